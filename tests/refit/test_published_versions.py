"""Versions of an offer: each published step is in the folder, whole or as a delta, and a failure begins a new chain."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.commands.applied_deltas import apply_version, read_index, read_model
from tests.commands.exported import llama, shard
from tests.commands.test_delta_live import train
from tests.commands.test_quantize import cut, make_state
from tests.sampled import sampled
from xrank.engine import made_records
from xrank.errors import RankFailedError, UsageError, XrankError

pytestmark = pytest.mark.timeout(300)


def version(folder: Path, number: int) -> dict:
    """Return the model of a version, by plain lines."""
    path = folder / f"weight_v{number:06d}"
    metadata = read_index(path)["metadata"]
    assert metadata["version"] == f"{number:06d}"
    if "delta_encoding" not in metadata:
        return read_model(path)
    return apply_version(path, version(folder, int(metadata["base_version"])))


OFFERS = [{}, {"snapshot": True}, {"dtype": "bf16"}, {"dtype": "bf16", "snapshot": True}]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", sampled(OFFERS, 2), ids=str)
def test_every_step_is_a_version(rank, world_size, tmp_path: Path, options: dict) -> None:
    model = shard(llama(tie_word_embeddings=True), "fsdp tp", world_size)
    folder, exported = tmp_path / "deltas", {name: options[name] for name in ("dtype",) if name in options}
    with xrank.offer_weights(model, tmp_path / "refit", deltas=folder, whole_every=3, **options) as offer:
        for number in range(5):
            offer.publish(10 * number)
            xrank.export_model(model, tmp_path / str(number), **exported)
            train(model)
    if rank == 0:
        assert len(list(folder.iterdir())) == 5, "nothing else is left"
        for number in range(5):
            assert version(folder, number) == read_model(tmp_path / str(number)), number
            metadata = read_index(folder / f"weight_v{number:06d}")["metadata"]
            assert ("delta_encoding" in metadata) is (number not in (0, 3))
            assert metadata["xrank"]["step"] == 10 * number
        assert (folder / "weight_v000003" / "config.json").exists()
    dist.barrier()


@pytest.mark.ranks(2)
def test_quantized_steps(rank, tmp_path: Path) -> None:
    state = make_state()
    model = cut(state)
    with xrank.offer_weights(model, tmp_path / "refit", deltas=tmp_path / "deltas", quantize="FP8_BLOCK") as offer:
        for number in range(3):
            offer.publish(number)
            xrank.export_model(model, tmp_path / str(number), quantize="FP8_BLOCK")
            local = model["model.layers.1.mlp.up_proj.weight"].to_local()
            local.view(-1)[3] *= 3
    if rank == 0:
        for number in range(3):
            assert version(tmp_path / "deltas", number) == read_model(tmp_path / str(number)), number
    dist.barrier()


@pytest.mark.ranks(2)
def test_after_a_failure_the_next_version_is_whole(rank, tmp_path: Path) -> None:
    model, folder = {"a.weight": torch.ones(300, 4), "b.weight": torch.zeros(300, 3)}, tmp_path / "deltas"

    def fail(*_: object) -> int:
        raise OSError(5, "no")

    with xrank.offer_weights(model, tmp_path / "refit", deltas=folder) as offer:
        offer.publish(0)
        model["a.weight"][3] += 1
        offer.publish(1)
        model["a.weight"][4] += 1
        model["b.weight"][2] += 1  # each rank has one of the two
        write = fail if rank == 1 else made_records.write_at
        with patch.object(made_records, "write_at", write), pytest.raises(XrankError if rank else RankFailedError):
            offer.publish(2)
        assert sorted(path.name for path in folder.iterdir()) == ["weight_v000000", "weight_v000001"]
        model["b.weight"][4] += 1
        dist.barrier()
        offer.publish(3)
        model["b.weight"][5] += 1
        offer.publish(4)
    dist.barrier()
    # An offer does not know what another one's last version is of.
    with xrank.offer_weights(model, tmp_path / "again", deltas=folder) as offer:
        offer.publish(7)
    if rank == 0:
        kinds = [read_index(path)["metadata"].get("delta_encoding") for path in sorted(folder.iterdir())]
        assert kinds == [None, "xor", None, "xor", None]
        assert version(folder, 3) == version(folder, 4)
        assert version(folder, 1) != version(folder, 2) != version(folder, 3)
    dist.barrier()


def test_a_number_of_versions_that_is_none(tmp_path: Path) -> None:
    for options in ({"whole_every": 0, "deltas": tmp_path / "x"}, {"whole_every": 2}):
        with pytest.raises(UsageError, match="whole_every"):
            xrank.offer_weights({"a": torch.ones(2)}, tmp_path / "refit", **options)
