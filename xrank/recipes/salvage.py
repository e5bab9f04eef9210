"""The whole tensors of a damaged source: damaged bytes, missing tensors, and a base model in their place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
from isal import isal_zlib
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from xrank.engine.buffers import NullTarget, OpenSource
from xrank.engine.executor import Budget, execute
from xrank.engine.faults import checksum_error
from xrank.engine.file_writing import hash_beside
from xrank.engine.planner import Plan, divide_replicas, find_lost_parts, make_plan
from xrank.engine.sources import open_source
from xrank.errors import ContradictionError, IncompleteError, UsageError, XrankError, option
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import LOST, NO_CHECKSUM, StoredModel, StoredShard, merge_models
from xrank.ranks.team import Team
from xrank.readers.base import Faults, Hints
from xrank.readers.hugging_face.folder import HfFolderReader
from xrank.recipes.found_source import BaseModel
from xrank.words import list_text, plural

_CHUNK_NBYTES = 1 << 20


class LostPart(Struct, frozen=True):
    """A part of a tensor that is lost with its file, whose path is relative to the source."""

    rank: int
    file: str


class MissingTensor(Struct, frozen=True):
    """A tensor that is not whole; type and global shape are None if no file that is left records them."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    problem: str
    lost: tuple[LostPart, ...] = ()


def find_missing(model: StoredModel) -> Iterator[MissingTensor]:
    """Yield the tensors of a model that are not whole; `Faults` has the reasons."""
    files = [file.path for file in model.files if file.nbytes == LOST]
    folder = model.path if os.path.isdir(model.path) else os.path.dirname(model.path)
    for shard in model.shards:
        try:
            divide_replicas(shard, model)
        except (IncompleteError, ContradictionError) as error:
            parts = (LostPart(rank, os.path.relpath(file, folder)) for rank, file in find_lost_parts(shard, model))
            yield MissingTensor(shard.name, shard.dtype, shard.shape, str(error.message), tuple(parts))
    for name in model.absent:
        lost = f"; lost: {list_text([os.path.relpath(file, folder) for file in files], 3)}" if files else ""
        yield MissingTensor(name, None, None, f"{name}: its parts could not be placed{lost}")


def lose_damaged(model: StoredModel, faults: Faults, budget: Budget) -> StoredModel:
    """Read all records; return the model without those that are damaged.

    Compares recorded checksums and replicas. Replicas that differ with right checksums are lost, all of them.
    """
    crc32 = model.records.crc32.copy()
    with closing(open_source(model)) as source:
        for record in np.flatnonzero(~np.isin(crc32, (NO_CHECKSUM, LOST))).tolist():
            fault = _check_record(model, source, record)
            if fault is not None:
                faults.add(fault)
                crc32[record] = LOST
    for hashed in model.hashes:
        with faults.losing(hashed.path), hash_beside([hashed], Team()) as finish:
            finish()
    # A hash shows that bytes of a file are wrong, and checksums show which; without them all are lost.
    lost = [number for number, file in enumerate(model.files) if file.path in faults.files]
    crc32[np.isin(model.records.file, lost) & (crc32 == NO_CHECKSUM)] = LOST
    hashes = tuple(one for one in model.hashes if one.path not in faults.files)
    model = replace(model, records=replace(model.records, crc32=crc32), hashes=hashes)
    missing = {one.name for one in find_missing(model)}
    waiting = [[one.name for one in model.shards if one.name not in missing and len(divide_replicas(one, model)[1])]]
    differing: list[str] = []
    while waiting:
        names = waiting.pop()
        fault = _find_fault(model, names, budget)
        if fault is not None and len(names) > 1:
            waiting += [names[: len(names) // 2], names[len(names) // 2 :]]
        elif fault is not None:
            faults.add(fault)
            differing += names
    none = np.zeros(0, dtype=np.int64)
    empty = (replace(one, rank=none, record=none, nests=one.nests.take(none)) for one in model.shards)
    shards = (lost if one.name in differing else one for one, lost in zip(model.shards, empty, strict=True))
    return replace(model, shards=tuple(shards))


def _check_record(model: StoredModel, source: OpenSource, record: int) -> XrankError | None:
    """Return the error of a record that cannot be read, or does not have its checksum."""
    nbytes, crc, want = int(model.records.nbytes[record]), 0, int(model.records.crc32[record])
    buffer = memoryview(bytearray(min(nbytes, _CHUNK_NBYTES)))
    try:
        for start in range(0, nbytes, _CHUNK_NBYTES):
            part = buffer[: min(_CHUNK_NBYTES, nbytes - start)]
            source.read_into(record, start, part)
            crc = isal_zlib.crc32(part, crc)
    except XrankError as error:
        return error
    return None if crc == want else checksum_error(Plan(model, ()), record, crc)


def _find_fault(model: StoredModel, names: Sequence[str], budget: Budget) -> XrankError | None:
    chosen = set(names)
    outputs = [OutputTensor(one.name, one.dtype, one.shape) for one in model.shards if one.name in chosen]
    try:
        plan = make_plan(model, [OutputFile.bare(output) for output in outputs])
        with closing(open_source(model)) as source:
            execute(plan, source, NullTarget(), budget=budget)
    except UsageError:
        raise
    except XrankError as error:
        return error
    return None


def fill_from(model: StoredModel, base: BaseModel, names: Sequence[str]) -> StoredModel:
    """Return a model, under Hugging Face's names, with these tensors of the base model in place of its own."""
    stored = HfFolderReader().read(base.path, Hints())
    stored = stored if base.decode is None else base.decode(stored)
    taken = set(names)
    kept = replace(model, shards=tuple(shard for shard in model.shards if shard.name not in taken))
    whole = merge_models(kept, replace(stored, shards=tuple(s for s in stored.shards if s.name in taken)), "")
    order: dict[str, StoredShard] = {shard.name: shard for shard in whole.shards}
    return replace(
        whole, shards=tuple(order[name] for name in dict.fromkeys((*(s.name for s in model.shards), *order)))
    )


def salvage_text(model: StoredModel, missing: Sequence[MissingTensor], faults: Faults, filled: Sequence[str]) -> str:
    """Return the list of missing tensors that lies beside the whole ones."""
    whole = {shard.name for shard in model.shards} - {one.name for one in missing}
    listed = {
        "schema": 1,
        "format": model.format,
        "step": model.step,
        "num_whole": len(whole),
        "missing": [to_builtins(one) for one in missing],
        "filled": list(filled),
        "faults": [{"type": type(one).__name__, "message": one.message, "rank": one.rank} for one in faults.errors],
    }
    return json.dumps(listed, indent=1) + "\n"


def explain_missing(missing: Sequence[MissingTensor], faults: Faults, path: str) -> IncompleteError:
    """Return the error for missing tensors that nothing fills in."""
    names = list_text([one.name for one in missing], 3)
    return IncompleteError(
        f"{path}: {plural(len(missing), 'tensor')} damaged or missing: {names}",
        tensor=missing[0].name,
        file=faults.errors[0].file if faults.errors else path,
        got=missing[0].problem,
        want="undamaged tensors, or a base model that replaces them",
        next_step=f"restore what xrank inspect lists, or add {option('salvage', True)} to write the undamaged ones",
    )
