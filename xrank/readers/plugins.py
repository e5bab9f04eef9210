"""Readers from other packages: objects or classes under the entry point ``xrank.readers``."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

from xrank.errors import IncompleteError, UsageError, XrankError
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints, Reader
from xrank.words import one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

GROUP = "xrank.readers"

_logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def plugin_readers() -> tuple[Reader, ...]:
    """Return the readers of installed packages; a reader that fails to load becomes a warning with its package's name.

    The search reads the metadata of every installed package. So it happens once, and only if no own reader fits.
    """
    found: list[Reader] = []
    for point in _entry_points():
        reader, fault = _try_load(point)
        if reader is not None:
            found.append(reader)
        else:
            package = _package_of(point)
            _logger.warning("the reader %s of the package %s does not load: %s", point.name, package, fault)
    return tuple(found)


def find_plugins() -> list[tuple[str, str, str | None]]:
    """Return (package, reader, why it does not load) for each reader of another package, sorted."""
    return sorted((_package_of(point), point.name, _try_load(point)[1]) for point in _entry_points())


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # slow, because it imports the email package

    return entry_points(group=GROUP)


def _package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _try_load(point: EntryPoint) -> tuple[Reader | None, str | None]:
    """Return the reader, or None and the reason in one line."""
    try:
        return _load(point), None
    except Exception as error:  # another package's code may raise anything
        return None, one_line(f"{type(error).__name__}: {error}")


def _load(point: EntryPoint) -> Reader:
    made = point.load()
    reader: Reader = made() if isinstance(made, type) else made
    for name in ("name", "recognise", "read"):
        if not hasattr(reader, name):
            raise TypeError(f"{point.value} lacks {name!r}, which a reader needs")
    if not isinstance(reader.name, str):
        raise TypeError(f"the name of {point.value} is {reader.name!r}, not a text")
    return _PluginReader(reader, _package_of(point))


class _PluginReader:
    """Another package's reader, whose failures name that package.

    Args:
        reader: the reader.
        package: the package that brings it.
    """

    def __init__(self, reader: Reader, package: str) -> None:
        self.name = reader.name
        self._reader, self._package = reader, package

    def recognise(self, path: str) -> str | None:
        """Return what the reader returns; a failure counts as a reason why not."""
        try:
            reason: object = self._reader.recognise(path)
        except XrankError:
            raise
        except Exception as error:  # another package's code may raise anything
            return self._describe(error)
        return reason if reason is None or isinstance(reason, str) else f"{self.name}: {reason!r}"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return what the reader returns.

        Raises:
            IncompleteError, UsageError: a file is missing, or may not be read.
            XrankError: as the reader raises; or the reader failed.
        """
        try:
            model: object = self._reader.read(path, hints)
            if not isinstance(model, StoredModel):
                raise TypeError(f"read returned {type(model).__name__}, not StoredModel")
            return model
        except XrankError:
            raise
        except Exception as error:
            kind: type[XrankError] = XrankError
            next_step = f"report it to the authors of {self._package}, with its traceback"
            if isinstance(error, FileNotFoundError):
                kind, next_step = IncompleteError, "bring the missing file"
            elif isinstance(error, PermissionError):
                kind, next_step = UsageError, "run as its owner, or let this user read it"
            raise kind(f"{path} cannot be read: {self._describe(error)}", file=path, next_step=next_step) from error

    def _describe(self, error: Exception) -> str:
        failure = one_line(f"{type(error).__name__}: {error}")
        return f"the reader {self.name} of the package {self._package} failed: {failure}"
