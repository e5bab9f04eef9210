import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from xrank.errors import LayoutError, UsageError
from xrank.gradients import GradientConfig, GradientPlan, mark
from xrank.gradients.roles import MeshPlace, ParameterRole, role_of
from xrank.layout import DeviceMesh, MeshViews
from xrank.layout.mesh import megatron_views

PLACE = MeshPlace(megatron_views(16, tp=2, ep=4, pp=2, etp=1), 3)
QK = "layers.0.self_attn.q_norm.weight"


def parameter(**attributes) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(4))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def role(made, name="w", place=PLACE, **options) -> ParameterRole:
    return role_of(name, made, place, GradientConfig(**options))


def test_a_parameter_without_any_source_is_a_plain_copy():
    assert role(parameter()) == ParameterRole()


@pytest.mark.parametrize(
    ("attribute", "value", "field", "meaning", "aspect"),
    [
        ("allreduce", False, "is_expert", True, "expert"),
        ("sequence_parallel", True, "over_tp", "sum", "tp"),
        ("average_gradients_across_tp_domain", True, "over_tp", "average", "tp"),
        ("shared_embedding", True, "tied", "word", "tied"),
        ("pipeline_parallel", True, "over_pp", True, "pp"),
    ],
)
def test_megatrons_attributes(attribute, value, field, meaning, aspect):
    found = role(parameter(**{attribute: value}))
    assert getattr(found, field) == meaning
    assert list(found.reasons) == [aspect] and attribute in found.reasons[aspect]
    # The other value of each attribute is its default.
    assert role(parameter(**{attribute: not value})) == ParameterRole()


def test_averages_come_before_sums():
    both = parameter(sequence_parallel=True, average_gradients_across_tp_domain=True)
    assert role(both).over_tp == "average"


def test_sequence_parallelism_is_the_configs():
    assert role(parameter(sequence_parallel=True), sequence_parallel=False) == ParameterRole()


def test_marks_beat_attributes_and_names():
    made = parameter(allreduce=False, sequence_parallel=True, pipeline_parallel=True, shared_embedding=True)
    mark(made, expert=False, over_tp="own", over_pp=False, tied="position", stages=[1, 0])
    found = role(made, QK)
    assert (found.is_expert, found.over_tp, found.over_pp, found.tied, found.stages) == (
        False,
        None,
        False,
        "position",
        (0, 1),
    )
    assert "marked" in found.reasons["tp"] and "marked" in found.reasons["tied"]
    mark(made, over_tp="average")
    found = role(made, QK)
    assert found.over_tp == "average" and found.is_expert and found.over_pp and found.tied == "word"


def test_a_mark_decides_before_config_and_attributes():
    made = parameter()
    mark(made, over_tp="sum")
    assert role(made, sequence_parallel=False, qk_layernorm=False).over_tp == "sum"


@pytest.mark.parametrize(
    "name", ["a.q_layernorm.weight", "a.k_layernorm.bias", "q_norm", "a.k_norm.weight", "attn_q_norm.w"]
)
def test_norms_of_queries_and_keys_are_known_by_name(name):
    assert role(parameter(), name, qk_layernorm=True).over_tp == "sum"
    assert role(parameter(), name, qk_layernorm=False).over_tp is None
    with pytest.raises(UsageError, match="it is unknown whether") as caught:
        role(parameter(), name)
    assert caught.value.tensor == name and "qk_layernorm=True" in caught.value.next_step
    # One rank needs no answer; a cut parameter sees only its own part; attributes decide first.
    assert role(parameter(), name, MeshPlace(megatron_views(4, ep=2), 1)).over_tp is None
    assert role(parameter(tensor_model_parallel=True), name, qk_layernorm=True).over_tp is None
    assert role(parameter(tensor_model_parallel=True), name).over_tp is None
    assert role(parameter(sequence_parallel=True), name).over_tp == "sum"


@pytest.mark.parametrize(
    "name", ["seq_norm.weight", "kv_layernorm.weight", "q_norms.weight", "rank_norm.weight", "q.norm"]
)
def test_other_names_decide_nothing(name):
    assert role(parameter(), name, qk_layernorm=True).over_tp is None


@pytest.mark.parametrize("marked", ["mark", "sequence_parallel", "average_gradients_across_tp_domain"])
def test_parameters_cut_along_tp_are_not_added_up_there(marked):
    made = parameter(tensor_model_parallel=True)
    if marked == "mark":
        mark(made, over_tp="sum")
    else:
        setattr(made, marked, True)
    with pytest.raises(UsageError, match="w: it is split along tp"):
        role(made)
    assert role(made, place=MeshPlace(megatron_views(4), 1)).sharded == ("tp",)


@pytest.mark.parametrize(
    "options",
    [
        {"over_tp": "mean"},
        {"tied": "output"},
        {"stages": (0, 1)},
        {"tied": "word", "stages": (1,)},
        {"tied": "word", "stages": (1, 1)},
        {"tied": "word", "stages": (-1, 1)},
    ],
)
def test_marks_that_mean_nothing_are_refused(options):
    with pytest.raises(UsageError):
        mark(parameter(), **options)


def test_marks_are_copied_with_a_module():
    module = nn.Linear(2, 2)
    mark(module.bias, over_tp="sum")
    assert role(pickle.loads(pickle.dumps(module)).bias).over_tp == "sum"


# Placements of real DTensors: meshes of processes


@pytest.mark.ranks(4)
def test_placements_define_the_role_of_a_parameter(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def place_parameter(*placements, on=mesh):
        return nn.Parameter(DTensor.from_local(torch.zeros(2, 3), on, placements, run_check=False))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.replica = place_parameter(Replicate(), Replicate())
            self.column = place_parameter(Replicate(), Shard(0))
            self.fully = place_parameter(Shard(0), Shard(1))
            self.partial = place_parameter(Replicate(), Partial())
            self.sub = place_parameter(Shard(0), on=mesh["tp"])
            self.q_norm = place_parameter(Replicate(), Replicate())

    plan = GradientPlan.from_module(Model(), mesh)
    assert plan.rank == rank
    found = {p.name: (p.shape, p.ranks, p.divisor, [(r.axes, r.operation) for r in p.later]) for p in plan.parameters}
    replicas, tensor = (rank % 2, rank % 2 + 2), [(("tp",), "sum")]
    assert found == {
        "replica": ((2, 3), replicas, 2, []),
        "column": ((2, 3), replicas, 2, []),
        # Cut along dp by something that adds up and averages there itself.
        "fully": ((2, 3), (rank,), 1, []),
        "partial": ((2, 3), replicas, 2, tensor),
        "sub": ((2, 3), replicas, 2, []),
        # Replicate marks a copy, so the name does not matter.
        "q_norm": ((2, 3), replicas, 2, []),
    }

    model = Model()
    mark(model.q_norm, over_tp="sum")
    assert [r.axes for r in GradientPlan.from_module(model, mesh)["q_norm"].later] == [("tp",)]
    mark(model.column, over_tp="sum")
    with pytest.raises(UsageError, match="column: it is split along tp"):
        GradientPlan.from_module(model, mesh)


@pytest.mark.ranks(4)
def test_experts_by_their_placement(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    module = nn.Module()
    module.experts = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Replicate(), Shard(0)), run_check=False))
    module.router = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Replicate(), Replicate()), run_check=False))
    plan = GradientPlan.from_module(module, mesh)
    assert plan.buffers[plan["experts"].buffer].is_expert
    assert (plan["experts"].ranks, plan["experts"].divisor) == ((rank % 2, rank % 2 + 2), 4)
    assert (plan["router"].ranks, plan["router"].divisor) == ((0, 1, 2, 3), 4)


@pytest.mark.ranks(2)
def test_placements_that_do_not_fit_the_mesh_are_refused(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    module = nn.Module()
    module.w = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Shard(0),), run_check=False))
    assert GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)))["w"].placement_axes == (("dp",),)
    other = DeviceMesh((2, 2), ("dp", "tp"))
    assert GradientPlan.from_module(module, other)["w"].placement_axes == (("tp",),)
    with pytest.raises(LayoutError, match="w: its placements are along 'fsdp', and no axes"):
        GradientPlan.from_module(module, DeviceMesh((4,), ("dp",)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module.w = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Replicate(),), run_check=False))
    with pytest.raises(LayoutError, match=r"w: its mesh has ranks \[0, 1\] along 'dp', and the plan's mesh"):
        GradientPlan.from_module(module, MeshViews(DeviceMesh((2, 1), ("tp", "dp"))))
    module.w = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, (Partial(),), run_check=False))
    with pytest.raises(LayoutError, match="w: its values are partial sums along 'dp'"):
        GradientPlan.from_module(module, mesh)
