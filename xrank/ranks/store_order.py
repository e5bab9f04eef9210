"""Whether processes may tell each other by a word in shared memory that the bytes before it are there."""

from __future__ import annotations

import os

__all__ = ["STORES_ARE_ORDERED"]

STORES_ARE_ORDERED = os.uname().machine in ("x86_64", "i686", "i586", "i386")
"""Whether all processors see stores in the order they were made in: a message before the word that tells of it.
Elsewhere that would take instructions that Python has not."""
