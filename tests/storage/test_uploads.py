"""Uploads in parts: parts confirmed by checksums, objects that appear once and whole."""

from __future__ import annotations

import os
import threading

import pytest

from tests.storage.fault_proxy import FaultKind, choose_at
from tests.storage.servers import SECRET, Bucket, make_bucket, open_proxy
from xrank.errors import OutputExistsError, UsageError, XrankError
from xrank.storage.places import open_store
from xrank.storage.uploads import PartPool, UploadedPart, Uploads, part_nbytes_for

MIB = 1 << 20


def open_bucket(bucket: Bucket) -> Uploads:
    return Uploads(open_store(bucket.url)[0])


def test_refuses_plain_http(small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XRANK_ALLOW_HTTP")
    open_bucket(small_bucket)  # AWS_ALLOW_HTTP is there, too
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(UsageError, match="plain http"):
        open_bucket(small_bucket)


def test_refuses_to_write_without_credentials(small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UsageError, match="settings in the environment"):
        open_bucket(small_bucket)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with pytest.raises(UsageError, match="settings in the environment"):
        open_bucket(small_bucket)


def test_uploads_parts(bucket: Bucket) -> None:
    uploads, data = open_bucket(bucket), os.urandom(5 * MIB + 100)
    upload_id = uploads.create("a b/model", "stage")
    parts = [uploads.put_part("a b/model", upload_id, n + 1, data[n * 5 * MIB :][: 5 * MIB]) for n in (1, 0)]
    listed = uploads.list_parts("a b/model", upload_id)
    assert listed is not None
    assert {n: row[:2] for n, row in listed.items()} == {part.number: (part.nbytes, part.etag) for part in parts}
    assert uploads.head("a b/model") is None
    assert [(key, one) for key, one, _ in uploads.list_uploads("a b/")] == [("a b/model", upload_id)]
    uploads.complete("a b/model", upload_id, parts[::-1], "stage")
    uploads.complete("a b/model", upload_id, parts[::-1], "stage")  # as after a lost answer
    assert bucket.read_all() == {"a b/model": data}
    assert uploads.list_parts("a b/model", upload_id) is None
    there = uploads.head("a b/model")
    assert there is not None
    assert (there.nbytes, there.mark) == (len(data), "stage")


def test_never_replaces_an_object(bucket: Bucket) -> None:
    uploads = open_bucket(bucket)
    bucket.client().put_object(Bucket=bucket.name, Key="model", Body=b"older")
    upload_id = uploads.create("model", "stage")
    part = uploads.put_part("model", upload_id, 1, b"newer")
    with pytest.raises(OutputExistsError, match="model"):
        uploads.complete("model", upload_id, [part], "stage")
    with pytest.raises(OutputExistsError, match="model"):
        uploads.put_new("model", b"newer", "stage")
    uploads.abort("model", upload_id)
    uploads.abort("model", upload_id)
    assert bucket.read_all() == {"model": b"older"}
    assert bucket.list_uploads() == []


@pytest.mark.parametrize("fault", ["reset", "lost", "short", "wrong", "throttled", "broken"])
def test_gets_over_faults(small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, fault: FaultKind) -> None:
    with open_proxy(small_bucket.server, choose_at(dict.fromkeys((1, 3, 5, 7), fault))) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        uploads = open_bucket(small_bucket)
        upload_id = uploads.create("model", "stage")
        part = uploads.put_part("model", upload_id, 1, b"some bytes")
        uploads.complete("model", upload_id, [part], "stage")
        uploads.put_new("small", b"more bytes", "stage")
    assert small_bucket.read_all() == {"model": b"some bytes", "small": b"more bytes"}
    assert sum(one.fault is not None for one in proxy.requests) > 1


def test_detects_wrong_bytes_by_the_etag(moto_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto accepts any checksum and confirms none: the MD5 in the etag must agree."""
    bucket = make_bucket(moto_server)
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    with open_proxy(bucket.server, choose_at({2: "wrong"})) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        uploads = open_bucket(bucket)
        upload_id = uploads.create("model", "stage")
        part = uploads.put_part("model", upload_id, 1, b"some bytes")
        uploads.complete("model", upload_id, [part], "stage")
    assert bucket.read_all() == {"model": b"some bytes"}
    assert [one.method for one in proxy.requests] == ["POST", "PUT", "PUT", "POST"]


def test_names_the_object_and_no_secret(small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XRANK_STORE_TIMEOUT", "1")
    with open_proxy(small_bucket.server, lambda *_: "broken") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(XrankError, match=f"{small_bucket.url}/model could not be written, tried") as caught:
            open_bucket(small_bucket).put_new("model", b"data", "stage")
    assert SECRET not in repr(caught.value.__dict__) + str(caught.value)


def test_parts_suffice() -> None:
    for nbytes in (1, 5 * MIB, 5 * MIB * 10_000, 5 * MIB * 10_000 + 1, 5 << 40):
        size = part_nbytes_for(nbytes)
        assert size % MIB == 0
        assert size >= 5 * MIB
        assert -(-nbytes // size) <= 10_000


@pytest.mark.parametrize(("room_nbytes", "num_sent"), [(0, 3), (40 * MIB, 7), (160 * MIB, 16), (64 << 30, 16)])
def test_more_memory_sends_more_parts_at_once(room_nbytes: int, num_sent: int) -> None:
    pool, started, end = PartPool(room_nbytes), threading.Semaphore(0), threading.Event()

    def send() -> UploadedPart:
        started.release()
        assert end.wait(30)
        return UploadedPart(1, 1, "", 0)

    sent = [pool.send(pool.take(MIB), send) for _ in range(num_sent + 1)]
    for _ in range(num_sent):
        assert started.acquire(timeout=30)
    assert not started.acquire(blocking=False)
    assert pool.nbytes >= (num_sent + 1) * 5 * MIB
    end.set()
    assert all(one.result(30).number == 1 for one in sent)
    pool.close()
