"""Locates the pieces of a torch DCP checkpoint's tensors: turns its ``.metadata`` into records and nests."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import xxhash

from xrank import dtypes
from xrank.errors import AGAIN, ContradictionError, CorruptError, IncompleteError, UnsafeError, XrankError
from xrank.formats.dcp_items import ItemKind, ItemReader, is_safetensors, read_safetensors_part
from xrank.formats.dcp_metadata import DcpMetadata, DcpTensor
from xrank.formats.regular_file import RegularFile, open_regular, quote
from xrank.layout.nest_table import IntArray, NestTable
from xrank.layout.nests import Nest, canonical
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile, StoredShard
from xrank.stores import places
from xrank.words import list_text

_FILE_NAME = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp", re.ASCII)
_SAMPLE_NBYTES = 1 << 16
_ARCHIVE = b"PK\x03\x04"
"""First bytes of an item."""


@dataclass(frozen=True, slots=True, eq=False)
class DcpPieces:
    """The selected tensors in the form of a `StoredModel`."""

    files: tuple[SourceFile, ...]
    records: RecordTable
    shards: tuple[StoredShard, ...]
    unchecked: tuple[str, ...]
    """Names of files that contain records without checksums."""


def rank_of_file(name: str) -> int | None:
    """Return the rank in a torch file name (``__<rank>_<n>.distcp``); None for any other name."""
    found = _FILE_NAME.fullmatch(name)
    return None if found is None else int(found[1])


def locate(folder: str, metadata: DcpMetadata, chosen: Mapping[str, DcpTensor]) -> DcpPieces:
    """Return where the pieces of the chosen tensors lie; only the ends of each piece are read.

    Args:
        folder: the checkpoint's folder.
        metadata: its metadata.
        chosen: the tensors by the names that they shall have.

    Raises:
        IncompleteError: a file is missing.
        CorruptError, UnsafeError: an item is damaged, or a path leads out of the folder.
        ContradictionError: an item differs from the metadata.
        UsageError: xrank does not support a tensor's element type.
    """
    _check_paths(metadata)
    names, tensors = list(chosen), list(chosen.values())
    dtypes_of = [_dtype(name, tensor, metadata.path) for name, tensor in chosen.items()]
    counts = [len(tensor.start) for tensor in tensors]
    owner = np.repeat(np.arange(len(tensors)), counts)
    file, start, nbytes = (
        np.concatenate([getattr(tensor, field) for tensor in tensors] or [np.zeros(0, dtype=np.int64)])
        for field in ("file", "start", "nbytes")
    )
    # Files that hold only optimizer state may be missing, so check only those with pieces of the model.
    used = np.flatnonzero(np.bincount(file, minlength=len(metadata.files))).tolist()
    _check_presence(folder, metadata, used, file, owner, names)
    # Read each file once and from start to end, whatever order the tensors have.
    order = np.lexsort((start, file))
    bounds = np.searchsorted(file[order], [*used, len(metadata.files)])
    rows = np.empty((len(file), 4), dtype=np.int64)
    files, reader = [], _FileReader(names, tensors, counts)
    for number, low, high in zip(used, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        mine = order[low:high]
        name = metadata.files[number]
        with open_regular(os.path.join(folder, name), rank_of_file(name)) as opened:
            _check_end(opened, int(metadata.ends[number]))
            rows[mine] = reader.read(opened, owner[mine], mine, start[mine], nbytes[mine])
            files.append(SourceFile.from_status(opened.origin.path, opened.status))
    kinds = reader.items.kinds
    ends = np.cumsum(counts)
    ranks = np.array([rank_of_file(name) or 0 for name in metadata.files], dtype=np.int64)
    shards = []
    for k, (name, tensor, dtype) in enumerate(zip(names, tensors, dtypes_of, strict=True)):
        first, end = int(ends[k]) - counts[k], int(ends[k])
        _check_kinds(name, tensor, dtype, rows[first:end, 0], kinds, metadata)
        nests = _nests(tensor, rows[first:end, 0], kinds)
        shards.append(StoredShard(name, dtype, tensor.shape, ranks[tensor.file], np.arange(first, end), nests))
    # From the metadata's numbers of files to those of the files with pieces of the model.
    place = np.zeros(len(metadata.files), dtype=np.int64)
    place[used] = np.arange(len(used))
    records = RecordTable(place[file], *(np.ascontiguousarray(rows[:, k]) for k in (1, 2, 3)))
    bare = np.bincount(records.file[records.crc32 == NO_CHECKSUM], minlength=len(files))
    unchecked = tuple(metadata.files[number] for number, count in zip(used, bare.tolist(), strict=True) if count)
    return DcpPieces(tuple(files), records, tuple(shards), unchecked)


def _check_paths(metadata: DcpMetadata) -> None:
    for name in metadata.files:
        # torch/distributed/checkpoint/filesystem.py: write_data: a plain file name without folders.
        if os.path.basename(name) != name or "\0" in name or name in ("", ".", ".."):
            raise UnsafeError(
                f"{metadata.path} names a file outside its folder",
                file=metadata.path,
                got=quote(name),
                want="plain file names",
                next_step="do not use this checkpoint: its metadata was tampered with",
            )


def _check_presence(
    folder: str, metadata: DcpMetadata, used: Sequence[int], file: IntArray, owner: IntArray, names: Sequence[str]
) -> None:
    there = set(places.list_names(folder))
    missing = [number for number in used if metadata.files[number] not in there]
    if not missing:
        return
    name = metadata.files[missing[0]]
    lost = np.flatnonzero(np.bincount(owner[np.isin(file, missing)])).tolist()
    files = list_text((metadata.files[number] for number in missing), 3)
    tensors = list_text((quote(names[k])[1:-1] for k in lost), 3)
    rank = rank_of_file(name)
    raise IncompleteError(
        f"{files}, with pieces of {tensors}: not in {folder}",
        tensor=names[lost[0]],
        rank=rank,
        file=os.path.join(folder, name),
        got=f"{len(used) - len(missing)} files",
        want=f"the {len(used)} files that .metadata names for the model",
        next_step=f"copy {name} from {'where it was written' if rank is None else f'the node of rank {rank}'}, "
        f"then {AGAIN}; nothing was written",
    )


def _check_end(file: RegularFile, end: int) -> None:
    """Refuse a file with an item after the last one that the metadata names: the metadata is written last."""
    if file.nbytes >= end + len(_ARCHIVE) and file.read(end, len(_ARCHIVE)) == _ARCHIVE:
        raise ContradictionError(
            f"{file.origin.path} continues after the last piece that .metadata names in it: they belong to two saves",
            rank=file.origin.rank,
            file=file.origin.path,
            got=f"{file.nbytes:,} bytes, an item at byte {end:,}",
            want=f"{end:,} bytes",
            next_step="if a save into this folder was interrupted, take another checkpoint; else copy it whole again",
        )


def _dtype(name: str, tensor: DcpTensor, path: str) -> str:
    try:
        dtype = dtypes.by_torch_name(tensor.dtype)
    except XrankError as error:
        error.about(quote(name)[1:-1], tensor=name, file=path)
        raise
    if prod(tensor.shape) * dtype.nbytes >= 1 << 63:
        raise _corrupt(name, "is larger than any file", path, got=quote(tensor.shape))
    return dtype.name


def _corrupt(name: str, what: str, path: str, *, got: str | None = None, want: str | None = None) -> CorruptError:
    return CorruptError(
        f"{quote(name)[1:-1]} {what}",
        tensor=name,
        file=path,
        got=got,
        want=want,
        next_step="copy the checkpoint again from where it was written",
    )


class _FileReader:
    """Reads the items file by file, and compares each file with the earlier ones."""

    def __init__(self, names: Sequence[str], tensors: Sequence[DcpTensor], counts: Sequence[int]) -> None:
        self.items = ItemReader()
        self._names, self._tensors = names, tensors
        self._firsts = np.cumsum([0, *counts])
        self._seen: dict[bytes, RegularFile] = {}

    def read(self, file: RegularFile, owner: IntArray, piece: IntArray, start: IntArray, nbytes: IntArray) -> IntArray:
        """Return kind, offset, bytes and checksum of each item; the items are in order of their starts."""
        if is_safetensors(file, int(start[0])):
            return self._safetensors(file, owner, piece, start)
        overlap = np.flatnonzero(start[1:] < start[:-1] + nbytes[:-1])
        if len(overlap):
            one, other = (self._names[int(owner[k])] for k in (overlap[0], overlap[0] + 1))
            raise _corrupt(other, f"and {quote(one)[1:-1]} share bytes of {file.origin.path}", file.origin.path)
        names = [self._names[k] for k in owner.tolist()]
        rows = self.items.read(file, start.tolist(), nbytes.tolist(), names)
        if (rows[:, 3] != NO_CHECKSUM).all():
            self._check_copy(file, owner, rows)
        return rows

    def _check_copy(self, file: RegularFile, owner: IntArray, rows: IntArray) -> None:
        """Refuse a file with exactly the pieces of another one, unless they repeat one value.

        An item does not record its rank, so this check alone detects a copy of another rank's file of the same size.
        """
        content = np.column_stack((owner, rows[:, [0, 2, 3]]))
        digest = xxhash.xxh3_128_digest(content[np.lexsort(content.T)].tobytes())
        # The digest is of all checksums, in an order that does not depend on the offsets in the file.
        other = self._seen.setdefault(digest, file)
        if other is file or all(self._is_uniform(file, *row[:3]) for row in rows[:16].tolist()):
            return
        path, rank = file.origin.path, file.origin.rank
        raise ContradictionError(
            f"{path} and {os.path.basename(other.origin.path)} hold the same bytes: one is a copy of the other",
            tensor=self._names[int(owner[0])],
            rank=rank,
            file=path,
            got=f"equal checksums of all {len(rows)} pieces",
            want="different pieces in each file",
            next_step="copy both files again from where they were written",
        )

    def _is_uniform(self, file: RegularFile, kind: int, offset: int, nbytes: int) -> bool:
        width = dtypes.dtype(self.items.kinds[kind].dtype).nbytes
        sample = file.read(offset, min(nbytes, _SAMPLE_NBYTES))
        return sample == sample[:width] * (len(sample) // width)

    def _safetensors(self, file: RegularFile, owner: IntArray, piece: IntArray, start: IntArray) -> IntArray:
        part = read_safetensors_part(file, int(start[0]))
        rows = np.empty((len(owner), 4), dtype=np.int64)
        for k, (tensor, number) in enumerate(zip(owner.tolist(), piece.tolist(), strict=True)):
            flat = self._tensors[tensor].name
            low = tuple(self._tensors[tensor].offsets[number - int(self._firsts[tensor])].tolist())
            if flat not in part.places or part.offsets[flat] != low or int(start[k]) != int(start[0]):
                raise ContradictionError(
                    f"{quote(flat)[1:-1]}: {file.origin.path} contains another piece than .metadata records",
                    tensor=self._names[tensor],
                    rank=file.origin.rank,
                    file=file.origin.path,
                    got=f"the piece at {list(part.offsets[flat])}" if flat in part.offsets else "no piece",
                    want=f"the piece at {list(low)}",
                    next_step="copy the file again from where it was written",
                )
            kind, offset, nbytes = part.places[flat]
            rows[k] = (self.items.number_of(kind), offset, nbytes, NO_CHECKSUM)
        return rows


def _check_kinds(
    name: str, tensor: DcpTensor, dtype: str, rows: IntArray, kinds: Sequence[ItemKind], metadata: DcpMetadata
) -> None:
    """Check that pieces lie within their tensor and match the metadata."""
    shape = np.array(tensor.shape, dtype=np.int64)
    out = np.flatnonzero((tensor.offsets + tensor.sizes > shape).any(axis=1))
    if len(out):
        raise _corrupt(
            name, "has a piece that reaches beyond it", metadata.path,
            got=f"{tensor.sizes[out[0]].tolist()} from {tensor.offsets[out[0]].tolist()} on",
            want=f"within {list(tensor.shape)}",
        )  # fmt: skip
    for number in sorted(set(rows.tolist())):
        kind, mine = kinds[number], rows == number
        other = (
            np.flatnonzero(mine & (tensor.sizes != np.array(kind.shape, dtype=np.int64)).any(axis=1))
            if len(kind.shape) == len(shape)
            else np.flatnonzero(mine)
        )
        if kind.dtype == dtype and not len(other):
            continue
        row = int(other[0]) if len(other) else int(np.flatnonzero(mine)[0])
        file = metadata.files[int(tensor.file[row])]
        raise ContradictionError(
            f"{quote(name)[1:-1]}: {file} contains another piece than .metadata records",
            tensor=name,
            rank=rank_of_file(file),
            file=os.path.join(os.path.dirname(metadata.path), file),
            got=f"{kind.dtype} {list(kind.shape)}",
            want=f"{dtype} {tensor.sizes[row].tolist()}",
            next_step=f"copy {file} again from where it was written",
        )


def _nests(tensor: DcpTensor, rows: IntArray, kinds: Sequence[ItemKind]) -> NestTable:
    """Return a nest for each piece, from its record to the row-major tensor."""
    steps = [prod(tensor.shape[k + 1 :]) for k in range(len(tensor.shape))]
    # Once per kind of item: a million pieces have a few kinds.
    loops = {}
    for number in set(rows.tolist()):
        kind = kinds[number]
        loops[number] = canonical(Nest(0, 0, tuple(zip(kind.shape, kind.strides, steps, strict=True)))).loops
    depth = max(map(len, loops.values()), default=0)
    table = np.empty((len(rows), depth, 3), dtype=np.int64)
    x = np.empty(len(rows), dtype=np.int64)
    for number, own in loops.items():
        mine = rows == number
        table[mine] = np.array([*own, *[(1, 0, 0)] * (depth - len(own))], dtype=np.int64).reshape(depth, 3)
        x[mine] = kinds[number].storage_offset
    return NestTable(x, tensor.offsets @ np.array(steps, dtype=np.int64), table)
