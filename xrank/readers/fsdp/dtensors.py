"""DTensors in a pickle: their local tensors, and the layouts of their placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from xrank.dialects.placements import from_placements
from xrank.errors import LayoutError
from xrank.formats.pickles import InertRecord
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive
from xrank.layout import DeviceMesh
from xrank.readers.fsdp.meshes import Meshes
from xrank.readers.fsdp.pickled import Wrapper, attributes, is_object, read_local_tensor, sizes_of

__all__ = ["DTensorPart", "DTensors", "build_placement"]

_MAX_EXTENT = 1 << 40


@dataclass(frozen=True, slots=True)
class DTensorPart:
    """A rank's part of a DTensor."""

    local: ArchivedTensor
    layout: str
    """The placements in the notation of layouts."""
    mesh: DeviceMesh
    shape: tuple[int, ...]
    """Global shape."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """Has the methods of torch's placements (torch/distributed/tensor/placement_types.py)."""

    def is_shard(self) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Replicate(_Placement):
    def is_replicate(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Shard(_Placement):
    dim: int

    def is_shard(self) -> bool:
        return True


# `from_placements` knows this class and Partial by their names, as it knows torch's.
@dataclass(frozen=True, slots=True)
class _StridedShard(_Placement):
    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Partial(_Placement):
    reduce_op: str

    def is_partial(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _OrderEntry:
    tensor_dim: int
    mesh_dims: tuple[int, ...]


class DTensors:
    """Reads the DTensors of one rank's file.

    Args:
        archive: the file.
        rank: the rank in the file's name.
    """

    def __init__(self, archive: TorchArchive, rank: int) -> None:
        self._origin = Origin(archive.path, rank)
        self._meshes = Meshes(archive, rank)
        self._layouts: dict[object, str] = {}

    def read_part(self, name: str, wrapper: Wrapper) -> DTensorPart | None:
        """Return the rank's part of a DTensor; None if the tensor's mesh does not contain the rank.

        Raises:
            ContradictionError: the file is another rank's.
            CorruptError, UnsafeError: it is not a DTensor as torch writes it.
            LayoutError: the notation cannot express its placements.
        """
        state = attributes(wrapper.state)
        spec = state.get("_spec")
        if not is_object(spec, "DTensorSpec"):
            raise self._origin.corrupt(f"{quote(name)}: the DTensor has no spec", got=type(spec).__name__)
        fields = attributes(spec)
        meta = fields.get("tensor_meta")
        if is_object(meta, "TensorMeta"):
            assert isinstance(meta, InertRecord) and meta.args is not None
            shape = sizes_of(meta.args[0], self._origin) if meta.args else None
            if shape != wrapper.shape:
                raise self._origin.corrupt(
                    f"{quote(name)}: the DTensor records two shapes",
                    got=f"{shape} in its spec",
                    want=f"{wrapper.shape}",
                )
        mesh = self._meshes.find(fields.get("mesh"))
        if mesh is None:
            return None
        local = read_local_tensor(state.get("_local_tensor"), quote(name), wrapper.dtype, self._origin)
        placements = tuple(self._placement(name, value) for value in _members(fields.get("placements")))
        order = tuple(self._order_entry(name, value) for value in _members(fields.get("shard_order")))
        # A model has thousands of DTensors, but a handful of ways to cut them.
        key = (mesh, placements, order, len(wrapper.shape))
        if key not in self._layouts:
            try:
                self._layouts[key] = str(from_placements(mesh, placements, len(wrapper.shape), order))
            except LayoutError as error:
                again = "copy the file again from where it was written"
                error.about(name, tensor=name, rank=self._origin.rank, file=self._origin.path, next_step=again)
                raise
            except (LookupError, ValueError) as error:
                raise self._origin.corrupt(
                    f"{quote(name)}: the DTensor's placements are damaged", got=str(error)
                ) from None
        return DTensorPart(local, self._layouts[key], mesh, wrapper.shape)

    def _placement(self, name: str, value: object) -> _Placement:
        fields = attributes(value)
        kind = value.name if isinstance(value, InertRecord) and is_object(value, value.name) else None
        placement = build_placement(kind, fields)
        if placement is not None:
            return placement
        raise LayoutError(
            f"{name}: no layout can express one of its placements",
            tensor=name,
            rank=self._origin.rank,
            file=self._origin.path,
            got=quote(kind or type(value).__name__),
            want="Shard, Replicate or _StridedShard",
            next_step="redistribute the tensor to Shard or Replicate before it is saved",
        )

    def _order_entry(self, name: str, value: object) -> _OrderEntry:
        match value:
            case InertRecord(name="ShardOrderEntry", args=(int(dim), tuple() as axes)) if all(map(_is_small, axes)):
                return _OrderEntry(dim, axes)
        raise self._origin.corrupt(f"{quote(name)}: the DTensor's order of cuts is damaged", got=type(value).__name__)


def build_placement(kind: str | None, fields: Mapping[str, Any]) -> _Placement | None:
    """Return the placement of a class of torch and its attributes; None for others."""
    dim, factor = fields.get("dim"), fields.get("split_factor")
    match kind:
        case "Replicate":
            return Replicate()
        case "Shard" if _is_small(dim):
            return Shard(dim)
        case "_StridedShard" if _is_small(dim) and _is_small(factor) and factor > 0:
            return _StridedShard(dim, factor)
        case "Partial" | "_Partial" if isinstance(fields.get("reduce_op"), str):
            return Partial(fields["reduce_op"])
    return None


def _members(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else ()


def _is_small(value: object) -> TypeGuard[int]:
    return type(value) is int and -_MAX_EXTENT < value < _MAX_EXTENT
