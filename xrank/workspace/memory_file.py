"""Files in memory that have no name, and how another process of the host finds one and knows that it is the one."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
from dataclasses import asdict, dataclass

from xrank.errors import CorruptError, UsageError
from xrank.ranks.peer import process_space

__all__ = ["MemoryFile", "MemoryPlace", "open_place"]

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEALS = _SIZE_SEALS | fcntl.F_SEAL_WRITE
_MARK = "xrank-"


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where a sealed file lies: what its writer tells, and a reader compares."""

    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int
    nonce: str
    """Is in the name that the kernel shows of the file: no file of another process or host has it by chance."""
    space: str
    """Which process numbers those are: the host's boot and the namespace. Only explains why a file is not found."""
    host: str

    def to_json(self) -> str:
        """Return the place as the store keeps it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, rank: int) -> MemoryPlace:
        """Return what `to_json` wrote.

        Raises:
            CorruptError: it did not write that.
        """
        try:
            told = json.loads(text)
            place = cls(**told)
        except (TypeError, ValueError, RecursionError):
            raise _corrupt(text, rank) from None
        numbers = (place.pid, place.fd, place.device, place.inode, place.nbytes)
        texts = (place.nonce, place.space, place.host)
        if any(type(n) is not int or n < 0 for n in numbers) or any(type(t) is not str for t in texts):
            raise _corrupt(text, rank)
        return place

    @property
    def path(self) -> str:
        """The writer's descriptor."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def check_reachable(self, rank: int) -> None:
        """Refuse a place that this process could not reach whether or not it is still there.

        Raises:
            UsageError: it is on another host, or in another namespace of process numbers.
        """
        if self.space == process_space():
            return
        here = socket.gethostname()
        raise UsageError(
            f"what rank {rank} wrote is in the memory of host {self.host}, which this process on {here} cannot reach",
            rank=rank,
            host=self.host,
            got=f"rank {rank} on {self.host}, the reader on {here}",
            want="ranks on one host that see each other's process numbers",
            next_step="use NFSWorkspace, or give workspace_path, a directory that both mount",
        )


class MemoryFile:
    """The writer's side: a new file, written through `fd`, and there until it is closed."""

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(16)
        self.fd = os.memfd_create(_MARK + self.nonce, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)

    def seal(self, *, writable: bool = False) -> MemoryPlace:
        """Keep the size, and what is not to stay `writable`, for everybody and for good; return where the file lies."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS if writable else _SEALS)
        status = os.fstat(self.fd)
        return MemoryPlace(
            pid=os.getpid(),
            fd=self.fd,
            device=status.st_dev,
            inode=status.st_ino,
            nbytes=status.st_size,
            nonce=self.nonce,
            space=process_space(),
            host=socket.gethostname(),
        )

    def close(self) -> None:
        """Let go of the file; readers that opened it keep it."""
        os.close(self.fd)


def open_place(place: MemoryPlace, *, writable: bool = False) -> int | None:
    """Return a descriptor of the caller's own on the sealed file, or None where the file is there no more.

    Numbers of processes and descriptors are used again: what is found there counts only if it is what was told.
    """
    try:
        # Looked at before it is opened: opening what a number means by now (a tape, a pipe) may do something.
        if not _is_told(os.stat(place.path), place):
            return None
        access = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(place.path, access | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # the process ended, the descriptor was closed, or the number is another user's by now
    try:
        seals = _SIZE_SEALS if writable else _SEALS
        if (
            _is_told(os.fstat(fd), place)
            and _has_seals(fd, seals)
            and _shown_name(fd) == f"/memfd:{_MARK}{place.nonce}"
        ):
            fd, opened = -1, fd
            return opened
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def _is_told(status: os.stat_result, place: MemoryPlace) -> bool:
    return (
        stat.S_ISREG(status.st_mode)
        and (status.st_dev, status.st_ino, status.st_size) == (place.device, place.inode, place.nbytes)
        and status.st_uid == os.geteuid()
    )


def _has_seals(fd: int, seals: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
    except OSError:
        return False  # EINVAL: no file in memory


def _shown_name(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


def _corrupt(text: str, rank: int) -> CorruptError:
    return CorruptError(
        f"what is told of where the memory of rank {rank} lies is no such thing",
        rank=rank,
        got=ascii(text[:200]),
        want="what SharedMemoryWorkspace tells",
        next_step="let the rank write again",
    )
