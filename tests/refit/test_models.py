"""Models of real frameworks and an engine's own loader, over several steps, from ranks into ranks of another job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

import xrank
from tests.commands.exported import llama, shard
from tests.commands.loaded_modules import assert_loaded, cut, weights
from tests.refit.jobs import serve_fused, train, wait_for_file

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("snapshot", [False, True])
def test_an_engine_with_fused_weights_takes_each_step(run_jobs: Any, tmp_path: Path, snapshot: bool) -> None:
    folder = str(tmp_path / "address")
    steps = 1 if snapshot else 3
    if snapshot:
        Path(folder).mkdir()
    published, taken = run_jobs((4, train, (folder, steps, 2, snapshot)), (2, serve_and_tell, (folder, steps)))
    for reports in taken:
        assert [report.step for report in reports] == list(range(1, steps + 1))
        # Padding of the vocabulary is the only part of the engine that no trainer rank holds.
        assert all(report.moved_nbytes <= 1.001 * report.nbytes for report in reports)
        assert all(report.direct_nbytes > 0.9 * report.nbytes for report in reports)
        assert [report.plan_seconds > 0 for report in reports] == [True, *[False] * (steps - 1)]
    if not snapshot:
        assert all(len(report.takers) == 2 and not report.failed for reports in published for report in reports)
    assert [name for name in (tmp_path / "address").iterdir() if name.suffix == ".json"] == []


def serve_and_tell(folder: str, steps: int) -> list[Any]:
    reports = serve_fused(folder, steps)
    dist.barrier()
    (Path(folder) / "done").touch()
    return reports


CUTS_OF_STEPS = [("both", "columns and rows"), ("replicated rows", "both"), ("rows", "plain")]


def test_modules_of_dtensors_fill_modules_of_other_cuts(run_jobs: Any, tmp_path: Path) -> None:
    run_jobs((4, train_blocks, (str(tmp_path),)), (4, serve_blocks, (str(tmp_path),)))


def train_blocks(folder: str) -> None:
    for number, (how, _) in enumerate(CUTS_OF_STEPS):
        block = cut(how)
        with torch.no_grad():
            for name, tensor in weights().items():
                block.state_dict()[name].copy_(like(tensor, block.state_dict()[name]))
        with xrank.offer_weights(block, f"{folder}/{number}") as offer:
            offer.wait_for_takers(4, timeout_seconds=60)
            offer.publish(1, timeout_seconds=60)
        dist.barrier()


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, cut as another one is."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor.to(other.dtype), other.device_mesh, other.placements)


def serve_blocks(folder: str) -> None:
    for number, (_, how) in enumerate(CUTS_OF_STEPS):
        block = cut(how)
        with xrank.take_weights(block, f"{folder}/{number}") as taken:
            assert taken.update(timeout_seconds=60).unused == ()
            assert_loaded(block)
        dist.barrier()


@pytest.mark.slow
def test_fsdp_over_tensor_parallelism_into_other_meshes(run_jobs: Any, tmp_path: Path) -> None:
    run_jobs((4, train_llama, (str(tmp_path),)), (2, serve_llama, (str(tmp_path),)))


def train_llama(folder: str) -> None:
    model = shard(llama(tie_word_embeddings=True), "fsdp tp", 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with xrank.offer_weights(model, folder) as offer:
        offer.wait_for_takers(2, timeout_seconds=60)
        for step in range(3):
            tokens = torch.arange(8).view(1, 8)
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = dict(xrank.iter_model(model))
            if dist.get_rank() == 0:
                torch.save(whole, f"{folder}/{step}.pt")
                (Path(folder) / f"{step}.ready").touch()
            report = offer.publish(step, timeout_seconds=60)
            assert len(report.takers) == 2


def serve_llama(folder: str) -> None:
    model = shard(llama(tie_word_embeddings=True).to(torch.bfloat16), "tp", 2)
    with xrank.take_weights(model, folder) as weights:
        for step in range(3):
            report = weights.update(timeout_seconds=60)
            assert report.step == step
            wait_for_file(Path(folder) / f"{step}.ready")
            whole = torch.load(f"{folder}/{step}.pt")
            for name, tensor in model.state_dict().items():
                got = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                want = whole["model.embed_tokens.weight" if name == "lm_head.weight" else name]
                assert got.equal(want.to(torch.bfloat16)), name


@pytest.mark.slow  # it imports transformers
def test_experts_of_a_moe_become_the_fused_experts_of_a_module(tmp_path: Path) -> None:
    """One process on each side: names and forms are decided as for a folder and a load."""
    from tests.commands.exported import qwen3_moe

    trained, served = qwen3_moe(), qwen3_moe()
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.zero_()
    with xrank.offer_weights(trained, tmp_path, snapshot=True) as offer:
        offer.publish(1)
        with xrank.take_weights(served, tmp_path) as weights:
            report = weights.update(timeout_seconds=20)
    assert report.unused == ()
    for name, tensor in trained.state_dict().items():
        assert served.state_dict()[name].equal(tensor), name
