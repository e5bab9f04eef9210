"""CRC-32C (Castagnoli) of a few bytes: what zarr's index of a shard ends in. Tensors are never checked with it here."""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0x82F63B78
"""RFC 3720, appendix B.4, with its bits reversed."""


def crc32c(data: bytes) -> int:
    """Return the checksum of bytes.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    table = _make_table()
    value = 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


@cache
def _make_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = (value >> 1) ^ _POLYNOMIAL if value & 1 else value >> 1
        table.append(value)
    return tuple(table)
