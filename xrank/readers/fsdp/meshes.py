"""torch's DeviceMesh in a pickle. Releases of torch describe the same grid of ranks in different ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from isal import isal_zlib

from xrank.errors import ContradictionError, LayoutError
from xrank.formats.regular_file import Origin, open_regular, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive
from xrank.layout import DeviceMesh
from xrank.layout.mesh import MAX_RANKS, is_name
from xrank.readers.fsdp.pickled import attributes, is_object

_INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


class Meshes:
    """The meshes of one rank's file; a mesh that many tensors share is read once.

    Args:
        archive: the file.
        rank: the rank in the file's name.
    """

    def __init__(self, archive: TorchArchive, rank: int) -> None:
        self._archive = archive
        self._rank = rank
        self._origin = Origin(archive.path, rank)
        # Keyed by identity: the archive's value keeps the objects alive, and a pickle contains a shared object once.
        self._known: dict[int, DeviceMesh | None] = {}
        self._values: dict[str, list[int]] = {}

    def find(self, value: object) -> DeviceMesh | None:
        """Return the mesh; None if it does not contain the rank, which then holds no part of the tensor.

        Raises:
            ContradictionError: the file is another rank's.
            CorruptError: it is not a mesh.
            LayoutError: it is not a grid of ranks.
        """
        if id(value) not in self._known:
            if not is_object(value, "DeviceMesh"):
                raise self._origin.corrupt("a DTensor has no device mesh", got=type(value).__name__)
            self._known[id(value)] = self._read(attributes(value))
        return self._known[id(value)]

    def _read(self, fields: Mapping[str, Any]) -> DeviceMesh | None:
        if fields.get("_rank", self._rank) != self._rank:
            raise self._rank_error(f"rank {fields['_rank']}")
        if isinstance(fields.get("mesh"), ArchivedTensor):  # up to torch 2.9: a tensor of ranks
            shape: tuple[int, ...] = fields["mesh"].shape
            ranks = self._integers(fields["mesh"])
        else:
            found = self._read_layout(fields)
            if found is None:
                return None
            shape, ranks = found
        names = fields.get("mesh_dim_names", fields.get("_mesh_dim_names"))
        try:
            mesh = make_mesh(shape, names, ranks)
        except LayoutError as error:
            again = "copy the file again from where it was written"
            error.about(self._origin.name, file=self._origin.path, rank=self._origin.rank, next_step=again)
            raise
        at = fields.get("_coordinate_on_dim")
        if self._rank not in mesh:
            if at is not None:
                raise self._rank_error(f"a rank at {at} of the ranks {list(mesh.ranks)[:16]}")
            return None
        coordinate = list(mesh.coordinate(self._rank).values())
        if isinstance(at, (list, tuple)) and list(at) != coordinate:
            raise self._rank_error(f"the rank at {list(at)} of {mesh.grid!r}", want=f"the one at {coordinate}")
        return mesh

    def _rank_error(self, got: str, want: str | None = None) -> ContradictionError:
        return ContradictionError(
            f"{self._origin.path} is a copy of another rank's file",
            rank=self._rank,
            file=self._origin.path,
            got=got,
            want=want or f"rank {self._rank}",
            next_step=f"copy the file of rank {self._rank} again, or let all ranks write again",
        )

    def _read_layout(self, fields: Mapping[str, Any]) -> tuple[tuple[int, ...], list[int]] | None:
        """Return a mesh that is recorded as strides over the root mesh's ranks (torch/distributed/_mesh_layout.py).

        A submesh records only its own strides; the rank that it contains determines its base.
        """
        axes = [list(zip(*axis, strict=True)) for axis in self._axes(fields.get("_layout"))]
        rank_map = self._rank_map(fields)
        if self._rank not in rank_map:
            return None
        base = rank_map.index(self._rank)
        # Subtract the rank's own coordinate along each axis: the submesh starts at its first rank.
        for size, stride in (loop for axis in axes for loop in axis):
            base -= (base // stride) % size * stride if stride else 0
        shape = tuple(prod(size for size, _ in axis) for axis in axes)
        if prod(shape) > len(rank_map):
            raise self._origin.corrupt(
                "a device mesh is larger than its ranks", got=quote(shape), want=f"{len(rank_map)} ranks"
            )
        loops = [loop for axis in axes for loop in axis]
        places = [
            base + sum(i * stride for i, (_, stride) in zip(at, loops, strict=True))
            for at in product(*(range(size) for size, _ in loops))
        ]
        if places and max(places) >= len(rank_map):
            raise self._origin.corrupt("a device mesh reaches beyond its ranks", got=f"place {max(places)}")
        return shape, [rank_map[place] for place in places]

    def _axes(self, layout: object) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        fields = attributes(layout)
        if "axes" in fields:  # torch 2.13: a flat layout per axis
            parts = [attributes(axis) for axis in fields["axes"]] if isinstance(fields["axes"], (list, tuple)) else []
            pairs = [(part.get("shape"), part.get("stride")) for part in parts]
        else:  # up to 2.12: one layout with an entry per axis
            shape, stride = _tuple(fields.get("shape")), _tuple(fields.get("stride"))
            pairs = list(zip(shape, stride, strict=False)) if len(shape) == len(stride) else []
        axes = [(_flat(shape), _flat(stride)) for shape, stride in pairs]
        if not axes or any(len(shape) != len(stride) or min((*shape, 1)) < 1 for shape, stride in axes):
            raise self._origin.corrupt("a device mesh has no shape", got=f"{len(axes)} axes")
        return axes

    def _rank_map(self, fields: Mapping[str, Any]) -> list[int]:
        if isinstance(fields.get("_rank_map"), ArchivedTensor):
            return self._integers(fields["_rank_map"])
        flat = _flat(fields.get("_flatten_rank_map"))
        if not flat:
            raise self._origin.corrupt("a device mesh has no ranks")
        return list(flat)

    def _integers(self, tensor: ArchivedTensor) -> list[int]:
        """Return the values of a small tensor; only such tensors are read together with the metadata."""
        if tensor.dtype not in _INTEGERS or prod(tensor.shape) > MAX_RANKS:
            raise self._origin.corrupt("a device mesh's ranks are not integers", got=f"{tensor.dtype} {tensor.shape}")
        values = self._record(tensor.key, _INTEGERS[tensor.dtype])
        places: Sequence[int] = [tensor.storage_offset]
        for size, stride in zip(tensor.shape, tensor.strides, strict=True):
            places = [place + i * stride for place in places for i in range(size)]
        return [values[place] for place in places]

    def _record(self, key: str, dtype: np.dtype[Any]) -> list[int]:
        if key not in self._values:
            record = self._archive.records[key]
            with open_regular(self._archive.path, self._rank) as file:
                data = file.read(record.offset, record.nbytes)
            # These values decide where all elements go, so they are proven now, and not when tensors are copied.
            if self._archive.has_checksums and isal_zlib.crc32(data) != record.crc32:
                raise self._origin.corrupt(
                    "a device mesh's ranks fail their checksum",
                    got=f"CRC {isal_zlib.crc32(data):08x}",
                    want=f"CRC {record.crc32:08x}",
                )
            self._values[key] = np.frombuffer(data, dtype).tolist()
        return self._values[key]


def make_mesh(shape: tuple[int, ...], names: object, ranks: Sequence[int]) -> DeviceMesh:
    """Return the mesh that a file describes; invalid names, and a wrong number of them, are replaced.

    Raises:
        LayoutError: it is not a grid of ranks.
    """
    if not _are_names(names, len(shape)):
        names = tuple(f"a{i}" for i in range(len(shape)))  # as xrank.dialects.placements.describe_mesh
    return _mesh(shape, names, tuple(ranks))


@lru_cache(maxsize=4096)
def _mesh(shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> DeviceMesh:
    """Return the same object for equal meshes, because all files of a run share a few."""
    return DeviceMesh(shape, names, ranks)


def _are_names(names: object, count: int) -> bool:
    return isinstance(names, (list, tuple)) and len(names) == count == len({*names}) and all(map(is_name, names))


def _tuple(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _flat(value: object) -> tuple[int, ...]:
    """Return the integers of nested tuples; an empty tuple if they contain anything else."""
    waiting, found = [value], list[int]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, (list, tuple)):
            waiting.extend(reversed(node))
        elif type(node) is int and 0 <= node < 1 << 62:
            found.append(node)
        else:
            return ()
    return tuple(found)
