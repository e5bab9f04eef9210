"""LoRA adapters alone, from FSDP2 ranks to an engine that holds several steps of them at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import xrank
from tests.commands.adapted_models import ALPHA, RANK, P, adapter, base_model, wrapped
from tests.commands.test_export import Adapted
from tests.refit.jobs import wait_for_file
from tests.refit.test_refusals import weight
from xrank.errors import ContradictionError, UsageError

pytestmark = pytest.mark.timeout(120)


def adapted(step: int) -> Any:
    """Return a model as PEFT makes it, with a step's adapter."""
    return Adapted(wrapped(base_model(torch.float32), adapter(seed=step)))


def saved(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors that PEFT saves of it."""
    return {P + name.replace(".default", ""): tensor for name, tensor in adapter(seed=step).items()}


def same(found: Mapping[str, torch.Tensor], step: int) -> bool:
    wanted = saved(step)
    return found.keys() == wanted.keys() and all(found[name].equal(tensor) for name, tensor in wanted.items())


def train(folder: str) -> None:
    model = adapted(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    held = dict(model.named_parameters())
    with xrank.offer_weights(model, folder, adapter_only=True, proof=True) as offer:
        offer.wait_for_takers(2, timeout_seconds=60)
        for step in (7, 8):
            for name, whole in dict(adapted(step).named_parameters()).items():
                part = held[name].to_local()
                part.detach().copy_(whole.tensor_split(2)[dist.get_rank()] if len(whole) % 2 == 0 else part)
            offer.publish(step, timeout_seconds=60)
        wait_for_file(Path(folder) / "done")


def serve(folder: str) -> list[Any]:
    with xrank.take_adapter(folder, proof=True) as taken:
        old = taken.update(timeout_seconds=60)
        path = old.write(f"{folder}/slot-{dist.get_rank()}-7")
        new = taken.update(timeout_seconds=60)
        assert (old.step, new.step) == (7, 8) and same(old.tensors, 7) and same(new.tensors, 8)
        assert same(load_file(f"{path}/adapter_model.safetensors"), 7)
        config = json.loads(Path(path, "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA) and config == new.config
        assert new.report.digests.keys() == saved(8).keys() and not new.report.unused
        dist.barrier()
        (Path(folder) / "done").touch()
        return [old.report.moved_nbytes, old.report.nbytes]


def test_an_engine_holds_two_steps_of_an_adapter_from_fsdp2(run_jobs: Any, tmp_path: Path) -> None:
    _, found = run_jobs((2, train, (str(tmp_path),)), (2, serve, (str(tmp_path),)))
    nbytes = sum(tensor.nbytes for tensor in saved(7).values())
    assert found == [[nbytes, nbytes]] * 2  # none of the base model's


def test_an_adapter_of_a_whole_offer_leaves_the_base_model_alone(tmp_path: Path) -> None:
    with xrank.offer_weights(adapted(3), tmp_path, snapshot=True) as offer, xrank.take_adapter(tmp_path) as taken:
        offer.publish(1)
        found = taken.update(timeout_seconds=10)
        assert same(found.tensors, 3) and len(found.report.unused) == len(base_model())
        found.write(tmp_path / "slot")
        with pytest.raises(UsageError, match="slot exists"):
            found.write(tmp_path / "slot")


def test_a_slot_of_the_engines_own_is_filled_in_place(tmp_path: Path) -> None:
    slot = {name: torch.zeros_like(tensor) for name, tensor in saved(3).items()}
    with (
        xrank.offer_weights(adapted(3), tmp_path, snapshot=True, adapter_only=True) as offer,
        xrank.take_weights(slot, tmp_path) as weights,
    ):
        offer.publish(1)
        assert not weights.update(timeout_seconds=10).unused and same(slot, 3)


def test_values_that_change_on_the_way_are_found(tmp_path: Path) -> None:
    with (
        xrank.offer_weights(adapted(3), tmp_path, snapshot=True, adapter_only=True, proof=True) as offer,
        xrank.take_adapter(tmp_path, proof=True) as taken,
    ):
        offer.publish(1)
        offer._part._copies[0].find_row(0, 4)[0] ^= 1
        with pytest.raises(ContradictionError, match=r"lora_A\.weight: engine rank 0 does not hold"):
            taken.update(timeout_seconds=10)


def test_models_without_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rank 0 has no tensors of a LoRA adapter to offer"):
        xrank.offer_weights(weight(), tmp_path, adapter_only=True)
    with (
        xrank.offer_weights(weight(), tmp_path, snapshot=True) as offer,
        xrank.take_adapter(tmp_path) as taken,
    ):
        offer.publish(1)
        with pytest.raises(UsageError, match="the trainer offers no LoRA adapter"):
            taken.update(timeout_seconds=10)
