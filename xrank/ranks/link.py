"""A link: short messages between two processes of one host, with file descriptors where needed.

A Unix socket that keeps message borders. The kernel ends it with either process, so that a waiting one always wakes.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
from typing import Any

from xrank.errors import CorruptError

__all__ = ["Link", "is_readable"]

_MAX_NBYTES = 65536
_MAX_DESCRIPTORS = 16


def is_readable(fd: int) -> bool:
    """Say whether a descriptor can be read without waiting; a pidfd can when its process has ended."""
    poller = select.poll()  # not select.select, which takes no descriptor above 1023
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


class Link:
    """One end; only one thread at a time may use it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(True)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send a message of at most 64 KiB as JSON, with descriptors.

        Raises:
            BrokenPipeError, ConnectionResetError: the other end is gone.
        """
        content = json.dumps(message, separators=(",", ":")).encode()
        assert len(content) <= _MAX_NBYTES, len(content)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._socket.sendmsg([content], rights, socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, which are the caller's; None when the other end is gone.

        Raises:
            CorruptError: what came is no message of xrank's.
        """
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        try:
            content, ancillary, flags, _ = self._socket.recvmsg(_MAX_NBYTES, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not content and not descriptors:
            return None
        try:
            message = json.loads(content)
        except ValueError:
            message = None
        if not isinstance(message, dict) or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for fd in descriptors:
                os.close(fd)
            raise CorruptError("a message between two ranks is damaged", got=f"{len(content)} bytes", want="JSON")
        return message, list(descriptors)

    def peer_uid(self) -> int:
        """Return the user that the other end belongs to, as the kernel knows it (unix(7): SO_PEERCRED)."""
        credentials = array.array("i")
        credentials.frombytes(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return credentials[1]

    def close(self) -> None:
        """Close this end; the other one hears of it."""
        self._socket.close()
