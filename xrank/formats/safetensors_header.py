"""The header of a safetensors file: read strictly, written the same for the same tensors.

The rules are those of safetensors 0.8 (``safetensors/src/tensor.rs: Metadata.validate``) and three that its text states
and its code lets pass (measured): no name twice, no blank before the brace, no key beyond the three of a tensor.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from xrank.dtypes import DTYPES, dtype, unsupported
from xrank.errors import UsageError
from xrank.formats.regular_file import Origin, open_regular, shown

__all__ = ["MAX_HEADER_NBYTES", "HeaderTensor", "SafetensorsHeader", "build_header", "read_header"]

MAX_HEADER_NBYTES = 100_000_000
"""``safetensors/src/tensor.rs: MAX_HEADER_SIZE``."""

_METADATA = "__metadata__"
_LENGTH_NBYTES = 8
_MAX_INTEGER = (1 << 64) - 1
# safetensors/src/tensor.rs: enum Dtype: sound there, but no array of whole bytes, or no kind xrank moves.
_OTHER_DTYPES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor as a header lists it."""

    name: str
    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the first byte after the header."""
    end: int
    """One past the last byte."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a file whose every byte it accounts for."""

    path: str
    status: os.stat_result
    """Of the file as it was read."""
    tensors: tuple[HeaderTensor, ...]
    """In the order of their bytes."""
    metadata: Mapping[str, str]
    data_start: int
    """First byte of the file after the header."""


def read_header(path: str, *, start: int = 0) -> SafetensorsHeader:
    """Read and check a safetensors header; the tensors' bytes are not read.

    Args:
        path: the file.
        start: its byte at which the header begins, behind what else it holds.

    Raises:
        CorruptError: the file breaks a rule of the format, or is not as long as its header says.
        UsageError: a tensor has an element type that xrank does not move.
        IncompleteError: there is no such file.
    """
    with open_regular(path) as file:
        origin = file.origin
        if file.nbytes < start + _LENGTH_NBYTES:
            raise origin.corrupt(
                "is too short for a safetensors file",
                got=f"{file.nbytes} bytes",
                want=f"at least {start + _LENGTH_NBYTES}",
            )
        nbytes = int.from_bytes(file.read(start, _LENGTH_NBYTES), "little")
        limit = min(MAX_HEADER_NBYTES, file.nbytes - start - _LENGTH_NBYTES)
        if nbytes > limit:
            raise origin.corrupt(
                "the safetensors header's length is wrong", got=f"{nbytes} bytes", want=f"at most {limit} bytes"
            )
        data_start = start + _LENGTH_NBYTES + nbytes
        raw = file.read(data_start - nbytes, nbytes)
        tensors, metadata = _parse(raw, file.nbytes - data_start, origin)
        return SafetensorsHeader(path, file.status, tensors, MappingProxyType(metadata), data_start)


def build_header(tensors: Sequence[HeaderTensor], metadata: Mapping[str, str], *, alignment: int = 4096) -> bytes:
    """Return the first bytes of a safetensors file, up to where the data start.

    The same tensors and metadata give the same bytes, in whatever order they come: names are sorted, the metadata
    come first, and blanks fill up to a multiple of ``alignment``.

    Raises:
        UsageError: the header would be longer than a reader takes, or would not be one.
    """
    if alignment < 1:
        raise UsageError("a header's alignment is a positive number of bytes", got=str(alignment), want="4096")
    _check_tensors(tensors)
    table: dict[str, object] = {}
    if metadata:
        table[_METADATA] = dict(sorted(metadata.items()))
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.end),
        }
    try:
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            "a name or a value of the metadata is no Unicode text",
            got=shown(error.object[max(error.start - 40, 0) : error.end]),
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
    """Raise for a list that `read_header` would refuse to read back."""
    names: set[str] = set()
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        fault = None
        width = dtype(tensor.dtype).nbytes
        if tensor.name in names or tensor.name == _METADATA:
            fault = "its name is taken"
        elif not all(type(extent) is int and extent >= 0 for extent in tensor.shape):
            fault = "its shape is no tuple of counts"
        elif tensor.start != offset:
            fault = f"it starts at byte {tensor.start}, the tensors before it end at byte {offset}"
        elif _nbytes(tensor.shape, width, tensor.end) != tensor.end - tensor.start:
            fault = f"its bytes {tensor.start} to {tensor.end} do not fit its shape"
        if fault is not None:
            raise UsageError(f"no header can list {shown(tensor.name)}: {fault}", tensor=tensor.name)
        names.add(tensor.name)
        offset = tensor.end


def _nbytes(shape: Sequence[int], width: int, limit: int) -> int:
    """Return the bytes of a tensor; of one larger than ``limit``, any number above it."""
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
        raise origin.corrupt(
            "the safetensors header is no JSON object padded with blanks", got=shown(raw[:20]), want="{...}"
        )
    try:
        table: dict[str, Any] = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_count,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except (ValueError, RecursionError) as error:
        # UnicodeDecodeError and JSONDecodeError are ValueErrors; the latter's text quotes nothing of the file.
        raise origin.corrupt("the safetensors header is damaged", got=f"{type(error).__name__}: {error}") from None
    metadata = table.pop(_METADATA, None)
    if metadata is None:  # tensor.rs: HashMetadata: an Option, of which null is the none
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise origin.corrupt("the safetensors header's __metadata__ is no table of texts")
    for text in (*table, *metadata, *metadata.values()):
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise origin.corrupt("the safetensors header holds half a surrogate pair", got=shown(text))
    tensors = [_tensor(name, entry, data_nbytes, origin) for name, entry in table.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end, tensor.name))
    offset = 0
    for tensor in tensors:
        if tensor.start != offset:
            raise origin.corrupt(
                f"tensor {shown(tensor.name)} leaves a hole or overlaps the one before it",
                got=f"starts at byte {tensor.start}",
                want=f"byte {offset}",
            )
        offset = tensor.end
    if offset != data_nbytes:
        raise origin.corrupt(
            "is not as long as its safetensors header says", got=f"{data_nbytes} bytes of data", want=f"{offset} bytes"
        )
    return tuple(tensors), metadata


def _tensor(name: str, entry: Any, data_nbytes: int, origin: Origin) -> HeaderTensor:
    # bool is no worry here: JSON's true comes as a bool, whose type is not int.
    match entry:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [start, end]} if len(entry) == 3 and all(
            type(number) is int for number in (*shape, start, end)
        ):
            pass
        case _:
            raise origin.corrupt(
                f"tensor {shown(name)} is not described as dtype, shape and data_offsets", want="these three"
            )
    if dtype_name in _OTHER_DTYPES:
        error = unsupported(dtype_name)
        error.about(origin.named(f"tensor {shown(name)}"), tensor=name, file=origin.path)
        raise error
    if dtype_name not in DTYPES:
        raise origin.corrupt(f"tensor {shown(name)} has an unknown element type", got=shown(dtype_name))
    nbytes = _nbytes(shape, dtype(dtype_name).nbytes, data_nbytes)
    if not start <= end <= data_nbytes or nbytes != end - start:
        raise origin.corrupt(
            f"tensor {shown(name)} does not have the size of its shape, or ends outside the file",
            got=f"bytes {start} to {end} of {data_nbytes}",
            want=f"{dtype_name} of shape {shown(tuple(shape))}",
        )
    return HeaderTensor(name, dtype_name, tuple(shape), start, end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(twice)} is there twice")
    return table


def _count(digits: str) -> int:
    # The length first: int() of a long text takes quadratic time.
    if digits.startswith("-") or len(digits) > 20 or int(digits) > _MAX_INTEGER:
        raise ValueError(f"{shown(digits)} is no count")
    return int(digits)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{shown(text)} is no count")
