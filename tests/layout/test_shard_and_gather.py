"""What ranks hold of a tensor is the tensor, in every layout; moved to any other layout and back, it is what it was.

Tensors are random bytes of real dtypes, and travel by nests alone, as the engine's copies do.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.shaped_layouts import shaped_case
from tests.sampled import count_of
from xrank.layout import TensorLayout
from xrank.layout.local_part import local_part
from xrank.layout.nests import intersect, swap
from xrank.layout.notation import parse, render

pytestmark = pytest.mark.quick

DTYPES = ("f8", "f4", "f2", "c8", "i8", "i4", "i2", "i1", "u8", "u2", "?")
DTYPES += tuple(getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"))


def indices(nest):
    """Return the addresses that a nest pairs, as two arrays."""
    xs, ys = np.array([nest.x]), np.array([nest.y])
    for n, x_stride, y_stride in nest.loops:
        xs = (xs[:, None] + np.arange(n) * x_stride).ravel()
        ys = (ys[:, None] + np.arange(n) * y_stride).ravel()
    return xs, ys


def parts_of(mesh, layout, shape):
    found = {rank: local_part(layout, mesh, mesh.coordinate(rank), shape) for rank in mesh.ranks}
    return {rank: part for rank, part in found.items() if part is not None}


def sharded(parts, whole):
    """Return every rank's local tensor; pads are zeros."""
    held = {}
    for rank, part in parts.items():
        held[rank] = np.zeros(math.prod(part.shape), whole.dtype)
        for nest in part.nests:
            xs, ys = indices(nest)
            held[rank][xs] = whole[ys]
    return held


def gathered(parts, held, count, dtype):
    """Return the whole of what ranks hold, each replica read; and how often each element was there."""
    whole, times = np.zeros(count, dtype), np.zeros(count, int)
    for rank, part in parts.items():
        for nest in part.nests:
            xs, ys = indices(nest)
            whole[ys] = held[rank][xs]
            times[ys] += 1
    return whole, times


def moved(parts, held, other):
    """Return what ranks of another layout get, each copy a nest from one local tensor to another."""
    got = {rank: np.zeros(math.prod(part.shape), next(iter(held.values())).dtype) for rank, part in other.items()}
    for rank, part in parts.items():
        for target, its in other.items():
            for mine in part.nests:
                for theirs in its.nests:
                    for copy in intersect(mine, swap(theirs)):
                        xs, ys = indices(copy)
                        got[target][ys] = held[rank][xs]
    return got


@st.composite
def shapes(draw, most):
    ndim = draw(st.sampled_from([2, 1, 3, 2, 3, 0]))
    sizes = st.sampled_from([8, 12, 5, 7, 6, 2, 3, 9, 1, 0])
    return tuple(draw(st.tuples(*[sizes] * ndim).filter(lambda shape: math.prod(shape) <= most)))


@st.composite
def tensors(draw):
    """A flat tensor of random bytes with its shape; 0-d and empty ones among them."""
    shape = draw(shapes(160))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    count = math.prod(shape)
    data = np.random.default_rng(draw(st.integers(0, 999))).bytes(count * dtype.itemsize)
    return shape, np.frombuffer(data, np.uint8).view(dtype) if dtype.kind != "b" else np.frombuffer(data, np.int8) > 0


@st.composite
def cases(draw, axis):
    return lambda shape: shaped_case(lambda low, high: draw(st.integers(low, high)), shape, axis)


@settings(max_examples=count_of(400), deadline=None)
@given(st.data())
def test_shard_then_gather_is_the_identity(data):
    shape, whole = data.draw(tensors())
    mesh, layout = data.draw(cases("a"))(shape)
    parts = parts_of(mesh, layout, shape)
    back, times = gathered(parts, sharded(parts, whole), len(whole), whole.dtype)
    assert back.tobytes() == whole.tobytes(), str(layout)
    assert times.all() or not len(whole)


@settings(max_examples=count_of(300), deadline=None)
@given(st.data())
def test_there_and_back_is_the_identity(data):
    shape, whole = data.draw(tensors())
    here, there = (parts_of(*data.draw(cases(axis))(shape), shape) for axis in "ab")
    held = sharded(here, whole)
    got = moved(here, held, there)
    assert {rank: part.tobytes() for rank, part in got.items()} == {
        rank: part.tobytes() for rank, part in sharded(there, whole).items()
    }
    back = moved(there, got, here)
    assert {rank: part.tobytes() for rank, part in back.items()} == {r: part.tobytes() for r, part in held.items()}


@settings(max_examples=count_of(300), deadline=None)
@given(st.data())
def test_print_then_parse_is_the_identity(data):
    shape = data.draw(shapes(10**6))
    _, layout = data.draw(cases("a"))(shape)
    text = str(layout)
    assert parse(text) == layout.tree and render(parse(text)) == text
    assert TensorLayout.parse(text, layout.device_mesh) == layout
    # Blanks mean nothing.
    assert parse(text.replace("[", " [ ").replace("/", " /").replace(",", " , ")) == layout.tree
