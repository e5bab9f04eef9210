"""Trainers that lend their weights in another form: cast, quantized part by part, or made by a function."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import xrank
from tests.layout.test_layouts_through_files import drawn_layouts, facts, local_tensors
from tests.refit.test_pairs import WORLD_SIZE, wait_for
from xrank import Quantization
from xrank.errors import ContradictionError, RankFailedError, UsageError
from xrank.layout import LayoutMap
from xrank.layout.nests import Nest, addresses
from xrank.refit.prepared_part import _choose_form, cut_matrix_tiles

pytestmark = pytest.mark.timeout(900)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(seed: int) -> tuple[list[dict[str, torch.Tensor]], LayoutMap, LayoutMap, Any, str | None]:
    """Return the tensors of two steps, the layouts of both sides, a transform and a dtype."""
    rng = random.Random(seed)
    sizes = [3, 5, 7, 8, 12, 16] if seed % 3 else [24, 33, 48]
    shapes = {
        f"t{i}.weight": tuple(rng.choices(sizes, k=rng.choice([1, 2, 2, 2, 3]))) for i in range(rng.randint(1, 4))
    }
    dtypes = {name: rng.choice(DTYPES) for name in shapes}
    steps = []
    for step in (1, 2):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        steps.append({n: (step * torch.randn(s, generator=generator)).to(dtypes[n]) for n, s in shapes.items()})
        steps[-1]["count"] = torch.tensor([step, 2, 3])
    kind = rng.choice(["quantize", "quantize", "quantize", "function", "cast"])
    blocks: Any = rng.choice(["tensor", "channel", (4, 4), (8, 3), (5, 16)])
    quantization = Quantization(rng.choice(["fp8", "int8"]), blocks, keep=("t3*",))
    transform = {"quantize": quantization, "function": Function(quantization), "cast": None}[kind]
    dtype = rng.choice(["bf16", "fp16"]) if kind == "cast" else rng.choice([None, "bf16"])
    wanted = apply(steps[0], transform, dtype)
    while True:
        here, size = drawn_layouts(rng, {name: tuple(tensor.shape) for name, tensor in steps[0].items()}, "a")
        there, other = drawn_layouts(rng, {name: tuple(tensor.shape) for name, tensor in wanted.items()}, "b")
        if max(size, other) <= WORLD_SIZE:
            return steps, here, there, transform, dtype


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


def train(folder: str, seeds: list[int]) -> None:
    rank = dist.get_rank()
    for seed in seeds:
        steps, layouts, _, transform, dtype = draw(seed)
        held = local_tensors(steps[0], layouts, rank)
        options: Any = {"layouts": layouts, "transform": transform, "dtype": dtype, "snapshot": bool(seed % 2)}
        with xrank.offer_weights(held, f"{folder}/{seed}", **options) as offer:
            offer.wait_for_takers(WORLD_SIZE, timeout_seconds=60)
            for step, tensors in enumerate(steps, 1):
                for name, tensor in local_tensors(tensors, layouts, rank).items():
                    held[name].copy_(tensor)
                offer.publish(step, timeout_seconds=60)
                for tensor in held.values():
                    tensor.zero_()  # copies are lent, or all engines have taken the step
                wait_for([Path(folder, str(seed), f"taken-{step}-{other}") for other in range(WORLD_SIZE)])


def serve(folder: str, seeds: list[int]) -> list[tuple[int, int]]:
    """Take two steps for each seed; return the bytes held and moved."""
    rank, moved = dist.get_rank(), []
    for seed in seeds:
        steps, _, layouts, transform, dtype = draw(seed)
        wanted = [local_tensors(apply(tensors, transform, dtype), layouts, rank) for tensors in steps]
        held = {name: torch.zeros_like(tensor) for name, tensor in wanted[0].items()}
        with xrank.take_weights(held, f"{folder}/{seed}", layouts=layouts) as weights:
            for step in (1, 2):
                report = weights.update(timeout_seconds=60)
                assert report.step == step and facts(held) == facts(wanted[step - 1]), seed
                Path(folder, str(seed), f"taken-{step}-{rank}").touch()
        moved.append((report.nbytes, report.moved_nbytes))
    return moved


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the parts: one of 5 pairs, in `make soak` 10 more of 20."""
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(11 if metafunc.config.getoption("soak") else 1))


def test_parts_are_prepared_as_whole_tensors(part: int, run_jobs: Any, tmp_path: Path) -> None:
    seeds = list(range(20 * part, 20 * part + 20)) if part else [0, 1, 4, 9, 10]
    run_jobs((WORLD_SIZE, train, (str(tmp_path), seeds)), (WORLD_SIZE, serve, (str(tmp_path), seeds)))


def test_blocks_have_scales_of_their_own() -> None:
    weight = torch.tensor([[1.0, -4.0, 0.5], [2.0, 3.0, -8.0], [0.0, 0.0, 16.0]])
    made = Quantization("int8", (2, 2))("w", weight)
    assert made["w_scale_inv"].tolist() == (torch.tensor([[4.0, 8.0], [1e-10, 16.0]]) / 127).tolist()
    assert made["w"].tolist() == [[32, -127, 8], [64, 95, -127], [0, 0, 127]]
    made = Quantization("fp8")("w", weight)
    assert made["w_scale"].shape == () and made["w_scale"] == torch.tensor(16.0) / 448
    assert made["w"].float().mul(made["w_scale"]).allclose(weight, rtol=0.07)
    assert Quantization("fp8")("norm.weight", weight) == {"norm.weight": weight}


@pytest.mark.parametrize(
    ("held", "options", "error", "match"),
    [
        ({"w": torch.ones(2, 2)}, {"transform": Quantization(scale_suffix="")}, UsageError, "two tensors would have"),
        ({"w": torch.ones(2, 2), "w_scale": torch.ones(1)}, {"transform": Quantization()}, UsageError, "w_scale: two"),
        ({"w": torch.ones(2, 2)}, {"dtype": "int3"}, UsageError, "dtype"),
        ({"w": torch.ones(2, 2)}, {"transform": lambda name, tensor: 3}, UsageError, "transform of w returned int"),
    ],
)
def test_transforms_that_cannot_be_offered(tmp_path: Path, held: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        xrank.offer_weights(held, tmp_path, **options)
    assert not (tmp_path / "trainer.json").exists()


def test_there_are_few_quantizations() -> None:
    for arguments in (("fp4",), ("fp8", "row"), ("int8", (0, 4)), ("int8", (4,))):
        with pytest.raises(UsageError, match="there is no quantization"):
            Quantization(*arguments)  # type: ignore[arg-type]


def test_values_that_are_not_finite_are_refused_and_the_next_step_is_right(tmp_path: Path) -> None:
    held, quantize = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}, Quantization("int8", "channel")
    target = {name: torch.zeros_like(one) for name, one in apply(held, quantize, None).items()}
    with (
        xrank.offer_weights(held, tmp_path, transform=quantize, snapshot=True) as offer,
        xrank.take_weights(target, tmp_path) as weights,
    ):
        held["v"][2, 1] = float("nan")
        with pytest.raises(ContradictionError, match="v has values that are not finite"):
            offer.publish(1)
        with pytest.raises(RankFailedError, match="v has values that are not finite"):
            weights.update(timeout_seconds=5)
        assert weights.step is None and not target["w"].any()
        held["v"][2, 1] = 1
        offer.publish(2)
        assert weights.update(timeout_seconds=5).step == 2
    assert facts(target) == facts(apply(held, quantize, None))


def test_an_engine_without_scales_of_its_own_is_refused(tmp_path: Path) -> None:
    """fp8 does not become bf16: the scales would be lost."""
    target = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    with (
        xrank.offer_weights({"w": torch.ones(4, 4)}, tmp_path, transform=Quantization(), snapshot=True) as offer,
        xrank.take_weights(target, tmp_path) as weights,
    ):
        offer.publish(1)
        with pytest.raises(UsageError, match="w: F8_E4M3 of the source does not become BF16"):
            weights.update(timeout_seconds=5)


def test_a_fused_tensor_of_two_kinds_is_refused() -> None:
    wanted: set[tuple[str | None, str]] = {("F8_E4M3", "q.weight"), ("", "norm.weight")}
    with pytest.raises(UsageError, match=r"q\.weight cannot be quantized part by part"):
        _choose_form(wanted, Quantization())


@pytest.mark.parametrize("seed", range(200))
def test_tiles_of_a_nest_are_its_elements(seed: int) -> None:
    rng = random.Random(seed)
    loops, xs = [], 1
    for _ in range(rng.randint(0, 3)):
        loops.append((rng.randint(2, 5), xs, rng.choice([1, 1, 2, 3, 4, 6, 12, 24])))
        xs *= loops[-1][0]
    nest, columns = Nest(rng.randint(0, 3), rng.randint(0, 9), tuple(reversed(loops))), rng.choice([1, 4, 6, 12])
    found = []
    for tile in cut_matrix_tiles(nest.x, nest.y, nest.loops, columns):
        rows, across = np.arange(tile.num_rows), np.arange(tile.num_columns)
        x = tile.x + rows[:, None] * tile.x_row + across * tile.x_column
        assert (tile.column + across * tile.column_step < columns).all()
        y = (tile.row + rows[:, None] * tile.row_step) * columns + tile.column + across * tile.column_step
        found += list(zip(x.ravel().tolist(), y.ravel().tolist(), strict=True))
    assert sorted(found) == sorted(addresses(nest))
