"""torch_checkpointing's folders, in all its layouts: gathered bit for bit, damaged, mixed up, and incomplete."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.readers.dcp_checkpoints import CUTS, expected
from tests.readers.rank_checkpoints import base_model
from tests.readers.torch_checkpointing_folders import KINDS, layout, saved
from tests.sampled import sampled
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    LayoutError,
    UnsafeError,
    UsageError,
    XrankError,
)
from xrank.readers.discovery import find_source
from xrank.readers.torch_checkpointing import TorchCheckpointingReader
from xrank.testing.rank_pool import RankPool
from xrank.testing.reader_contract import ReaderContract, SampleSource, WholeTensor, read_model, whole

PT, PT_META, TENSORS_META, TENSORS = KINDS


@pytest.mark.quick
class TestPt(ReaderContract):
    reader = TorchCheckpointingReader()

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleSource]:
        folder = saved(rank_pool, tmp_path_factory.mktemp("pt") / "step_7", "fsdp2", PT_META, num_ranks=2)
        yield SampleSource(folder, expected())


class TestSafetensors(ReaderContract):
    reader = TorchCheckpointingReader()
    unseen: ClassVar = {"a bit of a tensor flipped": "safetensors files hold no checksums"}
    exit_codes: ClassVar = {"a file missing": frozenset({2, 3})}  # 2: without metadata.pkl the user must give layouts

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleSource]:
        folder = saved(rank_pool, tmp_path_factory.mktemp("st") / "step_7", "fsdp2", TENSORS_META, num_ranks=2)
        yield SampleSource(folder, expected())


def gathered(folder: Path, **options: Any) -> Mapping[str, WholeTensor]:
    """Gather into a folder beside it; return the tensors."""
    out = folder.parent / f"{folder.name}.out"
    shutil.rmtree(out, ignore_errors=True)
    gather_checkpoint(folder, out, **options)
    return read_model(out)


@pytest.fixture(scope="module")
def steps(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of four ranks in each layout, which no test changes."""
    folder = tmp_path_factory.mktemp("steps")
    for kind in KINDS:
        saved(rank_pool, folder / kind / "step_7", "fsdp2 x tp", kind)
    return folder


@pytest.fixture
def checkpoint(steps: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one of them, to be changed."""
    return Path(shutil.copytree(steps / request.param / "step_7", tmp_path / "step_7"))


@pytest.mark.parametrize("kind", [PT, PT_META, TENSORS_META])
@pytest.mark.parametrize("cut", sampled(CUTS, 2))
def test_every_cut(rank_pool: RankPool, tmp_path: Path, cut: str, kind: str) -> None:
    assert gathered(saved(rank_pool, tmp_path / "step_7", cut, kind)) == expected()


@pytest.mark.parametrize("kind", [PT, TENSORS_META])
def test_what_is_found_and_left_out(steps: Path, kind: str) -> None:
    folder = steps / kind / "step_7"
    report = inspect_source(steps / kind)
    source = report.to_dict()["source"]
    assert (source["format"], source["world_size"], source["step"]) == ("torch-checkpointing", 4, 7)
    assert source["skipped_nbytes"] == sum(f.stat().st_size for f in folder.iterdir() if f.name[0] in "os")
    assert report.details["problems"] == [] and report.details["format"]["item"] == "model"
    suffix = kind.partition(" ")[0]
    assert find_source(str(folder / f"model_2.{suffix}")).path == str(folder)


@pytest.mark.parametrize("checkpoint", [PT, PT_META, TENSORS_META], indirect=True)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_missing_rank(checkpoint: Path, rank: int) -> None:
    (file,) = checkpoint.glob(f"model_{rank}.*")
    file.unlink()
    with pytest.raises((IncompleteError, UsageError), match=rf"rank {rank} of 4 wrote no {file.name}|no known format"):
        gathered(checkpoint)


@pytest.mark.parametrize("checkpoint", [TENSORS], indirect=True)
def test_safetensors_without_metadata(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing records the cuts; a base model's shapes do not show in which order two axes cut the same rows."""
    refused: list[dict[str, Any]] = [{}, {"base_model": base_model(tmp_path / "base")}]
    for options in refused:
        with pytest.raises(LayoutError, match=r"no metadata\.pkl records how they were split") as caught:
            gathered(checkpoint, **options)
        assert "layouts=" in str(caught.value.next_step) and "base_model" not in str(caught.value.next_step)
    file = tmp_path / "layout.toml"
    rows = {"embed.weight": "[a/~dp, b]", "up.weight": "[a/~tp/~dp, b]", "up.bias": "[a/~tp/~dp]"}
    rows |= {"down.weight": "[a/~dp, b/~tp]", "down.bias": "[a/~dp]", "odd.weight": "[a/~dp, b]", "odd.bias": "[a/~dp]"}
    rows |= {"norm.weight": "[a/~dp]", "norm.bias": "[a/~dp]", "steps": "[]", "mask": "[a]"}
    rules = "".join(f'"{name}" = "{text}"\n' for name, text in rows.items())
    file.write_text(f'[mesh]\ngrid = "dp=2 tp=2"\n\n[tensors]\n{rules}')
    assert gathered(checkpoint, layouts=file) == expected()


def test_the_file_of_a_single_rank_is_no_proof(tmp_path: Path) -> None:
    folder = tmp_path / "step_7"
    folder.mkdir()
    save_file({"w": torch.arange(6.0).reshape(3, 2)}, folder / "model_0.safetensors")
    for name, rows in (("whole", 3), ("larger", 6)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.zeros(rows, 2)}, tmp_path / name / "model.safetensors")
    with pytest.raises(LayoutError, match="contains a rank's elements") as caught:
        gathered(folder)
    assert "base_model=" in str(caught.value.next_step)
    assert gathered(folder, base_model=tmp_path / "whole") == {"w": whole(torch.arange(6.0).reshape(3, 2))}
    with pytest.raises(XrankError, match="w does not have its shape"):
        gathered(folder, base_model=tmp_path / "larger")


@pytest.mark.parametrize("checkpoint", [PT_META, TENSORS_META], indirect=True)
def test_files_of_two_saves(checkpoint: Path) -> None:
    """A shape, a type or a name that differs from the metadata."""
    (file,) = checkpoint.glob("model_1.*")
    is_pt = file.suffix == ".pt"
    state = torch.load(file, weights_only=False) if is_pt else load_file(file)
    norm = state["norm.weight"]
    changes: list[Callable[[], dict[str, Any]]] = [
        lambda: {name: tensor for name, tensor in state.items() if name != "norm.weight"},
        lambda: {**state, "more": torch.rand(2)},
        lambda: {**state, "norm.weight": norm.float()},
    ]
    for change in changes:
        torch.save(change(), file) if is_pt else save_file(change(), file)
        with pytest.raises(ContradictionError, match=r"metadata\.pkl and .* (disagree|record different)") as caught:
            gathered(checkpoint)
        assert (caught.value.rank, caught.value.file) == (1, str(file))
    shutil.copy(file, checkpoint / f"model_4{file.suffix}")
    with pytest.raises(ContradictionError, match="belongs to rank 4"):
        gathered(checkpoint)
    other = checkpoint / ("model_1.safetensors" if is_pt else "model_1.pt")
    other.touch()
    with pytest.raises(ContradictionError, match="files of the same item and rank"):
        gathered(checkpoint)


def test_items_under_other_names(rank_pool: RankPool, tmp_path: Path) -> None:
    """One that is no optimizer is the model; of two, the user names one, and averaged weights get a note."""
    folder = saved(rank_pool, tmp_path / "step_7", "fsdp2", TENSORS_META, num_ranks=2, item="policy")
    assert gathered(folder) == expected()
    saved(rank_pool, folder, "tp", PT, num_ranks=2, item="value")
    with pytest.raises(UsageError, match="contains 2 items that may be the model") as caught:
        gathered(folder)
    file = str(caught.value.next_step).rpartition(" ")[2]
    assert gathered(Path(file)) == expected()
    assert gathered(folder / "value_1.pt") == expected()
    for old in folder.glob("value_*"):
        old.rename(old.with_name(old.name.replace("value", "model")))
    report = gather_checkpoint(folder, tmp_path / "out")
    assert any(code == "left-out" and text.endswith("policy") for code, text in report.notes)


def test_nested_states_are_joined_by_dots(tmp_path: Path) -> None:
    folder = tmp_path / "step_7"
    folder.mkdir()
    w, b = torch.rand(3, 2), torch.rand(4)
    torch.save({"layers": [{"w": w}, {"w": w + 1}], "head": {"b": b}, "epoch": 3}, folder / "model_0.pt")
    assert gathered(folder) == {"layers.0.w": whole(w), "layers.1.w": whole(w + 1), "head.b": whole(b)}
    torch.save({"head": {"b": b}, "head.b": b + 1}, folder / "model_0.pt")
    with pytest.raises(UsageError, match=r"two tensors have the name 'head\.b'"):
        gathered(folder)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(content)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(content))


@pytest.mark.parametrize("checkpoint", [TENSORS_META], indirect=True)
def test_files_in_folders_of_their_ranks(checkpoint: Path) -> None:
    def move(content: dict[str, Any]) -> None:
        layouts = content["metadata"]["model"]["rank_to_layout_info"]
        for rank in layouts:
            layouts[rank] = layout(f"rank_{rank}/weights.safetensors")
            (checkpoint / f"rank_{rank}").mkdir()
            (checkpoint / f"model_{rank}.safetensors").rename(checkpoint / f"rank_{rank}" / "weights.safetensors")

    rewrite(checkpoint, move)
    assert gathered(checkpoint) == expected()
    (checkpoint / "rank_2" / "weights.safetensors").unlink()
    with pytest.raises(IncompleteError, match=r"rank 2 of 4 wrote no rank_2/weights\.safetensors"):
        gathered(checkpoint)


def model_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["metadata"]["model"]


def group_of(content: dict[str, Any]) -> dict[str, Any]:
    return model_of(content)["nested_path_to_metadata"]['["up.weight"]'][0]


@pytest.mark.parametrize("checkpoint", [TENSORS_META], indirect=True)
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda c: c.update(version="1.0"), UsageError, "a different version"),
        (lambda c: c.update(world_size=3), CorruptError, "an object with the 3 ranks"),
        (lambda c: c.update(world_size=-1), CorruptError, "world_size"),
        (lambda c: c.pop("metadata"), CorruptError, "is not metadata"),
        (lambda c: model_of(c)["rank_to_layout_info"].update({1: layout("../x")}), UnsafeError, "outside its folder"),
        (lambda c: model_of(c)["rank_to_layout_info"].update({1: layout("/x")}), UnsafeError, "'/x'"),
        (lambda c: group_of(c)["sharding_metadata"].update(type="mine"), UsageError, "no reader knows how"),
        (lambda c: group_of(c).update(ranks=(9,)), CorruptError, "ranks[0] is 9, not an integer from 0 to 3"),
        (lambda c: c.update(world_size=2**64), CorruptError, "world_size is 18446744073709551616, not an integer"),
        (lambda c: c.update(version=["2.0"]), CorruptError, "version is a list of 1, not a text"),
        (
            lambda c: model_of(c)["rank_to_layout_info"][1]["serialization_format"].update(type=["x"]),
            CorruptError,
            "rank_to_layout_info[1].serialization_format.type is a list of 1, not a text",
        ),
        (
            lambda c: model_of(c)["nested_path_to_metadata"].update({'["\\ud800"]': []}),
            CorruptError,
            "not a text in UTF-8",
        ),
        (lambda c: model_of(c)["nested_path_to_metadata"].update({"[" * 9000: []}), CorruptError, "nests too deep"),
        (
            lambda c: group_of(c)["sharding_metadata"]["data"]["mesh_spec"].update(mesh_dim_names=(1.5,)),
            CorruptError,
            "mesh_dim_names[0] is 1.5, not a text",
        ),
        (
            lambda c: group_of(c)["sharding_metadata"]["data"]["mesh_spec"].update(mesh_data=(0, 1, 2, 2)),
            LayoutError,
            "metadata.pkl",
        ),
        (
            lambda c: group_of(c)["sharding_metadata"]["data"]["placements"].insert(0, {"type": "Partial"}),
            CorruptError,
            "Partial",
        ),
    ],
)
def test_metadata_of_another_structure(
    checkpoint: Path, change: Callable[[dict[str, Any]], None], error: type[XrankError], match: str
) -> None:
    rewrite(checkpoint, change)
    with pytest.raises(error) as caught:
        gathered(checkpoint)
    assert match in f"{caught.value.message} {caught.value.got}"
    assert caught.value.file == str(checkpoint / "metadata.pkl")


def test_other_programs_files_of_these_names(tmp_path: Path) -> None:
    """Numbers from 1 are steps or epochs, and any program may write a metadata.pkl."""
    for name in ("model_1.pt", "model_2.pt", "metadata.pkl"):
        torch.save({"w": torch.rand(2)}, tmp_path / name)
    assert TorchCheckpointingReader().recognize(str(tmp_path)) is not None
