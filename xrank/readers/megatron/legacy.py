"""Reads Megatron's checkpoints with one file per model-parallel rank (``--ckpt-format torch``).

A file contains its rank's part of each tensor, under names that count layers within the rank's stage. Names alone
determine how tensors are cut. The result has the names of Megatron-core's own ``torch_dist``: layers and experts
counted over the whole model, gate and up halves end to end. The optimizer is left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from xrank.errors import ContradictionError
from xrank.formats.regular_file import quote
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints
from xrank.readers.checkpoint_folders import nbytes_below
from xrank.readers.megatron.args import ParallelSizes, check_agreement, parallel_sizes
from xrank.readers.megatron.folder import check_iteration, explain_mismatch, resolve_folder, sibling_iterations
from xrank.readers.megatron.grid import FILE, Place, check_grid, grid_text, list_folders, places_of
from xrank.readers.megatron.parts import (
    TensorParts,
    collect_parts,
    find_gating,
    find_own_tensors,
    layouts_of,
    place_parts,
)
from xrank.readers.megatron.stages import Chunk, count_layers, first_layers, has_encoder
from xrank.readers.megatron.states import MegatronRankFile, check_identities, read_rank_file
from xrank.readers.records import Records
from xrank.stores import places

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class MegatronLegacyReader:
    """The reader of Megatron's checkpoints with one file per rank (`xrank.readers.base.Reader`)."""

    name = "megatron-legacy"

    def recognise(self, path: str) -> str | None:
        """Return None for a checkpoint's folder, or a folder whose marker names a checkpoint."""
        return explain_mismatch(path, _holds, f"mp_rank_*/{FILE}")

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of a checkpoint lies; errors as in `Reader.read`."""
        folder = resolve_folder(path, _holds)
        found = [name for name in list_folders(folder) if places.is_present(os.path.join(folder, name, FILE))]
        # Every rank's arguments record the grid.
        first = read_rank_file(os.path.join(folder, found[0], FILE), 0)
        sizes = parallel_sizes(first.args, first.origin)
        cells = places_of(sizes, folder)
        check_grid(folder, found, sizes, cells)
        files = {}
        for place in cells:
            file = read_rank_file(os.path.join(folder, place.folder(sizes), FILE), place.rank(sizes))
            check_agreement(first.args, first.origin.path, file.args, file.origin.path)
            _check_moment(first, file)
            files[place] = file
        step = check_iteration(folder, first.iteration, first.origin.path)
        counts = _layers(files, sizes)
        starts = first_layers(counts, sizes, first.args, first.origin.path)
        # Before experts are numbered: their numbers in the whole model follow from equal counts on all ranks.
        _check_alike(files)
        records = Records()
        tensors = collect_parts(files, sizes, starts, records)
        layouts = layouts_of(tensors, sizes, hints, first.args, find_gating(tensors, first))
        # Needs the layouts: tensors that ranks share do not tell their files apart.
        check_identities(files, sizes, find_own_tensors(tensors, layouts))
        shards = tuple(place_parts(tensors[name], layouts[name], sizes, hints) for name in tensors)
        aliases = _find_ties(tensors, first.args)
        return StoredModel(
            format=self.name,
            path=path,
            files=tuple(records.files),
            records=records.table(),
            shards=shards,
            aliases=aliases,
            world_size=sizes.world or len(cells),
            step=step,
            args=first.args,
            nbytes=records.nbytes,
            skipped_nbytes=max(nbytes_below(folder) - records.nbytes, 0),
            notes=_notes(files, records),
            details=_details(folder, found, sizes, cells, counts, starts, aliases),
        )


def _holds(path: str) -> bool:
    return places.is_folder(path) and any(
        places.is_present(os.path.join(path, name, FILE)) for name in list_folders(path)
    )  # fmt: skip


def _check_moment(first: MegatronRankFile, file: MegatronRankFile) -> None:
    if repr(first.iteration) != repr(file.iteration):
        raise ContradictionError(
            file.origin.locate(f"belongs to another iteration than {first.origin.path}"),
            rank=file.origin.rank,
            file=file.origin.path,
            got=f"iteration {quote(str(file.iteration))}",
            want=f"iteration {quote(str(first.iteration))}",
            next_step="all files must come from one save of one run; copy them again",
        )


def _layers(files: Mapping[Place, MegatronRankFile], sizes: ParallelSizes) -> dict[Chunk, int]:
    """Return the number of layers in each chunk, after checking that all its ranks agree."""
    counts: dict[Chunk, int] = {}
    for place, file in files.items():
        for number, chunk in enumerate(file.chunks):
            if sizes.pipeline * sizes.virtual > 1 and has_encoder(chunk):
                raise file.origin.usage(
                    "contains layers of an encoder, which each stage counts from 0: the number of layers in earlier "
                    "stages is unknown",
                    got=str(sizes),
                    want="layers of a decoder, or one stage",
                    next_step="save with --ckpt-format torch_dist",
                )
            count = count_layers(chunk, file.origin.path, place.rank(sizes))
            known = counts.setdefault((number, place.pipeline), count)
            if known != count:
                raise ContradictionError(
                    file.origin.locate("contains another number of layers than other ranks of its stage"),
                    rank=file.origin.rank,
                    file=file.origin.path,
                    got=f"{count} layers",
                    want=f"{known}, as on the first rank of stage {place.pipeline}",
                    next_step="all files must come from one save of one run; copy them again",
                )
    return counts


def _check_alike(files: Mapping[Place, MegatronRankFile]) -> None:
    """Check that the ranks of a stage hold tensors of the same names; each rank counts its experts from 0."""
    first: dict[int, tuple[MegatronRankFile, list[set[str]]]] = {}
    for place, file in files.items():
        names = [set(chunk) for chunk in file.chunks]
        other, known = first.setdefault(place.pipeline, (file, names))
        for ours, theirs in zip(names, known, strict=True):
            if ours != theirs:
                name = min(ours ^ theirs)
                holder, lacking = (file, other) if name in ours else (other, file)
                raise ContradictionError(
                    f"{quote(name)[1:-1]}: {holder.origin.path} contains it, but {lacking.origin.path} of its stage "
                    "does not",
                    tensor=name,
                    rank=lacking.origin.rank,
                    file=lacking.origin.path,
                    got="no part",
                    want="a part, or a copy",
                    next_step="all files must come from one save of one run; copy them again",
                )


def _find_ties(tensors: Mapping[str, TensorParts], args: Mapping[str, Any]) -> dict[str, str]:
    """Return the last stage's copy of the embedding if the two are one tensor (models/gpt/gpt_model.py)."""
    if args.get("untie_embeddings_and_output_weights") is not False:
        return {}
    pairs = {name: name.removesuffix(_HEAD) + _EMBEDDING for name in tensors if name.endswith(_HEAD)}
    return {head: embedding for head, embedding in pairs.items() if embedding in tensors}


def _notes(files: Mapping[Place, MegatronRankFile], records: Records) -> tuple[tuple[str, str], ...]:
    notes = []
    num_extra = sum(file.num_extra for file in files.values())
    if num_extra:
        notes.append(("extra-state", f"{num_extra:,} _extra_state entries (Transformer Engine's own) were left out"))
    return (*notes, *records.notes())


def _details(
    folder: str,
    found: Sequence[str],
    sizes: ParallelSizes,
    cells: Sequence[Place],
    counts: Mapping[Chunk, int],
    starts: Mapping[Chunk, int],
    aliases: Mapping[str, str],
) -> dict[str, Any]:
    own = os.path.basename(places.real(folder))
    siblings = sibling_iterations(os.path.dirname(places.real(folder)))
    stages = {}
    for (chunk, stage), count in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
        name = f"PP {stage}" + (f", chunk {chunk}" if sizes.virtual > 1 else "")
        start = starts[chunk, stage]
        stages[name] = f"layers {start}-{start + count - 1}" if count else "no layers"
    return {
        "iteration": own,
        "iterations": siblings if own in siblings else [own],
        "parallel": str(sizes),
        "grid": grid_text(found, sizes, cells),
        "stages": stages,
        "tied": dict(aliases),
    }
