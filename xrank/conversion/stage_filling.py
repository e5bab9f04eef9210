"""Fills a stage: weights through the executor, then index, config, companions and, last, the manifest."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xrank.conversion.gather_plan import Gather
from xrank.conversion.rereading import FileDigests, reread
from xrank.errors import CorruptError, XrankError
from xrank.plan.buffers import FileSource, FileTarget
from xrank.plan.digests import digest_text
from xrank.plan.executor import Budget, FinishedFile, execute
from xrank.plan.planner import Plan, TensorPlan
from xrank.writers.disk import in_memory
from xrank.writers.hf_folder import INDEX_NAME, index_text
from xrank.writers.journal import JournalLine
from xrank.writers.manifest import (
    MANIFEST_NAME,
    ManifestFile,
    ManifestSource,
    ManifestTensor,
    TensorSource,
    manifest_text,
)
from xrank.writers.stage import Stage

__all__ = ["Made", "fill_stage"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Made:
    """What was found and written, as the report shows it."""

    proof: dict[str, Any]
    output: dict[str, Any]
    notes: tuple[tuple[str, str], ...]


def fill_stage(gather: Gather, stage: Stage, progress: Callable[[int, int], None]) -> Made:
    """Write everything of a gather into its stage; only the commit is left.

    Raises:
        CorruptError, ContradictionError: the source is not what its metadata promised.
        NoSpaceError, XrankError: it could not be written.
    """
    plan, options = gather.plan, gather.options
    budget = Budget.within(options.max_memory_nbytes, options.num_workers)
    resumed = _resumed(plan, stage, budget)
    resumed_nbytes = sum(plan.files[index].output.nbytes for index in resumed)
    work = _Writing(plan, stage, progress, resumed_nbytes)
    source = FileSource(gather.source)
    try:
        outcome = execute(
            plan,
            source,
            work.target,
            budget=budget,
            files=[index for index in range(len(plan.files)) if index not in resumed],
            replicas=options.replicas,
            begin=work.begin,
            finish=work.finish,
            progress=work.count,
        )
        source.check_unchanged()
    finally:
        work.close()
        source.close()
    digests = {**resumed, **{index: _digests_of(plan, done) for index, done in outcome.files.items()}}
    if options.verify if options.verify is not None else options.overwrite:
        _verify_stage(stage, digests, budget)
    notes = tuple(
        ("replicas-differ", f"{name}: rank {rank} differs in {count:,} elements; the lowest rank's were taken")
        for name, ranks in outcome.differences.items()
        for rank, count in ranks.items()
    )
    files = _write_small_files(gather, stage, digests, notes)
    return Made(
        proof={
            "num_replicas_compared": sum(
                len(tensor.replicas)
                for index, file in enumerate(plan.files)
                if index not in resumed
                for tensor in file.tensors
            ),
            "num_checksums": outcome.num_checksums,
        },
        output={"files": files, "resumed_nbytes": resumed_nbytes},
        notes=notes,
    )


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


def _resumed(plan: Plan, stage: Stage, budget: Budget) -> dict[int, FileDigests]:
    """Return the files that an interrupted run finished and that are still what it wrote; discard the others."""
    resumed = {}
    for index, file in enumerate(plan.files):
        line = stage.finished.get(file.output.name)
        if line is None:
            continue
        try:
            digests = reread(os.path.join(stage.path, file.output.name), budget)
        except XrankError:
            stage.discard(file.output.name)
            continue
        if digest_text(digests.digest) == line.digest and digests.nbytes == file.output.nbytes:
            resumed[index] = digests
        else:
            stage.discard(file.output.name)
    return resumed


def _digests_of(plan: Plan, done: FinishedFile) -> FileDigests:
    output = plan.files[done.index].output
    names = [tensor.name for tensor in output.tensors]
    tensors = dict(zip(names, done.tensor_digests, strict=True))
    return FileDigests(output.name, output.nbytes, done.digest, tensors)


def _verify_stage(stage: Stage, digests: dict[int, FileDigests], budget: Budget) -> None:
    """Read every file of the stage back, from the disk where the system lets go of its cache."""
    for expected in digests.values():
        path = os.path.join(stage.path, expected.name)
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = reread(path, budget)
        if found != expected:
            stage.discard(expected.name)
            raise CorruptError(
                f"{path} does not read back as it was written",
                file=path,
                got=digest_text(found.digest),
                want=digest_text(expected.digest),
                next_step="check the disk; then run the same command, which writes this file again",
            )


def _write_small_files(
    gather: Gather, stage: Stage, digests: dict[int, FileDigests], notes: tuple[tuple[str, str], ...]
) -> list[dict[str, Any]]:
    """Write all but the weights, the manifest last; return the weights' files as the report lists them."""
    plan = gather.plan
    weights = [ManifestFile(d.name, d.nbytes, digest_text(d.digest)) for _, d in sorted(digests.items())]
    files = list(weights)
    index = index_text(file.output for file in plan.files)
    if index is not None:
        line = stage.write_file(INDEX_NAME, index.encode())
        files.append(_plain(line))
    lines = [stage.copy_file(companion.name, companion.path) for companion in gather.companions]
    if gather.config_text is not None:
        lines.append(stage.write_file("config.json", gather.config_text.encode()))
    source = gather.source
    text = manifest_text(
        ManifestSource(source.format, source.world_size, source.run_id, source.step),
        files,
        {
            tensor.output.name: _manifest_tensor(plan, tensor, digests[index])
            for index, file in enumerate(plan.files)
            for tensor in file.tensors
        },
        companions=[_plain(line) for line in lines],
        tied={name: target for target, names in gather.selection.tied.items() for name in names},
        excluded=gather.selection.excluded,
        cast=gather.selection.cast,
        notes=[list(note) for note in (*gather.notes, *notes)],
    )
    stage.write_file(MANIFEST_NAME, text.encode())
    return [{"name": file.name, "nbytes": file.nbytes, "digest": file.digest} for file in weights]


def _plain(line: JournalLine) -> ManifestFile:
    """Return a small file as the manifest lists it, with the digest of its plain bytes."""
    return ManifestFile(line.file, line.nbytes, f"xxh128:{line.digest}")


def _manifest_tensor(plan: Plan, tensor: TensorPlan, digests: FileDigests) -> ManifestTensor:
    records, files = plan.source.records, plan.source.files
    seen: dict[int, TensorSource] = {}
    for rank, record in zip(tensor.copies.rank.tolist(), tensor.copies.record.tolist(), strict=True):
        name = os.path.basename(files[int(records.file[record])].path)
        seen.setdefault(record, TensorSource(name, rank, int(records.offset[record]), int(records.nbytes[record])))
    output = tensor.output
    return ManifestTensor(
        output.dtype,
        output.shape,
        digests.name,
        digest_text(digests.tensors[output.name]),
        tuple(seen.values()),
        len(tensor.replicas),
    )
