"""Writes a plan's files into a stage by all ranks of a team, round by round; rank 0 joins, checks and finishes them.

Order of events, on every rank: rank 0 keeps what an interrupted run finished, makes the other files at their full size
and tells the others its stage; all divide the plan alike; in each round every rank writes its share, syncs it, and
sends rank 0 what it found; rank 0 joins that, compares the checksums of records that several ranks read, and finishes
the files whose every source is checked. A file is in the journal only then.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import TypeVar

from xrank.conversion.file_writing import (
    WrittenFiles,
    digests_of,
    num_compared,
    resumed_files,
    verify_stage,
)
from xrank.conversion.options import ReplicaChoice
from xrank.conversion.partial_results import PartialResults
from xrank.conversion.team import Team
from xrank.errors import UsageError
from xrank.plan.buffers import FileSource, FileTarget
from xrank.plan.checksums import RecordChecksums, read_rest
from xrank.plan.digests import digest_text
from xrank.plan.division import Division, divide
from xrank.plan.executor import Budget, Outcome, execute
from xrank.plan.faults import checksum_error
from xrank.plan.file_parts import FilePart, JoinedFile
from xrank.plan.planner import Plan
from xrank.workspace.shared_directory import STALE_SECONDS
from xrank.writers.disk import explaining, in_memory
from xrank.writers.output_place import OutputPlace
from xrank.writers.shared_parts import SharedParts
from xrank.writers.stage import Stage

__all__ = ["help_to_write_files", "write_files_together"]

Seen = TypeVar("Seen")

_logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.05


def write_files_together(
    team: Team,
    plan: Plan,
    stage: Stage,
    budget: Budget,
    progress: Callable[[int, int], None],
    *,
    replicas: ReplicaChoice = "verify",
    verify: bool = False,
) -> WrittenFiles:
    """Do, as rank 0, what `write_files` does, with the help of all other ranks; arguments and errors are its.

    Raises:
        RankFailedError: a rank failed; what is finished is kept.
    """
    resumed = resumed_files(plan, stage, budget)
    unfinished = [index for index in range(len(plan.files)) if index not in resumed]
    for index in unfinished:
        output = plan.files[index].output
        os.close(stage.create_part(output.name, output.nbytes))
    team.tell("stage", json.dumps({"name": os.path.basename(stage.path), "files": unfinished}))
    resumed_nbytes = sum(plan.files[index].output.nbytes for index in resumed)
    joining = _Joining(plan, divide(plan, unfinished, team.size), stage, budget)
    share = _Share(team, plan, joining.division, SharedParts(stage.path), budget, replicas)
    done = resumed_nbytes

    def count(nbytes: int) -> None:
        # The others are as far, as far as anyone can tell.
        nonlocal done
        done = min(done + nbytes * team.size, plan.nbytes)
        progress(done, plan.nbytes)

    try:
        for number, round_ in enumerate(joining.division.rounds):
            results = share.write(number, count)
            with team.gathered(f"round {number + 1}", results.to_message(), early_exit=True) as messages:
                joining.join(number, [PartialResults.from_message(message) for message in messages])
            done = resumed_nbytes + sum(
                plan.files[index].output.nbytes for r in joining.division.rounds[: number + 1] for index in r.files
            )
            progress(done, plan.nbytes)
            _logger.debug("round %d of %d: %d files", number + 1, len(joining.division.rounds), len(round_.files))
        joining.source.check_unchanged()
    finally:
        share.close()
        joining.source.close()
    outcome = joining.outcome()
    digests = {**resumed, **{index: digests_of(plan, file) for index, file in outcome.files.items()}}
    if verify:
        verify_stage(plan, stage, digests, budget)
    return WrittenFiles(digests, resumed_nbytes, outcome, num_compared(plan, resumed))


def help_to_write_files(
    team: Team, plan: Plan, out: str, plan_digest: str, budget: Budget, *, replicas: ReplicaChoice = "verify"
) -> None:
    """Do the part of any other rank in `write_files_together`.

    Raises:
        CorruptError, ContradictionError: the source is not what its metadata promised.
        NoSpaceError, XrankError: it could not be written.
        UsageError: the output is not on a file system that this rank and rank 0 both see.
        RankFailedError: another rank failed.
    """
    told = json.loads(team.hear("stage"))
    place = OutputPlace.of(out)
    parts = SharedParts(os.path.join(place.parent, told["name"]))
    _await_sight(lambda: parts.is_of(plan_digest) or None, team.failures(), parts.path, team.rank)
    division = divide(plan, told["files"], team.size)
    share = _Share(team, plan, division, parts, budget, replicas)
    try:
        for number in range(len(division.rounds)):
            results = share.write(number, lambda nbytes: None)
            with team.gathered(f"round {number + 1}", results.to_message(), early_exit=True):
                pass
    finally:
        share.close()


class _Share:
    """One rank's share of all rounds."""

    def __init__(
        self, team: Team, plan: Plan, division: Division, parts: SharedParts, budget: Budget, replicas: ReplicaChoice
    ) -> None:
        self._team, self._plan, self._division, self._parts = team, plan, division, parts
        self._budget, self._replicas = budget, replicas
        self._source = FileSource(plan.source)
        self._target = FileTarget({})
        self._checksums = RecordChecksums(plan.source.records, _mismatch(plan), left_open=division.left_open)
        self._failures = team.failures()

    def write(self, number: int, count: Callable[[int], None]) -> PartialResults:
        """Write this rank's windows of a round, and make them last; `count` is told of the bytes of each."""
        division, rank = self._division, self._team.rank
        self._failures = self._team.failures()
        try:
            with explaining(self._parts.path):
                outcome = execute(
                    self._plan,
                    self._source,
                    self._target,
                    budget=self._budget,
                    shares=division.rounds[number].shares[rank],
                    checksums=self._checksums,
                    replicas=self._replicas,
                    begin=self._begin,
                    finish_share=self._finish,
                    cancelled=self._failures,
                    progress=count,
                )
        finally:
            self._close_files()
        read_rest(self._checksums, self._source, division.own_records(rank, number), _staging(self._budget))
        if number + 1 == len(division.rounds):
            self._source.check_unchanged()
        return PartialResults(
            tuple(outcome.parts.values()),
            self._checksums.take_parts(division.open_records(number)),
            self._checksums.num_checked,
            outcome.differences,
        )

    def _begin(self, index: int) -> None:
        output = self._plan.files[index].output
        path = os.path.join(self._parts.path, f"{output.name}.part")
        fd = _await_sight(lambda: self._parts.open(output.name, output.nbytes), self._failures, path, self._team.rank)
        self._target.in_memory = in_memory(fd)
        self._target.descriptors[index] = fd

    def _finish(self, part: FilePart) -> None:
        fd = self._target.descriptors.pop(part.index)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)  # NFS: what others, who open the file from now on, then see

    def _close_files(self) -> None:
        for fd in self._target.descriptors.values():
            os.close(fd)
        self._target.descriptors.clear()

    def close(self) -> None:
        """Close all files."""
        self._close_files()
        self._source.close()


class _Joining:
    """What rank 0 makes of all ranks' findings."""

    def __init__(self, plan: Plan, division: Division, stage: Stage, budget: Budget) -> None:
        self.division = division
        self.source = FileSource(plan.source)
        self._plan, self._stage, self._budget = plan, stage, budget
        self._parts = SharedParts(stage.path)
        self._checksums = RecordChecksums(plan.source.records, _mismatch(plan))
        self._joined: dict[int, JoinedFile] = {}  # of which records are still to be read in later rounds
        self._outcome = Outcome()
        self._num_checked: Sequence[int] = ()
        self._last_round = {
            index: max((self._read_last(index)), default=0) for r in division.rounds for index in r.files
        }

    def _read_last(self, index: int) -> list[int]:
        return [
            int(self.division.last_round[copies.record].max())
            for tensor in self._plan.files[index].tensors
            for copies in tensor.read
            if len(copies)
        ]

    def join(self, number: int, found: Sequence[PartialResults]) -> None:
        """Take in what all ranks found in a round; finish what can be finished."""
        self._joined |= {
            index: JoinedFile(self._plan.files[index].output, index) for index in self.division.rounds[number].files
        }
        for results in found:
            for part in results.parts:
                self._joined[part.index].join(part)
            for record in results.records:
                self._checksums.join(*record)
            for name, ranks in results.differences.items():
                known = self._outcome.differences.setdefault(name, {})
                for rank, num_elements in ranks.items():
                    known[rank] = known.get(rank, 0) + num_elements
        self._num_checked = [results.num_checksums for results in found]
        # What is missing now was read by no rank, or by two of them in cuts that overlap.
        read_rest(self._checksums, self.source, self.division.open_records(number), _staging(self._budget))
        for index in [index for index in self._joined if self._last_round[index] <= number]:
            self._finish(self._joined.pop(index), index)

    def _finish(self, file: JoinedFile, index: int) -> None:
        output = self._plan.files[index].output
        path = os.path.join(self._stage.path, f"{output.name}.part")
        finished, ending = file.finish()
        fd = _await_sight(lambda: self._parts.open(output.name, output.nbytes), lambda: False, path, 0)
        try:
            with explaining(path):
                for offset, data in ending:
                    os.pwrite(fd, data, offset)
        except BaseException:
            os.close(fd)
            raise
        self._stage.finish_part(output.name, fd, output.nbytes, digest_text(finished.digest))
        self._outcome.files[index] = finished
        _logger.info("finished %s, %s bytes", output.name, f"{output.nbytes:,}")

    def outcome(self) -> Outcome:
        """Return what one process would have found."""
        assert not self._joined, "files were written and never finished"
        self._outcome.num_checksums = sum(self._num_checked) + self._checksums.num_checked
        return self._outcome


def _mismatch(plan: Plan) -> Callable[[int, int], None]:
    def raise_(record: int, crc: int) -> None:
        raise checksum_error(plan, record, crc)

    return raise_


def _staging(budget: Budget) -> memoryview:
    return memoryview(mmap.mmap(-1, budget.staging_nbytes))


def _await_sight(look: Callable[[], Seen | None], failures: Callable[[], bool], path: str, rank: int) -> Seen:
    """Return what `look` finds; a network file system may show it a little later than rank 0 told of it.

    Raises:
        RankFailedError: from `failures`, which may be why it is not there.
        UsageError: it does not become visible.
    """
    end = monotonic() + STALE_SECONDS
    while (found := look()) is None:
        failures()
        if monotonic() > end:
            raise UsageError(
                f"rank {rank} does not see {path}, which rank 0 made",
                rank=rank,
                file=path,
                got="nothing there",
                want="a folder that all hosts mount, in the same place",
                next_step="choose an --out on a file system that all ranks share, then run the same command",
            )
        sleep(_PAUSE_SECONDS)
    return found
