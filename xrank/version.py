"""The version of the installed package, which the build takes from the repository's tags."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _find_version() -> str:
    try:
        return version("xrank")
    except PackageNotFoundError:
        return "0+unknown"  # the folder was copied, not installed


__version__ = _find_version()
