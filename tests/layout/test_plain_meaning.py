"""Random layouts of the whole notation against their meaning, listed element by element."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.plain_meaning import NOTHING, Made, combined, local_shape, places, whole
from tests.sampled import count_of
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import infer_shape, local_part
from xrank.layout.nests import addresses, canonical
from xrank.layout.notation import parse, render

pytestmark = pytest.mark.quick


def made_case(integer, pads=True):
    lengths = {f"a{i}": integer(1, 4) for i in range(integer(1, 3))}
    made = Made(integer, lengths, pads=pads)
    dims = (made.flat(),) if integer(0, 4) == 0 else made.dims(integer(0, 3))
    mesh = DeviceMesh(tuple(lengths.values()), tuple(lengths))
    return made, mesh, TensorLayout.from_dims(dims, mesh)


def listed(part) -> list[int]:
    """Return the global address of every local element of a part."""
    held = [NOTHING] * math.prod(part.shape)
    for nest in part.nests:
        assert canonical(nest) == nest
        for x, y in addresses(nest):
            assert held[x] == NOTHING
            held[x] = y
    return held


def check_case(made, mesh, layout) -> None:
    names = {**made.names, **made.lengths}
    shape = tuple(whole(dim, names) for dim in layout.dims)
    source = np.arange(math.prod(shape)) * 7 + 3
    gathered = np.full(math.prod(shape), -5)
    for at in places(made.lengths):
        part = local_part(layout, mesh, at, shape, sizes=made.names)
        assert part.shape == local_shape(layout.dims, names, made.lengths, at), (str(layout), at)
        held = combined(layout.dims, names, made.lengths, at)
        assert listed(part) == held, (str(layout), at)
        shard = np.array([source[y] if y != NOTHING else 0 for y in held])
        for nest in part.nests:
            for x, y in addresses(nest):
                gathered[y] = shard[x]
    assert (gathered == source).all(), str(layout)


def test_thousands_of_random_layouts_mean_what_they_say():
    rng = random.Random(20261106)
    for _ in range(count_of(800)):
        check_case(*made_case(rng.randint))


@given(st.data())
@settings(max_examples=count_of(60), deadline=None)
def test_layouts_that_hypothesis_makes(data):
    check_case(*made_case(lambda low, high: data.draw(st.integers(low, high))))


def test_random_layouts_are_read_as_they_print():
    rng = random.Random(20261107)
    for _ in range(600):
        _, mesh, layout = made_case(rng.randint)
        text = str(layout)
        assert parse(text) == layout.tree and render(parse(text)) == text
        assert TensorLayout.parse(text, mesh) == layout


def test_shapes_are_inferred_wherever_they_are_determined():
    """Also with pads: what is inferred is the shape, or it is said to be undetermined, and then sizes mend it."""
    rng = random.Random(20261108)
    told = 0
    for _ in range(400):
        made, mesh, layout = made_case(rng.randint, pads=bool(rng.randint(0, 1)))
        names = {**made.names, **made.lengths}
        shape = tuple(whole(dim, names) for dim in layout.dims)
        locals_ = {
            rank: local_part(layout, mesh, mesh.coordinate(rank), shape, sizes=made.names).shape for rank in mesh.ranks
        }
        assert infer_shape(layout, mesh, locals_, sizes=made.names) == shape
        try:
            assert infer_shape(layout, mesh, locals_) == shape, str(layout)
            told += 1
        except LayoutError as error:
            assert error.next_step and ("sizes=" in error.next_step), error
    assert told > 100


def test_a_random_layout_without_pads_tells_its_names_or_says_which_it_needs():
    rng = random.Random(20261109)
    for _ in range(300):
        made, mesh, layout = made_case(rng.randint)
        names = {**made.names, **made.lengths}
        shape = tuple(whole(dim, names) for dim in layout.dims)
        at = mesh.coordinate(0)
        try:
            part = local_part(layout, mesh, at, shape)
        except LayoutError as error:
            assert "is not known" in str(error) and any(repr(name) in str(error) for name in made.names), error
        else:
            assert part == local_part(layout, mesh, at, shape, sizes=made.names)
