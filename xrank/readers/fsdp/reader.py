"""The readers of checkpoints with one ``torch.save`` of a state dict per rank: verl's, SkyRL's, accelerate's.

torch records the place of each part: DTensors record mesh and placements, FSDP1's ShardedTensors their boxes. Plain
tensors among them are replicas (buffers, parameters that FSDP ignores), and are compared as such.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from xrank.errors import ContradictionError
from xrank.formats.regular_file import quote
from xrank.formats.safetensors_header import SafetensorsHeader
from xrank.formats.torch_archive import TorchArchive
from xrank.plan.source import StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.fsdp.file_names import ACCELERATE, VERL, RankFiles, Scheme, list_accelerate, list_verl
from xrank.readers.fsdp.flat_parameters import Index, find_flat_pieces, flat_shards, is_flat
from xrank.readers.fsdp.held_parts import check_kinds, collect_parts, locate_boxed_shards
from xrank.readers.fsdp.rank_files import FsdpRankFile, read_rank_file
from xrank.readers.placement import Placement, place_all
from xrank.readers.records import Records
from xrank.stores import places
from xrank.words import list_text

_STEP = re.compile(r"(?:.*[^a-z])?(?:global_step|checkpoint|step|epoch)[-_]?0*(\d{1,18})")
_MAX_SHOWN = 8


class VerlReader:
    """The reader of verl's and SkyRL's FSDP checkpoints (`xrank.readers.base.Reader`)."""

    name = VERL.format

    def recognise(self, path: str) -> str | None:
        """Return None if the folder contains files named by rank and world size."""
        return VERL.explain_mismatch(path)

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        return _read(VERL, path, list_verl(path), hints)


class AccelerateRanksReader:
    """The reader of accelerate's per-rank files without DCP (`xrank.readers.base.Reader`)."""

    name = ACCELERATE.format

    def recognise(self, path: str) -> str | None:
        """Return None for a folder with files named by rank, or for such a file if its folder has several models."""
        if places.is_file(path) and ACCELERATE.pattern.fullmatch(os.path.basename(path)):
            folder = os.path.dirname(places.absolute(path))
            models = {match[1] for entry in places.list_names(folder) if (match := ACCELERATE.pattern.fullmatch(entry))}
            return None if len(models) > 1 else "one rank's file; its folder is the checkpoint"
        return ACCELERATE.explain_mismatch(path)

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        return _read(ACCELERATE, path, list_accelerate(path), hints)


def _read(scheme: Scheme, path: str, listed: RankFiles, hints: Hints) -> StoredModel:
    files = []
    for rank, file in listed.by_rank.items():
        files.append(read_rank_file(file, rank))
        archive = files[-1].archive
        if isinstance(archive, TorchArchive):
            scheme.check_name(file, archive.name, rank)
    return describe_rank_files(scheme.format, path, listed, files, hints)


def describe_rank_files(
    format_name: str, path: str, listed: RankFiles, files: Sequence[FsdpRankFile], hints: Hints
) -> StoredModel:
    """Return where every tensor lies in the ranks' files.

    Args:
        format_name: the format's name.
        path: the source.
        listed: the files' places.
        files: their content, by rising rank.
        hints: as for `Reader.read`, whose errors are these.
    """
    world_size = _world_size(files, listed)
    records = Records()
    indexes = {file.rank: _add_file(records, file.archive) for file in files}
    check_kinds(files)
    pieces = find_flat_pieces(files, indexes)
    placement = place_all(collect_parts(files, indexes, pieces, world_size, hints), hints, world_size=world_size)
    shards: dict[str, StoredShard] = {}
    for shard in (*placement.shards, *flat_shards(pieces, hints.shapes), *locate_boxed_shards(files, indexes)):
        shards[shard.name] = shard
    ordered = [tensor for file in files for tensor in (*file.dtensors, *file.sharded, *file.plain) if tensor in shards]
    # Last what no file names: the members of flat buffers that only a layout file knows.
    ordered += list(shards)
    return StoredModel(
        format=format_name,
        path=path,
        files=tuple(records.files),
        records=records.table(),
        shards=tuple(shards[tensor] for tensor in dict.fromkeys(ordered)),
        absent=placement.absent,
        world_size=world_size,
        step=_step(listed.folder),
        nbytes=records.nbytes,
        skipped_nbytes=_nbytes_of(listed.skipped),
        notes=_notes(files, records, placement),
        layouts=placement.layouts,
        details=_details(listed, files),
    )


def _add_file(records: Records, archive: TorchArchive | SafetensorsHeader) -> Index:
    """Add a file, and return the function that gives the number of a record by its key: for safetensors, the name."""
    if isinstance(archive, TorchArchive):
        return records.add_archive(archive)
    record_of = records.add_safetensors(archive)
    tensors = {tensor.name: tensor for tensor in archive.tensors}
    return lambda key: record_of(tensors[key])


def _world_size(files: Sequence[FsdpRankFile], listed: RankFiles) -> int:
    """Return the world size, after checking that all files agree on it and that all its ranks are present."""
    recorded = [(file, part.world_size) for file in files for part in file.sharded.values()]
    # A DTensor's mesh may be smaller than the run, so it gives only a lower bound.
    least = [(file, max(part.mesh.ranks) + 1) for file in files for part in file.dtensors.values()]
    expected = listed.world_size or (recorded[0][1] if recorded else max((size for _, size in least), default=0))
    for file, size in (*((f, n) for f, n in recorded if n != expected), *((f, n) for f, n in least if n > expected)):
        raise ContradictionError(
            f"{file.archive.path} belongs to a run of another size",
            rank=file.rank,
            file=file.archive.path,
            got=f"{size} ranks, by its tensors",
            want=f"{expected} ranks",
            next_step="all files must come from one save of one run; copy them again",
        )
    world_size = max(expected, len(files))
    listed.check(world_size)
    return world_size


def _step(folder: str) -> int | None:
    """Return the step in the folder's name or its parent's."""
    folder = places.absolute(folder)
    for name in (os.path.basename(folder), os.path.basename(os.path.dirname(folder))):
        found = _STEP.fullmatch(name)
        if found is not None:
            return int(found[1])
    return None


def _nbytes_of(paths: Sequence[str]) -> int:
    total = 0
    for path in paths:
        # The trainer's own file may be a dangling link, or removed meanwhile.
        with suppress(OSError):
            total += places.nbytes_of(path)
    return total


def _notes(files: Sequence[FsdpRankFile], records: Records, placement: Placement) -> tuple[tuple[str, str], ...]:
    notes = [*placement.notes, *records.notes()]
    others = list(dict.fromkeys(name for file in files for name in file.others))
    if others:
        names = list_text((quote(name)[1:-1] for name in others), _MAX_SHOWN)
        notes.append(("left-out", f"{len(others)} values that are not tensors were left out: {names}"))
    return tuple(notes)


def _details(listed: RankFiles, files: Sequence[FsdpRankFile]) -> dict[str, Any]:
    names = {name for file in files for name in (*file.dtensors, *file.sharded, *file.plain)}
    return {
        "rank files": len(files),
        "meshes": sorted({part.mesh.grid for file in files for part in file.dtensors.values()}),
        "layouts": sorted({part.layout for file in files for part in file.dtensors.values()})[:_MAX_SHOWN],
        "DTensors": len({name for file in files for name in file.dtensors}),
        "ShardedTensors": len({name for file in files for name in file.sharded if not is_flat(name)}),
        "flat parameters": len({name for file in files for name in file.sharded if is_flat(name)}),
        "plain tensors": len({name for file in files for name in file.plain}),
        "LoRA tensors": sum(".lora_" in name for name in names),
        "huggingface": places.is_folder(os.path.join(listed.folder, "huggingface")),
    }
