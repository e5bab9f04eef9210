"""Reads existing files for their digests; resume, a reread stage and ``xrank verify`` share it."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

from xrank.errors import CorruptError, XrankError
from xrank.formats.regular_file import open_regular
from xrank.formats.safetensors_header import SafetensorsHeader
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, canonical
from xrank.plan.budget import Budget
from xrank.plan.buffers import NullTarget
from xrank.plan.decoding import open_source
from xrank.plan.executor import Outcome, execute
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.planner import Plan, make_plan
from xrank.plan.source import NO_CHECKSUM, RecordedHash, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.stores.url import is_url
from xrank.system import count_cores
from xrank.teams.team import Team
from xrank.writers.output_stage import OutputStage

_CHUNK_NBYTES, _REQUEST_NBYTES = 1 << 20, 8 << 20
"""Bytes that are hashed at once, of a file and of an object in a store."""
_LOOK_SECONDS = 0.2
"""Time between two looks for failed ranks."""


@dataclass(frozen=True, slots=True)
class FileDigests:
    """Digests of a file on disk."""

    name: str
    nbytes: int
    digest: bytes
    tensors: dict[str, bytes]
    """Digests by name of the tensor."""


def read_through(plan: Plan, budget: Budget, progress: Callable[[int, int], None] | None = None) -> Outcome:
    """Execute a plan and discard its bytes: for their digests, checksums and comparisons alone.

    Args:
        plan: the records to read, and the files that they would form.
        budget: threads and buffers.
        progress: called with (bytes assembled so far, bytes in all).

    Raises:
        CorruptError, ContradictionError: as `execute`; or a file changed during the reading.
    """
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, plan.nbytes)

    source = open_source(plan.source)
    try:
        outcome = execute(plan, source, NullTarget(), budget=budget, progress=count)
        # After the last byte, so that a change in the course of the reading is seen.
        source.check_unchanged()
    finally:
        source.close()
    return outcome


def reread(path: str, output: OutputFile, budget: Budget) -> FileDigests:
    """Return the digests of the file at a path, read with the layout of `output`, whatever its format.

    Raises:
        CorruptError: the file cannot be read, or has another size.
    """
    with open_regular(path) as file:
        status = file.status
        if status.st_size != output.nbytes:
            raise CorruptError(
                f"{path} has another size than it was given",
                file=path,
                got=f"{status.st_size:,} bytes",
                next_step="let nothing write to the file meanwhile, and copy it again from where it was written",
            )
        header = file.read(0, len(output.header))
        fragments = tuple((at, file.read(at, len(data))) for at, data in output.fragments)
        # For the places alone, which do not depend on the checksums.
        ending = output.ending([0] * len(output.tensors)) if output.ending is not None else ()
        found = tuple((at, file.read(at, len(data))) for at, data in ending)
    rows = [(0, tensor.offset, tensor.nbytes, NO_CHECKSUM) for tensor in output.tensors]
    # As bytes, and under numbers: every tensor is one record, whichever part of a tensor it is.
    tensors = tuple(OutputTensor(str(i), "U8", (row[2],), row[1]) for i, row in enumerate(rows))
    model = StoredModel(
        format="file",
        path=path,
        files=(SourceFile.from_status(path, status),),
        records=RecordTable(*(int_array(row[i] for row in rows) for i in range(4))),
        shards=tuple(_as_bytes(tensor, record) for record, tensor in enumerate(tensors)),
    )
    again = OutputFile(
        output.name, header, tensors, output.nbytes, fragments, None if output.ending is None else lambda crc32: found
    )
    done = read_through(make_plan(model, [again]), budget).files[0]
    names = [tensor.name for tensor in output.tensors]
    return FileDigests(output.name, output.nbytes, done.digest, dict(zip(names, done.tensor_digests, strict=True)))


def _as_bytes(tensor: OutputTensor, record: int) -> StoredShard:
    nests = [canonical(Nest(0, 0, ((tensor.nbytes, 1, 1),)))] if tensor.nbytes else []
    rank, records = int_array([0] * len(nests)), int_array([record] * len(nests))
    return StoredShard(tensor.name, "U8", tensor.shape, rank, records, NestTable.from_nests(nests))


def plan_of_headers(headers: Sequence[SafetensorsHeader]) -> Plan:
    """Return a plan that reads files as they are, from their headers; each is one file of the plan."""
    from xrank.readers.hugging_face.folder import describe_files, output_file_of

    model = describe_files(os.path.dirname(headers[0].path) if headers else "", headers, as_bytes=True)
    return make_plan(model, [output_file_of(header) for header in headers])


def digests_of(plan: Plan, outcome: Outcome) -> list[FileDigests]:
    """Return the digests of all files of an executed plan."""
    return [
        FileDigests(
            file.output.name,
            file.output.nbytes,
            outcome.files[index].digest,
            dict(zip([t.name for t in file.output.tensors], outcome.files[index].tensor_digests, strict=True)),
        )
        for index, file in enumerate(plan.files)
    ]


@contextmanager
def hash_beside(recorded: Sequence[RecordedHash], team: Team) -> Iterator[Callable[[], None]]:
    """Compare files with the hashes that their source records, while the caller reads its tensors.

    Args:
        recorded: all files and their hashes.
        team: the ranks that share the files.

    Yields:
        A function that all ranks call; it waits until all files are compared, and raises CorruptError for the first
        that differs.
    """
    stop = threading.Event()
    # Half of the cores: the others copy meanwhile.
    with ThreadPoolExecutor(max(1, count_cores() // 2), "xrank-hash") as pool:
        started = [pool.submit(_compare, one, stop) for one in recorded[team.position :: team.size]]

        def finish() -> None:
            for one in started:
                while not one.done():
                    wait([one], _LOOK_SECONDS)
                    team.check_failures()
                one.result()
            if recorded:
                team.meet("the hashes of the source's files")

        try:
            yield finish
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def keep_if_hashed(stage: OutputStage, finish_hashes: Callable[[], None]) -> None:
    """Wait for the hashes of the source's files; if one differs, no later run may keep a file that was made of them."""
    try:
        finish_hashes()
    except XrankError:
        for name in list(stage.finished):
            stage.discard(name)
        raise


def _compare(one: RecordedHash, stop: threading.Event) -> None:
    digest = hash_stretch(one.path, 0, None, one.hash_name, stop=stop)
    if digest != one.digest:
        raise CorruptError(
            f"{one.path}: its bytes do not have the hash that {one.listed_in} records",
            file=one.path,
            got=f"{one.hash_name} {digest.hex()}",
            want=f"{one.hash_name} {one.digest.hex()}",
            next_step="copy the file again from where it was written, or take another checkpoint",
        )


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

    Raises:
        CancelledError: `stop` was set.
        CorruptError: it is not a regular file, or too short.
        XrankError: the bytes cannot be read.
    """
    state, step = hashlib.new(hash_name, usedforsecurity=False), _REQUEST_NBYTES if is_url(path) else _CHUNK_NBYTES
    with open_regular(path, follow_links=follow_links) as file:
        end = file.nbytes if end is None else end
        for offset in range(start, end, step):
            if stop is not None and stop.is_set():
                raise CancelledError
            state.update(file.read(offset, min(step, end - offset)))
    return state.digest()
