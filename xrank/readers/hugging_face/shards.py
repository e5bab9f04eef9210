"""Reads the output of torch's HuggingFaceStorageWriter: each rank's pieces of tensors in safetensors files."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from math import prod

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from xrank.errors import AGAIN, ContradictionError, IncompleteError, LayoutError, UsageError, option
from xrank.formats.dcp_items import read_saved_offsets
from xrank.formats.safetensors_header import SafetensorsHeader, read_header
from xrank.layout.nest_table import NestTable
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.layout.terms.tensors import Box, box_nests, box_text, boxes_overlap, volume
from xrank.readers.base import Hints
from xrank.readers.records import NO_CHECKSUMS, ONE_SAVE, Records, Subject
from xrank.storage import places
from xrank.storage.regular_file import Origin
from xrank.words import list_text, ranks_text

_NAME = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_MAX_SHOWN = 20


def is_shard_name(name: str) -> bool:
    """Return whether a file of that name contains pieces, not whole tensors."""
    return _NAME.fullmatch(name) is not None


class ShardGrid(Struct, frozen=True):
    """The files that are present."""

    folder: str
    files: Mapping[tuple[int, int], str]
    """(rank, file), both from 1 -> path."""
    num_files: int
    num_ranks: int | None = None
    """Number of ranks that saved, as the user states it; None: it is not known."""

    @property
    def ranks(self) -> list[int]:
        """Ranks with a file, from 1."""
        return sorted({rank for rank, _ in self.files})

    def holes(self) -> list[str]:
        """Return the paths of files that may be missing; a rank without a piece for a file writes none."""
        # A name may claim any rank and number of files, so the list ends at what can be shown.
        absent = (
            os.path.join(self.folder, f"shard-{rank:05d}-model-{number:05d}-of-{self.num_files:05d}.safetensors")
            for rank in range(1, (self.num_ranks or max(self.ranks)) + 1)
            for number in range(1, self.num_files + 1)
            if (rank, number) not in self.files
        )
        return list(islice(absent, _MAX_SHOWN))

    def text(self) -> str:
        """Return a short description of the ranks that wrote files."""
        holes = [os.path.basename(file) for file in self.holes()]
        text = f"files of {ranks_text(self.ranks)} (from 1)"
        return text + (f", without {', '.join(holes[:3])}{' and more' if len(holes) > 3 else ''}" if holes else "")


def shard_grid(folder: str) -> ShardGrid:
    """Return the shards in a folder."""
    worlds: dict[int, dict[tuple[int, int], str]] = {}
    for entry in sorted(places.list_names(folder) if places.is_folder(folder) else []):
        match = _NAME.fullmatch(entry)
        if match is not None:
            rank, number, count = map(int, match.groups())
            if rank < 1 or not 1 <= number <= count:
                got = f"rank {rank}, file {number} of {count}"
                problem = "its name has an impossible rank or file number"
                raise Origin(os.path.join(folder, entry)).contradiction(problem, got, "numbers from 1", ONE_SAVE)
            worlds.setdefault(count, {})[rank, number] = os.path.join(folder, entry)
    if not worlds:
        raise Origin(folder).incomplete("contains no shards", want="shard-*.safetensors", next_step="check the path")
    if len(worlds) > 1:
        file = next(iter(min(worlds.values(), key=len).values()))
        got = "; ".join(f"{len(files)} files of -of-{count:05d}" for count, files in sorted(worlds.items()))
        problem = "belongs to a different save than the other files"
        raise Origin(file).contradiction(problem, got, "files of one save", ONE_SAVE)
    ((count, files),) = worlds.items()
    return ShardGrid(folder, files, count)


class ShardPieces(Struct):
    """Every tensor's pieces, as rows of numbers; a million of them take a few arrays."""

    records: Records = field(default_factory=Records)
    by_name: dict[str, tuple[str, int, array[int]]] = field(default_factory=dict)
    """Name -> element type, number of dims, and for each piece: rank, record, then first index and end in each dim."""

    def add(self, rank: int, header: SafetensorsHeader) -> None:
        """Add the pieces in one file."""
        offsets = read_saved_offsets(header, Origin(header.path))
        record_of = self.records.add_safetensors(header)
        for tensor in header.tensors:
            known = (tensor.dtype, len(tensor.shape), array("q"))
            dtype, ndim, row = self.by_name.setdefault(tensor.name, known)
            if (dtype, ndim) != (tensor.dtype, len(tensor.shape)):
                raise Origin(header.path).contradiction(
                    f"{tensor.name}: rank {rank}'s piece has a different type than earlier pieces",
                    f"{tensor.dtype}, {len(tensor.shape)} dims",
                    f"{dtype}, {ndim} dims",
                    ONE_SAVE,
                    tensor=tensor.name,
                )
            row.extend((rank, record_of(tensor.name)))
            for at, size in zip(offsets[tensor.name], tensor.shape, strict=True):
                row.extend((at, at + size))

    def table(self, name: str) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Return a tensor's rows."""
        _, ndim, rows = self.by_name[name]
        return np.frombuffer(rows, dtype=np.int64).reshape(-1, 2 + 2 * ndim)

    def boxes(self, name: str) -> list[Box]:
        """Return the pieces' index ranges."""
        return [tuple(zip(row[2::2], row[3::2], strict=True)) for row in self.table(name).tolist()]

    def shard(self, name: str, shape: tuple[int, ...]) -> StoredShard:
        """Return a tensor with its pieces."""
        nests = [box_nests(box, shape) for box in self.boxes(name)]
        kept = [i for i, nest in enumerate(nests) if nest]
        table, nests_kept = self.table(name)[kept], NestTable.from_nests([nests[i][0] for i in kept])
        # File names count ranks from 1.
        return StoredShard(name, self.by_name[name][0], shape, table[:, 0] - 1, table[:, 1].copy(), nests_kept)


_SUBFOLDER = "sharded"
"""Subfolder for the shards if the writer also consolidates them (_hf_utils.py: SHARDED_DIR_NAME)."""


class HfShardsReader:
    """The reader of torch's Hugging Face shards (`xrank.readers.base.Reader`)."""

    name = "hf-shards"

    def recognize(self, path: str) -> str | None:
        """Return None if the folder, or its ``sharded``, contains shards."""
        if not places.is_folder(path):
            return "not a folder"
        if _folder(path) is not None:
            return None
        return "no shard-<rank>-model-<file>-of-<files>.safetensors in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every piece lies; errors as in `Reader.read`."""
        grid = shard_grid(_folder(path) or path)
        if (num_ranks := hints.world_size) is not None:
            if max(grid.ranks) > num_ranks:
                file = next(file for (rank, _), file in sorted(grid.files.items()) if rank > num_ranks)
                raise UsageError(
                    f"{os.path.basename(file)} is of a later rank than {option('world_size', num_ranks)} states",
                    rank=num_ranks,
                    file=file,
                    got=grid.text(),
                    want=f"files of ranks 1 to {num_ranks}",
                    next_step=f"correct {option('world_size')}; or {ONE_SAVE}",
                )
            grid = replace(grid, num_ranks=num_ranks)
        pieces = ShardPieces()
        for (rank, _), file in sorted(grid.files.items()):
            pieces.add(rank, read_header(file))
        # The smallest shapes that contain all pieces.
        shapes = {name: tuple(pieces.table(name)[:, 3::2].max(axis=0).tolist()) for name in pieces.by_name}
        for name, shape in shapes.items():
            _check_pieces(name, pieces, shape, grid)
        proof = _prove(path, shapes, pieces, grid, hints)
        return StoredModel(
            format=self.name,
            path=path,
            files=tuple(pieces.records.files),
            records=pieces.records.table(),
            shards=tuple(pieces.shard(name, shape) for name, shape in shapes.items()),
            world_size=grid.num_ranks or max(grid.ranks),
            nbytes=pieces.records.nbytes,
            notes=(NO_CHECKSUMS, ("inferred-shapes", proof)),
            details={
                "rank files": len(grid.ranks),
                "files of a rank": grid.num_files,
                "holes": [os.path.basename(file) for file in grid.holes()],
                "shapes": "inferred",
            },
        )


def _folder(path: str) -> str | None:
    for folder in (path, os.path.join(path, _SUBFOLDER)):
        if places.is_folder(folder) and any(map(is_shard_name, places.list_names(folder))):
            return folder
    return None


def _check_pieces(name: str, pieces: ShardPieces, shape: tuple[int, ...], grid: ShardGrid) -> None:
    """Check that the pieces are disjoint and fill the inferred shape.

    torch saves every element once (checkpoint/default_planner.py: create_global_plan), so overlapping pieces come from
    two saves. The plan proves again, element by element, that they fill the shape; this check can name missing files.
    """
    filled = sum(map(volume, pieces.boxes(name)))
    if filled > prod(shape):
        raise _overlap(name, pieces)
    if filled < prod(shape):
        raise Subject(name, None, (grid.holes() or [grid.folder])[0]).incomplete(
            f"{prod(shape) - filled} of at least {prod(shape)} elements are in no file of {grid.folder}",
            grid.text(),
            f"pieces of all of {list(shape)}",
            f"copy the files of the missing ranks into the folder, then {AGAIN}",
        )


def _overlap(name: str, pieces: ShardPieces) -> ContradictionError:
    boxes = pieces.boxes(name)
    order = sorted(range(len(boxes)), key=lambda i: boxes[i])
    reaching: list[int] = []
    found = (order[0], order[-1])
    for i in order:
        # A sweep along the first dim: only boxes that reach this box's start can overlap it.
        reaching = [k for k in reaching if not boxes[i] or boxes[k][0][1] > boxes[i][0][0]]
        other = next((k for k in reaching if volume(boxes[k]) and boxes_overlap(boxes[k], boxes[i])), None)
        if other is not None and volume(boxes[i]):
            found = (other, i)
            break
        reaching.append(i)
    (rank, record), (other_rank, other_record) = (pieces.table(name)[i, :2].tolist() for i in sorted(found))
    path, other_path = pieces.records.path(record), pieces.records.path(other_record)
    one, two = (box_text(boxes[i]) for i in sorted(found))
    return Subject(name, other_rank - 1, other_path).contradiction(
        f"{os.path.basename(path)} and {os.path.basename(other_path)} contain the same elements",
        f"{one} of rank {rank} (from 1), {two} of rank {other_rank}",
        "every element once",
        ONE_SAVE,
    )


def _prove(path: str, shapes: Mapping[str, tuple[int, ...]], pieces: ShardPieces, grid: ShardGrid, hints: Hints) -> str:
    """Prove the inferred shapes, and return a description of the proof."""
    for name, shape in shapes.items():
        want = hints.shapes.get(name)
        if want is not None and want != shape:
            raise _shape_error(name, shape, want, pieces, grid)
    # A tensor without dims is always whole.
    unproven = [name for name, shape in shapes.items() if shape and name not in hints.shapes]
    if not unproven:
        return "global shapes, which the format does not record, are those of the base model"
    loose: LayoutError | None = None
    try:
        recipe = hints.prove_shapes(shapes) if hints.prove_shapes is not None else None
    except (IncompleteError, ContradictionError) as error:
        error.about(got=grid.text(), file=grid.folder)
        raise
    except LayoutError as error:
        recipe, loose = None, error
    if recipe is not None:
        return f"the format does not record global shapes; those of {recipe} with the sizes in config.json are used"
    if grid.num_ranks is not None and not grid.holes():
        # All pieces that were saved are here, and together they are the tensors.
        return f"global shapes, which the format does not record, are those of all files of {grid.num_ranks} ranks"
    raise _proof_error(path, shapes, unproven, grid, loose)


def _proof_error(
    path: str, shapes: Mapping[str, Sequence[int]], unproven: Sequence[str], grid: ShardGrid, loose: LayoutError | None
) -> LayoutError | IncompleteError:
    """Return the error for shapes that are neither contradicted nor proven; `loose` describes what a recipe lacks."""
    tensor = (loose.tensor if loose is not None else None) or unproven[0]
    reached = f"pieces that reach to {list(shapes[tensor])}; " if tensor in shapes else ""
    wants = [f"{loose.want}, or a base model" if loose is not None else "a base model with these names"]
    remedy = f"give {option('base_model', metavar='DIR')} to prove its shapes"
    if loose is not None and loose.want != "a base model with it":
        remedy = f"put the model's config.json into {path}, or {remedy}"
    holes = grid.holes()
    if holes:
        return Subject(tensor, None, holes[0]).incomplete(
            f"{os.path.basename(holes[0])} is missing, and it is unknown whether the rank wrote it",
            reached + grid.text(),
            "; or ".join(["all files of every rank", *wants]),
            f"copy the missing file into the folder; if the rank had no piece for it, {remedy}",
        )
    remedy += f", or give the number of ranks that saved it with {option('world_size', metavar='N')}"
    problem = "the format records no global shapes, so it is unknown whether all ranks' pieces are present"
    return LayoutError(
        loose.message if loose is not None else f"{list_text(unproven, 3)}: {problem}",
        tensor=tensor,
        file=grid.folder,
        got=reached + grid.text(),
        want=wants[0],
        next_step=f"{remedy}, then {AGAIN}",
    )


def _shape_error(
    name: str, shape: tuple[int, ...], want: tuple[int, ...], pieces: ShardPieces, grid: ShardGrid
) -> IncompleteError | ContradictionError:
    if len(shape) == len(want) and all(n <= m for n, m in zip(shape, want, strict=True)):
        return Subject(name, None, (grid.holes() or [grid.folder])[0]).incomplete(
            "its pieces end before the tensor does; a rank's files are missing",
            f"pieces that reach to {list(shape)}; {grid.text()}",
            f"{list(want)}, as in the base model",
            f"copy the files of the missing ranks (after rank {max(grid.ranks)}, perhaps) into the folder",
        )
    return Subject(name, None, pieces.records.path(int(pieces.table(name)[0, 1]))).contradiction(
        "its pieces reach beyond the base model's tensor",
        str(list(shape)),
        f"{list(want)}, as in the base model",
        f"give the base model that was trained; if the folder contains shards of two saves, {ONE_SAVE}",
    )
