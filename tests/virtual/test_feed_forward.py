"""Feed-forward layers over a mesh: values, flops, messages and bytes, forward and backward."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from tests.virtual.any_shardings import count_costs, shardings
from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.builder import shards_of
from xrank.virtual.cluster import VirtualCluster
from xrank.virtual.layers import FeedForward, FeedForwardSharding, FeedForwardShardingPolicy
from xrank.virtual.programs import plan

X, Y, P = 2, 4, 8
MESH = DeviceMesh((X, Y), ("x", "y"))
POLICIES = FeedForwardShardingPolicy
NAMES = ("x", "w1", "b1", "w2", "b2")

SHARDINGS = {
    "unsharded": (POLICIES.Unsharded, FeedForwardSharding.unsharded()),
    "gspmd": (POLICIES.GSPMD, FeedForwardSharding.gspmd()),
    "megatron": (POLICIES.Mixed, FeedForwardSharding.megatron("y")),
}


def arrays(b, s, m, h, dtype="float32"):
    """Return x, w1, b1, w2, b2 and the output's gradient."""
    generator = np.random.default_rng(7)
    shapes = ((b, s, m), (m, h), (h,), (h, m), (m,), (b, s, m))
    return [generator.standard_normal(shape).astype(dtype) / shape[0] ** 0.5 for shape in shapes]


def reference(x, w1, b1, w2, b2, dout):
    """Return the layer's output and gradients, by torch."""
    tensors = [torch.from_numpy(np.asarray(array)).clone().requires_grad_() for array in (x, w1, b1, w2, b2)]
    out = torch.relu(tensors[0] @ tensors[1] + tensors[2]) @ tensors[3] + tensors[4]
    out.backward(torch.from_numpy(dout))
    gradients = {f"d{name}": tensor.grad.numpy() for name, tensor in zip(NAMES, tensors, strict=True)}
    return out.detach().numpy(), gradients


def forward_costs(case, b, s, m, h):
    match case:
        case "unsharded":
            return P * 4 * b * s * m * h, 0, 0
        case "gspmd":
            elements = P * (2 * (Y - 1) * b * s * m + 2 * (X - 1) * m * h) / (X * Y)
            return 4 * b * s * m * h, P * 2 * (X - 1 + Y - 1), elements
        case "megatron":
            return P * 4 * b * s * m * h / Y, P * (Y - 1), P * (Y - 1) * b * s * m


def backward_costs(case, b, s, m, h):
    match case:
        case "unsharded":
            return P * 10 * b * s * m * h, 0, 0
        case "gspmd":
            elements = (3 * (Y - 1) * b * s * m + 4 * (X - 1) * m * h) / (X * Y) + (X - 1) * (m + h) / Y
            return 10 * b * s * m * h, P * (3 * (Y - 1) + 6 * (X - 1)), P * elements
        case "megatron":
            # One all-reduce, of dx.
            return P * 10 * b * s * m * h / Y, P * (Y - 1), P * (Y - 1) * b * s * m


def check_shards(outputs, whole, sharding, tolerance, mesh=MESH):
    for output, part in zip(outputs, shards_of(whole, sharding, mesh), strict=True):
        np.testing.assert_allclose(output, part, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("case", "engine"), [*((case, "in-process") for case in SHARDINGS), ("gspmd", "processes")])
def test_a_layer_has_the_values_and_costs_of_its_policy(case, engine):
    policy, sharding = SHARDINGS[case]
    assert sharding.policy is policy
    sizes = (8, 4, 32, 64)
    x, *parameters, dout = arrays(*sizes)
    out, gradients = reference(x, *parameters, dout)
    cluster = VirtualCluster(MESH, engine=engine)
    forward = FeedForward(sharding)
    run = cluster.run(forward, activations=(x,), parameters=parameters)
    check_shards(run.outputs, out, sharding.out, 1e-6 if case == "unsharded" else 1e-5)
    assert count_costs(run.statistics) == forward_costs(case, *sizes)
    assert run.statistics == plan(forward, MESH, activations=(x,), parameters=parameters)
    backward = forward.backward()
    run = cluster.run(backward, activations=(x, dout), parameters=parameters)
    for name, whole in gradients.items():
        check_shards([output[name] for output in run.outputs], whole, backward.output_shardings[name], 2e-5)
    assert count_costs(run.statistics) == backward_costs(case, *sizes)
    assert run.statistics == plan(backward, MESH, activations=(x, dout), parameters=parameters)
    assert run.channels.between_devices.nbytes == run.statistics.nbytes


@pytest.mark.parametrize("sizes", [(8, 128, 1024, 4096), (2, 1, 8, 8), (4, 3, 16, 8)])
@pytest.mark.parametrize("case", SHARDINGS)
def test_plans_have_the_costs_at_other_sizes(case, sizes):
    b, s, m, h = sizes
    forward = FeedForward(SHARDINGS[case][1])
    parameters = ((m, h), (h,), (h, m), (m,))
    assert count_costs(plan(forward, (X, Y), activations=((b, s, m),), parameters=parameters)) == forward_costs(
        case, *sizes
    )
    planned = plan(forward.backward(), (X, Y), activations=((b, s, m),) * 2, parameters=parameters)
    assert count_costs(planned) == backward_costs(case, *sizes)


@pytest.mark.parametrize("case", SHARDINGS)
def test_the_ring_all_reduces_in_pieces(case):
    b, s, m, _ = sizes = (4, 3, 8, 16)
    forward = FeedForward(SHARDINGS[case][1])
    x, *parameters, dout = arrays(*sizes)
    run = VirtualCluster(MESH, engine="in-process", algorithm="ring").run(
        forward.backward(), activations=(x, dout), parameters=parameters
    )
    joined = forward.backward().join(run.outputs, MESH)
    for name, whole in reference(x, *parameters, dout)[1].items():
        np.testing.assert_allclose(joined[name], whole, rtol=2e-5, atol=2e-5)
    flops, messages, elements = backward_costs(case, *sizes)
    if case == "megatron":
        messages, elements = 2 * messages, P * 2 * (Y - 1) / Y * b * s * m
    if case == "gspmd":
        # With two devices, a ring's all-reduce sends two halves where push sends the whole.
        messages += P * 2 * (X - 1)
    assert count_costs(run.statistics) == (flops, messages, elements)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_relu_has_gradient_0_at_0(kind):
    made = arrays(4, 2, 8, 8)
    made[1][:, ::2], made[2][::2] = 0, 0
    x, w1, b1, w2, b2, dout = map(kind, made)
    operation = FeedForward(FeedForwardSharding.gspmd()).backward()
    run = VirtualCluster(MESH, engine="in-process").run(operation, activations=(x, dout), parameters=(w1, b1, w2, b2))
    db1 = operation.join(run.outputs, MESH)["db1"]
    assert (db1[::2] == 0).all()
    assert (db1[1::2] != 0).any()


def test_sequence_parallel_shards_send_half_by_push():
    b, s, m, _ = sizes = (2, 8, 4, 16)
    texts = ("[b, s/y, m]", "[m, h/y]", "[h/y]", "[b, s, h/y]", "[h/y, m]", "[m]", "[b, s/y, m]")
    forward = FeedForward(FeedForwardSharding(texts))
    x, *parameters, dout = arrays(*sizes)
    out, gradients = reference(x, *parameters, dout)
    cluster = VirtualCluster(MESH, engine="in-process")
    run = cluster.run(forward, activations=(x,), parameters=parameters)
    np.testing.assert_allclose(forward.join(run.outputs, MESH), out, rtol=1e-5, atol=1e-5)
    # A gather of x and a reduce-scatter of out.
    assert count_costs(run.statistics)[1:] == (P * 2 * (Y - 1), P * 2 * (Y - 1) * b * s * m / Y)
    run = cluster.run(forward.backward(), activations=(x, dout), parameters=parameters)
    joined = forward.backward().join(run.outputs, MESH)
    for name, whole in gradients.items():
        np.testing.assert_allclose(joined[name], whole, rtol=2e-5, atol=2e-5)
    # Gathers of x and dout, a reduce-scatter of dx, an all-reduce of db2, whose rows are cut.
    assert count_costs(run.statistics)[1:] == (P * 4 * (Y - 1), P * (Y - 1) * (3 * b * s * m / Y + m))


@settings(max_examples=count_of(40))
@given(st.data())
def test_any_shardings_give_the_layer(data):
    lengths = st.tuples(*[st.integers(1, 3)] * 3).filter(lambda lengths: np.prod(lengths) <= 8)
    mesh = DeviceMesh(data.draw(lengths), "xyz")
    forward = FeedForward(FeedForwardSharding([data.draw(shardings(count)) for count in (3, 2, 1, 3, 2, 1, 3)]))
    sizes = tuple(data.draw(st.integers(1, 6)) for _ in range(4))
    x, *parameters, dout = arrays(*sizes, "float64")
    out, gradients = reference(x, *parameters, dout)
    algorithm = data.draw(st.sampled_from(["push", "ring"]))
    cluster = VirtualCluster(mesh, engine="in-process", algorithm=algorithm)
    run = cluster.run(forward, activations=(x,), parameters=parameters)
    np.testing.assert_allclose(forward.join(run.outputs, mesh), out, rtol=1e-11, atol=1e-11)
    run = cluster.run(forward.backward(), activations=(x, dout), parameters=parameters)
    joined = forward.backward().join(run.outputs, mesh)
    for name, whole in gradients.items():
        np.testing.assert_allclose(joined[name], whole, rtol=1e-11, atol=1e-11)
    planned = plan(forward.backward(), mesh, activations=(x, dout), parameters=parameters, algorithm=algorithm)
    assert planned == run.statistics


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_every_element_type_goes_through(dtype, tolerance, kind):
    made = arrays(4, 2, 8, 8, "float64")
    narrow = [array.astype(getattr(ml_dtypes, dtype, None) or dtype) for array in made]
    wide = [array.astype("float64") for array in narrow]
    if kind == "torch":
        narrow = [torch.from_numpy(array).to(getattr(torch, dtype)) for array in wide]
    operation = FeedForward(FeedForwardSharding.gspmd()).backward()
    run = VirtualCluster(MESH, engine="in-process").run(
        operation, activations=(narrow[0], narrow[5]), parameters=narrow[1:5]
    )
    joined = operation.join(run.outputs, MESH)
    for name, whole in reference(*wide)[1].items():
        assert type(joined[name]) is type(narrow[0])
        assert joined[name].dtype == narrow[0].dtype
        found = joined[name].double().numpy() if kind == "torch" else joined[name].astype("float64")
        np.testing.assert_allclose(found, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_gradients_of_a_bias_are_summed_in_wide_elements(dtype, kind):
    # In its own 8 bits a bfloat16's sum of ones stays at 256, a float16's at 2048.
    shapes = ((1, 4096, 1), (1, 4096, 1), (1, 1), (1,), (1, 1), (1,))
    made = [np.ones(shape).astype(getattr(ml_dtypes, dtype, None) or dtype) for shape in shapes]
    if kind == "torch":
        made = [torch.ones(shape, dtype=getattr(torch, dtype)) for shape in shapes]
    operation = FeedForward(FeedForwardSharding.unsharded()).backward()
    run = VirtualCluster(1, engine="in-process").run(operation, activations=made[:2], parameters=made[2:])
    assert {float(run.outputs[0][name][0]) for name in ("db1", "db2")} == {4096.0}


def test_policies_follow_from_the_shardings():
    assert FeedForwardSharding.gspmd("y", "x").policy is POLICIES.GSPMD
    texts = ["[b/x, s, m/y]", "[m/x, h/y]", "[h/y]", "[b/x, s, h/y]", "[h/y, m/x]", "[m/y]", "[b/x, s, m/y]"]
    assert FeedForwardSharding(texts).policy is POLICIES.GSPMD
    for place in range(7):
        changed = [*texts]
        changed[place] = changed[place].replace("/y", "")
        assert FeedForwardSharding(changed).policy is POLICIES.Mixed
    assert FeedForwardSharding.megatron("tp", 2).policy is POLICIES.Mixed
    assert FeedForwardSharding.unsharded(2).policy is POLICIES.Unsharded


@pytest.mark.parametrize(
    ("place", "text", "match"),
    [
        (0, "[b, s, m] sum(x)", "x cannot be a partial sum"),
        (3, "[b, s, h] sum(y)", "hidden cannot be a partial sum"),
        (6, "[b, s, m] sum(y)", "out cannot be a partial sum"),
        (1, "[m]", "the sharding of w1 does not match a feed-forward"),
        (3, "[b, h]", "the sharding of hidden does not match a feed-forward"),
        (0, "[m]", "the sharding of x does not match a feed-forward"),
    ],
)
def test_shardings_that_fit_no_layer_are_refused(place, text, match):
    texts = ["[b, s, m]", "[m, h]", "[h]", "[b, s, h]", "[h, m]", "[m]", "[b, s, m]"]
    texts[place] = text
    with pytest.raises(LayoutError, match=match):
        FeedForwardSharding(texts)
    with pytest.raises(UsageError, match="has the shardings of x, w1, b1, hidden, w2, b2, out"):
        FeedForwardSharding(texts[:-1])


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("w1", (7, 16), "x cannot be multiplied by w1"),
        ("b1", (15,), "b1 does not fit x"),
        ("w2", (16, 9), "w2 does not fit x"),
        ("b2", (16,), "b2 does not fit x"),
        ("dout", (2, 3, 16), "dout is not the gradient of its tensor"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(name, shape, match):
    shapes = {"x": (2, 3, 8), "w1": (8, 16), "b1": (16,), "w2": (16, 8), "b2": (8,), "dout": (2, 3, 8), name: shape}
    operation = FeedForward(FeedForwardSharding.unsharded()).backward()
    with pytest.raises(LayoutError, match=match) as caught:
        plan(
            operation,
            MESH,
            activations=(shapes["x"], shapes["dout"]),
            parameters=[shapes[each] for each in ("w1", "b1", "w2", "b2")],
        )
    assert caught.value.tensor == name


def test_invalid_layer_shardings_are_refused():
    with pytest.raises(UsageError, match="FeedForward takes a FeedForwardSharding"):
        FeedForward(("[b, s, m]",))


def test_sizes_that_do_not_divide_are_refused_by_name():
    texts = ("[b, s, m]", "[m, h/y]", "[h/y]", "[b, s, h/y]", "[h/y, m]", "[m]", "[b/x, s, m]")
    operation = FeedForward(FeedForwardSharding(texts))
    with pytest.raises(LayoutError, match="w1: 6/y: 6 is not divisible by 4"):
        plan(operation, MESH, activations=((2, 3, 8),), parameters=((8, 6), (6,), (6, 8), (8,)))
    with pytest.raises(LayoutError, match="out: 3/x: 3 is not divisible by 2"):
        plan(operation, MESH, activations=((3, 3, 8),), parameters=((8, 8), (8,), (8, 8), (8,)))
