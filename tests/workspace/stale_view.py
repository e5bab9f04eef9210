"""A directory as the worst client of a network file system shows it (nfs(5), and what real ones were seen to do).

The true directory is what the server has. Each `StaleClient` stands for the module `os` of one host: it remembers what
it has seen, of names that were absent as well, for as long as its memory lasts by a clock that only a test moves.
Modules do their work on it within ``with client.serving(directory_messages, message_file): ...``.

    negative dentries   a name that was absent stays absent
    stale content       under a name that was read before there is what was there then, of the size it had then
    stale listings      so does a listing
    half files          what is written reaches the server when it is synced or closed
    ESTALE              the first look at a name after its time is up says that its file is gone, where it is another
    lost replies        a rename that succeeded says that the name is gone, where the test asks for it
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch

__all__ = ["Server", "StaleClient"]


class Server:
    """What all hosts have in common."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The time; it passes when a test says so."""
        self.bearers: Counter[str] = Counter()
        """How many files have had a name: the numbers of files are given anew, and tell nothing."""


@dataclass
class _Seen:
    """What a client remembers of a name."""

    content: bytes
    status: os.stat_result | None
    """None where there was no file."""
    bearer: int
    until: float


class StaleClient:
    """Stands for `os` on one host.

    Args:
        server: what all hosts have in common.
        memory_seconds: how long it believes what it has seen: 60 is what nfs(5) allows a directory by itself.
    """

    def __init__(self, server: Server, memory_seconds: float = 60.0) -> None:
        self.looks: Counter[str] = Counter()
        """How often each name was opened to be read."""
        self.loses_next_rename = False
        self._server = server
        self._memory_seconds = memory_seconds
        self._seen: dict[str, _Seen] = {}
        self._listings: dict[str, tuple[list[str], float]] = {}
        self._unsynced: dict[int, list[tuple[bytes, int]]] = {}

    @contextlib.contextmanager
    def serving(self, *modules: ModuleType) -> Iterator[None]:
        """Let these modules see the file system through this client."""
        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(patch.object(module, "os", self))
            yield

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    # ---- looking

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            fd = os.open(path, flags, mode)
            self._server.bearers[path] += 1
            self._seen.pop(path, None)
            self._unsynced[fd] = []
            return fd
        if flags & os.O_DIRECTORY:
            return os.open(path, flags, mode)
        self.looks[os.path.basename(path)] += 1
        # A file of the client's own, as it remembers it: nothing that happens on the server reaches who has it open.
        self.stat(path)
        fd = os.memfd_create("page cache", os.MFD_CLOEXEC)
        os.pwrite(fd, self._seen[path].content, 0)
        return fd

    def stat(self, path: str) -> os.stat_result:
        if os.path.isdir(path):
            return os.stat(path)
        status = self._look(path).status
        if status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return status

    def listdir(self, path: str) -> list[str]:
        names, until = self._listings.get(path, ([], -1.0))
        if until <= self._server.seconds:
            names, until = os.listdir(path), self._server.seconds + self._memory_seconds
            self._listings[path] = names, until
        return list(names)

    def _look(self, path: str) -> _Seen:
        seen = self._seen.get(path)
        if seen is not None and self._server.seconds < seen.until:
            return seen
        now = self._seen[path] = self._ask_the_server(path)
        if seen is not None and seen.status and now.status and seen.bearer != now.bearer:
            # The client asks by the handle that it remembers, and only then by the name.
            del self._seen[path]
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return now

    def _ask_the_server(self, path: str) -> _Seen:
        until = self._server.seconds + self._memory_seconds
        try:
            with open(path, "rb") as file:
                return _Seen(file.read(), os.fstat(file.fileno()), self._server.bearers[path], until)
        except FileNotFoundError:
            return _Seen(b"", None, 0, until)

    # ---- changing

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._unsynced[fd].append((bytes(data), offset))
        return len(data)

    def fsync(self, fd: int) -> None:
        for data, offset in self._unsynced.get(fd, []):
            os.pwrite(fd, data, offset)
        self._unsynced[fd] = []

    def close(self, fd: int) -> None:
        if fd in self._unsynced:
            self.fsync(fd)
            del self._unsynced[fd]
        os.close(fd)

    def unlink(self, path: str) -> None:
        os.unlink(path)
        self._seen.pop(path, None)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)
        self._server.bearers[target] += 1
        for path in (source, target):
            self._seen.pop(path, None)
        if self.loses_next_rename:
            # The client asks again, and the server has done it already.
            self.loses_next_rename = False
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
