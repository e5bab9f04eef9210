"""Tensors as the executor's target: row-major bytes arrive window by window and go to the tensors' elements.

Nothing of the size of a tensor is allocated, whatever its strides and device. A contiguous tensor in this process's
memory is written directly, a strided one by strided copies, one on a device through pinned buffers of a window each.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xrank.engine.windows import WINDOW_NBYTES
from xrank.errors import UsageError
from xrank.ranks.peer_memory import address_of, memory_at
from xrank.ranks.tensor_bytes import locate_elements, runs_of

if TYPE_CHECKING:
    import torch


def check_fillable(name: str, tensor: torch.Tensor) -> None:
    """Check that elements do not share memory: the last one written would overwrite the others."""
    # By rising stride: each must step over all elements that the smaller ones reach.
    reach = 0
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1 and stride <= reach:
            got = f"strides {list(tensor.stride())} for the shape {list(tensor.shape)}"
            what, want = (
                f"{name}: its elements share memory, so it cannot be filled",
                "a contiguous tensor in its place",
            )
            raise UsageError(what, tensor=name, got=got, want=want)
        reach += (count - 1) * stride


class TensorTarget:
    """Writes output files into tensors by index of the file: each file is the row-major elements of one tensor.

    It writes without autograd, which then counts no change: the caller must mark the tensors as changed.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = {file: _Fillable(tensor) for file, tensor in tensors.items()}
        self._buffers = _PinnedBuffers()
        for device in self._devices():
            _synchronize(device)  # queued work may still read the old values

    def part_nbytes(self, file: int) -> int:
        """Return the bytes of a contiguous tensor in this process's memory; 0: of another one."""
        return self._tensors[file].part_nbytes

    def place(self, file: int, offset: int, nbytes: int) -> memoryview:
        """Return memory of a contiguous tensor."""
        return self._tensors[file].place(offset, nbytes)

    def placed(self, file: int, offset: int, nbytes: int) -> None:
        """Do nothing: the bytes are in the tensor."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Write whole elements at a byte offset of a file; any thread may call this."""
        self._tensors[file].write(offset, data, self._buffers)

    def finish(self) -> None:
        """Wait until all written bytes are on their devices."""
        for device in self._devices():
            _synchronize(device)

    def _devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self._tensors.values() if tensor.device.type == "cuda"}


class _Fillable:
    """One tensor and the way to write its elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self._address, self._elements = locate_elements(tensor)
        self.part_nbytes = 0 if self._address is None else tensor.numel() * tensor.element_size()

    def place(self, offset: int, nbytes: int) -> memoryview:
        assert self._address is not None, "a tensor without a piece of memory has no parts"
        return memory_at(self._address + offset, nbytes)

    def write(self, offset: int, data: memoryview, buffers: _PinnedBuffers) -> None:
        import torch

        if self._address is not None:
            # memmove releases the interpreter lock, an assignment does not.
            ctypes.memmove(self._address + offset, address_of(data), len(data))
            return
        elements = self._elements
        low = offset // elements.element_size()
        if elements.device.type != "cuda":
            self._put(low, torch.frombuffer(data, dtype=torch.uint8).view(elements.dtype))
            return
        buffer, event, stream = buffers.next(elements.device)
        event.synchronize()  # its last content is on the device
        ctypes.memmove(buffer.data_ptr(), address_of(data), len(data))
        with torch.cuda.stream(stream):
            self._put(low, buffer[: len(data)].view(elements.dtype))
            event.record(stream)

    def _put(self, low: int, values: torch.Tensor) -> None:
        done = 0
        for run in runs_of(self._elements, low, low + values.numel()):
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


def _synchronize(device: torch.device) -> None:
    import torch

    torch.cuda.synchronize(device)
