"""How chunks and entries of storage look in the pickle of a ``.metadata``, as regular expressions over its opcodes.

The pickler writes each alike, but for its numbers and for texts that come from another rank; classes and the names of
fields it writes once and then refers to by their numbers in the memo.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import TypeAlias

from xrank.formats.inert_record import InertRecord

__all__ = ["NUM_FIXED_MEMOS", "Matcher", "chunk_matcher", "count_of", "entry_matcher", "packed_tuple"]

Matcher: TypeAlias = Callable[[bytes, int], "re.Match[bytes] | None"]
"""Matches at a place in a pickle; its groups are as the function says that makes it."""

NUM_FIXED_MEMOS = 6
"""Values that either kind memoizes, always: an instance and its state and two Sizes with the tuples of their arguments;
or two instances and their states and one Size with its. A tuple with numbers, and a text in full, are one more each."""

_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"

# BININT1, BININT2, BININT, LONG1
_COUNT = rb"(?:K.|M..|J....|\x8a(?:\x05.....|\x06......|\x07.......|\x08........))"
_PLACE = rb"(" + _COUNT + rb")"
# EMPTY_TUPLE; TUPLE1 to 3, or TUPLE down to its MARK, and MEMOIZE; then the call of torch.Size on it
_SIZE = rb"(\)|\(?" + _COUNT + rb"+[\x85\x86\x87t]\x94)\x85\x94R\x94"
# BINGET, LONG_BINGET, SHORT_BINUNICODE and MEMOIZE
_TEXT = rb"(h.|j....|\x8c.[^\x94]*\x94)"
_INDEX = rb"(?:N|K.|M..|J....)"
_MADE = rb"\)\x81\x94\}\x94\("  # an empty instance, and its state begun
_SET = rb"ub"

_NBYTES = {0x4B: 2, 0x4D: 3, 0x4A: 5}  # of BININT1, BININT2 and BININT, with their opcodes
_ARITIES = {0x85: 1, 0x86: 2, 0x87: 3}  # of TUPLE1 to 3

_Part: TypeAlias = bytes | str | tuple[str, str]


def chunk_matcher(memo: Mapping[int, object]) -> Matcher | None:
    """Return what matches a ``ChunkStorageMetadata``: its offsets and its sizes, as tuples.

    Args:
        memo: of a machine that has just read one; None is returned where that was of another kind.
    """
    size = ("torch", "Size")
    return _matcher(
        memo, (_METADATA, "ChunkStorageMetadata"), _MADE, "offsets", size, _SIZE, "sizes", size, _SIZE, _SET
    )


def entry_matcher(memo: Mapping[int, object]) -> Matcher | None:
    """Return what matches a ``MetadataIndex`` and its ``_StorageInfo``: name, offsets, path, first byte and length.

    Args:
        memo: of a machine that has just read one; None is returned where that was of another kind.
    """
    index = (
        (_METADATA, "MetadataIndex"),
        _MADE,
        "fqn",
        _TEXT,
        "index",
        _INDEX,
        "offset",
        ("torch", "Size"),
        _SIZE,
        _SET,
    )
    info = ((_FILESYSTEM, "_StorageInfo"), _MADE, "relative_path", _TEXT, "offset", _PLACE, "length", _PLACE, _SET)
    return _matcher(memo, *index, *info)


def _matcher(memo: Mapping[int, object], *parts: _Part) -> Matcher | None:
    """Return what matches these parts, a text or a class as the reference to where the memo has it."""
    numbers: dict[object, int] = {}
    for number, value in memo.items():
        if isinstance(value, str):
            numbers.setdefault(value, number)
        elif type(value) is InertRecord and value.args is None:
            numbers.setdefault((value.module, value.name), number)
    pattern = b""
    for part in parts:
        if isinstance(part, bytes):
            pattern += part
        elif part not in numbers:
            return None
        else:
            number = numbers[part]
            get = b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
            pattern += re.escape(get)
    return re.compile(pattern, re.DOTALL).match


def packed_tuple(raw: bytes) -> bytes:
    """Return the integers of a matched tuple as int64, one after the other.

    Raises:
        ValueError: one is negative, or the opcodes make no tuple.
    """
    if raw == b")":
        return b""
    values: list[int] = []
    marked = raw[0] == 0x28
    at, end = int(marked), len(raw) - 2  # the opcode of the tuple and that of its memo
    while at < end:
        nbytes = 2 + raw[at + 1] if raw[at] == 0x8A else _NBYTES[raw[at]]
        values.append(count_of(raw[at : at + nbytes]))
        at += nbytes
    if _ARITIES.get(raw[end]) != (None if marked else len(values)):
        raise ValueError("a tuple takes more or fewer values than there are")
    return struct.pack(f"<{len(values)}q", *values)


def count_of(raw: bytes) -> int:
    """Return the value of a matched integer.

    Raises:
        ValueError: it is negative.
    """
    opcode = raw[0]
    # LONG1 has its length before it.
    value = int.from_bytes(raw[2 if opcode == 0x8A else 1 :], "little", signed=opcode in (0x8A, 0x4A))
    if value < 0:
        raise ValueError("a count below 0")
    return value
