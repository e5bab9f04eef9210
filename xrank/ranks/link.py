"""A link: short messages between two processes of one host, with file descriptors where needed.

A Unix socket that keeps message borders. The kernel closes it when either process ends, so a waiting process always
wakes. A message is the length of its JSON, the JSON, and its payload.
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

MAX_PAYLOAD_NBYTES = 32 << 10
_MAX_NBYTES = 128 << 10
"""Largest message; half of the default buffer of a Unix socket (Linux, net.core.wmem_default: 212,992)."""
_MAX_DESCRIPTORS = 16
_HEAD = Struct("<I")
_NO_CONTENT = _HEAD.pack(2) + b"{}"
"""Beginning of a message that is a payload alone."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode
# As numbers: combining enum members takes longer than the call.
_SEND, _SEND_AT_ONCE = int(socket.MSG_NOSIGNAL), int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_RIGHTS_NBYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)


def is_readable(fd: int) -> bool:
    """Return whether a descriptor can be read without waiting; a pidfd can once its process has ended."""
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
            BlockingIOError: `wait` is False and the socket's buffer is full.
        """
        parts = encode_message(message)
        assert sum(map(len, parts)) <= _MAX_NBYTES, parts[0]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._socket.sendmsg(parts, rights, _SEND if wait else _SEND_AT_ONCE)

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors, which the caller closes; None when the other end is gone.

        Raises:
            CorruptError: the bytes are not a message of xrank.
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
            # A message that was cut is damaged, even if what is left of it could be decoded.
            return decode_message(b"" if flags & _CUT else content), list(descriptors)
        except CorruptError:
            for fd in descriptors:
                os.close(fd)
            raise

    def peer_uid(self) -> int:
        """Return the user id of the other end, from the kernel (unix(7): SO_PEERCRED)."""
        credentials = array.array("i")
        credentials.frombytes(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return credentials[1]

    def close(self) -> None:
        """Close this end; the other end's next `receive` returns None."""
        self._socket.close()


def encode_message(message: Message) -> list[bytes]:
    """Return the bytes of a message, in parts that are sent together."""
    if not message.content:
        return [_NO_CONTENT, message.payload]
    content = _to_json(message.content).encode()
    return [_HEAD.pack(len(content)), content, message.payload]


def decode_message(content: bytes) -> Message:
    """Return the message that `encode_message` encoded.

    Raises:
        CorruptError: the bytes are not such a message.
    """
    if content.startswith(_NO_CONTENT):
        return Message({}, content[len(_NO_CONTENT) :])
    if len(content) >= _HEAD.size:
        end = _HEAD.size + _HEAD.unpack_from(content)[0]
        with suppress(ValueError):
            value = json.loads(content[_HEAD.size : end])
            if isinstance(value, dict):
                return Message(value, content[end:])
    raise CorruptError(
        "a message between two ranks is damaged",
        got=f"{len(content)} bytes",
        want="JSON",
        next_step="let all ranks use the same version of xrank",
    )
