"""torch's Hugging Face shards, written by torch on real ranks: shapes proven or refused, missing and stale files."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.cli.bench import run
from tests.commands.made_workspaces import leave_plain
from tests.readers.dcp_checkpoints import CUTS, built, expected
from tests.readers.rank_checkpoints import base_model
from xrank import NFSWorkspace
from xrank.commands.checkpoint import open_checkpoint
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.verify import verify_model
from xrank.errors import ContradictionError, CorruptError, IncompleteError, LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.base import Hints
from xrank.readers.discovery import find_source
from xrank.readers.hugging_face.shards import HfShardsReader
from xrank.testing.rank_pool import RankPool
from xrank.testing.reader_contract import ReaderContract, SampleSource, WholeTensor, read_model

FILES = {"embed.weight": 1, "up.weight": 2, "up.bias": 2, "down.weight": 2, "down.bias": 2}
"""The other tensors lie in file 3."""

LLAMA = {
    "model.embed_tokens.weight": (32, 16),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    **{f"model.layers.0.{name}_layernorm.weight": (16,) for name in ("input", "post_attention")},
    "model.norm.weight": (16,),
    "lm_head.weight": (32, 16),
}
LLAMA_CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,  # an old one's: as many heads of keys, of 16 / 4 elements
    "tie_word_embeddings": False,
}


def save(folder: str, cut: str, num_files: int, seed: int) -> None:
    """Save the model on every rank of a world, into one file or three."""
    warnings.simplefilter("ignore")  # of torch's own deprecations
    cut_model = CUTS[cut](built(seed))
    state = get_model_state_dict(cut_model) if isinstance(cut_model, nn.Module) else cut_model
    mapping = {name: min(FILES.get(name, 3), num_files) for name in state}
    writer = HuggingFaceStorageWriter(folder, mapping, save_distributed=True)
    dcp.save(state, storage_writer=writer)


def saved(
    pool: RankPool, folder: Path, cut: str = "fsdp2", *, num_ranks: int = 4, num_files: int = 3, seed: int = 0
) -> Path:
    """Let real ranks save the model; return the folder."""
    pool.run(num_ranks, save, str(folder), cut, num_files, seed)
    return folder


@pytest.mark.quick
class TestHfShards(ReaderContract):
    reader = HfShardsReader()
    unseen: ClassVar = {
        "a bit of a tensor flipped": "safetensors files hold no checksums",
        "zeros to the end": "safetensors files hold no checksums",
    }

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleSource]:
        folder = saved(rank_pool, tmp_path_factory.mktemp("shards") / "sharded", num_ranks=2, num_files=1)
        yield SampleSource(folder, expected(), base_model(tmp_path_factory.mktemp("base") / "base"))

    def test_inspect_finds_no_problem(self, made: SampleSource) -> None:
        """It has no base model; that the shapes are inferred is the one thing it says."""
        (problem,) = inspect_source(made.path).details["problems"]
        assert (problem["type"], problem["exit_code"]) == ("LayoutError", 2)


def gathered(folder: Path, **options: object) -> Mapping[str, WholeTensor]:
    """Gather into a folder beside it; return the tensors."""
    out = folder.parent / f"{folder.name}.out"
    shutil.rmtree(out, ignore_errors=True)
    gather_checkpoint(folder, out, **options)  # type: ignore[arg-type]
    return read_model(out)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def whole_grid(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks and three files, changed by no test."""
    return saved(rank_pool, tmp_path_factory.mktemp("shared") / "step-5")


@pytest.fixture
def shards(whole_grid: Path, tmp_path: Path) -> Path:
    """A copy of them, to be changed."""
    return Path(shutil.copytree(whole_grid, tmp_path / "step-5"))


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut(rank_pool: RankPool, tmp_path: Path, base: Path, cut: str) -> None:
    """Integers, bools, a tensor without dims, uneven rows, columns, ranks without a row."""
    assert gathered(saved(rank_pool, tmp_path / "shards", cut), base_model=base) == expected()


def test_shapes_that_nothing_proves_are_refused(shards: Path) -> None:
    with pytest.raises(LayoutError, match="records no global shapes") as caught:
        gathered(shards)
    assert caught.value.exit_code == 2
    assert "base_model=" in str(caught.value.next_step)
    assert "files of ranks 1-4" in str(caught.value.got)


def test_number_of_ranks_proves_the_shapes_of_a_whole_grid(shards: Path, tmp_path: Path) -> None:
    model = gathered(shards, world_size=4)
    assert model == expected()
    said = dict(gather_checkpoint(shards, tmp_path / "noted", world_size=4).notes)["inferred-shapes"]
    assert said.endswith("are those of all files of 4 ranks")
    assert inspect_source(shards, world_size=4).details["problems"] == []
    words = [shards, "--world-size", 4]
    assert run("gather", *words, "--out", tmp_path / "out").exit_code == 0
    assert run("verify", *words, "--against", tmp_path / "out").exit_code == 0
    assert run("inspect", *words, "--ranks").exit_code == 0
    (tmp_path / "new.toml").write_text(
        '[mesh]\ngrid = "tp=2"\n\n[tensors]\n'
        + "".join(
            f'"{name}" = "[{", ".join(f"d{i}" for i in range(len(tensor.shape)))}]"\n' for name, tensor in model.items()
        )
    )
    words += ["--layout", tmp_path / "new.toml", "--out", tmp_path / "states"]
    assert run("reshard", *words).exit_code == 0
    # A wrong number makes no model.
    with pytest.raises(UsageError, match=r"shard-00004-model-00001-of-00003.safetensors is of a later rank than"):
        gathered(shards, world_size=3)
    with pytest.raises(IncompleteError, match=r"shard-00005-model-00001-of-00003.safetensors is missing"):
        gathered(shards, world_size=5)


@pytest.mark.parametrize("file", ["shard-00004-model-00001-of-00003", "shard-00004-model-00003-of-00003"])
def test_number_of_ranks_shows_a_missing_file(shards: Path, base: Path, file: str) -> None:
    gone = shards / f"{file}.safetensors"
    gone.unlink()
    with pytest.raises(IncompleteError) as caught:
        gathered(shards, world_size=4)
    assert caught.value.file == str(gone) and caught.value.exit_code == 3
    for rest in shards.glob("shard-00004-*"):
        rest.unlink()
    with pytest.raises(IncompleteError, match=r"shard-00004-model-00001-of-00003\.safetensors is missing"):
        gathered(shards, world_size=4)
    # The advice not to guess: without the number, the rest is refused, too.
    with pytest.raises(LayoutError, match="records no global shapes") as loose:
        gathered(shards)
    assert "world_size=" in str(loose.value.next_step)


def test_number_of_ranks_is_compared_with_other_sources(tmp_path: Path) -> None:
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["w"] = "[h]"
    for rank in range(2):
        workspace = NFSWorkspace(str(tmp_path / "states"), rank=rank, world_size=2, run_id="a")
        workspace.write_configs_and_weights({}, {"w": torch.ones(2)}, layouts=layouts)
    for rank in range(2):  # as ModelOpt leaves them: nothing in them shows the world's size
        leave_plain(tmp_path / "plain", rank, {"w": torch.ones(2)}, {})
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert gather_checkpoint(tmp_path / "states", tmp_path / "out", world_size=2).ok
    assert gather_checkpoint(tmp_path / "plain", tmp_path / "plain-out", world_size=2, layouts=layouts).ok
    with pytest.raises(IncompleteError, match="was not written by the number of ranks in world_size=3"):
        gather_checkpoint(tmp_path / "plain", tmp_path / "no", world_size=3, layouts=layouts)
    for source, number, kind in (
        ("states", 1, UsageError),
        ("states", 3, IncompleteError),
        ("model.safetensors", 1, UsageError),
    ):
        with pytest.raises(kind, match=f"was not written by the number of ranks in world_size={number}"):
            gather_checkpoint(tmp_path / source, tmp_path / "no", world_size=number)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_missing_rank(shards: Path, base: Path, rank: int) -> None:
    """Also the last one: torch's own consolidation writes shorter tensors then."""
    for file in shards.glob(f"shard-{rank:05d}-*"):
        file.unlink()
    with pytest.raises(IncompleteError, match=r"embed\.weight") as caught:
        gathered(shards, base_model=base)
    left = {1: "2-4", 2: "1, 3-4", 4: "1-3"}[rank]
    assert f"files of ranks {left} (from 1)" in str(caught.value.got)
    if rank < 4:  # nothing outside is needed to see a hole
        with pytest.raises(IncompleteError, match=r"embed\.weight") as caught:
            gathered(shards)
        assert f"shard-{rank:05d}-model-00001-of-00003" in str(caught.value.file)


def test_a_missing_file(shards: Path, base: Path) -> None:
    gone = shards / "shard-00004-model-00001-of-00003.safetensors"
    gone.unlink()
    with pytest.raises(IncompleteError, match=r"embed\.weight: its pieces end before") as caught:
        gathered(shards, base_model=base)
    assert caught.value.file == str(gone)


def test_shards_of_a_larger_world(rank_pool: RankPool, tmp_path: Path, base: Path) -> None:
    folder = saved(rank_pool, tmp_path / "shards", num_ranks=4)
    saved(rank_pool, folder, num_ranks=2, seed=1)
    with pytest.raises(ContradictionError, match="contain the same elements") as caught:
        gathered(folder, base_model=base)
    assert caught.value.tensor is not None and "shard-0000" in str(caught.value.file)


def test_shards_of_another_number_of_files(shards: Path, base: Path) -> None:
    stale = shards / "shard-00002-model-00001-of-00001.safetensors"
    shutil.copy(shards / "shard-00002-model-00001-of-00003.safetensors", stale)
    with pytest.raises(ContradictionError, match="belongs to a different save") as caught:
        gathered(shards, base_model=base)
    assert caught.value.file == str(stale)


def test_a_base_model_of_other_sizes(shards: Path, base: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    state = load_file(base / "model.safetensors")
    save_file({**state, "up.weight": state["up.weight"][:7].clone()}, tmp_path / "small" / "model.safetensors")
    with pytest.raises(ContradictionError, match=r"up\.weight: its pieces reach beyond"):
        gathered(shards, base_model=tmp_path / "small")


def test_a_recipe_proves(shards: Path) -> None:
    """It is asked about all shapes at once; where it proves nothing, a file that may be missing is said to be."""
    asked = []

    def prove(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        asked.append(shapes)
        return "some-recipe"

    def refuse(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        raise LayoutError("embed.weight: 'v' is not told", tensor="embed.weight", want="config.json with 'vocab_size'")

    read = HfShardsReader().read
    model = read(str(shards), Hints(prove_shapes=prove, needs_config=False))
    assert dict(model.notes)["inferred-shapes"].endswith("those of some-recipe with the sizes in config.json are used")
    assert asked == [{name: tensor.shape for name, tensor in expected().items()}]
    with pytest.raises(LayoutError, match="it is unknown whether all") as loose:
        read(str(shards), Hints(prove_shapes=lambda shapes: None, needs_config=False))
    assert "config.json" not in str(loose.value.next_step)  # of names that no recipe knows it says nothing
    with pytest.raises(LayoutError, match="'v' is not told") as loose:
        read(str(shards), Hints(prove_shapes=refuse))
    assert f"config.json into {shards}" in str(loose.value.next_step) and "base_model=" in str(loose.value.next_step)

    # The last rank has no row of some tensors, and so not each file: a hole that a lost file would leave, too.
    gone = shards / "shard-00004-model-00001-of-00003.safetensors"
    gone.unlink()
    read(str(shards), Hints(prove_shapes=prove))
    for nothing in (refuse, None):
        with pytest.raises(IncompleteError, match=f"{gone.name} is missing, and it is unknown") as caught:
            read(str(shards), Hints(prove_shapes=nothing))
        assert caught.value.file == str(gone) and "base_model=" in str(caught.value.next_step)

    def contradict(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        raise IncompleteError("embed.weight is short", tensor="embed.weight", got="9 rows")

    with pytest.raises(IncompleteError) as caught:
        read(str(shards), Hints(prove_shapes=contradict, needs_config=False))
    assert "without shard-00004-model-00001-of-00003" in str(caught.value.got)


def save_llama(folder: str) -> None:
    """Save a Llama of 4 heads by tensor parallelism: each rank has one head, and rows of all that is cut by rows."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for name, shape in LLAMA.items():
        cut = Replicate() if "norm" in name else Shard(1) if re.search("o_proj|down_proj", name) else Shard(0)
        state[name] = distribute_tensor(torch.rand(shape), mesh, [cut])
    writer = HuggingFaceStorageWriter(folder, dict.fromkeys(state, 1), save_distributed=True)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # else the last rank writes a norm, which is missed
    dcp.save(state, storage_writer=writer, planner=planner)


def test_a_missing_last_rank_that_shortens_all_alike(rank_pool: RankPool, tmp_path: Path) -> None:
    """Three ranks of four make a smaller Llama; only config.json tells it from the whole one."""
    folder = tmp_path / "shards"
    rank_pool.run(4, save_llama, str(folder))
    config = folder / "config.json"
    config.write_text(json.dumps(LLAMA_CONFIG))
    assert {name: tensor.shape for name, tensor in gathered(folder).items()} == LLAMA
    (folder / "shard-00004-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteError, match=r"shorter than config\.json requires"):
        gathered(folder)
    config.unlink()
    for look in (gathered, open_checkpoint):
        with pytest.raises(LayoutError, match="only from the existing pieces") as caught:
            look(folder)
        assert "config.json into" in str(caught.value.next_step) and "base_model=" in str(caught.value.next_step)
    report = verify_model(folder)
    assert not report.ok and report.exit_code == 2
    (problem,) = inspect_source(folder).details["problems"]
    assert (problem["type"], problem["exit_code"]) == ("LayoutError", 2)


@pytest.mark.parametrize(
    "text", [None, "{", "[]", '{"embed.weight": {}}', '{"embed.weight": {"saved_offsets": [-1, 0]}}']
)
def test_a_header_that_does_not_say_where(shards: Path, base: Path, text: str | None) -> None:
    file = shards / "shard-00002-model-00001-of-00003.safetensors"
    save_file(load_file(file), file, metadata={} if text is None else {"DCP_SHARDING_INFO": text})
    with pytest.raises(CorruptError, match=file.name):
        gathered(shards, base_model=base)


def test_pieces_that_overlap_in_part(shards: Path, base: Path) -> None:
    file = shards / "shard-00002-model-00001-of-00003.safetensors"
    told = {"embed.weight": {"saved_offsets": [2, 0]}}
    save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": json.dumps(told)})
    with pytest.raises((IncompleteError, ContradictionError), match=r"embed\.weight"):
        gathered(shards, base_model=base)


def test_the_folder_above_and_what_torch_made_of_it(shards: Path, base: Path, tmp_path: Path) -> None:
    """Shards are found in ``sharded``; a consolidated model beside them is another candidate, and none is chosen."""
    shutil.move(shards, tmp_path / "run" / "sharded")
    assert gathered(tmp_path / "run", base_model=base) == expected()
    assert find_source(str(tmp_path / "run"))[1].name == "hf-shards"
    shutil.copy(base / "model.safetensors", tmp_path / "run")
    with pytest.raises(UsageError, match="can be read in several ways"):
        gathered(tmp_path / "run", base_model=base)
    assert gathered(tmp_path / "run", base_model=base, format="hf-shards") == expected()
    one = tmp_path / "run" / "sharded" / "shard-00001-model-00001-of-00003.safetensors"
    assert find_source(str(one))[0] == str(one.parent)
