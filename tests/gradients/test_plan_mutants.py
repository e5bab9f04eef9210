"""A mistake in the plan is never silent: of one-line mutations of its code, each that makes a gradient wrong is found.

Most mutations are refused before a gradient travels, since ranks agree on their plans first. Of the others those that
matter change a gradient, and `check_gradients` finds it, with the mutated plan itself and gradients of one process.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xrank.gradients
from tests.gradients.parallel_models import (
    Place,
    Stage,
    cut,
    place_of,
    reference_gradients,
    run_microbatch,
    take_batch,
)
from tests.gradients.plan_mutants import Mutant, draw_mutants, mutated_package
from xrank.errors import RankFailedError, RankTimeoutError, XrankError
from xrank.gradients.roles import MeshPlace
from xrank.testing.rank_pool import RankPool

pytestmark = pytest.mark.timeout(600)

_NUM_MUTANTS, _NUM_PARTS, _SEED = 600, 60, 19
"""At most so many mutants, as many as the code gives; each part takes every sixtieth, so no part is empty."""
_NUM_WITH_EFFECT = 200
_RUNS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pp": 2, "tp": 2}, {"use_distributed_optimizer": True}),
    ({"tp": 2, "ep": 4}, {"average_in_collective": True}),
    ({"cp": 2}, {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}),
    ({"cp": 2, "ep": 2}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 64}),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Mutant -> its outcome, of those that this process tried."""
    return {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the parts: all in `make soak`, else one."""
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", range(_NUM_PARTS if metafunc.config.getoption("soak") else 1))


def test_no_mutation_of_a_plan_is_silently_wrong(rank_pool: RankPool, outcomes: dict[str, str], part: int) -> None:
    tried: dict[str, str] = {}
    for mutant in draw_mutants(_SEED, _NUM_MUTANTS)[part::_NUM_PARTS]:
        source = mutant.source
        # Most leave all plans as they are, or make none: ranks need not try them.
        with mutated_package(mutant, source) as package:
            outcome = _compare_plans(package)
        if outcome is None:
            outcome = _try_on_ranks(rank_pool, mutant, source)
        tried[str(mutant)] = outcome
    print(*(f"{outcome[:100]:12} {mutant}" for mutant, outcome in tried.items()), sep="\n")
    assert not [mutant for mutant, outcome in tried.items() if outcome == "silent"]
    assert _count(tried)["found"] + _count(tried)["refused"] > 0, tried
    outcomes.update(tried)


def test_enough_mutations_have_an_effect(soak: bool, outcomes: dict[str, str]) -> None:
    if not soak:
        pytest.skip("make soak tries them all")
    counts = _count(outcomes)
    print(f"{len(outcomes)} mutations: {dict(counts)}")
    assert counts["found"] + counts["refused"] >= _NUM_WITH_EFFECT, counts


def _compare_plans(package: Any) -> str | None:
    """Return what becomes of a mutant before ranks meet; None if it changes plans."""
    try:
        described = _describe_plans(package)
    except Exception:  # of changed code, of any kind: its rank ends, and the others name it
        return "refused"
    return "no effect" if described == _describe_right_plans() else None


@cache
def _describe_right_plans() -> str:
    return _describe_plans(xrank.gradients)


def _describe_plans(package: Any) -> str:
    """Return all that training reads of the plans of all ranks in all runs."""
    found: list[Any] = []
    for number, (sizes, options) in enumerate(_RUNS):
        for rank in range(4):
            model = _make_stage(number, rank)
            config = package.GradientConfig(qk_layernorm=True, **options)
            plan = package.GradientPlan.from_module(model, model.place.views, config, rank)
            found += [sizes, plan, plan.groups(), plan.data_ranks, [plan.ranks_along(axis) for axis in ("pp", "tp")]]
            found += [(buffer.prescale, buffer.place) for buffer in plan.buffers]
            found += [(plan[one.name], one.numel, plan.owners(one.name)) for one in plan.parameters]
            for bucket in plan.buckets:
                shards = [plan.shard(bucket, owner) for owner in plan.buffers[bucket.buffer].shard_ranks]
                found += [bucket.numel, plan.shard(bucket), shards]
    return repr(found)


@cache
def _make_stage(number: int, rank: int) -> Stage:
    return Stage(place_of(rank, 4, connects=False, **_RUNS[number][0]))


def _try_on_ranks(rank_pool: RankPool, mutant: Mutant, source: str) -> str:
    """Return what becomes of a mutant that changes plans, in a step of four ranks."""
    try:
        found = rank_pool.run(4, _run_mutant, mutant, source, timeout_seconds=30)
    except (RankFailedError, RankTimeoutError) as error:
        # The error of a rank, or ranks that wait for each other: neither is silent.
        return f"crashed {getattr(error, 'cause', None) or 'all wait'}"
    return next((one for one in ("silent", "found", "refused") if one in found), "no effect")


def _count(outcomes: dict[str, str]) -> Counter[str]:
    return Counter(outcome.split()[0] for outcome in outcomes.values())


def _run_mutant(mutant: Mutant, source: str) -> str:
    """Return what became of a mutant on this rank."""
    rank, outcome = dist.get_rank(), "no effect"
    with mutated_package(mutant, source) as package:
        for sizes, options in _RUNS:
            place = place_of(rank, 4, **sizes)
            whole = _find_reference()
            wanted = {name: cut(name, one, place) for name, one in whole.items()}
            model, plan = Stage(place), None
            with suppress(Exception):
                config = package.GradientConfig(qk_layernorm=True, **options)
                plan = package.GradientPlan.from_module(model, place.views, config)
            plans: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(plans, plan is not None)
            if plan is None or not all(plans):
                return "refused"  # this rank's process would end, and the others name it
            try:
                ddp = _train(package, model, plan, place)
                check = package.check_gradients(ddp, plan, reference=wanted)
            except XrankError:
                return "refused"
            is_right = _is_right(ddp, place, wanted)
            if not check.is_right:
                return "found"
            if not is_right:
                return "silent"
    return outcome


@cache
def _find_reference() -> dict[str, torch.Tensor]:
    return reference_gradients(dtype=torch.float32)[0]


def _train(package: Any, model: Stage, plan: Any, place: Place) -> Any:
    ddp = package.DistributedDataParallel(model, plan)
    first, last = take_batch(place).chunk(2)
    with ddp.no_sync():
        run_microbatch(ddp, place, first, by_tokens=False, share=0.5)
    run_microbatch(ddp, place, last, by_tokens=False, share=0.5)
    package.finalize_model_grads(ddp)
    return ddp


def _is_right(ddp: Any, place: Place, wanted: dict[str, torch.Tensor]) -> bool:
    """Return whether owned elements are right, and each element has an owner among true replicas."""
    is_right, true = True, MeshPlace(place.views, place.rank)
    learning = {name: one for name, one in ddp.module.named_parameters() if one.requires_grad}
    owned = {name: ddp.plan[name].owned if name in ddp.plan else (0, 0) for name in learning}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, owned)
    for name, parameter in learning.items():
        part = slice(*owned[name])
        off = (ddp.main_grad(name).flatten()[part] - wanted[name].flatten()[part]).abs()
        is_right &= not off.numel() or float(off.max()) < 1e-4 * float(wanted[name].abs().max() + 0.01)
        is_expert = name.endswith("experts")
        ranks = true.ranks(true.data_axes(is_expert), is_expert)
        count = torch.zeros(parameter.numel())
        for rank in ranks:
            count[slice(*everywhere[rank][name])] += 1

        is_right &= bool((count > 0).all())
    flag = torch.tensor(int(is_right))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
