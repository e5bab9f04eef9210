"""An output in a store while it is made: its files are uploads that no reader sees until the commit completes them.

Order of the commit: the journal records it; weights; small files; the manifest; last the object that readers begin
with, the index or config.json. Each appears at one instant and only where none is there, so a reader that follows the
index sees nothing or a whole model, and of two gathers one is refused. A kill leaves a journal that the same command
goes on from. A model that replaces another one: weights under names of their own; the index, in the place of the old
one; the manifest; then the old weights are deleted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import xxhash

from xrank.errors import AGAIN, CorruptError, OutputExistsError, XrankError, option
from xrank.formats.rank_state import rank_of
from xrank.stores.uploads import KnownParts, Part, Uploads, part_nbytes_for
from xrank.writers.disk import open_companion
from xrank.writers.journal import JournalLine
from xrank.writers.output_place import MANIFEST_NAME, check_inner_name
from xrank.writers.store_files import PartPool, UploadedFile
from xrank.writers.store_journal import FileRecord, OpenJournal, Upload, read_record
from xrank.writers.store_place import StorePlace
from xrank.writers.store_replacing import check_same_file, check_same_names, name_weights
from xrank.writers.uploaded_files import UploadedFiles

_BEGINNERS = 8
"""Uploads that are begun at once."""
_SMALL_NBYTES = 4 << 20
"""Companions up to this size wait in memory for the commit; larger ones are uploaded in parts."""


class StoreStage:
    """An output in a store while it is made. Several threads may call its methods; ``commit`` comes last."""

    def __init__(
        self, place: StorePlace, uploads: Uploads, journal: OpenJournal, *, notes: tuple[str, ...] = ()
    ) -> None:
        self.path = place.url
        self.notes = notes
        self.kept_nbytes = 0
        """Bytes of parts that an interrupted run had uploaded, in files that it had not finished."""
        self._place, self._uploads, self._journal = place, uploads, journal
        self._records: dict[str, FileRecord] = {}
        self._finished: dict[str, JournalLine] = {}
        self._small: dict[str, bytes] = {}
        self._sha256: dict[str, bytes] = {}
        self._kept: set[str] = set()
        """Small files of a replaced model, which are to stay."""
        self._is_over = False
        self._recall()

    @property
    def finished(self) -> Mapping[str, JournalLine]:
        """Files whose parts are all in the store, of this run and of an interrupted one of the same plan."""
        return MappingProxyType(self._finished)

    def recall(self, name: str) -> tuple[bytes, list[bytes]] | None:
        """Return the digests of a finished file and of its tensors; the store has confirmed its bytes by checksums."""
        record = self._records.get(name)
        if record is None:
            return None
        return bytes.fromhex(record.digest.partition(":")[2]), [bytes.fromhex(one) for one in record.tensors]

    def open_files(self) -> UploadedFiles:
        """Return what uploads the files of this output; close it."""
        return UploadedFiles(self)

    def final_name(self, name: str) -> str:
        """Return the name in the output of a weights file that the plan calls so.

        Raises:
            UsageError: the weights that are there cannot be replaced by such a file.
        """
        content = self._journal.content
        if content.replaced is None:
            return name
        return name_weights(name, content.replaced, content.stage, self.path)

    def begin_file(self, name: str, nbytes: int, pool: PartPool, late: Sequence[tuple[int, int]] = ()) -> UploadedFile:
        """Begin to upload a file of weights, or go on with it."""
        return self._begin(name, self.final_name(name), nbytes, pool, late)

    def _begin(
        self, name: str, final: str, nbytes: int, pool: PartPool, late: Sequence[tuple[int, int]] = ()
    ) -> UploadedFile:
        check_inner_name(final)
        upload, known = self._find_or_create(name, final, nbytes)
        if known is None:
            self._journal.add_upload(name, upload)
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
        """Begin to upload many files, for several ranks to send their parts.

        Args:
            files: name -> bytes.

        Returns:
            Name -> its upload, and whether an interrupted run has begun it.
        """
        finals = {name: self.final_name(name) for name in files}
        for final in finals.values():
            check_inner_name(final)

        def begin(name: str) -> tuple[Upload, bool]:
            upload, known = self._find_or_create(name, finals[name], files[name])
            return upload, known is not None

        with ThreadPoolExecutor(_BEGINNERS, thread_name_prefix="xrank-upload") as pool:
            begun = dict(zip(files, pool.map(begin, files), strict=True))
        self._journal.add_uploads({name: upload for name, (upload, resumed) in begun.items() if not resumed})
        return begun

    def finish_parts(
        self, name: str, nbytes: int, parts: Sequence[Part], digest: str, tensors: Sequence[bytes]
    ) -> None:
        """Record a file as finished whose parts several ranks have sent.

        Raises:
            CorruptError: they are not its parts, each once.
        """
        upload = self._journal.content.uploads[name]
        sizes = [min(upload.part_nbytes, nbytes - start) for start in range(0, nbytes, upload.part_nbytes)]
        if [(part.number, part.nbytes) for part in parts] != [*enumerate(sizes, start=1)]:
            url = self._place.file_url(name)
            raise CorruptError(
                f"{url}: the ranks have not sent each part of it once",
                file=url,
                got=f"{len(parts)} parts, {sum(part.nbytes for part in parts):,} bytes",
                want=f"{len(sizes)} parts, {nbytes:,} bytes",
                next_step="run the same version of xrank on all ranks",
            )
        self._record(name, upload.upload_id, nbytes, digest, tensors, tuple(parts))

    def finish_file(self, name: str, file: UploadedFile, digest: str, tensors: Sequence[bytes]) -> None:
        """Wait for the last part of a file, and record it as finished."""
        parts = file.finish()
        self._record(name, file.upload_id, file.nbytes, digest, tensors, parts)
        self.kept_nbytes += file.kept_nbytes

    def _record(
        self, name: str, upload_id: str, nbytes: int, digest: str, tensors: Sequence[bytes], parts: tuple[Part, ...]
    ) -> None:
        hexes = tuple(one.hex() for one in tensors)
        record = FileRecord(self._journal.content.stage, upload_id, nbytes, digest, hexes, parts)
        self._journal.put_record(name, record)
        self._records[name], self._finished[name] = record, JournalLine(name, nbytes, digest)

    def discard(self, name: str) -> None:
        """Forget a finished file; it is made again."""
        self._finished.pop(name, None)
        self._records.pop(name, None)

    def write_file(self, name: str, content: bytes) -> JournalLine:
        """Keep a small file for the commit; return its entry for the manifest."""
        check_inner_name(name)
        digest = xxhash.xxh3_128_hexdigest(content)
        self._sha256[name] = hashlib.sha256(content).digest()
        replaced = self._journal.content.replaced
        if replaced is not None and name not in (MANIFEST_NAME, replaced.last):
            check_same_file(self._place, name, content, replaced)
            self._kept.add(name)
        elif len(content) > _SMALL_NBYTES:
            pool = PartPool()
            try:
                file = self._begin(name, name, len(content), pool)
                file.write(0, memoryview(content))
                self.finish_file(name, file, f"xxh128:{digest}", ())
            finally:
                pool.close()
        else:
            self._small[name] = content
        return JournalLine(name, len(content), digest)

    def copy_file(self, name: str, source_path: str) -> JournalLine:
        """Read a companion, and keep it for the commit; return its entry for the manifest.

        Raises:
            UnsafeError: the source is a FIFO, a device or a folder.
            ContradictionError: the source changed while it was read.
        """
        return self.write_file(name, _read_companion(source_path))

    def hash_file(self, name: str) -> bytes:
        """Return the SHA-256 of a small file."""
        return self._sha256[name]

    def commit(self) -> None:
        """Make all files visible, the one that readers begin with last.

        Raises:
            OutputExistsError: another program has written there, or another gather has taken over.
            UsageError: the model that is there has other small files.
            XrankError: a request failed for good; the same command goes on.
        """
        replaced = self._journal.content.replaced
        last = self._last_name() if replaced is None else replaced.last
        if replaced is not None:
            check_same_names(self.path, self._kept, replaced)
        self._journal.begin_commit(last)
        names = [name for name in (*self._records, *self._small) if name not in (MANIFEST_NAME, last)]
        # The manifest of a replaced model describes it until it is replaced.
        before, after = ([*names, MANIFEST_NAME], [last]) if replaced is None else (names, [last, MANIFEST_NAME])
        for name in before:
            self._publish(name)
        self._check_objects(before)
        # The last moment: a gather that has been taken over must not end another's.
        self._journal.check_owned()
        for name in after:
            self._publish(name)
        self._check_objects(after)
        try:
            if replaced is not None:
                for name in replaced.outdated:
                    self._place.store.delete(self._place.file_key(name))
            self._journal.remove()
            self._is_over = True
        except XrankError as error:
            # The output is complete; the next run, or xrank clean, removes the journal.
            self.notes += (f"the journal, or what was replaced, could not be removed: {error}",)

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
            raise OutputExistsError(
                f"{url}: another program wrote it while this gather ran",
                file=url,
                next_step=f"choose another {option('out')}, and let nothing else write there",
            ) from error

    def _make_object(self, name: str, version: str | None) -> None:
        """Make an object where none is there, or in the place of that version."""
        key, stage, record = self._key_of(name), self._journal.content.stage, self._records.get(name)
        if record is None:
            self._uploads.put_new(key, self._small[name], stage, if_version=version)
        else:
            self._uploads.complete(key, record.upload_id, record.parts, stage, if_version=version)

    def _key_of(self, name: str) -> str:
        upload = self._journal.content.uploads.get(name) if name in self._records else None
        return self._place.file_key(name if upload is None else upload.name)

    def _last_name(self) -> str:
        """Return the name of the file that readers begin with."""
        names = [*self._small, *self._records]
        states = {rank: name for name in names if (rank := rank_of(name)) is not None}
        if states:  # readers want all of them
            return states[max(states)]
        for name in sorted(names):
            if name.endswith(".safetensors.index.json"):
                return name
        return "config.json" if "config.json" in names else names[-1]

    def _recall(self) -> None:
        """Read the records of the files that an interrupted run has finished and that the store still has."""
        content = self._journal.content
        for name, upload in content.uploads.items():
            record = read_record(self._place, name)
            if record is None or (record.stage, record.upload_id) != (content.stage, upload.upload_id):
                continue
            key = self._place.file_key(upload.name)
            listed = self._uploads.list_parts(key, upload.upload_id)
            is_there = listed is not None and all(_is_listed(part, listed) for part in record.parts)
            if not is_there:
                there = self._uploads.head(key)  # a killed commit may have completed it, and removed parts
                is_there = there is not None and (there.mark, there.nbytes) == (content.stage, record.nbytes)
            if is_there:
                self._records[name] = record
                self._finished[name] = JournalLine(name, record.nbytes, record.digest)

    def _check_objects(self, names: Sequence[str]) -> None:
        """Compare size and writer of objects that the commit has made."""
        expected = {name: record.nbytes for name, record in self._records.items()}
        expected |= {name: len(content) for name, content in self._small.items()}
        for name in names:
            nbytes = expected[name]
            there = self._uploads.head(self._key_of(name))
            if there is None or (there.nbytes, there.mark) != (nbytes, self._journal.content.stage):
                url = self._place.store.url(self._key_of(name))
                raise CorruptError(
                    f"{url} is not the object that this gather wrote",
                    file=url,
                    got="none" if there is None else f"{there.nbytes:,} bytes",
                    want=f"{nbytes:,} bytes",
                    next_step=f"look who else writes there; then {AGAIN}",
                )


def _is_listed(part: Part, listed: KnownParts) -> bool:
    nbytes, etag, crc32 = listed.get(part.number, (-1, "", None))
    return (nbytes, etag.strip('"')) == (part.nbytes, part.etag.strip('"')) and crc32 in (None, part.crc32)


def _read_companion(path: str) -> bytes:
    with open_companion(path) as fd:
        chunks = []
        while chunk := os.read(fd, 1 << 20):
            chunks.append(chunk)
    return b"".join(chunks)
