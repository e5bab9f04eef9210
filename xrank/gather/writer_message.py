"""The message of a writer to the first rank: its call, and its value or the receipt under which the value lies.

A merge makes thousands of similar gathers, so equal headers are neither encoded nor parsed again.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from xrank.errors import CorruptError
from xrank.gather.tree import check_sendable, is_plain, make_tensors, pack
from xrank.ranks.wire import Message
from xrank.workspace.arena import is_as_in_memory

if TYPE_CHECKING:
    import torch

_INLINE_NBYTES = 32768
"""Bytes of a header; a larger one goes through the workspace."""
_HEAD = struct.Struct("<qII")
"""Head of a message's payload: number of the call, bytes of its description, bytes of the receipt."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_ALIGNMENT = 16
"""Alignment in bytes of a tensor in a message's payload: that of the largest element."""


class WriterMessage(NamedTuple):
    """One writer's message, parsed by the first rank."""

    call: int
    description: tuple[str, str | None, tuple[str, int], Any, Any]
    """Function, key, place, tree and rows."""
    receipt: str
    content: bytearray
    """Bytes of the tensors that came in the message itself."""

    @classmethod
    def from_message(cls, message: Message, rank: int) -> WriterMessage:
        """Return the parsed message of a rank.

        Raises:
            CorruptError: it is not a message of a gather.
        """
        payload = message.payload or message.content.get("told", "").encode("latin-1")
        try:
            call, num_described, num_receipt = _HEAD.unpack_from(payload)
            receipt_at = _HEAD.size + num_described
            content_at = receipt_at + num_receipt
            description = _parse_description(payload[_HEAD.size : receipt_at])
            return cls(call, description, payload[receipt_at:content_at].decode(), bytearray(payload[content_at:]))
        except (ValueError, TypeError, struct.error) as error:
            raise CorruptError(
                f"the message of rank {rank} is not a message of a gather",
                rank=rank,
                got=str(error)[:200],
                next_step="let all ranks use the same version of xrank, and no other program write into the workspace",
            ) from None


def is_small(header: str, tensors: Sequence[torch.Tensor], max_nbytes: int) -> bool:
    """Return whether a message of that payload has room for a value."""
    return len(header) <= _INLINE_NBYTES and sum([tensor.nbytes + _ALIGNMENT for tensor in tensors]) <= max_nbytes


def encode_message(
    number: int,
    call: tuple[str, str | None, tuple[str, int]],
    *,
    inline: tuple[str, Sequence[torch.Tensor]] | None,
    receipt: bytes,
    is_json: bool,
) -> Message:
    """Return the message of a writer.

    Args:
        number: that of the call.
        call: function, key and place of the call.
        inline: header and tensors of the value, if it is in the message.
        receipt: under which the value lies elsewhere; else empty.
        is_json: whether the wire carries JSON only.
    """
    header, tensors = inline or ("", ())
    description = _encode_description(*call, header)
    parts = [_HEAD.pack(number, len(description), len(receipt)), description, receipt, *map(_pad_bytes, tensors)]
    if is_json:
        return Message({"told": b"".join(parts).decode("latin-1")})
    return Message({}, b"".join(parts))


@lru_cache(maxsize=64)
def _encode_description(function: str, key: str | None, place: tuple[str, int], header: str) -> bytes:
    """Return the description of a call, with the header of its tensors if they are in the message."""
    return f"[{_to_json([function, key, place])},{header or 'null'}]".encode()


@lru_cache(maxsize=64)
def _parse_description(description: bytes) -> tuple[str, str | None, tuple[str, int], Any, Any]:
    """Return the arguments of `_encode_description`. They are cached: do not change them."""
    (function, key, (file, line)), header = json.loads(description)
    tree, rows = header or (None, None)
    return function, key, (file, line), tree, rows


def split_value(value: object) -> tuple[str, list[torch.Tensor]]:
    """Return the header and the tensors of a value."""
    if is_plain(value):
        check_sendable(value)
        return _header_of_one(value.dtype, value.shape), [value.detach() if value.requires_grad else value]
    tree, tensors = pack(value)
    kinds = groupby([(tensor.dtype, tensor.shape) for tensor in tensors])
    return _to_json([tree, [_row(dtype, shape, len(list(alike))) for (dtype, shape), alike in kinds]]), tensors


def _row(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> list[Any]:
    """Return the header's row for `count` consecutive tensors of one dtype and shape."""
    return [str(dtype).removeprefix("torch."), list(shape), count]


@lru_cache(maxsize=64)
def _header_of_one(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return the header of a single tensor, as `pack` would make it."""
    return _to_json([["t", 0], [_row(dtype, shape, 1)]])


def _pad_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements, row-major, with padding that aligns the next tensor."""
    if not is_as_in_memory(tensor):
        tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) + bytes(-tensor.nbytes % _ALIGNMENT)


def inline_tensors(rows: Sequence[Any], content: bytearray) -> list[torch.Tensor]:
    """Return the tensors of a message's own content."""
    import torch

    if len(rows) == 1 and rows[0][2] == 1 and content:  # a single tensor, as most gathers have
        dtype, shape, _ = rows[0]
        flat = torch.frombuffer(content, dtype=getattr(torch, dtype), count=prod(shape))
        return [flat if len(shape) == 1 else flat.view(shape)]
    memory, buffers, start = memoryview(content), [], 0
    for dtype, shape, count in rows:
        nbytes = prod(shape) * getattr(torch, dtype).itemsize
        for _ in range(count):
            buffers.append(memory[start : start + nbytes])
            start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return make_tensors(rows, buffers)
