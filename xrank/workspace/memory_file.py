"""Unnamed files in memory, and how another process of the host finds and identifies one."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
from dataclasses import asdict, dataclass

from xrank.errors import CorruptError, UsageError
from xrank.ranks.peer import process_space

# linux/fcntl.h: F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE; Python has them on Linux only
_SIZE_SEALS = 1 | 2 | 4
_SEALS = _SIZE_SEALS | 8
_MARK = "xrank-"


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where a sealed file lies, as its writer describes it and its reader checks it."""

    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int
    nonce: str
    """Part of the name that the kernel shows for the file; unique among processes and hosts."""
    space: str
    """Identifies the numbering of pids: the host's boot and the namespace. Used in errors only."""
    host: str

    def to_json(self) -> str:
        """Return the place as text for the store."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, rank: int) -> MemoryPlace:
        """Return the place that `to_json` wrote.

        Raises:
            CorruptError: the text is not a place.
        """
        try:
            place = cls(**json.loads(text))
        except (TypeError, ValueError, RecursionError):
            raise _corrupt(text, rank) from None
        numbers = (place.pid, place.fd, place.device, place.inode, place.nbytes)
        texts = (place.nonce, place.space, place.host)
        if any(type(n) is not int or n < 0 for n in numbers) or any(type(t) is not str for t in texts):
            raise _corrupt(text, rank)
        return place

    @property
    def path(self) -> str:
        """Path of the writer's descriptor."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def check_reachable(self, rank: int) -> None:
        """Check that this process could reach the place if it still exists.

        Raises:
            UsageError: the place is on another host, or in another pid namespace.
        """
        if self.space == process_space():
            return
        here = socket.gethostname()
        raise UsageError(
            f"the memory of rank {rank} is on host {self.host}, which this process on {here} cannot reach",
            rank=rank,
            host=self.host,
            got=f"rank {rank} on {self.host}, the reader on {here}",
            want="ranks on one host, in one pid namespace",
            next_step="use NFSWorkspace, or give workspace_path, a directory that both mount",
        )


class MemoryFile:
    """The writer's side: a new file, written through `fd`, that exists until it is closed."""

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(16)
        self.fd = os.memfd_create(_MARK + self.nonce, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # A new memfd has mode 0777.
        os.fchmod(self.fd, 0o600)

    def seal(self, *, writable: bool = False) -> MemoryPlace:
        """Seal the size, and the content unless it stays `writable`, and return the file's place."""
        import fcntl

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
        """Close the file; readers that opened it keep it."""
        os.close(self.fd)


def open_place(place: MemoryPlace, *, writable: bool = False) -> int | None:
    """Return the caller's own descriptor of the sealed file, or None if the file no longer exists.

    The system reuses pids and descriptors, so the file found there is accepted only if it matches the place.
    """
    try:
        # stat before open: the descriptor may by now be a tape or a pipe, and opening that may have an effect.
        if not _matches(os.stat(place.path), place):
            return None
        access = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(place.path, access | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # the process ended, the descriptor was closed, or the pid now belongs to another user
    try:
        seals = _SIZE_SEALS if writable else _SEALS
        if (
            # Once more: between stat and open the writer may have closed the descriptor and reused its number.
            _matches(os.fstat(fd), place)
            and _has_seals(fd, seals)
            and _read_link_name(fd) == f"/memfd:{_MARK}{place.nonce}"
        ):
            fd, opened = -1, fd
            return opened
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def _matches(status: os.stat_result, place: MemoryPlace) -> bool:
    return (
        stat.S_ISREG(status.st_mode)
        and (status.st_dev, status.st_ino, status.st_size) == (place.device, place.inode, place.nbytes)
        and status.st_uid == os.geteuid()
    )


def _has_seals(fd: int, seals: int) -> bool:
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
    except OSError:
        return False  # EINVAL: not a file in memory


def _read_link_name(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


def _corrupt(text: str, rank: int) -> CorruptError:
    return CorruptError(
        f"rank {rank} describes the place of its memory in a form that is not xrank's",
        rank=rank,
        got=ascii(text[:200]),
        want="a place that SharedMemoryWorkspace wrote",
        next_step="let the rank write again",
    )
