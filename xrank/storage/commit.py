"""The one commit protocol of outputs, whose back ends are a folder on a disk and a prefix in a bucket.

Order of events: `xrank.storage.staging.open_stage` refuses what may not be replaced, takes over or makes a journal
(in a folder under a lock; in a bucket the journal's object is the lock), and yields a stage. Files are made, and the
journal records each that is whole. `Stage.commit` checks that all are whole, makes them appear, and clears what they
replace: on a disk by one rename, in a bucket object by object, the index last. A kill at any point leaves the output
absent, old or whole, and a journal that the same command resumes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import xxhash
from msgspec import Meta, Struct

from xrank.errors import OutputExistsError, XrankError, option
from xrank.system import host_name, process_state

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A number in a record that is read back."""


class JournalLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A file that is whole and in its place."""

    file: str
    nbytes: Count
    digest: str


class DescriptorTarget(Protocol):
    """What the executor writes to, where the output is on a disk."""

    descriptors: dict[int, int]
    """Index of the file in the plan -> its descriptor."""
    in_memory: bool


class OutputFiles(Protocol):
    """The weight files of an output while they are made."""

    @property
    def target(self) -> Any:
        """What the executor writes to, by the files' index."""

    def begin(self, index: int, name: str, nbytes: int, late: Sequence[tuple[int, int]] = ()) -> None:
        """Make a file, before its first byte is written; `late` are (offset, bytes) of the parts of its ending."""

    def finish(self, index: int, name: str, nbytes: int, digest: str, tensors: Sequence[bytes]) -> None:
        """Finish a file after its last byte; `tensors` are the digests of its tensors, in order."""

    def close(self) -> None:
        """Leave the files that a failure left open."""


class Stage(ABC):
    """An output while it is made, in a folder or at a URL. Several threads may call it; ``commit`` comes last."""

    def __init__(self, path: str, notes: tuple[str, ...] = ()) -> None:
        self.path, self.notes = path, notes
        self.finished: dict[str, JournalLine] = {}
        """Finished files by name, of this run and of an interrupted one of the same plan."""

    def recall(self, name: str) -> tuple[bytes, list[bytes]] | None:
        """Return the digests of a finished file and of its tensors; None: it must be read again for them."""
        return None

    def final_name(self, name: str) -> str:
        """Return the name in the output of a weights file that the plan calls so."""
        return name

    @abstractmethod
    def open_files(self, target: DescriptorTarget) -> OutputFiles:
        """Return the output files of a plan, to write to; the caller closes them."""

    @abstractmethod
    def discard(self, name: str) -> None:
        """Remove a finished file that turned out to be wrong or outdated."""

    @abstractmethod
    def write_file(self, name: str, content: bytes | Iterable[bytes]) -> JournalLine:
        """Write a file beside the weights, at once or in blocks; return its entry for the manifest."""

    @abstractmethod
    def copy_file(self, name: str, source_path: str) -> JournalLine:
        """Copy a regular file; return its entry for the manifest. Errors as of `xrank.storage.disk.open_companion`."""

    @abstractmethod
    def hash_file(self, name: str) -> bytes:
        """Return the SHA-256 of a file that was written; in a bucket, of a small one."""

    def commit(self) -> None:
        """Make the stage the output.

        OutputExistsError if something took its name meanwhile, or another gather has taken over; XrankError if a file
        is not whole, or does not read back as written: the same command resumes.
        """
        self._check_whole()
        try:
            self._appear()
            try:
                self._clear_replaced()
            except XrankError as error:  # the output is complete; the next start, or xrank clean, removes the rest
                self.notes += (f"the replaced output, or its journal, could not be removed: {error}",)
        except BaseException as error:
            self._explain_failure(error)
            raise

    @abstractmethod
    def _check_whole(self) -> None:
        """Raise unless all files are whole."""

    @abstractmethod
    def _appear(self) -> None:
        """Let readers see the output: nothing, the old one or the whole one at any instant; and look at it."""

    @abstractmethod
    def _clear_replaced(self) -> None:
        """Remove what the output has replaced, and the journal."""

    def _explain_failure(self, error: BaseException) -> None:  # noqa: B027  a bucket needs nothing
        """Make ready for the next run after a failure, or raise an error that says more."""


def make_exists_error(where: str, what: str, **facts: Any) -> OutputExistsError:
    """Return the error for an output whose name is taken, or is being written."""
    facts = {"file": where, "next_step": f"wait for the other gather, or choose another {option('out')}", **facts}
    return OutputExistsError(f"{where}: {what}", **facts)


def owner_state(host: str, pid: int) -> str:
    """Return ``alive``, ``gone``, or ``unknown`` for a journal's owner on another host."""
    return process_state(pid) if host == host_name() else "unknown"


def seal(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line with its own checksum."""
    return json.dumps({**record, "xxh3": _checksum(record)}).encode() + b"\n"


def unseal(text: bytes) -> dict[str, Any] | None:
    """Return a sealed record; None if it is damaged."""
    try:
        record = json.loads(text)
        if isinstance(record, dict) and record.pop("xxh3", None) == _checksum(record):
            return record
    except (ValueError, RecursionError):
        pass
    return None


def _checksum(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())
