"""What a plan moves: bytes that each rank reads, exchanges and writes, round by round; data alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from xrank.layout.nest_table import IntArray
from xrank.plan.division import Round
from xrank.plan.planner import Plan
from xrank.plan.windows import WINDOW_NBYTES

__all__ = ["FROM_FILES", "Exchange", "Flow", "RoundTraffic", "Traffic", "round_of", "written_nbytes"]

FROM_FILES = -1
"""In `Flow.giver`: no rank's memory, but files."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Reads; row i is of one rank, from one place."""

    taker: IntArray
    """Who reads."""
    giver: IntArray
    """The rank whose memory is read, which may be the same; `FROM_FILES`."""
    nbytes: IntArray
    messages: IntArray
    """How many reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What ranks read of each other's memory; row i is a pair of ranks, each pair once, by rising taker, then giver."""

    taker: IntArray
    giver: IntArray
    nbytes: IntArray
    messages: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RoundTraffic:
    """One round, at whose end the ranks wait for the slowest; arrays are by rank."""

    written_nbytes: IntArray
    read_nbytes: IntArray
    """From files."""
    reads: IntArray
    """Of files: calls."""
    own_nbytes: IntArray
    """From the rank's own memory."""
    exchange: Exchange

    @property
    def taken_nbytes(self) -> IntArray:
        """By rank, from others' memory."""
        return self._by(self.exchange.taker, self.exchange.nbytes)

    @property
    def given_nbytes(self) -> IntArray:
        """By rank, what others take of its memory."""
        return self._by(self.exchange.giver, self.exchange.nbytes)

    @property
    def messages(self) -> IntArray:
        """By rank, reads of others' memory."""
        return self._by(self.exchange.taker, self.exchange.messages)

    def _by(self, rank: IntArray, amount: IntArray) -> IntArray:
        found = np.zeros_like(self.written_nbytes)
        np.add.at(found, rank, amount)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """All of a conversion."""

    rounds: tuple[RoundTraffic, ...]
    compared_nbytes: IntArray
    """By rank, of its own memory: what it digests before the first round, to compare replicas."""
    is_each_read: bool
    """Whether each read was followed; else messages are estimated, and so is what reads take along between pieces."""

    @property
    def num_ranks(self) -> int:
        """How many ranks work."""
        return len(self.compared_nbytes)

    def total(self, name: str) -> IntArray:
        """Return the sum over all rounds of an array of `RoundTraffic`, by rank."""
        return sum((getattr(one, name) for one in self.rounds), np.zeros_like(self.compared_nbytes))


def written_nbytes(plan: Plan, one: Round) -> IntArray:
    """Return what each rank writes in a round."""
    found = np.zeros(len(one.shares), np.int64)
    for rank, share in enumerate(one.shares):
        for index, ranges in share.items():
            end = plan.files[index].output.nbytes
            found[rank] += sum(min(r.stop * WINDOW_NBYTES, end) - r.start * WINDOW_NBYTES for r in ranges)
    return found


def round_of(written_nbytes: IntArray, flows: Iterable[Flow]) -> RoundTraffic:
    """Return a round of what each rank writes and of all reads."""
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
        Exchange(keys[firsts] // num_ranks, keys[firsts] % num_ranks, *both),
    )
