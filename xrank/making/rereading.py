"""Reads existing files for their digests; resume, a reread stage and ``xrank verify`` share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xrank.errors import CorruptError
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
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard

__all__ = ["FileDigests", "digests_of", "plan_of_headers", "read_through", "reread"]


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
