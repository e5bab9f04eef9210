"""Invariants of gradients for every cut of a model: real ranks against one process that sees the whole batch."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from tests.gradients.parallel_models import (
    NUM_LAYERS,
    RATE,
    Place,
    Stage,
    cut,
    place_of,
    reference_gradients,
    run_microbatch,
    run_step,
    whole_batch,
    whole_place,
)
from tests.sampled import sampled
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    Reduction,
    check_gradients,
    finalize_model_grads,
)

pytestmark = pytest.mark.timeout(120)

_TWO: list[dict[str, int]] = [{}, {"cp": 2}, {"tp": 2}, {"pp": 2}, {"ep": 2}]
_FOUR: list[dict[str, int]] = [
    {"cp": 2},
    {"tp": 2},
    {"tp": 2, "ep": 4},
    {"pp": 2, "tp": 2},
    {"pp": 2, "ep": 2},
    {"ep": 2},
    {"cp": 2, "ep": 4},
]
_WAYS: list[dict[str, Any]] = [
    {},
    {"overlap_grad_reduce": True, "bucket_size": 64, "average_in_collective": True},
    {"overlap_grad_reduce": True, "bucket_size": 64, "use_distributed_optimizer": True},
    {"use_distributed_optimizer": True},
]


def _id(sizes: dict[str, int]) -> str:
    return "x".join(f"{axis}{length}" for axis, length in sizes.items()) or "dp"


def _wrap(place: Place, dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    model = Stage(place, dtype)
    plan = GradientPlan.from_module(model, place.views, GradientConfig(qk_layernorm=True, **options))
    return DistributedDataParallel(model, plan)


def _step(ddp: DistributedDataParallel, place: Place, num_microbatches: int = 1) -> list[Reduction]:
    return run_step(ddp, place, num_microbatches, by_tokens=ddp.config.calculate_per_token_loss)


def _assert_right(ddp: DistributedDataParallel, place: Place, whole: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare owned elements with the whole model's, by hand and by the check."""
    largest = max(float(one.abs().max()) for one in whole.values())
    wanted = {name: cut(name, one, place) for name, one in whole.items() if name in ddp.plan}
    for name, one in wanted.items():
        part = slice(*ddp.plan[name].owned)
        found = ddp.main_grad(name).flatten()[part].double()
        off = (found - one.flatten()[part].double()).abs()
        assert not off.numel() or float(off.max()) <= tolerance * largest, name
    held = {planned.name: ddp.main_grad(planned.name) for planned in ddp.plan.parameters}
    check_gradients(held, ddp.plan, reference=wanted, tolerance=10 * tolerance).raise_if_wrong()


def _assert_reduced_once(ddp: DistributedDataParallel, done: list[Reduction]) -> None:
    """Each gradient goes once through each exchange that the plan has for it, and through no other."""
    seen = Counter((one.kind, name) for one in done for name in one.names if one.kind != "router")
    for planned in ddp.plan.parameters:
        ranks = {one.kind: one.ranks for one in done if planned.name in one.names}
        expected = {"data": planned.ranks} if len(planned.ranks) > 1 else {}
        if planned.owned != (0, 0):
            expected |= {later.kind: later.ranks for later in planned.later}
        assert ranks == expected
        assert all(seen[kind, planned.name] == 1 for kind in expected)


def _assert_padding_is_zero(ddp: DistributedDataParallel) -> None:
    for bucket in ddp.plan.buckets:
        data = ddp.gradient_buffers[bucket.buffer].data.clone()
        for name in bucket.names:
            planned = ddp.plan[name]
            data[planned.offset : planned.offset + planned.numel] = 0
        assert not data[slice(*ddp.plan.shard(bucket))].any()


def _assert_every_way_is_right(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    place = place_of(rank, world_size, **sizes)
    references = {by_tokens: reference_gradients(by_tokens=by_tokens) for by_tokens in (False, True)}
    ways = [*_WAYS, {**_WAYS[2], "num_distributed_optimizer_instances": 2}] if sizes == {"cp": 2} else _WAYS
    for way, by_tokens in product(ways, (False, True)):
        if by_tokens and "overlap_grad_reduce" not in way:
            continue
        if by_tokens:
            way = {name: value for name, value in way.items() if name != "average_in_collective"}
        ddp = _wrap(place, calculate_per_token_loss=by_tokens, **way)
        assert [name.rpartition(".")[2] for name in ddp.plan.frozen] == ["frozen"] * (
            NUM_LAYERS // place.lengths["pp"]
        )  # I10: frozen, and unused, which the backward never comes to
        whole, model = references[by_tokens]
        first: dict[str, torch.Tensor] = {}
        for number, num_microbatches in enumerate((1, 1, 2)):
            done = _step(ddp, place, num_microbatches)
            _assert_right(ddp, place, whole, 1e-6)  # I1, I2, I4, I7
            _assert_reduced_once(ddp, done)  # I8
            _assert_padding_is_zero(ddp)  # I5
            owned = {
                planned.name: ddp.main_grad(planned.name).flatten()[slice(*planned.owned)].clone()
                for planned in ddp.plan.parameters
            }
            if not number:
                first = owned
                _assert_biases_are_right(ddp, model)
            elif number == 1:
                assert all(torch.equal(owned[name], first[name]) for name in owned)  # I3
        ddp.zero_grad_buffer()
        finalize_model_grads(ddp, 0 if by_tokens else None)
        for planned in ddp.plan.parameters:  # I6
            assert not ddp.main_grad(planned.name).flatten()[slice(*planned.owned)].any()


def _stepped(ddp: DistributedDataParallel, rate: float) -> None:
    """Step what this rank owns, and gather the rest."""
    with torch.no_grad():
        for name, parameter in ddp.planned_parameters.items():
            part = slice(*ddp.plan[name].owned)
            parameter.view(-1)[part] -= rate * ddp.main_grad(name).flatten()[part]
    ddp.start_param_sync(force_sync=True)


def _assert_biases_are_right(ddp: DistributedDataParallel, whole: Stage) -> None:
    for number, layer in ddp.module.layers.items():
        counts = whole.layers[number].router.local_tokens_per_expert
        assert counts.sum() == 64
        assert counts.max() > counts.min()
        assert torch.equal(layer.router.expert_bias, torch.sign(counts.mean() - counts) * RATE)
        assert not layer.router.local_tokens_per_expert.any()


@pytest.mark.ranks(2, timeout_seconds=90)
@pytest.mark.parametrize("sizes", sampled(_TWO, 3), ids=_id)
def test_two_ranks_have_the_gradients_of_one_process(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    _assert_every_way_is_right(rank, world_size, sizes)


@pytest.mark.ranks(4, timeout_seconds=90)
@pytest.mark.parametrize("sizes", sampled(_FOUR, 4), ids=_id)
def test_four_ranks_have_the_gradients_of_one_process(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    _assert_every_way_is_right(rank, world_size, sizes)


@pytest.mark.ranks(4, timeout_seconds=90)
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "tp": 2}, {"tp": 2, "ep": 2}], ids=_id)
def test_weights_are_those_of_one_process_after_steps_and_copies_are_bitwise_equal(
    rank: int, world_size: int, sizes: dict[str, int]
) -> None:
    """I12, of tables on two stages, and of all replicas beside them."""
    place = place_of(rank, world_size, **sizes)
    whole = Stage(whole_place(), torch.float64)
    for _ in range(3):
        whole.zero_grad()
        run_microbatch(whole, whole.place, whole_batch(), by_tokens=False, share=1.0)
        with torch.no_grad():
            for parameter in whole.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
    wanted = {name: cut(name, one.detach(), place) for name, one in whole.named_parameters()}
    for way in _WAYS[1:3]:
        ddp = _wrap(place, **way)
        for _ in range(3):
            _step(ddp, place)
            _stepped(ddp, 0.5)
        held = {name: one.detach().clone() for name, one in ddp.module.named_parameters()}
        for name, found in held.items():
            torch.testing.assert_close(found.double(), wanted[name], rtol=1e-5, atol=2e-6, msg=name)
        # With a plan that owns all of each parameter: the check then compares every element, bit by bit.
        plan = GradientPlan.from_module(Stage(place), place.views, GradientConfig(qk_layernorm=True))
        check_gradients(held, plan).raise_if_wrong()


@pytest.mark.ranks(2, timeout_seconds=90)
def test_buffers_of_16_bits_are_near_and_of_32_bits_exact(rank: int, world_size: int) -> None:
    place = place_of(rank, world_size)
    # Gradients of each micro-batch are in 16 bits, their sums in 32.
    exact: dict[str, torch.Tensor] = {}
    for ids in whole_batch().chunk(2 * world_size):
        model = Stage(whole_place(), torch.bfloat16)
        run_microbatch(model, model.place, ids, by_tokens=False, share=0.5)
        for name, one in model.named_parameters():
            gradient = torch.zeros_like(one) if one.grad is None else one.grad
            exact[name] = exact.get(name, 0) + gradient.float() / world_size
    whole, _ = reference_gradients()
    for way in _WAYS:
        ddp = _wrap(place, torch.bfloat16, grad_reduce_in_fp32=True, **way)
        _step(ddp, place, 2)
        _assert_right(ddp, place, exact, 1e-6)
        assert all(buffer.data.dtype == torch.float32 for buffer in ddp.gradient_buffers)
        ddp = _wrap(place, torch.bfloat16, **way)
        _step(ddp, place, 2)
        _assert_right(ddp, place, exact, 1e-2)
        _assert_right(ddp, place, whole, 3e-2)  # what 16 bits lose in the model itself comes on top
        assert all(buffer.data.dtype == torch.bfloat16 for buffer in ddp.gradient_buffers)


@pytest.mark.ranks(4, timeout_seconds=90)
@pytest.mark.parametrize("sizes", [{"pp": 2, "tp": 2}, {"ep": 2}], ids=_id)
def test_frozen_weights_are_passed_over_in_every_exchange(rank: int, world_size: int, sizes: dict[str, int]) -> None:
    """I10, where tables, norms and experts are frozen, and only a condition and a cut weight learn."""
    place = place_of(rank, world_size, **sizes)
    whole, _ = reference_gradients()
    for way in _WAYS:
        model = Stage(place)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(("condition", ".up", ".unused")))
        plan = GradientPlan.from_module(model, place.views, GradientConfig(qk_layernorm=True, **way))
        ddp = DistributedDataParallel(model, plan)
        done = _step(ddp, place, 2)
        _assert_right(ddp, place, whole, 1e-6)
        _assert_reduced_once(ddp, done)
        assert {one.kind for one in done} <= {"data", "conditional", "tensor", "router"}
        learning = {"condition", *(f"layers.{number}.{name}" for number in model.layers for name in ("up", "unused"))}
        assert {name for one in done for name in one.names if one.kind != "router"} <= learning
        assert all(parameter.grad is None for parameter in model.parameters())
