"""Whole tensors in this process's memory, made by the executor as files are, ahead of who takes them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xrank import dtypes
from xrank.lending.peer_memory import address_of
from xrank.plan.buffers import Source
from xrank.plan.executor import Budget, CancelledError, execute
from xrank.plan.planner import Plan, TensorPlan

if TYPE_CHECKING:
    import torch

__all__ = ["TensorsAhead", "WholeTensors", "split_budget"]

_LOOK_SECONDS = 0.2
"""How often who waits for a tensor asks whether a rank has failed."""
_LEAST_BUFFERS_NBYTES = 2 << 20
_MAPPED_NBYTES = 1 << 20
"""Tensors of so many bytes have a map of their own."""


def split_budget(max_memory_nbytes: int, workers: int) -> tuple[Budget, int]:
    """Return the executor's part of a budget, a third, and the bytes that are left for tensors.

    Raises:
        UsageError: not even one worker with the smallest buffers fits.
    """
    least = min(max_memory_nbytes, _LEAST_BUFFERS_NBYTES)
    budget = Budget.from_memory(max(max_memory_nbytes // 3, least), workers)
    return budget, max(0, max_memory_nbytes - budget.nbytes)


class WholeTensors:
    """Tensors of a plan, each made whole in memory of its own.

    Args:
        plan: with one tensor in a file, and no header (`tensor_plan`).
        source: where they are read.
        budget: threads and buffers.
    """

    def __init__(self, plan: Plan, source: Source, budget: Budget) -> None:
        self._plan, self._source, self._budget = plan, source, budget

    def nbytes(self, number: int) -> int:
        """Return the bytes of a tensor, by the number of its file."""
        return self._plan.files[number].output.nbytes

    def make(self, numbers: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> list[torch.Tensor]:
        """Return these tensors; nothing here holds them.

        Args:
            numbers: which.
            cancelled: asked by threads before each window; it may raise, too.

        Raises:
            XrankError, CancelledError: as `execute`.
        """
        made = {number: _empty(self._plan.files[number].tensors[0]) for number in numbers}
        execute(
            self._plan,
            self._source,
            _Target({number: tensor.data_ptr() for number, tensor in made.items()}),
            budget=self._budget,
            files=numbers,
            cancelled=cancelled,
        )
        return list(made.values())


def _empty(tensor: TensorPlan) -> torch.Tensor:
    import torch

    output = tensor.output
    dtype = getattr(torch, dtypes.dtype(output.dtype).torch_name)
    if output.nbytes < _MAPPED_NBYTES:
        return torch.empty(output.shape, dtype=dtype, device="cpu")
    # A map of its own goes back to the system when the tensor goes; malloc keeps what is freed for a while.
    memory = mmap.mmap(-1, output.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # where the kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)  # filled two to three times as fast
    return torch.frombuffer(memory, dtype=dtype).view(output.shape)


class _Target:
    """Writes to tensors, by their addresses; whoever executes keeps them."""

    def __init__(self, addresses: dict[int, int]) -> None:
        self._addresses = addresses

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that tensor."""
        ctypes.memmove(self._addresses[file] + offset, address_of(data), len(data))  # other threads run meanwhile


@dataclass(slots=True)
class _Bucket:
    """Tensors that are made together, and the bytes that they take until they are taken."""

    numbers: list[int]
    nbytes: int


class TensorsAhead:
    """Makes tensors in order, ahead of who takes them, by a thread of its own; `close` ends it.

    Args:
        tensors: what is made: all of it.
        nbytes: by number, what a tensor takes until it is taken.
        room_nbytes: for all that is made or being made and not yet taken; a tensor that takes more has all of it.
        failures: raises if a rank has failed; asked by several threads.
    """

    def __init__(
        self, tensors: WholeTensors, nbytes: Sequence[int], room_nbytes: int, failures: Callable[[], bool]
    ) -> None:
        self._tensors, self._nbytes, self._room_nbytes, self._failures = tensors, nbytes, room_nbytes, failures
        self._changed = threading.Condition()
        self._ready: deque[torch.Tensor] = deque()
        self._untaken_nbytes = 0
        self._error: BaseException | None = None
        self._stopped = False
        # A program that ends while it holds an iterator must not wait for it.
        self._thread = threading.Thread(target=self._work, name="xrank-ahead", daemon=True)
        self._thread.start()

    def take(self, number: int) -> torch.Tensor:
        """Return the next tensor, whose number it is; it is the caller's alone.

        Raises:
            XrankError: as `WholeTensors.make`, or a rank has failed.
        """
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                if not self._changed.wait(_LOOK_SECONDS):
                    self._failures()
            self._untaken_nbytes -= self._nbytes[number]
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self) -> None:
        """Make no more, let go of what nobody took, and wait until nothing is read."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def _work(self) -> None:
        try:
            for bucket in self._buckets():
                with self._changed:
                    while not self._stopped and not self._has_room(bucket.nbytes):
                        self._changed.wait()
                    if self._stopped:
                        return
                    self._untaken_nbytes += bucket.nbytes
                made = self._tensors.make(bucket.numbers, self._is_cancelled)
                with self._changed:
                    self._ready.extend(made)
                    del made
                    self._changed.notify_all()
        except CancelledError:
            pass
        except BaseException as error:  # raised again by `take`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return not self._untaken_nbytes or self._untaken_nbytes + nbytes <= self._room_nbytes

    def _is_cancelled(self) -> bool:
        return self._stopped or self._failures()

    def _buckets(self) -> Iterator[_Bucket]:
        """Yield all tensors in order, as many at a time as fill half the room: while one is taken the next is made."""
        bucket = _Bucket([], 0)
        for number, nbytes in enumerate(self._nbytes):
            if bucket.numbers and bucket.nbytes + nbytes > self._room_nbytes // 2:
                yield bucket
                bucket = _Bucket([], 0)
            bucket.numbers.append(number)
            bucket.nbytes += nbytes
        if bucket.numbers:
            yield bucket
