"""What tells a rank's file from another's; the readers' own tests have copied files."""

from __future__ import annotations

import zlib

import pytest

from xrank.readers.records import compute_repeated_crc32


@pytest.mark.parametrize("pattern", [b"\0\0\0\0", b"\x80\x3f"])
def test_the_checksum_of_a_repeated_pattern(pattern: bytes) -> None:
    for count in (1, 2, 3, 7, 64, 1000):
        assert compute_repeated_crc32(pattern, count) == zlib.crc32(pattern * count)
