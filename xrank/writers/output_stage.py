"""The protocol of stages: an output while it is made, on a disk or in a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from xrank.writers.journal import JournalLine
from xrank.writers.part_files import OutputFiles


class OutputStage(Protocol):
    """An output while it is made. Several threads may call its methods; ``commit`` comes last."""

    @property
    def path(self) -> str:
        """Where it is made: a folder, or the URL of the output."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report."""

    @property
    def finished(self) -> Mapping[str, JournalLine]:
        """Finished files by name, of this run and of an interrupted one of the same plan."""

    def recall(self, name: str) -> tuple[bytes, list[bytes]] | None:
        """Return the digests of a finished file and of its tensors; None: it must be read again for them."""

    def open_files(self) -> OutputFiles:
        """Return the output files of a plan, to write to; the caller closes them."""

    def final_name(self, name: str) -> str:
        """Return the name in the output of a weights file that the plan calls so."""

    def discard(self, name: str) -> None:
        """Remove a finished file that turned out to be wrong or outdated."""

    def write_file(self, name: str, content: bytes) -> JournalLine:
        """Write a small file; return its entry for the manifest."""

    def copy_file(self, name: str, source_path: str) -> JournalLine:
        """Copy a regular file; return its entry for the manifest."""

    def hash_file(self, name: str) -> bytes:
        """Return the SHA-256 of a file that was written; in a store, of a small one."""

    def commit(self) -> None:
        """Make the stage the output."""
