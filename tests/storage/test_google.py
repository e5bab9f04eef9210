"""Google Cloud Storage: uploads that appear whole, conditions that are generations, and secrets that appear nowhere."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xrank
from tests.storage.fault_proxy import FaultKind, choose_at, choose_by_seed
from tests.storage.google_servers import GoogleBucket
from tests.storage.servers import open_proxy
from tests.storage.small_google import TOKEN, SmallGoogle
from tests.storage.written import check_kinds_of_outputs, leave_states
from xrank.errors import ContradictionError, IncompleteError, OutputExistsError, UsageError, XrankError
from xrank.storage.client import ABSENT, Store, StoreSettings, open_store
from xrank.storage.google import GoogleBackend
from xrank.storage.uploads import Uploads
from xrank.testing.workspace_contract import MakeWorkspace, WorkspaceContract


@pytest.fixture
def bucket(small_google: SmallGoogle, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleBucket]:
    """An empty bucket; this process's environment leads to it."""
    yield enter(GoogleBucket(small_google.url, "box"), monkeypatch)
    small_google.forget("box")


def enter(bucket: GoogleBucket, monkeypatch: pytest.MonkeyPatch) -> GoogleBucket:
    for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
        monkeypatch.delenv(name)
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket


def test_uploads_parts(bucket: GoogleBucket, small_google: SmallGoogle, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than one request composes twice over, in any order, and more than an answer lists."""
    monkeypatch.setattr(small_google, "page_nkeys", 100)
    small_google.composed.clear()
    pieces = [os.urandom(10 + n % 3) for n in range(32 * 32 + 1)]
    uploads = Uploads(open_store(bucket.url)[0])
    key = "a b/ü+&=?~'()*<.bin"
    upload_id = uploads.create(key, "stage")
    parts = [uploads.put_part(key, upload_id, n + 1, pieces[n]) for n in reversed(range(len(pieces)))][::-1]
    assert uploads.put_part(key, upload_id, 1, pieces[0]) == parts[0]  # as after a lost answer
    listed = uploads.list_parts(key, upload_id)
    assert listed == {part.number: (part.nbytes, part.etag, None) for part in parts}
    assert uploads.head(key) is None and bucket.read_all() == {}
    assert [(one, name) for one, name, _ in uploads.list_uploads("a b/")] == [(key, upload_id)]
    uploads.complete(key, upload_id, parts, "stage")
    assert small_google.composed == [*[32] * 32, 32, 2]
    uploads.complete(key, upload_id, parts, "stage")  # as after a kill
    uploads.abort(key, upload_id)
    assert bucket.read_all() == {key: b"".join(pieces)} and bucket.list_parts() == set()
    assert (uploads.list_parts(key, upload_id), [*uploads.list_uploads("")]) == ({}, [])
    there = uploads.head(key)
    assert there is not None and (there.nbytes, there.mark) == (sum(map(len, pieces)), "stage")
    status = open_store(bucket.url)[0].list_folder("a b").objects[key[4:]]
    assert bytes(open_store(bucket.url)[0].read(key, 7, 9, status)) == b"".join(pieces)[7:16]


def test_never_replaces_an_object(bucket: GoogleBucket) -> None:
    bucket.put("model", b"older")
    uploads = Uploads(open_store(bucket.url)[0])
    upload_id = uploads.create("model", "stage")
    part = uploads.put_part("model", upload_id, 1, b"newer")
    with pytest.raises(OutputExistsError):
        uploads.complete("model", upload_id, [part], "stage")
    with pytest.raises(OutputExistsError):
        uploads.complete("model", upload_id, [part], "stage", if_version='"99"')
    with pytest.raises(OutputExistsError):
        uploads.put_new("model", b"newer", "stage")
    assert bucket.read_all() == {"model": b"older"}
    there = uploads.head("model")
    assert there is not None
    uploads.complete("model", upload_id, [part], "stage", if_version=there.etag)
    assert bucket.read_all() == {"model": b"newer"}
    uploads.put_new("model", b"newest", "other", replaces=True)
    assert bucket.read_all() == {"model": b"newest"}
    other = uploads.create("other", "stage")
    part = uploads.put_part("other", other, 1, b"x")
    uploads.abort("other", other)
    assert bucket.list_parts() == set()
    with pytest.raises(IncompleteError):
        uploads.complete("other", other, [part], "stage")


def test_composes_the_parts_that_were_checked(bucket: GoogleBucket, small_google: SmallGoogle) -> None:
    """A part that another program writes between the list and the request is not taken."""
    uploads = Uploads(open_store(bucket.url)[0])
    upload_id = uploads.create("model", "stage")
    part = uploads.put_part("model", upload_id, 1, b"right")
    with pytest.MonkeyPatch.context() as patch:
        compose = GoogleBackend._compose

        def compose_late(self: Any, key: str, sources: Any, headers: Any) -> None:
            bucket.put(sources[0].key, b"wrong")
            compose(self, key, sources, headers)

        patch.setattr(GoogleBackend, "_compose", compose_late)
        with pytest.raises(IncompleteError):
            uploads.complete("model", upload_id, [part], "stage")
    assert bucket.read_all() == {}


def test_writes_the_version_that_it_read(bucket: GoogleBucket) -> None:
    bucket.put("journal", b"1")
    store = open_store(bucket.url)[0]
    old = store.head("journal").version
    new = store.put("journal", b"2", old)
    with pytest.raises(ContradictionError):
        store.put("journal", b"3", old)
    store.put("journal", b"4", new)
    with pytest.raises(OutputExistsError):
        store.put("journal", b"5", ABSENT)
    assert bucket.read_all() == {"journal": b"4"}


@pytest.mark.parametrize("fault", ["reset", "lost", "short", "wrong", "throttled", "broken"])
def test_gets_over_faults(bucket: GoogleBucket, monkeypatch: pytest.MonkeyPatch, fault: FaultKind) -> None:
    with open_proxy(bucket.server, choose_at(dict.fromkeys((1, 4, 6), fault))) as proxy:
        enter(bucket.behind(proxy), monkeypatch)
        uploads = Uploads(open_store(bucket.url)[0])
        upload_id = uploads.create("model", "stage")
        parts = [uploads.put_part("model", upload_id, 1, b"some bytes")]
        uploads.complete("model", upload_id, parts, "stage")
        uploads.put_new("small", b"more bytes", "stage")
    assert bucket.read_all() == {"model": b"some bytes", "small": b"more bytes"}
    assert bucket.list_parts() == set()
    assert sum(one.fault is not None for one in proxy.requests) > 1


def test_refuses_without_permission(bucket: GoogleBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_google(bucket, allow_http=False)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    with pytest.raises(UsageError, match="what the environment says") as caught:
        Uploads(store)
    assert caught.value.got == "FileNotFoundError"
    (tmp_path / "key.json").write_text(json.dumps({"gcs_base_url": bucket.server}))
    monkeypatch.delenv("GOOGLE_BASE_URL")
    with pytest.raises(UsageError, match="plain http"):
        Uploads(store)
    enter(bucket, monkeypatch)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "another")
    monkeypatch.setenv("XRANK_STORE_TIMEOUT", "3")
    with pytest.raises(UsageError, match="may not be") as refused:
        Uploads(open_store(bucket.url)[0]).head("model")
    assert "another" not in str(refused.value.to_dict())
    monkeypatch.delenv("XRANK_ALLOW_HTTP")
    with pytest.raises(UsageError, match="plain http"):
        open_store(bucket.url)


def open_google(bucket: GoogleBucket, *, allow_http: bool) -> Store:
    settings = StoreSettings(allow_http=allow_http, timeout_seconds=3)
    return Store(bucket.url, GoogleBackend(bucket.client(), bucket.url, settings), settings)


def test_takes_tokens_of_google_auth(bucket: GoogleBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    import google.auth
    from google.oauth2 import service_account
    from google.oauth2.credentials import Credentials

    class Failing(Credentials):
        def refresh(self, request: object) -> None:
            raise google.auth.exceptions.RefreshError("with a secret")

    def default(scopes: list[str]) -> tuple[Credentials, str]:
        assert scopes == ["https://www.googleapis.com/auth/devstorage.read_write"]
        return Credentials(TOKEN), "project"

    store = open_google(bucket, allow_http=True)
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    monkeypatch.setattr(google.auth, "default", default)
    Uploads(store).put_new("model", b"x", "stage")
    assert bucket.read_all() == {"model": b"x"}
    store = open_google(bucket, allow_http=True)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({"client_email": "me"}))
    with pytest.raises(UsageError, match="what the environment says"):
        Uploads(store)
    monkeypatch.setattr(service_account.Credentials, "from_service_account_info", lambda *_, **__: Failing(None))
    with pytest.raises(UsageError) as refused:
        Uploads(store).head("model")
    assert refused.value.got == "google-auth: RefreshError" and "secret" not in str(refused.value.to_dict())


def test_no_secret_is_written(
    bucket: GoogleBucket,
    small_google: SmallGoogle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither in a report, an error, an object nor a log."""
    monkeypatch.setenv("XRANK_STORE_TIMEOUT", "3")
    states = leave_states(tmp_path / "states", rows=26)
    caplog.set_level(logging.DEBUG)
    seen = []
    for rate in (0.0, 0.1):
        with open_proxy(bucket.server, choose_by_seed(1, rate)) as proxy:
            proxy.stall_seconds = 1
            monkeypatch.setenv("GOOGLE_BASE_URL", proxy.url)
            try:
                report = xrank.gather_checkpoint(states, f"{bucket.url}/{rate}", max_shard_size="200KB")
                seen.append(str(report.to_dict()))
            except XrankError as error:
                seen.append(repr(error.__dict__) + str(error))
            assert any("compose" in one.path for one in proxy.requests)
    printed = capfd.readouterr()
    text = "".join(seen) + "".join(map(repr, small_google.read_all(bucket.name).items()))
    text += caplog.text + "".join(str(record.__dict__) for record in caplog.records) + printed.out + printed.err
    assert TOKEN not in text and "marked" not in text


def test_writes_what_s3_takes_too(bucket: GoogleBucket, small_google: SmallGoogle, tmp_path: Path) -> None:
    check_kinds_of_outputs(bucket, tmp_path)
    assert small_google.list_parts("box") == set()


class TestStates(WorkspaceContract):
    @pytest.fixture
    def make_workspace(self, bucket: GoogleBucket) -> MakeWorkspace:
        def make(rank: int = 0, world_size: int = 1, run_id: str | None = "run") -> xrank.ObjectWorkspace:
            return xrank.ObjectWorkspace(f"{bucket.url}/states", rank=rank, world_size=world_size, run_id=run_id)

        return make

    @pytest.fixture
    def uninitialized(self) -> xrank.ObjectWorkspace:
        return xrank.ObjectWorkspace()
