"""A job of 4 ranks that gather what `mixed_gathers` draws, while one after another is killed and started again.

``python -m tests.workspace.soaking SEED COUNT EPOCH DIRECTORY`` prints what was done or went wrong, as JSON. Ranks
are forked from this process, which has imported torch. An epoch is as many gathers and, but for the last, a rank that
is killed at a moment of its own among further ones; those that live go on, over a new group, with its successor.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time
from collections import Counter, deque
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor

from tests.open_files import open_files
from tests.workspace.mixed_gathers import NUM_RANKS, Plan, Pool, differs, lists_of
from xrank.errors import RankFailedError
from xrank.workspace.parallel import get_configs_parallel, get_tensors_parallel

_NUM_LISTS = 9
_HELD = 6
_WAIT_SECONDS = 50
_MOMENT_SECONDS = 0.2
_SLOT = struct.Struct("<q")


class PlannedError(Exception):
    """The planned error of a body."""


def victim_of(seed: int, epoch: int) -> tuple[int, float]:
    """Return who is killed after an epoch, and how long after its last gather."""
    chosen = random.Random(f"{seed} kill {epoch}")
    return chosen.randrange(NUM_RANKS), chosen.random() * _MOMENT_SECONDS


class Soaker:
    """One rank."""

    def __init__(self, seed: int, rank: int, directory: str, port: int, noticed: mmap.mmap) -> None:
        self.seed, self.rank, self.directory, self.port, self.noticed = seed, rank, directory, port, noticed
        self.pool = Pool(seed)
        self.pool_sum = self.pool.sum()
        self.held: deque[tuple[Any, Any]] = deque()
        self.counts: Counter[str] = Counter()

    def run(self, first: int, num_epochs: int, size: int) -> dict[str, Any]:
        """Take part from an epoch on."""
        rss: list[int] = []
        fds: list[int] = []
        for epoch in range(first, num_epochs):
            store = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
            group = dist.PrefixStore(f"{epoch}", store)
            dist.init_process_group("gloo", store=group, rank=self.rank, world_size=NUM_RANKS)
            lists = lists_of(random.Random(f"{self.seed} {epoch}"), _NUM_LISTS)
            for number in range(epoch * size, (epoch + 1) * size):
                try:
                    self.gather(Plan.draw(self.seed, number, lists))
                except BaseException as error:
                    error.add_note(f"at gather {number} of epoch {epoch}")
                    raise
            if epoch < num_epochs - 1:
                self.die_or_notice(epoch, lists[:NUM_RANKS])
            else:
                dist.barrier()
            self.drop(0)
            assert self.pool.sum() == self.pool_sum, "a rank wrote to what another had lent"
            dist.destroy_process_group()
            del store, group
            gc.collect()
            rss.append(_rss_nbytes())
            names = list(open_files().values())
            fds.append(len(names))
            assert [name for name in names if "xrank" in name or "pidfd" in name] == [], names
        return {"counts": dict(self.counts), "rss": rss, "fds": fds}

    def gather(self, plan: Plan) -> None:
        """Do this rank's part of one gather, and check all that came."""
        if plan.raises is not None and self.rank in plan.ranks:
            self.counts["exceptions"] += 1
            try:
                with self.begin(plan, plan.ranks):
                    if self.rank == plan.raises:
                        raise PlannedError
            except PlannedError:
                assert self.rank == plan.raises
            except RankFailedError as error:
                assert error.rank == plan.raises and "PlannedError" in str(error), f"{plan.raises} raised: {error}"
            else:
                raise AssertionError(f"rank {plan.raises} raised, and no rank reported it")
            return
        with self.begin(plan, plan.ranks) as parts:
            self.check(plan, parts, plan.ranks)
            if plan.inner is not None and self.rank in plan.inner:
                with self.begin(plan, plan.inner, "inner") as more:
                    self.check(plan, more, plan.inner, "inner")
        self.counts["gathers"] += self.rank == plan.ranks[0]

    def begin(self, plan: Plan, ranks: tuple[int, ...], part: str = "") -> Any:
        value = plan.value(self.pool, self.seed, self.rank, part)
        gather: Any = get_configs_parallel if plan.is_config else get_tensors_parallel
        way = self.directory if plan.is_through_directory and not part else None
        early = plan.early[self.rank]
        return gather(value, ranks, None, workspace_path=way, early_exit=early, timeout_seconds=_WAIT_SECONDS)

    def check(self, plan: Plan, parts: list[Any], ranks: tuple[int, ...], part: str = "") -> None:
        if self.rank != ranks[0]:
            assert parts == [], f"rank {self.rank} of {ranks} got {len(parts)} parts"
            return
        want = [plan.value(self.pool, self.seed, rank, part) for rank in ranks]
        assert not (wrong := differs(parts, want)), f"gather {plan.number} {part}: {wrong}"
        self.counts["nbytes"] += sum(_nbytes(value) for value in want[1:])
        self.held.append((parts, want))
        self.drop(_HELD)

    def drop(self, most: int) -> None:
        """Let go of what came long ago, which is still what it was."""
        while len(self.held) > most:
            wrong = differs(*self.held.popleft())
            assert not wrong, f"changed after it came: {wrong}"

    def die_or_notice(self, epoch: int, lists: list[tuple[int, ...]]) -> None:
        """Gather until a rank is killed, which is this one or one that all others name."""
        victim, moment = victim_of(self.seed, epoch)
        for ranks in lists:  # a rank that dies before its list has met leaves no trace
            with get_tensors_parallel(None, ranks, timeout_seconds=_WAIT_SECONDS):
                pass
        if self.rank == victim:
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        number = 0
        try:
            while True:
                number -= 1
                self.gather(Plan.further(self.seed, f"{epoch} {number}", lists))
        except RankFailedError as error:
            assert error.rank == victim, f"rank {victim} was killed: {error}"
        self.counts["kills noticed"] += 1
        # A rank that ends its part now is not the one that was lost.
        _SLOT.pack_into(self.noticed, 8 * self.rank, epoch + 1)
        end = time.monotonic() + _WAIT_SECONDS
        for rank in range(NUM_RANKS):
            while rank != victim and _SLOT.unpack_from(self.noticed, 8 * rank)[0] <= epoch:
                assert time.monotonic() < end, f"rank {rank} does not notice that rank {victim} was killed"
                time.sleep(0.002)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return _nbytes(vars(value)) if hasattr(value, "weight") else 0


def _rss_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _serve_store() -> tuple[int, int]:
    """Fork a process that keeps a store, which no rank's end takes away; return its ID and port."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        while True:
            time.sleep(60)
    return pid, int(os.read(reading, 10))


def _fork(soaker: Soaker, epoch: int, num_epochs: int, size: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    said: dict[str, Any] = {}
    try:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        torch.set_num_threads(1)
        said = soaker.run(epoch, num_epochs, size)
    except BaseException as error:
        import traceback

        said = {"error": "".join(traceback.format_exception(error))[-4000:]}
    finally:
        with open(f"{soaker.directory}.rank {soaker.rank}", "w") as file:
            json.dump(said, file)
        os._exit(1 if "error" in said else 0)


def main(seed: int, count: int, size: int, directory: str, seconds: float) -> dict[str, Any]:
    """Run the job, and return the ranks' reports."""
    gc.collect()
    gc.freeze()  # what torch made: each collection of a rank would look at all of it
    # Forked before any thread is started: the store's process has them, this one never.
    (server, port), noticed = _serve_store(), mmap.mmap(-1, mmap.PAGESIZE)
    soakers = [Soaker(seed, rank, directory, port, noticed) for rank in range(NUM_RANKS)]
    num_epochs, epoch, kills = count // size, 0, 0
    pids = {_fork(soaker, 0, num_epochs, size): soaker.rank for soaker in soakers}
    end = time.monotonic() + seconds
    wrong: list[str] = []
    while pids and not wrong:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > end:
                wrong.append(f"ranks {sorted(pids.values())} still gather after {seconds} s: their stacks are above")
            time.sleep(0.01)
            continue
        rank, code = pids.pop(pid, -1), os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and epoch < num_epochs - 1 and rank == victim_of(seed, epoch)[0]:
            kills, epoch = kills + 1, epoch + 1
            pids[_fork(soakers[rank], epoch, num_epochs, size)] = rank
        elif code:
            wrong.append(f"rank {rank} ended with {code}")
    if wrong:
        time.sleep(1)  # the reports of the others
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1)
    for pid in (server, *pids):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said = []
    for rank in range(NUM_RANKS):
        with contextlib.suppress(FileNotFoundError), open(f"{directory}.rank {rank}") as file:
            said.append(json.load(file))
    return {"seed": seed, "wrong": wrong, "kills": kills, "ranks": said}


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:4]), sys.argv[4], float(sys.argv[5]))), flush=True)
