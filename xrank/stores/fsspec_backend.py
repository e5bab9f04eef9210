"""The Hub by huggingface_hub's file system, and other schemes by fsspec where the user has installed them.

Both give `info`, `ls` and `cat_file` with a range (fsspec/spec.py: AbstractFileSystem). huggingface_hub asks the Hub
with its token and follows redirects to other hosts without it.
"""

from __future__ import annotations

from typing import Any

from xrank.errors import UsageError
from xrank.stores.backend import Folder, ObjectStatus
from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.settings import StoreSettings, check_https

_VERSIONS = ("ETag", "etag", "blob_id", "checksum", "mtime", "LastModified", "last_modified", "created")
"""Names under which file systems give a file's version, the strictest first."""


class FsspecBackend:
    """A folder of a file system of fsspec; see `Backend`."""

    fills_memory = False

    def __init__(self, files: Any, root: str) -> None:
        self._files = files
        self._root = root

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    def head(self, key: str) -> ObjectStatus:
        """Return the status of an object."""
        with _Faults():
            found = self._files.info(self._path(key))
        if found["type"] == "directory":
            raise FaultError(FaultKind.MISSING, "a folder")
        return _status(found)

    def read(
        self, key: str, start: int, end: int, status: ObjectStatus | None, into: memoryview | None = None
    ) -> tuple[memoryview, ObjectStatus]:
        """Return bytes [start, end) of an object; its version is looked at when the gather ends."""
        with _Faults():
            data = self._files.cat_file(self._path(key), start=start, end=end)
            return memoryview(data), status if status is not None else _status(self._files.info(self._path(key)))

    def list_folder(self, key: str) -> Folder:
        """Return what lies directly below a key."""
        self._files.invalidate_cache()
        try:
            with _Faults():
                listed = self._files.ls(self._path(key), detail=True)
        except FaultError as fault:
            if fault.kind is FaultKind.MISSING:
                return Folder()
            raise
        named = {one["name"].rstrip("/").rpartition("/")[2]: one for one in listed}
        if len(named) == 1 and next(iter(listed))["name"].rstrip("/") == self._path(key).partition("://")[2]:
            return Folder()  # a file lists itself
        objects = {name: _status(one) for name, one in named.items() if one["type"] != "directory"}
        return Folder(objects, frozenset(named.keys() - objects.keys()))

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool, if_version: str | None) -> str:
        """Refuse to write: these file systems have no conditional writes."""
        raise FaultError(FaultKind.REFUSED, "a store that xrank only reads")

    def delete(self, key: str) -> None:
        """Refuse to delete."""
        raise FaultError(FaultKind.REFUSED, "a store that xrank only reads")


def open_fsspec(scheme: str, root: str, settings: StoreSettings) -> FsspecBackend:
    """Return the backend of a repository of the Hub, or of another scheme that fsspec knows.

    Raises:
        UsageError: no installed package knows the scheme.
    """
    if scheme == "hf":
        try:
            from huggingface_hub import HfFileSystem, constants
        except ImportError:
            raise UsageError(
                f"reading {root} needs huggingface_hub, which is not installed",
                got="xrank without huggingface_hub",
                next_step="run pip install huggingface_hub",
            ) from None
        check_https(constants.ENDPOINT, root, allow_http=settings.allow_http)
        return FsspecBackend(HfFileSystem(skip_instance_cache=True), root)
    try:
        import fsspec

        return FsspecBackend(fsspec.filesystem(scheme, skip_instance_cache=True), root)
    except (ImportError, ValueError):
        raise UsageError(
            f"{root} has a scheme that no installed package reads",
            file=root,
            got=scheme,
            want="s3, gs, az, abfs, hf, https, file, or a scheme of fsspec",
            next_step="check the URL, or install fsspec and its package for this scheme",
        ) from None


def _status(found: Any) -> ObjectStatus:
    version = next((found[name] for name in _VERSIONS if found.get(name)), None)
    large = found.get("lfs")  # huggingface_hub: the digest of a large file's content
    if large is not None:
        version = getattr(large, "sha256", None) or large.get("sha256") or version
    return ObjectStatus(found["size"], "" if version is None else str(version), is_etag=False)


class _Faults:
    """Turns exceptions of file systems into faults; their texts may contain URLs, so only their kinds are kept."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FaultError):
            raise _fault(error) from None


def _fault(error: Exception) -> FaultError:
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
