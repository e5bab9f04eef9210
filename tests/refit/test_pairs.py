"""Random layouts of a trainer's ranks into random layouts or loaders of an engine's, as they are or in another form."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xrank
from tests.engine.test_value_digests import whole_of
from tests.layout.test_layouts_through_files import DTYPES, drawn_layouts, facts, local_tensors, made_tensor
from xrank import Quantization
from xrank.engine.value_digests import digest_parts
from xrank.layout import LayoutMap
from xrank.refit import targets

pytestmark = pytest.mark.timeout(900)

WORLD_SIZE = 4
Tensors = dict[str, torch.Tensor]
OVERLAP = "the engine's parts of it overlap, or are incomplete"
"""Such as ranks with columns of their own beside some that all have."""
SOAKED = {"plain": 26, "prepared": 11}
"""Parts in `make soak`: 506 and 205 pairs. Otherwise the first of each, of 6 and 5."""
FIRST = {"plain": [0, 1, 2, 3, 4, 5], "prepared": [0, 1, 4, 9, 10]}


@dataclass
class Pair:
    """The tensors of two steps as the trainer has them and as engines get them, and the layouts of both sides."""

    steps: list[Tensors]
    wanted: list[Tensors]
    here: LayoutMap
    there: LayoutMap
    options: dict[str, Any]
    smallest_run_nbytes: int


def draw(kind: str, seed: int) -> Pair:
    rng = random.Random(seed)
    steps, options = draw_prepared(rng, seed) if kind == "prepared" else (draw_plain(rng, seed), {})
    wanted = [apply(step, options.get("transform"), options.get("dtype")) for step in steps]
    while True:
        (here, size), (there, other) = (
            drawn_layouts(rng, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, axis)
            for tensors, axis in ((steps[0], "a"), (wanted[0], "b"))
        )
        if max(size, other) <= WORLD_SIZE:
            smallest = 0 if rng.random() < 0.7 else targets._SMALLEST_RUN_NBYTES
            return Pair(steps, wanted, here, there, options, smallest)


def draw_plain(rng: random.Random, seed: int) -> list[Tensors]:
    while True:
        shapes, dtypes = {}, {}
        for i in range(rng.randint(1, 4)):
            largest = [6, 8, 5, 7, 12, 2, 3, 1, 0] if seed % 4 else [64, 48, 33, 96, 7]
            shapes[f"t{i}"] = tuple(rng.choice(largest) for _ in range(rng.randint(min(i, 1), 3)))
            dtypes[f"t{i}"] = rng.choice(DTYPES)
        if not all(0 in shape for shape in shapes.values()) and (0,) not in shapes.values():
            break
    return [{name: made_tensor(dtypes[name], shape, seed + step) for name, shape in shapes.items()} for step in (1, 2)]


def draw_prepared(rng: random.Random, seed: int) -> tuple[list[Tensors], dict[str, Any]]:
    sizes = [3, 5, 7, 8, 12, 16] if seed % 3 else [24, 33, 48]
    shapes = {
        f"t{i}.weight": tuple(rng.choices(sizes, k=rng.choice([1, 2, 2, 2, 3]))) for i in range(rng.randint(1, 4))
    }
    dtypes = {name: rng.choice([torch.float32, torch.bfloat16, torch.float16]) for name in shapes}
    steps = []
    for step in (1, 2):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        steps.append({n: (step * torch.randn(s, generator=generator)).to(dtypes[n]) for n, s in shapes.items()})
        steps[-1]["count"] = torch.tensor([step, 2, 3])
    kind = rng.choice(["quantize", "quantize", "quantize", "function", "cast"])
    blocks: Any = rng.choice(["tensor", "channel", (4, 4), (8, 3), (5, 16)])
    quantization = Quantization(rng.choice(["fp8", "int8"]), blocks, keep=("t3*",))
    transform = {"quantize": quantization, "function": Function(quantization), "cast": None}[kind]
    return steps, {"transform": transform, "dtype": rng.choice(["bf16", "fp16"] if kind == "cast" else [None, "bf16"])}


class Function:
    """A function of whole tensors that also leaves one out."""

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.startswith("t2"):
            return {}
        if not tensor.is_floating_point() or tensor.ndim < 2:
            return {name: tensor}
        return {**self.quantization(name, tensor), f"{name}.sum": tensor.double().sum().view(1)}


def apply(tensors: dict[str, torch.Tensor], transform: Any, dtype: str | None) -> dict[str, torch.Tensor]:
    """Return the whole tensors as an engine gets them."""
    found = {}
    for name, tensor in tensors.items():
        made = {name: tensor} if transform is None else transform(name, tensor)
        if made.get(name) is tensor and dtype is not None and tensor.is_floating_point():
            made = {name: tensor.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])}
        found |= made
    return found


Cut = Callable[[torch.Tensor], torch.Tensor]
"""Whole tensor -> a rank's part, as a view."""


class DrawnEngine(nn.Module):
    """One rank. A parameter is fused of the parts of one to three tensors of a type, with padding behind them."""

    def __init__(self, seed: int, rank: int, world_size: int, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        rng, self.slots = random.Random(seed), dict[str, torch.Tensor]()
        self.cuts: dict[str, Cut] = {}
        self.padding: list[torch.Tensor] = []
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in tensors.items():
            by_dtype.setdefault(tensor.dtype, []).append(name)
        for names in by_dtype.values():
            while names:
                count = rng.randint(1, 3)
                fused, names = names[:count], names[count:]
                self._fuse(rng, rank, world_size, {name: tensors[name] for name in fused})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the parameters from whole tensors."""
        for padding in self.padding:
            padding.fill_(0)
        for name, loaded in weights:
            self.slots[name].copy_(self.cuts[name](loaded))

    def _fuse(self, rng: random.Random, rank: int, world_size: int, tensors: Mapping[str, torch.Tensor]) -> None:
        parts = {}
        for name, tensor in tensors.items():
            self.cuts[name] = draw_cut(rng, rank, world_size, tuple(tensor.shape))
            parts[name] = self.cuts[name](tensor)
        dtype = next(iter(tensors.values())).dtype
        size, padding = sum(part.numel() for part in parts.values()), rng.choice([0, 3])
        flat = nn.Parameter(torch.zeros(size + (padding or (0 if size else 1)), dtype=dtype), requires_grad=False)
        self.register_parameter(f"fused{len(self.padding)}_{'_'.join(parts)}", flat)
        start = 0
        for name, part in parts.items():
            slot = flat.data[start : start + part.numel()]
            is_transposed = part.ndim >= 2 and rng.random() < 0.4
            shape = (*part.shape[:-2], part.shape[-1], part.shape[-2]) if is_transposed else part.shape
            self.slots[name] = slot.view(shape).transpose(-1, -2) if is_transposed else slot.view(shape)
            start += part.numel()
        self.padding.append(flat.data[start:])


def draw_cut(rng: random.Random, rank: int, world_size: int, shape: tuple[int, ...]) -> Cut:
    """Return a rank's part of tensors of a shape; together with the loader's copies every parameter is filled."""
    kind = rng.choice(["whole", "even", "uneven", "strided", "experts", "columns"])
    if not shape or kind == "whole":
        return lambda whole: whole
    dim = len(shape) - 1 if kind == "columns" else 0 if kind == "experts" else rng.randrange(len(shape))
    length = shape[dim]
    if kind == "strided":
        return lambda whole: whole[(slice(None),) * dim + (slice(rank, None, world_size),)]
    if kind == "experts":  # equal numbers of neighbors, on groups of ranks
        count = math.gcd(length, world_size)
        at = rank % count
        return lambda whole: whole.narrow(0, at * (length // count), length // count)
    bounds = sorted([0, length, *(rng.randint(0, length) for _ in range(world_size - 1))])
    if kind != "uneven":
        each = -(-length // world_size)
        bounds = [min(length, each * i) for i in range(world_size + 1)]
    return lambda whole: whole.narrow(dim, bounds[rank], bounds[rank + 1] - bounds[rank])


def train(folder: str, kind: str, seeds: list[int]) -> None:
    rank = dist.get_rank()
    for seed in seeds:
        pair, address = draw(kind, seed), Path(folder, str(seed))
        held = local_tensors(pair.steps[0], pair.here, rank)
        options = {"layouts": pair.here, "snapshot": bool(seed % 2), "proof": True, **pair.options}
        with xrank.offer_weights(held, address, **options) as offer:
            offer.wait_for_takers(WORLD_SIZE, timeout_seconds=200)
            for step, tensors in enumerate(pair.steps, 1):
                for name, tensor in local_tensors(tensors, pair.here, rank).items():
                    held[name].copy_(tensor)
                offer.publish(step, timeout_seconds=200)
                for tensor in held.values():
                    tensor.zero_()  # copies are lent, or all engines have taken the step
                wait_for([address / f"taken-{step}-{other}" for other in range(WORLD_SIZE)])


def serve(folder: str, kind: str, seeds: list[int]) -> list[tuple[int, int]]:
    """Take two steps for each seed; return the bytes moved and moved straight of the second."""
    rank, moved = dist.get_rank(), []
    for seed in seeds:
        pair = draw(kind, seed)
        held: Any
        if kind == "plain" and seed % 3 == 2:
            held, *wanted = (DrawnEngine(seed, rank, WORLD_SIZE, pair.steps[0]) for _ in range(3))
            for engine, step in zip(wanted, pair.steps, strict=True):
                engine.load_weights(step.items())
            cuts: Any = {"loader": held.load_weights}
        else:
            wanted = [local_tensors(tensors, pair.there, rank) for tensors in pair.wanted]
            held, cuts = {name: stale(tensor) for name, tensor in wanted[0].items()}, {"layouts": pair.there}
        with (
            patch.object(targets, "_SMALLEST_RUN_NBYTES", pair.smallest_run_nbytes),
            xrank.take_weights(held, f"{folder}/{seed}", proof=True, **cuts) as weights,
        ):
            for step in (1, 2):
                report = weights.update(timeout_seconds=200)
                assert report.step == step and not report.whole and (step == 1 or report.plan_seconds == 0)
                assert facts(list_held(held)) == facts(list_held(wanted[step - 1])), seed
                assert set(report.unproven.values()) <= {OVERLAP}, (seed, report.unproven)
                assert report.digests == digests_of(pair.wanted[step - 1], report.digests), seed
                assert weights.check().step == step
                Path(folder, str(seed), f"taken-{step}-{rank}").touch()
        if pair.smallest_run_nbytes == 0 and report.direct_nbytes == report.moved_nbytes:
            assert report.moved_nbytes <= 1.001 * report.nbytes, seed
        moved.append((report.moved_nbytes, report.direct_nbytes))
    return moved


def list_held(held: Any) -> Tensors:
    """Return the tensors of a state dict or an engine."""
    return held.state_dict() if isinstance(held, DrawnEngine) else held


def digests_of(tensors: Tensors, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of whole tensors."""
    parts = [whole_of(tensors[name].cpu().contiguous()) for name in names]
    return {name: f"{int(blocks.sum()):016x}" for name, blocks in zip(names, digest_parts(parts, 1), strict=True)}


def stale(tensor: torch.Tensor) -> torch.Tensor:
    """Return other values of the same kind, sometimes with the strides of a transposed tensor."""
    if tensor.ndim == 2 and tensor.numel() % 3 == 0:
        return torch.zeros_like(tensor.t()).contiguous().t()
    return torch.zeros_like(tensor)


def wait_for(paths: list[Path], seconds: float = 200.0) -> None:
    """Wait until all files are there."""
    end = time.monotonic() + seconds
    for path in paths:
        while not path.exists():
            assert time.monotonic() < end, path
            time.sleep(0.001)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parts = SOAKED if metafunc.config.getoption("soak") else dict.fromkeys(SOAKED, 1)
    metafunc.parametrize(("kind", "part"), [(kind, part) for kind, count in parts.items() for part in range(count)])


def test_random_parts_become_others_bit_by_bit(kind: str, part: int, run_jobs: Any, tmp_path: Path) -> None:
    seeds = list(range(20 * part, 20 * part + 20)) if part else FIRST[kind]
    arguments = (str(tmp_path), kind, seeds)
    _, moved = run_jobs(
        (WORLD_SIZE, train, arguments), (WORLD_SIZE, serve, arguments), timeout_seconds=60 + 40 * len(seeds)
    )
    # Some tensors went straight to their places, so that the bytes of these are as planned.
    assert kind == "prepared" or sum(direct > 0 for rank in moved for _, direct in rank) >= 3
