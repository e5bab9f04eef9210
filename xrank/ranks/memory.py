"""Memory of tensors: elements as bytes, buffers, and the errors about a lack of memory or disk space."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xrank.errors import NoSpaceError, UsageError
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
        next_step = "give the dense tensors that it consists of, or leave it out"
        raise UsageError(f"{what} is {kind}", tensor=name, got=kind, want="a dense tensor", next_step=next_step)
    if not has_memory(tensor):
        raise UsageError(
            f"{what} has no memory: its storage was freed",
            tensor=name,
            got=f"a storage of {tensor.untyped_storage().nbytes():,} bytes",
            want=f"memory of all {tensor.numel():,} elements",
            next_step="call this where it is in memory, not while FSDP or an offloader keeps it elsewhere",
        )


def row_major_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a dense tensor's elements, row-major: a view if the tensor is contiguous on the CPU."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): a single element may have any stride and still count as contiguous.
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]]
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
"""Error numbers of a write to a file in memory when the system lacks memory."""


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
            f"{what} is larger than a file of this process may be (ulimit -f, RLIMIT_FSIZE)",
            got=f"{nbytes:,} bytes",
            want="no limit" if limit < 0 else f"at most {limit:,} bytes",
            next_step="raise the limit: ulimit -f unlimited",
        ) from error


def make_no_memory_error(
    what: str, nbytes: int, next_step: str, *, rank: int | None = None, besides: str = ""
) -> NoSpaceError:
    """Return the error that the system lacks memory for `nbytes` bytes of `what`."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return NoSpaceError(
        f"not enough memory for {what}",
        rank=rank,
        got=f"{free:,} bytes free",
        want=f"{nbytes:,} bytes{besides}",
        next_step=next_step,
        needed_nbytes=nbytes,
        free_nbytes=free,
    )
