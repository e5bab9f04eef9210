"""Random layouts of a trainer into random layouts or loaders of an engine: equal bit by bit, with bytes as planned."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.layout.test_layouts_through_files import DTYPES, drawn_layouts, facts, local_tensors, made_tensor
from tests.refit.drawn_engine import DrawnEngine
from xrank.layout import LayoutMap
from xrank.refit import targets

pytestmark = pytest.mark.timeout(900)

WORLD_SIZE = 4


def draw(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], LayoutMap, LayoutMap, bool]:
    """Return the tensors of two steps, the layouts of both sides, and whether tiny runs go straight, too."""
    rng = random.Random(seed)
    shapes, dtypes = {}, {}
    for i in range(rng.randint(1, 4)):
        largest = [6, 8, 5, 7, 12, 2, 3, 1, 0] if seed % 4 else [64, 48, 33, 96, 7]
        shapes[f"t{i}"] = tuple(rng.choice(largest) for _ in range(rng.randint(min(i, 1), 3)))
        dtypes[f"t{i}"] = rng.choice(DTYPES)
    if all(0 in shape for shape in shapes.values()) or (0,) in shapes.values():
        return draw(seed + 100_000)
    both = [{name: made_tensor(dtypes[name], shape, seed + step) for name, shape in shapes.items()} for step in (1, 2)]
    while True:
        (here, size), (there, other) = (drawn_layouts(rng, shapes, axis) for axis in "ab")
        if max(size, other) <= WORLD_SIZE:
            return both[0], both[1], here, there, rng.random() < 0.7


def train(folder: str, seeds: list[int]) -> None:
    rank = dist.get_rank()
    for seed in seeds:
        first, second, layouts, _, _ = draw(seed)
        held = local_tensors(first, layouts, rank)
        with xrank.offer_weights(held, f"{folder}/{seed}", layouts=layouts, snapshot=bool(seed % 2)) as offer:
            offer.wait_for_takers(WORLD_SIZE, timeout_seconds=200)
            offer.publish(1, timeout_seconds=200)
            dist.barrier()
            (Path(folder) / f"{seed}" / f"published-{rank}").touch()
            wait_for([Path(folder) / f"{seed}" / f"taken-{other}" for other in range(WORLD_SIZE)])
            for name, tensor in local_tensors(second, layouts, rank).items():
                held[name].copy_(tensor)
            offer.publish(2, timeout_seconds=200)
            wait_for([Path(folder) / f"{seed}" / f"closed-{other}" for other in range(WORLD_SIZE)])


def make_target(
    seed: int, rank: int, tensors: tuple[dict[str, torch.Tensor], ...], layouts: LayoutMap
) -> tuple[Any, dict[str, Any], list[Any]]:
    """Return the tensors to fill, the arguments that say how they are cut, and the facts of each step."""
    if seed % 3 < 2:
        wanted = [local_tensors(step, layouts, rank) for step in tensors]
        held = {name: stale(tensor) for name, tensor in wanted[0].items()}
        return held, {"layouts": layouts}, [facts(step) for step in wanted]
    engines = [DrawnEngine(seed, rank, WORLD_SIZE, tensors[0]) for _ in range(3)]
    for engine, step in zip(engines[1:], tensors, strict=True):
        engine.load_weights(step.items())
    return engines[0], {"loader": engines[0].load_weights}, [facts(engine.state_dict()) for engine in engines[1:]]


def serve(folder: str, seeds: list[int]) -> list[tuple[int, int, int]]:
    """Take two steps for each seed; return (bytes held, moved, moved straight) of the second."""
    rank, moved = dist.get_rank(), []
    for seed in seeds:
        first, second, _, layouts, takes_tiny = draw(seed)
        held, cuts, wanted = make_target(seed, rank, (first, second), layouts)
        smallest = 0 if takes_tiny else targets._SMALLEST_RUN_NBYTES
        with (
            patch.object(targets, "_SMALLEST_RUN_NBYTES", smallest),
            xrank.take_weights(held, f"{folder}/{seed}", **cuts) as weights,
        ):
            assert weights.update(timeout_seconds=200).step == 1
            assert facts(list_held(held)) == wanted[0], seed
            (Path(folder) / f"{seed}" / f"taken-{rank}").touch()
            report = weights.update(timeout_seconds=200)
            assert report.step == 2 and report.plan_seconds == 0
            assert facts(list_held(held)) == wanted[1], seed
            assert not report.whole
            if takes_tiny and report.direct_nbytes == report.moved_nbytes:
                assert report.moved_nbytes <= 1.001 * report.nbytes, seed
            moved.append((report.nbytes, report.moved_nbytes, report.direct_nbytes))
        (Path(folder) / f"{seed}" / f"closed-{rank}").touch()
    return moved


def list_held(held: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict or an engine."""
    return held.state_dict() if isinstance(held, DrawnEngine) else held


def stale(tensor: torch.Tensor) -> torch.Tensor:
    """Return other values of the same kind, sometimes with the strides of a transposed tensor."""
    other = torch.zeros_like(tensor)
    if tensor.ndim == 2 and tensor.numel() % 3 == 0:
        other = torch.zeros_like(tensor.t()).contiguous().t()
    return other


def wait_for(paths: list[Path], seconds: float = 200.0) -> None:
    """Wait until all files are there."""
    end = time.monotonic() + seconds
    for path in paths:
        while not path.exists():
            assert time.monotonic() < end, path
            time.sleep(0.001)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the parts: the first with 6 pairs, in `make soak` 26 with 506."""
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(26 if metafunc.config.getoption("soak") else 1))


def test_random_layouts_become_others_bit_by_bit(part: int, run_jobs: Any, tmp_path: Path) -> None:
    seeds = list(range(20 * part, 20 * part + 20)) if part else list(range(6))
    _, moved = run_jobs(
        (WORLD_SIZE, train, (str(tmp_path), seeds)),
        (WORLD_SIZE, serve, (str(tmp_path), seeds)),
        timeout_seconds=60 + 40 * len(seeds),
    )
    # Some tensors went straight to their places, so that the bytes of these are as planned.
    straight = [one for rank in moved for one in rank if one[2]]
    assert len(straight) >= 3
