"""``.zarray`` and ``zarr.json``: the shape, type and chunks of one array, for the encodings that Orbax writes.

Sources: zarr-specs, v2 and v3 (core, codecs/sharding-indexed); tensorstore's drivers zarr and zarr3; Orbax 0.12
(serialization/tensorstore_utils.py: _build_zarr_shard_and_chunk_metadata).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from xrank import dtypes
from xrank.errors import UsageError, XrankError
from xrank.formats.crc32c import crc32c
from xrank.formats.regular_file import Origin, quote

__all__ = ["ZarrArray", "parse_array", "read_shard_index"]

ARRAY_FILES = {False: ".zarray", True: "zarr.json"}
"""Whether an array is zarr 3 -> name of its metadata."""

_NUMPY_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
_MISSING = (1 << 64) - 1
"""Offset and size of a chunk that a shard does not contain."""


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """One array, as its metadata describes it."""

    dtype: str
    """Safetensors name of the element type."""
    shape: tuple[int, ...]
    grid_shape: tuple[int, ...]
    """Shape of the chunk under each key; the last ones reach over the array's edge."""
    chunk_shape: tuple[int, ...]
    """Shape of what is encoded by itself: the chunk, or an equal part of a chunk that is a shard."""
    is_compressed: bool
    """Whether each is a frame of zstd; otherwise it is the elements themselves, row-major."""
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
    """Return an array from the content of its metadata file.

    Args:
        name: the array's name, for errors.
        text: the content.
        origin: the file with the content.
        is_zarr3: whether it is ``zarr.json`` rather than ``.zarray``.

    Raises:
        CorruptError: it is not such metadata.
        UsageError: the array has an encoding or a type that Orbax does not write.
    """
    try:
        value = json.loads(text)
        array = _parse_v3(name, value, origin) if is_zarr3 else _parse_v2(name, value, origin)
    except XrankError:
        raise
    # Any other failure of a look-up means that the file has another structure.
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise origin.corrupt(
            f"the metadata of {quote(name)} is not that of a zarr array", got=f"{type(error).__name__}: {error}"[:200]
        ) from None
    for shape in (array.shape, array.grid_shape, array.chunk_shape):
        if len(shape) != len(array.shape) or any(type(n) is not int or n < 0 for n in shape):
            raise origin.corrupt(f"the metadata of {quote(name)} has a wrong shape", got=quote(str(shape)))
    if any(n < 1 for n in (*array.grid_shape, *array.chunk_shape)) or any(
        n % size for n, size in zip(array.grid_shape, array.chunk_shape, strict=True)
    ):
        raise origin.corrupt(
            f"the metadata of {quote(name)} has wrong chunks",
            got=f"chunks {list(array.grid_shape)} in parts of {list(array.chunk_shape)}",
        )
    return array


def _parse_v2(name: str, value: Mapping[str, Any], origin: Origin) -> ZarrArray:
    if value["zarr_format"] != 2:
        raise ValueError(f"zarr_format {value['zarr_format']}")
    compressor = value["compressor"]
    found = re.fullmatch(r"[<|]([fiucb])(\d{1,2})", value["dtype"])
    plain = value["dtype"] if found is None else _NUMPY_KINDS[found[1]] + str(8 * int(found[2])) * (found[1] != "b")
    odd = [
        text
        for is_odd, text in (
            (value["dtype"].startswith(">"), f"the byte order of {value['dtype']}"),
            (value.get("order", "C") != "C", f"the order {value.get('order')}"),
            (bool(value.get("filters")), f"the filters {value.get('filters')}"),
            (
                compressor is not None and compressor["id"] != "zstd",
                f"the compressor {compressor and compressor['id']}",
            ),
        )
        if is_odd
    ]
    if odd:
        raise _unsupported(name, odd[0], origin)
    shape, chunks = tuple(value["shape"]), tuple(value["chunks"])
    return ZarrArray(
        _element_type(name, plain, origin),
        shape,
        chunks,
        chunks,
        compressor is not None,
        separator=value.get("dimension_separator", "."),
    )


def _parse_v3(name: str, value: Mapping[str, Any], origin: Origin) -> ZarrArray:
    if (value["zarr_format"], value["node_type"]) != (3, "array"):
        raise ValueError(f"zarr_format {value['zarr_format']}, node_type {value['node_type']}")
    if value["chunk_grid"]["name"] != "regular":
        raise _unsupported(name, f"the chunk grid {value['chunk_grid']['name']}", origin)
    grid_shape = chunk_shape = tuple(value["chunk_grid"]["configuration"]["chunk_shape"])
    keys = value["chunk_key_encoding"]
    if keys["name"] not in ("default", "v2"):
        raise _unsupported(name, f"the chunk keys {keys['name']}", origin)
    is_default = keys["name"] == "default"
    codecs = value["codecs"]
    is_sharded = [codec["name"] for codec in codecs] == ["sharding_indexed"]
    if is_sharded:
        sharding = codecs[0]["configuration"]
        index = [codec["name"] for codec in sharding["index_codecs"]]
        if index != ["bytes", "crc32c"] or sharding.get("index_location", "end") != "end":
            raise _unsupported(name, f"an index of shards in {', '.join(index)}", origin)
        chunk_shape, codecs = tuple(sharding["chunk_shape"]), sharding["codecs"]
    names = [codec["name"] for codec in codecs]
    if names not in (["bytes"], ["bytes", "zstd"]):
        raise _unsupported(name, f"the codecs {', '.join(names)}", origin)
    if codecs[0].get("configuration", {}).get("endian", "little") != "little":
        raise _unsupported(name, "big-endian elements", origin)
    return ZarrArray(
        _element_type(name, value["data_type"], origin),
        tuple(value["shape"]),
        grid_shape,
        chunk_shape,
        names[-1] == "zstd",
        is_sharded,
        "c" if is_default else "",
        keys.get("configuration", {}).get("separator", "/" if is_default else "."),
    )


def _element_type(name: str, text: str, origin: Origin) -> str:
    try:
        return dtypes.by_torch_name(text).name
    except UsageError as error:
        error.about(quote(name)[1:-1], tensor=name, file=origin.path)
        raise


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

    Args:
        index: the last ``16 * num_parts + 4`` bytes of the shard.
        num_parts: number of parts.
        nbytes: bytes of the shard.

    Returns:
        None if the index is cut short, its checksum is wrong, or a part lies outside the shard.
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
