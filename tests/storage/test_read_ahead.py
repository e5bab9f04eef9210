"""Ends of a folder's files: after a few single reads those of the next files are read at once."""

from __future__ import annotations

import pytest

from tests.sampled import sampled
from tests.storage.servers import Bucket, open_proxy
from xrank.errors import IncompleteError
from xrank.storage import places
from xrank.storage.regular_file import Origin, open_object

_NUM_FILES = 24
_NBYTES = 300_000
"""More than what is read as a whole."""


def content(number: int) -> bytes:
    return f"file {number}:".encode().ljust(_NBYTES, b"%d" % (number % 10))


@pytest.mark.parametrize("offset", sampled([0, _NBYTES - 8], 2), ids=["first bytes", "last bytes"])
def test_next_files_are_read_at_once(small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    for number in range(_NUM_FILES):
        small_bucket.put(f"run/part-{number:02}.bin", content(number))
    small_bucket.put("run/other.json", content(0))
    with open_proxy(small_bucket.server) as proxy:
        for name, value in small_bucket.behind(proxy).environment().items():
            monkeypatch.setenv(name, value)
        folder = places.enter(f"{small_bucket.url}/run")
        names = sorted(name for name in places.list_names(folder) if name.endswith(".bin"))
        proxy.restart()
        counts = []
        for number, name in enumerate(names):
            read = open_object(Origin(f"{folder}/{name}")).read(offset, 8)
            assert read == content(number)[offset : offset + 8]
            counts.append(len(proxy.requests))
        assert counts == [1, 2, *[18] * 16, *[_NUM_FILES] * 6]


def test_a_file_that_cannot_be_read_ahead_fails_when_it_is_read(
    small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in small_bucket.environment().items():
        monkeypatch.setenv(name, value)
    for number in range(5):
        small_bucket.put(f"run/part-{number}.bin", content(number))
    folder = places.enter(f"{small_bucket.url}/run")
    files = [open_object(Origin(f"{folder}/part-{number}.bin")) for number in range(5)]
    small_bucket.client().delete_object(Bucket=small_bucket.name, Key="run/part-4.bin")
    assert [file.read(0, 7) for file in files[:4]] == [b"file %d:" % number for number in range(4)]
    with pytest.raises(IncompleteError):
        files[4].read(0, 7)
