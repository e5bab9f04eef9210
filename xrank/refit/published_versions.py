"""Versions of an offer: each published step is also written into a folder, whole or as what has changed since the last.

Each rank keeps the last version's bytes of its share of the tensors, in their form in the folder, and replaces them
while it compares them. After a failure they may be those of no version, so that the next one is whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from xrank.commands.delta_writing import NewVersion, plan_version, share_of, write_delta
from xrank.commands.folder_filling import make_output
from xrank.commands.live_delta import LiveTensors, check_model_alone, row_of
from xrank.engine.tensor_pairs import Bytes, TensorSide
from xrank.engine.tensor_target import empty_tensor
from xrank.errors import UsageError, option
from xrank.formats.deltas import version_name
from xrank.ranks.loans import PeerSource
from xrank.ranks.team import Team, find_group_team
from xrank.readers.deltas import list_versions
from xrank.recipes.lent_model import LentModel
from xrank.storage import places

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Watcher(Protocol):
    """The owner of the tensors, whose `check` runs while other ranks' tensors are read."""

    check: Callable[[], object]
    """Raises if another rank has failed."""


def check_whole_every(whole_every: int | None, deltas: object) -> None:
    """Raise UsageError unless `whole_every` is None, or a number of versions that are written."""
    if whole_every is not None and (deltas is None or isinstance(whole_every, bool) or whole_every < 1):
        raise UsageError(
            f"{option('whole_every')} must be a number of versions",
            got=repr(whole_every) if deltas is not None else f"{whole_every!r} without {option('deltas')}",
            want=f"1 or more, with {option('deltas')}",
            next_step="give such a number, or leave it out",
        )


class _Lent:
    """The tensors of all ranks, which may only change between two versions."""

    def __init__(self, source: PeerSource) -> None:
        self.read_into, self.fetch = source.read_into, source.fetch
        self.check_unchanged: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Leave the source open for the next version."""


class PublishedVersions:
    """Writes an offer's steps as versions into a folder; all ranks of the trainer make each call."""

    def __init__(
        self,
        folder: str,
        lent: LentModel,
        team: Team,
        group: ProcessGroup | None,
        whole_every: int | None,
        timeout_seconds: float,
    ) -> None:
        self._folder, self._group, self._timeout_seconds = folder, group, timeout_seconds
        self._gather, self._holder, self._source = lent.gather, lent.holder, _Lent(lent.source)
        self._whole_every = whole_every
        check_model_alone(lent.gather, "the model", folder)
        self._live = LiveTensors(lent.gather, self._source, lent.holder, team)
        numbers = sorted(share_of(team, self._live.outputs, self._live.units))
        outputs = [self._live.outputs[number] for number in numbers]
        self._copies = {output.name: empty_tensor(output) for output in outputs}
        self._rows = dict(zip(numbers, map(row_of, self._copies.values()), strict=True))
        self._base = TensorSide(self._live.plan, self._source, self._rows)
        self._last: tuple[int, int] | None = None
        """Numbers of the last version, and of the whole one before it; None: the copies are of no version."""

    def write(self, step: int, check: Callable[[], None], watcher: Watcher) -> None:
        """Write the present weights as the version of a step; `check` raises if they have changed.

        Raises:
            XrankError: on all ranks, if the version could not be written; the next one will be whole.
        """
        team = find_group_team(self._group, self._folder, timeout_seconds=self._timeout_seconds, call="publish")
        with team.together():
            watcher.check = team.make_failure_check()
            self._source.check_unchanged = check
            last, self._last = self._last, None
            _, (number, whole) = team.agree("the version", lambda: last, lambda last: last, self._choose)
            out = os.path.join(self._folder, version_name(number))
            if number == whole:
                own = {"step": step}
                planned = replace(self._gather, index={"version": f"{number:06d}", "xrank": own})
                make_output(planned, self._source, out, None, team, self._holder)
                team.agree("the copies", lambda: self._live.fill(self._copies), lambda _: None, lambda _, __: None)
            else:
                self._write_changes(team, out, number - 1, step)
        self._last = number, whole

    def _choose(self, last: tuple[int, int] | None, every: Sequence[Sequence[int] | None]) -> tuple[int, int]:
        """Return the numbers of the next version, and of the whole one that its chain begins with."""
        newest = max(list_versions(places.enter(self._folder)), default=-1)
        if last is not None and last[0] == newest and all(one is not None and tuple(one) == last for one in every):
            number, whole = last[0] + 1, last[1]
            if self._whole_every is None or number - whole < self._whole_every:
                return number, whole
        return newest + 1, newest + 1

    def _write_changes(self, team: Team, out: str, base: int, step: int) -> None:
        def read(numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], tuple[TensorSide, TensorSide]]]:
            for part, side in self._live.sides(numbers):
                yield part, (side, self._base)
            self._source.check_unchanged()

        def keep(number: int, low: int, new: Bytes) -> None:
            if len(new):
                self._rows[number][low : low + len(new)] = new.data

        version = NewVersion(
            team,
            self._live.outputs,
            plan_version(out, os.path.join(self._folder, version_name(base)), step=step),
            self._gather.source,
            out,
            self._gather.options,
            command="publish",
            started=time.monotonic(),
            timeout_seconds=self._timeout_seconds,
        )
        write_delta(version, read, units=self._live.units, keep=keep)
