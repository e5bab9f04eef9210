"""Atomic renames: without replacing, and as an exchange; they make an output appear at one instant."""

from __future__ import annotations

import ctypes
import errno
import os

from xrank import system

# linux/fs.h
_NOREPLACE = 1
_EXCHANGE = 2
_AT_FDCWD = -100
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_TARGET_EXISTS = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}

Identity = tuple[int, int]


def renameat2(source: str, target: str, flags: int) -> None:
    """Rename by renameat2, which Python's os lacks; OSError(ENOSYS) if the C library lacks it too."""
    function = system.c_function("renameat2")
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source, None, target)
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def identity(path: str) -> Identity | None:
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
    """Rename a folder to a free name.

    Raises:
        FileExistsError: the name is taken.
        OSError: the file system refused.
    """
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


def _has_moved(moving: Identity | None, source: str, target: str) -> bool:
    # An NFS client repeats a request whose answer was lost, and then gets ENOENT for a rename that was done.
    return moving is not None and identity(target) == moving and identity(source) is None
