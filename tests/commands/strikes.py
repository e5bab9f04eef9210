"""Strikes: what befalls one rank of a live conversion, at a named step of the first rank or so far into its own work.

Runs in the ranks themselves. Those of one job share a board, memory that all see: who is which process, whether the
blow has fallen, and when.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = (
    *("stage made", "file made", "stage told", "file in place", "file finished", "config.json", "index", "manifest"),
    *("journal removed", "stage synced", "named", "folder synced", "read back", "committed", "report told"),
)
"""What the first rank does, in this order; "file ..." once for each file of weights."""
REPLACING = (*STEPS[:13], "old cleared", *STEPS[13:])
"""The same where a model is replaced: by an exchange of names, then the old one is removed."""

_RANK, _BLOW = struct.Struct("<q"), struct.Struct("<qd")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Board:
    """The memory that the ranks of a job share; made before they are forked."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def sign(self, rank: int) -> None:
        """Say that this process is that rank."""
        _RANK.pack_into(self._memory, 32 + 8 * rank, os.getpid())

    def strike(self, what: str, victim: int) -> None:
        """Let it befall that rank, and note when."""
        _BLOW.pack_into(self._memory, 0, 1, time.monotonic())
        os.kill(_RANK.unpack_from(self._memory, 32 + 8 * victim)[0], _SIGNALS[what])

    @property
    def struck(self) -> float | None:
        """When it fell; None: it never came so far."""
        fallen, when = _BLOW.unpack_from(self._memory)
        return when if fallen else None


def arm(board: Board, rank: int, strike: dict[str, Any]) -> None:
    """Prepare, in each rank, what is to befall one.

    Args:
        board: of all.
        rank: this one.
        strike: ``victim``; ``what``: kill, stop, fail (its own tensors can no longer be read) or fail to lend (only
            others cannot read them); and either ``step``, one of `STEPS`, with ``number``, the how manieth of its
            kind, or ``calls``: after so many calls of the victim that read, write or tell, and ``delay_seconds`` more.
    """
    board.sign(rank)
    victim, what = strike["victim"], strike["what"]
    if what in ("fail", "fail to lend"):
        if rank == victim:
            _fail_to_read(strike["calls"], only_lent=what == "fail to lend")
    elif "step" in strike:
        if rank == 0:
            _watch_steps(_Nth(strike.get("number", 1), lambda: board.strike(what, victim)), strike["step"])
    elif rank == victim:
        delay = strike.get("delay_seconds", 0.0)

        def fall() -> None:
            if delay:
                threading.Timer(delay, board.strike, (what, victim)).start()
            else:
                board.strike(what, victim)

        _watch_progress(_Nth(strike["calls"], fall))


class _Nth:
    """Acts when it is called for the N-th time, by whatever thread."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._number, self._act, self._calls, self._lock = number, act, 0, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._calls += 1
            if self._calls == self._number:
                self._act()


def _after(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Let a function of a module or class be noted, with its arguments, each time it has ended well."""
    function = getattr(owner, name)

    def noted(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        note(*arguments)
        return result

    setattr(owner, name, noted)


def _watch_steps(reach: Callable[[], None], wanted: str) -> None:
    """Call `reach` each time the step is done."""
    from xrank.ranks.team import SharedTeam
    from xrank.storage import disk, folder_stage
    from xrank.storage.folder_stage import FolderStage

    def step(name: str) -> None:
        if name == wanted:
            reach()

    named: list[bool] = []
    removed: list[bool] = []

    def unlinked(path: str, *_: Any) -> None:
        if str(path).endswith("journal.jsonl") and not removed:
            removed.append(True)
            step("journal removed")

    def synced(path: str) -> None:
        if named:
            step("folder synced")
        elif removed:
            step("stage synced")

    def took_name(*_: Any) -> None:
        if removed and not named:
            named.append(True)
            step("named")

    def moved(source: str, target: str) -> None:
        if target.endswith(".safetensors"):
            step("file in place")

    written = {"config.json": "config.json", "model.safetensors.index.json": "index", "xrank_manifest.json": "manifest"}
    _after(folder_stage, "write_journal", lambda *_: step("stage made"))
    _after(FolderStage, "create_part", lambda *_: step("file made"))
    _after(SharedTeam, "_send", lambda team, name, text: step(f"{name} told"))
    _after(disk, "move", moved)
    _after(FolderStage, "finish_part", lambda *_: step("file finished"))
    _after(FolderStage, "write_file", lambda stage, name, content: step(written.get(name, "")))
    _after(os, "unlink", unlinked)
    _after(folder_stage, "sync_folder", synced)
    _after(disk, "move_new", took_name)
    _after(disk, "exchange", took_name)
    _after(FolderStage, "_read_back", lambda *_: step("read back"))
    _after(folder_stage, "clear_folder", lambda *_: step("old cleared"))
    _after(SharedTeam, "mark_committed", lambda *_: step("committed"))


def _watch_progress(reach: Callable[[], None]) -> None:
    """Call `reach` after each call that reads a window, changes a file, or tells another rank something."""
    from xrank.engine.buffers import FileSource
    from xrank.ranks.exchange import GatherExchange
    from xrank.ranks.loans import PeerSource

    for name in ("pwrite", "fsync", "rename", "open", "unlink"):
        _after(os, name, lambda *_: reach())
    for owner, name in (
        *((GatherExchange, name) for name in ("send", "collect", "finish")),
        *((owner, name) for owner in (PeerSource, FileSource) for name in ("read_into", "fetch")),
    ):
        _after(owner, name, lambda *_: reach())


def _fail_to_read(number: int, *, only_lent: bool) -> None:
    """Let reads of this rank's own tensors fail from the N-th on, by whomever they are asked for or by others alone."""
    from xrank.ranks.memory import TensorBytes

    class Broken(TensorBytes):
        calls = 0

        def read_into(self, start: int, into: memoryview) -> None:
            counts = not only_lent or threading.current_thread().name == "xrank lender"
            Broken.calls += counts
            if counts and Broken.calls >= number:
                raise RuntimeError("the device was lost")
            super().read_into(start, into)

    import xrank.recipes.lent_model as module

    def broken(tensor: Any) -> TensorBytes:
        made = Broken(tensor)
        made.address = None  # nobody reads past it
        return made

    module.local_bytes = broken


def contents(folder: str) -> dict[str, str] | None:
    """Return a digest for each file of a folder; None: there is none."""
    if not os.path.lexists(folder):
        return None
    with os.scandir(folder) as entries:
        return {one.name: hashlib.sha256(Path(one).read_bytes()).hexdigest() for one in entries}


_CHANGES = {"open", *(f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "link", "symlink", "truncate"))}
"""What Python audits (its library reference: audit events) of what changes the names of files, or may write to one."""


def watch(folder: str) -> list[dict[str, str] | None]:
    """Return a list that grows: what a reader finds there, whenever it is another than before.

    It is looked at before each change that this process makes to any file. So it is what stays if it is killed at
    whatever moment, but in a write: whoever changes the folder in two steps is seen between them.
    """
    seen = [contents(folder)]
    looking = False

    def look(event: str, _: tuple[Any, ...]) -> None:
        nonlocal looking
        # Threads may change files at any time; the folder is this one's.
        if event not in _CHANGES or looking or threading.current_thread() is not threading.main_thread():
            return
        looking = True
        try:
            found = contents(folder)
            if found != seen[-1]:
                seen.append(found)
        finally:
            looking = False

    sys.addaudithook(look)
    return seen


def digests(named: Any) -> dict[str, str]:
    """Return a digest for each of (name, tensor): type, shape and bytes."""
    import torch
    import xxhash

    def digest(tensor: torch.Tensor) -> str:
        plain = tensor.detach().contiguous().reshape(-1)
        found = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        with contextlib.suppress(ValueError):  # of no bytes
            found.update(memoryview(plain.view(torch.uint8).numpy()))
        return found.hexdigest()

    return {name: digest(tensor) for name, tensor in named}
