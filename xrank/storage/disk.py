"""Requests to the file system: atomic renames, room for a file, a folder's sync, and errors with an explanation."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from xrank import system
from xrank.errors import AGAIN, ContradictionError, NoSpaceError, UnsafeError, UsageError, XrankError, option
from xrank.storage import places

_MEMORY_FILE_SYSTEMS = {0x01021994, 0x858458F6}  # linux/magic.h: TMPFS_MAGIC, RAMFS_MAGIC
_CERTAINLY_APART = _MEMORY_FILE_SYSTEMS | {0xEF53}  # EXT4_SUPER_MAGIC: two files never share a block
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
# linux/fs.h
_NOREPLACE = 1
_EXCHANGE = 2
_AT_FDCWD = -100
_TARGET_EXISTS = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_Identity = tuple[int, int]


def explain(error: OSError, path: str, *, needed_nbytes: int | None = None) -> XrankError:
    """Return xrank's error for an error of the file system at that path."""
    if isinstance(error, XrankError):
        return error
    text = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NO_SPACE:
        return _make_space_error(error.errno, path, needed_nbytes)
    kind: type[XrankError] = UsageError
    want = None
    if error.errno == errno.EFBIG:
        got = None if needed_nbytes is None else f"{needed_nbytes} bytes"
        text = "larger than the maximum size of a file (ulimit -f, or the file system's limit)"
        next_step = f"raise the limit (ulimit -f unlimited), or make {option('max_shard_size')} smaller"
    elif error.errno == errno.ENAMETOOLONG:
        got, next_step = None, "give the output a shorter name"
    elif error.errno in _NO_PERMISSION:
        got, next_step = describe(path), "choose another place, or change its owner or mode"
        text, want = f"{text} ({got})", "a place that this user may write to, and files that this user may read"
    else:
        kind, got = XrankError, errno.errorcode.get(error.errno or 0, str(error.errno))
        next_step = f"check the disk or the server; then {AGAIN}, which resumes from the finished files"
    return kind(f"{path}: {text}", file=path, got=got, want=want, next_step=next_step)


@contextmanager
def explain_errors(path: str, *, needed_nbytes: int | None = None) -> Iterator[None]:
    """Raise an OSError of the body as the XrankError that explains it."""
    try:
        yield
    except XrankError:
        raise
    except OSError as error:
        raise explain(error, path, needed_nbytes=needed_nbytes) from error


def describe(path: str) -> str:
    """Describe owner and mode of a path, or of the nearest existing folder above it."""
    there = _find_existing(path)
    try:
        status = os.lstat(there)
    except OSError:
        return "its owner and mode cannot be read"
    place = "" if there == path else f"{there}: "
    mode = stat.filemode(status.st_mode)
    return f"{place}owner uid {status.st_uid}, mode {mode}, this process is uid {system.user_id()}"


def measure_free_nbytes(path: str) -> int | None:
    """Return the bytes that this user may still write beside that path; None if they are not known."""
    return system.free_nbytes(_find_existing(path))


def reserve_room(fd: int, path: str, nbytes: int) -> None:
    """Size a new, empty file, so that a full disk is detected before the data moves.

    NoSpaceError if the file system has less room; UsageError if a file may not be that large here.
    """
    with explain_errors(path, needed_nbytes=nbytes):
        if is_in_memory(fd):
            # fallocate would zero every page of a tmpfs first, and a sparse file reserves nothing: check the room here.
            free = measure_free_nbytes(path)
            if free is not None and free < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif nbytes:
            try:
                allocate(fd, nbytes)
                return
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
        os.ftruncate(fd, nbytes)


def allocate(fd: int, nbytes: int) -> None:
    """Reserve the first bytes of a file: fallocate(2).

    Not os.posix_fallocate: where a file system cannot reserve (NFS 3, many FUSE), glibc writes a byte into every
    block instead of returning an error.
    """
    function = system.c_function("fallocate64") or system.c_function("fallocate")
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while function(fd, 0, 0, nbytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def sync_folder(path: str) -> None:
    """Sync a folder, so that the names in it survive a power loss."""
    with explain_errors(path):
        system.sync_folder(path)


def _make_space_error(number: int, path: str, needed: int | None) -> NoSpaceError:
    free = measure_free_nbytes(path)
    what = "the quota is used up" if number == errno.EDQUOT else "no space left"
    with suppress(OSError, AttributeError):
        status = os.statvfs(_find_existing(path))
        # ENOSPC stands for used-up inodes, too; file systems without a fixed number of them count 0 in all.
        if status.f_files and not status.f_favail:
            what = "no inode left (too many files)"
    want, got = None if needed is None else f"{needed} bytes", None if free is None else f"{free} bytes free"
    what = f"{path}: {what}{f', {want} needed' if want else ''}{f', {got}' if got else ''}"
    next_step = f"free space there, then {AGAIN}, which resumes from the finished files; or choose another "
    next_step += option("out")
    facts: dict[str, Any] = {"file": path, "needed_nbytes": needed, "free_nbytes": free}
    return NoSpaceError(what, got=got, want=want, next_step=next_step, **facts)


def _find_existing(path: str) -> str:
    while not os.path.lexists(path):
        parent = os.path.dirname(path)
        if parent == path or not parent:
            return os.curdir
        path = parent
    return path


def is_in_memory(fd: int) -> bool:
    """Return whether a file is in memory (tmpfs, ramfs)."""
    return _file_system(fd) in _MEMORY_FILE_SYSTEMS


def may_share_blocks(path: str, other: str) -> bool:
    """Return whether a new file at a path may share blocks with another file, and so need less room."""
    there = _find_existing(path)
    with suppress(OSError):
        if os.stat(there).st_dev != os.stat(other).st_dev:
            return False
        fd = os.open(there, system.READ)
        try:
            return _file_system(fd) not in _CERTAINLY_APART
        finally:
            os.close(fd)
    return True


def _file_system(fd: int) -> int | None:
    # os.statvfs leaves the file system's kind out; in struct statfs (linux, 64 bit) it is the first long.
    buffer = ctypes.create_string_buffer(256)
    function = system.c_function("fstatfs") if sys.platform == "linux" else None
    if function is None or function(fd, buffer) != 0:
        return None
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


@contextmanager
def open_companion(path: str) -> Iterator[int]:
    """Yield the descriptor of a regular file, following links, which the body reads to its end.

    UnsafeError for a FIFO, a device or a folder; ContradictionError if the file changed while it was read.
    """
    with explain_errors(path):
        fd = places.open_descriptor(path)
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            next_step = "replace it with a regular file"
            raise UnsafeError(f"{path} is not a regular file", file=path, got=describe(path), next_step=next_step)
        yield fd
        nbytes, after = os.lseek(fd, 0, os.SEEK_CUR), os.fstat(fd)
    finally:
        system.close_read(fd)
    if (nbytes, after.st_size, after.st_mtime_ns) != (before.st_size, before.st_size, before.st_mtime_ns):
        want = f"{before.st_size} bytes, unchanged"
        next_step = f"do not write to the source meanwhile, then {AGAIN}"
        what = f"{path}: changed while it was read"
        raise ContradictionError(what, file=path, got=f"{nbytes} bytes read", want=want, next_step=next_step)


def renameat2(source: str, target: str, flags: int) -> None:
    """Rename by renameat2, which Python's os lacks; OSError(ENOSYS) if the C library lacks it too."""
    function = system.c_function("renameat2")
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source, None, target)
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def identity(path: str) -> _Identity | None:
    """Return device and inode, which a rename keeps; None if nothing is there."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def move(source: str, target: str) -> None:
    """Rename; a file at the target is replaced at one instant."""
    moving = identity(source)
    try:
        system.replace(source, target)
    except OSError:
        if not _has_moved(moving, source, target):
            raise


def move_new(source: str, target: str) -> None:
    """Rename a folder to a free name; FileExistsError if it is taken."""
    moving = identity(source)
    try:
        renameat2(source, target, _NOREPLACE)
        return
    except OSError as error:
        if _has_moved(moving, source, target):
            return
        if error.errno not in _NOT_SUPPORTED:
            raise
    # Between the check and the rename another process may make a folder there; a rename replaces an empty one at most.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    try:
        os.rename(source, target)
    except OSError as error:
        if _has_moved(moving, source, target):
            return
        if error.errno in _TARGET_EXISTS:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
        raise


def exchange(one: str, other: str) -> bool:
    """Exchange the names of two folders at one instant; return False if the file system cannot."""
    first, second = identity(one), identity(other)
    try:
        renameat2(one, other, _EXCHANGE)
    except OSError as error:
        if first is not None and (identity(other), identity(one)) == (first, second):
            return True
        if error.errno in _NOT_SUPPORTED:
            return False
        raise
    return True


def _has_moved(moving: _Identity | None, source: str, target: str) -> bool:
    # An NFS client repeats a request whose answer was lost, and then gets ENOENT for a rename that was done.
    return moving is not None and identity(target) == moving and identity(source) is None
