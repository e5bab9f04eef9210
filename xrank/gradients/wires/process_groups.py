"""Process groups for the sets of ranks in a step: made once, in one order on all ranks, then kept.

Call order: all ranks of the world call `make_groups`, every time; a rank without exchanges passes no sets. All ranks
raise the same errors. The groups are never closed: they end with the world.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from xrank import environment
from xrank.errors import GradientError, UsageError
from xrank.gradients.wires.rank_watch import RankWatch
from xrank.ranks.peer import Peer
from xrank.ranks.store import find_store

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
