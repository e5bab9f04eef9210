"""Look at files and folders wherever they are, by functions of `os` that also take URLs, and open their stores.

A folder of a store is listed once and then known, so that recognizing a checkpoint takes few requests. `enter` forgets
the listings: each command calls it with its own paths first, and so sees what is there now.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import xxhash

from xrank import system
from xrank.environment import environ
from xrank.errors import IncompleteError, UsageError, require
from xrank.storage.client import (
    Backend,
    Folder,
    ObjectStatus,
    ObjectStore,
    StoreSettings,
    check_https,
    make_credentials_error,
)
from xrank.storage.url import can_list, clean_path, is_url, split_url

_CAUSE = r"\b(?:Missing|Invalid|Open|Decode|Unknown|Unable)[A-Z]\w+"
"""object_store's name of what an environment lacks."""
_AZURE = "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY as Azure shows it or another credential"
_NEXT_STEPS = {
    "gs": "let GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT name a file of credentials",
    "az": _AZURE,
    "abfs": _AZURE,
}
_PREFIXES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "GCS_", "HF_", "XRANK_")
_stores: dict[tuple[object, ...], ObjectStore] = {}
_opening = threading.Lock()


def open_store(url: str) -> tuple[ObjectStore, str]:
    """Return the store of a cleaned URL, and the key in it.

    Stores are kept for the life of the process, one for each bucket and environment. A forked process opens its own:
    threads and connections of a client do not survive a fork. UsageError if a package is missing, plain http is not
    allowed, or a setting is wrong.
    """
    place = split_url(url)
    variables = environ()
    known = (item for item in variables.items() if item[0].startswith(_PREFIXES))
    identity = (os.getpid(), place.root, *known)
    with _opening:
        store = _stores.get(identity)
        if store is None:
            settings = StoreSettings.from_environment(variables)
            try:
                backend = _open_backend(place.scheme, place.root, settings)
            except UsageError as error:
                error.rename(place.root, url)  # the path that the user gave
                raise
            store = _stores[identity] = ObjectStore(place.root, backend, settings)
    return store, place.key


def _open_backend(scheme: str, root: str, settings: StoreSettings) -> Backend:
    if scheme == "s3":
        from xrank.storage.s3 import open_s3

        return open_s3(root, settings)
    if scheme not in ("gs", "az", "abfs", "http", "https"):
        from xrank.storage.obstore_backend import open_fsspec

        return open_fsspec(scheme, root, settings)
    require("obstore", f"reading {root}")
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, HTTPStore

    from xrank.storage.azure import AzureBackend, find_endpoint
    from xrank.storage.google import GoogleBackend
    from xrank.storage.obstore_backend import ObstoreBackend

    place, variables = root.partition("://")[2], environ()
    endpoint = {"gs": variables.get("GOOGLE_BASE_URL") or "", "http": root, "https": root}.get(scheme)
    if endpoint is None:
        endpoint = find_endpoint(variables, "")
    check_https(endpoint, root, allow_http=settings.allow_http)
    client: dict[str, Any] = {"timeout": f"{settings.answer_seconds}s", "allow_http": settings.allow_http}
    options: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0}}
    try:
        if scheme == "gs":
            return GoogleBackend(GCSStore(place, **options), root, settings)
        if scheme in ("http", "https"):
            return ObstoreBackend(HTTPStore.from_url(root, **options))
        container, _, account = place.partition("@")
        if account:
            options["account_name"] = account.partition(".")[0]
        return AzureBackend(AzureStore(container, **options), root, settings)
    except BaseError as error:
        # A name, as the text may contain more of the environment.
        cause = " ".join(re.findall(_CAUSE, str(error))[:1]) or type(error).__name__
        raise make_credentials_error(root, _NEXT_STEPS.get(scheme, "correct the URL"), cause) from None


_COPY_NBYTES = 4 << 20
_MOST_COPIED_NBYTES = 4 << 30
_STATE_NAME = re.compile(r"rank_(0|[1-9][0-9]{0,8})_state\.pth")
_lock = threading.Lock()
_folders: dict[str, Folder] = {}
_statuses: dict[str, ObjectStatus | None] = {}
_entered: set[str] = set()


def enter(path: str | os.PathLike[str]) -> str:
    """Return a user's path or URL in the form that all of xrank uses, and look at what is there anew."""
    text = clean_path(path)
    if is_url(text):
        with _lock:
            _entered.add(text)
            folder = os.path.dirname(text)
            for known in (_folders, _statuses):
                for url in [url for url in known if url == folder or url.startswith(text)]:
                    del known[url]
    return text


def is_folder(path: str) -> bool:
    """Return whether a path is a folder; a URL is one if objects are below it."""
    if not is_url(path):
        return os.path.isdir(path)
    found = _folder(path)
    return bool(found.objects or found.folders)


def is_file(path: str) -> bool:
    """Return whether a path is a regular file or an object."""
    return _status(path) is not None if is_url(path) else os.path.isfile(path)


def exists(path: str) -> bool:
    """Return whether a path leads to a file or a folder."""
    return is_folder(path) or is_file(path) if is_url(path) else os.path.exists(path)


def is_present(path: str) -> bool:
    """Return whether a name is taken, also by a broken link."""
    return exists(path) if is_url(path) else os.path.lexists(path)


def is_link(path: str) -> bool:
    """Return whether a path is a symbolic link."""
    return not is_url(path) and os.path.islink(path)


def absolute(path: str) -> str:
    """Return an absolute path; a URL is one."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(path)


def real(path: str) -> str:
    """Return a path without links; a URL has none."""
    return path.rstrip("/") if is_url(path) else os.path.realpath(path)


def nbytes_of(path: str) -> int:
    """Return the size of a file or an object in bytes."""
    return object_status(path).nbytes if is_url(path) else os.stat(path).st_size


def list_names(path: str) -> list[str]:
    """Return the names in a folder, in any order; OSError without such a folder, of a URL XrankError."""
    if not is_url(path):
        return os.listdir(path)
    found = _folder(path)
    if not found.objects and not found.folders:
        raise FileNotFoundError(f"{path}: there are no objects below it")
    return [*found.objects, *found.folders]


def walk(path: str, *, followlinks: bool = False) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder from a path on with its folders and its files, as `os.walk` does."""
    if not is_url(path):
        yield from os.walk(path, followlinks=followlinks)
        return
    found = _folder(path)
    folders = sorted(found.folders)
    yield path, folders, sorted(found.objects)
    for name in folders:
        yield from walk(os.path.join(path, name))


def object_status(url: str) -> ObjectStatus:
    """Return the size and the version of an object; IncompleteError without one."""
    found = _status(url)
    if found is None:
        next_step = "check the URL; it may not have been written yet"
        raise IncompleteError(f"{url}: there is no such object", file=url, next_step=next_step)
    return found


def read_content(path: str) -> bytes:
    """Return all bytes of a small file or object."""
    with open_file(path) as file:
        return file.read()


def open_file(path: str) -> BinaryIO:
    """Open a file, or a copy of an object, to read it once; errors as for `open_descriptor`."""
    return open(open_descriptor(path) if is_url(path) else path, "rb")


def open_descriptor(path: str) -> int:
    """Open a file to read; of an object, a copy in a temporary file without a name. OSError, or of a URL XrankError."""
    if not is_url(path):
        return os.open(path, system.READ)
    store, key = open_store(path)
    status = object_status(path)
    if status.nbytes > _MOST_COPIED_NBYTES:
        raise UsageError(
            f"{path} is too large for a file that is not weights",
            file=path,
            got=f"{status.nbytes:,} bytes",
            want=f"at most {_MOST_COPIED_NBYTES:,} bytes",
            next_step="check the URL; or copy the folder to a disk, and give its path",
        )
    import tempfile  # files on disks do not need it

    with tempfile.TemporaryFile(buffering=0) as file:
        for start in range(0, status.nbytes, _COPY_NBYTES):
            system.write_all(file.fileno(), store.read(key, start, min(_COPY_NBYTES, status.nbytes - start), status))
        file.seek(0)
        return os.dup(file.fileno())


def _folder(url: str) -> Folder:
    url = url.rstrip("/")
    if not can_list(url):
        with _lock:
            looked = [(os.path.split(one), status) for one, status in _statuses.items() if status is not None]
        return Folder({name: status for (folder, name), status in looked if folder == url})
    found = _folders.get(url)
    folder = os.path.dirname(url)
    # A folder that is missing in the one above it has nothing in it.
    above = _folder(folder) if os.path.dirname(folder) in _folders else _folders.get(folder)
    if found is None and above is not None and os.path.basename(url) not in above.folders:
        found = _folders[url] = Folder()
    if found is None:
        store, key = open_store(url)
        found = store.list_folder(key)
        with _lock:
            _folders[url] = found
    return found


def _status(url: str) -> ObjectStatus | None:
    """Return the status of an object, from the listing of its folder if it is below an entered URL; None: no object."""
    folder, name = os.path.split(url.rstrip("/"))
    if not can_list(url):
        return _look_at(url)
    known, own = _folders.get(folder), _folders.get(url)
    if known is None and own is not None and (own.objects or own.folders):
        return None
    if known is None and url not in _entered:  # the folder of the user's own path may be large
        known = _folder(folder) if open_store(url)[1] else Folder()
    return _look_at(url) if known is None else known.objects.get(name)


def _look_at(url: str) -> ObjectStatus | None:
    if url in _statuses:
        return _statuses[url]
    store, key = open_store(url)
    if not key:
        return None
    try:
        found: ObjectStatus | None = store.head(key)
    except IncompleteError:
        found = None
    with _lock:
        _statuses[url] = found
    return found


def state_file_name(rank: int) -> str:
    """Return the file name of a rank's state, the same as ModelOpt's."""
    return f"rank_{rank}_state.pth"


def rank_of(file_name: str) -> int | None:
    """Return the rank in the file name of a state; None for other names."""
    match = _STATE_NAME.fullmatch(file_name)
    return None if match is None else int(match[1])


def hash_file(path: str, hash_name: str = "sha256", *, head: bytes = b"") -> bytes:
    """Return the hash of a file on disk, after that of some bytes before it."""
    import hashlib  # few gathers need it

    state = hashlib.new(hash_name, head, usedforsecurity=hash_name != "sha1")
    _feed(path, state.update)
    return state.digest()


def digest_plain_file(path: str) -> str:
    """Return the XXH3-128 of a file's bytes, which manifests have for files without tensors."""
    state = xxhash.xxh3_128()
    _feed(path, state.update)
    return state.hexdigest()


def _feed(path: str, update: Callable[[memoryview], object]) -> None:
    buffer = memoryview(bytearray(_COPY_NBYTES))
    with open(open_descriptor(path), "rb", buffering=0) as file:  # of a FIFO, too, it returns at once
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        while count := file.readinto(buffer):
            update(buffer[:count])
