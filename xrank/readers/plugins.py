"""Readers that other packages bring: objects or classes under the entry point ``xrank.readers``."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

from xrank.readers.base import Reader

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "plugin_readers"]

GROUP = "xrank.readers"

_logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def plugin_readers() -> tuple[Reader, ...]:
    """Return the readers of installed packages; one that does not load is a warning with its package's name.

    Looking for them reads every installed package's metadata, so it is done once, and only where no reader of xrank's
    own fits.
    """
    from importlib.metadata import entry_points  # it brings the email package: seldom needed, and slow

    found: list[Reader] = []
    for point in entry_points(group=GROUP):
        try:
            found.append(_loaded(point))
        except Exception as error:  # whatever another package's code raises
            package = point.dist.name if point.dist is not None else point.module
            _logger.warning("the reader %s of the package %s does not load: %s", point.name, package, error)
    return tuple(found)


def _loaded(point: EntryPoint) -> Reader:
    made = point.load()
    reader: Reader = made() if isinstance(made, type) else made
    for name in ("name", "recognise", "read"):
        if not hasattr(reader, name):
            raise TypeError(f"{point.value} has no {name!r}, which a reader has")
    return reader
