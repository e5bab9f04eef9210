"""A check names each wrong gradient with its ranks and the error: for plain dicts from any framework."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.wires import RecordingWire, batch_of, loss_of, make_module, mean_gradients
from xrank.errors import GradientError
from xrank.gradients import GradientCheck, GradientConfig, GradientPlan, check_gradients, mark
from xrank.gradients.checks import GivenGradients, _digest, take_slices
from xrank.layout import DeviceMesh
from xrank.layout.mesh import megatron_views

pytestmark = pytest.mark.timeout(90)


class Mixed(nn.Module):
    """A dense weight, a copy along tp, an expert and a table."""

    def __init__(self, *, table: str = "") -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(4, 3))
        self.norm = nn.Parameter(torch.zeros(5))
        self.expert = nn.Parameter(torch.zeros(6))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.norm.sequence_parallel = True
        self.expert.allreduce = False
        if table:
            self.register_parameter(table, nn.Parameter(torch.zeros(3, 2)))
            mark(self.get_parameter(table), tied="word")


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a gradient for each parameter, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(one.shape, generator=generator)
        for name, one in module.named_parameters()
        if one.requires_grad
    }


def is_same_everywhere(check: GradientCheck) -> GradientCheck:
    """Return a check whose findings are the same on all ranks."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, check.findings)
    assert texts == [texts[0]] * len(texts)
    return check


def find(check: GradientCheck) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return what a check found, without words."""
    return [(one.kind, one.name, one.ranks) for one in is_same_everywhere(check).findings]


@pytest.mark.ranks(4, timeout_seconds=60)
def test_replicas_that_differ_are_named_with_their_ranks_and_by_how_much(rank: int) -> None:
    module = Mixed()
    plan = GradientPlan.from_module(module, megatron_views(4, tp=2, ep=2, etp=1))  # dp 2 x tp 2, edp 2 x ep 2
    right = gradients_of(module)
    check = is_same_everywhere(check_gradients(right, plan, reference=right))
    assert check.is_right and check and check.num_checked == 3
    assert str(check) == f"3 gradients of rank {rank} are right"
    check.raise_if_wrong()
    own = {name: one.clone() for name, one in right.items()}
    own["dense"] += rank % 2  # another part along tp: it is not marked as a copy
    own["expert"] += rank % 2
    assert check_gradients(own, plan)
    assert plan["expert"].ranks in ((0, 2), (1, 3))
    if rank == 3:
        own["dense"][2, 1] += 0.5
        own["expert"][4] -= 0.25
        own["norm"][0] += 1
    check = check_gradients(own, plan)
    assert find(check) == [
        ("replicas", "dense", (1, 3)),
        ("replicas", "expert", (1, 3)),
        ("replicas", "norm", (1, 3)),
        ("replicas", "norm", (2, 3)),
    ]
    first = check.findings[0]
    assert first.difference == pytest.approx(0.5, rel=1e-6)
    assert str(first) == (
        "dense: on ranks 1, 3 copies along dp are not equal, by up to 0.5 at element 7 of those that are compared: "
        "each rank has a different value"
    )
    with pytest.raises(GradientError, match="dense: on ranks 1, 3") as caught:
        check.raise_if_wrong()
    assert len(caught.value.__notes__) == 4  # a next step, and three findings more


@pytest.mark.ranks(4, timeout_seconds=60)
def test_the_odd_one_of_many_replicas_is_named_and_zeros_have_no_sign(rank: int) -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2)})
    plan = GradientPlan.from_module(module, DeviceMesh((4,), ("dp",)))
    own: dict[str, Any] = {"module.module.a.weight": torch.zeros(2, 2), "module.a.bias": None}
    if rank == 1:
        own["module.module.a.weight"] = -torch.zeros(2, 2)
    assert find(check_gradients(own, plan)) == []
    if rank == 2:
        own["module.module.a.weight"][1, 1] = 2.0
        own["module.a.bias"] = torch.zeros(2)
    check = check_gradients(own, plan)
    assert find(check) == [("replicas", "a.bias", (0, 1, 2, 3)), ("replicas", "a.weight", (0, 1, 2, 3))]
    assert "ranks 0-1, 3 have one and the same, rank 2 another (2 of torch.float32" in str(check.findings[0])
    assert "at element 3 of those that are compared" in str(check.findings[1])
    for one in (torch.bfloat16, torch.complex64):
        plan = GradientPlan.from_module(nn.Linear(2, 2, bias=False, dtype=one), DeviceMesh((4,), ("dp",)))
        value = torch.arange(4).view(2, 2).to(one)
        assert check_gradients({"weight": value}, plan)
        assert check_gradients({"weight": value + (rank == 0)}, plan).findings[0].difference == 1


_CASES = [
    ("dense", 2.0, "2 times", "dp"),
    ("dense", 0.5, "1/2 of", "dp"),
    ("dense", 3.0, "3 times", "tp"),
    ("dense", 6.0, "6 times", "dp x tp"),
    ("expert", 2.0, "2 times", "ep"),
    ("dense", 1.7, "1.7 times", "not the length of an axis"),
]


def test_a_missing_factor_is_named_by_its_axis() -> None:
    """The check of one rank alone over a recorded wire: 6 ranks as dp 2 x tp 3."""
    module = Mixed()
    plan = GradientPlan.from_module(module, megatron_views(6, tp=3, ep=2, etp=1), rank=0)
    reference = gradients_of(module)
    for name, factor, times, axes in _CASES:
        for dtype in (torch.float32, torch.bfloat16):
            own = {one: value.to(dtype) for one, value in reference.items()}
            own[name] = (reference[name] * factor).to(dtype)
            check = check_gradients(own, plan, reference=reference, wire=RecordingWire())
            (finding,) = check.findings
            assert (finding.kind, finding.name) == ("scale", name), str(check)
            assert finding.factor == pytest.approx(factor, rel=1e-2)
            if dtype == torch.float32:
                assert f"it is {times} that of one process" in finding.message
            assert axes in finding.message
    # Divided by its replicas, too.
    own = {**reference, "expert": reference["expert"] / 3}
    (finding,) = check_gradients(own, plan, reference=reference, wire=RecordingWire()).findings
    assert "as many as ranks along edp: it was divided once too often" in finding.message


def test_a_quotient_and_a_factor_of_all_gradients_are_named_once() -> None:
    """The check of one rank alone, of 6 as dp 2 x tp 3 and edp 3 x ep 2."""
    module = Mixed()
    module.other = nn.Parameter(torch.zeros(3))
    module.other.allreduce = False
    plan = GradientPlan.from_module(module, megatron_views(6, tp=3, ep=2, etp=1), rank=0)
    reference = {**gradients_of(module), "dense": torch.zeros(4, 3)}  # zero, so that no factor shows in it
    experts = ("expert", "other")
    for factor, names, title, text in (
        (2 / 3, ("expert",), "expert", "1/1.5 of that of one process, which is dp/edp"),
        (3 / 2, experts, "all gradients of experts", "1.5 times that of one process, which is edp/dp"),
        (2.0, experts, "all gradients of experts", "as many as ranks along ep:"),
        (0.5, ("norm", *experts), "all gradients", "1/2 of that of one process, as many as ranks along dp:"),
        (5.0, ("norm", *experts), "all gradients", "check the numbers of micro-batches and tokens"),
    ):
        own = {name: one * (factor if name in names else 1) for name, one in reference.items()}
        (finding,) = check_gradients(own, plan, reference=reference, wire=RecordingWire()).findings
        assert (finding.kind, finding.name) == ("scale", title)
        assert finding.factor == pytest.approx(factor)
        assert text in finding.message


def test_a_reference_that_is_not_finite_is_a_finding_and_excuses_nothing() -> None:
    module = Mixed()
    plan = GradientPlan.from_module(module, megatron_views(1))
    own = gradients_of(module)
    for value in (float("nan"), float("inf")):
        reference = {name: one.clone() for name, one in own.items()}
        reference["dense"][1, 2] = value
        reference["expert"] += 1
        check = check_gradients(own, plan, reference=reference, wire=RecordingWire())
        assert [(one.kind, one.name) for one in check.findings] == [("nonfinite", "dense"), ("reference", "expert")]
        assert f"the reference is {value} at element [1, 2]" in str(check)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_the_reference_shows_replicas_that_agree_and_are_wrong(rank: int) -> None:
    module = make_module()
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)))
    whole = mean_gradients(make_module(), batch_of())
    assert check_gradients(whole, plan, reference=whole)
    half = mean_gradients(make_module(), batch_of().chunk(2)[0])  # rank 1's part was lost, on both
    check = check_gradients(half, plan, reference=whole)
    assert {(one.kind, one.ranks) for one in is_same_everywhere(check).findings} == {("reference", (0, 1))}
    assert "it differs from that of one process by up to" in str(check)
    zero = {**whole, "norm.bias": torch.zeros(8)}
    assert check_gradients(zero, plan, reference=whole).findings[0].message.startswith("it is zero")
    noisy = {name: one * (1 + 1e-6) for name, one in whole.items()}
    assert check_gradients(noisy, plan, reference=whole)
    assert not check_gradients(noisy, plan, reference=whole, tolerance=1e-8)
    none = {**whole, "extra.weight": None}
    assert find(check_gradients(none, plan, reference=whole)) == [("reference", "extra.weight", (0, 1))]
    assert check_gradients(none, plan, reference=none)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_elements_without_an_owner_are_a_finding(rank: int) -> None:
    module = nn.Linear(8, 32, bias=False)
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), GradientConfig(use_distributed_optimizer=True))
    own = mean_gradients(module, batch_of())
    assert check_gradients(own, plan, reference=own)
    if rank == 1:
        start, stop = plan["weight"].owned
        plan = replace(plan, parameters=(replace(plan["weight"], owned=(start + 3, stop)),))
    (finding,) = is_same_everywhere(check_gradients(own, plan, reference=own)).findings
    assert (finding.kind, finding.name, finding.ranks) == ("missing", "weight", (0, 1))
    assert "no rank has element 128 after the exchange" in finding.message


@pytest.mark.ranks(4, timeout_seconds=60)
def test_a_missing_sum_is_named_by_its_axes(rank: int) -> None:
    module, mesh = make_module(), DeviceMesh((2, 2), ("dp", "tp"))
    plan = GradientPlan.from_module(module, mesh)
    whole = mean_gradients(make_module(), batch_of())
    # A copy along tp whose gradient every rank has a part of, and one that was never averaged along dp.
    share = torch.rand(8, generator=torch.Generator().manual_seed(3))
    own = {**whole, "norm.weight": whole["norm.weight"] * (share if rank % 2 else 1 - share)}
    own["norm.bias"] = whole["norm.bias"] * (2 * share if rank < 2 else 2 - 2 * share)
    messages = {one.name: one.message for one in check_gradients(own, plan, reference=whole).findings}
    assert "its sum along tp is right: that sum is missing" in messages["norm.weight"]
    assert "its mean along dp is right: that mean is missing" in messages["norm.bias"]


@pytest.mark.ranks(2, timeout_seconds=60)
def test_tied_tables_of_stages_are_compared_under_the_name_of_the_first(rank: int) -> None:
    module = Mixed(table="word" if rank == 0 else "head")
    plan = GradientPlan.from_module(module, megatron_views(2, pp=2, tp=1, ep=1))
    own = gradients_of(module)
    own["dense"] += rank  # stages have weights of their own
    table = "word" if rank == 0 else "head"
    assert check_gradients(own, plan)
    own[table] += rank
    check = check_gradients(own, plan)
    assert find(check) == [("tied", "word", (0, 1))]
    assert "copies along pp are not equal, by up to 1 at" in str(check)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_missing_unknown_and_nonfinite_gradients_are_findings_on_all_ranks(rank: int) -> None:
    module = Mixed()
    plan = GradientPlan.from_module(module, megatron_views(2, tp=1, ep=1))
    own = gradients_of(module)
    own["frozen"] = torch.full((2,), float("nan"))
    if rank == 1:
        del own["norm"]
        own["dense"] = torch.zeros(3, 4)
        own["expert"][2] = float("inf")
        own["other"] = torch.zeros(1)
    check = check_gradients(own, plan)
    assert find(check) == [
        ("nonfinite", "expert", (1,)),
        ("missing", "norm", (1,)),
        ("unknown", "other", (1,)),
        ("shape", "dense", (1,)),
        ("replicas", "expert", (0, 1)),
    ]
    assert "it is inf at element [2], in bucket" in str(check)
    reference = gradients_of(module)
    del reference["expert"]
    assert find(check_gradients(gradients_of(module), plan, reference=reference)) == [("missing", "expert", (0, 1))]


@pytest.mark.ranks(4, timeout_seconds=60)
def test_with_shards_only_owned_elements_count(rank: int) -> None:
    module, mesh = make_module(), DeviceMesh((2, 2), ("dp", "tp"))
    mark(module.layers[0].weight, over_tp="sum")
    plan = GradientPlan.from_module(module, mesh, GradientConfig(use_distributed_optimizer=True))
    whole = mean_gradients(make_module(), batch_of())
    own = {name: torch.full_like(one, 7.0 + rank) for name, one in whole.items()}
    for name, one in own.items():
        part = slice(*plan[name].owned)
        one.view(-1)[part] = whole[name].view(-1)[part]
    assert check_gradients(own, plan, reference=whole)
    at = next(name for name in own if plan[name].owned[1] > plan[name].owned[0])
    own[at].view(-1)[plan[at].owned[0]] += 1
    assert not check_gradients(own, plan, reference=whole)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_gradients_of_torchs_fsdp_are_compared_with_whole_ones(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = mean_gradients(make_module(), batch_of())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = make_module()
    fully_shard(module, mesh=mesh)
    loss_of(module(batch_of().chunk(2)[rank])).backward()
    plan = GradientPlan.from_module(module, mesh)
    own = {name: one.grad for name, one in module.named_parameters()}
    assert check_gradients(own, plan, reference=whole)
    doubled = {name: one * 2 if name == "norm.weight" else one for name, one in own.items()}
    check = check_gradients(doubled, plan, reference=whole)
    assert find(check) == [("scale", "norm.weight", (0, 1))]
    assert "as many as ranks along dp: a division by it is missing" in str(check)


@pytest.mark.parametrize("num_instances", [None, 1, 2])
def test_slices_of_another_wrapper_need_no_options_of_the_plan(num_instances: int | None) -> None:
    """An option that the plan has for its own collectives may need a distributed optimizer, which the other lacks."""
    config = GradientConfig(use_distributed_optimizer=True, reduce_scatter_with_fp32_accumulation=True)
    plan = GradientPlan.from_module(nn.Linear(4, 4), DeviceMesh((4,), ("dp",)), config, rank=0)
    given = GivenGradients({}, {"weight": (0, 8)}, num_instances)
    taken = take_slices(plan, given)
    assert taken["weight"].owned == (0, 8)
    assert taken.config.use_distributed_optimizer == (num_instances is not None)


def test_digests_are_of_the_values_in_any_strides_conjugated_or_negated() -> None:
    base, value = torch.arange(6.0), torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (torch.tensor(4.0), base[4:5], base[4::2], base.view(2, 3)[1:, 1::2]):
        assert _digest(tensor) == _digest(torch.tensor([4.0])) != _digest(torch.tensor([5.0]))
    assert _digest(base[::2]) == _digest(torch.tensor([0.0, 2.0, 4.0]))
    assert _digest(value.conj()) == _digest(torch.tensor([1 - 2j, 3 + 4j])) != _digest(value)
    assert _digest(value.conj().imag) == _digest(torch.tensor([-2.0, 4.0]))
