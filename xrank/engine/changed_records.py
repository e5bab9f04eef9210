"""Records of a version of a model, made of an earlier version's where they are read.

A changed record is made whole, in order, and its checksum is compared before any of its bytes is used. Records up to
some MB stay in memory while they are recent, larger ones go to a scratch file: memory is flat whatever their size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from xrank.engine.buffers import OpenSource
from xrank.engine.faults import COPY, find_owner
from xrank.engine.made_records import RecordClaims, RecordStream, ScratchFile, SourceLayer
from xrank.engine.windows import Read
from xrank.errors import CorruptError
from xrank.formats.deltas import BodyReader, Bytes, DamagedBodyError, new_checksum
from xrank.layout.stored_model import RecordChange, StoredModel

_CHUNK_NBYTES = 256 << 10
"""Bytes that all changes are applied to while they are in a core's own cache."""
_FETCHED_NBYTES = 4 << 20
"""Bytes of a record that a store sends ahead."""
_ROOM_NBYTES = 32 << 20
"""Bytes of all records in memory."""
_LARGEST_NBYTES = 16 << 20
"""Bytes of the largest record that is kept in memory."""


class ChangedSource(SourceLayer):
    """Reads records, and applies the changes of those that have some. Errors as those of `FileSource`.

    CorruptError for a record that does not get the bytes whose checksum its version recorded.
    """

    def __init__(self, model: StoredModel, inner: OpenSource, folder: str | None = None) -> None:
        super().__init__(inner)
        self._model = model
        self._changes, self._nbytes = model.records.changed, model.records.nbytes
        self._scratch = ScratchFile(folder, sum(int(self._nbytes[one]) for one in self._changes), "changes are applied")
        self._scratch_nbytes = 0
        self._claims = RecordClaims()
        self._kept: OrderedDict[int, Bytes] = OrderedDict()
        """Records in memory, the one used longest ago first."""
        self._held_nbytes = 0
        """Bytes of these, and of those that are being made in memory."""
        self._used_nbytes: dict[int, int] = {}
        self._places: dict[int, int] = {}
        """Records in the scratch file -> first byte there."""
        self._made: set[int] = set()
        self._coming: OrderedDict[int, None] = OrderedDict()
        """Announced records that no thread makes yet."""
        self._ahead_nbytes = 0

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        if record in self._changes:
            into[:] = self.fetch(record, start, len(into), into)
        else:
            self._count(len(into))
            self._inner.read_into(record, start, into)

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return the record's bytes: in memory that stays as it is, or in the staging buffer."""
        self._count(nbytes)
        if record not in self._changes:
            return self._inner.fetch(record, start, nbytes, staging)
        data, place = self._claims.bring(lambda: self._find(record, nbytes), lambda: self._wanted(record), self._make)
        if data is not None:
            return data[start : start + nbytes].data
        self._scratch.read_into(staging[:nbytes], place + start)
        return staging[:nbytes]

    def announce(self, reads: Iterable[Read]) -> bool:
        """Take the records of reads that come soon as the next to make; return whether there was room for all."""
        known = list(reads)
        nbytes = sum(read.nbytes for read in known)
        with self._claims.changed:
            has_room = self._ahead_nbytes + nbytes <= _ROOM_NBYTES
            if has_room:
                self._ahead_nbytes += nbytes
                new = {read.record for read in known} & self._changes.keys() - self._made - self._claims.claimed
                self._coming |= dict.fromkeys(sorted(new - self._coming.keys()))
        plain = [read for read in known if read.record not in self._changes]
        for record in {read.record for read in known} & self._changes.keys() - self._made:
            stored = (record, *(change.body for change in self._changes[record]))
            plain += [Read(one, 0, min(int(self._nbytes[one]), _FETCHED_NBYTES), None) for one in stored]
        return self._fetch_ahead(plain) and has_room

    def close(self) -> None:
        """Close all files, the scratch file too; no read may be under way."""
        super().close()
        self._scratch.close()
        self._kept.clear()
        self._places.clear()
        self._held_nbytes = 0

    def trace(self, record: int, kinds: Iterable[str]) -> list[dict[str, str]]:
        """Return the checksums of a record in each version, the base's first; CorruptError at the first wrong one.

        `kinds` are checksums to compute beside those that the versions recorded.
        """
        changes = self._changes.get(record, ())
        wanted = [{*kinds}, *({*kinds, change.checksum_kind} for change in changes)]
        states = [{kind: new_checksum(kind) for kind in sorted(own)} for own in wanted]

        def add(version: int, part: Bytes) -> None:
            for state in states[version].values():
                state.update(part)

        self._apply(record, add)
        found = [{kind: state.hexdigest() for kind, state in own.items()} for own in states]
        for change, own in zip(changes, found[1:], strict=True):
            if own[change.checksum_kind] != change.checksum:
                raise self._make_error(record, change, own[change.checksum_kind])
        return found

    def _count(self, nbytes: int) -> None:
        with self._claims.changed:
            self._ahead_nbytes = max(0, self._ahead_nbytes - nbytes)

    def _fetch_ahead(self, reads: Sequence[Read]) -> bool:
        """Let stores begin to send bytes; return whether there was room for all."""
        announce = None if self.objects is None else getattr(self._inner, "announce", None)
        return announce is None or not reads or bool(announce(reads))

    def _find(self, record: int, nbytes: int) -> tuple[Bytes | None, int] | None:
        """Return a record in memory, or its place in the scratch file; count bytes of it as used."""
        if record in self._places:
            return None, self._places[record]
        data = self._kept.get(record)
        if data is None:
            return None
        self._kept.move_to_end(record)
        self._used_nbytes[record] = self._used_nbytes.get(record, 0) + nbytes
        if self._used_nbytes[record] >= len(data):
            self._drop(record)
        return data, 0

    def _wanted(self, record: int) -> Iterator[int]:
        """Yield the record, and others to make meanwhile as far as memory has room for them."""
        yield record
        for one in [*self._coming]:
            if one in self._made:
                del self._coming[one]
            elif one not in self._claims.claimed:
                nbytes = int(self._nbytes[one])
                if nbytes <= _LARGEST_NBYTES and self._held_nbytes + nbytes > _ROOM_NBYTES:
                    return
                yield one

    def _make(self, record: int) -> None:
        nbytes = int(self._nbytes[record])
        with self._claims.changed:
            self._coming.pop(record, None)
            # A second time, as for columns of a tensor that others follow: then it stays.
            in_memory = nbytes <= _LARGEST_NBYTES and record not in self._made
            while in_memory and self._held_nbytes + nbytes > _ROOM_NBYTES:
                if not self._kept:
                    in_memory = False
                    break
                self._drop(next(iter(self._kept)))
            if in_memory:
                self._held_nbytes += nbytes
            else:
                place, self._scratch_nbytes = self._scratch_nbytes, self._scratch_nbytes + nbytes
        data = np.empty(nbytes, np.uint8) if in_memory else None
        try:
            self._fill(record, data, None if in_memory else place)
        except BaseException:
            if in_memory:
                with self._claims.changed:
                    self._held_nbytes -= nbytes
            raise
        with self._claims.changed:
            self._made.add(record)
            if data is None:
                self._places[record] = place
            else:
                self._kept[record] = data
                self._used_nbytes[record] = 0

    def _drop(self, record: int) -> None:
        self._held_nbytes -= len(self._kept.pop(record))

    def _fill(self, record: int, data: Bytes | None, place: int | None) -> None:
        """Make a record in memory, or at a place of the scratch file, and compare its checksum."""
        changes = self._changes[record]
        last, state, done = len(changes), new_checksum(changes[-1].checksum_kind), 0

        def take(version: int, part: Bytes) -> None:
            nonlocal done
            if version < last:
                return
            state.update(part)
            if place is not None:
                self._scratch.write(part.data, place + done)
            done += len(part)

        self._apply(record, take, data)
        found = state.hexdigest()
        if found != changes[-1].checksum:
            self.trace(record, ())  # names the first version that is wrong
            raise self._make_error(record, changes[-1], found)

    def _apply(self, record: int, take: Callable[[int, Bytes], object], into: Bytes | None = None) -> None:
        """Make a record piece by piece; `take` gets each piece in each version, the base's first, in order.

        A piece is in `into` if that is given, and valid until the next otherwise.
        """
        nbytes, changes = int(self._nbytes[record]), self._changes.get(record, ())
        bodies = []
        for change in changes:
            with self._explain(record, change):
                bodies.append(BodyReader(change.encoding, nbytes, self._opener(change.body)))
        buffer = np.empty(min(nbytes, _CHUNK_NBYTES), np.uint8) if into is None else into
        for start in range(0, nbytes, _CHUNK_NBYTES):
            count = min(_CHUNK_NBYTES, nbytes - start)
            part = buffer[:count] if into is None else into[start : start + count]
            if start % _FETCHED_NBYTES == 0:
                self._fetch_ahead([Read(record, start, min(2 * _FETCHED_NBYTES, nbytes - start), None)])
            self._inner.read_into(record, start, part.data)
            take(0, part)
            for version, (change, body) in enumerate(zip(changes, bodies, strict=True), 1):
                with self._explain(record, change):
                    body.apply(part)
                take(version, part)
        for change, body in zip(changes, bodies, strict=True):
            with self._explain(record, change):
                body.finish()

    def _opener(self, body: int) -> Callable[[], RecordStream]:
        return lambda: RecordStream(self._inner, body, int(self._nbytes[body]))

    @contextmanager
    def _explain(self, record: int, change: RecordChange) -> Iterator[None]:
        try:
            yield
        except DamagedBodyError as error:
            name, path = self._describe(record, change)
            problem = f"{name}: its changes in {path} are damaged, or belong to a different base"
            want = f"{change.encoding} of {int(self._nbytes[record]):,} bytes"
            raise CorruptError(problem, file=path, got=str(error), want=want, next_step=COPY, tensor=name) from error

    def _make_error(self, record: int, change: RecordChange, found: str) -> CorruptError:
        name, path = self._describe(record, change)
        problem = f"{name}: {path} does not reproduce the bytes of its writer"
        got, want = f"{change.checksum_kind} {found}", change.checksum
        step = "give the model that the version was made from as its base, or copy the version again"
        return CorruptError(problem, file=path, got=got, want=want, next_step=step, tensor=name)

    def _describe(self, record: int, change: RecordChange) -> tuple[str, str]:
        """Return the tensor of a record, and the file of a change."""
        path = self._model.files[int(self._model.records.file[change.body])].path
        return str(find_owner(self._model, record).get("tensor", f"record {record}")), path
