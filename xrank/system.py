"""Flags, calls and libraries of the operating system that not every system has, looked up once at import.

Commands on files work on Linux, macOS and Windows, also without some of them. Calls that need Linux itself, such as
meetings of ranks in memory, first call `require_linux`.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
# Windows opens as text unless told otherwise, and lets children inherit in its own way.
_ALWAYS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)

READ = os.O_RDONLY | _ALWAYS | _NO_WAIT
"""Flags to read a file; the opening of a FIFO does not wait for a writer."""
READ_FOLDER: int | None = os.O_RDONLY | _ALWAYS | os.O_DIRECTORY if hasattr(os, "O_DIRECTORY") else None
"""Flags to open a folder; None where the system opens none."""
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | _ALWAYS | _NO_LINK
"""Flags to make a file that must not be there."""
UPDATE = os.O_RDWR | _ALWAYS | _NO_LINK | _NO_WAIT
"""Flags to read and write a file that must be there."""
APPEND = os.O_WRONLY | os.O_APPEND | _ALWAYS | _NO_LINK
"""Flags to write at the end of a file that must be there."""
NO_LINK = _NO_LINK
"""Flag that refuses a link in the place of a file; 0 where the system has none."""
_IS_POSIX = hasattr(os, "getuid")

_seeking = threading.Lock()


def lock_file(path: str) -> int | None:
    """Lock a file, made if it is absent, and return its descriptor; None if another process holds the lock.

    The system frees the lock when the descriptor is closed. OSError if the file system has no locks.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _ALWAYS | _NO_LINK | _NO_WAIT, 0o666)
        try:
            is_locked = _lock(fd)
            if is_locked and os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if not is_locked:
            return None
        # Its owner unlinked it before its lock was free: the next file of this name is the lock.


def _lock(fd: int) -> bool:
    if sys.platform == "win32":
        import msvcrt

        with suppress(OSError):
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
            return True
        return False
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOSYS, "no file locks on this system") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection in all threads: only for short work that makes many objects and no cycles."""
    # The user, or a caller of this function, has paused it and will decide when it runs again.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_bytes_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Read at most that many bytes at an offset; several threads may share a descriptor."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def read_at(fd: int, into: memoryview, offset: int) -> int:
    """Read at an offset into memory and return the number of bytes, 0 at the end; threads may share a descriptor."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [into], offset)
    data = read_bytes_at(fd, len(into), offset)
    into[: len(data)] = data
    return len(data)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write memory at an offset and return the number of bytes; threads may share a descriptor."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Write every byte, however few the kernel takes at once."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def replace(source: str, target: str) -> None:
    """Rename at one instant; a file at the target is replaced."""
    # On Windows rename does not replace.
    (os.rename if _IS_POSIX else os.replace)(source, target)


def sync_folder(path: str) -> None:
    """Sync a folder, so that the names in it survive a power loss; nothing where the system opens no folders."""
    if READ_FOLDER is None:
        return
    fd = os.open(path, READ_FOLDER)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems (CIFS, some FUSE and network ones) cannot sync folders and report that.
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        close_read(fd)


def close_read(fd: int) -> None:
    """Close a descriptor that nothing was written to: its bytes were read, whatever the file system reports now."""
    with suppress(OSError):
        os.close(fd)


def process_state(pid: int) -> str:
    """Return ``alive`` or ``gone`` for a process of this host, ``unknown`` where the system does not tell."""
    if not _IS_POSIX:  # os.kill would end it, or send Ctrl-C
        return "unknown"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return "gone"
    except PermissionError:
        pass
    return "alive"


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Register a function for forked processes, where processes fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def c_library() -> ctypes.CDLL | None:
    """Return the C library of this process; None where it cannot be had without a name."""
    with suppress(OSError, TypeError):
        return ctypes.CDLL(None, use_errno=True)
    return None


_LIBRARY = c_library()


def c_function(name: str) -> Any:
    """Return a function of the C library, as ctypes calls it; None if the library has no such function."""
    return getattr(_LIBRARY, name, None)


def user_id() -> int:
    """Return this process's user, as files record their owner."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def host_name() -> str:
    """Return this host's name."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    import socket

    return socket.gethostname()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def descriptor_limit() -> int:
    """Return the number of files that this process may have open."""
    try:
        import resource
    except ImportError:
        return 512  # of the C library of Windows
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if limit > 0 else 1 << 20  # without a limit the number is -1


def keep_descriptors_free(newest: int) -> bool:
    """Raise the soft limit of open files if a new descriptor comes near it; return whether the last quarter is free.

    A process that lends its memory to hundreds of others needs as many descriptors, and the rest of its program needs
    some, too. The limit is not raised before: programs that use select(2) cannot have more than 1,024.
    """
    # The kernel gives the lowest free number, so it tells how many are in use.
    while newest >= (soft := descriptor_limit()) * 3 // 4:
        try:
            import resource

            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            wanted = 2 * soft if hard < 0 else min(2 * soft, hard)
            if wanted <= soft:
                return False
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ImportError, OSError, ValueError):
            return False
    return True


def peak_rss_nbytes() -> int:
    """Return the peak resident memory of this process in bytes; 0 where the system does not record it.

    Reads /proc where it exists: getrusage also counts the program that started this one.
    """
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_nbytes(folder: str) -> int | None:
    """Return the bytes that this user may still write to a folder's file system; None if they are not known."""
    try:
        if not hasattr(os, "statvfs"):
            import shutil

            return shutil.disk_usage(folder).free
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def available_memory_nbytes() -> int | None:
    """Return the memory in bytes that this machine and the container still have; None if it is not known."""
    found: list[int] = []
    with suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        found.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    # cgroups(7), version 2; what files occupy is given back on demand, and memory.current counts it.
    with suppress(OSError, ValueError, StopIteration):
        amounts = []
        for name in ("max", "current"):
            with open(f"/sys/fs/cgroup/memory.{name}", encoding="ascii") as file:
                amounts.append(int(file.read()))
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as lines:
            of_files = next(int(line.split()[1]) for line in lines if line.startswith("file "))
        found.append(max(0, amounts[0] - amounts[1] + of_files))
    return min(found, default=None)


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Return private memory in a map of its own, in huge pages where the kernel has them."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may not support it
            memory.madvise(mmap.MADV_HUGEPAGE)  # huge pages fill two to three times as fast
    return memory
