"""One request to a store, its repetitions, and its errors."""

import pytest

from tests.storage.histories import FastClock
from tests.storage.servers import SECRET
from xrank.errors import ContradictionError, IncompleteError, OutputExistsError, UsageError, XrankError
from xrank.storage.client import (
    ABSENT,
    FaultError,
    FaultKind,
    Folder,
    ObjectStatus,
    ObjectStore,
    StoreSettings,
    traffic,
)
from xrank.storage.places import open_store


@pytest.fixture(params=["a key", "a session token"])
def client(request, monkeypatch):
    """What signs requests."""
    if request.param == "a session token":
        monkeypatch.setenv("AWS_SESSION_TOKEN", "token")


@pytest.mark.usefixtures("client")
def test_objects_are_listed_read_and_written(bucket):
    url = bucket.put("run/a.bin", bytes(range(256)))
    bucket.put("run/deep/b.bin", b"1")
    store, key = open_store(url)
    status = store.head(key)
    assert status.nbytes == 256 and status.is_etag
    before = traffic()
    assert bytes(store.read(key, 10, 5, status)) == bytes(range(10, 15))
    assert traffic().since(before).requests == 1 and traffic().since(before).read_nbytes == 5
    assert store.list_folder("run") == Folder({"a.bin": status}, frozenset({"deep"}))
    assert store.list_folder("nowhere") == Folder()
    version = store.put("run/c", b"new", ABSENT)
    with pytest.raises(OutputExistsError):
        store.put("run/c", b"newer", ABSENT)
    store.put("run/c", b"newer", version)
    with pytest.raises(ContradictionError):
        store.put("run/c", b"newest", version)
    store.put("empty", b"")
    assert store.head("empty").nbytes == 0


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("bucket", ["moto"], indirect=True)  # the small server has one bucket, and no bulk delete
def test_objects_are_deleted_and_absent_ones_are_incomplete(bucket):
    store, key = open_store(bucket.put("run/c", b"new"))
    store.delete(key)
    assert store.list_folder("run") == Folder()
    store, _ = open_store(bucket.url)
    with pytest.raises(IncompleteError, match=f"{bucket.url}/nothing"):
        store.head("nothing")
    with pytest.raises(IncompleteError, match="no-such"):
        open_store("s3://no-such-bucket/a")[0].list_folder("a")


@pytest.mark.usefixtures("client")
def test_an_object_that_changed_is_refused(bucket):
    store, key = open_store(bucket.put("a", b"0123456789"))
    status = store.head(key)
    bucket.put("a", b"012345678x")
    with pytest.raises(ContradictionError, match="changed while it was being read"):
        store.read(key, 0, 4, status)


def test_plain_http_is_refused_unless_allowed(bucket, monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    monkeypatch.delenv("XRANK_ALLOW_HTTP")
    for url in (bucket.url, "http://host/model.safetensors"):
        with pytest.raises(UsageError, match="plain http") as failure:
            open_store(url)
        assert SECRET not in str(failure.value.to_dict())


def test_an_unknown_scheme_is_refused():
    with pytest.raises(UsageError, match="no installed package supports"):
        open_store("nosuchscheme://a/b")


class Failing:
    """A backend whose first requests fail."""

    def __init__(self, *faults):
        self.faults = list(faults)

    def read(self, key, start, end, status, take):
        fault = self.faults.pop(0) if self.faults else bytes(end - start)
        if isinstance(fault, FaultError):
            raise fault
        take(fault)
        return ObjectStatus(100, "v")


def test_passing_failures_and_short_bodies_are_repeated():
    backend = Failing(
        FaultError(FaultKind.PASSING, "500"), b"12", b"12345", FaultError(FaultKind.THROTTLED, "503 SlowDown")
    )
    before = traffic()
    assert ObjectStore("s3://b", backend, StoreSettings()).read("k", 0, 4) == bytes(4)
    assert traffic().since(before).retries == 4


@pytest.mark.parametrize(
    ("kind", "error"),
    [(FaultKind.DENIED, UsageError), (FaultKind.MISSING, IncompleteError), (FaultKind.REFUSED, UsageError)],
)
def test_other_failures_are_final(kind, error):
    before = traffic()
    with pytest.raises(error, match="s3://b/k"):
        ObjectStore("s3://b", Failing(FaultError(kind, "no")), StoreSettings()).read("k", 0, 4)
    assert traffic().since(before).requests == 1


def test_the_deadline_ends_the_repetitions_and_the_error_names_object_and_range():
    backend = Failing(*[FaultError(FaultKind.PASSING, "500 Internal Server Error")] * 99)
    with pytest.raises(XrankError) as failure:
        ObjectStore("s3://b", backend, StoreSettings(timeout_seconds=0.5)).read("k", 7, 4)
    assert failure.value.exit_code == 1
    assert "s3://b/k could not be read at bytes 7 to 10, tried" in failure.value.message
    assert failure.value.got == "500 Internal Server Error"


def test_a_store_that_does_not_answer_is_named_once_while_requests_are_repeated(caplog):
    backend = Failing(*[FaultError(FaultKind.PASSING, "no connection")] * 8)
    store = ObjectStore("s3://b", backend, StoreSettings(), FastClock())
    assert store.read("k", 0, 4) == bytes(4)
    text = "s3://b: no connection; requests are repeated for up to 30 s (XRANK_STORE_TIMEOUT)"
    assert [record.getMessage() for record in caplog.records] == [text]


def test_a_store_that_never_answered_is_given_up_early():
    clock = FastClock()
    backend = Failing(*[FaultError(FaultKind.PASSING, "no connection")] * 99)
    started = clock.now()
    with pytest.raises(XrankError, match="tried") as failure:
        ObjectStore("s3://b", backend, StoreSettings(), clock).read("k", 0, 4)
    assert clock.now() - started < 60 and "AWS_ENDPOINT_URL" in failure.value.next_step
