"""Tensors as the executor's target: row-major bytes arrive window by window and go to the tensors' elements.

Nothing of the size of a tensor is allocated, whatever its strides and device. A contiguous tensor in this process's
memory is written directly, a strided one by strided copies, one on a device through pinned buffers of a window each.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from xrank import dtypes
from xrank.engine.buffers import Source
from xrank.engine.executor import Budget, CancelledError, execute
from xrank.engine.planner import Plan
from xrank.engine.windows import WINDOW_NBYTES
from xrank.errors import UsageError
from xrank.layout.output_files import OutputTensor
from xrank.ranks.memory import address_of, locate_elements, memory_at, runs_of
from xrank.system import anonymous_memory

if TYPE_CHECKING:
    import torch


def check_fillable(name: str, tensor: torch.Tensor) -> None:
    """Check that elements do not share memory: the last one written would overwrite the others."""
    # By rising stride: each must step over all elements that the smaller ones reach.
    reach = 0
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1 and stride <= reach:
            got = f"strides {list(tensor.stride())} for the shape {list(tensor.shape)}"
            what = f"{name}: its elements share memory, so it cannot be filled"
            raise UsageError(what, tensor=name, got=got, want="a contiguous tensor")
        reach += (count - 1) * stride


class TensorTarget:
    """Writes output files into tensors by index of the file: each file is the row-major elements of one tensor.

    It writes without autograd, which then counts no change: the caller must mark the tensors as changed.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._places = {file: locate_elements(tensor) for file, tensor in tensors.items()}
        self._buffers = _PinnedBuffers()
        self.finish()  # queued work may still read the old values

    def part_nbytes(self, file: int) -> int:
        """Return the bytes of a contiguous tensor in this process's memory; 0: of another one."""
        address, elements = self._places[file]
        return 0 if address is None else elements.nbytes

    def place(self, file: int, offset: int, nbytes: int) -> memoryview:
        """Return memory of a contiguous tensor."""
        address, _ = self._places[file]
        assert address is not None, "the tensor has no memory of its own"
        return memory_at(address + offset, nbytes)

    def placed(self, file: int, offset: int, nbytes: int) -> None:
        """Do nothing: the bytes are in the tensor."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write whole elements at a byte offset of the tensor that stands for a file; any thread may call this."""
        import torch

        address, elements = self._places[file]
        if address is not None:
            # memmove releases the interpreter lock, an assignment does not.
            ctypes.memmove(address + offset, address_of(data), len(data))
            return
        low = offset // elements.element_size()
        if elements.device.type != "cuda":
            _put(elements, low, torch.frombuffer(data, dtype=torch.uint8).view(elements.dtype))
            return
        buffer, event, stream = self._buffers.next(elements.device)
        event.synchronize()  # its last content is on the device
        ctypes.memmove(buffer.data_ptr(), address_of(data), len(data))
        with torch.cuda.stream(stream):
            _put(elements, low, buffer[: len(data)].view(elements.dtype))
            event.record(stream)

    def finish(self) -> None:
        """Wait until all written bytes are on their devices."""
        for device in {elements.device for _, elements in self._places.values() if elements.device.type == "cuda"}:
            import torch

            torch.cuda.synchronize(device)


def _put(elements: torch.Tensor, low: int, values: torch.Tensor) -> None:
    done = 0
    for run in runs_of(elements, low, low + values.numel()):
        run.copy_(values[done : done + run.numel()].view(run.shape), non_blocking=True)
        done += run.numel()


class _PinnedBuffers(threading.local):
    """Two buffers of a window for each thread and device: one is filled while the other is copied."""

    def __init__(self) -> None:
        self._made: dict[torch.device, list[tuple[torch.Tensor, Any, Any]]] = {}

    def next(self, device: torch.device) -> tuple[torch.Tensor, Any, Any]:
        """Return a pinned buffer, the event after which it is free, and the stream that copies from it."""
        import torch

        if device not in self._made:
            cuda: Any = torch.cuda
            stream = cuda.Stream(device)
            self._made[device] = [
                (torch.empty(WINDOW_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True), cuda.Event(), stream)
                for _ in range(2)
            ]
        ready = self._made[device]
        ready.reverse()
        return ready[0]


_LOOK_SECONDS = 0.2
"""Seconds between two checks for failed ranks while a thread waits for a tensor."""
_LEAST_BUFFERS_NBYTES = 2 << 20
_MAPPED_NBYTES = 1 << 20
"""Tensors of at least this many bytes have a memory map of their own."""


def split_budget(max_memory_nbytes: int, workers: int) -> tuple[Budget, int]:
    """Return the executor's part of a budget, a third, and the bytes that remain for tensors; errors as `Budget`'s."""
    least = min(max_memory_nbytes, _LEAST_BUFFERS_NBYTES)
    budget = Budget.from_memory(max(max_memory_nbytes // 3, least), workers)
    return budget, max(0, max_memory_nbytes - budget.nbytes)


def make_whole_tensors(
    plan: Plan,
    source: Source,
    budget: Budget,
    numbers: Sequence[int],
    cancelled: Callable[[], bool] = lambda: False,
) -> list[torch.Tensor]:
    """Return tensors of a plan, which has one in each file and no header, each whole in memory of its own.

    Errors are those of `execute`.
    """
    made = {number: empty_tensor(plan.files[number].tensors[0].output) for number in numbers}
    execute(plan, source, TensorTarget(made), budget=budget, files=numbers, cancelled=cancelled)
    return list(made.values())


def empty_tensor(output: OutputTensor) -> torch.Tensor:
    """Return a tensor without values, for an output, on the CPU."""
    import torch

    dtype = getattr(torch, dtypes.dtype(output.dtype).torch_name)
    if output.nbytes < _MAPPED_NBYTES:
        return torch.empty(output.shape, dtype=dtype, device="cpu")
    # A separate map returns to the system when the tensor is freed; malloc keeps freed memory for a while.
    return torch.frombuffer(anonymous_memory(output.nbytes), dtype=dtype).view(output.shape)


_Made = TypeVar("_Made")


class TensorsAhead(Generic[_Made]):
    """Makes tensors, or what stands for them, in order by `make`, ahead of the caller, in a thread; `close` ends it.

    A tensor occupies `nbytes[number]` until the caller takes it. All that are not yet taken fit the room; a larger one
    occupies all of it. `failures` raises if a rank has failed; several threads call it.
    """

    def __init__(
        self,
        make: Callable[[Sequence[int], Callable[[], bool]], list[_Made]],
        nbytes: Sequence[int],
        room_nbytes: int,
        failures: Callable[[], bool],
    ) -> None:
        self._make, self._nbytes, self._room_nbytes, self._failures = make, nbytes, room_nbytes, failures
        self._changed = threading.Condition()
        self._ready: deque[_Made] = deque()
        self._untaken_nbytes = 0
        self._error: BaseException | None = None
        self._stopped = False
        # A program that ends while it holds an iterator must not wait for this thread.
        self._thread = threading.Thread(target=self._work, name="xrank-ahead", daemon=True)
        self._thread.start()

    def take(self, number: int) -> _Made:
        """Return the next one, which must have this number; it belongs to the caller alone. Raises for failures."""
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
        """Stop, discard the tensors that were not taken, and wait until all reads have ended."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        # The caller closes the source next, and no read may be under way then.
        self._thread.join()
        self._ready.clear()

    def _work(self) -> None:
        try:
            for numbers, nbytes in self._buckets():
                with self._changed:
                    # A bucket that is larger than the room is made once nothing else waits; else it never would be.
                    while not self._stopped and self._untaken_nbytes > max(0, self._room_nbytes - nbytes):
                        self._changed.wait()
                    if self._stopped:
                        return
                    self._untaken_nbytes += nbytes
                made = self._make(numbers, lambda: self._stopped or self._failures())
                with self._changed:
                    self._ready.extend(made)
                    del made
                    self._changed.notify_all()
        except CancelledError:
            pass
        except BaseException as error:  # `take` raises it again
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _buckets(self) -> Iterator[tuple[list[int], int]]:
        """Yield all tensors in order, in buckets of half the room: one is made while the caller takes the last one."""
        numbers: list[int] = []
        total = 0
        for number, nbytes in enumerate(self._nbytes):
            if numbers and total + nbytes > self._room_nbytes // 2:
                yield numbers, total
                numbers, total = [], 0
            numbers.append(number)
            total += nbytes
        if numbers:
            yield numbers, total


if TYPE_CHECKING:
    Tensors = Generator[tuple[str, torch.Tensor], None, None]


class ModelTensors(Iterator[tuple[str, "torch.Tensor"]]):
    """The iterator of `iter_model`, for one thread. Garbage collection closes it."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    def close(self) -> None:
        """Stop taking tensors, and wait for the ranks that still take them. A second call does nothing."""
        self._tensors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._tensors.throw(error)  # `Team.together` reports it to all other ranks
        except BaseException as raised:
            if raised is not error:
                raise
