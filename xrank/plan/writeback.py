"""Early writeback: the kernel begins with pages that are complete, so that the fsync at the end finds little left.

sync_file_range(2) with SYNC_FILE_RANGE_WRITE starts the writing and waits for nothing; it promises nothing either, so
an fsync must still follow. Only Linux has it; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

__all__ = ["start_writeback"]

_SYNC_FILE_RANGE_WRITE = 2


@cache
def _sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Begin to write a range of a file to its disk; what can't be begun is left to fsync."""
    function = _sync_file_range()
    if function is not None:
        function(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)
