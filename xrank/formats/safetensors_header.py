"""Read the header of a safetensors file strictly, and write equal headers for equal tensors.

The rules are those of safetensors 0.8 (``safetensors/src/tensor.rs: Metadata.validate``), and three that its text
states but its code does not check (measured): no repeated name, no blank before the brace, only the three keys of a
tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from xrank.dtypes import DTYPES, dtype, unsupported
from xrank.errors import UsageError, XrankError
from xrank.storage.client import ObjectStatus
from xrank.storage.regular_file import Origin, open_regular, quote, refuse_pointer

MAX_HEADER_NBYTES = 100_000_000
"""``safetensors/src/tensor.rs: MAX_HEADER_SIZE``."""

_METADATA = "__metadata__"
_LENGTH_NBYTES = 8
_MAX_INTEGER = (1 << 64) - 1
# safetensors/src/tensor.rs: enum Dtype: valid types that do not have whole bytes and that torch lacks.
_OTHER_DTYPES = frozenset({"F6_E2M3", "F6_E3M2"})
_MAX_METADATA = 1 << 16
_MAX_ENTRY_NBYTES = 4096
"""Shapes of 64 dims, the most that numpy and torch know, fit."""


class HeaderTensor(Struct, frozen=True):
    """The entry of a tensor in a header."""

    name: str
    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    """Shape as torch has it, in elements. The header counts values; an element of F4 is two."""
    start: int
    """First byte, counted from the end of the header."""
    end: int
    """The byte after the last one."""


class SafetensorsHeader(Struct, frozen=True):
    """A header whose tensors cover all bytes of the file."""

    path: str
    status: os.stat_result | ObjectStatus
    """Status of the file when it was read."""
    tensors: tuple[HeaderTensor, ...]
    """The tensors in the order of their bytes."""
    metadata: Mapping[str, str]
    data_start: int
    """First byte of the file after the header."""


def read_header(path: str, *, start: int = 0) -> SafetensorsHeader:
    """Read and check the safetensors header that begins at a byte of a file; the tensors' bytes are not read."""
    with open_regular(path) as file:
        origin = file.origin
        refuse_pointer(file)
        if file.nbytes < start + _LENGTH_NBYTES:
            want = f"at least {start + _LENGTH_NBYTES}"
            raise origin.corrupt("is too short for a safetensors file", f"{file.nbytes} bytes", want)
        nbytes = int.from_bytes(file.read(start, _LENGTH_NBYTES), "little")
        limit = min(MAX_HEADER_NBYTES, file.nbytes - start - _LENGTH_NBYTES)
        if nbytes > limit:
            want = f"at most {limit} bytes"
            raise origin.corrupt("the safetensors header's length is wrong", f"{nbytes} bytes", want)
        data_start = start + _LENGTH_NBYTES + nbytes
        raw = file.read(data_start - nbytes, nbytes)
        tensors, metadata = _parse(raw, file.nbytes - data_start, origin)
        return SafetensorsHeader(path, file.status, tensors, MappingProxyType(metadata), data_start)


def build_header(tensors: Sequence[HeaderTensor], metadata: Mapping[str, str], *, alignment: int = 4096) -> bytes:
    """Return the bytes of a safetensors file before the data.

    The bytes do not depend on the order of tensors and metadata: metadata come first, names are sorted, and blanks fill
    up to a multiple of ``alignment``.
    """
    if alignment < 1:
        raise UsageError("a header's alignment is a positive number of bytes", got=str(alignment), want="4096")
    _check_tensors(tensors)
    table: dict[str, object] = {}
    if metadata:
        table[_METADATA] = dict(sorted(metadata.items()))
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        shape, num_packed = tensor.shape, dtype(tensor.dtype).num_packed
        if num_packed > 1:  # the last dim is the packed one (safetensors/torch.py: _tobytes)
            shape = (*shape[:-1], shape[-1] * num_packed)
        table[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": (tensor.start, tensor.end)}
    try:
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            "a name or a value of the metadata is not a Unicode text",
            got=quote(error.object[max(error.start - 40, 0) : error.end]),
            want="text without lone surrogates",
            next_step="rename it",
        ) from None
    nbytes = _LENGTH_NBYTES + len(text)
    padded = text + b" " * (-nbytes % alignment)
    if len(padded) > MAX_HEADER_NBYTES:
        raise UsageError(
            f"the header of {len(tensors)} tensors is too long for a safetensors file",
            got=f"{len(padded)} bytes",
            want=f"at most {MAX_HEADER_NBYTES} bytes",
            next_step="spread the tensors over more files",
        )
    return len(padded).to_bytes(_LENGTH_NBYTES, "little") + padded


def _check_tensors(tensors: Sequence[HeaderTensor]) -> None:
    """Raise an error for tensors that `read_header` would refuse."""
    names: set[str] = set()
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        fault = None
        width = dtype(tensor.dtype).nbytes
        if tensor.name in names or tensor.name == _METADATA:
            fault = "its name is taken"
        elif not all(type(extent) is int and extent >= 0 for extent in tensor.shape):
            fault = "its shape is not a tuple of counts"
        elif not tensor.shape and dtype(tensor.dtype).num_packed > 1:
            fault = f"{tensor.dtype} packs the last dim, and it has none"
        elif tensor.start != offset:
            fault = f"it starts at byte {tensor.start}, the tensors before it end at byte {offset}"
        elif _nbytes(tensor.shape, width, tensor.end) != tensor.end - tensor.start:
            fault = f"its bytes {tensor.start} to {tensor.end} do not fit its shape"
        if fault is not None:
            problem = f"a safetensors header cannot describe {quote(tensor.name)}: {fault}"
            step = "give the tensor a different name or size"
            raise UsageError(problem, tensor=tensor.name, next_step=step)
        names.add(tensor.name)
        offset = tensor.end


def _nbytes(shape: Sequence[int], width: int, limit: int) -> int:
    """Return the bytes of a tensor; above ``limit``, the result is only some larger number."""
    if 0 in shape:
        return 0
    nbytes = width
    for extent in shape:
        nbytes *= extent
        # A header of 100 MB may name millions of large extents, whose full product would take hours.
        if nbytes > limit:
            break
    return nbytes


def _parse(raw: bytes, data_nbytes: int, origin: Origin) -> tuple[tuple[HeaderTensor, ...], dict[str, str]]:
    if not raw.startswith(b"{") or not raw.rstrip(b" ").endswith(b"}"):
        problem = "the safetensors header is not a JSON object padded with blanks"
        raise origin.corrupt(problem, quote(raw[:20]), "{...}")
    try:
        entries = _decode(raw, msgspec.Raw)
        stated = bytes(entries.pop(_METADATA, b"null"))
        # tensor.rs: HashMetadata is an Option, so null means no metadata.
        try:
            metadata: dict[str, str] = {} if stated == b"null" else _decode(stated, str, _MAX_METADATA)
        except msgspec.ValidationError as error:
            problem = "the safetensors header's __metadata__ is not a table of strings, or is too long"
            raise origin.corrupt(problem, got=str(error), want=f"at most {_MAX_METADATA:,} strings by name") from None
        tensors = [_tensor(name, entry, data_nbytes, origin) for name, entry in entries.items()]
    except XrankError:
        raise
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        raise origin.corrupt("the safetensors header is damaged", got=f"{type(error).__name__}: {error}") from None
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end, tensor.name))
    offset = 0
    for tensor in tensors:
        if tensor.start != offset:
            problem = f"tensor {quote(tensor.name)} leaves a hole or overlaps the one before it"
            raise origin.corrupt(problem, f"starts at byte {tensor.start}", f"byte {offset}")
        offset = tensor.end
    if offset != data_nbytes:
        problem = "does not have the length that its safetensors header requires"
        raise origin.corrupt(problem, f"{data_nbytes} bytes of data", f"{offset} bytes")
    return tuple(tensors), metadata


class _Key(str):
    """A name in a JSON object, which `_decode` sees before a later one of the same name hides it."""

    __slots__ = ()


def _decode(text: bytes | msgspec.Raw, kind: Any, max_names: int | None = None) -> dict[str, Any]:
    """Return a JSON object; values of the kind `msgspec.Raw` stay bytes, for all objects would take 35 times these."""
    names: set[str] = set()

    def take_name(_: type, name: str) -> _Key:
        if name in names or len(names) == max_names:
            raise ValueError(f"{quote(name)} occurs twice" if name in names else f"more than {max_names:,} texts")
        names.add(name)
        return _Key(name)

    table: Any = dict[_Key, kind]
    return {str(name): value for name, value in msgspec.json.decode(text, type=table, dec_hook=take_name).items()}


def _tensor(name: str, raw: msgspec.Raw, data_nbytes: int, origin: Origin) -> HeaderTensor:
    text = memoryview(raw)
    entry = _decode(raw, Any) if text[:1].tobytes() == b"{" and text.nbytes <= _MAX_ENTRY_NBYTES else {}
    # JSON's true becomes a bool, whose type is not int, so it is refused.
    match entry:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [start, end]} if len(entry) == 3 and all(
            type(number) is int and 0 <= number <= _MAX_INTEGER for number in (*shape, start, end)
        ):
            pass
        case _:
            problem = f"tensor {quote(name)} is not described as dtype, shape and data_offsets"
            raise origin.corrupt(problem, quote(text[:80].tobytes()), "these three, of a text and of counts")
    if dtype_name not in DTYPES and dtype_name not in _OTHER_DTYPES:
        raise origin.corrupt(f"tensor {quote(name)} has an unknown element type", got=quote(dtype_name))
    num_packed = 1 if dtype_name in _OTHER_DTYPES else dtype(dtype_name).num_packed
    is_odd = num_packed > 1 and (not shape or shape[-1] % num_packed > 0)
    if dtype_name in _OTHER_DTYPES or is_odd:
        error = unsupported(f"{dtype_name} of shape {shape}" if is_odd else dtype_name)
        error.about(origin.locate(f"tensor {quote(name)}"), tensor=name, file=origin.path)
        raise error
    if num_packed > 1:
        shape = [*shape[:-1], shape[-1] // num_packed]
    nbytes = _nbytes(shape, dtype(dtype_name).nbytes, data_nbytes)
    if not start <= end <= data_nbytes or nbytes != end - start:
        problem = f"tensor {quote(name)} does not have the size of its shape, or ends outside the file"
        got = f"bytes {start} to {end} of {data_nbytes}"
        raise origin.corrupt(problem, got, f"{dtype_name} of shape {quote(tuple(shape))}")
    return HeaderTensor(name, dtype_name, tuple(shape), start, end)
