"""Digests of parts add up to that of the tensor, whatever the cut; each changed bit changes them."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xrank.engine.value_digests import DigestedPart, DigestRows, digest_parts, digest_places
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest, canonical, row_major
from xrank.ranks.memory import local_bytes

DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def part_of(whole: torch.Tensor, box: tuple[slice, ...], *, like: str = "copy") -> DigestedPart:
    """Return a box of a tensor: copied, as a view of the tensor, or transposed in memory."""
    strides, held = row_major(tuple(whole.shape)), whole[box]
    order = list(range(held.ndim))
    if like == "transposed":
        order.reverse()
        held = held.permute(order)
    if like != "view":
        held = held.contiguous()
    sizes = zip(held.shape, row_major(tuple(held.shape)), [strides[dim] for dim in order], strict=True)
    first = sum(one.start * stride for one, stride in zip(box, strides, strict=True))
    nests = NestTable.from_nests([canonical(Nest(0, first, tuple(sizes)))])
    return DigestedPart(DigestRows.of(whole.shape, whole.element_size()), nests, local_bytes(held))


def run_of(whole: torch.Tensor, low: int, high: int) -> DigestedPart:
    """Return elements that follow each other, as in a flat parameter."""
    nests = NestTable.from_nests([canonical(Nest(0, low, ((high - low, 1, 1),)))])
    return DigestedPart(DigestRows.of(whole.shape, whole.element_size()), nests, local_bytes(whole.flatten()[low:high]))


def whole_of(whole: torch.Tensor) -> DigestedPart:
    return part_of(whole, tuple(slice(0, n) for n in whole.shape))


def digest(*parts: DigestedPart) -> int:
    return int(digest_parts(parts, 2).sum())


def by_definition(whole: torch.Tensor) -> int:
    """Return the digest word by word, in Python's integers."""
    rows = DigestRows.of(whole.shape, whole.element_size())

    def mix(number: int) -> int:
        number = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
        number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
        return number ^ (number >> 31)

    content, total, nbytes = whole.numpy().tobytes(), 0, rows.length * rows.width
    for row, start in enumerate(range(0, len(content), nbytes)):
        line = content[start : start + nbytes]
        for at in range(0, len(line), 8):
            word = int.from_bytes(line[at : at + 8], "little")
            total += (word + (word >> 32)) * (mix(2**48 + at // 8) | 1) * (mix(row) | 1)
    return total % 2**64


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    lengths = st.sampled_from([1, 2, 3, 7, 8, 65, 130, 513, 700])
    shape = draw(st.lists(lengths, min_size=1, max_size=3).filter(lambda shape: prod(shape) <= 20_000))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    content = np.random.default_rng(seed).integers(0, 256, prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(content).view(dtype).view(shape)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), whole=tensors())
def test_parts_of_any_cut_add_up_to_the_definition(data: Any, whole: torch.Tensor) -> None:
    want = by_definition(whole)
    assert digest(whole_of(whole)) == want
    bounds = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in whole.shape]
    likes = st.sampled_from(["copy", "view", "transposed"])
    boxes = product(*([slice(low, high) for low, high in pairwise(its)] for its in bounds))
    parts = [part_of(whole, box, like=data.draw(likes)) for box in boxes]
    assert digest(*parts) == want
    ends = sorted({0, whole.numel(), *data.draw(st.lists(st.integers(0, whole.numel()), max_size=3))})
    runs = [run_of(whole, low, high) for low, high in pairwise(ends)]
    assert digest(*runs) == want
    places = digest_places(whole_of(whole))
    assert {sum(map(digest_places, each)) % 2**64 for each in (parts, runs)} == {places}
    if len(runs) > 1:
        assert sum(map(digest_places, (*runs, runs[0]))) % 2**64 != places


@settings(deadline=None, max_examples=40)
@given(data=st.data(), whole=tensors())
def test_every_flipped_bit_is_found_in_its_block(data: Any, whole: torch.Tensor) -> None:
    before = digest_parts([whole_of(whole)], 1)[0]
    at = data.draw(st.integers(0, 8 * whole.nbytes - 1))
    whole.view(-1).view(torch.uint8)[at // 8] ^= 1 << at % 8
    after = digest_parts([whole_of(whole)], 1)[0]
    rows, element = DigestRows.of(whole.shape, whole.element_size()), at // 8 // whole.element_size()
    assert before.sum() != after.sum()
    assert np.flatnonzero(before != after).tolist() == [element // (rows.length * rows.block)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_changed_signs_do_not_cancel(dtype: torch.dtype) -> None:
    whole = torch.ones(64, 64, dtype=dtype)
    before = digest(whole_of(whole))
    for other in range(7, 64, 4):
        whole[0, 3] = whole[0, other] = -1
        assert digest(whole_of(whole)) != before
        whole[0, 3] = whole[0, other] = 1


def test_exchanged_rows_columns_and_elements_are_found() -> None:
    whole = torch.arange(64 * 1024).view(64, 1024).to(torch.int32)
    columns = [1, 0, *range(2, 1024)]
    rows = [*range(62), 63, 62]
    halves = torch.cat((whole[:, 512:], whole[:, :512]), 1)
    changed = [whole, whole[rows], whole[:, columns], halves, whole.t().contiguous().view(64, 1024)]
    assert len({digest(whole_of(one)) for one in changed}) == len(changed)


def test_blocks_name_rows_and_elements() -> None:
    matrix, vector, long = (DigestRows.of(shape, 2) for shape in ((6400, 4096), (4096,), (1_000_000,)))
    assert matrix.describe_blocks([1]) == "rows 100-199" and matrix.describe_blocks([0, 63]) == "the whole tensor"
    assert vector.describe_blocks([0]) == "the whole tensor"
    assert long.describe_blocks([1]) == "elements 16384-32767"
