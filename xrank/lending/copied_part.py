"""A copy of a rank's part of a model: its owner may change the model while the copy is lent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrank.errors import NoSpaceError, UsageError, option
from xrank.lending.local_bytes import LocalBytes, local_bytes
from xrank.system import anonymous_memory, available_memory_nbytes
from xrank.words import size_text

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
"""Bytes; for the element types of all tensors."""


def copy_part(
    views: Sequence[torch.Tensor], *, rank: int, num_here: int, room_nbytes: int | None
) -> Sequence[LocalBytes]:
    """Return copies of tensors' bytes, all in one map of memory, which is freed with the last of them.

    Args:
        views: tensors on any device.
        rank: this rank, for errors.
        num_here: the number of ranks on this host that copy at once.
        room_nbytes: bytes that the copies may take; None: this rank's share of the memory that the host has left.

    Raises:
        UsageError: they take more than `room_nbytes`.
        NoSpaceError: they take more than the host has left.
    """
    import torch

    sources = [local_bytes(view) for view in views]
    starts, nbytes = [], 0
    for source in sources:
        starts.append(nbytes)
        nbytes += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
    _check_room(nbytes, rank, num_here, room_nbytes)
    memory = anonymous_memory(nbytes or 1)  # no map is empty
    content, copies = torch.frombuffer(memory, dtype=torch.uint8), []
    for start, source in zip(starts, sources, strict=True):
        source.read_into(0, memoryview(memory)[start : start + source.nbytes])
        copies.append(local_bytes(content[start : start + source.nbytes]))
    return copies


def _check_room(nbytes: int, rank: int, num_here: int, room_nbytes: int | None) -> None:
    if room_nbytes is not None:
        if nbytes > room_nbytes:
            raise UsageError(
                f"the copy of rank {rank}'s part takes {size_text(nbytes)}, "
                f"and {option('max_memory')} leaves {size_text(max(room_nbytes, 0))} beside the buffers",
                rank=rank,
                got=f"{nbytes:,} bytes of tensors on rank {rank}",
                want=f"at most {max(room_nbytes, 0):,} bytes",
                next_step=f"give a larger {option('max_memory')}, or leave {option('background', True)} out, "
                "which copies nothing",
            )
        return
    available = available_memory_nbytes()
    if available is not None and nbytes > available // num_here:
        raise NoSpaceError(
            f"the copy of rank {rank}'s part takes {size_text(nbytes)}, and the host has {size_text(available)} of "
            f"memory left for {num_here} rank(s)",
            rank=rank,
            needed_nbytes=nbytes * num_here,
            free_nbytes=available,
            next_step=f"leave {option('background', True)} out, which copies nothing; "
            f"{option('max_memory')} lifts this check",
        )
