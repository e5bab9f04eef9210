"""A rank's state as a torch archive: checked and written, and read back with its checksums."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from time import sleep
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from isal import isal_zlib
from msgspec import Struct

from xrank import system
from xrank.dtypes import DTYPES
from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    UnsafeError,
    UsageError,
    XrankError,
    require,
)
from xrank.formats.rank_state import (
    CONFIG,
    RECORD,
    WEIGHT,
    RankRecord,
    read_saved_state,
    record_of,
    state_error,
)
from xrank.formats.torch_archive import ALIGNMENT, ArchivedTensor, ArchiveRecord, TorchArchive, read_archive
from xrank.readers.live.modules import locate_tensors, view_key
from xrank.storage import places
from xrank.storage.client import ObjectStatus
from xrank.storage.entries import plain_config
from xrank.storage.places import open_store
from xrank.storage.url import is_url
from xrank.workspace.base import WorkspaceIdentity

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


def _plain_tensors(held: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as torch.save gets them: plain and contiguous on the CPU, in storages of their own size.

    Names of the same view share one object.
    """
    made: dict[Hashable, torch.Tensor] = {}
    storages: set[int] = set()
    dtypes: dict[int, torch.dtype] = {}
    for name, tensor in held.items():
        view = view_key(tensor)
        if view not in made:
            plain = _plain_tensor(tensor)
            # torch.save writes one record of one dtype per storage (torch/serialization.py: _save refuses two dtypes at
            # one address), so names that share bytes without being the same tensor get separate storages.
            if plain.untyped_storage()._cdata in storages:
                plain = _shrink_storage(plain)
            if plain.data_ptr() != 0 and dtypes.setdefault(plain.data_ptr(), plain.dtype) != plain.dtype:
                plain = plain.clone()
            storages.add(plain.untyped_storage()._cdata)
            made[view] = plain
        yield name, made[view]


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.numel() == 0:
        return torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    # Flatten and reshape: a dim of size 1 may have any stride and still count as contiguous.
    plain = plain.contiguous().as_strided((plain.numel(),), (1,)).view(plain.shape)
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else _shrink_storage(plain)


def _shrink_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor whose storage has exactly these bytes; it keeps the larger storage alive."""
    import torch

    # DLPack exports an address and a shape, so the imported tensor does not know the surrounding storage. As bytes,
    # because DLPack lacks some dtypes (torch/csrc/.../DLConvertor: float8, unsigned 16 to 64).
    nbytes = torch.utils.dlpack.from_dlpack(tensor.reshape(-1).view(torch.uint8))
    return nbytes.view(tensor.dtype).view(tensor.shape)


class StateArchive(Struct, frozen=True):
    """A state that can be written."""

    state: dict[str, Any]
    nbytes: int
    """Bytes of the tensors; the archive is a little larger."""

    def write(self, fd: int) -> None:
        """Write the torch archive, starting at the descriptor's position; errors as `pass_to`."""
        self.pass_to(lambda data: system.write_all(fd, data))

    def pass_to(self, write: Callable[[memoryview], None]) -> None:
        """Pass the bytes of the torch archive to a function, in order; the first error of `write` ends it."""
        import torch
        from torch.utils import serialization

        config: Any = serialization.config  # a module that replaces itself with an object; stubs do not know that
        sink = _Sink(write)
        try:
            # The user's own settings must not disable the checksums. The patch holds for this thread only
            # (torch/utils/_config_module.py: patch).
            with config.patch({"save.storage_alignment": ALIGNMENT, "save.compute_crc32": True}):
                torch.save(self.state, cast(IO[bytes], sink))
        except BaseException:
            # torch's writer finishes the archive while it unwinds, and hides the cause behind its own RuntimeError.
            if sink.error is not None:
                raise sink.error from None
            raise


def make_state_archive(
    identity: WorkspaceIdentity,
    config_json: dict[str, Any],
    weights: Mapping[str, torch.Tensor],
    layouts: LayoutMap | None,
    step: int | None,
) -> StateArchive:
    """Return a rank's state as an archive; see `Workspace.write_configs_and_weights`.

    Contiguous CPU tensors are not copied; strided, expanded and device tensors are copied to the CPU.
    """
    require("torch", "write_configs_and_weights")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step is {step!r}", want="the training step, an integer of 0 or more, or None")
    config = plain_config(config_json)
    located = locate_tensors(weights, layouts, identity.rank)  # all checks come before any copy
    plain = dict(_plain_tensors(located.local))
    nbytes = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in plain.values()}.values())
    record = RankRecord(
        run_id=identity.run_id,
        attempt=identity.attempt,
        step=step,
        rank=identity.rank,
        world_size=identity.world_size,
        host=system.host_name(),
        meshes=located.meshes,
        tensors=located.records,
    )
    return StateArchive({CONFIG: config, WEIGHT: plain, RECORD: record.to_json()}, nbytes)


class _Sink:
    """A file object for torch.save. It keeps the first error and refuses writes after it."""

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write
        self.error: OSError | XrankError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is not None:
            raise self.error
        try:
            self._write(data)
        except (OSError, XrankError) as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


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

    A state of another world size or run id is an earlier run's.
    """
    require("torch", "read_configs_and_weights_from_rank")

    def read() -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        state = read_saved_state(file, rank)
        if state.config is None or _holds_tensor(state.config):
            got = "no config" if state.config is None else "a tensor inside the config"
            raise state_error(file, rank, got, "a config of plain values")
        if state.record is None:
            if run_id is not None:
                raise ContradictionError(
                    f"the state of rank {rank} in {file} records no run, so it may be an earlier run's",
                    rank=rank,
                    file=file,
                    want=f"a state of run {run_id}; ModelOpt's NFSWorkspace records none",
                    next_step="let the rank write with xrank; or, if this run wrote it, construct "
                    'NFSWorkspace(path, run_id="")',
                )
        elif (state.record.run_id, state.record.world_size) != (run_id, world_size):
            return None
        # Only now: states of other runs are ignored, whichever rank wrote them.
        state.check_rank()
        return state.config, _tensors(state.archive, state.weights, rank)

    return _retry_while_replaced(file, read)


def read_run_id(file: str) -> str | None:
    """Return the run id that a state records; None if the file is absent, unreadable, or records none."""

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
    what = f"{file} was replaced {_NUM_ATTEMPTS} times while it was read"
    raise IncompleteError(what, file=file, next_step="let its rank finish writing, then read again")


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
    from xrank.storage.client import read_ranges

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
