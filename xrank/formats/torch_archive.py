"""Read the output of ``torch.save`` without torch: its tree, and checked views on the storages' bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import MappingProxyType

from isal import isal_zlib
from msgspec import Struct

from xrank.dtypes import by_torch_name, dtype
from xrank.errors import CorruptError, UsageError
from xrank.formats.pickles import (
    MAX_PICKLE_NBYTES,
    PLAIN_BUILDERS,
    Builder,
    InertRecord,
    build_nested_class,
    read_pickle,
)
from xrank.formats.zip_archive import ItemBytes, ZipMember, open_item, read_members
from xrank.storage.client import ObjectStatus
from xrank.storage.regular_file import Origin, RegularFile, open_regular, quote, refuse_pointer

NAMES = "save the names with the tensors: torch.save(model.state_dict(), file); then gather that"
"""The next step for a file without a state dict."""

_ZIP = b"PK\x03\x04"
# torch/serialization.py: MAGIC_NUMBER, pickled: the first bytes of files before torch 1.6, which introduced zips.
_BEFORE_ZIPS = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_DIMENSIONS = 64
_MAX_EXTENT = (1 << 63) - 1

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
"""Typed storage -> its element type (torch/storage.py: _dtype_to_storage_type_map); other storages are untyped."""

# The names of element types in torch: those that xrank copies and those that it refuses by name.
_DTYPE_NAMES = frozenset(
    {*STORAGE_DTYPES.values(), "uint16", "uint32", "uint64", "complex32", "float4_e2m1fn_x2"}
    | {f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")}
    | {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)


class ArchiveRecord(Struct, frozen=True):
    """The place of one storage's bytes in the file."""

    key: str
    offset: int
    """First byte of the payload from the start of the *file*."""
    nbytes: int
    crc32: int
    """The checksum in the archive's directory; meaningless if the archive has no checksums."""


class ArchivedTensor(Struct, frozen=True):
    """A view on one record; several tensors may share a record."""

    key: str
    """Key of the record in `TorchArchive.records`."""
    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements, positive where the shape is above 1. Dimensions nest: no two elements share bytes."""
    storage_offset: int
    """Offset in the record, in elements."""


def load_global(module: str, name: str) -> object:
    """Return the value of a global name in the pickle: the text of an element type, or an inert record."""
    if module == "torch" and name in _DTYPE_NAMES:
        return f"torch.{name}"
    return InertRecord(module, name)


class _Storage(InertRecord, eq=False):
    """A storage that a tensor will view; otherwise it stays in the tree as an inert record."""

    key: str = ""
    dtype: str | None = None
    """None for an untyped storage; the tensor defines the type."""


class TensorRebuilder(Struct, frozen=True):
    """Build checked tensors from the persistent ids and rebuild calls of a pickle."""

    records: Mapping[str, ArchiveRecord]
    origin: Origin

    def builders(self) -> dict[tuple[str, str], Builder]:
        """Return the builder of each call that concerns tensors."""
        return {
            ("torch", "Size"): _size,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor_v2,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_v3,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): _parameter_with_state,
            ("torch._tensor", "_rebuild_from_type_v2"): self._rebuild_with_state,
            ("__builtin__", "getattr"): build_nested_class,
            ("builtins", "getattr"): build_nested_class,
        }

    def load_storage(self, saved_id: object) -> object:
        """Return the storage of a persistent id."""
        # ("storage", type, key, location, count): torch/serialization.py: _save.persistent_id.
        match saved_id:
            case ("storage", InertRecord(args=None) as kind, str(key), str(), int(count)) if (
                type(count) is int and count >= 0 and kind.module in ("torch", "torch.storage")
            ):
                pass
            case _:
                raise self.origin.corrupt("the pickle refers to a storage in no known way", got=type(saved_id).__name__)
        if kind.name == "UntypedStorage":
            name, itemsize = None, 1
        elif kind.name in STORAGE_DTYPES:
            name = self._element_type(f"torch.{STORAGE_DTYPES[kind.name]}")
            itemsize = dtype(name).nbytes
        else:
            raise self.origin.corrupt("the pickle names an unknown kind of storage", got=quote(kind.name))
        record = self.records.get(key)
        if record is None:
            raise self.origin.corrupt(f"the record data/{quote(key)[1:-1]} is missing")
        if count * itemsize != record.nbytes:
            raise self.origin.corrupt(
                f"the record data/{quote(key)[1:-1]} does not have the size its storage claims",
                got=f"{record.nbytes} bytes",
                want=f"{count} elements of {itemsize} bytes",
            )
        return _Storage("torch.storage", kind.name, (), key=key, dtype=name)

    def _element_type(self, name: str) -> str:
        try:
            return by_torch_name(name.removeprefix("torch.")).name
        except UsageError as error:
            error.about(self.origin.name, file=self.origin.path, rank=self.origin.rank)
            raise

    def _tensor_v2(self, args: tuple[object, ...]) -> object:
        # torch/_utils.py: _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata=None).
        if len(args) not in (6, 7):
            raise self.origin.corrupt("a tensor has the wrong number of parts", got=str(len(args)), want="6 or 7")
        storage, offset, shape, strides, _, hooks, metadata = (*args, None)[:7]
        if not isinstance(storage, _Storage) or storage.dtype is None:
            raise self.origin.corrupt("a tensor has no storage of its type")
        return self._tensor(storage.key, storage.dtype, offset, shape, strides, hooks, metadata)

    def _tensor_v3(self, args: tuple[object, ...]) -> object:
        # torch/_utils.py: _rebuild_tensor_v3(..., hooks, dtype, metadata=None).
        if len(args) not in (7, 8):
            raise self.origin.corrupt("a tensor has the wrong number of parts", got=str(len(args)), want="7 or 8")
        storage, offset, shape, strides, _, hooks, name, metadata = (*args, None)[:8]
        if not isinstance(storage, _Storage) or not isinstance(name, str):
            raise self.origin.corrupt("a tensor has no storage, or no element type")
        element_type = self._element_type(name)
        if storage.dtype not in (None, element_type):
            raise self.origin.corrupt("a tensor and its storage differ in type", got=storage.dtype, want=element_type)
        return self._tensor(storage.key, element_type, offset, shape, strides, hooks, metadata)

    def _rebuild_with_state(self, args: tuple[object, ...]) -> object:
        # torch/_tensor.py: _rebuild_from_type_v2(func, new_type, args, state): a tensor with attributes of its own.
        match args:
            case (InertRecord(args=None) as rebuild, InertRecord(args=None) as kind, tuple() as parts, state) if (
                (rebuild.module, rebuild.name) == ("torch._utils", "_rebuild_tensor_v2")
                and (kind.module, kind.name) == ("torch", "Tensor")
                and _is_plain_state(state)
            ):
                return self._tensor_v2(parts)
        return NotImplemented

    def _tensor(
        self, key: str, dtype_name: str, offset: object, shape: object, strides: object, hooks: object, metadata: object
    ) -> ArchivedTensor:
        if hooks:
            raise self.origin.unsafe("a tensor asks for backward hooks", got=type(hooks).__name__)
        if metadata:
            # torch/_utils.py: get_tensor_metadata: lazy conjugation and negation, or a backend's own bits.
            raise self.origin.usage(
                "a tensor is stored with its conjugation or negation still to be done",
                next_step="call .resolve_conj() and .resolve_neg() before saving",
            )
        match offset, shape, strides:
            case int(), tuple(), tuple() if len(shape) == len(strides) <= _MAX_DIMENSIONS and all(
                type(part) is int and 0 <= part <= _MAX_EXTENT for part in (offset, *shape, *strides)
            ):
                pass
            case _:
                raise self.origin.corrupt("a tensor's offset, shape or strides are not counts")
        self._check_view(key, dtype_name, offset, shape, strides)
        return ArchivedTensor(key, dtype_name, shape, strides, offset)

    def _check_view(
        self, key: str, dtype_name: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        capacity = self.records[key].nbytes // dtype(dtype_name).nbytes
        extent = 1 if math.prod(shape) else 0
        if extent:
            for stride, count in sorted(zip(strides, shape, strict=True)):
                if count == 1:
                    continue
                # Each dimension must step over all smaller ones, or elements share bytes (as after expand()).
                if stride < extent:
                    raise self.origin.usage(
                        "a tensor's elements share or interleave their storage",
                        got=f"shape {quote(shape)}, strides {quote(strides)}",
                        next_step="call .contiguous() or .clone() before saving",
                    )
                extent += (count - 1) * stride
        if offset + extent > capacity:
            raise self.origin.corrupt(
                f"a tensor reaches past its storage data/{quote(key)[1:-1]}",
                got=f"{capacity} elements",
                want=f"{offset + extent} elements",
            )


def _size(args: tuple[object, ...]) -> object:
    return args[0] if len(args) == 1 and isinstance(args[0], tuple) else NotImplemented


def _parameter(args: tuple[object, ...]) -> object:
    # torch/_utils.py: _rebuild_parameter(data, requires_grad, hooks).
    return args[0] if len(args) == 3 and isinstance(args[0], ArchivedTensor) and not args[2] else NotImplemented


def _parameter_with_state(args: tuple[object, ...]) -> object:
    # torch/_utils.py: _rebuild_parameter_with_state(data, requires_grad, hooks, state).
    return _parameter(args[:3]) if len(args) == 4 and _is_plain_state(args[3]) else NotImplemented


def _is_plain_state(state: object) -> bool:
    """Return whether a tensor's attributes are only remarks (DeepSpeed's ``ds_id``), which are dropped.

    Other attributes may change the values: ``data`` or ``real`` with a tensor replaces them.
    """
    return isinstance(state, dict) and all(
        isinstance(name, str) and (value is None or isinstance(value, (bool, int, float, str)))
        for name, value in state.items()
    )


class TorchArchive(Struct, frozen=True):
    """The content of a ``torch.save`` archive; its tensors' bytes are still in the file."""

    path: str
    status: os.stat_result | ObjectStatus
    """Status of the file when it was read."""
    records: Mapping[str, ArchiveRecord]
    """Key -> the member ``data/<key>``."""
    value: object
    """Plain values, tuples, lists, dicts (also OrderedDict), sets, `ArchivedTensor` and `InertRecord`.

    An element type is a text such as ``"torch.bfloat16"``, a ``torch.Size`` a tuple, a parameter its tensor; a storage
    outside a tensor is an inert record. No container contains itself.
    """
    name: str
    """Stem of the file's name when it was saved, which a rename or copy does not change; ``archive`` if torch wrote to
    a stream."""
    has_checksums: bool
    """False if all checksums are 0 (``torch.serialization.set_crc32_options(False)``), so bytes cannot be verified."""
    foreign: Mapping[tuple[str, str], int]
    """Classes and functions in the pickle that frameworks do not write (`xrank.formats.pickles`)."""


def read_archive(path: str, *, rank: int | None = None) -> TorchArchive:
    """Read the structure of a ``torch.save`` archive, which a rank wrote, if one is given.

    Raises:
        CorruptError: the file is not such an archive, is cut short or damaged, or its parts disagree.
        UnsafeError: its pickle needs code to run.
        UsageError: it is undamaged, but safetensors cannot hold its tensors.
        IncompleteError: there is no such file, or a pointer of git-lfs in its place.
    """
    with open_regular(path, rank) as file:
        refuse_pointer(file)
        return read_archive_in(file)


def is_archive(file: RegularFile) -> bool:
    """Return whether an open file begins as ``torch.save`` lets it begin, in its old format, too."""
    start = file.read(0, min(len(_BEFORE_ZIPS), file.nbytes))
    return start.startswith(_ZIP) or start == _BEFORE_ZIPS


def read_archive_in(file: RegularFile, *, start: int = 0, nbytes: int | None = None) -> TorchArchive:
    """Read the archive in an open file, or, as in torch DCP's ``.distcp``, in these bytes of it; see `read_archive`."""
    item = open_item(file, start, nbytes)
    try:
        stem, members = _strip_folder(item, read_members(item))
    except CorruptError:
        if file.read(start, min(len(_BEFORE_ZIPS), file.nbytes - start)) != _BEFORE_ZIPS:
            raise
        raise file.origin.usage(
            "was written by torch before 1.6, or in its old format",
            got="a bare pickle",
            want="a zip",
            next_step="load it with torch and save it again",
        ) from None
    origin = file.origin
    member = members.get("data.pkl")
    if member is None:
        raise origin.corrupt("the archive holds no data.pkl: torch.save did not write it")
    if member.nbytes > MAX_PICKLE_NBYTES:
        raise origin.corrupt(
            "data.pkl is too large", got=f"{member.nbytes} bytes", want=f"at most {MAX_PICKLE_NBYTES} bytes"
        )
    # torch writes zeros for all checksums or for none; the CRC of an empty member is always 0.
    has_checksums = any(member.crc32 for member in members.values())
    _check_byteorder(item, members.get("byteorder"), has_checksums)
    data = _read_member(item, member, has_checksums)
    records = {
        name[5:]: ArchiveRecord(name[5:], start + member.offset, member.nbytes, member.crc32)
        for name, member in members.items()
        if name.startswith("data/")
    }
    tensors = TensorRebuilder(records, origin)
    pickled = read_pickle(
        data,
        origin,
        builders={**PLAIN_BUILDERS, **tensors.builders()},
        load_global=load_global,
        load_persistent=tensors.load_storage,
    )
    return TorchArchive(
        origin.path,
        file.status,
        MappingProxyType(records),
        pickled.value,
        stem,
        has_checksums,
        MappingProxyType(dict(pickled.foreign)),
    )


def _strip_folder(item: ItemBytes, members: tuple[ZipMember, ...]) -> tuple[str, dict[str, ZipMember]]:
    """Return the folder of all members, and the members by their names in it."""
    prefix = members[0].name.partition("/")[0] + "/" if members else ""
    for member in members:
        if not member.name.startswith(prefix):
            raise item.file.origin.corrupt(
                "the archive has members outside its folder", got=quote(member.name), want=quote(prefix)
            )
    return prefix[:-1], {member.name[len(prefix) :]: member for member in members}


def _read_member(item: ItemBytes, member: ZipMember, has_checksums: bool) -> bytes:
    data = item.read(member.offset, member.nbytes)
    crc32 = isal_zlib.crc32(data)
    if has_checksums and crc32 != member.crc32:
        raise item.file.origin.corrupt(
            f"{quote(member.name)} fails its checksum", got=f"CRC {crc32:08x}", want=f"CRC {member.crc32:08x}"
        )
    return data


def _check_byteorder(item: ItemBytes, member: ZipMember | None, has_checksums: bool) -> None:
    if member is None:  # torch writes it since 2.1; older files are little-endian
        return
    order = _read_member(item, member, has_checksums) if member.nbytes <= 16 else b""
    if order == b"big":
        raise item.file.origin.usage(
            "was written on a big-endian machine", got="big", want="little", next_step="save it on a little-endian one"
        )
    if order != b"little":
        raise item.file.origin.corrupt("its byte order is damaged", got=quote(order), want="little")
