"""Tiles: a nest cut into reads that fit a bounded buffer, each one contiguous in the source.

A tile is read in one call and copied to its place by one strided copy. Dense runs (rows of a column shard) are read
together with the bytes between them as long as at least a quarter of all is wanted; sparse runs are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from xrank.layout.nests import Loop, Nest

SMALLEST_DENSITY = 4
"""Most bytes that a tile reads, as a multiple of the wanted ones."""


class Tile(NamedTuple):
    """A read of elements [start, start + length) of the source; loops select those that go to `target` and after."""

    start: int
    length: int
    target: int
    loops: tuple[Loop, ...]
    """(count, source stride, target stride), by falling source stride."""

    @property
    def is_dense(self) -> bool:
        """Whether every element of the read is wanted."""
        return prod(n for n, _, _ in self.loops) == self.length


def cut_tiles(nest: Nest, max_elements: int) -> Iterator[Tile]:
    """Cut a nest (x = source, y = target) into tiles that span at most `max_elements` of the source each."""
    loops = sorted(nest.loops, key=lambda loop: -loop[1])
    inner: list[Loop] = []
    span = wanted = 1
    chunked: Loop | None = None
    while loops:
        n, xs, ys = loops[-1]
        whole = (n - 1) * xs + span
        if whole <= max_elements and whole <= SMALLEST_DENSITY * wanted * n:
            inner.insert(0, loops.pop())
            span, wanted = whole, wanted * n
            continue
        # The loop does not fit whole: take as many iterations at a time as fit, if they are dense enough.
        step = (max_elements - span) // xs + 1
        if step > 1 and (step - 1) * xs + span <= SMALLEST_DENSITY * wanted * step:
            chunked = (step, xs, ys)
        break
    for indices in product(*(range(n) for n, _, _ in (loops[:-1] if chunked else loops))):
        # Not strict: a chunked loop is the last one, and `indices` leaves it out.
        x = nest.x + sum(i * xs for i, (_, xs, _) in zip(indices, loops, strict=False))
        y = nest.y + sum(i * ys for i, (_, _, ys) in zip(indices, loops, strict=False))
        if chunked is None:
            yield Tile(x, span, y, tuple(inner))
            continue
        step, xs, ys = chunked
        total = loops[-1][0]
        for i in range(0, total, step):
            n = min(step, total - i)
            yield Tile(x + i * xs, (n - 1) * xs + span, y + i * ys, ((n, xs, ys), *inner))
