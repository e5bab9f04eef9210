"""Torch DCP on eight ranks, beside torch's own merge: the same tensors, and no silence where torch is silent."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.readers.dcp_checkpoints import CUTS, expected, saved
from xrank.commands.gather import gather_checkpoint
from xrank.errors import ContradictionError, CorruptError, IncompleteError
from xrank.readers.base import Hints
from xrank.readers.dcp import DcpReader
from xrank.testing.rank_pool import RankPool
from xrank.testing.reader_contract import WholeTensor, read_model, whole

NUM_RANKS = 8


def merged_by_torch(folder: Path, nesting: str = "model") -> dict[str, WholeTensor]:
    target = folder.parent / "merged.pt"
    dcp_to_torch_save(folder, target)
    state: Any = torch.load(target, weights_only=True)
    return {name: whole(tensor) for name, tensor in state[nesting].items()}


@pytest.fixture(scope="module")
def fsdp(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(rank_pool, tmp_path_factory.mktemp("shared") / "checkpoint", "fsdp2", num_ranks=NUM_RANKS)


@pytest.mark.parametrize("cut", CUTS)
def test_eight_ranks(rank_pool: RankPool, tmp_path: Path, cut: str) -> None:
    folder = saved(rank_pool, tmp_path / "checkpoint", cut, num_ranks=NUM_RANKS, thread_count=2)
    gather_checkpoint(folder, tmp_path / "out")
    assert read_model(tmp_path / "out") == expected() == merged_by_torch(folder)


@pytest.mark.parametrize("payload", list(SerializationFormat), ids=lambda payload: payload.value)
def test_eight_ranks_of_a_trainer(rank_pool: RankPool, tmp_path: Path, payload: SerializationFormat) -> None:
    options = {"num_ranks": NUM_RANKS, "serialization_format": payload}
    folder = saved(rank_pool, tmp_path / "checkpoint", "fsdp2 x tp", "trainer", **options)
    report = gather_checkpoint(folder, tmp_path / "out")
    assert read_model(tmp_path / "out") == expected()
    assert report.source["world_size"] == NUM_RANKS and report.source["skipped_nbytes"] > 0


def test_a_piece_that_the_metadata_lacks(fsdp: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fsdp, tmp_path / "checkpoint"))
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    chunk = metadata.state_dict_metadata["model.embed.weight"].chunks.pop(1)
    lost = [i for i in metadata.storage_data if i.fqn == "model.embed.weight" and i.offset == chunk.offsets]
    for index in lost:
        del metadata.storage_data[index]
    path.write_bytes(pickle.dumps(metadata))
    merged_by_torch(folder)  # of memory as it was, and without a word
    with pytest.raises(IncompleteError) as caught:
        gather_checkpoint(folder, tmp_path / "out")
    assert caught.value.tensor == "embed.weight"


def test_a_flipped_bit(fsdp: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fsdp, tmp_path / "checkpoint"))
    model = DcpReader().read(str(folder), Hints())
    file = Path(model.files[int(model.records.file[0])].path)
    content = bytearray(file.read_bytes())
    content[int(model.records.offset[0])] ^= 1
    file.write_bytes(content)
    assert merged_by_torch(folder) != expected()
    with pytest.raises(CorruptError):
        gather_checkpoint(folder, tmp_path / "out")


def test_a_copy_of_another_ranks_file(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = saved(rank_pool, tmp_path / "checkpoint", "even", num_ranks=NUM_RANKS)
    right = merged_by_torch(folder)
    shutil.copy(folder / "__4_0.distcp", folder / "__3_0.distcp")
    assert merged_by_torch(folder) != right
    with pytest.raises(ContradictionError, match="copy"):
        gather_checkpoint(folder, tmp_path / "out")
