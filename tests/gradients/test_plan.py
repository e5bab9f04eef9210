import pickle
import time
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.gradients.planned_modules import KINDS, MarkedParameter, module_of
from tests.sampled import count_of
from xrank.errors import LayoutError, UsageError
from xrank.gradients import GradientConfig, GradientPlan, mark
from xrank.gradients.distributed_data_parallel import agreement_lines, buffer_lines, check_lines
from xrank.gradients.roles import check_shard_order
from xrank.layout import DeviceMesh, MeshViews
from xrank.layout.mesh import megatron_views

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def meshes(draw) -> MeshViews:
    """Every way to lay out up to 16 ranks that Megatron knows, ranks in any order."""
    tp, cp, pp, dp = (draw(st.sampled_from([1, 2, 3])) for _ in range(4))
    world_size = tp * cp * pp * dp
    if world_size > 16:
        pp = cp = 1
        world_size = tp * dp
    whole = world_size // pp
    ep, etp = draw(st.sampled_from([(e, t) for e, t in product(range(1, whole + 1), repeat=2) if whole % (e * t) == 0]))
    ranks = draw(st.none() | st.permutations(range(world_size)))
    return megatron_views(world_size, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, ranks=ranks)


configs = st.builds(
    GradientConfig,
    grad_reduce_in_fp32=st.booleans(),
    overlap_grad_reduce=st.booleans(),
    use_distributed_optimizer=st.booleans(),
    bucket_size=st.none() | st.integers(1, 600),
    average_in_collective=st.booleans(),
)
modules = st.lists(
    st.builds(MarkedParameter, st.sampled_from(KINDS), st.integers(0, 300), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=10,
)


def plans_of(told, views, config) -> dict[int, GradientPlan]:
    """Return the plan of every rank; none where all of them refuse to cut shards."""
    try:
        check_shard_order(views)
    except LayoutError:
        if config.use_distributed_optimizer:
            for rank in range(views.main.size):
                with pytest.raises(LayoutError, match="descend along"):
                    GradientPlan.from_module(module_of(told, views, rank), views, config, rank)
            return {}
    return {
        rank: GradientPlan.from_module(module_of(told, views, rank), views, config, rank)
        for rank in range(views.main.size)
    }


@settings(max_examples=count_of(40))
@given(meshes(), modules, configs)
def test_all_ranks_agree(views, told, config):
    plans = plans_of(told, views, config)
    lines = {rank: agreement_lines(plan) for rank, plan in plans.items()}
    for rank, plan in plans.items():
        needed = {later.ranks for parameter in plan.parameters for later in parameter.later}
        needed |= {ranks for b in plan.buffers for ranks in (b.ranks, b.shard_ranks, b.across_ranks) if len(ranks) > 1}
        assert needed <= set(plan.groups())
        for ranks in plan.groups():
            assert rank in ranks and list(ranks) == sorted(ranks)
            # All ranks of an exchange exchange with the same ranks, in the same layout.
            if rank == ranks[0]:
                assert all(ranks in plans[other].groups() for other in ranks)
                check_lines({other: lines[other].get(ranks, ()) for other in ranks})
        for buffer in plan.buffers:
            own = {parameter.name for parameter in plan.parameters if parameter.buffer == buffer.id}
            for other in buffer.ranks:
                theirs = plans[other].buffers[plans[other][min(own)].buffer]
                assert buffer_lines(plans[other], theirs) == buffer_lines(plan, buffer)


@settings(max_examples=count_of(40))
@given(meshes(), modules, configs)
def test_buckets_leave_in_the_order_of_a_backward(views, told, config):
    """I11 over all buffers of a rank, and ids."""
    for rank, plan in plans_of(told, views, config).items():
        assert [bucket.id for bucket in plan.buckets] == list(range(len(plan.buckets)))
        place = {parameter.name: number for number, parameter in enumerate(plan.parameters)}
        filled = [min(place[name] for name in bucket.names) for bucket in plan.buckets]
        assert filled == sorted(filled, reverse=True)
        assert sorted(name for bucket in plan.buckets for name in bucket.names) == sorted(place)
        for buffer in plan.buffers:
            buckets = [plan.buckets[number] for number in buffer.buckets]
            assert [bucket.start for bucket in buckets] == [0, *(bucket.stop for bucket in buckets[:-1])]
            assert buckets[-1].stop == buffer.numel
            order = [place[name] for bucket in buckets for name in bucket.names]
            assert order == sorted(order, reverse=True)
            taken = torch.zeros(buffer.numel)
            for bucket in buckets:
                for name in bucket.names:
                    parameter = plan[name]
                    assert (parameter.buffer, parameter.bucket) == (buffer.id, bucket.id)
                    assert parameter.grad_dtype == buffer.grad_dtype and parameter.ranks == buffer.ranks
                    assert bucket.start <= parameter.offset <= parameter.offset + parameter.numel <= bucket.stop
                    taken[parameter.offset : parameter.offset + parameter.numel] += 1
                if config.use_distributed_optimizer:
                    shards = [plan.shard(bucket, other) for other in buffer.shard_ranks]
                    assert len({stop - start for start, stop in shards}) == 1
                    assert plan.shard(bucket) == shards[buffer.shard_ranks.index(rank)]
                else:
                    assert plan.shard(bucket) == (bucket.start, bucket.stop)
            assert not (taken > 1).any()
            assert taken.sum() == sum(parameter.numel for parameter in plan.parameters if parameter.buffer == buffer.id)


@settings(max_examples=count_of(40))
@given(meshes(), modules, configs)
def test_every_element_is_added_up_once_over_all_that_saw_data(views, told, config):
    """I8 as arithmetic: each rank's gradient counts 1 for an element, so the plan's result is known."""
    plans = plans_of(told, views, config)
    dense, expert = views.main, views.view("expert")
    num_data = dense.axis_length("dp") * dense.axis_length("cp")
    for rank, plan in plans.items():
        for parameter in plan.parameters:
            kind = parameter.name.partition("_")[0]
            group = next(
                ranks
                for ranks in (expert.groups("edp") if kind == "expert" else dense.groups("dp", "cp"))
                if rank in ranks
            )
            assert parameter.ranks == tuple(sorted(group))
            assert parameter.divisor == num_data
            averaged = len(group) if parameter.operation == "average" else 1
            weight = Fraction(plan.buffers[parameter.buffer].prescale).limit_denominator(64) * len(group) / averaged
            assert weight == Fraction(len(group), num_data)

            expected = {
                "copy": [("tensor", "sum", dense.groups("tp"))],
                "average": [("tensor", "average", dense.groups("tp"))],
                "conditional": [("conditional", "sum", dense.groups("pp"))],
                "word": [("word", "sum", [(g[0], g[-1]) for g in dense.groups("pp")])],
                "position": [("position", "sum", [(g[0], g[-1]) for g in dense.groups("pp")])],
            }.get(kind, [])
            wanted = [
                (what, operation, tuple(sorted(ranks)))
                for what, operation, groups in expected
                for ranks in groups
                if rank in ranks and len(set(ranks)) > 1
            ]
            assert [(later.kind, later.operation, later.ranks) for later in parameter.later] == wanted


@settings(max_examples=count_of(40))
@given(meshes(), modules, configs)
def test_owned_parts_are_the_parameter(views, told, config):
    plans = plans_of(told, views, config)
    for plan in plans.values():
        for parameter in plan.parameters:
            owners = plan.owners(parameter.name)
            parts = [plans[owner][parameter.name].owned for owner in owners]
            if not config.use_distributed_optimizer:
                assert parts == [(0, parameter.numel)] * len(plan.buffers[parameter.buffer].ranks)
                continue
            if parameter.numel:
                assert parts[0][0] == 0 and parts[-1][1] == parameter.numel
                assert all(a[1] == b[0] for a, b in pairwise(parts))
                assert all(start < stop for start, stop in parts)
            others = set(plan.buffers[parameter.buffer].shard_ranks) - set(owners)
            assert all(plans[other][parameter.name].owned == (0, 0) for other in others)
            if any(later.kind in ("word", "position", "conditional") for later in parameter.later):
                assert plan.buckets[parameter.bucket].names == (parameter.name,)


def two_layers() -> nn.Module:
    module = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "norm": nn.LayerNorm(4)})
    module.norm = module["norm"]
    module["layers"][0].bias.requires_grad = False
    return module


def test_a_plan_is_a_value():
    views = megatron_views(8, tp=2, pp=2)
    plan = GradientPlan.from_module(two_layers(), views, rank=5)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan == GradientPlan.from_module(two_layers(), views, GradientConfig(), 5)
    assert again["norm.weight"] == plan["norm.weight"]
    assert plan != GradientPlan.from_module(two_layers(), views, rank=7)
    assert [parameter.name for parameter in plan.parameters] == [
        "layers.0.weight",
        "layers.1.weight",
        "layers.1.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert plan.frozen == ("layers.0.bias",)
    assert plan.buckets[0].names[0] == "norm.bias"
    assert plan.ranks_along("tp") == (4, 5) and plan.ranks_along("pp") == (1, 5) and plan.ranks_along("cp") == (5,)
    assert plan.data_ranks == (5, 7)


@pytest.mark.slow
def test_every_rank_of_4096_is_planned_in_seconds_without_a_process():
    views = megatron_views(4096, tp=8, cp=2, ep=16, pp=4, etp=1)
    module = two_layers()
    module["layers"][1].weight.allreduce = False
    module["norm"].weight.sequence_parallel = True
    config = GradientConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=10)
    started = time.process_time()
    plans = [GradientPlan.from_module(module, views, config, rank) for rank in range(4096)]
    assert time.process_time() - started < 25
    sizes = {(len(plan["layers.0.weight"].ranks), len(plan["layers.1.weight"].ranks)) for plan in plans}
    assert sizes == {(128, 64)}
    assert {plan["layers.1.weight"].divisor for plan in plans} == {128}
    assert len({plan["layers.0.weight"].ranks for plan in plans}) == 4096 // 128
    owned = sum(stop - start for plan in plans for start, stop in [plan["norm.weight"].owned])
    assert owned == 4 * 4096 // 128


def test_a_parameter_of_two_names_is_planned_once():
    module = two_layers()
    module["layers"][1].weight = module["layers"][0].weight
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), rank=0)
    assert plan["layers.1.weight"] is plan["layers.0.weight"]
    assert plan["layers.0.weight"].aliases == ("layers.1.weight",) and "layers.1.weight" in plan
    assert "It is also called layers.1.weight." in plan.explain("layers.1.weight")
    assert len(plan.parameters) == 4


def test_instances_of_the_distributed_optimizer():
    config = GradientConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    for rank in range(4):
        plan = GradientPlan.from_module(two_layers(), DeviceMesh((4,), ("dp",)), config, rank)
        (buffer,) = plan.buffers
        assert buffer.ranks == (0, 1, 2, 3) and buffer.divisor == 4
        assert buffer.shard_ranks == ((0, 1), (0, 1), (2, 3), (2, 3))[rank]
        assert buffer.across_ranks == ((0, 2), (1, 3), (0, 2), (1, 3))[rank]
        assert buffer.place == rank % 2
        assert set(plan.groups()) == {(0, 1, 2, 3), buffer.shard_ranks, buffer.across_ranks}
    with pytest.raises(UsageError, match=r"3 replicas, .* cannot be 2 instances"):
        GradientPlan.from_module(two_layers(), DeviceMesh((3,), ("dp",)), config, 0)


def test_copies_along_tp_have_buffers_of_their_own():
    """Else uneven tensor parallelism would give the ranks of one tp group other shards of the same norm."""
    views = megatron_views(4, tp=2)
    config = GradientConfig(use_distributed_optimizer=True)
    told = [MarkedParameter("cut", 1000), MarkedParameter("copy", 300), MarkedParameter("replica", 10)]
    first, second = (GradientPlan.from_module(module_of(told, views, rank), views, config, rank) for rank in (0, 1))
    assert first["cut_0"].numel == second["cut_0"].numel + 1
    assert first["copy_1"].owned == second["copy_1"].owned and first["copy_1"].offset == second["copy_1"].offset
    assert first["copy_1"].buffer != first["replica_2"].buffer == first["cut_0"].buffer
    # Where every rank keeps all, they may lie together, as Megatron's do.
    assert len(GradientPlan.from_module(module_of(told, views, 0), views, rank=0).buffers) == 1


def test_default_buckets_of_experts_follow_experts_alone():
    """Replicas of an expert are on ranks along tp, which hold other numbers of elements of dense weights."""
    views = megatron_views(2, tp=2, etp=1)
    config = GradientConfig(overlap_grad_reduce=True)
    plans = []
    for rank, rows in enumerate((200, 8)):
        module = nn.Module()
        module.dense = nn.Parameter(torch.empty(rows, 1_000_000, device="meta"))
        module.experts = nn.ParameterList(torch.empty(1_500_000, device="meta") for _ in range(6))
        for expert in module.experts:
            expert.allreduce = False
        plans.append(GradientPlan.from_module(module, views, config, rank))
    lines = [agreement_lines(plan)[0, 1] for plan in plans]
    assert lines[0] == lines[1]
    # 9 million elements make buckets of an eighth.
    assert [len(bucket.names) for bucket in plans[0].buckets] == [1] * 7


@pytest.mark.parametrize("kind", ["word", "position", "conditional"])
def test_parameters_shared_by_stages_have_buckets_of_their_own(kind):
    views, told = (
        megatron_views(4, pp=2),
        [MarkedParameter("replica", 7), MarkedParameter(kind, 5), MarkedParameter("replica", 3)],
    )
    for sharded in (False, True):
        config = GradientConfig(use_distributed_optimizer=sharded)
        plan = GradientPlan.from_module(module_of(told, views, 3), views, config, 3)
        assert (plan.buckets[plan[f"{kind}_1"].bucket].names == (f"{kind}_1",)) == sharded
    # One stage shares with none.
    plan = GradientPlan.from_module(module_of(told, megatron_views(4), 3), megatron_views(4), config, 3)
    assert len(plan.buckets) == 1 and not plan[f"{kind}_1"].later


def test_the_first_and_the_last_of_many_stages_are_a_group():
    views, told = megatron_views(3, pp=3), [MarkedParameter("word", 5)]
    groups = GradientPlan.from_module(module_of(told, views, 2), views, rank=2).groups()
    assert groups == ((0, 2), (0, 1, 2))
    assert GradientPlan.from_module(module_of(told, views, 1), views, rank=1).groups() == ((0, 1, 2),)


def test_losses_over_tokens_are_not_divided():
    told, views = [MarkedParameter("replica", 4), MarkedParameter("expert", 4)], megatron_views(4, ep=2)
    plan = GradientPlan.from_module(
        module_of(told, views, 1), views, GradientConfig(calculate_per_token_loss=True), rank=1
    )
    assert {(p.divisor, p.prescale, p.operation) for p in plan.buffers} == {(1, 1.0, "sum")}
    averaged = GradientConfig(average_in_collective=True)
    plan = GradientPlan.from_module(module_of(told, views, 1), views, averaged, rank=1)
    # An expert's two replicas are averaged: halved first, they come out as a quarter of the sum.
    assert [(p.divisor, p.prescale, p.operation) for p in plan.buffers] == [(4, 1.0, "average"), (4, 0.5, "average")]


@pytest.mark.parametrize(
    ("dtype", "in_fp32", "grad_dtype"),
    [
        (torch.bfloat16, False, torch.bfloat16),
        (torch.bfloat16, True, torch.float32),
        (torch.float64, True, torch.float32),
        (torch.float32, False, torch.float32),
    ],
)
def test_the_dtype_of_gradients(dtype, in_fp32, grad_dtype):
    config = GradientConfig(grad_reduce_in_fp32=in_fp32)
    plan = GradientPlan.from_module(nn.Linear(2, 2, dtype=dtype), DeviceMesh((2,), ("dp",)), config, 0)
    assert (plan["weight"].dtype, plan["weight"].grad_dtype) == (dtype, grad_dtype)
    assert plan.buffers[0].grad_dtype == grad_dtype


# Refusals


def test_a_tied_table_on_a_stage_in_between():
    views = megatron_views(4, pp=4)
    module = nn.Linear(2, 2, bias=False)
    module.weight.shared_embedding = True
    with pytest.raises(UsageError, match="weight: this stage is not one of those that hold the word table") as caught:
        GradientPlan.from_module(module, views, rank=2)
    assert "stage 2 of 4" in caught.value.got and "stages=" in caught.value.next_step
    mark(module.weight, tied="word", stages=(0, 2, 3))
    assert GradientPlan.from_module(module, views, rank=2)["weight"].later[0].ranks == (0, 2, 3)
    mark(module.weight, tied="word", stages=(2, 4))
    with pytest.raises(UsageError, match="not one of those"):
        GradientPlan.from_module(module, views, rank=2)


def test_an_expert_without_experts_in_the_mesh():
    module = nn.Linear(2, 2)
    module.weight.allreduce = False
    with pytest.raises(UsageError, match=r"weight: it belongs to an expert, .* has no ep") as caught:
        GradientPlan.from_module(module, DeviceMesh((2, 2), ("dp", "tp")), rank=0)
    assert "megatron_views" in caught.value.next_step


@pytest.mark.parametrize(
    ("mesh", "rank", "message"),
    [
        (DeviceMesh((2,), ("nodes",)), 0, "has the axis 'nodes'"),
        (DeviceMesh((2, 2), ("dp", "edp")), 0, "both 'dp' and 'edp'"),
        (DeviceMesh((2,), ("dp",)), 2, "rank 2 is not in the mesh"),
        (MeshViews(DeviceMesh((2,), ("dp",)), (("expert", DeviceMesh((2,), ("ep_",))),)), 2, "rank 2"),
        ((2, 2), 0, "the mesh is a tuple, not a DeviceMesh"),
    ],
)
def test_meshes_that_mean_nothing(mesh, rank, message):
    with pytest.raises(LayoutError, match=message):
        GradientPlan.from_module(nn.Linear(2, 2), mesh, rank=rank)


def test_other_refusals():
    mesh = DeviceMesh((2,), ("dp",))
    with pytest.raises(UsageError, match=r"the rank of the plan .* is unknown"):
        GradientPlan.from_module(nn.Linear(2, 2), mesh)
    assert GradientPlan.from_module(nn.Linear(2, 2), DeviceMesh((1,), ("dp",), (7,))).rank == 7
    with pytest.raises(UsageError, match="is not a module"):
        GradientPlan.from_module({"w": torch.zeros(2)}, mesh, rank=0)
    with pytest.raises(UsageError, match="weight: it has no shape yet"):
        GradientPlan.from_module(nn.LazyLinear(2), mesh, rank=0)
    with pytest.raises(UsageError, match="complex"):
        config = GradientConfig(grad_reduce_in_fp32=True)
        GradientPlan.from_module(nn.Linear(2, 2, dtype=torch.complex64), mesh, config, 0)
    plan = GradientPlan.from_module(two_layers(), mesh, rank=0)
    with pytest.raises(UsageError, match=r"no parameter 'layers\.1\.wieght'") as caught:
        plan["layers.1.wieght"]
    assert "layers.1.weight" in caught.value.want
    with pytest.raises(UsageError, match="is frozen"):
        plan["layers.0.bias"]


# Explanations


def explain_all(told, views, rank, config=GradientConfig()):  # noqa: B008  frozen
    plan = GradientPlan.from_module(module_of(told, views, rank), views, config, rank)
    return [plan.explain(name) for name in (*(parameter.name for parameter in plan.parameters), *plan.frozen)]


WORD = """word_0 is a parameter of shape [40] in float32. Its gradients on ranks 9, 11, 13, 15, replicas along dp,
are added up and divided by 4. Later it is summed over ranks 1, 9 along pp, because stages 0 and 1 hold the same word
table: its attribute shared_embedding is True. It is in bucket 1 of 2, elements 14 to 53 of buffer 0."""
COPY = """copy_1 is a parameter of shape [8] in float32. Its gradients on ranks 9, 11, 13, 15, replicas along dp, are
added up and divided by 4. Later it is summed over ranks 8-9 along tp, because each has a part of its gradient: its
attribute sequence_parallel is True. It is in bucket 1 of 2, elements 6 to 13 of buffer 0."""
EXPERT = """expert_2 is an expert's parameter of shape [13] in float32. Its gradients on ranks 9, 13, replicas along
edp, are added up and divided by 4, the number of ranks that see different data. It is in bucket 0 of 2, elements 0 to
12 of buffer 1. This is known because its attribute allreduce is False, as Megatron marks experts."""
REPLICA = """replica_3 is a parameter of shape [6] in float32. Its gradients on ranks 9, 11, 13, 15, replicas along
dp, are added up and divided by 4. It is in bucket 1 of 2, elements 0 to 5 of buffer 0."""
FROZEN = "frozen_4 is frozen: it has no gradient, no place in a buffer, and is never exchanged."


def test_explanations_read_as_sentences():
    views = megatron_views(16, tp=2, ep=4, pp=2, etp=1)
    told = [
        MarkedParameter("word", 40),
        MarkedParameter("copy", 8),
        MarkedParameter("expert", 12),
        MarkedParameter("replica", 6),
        MarkedParameter("frozen", 3),
    ]
    wanted = [text.replace("\n", " ") for text in (WORD, COPY, EXPERT, REPLICA, FROZEN)]
    assert explain_all(told, views, 9) == wanted


def test_explanations_of_shards_tokens_and_many_ranks():
    sharded = GradientConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    views = megatron_views(64, ep=64)
    told = [
        MarkedParameter("replica", 200, torch.bfloat16),
        MarkedParameter("expert", 5),
        MarkedParameter("replica", 3),
    ]
    replica, expert, small = explain_all(told, views, 1, sharded)
    assert "in bfloat16, its gradient float32" in replica
    assert "on ranks 0-63, replicas along dp, are added up and divided by 64." in replica
    assert replica.endswith("Ranks 0-49 own shards of it: rank 1 owns elements 4 to 7 of it.")
    assert "Rank 1 holds the only copy, so its gradient is not added up with others but divided by 64, the" in expert
    assert small.endswith("Ranks 0-1 own shards of it: rank 1 owns element 2 of it.")
    alone = explain_all([MarkedParameter("replica", 4)], megatron_views(2, tp=2), 1)
    assert "holds the only copy, so its gradient is not added up with others." in alone[0]
    tokens = explain_all(
        [MarkedParameter("replica", 4)], megatron_views(2), 1, GradientConfig(calculate_per_token_loss=True)
    )
    assert "are added up; finalize_model_grads divides by the number of tokens." in tokens[0]
