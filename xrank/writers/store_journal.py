"""The journal of an output in a store: one object, which is also the lock, and one for each uploaded file.

Every change of the journal demands the version that this process wrote last. A gather that takes over a dead one's
journal thereby stops it, should it still run: its next change is refused.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import xxhash

from xrank.errors import ContradictionError, CorruptError, IncompleteError, OutputExistsError, XrankError, option
from xrank.formats.entries import Entry
from xrank.stores.client import Store
from xrank.stores.uploads import Part
from xrank.system import process_state
from xrank.writers.store_place import StorePlace
from xrank.writers.store_replacing import Replaced

_VERSION = 1
_DIGEST = re.compile(r"xxh(3|128):[0-9a-f]{32}")
_BEAT_SECONDS = 10.0
_MAX_NBYTES = 64 << 20
_SILENT_SECONDS = 35.0
"""An owner on another host that has not changed its journal for this long counts as dead: three beats."""


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload under way."""

    upload_id: str
    part_nbytes: int
    """Bytes of each part but the last."""
    name: str
    """Of its object in the output."""


@dataclass(frozen=True, slots=True)
class Journal:
    """What the journal's object contains."""

    stage: str
    """Random; every object of the output bears it."""
    plan: str
    host: str = ""
    pid: int = 0
    """The owner; 0 where a run that ended has given it up."""
    beat: int = 0
    last: str = ""
    """The file that the commit writes last; before the commit empty, and no object of the output is visible."""
    uploads: Mapping[str, Upload] = field(default_factory=dict)
    """By the file's name in the plan."""
    replaced: Replaced | None = None
    """The model that the output replaces."""

    @property
    def is_committing(self) -> bool:
        """Whether objects of the output may be visible."""
        return bool(self.last)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file whose parts are all uploaded."""

    stage: str
    upload_id: str
    nbytes: int
    digest: str
    tensors: tuple[str, ...]
    """Digests of its tensors, in hex, in the file's order."""
    parts: tuple[Part, ...]


class OpenJournal:
    """This process's journal; any thread may call its methods.

    Raises (from every method):
        OutputExistsError: another gather has taken it over.
    """

    def __init__(self, place: StorePlace, content: Journal, version: str) -> None:
        self._place, self._content, self._version = place, content, version
        self._lock = threading.Lock()
        self._lost: XrankError | None = None
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="xrank-journal", daemon=True)
        self._beating.start()

    @property
    def content(self) -> Journal:
        """What the journal contains now."""
        return self._content

    def add_upload(self, name: str, upload: Upload) -> None:
        """Record an upload before its first part."""
        self.add_uploads({name: upload})

    def add_uploads(self, uploads: Mapping[str, Upload]) -> None:
        """Record uploads, by the name of the file, before their first parts."""
        with self._lock:
            self._write(replace(self._content, uploads={**self._content.uploads, **uploads}))

    def set_replaced(self, replaced: Replaced | None) -> None:
        """Record the model that the output replaces."""
        with self._lock:
            if self._content.replaced != replaced:
                self._write(replace(self._content, replaced=replaced))

    def begin_commit(self, last: str) -> None:
        """Record that objects of the output may be visible from now on, and which is written last."""
        with self._lock:
            self._write(replace(self._content, last=last))

    def check_owned(self) -> None:
        """Raise if another gather has taken over."""
        with self._lock:
            self._write(replace(self._content, beat=self._content.beat + 1))

    def put_record(self, name: str, record: FileRecord) -> None:
        """Record an uploaded file."""
        self._place.store.put(self._place.record_key(name), _seal(asdict(record)))

    def remove(self) -> None:
        """Delete the journal and all records of files."""
        self._stop()
        for name in self._content.uploads:
            self._place.store.delete(self._place.record_key(name))
        self._place.store.delete(self._place.journal_key)

    def release(self) -> None:
        """Give the journal up, for the next run to go on with."""
        self._stop()
        with self._lock, suppress(XrankError):
            self._write(replace(self._content, host="", pid=0))

    def _stop(self) -> None:
        self._ended.set()
        self._beating.join()

    def _write(self, content: Journal) -> None:
        if self._lost is not None:
            raise self._lost
        try:
            self._version = put_journal(self._place, content, self._version)
        except (ContradictionError, IncompleteError, OutputExistsError):
            self._lost = OutputExistsError(
                f"{self._place.url}: another gather to it took over this one's journal",
                file=self._place.url,
                next_step=f"wait for the other gather, or give this one another {option('out')}",
            )
            raise self._lost from None
        self._content = content

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            # Whatever fails here shows again at the next change that matters.
            with suppress(XrankError):
                self.check_owned()


def put_journal(place: StorePlace, content: Journal, version: str | None) -> str:
    """Write the journal over this version of it, or as a new one; return its version.

    Raises:
        ContradictionError, OutputExistsError: another process has written it.
    """
    data = _seal(asdict(content))
    try:
        return place.store.put(place.journal_key, data, if_absent=version is None, if_version=version)
    except (ContradictionError, OutputExistsError):
        # After a broken connection, the journal that is there may be the one that was just written.
        found = _read(place.store, place.journal_key)
        if found is not None and found[0] == data:
            return found[1]
        raise


def make_owned(content: Journal) -> Journal:
    """Return the journal with this process as its owner."""
    return replace(content, host=socket.gethostname(), pid=os.getpid())


def read_journal(place: StorePlace) -> tuple[Journal | None, str] | None:
    """Return the journal, None in its place if it is damaged, and its version; None if there is none."""
    found = _read(place.store, place.journal_key)
    if found is None:
        return None
    try:
        record = _unseal(found[0])
        stage, plan, host, last = (record[key].text() for key in ("stage", "plan", "host", "last"))
        pid, beat = record["pid"].count(below=1 << 31), record["beat"].count()
        known = {
            name: Upload(one["upload_id"].text(), one["part_nbytes"].count(low=1), one["name"].text())
            for name, one in record["uploads"].items()
        }
        old = None if record["replaced"].value is None else Replaced.from_entry(record["replaced"])
    except CorruptError:
        return None, found[1]
    return Journal(stage, plan, host, pid, beat, last, known, old), found[1]


def read_record(place: StorePlace, name: str) -> FileRecord | None:
    """Return the record of an uploaded file; None if there is none, or a damaged one."""
    found = _read(place.store, place.record_key(name))
    if found is None:
        return None
    try:
        record = _unseal(found[0])
        parts = tuple(
            Part(
                part["number"].count(), part["nbytes"].count(), part["etag"].text(), part["crc32"].count(below=1 << 32)
            )
            for part in record["parts"].entries()
        )
        if not _DIGEST.fullmatch(record["digest"].text()):
            record["digest"].refuse("a digest")
        return FileRecord(
            record["stage"].text(),
            record["upload_id"].text(),
            record["nbytes"].count(),
            record["digest"].text(),
            tuple(one.digest().hex() for one in record["tensors"].entries()),
            parts,
        )
    except CorruptError:
        return None


def wait_for_owner(place: StorePlace, journal: Journal | None, version: str) -> bool:
    """Return whether the owner of a journal is alive; an owner on another host is watched until it changes it."""
    if journal is not None:
        if journal.pid == 0:
            return False
        if journal.host == socket.gethostname():
            # A container's only process has the same number in every run: no process but this one can be it.
            return journal.pid != os.getpid() and process_state(journal.pid) == "alive"
    deadline = time.monotonic() + _SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(1.0)
        found = _read(place.store, place.journal_key)
        if found is None or found[1] != version:
            return True
    return False


def _read(store: Store, key: str) -> tuple[bytes, str] | None:
    """Return an object's bytes and version; None if there is none."""
    for _ in range(5):
        try:
            status = store.head(key)
            if status.nbytes > _MAX_NBYTES:
                return b"", status.version
            return bytes(store.read(key, 0, status.nbytes, status)), status.version
        except IncompleteError:
            return None
        except ContradictionError:
            continue  # its owner wrote it between the two requests
    return b"", ""


def _seal(record: dict[str, Any]) -> bytes:
    text = json.dumps({"version": _VERSION, **record}, sort_keys=True)
    return json.dumps({"xxh3": xxhash.xxh3_64_hexdigest(text.encode()), "record": text}).encode()


def _unseal(data: bytes) -> Entry:
    """Return a sealed record.

    Raises:
        CorruptError: it is damaged, as are values of other types than were sealed.
    """
    sealed = Entry.parse(data, CorruptError)
    text = sealed["record"].text()
    if sealed["xxh3"].value != xxhash.xxh3_64_hexdigest(text.encode()):
        sealed["xxh3"].refuse("the checksum of the record")
    record = Entry.parse(text, CorruptError)
    if record["version"].value != _VERSION:
        record["version"].refuse(str(_VERSION))
    return record
