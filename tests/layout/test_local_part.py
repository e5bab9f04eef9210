"""Local parts against index arrays: a rank's part of np.arange, cut dim by dim as numpy would."""

import math

import numpy as np
import pytest

from xrank.errors import IncompleteError, LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import compile_dim, infer_shape, local_part
from xrank.layout.nests import Nest, addresses, canonical

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


def test_a_scalar_is_one_nest():
    part = part_of("[]", "tp=2", 1, ())
    assert part.shape == () and part.nests == (Nest(0, 0, ()),)


def test_an_empty_tensor_has_no_nests():
    for text in ("[n, 0]", "[n/tp, 0]", "[n, 0/tp]", "[n, 0/~tp]"):
        part = part_of(text, "tp=2", 1, (4, 0))
        assert part.nests == () and 0 in part.shape


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
        ("[f/tp, h]", {0: (2, 5), 1: (1, 5)}, "3 does not divide by 2"),
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
        ("[f/tp]", (7,), r"f/tp: 7 does not divide by 2"),
        ("[f/~dp/tp]", (5,), r"f/~dp/tp: 3 does not divide by 2"),
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
    with pytest.raises(LayoutError, match="lacks the place"):
        local_part(layout, mesh, {"dp": 1}, (4,))
    for place in (-1, 2):
        with pytest.raises(LayoutError, match="no place"):
            local_part(layout, mesh, {"tp": place}, (4,))
    with pytest.raises(LayoutError, match="another mesh"):
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
