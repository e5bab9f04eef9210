"""Local parts against index arrays: a rank's part of np.arange, cut dim by dim as numpy would."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from xrank.errors import IncompleteError, LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import compile_dim, infer_shape, local_part
from xrank.layout.nests import Nest, addresses, canonical
from xrank.layout.notation import Size, Split

pytestmark = pytest.mark.quick


def part_of(text: str, grid: str, rank: int, shape: tuple[int, ...]):
    mesh = DeviceMesh.parse_grid(grid)
    return local_part(TensorLayout.parse(text, mesh), mesh, mesh.coordinate(rank), shape)


def elements(part) -> np.ndarray:
    """Return the global addresses of a part's local elements, in the local shape; -1 where no nest names one."""
    held = np.full(math.prod(part.shape), -1)
    for nest in part.nests:
        assert canonical(nest) == nest
        for x, y in addresses(nest):
            assert held[x] == -1
            held[x] = y
    return held.reshape(part.shape)


def chunk(array: np.ndarray, count: int, place: int, dim: int) -> np.ndarray:
    """Return one ceil chunk, as torch.chunk cuts; past the last one, an empty one."""
    step = -(-array.shape[dim] // count)
    return array.take(range(*slice(place * step, (place + 1) * step).indices(array.shape[dim])), axis=dim)


def oracle(layout: TensorLayout, mesh: DeviceMesh, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    held = np.arange(math.prod(shape)).reshape(shape)
    for i, axes in enumerate(layout.axes):
        for axis in axes:
            held = chunk(held, mesh.axis_length(axis), mesh.coordinate(rank)[axis], i)
    return held


def test_example_1_columns_and_rows():
    columns = part_of("[f/tp, h]", "tp=2", 1, (8, 4))
    assert columns.shape == (4, 4) and columns.nests == (Nest(0, 16, ((16, 1, 1),)),)
    rows = part_of("[h, f/tp]", "tp=2", 1, (4, 8))
    assert rows.shape == (4, 4) and rows.nests == (Nest(0, 4, ((4, 4, 8), (4, 1, 1))),)
    assert part_of("[h]", "tp=2", 0, (4,)) == part_of("[h]", "tp=2", 1, (4,))


def test_example_2_fsdp_over_tp():
    ranges = {(0, 0): (0, 2), (0, 1): (4, 6), (1, 0): (2, 4), (1, 1): (6, 8)}
    mesh = DeviceMesh.parse_grid("dp=2 tp=2")
    for (dp, tp), (low, high) in ranges.items():
        part = part_of("[f/tp/~dp, h]", "dp=2 tp=2", mesh.rank_at({"dp": dp, "tp": tp}), (8, 3))
        assert part.shape == (2, 3) and part.nests == (Nest(0, low * 3, ((6, 1, 1),)),)
        assert high - low == 2


def test_example_3_uneven():
    parts = [part_of("[5/~dp]", "dp=4", rank, (5,)) for rank in range(4)]
    assert [part.shape for part in parts] == [(2,), (2,), (1,), (0,)]
    assert [elements(part).tolist() for part in parts] == [[0, 1], [2, 3], [4], []]
    assert parts[3].nests == ()


def test_a_scalar_is_one_nest():
    part = part_of("[]", "tp=2", 1, ())
    assert part.shape == () and part.nests == (Nest(0, 0, ()),)


def test_an_empty_tensor_has_no_nests():
    for text in ("[n, 0]", "[n/tp, 0]", "[n, 0/tp]", "[n, 0/~tp]"):
        part = part_of(text, "tp=2", 1, (4, 0))
        assert part.nests == () and 0 in part.shape


@st.composite
def cases(draw, even: bool = False):
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = DeviceMesh(lengths, [f"a{i}" for i in range(len(lengths))])
    shape = draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
    dims = [Size(f"n{i}") for i in range(len(shape))]
    for axis in draw(st.permutations(mesh.axis_names)):
        where = draw(st.integers(-1, len(shape) - 1))
        if where >= 0:
            dims[where] = Split(dims[where], axis, "/" if even else "/~")
            if even:
                shape[where] = draw(st.integers(0, 2)) if shape[where] > 2 else shape[where]
    layout = TensorLayout.from_dims(dims, mesh)
    if even:
        shape = [
            n * math.prod(mesh.axis_length(axis) for axis in axes) for n, axes in zip(shape, layout.axes, strict=True)
        ]
    return layout, mesh, tuple(shape)


@given(cases() | cases(even=True))
@settings(max_examples=count_of(200))
def test_every_rank_holds_what_chunks_hold_and_every_element_is_held(case):
    layout, mesh, shape = case
    distinct = {}
    for rank in mesh.ranks:
        part = local_part(layout, mesh, mesh.coordinate(rank), shape)
        held, expected = elements(part), oracle(layout, mesh, rank, shape)
        assert held.shape == expected.shape and (held == expected).all()
        place = tuple(mesh.coordinate(rank)[axis] for axes in layout.axes for axis in axes)
        assert distinct.setdefault(place, part) == part  # ranks that differ along other axes are replicas
    once = np.sort(np.concatenate([elements(part).ravel() for part in distinct.values()]))
    assert (once == np.arange(math.prod(shape))).all()


@given(cases() | cases(even=True))
def test_infer_shape_reads_the_global_shape_off_the_local_ones(case):
    layout, mesh, shape = case
    locals_ = {rank: local_part(layout, mesh, mesh.coordinate(rank), shape).shape for rank in mesh.ranks}
    assert infer_shape(layout, mesh, locals_) == shape


def test_infer_shape_needs_one_rank_a_place_only():
    mesh = DeviceMesh.parse_grid("pp=2 dp=2 tp=2")
    layout = TensorLayout.parse("[f/~tp, h]", mesh)
    assert infer_shape(layout, mesh, {4: (3, 5), 7: (2, 5)}) == (5, 5)
    with pytest.raises(IncompleteError, match="tp=1") as caught:
        infer_shape(layout, mesh, {4: (3, 5), 6: (3, 5)})
    assert "[4, 6]" in caught.value.got
    with pytest.raises(IncompleteError):
        infer_shape(layout, mesh, {})


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("[f/tp, h]", {0: (2, 5), 1: (2, 5), 2: (3, 5), 3: (2, 5)}, "ranks 0 and 2 hold the same part of dim 0"),
        ("[f/tp, h]", {0: (2, 5), 1: (2, 6)}, "ranks 0 and 1 hold the same part of dim 1"),
        ("[f/tp, h]", {0: (2, 5), 1: (1, 5)}, "3 is not divisible by 2"),
        ("[f/tp, h]", {0: (4, 5), 1: (2, 5)}, "rank 0's local shape is not the one"),
        ("[f/~tp, h]", {0: (2, 5), 1: (3, 5)}, "rank 0's local shape is not the one"),
        ("[f/~tp/~dp]", {0: (3,), 1: (1,), 2: (1,), 3: (1,)}, "rank 0's local shape is not the one"),
        ("[f/tp, h]", {0: (2,), 1: (2,)}, "does not have the dims"),
        ("[5/~tp]", {0: (2,), 1: (2,)}, "is 5 in the layout and 4"),
        ("[f, f/tp]", {0: (4, 1), 1: (4, 1)}, "is 4 in the layout and 2"),
        ("[f]", {9: (4,)}, "rank 9 is not in the mesh"),
        ("[f/ep]", {0: (4,)}, "no axis 'ep'"),
    ],
)
def test_infer_shape_refuses_shapes_that_contradict(text, shapes, message):
    with pytest.raises(LayoutError, match=message):
        infer_shape(TensorLayout.parse(text), DeviceMesh.parse_grid("dp=2 tp=2"), shapes)


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("[f, h]", (4,), "2 dims for 1"),
        ("[]", (1,), "0 dims for 1"),
        ("[f]", (), "1 dims for 0"),
        ("[3, h]", (4, 4), "dim 0, 3, is 3 in the layout and 4 in the shape"),
        ("[h, h]", (4, 5), "dim 1, h, is 4 in the layout and 5 in the shape"),
        ("[f/tp]", (7,), r"f/tp: 7 is not divisible by 2"),
        ("[f/~dp/tp]", (5,), r"f/~dp/tp: 3 is not divisible by 2"),
        ("[f/ep]", (4,), "no axis 'ep'"),
        ("[f]", (-1,), "negative"),
        ("[f]", (1.5,), "not a sequence of integers"),
        ("[f]", 5, "not a sequence of integers"),
    ],
)
def test_binding_refuses(text, shape, message):
    mesh = DeviceMesh.parse_grid("dp=2 tp=2")
    with pytest.raises(LayoutError, match=message):
        local_part(TensorLayout.parse(text), mesh, mesh.coordinate(0), shape)


def test_coordinates_must_fit():
    mesh = DeviceMesh.parse_grid("dp=2 tp=2")
    layout = TensorLayout.parse("[f/tp]")
    assert local_part(layout, mesh, {"tp": 1}, (4,)).nests == (Nest(0, 2, ((2, 1, 1),)),)
    with pytest.raises(LayoutError, match="lacks the index"):
        local_part(layout, mesh, {"dp": 1}, (4,))
    for place in (-1, 2):
        with pytest.raises(LayoutError, match="no index"):
            local_part(layout, mesh, {"tp": place}, (4,))
    with pytest.raises(LayoutError, match="a different mesh"):
        local_part(layout.with_mesh(DeviceMesh.parse_grid("tp=4")), mesh, {"tp": 1}, (4,))


def test_dims_are_compiled_once_for_all_ranks_and_tensors_that_share_them():
    mesh = DeviceMesh.parse_grid("dp=64 tp=8")
    layout = TensorLayout.parse("[onceonly/tp, h]", mesh)
    before = compile_dim.cache_info().misses
    for rank in mesh.ranks:
        local_part(layout, mesh, mesh.coordinate(rank), (1024, 16))
    assert compile_dim.cache_info().misses - before <= 9  # 8 places along tp, and h


def test_sizes_of_the_real_world_cost_nothing():
    part = part_of("[f/tp/~dp, h]", "dp=96 tp=8", 700, (1 << 40, 1 << 14))
    assert len(part.nests) == 1
