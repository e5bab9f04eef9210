"""Products over a mesh: values, flops, messages and bytes of every policy, forward and backward."""

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
from xrank.virtual.layers import (
    FeedForward,
    FeedForwardSharding,
    MatMul,
    MatMulSharding,
    MatMulShardingPolicy,
    cheapest,
)
from xrank.virtual.link_model import LinkModel
from xrank.virtual.programs import plan
from xrank.virtual.sharding import TensorSharding

X, Y, P = 2, 4, 8
MESH = DeviceMesh((X, Y), ("x", "y"))
POLICIES = MatMulShardingPolicy

CASES = {
    "unsharded": (POLICIES.Unsharded, "[m, k]", "[k, n]", 1),
    "matched 8": (POLICIES.MatchedInnerSharding, "[m, k/x/y]", "[k/x/y, n]", 8),
    "matched 2": (POLICIES.MatchedInnerSharding, "[m, k/x]", "[k/x, n]", 2),
    "matched 4": (POLICIES.MatchedInnerSharding, "[m, k/y]", "[k/y, n]", 4),
    "unmatched": (POLICIES.UnmatchedInnerSharding, "[m, k/y]", "[k/x, n]", 1),
    "outer": (POLICIES.OuterSharding, "[m/x, k/y]", "[k/x, n]", 1),
    "full": (POLICIES.FullSharding, "[m/x, k/y]", "[k/x, n/y]", 1),
}


def costs(policy, m, k, n, g):
    """Return flops, messages and elements of the table, for all devices together."""
    match policy:
        case POLICIES.Unsharded:
            return P * 2 * m * k * n, 0, 0
        case POLICIES.MatchedInnerSharding:
            return P * 2 * m * k * n / g, P * (g - 1), P * (g - 1) * m * n
        case POLICIES.UnmatchedInnerSharding:
            return P * 2 * m * k * n, P * (Y - 1 + X - 1), P * ((Y - 1) * m * k / Y + (X - 1) * k * n / X)
        case POLICIES.OuterSharding:
            elements = (Y - 1) * m * k / (X * Y) + (X - 1) * k * n / X + (X - 1) * m * n / X
            return P * 2 * m * k * n / X, P * (Y - 1 + 2 * (X - 1)), P * elements
        case POLICIES.FullSharding:
            elements = ((Y - 1) * m * k + (X - 1) * k * n + (X * Y - 1) * m * n) / (X * Y)
            return 2 * m * k * n, P * (Y - 1 + X - 1 + X * Y - 1), P * elements


def backward_costs(policy, m, k, n, g):
    """Return the same of dA and dB."""
    match policy:
        case POLICIES.Unsharded:
            return P * 4 * m * k * n, 0, 0
        case POLICIES.MatchedInnerSharding:
            return P * 4 * m * k * n / g, 0, 0
        case POLICIES.UnmatchedInnerSharding:
            elements = (Y - 1) * m * k / Y + (X - 1) * k * n / X
            return P * 2 * m * k * n * (1 / X + 1 / Y), P * (Y - 1 + X - 1), P * elements
        case POLICIES.OuterSharding:
            elements = (Y - 1) * m * k / (X * Y) + 2 * (X - 1) * k * n / X
            return 2 * m * k * n + P * 2 * m * k * n / X, P * (Y - 1 + 2 * (X - 1)), P * elements
        case POLICIES.FullSharding:
            elements = 2 * ((Y - 1) * m * k + (X - 1) * k * n) / (X * Y)
            return 4 * m * k * n, P * 2 * (Y - 1 + X - 1), P * elements


def arrays(m, k, n, dtype="float32", seed=0):
    generator = np.random.default_rng(seed)
    return tuple(generator.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n), (m, n)))


def cluster(algorithm="push", engine="in-process", mesh=MESH):
    return VirtualCluster(mesh, engine=engine, algorithm=algorithm)


@pytest.mark.parametrize(("case", "engine"), [*((case, "in-process") for case in CASES), ("full", "processes")])
def test_forward_has_the_values_and_costs_of_its_policy(case, engine):
    policy, a_text, b_text, g = CASES[case]
    sharding = MatMulSharding((a_text, b_text))
    assert sharding.policy is policy
    m, k, n = 64, 32, 48
    a, b, _ = arrays(m, k, n)
    run = cluster(engine=engine).run(MatMul(sharding), activations=(a,), parameters=(b,))
    tolerance = 1e-6 if policy is POLICIES.Unsharded else 1e-5
    for output in run.outputs:
        np.testing.assert_allclose(output, a @ b, rtol=tolerance, atol=tolerance)
    assert count_costs(run.statistics) == costs(policy, m, k, n, g)
    assert run.statistics == plan(MatMul(sharding), MESH, activations=(a,), parameters=(b,))
    between = run.channels.between_devices
    assert (between.messages, between.nbytes) == (run.statistics.messages, run.statistics.nbytes)
    shards = [*shards_of(a, sharding.a, MESH), *shards_of(b, sharding.b, MESH)]
    from_host = [device.from_host for device in run.statistics.devices]
    assert sum(each.received_nbytes for each in from_host) == sum(shard.nbytes for shard in shards)
    assert {each.received_messages for each in from_host} == {2}


@pytest.mark.parametrize(("case", "engine"), [*((case, "in-process") for case in CASES), ("full", "processes")])
def test_backward_has_the_values_and_costs_of_its_policy(case, engine):
    policy, a_text, b_text, g = CASES[case]
    operation = MatMul(MatMulSharding((a_text, b_text))).backward()
    m, k, n = 64, 32, 48
    a, b, dc = arrays(m, k, n)
    run = cluster(engine=engine).run(operation, activations=(a, dc), parameters=(b,))
    for name, whole in (("da", dc @ b.T), ("db", a.T @ dc)):
        sharding = operation.output_shardings[name]
        for device, output in zip(MESH.ranks, run.outputs, strict=True):
            ranges = sharding.slices(MESH, MESH.coordinate(device), whole.shape)
            part = whole[tuple(slice(low, high) for low, high in ranges)]
            np.testing.assert_allclose(output[name], part, rtol=1e-5, atol=1e-4)
    assert count_costs(run.statistics) == backward_costs(policy, m, k, n, g)
    assert run.statistics == plan(operation, MESH, activations=(a, dc), parameters=(b,))


@pytest.mark.parametrize("sizes", [(4096, 2048, 4096), (8, 8, 8), (24, 40, 16), (16, 64, 8)])
@pytest.mark.parametrize("case", CASES)
def test_plans_have_the_costs_at_other_sizes(case, sizes):
    policy, a_text, b_text, g = CASES[case]
    operation = MatMul(MatMulSharding((a_text, b_text)))
    m, k, n = sizes
    forward = plan(operation, (X, Y), activations=((m, k),), parameters=((k, n),))
    assert count_costs(forward) == costs(policy, m, k, n, g)
    backward = plan(operation.backward(), (X, Y), activations=((m, k), (m, n)), parameters=((k, n),))
    assert count_costs(backward) == backward_costs(policy, m, k, n, g)


@pytest.mark.parametrize("case", CASES)
def test_the_ring_reduces_in_pieces_and_gathers_as_many_bytes(case):
    policy, a_text, b_text, g = CASES[case]
    m, k, n = 61, 32, 47
    a, b, dc = arrays(m, k, n)
    sharding = MatMulSharding((a_text.replace("m/", "m/="), b_text.replace("n/", "n/=")))
    operation = MatMul(sharding)
    run = cluster("ring").run(operation, activations=(a,), parameters=(b,))
    np.testing.assert_allclose(run.outputs[5], a @ b, rtol=1e-5, atol=1e-5)
    flops, messages, elements = count_costs(run.statistics)
    push = count_costs(plan(operation, MESH, activations=(a,), parameters=(b,)))
    assert flops == push[0]
    if policy is POLICIES.MatchedInnerSharding:
        assert (messages, elements) == (P * 2 * (g - 1), P * 2 * (g - 1) / g * m * n)
        assert push[1:] == (P * (g - 1), P * (g - 1) * m * n)
    else:
        assert (messages, elements) == push[1:]
    backward = cluster("ring").run(operation.backward(), activations=(a, dc), parameters=(b,))
    np.testing.assert_allclose(operation.backward().join(backward.outputs, MESH)["db"], a.T @ dc, rtol=1e-5, atol=1e-4)
    planned = plan(operation.backward(), MESH, activations=(a, dc), parameters=(b,), algorithm="ring")
    assert backward.statistics == planned


@pytest.mark.parametrize(
    ("case", "c_text", "flops", "elements"),
    [
        # A device's flops and sent elements in a product of 64 by 32 by 48; c has 3072 elements.
        ("unsharded", "[m/x, n/y]", 1 / 8, 0),
        ("unsharded", "[m, n] sum(y)", 1 / 4, 0),
        ("unsharded", "[m/x, n] sum(y)", 1 / 8, 0),
        ("matched 4", "[m/y, n]", 1 / 4, 3 * 3072 / 4),
        ("matched 4", "[m/x, n/y]", 1 / 8, 3 * 1536 / 4),
        ("matched 4", "[m/x, n]", 1 / 8, 3 * 1536),
        ("matched 4", "[m, n] sum(y)", 1 / 4, 0),
        ("matched 4", "[m, n] sum(x) sum(y)", 1 / 8, 0),
        ("matched 8", "[m/x, n/y]", 1 / 8, 1536 + 3 * 1536 / 4),
        ("matched 8", "[m/x, n] sum(y)", 1 / 8, 1536),
        ("unmatched", "[m/x, n/y]", 1 / 8, 3 * 32 * 32 / 4 + 32 * 12 / 2),
        ("unmatched", "[m, n] sum(y)", 1 / 4, 32 * 48 / 2),
        ("outer", "[m/x, n]", 1 / 2, 3 * 32 * 8 + 16 * 48),
        ("outer", "[m/x, n/y]", 1 / 8, 3 * 32 * 8 + 16 * 12),
        ("full", "[m/x, n/y]", 1 / 8, 3 * 32 * 8 + 16 * 12),
        ("full", "[m/x, n]", 1 / 8, 3 * 32 * 8 + 16 * 12 + 3 * 32 * 12),
        ("full", "[m, n/y]", 1 / 8, 3 * 32 * 8 + 16 * 12 + 32 * 12),
    ],
)
def test_a_cut_or_partial_c_costs_less(case, c_text, flops, elements):
    _, a_text, b_text, _ = CASES[case]
    operation = MatMul(MatMulSharding((a_text, b_text, c_text)))
    whole = MatMul(MatMulSharding((a_text, b_text)))
    a, b, dc = arrays(64, 32, 48)
    run = cluster().run(operation, activations=(a,), parameters=(b,))
    np.testing.assert_allclose(operation.join(run.outputs, MESH), a @ b, rtol=1e-5, atol=1e-5)
    assert {device.flops for device in run.statistics.devices} == {2 * 64 * 32 * 48 * flops}
    assert {device.traffic.sent_nbytes for device in run.statistics.devices} == {4 * elements}
    of_whole = plan(whole, MESH, activations=(a,), parameters=(b,))
    assert (run.statistics.nbytes, run.statistics.flops) < (of_whole.nbytes, of_whole.flops)
    backward = cluster().run(operation.backward(), activations=(a, dc), parameters=(b,))
    gradients = operation.backward().join(backward.outputs, MESH)
    np.testing.assert_allclose(gradients["da"], dc @ b.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(gradients["db"], a.T @ dc, rtol=1e-5, atol=1e-4)


def test_addends_of_an_inner_dim_that_is_cut_unevenly_once_more():
    operation = MatMul(MatMulSharding(("[m, k/x]", "[k/x, n]", "[m, n] sum(y)")))
    a, b, _ = arrays(3, 6, 5)
    run = cluster().run(operation, activations=(a,), parameters=(b,))
    # Each half of 3 along x is 1, 1, 1, 0 along y.
    assert [device.flops for device in run.statistics.devices] == [2 * 3 * 5, 2 * 3 * 5, 2 * 3 * 5, 0] * 2
    np.testing.assert_allclose(operation.join(run.outputs, MESH), a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "c_text", "gathered"),
    [
        # Such an axis stays with rows or columns: gathered is the smaller factor, or what C is not cut by.
        ((32, 8, 4), "[m, n]", 8 * 4 + 32 * 4),
        ((4, 8, 32), "[m, n]", 4 * 8 + 4 * 32),
        ((32, 8, 4), "[m, n/y]", 32 * 8),
        ((4, 8, 32), "[m/y, n]", 8 * 32),
    ],
)
def test_an_axis_of_rows_and_columns_gathers_the_cheaper(sizes, c_text, gathered):
    m, k, n = sizes
    operation = MatMul(MatMulSharding(("[m/y, k]", "[k, n/y]", c_text)))
    a, b, _ = arrays(m, k, n)
    run = cluster().run(operation, activations=(a,), parameters=(b,))
    np.testing.assert_allclose(operation.join(run.outputs, MESH), a @ b, rtol=1e-5, atol=1e-5)
    assert run.statistics.nbytes == P * 4 * 3 * gathered / 4


def test_a_matched_inner_dim_leaves_the_columns_cut():
    sharding = MatMulSharding(("[m, k/y]", "[k/y, n/x]"))
    operation = MatMul(sharding, POLICIES.MatchedInnerSharding)
    a, b, _ = arrays(8, 16, 4)
    run = cluster().run(operation, activations=(a,), parameters=(b,))
    np.testing.assert_allclose(operation.join(run.outputs, MESH), a @ b, rtol=1e-5, atol=1e-5)
    # Half of C is all-reduced along y, then gathered along x.
    assert count_costs(run.statistics) == (2 * 8 * 16 * 4, P * (Y - 1 + X - 1), P * (3 * 16 + 16))


def test_each_gradient_is_cut_for_itself():
    operation = MatMul(MatMulSharding(("[m/x, k]", "[k, n/x]")), POLICIES.UnmatchedInnerSharding).backward()
    statistics = plan(operation, MESH, activations=((8, 16), (8, 4)), parameters=((16, 4),))
    # Both halves of dC are free; A is gathered for dB, and B for dA.
    assert count_costs(statistics) == (P * 2 * 8 * 16 * 4, P * 2, P * (8 * 16 + 16 * 4) / 2)


def test_columns_alone_cut_need_no_device_to_hang():
    sharding = MatMulSharding(("[m, k]", "[k, n/y]"))
    assert sharding.policy is POLICIES.FullSharding
    a, b, _ = arrays(6, 5, 9)
    run = cluster().run(MatMul(MatMulSharding(("[m, k]", "[k, n/=y]"))), activations=(a,), parameters=(b,))
    for output in run.outputs:
        np.testing.assert_allclose(output, a @ b, rtol=1e-5, atol=1e-5)
    even = plan(MatMul(sharding), MESH, activations=((8, 8),), parameters=((8, 8),))
    assert count_costs(even) == (P * 2 * 8**3 / Y, P * (Y - 1), P * (Y - 1) * 64 / Y)


@settings(max_examples=count_of(60))
@given(st.data())
def test_any_shardings_by_any_policy_give_the_product(data):
    mesh = DeviceMesh(
        data.draw(st.tuples(*[st.integers(1, 3)] * 3).filter(lambda lengths: np.prod(lengths) <= 8)), "xyz"
    )
    num_dims = data.draw(st.integers(2, 3))
    sharding = MatMulSharding(
        [data.draw(shardings(num_dims)), data.draw(shardings(2)), data.draw(shardings(num_dims, "xyz"))]
    )
    operation = MatMul(sharding, data.draw(st.sampled_from(sharding.policies)))
    rows = data.draw(st.tuples(*[st.integers(1, 6)] * (num_dims - 1)))
    k, n = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    # Whole numbers, so that sums are exact in any order.
    a, b, dc = (generator.integers(-9, 9, shape).astype("float32") for shape in ((*rows, k), (k, n), (*rows, n)))
    algorithm = data.draw(st.sampled_from(["push", "ring"]))
    run = cluster(algorithm, mesh=mesh).run(operation, activations=(a,), parameters=(b,))
    assert np.array_equal(operation.join(run.outputs, mesh), a @ b)
    assert run.statistics == plan(operation, mesh, activations=(a,), parameters=(b,), algorithm=algorithm)
    run = cluster(algorithm, mesh=mesh).run(operation.backward(), activations=(a, dc), parameters=(b,))
    gradients = operation.backward().join(run.outputs, mesh)
    assert np.array_equal(gradients["da"], dc @ b.T)
    assert np.array_equal(gradients["db"], a.reshape(-1, k).T @ dc.reshape(-1, n))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32"])
def test_every_element_type_is_multiplied(dtype, kind):
    a, b, dc = (np.round(4 * array) for array in arrays(6, 8, 4))
    made = [array.astype(getattr(ml_dtypes, dtype, None) or dtype) for array in (a, b, dc)]
    if kind == "torch":
        made = [torch.from_numpy(array).to(getattr(torch, dtype)) for array in (a, b, dc)]
    operation = MatMul(MatMulSharding(("[m/=x, k/=y]", "[k/=y, n]", "[m/x, n]")), POLICIES.MatchedInnerSharding)
    run = cluster().run(operation.backward(), activations=(made[0], made[2]), parameters=(made[1],))
    gradients = operation.backward().join(run.outputs, MESH)
    assert gradients["da"].dtype == made[0].dtype
    assert type(gradients["da"]) is type(made[0])
    # Small whole numbers: exact but for the 8 bits of a bfloat16.
    tolerance = 2**-8 if dtype == "bfloat16" else 0
    da = gradients["da"].float().numpy() if kind == "torch" else gradients["da"].astype("float32")
    db = gradients["db"].float().numpy() if kind == "torch" else gradients["db"].astype("float32")
    np.testing.assert_allclose(da, dc @ b.T, rtol=tolerance)
    np.testing.assert_allclose(db, a.T @ dc, rtol=2 * tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_elements_are_summed_in_wide_ones(dtype, kind):
    # In its own 8 bits a bfloat16's sum of ones stays at 256, and a float16's of 1.5 at 4096.
    made = [np.full(shape, 1.5).astype(getattr(ml_dtypes, dtype, None) or dtype) for shape in ((1, 4096), (4096, 1))]
    if kind == "torch":
        made = [torch.full(shape, 1.5, dtype=getattr(torch, dtype)) for shape in ((1, 4096), (4096, 1))]
    run = cluster(mesh=(1,)).run(
        MatMul(MatMulSharding(("[m, k]", "[k, n]"))), activations=made[:1], parameters=made[1:]
    )
    assert float(run.outputs[0][0, 0]) == 2.25 * 4096


@pytest.mark.parametrize(
    ("texts", "policy"),
    [
        (("[m, k/x]", "[k/y, n]"), POLICIES.UnmatchedInnerSharding),
        (("[m, k/x/y]", "[k/y/x, n]"), POLICIES.UnmatchedInnerSharding),
        (("[m, k/x]", "[k, n]"), POLICIES.OuterSharding),
        (("[m/x, k]", "[k, n]"), POLICIES.OuterSharding),
        (("[m/x, k]", "[k, n/y]"), POLICIES.FullSharding),
        (("[m, k/x]", "[k/x, n/y]"), POLICIES.FullSharding),
        (("[b/x, s, k/y]", "[k/y, n]"), POLICIES.OuterSharding),
        (("[b, s, k/y]", "[k/y, n]"), POLICIES.MatchedInnerSharding),
    ],
)
def test_shardings_have_their_own_policy(texts, policy):
    sharding = MatMulSharding(texts)
    assert sharding.policy is policy
    assert sharding.policies[0] is policy
    is_matched = texts[0].split("k")[1].rstrip("]") == texts[1].split("k")[1].split(",")[0] != ""
    assert (POLICIES.MatchedInnerSharding in sharding.policies) == is_matched


def test_the_cheapest_policy_sends_the_fewest_bytes():
    # Data-parallel rows and a tensor-parallel inner dim: the shardings' own policy gathers both factors.
    sharding = MatMulSharding(("[m/x, k/y]", "[k/y, n]", "[m/x, n]"))
    shapes = {"activations": ((16, 64),), "parameters": ((64, 16),)}
    choice = cheapest(sharding, MESH, **shapes)
    assert sharding.policy is POLICIES.OuterSharding
    assert choice.operation == MatMul(sharding, POLICIES.MatchedInnerSharding)
    assert choice.statistics == plan(choice.operation, MESH, **shapes)
    bytes_of = {operation.policy: nbytes for operation, nbytes, _ in choice.costs}
    assert bytes_of == {
        POLICIES.OuterSharding: P * 4 * (3 * 8 * 16 + 3 * 16 * 16),
        POLICIES.MatchedInnerSharding: P * 4 * 3 * 8 * 16,
        POLICIES.UnmatchedInnerSharding: P * 4 * (3 * 8 * 16 + 3 * 16 * 16),
        POLICIES.FullSharding: P * 4 * (3 * 8 * 16 + 3 * 16 * 16),
    }


def test_ties_go_to_fewer_flops_then_to_the_first():
    whole, cut, again = (MatMulSharding(("[m, k]", "[k, n]", c)) for c in ("[m, n]", "[m/x, n]", "[m, n/x]"))
    shapes = {"activations": ((8, 8),), "parameters": ((8, 8),)}
    assert cheapest([MatMul(whole), MatMul(cut), MatMul(again)], MESH, **shapes).operation == MatMul(cut)
    assert cheapest([MatMul(whole), MatMul(again), MatMul(cut)], MESH, **shapes).operation == MatMul(again)


def test_the_algorithm_decides_too():
    inner, outer = MatMulSharding(("[m, k/y]", "[k/y, n]")), MatMulSharding(("[m/y, k]", "[k, n/x]"))
    shapes = {"activations": ((16, 16),), "parameters": ((16, 16),)}
    candidates = [MatMul(inner), MatMul(outer)]
    # An all-reduce sends 3 times the product by push and 1.5 times by ring, a gather of 8 blocks 7/8 by both.
    push, ring = (cheapest(candidates, MESH, algorithm=name, **shapes) for name in ("push", "ring"))
    assert [nbytes for _, nbytes, _ in push.costs] == [P * 4 * 3 * 256, P * 4 * 7 * 32]
    assert [nbytes for _, nbytes, _ in ring.costs] == [P * 4 * 1.5 * 256, P * 4 * 7 * 32]


def test_seconds_of_a_link_model_decide_where_it_is_given():
    along_x, along_y = (MatMulSharding((f"[m, k/{axis}]", f"[k/{axis}, n]")) for axis in "xy")
    shapes = {"activations": ((16, 16),), "parameters": ((16, 16),)}
    candidates = [MatMul(along_y), MatMul(along_x)]
    assert cheapest(candidates, MESH, **shapes).operation == MatMul(along_x)  # fewer ranks, so fewer bytes
    slow = LinkModel(latency_seconds=1e-6, bandwidth_nbytes_per_second=1e9, axes={"x": (1e-6, 1e6)})
    choice = cheapest(candidates, MESH, links=slow, **shapes)
    assert choice.operation == MatMul(along_y) and choice.seconds[0] < choice.seconds[1]


def test_an_impossible_candidate_is_not_chosen():
    wrong = MatMulSharding(("[m/tp, k]", "[k, n]"))
    uneven = MatMulSharding(("[m/y, k]", "[k, n]"))
    right = MatMulSharding(("[m/x, k]", "[k, n/y]"))
    shapes = {"activations": ((6, 8),), "parameters": ((8, 8),)}
    choice = cheapest([wrong, uneven, right], MESH, **shapes)
    assert choice.operation.sharding == right
    assert {operation.sharding for operation, _ in choice.refused} == {wrong, uneven}
    with pytest.raises(LayoutError, match=r"a: 6/y: 6 is not divisible by 4"):
        cheapest([uneven], MESH, **shapes)
    with pytest.raises(UsageError, match="no shardings to choose from"):
        cheapest([], MESH, **shapes)


def test_layers_are_chosen_from_as_products_are():
    shapes = {"activations": ((8, 4, 16),), "parameters": ((16, 32), (32,), (32, 16), (16,))}
    layers = [FeedForwardSharding.unsharded(), FeedForwardSharding.gspmd()]
    assert cheapest(layers, MESH, **shapes).operation == FeedForward(layers[0])
    assert [flops for _, _, flops in cheapest(layers, MESH, **shapes).costs] == [
        P * 4 * 8 * 4 * 16 * 32,
        4 * 8 * 4 * 16 * 32,
    ]


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        (("[m/x, k/x]", "[k, n]"), "the layout .* is cut twice by 'x'"),
        (("[m, k] sum(x)", "[k, n]"), "A cannot be a partial sum along 'x'"),
        (("[m, k]", "[k, n] sum(y)"), "B cannot be a partial sum"),
        (("[k]", "[k, n]"), "not of a product"),
        (("[m, k]", "[e, k, n]"), "not of a product"),
        (("[b, m, k]", "[k, n]", "[m, n]"), "not of a product"),
        (("[m, k]",), "has the shardings of A, B and C"),
    ],
)
def test_shardings_that_fit_no_product_are_refused(texts, match):
    with pytest.raises((LayoutError, UsageError), match=match):
        MatMulSharding(texts)


def test_one_axis_for_two_dims_of_a_tensor_is_refused():
    with pytest.raises(LayoutError, match="the axis 'x' has two roles in the sharding"):
        MatMulSharding((TensorSharding(("x", "x")), TensorSharding((None, None))))


@pytest.mark.parametrize("sharding", [None, "[m, k]", ("[m, k]", "[k, n]", "[m, n]")])
def test_invalid_product_shardings_are_refused(sharding):
    with pytest.raises(UsageError, match="MatMul takes a MatMulSharding"):
        MatMul(sharding)


def test_a_policy_that_the_shardings_cannot_have_is_refused():
    with pytest.raises(UsageError, match="do not fit the policy MatchedInnerSharding"):
        MatMul(MatMulSharding(("[m, k/y]", "[k/x, n]")), POLICIES.MatchedInnerSharding)
    with pytest.raises(UsageError, match="do not fit the policy Unsharded"):
        MatMul(MatMulSharding(("[m, k/y]", "[k/y, n]")), POLICIES.Unsharded)


def test_arrays_that_do_not_fit_are_refused_before_anything_runs():
    operation = MatMul(MatMulSharding(("[m/x, k]", "[k, n]", "[m, n/y]")))
    a, b, dc = arrays(8, 6, 8)
    with pytest.raises(LayoutError, match="a cannot be multiplied by b") as caught:
        cluster().run(operation, activations=(a,), parameters=(b[:5],))
    assert (caught.value.tensor, caught.value.want) == ("b", "b of 6 rows in F32")
    with pytest.raises(LayoutError, match="a cannot be multiplied by b"):
        cluster().run(operation, activations=(a,), parameters=(b.astype("float64"),))
    with pytest.raises(LayoutError, match="c: 6/y: 6 is not divisible by 4") as caught:
        cluster().run(operation, activations=(a,), parameters=(b[:, :6],))
    assert caught.value.tensor == "c"
    with pytest.raises(LayoutError, match="dc is not the gradient of its tensor"):
        cluster().run(operation.backward(), activations=(a, dc[:4]), parameters=(b,))
    with pytest.raises(UsageError, match="b is a different kind of array than a") as other:
        cluster().run(operation, activations=(a,), parameters=(torch.from_numpy(b),))
    assert (other.value.tensor, other.value.got, other.value.want) == ("b", "torch", "numpy, as a")
    with pytest.raises(UsageError, match="MatMulBackward takes the activations a, dc"):
        cluster().run(operation.backward(), activations=(a,), parameters=(b,))


def test_torch_agrees_on_the_gradients():
    a, b, dc = (torch.from_numpy(array) for array in arrays(10, 6, 7, "float64"))
    operation = MatMul(MatMulSharding(("[m/=x, k/=y]", "[k/=x, n/=y]", "[m/=y, n/=x]"))).backward()
    run = cluster().run(operation, activations=(a, dc), parameters=(b,))
    gradients = operation.join(run.outputs, MESH)
    wanted_a, wanted_b = a.clone().requires_grad_(), b.clone().requires_grad_()
    (wanted_a @ wanted_b).backward(dc)
    torch.testing.assert_close(gradients["da"], wanted_a.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients["db"], wanted_b.grad, rtol=1e-12, atol=1e-12)
