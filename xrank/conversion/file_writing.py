"""Writes a plan's files into a stage through the executor; what an interrupted run finished is checked and kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container
from dataclasses import dataclass

from xrank.conversion.options import ReplicaChoice
from xrank.conversion.rereading import FileDigests, reread
from xrank.errors import CorruptError, XrankError
from xrank.plan.buffers import FileSource, FileTarget
from xrank.plan.digests import digest_text
from xrank.plan.executor import Budget, FinishedFile, Outcome, execute
from xrank.plan.planner import Plan
from xrank.writers.disk import in_memory
from xrank.writers.stage import Stage

__all__ = ["WrittenFiles", "digests_of", "num_compared", "resumed_files", "verify_stage", "write_files"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """A plan's files, all finished in their stage, and what was found on the way."""

    digests: dict[int, FileDigests]
    """By index of the file."""
    resumed_nbytes: int
    """Of files that an interrupted run had finished."""
    outcome: Outcome
    """Of what was written now."""
    num_replicas_compared: int

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """What the report says of replicas that were picked among."""
        # Sorted: which thread, or which rank, found one first must not decide what the manifest says.
        return tuple(
            ("replicas-differ", f"{name}: rank {rank} differs in {count:,} elements; the lowest rank's were taken")
            for name, ranks in sorted(self.outcome.differences.items())
            for rank, count in sorted(ranks.items())
        )


def write_files(
    plan: Plan,
    stage: Stage,
    budget: Budget,
    progress: Callable[[int, int], None],
    *,
    replicas: ReplicaChoice = "verify",
    verify: bool = False,
) -> WrittenFiles:
    """Write every file of a plan that the stage does not yet hold.

    Args:
        plan: what to write.
        stage: where.
        budget: threads and buffers.
        progress: called with (bytes written so far, bytes in all).
        replicas: whether replicas that differ are refused or picked among.
        verify: read all back when it is written.

    Raises:
        CorruptError, ContradictionError: the source is not what its metadata promised.
        NoSpaceError, XrankError: it could not be written.
    """
    resumed = resumed_files(plan, stage, budget)
    resumed_nbytes = sum(plan.files[index].output.nbytes for index in resumed)
    work = _Writing(plan, stage, progress, resumed_nbytes)
    source = FileSource(plan.source)
    try:
        outcome = execute(
            plan,
            source,
            work.target,
            budget=budget,
            files=[index for index in range(len(plan.files)) if index not in resumed],
            replicas=replicas,
            begin=work.begin,
            finish=work.finish,
            progress=work.count,
        )
        source.check_unchanged()
    finally:
        work.close()
        source.close()
    digests = {**resumed, **{index: digests_of(plan, done) for index, done in outcome.files.items()}}
    if verify:
        verify_stage(plan, stage, digests, budget)
    return WrittenFiles(digests, resumed_nbytes, outcome, num_compared(plan, resumed))


class _Writing:
    """Opens, counts and finishes the stage's files as the executor asks."""

    def __init__(self, plan: Plan, stage: Stage, progress: Callable[[int, int], None], done: int) -> None:
        self.target = FileTarget({})
        self._plan, self._stage, self._progress, self._done = plan, stage, progress, done

    def begin(self, index: int) -> None:
        output = self._plan.files[index].output
        fd = self._stage.create_part(output.name, output.nbytes)
        self.target.in_memory = in_memory(fd)
        self.target.descriptors[index] = fd

    def finish(self, finished: FinishedFile) -> None:
        output = self._plan.files[finished.index].output
        # The stage closes the descriptor whatever happens, so it is taken out of `close`'s reach first.
        fd = self.target.descriptors.pop(finished.index)
        self._stage.finish_part(output.name, fd, output.nbytes, digest_text(finished.digest))
        _logger.info("finished %s, %s bytes", output.name, f"{output.nbytes:,}")

    def count(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._plan.nbytes)

    def close(self) -> None:
        """Close what a failure left open."""
        for fd in self.target.descriptors.values():
            os.close(fd)
        self.target.descriptors.clear()


def num_compared(plan: Plan, resumed: Container[int]) -> int:
    """Return how many replicas are compared with what is written: of all files but those."""
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


def resumed_files(plan: Plan, stage: Stage, budget: Budget) -> dict[int, FileDigests]:
    """Return the files that an interrupted run finished and that are still what it wrote; discard the others."""
    resumed = {}
    for index, file in enumerate(plan.files):
        line = stage.finished.get(file.output.name)
        if line is None:
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


def digests_of(plan: Plan, done: FinishedFile) -> FileDigests:
    """Return a finished file's digests by name."""
    output = plan.files[done.index].output
    names = [tensor.name for tensor in output.tensors]
    tensors = dict(zip(names, done.tensor_digests, strict=True))
    return FileDigests(output.name, output.nbytes, done.digest, tensors)


def verify_stage(plan: Plan, stage: Stage, digests: dict[int, FileDigests], budget: Budget) -> None:
    """Read every file of the stage back, from the disk where the system lets go of its cache."""
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
                next_step="check the disk; then run the same command, which writes this file again",
            )
