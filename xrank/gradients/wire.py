"""Waits for collectives that end when a rank of the world has ended, with an error that names the rank.

A dead rank closes its connections: gloo's collectives of its group fail, without its number, and those of other groups
wait for ranks that wait for it. NCCL's wait until its own time-out. So every wait looks at the ranks' processes, as
gathers do (`xrank.ranks.waits`). The first rank that finds a death publishes it: ranks that raise then end too,
and must not be named in its place.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, Literal, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from xxhash import xxh128_hexdigest

from xrank import environment
from xrank.errors import GradientError, RankFailedError, RankTimeoutError, UsageError
from xrank.ranks.failure import FailureRecord
from xrank.ranks.processes import Peer
from xrank.ranks.store import Store, find_store
from xrank.ranks.waits import Membership
from xrank.words import first_lines

_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 0.001
_GRACE_SECONDS = 1.0
"""Time between the error of a collective and the end of the process that caused it: connections close a little before
a process ends, and a rank that raises an error ends later."""
_CALL = "a step's collectives"

_T = TypeVar("_T")


class RankWatch:
    """The other ranks of a world, as far as this rank's collectives need them; made on all ranks.

    Args:
        store: a part of the world's store.
        rank: this rank.
        peers: the processes of all ranks, this one among them.
    """

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
        """Wait for a collective.

        Args:
            work: torch's handle.
            is_on_host: whether ``work.wait`` itself blocks until the results are there, as for tensors of the CPU.

        Raises:
            RankFailedError: a rank has ended; it names the first that did.
            RankTimeoutError: the collective was not done within its group's timeout.
        """
        while not (work.is_completed() if is_on_host else self._is_soon(work)):
            if is_on_host:
                with suppress(RuntimeError):  # this wait's own timeout; a failed collective counts as completed
                    work.wait(timedelta(seconds=_LOOK_SECONDS))
                    return
            self._look()
        self.run(work.wait)

    def run(self, call: Callable[[], _T]) -> _T:
        """Run a call of torch.distributed, and name the rank whose end makes it fail."""
        try:
            return call()
        except RuntimeError as error:
            self._explain(error)
            raise

    def _is_soon(self, work: Any) -> bool:
        """Return whether a collective on an accelerator is done within the time between two looks."""
        end = monotonic() + _LOOK_SECONDS
        while not work.is_completed():
            if monotonic() >= end:
                return False
            sleep(_PAUSE_SECONDS)
        return True

    def _look(self) -> None:
        """Raise if a rank has ended."""
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
        raise replace(record, id="").to_error()

    def _explain(self, error: RuntimeError) -> None:
        """Raise an error that names the rank that has ended, or an error of a timeout; else return."""
        end = monotonic() + _GRACE_SECONDS
        while monotonic() < end:
            try:
                self._look()
            except RankFailedError as failure:
                raise failure from error
            sleep(_LOOK_SECONDS / 5)
        if "timed out" in str(error).lower():
            raise RankTimeoutError(
                "the ranks of a step's collective did not all come to it within the timeout of their process group",
                rank=self._rank,
                got=str(error).splitlines()[0][:200],
                want="all ranks at the same step",
                next_step="see what the other ranks do: py-spy dump --pid PID",
            ) from error


_watches: WeakKeyDictionary[dist.ProcessGroup, RankWatch] = WeakKeyDictionary()
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of each world that contain this rank, and torch's stand-ins for other groups."""


@dataclass(frozen=True, slots=True)
class ProcessGroups(Mapping[tuple[int, ...], dist.ProcessGroup | None]):
    """The group of each ascending set of ranks; None for a set of one rank, which needs no group."""

    found: Mapping[tuple[int, ...], dist.ProcessGroup]
    watch: RankWatch | None = None
    """The world's ranks; None in a world of one rank."""

    def __getitem__(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        try:
            return self.found[ranks]
        except KeyError:
            raise UsageError(
                f"there is no process group of ranks {list(ranks)}",
                got=str(list(ranks)),
                want=f"one of {[list(known) for known in self.found]}",
            ) from None

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def make_groups(wanted: Iterable[tuple[int, ...]], timeout_seconds: float | None = None) -> ProcessGroups:
    """Return a process group of the world's backend for each set of ranks; collective over the world.

    Known sets keep their groups. The set of all ranks gets the world itself. The first call also finds the processes
    of all ranks, so that collectives name a rank that ends.

    Args:
        wanted: sets of ranks that contain this rank: ``GradientPlan.groups()``.
        timeout_seconds: timeout of the collectives of new groups; the world's when None.

    Raises:
        UsageError: there is no world.
        GradientError: a set names ranks outside of the world, or some of its ranks do not ask for it, so that the
            others would wait for them. All ranks raise the same.
    """
    if not dist.is_initialized():
        raise UsageError(
            "gradients are exchanged in a process group, and none is initialized",
            next_step="call torch.distributed.init_process_group before",
        )
    world = dist.group.WORLD
    assert world is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Ascending: a process group numbers its ranks in the order in which they are given.
    own = {tuple(sorted(ranks)) for ranks in wanted if len(ranks) > 1}
    watch = _find_watch(world, rank, world_size)
    texts = exchange_texts(json.dumps(sorted(own)), watch=watch)
    sets_by_rank = [[tuple(ranks) for ranks in json.loads(text)] for text in texts]
    _check_sets(sets_by_rank, world_size)
    made = _made.setdefault(world, {})
    timeout = _world_timeout(world) if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    for ranks in sorted({ranks for sets in sets_by_rank for ranks in sets}):
        if len(ranks) < world_size and ranks not in made:
            # Ranks outside of the set call this too, in the same order: torch names groups by counting them.
            made[ranks] = dist.new_group(list(ranks), timeout=timeout)
    # torch returns a stand-in for groups without this rank, which must not be used.
    found = {ranks: group for ranks, group in made.items() if rank in ranks}
    return ProcessGroups({**found, tuple(range(world_size)): world}, watch)


def _find_watch(world: dist.ProcessGroup, rank: int, world_size: int) -> RankWatch | None:
    """Return the world's watch, which the first call makes; collective over the world."""
    if world_size > 1 and world not in _watches:
        texts = exchange_texts(json.dumps(Peer.from_this_process(rank).to_dict()))
        store = find_store(world, environment.environ()).with_prefix("gradients")
        _watches[world] = RankWatch(store, rank, [Peer.from_dict(json.loads(text)) for text in texts])
    return _watches.get(world)


def _world_timeout(world: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout that the caller gave to the world; new groups would get torch's own, half an hour."""
    options = getattr(world._get_backend(world_device()), "options", None)
    return getattr(options, "_timeout", None)


def world_device() -> torch.device:
    """Return the device of tensors that the world exchanges: the CPU, unless the backend has none (nccl)."""
    kinds = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], torch.accelerator.current_device_index())


def exchange_texts(text: str, group: dist.ProcessGroup | None = None, watch: RankWatch | None = None) -> list[str]:
    """Return the text of each rank in the order of a group, the world if None; collective over the group.

    Args:
        text: this rank's text.
        group: the ranks.
        watch: names a rank that ends meanwhile; None before the watch is made.

    Raises:
        RankFailedError: a rank has ended.
    """
    device, own = world_device(), text.encode()

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


def _check_sets(sets_by_rank: list[list[tuple[int, ...]]], world_size: int) -> None:
    """Check that all ranks of a set asked for it. All ranks get the same result, since all have all sets."""
    num_asking = Counter(ranks for sets in sets_by_rank for ranks in sets)
    for rank, sets in enumerate(sets_by_rank):
        for ranks in sets:
            if rank not in ranks or not 0 <= ranks[0] <= ranks[-1] < world_size or len(set(ranks)) != len(ranks):
                raise GradientError(
                    f"rank {rank} asks for a group of ranks {list(ranks)}",
                    rank=rank,
                    got=str(list(ranks)),
                    want=f"rank {rank} and others of the {world_size} ranks of the world, each once",
                    next_step="make the mesh of the ranks of this world",
                )
            if num_asking[ranks] < len(ranks):
                absent = [other for other in ranks if ranks not in sets_by_rank[other]]
                raise GradientError(
                    f"rank {rank} exchanges gradients with ranks {list(ranks)}, and rank {absent[0]} does not",
                    rank=absent[0],
                    got=f"on rank {absent[0]} the groups {[list(known) for known in sets_by_rank[absent[0]]]}",
                    want=f"{list(ranks)} among them",
                    next_step="make the same mesh on all ranks, and the same marks on copies of a parameter",
                )


Combination: TypeAlias = Literal["sum", "average", "max"]

_OPERATIONS: Mapping[Combination, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
}
# torch 2.13 warns of these names, the only ones that 2.10 has.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        """Device of small tensors that are exchanged beside gradients."""

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


class Done:
    """The handle of a collective over one rank."""

    def wait(self) -> None:
        """Return at once."""


class TorchWire:
    """The collectives of torch's process groups.

    Raises:
        RankFailedError: from all methods, and from waits on handles: a rank of the world has ended.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self.device = world_device()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: Combination) -> Handle:
        """Combine a tensor in place."""
        return self._start(ranks, dist.all_reduce, tensor, op=_OPERATIONS[how])

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: Combination
    ) -> Handle:
        """Combine a tensor and keep this rank's part."""
        return self._start(ranks, _reduce_scatter, shard, whole, op=_OPERATIONS[how])

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Exchange parts."""
        return self._start(ranks, dist.all_to_all_single, received, whole)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Gather the parts of all ranks."""
        return self._start(ranks, _all_gather, whole, shard)

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Send the first rank's tensor to all ranks."""
        return self._start(ranks, dist.broadcast, tensor, src=ranks[0])

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Return each rank's text."""
        if len(ranks) == 1:
            return {ranks[0]: text}
        return dict(zip(ranks, exchange_texts(text, self._groups[ranks], self._groups.watch), strict=True))

    def _start(self, ranks: tuple[int, ...], collective: Callable[..., Any], *tensors: Any, **options: Any) -> Handle:
        if len(ranks) == 1:
            return Done()
        watch = self._groups.watch
        assert watch is not None  # a world of several ranks has one
        work = watch.run(partial(collective, *tensors, group=self._groups[ranks], async_op=True, **options))
        if work is None:  # this rank is not in the group
            return Done()
        return _WatchedWork(work, watch, tensors[0].device.type == "cpu")


@dataclass(frozen=True, slots=True)
class _WatchedWork:
    """A collective of torch whose waits end when a rank has ended."""

    work: Any
    watch: RankWatch
    is_on_host: bool

    def wait(self) -> None:
        # On an accelerator this only orders streams: the host goes on.
        if self.is_on_host:
            self.watch.wait(self.work, is_on_host=True)
        else:
            self.watch.run(self.work.wait)

    def finish(self) -> None:
        self.watch.wait(self.work, is_on_host=self.is_on_host)


def finish(handle: Handle) -> None:
    """Wait on the host for a collective whose result the host reads next, on an accelerator, too.

    Raises:
        RankFailedError: a rank has ended; reading the result would wait for it.
    """
    if isinstance(handle, _WatchedWork):
        handle.finish()
    else:
        handle.wait()


_MAX_SENT = 8
"""Faults that one rank sends: a mistake in the loop makes one for every parameter."""


@dataclass(frozen=True, slots=True)
class GradientFault:
    """The parts of a `GradientError`."""

    message: str
    """Text that names the parameter and the rank."""
    rank: int
    tensor: str | None = None
    got: str | None = None
    want: str | None = None
    next_step: str | None = None

    def make_error(self) -> GradientError:
        """Return the fault as an error."""
        return GradientError(
            self.message,
            tensor=self.tensor,
            rank=self.rank,
            got=self.got,
            want=self.want,
            next_step=self.next_step,
        )


class FaultFlag:
    """One number that flags a fault on any rank, reduced while gradients are under way."""

    def __init__(self, faults: Sequence[GradientFault], wire: GradientWire, ranks: tuple[int, ...]) -> None:
        self._faults, self._wire, self._ranks = faults, wire, ranks
        # One int64 per step: ranks send the texts of faults only after a flag was raised.
        self._flag = torch.tensor([len(faults)], dtype=torch.int64, device=wire.device)
        self._handle: Handle = wire.all_reduce(self._flag, ranks, "max")

    def raise_if_any(self) -> None:
        """Raise the first fault of the lowest rank on all ranks, with the other faults as notes.

        Raises:
            GradientError: a rank has a fault.
            RankFailedError: a rank has ended.
        """
        finish(self._handle)
        if not int(self._flag):
            return
        text = json.dumps([asdict(fault) for fault in self._faults[:_MAX_SENT]])
        texts = self._wire.exchange(text, self._ranks)
        raise_faults({rank: [GradientFault(**fault) for fault in json.loads(text)] for rank, text in texts.items()})


def raise_faults(found: Mapping[int, Sequence[GradientFault]]) -> None:
    """Raise the first fault, with the others as notes; return without faults.

    Args:
        found: faults by the rank that found them.

    Raises:
        GradientError: there is a fault.
    """
    # In the order of ranks, so that all ranks raise the same fault first.
    faults = [fault for rank in sorted(found) for fault in found[rank]]
    if not faults:
        return
    error = faults[0].make_error()
    others = [fault.message for fault in faults[1:] if fault.message != faults[0].message]
    for line in first_lines([f"also: {message}" for message in others], _MAX_SENT):
        error.add_note(line)
    raise error
