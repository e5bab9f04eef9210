"""Writes a plan's files into a stage, alone or with a team; checks and keeps files that an interrupted run finished."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic

from xrank.errors import AGAIN, CorruptError, XrankError
from xrank.making.rereading import FileDigests, reread
from xrank.making.rounds import LocalOutputs
from xrank.making.work import Work
from xrank.plan.budget import Budget
from xrank.plan.buffers import NullTarget
from xrank.plan.digests import digest_text
from xrank.plan.executor import FinishedFile, Outcome, execute
from xrank.plan.file_parts import FilePart, JoinedFile, make_finished_file
from xrank.plan.output import OutputFile
from xrank.plan.planner import Plan
from xrank.teams.team import Team
from xrank.words import plural, size_text
from xrank.writers.disk import explain_errors
from xrank.writers.output_stage import OutputStage
from xrank.writers.stage import Stage

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """A plan's files, all finished in their stage, and the findings of the run."""

    digests: dict[int, FileDigests]
    """Digests by index of the file."""
    resumed_nbytes: int
    """Bytes of the files that an interrupted run had finished."""
    outcome: Outcome
    """Outcome of the files that this run wrote."""
    num_replicas_compared: int

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Return the report's notes on differing replicas from which one was picked."""
        # Sorted: the manifest must not depend on which thread or rank found one first.
        return tuple(
            ("replicas-differ", f"{name}: rank {rank} differs in {count:,} elements; the lowest rank's were taken")
            for name, ranks in sorted(self.outcome.differences.items())
            for rank, count in sorted(ranks.items())
        )


def write_files(
    work: Work, stage: OutputStage, progress: Callable[[int, int], None], team: Team, *, verify: bool = False
) -> WrittenFiles:
    """Write every file of a plan that the stage does not yet hold.

    Args:
        work: the plan, and how this rank carries it out.
        stage: the stage to write into.
        progress: called with (bytes written so far, bytes in all).
        team: the ranks that help, of which this is the first.
        verify: whether to read all files back after writing.

    Raises:
        CorruptError, ContradictionError: the source does not match its metadata.
        NoSpaceError, XrankError: the files could not be written.
        RankFailedError: another rank of the team failed; finished files are kept.
    """
    plan, is_live = work.plan, work.holder is not None
    resumed = _find_resumed_files(plan, stage, work.budget, signs=work.file_hashes is not None)
    if is_live:  # its tensors may have changed since
        resumed = _keep_unchanged(work, stage, resumed, team)
    resumed_nbytes = sum(plan.files[index].output.nbytes for index in resumed)
    unfinished = [index for index in range(len(plan.files)) if index not in resumed]

    total_nbytes = plan.nbytes
    counts = f"{plural(sum(len(file.tensors) for file in plan.files), 'tensor')} in {plural(len(plan.files), 'file')}"
    kept = f"; {size_text(resumed_nbytes)} kept of an earlier run" if resumed_nbytes else ""
    _logger.debug("plan: %s, %s by %s%s", counts, size_text(total_nbytes), plural(team.size, "rank"), kept)

    def count(nbytes: int) -> None:
        progress(resumed_nbytes + nbytes, total_nbytes)

    if team.size == 1:
        outcome = _write_alone(team, work, stage, unfinished, count)
    else:
        from xrank.making.shared_writing import write_together  # one process does not need this module

        outcome = write_together(team, work, stage, unfinished, count)
    digests = {**resumed, **{index: _digests_of(plan, done) for index, done in outcome.files.items()}}
    if verify and isinstance(stage, Stage):  # a store has confirmed each part by its checksum
        _verify_stage(plan, stage, digests, work.budget)
    # A run compares all replicas of a live model, whichever files it kept.
    return WrittenFiles(digests, resumed_nbytes, outcome, _num_compared(plan, () if is_live else resumed))


def _write_alone(
    team: Team, work: Work, stage: OutputStage, unfinished: Sequence[int], progress: Callable[[int], None]
) -> Outcome:
    writing = _Writing(work.plan, stage, progress)
    copied, last = work.split_files(unfinished)
    try:
        outcome = execute(
            work.plan,
            work.source,
            writing.target,
            budget=work.budget,
            files=copied,
            file_hashes=work.file_hashes,
            replicas=work.replicas,
            begin=writing.begin,
            finish=writing.finish,
            progress=writing.count,
        )
        if last:
            from xrank.making.transformed_files import make_transformed  # copied files do not need this module

            made = make_transformed(team, work, last, writing, what="the files", finish=writing.finish_joined)
            outcome.files |= made.files
        # After the last read: a source that changed in between has given old bytes and new ones.
        work.source.check_unchanged()
    finally:
        writing.close()
    return outcome


class _Writing(LocalOutputs):
    """Opens, counts and finishes the stage's files as the executor asks."""

    def __init__(self, plan: Plan, stage: OutputStage, progress: Callable[[int], None]) -> None:
        self._files = stage.open_files()
        self.target = self._files.target
        self._plan, self._stage, self._progress, self._done = plan, stage, progress, 0
        self._begun: dict[int, float] = {}

    def begin(self, index: int) -> None:
        output = self._plan.files[index].output
        self._begun[index] = monotonic()
        self._files.begin(index, output.name, output.nbytes, output.late_places)

    def finish(self, finished: FinishedFile) -> None:
        output, index = self._plan.files[finished.index].output, finished.index
        self._files.finish(index, output.name, output.nbytes, digest_text(finished.digest), finished.tensor_digests)
        _logger.info("finished %s, %s bytes", output.name, f"{output.nbytes:,}")
        seconds = max(monotonic() - self._begun.pop(index, monotonic()), 1e-9)
        _logger.debug("%s took %.1f s, %s/s", output.name, seconds, size_text(output.nbytes / seconds))

    def explain_errors(self) -> AbstractContextManager[None]:
        """Explain the file system's errors in the body."""
        return explain_errors(self._stage.path)

    def finish_share(self, part: FilePart) -> None:
        """Do nothing: this process makes all parts."""

    def finish_joined(self, file: JoinedFile, index: int) -> FinishedFile:
        """Finish a file after its only part is joined."""
        finished, _ = file.finish()
        self.finish(finished)
        return finished

    def count(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done)

    def close(self) -> None:
        """Leave the files that a failure left open."""
        self._files.close()


def _num_compared(plan: Plan, resumed: Container[int]) -> int:
    """Count the replicas that are compared with written data, in all files but the resumed ones."""
    # A record may be compared part by part, with several files.
    return len(
        {
            (tensor.output.name, record)
            for index, file in enumerate(plan.files)
            if index not in resumed
            for tensor in file.tensors
            for replicas in tensor.compared
            for record in replicas.record.tolist()
        }
    )


def _find_resumed_files(plan: Plan, stage: OutputStage, budget: Budget, *, signs: bool) -> dict[int, FileDigests]:
    """Return the files that an interrupted run finished and that did not change since; discard the others.

    In a store, files that are to be signed are made again, and their parts not sent again.
    """
    resumed = {}
    for index, file in enumerate(plan.files):
        line = stage.finished.get(file.output.name)
        if line is None:
            continue
        recalled = stage.recall(file.output.name)
        if recalled is not None:
            if signs:  # its SHA-256 is not known, and it cannot be read before the commit
                stage.discard(file.output.name)
                continue
            digest, tensors = recalled
            if _may_be_of(file.output, line.nbytes, digest, tensors):
                resumed[index] = _digests_of(plan, FinishedFile(index, digest, tuple(tensors)))
            else:
                stage.discard(file.output.name)
            continue
        try:
            digests = reread(os.path.join(stage.path, file.output.name), file.output, budget)
        except XrankError:
            stage.discard(file.output.name)
            continue
        if digest_text(digests.digest) == line.digest:
            resumed[index] = digests
        else:
            stage.discard(file.output.name)
    return resumed


def _may_be_of(output: OutputFile, nbytes: int, digest: bytes, tensors: Sequence[bytes]) -> bool:
    """Return whether a file's recorded digests agree with each other and with its plan."""
    if (
        nbytes != output.nbytes
        or len(tensors) != len(output.tensors)
        or any(len(one) != len(digest) for one in tensors)
    ):
        return False
    # The digest of an archive also covers CRCs that no record has.
    return output.ending is not None or make_finished_file(output, 0, tensors, ()).digest == digest


def _keep_unchanged(
    work: Work, stage: OutputStage, resumed: dict[int, FileDigests], team: Team
) -> dict[int, FileDigests]:
    """Return the files that this run would write identically; discard the others."""
    if team.size > 1:
        from xrank.making.shared_writing import read_together

        now = read_together(team, work, sorted(resumed))
    else:
        copied, last = work.split_files(sorted(resumed))
        now = execute(work.plan, work.source, NullTarget(), budget=work.budget, files=copied).files
        if last:
            from xrank.making.rounds import NoOutputs
            from xrank.making.transformed_files import make_transformed

            now |= make_transformed(team, work, last, NoOutputs(), what="what was kept").files
    for index, kept in list(resumed.items()):
        if _digests_of(work.plan, now[index]) != kept:
            stage.discard(kept.name)
            del resumed[index]
    return resumed


def _digests_of(plan: Plan, done: FinishedFile) -> FileDigests:
    """Return a finished file's digests by name."""
    output = plan.files[done.index].output
    names = [tensor.name for tensor in output.tensors]
    tensors = dict(zip(names, done.tensor_digests, strict=True))
    return FileDigests(output.name, output.nbytes, done.digest, tensors)


def _verify_stage(plan: Plan, stage: Stage, digests: dict[int, FileDigests], budget: Budget) -> None:
    """Read every file of the stage back, from the disk where the system can drop its cache."""
    for index, expected in digests.items():
        path = os.path.join(stage.path, expected.name)
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = reread(path, plan.files[index].output, budget)
        if found != expected:
            stage.discard(expected.name)
            raise CorruptError(
                f"{path} does not read back as it was written",
                file=path,
                got=digest_text(found.digest),
                want=digest_text(expected.digest),
                next_step=f"check the disk; then {AGAIN}, which writes this file again",
            )
