"""Requests to stores: repeated with growing pauses up to a deadline, counted, and named in their errors.

A backend sends one request of one kind of store and raises `FaultError` where it fails. `ObjectStore` repeats it,
bounds its time and its bytes, and raises xrank's errors. Nothing here imports a client library before a URL is opened.
"""

from __future__ import annotations

import enum
import io
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures  # loads threads and queues at first use
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast

from msgspec import Struct, field
from msgspec.structs import astuple

from xrank.environment import setting
from xrank.errors import (
    AGAIN,
    ContradictionError,
    IncompleteError,
    OutputExistsError,
    UsageError,
    XrankError,
    either,
    option,
)

_logger = logging.getLogger(__name__)
CONNECTIONS = 16
"""Requests under way at once, at most: at 20 ms latency and 1 MiB each, they move 800 MB/s."""
TIMEOUT_SECONDS = 300.0
"""Patience for one request with all its repetitions."""
REQUEST_SECONDS = 60.0
"""Most seconds that a client waits for the next bytes of an answer."""
MOST_ANSWER_NBYTES = 32 << 20
"""Most bytes of an answer that is not an object's: a page of a list, an error."""
ABSENT = "absent"
"""The condition that no object is there."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 20.0
_LEAST_SECONDS = 1.0
"""Time that a repetition has at least, when the deadline is near."""
_SILENT_SECONDS = 5.0
"""Time after which a user is told about failures that may pass."""
_FIRST_SECONDS = 30.0
"""Patience for a store that has not answered any request yet: its address may be wrong."""
_LOOK_SECONDS = 0.1
"""Time between two looks whether a request shall be given up."""
_RANGE_NBYTES = 4 << 20
_GAP_NBYTES = 16 << 10
"""Ranges that are closer than this share a request."""
_Result = TypeVar("_Result")


class ObjectStatus(Struct, frozen=True):
    """Size and version of an object when it was listed or looked at, to detect later changes."""

    nbytes: int
    version: str
    """The store's etag, or its time of change where it gives none; empty if it gives neither."""
    is_etag: bool = True
    """Whether requests may demand this version (``If-Match``)."""

    @property
    def st_size(self) -> int:
        """The size under the name that `os.stat_result` gives it."""
        return self.nbytes


class Folder(Struct, frozen=True):
    """The objects and folders directly below a key."""

    objects: Mapping[str, ObjectStatus] = field(default_factory=dict)
    """Name -> status."""
    folders: frozenset[str] = frozenset()
    """Names."""


class Backend(Protocol):
    """Reads one bucket, host or repository; any thread may call it. `uploads.WritableBackend` writes, too.

    A request that fails is a FaultError.
    """

    fills_memory: bool
    """Whether the bytes of an object arrive in small pieces, not in one answer that is copied."""

    def head(self, key: str) -> ObjectStatus:
        """Return the status of an object."""

    def read(
        self, key: str, start: int, end: int, status: ObjectStatus | None, take: Callable[[memoryview | bytes], None]
    ) -> ObjectStatus:
        """Pass bytes [start, end) of an object to `take`, piece by piece in order; return its status with this answer.

        `take` raises at the first byte too many, so that an answer without end costs no memory. A `status` that is
        given is the wanted version.
        """

    def list_folder(self, key: str) -> Folder:
        """Return what lies directly below a key; an empty folder if nothing does."""


class FaultKind(enum.Enum):
    """Kinds of failures, by what helps."""

    MISSING = "missing"
    DENIED = "denied"
    CHANGED = "changed"
    """A condition on the object's etag does not hold."""
    EXISTS = "exists"
    """A condition that there is no object does not hold."""
    PASSING = "passing"
    """A connection or a server failed; the next request may succeed."""
    THROTTLED = "throttled"
    """The store asks for fewer requests."""
    REFUSED = "refused"
    """The store or the client does not accept the request, however often it is sent."""


class FaultError(Exception):
    """A failed request, as a backend reports it: its kind, and a text without URLs, headers and credentials."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


_KINDS = {
    **dict.fromkeys((401, 403), FaultKind.DENIED),
    404: FaultKind.MISSING,
    412: FaultKind.CHANGED,
    **dict.fromkeys((408, 409), FaultKind.PASSING),  # 409: another request changes the same object at this moment
    **dict.fromkeys((429, 503), FaultKind.THROTTLED),
}
_CODES = {
    **dict.fromkeys(
        ("SlowDown", "ServerBusy", "RequestLimitExceeded", "Throttling", "ThrottlingException"), FaultKind.THROTTLED
    ),
    # A damaged body is sent again whole. Azurite has other names for Azure's Md5Mismatch.
    **dict.fromkeys(("BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "Md5Mismatch"), FaultKind.PASSING),
    **dict.fromkeys(("RequestTimeout", "InternalError", "OperationAborted", "OperationTimedOut"), FaultKind.PASSING),
    **dict.fromkeys(("RequestBodyIncomplete", "InvalidOperation", "InvalidXmlDocument"), FaultKind.PASSING),
    **dict.fromkeys(("BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet"), FaultKind.CHANGED),
    **dict.fromkeys(("InvalidBlockList", "NoSuchUpload"), FaultKind.MISSING),
}
"""Amazon S3 API Reference, "Error responses"; Azure Storage REST reference, "Blob service error codes"."""


def make_fault(status: int, reason: str, code: str = "") -> FaultError:
    """Return the fault of an answer: its HTTP status and reason, and the store's code."""
    shown = " ".join(filter(None, (str(status), reason, code)))
    default = FaultKind.PASSING if status >= 500 or status < 300 else FaultKind.REFUSED
    return FaultError(_CODES.get(code) or _KINDS.get(status, default), shown)


_RIGHTS = "check the credentials in the environment, and their permissions for this bucket"
_FINISH = "let its writer finish"
_ERRORS: dict[FaultKind, tuple[type[XrankError], str, str]] = {
    FaultKind.MISSING: (
        IncompleteError,
        ": there is no such object",
        "check the URL; it may not have been written yet",
    ),
    FaultKind.DENIED: (UsageError, " may not be {what}", _RIGHTS),
    FaultKind.CHANGED: (ContradictionError, " changed while it was being read", f"{_FINISH}, then {AGAIN}"),
    FaultKind.EXISTS: (OutputExistsError, " exists", "choose a different output, or stop the other writer"),
    FaultKind.REFUSED: (UsageError, " cannot be {what}", "check the URL and the endpoint"),
}


_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
"""Codes of S3 and Azure, and Google's text."""


def make_error(fault: FaultError, url: str, what: str, *, tries: int = 1, seconds: float = 0.0) -> XrankError:
    """Return the error for a request that failed for good after so many tries and seconds.

    `what` is the request, as a participle: ``"read at bytes 0 to 99"``.
    """
    times = "once" if tries == 1 else f"{tries} times in {seconds:.0f} s"
    again = f"check the endpoint (such as AWS_ENDPOINT_URL), the network and the store; then {AGAIN}"
    default = (XrankError, f" could not be {{what}}, tried {times}", again)
    kind, text, next_step = _ERRORS.get(fault.kind, default)
    if fault.kind is FaultKind.MISSING and _NO_BUCKET.search(fault.text):
        text, next_step = ": there is no such bucket", "check the bucket's name in the URL, the endpoint and the region"
    return kind(url + text.format(what=what), file=url, got=fault.text, next_step=next_step)


def or_none(send: Callable[[], _Result]) -> _Result | None:
    """Return the result of a request; None where nothing is there."""
    try:
        return send()
    except FaultError as fault:
        if fault.kind is FaultKind.MISSING:
            return None
        raise


class StoreSettings(Struct, frozen=True):
    """How xrank talks to stores."""

    connections: int = CONNECTIONS
    """Requests under way at once, at most."""
    timeout_seconds: float = TIMEOUT_SECONDS
    """Patience for one request with all its repetitions."""
    allow_http: bool = False
    """Whether requests may go over plain http, where any host on the way can read and change them."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> StoreSettings:
        """Return the settings of ``XRANK_STORE_CONNECTIONS``, ``XRANK_STORE_TIMEOUT`` and ``XRANK_ALLOW_HTTP``.

        UsageError if one of them is not a number in its range.
        """

        def number(name: str, kind: Callable[[str], float], default: float) -> float:
            text = setting(environ, name)
            try:
                found = default if text is None else kind(text)
            except ValueError:
                found = 0
            if not 0 < found < 1e6:
                next_step = f"set {name} to a number, or unset it"
                raise UsageError(f"{name} must be a number above 0", got=text, next_step=next_step)
            return found

        return cls(
            int(number("XRANK_STORE_CONNECTIONS", int, CONNECTIONS)),
            number("XRANK_STORE_TIMEOUT", float, TIMEOUT_SECONDS),
            is_set(setting(environ, "XRANK_ALLOW_HTTP")),
        )

    @property
    def answer_seconds(self) -> float:
        """Patience for the next bytes of one answer."""
        return min(REQUEST_SECONDS, self.timeout_seconds)


def is_set(text: str | None) -> bool:
    """Return whether a variable switches something on."""
    return (text or "").lower() in ("1", "true", "yes", "on")


def check_https(endpoint: str, url: str, *, allow_http: bool) -> None:
    """Refuse plain http without permission; the error names the place `url` in the store."""
    if endpoint.lower().startswith("http:") and not allow_http:
        what = "would be reached over plain http, so others could read and change the bytes and the credentials"
        permit = either(f"give {option('allow_http', True)}", "set XRANK_ALLOW_HTTP=1")
        next_step = f"give an endpoint with https; or, on a private network, {permit}"
        raise UsageError(f"{url} {what}", file=url, want="https", next_step=next_step)


def make_credentials_error(url: str, next_step: str, got: str | None = None) -> UsageError:
    """Return the error for an environment whose credentials do not suffice to open a store."""
    message = f"{url} cannot be opened with the settings in the environment"
    return UsageError(message, file=url, got=got, next_step=next_step)


def import_hub(url: str, what: str, settings: StoreSettings) -> Any:
    """Return huggingface_hub, which `what` needs; UsageError without it, or if it asks the Hub over plain http."""
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError:
        message = f"{what} needs huggingface_hub, which is not installed"
        raise UsageError(message, next_step="run pip install huggingface_hub") from None
    check_https(constants.ENDPOINT, url, allow_http=settings.allow_http)
    return huggingface_hub


def hide_debug_logs(*names: str) -> None:
    """Let client libraries log warnings only, unless the user set a level: at DEBUG they show keys and tokens."""
    for name in names:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)


def copy_bytes(source: memoryview | bytes, into: memoryview) -> None:
    """Copy bytes to a place of as many. Other threads run meanwhile, as they do not during an assignment."""
    if into:
        import numpy as np  # not needed for files on disks

        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def receive(read: Callable[[int], bytes]) -> bytes:
    """Return all bytes of a small answer, whatever it says of its length; raise FaultError if there are too many."""
    pieces, nbytes = [], 0
    while piece := read(1 << 20):
        pieces.append(piece)
        nbytes += len(piece)
        if nbytes > MOST_ANSWER_NBYTES:
            raise FaultError(FaultKind.PASSING, f"an answer of more than {MOST_ANSWER_NBYTES:,} bytes")
    return b"".join(pieces)


def make_session(session: Any, connections: int) -> Any:
    """Return a session of requests that follows no redirect and receives no more of an answer than `receive` does."""
    import requests.adapters
    import urllib3

    def send(request: Any, stream: bool = False, **options: Any) -> Any:
        answer = send_streamed(request, stream=True, **options)
        raw = answer.raw
        try:
            content = io.BytesIO(receive(lambda nbytes: raw.read(nbytes, decode_content=False)))
        except urllib3.exceptions.HTTPError:
            raise FaultError(FaultKind.PASSING, "the connection broke") from None
        finally:
            raw.close() if raw.length_remaining else raw.release_conn()
        options = {"preload_content": False, "enforce_content_length": False}
        answer.raw = urllib3.HTTPResponse(content, raw.headers, raw.status, **options)
        return answer

    adapter = requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=connections)
    send_streamed, adapter.send = adapter.send, send
    session.max_redirects = 0
    for scheme in ("http://", "https://"):
        session.mount(scheme, adapter)
    return session


class StoreTraffic(Struct, frozen=True):
    """Requests and bytes of this process since it started."""

    requests: int = 0
    """All requests, repetitions included."""
    retries: int = 0
    """Repetitions of requests that had failed."""
    read_nbytes: int = 0
    """Bytes of objects in answers."""
    written_nbytes: int = 0
    """Bytes of objects in requests."""

    def since(self, earlier: StoreTraffic) -> StoreTraffic:
        """Return the traffic after an earlier moment."""
        return StoreTraffic(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))


class Clock:
    """The time of pauses and deadlines."""

    def now(self) -> float:
        """Return seconds since any moment."""
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Wait, or until the event is set."""
        stop.wait(seconds)


_total = _taken = StoreTraffic()
_counting = threading.Lock()
_clock = Clock()


def traffic() -> StoreTraffic:
    """Return the requests and bytes of this process up to now; `StoreTraffic.since` gives those of one command."""
    return _total


def take_traffic() -> StoreTraffic:
    """Return the requests and bytes since the last call, for the report of another rank."""
    global _taken
    with _counting:
        new, _taken = _total.since(_taken), _total
        return new


def add_traffic(other: StoreTraffic) -> None:
    """Count the requests and bytes of another rank as this process's own."""
    global _total
    with _counting:
        _total = StoreTraffic(*map(sum, zip(astuple(_total), astuple(other), strict=True)))


class _Buffer:
    """Takes the bytes of one answer, until it is full or its request was left behind."""

    def __init__(self, into: memoryview) -> None:
        self._into, self.nbytes, self._is_closed = into, 0, False
        self._lock = threading.Lock()

    def take(self, piece: memoryview | bytes) -> None:
        with self._lock:
            end = self.nbytes + len(piece)
            if self._is_closed or end > len(self._into):
                raise FaultError(FaultKind.PASSING, f"more than {len(self._into):,} bytes")
            copy_bytes(piece, self._into[self.nbytes : end])
            self.nbytes = end

    def close(self) -> None:
        with self._lock:
            self._is_closed = True


class ObjectStore:
    """The objects of one bucket, container, host or repository; any thread may call it.

    Each method repeats a request whose failure may pass, until `StoreSettings.timeout_seconds` are over. A request that
    has not ended by then, such as one whose answer comes byte by byte or has no end, has failed, too.

    Raises (from every method):
        IncompleteError: there is no such object.
        UsageError: the credentials do not suffice, or the store does not accept the request.
        ContradictionError: the object is not the wanted version.
        XrankError: the requests failed until the deadline.
    """

    def __init__(self, root: str, backend: Backend, settings: StoreSettings, clock: Clock | None = None) -> None:
        self.root, self.settings, self.backend = root, settings, backend
        self._clock = clock or _clock
        self._slots = threading.BoundedSemaphore(settings.connections)
        self._is_silent, self._has_answered = True, False

    @property
    def fills_memory(self) -> bool:
        """Whether `read` receives bytes in the caller's memory, and holds them nowhere else."""
        return self.backend.fills_memory

    def head(self, key: str) -> ObjectStatus:
        """Return the size and the version of an object."""
        return self.repeat(key, "looked at", lambda: self.backend.head(key))

    def read(
        self,
        key: str,
        offset: int,
        nbytes: int,
        status: ObjectStatus | None = None,
        *,
        into: memoryview | None = None,
        stop: threading.Event | None = None,
    ) -> memoryview:
        """Return exactly these bytes of an object, in `into` if it is given; the range must lie in the object.

        A `status` is the version to read. `stop` ends the repetitions when it is set.
        """
        view = memoryview(bytearray(nbytes)) if into is None else into
        buffer = _Buffer(view)

        def read() -> None:
            nonlocal buffer
            mine = buffer = _Buffer(view)
            found = self.backend.read(key, offset, offset + nbytes, status, mine.take)
            add_traffic(StoreTraffic(read_nbytes=mine.nbytes))
            if status is not None and (found.nbytes, found.version) != (status.nbytes, status.version):
                text = f"{found.nbytes:,} bytes, version {found.version}, not {status.version}"
                raise FaultError(FaultKind.CHANGED, text)
            if mine.nbytes != nbytes:
                raise FaultError(FaultKind.PASSING, f"{mine.nbytes:,} of {nbytes:,} bytes")

        if nbytes:
            try:
                self.repeat(key, f"read at bytes {offset:,} to {offset + nbytes - 1:,}", read, stop=stop)
            finally:
                buffer.close()
        return view

    def list_folder(self, key: str) -> Folder:
        """Return the objects and folders directly below a key; an empty folder if nothing is there."""
        return self.repeat(key, "listed", lambda: self.backend.list_folder(key))

    def put(self, key: str, data: bytes | memoryview, condition: str | None = None) -> str:
        """Write an object at one instant; return its version.

        With the condition `ABSENT`, only where no object is (else OutputExistsError; after a broken connection that may
        be this call's own: the caller compares); with a version, only in its place (else ContradictionError).
        """

        def put() -> str:
            try:
                return str(cast("Any", self.backend).put(key, data, condition))
            except FaultError as fault:
                if condition == ABSENT and fault.kind is FaultKind.CHANGED:
                    raise FaultError(FaultKind.EXISTS, fault.text) from None
                raise

        return self.repeat(key, "written", put, written_nbytes=len(data))

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent."""
        self.repeat(key, "deleted", lambda: cast("Any", self.backend).delete(key))

    def url(self, key: str) -> str:
        """Return the URL of an object of this store."""
        return f"{self.root}/{key}" if key else self.root

    def repeat(
        self,
        key: str,
        what: str,
        send: Callable[[], _Result],
        *,
        written_nbytes: int = 0,
        stop: threading.Event | None = None,
    ) -> _Result:
        """Call `send` until it succeeds or its failure is final; it may run on after this call has failed.

        `what` is the request, as a participle: ``"written"``. `stop` ends the repetitions when it is set.
        """
        started, tries = self._clock.now(), 0
        stop = stop or threading.Event()
        while True:
            tries += 1
            add_traffic(StoreTraffic(1, int(tries > 1), written_nbytes=written_nbytes))
            try:
                with self._slots:
                    left = started + self.settings.timeout_seconds - self._clock.now()
                    result = _send_within(send, max(left, _LEAST_SECONDS), stop)
                self._has_answered = True
                return result
            except FaultError as fault:
                self._has_answered |= fault.kind is not FaultKind.PASSING or fault.text[:1].isdigit()
                spent = self._clock.now() - started
                patience = self.settings.timeout_seconds
                patience = patience if self._has_answered else min(patience, _FIRST_SECONDS)
                # The pauses double, and a random part keeps many clients from coming back at once.
                pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(tries - 1, 16))
                import random  # requests rarely fail

                pause *= random.uniform(0.5, 1.0)  # noqa: S311
                is_final = fault.kind not in (FaultKind.PASSING, FaultKind.THROTTLED)
                if is_final or spent + pause > patience or stop.is_set():
                    raise make_error(fault, self.url(key), what, tries=tries, seconds=spent) from None
                if spent > _SILENT_SECONDS and self._is_silent:
                    self._is_silent = False
                    text = "%s: %s; requests are repeated for up to %.0f s (XRANK_STORE_TIMEOUT)"
                    _logger.warning(text, self.root, fault.text, patience)
            self._clock.wait(pause, stop)


def _send_within(send: Callable[[], _Result], seconds: float, stop: threading.Event) -> _Result:
    """Send a request in a thread of its own, which is left behind if it does not end in time.

    Clients bound the time of a single read of a connection; an answer that comes byte by byte has no end for them.
    """
    ended: SimpleQueue[tuple[_Result | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            ended.put((send(), None))
        except BaseException as error:
            ended.put((None, error))

    is_stopped = stop.is_set()  # then it only ends the repetitions
    deadline = time.monotonic() + seconds
    threading.Thread(target=run, name="xrank-request", daemon=True).start()
    while True:
        left = deadline - time.monotonic()
        try:
            result, error = ended.get(timeout=min(max(left, 0.001), _LOOK_SECONDS))
        except Empty:
            if left <= 0 or (stop.is_set() and not is_stopped):
                raise FaultError(FaultKind.PASSING, f"no complete response within {seconds:.0f} s") from None
            continue
        if error is not None:
            raise error
        return cast("_Result", result)


def read_ranges(store: ObjectStore, key: str, status: ObjectStatus, ranges: Iterable[tuple[int, memoryview]]) -> None:
    """Fill buffers with bytes of an object of that version: (offset, buffer), by rising offsets, many at once.

    Errors as of `ObjectStore.read`.
    """
    groups: list[list[tuple[int, memoryview]]] = []
    end = 0
    for offset, buffer in ranges:
        for start in range(0, len(buffer), _RANGE_NBYTES):
            piece = buffer[start : start + _RANGE_NBYTES]
            first, stop = offset + start, offset + start + len(piece)
            if groups and first - end <= _GAP_NBYTES and stop - groups[-1][0][0] <= _RANGE_NBYTES:
                groups[-1].append((first, piece))
            else:
                groups.append([(first, piece)])
            end = stop

    def fetch(group: list[tuple[int, memoryview]]) -> None:
        start, (last, buffer) = group[0][0], group[-1]
        data = store.read(key, start, last + len(buffer) - start, status)
        for offset, into in group:
            into[:] = data[offset - start : offset - start + len(into)]

    with futures.ThreadPoolExecutor(min(store.settings.connections, len(groups) or 1), "xrank-store") as pool:
        try:
            for _ in pool.map(fetch, groups):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
