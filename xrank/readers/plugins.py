"""Readers from other packages: objects or classes under the entry point ``xrank.readers``."""

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
    """Return the readers of installed packages; a reader that fails to load becomes a warning with its package's name.

    The search reads the metadata of every installed package. So it happens once, and only if no own reader fits.
    """
    from importlib.metadata import entry_points  # slow, because it imports the email package

    found: list[Reader] = []
    for point in entry_points(group=GROUP):
        try:
            found.append(_load(point))
        except Exception as error:  # another package's code may raise anything
            package = point.dist.name if point.dist is not None else point.module
            _logger.warning("the reader %s of the package %s does not load: %s", point.name, package, error)
    return tuple(found)


def _load(point: EntryPoint) -> Reader:
    made = point.load()
    reader: Reader = made() if isinstance(made, type) else made
    for name in ("name", "recognise", "read"):
        if not hasattr(reader, name):
            raise TypeError(f"{point.value} lacks {name!r}, which a reader needs")
    return reader
