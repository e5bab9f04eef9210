"""The readers of checkpoints with one torch.save of a state dict per rank: verl's, SkyRL's, accelerate's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.dtypes import dtype
from xrank.errors import AGAIN, ContradictionError, option
from xrank.formats.torch_archive import TorchArchive
from xrank.layout import DeviceMesh
from xrank.layout.nests import Nest
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.layout.terms.tensors import box_nests
from xrank.readers.base import MAX_LISTED, RAISING, Faults, Hints, drop_outvoted
from xrank.readers.fsdp.rank_files import FsdpRankFile, RankFileReader
from xrank.readers.placement import HeldTensor, Placement, pieces_of, place_all, replicate
from xrank.readers.records import Records, Subject, absent_rank_error, find_step, nbytes_of, read_object
from xrank.storage import places
from xrank.storage.regular_file import Origin, quote
from xrank.words import likewise_text, list_text, ranks_text

_VERL_OTHERS = re.compile(r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_VERL_CONFIG = "fsdp_config.json"
_MAX_CONFIG_NBYTES = 1 << 20
_OTHER_RUN = f"move the files of another run to another folder, then {AGAIN}"


class RankFiles(Struct, frozen=True):
    """The files of one model."""

    folder: str
    by_rank: dict[int, str] = field(default_factory=dict)
    """Paths, by rising rank."""
    world_size: int | None = None
    """World size in the names; None if they do not contain it."""
    skipped: tuple[str, ...] = ()
    """Paths of the trainer's own files: optimizer, schedules."""

    def check(self, world_size: int, faults: Faults = RAISING) -> None:
        """Check that exactly the ranks of a world wrote files."""
        beyond = [rank for rank in self.by_rank if rank >= world_size]
        for rank in beyond:
            problem = f"belongs to rank {rank}, but the run has {world_size} ranks"
            origin, want = Origin(self.by_rank[rank], rank), f"ranks 0 to {world_size - 1}"
            faults.lose(origin.contradiction(problem, ranks_text(self.by_rank), want, _OTHER_RUN), origin.path)
        # A name may claim any number of ranks, so count the present ranks, not the absent ones.
        count = world_size - len(self.by_rank) + len(beyond)
        faults = RAISING if count > MAX_LISTED else faults
        absent = (rank for rank in range(world_size) if rank not in self.by_rank)
        got = f"files of {ranks_text(self.by_rank)}"
        for rank in absent if count else ():
            who = f"rank {rank}" if count == 1 or not faults.raises else f"rank {rank}, and {count - 1} more"
            file = self.name_file(rank)
            faults.lose(absent_rank_error(self.folder, file, rank, world_size, who=who, got=got), file)

    def name_file(self, rank: int) -> str:
        """Return the path of the file that a rank writes."""
        other, path = next(iter(self.by_rank.items()))
        return os.path.join(self.folder, re.sub(rf"(rank_?|_){other}\.", rf"\g<1>{rank}.", os.path.basename(path)))


_NAME = "_flat_param"
_SAVE_AGAIN = "all ranks must come from one run; save again"
_ALIGNMENT_NBYTES = 16
"""Alignment of parameters (torch/distributed/fsdp/_flat_param.py: _get_aligned_numel)."""

Index: TypeAlias = Callable[[str], int]
"""Key of a record in a rank's file -> its number in the source."""


class _Piece(Struct, frozen=True):
    """A rank's elements of one parameter."""

    held: HeldTensor
    buffer: str
    start: int
    """Index in the whole buffer."""
    stop: int


class FlatPieces(Struct, frozen=True):
    """The pieces of named parameters, and the buffers without names."""

    by_name: Mapping[str, tuple[_Piece, ...]]
    nameless: tuple[str, ...]


def is_flat(name: str) -> bool:
    """Return whether a ShardedTensor of that name is a flat parameter."""
    return name.rpartition(".")[2] == _NAME


def find_flat_pieces(files: Sequence[FsdpRankFile], indexes: Mapping[int, Index]) -> FlatPieces:
    """Return the places of all named parameters in their flat parameters."""
    found: dict[str, list[_Piece]] = {}
    buffers: dict[str, None] = {}
    for file in files:
        at = {}
        for name, part in file.sharded.items():
            if is_flat(name):
                buffers[name] = None
                # Named parameters are views of the buffer's storage, so they share its record's key.
                at.update({tensor.key: (name, box, tensor) for box, tensor in part.shards if len(box) == 1})
        for name, tensor in file.plain.items():
            if tensor.key not in at or len(tensor.shape) != 1 or not tensor.shape[0]:
                continue
            buffer, ((low, high),), whole = at[tensor.key]
            start = low + tensor.storage_offset - whole.storage_offset
            stop = start + tensor.shape[0]
            if not low <= start < stop <= high or tensor.strides != (1,):
                problem = f"{name} reaches beyond the rank's range of {buffer}"
                raise file.origin.corrupt(problem, f"{start}:{stop}", f"in {low}:{high}")
            held = file.hold(tensor, indexes[file.rank])
            found.setdefault(name, []).append(_Piece(held, buffer, start, stop))
    for file in files:
        for name in found:
            held_by = {piece.held.rank for piece in found[name]}
            if file.rank not in held_by and name in file.plain and 0 not in file.plain[name].shape:
                problem = f"it is a piece of a flat parameter on {ranks_text(held_by)}, but a whole tensor on rank"
                got = f"shape {list(file.plain[name].shape)}"
                raise file.of(name).contradiction(f"{problem} {file.rank}", got, None, _SAVE_AGAIN)
    members: dict[str, list[_Piece]] = {}
    for piece in chain.from_iterable(found.values()):
        members.setdefault(piece.buffer, []).append(piece)
    for buffer, pieces in members.items():
        _check_gaps(buffer, files, pieces)
    named = {name: tuple(pieces) for name, pieces in found.items()}
    return FlatPieces(named, tuple(name for name in buffers if name not in members))


def _check_gaps(buffer: str, files: Sequence[FsdpRankFile], pieces: Iterable[_Piece]) -> None:
    """Check that only padding lies between the parameters."""
    parts = [file.sharded[buffer] for file in files if buffer in file.sharded]
    size = parts[0].shape[0]
    padding = _ALIGNMENT_NBYTES // dtype(parts[0].dtype).nbytes
    stand = 0
    # The buffer's end is the last entry, so that the gap before it is checked, too.
    for start, stop in [*sorted({(piece.start, piece.stop) for piece in pieces}), (size, size)]:
        # The end is also padded to a multiple of the number of ranks.
        room = padding if start < size else padding + len(parts)
        if start - stand > room:
            raise Subject(buffer, None, files[0].archive.path).contradiction(
                f"elements {stand} to {start - 1} belong to no named parameter",
                f"{start - stand} elements",
                f"at most {room} of padding",
                "save the whole state dict, with all its names",
            )
        stand = max(stand, stop)


def flat_shards(pieces: FlatPieces, shapes: Mapping[str, tuple[int, ...]]) -> list[StoredShard]:
    """Return every named parameter with its pieces."""
    unknown = {name: _extent(name, own) for name, own in pieces.by_name.items() if name not in shapes}
    if unknown:
        name, (start, stop) = next(iter(unknown.items()))
        more = likewise_text([other for other in unknown if other != name])
        subject = pieces.by_name[name][0].held.of(name)
        raise subject.layout(
            f"a flat parameter contains its elements but not its shape{more}",
            f"{stop - start} elements",
            "the tensor's whole shape in a base model",
            f"give {option('base_model', metavar='DIR')}, or save with SHARDED_STATE_DICT or FULL_STATE_DICT",
        )
    return [_shard(name, own, shapes[name]) for name, own in pieces.by_name.items()]


def _extent(name: str, pieces: Sequence[_Piece]) -> tuple[int, int]:
    """Return a parameter's range of its buffer, after checking that its pieces leave no hole."""
    # A set, because replicas repeat a range.
    ranges = sorted({(piece.start, piece.stop) for piece in pieces})
    kinds = [(piece.buffer, piece.held.dtype) for piece in pieces]
    if len(set(kinds)) > 1:
        first, other = pieces[0].held, next(p.held for p, kind in zip(pieces, kinds, strict=True) if kind != kinds[0])
        got = next(kind for kind in kinds if kind != kinds[0])
        raise other.of(name).disagreement(first.rank, "flat parameter or type", str(got), str(kinds[0]), _SAVE_AGAIN)
    stand = ranges[0][0]
    for start, stop in ranges:
        if start != stand:
            problem = f"elements {stand} to {start - 1} of {pieces[0].buffer} are on no rank"
            step = "save the state dict of all ranks again"
            ranks = ranks_text(piece.held.rank for piece in pieces)
            raise pieces[0].held.of(name).incomplete(problem, ranks, "a piece on every rank in between", step)
        stand = stop
    return ranges[0][0], stand


def _shard(name: str, pieces: Sequence[_Piece], shape: tuple[int, ...]) -> StoredShard:
    first, stop = _extent(name, pieces)
    if prod(shape) != stop - first:
        problem = "the base model's shape does not fit the number of elements in the flat parameter"
        got, want = f"{stop - first} elements", f"{prod(shape)}, for the shape {list(shape)}"
        raise pieces[0].held.of(name).layout(problem, got, want, "give the base model that was trained")
    nests = [(Nest(0, p.start - first, ((p.stop - p.start, 1, 1),) if p.stop - p.start > 1 else ()),) for p in pieces]
    return pieces_of(name, [piece.held for piece in pieces], shape, nests)


def _distinct(files: Iterable[FsdpRankFile]) -> list[FsdpRankFile]:
    """Return the first of the files that share their tensors, for what such files have alike."""
    first: dict[tuple[int, ...], FsdpRankFile] = {}
    for file in files:
        first.setdefault((id(file.dtensors), id(file.sharded), id(file.plain)), file)
    return list(first.values())


def check_kinds(files: Sequence[FsdpRankFile]) -> None:
    """Check that each name is one kind of tensor on all ranks."""
    kinds: dict[str, tuple[FsdpRankFile, str]] = {}
    for file in _distinct(files):
        for kind, names in (("DTensor", file.dtensors), ("ShardedTensor", file.sharded), ("plain tensor", file.plain)):
            for name in names:
                first, before = kinds.setdefault(name, (file, kind))
                if before != kind:
                    problem = f"it is a {before} on rank {first.rank} and a {kind} on rank {file.rank}"
                    raise file.of(name).contradiction(problem, kind, before)


def list_parts(
    files: Sequence[FsdpRankFile], indexes: Mapping[int, Index], pieces: FlatPieces, world_size: int, hints: Hints
) -> Iterator[tuple[str, list[HeldTensor]]]:
    """Yield the name and the ranks' parts, by rising rank, of each tensor that a layout places.

    Beside DTensors and ShardedTensors, plain tensors are replicas, because torch saves cut tensors as one of those two.
    If no file contains either, hints place the plain tensors.
    """
    are_replicas = any(file.dtensors or file.sharded for file in files)
    world = DeviceMesh((world_size,), ("rank",))
    groups: dict[int, list[FsdpRankFile]] = {}
    names: dict[str, None] = {}
    for file in files:
        group = groups.setdefault(id(file.dtensors), [])
        group.append(file)
        if len(group) == 1:
            names.update(dict.fromkeys((*file.dtensors, *(name for name in file.plain if name not in pieces.by_name))))
        names.update(dict.fromkeys(name for name in pieces.nameless if name in file.sharded))
    for name in names:
        held: list[HeldTensor] = []
        for first, *others in groups.values():
            part, plain, key = first.dtensors.get(name), first.plain.get(name), ""
            if part is not None:
                own = first.hold(part.local, indexes[first.rank])
                own, key = replace(own, layout=part.layout, mesh=part.mesh, global_shape=part.shape), part.local.key
            elif plain is not None and name not in pieces.by_name:
                own, key = first.hold(plain, indexes[first.rank]), plain.key
                # A rule of the layout file overrides this assumption.
                if are_replicas and not _has_rule(hints, name):
                    own = replicate(own, world)
            else:
                held += _hold_nameless(name, [first, *others], indexes, pieces, hints)
                continue
            held.append(own)
            held += own.on((file.rank, file.archive.path, indexes[file.rank](key)) for file in others)
        yield name, sorted(held, key=lambda each: each.rank)


def _hold_nameless(
    name: str, files: Sequence[FsdpRankFile], indexes: Mapping[int, Index], pieces: FlatPieces, hints: Hints
) -> Iterator[HeldTensor]:
    """Yield the ranks' parts of a flat parameter that does not record the names of its members."""
    for file in files if name in pieces.nameless else ():
        if name not in file.sharded:
            continue
        if not _has_rule(hints, name):
            problem = "a flat parameter that records neither names nor shapes of its members"
            step = (
                "save with SHARDED_STATE_DICT or FULL_STATE_DICT (load it first), or give a rule "
                f'like "{name}" = "flat(a [7, 10], b [7])/~fsdp" by {option("layouts", metavar="FILE")}'
            )
            got = f"{file.sharded[name].shape[0]} elements"
            raise file.of(name).layout(problem, got, "parameters by name", step)
        yield from (file.hold(tensor, indexes[file.rank]) for _, tensor in file.sharded[name].shards)


def _has_rule(hints: Hints, name: str) -> bool:
    return hints.layouts is not None and hints.layouts.rule_for(name) is not None


def locate_boxed_shards(files: Sequence[FsdpRankFile], indexes: Mapping[int, Index]) -> list[StoredShard]:
    """Return every ShardedTensor that is not a flat parameter, with all its boxes."""
    shards = []
    for name in dict.fromkeys(name for file in files for name in file.sharded if not is_flat(name)):
        parts = [(file, file.sharded[name]) for file in files if name in file.sharded]
        _, first = parts[0]
        held, nests = [], []
        for file, part in parts:
            if (part.dtype, part.shape, part.boxes) != (first.dtype, first.shape, first.boxes):
                got, want = (f"{p.dtype} {list(p.shape)} in {len(p.boxes)} shards" for p in (part, first))
                raise file.of(name).contradiction("ranks disagree about its type, shape or shards", got, want)
            for box, tensor in part.shards:
                held.append(file.hold(tensor, indexes[file.rank]))
                nests.append(box_nests(box, part.shape))
        if held:
            shards.append(pieces_of(name, held, first.shape, nests))
        elif first.boxes:
            path = parts[0][0].archive.path
            want = f"{len(first.boxes)} shards"
            raise Subject(name, None, path).contradiction("no rank holds any of it", "no shard", want)
    return shards


_STEP = re.compile(r"(?:.*[^a-z])?(?:global_step|checkpoint|step|epoch)[-_]?0*(\d{1,18})")
_MAX_SHOWN = 8


class _RanksReader:
    """A reader of folders in which each rank saved a state dict by itself, by the names of the files."""

    name: str
    pattern: re.Pattern[str]
    """Names of the files. Group 1 differs between models or runs in one folder; group 2 is the rank."""
    example: str

    def recognize(self, path: str) -> str | None:
        """Return None if the folder contains files named by rank."""
        if not places.is_folder(path):
            return "not a folder"
        if any(map(self.pattern.fullmatch, places.list_names(path))):
            return None
        return f"no {self.example} in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        listed = self.list_files(path, hints.faults)
        files, reader = [], RankFileReader()
        for rank, file in listed.by_rank.items():
            if file not in hints.faults.files:
                with hints.faults.losing(file):
                    files.append(self._read_file(reader, file, rank))
        return describe_rank_files(self.name, path, listed, files, hints)

    def _read_file(self, reader: RankFileReader, path: str, rank: int) -> FsdpRankFile:
        file = reader.read(path, rank)
        archive, (stem, suffix) = file.archive, os.path.splitext(os.path.basename(path))
        saved_as = archive.name + suffix if isinstance(archive, TorchArchive) else stem + suffix
        # A copy under another rank's name still has the name under which it was saved.
        if saved_as != stem + suffix and self.pattern.fullmatch(saved_as):
            raise ContradictionError(
                f"{Origin(path, rank).name} was saved under a different name",
                rank=rank,
                file=path,
                got=saved_as,
                want=stem + suffix,
                next_step=f"copy the file of rank {rank} again, or let all ranks write again",
            )
        return file

    def list_files(self, path: str, faults: Faults) -> RankFiles:
        """Return the files of the one model in a folder."""
        raise NotImplementedError

    def group_files(self, folder: str) -> dict[str, dict[int, str]]:
        """Return the paths of the ranks' files, by the first number in their names and by rank."""
        groups: dict[str, dict[int, str]] = {}
        for entry in sorted(places.list_names(folder)):
            match = self.pattern.fullmatch(entry)
            if match is not None:
                groups.setdefault(match[1] or "", {})[int(match[2])] = os.path.join(folder, entry)
        if not groups:
            raise Origin(folder).incomplete("contains no rank's file", None, self.example, "check the path")
        return groups


class VerlReader(_RanksReader):
    """The reader of verl's and SkyRL's FSDP checkpoints (`xrank.readers.base.Reader`)."""

    name = "verl"
    # verl/utils/checkpoint/fsdp_checkpoint_manager.py: save_checkpoint; SkyRL uses the same names.
    pattern = re.compile(r"model_world_size_([1-9]\d{0,8})_rank_(0|[1-9]\d{0,8})\.pt")
    example = "model_world_size_<N>_rank_<r>.pt"

    def list_files(self, path: str, faults: Faults) -> RankFiles:
        """Return the model's files; those of two runs are an error."""
        worlds = {int(number): by_rank for number, by_rank in self.group_files(path).items()}
        # Older verl records none.
        recorded = read_object(os.path.join(path, _VERL_CONFIG), _MAX_CONFIG_NBYTES).get("world_size")
        recorded = recorded if type(recorded) is int else None
        if len(worlds) > 1 or (recorded is not None and recorded not in worlds):
            is_odd = recorded is None or len(worlds) > 1
            file = next(iter(worlds[max(worlds)].values())) if is_odd else os.path.join(path, _VERL_CONFIG)
            got = "; ".join(f"world of {n}: {ranks_text(ranks)}" for n, ranks in sorted(worlds.items()))
            got += f"; {_VERL_CONFIG}: world of {recorded}" if recorded is not None else ""
            problem = "belongs to a different run than other files in the folder"
            raise Origin(file).contradiction(problem, got, "one world size", _OTHER_RUN)
        ((world_size, by_rank),) = worlds.items()
        others = sorted(filter(_VERL_OTHERS.fullmatch, places.list_names(path)))
        paths = tuple(os.path.join(path, entry) for entry in others)
        files = RankFiles(path, dict(sorted(by_rank.items())), world_size, paths)
        files.check(world_size, faults)
        return files


class AccelerateRanksReader(_RanksReader):
    """The reader of accelerate's per-rank files without DCP (`xrank.readers.base.Reader`)."""

    name = "accelerate-ranks"
    # accelerate/utils/fsdp_utils.py: save_fsdp_model. The number is the model's; LOCAL_STATE_DICT omits a 0.
    pattern = re.compile(r"pytorch_model_fsdp(?:_(0|[1-9]\d{0,4}))?_rank(0|[1-9]\d{0,8})\.bin")
    example = "pytorch_model_fsdp_rank<r>.bin"

    def recognize(self, path: str) -> str | None:
        """Return None for a folder with files named by rank, or for such a file if its folder has several models."""
        if places.is_file(path) and self.pattern.fullmatch(os.path.basename(path)):
            models = self.group_files(os.path.dirname(places.absolute(path)))
            return None if len(models) > 1 else "one rank's file; its folder is the checkpoint"
        return super().recognize(path)

    def list_files(self, path: str, faults: Faults) -> RankFiles:
        """Return the files of the one model in a folder, or of the model to which a given file belongs."""
        folder = path if places.is_folder(path) else os.path.dirname(places.absolute(path))
        models = self.group_files(folder)
        if path != folder:
            named = self.pattern.fullmatch(os.path.basename(path))
            models = {k: ranks for k, ranks in models.items() if named is not None and k == (named[1] or "")} or models
        if len(models) > 1:
            files = [next(iter(ranks.values())) for _, ranks in sorted(models.items())]
            step = f"give the path of a file of one model, such as {files[0]}"
            got = list_text(map(os.path.basename, files), 10)
            raise Origin(folder).usage(f"contains {len(models)} models", got, "one", step)
        ((_, by_rank),) = models.items()
        found = RankFiles(folder, dict(sorted(by_rank.items())))
        found.check(max(by_rank) + 1, faults)
        return found


def describe_rank_files(
    format_name: str, path: str, listed: RankFiles, files: Sequence[FsdpRankFile], hints: Hints
) -> StoredModel:
    """Return where every tensor lies in the ranks' files."""
    faults = hints.faults
    files = list(drop_outvoted({file.rank: file for file in files}, _kinds_of, faults).values())
    if not files:
        raise next(iter(faults.files.values()))
    world_size = _world_size(files, listed, faults)
    files = [file for file in files if file.archive.path not in faults.files]
    records = Records()
    present = {file.rank for file in files}
    for rank in range(world_size) if faults.files else ():
        if rank not in present and (lost := listed.by_rank.get(rank) or listed.name_file(rank)) in faults.files:
            faults.ranks[rank] = lost, records.add_lost(lost)
    indexes = {file.rank: _index_records(file, records) for file in files}
    check_kinds(files)
    pieces = find_flat_pieces(files, indexes)
    # The records of files with ShardedTensors are numbered file by file too: the digest of a plan depends on it.
    for file in (file for file in files if file.sharded):
        named = (tensor for name, tensor in file.plain.items() if name not in pieces.by_name)
        nameless = [file.sharded[name].shards for name in pieces.nameless if name in file.sharded]
        flat = (tensor for shards in nameless for _, tensor in shards)
        for tensor in (*(part.local for part in file.dtensors.values()), *named, *flat):
            indexes[file.rank](tensor.key)
    parts = partial(list_parts, files, indexes, pieces, world_size, hints)
    placement = place_all(parts, hints, world_size=world_size)
    listing = (*placement.shards, *flat_shards(pieces, hints.shapes), *locate_boxed_shards(files, indexes))
    shards = {shard.name: shard for shard in listing}
    ordered = [
        tensor
        for file in _distinct(files)
        for tensor in (*file.dtensors, *file.sharded, *file.plain)
        if tensor in shards
    ]
    # Last what no file names: the members of flat buffers that only a layout file knows.
    ordered += list(shards)
    return StoredModel(
        format=format_name,
        path=path,
        files=tuple(records.files),
        records=records.table(faults.files),
        shards=tuple(shards[tensor] for tensor in dict.fromkeys(ordered)),
        absent=placement.absent,
        world_size=world_size,
        step=find_step(listed.folder, _STEP),
        nbytes=records.nbytes,
        skipped_nbytes=nbytes_of(listed.skipped),
        notes=_notes(files, records, placement),
        layouts=placement.layouts,
        details=_details(listed, files),
    )


def _kinds_of(file: FsdpRankFile) -> dict[str, object]:
    """Return what the files of one model record alike of their tensors."""
    kinds: dict[str, object] = {name: ("plain tensor", one.dtype) for name, one in file.plain.items()}
    kinds.update((name, ("ShardedTensor", one.dtype, one.shape)) for name, one in file.sharded.items())
    for name, part in file.dtensors.items():
        kinds[name] = "DTensor", part.local.dtype, part.shape, part.layout, part.mesh.grid
    return kinds


def _index_records(file: FsdpRankFile, records: Records) -> Index:
    if not isinstance(file.archive, TorchArchive):
        return records.add_safetensors(file.archive)
    if file.sharded:  # the record of a flat parameter may hold padding alone
        return records.add_archive(file.archive)
    first = records.add_records(file.archive, file.keys)
    return lambda key: first + file.keys[key]


def _world_size(files: Sequence[FsdpRankFile], listed: RankFiles, faults: Faults) -> int:
    """Return the world size, after checking that all files agree on it and that all its ranks are present."""
    recorded = [(file, part.world_size) for file in files for part in file.sharded.values()]
    # A DTensor's mesh may be smaller than the run, so it gives only a lower bound.
    meshes = [(file, {id(part.mesh): part.mesh for part in file.dtensors.values()}) for file in _distinct(files)]
    least = [(file, max(mesh.ranks) + 1) for file, own in meshes for mesh in own.values()]
    expected = listed.world_size or (recorded[0][1] if recorded else max((size for _, size in least), default=0))
    for file, size in (*((f, n) for f, n in recorded if n != expected), *((f, n) for f, n in least if n > expected)):
        got = f"{size} ranks, by its tensors"
        error = file.origin.contradiction("belongs to a run with a different number of ranks", got, f"{expected} ranks")
        faults.lose(error, file.archive.path)
    world_size = max(expected, len(files))
    listed.check(world_size, faults)
    return world_size


def _notes(files: Sequence[FsdpRankFile], records: Records, placement: Placement) -> tuple[tuple[str, str], ...]:
    notes = [*placement.notes, *records.notes()]
    others = list(dict.fromkeys(name for file in _distinct(files) for name in file.others))
    if others:
        names = list_text((quote(name)[1:-1] for name in others), _MAX_SHOWN)
        notes.append(("left-out", f"{len(others)} values that are not tensors were left out: {names}"))
    return tuple(notes)


def _details(listed: RankFiles, files: Sequence[FsdpRankFile]) -> dict[str, Any]:
    all_files, files = files, _distinct(files)
    names = {name for file in files for name in (*file.dtensors, *file.sharded, *file.plain)}
    return {
        "rank files": len(all_files),
        "meshes": sorted({part.mesh.grid for file in files for part in file.dtensors.values()}),
        "layouts": sorted({part.layout for file in files for part in file.dtensors.values()})[:_MAX_SHOWN],
        "DTensors": len({name for file in files for name in file.dtensors}),
        "ShardedTensors": len({name for file in files for name in file.sharded if not is_flat(name)}),
        "flat parameters": len({name for file in files for name in file.sharded if is_flat(name)}),
        "plain tensors": len({name for file in files for name in file.plain}),
        "LoRA tensors": sum(".lora_" in name for name in names),
        "huggingface": places.is_folder(os.path.join(listed.folder, "huggingface")),
    }
