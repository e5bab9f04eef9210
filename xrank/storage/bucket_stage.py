"""The commit's back end in a bucket: uploads that no reader sees until the commit completes them.

PARENT/.NAME.xrank/journal.json        owner, plan, and the uploads under way; it is also the lock
PARENT/.NAME.xrank/FILE.json           a file whose parts are all uploaded: their numbers, etags, checksums, and digests

Order of the commit: the journal records it; weights; small files; the manifest; last the object that readers begin
with, the index or config.json. Each appears at one instant and only where none is there, so a reader that follows the
index sees nothing or a whole model, and of two gathers one is refused.

A model that replaces another one: a store replaces one object at an instant, so the new weights get names of their own;
the file that readers begin with is replaced where it is still the same, then the manifest; then the old weights are
deleted. All other files must be those that are there.

Every change of the journal demands the version that this process wrote last. A gather that takes over a dead one's
journal thereby stops it, should it still run: its next change is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import xxhash
from msgspec import Struct, convert, field, to_builtins
from msgspec.structs import replace

from xrank.errors import (
    AGAIN,
    ContradictionError,
    CorruptError,
    IncompleteError,
    OutputExistsError,
    UsageError,
    XrankError,
    option,
)
from xrank.storage.client import ABSENT, Folder, ObjectStore
from xrank.storage.commit import (
    Count,
    DescriptorTarget,
    JournalLine,
    Stage,
    make_exists_error,
    owner_state,
    seal,
    unseal,
)
from xrank.storage.disk import open_companion
from xrank.storage.manifest import MANIFEST_NAME, parse_manifest
from xrank.storage.output_place import ATTESTATION_NAME, SIGNATURE_NAME, check_inner_name
from xrank.storage.places import open_store, rank_of
from xrank.storage.uploads import (
    WRITABLE,
    KnownParts,
    PartPool,
    PartsTarget,
    UploadedFile,
    UploadedPart,
    Uploads,
    part_nbytes_for,
)
from xrank.storage.url import clean_path, split_url
from xrank.system import host_name
from xrank.words import list_text

_Record = TypeVar("_Record")
_BEGINNERS = 8
"""Uploads that are begun at once."""
_SMALL_NBYTES = 4 << 20
"""Companions up to this size wait in memory for the commit; larger ones are uploaded in parts."""
_ABANDONED_SECONDS = 3600
"""An upload without a journal counts as abandoned after this long."""
_MAX_JOURNAL_NBYTES = 64 << 20
_BEAT_SECONDS = 10.0
_SILENT_SECONDS = 35.0
"""An owner on another host that has not changed its journal for this long counts as dead: three beats."""
_DIGEST = re.compile(r"xxh(3|128):[0-9a-f]{32}")
_HEX = re.compile(r"[0-9a-f]{32}")
_INDEX_END = ".safetensors.index.json"
_NUMBERED = re.compile(r"-(\d{5,}-of-\d{5,}\.safetensors)")


class BucketPlace(Struct, frozen=True):
    """The place of an output in a bucket, and the objects that xrank keeps beside it while it writes."""

    store: ObjectStore
    key: str
    """Prefix of the output's objects, without a slash at its end."""

    @classmethod
    def from_url(cls, out: str | os.PathLike[str]) -> BucketPlace:
        """Return the place of an output's URL; UsageError for a whole bucket, or a store that xrank cannot write to."""
        url = clean_path(out)
        place = split_url(url)
        if place.scheme in WRITABLE and place.key:
            return cls(*open_store(url))
        if place.scheme == "hf":
            what = "a repository of the Hub is written by one commit from a folder"
            next_step = f"give {option('out')} a folder, and upload it: hf upload {url.removeprefix('hf://')} FOLDER"
        elif place.scheme in WRITABLE:
            what, next_step = "is a whole bucket, not a path for an output", f"give a new prefix, such as {url}/model"
        else:
            what = f"outputs are not written to {place.scheme}:// stores"
            next_step = f"choose another {option('out')}: s3://, gs:// or az://, or a folder"
        raise UsageError(f"{url}: {what}", file=url, next_step=next_step)

    @property
    def url(self) -> str:
        """The URL of the output."""
        return self.store.url(self.key)

    @property
    def stage_key(self) -> str:
        """The prefix of the objects that xrank keeps beside the output."""
        parent, slash, name = self.key.rpartition("/")
        return f"{parent}{slash}.{name}.xrank"

    @property
    def journal_key(self) -> str:
        """The key of the journal."""
        return f"{self.stage_key}/journal.json"

    def record_key(self, name: str) -> str:
        """Return the key of the record of an uploaded file."""
        return f"{self.stage_key}/{name}.json"

    def file_key(self, name: str) -> str:
        """Return the key of a file of the output."""
        return f"{self.key}/{name}"

    def file_url(self, name: str) -> str:
        """Return the URL of a file of the output."""
        return self.store.url(self.file_key(name))


class Replaced(Struct, frozen=True, forbid_unknown_fields=True):
    """A model that another one replaces."""

    last: str
    """The file that readers begin with: the index, or the only weights file."""
    version: str
    """The etag of that file: it is replaced only while it has this one."""
    manifest_version: str
    weights: tuple[str, ...]
    """Names of the weights' files."""
    small: tuple[str, ...]
    """Names of all others, without the manifest."""

    @property
    def has_index(self) -> bool:
        """Whether its weights' files have names that only the index knows."""
        return self.last.endswith(_INDEX_END)

    @property
    def outdated(self) -> tuple[str, ...]:
        """The files that no reader needs once the new model is there: none of a name that it has, too."""
        return self.weights if self.has_index else ()


class Upload(Struct, frozen=True, forbid_unknown_fields=True):
    """An upload under way."""

    upload_id: str
    part_nbytes: Count
    """Bytes of each part but the last."""
    name: str
    """Of its object in the output."""


class BucketJournal(Struct, frozen=True, forbid_unknown_fields=True):
    """What the journal's object contains."""

    stage: str
    """Random; every object of the output bears it."""
    plan: str
    host: str = ""
    pid: Count = 0
    """The owner; 0 where a run that ended has given it up."""
    beat: Count = 0
    last: str = ""
    """The file that the commit writes last; before the commit empty, and no object of the output is visible."""
    uploads: Mapping[str, Upload] = field(default_factory=dict)
    """By the file's name in the plan."""
    replaced: Replaced | None = None
    """The model that the output replaces."""

    def __post_init__(self) -> None:
        if self.pid >= 1 << 31 or any(one.part_nbytes < 1 for one in self.uploads.values()):
            raise ValueError("not a process or a part's size")

    @property
    def is_committing(self) -> bool:
        """Whether objects of the output may be visible."""
        return bool(self.last)


class FileRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A file whose parts are all uploaded."""

    stage: str
    upload_id: str
    nbytes: Count
    digest: str
    tensors: tuple[str, ...]
    """Digests of its tensors, in hex, in the file's order."""
    parts: tuple[UploadedPart, ...]

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.digest) or not all(_HEX.fullmatch(one) for one in self.tensors):
            raise ValueError("not a digest")


class OpenJournal:
    """This process's journal; any thread may call its methods. OutputExistsError if another gather took it over."""

    def __init__(self, place: BucketPlace, content: BucketJournal, version: str | None) -> None:
        """Write it over this version, or as a new one; raise if another process did."""
        self._version = put_journal(place, content, version)
        self._place, self.content = place, content
        self._lock = threading.Lock()
        self._lost: XrankError | None = None
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="xrank-journal", daemon=True)
        self._beating.start()

    def change(self, uploads: Mapping[str, Upload] | None = None, **changes: Any) -> None:
        """Record other values of fields, and more uploads, by the name of the file, before their first parts."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            content = replace(self.content, uploads={**self.content.uploads, **(uploads or {})}, **changes)
            try:
                self._version = put_journal(self._place, content, self._version)
            except (ContradictionError, IncompleteError, OutputExistsError):
                self._lost = make_exists_error(self._place.url, "another gather to it took over this one's journal")
                raise self._lost from None
            self.content = content

    def check_owned(self) -> None:
        """Raise if another gather has taken over."""
        self.change(beat=self.content.beat + 1)

    def remove(self) -> None:
        """Delete the journal and all records of files."""
        self._stop()
        for name in self.content.uploads:
            self._place.store.delete(self._place.record_key(name))
        self._place.store.delete(self._place.journal_key)

    def release(self) -> None:
        """Give the journal up, for the next run to go on with."""
        self._stop()
        with suppress(XrankError):
            self.change(host="", pid=0)

    def _stop(self) -> None:
        self._ended.set()
        self._beating.join()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            # Whatever fails here shows again at the next change that matters.
            with suppress(XrankError):
                self.check_owned()


def put_journal(place: BucketPlace, content: BucketJournal, version: str | None) -> str:
    """Write the journal over this version of it, or as a new one; return its version. Raises if another process did."""
    data = _seal(content)
    try:
        return place.store.put(place.journal_key, data, version or ABSENT)
    except (ContradictionError, OutputExistsError):
        # After a broken connection, the journal that is there may be the one that was just written.
        found = _read(place.store, place.journal_key)
        if found is not None and found[0] == data:
            return found[1]
        raise


def make_owned(content: BucketJournal) -> BucketJournal:
    """Return the journal with this process as its owner."""
    return replace(content, host=host_name(), pid=os.getpid())


def read_journal(place: BucketPlace) -> tuple[BucketJournal | None, str] | None:
    """Return the journal, None in its place if it is damaged, and its version; None if the output has no journal."""
    found = _read(place.store, place.journal_key)
    return None if found is None else (_unseal(BucketJournal, found[0]), found[1])


def read_record(place: BucketPlace, name: str) -> FileRecord | None:
    """Return the record of an uploaded file; None if it is absent or damaged."""
    found = _read(place.store, place.record_key(name))
    return None if found is None else _unseal(FileRecord, found[0])


def _seal(record: BucketJournal | FileRecord) -> bytes:
    return seal({"version": 1, **to_builtins(record)})


def _unseal(kind: type[_Record], data: bytes) -> _Record | None:
    record = unseal(data)
    try:
        return None if record is None or record.pop("version", 0) != 1 else convert(record, kind)
    except ValueError:
        return None


def wait_for_owner(place: BucketPlace, journal: BucketJournal | None, version: str) -> bool:
    """Return whether the owner of a journal is alive; an owner on another host is watched until it changes it."""
    if journal is not None:
        if journal.pid == 0:
            return False
        state = owner_state(journal.host, journal.pid)
        if state != "unknown":
            # A container's only process has the same number in every run: no process but this one can be it.
            return journal.pid != os.getpid() and state == "alive"
    deadline = time.monotonic() + _SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(1.0)
        found = _read(place.store, place.journal_key)
        if found is None or found[1] != version:
            return True
    return False


def _read(store: ObjectStore, key: str) -> tuple[bytes, str] | None:
    """Return an object's bytes and version; None if it is absent."""
    for _ in range(5):
        try:
            status = store.head(key)
            if status.nbytes > _MAX_JOURNAL_NBYTES:
                return b"", status.version
            return bytes(store.read(key, 0, status.nbytes, status)), status.version
        except IncompleteError:
            return None
        except ContradictionError:
            continue  # its owner wrote it between the two requests
    return b"", ""


def find_replaced(place: BucketPlace, *, overwrite: bool) -> Replaced | None:
    """Return the model that an output replaces; None where nothing is.

    OutputExistsError if something else is there, or `overwrite` is not given; UsageError if a store cannot replace it.
    """
    there = place.store.list_folder(place.key)
    if not there.objects and not there.folders:
        return None
    if not overwrite:
        next_step = f"choose another {option('out')}, or add {option('overwrite', True)} to replace a model"
        what = f"exists already (a prefix that contains {_list(there)})"
        raise make_exists_error(place.url, what, want="nothing there", next_step=next_step)
    try:
        content, manifest_version = _read_small(place, MANIFEST_NAME)
    except IncompleteError as error:
        what = f"holds {_list(there)}, and no model that xrank wrote; {option('overwrite', True)} does not replace it"
        raise make_exists_error(place.url, what, next_step=f"choose another {option('out')}") from error
    manifest = parse_manifest(content, place.file_url(MANIFEST_NAME))
    weights = tuple(sorted({tensor["file"] for tensor in manifest["tensors"].values()}))
    others = [one["name"] for one in (*manifest["files"], *manifest["companions"]) if one["name"] not in weights]
    indexes = [name for name in others if name.endswith(_INDEX_END)]
    if len(indexes or weights) != 1:
        raise make_unlike_error(place.url, "its weights have several files and no index")
    signed = sorted({SIGNATURE_NAME, ATTESTATION_NAME} & there.objects.keys())
    if signed:
        raise make_unlike_error(place.url, f"it is signed ({signed[0]})")
    last = (indexes or weights)[0]
    version = place.store.head(place.file_key(last)).version
    return Replaced(last, version, manifest_version, weights, tuple(name for name in others if name != last))


def _list(there: Folder) -> str:
    return list_text(map(repr, sorted([*there.objects, *(f"{name}/" for name in there.folders)])), 3)


def make_unlike_error(url: str, why: str) -> UsageError:
    """Return the error for a model that a store cannot replace by the new one."""
    what = f"{url}: a store can only replace the weights atomically, but more would change: {why}"
    return UsageError(what, file=url, next_step=f"choose another {option('out')}, and point the readers to it")


def _read_small(place: BucketPlace, name: str) -> tuple[bytes, str]:
    """Return the bytes and the version of a file of the output."""
    key = place.file_key(name)
    status = place.store.head(key)
    return bytes(place.store.read(key, 0, status.nbytes, status)), status.version


class BucketStage(Stage):
    """An output in a bucket; see `Stage`."""

    def __init__(
        self, place: BucketPlace, uploads: Uploads, journal: OpenJournal, *, notes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(place.url, notes)
        self.kept_nbytes = 0
        """Bytes of parts that an interrupted run had uploaded, in files that it had not finished."""
        self._place, self._uploads, self._journal = place, uploads, journal
        self._records: dict[str, FileRecord] = {}
        self._small: dict[str, bytes] = {}
        self._sha256: dict[str, bytes] = {}
        self._kept: set[str] = set()
        """Small files of a replaced model, which are to stay."""
        self._is_over = False
        self._recall()

    def recall(self, name: str) -> tuple[bytes, list[bytes]] | None:
        """Return the digests of a finished file and of its tensors; the store has confirmed its bytes by checksums."""
        record = self._records.get(name)
        if record is None:
            return None
        return bytes.fromhex(record.digest.partition(":")[2]), [bytes.fromhex(one) for one in record.tensors]

    def open_files(self, target: DescriptorTarget) -> _UploadedFiles:
        """Return what uploads the files of this output, and is their target itself; close it."""
        return _UploadedFiles(self)

    def final_name(self, name: str) -> str:
        """Return the name in the output of a weights file that the plan calls so.

        UsageError if the weights that are there cannot be replaced by such a file: a reader would find it by its own
        name before the index is replaced.
        """
        check_inner_name(name)
        replaced, stage = self._journal.content.replaced, self._journal.content.stage
        if replaced is not None and replaced.has_index and _NUMBERED.search(name):
            return _NUMBERED.sub(rf"-{stage[:8]}-\1", name)
        if replaced is not None and name != replaced.last:
            why = f"its readers open {replaced.last} first, and readers of the new model {name}"
            raise make_unlike_error(self.path, why)
        return name

    def begin_file(
        self, name: str, final: str, nbytes: int, pool: PartPool, late: Sequence[tuple[int, int]] = ()
    ) -> UploadedFile:
        """Begin to upload a file under its final name, or go on with it."""
        upload, known = self._find_or_create(name, final, nbytes)
        if known is None:
            self._journal.change({name: upload})
        key = self._place.file_key(final)
        return UploadedFile(self._uploads, pool, key, upload.upload_id, nbytes, upload.part_nbytes, known or {}, late)

    def _find_or_create(self, name: str, final: str, nbytes: int) -> tuple[Upload, KnownParts | None]:
        """Return the upload of a file, and the parts that an interrupted run has sent; None for a new upload."""
        key, content = self._place.file_key(final), self._journal.content
        upload = content.uploads.get(name)
        if upload is not None and upload.name == final:
            known = self._uploads.list_parts(key, upload.upload_id)
            if known is not None:
                return upload, known
        return Upload(self._uploads.create(key, content.stage), part_nbytes_for(nbytes), final), None

    def begin_uploads(self, files: Mapping[str, int]) -> dict[str, tuple[Upload, bool]]:
        """Begin to upload many files, name -> bytes, whose parts several ranks send.

        Return name -> its upload, and whether an interrupted run has begun it.
        """
        finals = {name: self.final_name(name) for name in files}

        def begin(name: str) -> tuple[Upload, bool]:
            upload, known = self._find_or_create(name, finals[name], files[name])
            return upload, known is not None

        with ThreadPoolExecutor(_BEGINNERS, thread_name_prefix="xrank-upload") as pool:
            begun = dict(zip(files, pool.map(begin, files), strict=True))
        self._journal.change({name: upload for name, (upload, resumed) in begun.items() if not resumed})
        return begun

    def finish_parts(
        self, name: str, nbytes: int, parts: Sequence[UploadedPart], digest: str, tensors: Sequence[bytes]
    ) -> None:
        """Record a file as finished whose parts several ranks have sent; CorruptError unless these are all of them."""
        upload = self._journal.content.uploads[name]
        sizes = [min(upload.part_nbytes, nbytes - start) for start in range(0, nbytes, upload.part_nbytes)]
        if [(part.number, part.nbytes) for part in parts] != [*enumerate(sizes, start=1)]:
            url = self._place.file_url(name)
            got = f"{len(parts)} parts, {sum(part.nbytes for part in parts):,} bytes"
            what = f"{url}: the ranks have sent {got} of it, not {len(sizes)} parts, {nbytes:,} bytes"
            raise CorruptError(what, file=url, next_step="run the same version of xrank on all ranks")
        hexes = tuple(one.hex() for one in tensors)
        record = FileRecord(self._journal.content.stage, upload.upload_id, nbytes, digest, hexes, tuple(parts))
        self._place.store.put(self._place.record_key(name), _seal(record))
        self._records[name], self.finished[name] = record, JournalLine(name, nbytes, digest)

    def finish_file(self, name: str, file: UploadedFile, digest: str, tensors: Sequence[bytes]) -> None:
        """Wait for the last part of a file, and record it as finished."""
        self.finish_parts(name, file.nbytes, file.finish_parts(), digest, tensors)
        self.kept_nbytes += file.kept_nbytes

    def discard(self, name: str) -> None:
        """Forget a finished file; it is made again."""
        self.finished.pop(name, None)
        self._records.pop(name, None)

    def write_file(self, name: str, content: bytes | Iterable[bytes]) -> JournalLine:
        """Keep a file for the commit; return its entry for the manifest."""
        content = content if isinstance(content, bytes) else b"".join(content)
        check_inner_name(name)
        digest = xxhash.xxh3_128_hexdigest(content)
        self._sha256[name] = hashlib.sha256(content).digest()
        replaced = self._journal.content.replaced
        if replaced is not None and name not in (MANIFEST_NAME, replaced.last):
            if name not in replaced.small:
                raise make_unlike_error(self.path, f"it has no {name}, but the new model has one")
            if _read_small(self._place, name)[0] != content:
                raise make_unlike_error(self.path, f"its {name} differs from the new model's")
            self._kept.add(name)
        elif len(content) > _SMALL_NBYTES:
            pool = PartPool()
            try:
                file = self.begin_file(name, name, len(content), pool)
                file.write(0, memoryview(content))
                self.finish_file(name, file, f"xxh128:{digest}", ())
            finally:
                pool.close()
        else:
            self._small[name] = content
        return JournalLine(name, len(content), digest)

    def copy_file(self, name: str, source_path: str) -> JournalLine:
        """Read a companion, and keep it for the commit; see `Stage`."""
        chunks = []
        with open_companion(source_path) as fd:
            while chunk := os.read(fd, 1 << 20):
                chunks.append(chunk)
        return self.write_file(name, b"".join(chunks))

    def hash_file(self, name: str) -> bytes:
        """Return the SHA-256 of a small file."""
        return self._sha256[name]

    def _check_whole(self) -> None:
        """Raise if the model that is there has small files that the new one lacks."""
        replaced = self._journal.content.replaced
        missing = [] if replaced is None else sorted(set(replaced.small) - self._kept)
        if missing:
            raise make_unlike_error(self.path, f"it has {missing[0]}, but the new model does not")

    def _appear(self) -> None:
        replaced = self._journal.content.replaced
        last = self._last_name() if replaced is None else replaced.last
        self._journal.change(last=last)
        names = [name for name in (*self._records, *self._small) if name not in (MANIFEST_NAME, last)]
        # The manifest of a replaced model describes it until it is replaced.
        before, after = ([*names, MANIFEST_NAME], [last]) if replaced is None else (names, [last, MANIFEST_NAME])
        for some in (before, after):
            for name in some:
                self._publish(name)
            self._check_objects(some)
            if some is before:  # the last moment: a gather that has been taken over must not end another's
                self._journal.check_owned()

    def _clear_replaced(self) -> None:
        replaced = self._journal.content.replaced
        for name in () if replaced is None else replaced.outdated:
            self._place.store.delete(self._place.file_key(name))
        self._journal.remove()
        self._is_over = True

    def leave(self) -> None:
        """Give the journal up after a failure or a stop; finished parts stay for the next run."""
        if not self._is_over:
            self._journal.release()

    def _publish(self, name: str) -> None:
        replaced, stage = self._journal.content.replaced, self._journal.content.stage
        version = None
        if replaced is not None:
            version = {replaced.last: replaced.version, MANIFEST_NAME: replaced.manifest_version}.get(name)
        try:
            self._make_object(name, version)
        except OutputExistsError as error:
            there = self._uploads.head(self._key_of(name))
            if there is not None and there.mark == stage:
                # A killed commit of this stage has written it with other content.
                self._make_object(name, there.etag)
                return
            url = self._place.store.url(self._key_of(name))
            next_step = f"choose another {option('out')}, and make sure that nothing else writes there"
            what = "another program wrote it while this gather ran"
            raise make_exists_error(url, what, next_step=next_step) from error

    def _make_object(self, name: str, version: str | None) -> None:
        """Make an object where none is there, or in the place of that version."""
        key, stage, record = self._key_of(name), self._journal.content.stage, self._records.get(name)
        if record is None:
            self._uploads.put_new(key, self._small[name], stage, version or ABSENT)
        else:
            self._uploads.complete(key, record.upload_id, record.parts, stage, version or ABSENT)

    def _key_of(self, name: str) -> str:
        upload = self._journal.content.uploads.get(name) if name in self._records else None
        return self._place.file_key(name if upload is None else upload.name)

    def _last_name(self) -> str:
        names = [*self._small, *self._records]
        states = {rank: name for name in names if (rank := rank_of(name)) is not None}
        if states:  # readers want all of them
            return states[max(states)]
        indexes = sorted(name for name in names if name.endswith(_INDEX_END))
        return indexes[0] if indexes else "config.json" if "config.json" in names else names[-1]

    def _recall(self) -> None:
        """Read the records of the files that an interrupted run has finished and that the store still has."""
        content = self._journal.content
        for name, upload in content.uploads.items():
            record = read_record(self._place, name)
            if record is None or (record.stage, record.upload_id) != (content.stage, upload.upload_id):
                continue
            key = self._place.file_key(upload.name)
            listed = self._uploads.list_parts(key, upload.upload_id)
            found = [((listed or {}).get(part.number, (-1, "", None)), part) for part in record.parts]
            is_there = listed is not None and all(
                (nbytes, etag.strip('"')) == (part.nbytes, part.etag.strip('"')) and crc32 in (None, part.crc32)
                for (nbytes, etag, crc32), part in found
            )
            if not is_there:
                there = self._uploads.head(key)  # a killed commit may have completed it, and removed parts
                is_there = there is not None and (there.mark, there.nbytes) == (content.stage, record.nbytes)
            if is_there:
                self._records[name] = record
                self.finished[name] = JournalLine(name, record.nbytes, record.digest)

    def _check_objects(self, names: Sequence[str]) -> None:
        """Compare size and writer of objects that the commit has made."""
        for name in names:
            nbytes = len(self._small[name]) if name in self._small else self._records[name].nbytes
            there = self._uploads.head(self._key_of(name))
            if there is None or (there.nbytes, there.mark) != (nbytes, self._journal.content.stage):
                url = self._place.store.url(self._key_of(name))
                got = "none" if there is None else f"{there.nbytes:,} bytes"
                what = f"{url} is not the object that this gather wrote"
                next_step = f"stop the other program that writes there; then {AGAIN}"
                raise CorruptError(what, file=url, got=got, want=f"{nbytes:,} bytes", next_step=next_step)


class _UploadedFiles(PartsTarget):
    """Uploads the files of a plan to a stage; see `xrank.storage.commit.OutputFiles`."""

    def __init__(self, stage: BucketStage) -> None:
        super().__init__()
        self.target = self
        self._stage = stage

    def begin(self, index: int, name: str, nbytes: int, late: Sequence[tuple[int, int]] = ()) -> None:
        self._pool = self._pool or PartPool()
        final = self._stage.final_name(name)
        self._files[index] = self._stage.begin_file(name, final, nbytes, self._pool, late)

    def finish(self, index: int, name: str, nbytes: int, digest: str, tensors: Sequence[bytes]) -> None:
        self._stage.finish_file(name, self._files.pop(index), digest, tensors)

    def close(self) -> None:
        self._files.clear()
        if self._pool is not None:
            self._pool.close()


def check_bucket_output(place: BucketPlace, *, overwrite: bool, is_states: bool) -> None:
    """Refuse an output in a bucket where objects are already; see `xrank.storage.staging.check_output`."""
    Uploads(place.store, place.url)  # without credentials, or a package, the call must change
    if is_states and overwrite:
        what = f"{place.url}: states of ranks in a store cannot be replaced"
        raise UsageError(what, file=place.url, next_step=f"choose another {option('out')}")
    found = read_journal(place)
    if found is None or found[0] is None or not found[0].is_committing:
        find_replaced(place, overwrite=overwrite)


@contextmanager
def open_bucket_stage(
    place: BucketPlace, plan_digest: str, *, overwrite: bool, replaces_states: bool, resume: bool
) -> Iterator[BucketStage]:
    """Yield a stage in a bucket; see `xrank.storage.staging.open_stage`."""
    check_bucket_output(place, overwrite=overwrite, is_states=replaces_states)
    uploads = Uploads(place.store, place.url)
    journal, notes = _claim(place, uploads, plan_digest, resume=resume)
    try:
        content = journal.content
        # Again, now that no other gather is under way.
        if not content.is_committing and (found := find_replaced(place, overwrite=overwrite)) != content.replaced:
            journal.change(replaced=found)
        stage = BucketStage(place, uploads, journal, notes=notes)
    except BaseException:
        if journal.content.uploads:
            journal.release()
        else:
            journal.remove()
        raise
    try:
        yield stage
    finally:
        stage.leave()


def _claim(
    place: BucketPlace, uploads: Uploads, plan_digest: str, *, resume: bool
) -> tuple[OpenJournal, tuple[str, ...]]:
    """Make the journal of this output, or take over that of a run that ended."""
    found = read_journal(place)
    old, version = found or (None, None)
    if found is not None and wait_for_owner(place, *found):
        raise _make_running_error(place, old)
    is_same = old is not None and old.plan == plan_digest and resume
    if old is not None and old.is_committing and not is_same:
        next_step = f"run that gather again, which completes it, or run xrank clean {place.url}"
        what = "a gather with a different plan was stopped during its commit"
        raise make_exists_error(place.url, what, next_step=next_step)
    mine = old if old is not None and is_same else BucketJournal(os.urandom(8).hex(), plan_digest)
    lost = OutputExistsError if found is None else (ContradictionError, IncompleteError)
    try:
        journal = OpenJournal(place, make_owned(mine), version)
    except lost as error:  # two made it, or took it over, at once
        raise _make_running_error(place, None) from error
    if is_same or old is None:
        return journal, ()
    for upload in old.uploads.values():
        uploads.abort(place.file_key(upload.name), upload.upload_id)
    has_other_plan = "its run had a different plan (a different source, or different options)"
    why = has_other_plan if resume else "this run was not allowed to resume"
    return journal, (f"{place.url}: the uploads of an earlier run were removed: {why}",)


def _make_running_error(place: BucketPlace, owner: BucketJournal | None) -> OutputExistsError:
    who = "" if owner is None else f" (host {owner.host}, pid {owner.pid})"
    return make_exists_error(place.url, f"another gather to it is running{who}")


def read_bucket_manifest(place: BucketPlace) -> dict[str, Any]:
    """Return the manifest of an output in a bucket."""
    return parse_manifest(_read_small(place, MANIFEST_NAME)[0], place.file_url(MANIFEST_NAME))


def is_replaced_now(url: str) -> bool:
    """Return whether a gather is replacing the model at a URL, or was stopped while it did."""
    if split_url(url).scheme not in WRITABLE or not split_url(url).key:
        return False
    found = read_journal(BucketPlace.from_url(url))
    return found is not None and found[0] is not None and found[0].is_committing and found[0].replaced is not None


def settle_bucket_output(place: BucketPlace) -> None:
    """Finish the work of a run that ended after its commit: remove what it replaced, and its journal."""
    found = read_journal(place)
    if found is None or found[0] is None or wait_for_owner(place, *found):
        return
    with suppress(XrankError):
        uploads = Uploads(place.store, place.url)
        if found[0].replaced is not None and _has(place, uploads, found[0], found[0].last):
            for name in found[0].replaced.outdated:
                place.store.delete(place.file_key(name))
        OpenJournal(place, make_owned(found[0]), found[1]).remove()


def clean_bucket(url: str, *, dry_run: bool) -> list[dict[str, Any]]:
    """Abort the uploads that dead gathers to an output left, and remove what a killed commit has made visible.

    Returns one row for each upload or object.
    """
    place = BucketPlace.from_url(url)
    uploads = Uploads(place.store, place.url)
    found = read_journal(place)
    owner = found[0] if found is not None else None
    if found is not None and wait_for_owner(place, *found):
        return [_row(place.store.url(place.journal_key), 0, "its gather is running", removed=False)]
    rows = []
    known = {one.upload_id for one in owner.uploads.values()} if owner is not None else set()
    for key, upload_id, age_seconds in [*uploads.list_uploads(f"{place.key}/")]:
        removed, why = upload_id in known, "its gather has ended"
        if not removed and uploads.lists_only_own:  # a kill between the upload's beginning and the journal's line
            removed = age_seconds > _ABANDONED_SECONDS
            why = "no journal names it, and it is " + ("over an hour old" if removed else "recent")
        elif not removed:
            why = "no journal names it: another program may be writing it"
        parts = uploads.list_parts(key, upload_id) or {}
        rows.append(_row(f"{place.store.url(key)} (upload)", sum(p[0] for p in parts.values()), why, removed=removed))
        if removed and not dry_run:
            uploads.abort(key, upload_id)
    if found is None:
        return rows
    if owner is not None and owner.replaced is not None and _has(place, uploads, owner, owner.last):
        if not _has(place, uploads, owner, MANIFEST_NAME):
            why = "its model is visible, but its manifest is not yet: run the same gather again to complete it"
            return [*rows, _row(place.store.url(place.journal_key), 0, why, removed=False)]
        why = "a different model has replaced it"
        rows += _clean_files(place, uploads, owner.replaced.outdated, why, None, dry_run=dry_run)
    if owner is not None and owner.is_committing and not _has(place, uploads, owner, owner.last):
        why = "its gather was stopped during its commit"
        names = sorted(place.store.list_folder(place.key).objects)
        rows += _clean_files(place, uploads, names, why, owner.stage, dry_run=dry_run)
    rows.append(_row(place.store.url(place.journal_key), 0, "its gather has ended", removed=True))
    if not dry_run:
        OpenJournal(place, make_owned(BucketJournal("", "") if owner is None else owner), found[1]).remove()
    return rows


def _clean_files(
    place: BucketPlace, uploads: Uploads, names: Sequence[str], why: str, mark: str | None, *, dry_run: bool
) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        there = uploads.head(place.file_key(name))
        if there is not None and mark in (None, there.mark):
            rows.append(_row(place.file_url(name), there.nbytes, why, removed=True))
            if not dry_run:
                place.store.delete(place.file_key(name))
    return rows


def _has(place: BucketPlace, uploads: Uploads, owner: BucketJournal, name: str) -> bool:
    """Return whether a file of the output is the one that the journal's gather has made visible."""
    there = uploads.head(place.file_key(name)) if owner.is_committing else None
    return there is not None and there.mark == owner.stage


def _row(path: str, nbytes: int, why: str, *, removed: bool) -> dict[str, Any]:
    return {"path": path, "nbytes": nbytes, "removed": removed, "why": why}
