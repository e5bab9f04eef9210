"""The reader of torch.distributed.checkpoint: .metadata, and the pieces in .distcp files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from xrank import dtypes
from xrank.errors import AGAIN, CorruptError, IncompleteError, XrankError, either, option
from xrank.formats.dcp_items import ItemKind, ItemReader, is_safetensors, read_safetensors_part
from xrank.formats.dcp_metadata import DcpMetadata, DcpTensor, read_metadata
from xrank.formats.torch_archive import ArchivedTensor, element_type, read_archive, read_archive_in, walk_leaves
from xrank.layout.nest_table import IntArray, NestTable
from xrank.layout.nests import Nest, canonical, row_major
from xrank.layout.stored_model import LOST, NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.readers.base import RAISING, Faults, Hints
from xrank.readers.names import (
    ChosenPart,
    SavedTree,
    describe_families,
    is_of_lightning,
    part_details,
    part_notes,
    select_model,
)
from xrank.readers.records import Subject, find_step, note_bare_files, note_foreign_names, outside_error, read_object
from xrank.storage import places
from xrank.storage.regular_file import Origin, RegularFile, open_regular, quote
from xrank.words import list_text, plural


def check_values(
    folder: str, metadata: DcpMetadata, values: Mapping[str, str], is_left_out: Callable[[str], bool]
) -> tuple[str, ...]:
    """Refuse values that contain tensors; return the names of those that the caller leaves out.

    torch's planner takes dicts and lists apart. It pickles other values whole, such as tuples, and dicts with
    ``flatten_state_dict=False`` (torch/distributed/checkpoint/_traverse.py: traverse_state_dict). torch cannot load
    tensors from an unreadable value either; other checks report the damage. `values` are the model's: name -> flat
    name. The names of their files must be checked already.
    """
    by_file: dict[int, list[tuple[str, int, int]]] = {}
    for name, flat in values.items():
        number, start, nbytes = metadata.byte_items[flat]
        by_file.setdefault(number, []).append((name, start, nbytes))
    left_out: list[str] = []
    for number, items in by_file.items():
        path = os.path.join(folder, metadata.files[number])
        found: list[tuple[str, str, int]] = []
        with suppress(XrankError), open_regular(path) as file:
            for name, start, nbytes in items:
                with suppress(XrankError):
                    archive = read_archive_in(file, start=start, nbytes=nbytes)
                    leaves = (leaf for _, leaf in walk_leaves(archive.value))
                    if archive.records and (count := sum(isinstance(leaf, ArchivedTensor) for leaf in leaves)):
                        found.append((name, type(archive.value).__name__, count))
        for name, kind, count in found:
            if not is_left_out(name):
                raise Origin(path).usage(
                    f"{quote(name)[1:-1]} was pickled whole, with {plural(count, 'tensor')} in it",
                    f"a {kind}",
                    "tensors by name, as torch's default planner saves them from dicts and lists",
                    either("load it, and save its tensors by name", f"leave it out with {option('exclude')}"),
                    tensor=name,
                )
            left_out.append(name)
    return tuple(left_out)


_SUFFIX = ".distcp"
_MAX_CONFIG_NBYTES = 1 << 16


def read_backend(folder: str) -> str | None:
    """Return the format that Megatron's ``metadata.json`` in a folder names; None without a readable one."""
    backend = read_object(os.path.join(folder, "metadata.json"), _MAX_CONFIG_NBYTES).get("sharded_backend")
    return backend if isinstance(backend, str) else None


def find_other_files(folder: str, metadata: DcpMetadata) -> tuple[list[str], list[str]]:
    """Return the shards that the metadata does not name: those with content, and the empty ones of idle ranks."""
    named = set(metadata.files)
    others = sorted(entry for entry in places.list_names(folder) if entry.endswith(_SUFFIX) and entry not in named)
    # torch/distributed/checkpoint/filesystem.py: write_data opens a file even for an empty plan.
    idle = [entry for entry in others if _nbytes(os.path.join(folder, entry)) == 0]
    return [entry for entry in others if entry not in idle], idle


def file_notes(
    folder: str, metadata: DcpMetadata, unused: Sequence[str], faults: Faults = RAISING
) -> list[tuple[str, str]]:
    """Return notes about the files of a checkpoint whose model was located, but for those with faults."""
    notes, lost = [], []
    known = {*faults.files, *(error.file for error in faults.errors)}
    for name, end in zip(metadata.files, metadata.ends.tolist(), strict=True):
        if os.path.join(folder, name) in known:
            continue
        nbytes = _nbytes(os.path.join(folder, name))
        if nbytes is None:
            lost.append(f"{name} is missing")
        elif nbytes < end:
            lost.append(f"{name} ends at byte {nbytes:,} of {end:,}")
    if lost:
        text = f"the checkpoint is damaged, though no byte of the model is lost: {list_text(lost, 3)}"
        notes.append(("damage", text))
    notes += note_foreign_names({metadata.path: metadata.foreign})
    if unused:
        text = f"{list_text(unused, 3)}: not in .metadata, so from a different save, and not read"
        notes.append(("unused-files", text))
    return notes


def _nbytes(path: str) -> int | None:
    try:
        return places.nbytes_of(path)
    except OSError:
        return None


_FILE_NAME = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp", re.ASCII)
_SAMPLE_NBYTES = 1 << 16
_ARCHIVE = b"PK\x03\x04"
"""First bytes of an item."""
_END, _END_NBYTES = b"PK\x05\x06", 22
"""First bytes of an item's end, and its length."""


class DcpPieces(Struct, frozen=True, eq=False):
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


def locate(folder: str, metadata: DcpMetadata, chosen: Mapping[str, DcpTensor], faults: Faults = RAISING) -> DcpPieces:
    """Return where the pieces of the chosen tensors lie; only the ends of each piece are read."""
    for name in metadata.files:
        # torch/distributed/checkpoint/filesystem.py: write_data: a plain file name without folders.
        if os.path.basename(name) != name or "\0" in name or name in ("", ".", ".."):
            raise outside_error(metadata.path, name)
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
    _check_presence(folder, metadata, used, file, owner, names, faults)
    # Read each file once and from start to end, whatever order the tensors have.
    order = np.lexsort((start, file))
    bounds = np.searchsorted(file[order], [*used, len(metadata.files)])
    rows = np.full((len(file), 4), (-1, 0, 0, LOST), dtype=np.int64)
    files, reader = [], _FileReader(names, tensors, counts, faults)
    for number, low, high in zip(used, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        mine = order[low:high]
        name = metadata.files[number]
        path = os.path.join(folder, name)
        files.append(SourceFile.lost(path))
        if path in faults.files:
            continue
        with faults.losing(path), open_regular(path, rank_of_file(name)) as opened:
            end = int(metadata.ends[number])
            # The metadata is written last, so an item after the last one that it names is of another save.
            if opened.nbytes >= end + len(_ARCHIVE) and opened.read(end, len(_ARCHIVE)) == _ARCHIVE:
                raise opened.origin.contradiction(
                    "is longer than the pieces that .metadata lists in it: the two belong to different saves",
                    f"{opened.nbytes:,} bytes, an item at byte {end:,}",
                    f"{end:,} bytes",
                    "if a save into this folder was interrupted, use a different checkpoint; if not, copy the whole "
                    "folder again",
                )
            rows[mine] = reader.read(opened, owner[mine], mine, start[mine], nbytes[mine])
            files[-1] = SourceFile.from_status(opened.origin.path, opened.status)
    if not faults.raises:
        for number in used:
            reader.lose_copy(os.path.join(folder, metadata.files[number]), file == number, owner, rows)
    kinds = reader.items.kinds
    ends = np.cumsum(counts)
    ranks = np.array([rank_of_file(name) or 0 for name in metadata.files], dtype=np.int64)
    shards = []
    for k, (name, tensor, dtype) in enumerate(zip(names, tensors, dtypes_of, strict=True)):
        first, end = int(ends[k]) - counts[k], int(ends[k])
        _check_kinds(name, tensor, dtype, rows[first:end, 0], kinds, metadata, faults)
        nests = _nests(tensor, rows[first:end, 0], kinds)
        shards.append(StoredShard(name, dtype, tensor.shape, ranks[tensor.file], np.arange(first, end), nests))
    # From the metadata's numbers of files to those of the files with pieces of the model.
    place = np.zeros(len(metadata.files), dtype=np.int64)
    place[used] = np.arange(len(used))
    for number in used:
        if os.path.join(folder, metadata.files[number]) in faults.files:
            rows[file == number, 1:] = 0, 0, LOST
    offset, nbytes, crc32 = (np.ascontiguousarray(rows[:, k]) for k in (1, 2, 3))
    records = RecordTable(place[file], offset, nbytes, crc32)
    bare = np.bincount(records.file[records.crc32 == NO_CHECKSUM], minlength=len(files))
    unchecked = tuple(metadata.files[number] for number, count in zip(used, bare.tolist(), strict=True) if count)
    return DcpPieces(tuple(files), records, tuple(shards), unchecked)


def _check_presence(
    folder: str,
    metadata: DcpMetadata,
    used: Sequence[int],
    file: IntArray,
    owner: IntArray,
    names: Sequence[str],
    faults: Faults,
) -> None:
    there = set(places.list_names(folder))
    missing = [number for number in used if metadata.files[number] not in there]
    # One error names all files, or each file has its own.
    for group in [missing] if faults.raises and missing else [[number] for number in missing]:
        name = metadata.files[group[0]]
        lost = np.flatnonzero(np.bincount(owner[np.isin(file, group)])).tolist()
        files = list_text((metadata.files[number] for number in group), 3)
        tensors = list_text((quote(names[k])[1:-1] for k in lost), 3)
        rank = rank_of_file(name)
        error = IncompleteError(
            f"{folder} lacks {files}, which contain pieces of {tensors}",
            tensor=names[lost[0]],
            rank=rank,
            file=os.path.join(folder, name),
            got=f"{len(used) - len(missing)} files",
            want=f"the {len(used)} files that .metadata lists for the model",
            next_step=f"copy {name} from {'where it was written' if rank is None else f'the node of rank {rank}'}, "
            f"then {AGAIN}; nothing was written",
        )
        faults.lose(error, *(os.path.join(folder, metadata.files[number]) for number in group))


def _dtype(name: str, tensor: DcpTensor, path: str) -> str:
    dtype = element_type(tensor.dtype, Origin(path), name)
    if prod(tensor.shape) * dtypes.dtype(dtype).nbytes >= 1 << 63:
        raise _corrupt(name, "is larger than any file", path, got=quote(tensor.shape))
    return dtype


def _corrupt(name: str, what: str, path: str, *, got: str | None = None, want: str | None = None) -> CorruptError:
    return Origin(path).corrupt(
        f"{quote(name)[1:-1]} {what}", got, want, "copy the checkpoint again from where it was written", tensor=name
    )


class _FileReader:
    """Reads the items file by file, and compares each file with the earlier ones."""

    def __init__(
        self, names: Sequence[str], tensors: Sequence[DcpTensor], counts: Sequence[int], faults: Faults
    ) -> None:
        self.items = ItemReader()
        self._names, self._tensors, self._faults = names, tensors, faults
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
        try:
            rows = self.items.read(file, start.tolist(), nbytes.tolist(), names)
        except XrankError as error:
            self._faults.add(error)
            rows = self._read_each(file, start, nbytes, names)
            if not len(rows):
                self._faults.lose(error, file.origin.path)
                rows = np.full((len(names), 4), (-1, 0, 0, LOST), dtype=np.int64)
            return rows
        if (rows[:, 3] != NO_CHECKSUM).all():
            self._check_copy(file, owner, rows)
        return rows

    def _read_each(self, file: RegularFile, start: IntArray, nbytes: IntArray, names: Sequence[str]) -> IntArray:
        """Return the items of a damaged file, the lost ones `LOST`; none if it may be a file of another save."""
        rows = np.full((len(names), 4), (-1, 0, 0, LOST), dtype=np.int64)
        for k, (first, end) in enumerate(zip(start.tolist(), (start + nbytes).tolist(), strict=True)):
            try:
                rows[k] = self.items.read(file, [first], [end - first], [names[k]])[0]
            except XrankError:
                # Damage within an item leaves its ends, or zeros, and a file that was cut has no item's end at its end.
                head, tail = (
                    file.read(at, 4) if 0 <= at <= file.nbytes - 4 else b"" for at in (first, end - _END_NBYTES)
                )
                is_whole = end > file.nbytes > _END_NBYTES and file.read(file.nbytes - _END_NBYTES, 4) == _END
                if is_whole or head not in (_ARCHIVE, bytes(4), b"") or tail not in (_END, bytes(4), b""):
                    return rows[:0]
        return rows

    def lose_copy(self, path: str, mine: npt.NDArray[np.bool_], owner: IntArray, rows: IntArray) -> None:
        """Lose a damaged file if one of its pieces is also another file's: it may be a copy, cut or damaged since."""
        fault = next((error for error in self._faults.errors if error.file == path), None)
        is_there = rows[:, 3] != LOST
        if fault is None or path in self._faults.files or not (mine & is_there).any():
            return
        keys = np.column_stack((owner, rows[:, 2:]))
        known = set(map(tuple, keys[~mine & is_there].tolist()))
        own = zip(keys[mine & is_there].tolist(), rows[mine & is_there].tolist(), strict=True)
        with open_regular(path) as file:
            if any(tuple(key) in known and not self._is_uniform(file, *row[:3]) for key, row in own):
                self._faults.lose(fault, path)

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
        error = file.origin.contradiction(
            f"contains the same bytes as {os.path.basename(other.origin.path)}: one is a copy of the other",
            f"equal checksums of all {len(rows)} pieces",
            "different pieces in each file",
            "copy both files again from where they were written",
            tensor=self._names[int(owner[0])],
        )
        self._faults.lose(error, file.origin.path, other.origin.path)  # which of the two is the copy is unknown

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
            found = part.get(flat)
            if found is None or found[3] != low or int(start[k]) != int(start[0]):
                raise Subject(self._names[tensor], file.origin.rank, file.origin.path).contradiction(
                    f"{file.origin.path} contains a different piece than .metadata records",
                    "no piece" if found is None else f"the piece at {list(found[3])}",
                    f"the piece at {list(low)}",
                    "copy the file again from where it was written",
                )
            kind, offset, nbytes, _ = found
            rows[k] = (self.items.number_of(kind), offset, nbytes, NO_CHECKSUM)
        return rows


def _check_kinds(
    name: str,
    tensor: DcpTensor,
    dtype: str,
    rows: IntArray,
    kinds: Sequence[ItemKind],
    metadata: DcpMetadata,
    faults: Faults,
) -> None:
    """Check that pieces lie within their tensor and match the metadata."""
    shape = np.array(tensor.shape, dtype=np.int64)
    out = np.flatnonzero((tensor.offsets + tensor.sizes > shape).any(axis=1))
    if len(out):
        got = f"{tensor.sizes[out[0]].tolist()} from {tensor.offsets[out[0]].tolist()} on"
        want = f"within {list(tensor.shape)}"
        raise _corrupt(name, "has a piece that reaches beyond it", metadata.path, got=got, want=want)
    for number in sorted({*rows.tolist()} - {-1}):
        kind, odd = kinds[number], rows == number
        if kind.dtype == dtype and len(kind.shape) == len(shape):
            odd &= (tensor.sizes != np.array(kind.shape, dtype=np.int64)).any(axis=1)
        if not odd.any():
            continue
        for row in np.flatnonzero(odd).tolist():
            file = metadata.files[int(tensor.file[row])]
            path = os.path.join(os.path.dirname(metadata.path), file)
            error = Subject(name, rank_of_file(file), path).contradiction(
                f"{file} contains a different piece than .metadata records",
                f"{kind.dtype} {list(kind.shape)}",
                f"{dtype} {tensor.sizes[row].tolist()}",
                f"copy {file} again from where it was written",
            )
            if path not in faults.files:
                faults.lose(error, path)
        rows[odd] = -1


def _nests(tensor: DcpTensor, rows: IntArray, kinds: Sequence[ItemKind]) -> NestTable:
    """Return a nest for each piece, from its record to the row-major tensor."""
    steps = [prod(tensor.shape[k + 1 :]) for k in range(len(tensor.shape))]
    if (rows == -1).any():  # lost pieces, whose shapes the metadata have
        kinds, sizes = [*kinds], tensor.sizes.tolist()
        for row in np.flatnonzero(rows == -1).tolist():
            kinds.append(ItemKind("", tuple(sizes[row]), row_major(tuple(sizes[row])), 0))
            rows[row] = len(kinds) - 1
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


_METADATA = ".metadata"
MODEL_FOLDER = re.compile(r"pytorch_model_fsdp(_\d+)?")
"""Folder of the model beside that of the optimizer (accelerate/utils/fsdp_utils.py: save_fsdp_model)."""
_OPTIMIZER_FOLDER = re.compile(r"optimizer(_\d+)?")  # accelerate/utils/fsdp_utils.py: save_fsdp_optimizer
_STEP = re.compile(r"(?:.*[^a-z])?(?:checkpoint|ckpt|step|iter|iteration|global_step)[-_]?0*(\d{1,18})", re.IGNORECASE)
_FLAT = "_flat_param"  # torch/distributed/fsdp/_flat_param.py: FLAT_PARAM


class DcpReader:
    """The reader of torch DCP checkpoints (`xrank.readers.base.Reader`)."""

    name = "dcp"

    def recognize(self, path: str) -> str | None:
        """Return None if the folder contains DCP's metadata or shards, and they are those of a torch model."""
        if not places.is_folder(path):
            return "not a folder"
        entries = places.list_names(path)
        if not places.is_file(os.path.join(path, _METADATA)) and not any(e.endswith(_SUFFIX) for e in entries):
            return "no .metadata and no *.distcp in it"
        if _OPTIMIZER_FOLDER.fullmatch(os.path.basename(places.absolute(path))):
            # accelerate's folder of the model may lie beside it.
            name = os.path.basename(places.absolute(path)).replace("optimizer", "pytorch_model_fsdp")
            is_beside = places.is_folder(os.path.join(os.path.dirname(places.absolute(path)), name))
            hint = f"; give {os.path.dirname(places.absolute(path))}, which has the model, too" if is_beside else ""
            return f"only an optimizer's state, in a folder of accelerate{hint}"
        if read_backend(path) == "torch_dist" or {"common.pt", _METADATA}.issubset(entries):
            return "a Megatron checkpoint (torch_dist)"
        return None

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of the model lies; errors as in `Reader.read`."""
        return self.read_part(path, read_folder(path), hints)[0]

    def read_part(self, path: str, metadata: DcpMetadata, hints: Hints) -> tuple[StoredModel, ChosenPart]:
        """Return where every tensor of the model lies, and the model's part of the metadata; errors as in `read`."""
        tree = SavedTree(
            metadata.path,
            {name: tensor.shape for name, tensor in metadata.tensors.items()},
            metadata.byte_items,
            metadata.paths or {},
            lambda name: int(metadata.tensors[name].nbytes.sum()),
            metadata.byte_items,
        )
        part = select_model(tree, hints.part)
        tensors = {name: metadata.tensors[flat] for name, flat in part.tensors.items()}
        for name, tensor in tensors.items():
            if name.rpartition(".")[2] == _FLAT:  # every rank saved its own range under one name
                raise Origin(metadata.path).layout(
                    f"{quote(name)[1:-1]}: a flat parameter of FSDP1, which does not record its members' shapes",
                    f"{tensor.shape[0] if tensor.shape else 1:,} elements of a LOCAL_STATE_DICT",
                    "parameters by name",
                    "load it into the same model, and save with SHARDED_STATE_DICT or FULL_STATE_DICT",
                    tensor=name,
                )
        pieces = locate(path, metadata, tensors, hints.faults)
        left_out = check_values(path, metadata, part.values, hints.is_left_out or (lambda name: False))
        kept_nbytes = sum(int(tensor.nbytes.sum()) for tensor in tensors.values())
        unused, idle = find_other_files(path, metadata)
        # Idle ranks belong to the world, too, though the metadata name none of their files.
        ranks = sorted({rank for name in (*metadata.files, *idle) if (rank := rank_of_file(name)) is not None})
        is_attribute = False
        with suppress(XrankError):  # lightning/pytorch/strategies/fsdp.py: FSDPStrategy.save_checkpoint
            is_attribute = is_of_lightning(read_archive(os.path.join(path, "meta.pt")).value)
        model = StoredModel(
            format=self.name,
            path=path,
            files=pieces.files,
            records=pieces.records,
            shards=pieces.shards,
            world_size=ranks[-1] + 1 if ranks else None,
            step=_step(path),
            nbytes=int(pieces.records.nbytes.sum()),
            skipped_nbytes=metadata.nbytes - kept_nbytes,
            notes=_notes(path, metadata, part, pieces, unused, hints.faults),
            details={**part_details(part), **_details(metadata, tensors, ranks, unused)},
            absent=left_out,
            part=hints.part,
            is_attribute=is_attribute,
        )
        return model, part


def read_folder(path: str) -> DcpMetadata:
    """Return the metadata of a folder; IncompleteError without the ``.metadata``, which is written last."""
    _check_files(path)
    return read_metadata(os.path.join(path, _METADATA))


def _check_files(path: str) -> None:
    entries = places.list_names(path)
    if _METADATA in entries:
        return
    file = os.path.join(path, _METADATA)
    own = sorted(entry for entry in entries if re.fullmatch(r"__\d+\.metadata", entry))
    if own:
        raise Origin(path).usage(
            "was saved without coordination: each rank has its own metadata, and none describes the whole checkpoint",
            f"{len(own)} files like {own[0]}",
            _METADATA,
            "save with coordination (torch's default), or load it and save it again with torch",
        )
    shards = sum(entry.endswith(_SUFFIX) for entry in entries)
    raise Origin(file).incomplete(
        "is missing: the checkpoint was not finished, or not copied whole",
        f"{shards} *.distcp files" + (", .metadata.tmp" if ".metadata.tmp" in entries else ""),
        "the .metadata that is written last",
        "copy .metadata from where the checkpoint was written, or use an earlier checkpoint",
    )


def _step(path: str) -> int | None:
    folder = places.absolute(path)
    # accelerate's folder has the number of the model, and the step is in its parent's name.
    is_numbered = MODEL_FOLDER.fullmatch(os.path.basename(folder))
    return find_step(os.path.dirname(folder) if is_numbered else folder, _STEP, levels=1)


def _notes(
    path: str, metadata: DcpMetadata, part: ChosenPart, pieces: DcpPieces, unused: Sequence[str], faults: Faults
) -> tuple[tuple[str, str], ...]:
    notes = file_notes(path, metadata, unused, faults)
    notes += part_notes(part)
    if metadata.byte_items:
        names = sorted(ascii(name)[1:-1][:100] for name in metadata.byte_items)
        notes.append(("byte-items", f"{len(names):,} values that are not tensors were left out: {list_text(names, 3)}"))
    return (*notes, *note_bare_files(pieces.unchecked))


def _details(
    metadata: DcpMetadata, tensors: Mapping[str, DcpTensor], ranks: Sequence[int], unused: Sequence[str]
) -> dict[str, Any]:
    return {
        "ranks that wrote": len(ranks),
        "values that are not tensors": len(metadata.byte_items),
        "chunks": describe_families((name, _grid(tensor)) for name, tensor in tensors.items()),
        "unused files": list(unused),
    }


def _grid(tensor: DcpTensor) -> str:
    """Return the number of parts in each dimension: ``4 x 2``."""
    cuts = [len(set(tensor.offsets[:, k].tolist())) for k in range(len(tensor.shape))]
    return " x ".join(map(str, cuts)) if max(cuts, default=1) > 1 else "whole"
