"""The journal of a stage: its finished files, each line with its own checksum."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from xrank import system

JOURNAL_NAME = ".xrank-journal.jsonl"
"""Hidden: hidden files are never companions, so no companion has this name."""

_VERSION = 1
_MAX_NBYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class JournalLine:
    """A file that is whole and on disk."""

    file: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal of an earlier run."""

    plan: str
    """Digest of its plan."""
    host: str
    pid: int
    lines: tuple[JournalLine, ...]
    """Lines before the first damaged one."""


def encode_journal(plan: str, host: str, pid: int, lines: Iterable[JournalLine] = ()) -> bytes:
    """Return the bytes of a journal."""
    head = _seal({"version": _VERSION, "plan": plan, "host": host, "pid": pid})
    return head + b"".join(encode_line(line) for line in lines)


def encode_line(line: JournalLine) -> bytes:
    """Return the bytes of the line for a finished file."""
    return _seal({"file": line.file, "nbytes": line.nbytes, "digest": line.digest})


def parse_journal(content: bytes) -> Journal | None:
    """Read a journal up to its first damaged line; None if the first is damaged or of another version.

    Lines after a damaged one are not trusted either: their run did not know of the damage.
    """
    records = []
    for text in content.split(b"\n")[:-1]:  # the text after the last newline is torn or empty
        record = _unseal(text)
        if record is None:
            break
        records.append(record)
    match records:
        case [{"version": 1, "plan": str(plan), "host": str(host), "pid": int(pid)}, *rest]:
            pass
        case _:
            return None
    finished: dict[str, JournalLine] = {}
    for record in rest:
        match record:
            # Whoever wrote the line, no file outside the stage counts as finished.
            case {"file": str(file), "nbytes": int(nbytes), "digest": str(digest)} if os.path.basename(file) == file:
                finished[file] = JournalLine(
                    file, nbytes, digest
                )  # a file that was made again has two lines: the last counts
            case _:
                break
    return Journal(plan, host, pid, tuple(finished.values()))


def read_journal(stage: str) -> Journal | None:
    """Read the journal in a stage; None without a valid one. Does not follow links or wait for FIFOs."""
    try:
        fd = os.open(os.path.join(stage, JOURNAL_NAME), system.READ | system.NO_LINK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_NBYTES:
            return None
        try:
            return parse_journal(file.read())
        except OSError:
            return None


def _seal(record: dict[str, Any]) -> bytes:
    return json.dumps({**record, "xxh3": _checksum(record)}).encode() + b"\n"


def _unseal(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    checksum = record.pop("xxh3", None)
    return record if checksum == _checksum(record) else None


def _checksum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())
