"""Makes this interpreter look like one on macOS or Windows: what those systems lack is taken away.

Import it before xrank: what other packages need of the system is imported here, and stays.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import json  # noqa: F401
import logging  # noqa: F401
import mmap
import multiprocessing  # noqa: F401
import os
import select
import shutil
import signal
import socket
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
from typing import Any

import click  # noqa: F401
import isal.isal_zlib  # noqa: F401
import ml_dtypes  # noqa: F401
import numpy  # noqa: F401
import xxhash  # noqa: F401

LINUX_ONLY = {
    os: "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING pidfd_open eventfd eventfd_read eventfd_write EFD_CLOEXEC "
    "EFD_NONBLOCK posix_fallocate posix_fadvise POSIX_FADV_DONTNEED sched_getaffinity copy_file_range fdatasync preadv "
    "pwritev splice",
    mmap: "MADV_HUGEPAGE MADV_REMOVE MADV_POPULATE_WRITE",
    select: "epoll EPOLLIN EPOLLOUT EPOLLET EPOLLHUP EPOLLRDHUP EPOLLERR",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_SEQPACKET",
    signal: "pidfd_send_signal",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_GROW F_SEAL_WRITE",
}
POSIX_ONLY = {
    os: "O_CLOEXEC O_NONBLOCK O_NOFOLLOW O_DIRECTORY O_NOCTTY pread pwrite statvfs ST_RDONLY geteuid getuid getegid "
    "getgid uname fork register_at_fork sendfile fchmod fchown chown killpg sched_yield mkfifo sync",
    mmap: "MAP_PRIVATE MAP_ANONYMOUS MAP_ANON MAP_SHARED PROT_READ PROT_WRITE MADV_DONTNEED",
    select: "poll POLLIN POLLOUT POLLHUP POLLERR",
    socket: "AF_UNIX SCM_RIGHTS",
    signal: "SIGKILL SIGSTOP SIGCONT SIGHUP SIGUSR1 SIGUSR2 pthread_sigmask",
}
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "posix")
LINUX_FUNCTIONS = {"fallocate", "fallocate64", "renameat2", "sync_file_range", "process_vm_readv", "prctl", "fstatfs"}
O_BINARY = 0x8000  # a flag that this kernel ignores (fcntl.h: O_LARGEFILE)


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name in LINUX_FUNCTIONS:
            raise AttributeError(name)
        return super().__getattr__(name)


def become(system: str) -> None:
    """Take away what the system lacks, "macOS" or "Windows"."""
    for table in (LINUX_ONLY, POSIX_ONLY)[: 1 if system == "macOS" else 2]:
        for module, names in table.items():
            for name in names.split():
                if hasattr(module, name):
                    delattr(module, name)
    _hide_proc()
    if system == "macOS":
        ctypes.CDLL = _Library  # type: ignore[misc]
        return
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    ctypes.CDLL = _no_library  # type: ignore[assignment, misc]
    os.O_BINARY = O_BINARY  # type: ignore[attr-defined]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    _make_windows_files()


def _no_library(name: object, **options: Any) -> Any:
    raise TypeError("bad argument type for built-in operation")


def _hide_proc() -> None:
    open_file = builtins.open

    def open_hidden(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str) and file.startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, "no /proc here", file)
        return open_file(file, *args, **kwargs)

    builtins.open = open_hidden


def _make_windows_files() -> None:
    """Folders cannot be opened, and a rename does not replace; files are opened as bytes only if that is asked for."""
    open_descriptor, rename = os.open, os.rename

    def open_checked(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        if "xrank" in sys._getframe(1).f_code.co_filename and path != os.devnull and not flags & O_BINARY:
            raise AssertionError(f"{path} is opened as text")
        return open_descriptor(path, flags, *args, **kwargs)

    def rename_new(source: Any, target: Any, **kwargs: Any) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "File exists", source, None, target)
        rename(source, target, **kwargs)

    os.open, os.rename = open_checked, rename_new
