"""Whether a number in shared memory may announce that the bytes written before it are there."""

from __future__ import annotations

import platform

STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686", "i586", "i386")
"""Whether all processors see stores in the order they were made in: a message before the number that announces it.
Other processors need barrier instructions for that, which Python does not have."""
