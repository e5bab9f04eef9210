"""Reads safetensors files that exist, for their digests: what resume, ``--verify`` and ``xrank verify`` share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from xrank.formats.safetensors_header import SafetensorsHeader, read_header
from xrank.plan.buffers import FileSource, NullTarget
from xrank.plan.executor import Budget, Outcome, execute
from xrank.plan.planner import Plan, make_plan
from xrank.readers.hf_folder import describe_files, output_file_of

__all__ = ["FileDigests", "read_through", "reread", "reread_headers"]


@dataclass(frozen=True, slots=True)
class FileDigests:
    """What a file on disk holds."""

    name: str
    nbytes: int
    digest: bytes
    tensors: dict[str, bytes]
    """Tensor -> digest."""


def read_through(plan: Plan, budget: Budget) -> Outcome:
    """Carry out a plan and let go of its bytes: for their digests, checksums and comparisons alone.

    Raises:
        CorruptError, ContradictionError: as `execute`; or a file changed while it was read.
    """
    source = FileSource(plan.source)
    try:
        outcome = execute(plan, source, NullTarget(), budget=budget)
        source.check_unchanged()
    finally:
        source.close()
    return outcome


def reread(path: str, budget: Budget) -> FileDigests:
    """Return the digests of the file at that path.

    Raises:
        CorruptError: it is not a safetensors file.
    """
    return reread_headers([read_header(path)], budget)[0]


def reread_headers(headers: Sequence[SafetensorsHeader], budget: Budget) -> list[FileDigests]:
    """Return the digests of the files whose headers were read, in their order."""
    model = describe_files(os.path.dirname(headers[0].path) if headers else "", headers, as_bytes=True)
    files = [output_file_of(header) for header in headers]
    plan = make_plan(model, files)
    outcome = read_through(plan, budget)
    digests = []
    for index, file in enumerate(files):
        done = outcome.files[index]
        names = [tensor.name for tensor in file.tensors]
        digests.append(
            FileDigests(file.name, file.nbytes, done.digest, dict(zip(names, done.tensor_digests, strict=True)))
        )
    return digests
