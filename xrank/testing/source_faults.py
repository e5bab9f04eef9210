"""Ways to damage the files of a source, each as a change that can be undone.

Faults are independent of formats. They need the files, the ranges of bytes that hold tensors, and the two containers
that every framework uses: a bare pickle and the zip of ``torch.save``.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

_Ranges: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]
"""Real path of a file -> (first byte, end) of the bytes that hold tensors."""

MARKER = "ran"
"""Name of the file that hostile pickles would leave in the working directory."""


@dataclass(frozen=True, slots=True)
class SourceChange:
    """One change to one file of a source."""

    what: str
    file: Path
    apply: Callable[[Path], None]
    """Function that makes the change; afterwards the file is always restored."""

    @contextmanager
    def apply_and_undo(self) -> Iterator[None]:
        """Make the change, run the body, and restore the file."""
        content, status = self.file.read_bytes(), self.file.stat()
        try:
            self.apply(self.file)
            yield
        finally:
            if self.file.is_dir() and not self.file.is_symlink():
                self.file.rmdir()
            else:
                self.file.unlink(missing_ok=True)
            self.file.write_bytes(content)
            os.utime(self.file, ns=(status.st_atime_ns, status.st_mtime_ns))


@dataclass(frozen=True, slots=True)
class SourceFault:
    """A kind of damage, and the exit codes that fit it."""

    exit_codes: frozenset[int]
    changes: Callable[[Sequence[Path], _Ranges], Iterator[SourceChange]]


def _rewrite(content: bytes) -> Callable[[Path], None]:
    """Return a function that replaces a file's bytes."""

    def apply(file: Path) -> None:
        file.write_bytes(content)

    return apply


def _change_each(
    what: str, apply: Callable[[Path], None]
) -> Callable[[Sequence[Path], _Ranges], Iterator[SourceChange]]:
    def changes(files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
        for file in files:
            yield SourceChange(f"{file.name} {what}", file, apply)

    return changes


def _truncate(files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    for file in files:
        content = file.read_bytes()
        random_ = random.Random(file.name)  # noqa: S311  seeded: the same lengths on every run
        shares = [0.5, 0.99, *(random_.random() for _ in range(4))]
        lengths = {1, len(content) - 1, *(int(len(content) * share) for share in shares)}
        for length in sorted(length for length in lengths if 0 < length < len(content)):
            yield SourceChange(f"{file.name} cut to {length} of {len(content)} bytes", file, _rewrite(content[:length]))


def _zero_tail(files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    for file in files:
        content = file.read_bytes()
        for share in (0.1, 0.6, 0.95):
            start = int(len(content) * share)
            if any(content[start:]):
                zeros = content[:start] + bytes(len(content) - start)
                yield SourceChange(f"{file.name} zeros from byte {start} on", file, _rewrite(zeros))


def _flips(content: bytes, places: Sequence[int], file: Path) -> Iterator[SourceChange]:
    for at in places:
        bit = at % 8
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        yield SourceChange(f"{file.name} bit {bit} of byte {at} flipped", file, _rewrite(bytes(flipped)))


def _flip_payload(files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    for file in files:
        content = file.read_bytes()
        ranges = payload.get(os.path.realpath(file), ())
        random_ = random.Random(file.name)  # noqa: S311
        places = {place for first, end in ranges for place in (first, random_.randrange(first, end), end - 1)}
        yield from _flips(content, random_.sample(sorted(places), min(len(places), 12)), file)


def _flip_metadata(files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    for file in files:
        content = file.read_bytes()
        is_payload = bytearray(len(content))
        for first, end in payload.get(os.path.realpath(file), ()):
            is_payload[first:end] = b"\1" * (end - first)
        # Zeros and Z are mostly torch's padding, where a flip has no effect.
        places = [at for at, byte in enumerate(content) if not is_payload[at] and byte not in b"\0Z"]
        random_ = random.Random(file.name)  # noqa: S311
        yield from _flips(content, sorted(random_.sample(places, min(len(places), 40))), file)


def _copy_other_rank(files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    for file in files:
        for other in files:
            same = file.suffix == other.suffix and file.parent == other.parent and file.name != other.name
            content = other.read_bytes() if same else b""
            if same and len(content) == file.stat().st_size and content != file.read_bytes():
                yield SourceChange(f"{file.name} is a copy of {other.name}", file, _rewrite(content))


def _link_outside(file: Path) -> None:
    # The link leads out of the folder, to the same bytes: readers follow links in a user's folder.
    target = file.parent.parent / f".{file.name}.target"
    shutil.copy2(file, target)
    file.unlink()
    file.symlink_to(target)


def _make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("nothing-there")


_MISSING, _DAMAGED = frozenset({3}), frozenset({4})

FAULTS: Mapping[str, SourceFault] = {
    "a file missing": SourceFault(_MISSING, _change_each("removed", lambda file: file.unlink())),
    "a link to nothing": SourceFault(_MISSING, _change_each("links to nothing", _link_to_nothing)),
    "a file cut short": SourceFault(_DAMAGED, _truncate),
    "an empty file": SourceFault(_MISSING | _DAMAGED, _change_each("is empty", _rewrite(b""))),
    "zeros to the end": SourceFault(_DAMAGED, _zero_tail),
    "a folder in place of a file": SourceFault(_MISSING | _DAMAGED, _change_each("is a folder", _make_folder)),
    "a pipe in place of a file": SourceFault(_MISSING | _DAMAGED, _change_each("is a pipe", _make_fifo)),
    "a link out of the folder": SourceFault(_DAMAGED, _change_each("is a link", _link_outside)),
    "a bit of a tensor flipped": SourceFault(_DAMAGED, _flip_payload),
    # A flipped name of a dtype or a layout may be valid, and then requires another command.
    "a bit of the metadata flipped": SourceFault(_MISSING | _DAMAGED | {2}, _flip_metadata),
    "another rank's file": SourceFault(_MISSING | _DAMAGED, _copy_other_rank),
}
"""Name -> fault, in the order of the table in docs/formats.md."""


# ---- hostile pickles

_COMMAND = f">{MARKER}".encode()
_ARGUMENT = b"X" + struct.pack("<I", len(_COMMAND)) + _COMMAND

HOSTILE_PICKLES: Mapping[str, bytes] = {
    "REDUCE": b"cposix\nsystem\n" + _ARGUMENT + b"\x85R",
    "STACK_GLOBAL": b"\x8c\x05posix\x8c\x06system\x93" + _ARGUMENT + b"\x85R",
    "INST": b"(S'>" + MARKER.encode() + b"'\niposix\nsystem\n",
    "OBJ": b"(cposix\nsystem\n" + _ARGUMENT + b"o",
    "NEWOBJ": b"cposix\nsystem\n" + _ARGUMENT + b"\x85\x81",
    "eval": b"c__builtin__\neval\nX" + struct.pack("<I", 15) + b"open('ran','w')" + b"\x85R",
    "BUILD": b"cbuiltins\nprint\n)\x81}X\x08\0\0\0__call__cposix\nsystem\nsb",
    "a call of a call's result": b"cbuiltins\ngetattr\ncos\npath\nX\x06\0\0\0exists\x86R" + _ARGUMENT + b"\x85R",
    "EXT1": b"\x82\x01",
    "BINPERSID": b"cposix\nsystem\nQ",
}
"""Kind -> opcodes that leave one value on the stack, and would run a command before."""


def hostile_changes(files: Sequence[Path]) -> Iterator[SourceChange]:
    """Yield changes of every pickle in the files, for each hostile kind: it replaces the pickle, or runs before it."""
    for file in files:
        content = file.read_bytes()
        if content[:1] == b"\x80" and content[-1:] == b".":
            for kind, code in HOSTILE_PICKLES.items():
                yield SourceChange(f"{file.name} is a hostile {kind}", file, _rewrite(b"\x80\x04" + code + b"."))
                dropped = content[:2] + code + b"0" + content[2:]
                yield SourceChange(f"{file.name} begins with a hostile {kind}", file, _rewrite(dropped))
        for number, start in enumerate(_archives(content)):
            if number >= 3:
                break  # all items of a file are read in the same way
            for kind, code in HOSTILE_PICKLES.items():
                hostile = _with_pickle(content, start, code)
                if hostile is not None:
                    yield SourceChange(f"item {number} of {file.name} is a hostile {kind}", file, _rewrite(hostile))


def _archives(content: bytes) -> list[int]:
    """Return the offsets of the archives of ``torch.save``, whose first member is ``<folder>/data.pkl``."""
    return [found.start() for found in re.finditer(rb"PK\x03\x04.{26}[^/]{1,100}/data\.pkl", content, re.DOTALL)]


def _with_pickle(content: bytes, start: int, code: bytes) -> bytes | None:
    """Return the bytes with another data.pkl in that archive, of the same size and with a right checksum."""
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", content, start + 26)
    payload = start + 30 + name_nbytes + extra_nbytes
    end = content.index(b"PK\x07\x08", payload)
    room = end - payload - len(b"\x80\x02") - len(code) - 1
    if room < 0 or room == 1:
        return None
    # Values that are pushed and popped fill the size: a pickle that ends before its bytes would be refused for that.
    odd = b"K\x000" if room % 2 else b""
    filled = b"\x80\x02" + odd + b"N0" * ((room - len(odd)) // 2) + code + b"."
    old, new = (struct.pack("<I", zlib.crc32(data)) for data in (content[payload:end], filled))
    changed = bytearray(content[:payload] + filled + content[end:])
    # The checksum is in the descriptor after the member, and in the directory at the archive's end.
    at = end
    for _ in range(2):
        at = changed.index(old, at)
        changed[at : at + 4] = new
        at += 4
    return bytes(changed)


# ---- paths

_MIN_NAME_NBYTES = 6


def escaping_paths(files: Sequence[Path]) -> Iterator[SourceChange]:
    """Yield changes of every file that contains another file's name: a path that leaves the folder replaces the name.

    The path has the name's length, so that length fields stay right, and leads to the same bytes.
    """
    for file in files:
        content = file.read_bytes()
        for other in files:
            name = other.name.encode()
            if other == file or len(name) < _MIN_NAME_NBYTES or name not in content:
                continue
            for path in (b"../" + b"x" * (len(name) - 3), b"./../" + b"x" * (len(name) - 5)):
                yield SourceChange(
                    f"{file.name} names {path.decode()} for {other.name}",
                    file,
                    _escaping(content.replace(name, path), other, path),
                )
            absolute = b"/" + b"x" * (len(name) - 1)
            yield SourceChange(
                f"{file.name} names {absolute.decode()}", file, _rewrite(content.replace(name, absolute))
            )
            yield SourceChange(
                f"{file.name} names a path with a NUL",
                file,
                _rewrite(content.replace(name, name[:-2] + b"\0x")),
            )


def _escaping(content: bytes, other: Path, path: bytes) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        shutil.copy2(other, file.parent / path.decode())
        file.write_bytes(content)

    return apply
