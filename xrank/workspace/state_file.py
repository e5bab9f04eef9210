"""Reads a rank's state back: first its record, then its tensors, with their checksums.

torch.load is not used. xrank's own reader never runs code from the pickle, whatever the environment and the user's
allow-lists permit, and it checks exactly those bytes that become the tensors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from operator import itemgetter
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

from isal import isal_zlib

from xrank import system
from xrank.dtypes import DTYPES
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UnsafeError, XrankError, require_torch
from xrank.formats.rank_state import read_saved_state, record_of, state_error
from xrank.formats.torch_archive import ArchivedTensor, ArchiveRecord, TorchArchive, read_archive
from xrank.stores import places
from xrank.stores.backend import ObjectStatus
from xrank.stores.client import open_store
from xrank.stores.url import is_url

if TYPE_CHECKING:
    import torch

_NUM_ATTEMPTS = 5
"""Number of times a file that was replaced during reading is opened; each time by its name."""
_PAUSE_SECONDS = 0.1
"""Seconds before the first retry, in case the client's cache is old; doubled before each further one."""

_WINDOW_NBYTES = 1 << 20
"""Bytes read and checked at a time, so that they stay in the processor's cache."""

_T = TypeVar("_T")


class _ReplacedError(Exception):
    """The name now belongs to another file."""


def read_state(
    file: str, rank: int, world_size: int, run_id: str | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """Return config and weights of a rank's state, or None if it is absent or belongs to an earlier run.

    Args:
        file: the state's path.
        rank: the rank that must have written it.
        world_size: of this run. A state of another world size belongs to an earlier run.
        run_id: of this run; None matches states that record no run id.

    Raises:
        ContradictionError: another rank wrote it; or it records no run, as ModelOpt's states, and this run has an id.
        CorruptError: its bytes differ from those that were written.
        UnsafeError: it asks to run code.
        UsageError: it holds a tensor that safetensors cannot, a newer xrank wrote it, or torch is not installed.
    """
    require_torch("read_configs_and_weights_from_rank")

    def read() -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        state = read_saved_state(file, rank)
        if state.config is None or _holds_tensor(state.config):
            got = "no config" if state.config is None else "a tensor inside the config"
            raise state_error(file, rank, got, "a config of plain values")
        if state.record is None:
            if run_id is not None:
                raise _unknown_run(file, rank, run_id)
        elif (state.record.run_id, state.record.world_size) != (run_id, world_size):
            return None
        # Only now: states of other runs are ignored, whichever rank wrote them.
        state.check_rank()
        return state.config, _tensors(state.archive, state.weights, rank)

    return _retry_while_replaced(file, read)


def _unknown_run(file: str, rank: int, run_id: str) -> ContradictionError:
    return ContradictionError(
        f"the state of rank {rank} in {file} records no run, so it may be an earlier run's",
        rank=rank,
        file=file,
        got="a state without a run id, as ModelOpt's NFSWorkspace writes",
        want=f"a state of run {run_id}",
        next_step='let the rank write with xrank; or, if this run wrote it, construct NFSWorkspace(path, run_id="")',
    )


def read_run_id(file: str) -> str | None:
    """Return the run id that a state records, or None if the file is absent, unreadable, or records none.

    Raises:
        XrankError: of a URL alone: the store does not give the state.
    """

    def read() -> str | None:
        record = record_of(read_archive(file), None)
        return None if record is None else record.run_id

    try:
        return _retry_while_replaced(file, read)
    except (XrankError, OSError) as error:
        # A store that does not answer, or refuses, may have the state of this run.
        if is_url(file) and not isinstance(error, ContradictionError | CorruptError | IncompleteError | UnsafeError):
            raise
        return None


def _retry_while_replaced(file: str, read: Callable[[], _T]) -> _T | None:
    """Return the result of `read`, repeated while the file is being replaced; None without a file."""
    status = None
    for attempt in range(_NUM_ATTEMPTS):
        try:
            status = _look_anew(file)
            return read()
        except (FileNotFoundError, _ReplacedError) as error:  # IncompleteError is a FileNotFoundError
            if isinstance(error, FileNotFoundError):
                return None
        except ContradictionError:
            if status is None or _look_anew(file) == status:
                raise
        except (OSError, XrankError) as error:
            # ESTALE: on the server this name now belongs to another file (nfs(5); tox-dev/filelock#669).
            cause = error.__cause__ if isinstance(error, XrankError) else error
            if getattr(cause, "errno", None) != errno.ESTALE:
                raise
            # A client may keep its old view for a second (measured on glusterfs), whatever calls it gets.
            sleep(_PAUSE_SECONDS * 2**attempt)
    raise IncompleteError(
        f"{file} was replaced {_NUM_ATTEMPTS} times while it was read",
        file=file,
        next_step="let its rank finish writing, then read again",
    )


def _look_anew(file: str) -> ObjectStatus | None:
    """Return the size and the version of an object as they are now; None for a file."""
    return places.object_status(places.enter(file)) if is_url(file) else None


def _holds_tensor(value: object) -> bool:
    # Recursion is safe: the reader has bounded the depth (xrank.formats.pickles.MAX_DEPTH).
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_holds_tensor, value))
    return isinstance(value, ArchivedTensor)


def _tensors(archive: TorchArchive, weights: dict[str, ArchivedTensor], rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors in memory of their own. Equal views become one tensor, as when they were written."""
    import torch

    records = [archive.records[key] for key in dict.fromkeys(tensor.key for tensor in weights.values())]
    contents = (_read_object if isinstance(archive.status, ObjectStatus) else _read_file)(archive, records, rank)
    storages = {record.key: content.untyped_storage() for record, content in zip(records, contents, strict=True)}
    made: dict[ArchivedTensor, torch.Tensor] = {}
    for tensor in weights.values():
        if tensor not in made:
            empty = torch.empty(0, dtype=getattr(torch, DTYPES[tensor.dtype].torch_name), device="cpu")
            made[tensor] = empty.set_(storages[tensor.key], tensor.storage_offset, tensor.shape, tensor.strides)
    return {name: made[tensor] for name, tensor in weights.items()}


def _read_file(archive: TorchArchive, records: Sequence[ArchiveRecord], rank: int) -> list[torch.Tensor]:
    # Read, not mapped: if a mapped file shrinks or goes stale on the server, SIGBUS kills the process.
    fd = os.open(archive.path, system.READ)
    try:
        assert isinstance(archive.status, os.stat_result)
        if _identity(os.fstat(fd)) != _identity(archive.status):
            raise _ReplacedError
        return [_read_record(fd, archive, record, rank) for record in records]
    finally:
        system.close_read(fd)


def _read_object(archive: TorchArchive, records: Sequence[ArchiveRecord], rank: int) -> list[torch.Tensor]:
    from xrank.stores.ranges import read_ranges

    assert isinstance(archive.status, ObjectStatus)
    store, key = open_store(archive.path)
    contents = [_new_content(record) for record in records]
    ranges = [(record.offset, view) for record, (_, view) in zip(records, contents, strict=True)]
    try:
        read_ranges(store, key, archive.status, sorted(ranges, key=itemgetter(0)))
    except XrankError as error:
        error.about(f"rank {rank}", rank=rank)
        raise
    for record, (_, view) in zip(records, contents, strict=True):
        _check_crc32(archive, record, rank, isal_zlib.crc32(view))
    return [content for content, _ in contents]


def _new_content(record: ArchiveRecord) -> tuple[torch.Tensor, memoryview]:
    """Return memory for a record's bytes."""
    import torch

    content = torch.empty(record.nbytes, dtype=torch.uint8, device="cpu")
    array: Any = content.numpy()
    return content, memoryview(array)


def _check_crc32(archive: TorchArchive, record: ArchiveRecord, rank: int, crc32: int) -> None:
    if archive.has_checksums and crc32 != record.crc32:
        raise state_error(
            archive.path, rank, f"data/{record.key} fails its checksum: CRC {crc32:08x}", f"CRC {record.crc32:08x}"
        )


def _read_record(fd: int, archive: TorchArchive, record: ArchiveRecord, rank: int) -> torch.Tensor:
    content, view = _new_content(record)
    crc32 = done = 0
    while done < record.nbytes:
        count = system.read_at(fd, view[done : done + _WINDOW_NBYTES], record.offset + done)
        if count == 0:
            raise state_error(archive.path, rank, f"the file ends within data/{record.key}", "all of it")
        crc32 = isal_zlib.crc32(view[done : done + count], crc32)
        done += count
    _check_crc32(archive, record, rank, crc32)
    return content


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
