"""Finds what a user's path means: the source at it, just above it or below it, and the reader that fits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from xrank.errors import IncompleteError, UnknownFormatError, UsageError
from xrank.readers.base import Reader
from xrank.readers.bin_folder import BinFolderReader
from xrank.readers.dcp import DcpReader
from xrank.readers.deepspeed import DeepSpeedReader
from xrank.readers.fsdp import AccelerateRanksReader, VerlReader
from xrank.readers.hf_folder import HfFolderReader
from xrank.readers.hf_shards import HfShardsReader
from xrank.readers.megatron_dist import MegatronDistReader
from xrank.readers.megatron_legacy import MegatronLegacyReader
from xrank.readers.plugins import plugin_readers
from xrank.readers.step_marker import marked_step
from xrank.readers.workspace import WorkspaceReader

__all__ = ["READERS", "find_source"]

READERS: tuple[Reader, ...] = (
    WorkspaceReader(),
    HfFolderReader(),
    HfShardsReader(),
    BinFolderReader(),
    DcpReader(),
    MegatronDistReader(),
    MegatronLegacyReader(),
    DeepSpeedReader(),
    VerlReader(),
    AccelerateRanksReader(),
)
"""xrank's own readers, in the order in which they are asked; where none of them fits, other packages' are."""

_SEARCHED_LEVELS = 2


def find_source(path: str, *, format_name: str | None = None) -> tuple[str, Reader]:
    """Return the source that a path means and the one reader that recognises it.

    The path itself comes first; a state's file stands for its folder; a folder of no format is searched two levels
    down, or only the step in it that a marker names. More than one source is never chosen among.

    Args:
        path: what the user gave.
        format_name: consider only this reader.

    Raises:
        IncompleteError: the path does not exist.
        UnknownFormatError: no reader recognises anything there; what each said is listed.
        UsageError: several readers, or several folders, fit.
    """
    if not os.path.exists(path):
        raise IncompleteError(f"{path} does not exist", file=path, next_step="check the path")
    readers = _named(READERS, format_name)
    try:
        return _found(path, readers, format_name)
    except UnknownFormatError:
        more = _named(plugin_readers(), format_name)
        if not more:
            raise
    return _found(path, [*readers, *more], format_name)


def _named(readers: Iterable[Reader], format_name: str | None) -> list[Reader]:
    return [reader for reader in readers if format_name in (None, reader.name)]


def _found(path: str, readers: Sequence[Reader], format_name: str | None) -> tuple[str, Reader]:
    if not readers:
        known = ", ".join(reader.name for reader in (*READERS, *plugin_readers()))
        raise UnknownFormatError(
            f"no format is called {format_name}",
            got=str(format_name),
            want=known,
            next_step="leave --format out: formats are recognised",
        )
    answers = {reader.name: reader.recognise(path) for reader in readers}
    for place in (path, *([os.path.dirname(os.path.abspath(path))] if os.path.isfile(path) else [])):
        fitting = [reader for reader in readers if reader.recognise(place) is None]
        if fitting:
            return place, _only_reader(place, fitting)
    found: list[tuple[str, list[Reader]]] = []
    for place in _folders_below(marked_step(path) or path, _SEARCHED_LEVELS):
        # What lies below a source is a part of it, such as the folder that its marker names.
        if found and place.startswith(found[-1][0] + os.sep):
            continue
        fitting = [reader for reader in readers if reader.recognise(place) is None]
        if fitting:
            found.append((place, fitting))
    if len(found) > 1:
        raise UsageError(
            f"{path} holds several sources",
            file=path,
            got=", ".join(f"{place} ({fitting[0].name})" for place, fitting in found[:10]),
            want="one",
            next_step="name the one to take",
        )
    if found:
        return found[0][0], _only_reader(*found[0])
    raise UnknownFormatError(
        f"{path} is of no format that is known",
        file=path,
        got="; ".join(f"{name}: {answer}" for name, answer in answers.items()),
        want="one of " + ", ".join(reader.name for reader in readers),
        next_step="check the path",
    )


def _only_reader(place: str, fitting: Sequence[Reader]) -> Reader:
    if len(fitting) > 1:
        raise UsageError(
            f"{place} can be read in several ways",
            file=place,
            got=", ".join(reader.name for reader in fitting),
            next_step="choose one with --format",
        )
    return fitting[0]


def _folders_below(path: str, levels: int) -> Iterator[str]:
    """Yield the folders below one, by name; hidden ones (stages of xrank among them) are passed over."""
    if levels == 0 or not os.path.isdir(path):
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.startswith("."):
            yield entry.path
            yield from _folders_below(entry.path, levels - 1)
