"""``metadata.pkl``: where the ranks' files of each item lie, and how each tensor in them was cut.

torch_checkpointing writes it if an item was saved with a resharder (torch_checkpointing 0.1.1: distributed_metadata.py,
dtensor_metadata.py, checkpoint_layout.py). It is a pickle of plain values, read here without running it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrank.dialects.placements import from_placements
from xrank.errors import LayoutError, UnsafeError
from xrank.formats.entries import Entry
from xrank.formats.pickles import MAX_PICKLE_NBYTES, read_pickle
from xrank.formats.regular_file import Origin, open_regular, quote
from xrank.layout import DeviceMesh
from xrank.readers.fsdp.dtensors import build_placement
from xrank.readers.fsdp.meshes import make_mesh
from xrank.readers.fsdp.pickled import element_type, sizes_of
from xrank.stores import places

METADATA = "metadata.pkl"

_VERSION = "2.0"
_DTENSOR = "DTensorShardingMetadata"
_PLACEMENTS = {"Shard": "Shard", "StridedShard": "_StridedShard", "Replicate": "Replicate"}
_MAX_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class SavedCut:
    """How a tensor was cut over a mesh."""

    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    """Global shape."""
    layout: str
    mesh: DeviceMesh


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """One item of a checkpoint, such as the model."""

    files: Mapping[int, tuple[str, str]]
    """Rank -> path in the checkpoint's folder, and kind of the file: ``TorchSerialization``, ..."""
    cuts: Sequence[tuple[str, frozenset[int], SavedCut]]
    """Name of a tensor, ranks that hold a part of it, and its cut over them."""

    def cuts_of(self, rank: int) -> dict[str, SavedCut]:
        """Return the cuts of the tensors that a rank holds, by name."""
        return {name: cut for name, ranks, cut in self.cuts if rank in ranks}


@dataclass(frozen=True, slots=True)
class SavedMetadata:
    """Content of the file."""

    path: str
    world_size: int
    items: Mapping[str, ItemMetadata]


def read_metadata(folder: str) -> SavedMetadata | None:
    """Return the metadata of a checkpoint; None if it has none.

    Raises:
        CorruptError, UnsafeError: the file is damaged, is no plain data, or names a path outside its folder.
        UsageError: another version wrote it.
        LayoutError: no layout can express a placement.
    """
    path = os.path.join(folder, METADATA)
    if not places.is_present(path):
        return None
    origin = Origin(path)
    with open_regular(path) as file:
        if file.nbytes > MAX_PICKLE_NBYTES:
            raise origin.corrupt("is too large", got=f"{file.nbytes:,} bytes", want=f"at most {MAX_PICKLE_NBYTES:,}")
        read = read_pickle(file.read(0, file.nbytes), origin).value
    value = Entry(read, lambda fault: origin.corrupt("is not metadata of torch_checkpointing", got=fault))
    if value["version"].text() != _VERSION:
        raise origin.usage(
            "was written by another version of torch_checkpointing",
            got=quote(value["version"].text()),
            want=_VERSION,
            next_step="load it with torch_checkpointing and save it again",
        )
    world_size = value["world_size"].count(low=1, below=_MAX_RANKS)
    parser = _Parser(origin, world_size)
    return SavedMetadata(path, world_size, {key: parser.item(key, one) for key, one in value["metadata"].items()})


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
            raise UnsafeError(
                f"{self._origin.path} names a file outside its folder",
                file=self._origin.path,
                got=quote(path),
                want="paths in the folder",
                next_step="do not use this checkpoint: its metadata was tampered with",
            )
        return path, kind

    def _cuts(self, value: Entry) -> Iterator[tuple[str, frozenset[int], SavedCut]]:
        for place, groups in value.items():
            name = self._name(place)
            for group in groups.entries():
                saved = group["sharding_metadata"]
                if saved["type"].text() != _DTENSOR:
                    raise self._origin.usage(
                        f"{quote(name)}: no reader knows how its parts were cut",
                        got=quote(saved["type"].text()),
                        want=_DTENSOR,
                        next_step="load it with torch_checkpointing and save DTensors or plain tensors",
                    )
                ranks, cut = self._ranks_of(group["ranks"]), self._cut(name, saved["data"])
                if not ranks.issubset(cut.mesh.ranks):
                    group["ranks"].refuse(f"ranks of the mesh of {quote(name)}")
                yield name, ranks, cut

    def _name(self, place: str) -> str:
        """Return the name of a tensor by its place, a list of keys as JSON."""
        problem = f"names a tensor by {quote(place)}, not by a list of keys as JSON"
        parts = Entry.parse(place, lambda fault: self._origin.corrupt(problem, got=fault)).entries()
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
