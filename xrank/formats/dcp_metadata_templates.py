"""Regular expressions over opcodes for the chunks and entries of storage in the pickle of a ``.metadata``.

The pickler writes all of a kind alike, except for numbers and for texts from another rank. It writes classes and names
of fields once, and later refers to them by their numbers in the memo.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import TypeAlias

from xrank.formats.inert_record import InertRecord

Matcher: TypeAlias = Callable[[bytes, int], "re.Match[bytes] | None"]
"""Matches at a byte of a pickle; the functions that make matchers define its groups."""

NUM_FIXED_MEMOS = 6
"""Number of memo values in every object of either kind: one instance, its state, and two Sizes with their argument
tuples; or two instances, their states, and one Size with its tuple. A tuple with numbers and a full text add one."""

_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"

# BININT1, BININT2, BININT, LONG1
_COUNT = rb"(?:K.|M..|J....|\x8a(?:\x05.....|\x06......|\x07.......|\x08........))"
_PLACE = rb"(" + _COUNT + rb")"
# EMPTY_TUPLE; TUPLE1 to 3, or TUPLE down to its MARK, and MEMOIZE; then the call of torch.Size on it
_SIZE = rb"(\)|\(?" + _COUNT + rb"+[\x85\x86\x87t]\x94)\x85\x94R\x94"
# BINGET, LONG_BINGET, SHORT_BINUNICODE and MEMOIZE
_TEXT = rb"(h.|j....|\x8c.[^\x94]*\x94)"
_INDEX = rb"(?:N|K.|M..|J....)"
_MADE = rb"\)\x81\x94\}\x94\("  # an empty instance, and the start of its state
_SET = rb"ub"

_NBYTES = {0x4B: 2, 0x4D: 3, 0x4A: 5}  # of BININT1, BININT2 and BININT, with their opcodes
_ARITIES = {0x85: 1, 0x86: 2, 0x87: 3}  # of TUPLE1 to 3

_Part: TypeAlias = bytes | str | tuple[str, str]


def chunk_matcher(memo: Mapping[int, object]) -> Matcher | None:
    """Return the matcher of a ``ChunkStorageMetadata``; its groups are the tuples of offsets and sizes.

    Args:
        memo: the memo of a machine that has just read one; None is returned if the object had another form.
    """
    size = ("torch", "Size")
    return _matcher(
        memo, (_METADATA, "ChunkStorageMetadata"), _MADE, "offsets", size, _SIZE, "sizes", size, _SIZE, _SET
    )


def entry_matcher(memo: Mapping[int, object]) -> Matcher | None:
    """Return the matcher of a ``MetadataIndex`` and its ``_StorageInfo``: name, offsets, path, first byte, length.

    Args:
        memo: the memo of a machine that has just read one; None is returned if the object had another form.
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
    """Return the matcher of these parts; a text or a class stands for the reference to its memo number."""
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


def pack_tuple(raw: bytes) -> bytes:
    """Return the integers of a matched tuple as consecutive int64.

    Raises:
        ValueError: an integer is negative, or the opcodes do not form a tuple.
    """
    if raw == b")":
        return b""
    values: list[int] = []
    marked = raw[0] == 0x28
    at, end = int(marked), len(raw) - 2  # the opcode of the tuple and that of its memo
    while at < end:
        nbytes = 2 + raw[at + 1] if raw[at] == 0x8A else _NBYTES[raw[at]]
        values.append(parse_count(raw[at : at + nbytes]))
        at += nbytes
    if _ARITIES.get(raw[end]) != (None if marked else len(values)):
        raise ValueError("a tuple takes more or fewer values than there are")
    return struct.pack(f"<{len(values)}q", *values)


def parse_count(raw: bytes) -> int:
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
