"""Write a plan's files into a stage by all ranks of a team; the first keeps finished files, and finishes the rest.

Order of events, on every rank: rank 0 keeps files that an interrupted run finished (with a live model, only those that
all ranks together find unchanged). On a disk, it creates the other files at their full size and broadcasts its stage;
in a store, it begins their uploads and broadcasts the ids. Then all make them in rounds. In a store a rank's share is
whole parts of an upload: it sends their numbers, etags and checksums to rank 0. Rank 0 alone owns the journal, which
lists a file only after every source of it is checked, and commits.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from time import monotonic, sleep
from typing import Any, TypeVar

from xrank.engine import windows
from xrank.engine.buffers import FileTarget
from xrank.engine.executor import Outcome
from xrank.engine.planner import Plan
from xrank.engine.rounds import Outputs, Work, make_files
from xrank.engine.windows import FilePart, FinishedFile, JoinedFile, digest_text
from xrank.errors import AGAIN, UsageError, XrankError, option
from xrank.layout.output_files import PlacedBytes
from xrank.ranks.team import Team
from xrank.storage.bucket_stage import BucketPlace, BucketStage, Upload
from xrank.storage.commit import Stage
from xrank.storage.disk import explain_errors, is_in_memory
from xrank.storage.folder_stage import FolderStage, Journal, open_shared_part, read_journal
from xrank.storage.output_place import OutputPlace
from xrank.storage.shared_directory import STALE_SECONDS
from xrank.storage.uploads import PartPool, PartsTarget, UploadedFile, UploadedPart, Uploads
from xrank.storage.url import is_url
from xrank.system import write_at

Seen = TypeVar("Seen")

_logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.05
_ELSEWHERE_SECONDS = 5.0
"""Seconds to look for the stage in a folder that differs from rank 0's."""


def read_together(team: Team, work: Work, files: Sequence[int] | None = None) -> dict[int, FinishedFile]:
    """Return, on rank 0, which gives the files, those that a run of all ranks would write now; write nothing."""
    files = json.loads(team.broadcast("files to read", None if files is None else json.dumps([*files])))
    return make_files(team, work, files, Outputs(), what="what was kept").files


def write_together(
    team: Team, work: Work, stage: Stage, unfinished: Sequence[int], progress: Callable[[int], None]
) -> Outcome:
    """Write, as rank 0, the unfinished files of a plan with the help of all other ranks.

    `progress` is called with the bytes of these files that are written so far. Errors as `write_files`.
    """
    files = {index: work.plan.files[index].output for index in unfinished}
    outputs: Outputs
    if isinstance(stage, FolderStage):
        # Before the broadcast: the other ranks open these files and never make them.
        for output in files.values():
            os.close(stage.create_part(output.name, output.nbytes))
        told = {"name": os.path.basename(stage.path), "files": [*files], "above": _list_parents(stage.path)}
        team.broadcast("stage", json.dumps(told))
        outputs = _Parts(team, work.plan, stage.path, stage)
    else:
        assert isinstance(stage, BucketStage), "a stage is on a disk or in a store"
        begun = stage.begin_uploads({output.name: output.nbytes for output in files.values()})
        uploads = {index: begun[output.name] for index, output in files.items()}
        ids = {index: (one.upload_id, one.part_nbytes, one.name, resumed) for index, (one, resumed) in uploads.items()}
        team.broadcast("uploads", json.dumps(ids))
        outputs = _SharedUploads(team, work.plan, BucketPlace.from_url(stage.path), uploads, stage)
    return make_files(team, work, unfinished, outputs, what="the files", progress=progress)


def help_to_write_files(team: Team, work: Work, out: str, plan_digest: str) -> None:
    """Run the part of any other rank in `write_together`, and in `read_together` where the source is a live model.

    Errors as `write_files`; UsageError if this rank and rank 0 do not both see the file system of the output.
    """
    if work.holder is not None:
        read_together(team, work)
    if is_url(out):
        told = json.loads(team.broadcast("uploads"))
        uploads = {int(index): (Upload(*upload), resumed) for index, (*upload, resumed) in told.items()}
        shares = _SharedUploads(team, work.plan, BucketPlace.from_url(out), uploads)
        make_files(team, work, [*uploads], shares, what="the files")
        return
    told = json.loads(team.broadcast("stage"))
    path = os.path.join(OutputPlace.from_path(out).parent, told["name"])
    if told["files"]:  # otherwise rank 0 does not wait, and the stage may be the output already
        # A folder that certainly differs does not appear later: do not wait for a network file system's client.
        seconds = _ELSEWHERE_SECONDS if _is_elsewhere(path, told["above"]) else STALE_SECONDS

        def look() -> Journal | None:
            journal = read_journal(path)
            return journal if journal is not None and journal.plan == plan_digest else None

        _await_sight(look, team.make_failure_check(), path, team.rank, seconds)
    make_files(team, work, told["files"], _Parts(team, work.plan, path), what="the files")


class _Parts(Outputs):
    """The files of a stage, into which one rank writes its shares."""

    target: FileTarget

    def __init__(self, team: Team, plan: Plan, path: str, stage: FolderStage | None = None) -> None:
        self.target = FileTarget({})
        self._plan, self._path, self._rank, self._stage = plan, path, team.rank, stage
        self._failures = team.make_failure_check()  # also for threads that are not in a gather

    def begin(self, index: int) -> None:
        """Open a file, which may become visible here a little after rank 0 created it."""
        fd = self._open(index, self._failures)
        self.target.in_memory = is_in_memory(fd)
        self.target.descriptors[index] = fd

    def _open(self, index: int, failures: Callable[[], bool]) -> int:
        output = self._plan.files[index].output
        path = os.path.join(self._path, f"{output.name}.part")
        return _await_sight(lambda: open_shared_part(path, output.nbytes), failures, path, self._rank)

    def finish_share(self, part: FilePart) -> None:
        fd = self.target.descriptors.pop(part.index)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)  # NFS: ranks that open the file from now on see this data

    def explain_errors(self) -> AbstractContextManager[None]:
        return explain_errors(self._path)

    def close(self) -> None:
        for fd in self.target.descriptors.values():
            os.close(fd)
        self.target.descriptors.clear()

    def finish(self, finished: FinishedFile, ending: Sequence[PlacedBytes] = ()) -> None:
        assert self._stage is not None, "only the first rank finishes files"
        output, fd = self._plan.files[finished.index].output, self._open(finished.index, lambda: False)
        try:
            with explain_errors(self._stage.part_path(output.name)):
                for offset, data in ending:
                    write_at(fd, data, offset)
        except BaseException:
            os.close(fd)
            raise
        self._stage.finish_part(output.name, fd, output.nbytes, digest_text(finished.digest))
        _logger.info("finished %s, %s bytes", output.name, f"{output.nbytes:,}")


def _list_parents(path: str) -> list[tuple[str, int]]:
    """Return the existing folders above a path, the nearest first, and the inode of each."""
    found = []
    while (folder := os.path.dirname(path)) != path:
        with suppress(OSError):
            found.append((folder, os.stat(folder).st_ino))
        path = folder
    return found


def _is_elsewhere(path: str, above: Sequence[Sequence[object]]) -> bool:
    """Return whether the nearest existing folder above a path here is not among rank 0's."""
    here = _list_parents(path)
    return bool(here) and here[0] not in {(folder, inode) for folder, inode in above}


def _await_sight(
    look: Callable[[], Seen | None],
    failures: Callable[[], bool],
    path: str,
    rank: int,
    seconds: float = STALE_SECONDS,
) -> Seen:
    """Return the result of `look`; a network file system may show it a little after rank 0 announced it.

    RankFailedError, from `failures`: a failed rank may be the reason that it is missing. UsageError: it never appears.
    """
    end = monotonic() + seconds
    while (found := look()) is None:
        failures()
        if monotonic() > end:
            raise UsageError(
                f"rank {rank} does not see {path}, which rank 0 made",
                rank=rank,
                file=path,
                got="nothing there",
                want=f"{os.path.dirname(path)} to be one folder that all hosts mount at the same path",
                next_step=f"choose an {option('out')} on a file system that all ranks share, then {AGAIN}",
            )
        sleep(_PAUSE_SECONDS)
    return found


class _SharedUploads(PartsTarget, Outputs):
    """The parts of uploads that one rank sends."""

    writes_anywhere = False

    def __init__(
        self,
        team: Team,
        plan: Plan,
        place: BucketPlace,
        uploads: Mapping[int, tuple[Upload, bool]],
        stage: BucketStage | None = None,
    ) -> None:
        super().__init__()
        self.target = self
        self.uploads = Uploads(place.store, place.url)
        self._rank, self._plan, self._place, self._begun, self._stage = team.rank, plan, place, uploads, stage
        self._sent: dict[int, list[list[Any]]] = {}
        self._kept_nbytes = 0
        self._parts: dict[int, list[UploadedPart]] = {}
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
        known = self.uploads.list_parts(key, upload.upload_id) if resumed else {}
        pool = self._pool = self._pool or PartPool()
        sizes, known = (output.nbytes, upload.part_nbytes), known or {}
        self._files[index] = UploadedFile(self.uploads, pool, key, upload.upload_id, *sizes, known, output.late_places)

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
        with self._lock:
            sent, kept, self._sent, self._kept_nbytes = self._sent, self._kept_nbytes, {}, 0
        return json.dumps({"kept": kept, "parts": sent}) if sent else ""

    def accept(self, receipt: str) -> None:
        if receipt:
            content = json.loads(receipt)
            assert self._stage is not None, "only the first rank finishes files"
            self._stage.kept_nbytes += content["kept"]
            for index, parts in content["parts"].items():
                self._parts.setdefault(int(index), []).extend(UploadedPart(*one) for one in parts)

    def finish(self, finished: FinishedFile, ending: Sequence[PlacedBytes] = ()) -> None:
        """Complete the upload of a file of the parts that all ranks have sent; they contain its ending."""
        assert self._stage is not None, "only the first rank finishes files"
        output = self._plan.files[finished.index].output
        parts = sorted(self._parts.pop(finished.index, ()), key=lambda part: part.number)
        digest = digest_text(finished.digest)
        self._stage.finish_parts(output.name, output.nbytes, parts, digest, finished.tensor_digests)
        _logger.info("finished %s, %s bytes", output.name, f"{output.nbytes:,}")

    def close(self) -> None:
        self._files.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
