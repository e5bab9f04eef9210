"""State dicts of every rank, written by torch on real ranks: gathered bit for bit, damaged, mixed up, of old torch."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from msgspec.structs import replace

from tests.readers.dcp_checkpoints import CUTS, expected
from tests.readers.rank_checkpoints import accelerate, base_model, verl
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.layout import check_file, diff_layouts
from xrank.errors import ContradictionError, CorruptError, IncompleteError, LayoutError, UsageError
from xrank.readers.discovery import find_source
from xrank.readers.fsdp.rank_files import FsdpRankFile, RankFileReader
from xrank.readers.fsdp.reader import AccelerateRanksReader, VerlReader, find_flat_pieces, flat_shards
from xrank.recipes.layout_sources import file_text, layouts_at
from xrank.recipes.sources import read_source
from xrank.testing.rank_pool import RankPool
from xrank.testing.reader_contract import ReaderContract, SampleSource, WholeTensor, read_model, whole

BUFFER = {"a_buffer": whole(torch.arange(5))}


@pytest.mark.quick
class TestVerl(ReaderContract):
    reader = VerlReader()

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleSource]:
        folder = verl(rank_pool, tmp_path_factory.mktemp("verl") / "actor", num_ranks=2)
        yield SampleSource(folder, expected() | BUFFER)


class TestAccelerate(ReaderContract):
    reader = AccelerateRanksReader()

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleSource]:
        folder = accelerate(rank_pool, tmp_path_factory.mktemp("ranks") / "checkpoint-7", "sharded", num_ranks=2)
        yield SampleSource(folder, expected())


def gathered(folder: Path, **options: object) -> Mapping[str, WholeTensor]:
    """Gather into a folder beside it; return the tensors."""
    out = folder.parent / f"{folder.name}.out"
    shutil.rmtree(out, ignore_errors=True)
    gather_checkpoint(folder, out, **options)  # type: ignore[arg-type]
    return read_model(out)


@pytest.fixture(scope="module")
def actor(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks that no test changes."""
    return verl(rank_pool, tmp_path_factory.mktemp("shared") / "global_step_30" / "actor", "fsdp2 x tp")


@pytest.fixture
def checkpoint(actor: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(actor, tmp_path / "actor"))


# ---- verl


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "fsdp2 x tp"])
def test_every_cut(rank_pool: RankPool, tmp_path: Path, cut: str) -> None:
    """fp32, bf16, integers and bools stay as they are; a plain tensor that comes first changes nothing."""
    assert gathered(verl(rank_pool, tmp_path / "actor", cut)) == expected() | BUFFER


def test_a_trainers_folders(actor: Path, tmp_path: Path) -> None:
    """Found from the folder of the step; what is the trainer's own is left out, companions are taken."""
    step = Path(shutil.copytree(actor.parent, tmp_path / "global_step_30"))
    torch.save({"state": {}}, step / "actor" / "optim_world_size_4_rank_0.pt")
    report = gather_checkpoint(step, tmp_path / "out")
    assert read_model(tmp_path / "out") == expected() | BUFFER
    assert (tmp_path / "out" / "config.json").is_file()
    source = report.to_dict()["source"]
    assert (source["format"], source["world_size"], source["step"]) == ("verl", 4, 30)
    assert source["skipped_nbytes"] == (step / "actor" / "optim_world_size_4_rank_0.pt").stat().st_size
    shown = inspect_source(step).details["format"]
    assert shown["meshes"] == ["dp=2", "dp=2 tp=2"]
    assert (shown["plain tensors"], shown["huggingface"], shown["LoRA tensors"]) == (3, True, 0)


def test_the_layouts_are_those_of_the_dtensors(actor: Path, tmp_path: Path) -> None:
    found = layouts_at(str(actor))
    assert found.device_mesh is not None and found.device_mesh.grid == "dp=2 tp=2" and not found.views
    told = inspect_source(actor).details["format"]["layouts"]
    assert {str(layout) for name, layout in found.items() if name not in ("a_buffer", "steps", "mask")} == set(told)
    assert {name: str(found[name]) for name in ("embed.weight", "up.weight", "a_buffer", "steps")} == {
        "embed.weight": "[d0/~dp, d1]",  # on a mesh of dp alone for each place along tp
        "up.weight": "[d0/~tp/~dp, d1]",
        "a_buffer": "[d0]",  # a plain tensor, on every rank
        "steps": "[]",
    }
    file = tmp_path / "l.toml"
    file.write_text(file_text(found))
    report = check_file(str(file), str(actor))
    assert report.fault is None and report.num_tensors == len(found) == len(expected() | BUFFER)
    assert not diff_layouts(str(file), str(actor))[1]


def test_the_step_that_a_marker_names(actor: Path, tmp_path: Path) -> None:
    """Without it no step is chosen; an actor and a critic are two models."""
    run = tmp_path / "run"
    for step in (9, 30):
        shutil.copytree(actor, run / f"global_step_{step}" / "actor")
    with pytest.raises(UsageError, match="contains several sources"):
        find_source(str(run))
    marker = run / "latest_checkpointed_iteration.txt"
    for text, error, match in [("31", IncompleteError, "global_step_31"), ("9\0", CorruptError, "not a step marker")]:
        marker.write_text(text)
        with pytest.raises(error, match=match):
            find_source(str(run))
    marker.write_text("9\n")
    assert find_source(str(run))[0] == str(run / "global_step_9" / "actor")
    marker.rename(run / "latest_ckpt_global_step.txt")
    assert find_source(str(run))[0] == str(run / "global_step_9" / "actor")
    shutil.copytree(actor, run / "global_step_9" / "critic")
    with pytest.raises(UsageError, match="contains several sources"):
        find_source(str(run))


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_missing_rank(checkpoint: Path, rank: int) -> None:
    file = checkpoint / f"model_world_size_4_rank_{rank}.pt"
    file.unlink()
    with pytest.raises(IncompleteError, match=f"rank {rank} of 4 wrote no {file.name}") as caught:
        gathered(checkpoint)
    assert (caught.value.rank, caught.value.file) == (rank, str(file))


def test_files_of_two_worlds(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "model_world_size_4_rank_0.pt", checkpoint / "model_world_size_8_rank_5.pt")
    with pytest.raises(ContradictionError, match="of another run") as caught:
        gathered(checkpoint)
    assert caught.value.got == "world of 4: ranks 0-3; world of 8: rank 5; fsdp_config.json: world of 4"


def test_a_config_of_another_world(checkpoint: Path) -> None:
    (checkpoint / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    with pytest.raises(ContradictionError, match="fsdp_config"):
        gathered(checkpoint)


def test_a_rank_beyond_the_world(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "model_world_size_4_rank_0.pt", checkpoint / "model_world_size_4_rank_4.pt")
    with pytest.raises(ContradictionError, match="belongs to rank 4, but the run has 4 ranks"):
        gathered(checkpoint)


def test_another_ranks_file_is_seen_by_its_name(tmp_path: Path) -> None:
    """Also where nothing in it says a rank."""
    folder = save_plain(tmp_path / "plain", [{"w": torch.rand(2, 6)}, {"w": torch.rand(2, 6)}])
    (tmp_path / "layout.toml").write_text('[mesh]\ngrid = "fsdp=2"\n\n[tensors]\n"w" = "[a/fsdp, b]"\n')
    assert gathered(folder, layouts=tmp_path / "layout.toml").keys() == {"w"}
    shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_2_rank_1.pt")
    with pytest.raises(ContradictionError, match=r"rank_1\.pt was saved under a different name") as caught:
        gathered(folder, layouts=tmp_path / "layout.toml")
    assert (caught.value.rank, caught.value.got) == (1, "model_world_size_2_rank_0.pt")


@pytest.mark.parametrize("kind", ["verl", "accelerate"])
def test_another_ranks_file_is_seen_by_its_tensors(rank_pool: RankPool, tmp_path: Path, kind: str) -> None:
    """Also where the file's name is not in the file."""
    if kind == "verl":
        folder = verl(rank_pool, tmp_path / "actor", "fsdp2", as_stream=True)
        one, other = (folder / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 2))
    else:
        folder = accelerate(rank_pool, tmp_path / "ranks", "sharded")
        one, other = (folder / f"pytorch_model_fsdp_0_rank{rank}.bin" for rank in (1, 2))
    content = one.read_bytes()
    other.write_bytes(content.replace(b"pytorch_model_fsdp_0_rank1/", b"pytorch_model_fsdp_0_rank2/"))
    with pytest.raises(ContradictionError, match=rf"{other.name} is a copy of another rank's file"):
        gathered(folder)


def test_files_of_a_larger_run_under_smaller_names(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = verl(rank_pool, tmp_path / "actor", "fsdp2", as_stream=True)
    (folder / "fsdp_config.json").unlink()
    for rank in range(4):
        file = folder / f"model_world_size_4_rank_{rank}.pt"
        file.rename(folder / f"model_world_size_2_rank_{rank}.pt") if rank < 2 else file.unlink()
    with pytest.raises(ContradictionError, match="to a run with a different number of ranks"):
        gathered(folder)


def save_plain(folder: Path, states: list[dict[str, object]]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, state in enumerate(states):
        torch.save(state, folder / f"model_world_size_{len(states)}_rank_{rank}.pt")
    return folder


@pytest.mark.parametrize(
    "value",
    [{"layers": {"w": torch.rand(2)}}, [torch.rand(2)], (3, [torch.rand(2)]), {torch.float32: torch.rand(2)}],
    ids=["dicts", "list", "list in a tuple", "odd key"],
)
def test_tensors_inside_values_are_not_lost(tmp_path: Path, value: object) -> None:
    folder = save_plain(tmp_path / "plain", [{"b": torch.rand(3), "model": value, "epoch": {"number": 3}}])
    with pytest.raises(UsageError, match=r"not a model's state dict: 'model' is a (dict|list|tuple) of tensors"):
        gathered(folder)


def test_dtensors_inside_values_are_not_lost(actor: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(actor, tmp_path / "actor"))
    for file in folder.glob("*.pt"):
        torch.save({"model": torch.load(file, weights_only=False), "epoch": 3}, file)
    with pytest.raises(UsageError, match="not a model's state dict: 'model' is a dict of tensors"):
        gathered(folder)


def test_plain_tensors_alone_say_no_cut(tmp_path: Path) -> None:
    """As older verl saved them: placed by a base model, by a layout file, or not at all."""
    w, b = torch.rand(4, 6), torch.rand(3)
    folder = save_plain(tmp_path / "plain", [{"w": w[:2], "b": b}, {"w": w[2:], "b": b}])
    with pytest.raises(LayoutError, match=r"w: no layout is recorded") as caught:
        gathered(folder)
    assert "layouts=" in str(caught.value.next_step) and "base_model=" in str(caught.value.next_step)
    assert "likewise b" in str(caught.value.got)
    from safetensors.torch import save_file

    (tmp_path / "base").mkdir()
    save_file({"w": torch.zeros(4, 6), "b": torch.zeros(3)}, tmp_path / "base" / "model.safetensors")
    assert gathered(folder, base_model=tmp_path / "base") == {"w": whole(w), "b": whole(b)}
    (tmp_path / "layout.toml").write_text('[mesh]\ngrid = "fsdp=2"\n\n[tensors]\n"w" = "[a/fsdp, b]"\n"b" = "[a]"\n')
    assert gathered(folder, layouts=tmp_path / "layout.toml") == {"w": whole(w), "b": whole(b)}


def test_names_that_wrappers_gave(rank_pool: RankPool, tmp_path: Path) -> None:
    """Names of a compiled model are the model's own, in the layouts that DTensors tell, too."""
    folder = verl(rank_pool, tmp_path / "actor", num_ranks=2, prefix="_orig_mod.")
    model = read_source(str(folder), find_source(str(folder)), for_layouts=True).model
    assert {shard.name for shard in model.shards} == {*expected(), *BUFFER}
    assert model.layouts and not any("_orig_mod" in name for name in model.layouts)
    assert "wrapper-names" in dict(model.notes)


def test_one_rank_alone(tmp_path: Path) -> None:
    w = torch.rand(4, 6)
    assert gathered(save_plain(tmp_path / "one", [{"w": w, "t": w.t(), "epoch": 3}])) == {
        "w": whole(w),
        "t": whole(w.t()),
    }


def test_replicas_that_differ(checkpoint: Path) -> None:
    file = checkpoint / "model_world_size_4_rank_2.pt"
    state = file.read_bytes()
    # The buffer 0, 1, 2, 3, 4 gets another value, and the checksums that it then must have.
    archive = zip_with(state, torch.arange(5).numpy().tobytes(), torch.tensor([0, 1, 2, 3, 5]).numpy().tobytes())
    file.write_bytes(archive)
    with pytest.raises(ContradictionError, match="a_buffer") as caught:
        gathered(checkpoint)
    assert "2" in str(caught.value.got) + str(caught.value)


def zip_with(content: bytes, old: bytes, new: bytes) -> bytes:
    """Return an archive in which a record has other bytes, soundly."""
    import struct
    import zlib

    assert content.count(old) == 1
    crcs = [struct.pack("<I", zlib.crc32(data)) for data in (old, new)]
    assert content.count(crcs[0]) == 2
    return content.replace(old, new).replace(*crcs)


def test_what_is_no_plain_data_is_refused(tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "odd", [{"w": torch.rand(2), "x": torch.device("cpu")}])
    with pytest.raises(UsageError, match=r"torch\.device"):
        gathered(folder)
    torch.save(torch.nn.Linear(2, 2), folder / "model_world_size_1_rank_0.pt")
    with pytest.raises(UsageError, match=r"rank 0: .*holds a whole module"):
        gathered(folder)


def save_partial(folder: str, is_reduced: bool = False) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(torch.arange(4.0), mesh, [Partial()])
    torch.save(
        {"w": tensor.redistribute(placements=[Replicate()]) if is_reduced else tensor},
        f"{folder}/model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt",
    )


def test_addends_of_a_sum_are_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, save_partial, str(tmp_path))
    with pytest.raises(LayoutError, match="w: its ranks hold partial sums") as raised:
        gather_checkpoint(tmp_path, tmp_path / "out")
    assert raised.value.next_step == "reduce the tensor before you save it"
    rank_pool.run(2, save_partial, str(tmp_path), True)
    gather_checkpoint(tmp_path, tmp_path / "out")
    assert read_model(tmp_path / "out") == {"w": whole(torch.arange(4.0) * 2)}


@pytest.mark.parametrize("release", ["2.4.1", "2.9.1", "2.11.0"])
def test_old_releases_of_torch(release: str, tmp_path: Path) -> None:
    """Written by these releases: DTensors on the mesh dp=2 tp=2 and on its parts, a plain buffer."""
    w = torch.arange(70, dtype=torch.float32).reshape(7, 10)
    folder = Path(shutil.copytree(Path(__file__).parent / "old_torch" / release, tmp_path / release))
    wanted = {"w": w, "v": w[0], "u": w[0], "r": w[0], "buf": torch.arange(5)}
    assert gathered(folder) == {name: whole(tensor) for name, tensor in wanted.items()}


@pytest.mark.parametrize("release", ["2.4.1", "2.11.0"])
def test_another_ranks_file_of_old_releases(release: str, tmp_path: Path) -> None:
    """2.4 tells a rank by its place in the mesh alone."""
    folder = Path(shutil.copytree(Path(__file__).parent / "old_torch" / release, tmp_path / release))
    one, other = (folder / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 2))
    other.write_bytes(one.read_bytes().replace(b"size_4_rank_1/", b"size_4_rank_2/"))
    with pytest.raises(ContradictionError, match="is a copy of another rank's file") as caught:
        gathered(folder)
    assert caught.value.rank == 2


# ---- accelerate


@pytest.mark.parametrize("kind", ["sharded", "dtensor"])
def test_accelerate(rank_pool: RankPool, tmp_path: Path, kind: str) -> None:
    folder = accelerate(rank_pool, tmp_path / "checkpoint-40", kind)
    assert gathered(folder) == expected()
    last = folder / "pytorch_model_fsdp_0_rank3.bin"
    last.unlink()
    with pytest.raises(IncompleteError, match=rf"rank 3 of 4 wrote no {last.name}"):
        gathered(folder)


def test_two_models_in_a_folder(rank_pool: RankPool, tmp_path: Path) -> None:
    """A file of one of them says which is meant; the folder does not."""
    folder = accelerate(rank_pool, tmp_path / "both", "sharded", num_ranks=2)
    accelerate(rank_pool, folder, "dtensor", num_ranks=2, number=1)
    with pytest.raises(UsageError, match="contains 2 models"):
        gathered(folder)
    gather_checkpoint(folder / "pytorch_model_fsdp_1_rank0.bin", tmp_path / "out")
    assert read_model(tmp_path / "out") == expected()


class TestFlatParameters:
    """FSDP1's LOCAL_STATE_DICT."""

    kinds: ClassVar = ["local", "flat"]

    @pytest.fixture(scope="class")
    @classmethod
    def folders(cls, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        return {kind: accelerate(rank_pool, tmp_path_factory.mktemp("flat") / kind, kind) for kind in cls.kinds}

    def test_named_ones_take_their_shapes_from_a_base_model(self, folders: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(LayoutError, match="contains its elements but not its shape; likewise") as caught:
            gathered(folders["local"])
        assert "base_model=" in str(caught.value.next_step)
        assert gathered(folders["local"], base_model=base_model(tmp_path / "base")) == expected()

    def test_a_base_model_of_other_sizes(self, folders: dict[str, Path], tmp_path: Path) -> None:
        from safetensors.torch import save_file

        (tmp_path / "base").mkdir()
        state = {name: torch.zeros(t.shape) for name, t in expected().items()} | {"up.weight": torch.zeros(9, 6)}
        save_file(state, tmp_path / "base" / "model.safetensors")
        with pytest.raises(LayoutError, match=r"up\.weight: the base model's shape does not fit"):
            gathered(folders["local"], base_model=tmp_path / "base")

    def test_a_name_that_is_gone(self, folders: dict[str, Path], tmp_path: Path) -> None:
        """On all ranks, its elements are missed in the buffer; on one, among its own."""
        files = [RankFileReader().read(str(file), rank) for rank, file in enumerate(sorted(folders["local"].iterdir()))]
        indexes: dict[int, Callable[[str], int]] = {file.rank: lambda key: 0 for file in files}
        shapes = {name: tensor.shape for name, tensor in expected().items()}
        assert len(flat_shards(find_flat_pieces(files, indexes), shapes)) == 9

        def without(name: str, ranks: Sequence[int]) -> list[FsdpRankFile]:
            return [
                replace(f, plain={n: t for n, t in f.plain.items() if n != name or f.rank not in ranks}) for f in files
            ]

        with pytest.raises(ContradictionError, match=r"_flat_param: elements .* belong to no named parameter"):
            find_flat_pieces(without("odd.weight", range(4)), indexes)
        holders = [f.rank for f in files if f.plain["up.weight"].shape[0]]
        assert len(holders) > 1
        with pytest.raises(ContradictionError, match="belong to no named parameter"):
            find_flat_pieces(without("up.weight", holders[:1]), indexes)
        # The same hole within a parameter.
        pieces = find_flat_pieces(files, indexes)
        name = next(name for name, own in pieces.by_name.items() if len(own) > 1)
        own = pieces.by_name[name]
        torn = replace(pieces, by_name={name: (replace(own[0], stop=own[0].stop - 1), *own[1:])})
        with pytest.raises(IncompleteError, match="are on no rank"):
            flat_shards(torn, shapes)

    def test_nameless_ones_are_refused(self, folders: dict[str, Path]) -> None:
        with pytest.raises(LayoutError, match="_flat_param: a flat parameter that records neither names nor") as caught:
            gathered(folders["flat"])
        assert "SHARDED_STATE_DICT" in str(caught.value.next_step)

    def test_nameless_ones_by_a_layout_file(self, folders: dict[str, Path], tmp_path: Path) -> None:
        members = ", ".join(
            f"{name} {list(expected()[name].shape)}"
            for layer in ("embed", "up", "down", "odd")
            for name in (f"{layer}.weight", f"{layer}.bias")
            if name in expected()
        )
        (tmp_path / "layout.toml").write_text(
            '[mesh]\ngrid = "fsdp=4"\n\n[tensors]\n'
            f'"_flat_param" = "flat({members})/~fsdp"\n'
            '"norm._flat_param" = "flat(norm.weight [6], norm.bias [6])/~fsdp"\n'
        )
        assert gathered(folders["flat"], layouts=tmp_path / "layout.toml") == expected()


def test_each_folder_has_one_reader(actor: Path, tmp_path: Path) -> None:
    """Weights of a finished model under it do not make it two sources."""
    from safetensors.torch import save_file

    folder = Path(shutil.copytree(actor, tmp_path / "actor"))
    save_file({"w": torch.zeros(2)}, folder / "huggingface" / "model.safetensors")
    place, reader = find_source(str(folder))[:2]
    assert (place, reader.name) == (str(folder), "verl")
    assert find_source(str(folder / "model_world_size_4_rank_1.pt"))[0] == str(folder)


def test_the_stream_has_no_name() -> None:
    """What the tests above rely on."""
    stream = io.BytesIO()
    torch.save({}, stream)
    assert b"archive/data.pkl" in stream.getvalue()
