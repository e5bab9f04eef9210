"""Builders: steps on sharded values, and how a value gets from one sharding to another."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from tests.virtual.any_shardings import shardings
from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.builder import ProgramBuilder, ShardedOperation, Value, extend_cut, redistribute
from xrank.virtual.cluster import VirtualCluster
from xrank.virtual.programs import Communicate, Compute, plan
from xrank.virtual.sharding import FULL, DimSharding, TensorSharding, as_sharding

MESH = DeviceMesh((2, 4), ("x", "y"))


@dataclass(frozen=True)
class Moved(ShardedOperation):
    """Takes (..., k) and (k, n), and gives their product, summed along what cuts k, by another sharding."""

    left: TensorSharding
    right: TensorSharding
    target: TensorSharding

    @property
    def activation_shardings(self):
        return {"left": self.left}

    @property
    def parameter_shardings(self):
        return {"right": self.right}

    @property
    def output_shardings(self):
        return {"product": self.target}

    def build(self, builder, inputs):
        return {"product": builder.matmul(inputs["left"], inputs["right"])}


def moved(left: str, right: str, target: str) -> Moved:
    return Moved(*map(as_sharding, (left, right, target)))


def value_of(builder: ProgramBuilder, shape: tuple[int, ...], layout: str) -> Value:
    return builder.receive("v", shape, "F32", as_sharding(layout))


def collectives_of(builder: ProgramBuilder, device: int = 0) -> list[str]:
    return [each.collective for each in builder.instructions[device] if isinstance(each, Communicate)]


@settings(max_examples=count_of(150))
@given(st.data())
def test_a_value_gets_from_any_sharding_to_any_other(data):
    names = ("x", "y", "z")
    mesh = DeviceMesh(data.draw(st.tuples(*[st.integers(1, 3)] * 3)), names)
    left = data.draw(shardings(2))
    kept = [axis for axis in names if axis not in left.axes]
    right = TensorSharding((left[1], DimSharding(tuple(data.draw(st.permutations(kept))))))
    target = data.draw(shardings(2, tuple(axis for axis in names if axis in left[1].axes)))
    m, k, n = (data.draw(st.integers(1, 7)) for _ in range(3))
    a, b = np.arange(m * k).reshape(m, k), np.arange(k * n).reshape(k, n) - 5
    operation = Moved(left, right, target)
    algorithm = data.draw(st.sampled_from(["push", "ring"]))
    run = VirtualCluster(mesh, engine="in-process", algorithm=algorithm).run(
        operation, activations=(a,), parameters=(b,)
    )
    assert np.array_equal(operation.join(run.outputs, mesh), a @ b)
    planned = plan(operation, mesh, activations=(a,), parameters=(b,), algorithm=algorithm)
    assert planned == run.statistics
    assert run.channels.between_devices.nbytes == planned.nbytes


@pytest.mark.parametrize(
    ("shapes", "layouts", "collectives", "elements"),
    [
        # Elements that a device sends for a product of 256 elements.
        ((16, 8, 16), ("[m, k/y]", "[k/y, n]", "[m, n]"), ["all_reduce"], 3 * 256),
        ((16, 8, 16), ("[m, k/y]", "[k/y, n]", "[m/y, n]"), ["reduce_scatter"], 3 * 256 / 4),
        ((16, 8, 16), ("[m, k/y]", "[k/y, n]", "[m/y, n/x]"), ["reduce_scatter"], 3 * 256 / 4),
        ((16, 8, 16), ("[m, k/y]", "[k/y, n]", "[m/x/y, n]"), ["reduce_scatter"], 3 * 128 / 4),
        ((16, 8, 16), ("[m, k/y]", "[k/y, n]", "[m, n/x]"), ["all_reduce"], 3 * 128),
        ((16, 8, 16), ("[m, k/y]", "[k/y, n]", "[m, n] sum(y)"), [], 0),
        ((16, 8, 16), ("[m, k/x/y]", "[k/x/y, n]", "[m/y, n]"), ["reduce_scatter", "all_reduce"], 3 * 64 + 64),
        ((16, 8, 16), ("[m, k/x/y]", "[k/x/y, n]", "[m/x/y, n]"), ["reduce_scatter"] * 2, 128 + 3 * 32),
        ((16, 8, 16), ("[m, k]", "[k, n]", "[m/x, n/y]"), [], 0),
        ((16, 8, 16), ("[m/x, k]", "[k, n/y]", "[m/x, n/y]"), [], 0),
        ((16, 8, 16), ("[m/x, k]", "[k, n/y]", "[m/x, n]"), ["all_gather"], 3 * 32),
        ((16, 8, 16), ("[m/x, k]", "[k, n/y]", "[m, n]"), ["all_gather"], 7 * 32),
        ((16, 8, 16), ("[m/x/y, k]", "[k, n]", "[m/x, n]"), ["all_gather"], 3 * 32),
        ((16, 8, 16), ("[m/x/y, k]", "[k, n]", "[m/y, n]"), ["all_gather"], 7 * 32),
        ((16, 8, 16), ("[m/y, k]", "[k, n]", "[m, n/y]"), ["all_gather"], 3 * 64),
        # Chunks of 13 rows are 4, 4, 4, 1, and a reduce-scatter cuts 4, 3, 3, 3.
        ((13, 8, 16), ("[m, k/y]", "[k/y, n]", "[m/=y, n]"), ["reduce_scatter"], None),
        ((13, 8, 16), ("[m, k/y]", "[k/y, n]", "[m/~y, n]"), ["all_reduce"], 3 * 13 * 16),
    ],
)
def test_a_value_moves_by_little(shapes, layouts, collectives, elements):
    m, k, n = shapes
    operation = moved(*layouts)
    builder = ProgramBuilder(MESH)
    left = builder.receive("left", (m, k), "F32", operation.left)
    right = builder.receive("right", (k, n), "F32", operation.right)
    redistribute(builder, builder.matmul(left, right), operation.target)
    assert collectives_of(builder, 3) == collectives
    statistics = plan(operation, MESH, activations=((m, k),), parameters=((k, n),))
    if elements is not None:
        assert {device.traffic.sent_nbytes for device in statistics.devices} == {4 * elements}


def test_groups_that_join_blocks_of_other_sizes_lay_them_out_each_for_itself():
    mesh = DeviceMesh((2, 2, 2), ("z", "x", "y"))
    operation = moved("[m/=z/=x, k]", "[k, n/=y]", "[m/=z, n]")
    a, b = np.arange(35).reshape(5, 7), np.arange(21).reshape(7, 3)
    run = VirtualCluster(mesh, engine="in-process").run(operation, activations=(a,), parameters=(b,))
    # 5 rows are 3 and 2 along z, which are 2, 1 and 1, 1 along x.
    for output in run.outputs[:4]:
        assert np.array_equal(output, (a @ b)[:3])
    for output in run.outputs[4:]:
        assert np.array_equal(output, (a @ b)[3:])


def test_a_value_that_is_wanted_twice_moves_once():
    builder = ProgramBuilder(MESH)
    value = value_of(builder, (8, 8), "[a/x, b/y]")
    first = redistribute(builder, value, as_sharding("[a, b]"))
    assert redistribute(builder, value, as_sharding("[a/~x, b]")).sharding == as_sharding("[a/x, b]")
    assert redistribute(builder, value, TensorSharding((None, None))) is first
    assert collectives_of(builder) == ["all_gather", "all_gather"]
    assert redistribute(builder, value, as_sharding("[a/=x, b/~y]")) == value


def test_axes_of_one_place_cut_nothing_and_send_nothing():
    mesh = DeviceMesh((1, 4), ("x", "y"))
    operation = moved("[m/x, k]", "[k, n]", "[m, n/x]")
    assert plan(operation, mesh, activations=((4, 4),), parameters=((4, 4),)).devices[0].collectives == {}


def test_a_group_comes_in_the_order_of_cutting():
    builder = ProgramBuilder(MESH)
    assert builder.groups(("y",))[5] == (4, 5, 6, 7)
    assert builder.groups(("x", "y"))[5] == (0, 1, 2, 3, 4, 5, 6, 7)
    assert builder.groups(("y", "x"))[5] == (0, 4, 1, 5, 2, 6, 3, 7)
    assert builder.groups(("y", "x"))[0] is builder.groups(("y", "x"))[7]
    with pytest.raises(LayoutError, match="no axis 'tp'"):
        builder.groups(("tp",))


def test_a_part_of_a_mesh_keeps_its_numbers():
    stage = DeviceMesh((2, 2, 2), ("pp", "dp", "tp")).submesh(pp=1)
    builder = ProgramBuilder(stage)
    value = value_of(builder, (4, 6), "[a/dp, b/tp]")
    builder.give(redistribute(builder, value, as_sharding("[a/dp, b]")), "out")
    assert [program.device for program in builder.programs()] == [4, 5, 6, 7]
    gather = next(each for each in builder.instructions[6] if isinstance(each, Communicate))
    assert (gather.group, gather.axes, gather.dim) == ((6, 7), ("tp",), 1)
    assert [spec.shape for spec in gather.given] == [(2, 3), (2, 3)]
    assert gather.spec.shape == (2, 6)


def test_flops_are_those_of_each_devices_own_product():
    operation = moved("[m/=y, k]", "[k, n/x]", "[m/=y, n/x]")
    statistics = plan(operation, MESH, activations=((5, 3),), parameters=((3, 4),))
    assert [device.flops for device in statistics.devices] == [2 * rows * 3 * 2 for rows in (2, 1, 1, 1)] * 2


def test_the_three_forms_of_a_product_have_their_cuts():
    builder = ProgramBuilder(MESH)
    a = builder.receive("a", (3, 8, 4), "F32", as_sharding("[b, s/x, k]"))
    w = builder.receive("w", (4, 8), "F32", as_sharding("[k, n/y]"))
    c = builder.matmul(a, w)
    assert (c.shape, c.sharding) == ((3, 8, 8), as_sharding("[b, s/x, n/y]"))
    of_a = builder.matmul(c, w, "nt")
    assert (of_a.shape, of_a.sharding) == ((3, 8, 4), as_sharding("[b, s/x, k] sum(y)"))
    of_w = builder.matmul(a, c, "tn")
    assert (of_w.shape, of_w.sharding) == ((4, 8), as_sharding("[k, n/y] sum(x)"))
    last = [each for each in builder.instructions[2] if isinstance(each, Compute)][-1]
    assert (last.options, last.flops) == ((("form", "tn"),), 2 * 4 * (3 * 4) * 2)


@pytest.mark.parametrize(
    ("left", "right", "match"),
    [
        (((4, 6), "F32", "[m, k]"), ((5, 4), "F32", "[k, n]"), "does not fit"),
        (((4, 6), "F32", "[m, k]"), ((6, 4), "BF16", "[k, n]"), "does not fit"),
        (((4, 8), "F32", "[m, k/x]"), ((8, 4), "F32", "[k, n]"), "is not local"),
        (((4, 8), "F32", "[m, k/y]"), ((8, 4), "F32", "[k/x, n]"), "is not local"),
        (((4, 8), "F32", "[m/y, k]"), ((8, 4), "F32", "[k, n/y]"), "the axis 'y' has two roles"),
        (((4, 8), "F32", "[m/x, k]"), ((8, 4), "F32", "[k, n] sum(x)"), "the axis 'x' has two roles"),
    ],
)
def test_a_product_that_is_not_local_is_refused(left, right, match):
    builder = ProgramBuilder(MESH)
    values = [
        builder.receive(name, shape, dtype, as_sharding(layout))
        for name, (shape, dtype, layout) in (("a", left), ("b", right))
    ]
    with pytest.raises(LayoutError, match=match):
        builder.matmul(*values)


def test_a_whole_tensor_does_not_become_addends():
    builder = ProgramBuilder(MESH)
    with pytest.raises(LayoutError, match="has no partial sums along 'y'"):
        redistribute(builder, value_of(builder, (4,), "[a]"), as_sharding("[a] sum(y)"))


def test_a_cut_is_extended_up_to_an_axis_that_is_taken():
    builder = ProgramBuilder(DeviceMesh((2, 2, 2), ("x", "y", "z")))
    own, wanted = DimSharding(("x",)), DimSharding(("x", "y", "z"))
    taken = {"x", "z"}
    assert extend_cut(builder, 8, own, wanted, taken) == DimSharding(("x", "y"), "/")
    assert taken == {"x", "y", "z"}
    assert extend_cut(builder, 8, FULL, DimSharding(("z", "y")), {"x"}).axes == ("z", "y")
    assert extend_cut(builder, 8, own, DimSharding(("y", "x")), set()) == DimSharding(("x",), "/")


def test_arguments_that_do_not_fit_are_refused_by_name():
    operation = moved("[m/x, k]", "[k, n]", "[m, n]")
    with pytest.raises(UsageError, match="Moved takes the parameters right"):
        plan(operation, MESH, activations=((4, 4),))
    with pytest.raises(LayoutError, match=r"right: the sharding .* is not of a tensor of shape \(4,\)") as caught:
        plan(operation, MESH, activations=((4, 4),), parameters=((4,),))
    assert caught.value.tensor == "right"
    with pytest.raises(LayoutError, match=r"left: .*no axis 'tp'"):
        plan(moved("[m/tp, k]", "[k, n]", "[m, n]"), MESH, activations=((4, 4),), parameters=((4, 4),))
