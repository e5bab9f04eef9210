"""The reader of torch_checkpointing: one file per item and rank, as torch.save or as safetensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import LayoutError, UsageError, XrankError, either, option
from xrank.formats.pickles import MAX_PICKLE_NBYTES, read_pickle
from xrank.formats.safetensors_header import read_header
from xrank.formats.torch_archive import ArchivedTensor, element_type
from xrank.layout import DeviceMesh
from xrank.layout.nests import row_major
from xrank.layout.stored_model import StoredModel
from xrank.layout.terms.tensors import from_placements
from xrank.readers.base import Hints
from xrank.readers.fsdp.rank_files import (
    DTensorPart,
    FsdpRankFile,
    RankFileReader,
    build_placement,
    make_mesh,
    sizes_of,
)
from xrank.readers.fsdp.reader import RankFiles, describe_rank_files
from xrank.readers.records import ONE_SAVE, absent_rank_error, outside_error, read_small, read_start
from xrank.storage import places
from xrank.storage.entries import Entry
from xrank.storage.regular_file import Origin, quote
from xrank.words import list_text, plural, ranks_text

METADATA = "metadata.pkl"

_VERSION = "2.0"
_DTENSOR = "DTensorShardingMetadata"
_PLACEMENTS = {"Shard": "Shard", "StridedShard": "_StridedShard", "Replicate": "Replicate"}
_MAX_RANKS = 1 << 24


class SavedCut(Struct, frozen=True):
    """How a tensor was cut over a mesh."""

    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    """Global shape."""
    layout: str
    mesh: DeviceMesh


class ItemMetadata(Struct, frozen=True):
    """One item of a checkpoint, such as the model."""

    files: Mapping[int, tuple[str, str]]
    """Rank -> path in the checkpoint's folder, and kind of the file: ``TorchSerialization``, ..."""
    cuts: Sequence[tuple[str, frozenset[int], SavedCut]]
    """Name of a tensor, ranks that hold a part of it, and its cut over them."""

    def cuts_of(self, rank: int) -> dict[str, SavedCut]:
        """Return the cuts of the tensors that a rank holds, by name."""
        return {name: cut for name, ranks, cut in self.cuts if rank in ranks}


def read_metadata(folder: str) -> tuple[int | None, dict[str, ItemMetadata]]:
    """Return the world size and the items that a checkpoint's metadata record; (None, {}) without metadata."""
    path = os.path.join(folder, METADATA)
    if not places.is_present(path):
        return None, {}
    origin = Origin(path)
    read = read_pickle(read_small(path, MAX_PICKLE_NBYTES), origin).value
    value = Entry(read, lambda fault: origin.corrupt("is not metadata of torch_checkpointing", fault))
    if value["version"].text() != _VERSION:
        raise origin.usage(
            "was written by a different version of torch_checkpointing",
            quote(value["version"].text()),
            _VERSION,
            "load it with torch_checkpointing and save it again",
        )
    world_size = value["world_size"].count(low=1, below=_MAX_RANKS)
    parser = _Parser(origin, world_size)
    return world_size, {key: parser.item(key, one) for key, one in value["metadata"].items()}


class _Parser:
    """Turns plain values into metadata; values that many tensors share are converted once."""

    def __init__(self, origin: Origin, world_size: int) -> None:
        self._origin = origin
        self._world_size = world_size
        # Keyed by identity: the pickle's value keeps the objects alive, and holds a shared object once.
        self._meshes: dict[int, DeviceMesh] = {}
        self._ranks: dict[int, frozenset[int]] = {}
        self._layouts: dict[object, str] = {}

    def item(self, key: str, value: Entry) -> ItemMetadata:
        layouts = value["rank_to_layout_info"]
        if not isinstance(layouts.value, dict) or {*layouts.value} != {*range(self._world_size)}:
            layouts.refuse(f"an object with the {self._world_size} ranks as its keys")
        files = {rank: self._file(key, rank, layouts.at(rank)) for rank in layouts.value}
        return ItemMetadata(files, tuple(self._cuts(value["nested_path_to_metadata"])))

    def _file(self, key: str, rank: int, layout: Entry) -> tuple[str, str]:
        # checkpoint_layout.py: default_torch_layout_info.
        path, kind = f"{key}_{rank}.pt", "TorchSerialization"
        if layout.value is not None:
            path, kind = layout["file_path"].text(), layout["serialization_format"]["type"].text()
        parts = path.split("/")
        if "\0" in path or any(part in ("", ".", "..") for part in parts):
            raise outside_error(self._origin.path, path)
        return path, kind

    def _cuts(self, value: Entry) -> Iterator[tuple[str, frozenset[int], SavedCut]]:
        for place, groups in value.items():
            name = self._name(place)
            for group in groups.entries():
                saved = group["sharding_metadata"]
                if saved["type"].text() != _DTENSOR:
                    raise self._origin.usage(
                        f"{quote(name)}: no reader knows how its parts were split",
                        quote(saved["type"].text()),
                        _DTENSOR,
                        "load it with torch_checkpointing and save DTensors or plain tensors",
                    )
                ranks, cut = self._ranks_of(group["ranks"]), self._cut(name, saved["data"])
                if not ranks.issubset(cut.mesh.ranks):
                    group["ranks"].refuse(f"ranks of the mesh of {quote(name)}")
                yield name, ranks, cut

    def _name(self, place: str) -> str:
        """Return the name of a tensor by its place, a list of keys as JSON."""
        problem = f"lists a tensor as {quote(place)}, not as a list of keys in JSON"
        parts = Entry.parse(place, lambda fault: self._origin.corrupt(problem, fault)).entries()
        if not parts:
            raise self._origin.corrupt(problem)
        return ".".join(str(part.count()) if isinstance(part.value, int) else part.text() for part in parts)

    def _ranks_of(self, entry: Entry) -> frozenset[int]:
        if id(entry.value) not in self._ranks:
            self._ranks[id(entry.value)] = frozenset(entry.counts(below=self._world_size))
        return self._ranks[id(entry.value)]

    def _cut(self, name: str, data: Entry) -> SavedCut:
        shape = sizes_of(data["global_shape"].value, self._origin)
        mesh = self._mesh(data["mesh_spec"])
        kinds = tuple(self._placement(one) for one in data["placements"].entries())
        key = (mesh, kinds, len(shape))
        if key not in self._layouts:
            try:
                self._layouts[key] = str(from_placements(mesh, kinds, len(shape)))
            except LayoutError as error:
                error.about(name, tensor=name, file=self._origin.path, next_step="copy the file again")
                raise
        return SavedCut(element_type(data["dtype"].text(), self._origin), shape, self._layouts[key], mesh)

    def _mesh(self, spec: Entry) -> DeviceMesh:
        if id(spec.value) not in self._meshes:
            names = spec["mesh_dim_names"]
            try:
                self._meshes[id(spec.value)] = make_mesh(
                    spec["mesh_shape"].counts(below=_MAX_RANKS),
                    None if names.value is None else names.texts(),
                    spec["mesh_data"].counts(below=_MAX_RANKS),
                )
            except LayoutError as error:
                error.about(self._origin.name, file=self._origin.path, next_step="copy the file again")
                raise
        return self._meshes[id(spec.value)]

    def _placement(self, value: Entry) -> Any:
        placement = build_placement(_PLACEMENTS.get(value["type"].text()), value.table())
        if placement is None:
            value["type"].refuse(f"one of {', '.join(_PLACEMENTS)}, with its dim")
        return placement


# checkpoint_layout.py: default_torch_layout_info; schema.py: ItemSpec.layout for safetensors.
_FILE = re.compile(r"(.+)_(0|[1-9]\d{0,8})\.(pt|safetensors)")
_MODEL = "model"
_NO_MODEL = re.compile(r"(?i).*(optim|sched|step|rng|loader|dataset|config|epoch|train_state).*")
"""Names of items that trainers save beside a model."""
_TORCH, _SAFETENSORS = "TorchSerialization", "SafetensorsSerialization"
_KINDS = {"pt": _TORCH, "safetensors": _SAFETENSORS}
# The first keys of metadata.pkl, by which other programs' files of that name are told apart.
_MARK = b"nested_path_to_metadata"
_MAX_MARK_NBYTES = 4096


class ModelFiles(Struct, frozen=True):
    """The files of the item that is the model."""

    item: str
    listed: RankFiles
    are_safetensors: bool
    metadata: ItemMetadata | None
    """How its tensors were cut; None if the checkpoint was saved without a resharder for the item."""
    others: tuple[str, ...]
    """Other items that may be models, such as averaged weights."""


def find_model_files(path: str) -> ModelFiles:
    """Return the files of a checkpoint's model, or of the item to which a given file belongs."""
    folder = path if places.is_folder(path) else os.path.dirname(places.absolute(path))
    world_size, saved_items = read_metadata(folder)
    items = _list_items(folder)
    item = _choose_item(path, folder, items, saved_items)
    saved = saved_items.get(item)
    skipped = [os.path.join(folder, name) for key, files in items.items() if key != item for name in files.values()]
    named = {rank: (name, _KINDS[name.rpartition(".")[2]]) for rank, name in items.get(item, {}).items()}
    files = named if saved is None else saved.files
    kinds = {kind for _, kind in files.values()}
    # Other items may have been saved on ranks whose file of the model is missing.
    if world_size is None:
        world_size = max((rank + 1 for ranks in items.values() for rank in ranks), default=1)
    by_rank = {rank: os.path.join(folder, name) for rank, (name, _) in sorted(files.items())}
    listed = RankFiles(folder, by_rank, world_size, tuple(skipped))
    if saved is not None:
        _check_ranks(listed, world_size, named)
    listed.check(world_size)
    if len(kinds) > 1 or not kinds <= {_TORCH, _SAFETENSORS}:
        raise UsageError(
            f"the item {item} of {folder} was not saved as one kind of tensor files",
            file=folder,
            got=", ".join(sorted(map(str, kinds))),
            want=f"{_TORCH} or {_SAFETENSORS} on all ranks",
            next_step="load it with torch_checkpointing and save it in one layout",
        )
    others = tuple(other for other in items if other != item and not _NO_MODEL.fullmatch(other))
    return ModelFiles(item, listed, kinds == {_SAFETENSORS}, saved, others)


def _list_items(folder: str) -> dict[str, dict[int, str]]:
    """Return item -> rank -> name of the file, by the names of the files."""
    items: dict[str, dict[int, str]] = {}
    for name in sorted(places.list_names(folder)):
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        own = items.setdefault(match[1], {})
        other = own.setdefault(int(match[2]), name)
        if other != name:
            problem = f"{name} and {other} are files of the same item and rank, so they are from two saves"
            origin = Origin(os.path.join(folder, name), int(match[2]))
            raise origin.contradiction(problem, f"{other} and {name}", "one of them", ONE_SAVE)
    return items


def _choose_item(path: str, folder: str, items: Mapping[str, Mapping[int, str]], saved: Iterable[str]) -> str:
    match = _FILE.fullmatch(os.path.basename(path)) if path != folder else None
    if match is not None:
        return match[1]
    known = dict.fromkeys([*saved, *items])
    found = [_MODEL] if _MODEL in known else [item for item in known if not _NO_MODEL.fullmatch(item)]
    if len(found) == 1:
        return found[0]
    file = next((name for item in found for name in items.get(item, {}).values()), None)
    step = f"save the model as the item {_MODEL}"
    if file:
        step = f"give the path of a file of the item, such as {os.path.join(folder, file)}"
    problem = f"contains {len(found) or 'no'} items that may be the model"
    raise Origin(folder).usage(problem, list_text(known, 10), f"an item {_MODEL}, or a single other one", step)


def _check_ranks(listed: RankFiles, world_size: int, named: Mapping[int, tuple[str, str]]) -> None:
    missing = [rank for rank, file in listed.by_rank.items() if not places.is_present(file)]
    if missing:
        file, who = listed.by_rank[missing[0]], ranks_text(missing)
        raise absent_rank_error(listed.folder, file, missing[0], world_size, who=who, got=f"no files of {who}")
    beyond = min(set(named) - set(listed.by_rank), default=None)
    if beyond is not None:
        problem = f"belongs to rank {beyond}, but {METADATA} records {world_size} ranks"
        origin = Origin(os.path.join(listed.folder, named[beyond][0]), beyond)
        raise origin.contradiction(problem, ranks_text([*named]), f"ranks 0 to {world_size - 1}", ONE_SAVE)


class TorchCheckpointingReader:
    """The reader of torch_checkpointing's folders (`xrank.readers.base.Reader`)."""

    name = "torch-checkpointing"

    def recognize(self, path: str) -> str | None:
        """Return None for a folder with ``metadata.pkl`` or ``model_0.pt``, or for a file of another item."""
        if not places.is_folder(path):
            match = _FILE.fullmatch(os.path.basename(path))
            if match is None or self.recognize(os.path.dirname(places.absolute(path))) is not None:
                return "no file of a torch_checkpointing checkpoint"
            if _NO_MODEL.fullmatch(match[1]):
                return "an optimizer's or a trainer's own state"
            return "one rank's file; its folder is the checkpoint" if match[1] == _MODEL else None
        names = places.list_names(path)
        with suppress(XrankError):
            if METADATA in names and _MARK in read_start(os.path.join(path, METADATA), _MAX_MARK_NBYTES):
                return None
        # Only the names of the files show the format without metadata; others number files from 1, or by steps.
        if f"{_MODEL}_0.pt" in names or (f"{_MODEL}_0.safetensors" in names and f"{_MODEL}.safetensors" not in names):
            return None
        return f"no {METADATA} with files of ranks, and no {_MODEL}_0.pt"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        found = find_model_files(path)
        files, reader = [], RankFileReader(is_nested=True)
        for rank, file in found.listed.by_rank.items():
            if found.are_safetensors:
                header = read_header(file)
                plain = {
                    tensor.name: ArchivedTensor(tensor.name, tensor.dtype, tensor.shape, row_major(tensor.shape), 0)
                    for tensor in header.tensors
                }
                read = FsdpRankFile(rank, header, {}, {}, plain, ())
            else:
                read = reader.read(file, rank)
            files.append(read if found.metadata is None else _apply_cuts(read, found.metadata.cuts_of(rank)))
        if found.are_safetensors and found.metadata is None:
            hints = _limit_hints(found, hints)
        model = describe_rank_files(self.name, path, found.listed, files, hints)
        notes = list(model.notes)
        if found.others:
            notes.append(("left-out", f"items other than {found.item} were left out: {list_text(found.others)}"))
        return replace(model, notes=tuple(notes), details={**model.details, "item": found.item})


def _apply_cuts(file: FsdpRankFile, cuts: dict[str, SavedCut]) -> FsdpRankFile:
    """Return a rank's file whose plain tensors have the cuts that the metadata records."""
    held = {**file.dtensors, **file.sharded, **file.plain}
    odd = sorted(cuts.keys() ^ held.keys())
    if odd:
        got = "the tensor in the file" if odd[0] in held else "no such tensor in the file"
        want = f"it {'is' if odd[0] in cuts else 'is not'} in {METADATA}"
        raise file.of(odd[0]).contradiction(f"{METADATA} and {file.archive.path} disagree about it", got, want)
    kinds = {name: (part.local.dtype, part.shape) for name, part in file.dtensors.items()}
    kinds.update((name, (part.dtype, part.shape)) for name, part in file.sharded.items())
    kinds.update((name, (part.dtype, cuts[name].shape)) for name, part in file.plain.items())
    for name, (dtype, shape) in kinds.items():
        cut = cuts[name]
        if (dtype, shape) != (cut.dtype, cut.shape):
            problem = f"{METADATA} and {file.archive.path} record different types or shapes"
            want = f"{cut.dtype} {list(cut.shape)}, as in {METADATA}"
            raise file.of(name).contradiction(problem, f"{dtype} {list(shape)}", want)
    parts = {
        name: DTensorPart(tensor, cuts[name].layout, cuts[name].mesh, cuts[name].shape)
        for name, tensor in file.plain.items()
    }
    # No plain tensor is left, which beside DTensors would count as a replica.
    return replace(file, dtensors={**file.dtensors, **parts}, plain={})


def _limit_hints(found: ModelFiles, hints: Hints) -> Hints:
    """Return the hints that can place ranks' elements whose cuts are recorded nowhere.

    A base model's shapes show whether the file of a single rank is a whole model. They do not show the order of the
    parts of several ranks: FSDP2 over tensor parallelism cuts rows in another order than that of the ranks.
    """
    num_ranks = len(found.listed.by_rank)
    if hints.layouts is not None:
        return replace(hints, shapes={})
    if num_ranks == 1 and hints.shapes:
        return hints
    file = next(iter(found.listed.by_rank.values()))
    raise Origin(file).layout(
        f"contains a rank's elements of tensors, and no {METADATA} records how they were split",
        f"safetensors files of {plural(num_ranks, 'rank')}",
        f"{METADATA}, or a layout file{', or a base model' if num_ranks == 1 else ''}",
        either(
            f"give {option('layouts', metavar='FILE')}",
            *([f"give {option('base_model', metavar='DIR')}"] if num_ranks == 1 else []),
            "save with a resharder (ItemSpec(resharder=DefaultResharder()))",
        ),
    )
