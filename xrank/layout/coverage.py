"""The proof that nests cover a tensor exactly once, and the first wrong element otherwise.

Boxes cover a whole exactly once if and only if the signed corners of all boxes equal those of the whole: the signed
corner measure of a box is the mixed derivative of its indicator function, which determines it. Two sorted arrays of
integers are compared; no grid is built, and the boxes may come in any order and irregular.

Nests become boxes by writing addresses in mixed radix: a chain of strides, each dividing the one before, gives each
address digits, and a loop over a chain stride is an interval of one digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank.errors import LayoutError
from xrank.layout.nest_table import IntArray, NestTable
from xrank.layout.nests import Nest

MAX_BOXES = 1 << 24
"""Boxes that the nests of one tensor may be cut into before the proof is refused."""


class CoverageFault(Struct, frozen=True):
    """The first element, in row-major order, that is not covered exactly once."""

    kind: Literal["gap", "overlap", "outside"]
    address: int
    """Row-major address of the element in the tensor."""


def find_fault(nests: NestTable, num_elements: int, wanted: NestTable | None = None) -> CoverageFault | None:
    """Return the first element of [0, num_elements) that the y sides do not cover exactly once, or None if all are.

    `wanted` has the elements to cover in place of all of them: those of a tensor with padding. LayoutError if the nests
    would have to be cut into more than `MAX_BOXES` boxes.
    """
    # Bounds first: the mixed radix below is defined inside [0, num_elements) only.
    if len(nests):
        if int(nests.y.min()) < 0:
            return CoverageFault("outside", int(nests.y.min()))
        if int(nests.y_ends.max()) > num_elements:
            return CoverageFault("outside", int(nests.y_ends.max()) - 1)
    if num_elements == 0 or not len(nests):
        first = 0 if wanted is None else int(wanted.y.min(initial=num_elements))
        return CoverageFault("gap", first) if first < num_elements else None
    # Strides by falling size, each dividing the one before, the last one 1, that loops of the nests use.
    tables = [nests] if wanted is None else [nests, wanted]
    used = np.sort(np.concatenate([table.loops[:, :, 2][table.loops[:, :, 0] > 1] for table in tables]))
    strides = [1]
    # Not np.unique: it imports numpy.ma, which takes longer than most proofs.
    for stride in used[np.append(True, used[1:] != used[:-1])].tolist() if len(used) else ():
        # Loops over a stride that is left out of the chain are unrolled by `_digit_counts`.
        if stride > strides[-1] and stride % strides[-1] == 0:
            strides.append(stride)
    chain = np.array(strides[::-1], dtype=np.int64)
    lower, upper = _boxes(*_digit_counts(nests, chain), chain)
    if wanted is None:
        whole_counts = np.ones((1, len(chain)), dtype=np.int64)
        whole_counts[0, -1] = num_elements
        whole = _boxes(np.zeros(1, dtype=np.int64), whole_counts, chain)
    else:
        whole = _boxes(*_digit_counts(wanted, chain), chain)
    return _compare_corners(lower, upper, *whole, chain)


def _digit_counts(nests: NestTable, chain: IntArray) -> tuple[IntArray, IntArray]:
    """Return start addresses [n] and for each chain stride how many steps a nest takes over it [n, len(chain)].

    A loop over another stride, or a second loop over one stride, is unrolled into rows of its own.
    """
    starts = nests.y.copy()
    counts = np.ones((len(nests), len(chain)), dtype=np.int64)
    loops = nests.loops
    for column in range(loops.shape[1]):
        n, stride = loops[:, column, 0], loops[:, column, 2]
        position = len(chain) - 1 - np.searchsorted(chain[::-1], stride)
        position = np.clip(position, 0, len(chain) - 1)
        rows = np.arange(len(starts))
        direct = (chain[position] == stride) & (counts[rows, position] == 1) & (n > 1)
        counts[rows[direct], position[direct]] = n[direct]
        repeats = np.where(direct, 1, n)
        if (repeats > 1).any():
            rows, step = _repeat_rows(repeats)
            starts, counts, loops = starts[rows] + step * stride[rows], counts[rows], loops[rows]
    return starts, counts


def _repeat_rows(repeats: IntArray) -> tuple[IntArray, IntArray]:
    """Return each row number as often as `repeats` gives, and a running number within each row."""
    total = int(repeats.sum())
    _check_size(total)
    rows = np.repeat(np.arange(len(repeats)), repeats)
    ends = np.cumsum(repeats)
    return rows, np.arange(total) - np.repeat(ends - repeats, repeats)


def _check_size(num_boxes: int) -> None:
    if num_boxes > MAX_BOXES:
        what = "the cuts of one tensor are too irregular: the proof would need too many boxes"
        next_step = "choose a layout with cuts at multiples of each other"
        raise LayoutError(what, got=f"{num_boxes:,} boxes", want=f"at most {MAX_BOXES:,}", next_step=next_step)


def _boxes(starts: IntArray, counts: IntArray, chain: IntArray) -> tuple[IntArray, IntArray]:
    """Cut nests into boxes of digits; return their lower and upper (exclusive) digits, each [boxes, len(chain)].

    From the last digit to the first, an interval that runs past its digit's end is cut into the part up to that end,
    whole turns (which carry into the digit before) and the rest.
    """
    lower = np.zeros_like(counts)
    upper = np.zeros_like(counts)
    for level in range(len(chain) - 1, 0, -1):
        stride, radix = int(chain[level]), int(chain[level - 1] // chain[level])
        digit = starts // stride % radix
        count = counts[:, level]
        inside = digit + count <= radix
        if inside.all():
            lower[:, level], upper[:, level] = digit, digit + count
            continue
        # A nest that begins at digit 0 begins with whole turns, without a head.
        head = np.where(inside, count, np.where(digit == 0, 0, radix - digit))
        turns = (count - head) // radix
        tail = count - head - turns * radix
        kept = []
        for part, offset in ((head, 0), (turns, head), (tail, head + turns * radix)):
            rows = np.flatnonzero(part)
            part_starts = (starts + offset * stride)[rows]
            part_counts, part_lower, part_upper = counts[rows], lower[rows], upper[rows]
            if part is turns:
                part_lower[:, level], part_upper[:, level] = 0, radix
                carried = part[rows]
                # The next digit already has a count and now gets a carry too: unroll its own steps into rows.
                own = np.where(carried > 1, part_counts[:, level - 1], 1)
                part_counts[:, level - 1] = np.where(carried > 1, carried, part_counts[:, level - 1])
                if (own > 1).any():
                    again, step = _repeat_rows(own)
                    part_starts = part_starts[again] + step * int(chain[level - 1])
                    part_counts, part_lower, part_upper = part_counts[again], part_lower[again], part_upper[again]
            else:
                part_digit = part_starts // stride % radix
                part_lower[:, level], part_upper[:, level] = part_digit, part_digit + part[rows]
            kept.append((part_starts, part_counts, part_lower, part_upper))
        starts, counts, lower, upper = (np.concatenate(columns) for columns in zip(*kept, strict=True))
        _check_size(len(starts))
    # The first digit has no digit before it to carry into, so its intervals are never cut.
    lower[:, 0] = starts // int(chain[0])
    upper[:, 0] = lower[:, 0] + counts[:, 0]
    return lower, upper


def _compare_corners(
    lower: IntArray, upper: IntArray, whole_lower: IntArray, whole_upper: IntArray, chain: IntArray
) -> CoverageFault | None:
    all_lower, all_upper = np.concatenate((lower, whole_lower)), np.concatenate((upper, whole_upper))
    # A digit that every box spans alike adds the same factor to every corner: leave it out.
    differs = (all_lower != all_lower[0]).any(axis=0) | (all_upper != all_upper[0]).any(axis=0)
    cut: list[int] = np.flatnonzero(differs).tolist() or [0]
    sizes = [int(all_upper[:, d].max()) + 1 for d in cut]
    if math.prod(sizes) >= 1 << 63:
        what = "a tensor is too large for the proof of coverage"
        next_step = "report this shape as a bug of xrank"
        raise LayoutError(what, got=f"{math.prod(sizes):,} corners", want="fewer than 2**63", next_step=next_step)
    covered = _corner_keys(lower, upper, cut, sizes)
    whole = _corner_keys(whole_lower, whole_upper, cut, sizes)
    # Sum over boxes minus sum over the whole is zero if and only if both sorted arrays are equal: positive corners of
    # the boxes and negative ones of the whole on one side, the others on the other side.
    positive = np.sort(np.concatenate((covered[0], whole[1])))
    negative = np.sort(np.concatenate((covered[1], whole[0])))
    common = min(len(positive), len(negative))
    different = np.flatnonzero(positive[:common] != negative[:common])
    if not len(different) and len(positive) == len(negative):
        return None
    # Both arrays must be equal. At the first difference, the smaller corner lacks its counterpart: a positive one means
    # that a box begins too early (overlap), a negative one that a box is missing (gap).
    at = int(different[0]) if len(different) else common
    excess = len(negative) <= at or (len(positive) > at and positive[at] < negative[at])
    key = int(positive[at] if excess else negative[at])
    digits = [int(all_lower[0, d]) for d in range(len(chain))]
    for d, size in zip(reversed(cut), reversed(sizes), strict=True):
        key, digits[d] = divmod(key, size)
    address = sum(digit * int(stride) for digit, stride in zip(digits, chain, strict=True))
    return CoverageFault("overlap" if excess else "gap", address)


def _corner_keys(
    lower: IntArray, upper: IntArray, cut: Sequence[int], sizes: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """Return the linear keys of the corners with an even, and with an odd, number of upper coordinates."""
    # A corner takes the lower or the upper coordinate in each dim; its sign is (-1) ** (number of upper ones). Keys are
    # built dim by dim: lower keeps the parity of a corner, upper flips it.
    even: list[IntArray] = [np.zeros(len(lower), dtype=np.int64)]
    odd: list[IntArray] = []
    for d, size in zip(cut, sizes, strict=True):
        low, high = lower[:, d], upper[:, d]
        even, odd = (
            [key * size + low for key in even] + [key * size + high for key in odd],
            [key * size + low for key in odd] + [key * size + high for key in even],
        )
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([*even, empty]), np.concatenate([*odd, empty])


def contains(nest: Nest, address: int) -> bool:
    """Return whether a nest contains a y address."""
    remaining = address - nest.y
    if remaining < 0:
        return False
    for n, _, stride in sorted(nest.loops, key=lambda loop: -loop[2]):
        remaining -= min(remaining // stride, n - 1) * stride
    return remaining == 0


def destination_keys(nests: NestTable) -> IntArray:
    """Return one row of integers for each nest that is equal for nests with the same y side, whatever their x side."""
    loops = nests.loops[:, :, [0, 2]]
    n, depth = len(nests), loops.shape[1]
    loops = np.where(loops[:, :, :1] > 1, loops, np.array([1, 0]))
    # Rising stride, single iterations first; then loops that continue one another are merged, so that nests with the
    # same addresses get the same key however their loops were split.
    order = np.argsort(loops[:, :, 1], axis=1, kind="stable")
    loops = np.take_along_axis(loops, order[:, :, None], axis=1)
    merged = np.zeros((n, depth + 1, 2), dtype=np.int64)
    merged[:, :, 0] = 1
    current = merged[:, 0].copy()
    slot = np.zeros(n, dtype=np.int64)
    rows = np.arange(n)
    for column in range(depth):
        count, stride = loops[:, column, 0], loops[:, column, 1]
        real = count > 1
        joins = real & (current[:, 0] > 1) & (stride == current[:, 0] * current[:, 1])
        begins = real & ~joins
        full = begins & (current[:, 0] > 1)
        merged[rows[full], slot[full]] = current[full]
        slot[full] += 1
        current[begins] = loops[begins, column]
        current[joins, 0] *= count[joins]
    merged[rows, slot] = current
    return np.concatenate((nests.y[:, None], merged.reshape(n, 2 * (depth + 1))), axis=1)


def first_of_equal(keys: IntArray) -> npt.NDArray[np.bool_]:
    """Return a mask [n] of the rows that are the first of equal ones."""
    first = np.zeros(len(keys), dtype=np.bool_)
    order = np.lexsort(keys.T[::-1])  # stable: among equal rows the first stays first
    ordered = keys[order]
    first[order[:1]] = True
    first[order[1:][(ordered[1:] != ordered[:-1]).any(axis=1)]] = True
    return first


def range_text(shape: Sequence[int], first: int, last: int) -> str:
    """Describe the row-major addresses first..last (inclusive) of a tensor of that global shape."""
    if not shape or math.prod(shape) == 0 or (first, last) == (0, math.prod(shape) - 1):
        return "the whole tensor"
    row = math.prod(shape[1:])
    if first % row == 0 and (last + 1) % row == 0:
        name = "rows" if len(shape) > 1 else "elements"
        return f"{name} {first // row}-{last // row}"
    start = [int(i) for i in np.unravel_index(first, tuple(shape))]
    end = [int(i) for i in np.unravel_index(last, tuple(shape))]
    return f"element {start}" if start == end else f"elements {start} to {end}"
