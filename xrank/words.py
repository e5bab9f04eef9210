"""Counts and sizes as people read them."""

from __future__ import annotations

__all__ = ["plural", "size_text"]


def size_text(nbytes: float) -> str:
    """Return bytes in decimal units: ``16.1 GB``."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 file``, ``1,024 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
