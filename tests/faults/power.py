"""Power losses: a job's writes and syncs are recorded, and every state is made that POSIX lets a crash leave.

POSIX guarantees synced bytes and names alone: an fsync of a file keeps its bytes, an fsync of a folder its names. Any
subset of the later changes may be on the disk, and any sectors of a write. A rename is done or not.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.findings import Findings
from tests.faults.jobs import Job, make_jobs
from xrank.storage import disk

__all__ = ["lose_power"]

_SECTOR = 512
_EXCHANGE = 2  # linux/fs.h: RENAME_EXCHANGE


@dataclass(frozen=True)
class Operation:
    """A change of one inode: of a file's bytes, or of a folder's names."""

    kind: str
    inode: int
    name: str = ""
    """The name that is set, moved or removed."""
    other: str = ""
    """The name that it is moved to, or exchanged with."""
    target: int = 0
    """The inode of the name."""
    second: int = 0
    """The inode of the other name, in an exchange."""
    offset: int = 0
    content: bytes = b""


@dataclass
class Inode:
    """A file or folder: its content that is surely on the disk, and the changes that may be there."""

    is_folder: bool
    content: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    pending: list[Operation] = field(default_factory=list)


def lose_power(folder: Path, seed: int, count: int) -> Findings:
    """Try about so many states over all jobs; each is looked at, and the job is run again on it."""
    findings = Findings()
    rng = random.Random(seed)
    jobs = list(make_jobs(folder))
    for job in jobs:
        states: set[bytes] = set()
        tree = _snapshot(job.out.parent)
        operations = _record(job)
        findings.count("operations", len(operations))
        job.reset()
        for point in _points(len(operations), count // len(jobs), rng):
            is_last = point == len(operations)
            inodes = _replay(tree, operations[:point])
            for how, choose in _choices(rng, max(1, count // len(jobs) // (len(operations) + 1) - 4)):
                state = _crash(inodes, choose)
                mark = _fingerprint(state, tree.root)
                if mark in states and not is_last:
                    continue
                states.add(mark)
                _materialize(job, state, tree)
                findings.count("states")
                findings.count(f"of {job.name}")
                where = f"{job.name}: power is lost after operation {point} of {len(operations)}; {how} on the disk"
                job.judge(findings, where, after=" after a power loss", is_done=is_last)
                job.reset()
    return findings


def _points(num_operations: int, count: int, rng: random.Random) -> Sequence[int]:
    """Return the moments that are tried: all, or a sample; the end always."""
    every = list(range(num_operations + 1))
    wanted = max(2, count // 5)
    return every if wanted >= len(every) else sorted({num_operations, *rng.sample(every, wanted)})


_Choose = Callable[[Operation], float]
"""Returns how much of a pending operation is on the disk: from 0, nothing, to 1."""


def _choices(rng: random.Random, num_random: int) -> Iterator[tuple[str, _Choose]]:
    def is_data(operation: Operation) -> bool:
        return operation.kind in ("data", "size")

    yield "only synced content is", lambda operation: 0
    yield "everything is", lambda operation: 1
    yield "all names and no bytes are", lambda operation: 0 if is_data(operation) else 1
    yield "all bytes and no names are", lambda operation: 1 if is_data(operation) else 0
    for _ in range(num_random):
        share = rng.random()
        yield (
            "a random subset is",
            lambda operation, share=share: (
                rng.random() if is_data(operation) and rng.random() < 0.3 else rng.random() < share
            ),
        )


@dataclass
class Tree:
    """A folder as it was before."""

    root: int
    inodes: dict[int, Inode]


def _snapshot(folder: Path) -> Tree:
    inodes: dict[int, Inode] = {}

    def visit(path: Path) -> int:
        number = os.lstat(path).st_ino
        if path.is_dir():
            inodes[number] = Inode(True, names={child.name: visit(child) for child in path.iterdir()})
        else:
            inodes[number] = Inode(False, path.read_bytes())
        return number

    return Tree(visit(folder), inodes)


def _replay(tree: Tree, operations: Sequence[Operation]) -> dict[int, Inode]:
    """Return all inodes after these operations; those that were not synced are pending."""
    inodes = {number: Inode(inode.is_folder, inode.content, dict(inode.names)) for number, inode in tree.inodes.items()}
    for operation in operations:
        if operation.kind in ("file", "folder"):
            inodes[operation.target] = Inode(operation.kind == "folder")
        inode = inodes[operation.inode]
        if operation.kind == "sync":
            for change in inode.pending:
                _apply(inode, change, 1)
            inode.pending.clear()
        else:
            inode.pending.append(operation)
    return inodes


def _crash(inodes: dict[int, Inode], choose: _Choose) -> dict[int, Inode]:
    """Return the inodes as the crash leaves them."""
    left = {}
    for number, inode in inodes.items():
        left[number] = Inode(inode.is_folder, inode.content, dict(inode.names))
        for operation in inode.pending:
            share = choose(operation)
            if share:
                _apply(left[number], operation, float(share))
    return left


def _apply(inode: Inode, operation: Operation, share: float) -> None:
    """Apply a change to an inode; of a write only the sectors of its first part, unless all of it is there."""
    names = inode.names
    match operation.kind:
        case "data":
            content = operation.content
            if share < 1:
                end = (operation.offset + int(len(content) * share)) // _SECTOR * _SECTOR
                content = content[: max(0, end - operation.offset)]
            if content:
                whole = inode.content.ljust(operation.offset, b"\0")
                inode.content = whole[: operation.offset] + content + whole[operation.offset + len(content) :]
        case "size":
            inode.content = inode.content[: operation.offset].ljust(operation.offset, b"\0")
        case "file" | "folder" | "link":
            names[operation.name] = operation.target
        case "move":
            if names.get(operation.name) == operation.target:
                del names[operation.name]
            names[operation.other] = operation.target
        case "exchange":
            names[operation.name], names[operation.other] = operation.second, operation.target
        case "remove":
            if names.get(operation.name) == operation.target:
                del names[operation.name]


def _fingerprint(inodes: dict[int, Inode], root: int) -> bytes:
    digest = hashlib.sha256()

    def visit(number: int) -> None:
        inode = inodes[number]
        digest.update(inode.content)
        for name in sorted(inode.names):
            digest.update(b"\0" + name.encode())
            visit(inode.names[name])
        digest.update(b"\1")

    visit(root)
    return digest.digest()


def _materialize(job: Job, inodes: dict[int, Inode], tree: Tree) -> None:
    """Make the state in place of what lies at the output and beside it."""
    for path in (*job.beside(), job.out):
        job._remove(path)
    place = job.out.parent

    def write(number: int, path: Path) -> None:
        inode = inodes[number]
        if not inode.is_folder:
            path.write_bytes(inode.content)
            return
        path.mkdir()
        for name, child in inode.names.items():
            write(child, path / name)

    for name, number in inodes[tree.root].names.items():
        if not (place / name).exists():  # the sources are there
            write(number, place / name)


# ---- what follows runs in the process that is recorded


def _record(job: Job) -> list[Operation]:
    """Run the job in a child, and return its operations below the folder of its output."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status, raw_write = 1, os.write
        try:
            recorder = _Recorder(str(job.out.parent))
            recorder.install()
            job.work()
            content = pickle.dumps(recorder.operations)
            while content:
                content = content[raw_write(write, content) :]
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        content = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, f"{job.name} fails while it is recorded"
    operations: list[Operation] = pickle.loads(content)
    return operations


class _Recorder:
    """Wraps the functions that change a disk."""

    def __init__(self, root: str) -> None:
        self._root, self._lock = os.path.realpath(root), threading.RLock()
        self.operations: list[Operation] = []

    def install(self) -> None:
        """Put wrappers in the place of the functions."""
        for name in (
            "open",
            "mkdir",
            "write",
            "pwrite",
            "ftruncate",
            "fsync",
            "fdatasync",
            "unlink",
            "remove",
            "rmdir",
        ):
            self._wrap(os, name, getattr(self, f"_{name}"))
        for name in ("rename", "replace"):
            self._wrap(os, name, self._rename)
        self._wrap(disk, "renameat2", self._renameat2)
        self._wrap(disk, "allocate", self._allocate)
        for name in (
            "sendfile",
            "copy_file_range",
            "pwritev",
            "writev",
            "truncate",
            "link",
            "symlink",
            "posix_fallocate",
        ):
            self._wrap(os, name, self._unknown)

    def _wrap(self, module: Any, name: str, wrapper: Callable[..., Any]) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                return wrapper(function, *arguments, **named)

        setattr(module, name, call)

    def _add(self, kind: str, inode: int, **more: Any) -> None:
        self.operations.append(Operation(kind, inode, **more))

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """Return the inode of a path's folder, and its name; None outside the root."""
        text = os.fspath(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        folder = os.path.realpath(folder)
        if folder != self._root and not folder.startswith(self._root + os.sep):
            return None
        return os.stat(folder).st_ino, name

    def _inode(self, fd: int) -> int | None:
        path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
        is_ours = path == self._root or path.startswith(self._root + os.sep)
        return os.fstat(fd).st_ino if is_ours else None

    def _open(self, function: Any, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        place = self._place(path, named.get("dir_fd")) if flags & os.O_CREAT else None
        was_there = place is not None and os.path.lexists(path)
        fd = int(function(path, flags, *rest, **named))
        if place is not None and not was_there:
            self._add("file", place[0], name=place[1], target=os.fstat(fd).st_ino)
        if flags & os.O_TRUNC and (inode := self._inode(fd)) is not None:
            self._add("size", inode)
        return fd

    def _mkdir(self, function: Any, path: Any, *rest: Any, **named: Any) -> None:
        place = self._place(path, named.get("dir_fd"))
        function(path, *rest, **named)
        if place is not None:
            self._add("folder", place[0], name=place[1], target=os.stat(path).st_ino)

    def _write(self, function: Any, fd: int, content: Any) -> int:
        inode = self._inode(fd)
        written = int(function(fd, content))
        if inode is not None:
            end = os.lseek(fd, 0, os.SEEK_CUR)
            self._add("data", inode, offset=end - written, content=bytes(memoryview(content).cast("B")[:written]))
        return written

    def _pwrite(self, function: Any, fd: int, content: Any, offset: int) -> int:
        inode = self._inode(fd)
        written = int(function(fd, content, offset))
        if inode is not None:
            self._add("data", inode, offset=offset, content=bytes(memoryview(content).cast("B")[:written]))
        return written

    def _ftruncate(self, function: Any, fd: int, nbytes: int) -> None:
        function(fd, nbytes)
        if (inode := self._inode(fd)) is not None:
            self._add("size", inode, offset=nbytes)

    def _allocate(self, function: Any, fd: int, nbytes: int) -> None:
        function(fd, nbytes)
        if (inode := self._inode(fd)) is not None:
            self._add("size", inode, offset=max(nbytes, os.fstat(fd).st_size))

    def _fsync(self, function: Any, fd: int) -> None:
        function(fd)
        if (inode := self._inode(fd)) is not None:
            self._add("sync", inode)

    _fdatasync = _fsync

    def _unlink(self, function: Any, path: Any, **named: Any) -> None:
        place = self._place(path, named.get("dir_fd"))
        inode = os.stat(path, follow_symlinks=False, **named).st_ino
        function(path, **named)
        if place is not None:
            self._add("remove", place[0], name=place[1], target=inode)

    _remove = _rmdir = _unlink

    def _rename(self, function: Any, source: Any, target: Any, **named: Any) -> None:
        self._move(lambda: function(source, target, **named), source, target, is_exchange=False)

    def _renameat2(self, function: Any, source: str, target: str, flags: int) -> None:
        self._move(lambda: function(source, target, flags), source, target, is_exchange=flags == _EXCHANGE)

    def _move(self, function: Callable[[], Any], source: Any, target: Any, *, is_exchange: bool) -> None:
        place, other = self._place(source), self._place(target)
        inode = os.lstat(source).st_ino
        second = os.lstat(target).st_ino if is_exchange else 0
        function()
        if place is None or other is None:
            return
        assert place[0] == other[0], "a move between folders"
        kind = "exchange" if is_exchange else "move"
        self._add(kind, place[0], name=place[1], other=other[1], target=inode, second=second)

    def _unknown(self, function: Any, *arguments: Any, **named: Any) -> Any:
        raise AssertionError(f"{function.__name__} is not recorded")
