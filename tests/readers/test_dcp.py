"""Torch DCP checkpoints, written by torch on four ranks: gathered bit for bit, damaged, and of every nesting."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.readers.dcp_checkpoints import CUTS, expected, saved
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.verify import verify_model
from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    LayoutError,
    UnknownFormatError,
    UnsafeError,
    UsageError,
)
from xrank.layout.stored_model import NO_CHECKSUM, StoredModel
from xrank.readers import dcp as dcp_reader
from xrank.readers.base import Hints
from xrank.readers.dcp import DcpReader
from xrank.testing.rank_pool import RankPool
from xrank.testing.reader_contract import ReaderContract, SampleSource, WholeTensor, read_model, whole


class DcpContract(ReaderContract):
    reader = DcpReader()
    cut = "fsdp2"
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleSource]:
        folder = tmp_path_factory.mktemp("dcp")
        yield SampleSource(saved(rank_pool, folder / "checkpoint-20", cls.cut, **cls.options), expected())


class TestFsdp(DcpContract):
    options: ClassVar = {"nesting": "trainer"}


@pytest.mark.slow
class TestFsdpTensorParallel(DcpContract):
    cut = "fsdp2 x tp"
    options: ClassVar = {"thread_count": 2, "nesting": "flat"}


class TestSafetensorsPayload(DcpContract):
    options: ClassVar = {"serialization_format": SerializationFormat.SAFETENSORS, "nesting": "trainer"}
    unseen: ClassVar = {
        "zeros to the end": "safetensors hold no checksums",
        "a bit of a tensor flipped": "safetensors hold no checksums",
    }


def gathered(folder: Path, **options: Any) -> dict[str, WholeTensor]:
    """Gather into a folder beside it; return the tensors."""
    out = folder.parent / f"{folder.name}.out"
    gather_checkpoint(folder, out, **options)
    return read_model(out)


def read(folder: Path) -> StoredModel:
    return DcpReader().read(str(folder), Hints())


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut(rank_pool: RankPool, tmp_path: Path, cut: str) -> None:
    assert gathered(saved(rank_pool, tmp_path / "checkpoint", cut)) == expected()


@pytest.fixture(scope="module")
def fsdp(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    return saved(rank_pool, tmp_path_factory.mktemp("shared") / "step-000300", "fsdp2", "trainer")


@pytest.fixture
def checkpoint(fsdp: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(fsdp, tmp_path / "step-000300"))


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata, with torch's own classes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


# ---- what is told


@pytest.mark.quick
def test_optimizer_and_values_are_left_out_and_told(fsdp: Path) -> None:
    model = read(fsdp)
    metadata = pickle.loads((fsdp / ".metadata").read_bytes())
    items = {index: info.length for index, info in metadata.storage_data.items()}
    mine = {
        MetadataIndex(name, chunk.offsets)
        for name, item in metadata.state_dict_metadata.items()
        for chunk in getattr(item, "chunks", ())
        if name.startswith("model.") and 0 not in chunk.sizes  # ranks without a row leave items without an element
    }
    assert {shard.name for shard in model.shards} == set(expected())
    assert model.skipped_nbytes == sum(length for index, length in items.items() if index not in mine)
    assert model.nbytes == sum(len(tensor.data) for tensor in expected().values())
    assert (model.world_size, model.step) == (4, 300)
    notes = dict(model.notes)
    num_optimizer = sum(
        name.startswith("optim.") and hasattr(item, "chunks") for name, item in metadata.state_dict_metadata.items()
    )
    assert notes["left-out"].endswith(f"optim ({num_optimizer})")
    assert notes["byte-items"].startswith(
        f"{len(metadata_bytes(metadata))} values that are not tensors were left out: "
    )
    assert notes["byte-items"].endswith(f" and {len(metadata_bytes(metadata)) - 3} more")
    assert set(notes) == {"left-out", "byte-items"}


def metadata_bytes(metadata: Any) -> list[str]:
    return [name for name, item in metadata.state_dict_metadata.items() if not hasattr(item, "chunks")]


def ends_of(metadata: Any, file: str, prefix: str) -> int:
    """Return where the last item ends that a file holds of these names."""
    places = metadata.storage_data.items()
    return max(
        info.offset + info.length
        for index, info in places
        if info.relative_path == file and index.fqn.startswith(prefix)
    )


def test_damage_to_what_is_left_out_is_told(checkpoint: Path) -> None:
    """Nothing of the model is lost, and it gathers; nobody may train on from it."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    file = "__3_0.distcp"
    end, last = (ends_of(metadata, file, prefix) for prefix in ("model.", ""))
    assert end < last
    os.truncate(checkpoint / file, last - 1)
    told = dict(read(checkpoint).notes)["damage"]
    assert f"ends at byte {last - 1:,} of {last:,}" in told
    assert gathered(checkpoint) == expected()
    os.truncate(checkpoint / file, ends_of(metadata, file, "model.embed.weight") - 1)
    with pytest.raises(CorruptError, match=file):
        read(checkpoint)


def test_a_file_that_holds_values_alone_is_missed(checkpoint: Path) -> None:
    def move(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == metadata_bytes(metadata)[0]:
                info.relative_path = "__0_1.distcp"

    edit(checkpoint, move)
    assert "__0_1.distcp is missing" in dict(read(checkpoint).notes)["damage"]


def test_a_file_of_a_larger_world_is_told(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "__3_0.distcp", checkpoint / "__7_0.distcp")
    model = read(checkpoint)
    assert model.world_size == 4 and model.details["unused files"] == ["__7_0.distcp"]
    assert "__7_0.distcp: not in .metadata, so from a different save" in dict(model.notes)["unused-files"]
    (checkpoint / "__7_0.distcp").write_bytes(b"")  # as a rank leaves it that has nothing to save
    assert dict(read(checkpoint).notes).keys() == {"left-out", "byte-items"}


def test_inspect_tells_parts_ranks_and_cuts(fsdp: Path) -> None:
    details = read(fsdp).details
    assert list(details["parts"]) == ["model", "optim"]
    assert details["parts"]["optim"].startswith("left out: ")
    assert details["prefix"] == "model"
    assert details["chunks"]["embed.weight"] == "4 x 1"
    assert details["chunks"]["odd.bias"] == "3"
    assert details["chunks"]["steps"] == "whole"
    json.dumps(details)


# ---- how it is found


@pytest.fixture
def accelerate(rank_pool: RankPool, tmp_path: Path) -> Path:
    saved(rank_pool, tmp_path / "run" / "checkpoint-2000", "fsdp2", "accelerate")
    return tmp_path / "run"


@pytest.mark.quick
@pytest.mark.parametrize(
    "given",
    ["", "checkpoint-2000", "checkpoint-2000/pytorch_model_fsdp_0", "checkpoint-2000/pytorch_model_fsdp_0/.metadata"],
)
def test_accelerates_model_is_found_from_above_and_from_within(accelerate: Path, given: str, tmp_path: Path) -> None:
    report = gather_checkpoint(accelerate / given, tmp_path / "out")
    assert report.source["step"] == 2000
    assert os.path.basename(report.source["path"]) == "pytorch_model_fsdp_0"
    assert read_model(tmp_path / "out") == expected()


def test_an_optimizers_folder_is_no_model(accelerate: Path, tmp_path: Path) -> None:
    folder = accelerate / "checkpoint-2000" / "optimizer_0"
    with pytest.raises(UnknownFormatError, match="has no known format") as caught:
        gather_checkpoint(folder, tmp_path / "out")
    assert "dcp: only an optimizer's state" in caught.value.got
    with pytest.raises(UsageError, match="this checkpoint contains no model"):
        read(Path(shutil.copytree(folder, tmp_path / "renamed")))


def test_two_models_are_not_chosen_among(accelerate: Path, tmp_path: Path) -> None:
    folder = accelerate / "checkpoint-2000"
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "pytorch_model_fsdp_1")
    with pytest.raises(UsageError, match="several sources") as caught:
        gather_checkpoint(accelerate, tmp_path / "out")
    assert "pytorch_model_fsdp_0" in caught.value.got and "pytorch_model_fsdp_1" in caught.value.got


def test_a_megatron_checkpoint_is_left_to_its_own_reader(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert "Megatron" in DcpReader().recognize(str(checkpoint))


# ---- what is missing


def test_a_missing_file_is_named_with_rank_and_tensors(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "__2_0.distcp").unlink()
    with pytest.raises(IncompleteError) as caught:
        gather_checkpoint(checkpoint, tmp_path / "out")
    error = caught.value
    assert (error.rank, error.file) == (2, str(checkpoint / "__2_0.distcp"))
    assert "embed.weight" in error.message and "rank 2" in error.next_step
    assert error.exit_code == 3 and not (tmp_path / "out").exists()


def test_no_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").rename(checkpoint / ".metadata.tmp")
    with pytest.raises(IncompleteError, match="not finished, or not copied whole") as caught:
        read(checkpoint)
    assert ".metadata.tmp" in caught.value.got
    assert inspect_source(checkpoint).details["problems"][0]["exit_code"] == 3
    (checkpoint / ".metadata.tmp").rename(checkpoint / "__0.metadata")
    with pytest.raises(UsageError, match="without coordination"):
        read(checkpoint)


@pytest.mark.parametrize("name", ["embed.weight", "odd.weight", "up.bias"])
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_piece_that_the_metadata_lacks(checkpoint: Path, tmp_path: Path, name: str, number: int) -> None:
    # torch leaves the region as its memory was, with exit code 0.
    def drop(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[f"model.{name}"].chunks
        chunk = [chunk for chunk in chunks if 0 not in chunk.sizes][number]
        chunks.remove(chunk)
        lost = [i for i in metadata.storage_data if i.fqn == f"model.{name}" and i.offset == chunk.offsets]
        assert len(lost) == 1
        del metadata.storage_data[lost[0]]

    edit(checkpoint, drop)
    with pytest.raises(IncompleteError, match="no rank wrote these elements") as caught:
        gather_checkpoint(checkpoint, tmp_path / "out")
    assert caught.value.tensor == name and caught.value.index_range


def test_a_piece_that_is_listed_and_not_stored(checkpoint: Path) -> None:
    def drop(metadata: Any) -> None:
        del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "model.embed.weight")]

    edit(checkpoint, drop)
    with pytest.raises(CorruptError, match="stored nowhere") as caught:
        read(checkpoint)
    assert caught.value.tensor == "model.embed.weight"


# ---- another's file


def test_a_copy_of_another_ranks_file_is_seen(checkpoint: Path, tmp_path: Path) -> None:
    # Same sizes, same offsets, good checksums: torch writes a model of which all tensors are wrong.
    assert (checkpoint / "__0_0.distcp").stat().st_size != (checkpoint / "__1_0.distcp").stat().st_size
    plain = Path(shutil.copytree(checkpoint, tmp_path / "plain"))
    shutil.copy(plain / "__2_0.distcp", plain / "__1_0.distcp")
    with pytest.raises((CorruptError, ContradictionError)) as caught:
        gather_checkpoint(plain, tmp_path / "out")
    assert caught.value.rank in (1, 2)


def test_two_exchanged_files_of_the_same_pieces_are_unseen(rank_pool: RankPool, tmp_path: Path) -> None:
    """Nothing in a file names its rank, and `.metadata` has no checksums: docs/formats.md lists it as a blind spot."""
    folder = saved(rank_pool, tmp_path / "checkpoint", "even")
    one, other = folder / "__1_0.distcp", folder / "__2_0.distcp"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert gathered(folder) != expected()


def test_two_files_of_the_same_pieces_are_seen(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = saved(rank_pool, tmp_path / "checkpoint", "even")
    assert (folder / "__2_0.distcp").stat().st_size == (folder / "__1_0.distcp").stat().st_size
    shutil.copy(folder / "__1_0.distcp", folder / "__2_0.distcp")
    with pytest.raises(ContradictionError, match="one is a copy of the other") as caught:
        gather_checkpoint(folder, tmp_path / "out")
    assert caught.value.rank == 2 and caught.value.exit_code == 4


def test_ranks_that_hold_the_same_constants_are_no_copies(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = saved(rank_pool, tmp_path / "checkpoint", "constant")
    found = gathered(folder)
    assert set(found["w"].data) == {0, 0x80, 0x3F} and found["w"].shape == (8, 4)


def test_the_file_of_another_step_is_not_seen(rank_pool: RankPool, tmp_path: Path) -> None:
    """Nothing in an item says whose or of which step it is: docs/formats.md says so. This keeps the table honest."""
    one, other = (saved(rank_pool, tmp_path / f"step-{seed}", "even", seed=seed) for seed in (1, 2))
    right = gathered(one)
    shutil.rmtree(tmp_path / "step-1.out")
    shutil.copy(other / "__1_0.distcp", one / "__1_0.distcp")
    assert gathered(one) != right


def test_a_save_that_was_interrupted_is_seen_where_it_has_more(tmp_path: Path) -> None:
    folder = save_here(tmp_path / "checkpoint", {"w": W, "z": B})
    more = save_here(tmp_path / "more", {"w": W, "y": B, "z": B + 1})  # in z's place lies y
    shutil.copy(more / "__0_0.distcp", folder / "__0_0.distcp")
    with pytest.raises(ContradictionError, match="belong to different saves") as caught:
        read(folder)
    assert caught.value.rank == 0


def test_the_payload_of_another_rank_is_seen_in_safetensors(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = saved(rank_pool, tmp_path / "checkpoint", "even", serialization_format=SerializationFormat.SAFETENSORS)
    shutil.copy(folder / "__1_0.distcp", folder / "__2_0.distcp")
    with pytest.raises(ContradictionError, match=r"a different piece than \.metadata records") as caught:
        read(folder)
    assert caught.value.rank == 2 and caught.value.tensor == "w"
    assert caught.value.want == "the piece at [4, 0]"


# ---- metadata that contradicts itself or its files


def test_an_item_of_another_tensor(checkpoint: Path) -> None:
    def exchange(metadata: Any) -> None:
        by_name = {i.fqn: i for i in metadata.storage_data if i.fqn in ("model.steps", "model.mask")}
        one, other = by_name.values()
        stored = metadata.storage_data
        stored[one], stored[other] = stored[other], stored[one]

    edit(checkpoint, exchange)
    with pytest.raises(ContradictionError, match=r"a different piece than \.metadata records") as caught:
        read(checkpoint)
    assert caught.value.tensor in ("mask", "steps")


@pytest.mark.parametrize("shape", [(9, 6), (10, 5)], ids=["rows", "columns"])
def test_a_piece_that_reaches_out_of_its_tensor(checkpoint: Path, shape: tuple[int, int]) -> None:
    def shrink(metadata: Any) -> None:
        metadata.state_dict_metadata["model.embed.weight"].size = torch.Size(shape)

    edit(checkpoint, shrink)
    with pytest.raises(CorruptError, match="reaches beyond it") as caught:
        read(checkpoint)
    assert caught.value.tensor == "embed.weight" and caught.value.want == f"within {list(shape)}"


def test_two_tensors_in_one_item(checkpoint: Path) -> None:
    def share(metadata: Any) -> None:
        mine = [i for i in metadata.storage_data if i.fqn in ("model.up.weight", "model.down.weight")]
        info = metadata.storage_data[mine[0]]
        for index in mine:
            if metadata.storage_data[index].relative_path == info.relative_path:
                metadata.storage_data[index] = info

    edit(checkpoint, share)
    with pytest.raises(CorruptError, match="share bytes"):
        read(checkpoint)


def test_pieces_through_a_transform_are_refused(checkpoint: Path) -> None:
    def compress(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd"]

    edit(checkpoint, compress)
    with pytest.raises(UsageError, match="through a transform") as caught:
        read(checkpoint)
    assert "stream.zstd" in caught.value.got


@pytest.mark.parametrize(
    "path", ["../__1_0.distcp", "/etc/hostname", "a/__1_0.distcp", "..", "__1_0.distcp\0", ""], ids=ascii
)
def test_paths_out_of_the_folder(checkpoint: Path, path: str) -> None:
    shutil.copy(checkpoint / "__1_0.distcp", checkpoint.parent / "__1_0.distcp")

    def lead_away(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            if info.relative_path == "__1_0.distcp":
                info.relative_path = path

    edit(checkpoint, lead_away)
    with pytest.raises(UnsafeError, match="outside its folder"):
        read(checkpoint)


# ---- states as trainers nest them


def save_here(folder: Path, state: Any, planner: DefaultSavePlanner | None = None, **options: Any) -> Path:
    """Save from this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(folder, **options), planner=planner, no_dist=True)
    return folder


W, B, LR = torch.rand(3, 4), torch.rand(4), torch.tensor(0.1)


@pytest.mark.parametrize(
    ("state", "want"),
    [
        ({"a.w": W, "a.b": B}, {"a.w": W, "a.b": B}),
        ({"w": W}, {"w": W}),
        ({"model": W, "b": B}, {"model": W, "b": B}),  # a tensor of that name, no part
        ({"model": {"w": W}}, {"w": W}),
        ({"model": {"model.w": W, "lm_head.w": B}}, {"model.w": W, "lm_head.w": B}),
        ({"model": {"w": W}, "optim": {"state": {"w": {"exp_avg": B}}}, "step": 3}, {"w": W}),
        ({"model": {"w": W}, "optimizer.state.w.exp_avg": B, "rng": B}, {"w": W}),
        ({"model": {"w": W}, "seed": torch.tensor(3)}, {"w": W}),
        ({"app": {"model": {"w": W}, "optim": {"b": B}}}, {"w": W}),
        ({"state_dict": {"w": W}, "lr_scheduler": {"b": B}}, {"w": W}),
        ({"w": W, "v.w": B, "optimizer": {"b": B}, "dataloader": {"n": 3}}, {"w": W, "v.w": B}),
        ({"encoder": {"w": W}, "decoder": {"w": B}}, {"encoder.w": W, "decoder.w": B}),
        ({"model": {"blocks": [{"w": W}, {"w": B}]}}, {"blocks.0.w": W, "blocks.1.w": B}),
        # An optimizer's state in the model's own dict, as torch flattens it, or under a key that no list has.
        ({"w": W, "state.w.exp_avg": B, "state.w.step": B, "state.b": B}, {"w": W, "state.b": B}),
        ({"model": {"w": W, "state.w.momentum_buffer": B}}, {"w": W}),
        ({"net": {"w": W}, "adam": {"state": {0: {"exp_avg": B, "step": B}}}}, {"w": W}),
        ({"model": {"w": W}, "opt": {"state": {0: {"exp_avg": W}}}}, {"w": W}),
        ({"model": {"w": W}, "opt": {"state": {0: {"state1": W}}, "param_groups": [{"lr": 0.1}]}}, {"w": W}),
        ({"net": {"w": W}, "opt": {"state.w.exp_avg": W, "param_groups.w.lr": LR}}, {"w": W}),
        ({"w": W, "state.w.exp_avg": B, "param_groups.w.lr": LR}, {"w": W}),
        ({"w": W, "state.w.state1": B, "param_groups.w.lr": 0.1}, {"w": W}),
        ({"trial": {"model": {"w": W}, "optim": {"state": {0: {"exp_avg": W}}}}}, {"w": W}),
        ({"model": {"w": W}, "data": {"seen": B}}, {"w": W}),  # no model is without a matrix
        # However deep an optimizer lies, with rates that are tensors, with tuples of its own.
        (
            {"run": {"net": {"w": W}, "opt": {"state": [{"state1": W}], "param_groups": [{"lr": 0.1}]}}},
            {"w": W},
        ),
        ({"net": {"w": W}, "opt": {"state": [{"state1": W}], "param_groups": [{"lr": LR}]}}, {"w": W}),
        ({"net": {"w": W}, "opt": {"state": [{"pair": (W, W)}, {"step": B}], "param_groups": [{}, LR]}}, {"w": W}),
        ({"model": {"w": W}, "opt": {"adam": {"state": [{"exp_avg": W}]}}}, {"w": W}),
        # What DistributedDataParallel and torch.compile put into names.
        ({"model": {"module.a._orig_mod.w": W, "module.b": B}}, {"a.w": W, "b": B}),
        ({"module.w": W, "b": B}, {"module.w": W, "b": B}),
    ],
)
def test_which_part_is_the_model(tmp_path: Path, state: Any, want: dict[str, torch.Tensor]) -> None:
    folder = save_here(tmp_path / "checkpoint", state)
    assert gathered(folder) == {name: whole(tensor) for name, tensor in want.items()}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {"w": W}, "ema": {"w": W}}, "more than one part"),
        ({"model": {"w": W}, "module": {"w": W}}, "more than one part"),
        ({"optim": {"w": W}}, "no model"),
        ({"epoch": 3}, "no model"),
        ({"adam": {"state": {0: {"exp_avg": B}}}}, "no model"),
        ({"state": {0: {"exp_avg": W}}}, "no model"),
        ({"model": {"opt.state.w.exp_avg": B}, "ema": W}, "no model"),  # and none is looked for beside it
        ({"state": {0: {"state1": W}}, "param_groups": [{"lr": 0.1}]}, "no model"),
        ({"model": {"w": W, "pair": (W, {"b": [B]})}}, "pair was pickled whole, with 2 tensors in it"),
        (
            {"app": [{"model": {"w": W, "pair": (W,)}, "optim": {"b": B}}]},
            "pair was pickled whole, with 1 tensor in it",
        ),
        ({"run": {"ema": {"state": [{"state1": W}], "param_groups": [{"lr": 0.1}]}}}, "no model"),
    ],
)
def test_parts_that_are_not_chosen_among(tmp_path: Path, state: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(save_here(tmp_path / "checkpoint", state))


def test_what_a_planner_left_nested(tmp_path: Path) -> None:
    """torch pickles the dicts whole."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": {"w": W}, "optim": {"state": {0: {"exp_avg": B}}}}
    folder = save_here(tmp_path / "nested", state, planner)
    with pytest.raises(UsageError, match="no model") as caught:
        read(folder)
    assert caught.value.got == "model, pickled whole"
    folder = save_here(tmp_path / "beside", {**state, "scale": B}, planner)
    with pytest.raises(UsageError, match="model was pickled whole, with 1 tensor in it"):
        read(folder)
    assert gathered(folder, exclude=("model",)) == {"scale": whole(B)}
    assert verify_model(folder, against=f"{folder}.out").ok  # whose manifest says what was left out


def test_a_file_of_many_values_is_opened_once(tmp_path: Path) -> None:
    """A run of thousands of values on a network file system asks the server once for each file."""
    held = [f"held{k}" for k in range(6)]
    state = {"model": {"w": W, **dict.fromkeys(held, (W, B)), "pairs": {str(k): (k, k) for k in range(20)}}}
    folder = save_here(tmp_path / "checkpoint", state, thread_count=2)
    with mock.patch.object(dcp_reader, "open_regular", wraps=dcp_reader.open_regular) as opened:
        absent = DcpReader().read(str(folder), Hints(is_left_out=held.__contains__)).absent
    assert sorted(absent) == held
    # Each is opened once for its values, and one of them for the tensor.
    assert sorted({call.args[0] for call in opened.call_args_list}) == [str(folder / f"__0_{k}.distcp") for k in (0, 1)]
    assert len(opened.call_args_list) <= 3
    for name in held:
        with pytest.raises(UsageError, match=f"{name} was pickled whole, with 2 tensors in it"):
            DcpReader().read(str(folder), Hints(is_left_out={*held}.difference([name]).__contains__))


def test_names_that_the_base_model_has_are_no_wrappers(tmp_path: Path) -> None:
    folder = save_here(tmp_path / "checkpoint", {"model": {"module.w": W}})
    report = gather_checkpoint(folder, tmp_path / "out")
    assert dict(report.notes)["wrapper-names"].endswith("module.w is w")
    (tmp_path / "base").mkdir()
    save_file({"module.w": W}, tmp_path / "base" / "model.safetensors")
    report = gather_checkpoint(folder, tmp_path / "kept", base_model=tmp_path / "base")
    assert [*load_file(tmp_path / "kept" / "model.safetensors")] == ["module.w"]
    assert "wrapper-names" not in dict(report.notes)


def test_flat_parameters_are_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    """Beside them, each name is a range that each rank cut for itself, of which torch keeps one."""
    folder = saved(rank_pool, tmp_path / "checkpoint", "fsdp1 local", num_ranks=2)
    with pytest.raises(LayoutError, match="_flat_param: a flat parameter of FSDP1"):
        read(folder)


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.rand(3, 5).t(),
        "permuted": torch.rand(2, 3, 4).permute(2, 0, 1),
        "slice": torch.rand(6, 8)[2:5, 1:3],
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "five dims": torch.rand(2, 1, 3, 2, 2),
        "bool": torch.tensor([True, False]),
        "int64": torch.tensor([2**40, -1]),
        "fp8": torch.rand(7).to(torch.float8_e4m3fn),
        "large": torch.rand(300, 200),  # read at its two ends
        "large too": torch.rand(300, 200),
        "": torch.ones(1),
        "odd name/\u00d4": torch.zeros(2),
        "n" * 300: torch.ones(3),
    }
    found = gathered(save_here(tmp_path / "checkpoint", tensors))
    assert found == {name: whole(tensor) for name, tensor in tensors.items()}


def test_element_types_that_no_safetensors_file_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="complex128") as caught:
        read(save_here(tmp_path / "checkpoint", {"w": torch.rand(3).to(torch.complex128)}))
    assert caught.value.tensor == "w"


def test_items_without_checksums_are_taken_and_told(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder = save_here(tmp_path / "checkpoint", {"w": W, "v": W + 1, "b": B})
    finally:
        torch.serialization.set_crc32_options(True)
    model = read(folder)
    assert (model.records.crc32 == NO_CHECKSUM).all()
    assert dict(model.notes)["no-checksums"].startswith("1 file without checksums, ")
    assert gathered(folder) == {"w": whole(W), "v": whole(W + 1), "b": whole(B)}


def test_one_file_for_each_item(tmp_path: Path) -> None:
    folder = save_here(tmp_path / "checkpoint", {"model": {"w": W, "b": B}}, single_file_per_rank=False)
    assert len(list(folder.glob("*.distcp"))) == 2
    assert gathered(folder) == {"w": whole(W), "b": whole(B)}
