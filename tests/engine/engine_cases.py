"""Models in memory whose every element is known: what the engine's tests plan, execute and compare with."""

from __future__ import annotations

import math
import os
import random
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine import object_records, windows
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, canonical
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.storage.client import ObjectStatus, StoreSettings

Integer = Callable[[int, int], int]
"""Draws from low to high, both included: ``random.Random.randint``, or hypothesis."""

Box = tuple[tuple[int, int], ...]


def strides_of(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def cut_boxes(integer: Integer, shape: Sequence[int], num_cuts: int) -> list[Box]:
    """Cut a shape into boxes, each cut through one of the boxes so far."""
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(num_cuts if shape else 0):
        box = boxes.pop(integer(0, len(boxes) - 1))
        dim = integer(0, len(shape) - 1)
        low, high = box[dim]
        if high - low < 2:
            boxes.append(box)
            continue
        at = integer(low + 1, high - 1)
        boxes += [(*box[:dim], (low, at), *box[dim + 1 :]), (*box[:dim], (at, high), *box[dim + 1 :])]
    return boxes


def box_nest(box: Box, shape: Sequence[int], order: Sequence[int] | None = None) -> Nest:
    """Return a box's nest; x is an address in a storage that has the box's dims in that order."""
    lengths = [high - low for low, high in box]
    order = range(len(shape)) if order is None else order
    storage = strides_of([lengths[d] for d in order])
    x_strides = dict(zip(order, storage, strict=True))
    strides = strides_of(shape)
    start = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
    return canonical(Nest(0, start, tuple((n, x_strides[d], strides[d]) for d, n in enumerate(lengths))))


def shuffled(integer: Integer, items: Iterable) -> list:
    left = list(items)
    return [left.pop(integer(0, len(left) - 1)) for _ in range(len(left))]


def pairs_of(nest: Nest) -> tuple[np.ndarray, np.ndarray]:
    """Return the x and the y addresses of a nest, by its plain meaning."""
    x, y = np.array(nest.x), np.array(nest.y)
    for n, xs, ys in nest.loops:
        x, y = x[..., None] + np.arange(n) * xs, y[..., None] + np.arange(n) * ys
    return x.ravel(), y.ravel()


class MadeModel:
    """Grows tensor by tensor; `whole` says what each must become, `records` what the ranks hold."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.crc32: list[int] = []
        self.ranks: list[int] = []
        self.shards: list[StoredShard] = []
        self.whole: dict[str, bytes] = {}

    def add(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        whole: np.ndarray,
        pieces: Sequence[tuple[int, Sequence[Nest]]],
        *,
        has_checksum: bool = True,
        noise: int = 0,
    ) -> None:
        """Add a tensor of those elements; each piece is (rank, nests over one record), `noise` elements around it."""
        width = dtypes.dtype(dtype).nbytes
        elements = np.frombuffer(whole.tobytes(), f"u{width}")
        assert len(elements) == math.prod(shape)
        rows = []
        for rank, nests in pieces:
            nests = [nest._replace(x=nest.x + noise) for nest in nests]
            pairs = [pairs_of(nest) for nest in nests]
            length = noise + max((int(x.max()) + 1 for x, _ in pairs), default=0)
            storage = np.frombuffer(random.Random(len(self.records)).randbytes(length * width), f"u{width}").copy()
            for x, y in pairs:
                storage[x] = elements[y]
            rows += [(rank, len(self.records), nest) for nest in nests]
            self.ranks.append(rank)
            self.records.append(storage.tobytes())
            self.crc32.append(zlib.crc32(storage) if has_checksum else NO_CHECKSUM)
        self.whole[name] = elements.tobytes()
        self.shards.append(
            StoredShard(
                name,
                dtype,
                tuple(shape),
                int_array(row[0] for row in rows),
                int_array(row[1] for row in rows),
                NestTable.from_nests([row[2] for row in rows]),
            )
        )

    def in_memory(self) -> StoredModel:
        zeros = [0] * len(self.records)
        return self._model((SourceFile("memory", 0, 0, 0),), zeros, zeros)

    def on_disk(self, folder: Path) -> StoredModel:
        """Write each rank's records to a file of its own, with odd gaps between them."""
        content: dict[int, bytearray] = {rank: bytearray(b"head") for rank in sorted(set(self.ranks))}
        offsets = []
        for rank, record in zip(self.ranks, self.records, strict=True):
            offsets.append(len(content[rank]))
            content[rank] += record + b"gap"
        for rank, data in content.items():
            (folder / f"rank_{rank}").write_bytes(data)
        files = [
            SourceFile.from_status(str(folder / f"rank_{rank}"), os.stat(folder / f"rank_{rank}")) for rank in content
        ]
        numbers = {rank: i for i, rank in enumerate(content)}
        return self._model(tuple(files), [numbers[rank] for rank in self.ranks], offsets)

    def in_store(self, folder: Path) -> StoredModel:
        """Write the records as `on_disk` does; the files are objects of a store."""
        model = self.on_disk(folder)
        files = [replace(file, in_store=ObjectStatus(file.nbytes, "v")) for file in model.files]
        return replace(model, files=tuple(files))

    def _model(self, files: tuple[SourceFile, ...], file: list[int], offset: list[int]) -> StoredModel:
        nbytes = [len(record) for record in self.records]
        records = RecordTable(*(int_array(values) for values in (file, offset, nbytes, self.crc32)))
        return StoredModel("made", "made", files, records, tuple(self.shards))

    @property
    def views(self) -> list[memoryview]:
        return [memoryview(record) for record in self.records]


class MemorySource:
    """Reads records that are views of memory, one for each record."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view.cast("B") for view in views]

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        into[:] = self._views[record][start : start + len(into)]

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return a view of the bytes; nothing is copied."""
        return self._views[record][start : start + nbytes]


def add_random(
    made: MadeModel,
    integer: Integer,
    name: str,
    shape: Sequence[int],
    *,
    dtype: str = "F32",
    num_cuts: int = 3,
    replicas: bool = True,
    whole: np.ndarray | None = None,
) -> None:
    """Add a tensor of random bytes in random boxes: some stored transposed, some twice, some without a checksum."""
    width, size = dtypes.dtype(dtype).nbytes, math.prod(shape)
    if whole is None:
        whole = np.frombuffer(random.Random(integer(0, 1 << 30)).randbytes(size * width), np.uint8)
    pieces = []
    for rank, box in enumerate(cut_boxes(integer, shape, num_cuts) if size else ()):
        order = shuffled(integer, range(len(shape))) if integer(0, 2) == 0 else range(len(shape))
        ranks = (rank, rank + 10) if replicas and integer(0, 3) == 0 else (rank,)
        pieces += [(r, [box_nest(box, shape, order)]) for r in ranks]
    made.add(name, dtype, shape, whole, pieces, has_checksum=bool(integer(0, 4)), noise=integer(0, 3))


def lay_out(outputs: Sequence[OutputTensor], num_files: int = 1, header_nbytes: int = 100) -> list[OutputFile]:
    """Deal tensors to files, in each file the widest elements first and no gaps; headers are bytes of their own."""
    files = []
    for i in range(num_files):
        tensors = sorted(outputs[i::num_files], key=lambda tensor: -dtypes.dtype(tensor.dtype).nbytes)
        header = random.Random(i).randbytes(-(-header_nbytes // 8) * 8)
        offset, placed = len(header), []
        for tensor in tensors:
            placed.append(replace(tensor, offset=offset))
            offset += tensor.nbytes
        files.append(OutputFile(f"file{i}", header, tuple(placed), offset))
    return files


def outputs_of(made: MadeModel, dtype: str | None = None) -> list[OutputTensor]:
    return [OutputTensor(shard.name, dtype or shard.dtype, shard.shape) for shard in made.shards]


def expected_file(file: OutputFile, whole: dict[str, bytes]) -> bytes:
    return file.header + b"".join(whole[tensor.name] for tensor in file.tensors)


def plain_digest(data: bytes) -> bytes:
    """Return a tensor's digest by its definition."""
    blocks = [data[i : i + 65_536] for i in range(0, len(data), 65_536)]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(block) for block in blocks))


def by_torch(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    """Return the bits that torch casts to."""
    width = dtypes.dtype(target).nbytes
    tensor = torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(getattr(torch, dtypes.dtype(source).torch_name))
    cast = tensor.to(getattr(torch, dtypes.dtype(target).torch_name))
    return cast.view(getattr(torch, f"int{width * 8}")).numpy().view(f"u{width}")


class FolderStore:
    """A folder as a store."""

    settings = StoreSettings(connections=3)

    def __init__(self, folder: Path, *, fills_memory: bool = True) -> None:
        self._folder = folder
        self.fills_memory = fills_memory

    def read(
        self,
        key: str,
        offset: int,
        nbytes: int,
        status: ObjectStatus | None = None,
        *,
        into: memoryview | None = None,
        stop: threading.Event | None = None,
    ) -> memoryview:
        data = memoryview((self._folder / key).read_bytes()[offset : offset + nbytes])
        assert into is None or self.fills_memory, "this store leaves the caller's memory"
        if into is None:
            return data
        into[:] = data
        return into


def use_as_store(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fills_memory: bool = True) -> None:
    """Let objects be files of a folder, of whose records those above 64 bytes are large."""
    store = FolderStore(folder, fills_memory=fills_memory)
    monkeypatch.setattr(object_records, "open_store", lambda path: (store, os.path.basename(path)))
    monkeypatch.setattr(object_records, "_SMALL_NBYTES", 64)
    monkeypatch.setattr(object_records, "_GAP_NBYTES", 8)
    monkeypatch.setattr(windows, "_STRAIGHT_NBYTES", 64)
