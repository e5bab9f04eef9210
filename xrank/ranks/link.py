"""A link: short messages between two processes of one host, with file descriptors where needed.

A Unix socket that keeps message borders. The kernel ends it with either process, so that a waiting one always wakes.
A message is the length of its JSON, the JSON, and its payload.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
from contextlib import suppress
from struct import Struct

from xrank.errors import CorruptError
from xrank.ranks.wire import Message

__all__ = ["MAX_PAYLOAD_NBYTES", "Link", "framed", "is_readable", "parsed"]

MAX_PAYLOAD_NBYTES = 32 << 10
_MAX_NBYTES = 128 << 10
"""Of a message; half of what Linux lets a Unix socket hold by default (net.core.wmem_default: 212,992)."""
_MAX_DESCRIPTORS = 16
_HEAD = Struct("<I")
_NO_CONTENT = _HEAD.pack(2) + b"{}"
"""How a message begins that is a payload alone."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode
# Numbers, not members of enums, which cost more to combine than the call does.
_SEND, _SEND_AT_ONCE = int(socket.MSG_NOSIGNAL), int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_RIGHTS_NBYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)


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

    def send(self, message: Message, descriptors: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Send a message of at most 128 KiB, with descriptors.

        Raises:
            BrokenPipeError, ConnectionResetError: the other end is gone.
            BlockingIOError: it is not to `wait`, and the other end has not read enough yet.
        """
        parts = framed(message)
        assert sum(map(len, parts)) <= _MAX_NBYTES, parts[0]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._socket.sendmsg(parts, rights, _SEND if wait else _SEND_AT_ONCE)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors, which are the caller's; None when the other end is gone.

        Raises:
            CorruptError: what came is no message of xrank's.
        """
        try:
            content, ancillary, flags, _ = self._socket.recvmsg(_MAX_NBYTES, _RIGHTS_NBYTES, _RECEIVE)
        except ConnectionResetError:
            return None
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not content and not descriptors:
            return None
        try:
            return parsed(b"" if flags & _CUT else content), list(descriptors)
        except CorruptError:
            for fd in descriptors:
                os.close(fd)
            raise

    def peer_uid(self) -> int:
        """Return the user that the other end belongs to, as the kernel knows it (unix(7): SO_PEERCRED)."""
        credentials = array.array("i")
        credentials.frombytes(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return credentials[1]

    def close(self) -> None:
        """Close this end; the other one hears of it."""
        self._socket.close()


def framed(message: Message) -> list[bytes]:
    """Return the bytes of a message, in parts."""
    if not message.content:
        return [_NO_CONTENT, message.payload]
    content = _to_json(message.content).encode()
    return [_HEAD.pack(len(content)), content, message.payload]


def parsed(content: bytes) -> Message:
    """Return the message of which `framed` gave the bytes.

    Raises:
        CorruptError: it did not give them.
    """
    if content.startswith(_NO_CONTENT):
        return Message({}, content[len(_NO_CONTENT) :])
    if len(content) >= _HEAD.size:
        end = _HEAD.size + _HEAD.unpack_from(content)[0]
        with suppress(ValueError):
            told = json.loads(content[_HEAD.size : end])
            if isinstance(told, dict):
                return Message(told, content[end:])
    raise CorruptError("a message between two ranks is damaged", got=f"{len(content)} bytes", want="JSON")
