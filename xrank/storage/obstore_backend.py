"""Google, Azure and plain web servers, read through obstore; the Hub and other schemes through file systems of fsspec.

obstore, the Python binding of Rust's object_store, takes credentials and endpoints from the environment, as the stores'
own tools do (https://developmentseed.org/obstore/latest/authentication/). Its own repetitions are off: `Store` repeats.
huggingface_hub asks the Hub with its token and follows redirects to other hosts without it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xrank.errors import UsageError
from xrank.storage.client import (
    Backend,
    FaultError,
    FaultKind,
    Folder,
    ObjectStatus,
    StoreSettings,
    import_hub,
    make_fault,
    or_none,
)
from xrank.storage.uploads import UploadedObject

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_STATUS = re.compile(r"(?:status code: |\(code: )(\d{3})([A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_PIECE_NBYTES = 1 << 20
_VERSIONS = ("ETag", "etag", "blob_id", "checksum", "mtime", "LastModified", "last_modified", "created")
"""Names under which file systems give a file's version, the strictest first."""


class ObstoreBackend:
    """One obstore store; see `Backend`."""

    fills_memory = False

    def __init__(self, store: ObjectStore) -> None:
        import obstore

        self._obstore = obstore
        self._store = store

    def head(self, key: str) -> ObjectStatus:
        """Return the status of an object."""
        with _faults():
            return _status(self._obstore.head(self._store, key))

    def read(
        self, key: str, start: int, end: int, status: ObjectStatus | None, take: Callable[[memoryview | bytes], None]
    ) -> ObjectStatus:
        """Pass bytes [start, end) of an object to `take`, and return its status with this answer."""
        options: dict[str, Any] = {"range": (start, end)}
        if status is not None and status.is_etag and status.version:
            options["if_match"] = status.version
        with _faults():
            result = self._obstore.get(self._store, key, options=options)  # type: ignore[arg-type]
            for piece in result.stream(min_chunk_size=min(end - start, _PIECE_NBYTES)):
                take(memoryview(piece))
            return _status(result.meta)

    def list_folder(self, key: str) -> Folder:
        """Return what lies directly below a key."""
        with _faults():
            listed = self._obstore.list_with_delimiter(self._store, key or None)
        objects = {_name(one["path"]): _status(one) for one in listed["objects"]}
        return Folder(objects, frozenset(map(_name, listed["common_prefixes"])))


class PartsBackend(ObstoreBackend):
    """A store that obstore reads and that uploads parts under names; see `xrank.storage.uploads.WritableBackend`.

    `root` is ``gs://bucket``, ``az://container`` or ``abfs://container@account``.
    """

    lists_only_own = True

    def __init__(self, store: ObjectStore, root: str, settings: StoreSettings) -> None:
        super().__init__(store)
        self._root, self._settings = root, settings

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent. A 404 is believed when a second request finds nothing, too."""
        try:
            self._delete(key)
        except FaultError as fault:
            if fault.kind is not FaultKind.MISSING:
                raise
            if self.look(key) is not None:
                raise FaultError(FaultKind.PASSING, fault.text) from None

    def create(self, key: str, mark: str) -> str:
        """Return a new id: the time in seconds since the epoch, and random bits. Its first part begins the upload."""
        return f"{int(time.time()):010x}{os.urandom(6).hex()}"

    def look(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent."""
        raise NotImplementedError

    def _delete(self, key: str) -> None:
        raise NotImplementedError


def _status(meta: Any) -> ObjectStatus:
    etag = meta["e_tag"]
    if etag and not etag.startswith(('"', "W/")):  # Azure's listings lack the quotes that its other answers have
        etag = f'"{etag}"'
    # RFC 9110, 13.1.1: If-Match compares strongly, so a weak etag never matches.
    if etag and not etag.startswith("W/"):
        return ObjectStatus(meta["size"], etag)
    return ObjectStatus(meta["size"], etag or str(meta["last_modified"]), is_etag=False)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


@contextmanager
def _faults(*, of_files: bool = False) -> Iterator[None]:
    """Turn exceptions of obstore, or of file systems, into faults; their texts have URLs: only known parts are kept."""
    try:
        yield
    except FaultError:
        raise
    except Exception as error:
        raise (_file_fault if of_files else _fault)(error) from None


def _fault(error: Exception) -> FaultError:
    name, text = type(error).__name__, str(error)
    found, code = _STATUS.search(text), _CODE.search(text)
    number = int(found[1]) if found else 0
    fault = make_fault(number, found[2].strip() if found else "", code[1] if code else "") if found else None
    shown = "" if fault is None else fault.text
    if isinstance(error, FileNotFoundError) or number == 404:
        return FaultError(FaultKind.MISSING, shown or "404 Not Found")
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return FaultError(FaultKind.DENIED, shown or name)
    if name == "PreconditionError":
        return FaultError(FaultKind.CHANGED, shown or "412 Precondition Failed")
    if number == 416:
        return FaultError(FaultKind.CHANGED, f"{shown}: it has become shorter")
    if fault is not None:
        return fault
    if name in ("InvalidPathError", "NotSupportedError", "ValueError", "UnknownConfigurationKeyError"):
        return FaultError(FaultKind.REFUSED, name)
    for part, kind, shown in (
        ("builder error", FaultKind.REFUSED, "an address that the client does not accept"),
        ("timed out", FaultKind.PASSING, "no answer in time"),
        ("Timeout", FaultKind.PASSING, "no answer in time"),
        ("kind: Connect", FaultKind.PASSING, "no connection"),
        *((one, FaultKind.PASSING, "the connection broke") for one in ("kind: ", "HTTP error", "error decoding")),
        ("Generic", FaultKind.PASSING, "the connection broke"),
    ):
        if part in text:
            return FaultError(kind, shown)
    return FaultError(FaultKind.REFUSED, name)


class _FsspecBackend:
    """A folder of a file system of fsspec; see `Backend`."""

    fills_memory = False

    def __init__(self, files: Any, root: str) -> None:
        self._files = files
        self._root = root

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    def head(self, key: str) -> ObjectStatus:
        with _faults(of_files=True):
            found = self._files.info(self._path(key))
        if found["type"] == "directory":
            raise FaultError(FaultKind.MISSING, "a folder")
        return _file_status(found)

    def read(
        self, key: str, start: int, end: int, status: ObjectStatus | None, take: Callable[[memoryview | bytes], None]
    ) -> ObjectStatus:
        """Pass bytes [start, end) of an object to `take`; its version is looked at when the gather ends."""
        with _faults(of_files=True):
            take(self._files.cat_file(self._path(key), start=start, end=end))
            return status if status is not None else _file_status(self._files.info(self._path(key)))

    def list_folder(self, key: str) -> Folder:
        self._files.invalidate_cache()

        def ask() -> list[Any]:
            with _faults(of_files=True):
                return list(self._files.ls(self._path(key), detail=True))

        listed = or_none(ask)
        if listed is None:
            return Folder()
        named = {one["name"].rstrip("/").rpartition("/")[2]: one for one in listed}
        if len(named) == 1 and next(iter(listed))["name"].rstrip("/") == self._path(key).partition("://")[2]:
            return Folder()  # a file lists itself
        objects = {name: _file_status(one) for name, one in named.items() if one["type"] != "directory"}
        return Folder(objects, frozenset(named.keys() - objects.keys()))


def open_fsspec(scheme: str, root: str, settings: StoreSettings) -> Backend:
    """Return the backend of a repository of the Hub, or of another scheme that an installed package knows."""
    if scheme == "hf":
        hub = import_hub(root, f"reading {root}", settings)
        return _FsspecBackend(hub.HfFileSystem(skip_instance_cache=True), root)
    try:
        import fsspec

        return _FsspecBackend(fsspec.filesystem(scheme, skip_instance_cache=True), root)
    except (ImportError, ValueError):
        want = "s3, gs, az, abfs, hf, https, file, or a scheme of fsspec"
        next_step = "check the URL, or install fsspec and its package for this scheme"
        what = f"{root} has a scheme that no installed package supports"
        raise UsageError(what, file=root, got=scheme, want=want, next_step=next_step) from None


def _file_status(found: Any) -> ObjectStatus:
    version = next((found[name] for name in _VERSIONS if found.get(name)), None)
    large = found.get("lfs")  # huggingface_hub: the digest of a large file's content
    if large is not None:
        version = getattr(large, "sha256", None) or large.get("sha256") or version
    return ObjectStatus(found["size"], "" if version is None else str(version), is_etag=False)


def _file_fault(error: Exception) -> FaultError:
    answer = getattr(error, "response", None)
    number = getattr(answer, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    shown = f"{number} {type(error).__name__}" if number else type(error).__name__
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError) or number == 404:
        return FaultError(FaultKind.MISSING, shown)
    if isinstance(error, PermissionError) or number in (401, 403):
        return FaultError(FaultKind.DENIED, shown)
    if number in (429, 503):
        return FaultError(FaultKind.THROTTLED, shown)
    if isinstance(error, NotImplementedError | TypeError | ValueError) or (number and 400 <= int(number) < 500):
        return FaultError(FaultKind.REFUSED, shown)
    return FaultError(FaultKind.PASSING, shown)
