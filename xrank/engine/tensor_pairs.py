"""Pairs: the same tensors of two plans, read side by side in flat memory.

Several threads read. Each takes the next tensors, small ones together, and hands on equal stretches of both plans: all
of one tensor come from one thread, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from xrank.engine.buffers import Source, take_memory
from xrank.engine.executor import Budget, CancelledError, execute
from xrank.engine.faults import make_checksums
from xrank.engine.planner import Plan
from xrank.engine.windows import WINDOW_NBYTES, RecordChecksums, read_rest

_STRETCH_NBYTES = 4 * WINDOW_NBYTES
"""Bytes of each plan that a thread has in memory."""
MEMORY_NBYTES = 3 * _STRETCH_NBYTES
"""Bytes that a thread takes beside its staging buffer: the stretches of both plans, and what is made of them."""
_ALIGNMENT = 64

Bytes: TypeAlias = npt.NDArray[np.uint8]
Take: TypeAlias = Callable[[int, int, Bytes, Bytes], None]
"""Takes the number of a tensor, the first byte of a stretch, and the stretch of both plans, which stays valid until the
function returns. A tensor without bytes comes once."""


class TensorSide(Struct, frozen=True, eq=False):
    """A plan with a tensor in each file and no headers, and the source that it reads."""

    plan: Plan
    source: Source
    rows: Mapping[int, memoryview] | None = None
    """Number -> all bytes of a tensor in this process's memory, from which it is taken; None: the source is read."""


def read_pairs(
    sides: tuple[TensorSide, TensorSide],
    numbers: Sequence[int],
    budget: Budget,
    take: Take,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Read tensors by number from both plans, which have equal outputs; errors as `execute`.

    Args:
        sides: the two plans. Their records are checked; a record's rest is read for its checksum.
        numbers: the tensors, in the order in which threads take them.
        budget: the number of threads, and the staging buffer of each.
        take: called by any thread.
        cancelled: as of `execute`, but any thread calls it.
        progress: called with the bytes of a stretch that was taken, by one thread at a time.
    """
    groups, lock, stop = _group(sides[0].plan, numbers), threading.Lock(), threading.Event()
    states = [make_checksums(side.plan) for side in sides]

    def read() -> None:
        readers = [
            _Reader(side, replace(budget, workers=1), state, lambda: stop.is_set() or cancelled())
            for side, state in zip(sides, states, strict=True)
        ]
        while not stop.is_set():
            with lock:
                group = next(groups, None)
            if group is None:
                return
            try:
                for low in range(0, max(1, group[0].nbytes), _STRETCH_NBYTES):
                    for reader in readers:
                        reader.fill(group, low)
                    for place in group:
                        take(place.number, low, *(reader.find(place, low) for reader in readers))
                    with lock:
                        progress(sum(min(place.nbytes - low, _STRETCH_NBYTES) for place in group))
            except CancelledError:
                if not stop.is_set():
                    raise
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(budget.workers, "xrank-pairs") as pool:
        started = [pool.submit(read) for _ in range(budget.workers)]
        try:
            for one in started:
                one.result()
        finally:
            stop.set()  # after Ctrl-C, too: the pool waits for its threads
    for side, state in zip(sides, states, strict=True):
        if side.rows is not None:
            continue
        used = [copies.record for number in numbers for copies in side.plan.files[number].tensors[0].read]
        records = np.unique(np.concatenate([np.empty(0, np.int64), *used]))
        read_rest(state, side.source, records, take_memory(WINDOW_NBYTES, "a buffer"))


class _Place(NamedTuple):
    """A tensor's place in a thread's memory; a tensor that is larger than this memory fills it several times."""

    number: int
    nbytes: int
    start: int


def _group(plan: Plan, numbers: Sequence[int]) -> Iterator[list[_Place]]:
    """Yield tensors that fit the memory of a thread together, or one that does not."""
    group, end = list[_Place](), 0
    for number in numbers:
        nbytes = plan.files[number].output.nbytes
        if group and end + nbytes > _STRETCH_NBYTES:
            yield group
            group, end = [], 0
        group.append(_Place(number, nbytes, end))
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    if group:
        yield group


class _Reader:
    """A thread's memory for stretches of a plan, as a `PlacingTarget`: windows are made in it."""

    def __init__(
        self, side: TensorSide, budget: Budget, checksums: RecordChecksums, cancelled: Callable[[], bool]
    ) -> None:
        self._side, self._budget, self._checksums, self._cancelled = side, budget, checksums, cancelled
        self._room = take_memory(_STRETCH_NBYTES, "stretches of tensors")
        self._starts: dict[int, int] = {}

    def fill(self, group: Sequence[_Place], low: int) -> None:
        """Read a stretch of each tensor of a group, from its byte `low` on."""
        self._starts = {place.number: place.start - low for place in group}
        windows = {
            place.number: (range(low // WINDOW_NBYTES, -(-min(place.nbytes, low + _STRETCH_NBYTES) // WINDOW_NBYTES)),)
            for place in group
            if place.nbytes
        }
        plan, source = self._side.plan, self._side.source
        checksums, cancelled = self._checksums, self._cancelled
        if windows and self._side.rows is None:
            execute(plan, source, self, budget=self._budget, shares=windows, checksums=checksums, cancelled=cancelled)

    def find(self, place: _Place, low: int) -> Bytes:
        """Return the stretch of a tensor."""
        if self._side.rows is not None and place.nbytes:
            return np.frombuffer(self._side.rows[place.number], np.uint8)[low : low + _STRETCH_NBYTES]
        stretch = self._room[place.start : place.start + min(place.nbytes - low, _STRETCH_NBYTES)]
        return np.frombuffer(stretch, np.uint8)

    def part_nbytes(self, file: int) -> int:
        """Return the bytes of the memory."""
        return _STRETCH_NBYTES

    def place(self, file: int, offset: int, nbytes: int) -> memoryview:
        """Return the place of a window."""
        start = self._starts[file] + offset
        return self._room[start : start + nbytes]

    def placed(self, file: int, offset: int, nbytes: int) -> None:
        """Do nothing: the bytes are in their place."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Refuse bytes that were made elsewhere."""
        raise AssertionError("windows are made in place")
