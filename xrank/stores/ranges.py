"""Ranges of one object, read into memory by many requests at once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from xrank.stores.backend import ObjectStatus
from xrank.stores.client import Store

_REQUEST_NBYTES = 4 << 20
_GAP_NBYTES = 16 << 10
"""Ranges that are closer than this share a request."""

_Group = list[tuple[int, memoryview]]


def read_ranges(store: Store, key: str, status: ObjectStatus, ranges: Iterable[tuple[int, memoryview]]) -> None:
    """Fill each buffer with the bytes of the object from an offset on.

    Args:
        store: the store.
        key: the object.
        status: its version; all ranges must lie in it.
        ranges: (offset, buffer), with rising offsets.

    Raises:
        ContradictionError: the object is not that version.
        XrankError: as `Store.read`.
    """

    def fetch(group: _Group) -> None:
        start, (last, buffer) = group[0][0], group[-1]
        data = store.read(key, start, last + len(buffer) - start, status)
        for offset, into in group:
            into[:] = data[offset - start : offset - start + len(into)]

    groups = _group(ranges)
    if len(groups) < 2:
        for group in groups:
            fetch(group)
        return
    with ThreadPoolExecutor(min(store.settings.connections, len(groups)), "xrank-store") as pool:
        try:
            for _ in pool.map(fetch, groups):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _group(ranges: Iterable[tuple[int, memoryview]]) -> list[_Group]:
    """Return the ranges, cut and joined, by request."""
    groups: list[_Group] = []
    end = 0
    for offset, buffer in ranges:
        for start in range(0, len(buffer), _REQUEST_NBYTES):
            piece = buffer[start : start + _REQUEST_NBYTES]
            first, stop = offset + start, offset + start + len(piece)
            if groups and first - end <= _GAP_NBYTES and stop - groups[-1][0][0] <= _REQUEST_NBYTES:
                groups[-1].append((first, piece))
            else:
                groups.append([(first, piece)])
            end = stop
    return groups
