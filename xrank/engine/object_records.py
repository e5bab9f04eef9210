"""Records in objects of stores.

Objects are read in blocks of the plan's ranges, many requests at once, each byte fetched once. The executor announces
the ranges of the windows that come next, so that requests overlap. Small records that are close together are one block;
larger ones are cut into blocks, which a window and its neighbors share. A block is dropped when all of its bytes were
used, and blocks take a bounded number of bytes.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from msgspec import Struct, field

from xrank.engine.buffers import FileSource, make_change_error
from xrank.engine.windows import Read
from xrank.errors import AGAIN, CorruptError, XrankError
from xrank.layout.stored_model import StoredModel
from xrank.storage.client import ObjectStore, copy_bytes
from xrank.storage.places import open_store
from xrank.storage.url import can_list

BLOCK_NBYTES = 1 << 20
"""Bytes of a block of a large record, unless the budget has room for larger ones."""
LEAST_BLOCK_NBYTES = 64 << 10
ROOM_NBYTES = 16 << 20
"""Bytes of all blocks, unless the budget says otherwise."""
_SMALL_NBYTES = 256 << 10
"""Records up to this size share requests with their neighbors."""
_GAP_NBYTES = 16 << 10
"""Gaps up to this size between small records are read through."""


def count_requests(model: StoredModel) -> tuple[int, int]:
    """Return the number of requests for all blocks of a model in stores, at most, and their bytes."""
    units = [unit for unit in make_units(model)[0] if model.files[unit.file].in_store is not None]
    nbytes = [unit.end - unit.start for unit in units]
    return sum(-(-one // BLOCK_NBYTES) for one in nbytes), sum(nbytes)


class Unit(Struct):
    """A large record, or small neighbors, in one object."""

    file: int
    start: int
    end: int
    used_nbytes: int
    """Bytes of its records."""
    step: int = 0
    """Bytes of a block; 0: not decided yet."""


def make_units(model: StoredModel) -> tuple[list[Unit], list[int]]:
    """Return the units of all objects, and each record's index into them."""
    records = model.records
    files, offsets, sizes = (column.tolist() for column in (records.file, records.offset, records.stored_nbytes))
    # Many files are read at the same time, and their blocks have to fit the room.
    most = max(LEAST_BLOCK_NBYTES, min(BLOCK_NBYTES, ROOM_NBYTES // (2 * max(1, len(model.files)))))
    small = min(_SMALL_NBYTES, most)
    units: list[Unit] = []
    unit_of = [0] * len(records)
    for record in np.lexsort((records.offset, records.file)).tolist():
        file, start, end = files[record], offsets[record], offsets[record] + sizes[record]
        last = units[-1] if units and units[-1].file == file else None
        is_small = sizes[record] <= small
        if last and start >= last.start and end <= last.end:
            pass  # tied tensors share a record
        elif last and last.step and is_small and start - last.end <= _GAP_NBYTES and end - last.start <= most:
            last.used_nbytes += end - max(start, last.end)
            last.end = end
            last.step = end - last.start
        else:
            # A unit of small records is one block.
            units.append(Unit(file, start, end, end - start, max(1, end - start) if is_small else 0))
        unit_of[record] = len(units) - 1
    return units, unit_of


_MOST_BLOCK_NBYTES = 4 << 20


def holds_objects(model: StoredModel) -> bool:
    """Return whether any file of a model is an object in a store."""
    return any(file.in_store is not None for file in model.files)


class _Block(Struct):
    nbytes: int
    used_nbytes: int
    """Bytes that will be used."""
    done: threading.Event = field(default_factory=threading.Event)
    data: memoryview | None = None
    error: Exception | None = None
    taken_nbytes: int = 0


class ObjectSource:
    """Reads records of a stored model whose files are objects, or some of them. Errors as those of `FileSource`."""

    def __init__(self, model: StoredModel) -> None:
        self._model = model
        self._local = FileSource(model)
        self._records = list(zip(model.records.file.tolist(), model.records.offset.tolist(), strict=True))
        self._is_local = [file.in_store is None for file in model.files]
        self._stores: list[tuple[ObjectStore, str] | None] = [
            None if file.in_store is None else open_store(file.path) for file in model.files
        ]
        self.connections = max(store.settings.connections for store, _ in filter(None, self._stores))
        self._units, self._unit_of = make_units(model)
        self._is_joint = [unit.step > 0 for unit in self._units]
        """Whether each unit is made of small records."""
        self._num_reads = {
            self._unit_of[part.record]: matrix.num_reads
            for matrix in model.records.quantized.values()
            for part in matrix.parts
        }
        """Unit with codes or scales -> about how many times its bytes are read."""
        self._blocks: OrderedDict[tuple[int, int], _Block] = OrderedDict()
        self._held_nbytes = 0
        self._room_nbytes, self._block_nbytes = ROOM_NBYTES, BLOCK_NBYTES
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()

    @property
    def objects(self) -> ObjectSource:
        """This source itself; a source that decodes records has one inside."""
        return self

    def limit(self, nbytes: int) -> None:
        """Set the bytes that blocks may take."""
        self._room_nbytes = max(nbytes, 2 * BLOCK_NBYTES)
        # Larger blocks bring more for each wait, where the room still takes one for about each connection.
        self._block_nbytes = BLOCK_NBYTES
        while self._block_nbytes < _MOST_BLOCK_NBYTES and self._block_nbytes * self.connections <= nbytes:
            self._block_nbytes *= 2

    def announce(self, reads: Iterable[Read]) -> bool:
        """Start to fetch bytes that will be read soon; return whether there was room for all."""
        remote = [one for one in reads if not self._is_local[self._records[one.record][0]]]
        if not remote:
            return False  # nothing to fetch, so that looking further ahead brings nothing
        # A window across many pieces, as of a tensor cut by columns, leaves each piece less room.
        step = self._block_nbytes
        while step > LEAST_BLOCK_NBYTES and step * 2 * len(remote) > self._room_nbytes:
            step //= 2
        for record, start, nbytes, _ in remote:
            number = self._unit_of[record]
            unit = self._units[number]
            unit.step = unit.step or step
            first = self._records[record][1] + start - unit.start
            for index in range(first // unit.step, (first + nbytes - 1) // unit.step + 1 if nbytes else 0):
                if not self._start(number, index):
                    return False
        return True

    @property
    def fills_memory(self) -> bool:
        """Whether all stores receive bytes where they are to stay; others would hold them twice."""
        return all(opened is None or opened[0].fills_memory for opened in self._stores)

    def is_large(self, record: int) -> bool:
        """Return whether a record's bytes come by requests of their own, not by those of its neighbors."""
        return not self._is_local[self._records[record][0]] and not self._is_joint[self._unit_of[record]]

    def read_all(self, reads: Sequence[Read], memory: memoryview) -> None:
        """Read bytes of large records to their places in memory, by one request for each, all at once."""
        others: list[Future[None]] = []
        try:
            others.extend(self._submit(self._read_straight, read, memory) for read in reads[1:])
            for read in reads[:1]:
                self._read_straight(read, memory)
        finally:
            wait(others)  # no thread may write to memory that its owner uses again
        for one in others:
            one.result()

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        file, offset = self._records[record]
        if self._is_local[file]:
            self._local.read_into(record, start, into)
            return
        position = offset + start
        while into:
            part = self._take(record, position, len(into))
            copy_bytes(part, into[: len(part)])
            into, position = into[len(part) :], position + len(part)

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return the bytes in a block where they lie in one, otherwise in the staging buffer."""
        file, offset = self._records[record]
        if self._is_local[file] or nbytes == 0:
            return self._local.fetch(record, start, nbytes, staging)
        part = self._take(record, offset + start, nbytes)
        if len(part) == nbytes:
            return part
        copy_bytes(part, staging[: len(part)])
        self.read_into(record, start + len(part), staging[len(part) : nbytes])
        return staging[:nbytes]

    def check_unchanged(self) -> None:
        """Compare size and version of every object, and the status of every file, with those of its metadata."""
        folders: dict[str, dict[str, object]] = {}
        for file, opened in zip(self._model.files, self._stores, strict=True):
            if opened is None:
                continue
            store, key = opened
            folder, name = os.path.split(file.path)
            if not can_list(file.path):
                if store.head(key) != file.in_store:
                    raise make_change_error(file)
                continue
            if folder not in folders:
                folders[folder] = dict(store.list_folder(os.path.dirname(key)).objects)
            if folders[folder].get(name) != file.in_store:
                raise make_change_error(file)
        self._local.check_unchanged()

    def close(self) -> None:
        """Drop all blocks and close local files; no read may be under way."""
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._stop = threading.Event()
        with self._lock:
            self._blocks.clear()
            self._held_nbytes = 0
        self._local.close()

    def _take(self, record: int, position: int, nbytes: int) -> memoryview:
        """Return bytes of an object from a position on, up to the end of their block, and count them as used."""
        number = self._unit_of[record]
        unit = self._units[number]
        unit.step = unit.step or self._block_nbytes
        key = (number, (position - unit.start) // unit.step)
        block = self._bring(key)
        assert block.data is not None
        low = position - unit.start - key[1] * unit.step
        part = block.data[low : low + nbytes]
        with self._lock:
            block.taken_nbytes += len(part)
            if block.taken_nbytes >= block.used_nbytes and number not in self._num_reads:
                self._drop(key, block)
        return part

    def _bring(self, key: tuple[int, int]) -> _Block:
        with self._lock:
            block = self._blocks.get(key)
            is_mine = block is None
            if block is None:
                block = self._add(key)
            else:
                self._blocks.move_to_end(key)
        if is_mine:
            self._load(key, block)
        block.done.wait()
        if block.error is not None:
            raise block.error
        return block

    def _start(self, number: int, index: int) -> bool:
        """Fetch a block in another thread, unless it is there; return False if there is no room."""
        key = (number, index)
        with self._lock:
            if key in self._blocks:
                return True
            self._drop_finished(self._units[number].step)
            if self._held_nbytes + self._units[number].step > self._room_nbytes:
                return False
            block = self._add(key)
        self._submit(self._load, key, block)
        return True

    def _submit(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.connections, "xrank-store")
            pool = self._pool
        return pool.submit(work, *arguments)

    def _add(self, key: tuple[int, int]) -> _Block:
        """Add a block that is not fetched yet, and drop the ones used longest ago; the caller has the lock."""
        unit = self._units[key[0]]
        start = unit.start + key[1] * unit.step
        nbytes = min(unit.step, unit.end - start)
        is_whole = nbytes == unit.end - unit.start
        self._drop_finished(nbytes)
        used_nbytes = (unit.used_nbytes if is_whole else nbytes) * self._num_reads.get(key[0], 1)
        block = self._blocks[key] = _Block(nbytes, used_nbytes)
        self._held_nbytes += nbytes
        for other, held in list(self._blocks.items()):
            if self._held_nbytes <= self._room_nbytes:
                break
            if held.data is not None and held.taken_nbytes:
                self._drop(other, held)
        return block

    def _drop_finished(self, nbytes: int) -> None:
        """Drop blocks that are used, though perhaps read again, until there is room for so many bytes."""
        for key, held in list(self._blocks.items()):
            if self._held_nbytes + nbytes <= self._room_nbytes:
                return
            if held.taken_nbytes >= held.used_nbytes:
                self._drop(key, held)

    def _drop(self, key: tuple[int, int], block: _Block) -> None:
        if self._blocks.get(key) is block:
            del self._blocks[key]
            self._held_nbytes -= block.nbytes

    def _read_straight(self, read: Read, memory: memoryview) -> None:
        assert read.place is not None, "only bytes with an offset are read directly"
        file, offset = self._records[read.record]
        self._read(file, offset + read.start, read.nbytes, memory[read.place : read.place + read.nbytes])

    def _read(self, number: int, start: int, nbytes: int, into: memoryview | None = None) -> memoryview:
        """Return bytes of a file by one request, in `into` if it is given."""
        file, opened = self._model.files[number], self._stores[number]
        assert opened is not None
        store, name = opened
        if start + nbytes > file.nbytes:
            raise CorruptError(
                f"{file.path} ends before byte {start + nbytes:,}",
                file=file.path,
                got=f"{file.nbytes:,} bytes",
                want=f"at least {start + nbytes:,} bytes",
                next_step="copy the object again from where it was written",
            )
        try:
            return store.read(name, start, nbytes, file.in_store, into=into, stop=self._stop)
        except XrankError:
            raise
        except Exception as error:
            raise XrankError(f"{file.path}: {error}", file=file.path, next_step=AGAIN) from error

    def _load(self, key: tuple[int, int], block: _Block) -> None:
        unit = self._units[key[0]]
        try:
            block.data = self._read(unit.file, unit.start + key[1] * unit.step, block.nbytes)
        except Exception as error:
            block.error = error
            with self._lock:
                self._drop(key, block)
        except BaseException:
            path = self._model.files[unit.file].path
            block.error = XrankError(f"{path}: its reading was interrupted", file=path, next_step=AGAIN)
            raise
        finally:
            block.done.set()
