"""Early writeback: the kernel writes complete pages in the background, so that the final fsync has little left to do.

sync_file_range(2) with SYNC_FILE_RANGE_WRITE starts the writing without waiting. It guarantees nothing, so an fsync
must still follow. Only Linux has it; other systems do nothing here.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from xrank.system import c_function

_SYNC_FILE_RANGE_WRITE = 2


@cache
def _sync_file_range() -> Any:
    function = c_function("sync_file_range")
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Begin to write a range of a file to its disk; errors are left to fsync."""
    function = _sync_file_range()
    if function is not None:
        function(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)
