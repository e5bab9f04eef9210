"""A model described only by a layout file, in the form in which a reader describes a checkpoint."""

from __future__ import annotations

import os

import numpy as np

from xrank import dtypes
from xrank.conversion.report import check_survey
from xrank.errors import LayoutError, UsageError, option
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.nest_table import IntArray, int_array, rows_of
from xrank.plan.holdings import Holdings, Survey, compute_shapes, survey
from xrank.plan.source import RecordTable, SourceFile, StoredModel, StoredShard

_SOME_CHECKSUM = 0
"""Any checksum: saved states have one per tensor, and verifying it reads bytes (mostly padding) that no copy needs."""


def read_layouts_on(file: str, mesh: str | None) -> LayoutMap:
    """Read a layout file, and replace its mesh if another one is given.

    Raises:
        LayoutError: the mesh is invalid, or does not fit the layouts.
        UsageError: the file cannot be read.
    """
    try:
        return LayoutMap.read(file, mesh=None if mesh is None else DeviceMesh.parse_grid(mesh))
    except LayoutError as error:
        if mesh is not None:
            error.advise(f"give {option('mesh')} the axes that {file} names, or correct the file")
        raise


def survey_layouts(layouts: LayoutMap, file: str, dtype: str) -> tuple[Survey, tuple[tuple[str, str], ...]]:
    """Survey all tensors whose sizes a layout file defines, and return notes on the others.

    Args:
        layouts: content of the file.
        file: path of the file.
        dtype: safetensors name of the element type of all tensors.

    Raises:
        LayoutError: no size or no mesh is defined, a size does not divide as its layout requires, the ranks do not
            cover a tensor exactly once, or they have addends of it.
    """
    shapes, untold = compute_shapes(layouts, is_strict=True)
    if not shapes:
        raise LayoutError(
            f"{file} defines the size of no tensor",
            file=file,
            got=next(iter(untold.values()), "no rule"),
            want="numbers in the layouts or in [sizes]",
            next_step=f"write numbers in place of the names in {file}, or define them in its [sizes]",
        )
    found = survey(layouts, shapes, dtypes=dict.fromkeys(shapes, dtype))
    _, problem = check_survey(found)
    if problem is not None:
        raise problem
    for one in found.tensors:
        if one.sums:
            raise LayoutError(
                f"{one.name}: its ranks have addends of a sum over {', '.join(one.sums)}, which cannot be copied",
                tensor=one.name,
                got=one.text,
                want="parts or replicas",
                next_step="give the layout of the reduced tensor",
            )
    notes = (("no-shape", f"the rule {rule!r} is left out: {reason}") for rule, reason in untold.items())
    return found, tuple(notes)


def build_layout_model(found: Survey, path: str) -> StoredModel:
    """Build the stored model of a survey: one file per rank, and one record per tensor on a rank.

    Args:
        found: a survey without problems, with all element types.
        path: name of the model in messages.

    Raises:
        UsageError: the survey has no ranks, or they are not numbered from 0.
    """
    held = [one for one in found.tensors if one.parts is not None and len(one.parts.ranks)]
    meshes = [one.mesh for one in held if one.mesh is not None]
    ranks = sorted({rank for mesh in dict.fromkeys(meshes) for rank in mesh.ranks})
    if not ranks or ranks != list(range(len(ranks))):
        raise UsageError(
            f"the ranks of {path} are not numbered from 0 without a gap",
            file=path,
            got=f"{len(ranks)} ranks, up to {ranks[-1]}" if ranks else "no rank",
            want="ranks 0, 1, 2, ...",
            next_step=f'leave "ranks" out of [mesh], or give {option("mesh")}',
        )
    used = np.zeros(len(ranks), np.int64)
    file, offset, nbytes, shards, count = [], [], [], [], 0
    for one in held:
        shard, sizes = _shard(one, count)
        holders = one.parts.ranks if one.parts is not None else shard.rank
        file.append(holders)
        # In each rank's file, records follow one another in the order of the tensors.
        offset.append(used[holders])
        nbytes.append(sizes)
        used[holders] += sizes
        shards.append(shard)
        count += len(holders)
    table = [np.concatenate(column) for column in (file, offset, nbytes)]
    total = [int(n) for n in used]
    return StoredModel(
        format="layout file",
        path=path,
        files=tuple(SourceFile(os.fspath(f"rank {r}"), n, inode=r, mtime_ns=0) for r, n in enumerate(total)),
        records=RecordTable(table[0], table[1], table[2], np.full(count, _SOME_CHECKSUM, np.int64)),
        shards=tuple(shards),
        world_size=len(ranks),
        nbytes=sum(total),
    )


def _shard(one: Holdings, first: int) -> tuple[StoredShard, IntArray]:
    """Return a tensor's shard, with records numbered from `first`, and the bytes of each record."""
    parts, dtype = one.parts, one.dtype
    assert parts is not None and dtype is not None
    rows, holder = rows_of(parts.owner, parts.part, len(parts.local_sizes))
    shard = StoredShard(
        one.name, dtype, one.shape, parts.ranks[holder], int_array(first + holder), parts.nests.take(rows)
    )
    return shard, parts.local_sizes[parts.part] * dtypes.dtype(dtype).nbytes
