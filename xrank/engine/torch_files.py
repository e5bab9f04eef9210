"""Files of ``torch.save`` archives before any data moves: one archive with many tensors, or many of one tensor each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isal import isal_zlib
from msgspec import Struct
from msgspec.structs import replace

from xrank.formats.pickle_writing import write_pickle
from xrank.formats.torch_archive import ALIGNMENT, ArchivedTensor, ArchiveLayout, lay_out_archive
from xrank.layout.nests import row_major
from xrank.layout.output_files import OutputFile, OutputTensor, PlacedBytes

_LARGE_NBYTES = 1 << 20
_ALIGNMENT = 64  # torch/utils/serialization/config.py: save.storage_alignment


class Item(Struct, frozen=True):
    """An archive with one tensor or none."""

    value: Any
    """What `write_pickle` takes; ``view(...)`` of the tensor stands for it."""
    tensor: OutputTensor | None = None
    """The tensor to copy."""
    content: bytes | None = None
    """Bytes of the tensor, if they are known already."""


def view(dtype: str, shape: tuple[int, ...], key: str = "0") -> ArchivedTensor:
    """Return the tensor that is all of a record."""
    return ArchivedTensor(key, dtype, shape, row_major(shape), 0)


def lay_out_archive_file(name: str, pickled: bytes, tensors: Sequence[OutputTensor]) -> OutputFile:
    """Return a file that is one archive; tensor i is the record i."""
    layout = lay_out_archive(pickled, [tensor.nbytes for tensor in tensors])
    placed = tuple(replace(tensor, offset=at) for tensor, at in zip(tensors, layout.offsets, strict=True))
    return OutputFile(name, layout.front, placed, layout.nbytes, layout.headers, layout.ending, layout.trailer)


def bare_file(name: str, content: bytes) -> OutputFile:
    """Return a file all bytes of which are known."""
    return OutputFile(name, content, (), len(content))


def lay_out_items(name: str, items: Sequence[Item]) -> tuple[OutputFile, list[tuple[int, int]]]:
    """Return a file of archives one after another, with zeros in between, and the first byte and bytes of each."""
    end, known, tensors, late, places = 0, list[PlacedBytes](), list[OutputTensor](), list[tuple[int, Item]](), []
    for item in items:
        tensor, content = item.tensor, item.content
        if tensor is not None and not tensor.nbytes:
            tensor, content = None, b""
        layout = _lay_out(item)
        # Large tensors start at a block of the file, behind a header that is shorter than one.
        is_large = bool(end) and tensor is not None and tensor.nbytes >= _LARGE_NBYTES
        start = end + -(end + (layout.offsets[0] if is_large else 0)) % (ALIGNMENT if is_large else _ALIGNMENT)
        end = start + layout.nbytes
        places.append((start, layout.nbytes))
        known.append((start, layout.front + b"".join(data for _, data in layout.headers)))
        if tensor is not None:
            tensors.append(replace(tensor, offset=start + layout.offsets[0]))
            late.append((start, item))
            continue
        if content:
            known.append((start + layout.offsets[0], content))
        crcs = [] if content is None else [isal_zlib.crc32(content)]
        known += [(start + at, data) for at, data in layout.ending(crcs)]

    def end_of(row: int, crc32: int) -> PlacedBytes:
        start, item = late[row]
        parts = _lay_out(item).ending([crc32])  # laid out again, for thousands of layouts take memory
        return start + parts[0][0], b"".join(data for _, data in parts)

    def ending(crc32: Sequence[int]) -> list[PlacedBytes]:
        return [end_of(row, crc) for row, crc in enumerate(crc32)]

    def trailer(row: int, crc32: int) -> PlacedBytes | None:
        # The last one is written when the file is complete.
        return end_of(row, crc32) if row < len(late) - 1 else None

    (_, header), *fragments = known
    if not tensors:
        return OutputFile(name, header, (), end, tuple(fragments)), places
    return OutputFile(name, header, tuple(tensors), end, tuple(fragments), ending, trailer), places


def _lay_out(item: Item) -> ArchiveLayout:
    data = item.tensor.nbytes if item.tensor is not None else None if item.content is None else len(item.content)
    sizes = [] if data is None else [data]
    return lay_out_archive(write_pickle(item.value), sizes, alignment=_ALIGNMENT, ends_with_records=True)
