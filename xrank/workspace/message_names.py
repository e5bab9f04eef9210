"""Names of messages in a place that all ranks reach, and the messages that one process has published there."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import weakref

from xrank.ranks.peer import process_space
from xrank.system import after_fork_in_child, process_state
from xrank.workspace.message_file import MessageReceipt

_NAME = re.compile(r"\.rank_(\d+)\.([0-9a-f]{16})\.(\d+)\.[0-9a-f]{16}\.\d+\.message")


class MessageName:
    """Names of one process's messages: they contain the owner and a number, and are unique."""

    def __init__(self, rank: int) -> None:
        self._prefix = f".rank_{rank}.{_space_digest()}.{os.getpid()}.{secrets.token_hex(8)}"
        self._count = 0

    def new(self) -> str:
        """Return a name that was never used before."""
        self._count += 1
        return f"{self._prefix}.{self._count}.message"

    @staticmethod
    def owner_state(name: str) -> str | None:
        """Return ``alive``, ``gone``, or ``unknown`` for a process of another host; None if it is not a message."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        if match[2] != _space_digest():
            return "unknown"
        return process_state(int(match[3]))


class NamedMessages:
    """Base of messages with names: removes those that this process has published, and no others'.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._begin()
        _living.add(self)

    def _begin(self) -> None:
        self._names = MessageName(self._rank)
        self._published: set[str] = set()
        self._pid = os.getpid()

    def retire(self, receipt: str) -> None:
        """Remove a message of this rank after its reader has fetched it."""
        self._remove(MessageReceipt.from_json(receipt, -1).name)

    def close(self) -> None:
        """Remove everything that this rank published. A second call does nothing."""
        if os.getpid() == self._pid:  # not in a process that the rank forked
            for name in list(self._published):
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._published.discard(name)
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        """Remove the message of that name; it may be absent."""
        raise NotImplementedError


_living: weakref.WeakSet[NamedMessages] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    # Otherwise a forked process would reuse its parent's names, and remove its parent's messages when it ends.
    for messages in _living:
        messages._begin()


after_fork_in_child(_begin_anew_in_child)


def _space_digest() -> str:
    return hashlib.blake2b(process_space().encode(), digest_size=8).hexdigest()
