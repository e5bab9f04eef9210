"""Shardings: the elements of each device, the text forms, and invalid shardings."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xrank.errors import ContradictionError, LayoutError
from xrank.layout.local_part import local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.tensor_layout import TensorLayout
from xrank.virtual.builder import join_shards, shards_of
from xrank.virtual.sharding import FULL, DimSharding, TensorSharding, canonical

MESH = DeviceMesh((2, 4), ("x", "y"))


def list_elements(sharding: TensorSharding, shape: tuple[int, ...], mesh: DeviceMesh = MESH) -> list[list[int]]:
    """Return the elements of 0, 1, 2, ... that each device holds."""
    array = np.arange(np.prod(shape)).reshape(shape)
    return [shard.ravel().tolist() for shard in shards_of(array, sharding, mesh)]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 6, 7, 8, 9])
def test_an_uneven_dim_is_cut_as_array_split_or_as_chunk(size):
    balanced = [part.tolist() for part in np.array_split(np.arange(size), 4)]
    assert list_elements(TensorSharding(("y",)), (size,)) == balanced * 2
    chunks = [part.tolist() for part in torch.arange(size).chunk(4)] if size else []
    chunks += [[]] * (4 - len(chunks))
    assert list_elements(TensorSharding((DimSharding(("y",), "/~"),)), (size,)) == chunks * 2


def test_a_cut_that_must_be_even_is_refused_where_it_does_not_divide():
    assert list_elements(TensorSharding((DimSharding(("y",), "/"),)), (8,))[3] == [6, 7]
    with pytest.raises(LayoutError, match=r"7/y: 7 is not divisible by 4") as caught:
        list_elements(TensorSharding((DimSharding(("y",), "/"),)), (7,))
    assert caught.value.want == "a multiple of 4"


def test_two_axes_cut_one_dim_one_within_the_other():
    halves = np.array_split(np.arange(11), 2)
    inner = [part.tolist() for half in halves for part in np.array_split(half, 4)]
    assert list_elements(TensorSharding((("x", "y"),)), (11,)) == inner
    other = [part.tolist() for quarter in np.array_split(np.arange(11), 4) for part in np.array_split(quarter, 2)]
    assert list_elements(TensorSharding((("y", "x"),)), (11,)) == [other[2 * y + x] for x in range(2) for y in range(4)]


def test_a_device_has_the_block_of_its_place():
    assert list_elements(TensorSharding(("x", "y")), (2, 4)) == [[i] for i in range(8)]
    assert list_elements(TensorSharding(("y", None)), (4, 1)) == [[0], [1], [2], [3]] * 2
    assert list_elements(TensorSharding((None, None)), (1, 2)) == [[0, 1]] * 8


@pytest.mark.parametrize(
    ("dims", "sums", "roles"),
    [
        (("x", "x"), (), "dim 0 and dim 1"),
        ((("y", "x"), None, "y"), (), "dim 0 and dim 2"),
        (("x", None), ("x",), "dim 0 and sum"),
        ((None,), ("y", "y"), "sum and sum"),
    ],
)
def test_an_axis_of_two_roles_is_refused_by_name(dims, sums, roles):
    with pytest.raises(LayoutError, match=f"the axis '[xy]' has two roles in the sharding .*: {roles}"):
        TensorSharding(dims, sums)


def test_an_axis_that_cuts_a_dim_twice_or_is_not_there_is_refused():
    with pytest.raises(LayoutError, match="'x' cuts one dim twice"):
        DimSharding(("x", "x"))
    with pytest.raises(LayoutError, match="has no axis 'tp'"):
        list_elements(TensorSharding(("tp",)), (8,))
    with pytest.raises(LayoutError, match=r"is not of a tensor of shape \(8,\)"):
        list_elements(TensorSharding(("x", None)), (8,))
    with pytest.raises(LayoutError, match="cannot be cut by '%'"):
        DimSharding(("x",), "%")
    for axes in (2, ("x", 2), [None]):
        with pytest.raises(LayoutError, match="must be a name"):
            DimSharding(axes)


def test_names_alone_are_axes_whole():
    assert TensorSharding(("tp", None), "dp") == TensorSharding((DimSharding(("tp",)), FULL), ("dp",))
    assert DimSharding("tp").axes == ("tp",)


@pytest.mark.parametrize(
    "text", ["[d0/=x, d1]", "[d0/~x/~y, d1]", "[d0/x, d1/=y]", "[d0, d1/y] sum(x)", "[d0] sum(x) sum(y)", "[]"]
)
def test_layouts_and_shardings_are_equivalent(text):
    sharding = TensorSharding.from_layout(text)
    assert str(sharding) == str(sharding.to_layout(MESH)) == text
    assert TensorSharding.from_layout(sharding.to_layout(MESH)) == sharding
    assert sharding.to_layout(MESH).device_mesh == MESH


def test_a_size_gets_no_name_of_an_axis():
    mesh = DeviceMesh((2,), ("d0",))
    assert str(TensorSharding(("d0",)).to_layout(mesh)) == "[dd0/=d0]"


@pytest.mark.parametrize("text", ["[d/=x/~y, e]", "[d/~y, e/=x]", "[d, e/~x/~y]"])
def test_shards_match_the_layout(text):
    layout = TensorLayout.parse(text)
    shape = (7, 9)
    if "/=x/~y" in text:
        with pytest.raises(LayoutError, match="cuts of several kinds in dim 0"):
            TensorSharding.from_layout(layout)
        return
    sharding = TensorSharding.from_layout(layout)
    for device in MESH.ranks:
        part = local_part(layout, MESH, MESH.coordinate(device), shape)
        ranges = sharding.slices(MESH, MESH.coordinate(device), shape)
        assert part.shape == tuple(high - low for low, high in ranges)
        first = np.ravel_multi_index([low for low, _ in ranges], shape) if np.prod(part.shape) else None
        assert (part.nests[0].y if part.nests else None) == first


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[d] where x=0", '"where"'),
        ("[d/x%2]", "dim 0"),
        ("[a b/x]", "dim 0"),
        ("[e, pad(d, 8)/y]", "dim 1"),
        ("[<q: d/x | k: e/x>]", "dim 0"),
        ("[d] in other", "a view"),
    ],
)
def test_a_layout_with_more_than_axis_cuts_is_refused(text, what):
    with pytest.raises(LayoutError) as caught:
        TensorSharding.from_layout(text)
    assert f"because of {what}" in caught.value.message
    assert caught.value.next_step


def test_questions_of_the_seed_have_answers():
    sharding = TensorSharding(("x", None, "y"))
    assert (sharding[0].axis, sharding[1].full, sharding[2].num_shards(MESH)) == ("x", True, 4)
    assert sharding.axes_sharded_at({"x": 0, "y": 2})
    assert not sharding.axes_sharded_at({"x": 0})
    assert not sharding.sharded_at(0)
    assert TensorSharding((("x", "y"), None)).sharded_at(0)
    assert not TensorSharding((None, "x"), "y").sharded_at(1)
    assert DimSharding(("x", "y")).axis is None
    assert DimSharding(("x", "y")).num_shards(MESH) == 8
    assert TensorSharding.replicated(2).full
    assert not TensorSharding((None,), "x").full


def test_equal_cuts_have_one_normal_form():
    mesh = DeviceMesh((2, 1, 3), ("x", "one", "z"))
    assert canonical(DimSharding(("x", "one")), 8, mesh) == DimSharding(("x",), "/")
    assert canonical(DimSharding(("x",), "/~"), 8, mesh) == canonical(DimSharding(("x",), "/="), 8, mesh)
    assert canonical(DimSharding(("x",), "/~"), 7, mesh) != canonical(DimSharding(("x",), "/="), 7, mesh)
    assert canonical(DimSharding(("one",)), 7, mesh) == FULL


@given(st.data())
def test_shards_join_to_the_array_they_were_cut_from(data):
    names = data.draw(st.permutations("xyz"))
    places = [data.draw(st.integers(0, 2)) for _ in names]
    kinds = [data.draw(st.sampled_from(["/=", "/~"])) for _ in range(2)]
    dims = [DimSharding([n for n, p in zip(names, places, strict=True) if p == d], kinds[d]) for d in range(2)]
    sharding = TensorSharding(dims)
    mesh = DeviceMesh(data.draw(st.tuples(*[st.integers(1, 3)] * 3)), "xyz")
    shape = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    array = np.arange(shape[0] * shape[1], dtype=np.int16).reshape(shape)
    for whole in (array, torch.from_numpy(array.copy())):
        joined = join_shards(shards_of(whole, sharding, mesh), sharding, mesh)
        assert type(joined) is type(whole)
        assert np.array_equal(np.asarray(joined), array)


def test_addends_are_added_and_replicas_compared():
    sharding = TensorSharding((None, "x"), "y")
    shards = [np.full((2, 3), device, np.float32) for device in range(8)]
    joined = join_shards(shards, sharding, MESH)
    assert joined.tolist() == [[6, 6, 6, 22, 22, 22]] * 2
    replicas = [np.zeros((2, 3), np.float32) for _ in range(8)]
    replicas[6][1, 2] = 1e-30
    with pytest.raises(ContradictionError, match="devices 4 and 6 have the same part") as caught:
        join_shards(replicas, TensorSharding((None, "x")), MESH)
    assert (caught.value.rank, caught.value.index_range) == (6, "0:2, 3:6")


@pytest.mark.parametrize(
    ("wrong", "device"),
    [(np.zeros((2, 4)), 0), (np.zeros((3, 3)), 5), (np.zeros(3), 5), (np.zeros((2, 3), np.float32), 5)],
)
def test_invalid_shards_are_not_joined(wrong, device):
    shards = [np.zeros((2, 3)) for _ in range(8)]
    shards[5] = wrong
    # One column too many is 25 columns, of which the first device would have 4.
    with pytest.raises(LayoutError, match=f"device {device} has no shard"):
        join_shards(shards, TensorSharding((None, ("x", "y"))), MESH)
    with pytest.raises(LayoutError, match="each device has one shard"):
        join_shards(shards[:7], TensorSharding((None, "x")), MESH)
    with pytest.raises(LayoutError, match="cannot be split into partial sums"):
        shards_of(wrong, TensorSharding((None,) * wrong.ndim, "x"), MESH)


def test_shards_of_a_mesh_in_any_form():
    whole = np.arange(12).reshape(4, 3)
    for mesh in ((2, 2), DeviceMesh((2, 2), ("x", "y"))):
        shards = shards_of(whole, "[a/x/y, b]", mesh)
        assert [shard.tolist() for shard in shards] == [[row] for row in whole.tolist()]
        assert join_shards(shards, "[a/x/y, b]", mesh).tolist() == whole.tolist()


def test_shards_of_two_kinds_do_not_join():
    with pytest.raises(LayoutError, match="different array types") as raised:
        join_shards([np.ones(2), torch.ones(2, dtype=torch.float64)], "[a/x]", 2)
    assert raised.value.rank == 1 and raised.value.got == "a torch array"
