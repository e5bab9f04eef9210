"""Requests to stores: repeated with growing pauses up to a deadline, counted, and named in their errors."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from xrank import system
from xrank.environment import environ
from xrank.stores.backend import Backend, Folder, ObjectStatus
from xrank.stores.faults import FaultError, FaultKind, make_error
from xrank.stores.settings import StoreSettings
from xrank.stores.url import split_url

_FIRST_PAUSE_SECONDS = dict.fromkeys((FaultKind.PASSING, FaultKind.THROTTLED), 0.1)
_LONGEST_PAUSE_SECONDS = 20.0
_LEAST_SECONDS = 1.0
"""Time that a repetition has at least, when the deadline is near."""
_LOOK_SECONDS = 0.1
"""Time between two looks whether a request shall be given up."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests and bytes of this process since it started."""

    requests: int = 0
    """All requests, repetitions included."""
    retries: int = 0
    """Repetitions of requests that had failed."""
    read_nbytes: int = 0
    """Bytes of objects in answers."""
    written_nbytes: int = 0
    """Bytes of objects in requests."""

    def since(self, earlier: Traffic) -> Traffic:
        """Return the traffic after an earlier moment."""
        return Traffic(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))


class Clock:
    """The time of pauses and deadlines."""

    def now(self) -> float:
        """Return seconds since any moment."""
        return time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Wait, or until the event is set."""
        stop.wait(seconds)


class _Counter:
    def __init__(self) -> None:
        self.total = Traffic()
        self.taken = Traffic()
        self._lock = threading.Lock()

    def add(self, *, requests: int = 0, retries: int = 0, read: int = 0, written: int = 0) -> None:
        with self._lock:
            old = self.total
            self.total = Traffic(
                old.requests + requests, old.retries + retries, old.read_nbytes + read, old.written_nbytes + written
            )

    def take(self) -> Traffic:
        with self._lock:
            new, self.taken = self.total.since(self.taken), self.total
            return new


_counter = _Counter()
_clock = Clock()
_stores: dict[tuple[object, ...], Store] = {}
_opening = threading.Lock()


def traffic() -> Traffic:
    """Return the requests and bytes of this process up to now; `Traffic.since` gives those of one command."""
    return _counter.total


def take_traffic() -> Traffic:
    """Return the requests and bytes since the last call, for the report of another rank."""
    return _counter.take()


def add_traffic(other: Traffic) -> None:
    """Count the requests and bytes of another rank as this process's own."""
    _counter.add(requests=other.requests, retries=other.retries, read=other.read_nbytes, written=other.written_nbytes)


class Store:
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
        self.root = root
        self.settings = settings
        self._backend = backend
        self._clock = clock or _clock
        self._slots = threading.BoundedSemaphore(settings.connections)

    @property
    def fills_memory(self) -> bool:
        """Whether `read` receives bytes in the caller's memory."""
        return self._backend.fills_memory

    def head(self, key: str) -> ObjectStatus:
        """Return the size and the version of an object."""
        return self._request(key, "looked at", lambda: self._backend.head(key), may_leave=True)

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
        """Return exactly these bytes of an object.

        Args:
            key: the object.
            offset: its first wanted byte.
            nbytes: their number; the range must lie in the object.
            status: the version to read; None: whichever is there.
            into: a buffer of `nbytes`, which is filled and returned if the store fills memory.
            stop: ends the repetitions when it is set.
        """

        def read() -> memoryview:
            view, found = self._backend.read(key, offset, offset + nbytes, status, into)
            _counter.add(read=len(view))
            if status is not None and (found.nbytes, found.version) != (status.nbytes, status.version):
                raise FaultError(
                    FaultKind.CHANGED, f"{found.nbytes:,} bytes, version {found.version}, not {status.version}"
                )
            if len(view) != nbytes:
                raise FaultError(FaultKind.PASSING, f"{len(view):,} of {nbytes:,} bytes")
            return view

        if nbytes == 0:
            return memoryview(b"")
        what = f"read at bytes {offset:,} to {offset + nbytes - 1:,}"
        # A request that was left behind must not write to memory that its owner uses again.
        may_leave = into is None or not self.fills_memory
        return self._request(key, what, read, stop, may_leave=may_leave)

    def list_folder(self, key: str) -> Folder:
        """Return the objects and folders directly below a key; an empty folder if nothing is there."""
        return self._request(key, "listed", lambda: self._backend.list_folder(key), may_leave=True)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None) -> str:
        """Write an object at one instant; return its version.

        Args:
            key: the object.
            data: all its bytes.
            if_absent: refuse where an object is there (OutputExistsError). After a broken connection that may be this
                call's own: the caller compares.
            if_version: refuse unless the object there has this version (ContradictionError).
        """

        def put() -> str:
            _counter.add(written=len(data))
            try:
                return self._backend.put(key, data, if_absent=if_absent, if_version=if_version)
            except FaultError as fault:
                if if_absent and fault.kind is FaultKind.CHANGED:  # S3 answers 412 to both conditions
                    raise FaultError(FaultKind.EXISTS, fault.text) from None
                raise

        return self._request(key, "written", put)

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent."""
        self._request(key, "deleted", lambda: self._backend.delete(key))

    def repeat(self, key: str, what: str, send: Callable[[], _Result], *, written_nbytes: int = 0) -> _Result:
        """Send a request until it succeeds or its failure is final.

        Args:
            key: the object, for errors.
            what: the request, as a participle: ``"written"``.
            send: sends it once; raises `FaultError`.
            written_nbytes: bytes of an object in each request.
        """

        def count_and_send() -> _Result:
            _counter.add(written=written_nbytes)
            return send()

        return self._request(key, what, count_and_send)

    def url(self, key: str) -> str:
        """Return the URL of an object of this store."""
        return f"{self.root}/{key}" if key else self.root

    def _request(
        self,
        key: str,
        what: str,
        send: Callable[[], _Result],
        stop: threading.Event | None = None,
        *,
        may_leave: bool = False,
    ) -> _Result:
        started, tries = self._clock.now(), 0
        stop = stop or threading.Event()
        while True:
            tries += 1
            _counter.add(requests=1, retries=int(tries > 1))
            try:
                with self._slots:
                    if not may_leave:
                        return send()
                    left = started + self.settings.timeout_seconds - self._clock.now()
                    return _send_within(send, max(left, _LEAST_SECONDS), stop)
            except FaultError as fault:
                spent = self._clock.now() - started
                pause = _pause(fault.kind, tries)
                if pause is None or spent + pause > self.settings.timeout_seconds or stop.is_set():
                    raise make_error(fault, self.url(key), what, tries=tries, seconds=spent) from None
            self._clock.wait(pause, stop)


def _send_within(send: Callable[[], _Result], seconds: float, stop: threading.Event) -> _Result:
    """Send a request in a thread of its own, which is left behind if it does not end in time.

    Clients bound the time of a single read of a connection; an answer that comes byte by byte has no end for them.

    Raises:
        FaultError: as `send`; or the time is over, or `stop` was set after the first moment.
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
                raise FaultError(FaultKind.PASSING, f"no whole answer within {seconds:.0f} s") from None
            continue
        if error is not None:
            raise error
        return cast("_Result", result)


def _pause(kind: FaultKind, tries: int) -> float | None:
    """Return the seconds before the next request; None if it would fail, too.

    The pauses double, and a random part keeps many clients from coming back at once.
    """
    first = _FIRST_PAUSE_SECONDS.get(kind)
    if first is None:
        return None
    return min(_LONGEST_PAUSE_SECONDS, first * 2.0 ** min(tries - 1, 16)) * random.uniform(0.5, 1.0)  # noqa: S311


def open_store(url: str) -> tuple[Store, str]:
    """Return the store of a cleaned URL, and the key in it.

    Stores are kept for the life of the process, one for each bucket and environment.

    Raises:
        UsageError: a package is missing, plain http is not allowed, or a setting is wrong.
    """
    place = split_url(url)
    variables = environ()
    identity = (place.root, *((name, text) for name, text in variables.items() if name.startswith(_PREFIXES)))
    with _opening:
        store = _stores.get(identity)
        if store is None:
            settings = StoreSettings.from_environment(variables)
            store = _stores[identity] = Store(place.root, _open_backend(place.scheme, place.root, settings), settings)
    return store, place.key


_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "GCS_", "HF_", "XRANK_")


def _open_backend(scheme: str, root: str, settings: StoreSettings) -> Backend:
    variables = environ()
    # With keys by our own connection, which takes a quarter less time and 25 MB less memory than obstore, and follows
    # no redirect. obstore also finds roles and reads public buckets.
    has_key = variables.get("AWS_ACCESS_KEY_ID") and variables.get("AWS_SECRET_ACCESS_KEY")
    is_public = variables.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    if scheme == "s3" and has_key and not is_public:
        from xrank.stores.s3_backend import S3Backend
        from xrank.stores.s3_connection import S3Connection

        return S3Backend(S3Connection(root.partition("://")[2], settings, variables, root))
    if scheme in ("s3", "gs", "az", "abfs", "http", "https"):
        from xrank.stores.obstore_backend import open_obstore

        return open_obstore(root, settings)
    from xrank.stores.fsspec_backend import open_fsspec

    return open_fsspec(scheme, root, settings)


# Threads and connections of a client do not survive a fork.
system.after_fork_in_child(_stores.clear)
