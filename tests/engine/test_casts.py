"""Copies against plain indexing, and casts against torch's ``Tensor.to``."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.engine_cases import Integer, by_torch, pairs_of, shuffled
from xrank import dtypes
from xrank.engine.casts import (
    CastOverflowError,
    Tile,
    change_elements,
    copy_cast,
    copy_same,
    count_cast_different,
    count_different,
    cut_tiles,
)
from xrank.layout.nests import Loop, Nest, canonical

pytestmark = pytest.mark.quick

FLOATS = ("F64", "F32", "F16", "BF16")


def strided_copy(integer: Integer) -> tuple[int, int, int, tuple[Loop, ...]]:
    """Return element counts of source and target, the target's offset, and loops that pair them one to one."""
    counts = [integer(1, 5) for _ in range(integer(0, 3))]
    sides = []
    for order in (range(len(counts)), shuffled(integer, range(len(counts)))):
        extent, strides = 1, [0] * len(counts)
        for k in order:
            strides[k] = extent + integer(0, 2) * integer(0, 1)
            extent += (counts[k] - 1) * strides[k]
        sides.append((extent, strides))
    (length, xs), (reach, ys) = sides
    loops = sorted(zip(counts, xs, ys, strict=True), key=lambda loop: -loop[1])
    offset = integer(0, 9)
    return length, offset + reach + integer(0, 3), offset, tuple(loops)


def indices(loops: tuple[Loop, ...], side: int) -> np.ndarray:
    at = np.array(0)
    for loop in loops:
        at = at[..., None] + np.arange(loop[0]) * loop[side]
    return at.ravel()


@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
@settings(deadline=None)
def test_copy_same_and_count_different(data, width, unaligned):
    length, room, offset, loops = strided_copy(lambda low, high: data.draw(st.integers(low, high)))
    rng = random.Random(length)
    source, target = rng.randbytes(length * width + unaligned), bytearray(rng.randbytes(room * width + unaligned))
    source_view, target_view = memoryview(source)[unaligned:], memoryview(target)[unaligned:]
    expected = np.frombuffer(bytes(target_view), f"u{width}").copy()
    expected[offset + indices(loops, 2)] = np.frombuffer(source, f"u{width}", offset=unaligned)[indices(loops, 1)]
    copy_same(source_view, target_view, offset, loops, width)
    assert bytes(target_view) == expected.tobytes()
    assert count_different(source_view, target_view, offset, loops, width) == 0
    # Flip some of the elements that the copy wrote.
    flipped = set(data.draw(st.lists(st.sampled_from((offset + indices(loops, 2)).tolist()), max_size=4)))
    for element in flipped:
        target_view[element * width + width - 1] ^= 0x80
    assert count_different(source_view, target_view, offset, loops, width) == len(flipped)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_wide_rows_with_any_offset_and_length(width):
    rng = random.Random(width)
    for length in (1, 7, 8, 16, 31):
        for offset in range(9):
            for gap in (0, 1, 8):
                loops = ((3, length + gap, length), (length, 1, 1))
                source, target = rng.randbytes(3 * (length + gap) * width), bytearray((offset + 3 * length) * width)
                copy_same(memoryview(source), memoryview(target), offset, loops, width)
                rows = [source[i * (length + gap) * width :][: length * width] for i in range(3)]
                assert bytes(target) == bytes(offset * width) + b"".join(rows)


def around_ties(narrow: np.ndarray) -> np.ndarray:
    """Return the values of a narrow type and those halfway between two, with their neighbors in the wide type."""
    narrow = np.unique(narrow[np.isfinite(narrow)])
    ties = narrow[:-1] / 2 + narrow[1:] / 2  # exact: one bit more than the narrow type has
    return np.concatenate([narrow, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])


def bits_of(dtype: str) -> np.ndarray:
    """Return bit patterns of a float type: all of 16, or many random ones and all that are near an edge."""
    width = dtypes.dtype(dtype).nbytes
    if width == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    kind, unsigned = np.dtype(f"f{width}"), np.dtype(f"u{width}")
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        halves = around_ties(patterns.view(np.float16).astype(kind))
        bfloats = around_ties((patterns.astype(np.uint32) << 16).view(np.float32).astype(kind))
    values = [halves, bfloats, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(kind).smallest_subnormal], kind)]
    if width == 8:
        # Beside a tie in bits that a float has not: torch rounds these by way of float.
        values += [halves * (1 + 2.0**-45), halves * (1 - 2.0**-45)]
        singles = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
        middles = (singles.astype(kind) + np.nextafter(singles, np.float32(np.inf))) / 2
        values += [middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)]
    signalling = np.array([0x7F800001 if width == 4 else 0x7FF0000000000001], unsigned)
    anything = np.frombuffer(random.Random(20261111).randbytes(100_000 * width), unsigned)
    return np.concatenate([np.concatenate(values).view(unsigned), signalling, anything])


def cast(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    width = dtypes.dtype(target).nbytes
    made = bytearray(bits.size * width)
    loops = ((bits.size, 1, 1),) if bits.size > 1 else ()
    copy_cast(memoryview(bits).cast("B"), source, memoryview(made), target, 0, loops)
    return np.frombuffer(made, f"u{width}")


def as_floats(bits: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return bits.view(dtypes.numpy_dtype(dtype)).astype(np.float64)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_are_torchs(source, target):
    bits = bits_of(source)
    expected = by_torch(bits, source, target)
    lost = np.isinf(as_floats(expected, target)) & np.isfinite(as_floats(bits, source))
    bits, expected = bits[~lost], expected[~lost]
    made = cast(bits, source, target)
    nan = np.isnan(as_floats(bits, source))
    assert nan.any()
    assert np.isnan(as_floats(made, target)[nan]).all()
    assert (made[~nan] == expected[~nan]).all()  # bits: -0.0 and infinity included
    assert (
        count_cast_different(
            memoryview(bits).cast("B"), source, memoryview(bytearray(made)), target, 0, ((bits.size, 1, 1),)
        )
        == 0
    )


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        ("F32", "F16", 65520.0),
        ("F32", "F16", -1e30),
        ("F64", "F16", 65519.99999999999),  # torch rounds it to the float 65520 first
        ("F64", "BF16", 1e39),
        ("F64", "F32", -1e300),
        ("F32", "BF16", 3.4e38),
        ("BF16", "F16", 1e30),
    ],
)
def test_a_finite_value_that_would_become_infinite_is_refused(source, target, value):
    wide = torch.tensor([1.0, float("inf"), value, -2 * value if abs(value) < 1e38 else 0.0], dtype=torch.float64)
    tensor = wide.to(getattr(torch, dtypes.dtype(source).torch_name))
    bits = tensor.view(getattr(torch, f"int{tensor.element_size() * 8}")).numpy()
    assert torch.isinf(tensor.to(getattr(torch, dtypes.dtype(target).torch_name))[2])
    with pytest.raises(CastOverflowError) as caught:
        cast(bits, source, target)
    assert caught.value.value == float(tensor[2])
    with pytest.raises(CastOverflowError):
        cast(bits[2:3], source, target)


def test_the_largest_values_that_fit_are_kept():
    for source, target, value in [("F32", "F16", 65519.996), ("F64", "F32", 3.4028235e38), ("F32", "BF16", 3.39e38)]:
        tensor = torch.tensor([value, -value], dtype=torch.float64)
        bits = tensor.to(getattr(torch, dtypes.dtype(source).torch_name)).numpy()
        assert np.isfinite(as_floats(cast(bits, source, target), target)).all()


@given(st.data(), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
@settings(deadline=None)
def test_strided_casts(data, source, target):
    length, room, offset, loops = strided_copy(lambda low, high: data.draw(st.integers(low, high)))
    wide, narrow = dtypes.numpy_dtype(source), dtypes.numpy_dtype(target)
    values = np.random.default_rng(length).standard_normal(length).astype(wide)
    made = np.arange(room).astype(narrow)
    expected = made.copy()
    bits = by_torch(values.view(f"u{wide.itemsize}"), source, target)
    expected[offset + indices(loops, 2)] = bits.view(narrow)[indices(loops, 1)]
    into = memoryview(bytearray(made.tobytes()))
    data_view = memoryview(values.tobytes())
    assert count_cast_different(data_view, source, into, target, offset, loops) == int(
        (made.view(f"u{made.itemsize}") != expected.view(f"u{made.itemsize}")).sum()
    )
    copy_cast(data_view, source, into, target, offset, loops)
    assert bytes(into) == expected.tobytes()
    assert count_cast_different(data_view, source, into, target, offset, loops) == 0


@pytest.mark.parametrize("factor", [8**0.5, 1 / 8**0.5, 128**0.5])
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_products_are_rounded_once(source, target, factor):
    """As MaxText's conversion: a product in float32, then a cast."""
    values = np.random.default_rng(0).standard_normal(1000).astype(dtypes.numpy_dtype(source))
    kind = "F64" if source == "F64" else "F32"
    products = values.astype(dtypes.numpy_dtype(kind)) * dtypes.numpy_dtype(kind).type(factor)
    made, wide = change_elements(memoryview(values.tobytes()), source, factor, 0)
    assert (bytes(made), wide) == (products.tobytes(), kind)
    into = memoryview(bytearray(len(values) * dtypes.dtype(target).nbytes))
    copy_cast(made, wide, into, target, 0, ((len(values), 1, 1),))
    assert bytes(into) == by_torch(products.view(f"u{products.itemsize}"), kind, target).tobytes()


@pytest.mark.parametrize("name", FLOATS)
def test_a_product_that_overflows(name):
    kind = dtypes.numpy_dtype(name)
    largest = np.array([1, {"F16": 60000, "F64": 1.7e308}.get(name, 3e38), np.inf]).astype(kind)

    def multiply(values):
        into = memoryview(bytearray(values.nbytes))
        copy_cast(*change_elements(memoryview(values.tobytes()), name, 4.0, 0), into, name, 0, ((len(values), 1, 1),))
        return np.frombuffer(into, kind)

    with pytest.raises(CastOverflowError):
        multiply(largest)
    assert np.isinf(multiply(largest[::2])).tolist() == [False, True]


def drawn_nest(integer: Integer) -> Nest:
    """Return a one-to-one nest with gaps, its loops in any order on the target's side."""
    counts = [integer(1, 6) for _ in range(integer(0, 4))]
    strides = []
    for order in (range(len(counts)), shuffled(integer, range(len(counts)))):
        extent, side = 1, [0] * len(counts)
        for k in order:
            side[k] = extent + integer(0, 3) * integer(0, 1) * integer(1, 9)
            extent += (counts[k] - 1) * side[k]
        strides.append(side)
    loops = list(zip(counts, *strides, strict=True))
    return canonical(Nest(integer(0, 50), integer(0, 50), tuple(shuffled(integer, loops))))


def pairs_of_tile(tile: Tile) -> list[tuple[int, int]]:
    x, y = pairs_of(Nest(tile.start, tile.target, tile.loops))
    return list(zip(x.tolist(), y.tolist(), strict=True))


def check(nest: Nest, max_elements: int) -> None:
    made = list(cut_tiles(nest, max_elements))
    x, y = pairs_of(nest)
    pairs = [pair for tile in made for pair in pairs_of_tile(tile)]
    assert sorted(pairs) == sorted(zip(x.tolist(), y.tolist(), strict=True))
    for tile in made:
        own = pairs_of_tile(tile)
        xs = [x for x, _ in own]
        assert 1 <= tile.length <= max_elements
        assert (min(xs), max(xs)) == (tile.start, tile.start + tile.length - 1)
        assert tile.length <= 4 * len(own)
        assert tile.is_dense == (len(own) == tile.length)
        assert list(tile.loops) == sorted(tile.loops, key=lambda loop: -loop[1])


@given(st.data(), st.integers(1, 200))
@settings(deadline=None)
def test_tiles_are_the_nest(data, max_elements):
    check(drawn_nest(lambda low, high: data.draw(st.integers(low, high))), max_elements)


def test_thousands_of_nests():
    rng = random.Random(20261106)
    for _ in range(2_500):
        check(drawn_nest(rng.randint), rng.choice([1, 2, 7, 30, 1000]))


def test_a_run_is_cut_only_by_the_bound():
    assert list(cut_tiles(Nest(5, 7, ((10, 1, 1),)), 4)) == [
        Tile(5, 4, 7, ((4, 1, 1),)),
        Tile(9, 4, 11, ((4, 1, 1),)),
        Tile(13, 2, 15, ((2, 1, 1),)),
    ]
    assert list(cut_tiles(Nest(5, 7), 4)) == [Tile(5, 1, 7, ())]


@pytest.mark.parametrize(("row", "together"), [(406, True), (407, False)])
def test_columns_are_read_together_while_a_quarter_of_the_bytes_is_wanted(row, together):
    columns = Nest(0, 0, ((50, row, 100), (100, 1, 1)))
    made = list(cut_tiles(columns, 1 << 20))
    assert len(made) == (1 if together else 50)
    assert sum(tile.length for tile in made) == (49 * row + 100 if together else 5000)


def test_rows_that_do_not_fit_together_are_read_some_at_a_time():
    made = list(cut_tiles(Nest(0, 0, ((10, 20, 10), (10, 1, 1))), 75))
    assert [(tile.start, tile.length, tile.loops[0][0]) for tile in made] == [(0, 70, 4), (80, 70, 4), (160, 30, 2)]


def test_a_transposed_nest_is_read_whole_not_by_elements():
    rows, columns = 300, 200
    made = list(cut_tiles(Nest(0, 0, ((rows, 1, columns), (columns, rows, 1))), 30_000))
    assert [(tile.start, tile.length) for tile in made] == [(0, 30_000), (30_000, 30_000)]
    assert all(tile.is_dense for tile in made)


def test_the_number_of_tiles_of_a_large_nest_follows_from_its_bytes():
    nest = Nest(0, 0, ((1 << 10, 1 << 12, 1 << 11), (1 << 11, 1, 1)))
    assert sum(1 for _ in cut_tiles(nest, 1 << 20)) == math.ceil((1 << 22) / (1 << 20))
