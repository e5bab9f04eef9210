"""Bytes of a tensor by range, wherever they are: a rank lends them while a conversion reads its model.

The bytes are those of a row-major file of the tensor, whatever its strides, device and lazy bits. Nothing of the size
of a tensor is allocated: elements that are not in a row are copied in chunks of 1 MiB.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from xrank.ranks.byte_service import ServedBytes
from xrank.ranks.memory import check_dense
from xrank.ranks.peer_memory import address_of, memory_at

if TYPE_CHECKING:
    import torch


_CHUNK_NBYTES = 1 << 20


class LocalBytes(ServedBytes, Protocol):
    """A tensor's row-major bytes. Several threads may read at once."""

    address: int | None
    """Address of all bytes in this process's memory; None if they are strided, on a device, or empty."""


def local_bytes(tensor: torch.Tensor) -> TensorBytes:
    """Return a tensor's bytes in place. For a device, this waits for the work that is queued there.

    The result keeps the tensor alive, and detects changes that torch counts (`TensorBytes.is_unchanged`). UsageError:
    the tensor has no elements in memory; callers that know its name have checked this before.
    """
    import torch

    check_dense(tensor, "a lent tensor")
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return TensorBytes(tensor.detach())


class TensorBytes:
    """The bytes of a tensor as `LocalBytes`; see `local_bytes`, which makes them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.numel() * tensor.element_size()
        self._tensor = tensor
        self._version = _version(tensor)
        self.address, self._elements = locate_elements(tensor)

    @property
    def is_unchanged(self) -> bool:
        """Whether torch has counted no change in place since construction; uncounted changes are not noticed."""
        return _version(self._tensor) == self._version

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        """Return the bytes from `start` on in place, while the tensor lives; None if `address` is None."""
        return None if self.address is None else memory_at(self.address + start, nbytes)

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        assert start >= 0 and start + len(into) <= self.nbytes, (start, len(into), self.nbytes)
        if self.address is not None:
            if into:  # memmove releases the interpreter lock, an assignment does not
                ctypes.memmove(address_of(into), self.address + start, len(into))
            return
        width, end = self._elements.element_size(), start + len(into)
        step = _CHUNK_NBYTES // width
        for low in range(start // width, -(-end // width), step):
            high = min(low + step, -(-end // width))
            # A range may begin and end within an element.
            first, stop = max(start, low * width), min(end, high * width)
            self._bring(low, high, first - low * width, into[first - start : stop - start])

    def _bring(self, low: int, high: int, skip: int, into: memoryview) -> None:
        """Fill `into` with bytes of elements [low, high), without the first `skip`."""
        import torch

        elements = self._elements
        # Without staging, unless the range cuts an element or the target is not aligned for its type.
        if elements.device.type == "cpu" and (high - low) * elements.element_size() == len(into):
            target = torch.frombuffer(into, dtype=torch.uint8)
            if target.data_ptr() % elements.element_size() == 0:
                _copy(elements, low, high, target.view(elements.dtype))
                return
        staging, stream = _staging.get(elements.device)
        target = staging[: (high - low) * elements.element_size()].view(elements.dtype)
        if stream is None:
            _copy(elements, low, high, target)
        else:
            with torch.cuda.stream(stream):
                _copy(elements, low, high, target, non_blocking=True)
            stream.synchronize()
        into[:] = memory_at(staging.data_ptr() + skip, len(into))


class _Staging(threading.local):
    """This thread's buffers of one chunk and streams by device. The model's own streams are not disturbed."""

    def __init__(self) -> None:
        self._made: dict[torch.device, tuple[torch.Tensor, torch.cuda.Stream | None]] = {}

    def get(self, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Stream | None]:
        """Return a buffer in this process's memory, pinned for CUDA, and the stream of its copies."""
        import torch

        if device not in self._made:
            is_cuda = device.type == "cuda"
            staging = torch.empty(_CHUNK_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
            stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
            self._made[device] = staging, stream
        return self._made[device]


_staging = _Staging()


def _copy(elements: torch.Tensor, low: int, high: int, target: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy elements [low, high) in row-major order to a target of one dim in this process's memory."""
    done = 0
    for run in runs_of(elements, low, high):
        # Resolved first: for a copy that is not waited for, torch conjugates the target before the copy is done
        # (torch, aten/src/ATen/native/cuda/Copy.cu: copy_kernel_cuda).
        plain = run.resolve_conj().resolve_neg()
        target[done : done + run.numel()].view(run.shape).copy_(plain, non_blocking=non_blocking)
        done += run.numel()


def runs_of(elements: torch.Tensor, low: int, high: int) -> Iterator[torch.Tensor]:
    """Yield views that together are the elements [low, high) in row-major order: at most two for each dim."""
    if high - low == elements.numel():
        yield elements
        return
    inner = elements.numel() // elements.shape[0]
    row, skip = divmod(low, inner)
    if skip:
        stop = min(high - row * inner, inner)
        yield from runs_of(elements[row], skip, stop)
        row, low = row + 1, row * inner + stop
    last = high // inner
    if row < last:
        yield elements[row:last]
        low = last * inner
    if low < high:
        yield from runs_of(elements[last], 0, high - last * inner)


def locate_elements(tensor: torch.Tensor) -> tuple[int | None, torch.Tensor]:
    """Return the address of a tensor's bytes, None unless they are in a row in memory, and its elements as integers."""
    import torch

    if tensor.is_conj() or tensor.is_neg():
        return None, tensor  # only the tensor's own dtype can apply lazy bits
    is_in_row = tensor.nbytes and tensor.is_contiguous() and tensor.device.type == "cpu"
    # Integers are copied without reading elements as numbers.
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    return tensor.data_ptr() if is_in_row else None, tensor if integer is None else tensor.view(integer)


def _version(tensor: torch.Tensor) -> int | None:
    """Return torch's count of changes of the tensor; None if it does not count them."""
    return None if tensor.is_inference() else tensor._version
