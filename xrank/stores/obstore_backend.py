"""S3, Google, Azure and plain web servers through obstore, the Python binding of Rust's object_store.

The stores take credentials, endpoints and regions from the environment, as their own tools do
(https://developmentseed.org/obstore/latest/authentication/). obstore's own repetitions are off: `client` repeats, so
that it can count and obey one deadline.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from xrank.environment import environ
from xrank.errors import UsageError, require_obstore
from xrank.stores.azure_account import endpoint_of
from xrank.stores.backend import Folder, ObjectStatus
from xrank.stores.faults import PASSING_CODES, THROTTLED_CODES, FaultError, FaultKind
from xrank.stores.s3_connection import find_endpoint
from xrank.stores.settings import StoreSettings, check_https

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_STATUS = re.compile(r"(?:status code: |\(code: )(\d{3})([A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_THROTTLED = {"429", "503"}
_CAUSE = re.compile(r"\b(?:Missing|Invalid|Open|Decode|Unknown|Unable)[A-Z]\w+")
"""object_store's name of what an environment lacks."""
_AZURE = "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY as Azure shows it or another credential"
_NEXT_STEPS = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or none of them",
    "gs": "let GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT name a file of credentials",
    "az": _AZURE,
    "abfs": _AZURE,
}
_REQUEST_SECONDS = 60.0


class ObstoreBackend:
    """One obstore store; see `Backend`.

    Args:
        store: the store.
    """

    fills_memory = False

    def __init__(self, store: ObjectStore) -> None:
        import obstore

        self._obstore = obstore
        self._store = store

    def head(self, key: str) -> ObjectStatus:
        """Return the status of an object."""
        with _Faults():
            return _status(self._obstore.head(self._store, key))

    def read(
        self, key: str, start: int, end: int, status: ObjectStatus | None, into: memoryview | None = None
    ) -> tuple[memoryview, ObjectStatus]:
        """Return bytes [start, end) of an object, and its status with this answer."""
        options: dict[str, Any] = {"range": (start, end)}
        if status is not None and status.is_etag and status.version:
            options["if_match"] = status.version
        with _Faults():
            result = self._obstore.get(self._store, key, options=options)  # type: ignore[arg-type]
            # One piece of all bytes, and the end: an answer may go on after the range that was asked for.
            pieces = iter(result.stream(min_chunk_size=end - start))
            data = next(pieces, b"")
            if len(data) > end - start or next(pieces, None) is not None:
                raise FaultError(FaultKind.PASSING, f"more than {end - start:,} bytes")
            return memoryview(data), _status(result.meta)

    def list_folder(self, key: str) -> Folder:
        """Return what lies directly below a key."""
        with _Faults():
            listed = self._obstore.list_with_delimiter(self._store, key or None)
        objects = {_name(one["path"]): _status(one) for one in listed["objects"]}
        return Folder(objects, frozenset(map(_name, listed["common_prefixes"])))

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool, if_version: str | None) -> str:
        """Write an object at one instant and return its version."""
        mode: Any = "create" if if_absent else "overwrite" if if_version is None else {"e_tag": if_version}
        with _Faults():
            return self._obstore.put(self._store, key, memoryview(data), mode=mode, use_multipart=False)["e_tag"] or ""

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent."""
        with _Faults(), suppress(FileNotFoundError):  # Azure answers 404
            self._obstore.delete(self._store, key)


def open_obstore(root: str, settings: StoreSettings) -> ObstoreBackend:
    """Return the backend of a bucket, container or host.

    Raises:
        UsageError: obstore is not installed, plain http is not allowed, or the environment lacks an account or has
            half of a key.
    """
    require_obstore(f"reading {root}")
    from obstore.exceptions import BaseError

    scheme = root.partition("://")[0]
    check_https(root, root, allow_http=settings.allow_http)
    client: dict[str, Any] = {
        "timeout": f"{min(_REQUEST_SECONDS, settings.timeout_seconds)}s",
        "allow_http": scheme == "http" or _may_use_http(scheme, root, settings),
    }
    options: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0}}
    try:
        store = _make_store(root, options)
    except BaseError as error:
        raise UsageError(
            f"{root} cannot be opened with what the environment says",
            file=root,
            # A name, as the text may contain more of the environment.
            got=" ".join(_CAUSE.findall(str(error))[:1]) or type(error).__name__,
            next_step=_NEXT_STEPS.get(scheme, "correct the URL"),
        ) from None
    if scheme == "gs":
        from xrank.stores.google_backend import GoogleBackend

        return GoogleBackend(store, root, settings)
    if scheme in ("az", "abfs"):
        from xrank.stores.azure_backend import AzureBackend

        return AzureBackend(store, root, settings)
    return ObstoreBackend(store)


def _make_store(root: str, options: dict[str, Any]) -> ObjectStore:
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    scheme, _, place = root.partition("://")
    if scheme == "s3":
        # The keys are the bucket's as they are; boto3 takes the region from AWS_DEFAULT_REGION, too.
        region = environ().get("AWS_REGION") or environ().get("AWS_DEFAULT_REGION") or "us-east-1"
        return S3Store(place, region=region, **options)
    if scheme == "gs":
        return GCSStore(place, **options)
    if scheme in ("az", "abfs"):
        container, _, account = place.partition("@")
        if account:
            options = {**options, "account_name": account.partition(".")[0]}
        return AzureStore(container, **options)
    return HTTPStore.from_url(root, **options)


def _may_use_http(scheme: str, root: str, settings: StoreSettings) -> bool:
    """Return whether the store's endpoint may be plain http; refuse one in the environment that is not allowed."""
    variables = environ()
    if scheme in ("az", "abfs"):
        endpoint = endpoint_of(variables, "")
    else:
        endpoint = (find_endpoint(variables) if scheme == "s3" else variables.get("GOOGLE_BASE_URL")) or ""
    # object_store's own name of the permission.
    allowed = settings.allow_http or (scheme == "s3" and variables.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"))
    check_https(endpoint, root, allow_http=allowed)
    return allowed


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


class _Faults:
    """Turns obstore's exceptions into faults. Their texts contain URLs, so only known parts of them are kept."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, FaultError) or not isinstance(error, Exception):
            return
        raise _fault(error) from None


def _fault(error: Exception) -> FaultError:
    name, text = type(error).__name__, str(error)
    found, code = _STATUS.search(text), _CODE.search(text)
    number = found[1] if found else ""
    shown = " ".join(filter(None, (f"{number}{found[2]}".strip() if found else "", code[1] if code else "")))
    if isinstance(error, FileNotFoundError) or number == "404":
        return FaultError(FaultKind.MISSING, shown or "404 Not Found")
    if name in ("PermissionDeniedError", "UnauthenticatedError") or number in ("401", "403"):
        return FaultError(FaultKind.DENIED, shown or name)
    if name == "PreconditionError" or number == "412":
        return FaultError(FaultKind.CHANGED, shown or "412 Precondition Failed")
    if name == "AlreadyExistsError" or number == "409":
        return FaultError(FaultKind.EXISTS, shown or "409 Conflict")
    if number in _THROTTLED or (code and code[1] in THROTTLED_CODES):
        return FaultError(FaultKind.THROTTLED, shown)
    if number.startswith("5") or number == "408" or (code and code[1] in PASSING_CODES):
        return FaultError(FaultKind.PASSING, shown)
    if number == "416":
        return FaultError(FaultKind.CHANGED, f"{shown}: it is shorter now")
    if found or name in ("InvalidPathError", "NotSupportedError", "ValueError", "UnknownConfigurationKeyError"):
        return FaultError(FaultKind.REFUSED, shown or name)
    if "builder error" in text:
        return FaultError(FaultKind.REFUSED, "an address that the client does not accept")
    if "timed out" in text or "Timeout" in text:
        return FaultError(FaultKind.PASSING, "no answer in time")
    if "kind: Connect" in text:
        return FaultError(FaultKind.PASSING, "no connection")
    if "kind: " in text or "HTTP error" in text or "error decoding" in text or "Generic" in text:
        return FaultError(FaultKind.PASSING, "the connection broke")
    return FaultError(FaultKind.REFUSED, name)
