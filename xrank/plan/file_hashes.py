"""Hashes of whole files: SHA-256 for signatures, made while windows are in memory, and of files on disk."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable

import xxhash

from xrank.plan.windows import WINDOW_NBYTES
from xrank.stores import places


class FileHashes:
    """Hashes the files that one execution makes whole; any thread may add a window.

    SHA-256 takes bytes in their order alone. A thread with a later window waits for its turn: windows are given out in
    order, so some other thread has the one before.
    """

    def __init__(self) -> None:
        self._states = {}  # type: ignore[var-annotated]  # hashlib's type has no public name
        self._next: dict[int, int] = {}
        self._turn = threading.Condition()
        self._is_aborted = False

    def add(self, file: int, windows: range, data: memoryview) -> None:
        """Add windows of a file, as they are written; wait until all before are added, or another thread failed."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_aborted or self._next.get(file, 0) == windows.start)
            if self._is_aborted:
                return
            state = self._states.setdefault(file, hashlib.sha256())
        state.update(data)  # outside of both locks: the next window's thread still waits, others work
        with self._turn:
            self._next[file] = windows.stop
            self._turn.notify_all()

    def abort(self) -> None:
        """Let all waiting threads go on: one has failed."""
        with self._turn:
            self._is_aborted = True
            self._turn.notify_all()

    def of_file(self, file: int, nbytes: int) -> bytes | None:
        """Return the hash of a file of that size; None if another rank or run made some of its windows."""
        is_whole = self._next.get(file, 0) == -(-nbytes // WINDOW_NBYTES)
        return self._states[file].digest() if is_whole and file in self._states else None


def hash_file(path: str, hash_name: str = "sha256", *, head: bytes = b"") -> bytes:
    """Return the hash of a file on disk, after that of some bytes before it.

    Raises:
        OSError: the file cannot be read.
    """
    state = hashlib.new(hash_name, head, usedforsecurity=hash_name != "sha1")
    _feed(path, state.update)
    return state.digest()


def digest_plain_file(path: str) -> str:
    """Return the XXH3-128 of a file's bytes, which manifests have for files that hold no tensors.

    Raises:
        OSError: the file cannot be read.
    """
    state = xxhash.xxh3_128()
    _feed(path, state.update)
    return state.hexdigest()


def _feed(path: str, update: Callable[[memoryview], object]) -> None:
    buffer = memoryview(bytearray(WINDOW_NBYTES))
    with open(places.open_descriptor(path), "rb", buffering=0) as file:  # of a FIFO, too, it returns at once
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        while count := file.readinto(buffer):
            update(buffer[:count])
