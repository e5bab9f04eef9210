"""One rank's file: DTensors with their meshes, FSDP1's ShardedTensors, plain tensors and other values, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, TypeGuard

import numpy as np
from isal import isal_zlib
from msgspec import Struct, field
from msgspec.structs import replace

from xrank.errors import ContradictionError, LayoutError, XrankError
from xrank.formats.pickles import (
    InertRecord,
    fill_blanks,
    inert_error,
    is_extra_state,
    new_families,
    refuse_inert,
)
from xrank.formats.safetensors_header import SafetensorsHeader
from xrank.formats.torch_archive import (
    ArchivedTensor,
    TorchArchive,
    element_type,
    no_names_error,
    read_archive,
    walk_leaves,
)
from xrank.layout import DeviceMesh
from xrank.layout.mesh import MAX_RANKS, is_name
from xrank.layout.terms.tensors import Box, box_text, from_placements
from xrank.readers.placement import HeldTensor, shared_mesh
from xrank.readers.records import Subject
from xrank.storage.regular_file import Origin, open_regular, quote
from xrank.words import list_text

_PACKAGE = "torch.distributed."
_MAX_DIMENSIONS = 64
_STATE_DICT = "save only the model's state_dict()"


class Wrapper(Struct, frozen=True):
    """A tensor subclass around local tensors (torch/_utils.py: _rebuild_wrapper_subclass)."""

    kind: str
    """Name of the class."""
    dtype: str
    """Safetensors name of the element type."""
    shape: tuple[int, ...]
    """Global shape."""
    state: object
    """State that the class saved."""


def is_object(value: object, *names: str) -> bool:
    """Return whether a pickled value is an object of one of these classes of torch.distributed.

    Releases moved the modules (``torch.distributed._tensor``, ``torch.distributed.tensor``) but kept the class names.
    """
    return (
        isinstance(value, InertRecord)
        and value.args is not None
        and value.name in names
        and value.module.startswith(_PACKAGE)
    )


def attributes(value: object) -> Mapping[str, Any]:
    """Return an object's attributes, from a ``__dict__`` or slots (a pair of both); empty without either."""
    state = value.state if isinstance(value, InertRecord) else value
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    found: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            found.update((key, value) for key, value in part.items() if isinstance(key, str))
    return found


def unwrap_parameter(value: object) -> object:
    """Return the data of a parameter; other values unchanged."""
    # torch/_utils.py: _rebuild_parameter(data, requires_grad, hooks); already resolved for plain tensors.
    match value:
        case InertRecord(module="torch._utils", name="_rebuild_parameter", args=(data, bool(), hooks)) if not hooks:
            return data
    return value


def read_wrapper(value: object, origin: Origin) -> Wrapper | None:
    """Return a DTensor or a ShardedTensor as its class and state; None for other values."""
    # torch/_tensor.py: _rebuild_from_type_v2(func, new_type, args, state), with func _rebuild_wrapper_subclass(cls,
    # dtype, size, stride, storage_offset, layout, device, requires_grad).
    match value:
        case InertRecord(
            module="torch._tensor",
            name="_rebuild_from_type_v2",
            args=(
                InertRecord(module="torch._utils", name="_rebuild_wrapper_subclass", args=None),
                InertRecord(args=None) as kind,
                tuple() as parts,
                state,
            ),
        ) if kind.module.startswith(_PACKAGE) and len(parts) >= 3:
            if not isinstance(parts[1], str):
                raise origin.corrupt("a tensor's element type is invalid", type(parts[1]).__name__)
            return Wrapper(kind.name, element_type(parts[1], origin), sizes_of(parts[2], origin), state)
    return None


def sizes_of(value: object, origin: Origin) -> tuple[int, ...]:
    """Return sizes or offsets, one per dim."""
    if (
        not isinstance(value, (tuple, list))
        or len(value) > _MAX_DIMENSIONS
        or not all(type(part) is int and 0 <= part < 1 << 63 for part in value)
    ):
        got = quote(tuple(value)) if isinstance(value, (tuple, list)) else type(value).__name__
        raise origin.corrupt("a tensor's sizes are not counts", got)
    return tuple(value)


def read_local_tensor(value: object, name: str, dtype: str, origin: Origin) -> ArchivedTensor:
    """Return a rank's plain tensor inside a tensor subclass."""
    value = unwrap_parameter(value)
    if not isinstance(value, ArchivedTensor):
        raise inert_error(value, origin, f"{name}: the rank's part")
    if value.dtype != dtype:
        raise origin.corrupt(f"{name}: the type of the rank's part differs from the tensor's", value.dtype, dtype)
    return value


class ShardedPart(Struct, frozen=True):
    """A rank's part of a ShardedTensor."""

    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    shards: tuple[tuple[Box, ArchivedTensor], ...]
    """The rank's own boxes and their elements; empty if the tensor ends before the rank's share."""
    boxes: tuple[Box, ...]
    """Boxes of all ranks of its process group."""
    world_size: int
    """Number of ranks of the run."""


def read_sharded_part(name: str, wrapper: Wrapper, origin: Origin) -> ShardedPart:
    """Return a rank's part of a ShardedTensor (torch/distributed/_shard/sharded_tensor/api.py: __getstate__)."""
    state = wrapper.state
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], list):
        raise origin.corrupt(f"{quote(name)}: the ShardedTensor's state is invalid", type(state).__name__)
    locals_, metadata, group = state[0], attributes(state[1]), attributes(state[2])
    rank, world_size = group.get("global_rank"), group.get("global_world_size")
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise origin.corrupt(f"{quote(name)}: the ShardedTensor records no rank", f"{rank} of {world_size}")
    if rank != origin.rank:
        raise _copy_error(origin, f"rank {rank}")
    if sizes_of(metadata.get("size"), origin) != wrapper.shape:
        got = f"{metadata.get('size')} in its metadata"
        raise origin.corrupt(f"{quote(name)}: the ShardedTensor records two shapes", got, f"{wrapper.shape}")
    listed = metadata.get("shards_metadata")
    boxes = tuple(_box(name, value, wrapper.shape, origin) for value in (listed if isinstance(listed, list) else []))
    shards = []
    for value in locals_:
        fields = attributes(value)
        if not is_object(value, "Shard"):
            raise origin.corrupt(f"{quote(name)}: a shard is invalid", type(value).__name__)
        box = _box(name, fields.get("metadata"), wrapper.shape, origin)
        tensor = read_local_tensor(fields.get("tensor"), quote(name), wrapper.dtype, origin)
        if box not in boxes or tensor.shape != tuple(high - low for low, high in box):
            got = f"{box_text(box)} of shape {tensor.shape}"
            want = f"one of {list_text(map(box_text, boxes), 8)}"
            raise origin.corrupt(f"{quote(name)}: a shard is not among the tensor's shards", got, want)
        shards.append((box, tensor))
    return ShardedPart(wrapper.dtype, wrapper.shape, tuple(shards), boxes, world_size)


def _box(name: str, value: Any, shape: tuple[int, ...], origin: Origin) -> Box:
    if not isinstance(value, InertRecord) or not is_object(value, "ShardMetadata"):
        raise origin.corrupt(f"{quote(name)}: a shard has no metadata", type(value).__name__)
    fields = attributes(value)
    offsets, sizes = (sizes_of(fields.get(key), origin) for key in ("shard_offsets", "shard_sizes"))
    # Unequal numbers of dims are refused below, by an error that names the file.
    box = tuple(zip(offsets, (a + n for a, n in zip(offsets, sizes, strict=False)), strict=False))
    if not len(offsets) == len(sizes) == len(shape) or any(high > n for (_, high), n in zip(box, shape, strict=True)):
        got = f"{offsets} + {sizes}"
        raise origin.corrupt(f"{quote(name)}: a shard is not within its tensor", got, f"within {shape}")
    return box


def _copy_error(origin: Origin, got: str, want: str | None = None) -> ContradictionError:
    step = f"copy the file of rank {origin.rank} again, or let all ranks write again"
    return origin.contradiction("is a copy of another rank's file", got, want or f"rank {origin.rank}", step)


_MAX_EXTENT = 1 << 40


class DTensorPart(Struct, frozen=True):
    """A rank's part of a DTensor."""

    local: ArchivedTensor
    layout: str
    """The placements in the notation of layouts."""
    mesh: DeviceMesh
    shape: tuple[int, ...]
    """Global shape."""


class _Placement(Struct, frozen=True):
    """Has the names and methods of torch's placements, which `from_placements` reads."""

    def is_shard(self) -> bool:
        return isinstance(self, Shard)

    def is_replicate(self) -> bool:
        return isinstance(self, Replicate)

    def is_partial(self) -> bool:
        return isinstance(self, Partial)


class Replicate(_Placement, frozen=True):
    """A replica."""


class Shard(_Placement, frozen=True):
    """A part along a dim."""

    dim: int


class _StridedShard(_Placement, frozen=True):
    dim: int
    split_factor: int


class Partial(_Placement, frozen=True):
    """Addends of a sum."""

    reduce_op: str


class _OrderEntry(Struct, frozen=True):
    tensor_dim: int
    mesh_dims: tuple[int, ...]


_INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


class DTensors:
    """Reads the DTensors of one rank's file. A mesh that many of them share is read once."""

    def __init__(self, archive: TorchArchive, rank: int) -> None:
        self._archive = archive
        self._rank = rank
        self._origin = Origin(archive.path, rank)
        # Keyed by identity: the archive's value keeps the objects alive, and a pickle contains a shared object once.
        self._known: dict[int, DeviceMesh | None] = {}
        self._values: dict[str, list[int]] = {}
        self._layouts: dict[object, str] = {}
        self._meshes: list[object] = []

    def read_part(self, name: str, wrapper: Wrapper) -> DTensorPart | None:
        """Return the rank's part of a DTensor; None if the tensor's mesh does not contain the rank."""
        state = attributes(wrapper.state)
        spec = state.get("_spec")
        if not is_object(spec, "DTensorSpec"):
            raise self._origin.corrupt(f"{quote(name)}: the DTensor has no spec", type(spec).__name__)
        fields = attributes(spec)
        meta = fields.get("tensor_meta")
        if is_object(meta, "TensorMeta"):
            assert isinstance(meta, InertRecord) and meta.args is not None
            shape = sizes_of(meta.args[0], self._origin) if meta.args else None
            if shape != wrapper.shape:
                raise self._origin.corrupt(
                    f"{quote(name)}: the DTensor records two shapes", f"{shape} in its spec", f"{wrapper.shape}"
                )
        mesh = self._find_mesh(fields.get("mesh"))
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
                raise self._origin.corrupt(f"{quote(name)}: the DTensor's placements are damaged", str(error)) from None
        return DTensorPart(local, self._layouts[key], mesh, wrapper.shape)

    def _placement(self, name: str, value: object) -> _Placement:
        fields = attributes(value)
        kind = value.name if isinstance(value, InertRecord) and is_object(value, value.name) else None
        placement = build_placement(kind, fields)
        if placement is None:
            problem = f"{name}: one of its placements cannot be expressed as a layout"
            got = quote(kind or type(value).__name__)
            step = "redistribute the tensor to Shard or Replicate before it is saved"
            raise self._origin.layout(problem, got, "Shard, Replicate or _StridedShard", step, tensor=name)
        return placement

    def _order_entry(self, name: str, value: object) -> _OrderEntry:
        match value:
            case InertRecord(name="ShardOrderEntry", args=(int(dim), tuple() as axes)) if all(map(_is_small, axes)):
                return _OrderEntry(dim, axes)
        raise self._origin.corrupt(f"{quote(name)}: the DTensor's order of cuts is damaged", type(value).__name__)

    def _find_mesh(self, value: object) -> DeviceMesh | None:
        """Return the mesh; None if it does not contain the rank, which then holds no part of the tensor."""
        if id(value) not in self._known:
            if not is_object(value, "DeviceMesh"):
                raise self._origin.corrupt("a DTensor has no device mesh", type(value).__name__)
            self._known[id(value)] = self._read_mesh(attributes(fill_blanks(value, self._archive.own or ())))
            self._meshes.append(value)
        return self._known[id(value)]

    def has_meshes_of(self, other: DTensors) -> bool:
        """Return whether the meshes of an archive with the same value are this one's."""
        return all(self._find_mesh(value) == other._find_mesh(value) for value in other._meshes)

    def _read_mesh(self, fields: Mapping[str, Any]) -> DeviceMesh | None:
        if fields.get("_rank", self._rank) != self._rank:
            raise _copy_error(self._origin, f"rank {fields['_rank']}")
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
                raise _copy_error(self._origin, f"a rank at {at} of the ranks {list(mesh.ranks)[:16]}")
            return None
        coordinate = list(mesh.coordinate(self._rank).values())
        if isinstance(at, (list, tuple)) and list(at) != coordinate:
            raise _copy_error(self._origin, f"the rank at {list(at)} of {mesh.grid!r}", f"the one at {coordinate}")
        return mesh

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
            raise self._origin.corrupt("a device mesh is larger than its ranks", quote(shape), f"{len(rank_map)} ranks")
        loops = [loop for axis in axes for loop in axis]
        places = [
            base + sum(i * stride for i, (_, stride) in zip(at, loops, strict=True))
            for at in product(*(range(size) for size, _ in loops))
        ]
        if places and max(places) >= len(rank_map):
            raise self._origin.corrupt("a device mesh reaches beyond its ranks", f"place {max(places)}")
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
            raise self._origin.corrupt("a device mesh has no shape", f"{len(axes)} axes")
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
            raise self._origin.corrupt("a device mesh's ranks are not integers", f"{tensor.dtype} {tensor.shape}")
        record = self._archive.records[tensor.key]
        if tensor.key not in self._values:
            with open_regular(self._archive.path, self._rank) as file:
                data = file.read(record.offset, record.nbytes)
            # These values decide where all elements go, so they are proven now, and not when tensors are copied.
            crc32 = isal_zlib.crc32(data)
            if self._archive.has_checksums and crc32 != record.crc32:
                got, want = f"CRC {crc32:08x}", f"CRC {record.crc32:08x}"
                raise self._origin.corrupt("a device mesh's ranks fail their checksum", got, want)
            self._values[tensor.key] = np.frombuffer(data, _INTEGERS[tensor.dtype]).tolist()
        places: Sequence[int] = [tensor.storage_offset]
        for size, stride in zip(tensor.shape, tensor.strides, strict=True):
            places = [place + i * stride for place in places for i in range(size)]
        return [self._values[tensor.key][place] for place in places]


def make_mesh(shape: tuple[int, ...], names: object, ranks: Sequence[int]) -> DeviceMesh:
    """Return the mesh that a file describes; invalid names, and a wrong number of them, are replaced."""
    count = len(shape)
    if not (isinstance(names, (list, tuple)) and len(names) == count == len({*names}) and all(map(is_name, names))):
        names = tuple(f"a{i}" for i in range(count))  # as xrank.layout.terms.tensors.describe_mesh
    return shared_mesh(shape, tuple(names), tuple(ranks))


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


class FsdpRankFile(Struct, frozen=True):
    """One rank's file, read from its metadata alone."""

    rank: int
    archive: TorchArchive | SafetensorsHeader
    dtensors: Mapping[str, DTensorPart]
    sharded: Mapping[str, ShardedPart]
    plain: Mapping[str, ArchivedTensor]
    others: tuple[str, ...]
    """Names of plain values that are not tensors."""
    keys: Mapping[str, int] = field(default_factory=dict)
    """Key of each DTensor's and plain tensor's record -> its number among them."""

    @property
    def origin(self) -> Origin:
        """Makes the errors that name the file."""
        return Origin(self.archive.path, self.rank)

    def of(self, name: str) -> Subject:
        """Return the subject of errors about a tensor in the file."""
        return Subject(name, self.rank, self.archive.path)

    def hold(self, tensor: ArchivedTensor, index: Callable[[str], int]) -> HeldTensor:
        """Return a tensor of the file as a rank's part; `index` is that of its records."""
        return HeldTensor.from_archive(tensor, rank=self.rank, file=self.archive.path, record=index(tensor.key))


class RankFileReader:
    """Reads the files of a run's ranks. Those that hold the same but for their rank share what was read.

    If the state dicts may be nested (`is_nested`), dots join the names of the dicts around a tensor with its own name.
    """

    def __init__(self, *, is_nested: bool = False) -> None:
        self._is_nested = is_nested
        self._families = new_families()
        self._read: dict[int, tuple[FsdpRankFile, DTensors]] = {}
        """Identity of an archive's value -> the first file that has it."""

    def read(self, path: str, rank: int) -> FsdpRankFile:
        """Return the content of a rank's file."""
        archive = read_archive(path, rank=rank, families=self._families)
        dtensors = DTensors(archive, rank)
        if archive.own is None:
            return _read_values(archive, rank, dtensors, is_nested=self._is_nested)
        try:
            if id(archive.value) in self._read:
                file, first = self._read[id(archive.value)]
                if not file.sharded and dtensors.has_meshes_of(first):
                    return replace(file, rank=rank, archive=replace(archive, value=None))
            file = _read_values(archive, rank, dtensors, is_nested=self._is_nested)
        except XrankError:  # it may be about what differs between ranks
            archive = read_archive(path, rank=rank)
            return _read_values(archive, rank, DTensors(archive, rank), is_nested=self._is_nested)
        self._read.setdefault(id(archive.value), (file, dtensors))
        return file


def _read_values(archive: TorchArchive, rank: int, reader: DTensors, *, is_nested: bool) -> FsdpRankFile:
    path = archive.path
    origin = Origin(path, rank)
    state = archive.value
    if not isinstance(state, dict):
        refuse_inert(state, path, rank)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise no_names_error(origin, type(state).__name__)
    dtensors: dict[str, DTensorPart] = {}
    sharded: dict[str, ShardedPart] = {}
    plain: dict[str, ArchivedTensor] = {}
    others: list[str] = []
    nested = ((".".join(map(str, path)), leaf) for path, leaf in walk_leaves(state))
    for name, saved in nested if is_nested else state.items():
        if is_nested and (name in dtensors or name in sharded or name in plain):
            problem = f"two tensors have the name {quote(name)}, once their dicts are left out"
            raise origin.usage(problem, want="different names", next_step=_STATE_DICT)
        if is_extra_state(name):  # differs between ranks
            others.append(name)
            continue
        value = unwrap_parameter(saved)
        wrapper = read_wrapper(value, origin)
        if isinstance(value, ArchivedTensor):
            plain[name] = value
        elif wrapper is not None and wrapper.kind == "DTensor":
            part = reader.read_part(name, wrapper)
            if part is not None:
                dtensors[name] = part
        elif wrapper is not None and wrapper.kind == "ShardedTensor":
            sharded[name] = read_sharded_part(name, wrapper, origin)
        elif wrapper is not None:
            raise origin.usage(
                f"{quote(name)} is an unknown kind of tensor",
                quote(wrapper.kind),
                "plain tensors, DTensors and ShardedTensors",
                "save the model's state_dict() with plain tensors",
            )
        else:
            leaves = [unwrap_parameter(leaf) for _, leaf in walk_leaves(value)]
            if any(isinstance(leaf, ArchivedTensor) or read_wrapper(leaf, origin) is not None for leaf in leaves):
                problem = f"is not a model's state dict: {quote(name)} is a {type(value).__name__} of tensors"
                raise origin.usage(problem, want="tensors by name", next_step=_STATE_DICT)
            refuse_inert(value, path, rank)
            others.append(name)
    tensors = (*(part.local for part in dtensors.values()), *plain.values())
    keys = {key: number for number, key in enumerate(dict.fromkeys(tensor.key for tensor in tensors))}
    # Its value may take more memory than all files' tensors.
    return FsdpRankFile(rank, replace(archive, value=None), dtensors, sharded, plain, tuple(others), keys)
