"""Messages as files in a directory that all ranks mount, for ranks of several hosts.

The rules for network file systems (nfs(5): close-to-open, cached attributes and cached absence, ESTALE) are met by
names that are never used twice and computed, not listed; by looking only when the writer has said that the file is
complete; and by looking again, for longer than any client remembers, if it is not to be seen even so.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrank.errors import IncompleteError
from xrank.ranks.peer import process_space
from xrank.workspace.free_space import no_space_named
from xrank.workspace.message_file import MessageReceipt, read_message, write_message
from xrank.workspace.plain_memory import row_major_bytes
from xrank.workspace.shared_directory import STALE_SECONDS, make_directory, names_in

if TYPE_CHECKING:
    import torch

__all__ = ["DirectoryMessages", "MessageName"]

_NAME = re.compile(r"\.rank_(\d+)\.([0-9a-f]{16})\.(\d+)\.[0-9a-f]{16}\.\d+\.message")


class MessageName:
    """The names of one process' messages: whose they are, and a number that no other has."""

    def __init__(self, rank: int) -> None:
        self._prefix = f".rank_{rank}.{_space_digest()}.{os.getpid()}.{secrets.token_hex(8)}"
        self._count = 0

    def new(self) -> str:
        """Return a name that was never used."""
        self._count += 1
        return f"{self._prefix}.{self._count}.message"

    @staticmethod
    def owner_state(name: str) -> str | None:
        """Return ``alive``, ``gone``, or ``unknown`` for a process of another host; None for what is no message."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        if match[2] != _space_digest():
            return "unknown"
        try:
            os.kill(int(match[3]), 0)
        except (ProcessLookupError, OverflowError):
            return "gone"
        except PermissionError:
            pass
        return "alive"


class DirectoryMessages:
    """A `MessageWorkspace` in a directory; one thread at a time uses it.

    Construction makes the directory, and removes messages that dead processes of this host left there for this rank.

    Args:
        path: the directory; hosts may mount it in different places.
        rank: this one.

    Raises:
        UsageError: the path is no directory.
    """

    patience_seconds = STALE_SECONDS

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._rank = rank
        self._begin()
        _living.add(self)
        # Every rank makes it: nobody could wait for the one that would.
        make_directory(self._path)
        for name in names_in(self._path):
            if name.startswith(f".rank_{rank}.") and MessageName.owner_state(name) == "gone":
                # It is in nobody's way; it may be another user's, or another rank may be removing it.
                with contextlib.suppress(OSError):
                    self._remove(name)

    def _begin(self) -> None:
        self._names = MessageName(self._rank)
        self._published: set[str] = set()
        self._pid = os.getpid()

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Leave a message; see `MessageWorkspace`."""
        name = self._names.new()
        head, buffers = header.encode(), [row_major_bytes(tensor).data for tensor in tensors]
        try:
            with no_space_named(self._path, "what is to be gathered", sum(map(len, buffers)) + len(head)):
                receipt = write_message(self._path, name, head, buffers)
        except BaseException:
            with contextlib.suppress(OSError):
                self._remove(name)
            raise
        self._published.add(name)
        return receipt.to_json()

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message; see `MessageWorkspace`.

        Raises:
            IncompleteError: the file is not to be seen, or not to its end.
            CorruptError: it is not what was written.
        """
        told = MessageReceipt.from_json(receipt, rank)
        try:
            return read_message(self._path, told, rank)
        except OSError as error:
            # A file handle that the server no longer knows (ESTALE) is looked up anew by the next open.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            file = os.path.join(self._path, told.name)
            raise IncompleteError(
                f"{file}: the message of rank {rank} is not to be seen here",
                rank=rank,
                file=file,
                got=str(error),
                want=f"the {told.nbytes} bytes that rank {rank} wrote to {told.directory}",
                next_step="check that workspace_path is the same directory on both hosts",
            ) from None

    def retire(self, receipt: str) -> None:
        """Remove a message of this rank's that its reader has."""
        self._remove(MessageReceipt.from_json(receipt, -1).name)

    def close(self) -> None:
        """Remove what this rank published; calling it again does nothing."""
        if os.getpid() == self._pid:  # a process forked from the rank is not the rank
            for name in list(self._published):
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._published.discard(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._path, name))


_living: weakref.WeakSet[DirectoryMessages] = weakref.WeakSet()


def _begin_anew_in_child() -> None:
    # A forked process would give its parent's names a second time, and remove its parent's messages when it ends.
    for messages in _living:
        messages._begin()


os.register_at_fork(after_in_child=_begin_anew_in_child)


def _space_digest() -> str:
    return hashlib.blake2b(process_space().encode(), digest_size=8).hexdigest()
