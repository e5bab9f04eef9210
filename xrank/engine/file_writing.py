"""Write a plan's files into a stage, alone or with a team, and read files again for their digests.

Files that an interrupted run finished are kept if they read back as recorded.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from time import monotonic

from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_128, xxh3_128_digest

from xrank.engine.buffers import FileTarget, NullTarget
from xrank.engine.executor import Budget, Outcome, execute
from xrank.engine.faults import COPY
from xrank.engine.planner import Plan, make_plan
from xrank.engine.rounds import Outputs, Work, make_files
from xrank.engine.sources import open_source
from xrank.engine.windows import FinishedFile, digest_text, make_finished_file
from xrank.errors import AGAIN, CorruptError, XrankError
from xrank.formats.deltas import state_digest
from xrank.layout.nest_table import int_array
from xrank.layout.output_files import OutputFile, OutputTensor, PlacedBytes
from xrank.layout.stored_model import NO_CHECKSUM, RecordedHash, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.ranks.team import Team
from xrank.storage.commit import Stage
from xrank.storage.disk import explain_errors
from xrank.storage.folder_stage import FolderStage
from xrank.storage.regular_file import open_regular
from xrank.storage.url import is_url
from xrank.system import count_cores
from xrank.words import plural, size_text

_CHUNK_NBYTES, _REQUEST_NBYTES = 1 << 20, 8 << 20
"""Bytes that are hashed at once, of a file and of an object in a store."""
_LOOK_SECONDS = 0.2
"""Time between two looks for failed ranks."""


class FileDigests(Struct, frozen=True):
    """Digests of a file on disk."""

    name: str
    nbytes: int
    digest: bytes
    tensors: dict[str, bytes]
    """Digests by name of the tensor."""


def read_through(plan: Plan, budget: Budget) -> Outcome:
    """Execute a plan and discard its bytes."""
    with closing(open_source(plan.source)) as source:
        outcome = execute(plan, source, NullTarget(), budget=budget)
        # After the last byte, so that a change in the course of the reading is seen.
        source.check_unchanged()
    return outcome


def reread(path: str, output: OutputFile, budget: Budget) -> FileDigests:
    """Return the digests of a file, read with the layout of `output`; CorruptError if it has another size."""
    with open_regular(path) as file:
        status = file.status
        if status.st_size != output.nbytes:
            raise CorruptError(
                f"{path} does not have its expected size",
                file=path,
                got=f"{status.st_size:,} bytes",
                next_step="do not write to the file meanwhile, and copy it again from where it was written",
            )
        header = file.read(0, len(output.header))
        fragments = tuple((at, file.read(at, len(data))) for at, data in output.fragments)
        # For the places alone, which do not depend on the checksums.
        ending = output.ending([0] * len(output.tensors)) if output.ending is not None else ()
        found = tuple((at, file.read(at, len(data))) for at, data in ending)
    rows = [(0, tensor.offset, tensor.nbytes, NO_CHECKSUM) for tensor in output.tensors]
    numbers, offsets, sizes, crc32 = (int_array(row[i] for row in rows) for i in range(4))
    records = RecordTable(numbers, offsets, sizes, crc32)
    # As bytes, and under numbers: every tensor is one record, whichever part of a tensor it is.
    tensors, shards = [], []
    for record, (_, offset, nbytes, _) in enumerate(rows):
        tensors.append(OutputTensor(str(record), "U8", (nbytes,), offset))
        shards.append(StoredShard.from_record(str(record), "U8", (nbytes,), record))
    files = (SourceFile.from_status(path, status),)
    model = StoredModel(format="file", path=path, files=files, records=records, shards=tuple(shards))
    known_ending = None if output.ending is None else lambda crc32: found
    again = OutputFile(output.name, header, tuple(tensors), output.nbytes, fragments, known_ending)
    return digests_of(output, read_through(make_plan(model, [again]), budget).files[0])


def digests_of(output: OutputFile, done: FinishedFile) -> FileDigests:
    """Return a finished file's digests by name."""
    names = [tensor.name for tensor in output.tensors]
    return FileDigests(output.name, output.nbytes, done.digest, dict(zip(names, done.tensor_digests, strict=True)))


@contextmanager
def hash_beside(recorded: Sequence[RecordedHash], team: Team) -> Iterator[Callable[..., None]]:
    """Compare files with the hashes that their source records, shared by a team, while the caller reads its tensors.

    Yields a function that all ranks call: it waits for all files, and raises CorruptError for the first that differs.
    A stage that it gets then loses its files: no later run may keep what was made of wrong bytes.
    """
    stop = threading.Event()
    # Half of the cores: the others copy meanwhile.
    with ThreadPoolExecutor(max(1, count_cores() // 2), "xrank-hash") as pool:
        started = [pool.submit(_compare, one, stop) for one in recorded[team.position :: team.size]]

        def finish(stage: Stage | None = None) -> None:
            try:
                for one in started:
                    while not one.done():
                        wait([one], _LOOK_SECONDS)
                        team.check_failures()
                    one.result()
                if recorded:
                    team.meet("the hashes of the source's files")
            except XrankError:
                if stage is not None:
                    for name in list(stage.finished):
                        stage.discard(name)
                raise

        try:
            yield finish
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _compare(one: RecordedHash, stop: threading.Event) -> None:
    if one.tensors:
        kinds = {}
        for name, dtype, shape, path, start, nbytes in one.tensors:
            own = xxh3_128_digest(b"")
            if nbytes:
                own = hash_stretch(path, start, start + nbytes, one.hash_name, stop=stop)
            kinds[name] = (dtype, shape, own.hex())
        digest = bytes.fromhex(state_digest(kinds))
    else:
        digest = hash_stretch(one.path, 0, None, one.hash_name, stop=stop)
    if digest != one.digest:
        what = (
            f"{one.path}: its {'tensors' if one.tensors else 'bytes'} do not have the hash that {one.listed_in} records"
        )
        got, want = (f"{one.hash_name} {each.hex()}" for each in (digest, one.digest))
        next_step = f"give the model that {one.listed_in} was made of, or copy its files again" if one.tensors else COPY
        raise CorruptError(what, file=one.path, got=got, want=want, next_step=next_step)


def hash_stretch(
    path: str,
    start: int,
    end: int | None,
    hash_name: str,
    *,
    stop: threading.Event | None = None,
    follow_links: bool = True,
) -> bytes:
    """Return the hash of bytes [start, end) of a regular file or an object in a store; None: up to its end.

    Raises CancelledError if `stop` is set meanwhile, XrankError if the bytes cannot be read.
    """
    import hashlib  # few gathers need it

    state = xxh3_128() if hash_name == "xxh3_128" else hashlib.new(hash_name, usedforsecurity=False)
    step = _REQUEST_NBYTES if is_url(path) else _CHUNK_NBYTES
    with open_regular(path, follow_links=follow_links) as file:
        end = file.nbytes if end is None else end
        for offset in range(start, end, step):
            if stop is not None and stop.is_set():
                raise CancelledError
            state.update(file.read(offset, min(step, end - offset)))
    return state.digest()


_logger = logging.getLogger(__name__)


class WrittenFiles(Struct, frozen=True):
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
        found = ((name, *one) for name, ranks in self.outcome.differences.items() for one in ranks.items())
        texts = (f"{name}: rank {rank} differs in {count:,} elements" for name, rank, count in sorted(found))
        return tuple(("replicas-differ", f"{text}; the lowest rank's were used") for text in texts)


def write_files(
    work: Work, stage: Stage, progress: Callable[[int, int], None], team: Team, *, verify: bool = False
) -> WrittenFiles:
    """Write every file of a plan that the stage does not yet hold, with a team of which this rank is the first.

    `progress` is called with (bytes written so far, bytes in all); `verify` reads all files back after writing.

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

    def count(done: int) -> None:
        progress(resumed_nbytes + done, total_nbytes)

    if team.size == 1:
        writing = _Writing(plan, stage)
        try:
            outcome = make_files(team, work, unfinished, writing, what="the files", progress=count)
            # After the last read: a source that changed in between has given old bytes and new ones.
            work.source.check_unchanged()
        finally:
            writing.close()
    else:
        from xrank.engine.shared_writing import write_together  # one process does not need this module

        outcome = write_together(team, work, stage, unfinished, count)
    digests = {**resumed, **{i: digests_of(plan.files[i].output, done) for i, done in outcome.files.items()}}
    if verify and isinstance(stage, FolderStage):  # a store has confirmed each part by its checksum
        _verify_stage(plan, stage, digests, work.budget)
    # A run compares all replicas of a live model, whichever files it kept. A record may be compared part by part.
    compared = {
        (tensor.output.name, record)
        for index in (range(len(plan.files)) if is_live else unfinished)
        for tensor in plan.files[index].tensors
        for replicas in tensor.compared
        for record in replicas.record.tolist()
    }
    return WrittenFiles(digests, resumed_nbytes, outcome, len(compared))


class _Writing(Outputs):
    """The files of a stage that one process writes."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._files = stage.open_files(FileTarget({}))
        self.target = self._files.target
        self._plan, self._stage = plan, stage
        self._begun: dict[int, float] = {}

    def begin(self, index: int) -> None:
        output = self._plan.files[index].output
        self._begun[index] = monotonic()
        self._files.begin(index, output.name, output.nbytes, output.late_places)

    def finish(self, finished: FinishedFile, ending: Sequence[PlacedBytes] = ()) -> None:
        output, index = self._plan.files[finished.index].output, finished.index
        self._files.finish(index, output.name, output.nbytes, digest_text(finished.digest), finished.tensor_digests)
        # A state for DeepSpeed has thousands of files, in folders.
        level = logging.DEBUG if "/" in output.name else logging.INFO
        _logger.log(level, "finished %s, %s bytes", output.name, f"{output.nbytes:,}")
        seconds = max(monotonic() - self._begun.pop(index, monotonic()), 1e-9)
        _logger.debug("%s took %.1f s, %s/s", output.name, seconds, size_text(output.nbytes / seconds))

    def explain_errors(self) -> AbstractContextManager[None]:
        return explain_errors(self._stage.path)

    def close(self) -> None:
        self._files.close()


def _find_resumed_files(plan: Plan, stage: Stage, budget: Budget, *, signs: bool) -> dict[int, FileDigests]:
    """Return the files that an interrupted run finished and that did not change since; discard the others."""
    resumed = {}
    for index, file in enumerate(plan.files):
        output = file.output
        line = stage.finished.get(output.name)
        if line is None:
            continue
        found = None
        recalled = stage.recall(output.name)
        if recalled is None:
            with suppress(XrankError):
                read = reread(os.path.join(stage.path, output.name), output, budget)
                found = read if digest_text(read.digest) == line.digest else None
        elif not signs:  # otherwise its SHA-256 is not known, and it cannot be read before the commit
            digest, tensors = recalled
            is_alike = (line.nbytes, len(tensors)) == (output.nbytes, len(output.tensors))
            is_alike = is_alike and all(len(one) == len(digest) for one in tensors)
            if is_alike and output.ending is None:  # the digest of an archive also covers CRCs that no record has
                is_alike = make_finished_file(output, 0, tensors, ()).digest == digest
            if is_alike:
                found = digests_of(output, FinishedFile(index, digest, tuple(tensors)))
        if found is None:
            stage.discard(output.name)
        else:
            resumed[index] = found
    return resumed


def _keep_unchanged(work: Work, stage: Stage, resumed: dict[int, FileDigests], team: Team) -> dict[int, FileDigests]:
    """Return the files that this run would write identically; discard the others."""
    if team.size > 1:
        from xrank.engine.shared_writing import read_together

        now = read_together(team, work, sorted(resumed))
    else:
        # Not hashed: `write_files` may make them again.
        now = make_files(team, replace(work, file_hashes=None), sorted(resumed), Outputs(), what="what was kept").files
    for index, kept in list(resumed.items()):
        if digests_of(work.plan.files[index].output, now[index]) != kept:
            stage.discard(kept.name)
            del resumed[index]
    return resumed


def _verify_stage(plan: Plan, stage: FolderStage, digests: dict[int, FileDigests], budget: Budget) -> None:
    """Read every file of the stage back, from the disk where the system can drop its cache."""
    for index, expected in digests.items():
        path = os.path.join(stage.path, expected.name)
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = reread(path, plan.files[index].output, budget)
        if found != expected:
            stage.discard(expected.name)
            what = f"{path} differs from what was written when it is read back"
            got, want = (digest_text(one.digest) for one in (found, expected))
            next_step = f"check the disk; then {AGAIN}, which writes this file again"
            raise CorruptError(what, file=path, got=got, want=want, next_step=next_step)
