"""Ways in which the files of a source go bad, each as a change that can be made and taken back.

A fault knows nothing of formats: it works on files, on which of their bytes hold tensors, and on the two containers
that every framework uses, a bare pickle and the zip of ``torch.save``.
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

__all__ = ["FAULTS", "HOSTILE_PICKLES", "Change", "Fault", "escaping_paths", "hostile_changes", "replaced"]

_Ranges: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]
"""Real path of a file -> (first byte, end) of what holds tensors."""

MARKER = "ran"
"""A file that hostile pickles would leave in the working directory."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change to one file of a source."""

    what: str
    file: Path
    apply: Callable[[Path], None]
    """Makes the change; the file is put back afterwards, whatever became of it."""

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the change for as long as the body runs."""
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
class Fault:
    """A kind of damage, and how a command that meets it may exit."""

    exit_codes: frozenset[int]
    changes: Callable[[Sequence[Path], _Ranges], Iterator[Change]]


def replaced(content: bytes) -> Callable[[Path], None]:
    """Return what gives a file other bytes."""

    def apply(file: Path) -> None:
        file.write_bytes(content)

    return apply


def _each(what: str, apply: Callable[[Path], None]) -> Callable[[Sequence[Path], _Ranges], Iterator[Change]]:
    def changes(files: Sequence[Path], payload: _Ranges) -> Iterator[Change]:
        for file in files:
            yield Change(f"{file.name} {what}", file, apply)

    return changes


def _truncated(files: Sequence[Path], payload: _Ranges) -> Iterator[Change]:
    for file in files:
        content = file.read_bytes()
        random_ = random.Random(file.name)  # noqa: S311  seeded: the same lengths on every run
        shares = [0.5, 0.99, *(random_.random() for _ in range(4))]
        lengths = {1, len(content) - 1, *(int(len(content) * share) for share in shares)}
        for length in sorted(length for length in lengths if 0 < length < len(content)):
            yield Change(f"{file.name} cut to {length} of {len(content)} bytes", file, replaced(content[:length]))


def _zero_tail(files: Sequence[Path], payload: _Ranges) -> Iterator[Change]:
    for file in files:
        content = file.read_bytes()
        for share in (0.1, 0.6, 0.95):
            start = int(len(content) * share)
            if any(content[start:]):
                zeros = content[:start] + bytes(len(content) - start)
                yield Change(f"{file.name} zeros from byte {start} on", file, replaced(zeros))


def _flips(content: bytes, places: Sequence[int], file: Path) -> Iterator[Change]:
    for at in places:
        bit = at % 8
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        yield Change(f"{file.name} bit {bit} of byte {at} flipped", file, replaced(bytes(flipped)))


def _flipped_payload(files: Sequence[Path], payload: _Ranges) -> Iterator[Change]:
    for file in files:
        content = file.read_bytes()
        ranges = payload.get(os.path.realpath(file), ())
        random_ = random.Random(file.name)  # noqa: S311
        places = {place for first, end in ranges for place in (first, random_.randrange(first, end), end - 1)}
        yield from _flips(content, random_.sample(sorted(places), min(len(places), 12)), file)


def _flipped_metadata(files: Sequence[Path], payload: _Ranges) -> Iterator[Change]:
    for file in files:
        content = file.read_bytes()
        is_payload = bytearray(len(content))
        for first, end in payload.get(os.path.realpath(file), ()):
            is_payload[first:end] = b"\1" * (end - first)
        # Zeros and Z are mostly torch's padding, where a flip means nothing.
        places = [at for at, byte in enumerate(content) if not is_payload[at] and byte not in b"\0Z"]
        random_ = random.Random(file.name)  # noqa: S311
        yield from _flips(content, sorted(random_.sample(places, min(len(places), 40))), file)


def _another_ranks(files: Sequence[Path], payload: _Ranges) -> Iterator[Change]:
    for file in files:
        for other in files:
            same = file.suffix == other.suffix and file.parent == other.parent and file.name != other.name
            content = other.read_bytes() if same else b""
            if same and len(content) == file.stat().st_size and content != file.read_bytes():
                yield Change(f"{file.name} is a copy of {other.name}", file, replaced(content))


def _linked(file: Path) -> None:
    # Out of the folder, but to the same bytes: links that a user's folder holds are followed for reading.
    target = file.parent.parent / f".{file.name}.target"
    shutil.copy2(file, target)
    file.unlink()
    file.symlink_to(target)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nothing-there")


_MISSING, _DAMAGED = frozenset({3}), frozenset({4})

FAULTS: Mapping[str, Fault] = {
    "a file missing": Fault(_MISSING, _each("removed", lambda file: file.unlink())),
    "a link to nothing": Fault(_MISSING, _each("links to nothing", _dangling)),
    "a file cut short": Fault(_DAMAGED, _truncated),
    "an empty file": Fault(_MISSING | _DAMAGED, _each("is empty", replaced(b""))),
    "zeros to the end": Fault(_DAMAGED, _zero_tail),
    "a folder in place of a file": Fault(_MISSING | _DAMAGED, _each("is a folder", _folder)),
    "a pipe in place of a file": Fault(_MISSING | _DAMAGED, _each("is a pipe", _fifo)),
    "a link out of the folder": Fault(_DAMAGED, _each("is a link", _linked)),
    "a bit of a tensor flipped": Fault(_DAMAGED, _flipped_payload),
    # A name of an element type or a layout that became another one asks for another command.
    "a bit of the metadata flipped": Fault(_MISSING | _DAMAGED | {2}, _flipped_metadata),
    "another rank's file": Fault(_MISSING | _DAMAGED, _another_ranks),
}
"""Name -> fault, in the order of the README's table."""


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
"""Kind -> opcodes that leave one value on the stack, and would run something on the way."""


def hostile_changes(files: Sequence[Path]) -> Iterator[Change]:
    """Yield every pickle of the files with each hostile kind: in its place, or called and dropped before it."""
    for file in files:
        content = file.read_bytes()
        if content[:1] == b"\x80" and content[-1:] == b".":
            for kind, code in HOSTILE_PICKLES.items():
                yield Change(f"{file.name} is a hostile {kind}", file, replaced(b"\x80\x04" + code + b"."))
                dropped = content[:2] + code + b"0" + content[2:]
                yield Change(f"{file.name} begins with a hostile {kind}", file, replaced(dropped))
        for number, start in enumerate(_archives(content)):
            if number >= 3:
                break  # the items of one file are all read alike
            for kind, code in HOSTILE_PICKLES.items():
                hostile = _with_pickle(content, start, code)
                if hostile is not None:
                    yield Change(f"item {number} of {file.name} is a hostile {kind}", file, replaced(hostile))


def _archives(content: bytes) -> list[int]:
    """Return where the archives of ``torch.save`` begin, whose first member is ``<folder>/data.pkl``."""
    return [found.start() for found in re.finditer(rb"PK\x03\x04.{26}[^/]{1,100}/data\.pkl", content, re.DOTALL)]


def _with_pickle(content: bytes, start: int, code: bytes) -> bytes | None:
    """Return the bytes with that archive's data.pkl replaced, all sizes kept, its checksum made right."""
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", content, start + 26)
    payload = start + 30 + name_nbytes + extra_nbytes
    end = content.index(b"PK\x07\x08", payload)
    room = end - payload - len(b"\x80\x02") - len(code) - 1
    if room < 0 or room == 1:
        return None
    # Values pushed and popped fill up: a pickle that ends before its bytes do is refused for that alone.
    odd = b"K\x000" if room % 2 else b""
    filled = b"\x80\x02" + odd + b"N0" * ((room - len(odd)) // 2) + code + b"."
    old, new = (struct.pack("<I", zlib.crc32(data)) for data in (content[payload:end], filled))
    changed = bytearray(content[:payload] + filled + content[end:])
    # The checksum stands in the descriptor behind the member and in the directory at the archive's end.
    at = end
    for _ in range(2):
        at = changed.index(old, at)
        changed[at : at + 4] = new
        at += 4
    return bytes(changed)


# ---- paths

_MIN_NAME_NBYTES = 6


def escaping_paths(files: Sequence[Path]) -> Iterator[Change]:
    """Yield every file in which another one's name stands, with a path in its place that leaves the folder.

    The path has the name's length, so that texts with lengths before them stay sound, and leads to the same bytes.
    """
    for file in files:
        content = file.read_bytes()
        for other in files:
            name = other.name.encode()
            if other == file or len(name) < _MIN_NAME_NBYTES or name not in content:
                continue
            for path in (b"../" + b"x" * (len(name) - 3), b"./../" + b"x" * (len(name) - 5)):
                yield Change(
                    f"{file.name} names {path.decode()} for {other.name}",
                    file,
                    _escaping(content.replace(name, path), other, path),
                )
            absolute = b"/" + b"x" * (len(name) - 1)
            yield Change(f"{file.name} names {absolute.decode()}", file, replaced(content.replace(name, absolute)))
            yield Change(
                f"{file.name} names a path with a NUL", file, replaced(content.replace(name, name[:-2] + b"\0x"))
            )


def _escaping(content: bytes, other: Path, path: bytes) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        shutil.copy2(other, file.parent / path.decode())
        file.write_bytes(content)

    return apply
