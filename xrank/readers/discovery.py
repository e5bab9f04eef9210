"""Finds the reader that fits a path."""

from __future__ import annotations

import os
from collections.abc import Sequence

from xrank.errors import IncompleteError, UnknownFormatError, UsageError
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints, Reader
from xrank.readers.hf_folder import HfFolderReader
from xrank.readers.workspace import WorkspaceReader

__all__ = ["READERS", "find_reader", "read_source"]

READERS: tuple[Reader, ...] = (WorkspaceReader(), HfFolderReader())
"""Every reader, in the order in which they are asked."""


def find_reader(path: str, *, format_name: str | None = None, readers: Sequence[Reader] = READERS) -> Reader:
    """Return the one reader that recognises a path.

    Args:
        path: the source.
        format_name: take this reader; it must recognise the path.
        readers: those to ask.

    Raises:
        IncompleteError: the path does not exist.
        UnknownFormatError: no reader recognises it; what each said is listed.
        UsageError: several do.
    """
    if not os.path.exists(path):
        raise IncompleteError(f"{path} does not exist", file=path, next_step="check the path")
    if format_name is not None:
        readers = [reader for reader in readers if reader.name == format_name]
        if not readers:
            known = ", ".join(reader.name for reader in READERS)
            raise UsageError(f"no format is called {format_name}", got=format_name, want=known)
    answers = {reader.name: reader.recognise(path) for reader in readers}
    fitting = [reader for reader in readers if answers[reader.name] is None]
    if len(fitting) > 1:
        raise UsageError(
            f"{path} can be read in several ways",
            file=path,
            got=", ".join(reader.name for reader in fitting),
            next_step="choose one with --format",
        )
    if not fitting:
        raise UnknownFormatError(
            f"{path} is of no format that is known",
            file=path,
            got="; ".join(f"{name}: {answer}" for name, answer in answers.items()),
            next_step="check the path; xrank gather --help lists what it takes",
        )
    return fitting[0]


def read_source(path: str, hints: Hints, *, format_name: str | None = None) -> StoredModel:
    """Return the stored model at a path, read by the reader that recognises it."""
    return find_reader(path, format_name=format_name).read(path, hints)
