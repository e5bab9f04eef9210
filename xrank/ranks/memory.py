"""Memory of tensors: elements as bytes by range, buffers, and errors about a lack of memory or disk space.

The bytes are those of a row-major file of the tensor, whatever its strides, device and lazy bits. Nothing of the size
of a tensor is allocated: elements that are not in a row are copied in chunks of 1 MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from xrank.errors import NoSpaceError, UsageError, XrankError
from xrank.system import free_nbytes

if TYPE_CHECKING:
    import numpy as np
    import torch


def kind_without_elements(tensor: torch.Tensor) -> str | None:
    """Return a description of a tensor that is not dense; None for a dense one, even if its memory was freed."""
    import torch

    if tensor.is_meta:
        return "a meta tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "quantized"
    return None if tensor.layout is torch.strided else f"of layout {tensor.layout}"


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor's storage is long enough for it; FSDP and offloaders free some storages."""
    count = tensor.numel()
    if not count:
        return True
    last = count - 1  # offset of the last element of a contiguous tensor
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last + 1) * tensor.element_size())


def check_dense(tensor: torch.Tensor, what: str, *, name: str | None = None) -> None:
    """Raise UsageError unless a tensor is dense and has memory: reading one without would crash the process."""
    if (kind := kind_without_elements(tensor)) is not None:
        next_step = "give the dense tensors that it consists of, or omit it"
        raise UsageError(f"{what} is {kind}", tensor=name, got=kind, want="a dense tensor", next_step=next_step)
    if not has_memory(tensor):
        raise UsageError(
            f"{what} has no memory: its storage was freed",
            tensor=name,
            got=f"a storage of {tensor.untyped_storage().nbytes():,} bytes",
            want=f"memory of all {tensor.numel():,} elements",
            next_step="call this where it is in memory, not while FSDP has freed it or it is offloaded",
        )


def row_major_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a dense tensor's elements, row-major: a view if the tensor is contiguous on the CPU."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): a single element may have any stride and still count as contiguous.
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]]
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


@contextlib.contextmanager
def explain_no_space(
    directory: str, what: str, nbytes: int, *, file: str | None = None, rank: int | None = None, besides: str = ""
) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into a NoSpaceError with the needed and the free bytes of the directory.

    `besides` follows the wanted number of bytes; `file` is the path that the message names, by default the directory.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            if error.filename is None:  # calls with a descriptor do not name its file
                error.filename = file or directory
            raise
        # Asked after the failure, so the numbers in the error belong to it.
        free = free_nbytes(directory) or 0
        raise NoSpaceError(
            f"{file or directory}: no space for {what}",
            rank=rank,
            file=file or directory,
            got=f"{free} bytes free" + (", and a quota" if error.errno == errno.EDQUOT else ""),
            want=f"{nbytes} bytes{besides}",
            next_step="free space, or use another workspace",
            needed_nbytes=nbytes,
            free_nbytes=free,
        ) from error


@contextlib.contextmanager
def explain_size_limit(what: str, nbytes: int) -> Iterator[None]:
    """Turn EFBIG into a UsageError: the process's limit of file sizes, which also counts for files in memory."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        import resource  # a POSIX library; only POSIX limits the size of files

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        raise UsageError(
            f"{what} is larger than the maximum size of a file (ulimit -f, RLIMIT_FSIZE)",
            got=f"{nbytes:,} bytes",
            want="no limit" if limit < 0 else f"at most {limit:,} bytes",
            next_step="raise the limit: ulimit -f unlimited",
        ) from error


@contextlib.contextmanager
def explain_no_memory(
    what: str, nbytes: int, next_step: str, *, rank: int | None = None, besides: str = ""
) -> Iterator[None]:
    """Turn a lack of memory, also for a file in memory, into a NoSpaceError with the needed and the free bytes.

    Another failure of a file in memory, as of the swap below it, becomes an XrankError.
    """
    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            if error.filename is not None or error.errno == errno.EFBIG:
                raise
            problem = f"{what} cannot be written to memory: {error.strerror}"
            raise XrankError(problem, rank=rank, next_step="check this host's memory and swap") from error
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        raise NoSpaceError(
            f"not enough memory for {what}",
            rank=rank,
            got=f"{free:,} bytes free",
            want=f"{nbytes:,} bytes{besides}",
            next_step=next_step,
            needed_nbytes=nbytes,
            free_nbytes=free,
        ) from error


_CHUNK_NBYTES = 1 << 20


class LocalBytes(Protocol):
    """Bytes of this process that a service sends, such as a tensor's, row-major. Several threads may read at once."""

    nbytes: int
    address: int | None
    """Address of all bytes in this process's memory; None if they are strided, on a device, or empty."""

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        """Return the bytes from `start` on in place; None if they are not in a row in this process's memory."""

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""


class MemoryBytes:
    """Writable memory of this process as `LocalBytes`."""

    def __init__(self, memory: memoryview) -> None:
        self.nbytes, self._content = len(memory), memory
        self.address: int | None = address_of(memory) if memory else None

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        """Return the bytes from `start` on in place."""
        return self._content[start : start + nbytes]

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        into[:] = self._content[start : start + len(into)]


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


# A ctypes array type for each length would cost more than the copy.
_FOR_WRITING = 0x200  # CPython, Include/cpython/object.h: PyBUF_WRITE
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return this process's memory at an address; the caller keeps it alive."""
    memory: memoryview = _memory_view(address, nbytes, _FOR_WRITING)
    return memory


def address_of(memory: memoryview) -> int:
    """Return the address of writable memory of at least one byte, for a call that ends before the memory is freed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
