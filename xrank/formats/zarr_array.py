"""Arrays of zarr 2 and 3 in Orbax's checkpoints: metadata, indexes of shards, OCDBT stores, and frames of zstd."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from xrank import dtypes
from xrank.errors import UnsafeError, UsageError
from xrank.formats.torch_archive import element_type
from xrank.storage.entries import Entry
from xrank.storage.regular_file import Origin, open_regular, quote

if TYPE_CHECKING:
    from types import ModuleType


_CHUNK_NBYTES = 256 << 10
_MAX_WINDOW_NBYTES = 8 << 20
"""Memory that a frame may ask for. zstd's levels 1 to 19 ask for 8 MiB at most; Orbax's 1 and 3 for 2 MiB."""


def _import_extra(name: str, problem: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"the checkpoint is {problem}, and {name} is not installed",
            got=f"no module {name}",
            want=f"the package {name}",
            next_step=f"install it: pip install {name}",
        ) from None


def import_zstandard() -> ModuleType:
    """Return the module that decodes frames of zstd; its absence is a UsageError."""
    return _import_extra("zstandard", "compressed with zstd")


class Readable(Protocol):
    """Bytes in order."""

    def read(self, nbytes: int, /) -> bytes:
        """Return the next bytes, fewer only at the end."""


def open_frame(encoded: Readable) -> Any:
    """Return a stream (`read`, `readinto`) of the content of one frame of zstd; it raises ZstdError."""
    decoder = import_zstandard().ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES)
    return decoder.stream_reader(encoded, read_size=_CHUNK_NBYTES, read_across_frames=False)


_POLYNOMIAL = 0x82F63B78
"""RFC 3720, appendix B.4, with its bits reversed."""


def crc32c(data: bytes) -> int:
    """Return the checksum of bytes.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    table = _make_table()
    value = 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


@cache
def _make_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        value = number
        for _ in range(8):
            value = (value >> 1) ^ _POLYNOMIAL if value & 1 else value >> 1
        table.append(value)
    return tuple(table)


ARRAY_FILES = {False: ".zarray", True: "zarr.json"}
"""Whether an array is zarr 3 -> name of its metadata."""

_NUMPY_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
_MISSING = (1 << 64) - 1
"""Offset and size of a chunk that a shard does not contain."""


class ZarrArray(Struct, frozen=True):
    """One array, as its metadata describes it."""

    dtype: str
    """Safetensors name of the element type."""
    shape: tuple[int, ...]
    grid_shape: tuple[int, ...]
    """Shape of the chunk under each key; the last ones reach over the array's edge."""
    chunk_shape: tuple[int, ...]
    """Shape of what is encoded by itself: the chunk, or an equal part of a chunk that is a shard."""
    is_compressed: bool
    """Whether each is a valid zstd frame; otherwise it is the elements themselves, row-major."""
    is_sharded: bool = False
    """Whether the value under a key ends in an index of its parts."""
    key_prefix: str = ""
    separator: str = "."

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * dtypes.dtype(self.dtype).nbytes

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a decoded chunk."""
        return prod(self.chunk_shape) * dtypes.dtype(self.dtype).nbytes

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of keys in each dim."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.grid_shape, strict=True))

    @property
    def shard_grid(self) -> tuple[int, ...]:
        """Number of parts of a key's value in each dim."""
        return tuple(n // size for n, size in zip(self.grid_shape, self.chunk_shape, strict=True))

    def key(self, place: Sequence[int]) -> str:
        """Return the key of a chunk below the array's own name."""
        if self.key_prefix:
            return self.separator.join([self.key_prefix, *map(str, place)])
        return self.separator.join(map(str, place)) or "0"

    def place(self, key: str) -> tuple[int, ...] | None:
        """Return the place in the grid of a key below the array's own name; None if it names no chunk."""
        parts = key.split(self.separator)
        if self.key_prefix and parts.pop(0) != self.key_prefix:
            return None
        is_place = len(parts) == len(self.shape) and all(part.isascii() and part.isdecimal() for part in parts)
        return tuple(map(int, parts)) if is_place else None


def parse_array(name: str, text: bytes, origin: Origin, *, is_zarr3: bool) -> ZarrArray:
    """Return an array from the content of its ``zarr.json`` or ``.zarray``."""
    problem = f"the metadata of {quote(name)} is not valid metadata of a zarr array"
    value = Entry.parse(text, lambda fault: origin.corrupt(problem, got=fault))
    array = _parse_v3(name, value, origin) if is_zarr3 else _parse_v2(name, value, origin)
    if not len(array.shape) == len(array.grid_shape) == len(array.chunk_shape):
        shapes = f"{list(array.shape)}, chunks {list(array.grid_shape)} in parts of {list(array.chunk_shape)}"
        raise origin.corrupt(f"the metadata of {quote(name)} has a wrong shape", got=quote(shapes)[1:-1])
    sizes = list(zip(array.grid_shape, array.chunk_shape, strict=True))
    if any(n < 1 or size < 1 or n % size for n, size in sizes):
        got = f"chunks {list(array.grid_shape)} in parts of {list(array.chunk_shape)}"
        raise origin.corrupt(f"the metadata of {quote(name)} has wrong chunks", got)
    return array


def _parse_v2(name: str, value: Entry, origin: Origin) -> ZarrArray:
    if value["zarr_format"].count() != 2:
        value["zarr_format"].refuse("2")
    compressor, dtype = value.get("compressor"), value["dtype"].text()
    order = value.get("order")
    found = re.fullmatch(r"[<|]([fiucb])(\d{1,2})", dtype, re.ASCII)
    plain = dtype if found is None else _NUMPY_KINDS[found[1]] + str(8 * int(found[2])) * (found[1] != "b")
    if dtype.startswith(">"):
        raise _unsupported(name, f"the byte order of {dtype}", origin)
    if order is not None and order.text() != "C":
        raise _unsupported(name, f"the order {order.text()}", origin)
    filters = value.get("filters")
    if filters is not None and filters.entries():
        raise _unsupported(name, f"the filters {filters.value}", origin)
    if compressor is not None and compressor["id"].text() != "zstd":
        raise _unsupported(name, f"the compressor {compressor['id'].text()}", origin)
    chunks = value["chunks"].counts()
    separator = _separator(value.get("dimension_separator"), ".")
    element = element_type(plain, origin, name)
    return ZarrArray(element, value["shape"].counts(), chunks, chunks, compressor is not None, separator=separator)


def _parse_v3(name: str, value: Entry, origin: Origin) -> ZarrArray:
    if value["zarr_format"].count() != 3:
        value["zarr_format"].refuse("3")
    if value["node_type"].value != "array":
        value["node_type"].refuse("array")
    grid, keys, codecs = value["chunk_grid"], value["chunk_key_encoding"], value["codecs"].entries()
    if grid["name"].text() != "regular":
        raise _unsupported(name, f"the chunk grid {grid['name'].text()}", origin)
    grid_shape = chunk_shape = grid["configuration"]["chunk_shape"].counts()
    if keys["name"].text() not in ("default", "v2"):
        raise _unsupported(name, f"the chunk keys {keys['name'].text()}", origin)
    is_default = keys["name"].text() == "default"
    is_sharded = _names(codecs) == ["sharding_indexed"]
    if is_sharded:
        sharding = codecs[0]["configuration"]
        index, location = _names(sharding["index_codecs"].entries()), sharding.get("index_location")
        if index != ["bytes", "crc32c"] or (location is not None and location.text() != "end"):
            raise _unsupported(name, f"an index of shards in {', '.join(index)}", origin)
        chunk_shape, codecs = sharding["chunk_shape"].counts(), sharding["codecs"].entries()
    names = _names(codecs)
    if names not in (["bytes"], ["bytes", "zstd"]):
        raise _unsupported(name, f"the codecs {', '.join(names)}", origin)
    configuration = codecs[0].get("configuration")
    endian = None if configuration is None else configuration.get("endian")
    if endian is not None and endian.text() != "little":
        raise _unsupported(name, "big-endian elements", origin)
    configuration = keys.get("configuration")
    return ZarrArray(
        element_type(value["data_type"].text(), origin, name),
        value["shape"].counts(),
        grid_shape,
        chunk_shape,
        names[-1] == "zstd",
        is_sharded,
        "c" if is_default else "",
        _separator(None if configuration is None else configuration.get("separator"), "/" if is_default else "."),
    )


def _names(codecs: Sequence[Entry]) -> list[str]:
    return [codec["name"].text() for codec in codecs]


def _separator(value: Entry | None, default: str) -> str:
    if value is not None and value.value not in ("/", "."):
        value.refuse("a slash or a dot")
    return default if value is None else value.text()


def _unsupported(name: str, what: str, origin: Origin) -> UsageError:
    return UsageError(
        f"{quote(name)[1:-1]}: {what} is not an encoding that xrank decodes",
        tensor=name,
        file=origin.path,
        got=quote(what)[1:-1],
        want="little-endian elements in row-major chunks, plain or compressed with zstd, as Orbax writes them",
        next_step="load the checkpoint with the program that wrote it, and save it with Orbax",
    )


def read_shard_index(index: bytes, num_parts: int, nbytes: int) -> list[tuple[int, int] | None] | None:
    """Return offset and bytes of each part of a shard, in row-major order; None for a part that it does not contain.

    `index` is the last ``16 * num_parts + 4`` bytes of the shard. Where it is cut short, its checksum is wrong, or a
    part lies outside the shard, return None.
    """
    table, checksum = index[:-4], int.from_bytes(index[-4:], "little")
    if len(table) != 16 * num_parts or crc32c(table) != checksum:
        return None
    numbers = [int.from_bytes(table[at : at + 8], "little") for at in range(0, len(table), 8)]
    found: list[tuple[int, int] | None] = []
    for offset, size in zip(numbers[::2], numbers[1::2], strict=True):
        if (offset, size) == (_MISSING, _MISSING):
            found.append(None)
        elif offset + size > nbytes - len(index):
            return None
        else:
            found.append((offset, size))
    return found


MANIFEST = "manifest.ocdbt"
_MAX_NODE_NBYTES = 1 << 28
_MAX_HEIGHT = 64


class StoredValue(Struct, frozen=True):
    """Where the value of a key lies."""

    file: str
    """Path in the store's folder: of the value, or of the node that contains it."""
    offset: int
    """First byte of the value in the file; of the node if `data` is given."""
    nbytes: int
    data: bytes | None = None
    """The value, if the node contains it."""


def read_ocdbt(folder: str) -> dict[str, StoredValue]:
    """Return key -> place of its value, for the last version of a store."""
    tensorstore = _import_extra("tensorstore", "Orbax's in OCDBT")
    path = os.path.join(folder, MANIFEST)
    with open_regular(path) as file:
        content = _read(file, 0, file.nbytes)
    manifest = _decode(tensorstore, MANIFEST, content, None, Origin(path))
    versions = manifest.get("versions")
    if not versions:
        raise Origin(path).corrupt("names no version of the store", got=quote(str(sorted(manifest))), want="one")
    found: dict[str, StoredValue] = {}
    root = versions[-1]["root"].get("location")
    if root is not None:  # absent in an empty store
        for key, value in _walk(tensorstore, folder, path, root, b"", 0):
            found[key.decode("utf-8", "surrogateescape")] = value
    return found


def _walk(
    tensorstore: Any, folder: str, above: str, location: str, prefix: bytes, depth: int
) -> Iterator[tuple[bytes, StoredValue]]:
    """Yield all keys below a node with their values; `above` is the file that names the node."""
    kind, base, relative, offset, nbytes = _parse_location(location, above)
    name = base + relative
    path = os.path.join(folder, name)
    origin = Origin(path)
    if depth > _MAX_HEIGHT:
        raise origin.corrupt("the nodes of the store form a cycle")
    with open_regular(path) as file:
        content = _read(file, offset, nbytes)
    # Alone under its name, so that it begins at byte 0.
    node = _decode(tensorstore, name, content, f"{kind}:{base}:{relative}:0:{nbytes}", origin)
    for entry in node["entries"]:
        key = prefix + entry["key"]
        if node["height"]:
            below = prefix + entry["subtree_common_prefix"]
            yield from _walk(tensorstore, folder, path, entry["location"], below, depth + 1)
        elif "inline_value" in entry:
            yield key, StoredValue(name, offset, len(entry["inline_value"]), entry["inline_value"])
        else:
            _, base_path, file_path, start, size = _parse_location(entry["indirect_value"], path)
            yield key, StoredValue(base_path + file_path, start, size)


def _read(file: Any, offset: int, nbytes: int) -> bytes:
    if nbytes > _MAX_NODE_NBYTES:
        raise file.origin.corrupt("contains too large a node", got=f"{nbytes:,} bytes", want=f"{_MAX_NODE_NBYTES:,}")
    content: bytes = file.read(offset, nbytes)
    return content


def _decode(tensorstore: Any, name: str, content: bytes, node: str | None, origin: Origin) -> Any:
    """Return a manifest or node as plain values."""
    store = tensorstore.KvStore.open("memory://").result()
    store.write(name, content).result()
    try:
        return tensorstore.ocdbt.dump(store, node).result()
    # tensorstore raises ValueError for damage, and others for what it takes for a fault of the store.
    except Exception as error:
        raise origin.corrupt("is not a valid part of an OCDBT store", got=str(error)[:300]) from None


def _parse_location(location: str, above: str) -> tuple[str, str, str, int, int]:
    """Return kind, base path, relative path, offset and bytes of ``<kind>:<base>:<path>:<offset>:<bytes>``."""
    parts = location.split(":")
    if len(parts) != 5:
        raise Origin(above).corrupt("names a part of the store in an unknown way", got=quote(location))
    kind, base, relative, offset, nbytes = parts
    name = base + relative
    if "\0" in name or name.startswith(("/", "../")) or posixpath.normpath(name) != name:
        raise UnsafeError(
            f"{above} names a file outside its folder",
            file=above,
            got=quote(name),
            want="paths in the folder",
            next_step="do not use this checkpoint: its metadata was tampered with",
        )
    return kind, base, relative, int(offset), int(nbytes)
