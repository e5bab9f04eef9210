"""Messages as files in a directory that all ranks mount, for ranks of several hosts.

Network file systems cache attributes and absent names, and return ESTALE (nfs(5): close-to-open). So names are
computed, never listed or reused. A reader opens a file only after the writer has reported it complete. If the file is
not visible even then, the reader retries for longer than any client caches.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrank.errors import IncompleteError
from xrank.workspace.free_space import explain_no_space
from xrank.workspace.message_file import MessageReceipt, read_message, write_message
from xrank.workspace.message_names import MessageName, NamedMessages
from xrank.workspace.plain_memory import row_major_bytes
from xrank.workspace.shared_directory import STALE_SECONDS, list_names, make_directory

if TYPE_CHECKING:
    import torch


class DirectoryMessages(NamedMessages):
    """A `MessageWorkspace` in a directory, used by one thread at a time.

    Construction creates the directory, and removes messages that dead processes of this host left for this rank.

    Args:
        path: the directory; hosts may mount it under different paths.
        rank: this rank.

    Raises:
        UsageError: the path is not a directory.
    """

    patience_seconds = STALE_SECONDS

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        super().__init__(rank)
        self._path = os.path.abspath(os.fspath(path))
        # Every rank creates it: a rank cannot wait for another one here.
        make_directory(self._path)
        for name in list_names(self._path):
            if name.startswith(f".rank_{rank}.") and MessageName.owner_state(name) == "gone":
                # The file harms no run; another user may own it, or another rank may be removing it.
                with contextlib.suppress(OSError):
                    self._remove(name)

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message; see `MessageWorkspace`."""
        name = self._names.new()
        head, buffers = header.encode(), [row_major_bytes(tensor).data for tensor in tensors]
        try:
            with explain_no_space(self._path, "the message", sum(map(len, buffers)) + len(head)):
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
            IncompleteError: the file is not visible, or not to its end.
            CorruptError: its bytes differ from those that were written.
        """
        message = MessageReceipt.from_json(receipt, rank)
        try:
            return read_message(self._path, message, rank)
        except OSError as error:
            # After ESTALE, an unknown file handle, the next open looks the name up again.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            file = os.path.join(self._path, message.name)
            raise IncompleteError(
                f"{file}: the message of rank {rank} is not visible here",
                rank=rank,
                file=file,
                got=str(error),
                want=f"the {message.nbytes} bytes that rank {rank} wrote to {message.directory}",
                next_step="check that workspace_path is the same directory on both hosts",
            ) from None

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._path, name))
