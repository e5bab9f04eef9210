"""ConversionTraffic of a plan as data: the bytes that each rank reads, exchanges and writes, per round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from xrank.layout.nest_table import IntArray
from xrank.plan.division import Round
from xrank.plan.planner import Plan
from xrank.plan.windows import WINDOW_NBYTES

FROM_FILES = -1
"""Value of `Flow.giver` for reads from files instead of a rank's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Groups of reads; row i is by one rank from one place."""

    taker: IntArray
    """The reading rank."""
    giver: IntArray
    """The rank whose memory is read, possibly the reading one, or `FROM_FILES`."""
    nbytes: IntArray
    messages: IntArray
    """Number of reads."""


@dataclass(frozen=True, slots=True, eq=False)
class RankExchange:
    """Reads from other ranks' memory; row i is a unique pair of ranks, sorted by taker, then giver."""

    taker: IntArray
    giver: IntArray
    nbytes: IntArray
    messages: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RoundTraffic:
    """ConversionTraffic of one round, after which the ranks wait for the slowest; arrays are indexed by rank."""

    written_nbytes: IntArray
    read_nbytes: IntArray
    """Bytes read from files."""
    reads: IntArray
    """Number of read calls on files."""
    own_nbytes: IntArray
    """Bytes read from the rank's own memory."""
    exchange: RankExchange

    @property
    def taken_nbytes(self) -> IntArray:
        """Bytes that each rank reads from others' memory."""
        return self._sum_by_rank(self.exchange.taker, self.exchange.nbytes)

    @property
    def given_nbytes(self) -> IntArray:
        """Bytes that others read from each rank's memory."""
        return self._sum_by_rank(self.exchange.giver, self.exchange.nbytes)

    @property
    def messages(self) -> IntArray:
        """Number of reads of each rank from others' memory."""
        return self._sum_by_rank(self.exchange.taker, self.exchange.messages)

    def _sum_by_rank(self, rank: IntArray, amount: IntArray) -> IntArray:
        found = np.zeros_like(self.written_nbytes)
        np.add.at(found, rank, amount)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class ConversionTraffic:
    """ConversionTraffic of a whole conversion."""

    rounds: tuple[RoundTraffic, ...]
    compared_nbytes: IntArray
    """Bytes of its own memory that each rank digests before the first round, to compare replicas."""
    is_each_read: bool
    """Whether each read was traced; otherwise messages, and bytes read between wanted ones, are estimated."""

    @property
    def num_ranks(self) -> int:
        """Number of working ranks."""
        return len(self.compared_nbytes)

    def total(self, name: str) -> IntArray:
        """Return the sum of an array of `RoundTraffic` over all rounds, by rank."""
        return sum((getattr(one, name) for one in self.rounds), np.zeros_like(self.compared_nbytes))


def count_written_nbytes(plan: Plan, one: Round) -> IntArray:
    """Count the bytes that each rank writes in a round."""
    found = np.zeros(len(one.shares), np.int64)
    for rank, share in enumerate(one.shares):
        for index, ranges in share.items():
            end = plan.files[index].output.nbytes
            found[rank] += sum(min(r.stop * WINDOW_NBYTES, end) - r.start * WINDOW_NBYTES for r in ranges)
    return found


def build_round(written_nbytes: IntArray, flows: Iterable[Flow]) -> RoundTraffic:
    """Build a round from the bytes written by each rank and all reads."""
    num_ranks = len(written_nbytes)
    none = np.zeros(0, np.int64)
    parts = [(flow.taker, flow.giver, flow.nbytes, flow.messages) for flow in flows]
    taker, giver, nbytes, messages = (np.concatenate([none, *c]) for c in zip(*(parts or [(none,) * 4]), strict=True))

    def sums(chosen: IntArray, amount: IntArray) -> IntArray:
        found = np.zeros(num_ranks, np.int64)
        np.add.at(found, taker[chosen], amount[chosen])
        return found

    files, own = np.flatnonzero(giver == FROM_FILES), np.flatnonzero(giver == taker)
    others = np.flatnonzero((giver != FROM_FILES) & (giver != taker))
    # Sum the flows of each (taker, giver) pair: sort by a combined key, then reduce runs of equal keys.
    keys = taker[others] * num_ranks + giver[others]
    order = np.argsort(keys, kind="stable")
    keys, others = keys[order], others[order]
    firsts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    both = [np.add.reduceat(each[others], firsts) if len(firsts) else none for each in (nbytes, messages)]
    return RoundTraffic(
        written_nbytes,
        sums(files, nbytes),
        sums(files, messages),
        sums(own, nbytes),
        RankExchange(keys[firsts] // num_ranks, keys[firsts] % num_ranks, *both),
    )
