"""Collectives on gradients between sets of ranks, over torch's process groups; each names a rank that has ended.

A dead rank closes its connections: gloo's collectives of its group fail, without its number, and those of other groups
wait for ranks that wait for it. NCCL's wait until its own time-out. So every wait looks at the ranks' processes, as
gathers do. The first rank that finds a death publishes it: ranks that raise then end too, and must not be named in its
place.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, Literal, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from msgspec import structs
from xxhash import xxh128_hexdigest

from xrank import environment
from xrank.errors import RankFailedError, RankTimeoutError
from xrank.gradients.faults import At
from xrank.ranks.failure import FailureRecord
from xrank.ranks.store import Store, find_store
from xrank.ranks.waits import Membership, Peer

Combination: TypeAlias = Literal["sum", "average", "max"]

_OPERATIONS: Mapping[Combination, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
}
# torch 2.13 warns of these names, the only ones that 2.10 has.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 0.001
_GRACE_SECONDS = 1.0
"""Time between the error of a collective and the end of the process that caused it: connections close a little before
a process ends, and a rank that raises an error ends later."""
_CALL = "a step's collectives"

_T = TypeVar("_T")


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when its results may be read; on a GPU, by work that is queued after this call."""


class GradientWire(Protocol):
    """Collectives over ascending sets of ranks that contain the caller. All but `exchange` return a handle at once.

    Call order: every rank of a set makes the same calls over it in the same order. The caller neither writes nor reads
    a tensor of a call until its handle was waited for. Calls over a set of one rank do nothing and need no group.
    """

    @property
    def device(self) -> torch.device:
        """Device of small tensors that are exchanged with gradients."""

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: Combination) -> Handle:
        """Combine a tensor in place."""

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: Combination
    ) -> Handle:
        """Combine a tensor and keep one of its equal parts in ``shard``, which may be a view of this rank's part."""

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Send each rank its equal part of ``whole``, and receive this rank's parts, in the order of ranks."""

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Gather the equal parts of all ranks into ``whole``, where ``shard`` may be a view of this rank's part."""

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Send the first rank's tensor to all ranks."""

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Return the text of each rank. This waits: texts are not gradients."""


class RankWatch:
    """The processes of the other ranks of a world, for waits that end when one of them has; made on all ranks."""

    def __init__(self, store: Store, rank: int, peers: Sequence[Peer]) -> None:
        self._store, self._rank, self._pid = store, rank, os.getpid()
        self._others = tuple(peer.rank for peer in peers if peer.rank != rank)
        is_one_host = len({peer.space for peer in peers}) == 1
        self._membership = Membership(store, rank, beats=not is_one_host, peers=peers)
        # Opens the processes' descriptors, which a look needs when the store may be gone.
        self._membership.find_death(self._others, _CALL)
        # The name holds the processes: ranks that restart in the same store have failures of their own.
        processes = json.dumps(sorted([peer.rank, peer.host, peer.pid] for peer in peers))
        self._name = f"died/{xxh128_hexdigest(processes.encode())}"

    def wait(self, work: Any, *, is_on_host: bool) -> None:
        """Wait for a collective, or raise the error that names a rank that has ended."""
        while not work.is_completed():
            if is_on_host:
                # It blocks until the results are there. The error is of this wait's own timeout: a failed collective
                # counts as completed.
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=_LOOK_SECONDS))
                    return
            else:
                end = monotonic() + _LOOK_SECONDS
                while not work.is_completed() and monotonic() < end:
                    sleep(_PAUSE_SECONDS)
                if work.is_completed():
                    break
            self._look()
        self.run(work.wait)

    def run(self, call: Callable[[], _T]) -> _T:
        """Run a call of torch.distributed, and name the rank whose end makes it fail, or the timeout."""
        try:
            return call()
        except RuntimeError as error:
            end = monotonic() + _GRACE_SECONDS
            while monotonic() < end:
                try:
                    self._look()
                except RankFailedError as failure:
                    raise failure from error
                sleep(_LOOK_SECONDS / 5)
            if "timed out" in str(error).lower():
                raise RankTimeoutError(
                    "the ranks did not all come to a step's collective within the timeout of their process group",
                    rank=self._rank,
                    got=str(error).splitlines()[0][:200],
                    next_step="find out what the other ranks are doing: py-spy dump --pid PID",
                ) from error
            raise

    def _look(self) -> None:
        if os.getpid() != self._pid:
            return
        record = None
        with suppress(RankFailedError):  # the rank that serves the store may have ended
            record = self._membership.find_death(self._others, _CALL)
        if record is None:
            return
        with suppress(RankFailedError):
            claimed = self._store.claim(self._name, record.to_text())
            record = FailureRecord.from_text(claimed) if claimed else record
        raise structs.replace(record, id="").to_error()


_watches: WeakKeyDictionary[dist.ProcessGroup, RankWatch] = WeakKeyDictionary()
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of each world that contain this rank, and torch's stand-ins for other groups."""


def make_wire(wanted: Iterable[tuple[int, ...]], timeout_seconds: float | None = None) -> _TorchWire:
    """Return a wire with a process group for each set of ranks; all ranks of the world call this together.

    Groups have the world's backend, and are kept until the world ends. `wanted` are the sets that contain this rank
    (``GradientPlan.groups()``), none for a rank without exchanges. All ranks raise the same error if some ranks of a
    set do not ask for it. Collectives of new groups have this timeout; None: the world's.
    """
    if not dist.is_initialized():
        raise At().usage_error(
            "gradients are exchanged in a process group, and none is initialized",
            "call torch.distributed.init_process_group before",
        )
    world = dist.group.WORLD
    assert world is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Ascending: a process group numbers its ranks in the order in which they are given.
    own = {tuple(sorted(ranks)) for ranks in wanted if len(ranks) > 1}
    if world_size > 1 and world not in _watches:
        peers = exchange_texts(json.dumps(Peer.from_this_process(rank).to_dict()))
        store = find_store(world, environment.environ()).with_prefix("gradients")
        _watches[world] = RankWatch(store, rank, [Peer.from_dict(json.loads(text)) for text in peers])
    watch = _watches.get(world)
    texts = exchange_texts(json.dumps(sorted(own)), watch=watch)
    sets_by_rank = [[tuple(ranks) for ranks in json.loads(text)] for text in texts]
    # All ranks of a set must have asked for it. All ranks get the same result, since all have all sets.
    num_asking = Counter(ranks for sets in sets_by_rank for ranks in sets)
    for other, sets in enumerate(sets_by_rank):
        for ranks in sets:
            if other not in ranks or not 0 <= ranks[0] <= ranks[-1] < world_size or len(set(ranks)) != len(ranks):
                raise At(rank=other).error(
                    f"rank {other} asks for a group of ranks {list(ranks)}",
                    "make the mesh of the ranks of this world",
                    want=f"rank {other} and others of the {world_size} ranks of the world, each once",
                )
            if num_asking[ranks] < len(ranks):
                absent = next(one for one in ranks if ranks not in sets_by_rank[one])
                raise At(rank=absent).error(
                    f"rank {other} exchanges gradients with ranks {list(ranks)}, and rank {absent} does not",
                    "make the same mesh on all ranks, and the same marks on copies of a parameter",
                    f"on rank {absent} the groups {[list(known) for known in sets_by_rank[absent]]}",
                )
    made = _made.setdefault(world, {})
    # New groups would get torch's own timeout, half an hour.
    options = getattr(world._get_backend(find_world_device()), "options", None)
    timeout = getattr(options, "_timeout", None) if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    for ranks in sorted({ranks for sets in sets_by_rank for ranks in sets}):
        if len(ranks) < world_size and ranks not in made:
            # Ranks outside of the set call this too, in the same order: torch names groups by counting them.
            made[ranks] = dist.new_group(list(ranks), timeout=timeout)
    # torch returns a stand-in for groups without this rank, which must not be used.
    found = {ranks: group for ranks, group in made.items() if rank in ranks}
    return _TorchWire({**found, tuple(range(world_size)): world}, watch)


def find_world_device() -> torch.device:
    """Return the device of tensors that the world exchanges: the CPU, unless the backend has none (nccl)."""
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], torch.accelerator.current_device_index())


def exchange_texts(text: str, group: dist.ProcessGroup | None = None, watch: RankWatch | None = None) -> list[str]:
    """Return the text of each rank in the order of a group, the world if None; all ranks of the group together."""
    device, own = find_world_device(), text.encode()

    def gather(parts: list[torch.Tensor], part: torch.Tensor) -> None:
        start = partial(dist.all_gather, parts, part, group=group, async_op=True)
        if watch is None:
            start().wait()
        else:
            watch.wait(watch.run(start), is_on_host=device.type == "cpu")

    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    gather(sizes, torch.tensor([len(own)], device=device))
    lengths = [int(size) for size in sizes]
    # All texts get one length, one more than the longest: a collective takes no empty tensor.
    padded = torch.frombuffer(bytearray(own.ljust(max(lengths) + 1, b"\0")), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in lengths]
    gather(texts, padded)
    return [found[:length].cpu().numpy().tobytes().decode() for found, length in zip(texts, lengths, strict=True)]


class _TorchWire:
    """The collectives of torch's process groups. All methods, and waits on handles, name a rank that has ended."""

    def __init__(self, groups: Mapping[tuple[int, ...], dist.ProcessGroup], watch: RankWatch | None) -> None:
        self.groups, self._watch = groups, watch
        self.device = find_world_device()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: Combination) -> Handle:
        return self._start(ranks, dist.all_reduce, tensor, op=_OPERATIONS[how])

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: Combination
    ) -> Handle:
        return self._start(ranks, _reduce_scatter, shard, whole, op=_OPERATIONS[how])

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        return self._start(ranks, dist.all_to_all_single, received, whole)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        return self._start(ranks, _all_gather, whole, shard)

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        return self._start(ranks, dist.broadcast, tensor, src=ranks[0])

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        if len(ranks) == 1:
            return {ranks[0]: text}
        return dict(zip(ranks, exchange_texts(text, self._find_group(ranks), self._watch), strict=True))

    def _find_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self.groups:
            known = f"one of {[list(known) for known in self.groups]}"
            raise At().usage_error(f"there is no process group of ranks {list(ranks)}", f"use {known}")
        return self.groups[ranks]

    def _start(self, ranks: tuple[int, ...], collective: Callable[..., Any], *tensors: Any, **options: Any) -> Handle:
        if len(ranks) == 1:
            return _WatchedWork(None, None, is_on_host=True)
        watch = self._watch
        assert watch is not None  # a world of several ranks has one
        work = watch.run(partial(collective, *tensors, group=self._find_group(ranks), async_op=True, **options))
        return _WatchedWork(work, watch, tensors[0].device.type == "cpu")


@dataclass(frozen=True, slots=True)
class _WatchedWork:
    """A collective of torch whose waits end when a rank has ended; None for a set of one rank."""

    work: Any
    watch: RankWatch | None
    is_on_host: bool

    def wait(self) -> None:
        # On an accelerator this only orders streams: the host goes on.
        if self.is_on_host:
            self.finish()
        elif self.work is not None and self.watch is not None:
            self.watch.run(self.work.wait)

    def finish(self) -> None:
        if self.work is not None and self.watch is not None:
            self.watch.wait(self.work, is_on_host=self.is_on_host)
