"""Uploads a plan's files to a store by all ranks of a team: each rank sends its own parts of the same uploads.

Order of events, on every rank: rank 0 keeps files that an interrupted run finished, begins the uploads of the others,
and broadcasts their ids; then all ranks make the files in rounds. A rank's share of a file is whole parts of its
upload. It sends their numbers, etags and checksums to rank 0 with its other findings. Rank 0 alone owns the journal,
records finished files, and commits.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from xrank.errors import XrankError
from xrank.making.shared_writing import make_together
from xrank.making.work import Work
from xrank.plan import windows
from xrank.plan.digests import digest_text
from xrank.plan.executor import FinishedFile, Outcome
from xrank.plan.file_parts import FilePart, JoinedFile
from xrank.plan.planner import Plan
from xrank.stores.uploads import Part, open_uploads
from xrank.teams.team import Team
from xrank.writers.output_stage import OutputStage
from xrank.writers.store_files import PartPool, UploadedFile
from xrank.writers.store_journal import Upload
from xrank.writers.store_place import StorePlace
from xrank.writers.store_stage import StoreStage
from xrank.writers.uploaded_files import PartsTarget

_logger = logging.getLogger(__name__)


def upload_together(
    team: Team, work: Work, stage: OutputStage, unfinished: Sequence[int], progress: Callable[[int], None]
) -> Outcome:
    """Upload, as rank 0, the unfinished files of a plan with the help of all other ranks.

    Arguments and errors as `xrank.making.shared_writing.write_together`.
    """
    assert isinstance(stage, StoreStage), "a stage is on a disk or in a store"
    files = work.plan.files
    outputs = [files[index].output for index in unfinished]
    begun = stage.begin_uploads({output.name: output.nbytes for output in outputs})
    uploads = {index: begun[output.name] for index, output in zip(unfinished, outputs, strict=True)}
    told = {index: (one.upload_id, one.part_nbytes, one.name, resumed) for index, (one, resumed) in uploads.items()}
    team.broadcast("uploads", json.dumps(told))
    shares = _SharedUploads(team, work.plan, StorePlace.from_url(stage.path), uploads)

    def finish(file: JoinedFile, index: int) -> FinishedFile:
        finished, _ = file.finish()
        name, nbytes = files[index].output.name, files[index].output.nbytes
        stage.finish_parts(
            name, nbytes, shares.take_parts(index), digest_text(finished.digest), finished.tensor_digests
        )
        _logger.info("finished %s, %s bytes", name, f"{nbytes:,}")
        return finished

    with closing(shares.uploads):
        outcome = make_together(team, work, unfinished, shares, what="the files", finish=finish, progress=progress)
    stage.kept_nbytes += shares.kept_nbytes
    return outcome


def help_to_upload(team: Team, work: Work, out: str) -> None:
    """Run the part of any other rank in `upload_together`; errors as there."""
    told = json.loads(team.broadcast("uploads"))
    uploads = {int(index): (Upload(*upload), resumed) for index, (*upload, resumed) in told.items()}
    shares = _SharedUploads(team, work.plan, StorePlace.from_url(out), uploads)
    with closing(shares.uploads):
        make_together(team, work, [*uploads], shares, what="the files")


class _SharedUploads(PartsTarget):
    """The parts of uploads that one rank sends; see `xrank.making.rounds.Outputs`."""

    writes_anywhere = False

    def __init__(self, team: Team, plan: Plan, place: StorePlace, uploads: Mapping[int, tuple[Upload, bool]]) -> None:
        super().__init__()
        self.target = self
        self.uploads = open_uploads(place.store, place.url)
        self.kept_nbytes = 0
        """On the first rank: bytes of parts that an interrupted run had sent."""
        self._rank, self._plan, self._place, self._begun = team.rank, plan, place, uploads
        self._sent: dict[int, list[list[Any]]] = {}
        self._kept_nbytes = 0
        self._parts: dict[int, list[Part]] = {}
        self._lock = threading.Lock()

    def unit_nbytes(self, index: int) -> int:
        """Return the bytes of a part; of a file whose ending depends on all of it, those of the file."""
        output = self._plan.files[index].output
        if output.ending is not None:
            return -(-output.nbytes // windows.WINDOW_NBYTES) * windows.WINDOW_NBYTES
        return self._begun[index][0].part_nbytes

    def begin(self, index: int) -> None:
        """Look up the parts that an interrupted run has sent."""
        output, (upload, resumed) = self._plan.files[index].output, self._begun[index]
        key = self._place.file_key(upload.name)
        known = self.uploads.list_parts(key, upload.upload_id) if resumed else None
        if self._pool is None:
            self._pool = PartPool()
        self._files[index] = UploadedFile(
            self.uploads,
            self._pool,
            key,
            upload.upload_id,
            output.nbytes,
            upload.part_nbytes,
            known or {},
            output.late_places,
        )

    def finish_share(self, part: FilePart) -> None:
        """Wait for this rank's parts of a file."""
        file, output = self._files.pop(part.index), self._plan.files[part.index].output
        if output.ending is not None:  # this rank has made all of the file
            joined = JoinedFile(output, part.index)
            joined.join(part)
            offset, data = joined.finish()[1][-1]
            file.write_late(offset, memoryview(data))
        parts = file.finish_parts()
        with self._lock:
            self._sent.setdefault(part.index, []).extend([p.number, p.nbytes, p.etag, p.crc32] for p in parts)
            self._kept_nbytes += file.kept_nbytes

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Let errors of the store name this rank."""
        try:
            yield
        except XrankError as error:
            error.about(rank=self._rank)
            raise

    def take_receipt(self) -> str:
        """Return the parts of this round as text."""
        with self._lock:
            sent, kept, self._sent, self._kept_nbytes = self._sent, self._kept_nbytes, {}, 0
        return json.dumps({"kept": kept, "parts": sent}) if sent else ""

    def accept(self, receipt: str) -> None:
        """Keep, on the first rank, the parts that a rank has sent."""
        if receipt:
            content = json.loads(receipt)
            self.kept_nbytes += content["kept"]
            for index, parts in content["parts"].items():
                self._parts.setdefault(int(index), []).extend(Part(*one) for one in parts)

    def take_parts(self, index: int) -> list[Part]:
        """Return the parts of a file that all ranks have sent, in order."""
        return sorted(self._parts.pop(index, ()), key=lambda part: part.number)

    def close(self) -> None:
        """Wait for the parts that are on their way, and free the memory."""
        self._files.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
