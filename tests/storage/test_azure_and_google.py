"""Azure's and Google's stores: uploads appear whole and replace nothing unasked; secrets appear nowhere."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import xrank
from tests.storage.fault_proxy import FaultKind, choose_at, choose_by_seed
from tests.storage.servers import KEY, Container, GoogleBucket, Place, make_container, open_proxy
from tests.storage.small_azure import SmallAzure
from tests.storage.small_google import TOKEN, SmallGoogle
from tests.storage.written import check_kinds_of_outputs, leave_states
from xrank.errors import ContradictionError, IncompleteError, OutputExistsError, UsageError, XrankError
from xrank.storage.client import ABSENT, ObjectStore, StoreSettings
from xrank.storage.google import GoogleBackend
from xrank.storage.places import open_store
from xrank.storage.uploads import Uploads
from xrank.testing.workspace_contract import MakeWorkspace, WorkspaceContract

MIB = 1 << 20
SAS = "sv=2023-11-03&ss=b&srt=sco&sp=rwdlac&se=2036-01-01&sig=marked%2Bsignature%3D"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", ("az", "gs", "azurite") if metafunc.config.getoption("soak") else ("az", "gs"))


@pytest.fixture
def container(small_azure: SmallAzure, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    """An empty container on the small server; this process's environment leads to it."""
    yield make_container(small_azure.url, "small").enter(monkeypatch)
    small_azure.forget("small")


@pytest.fixture
def bucket(small_google: SmallGoogle, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleBucket]:
    """An empty bucket; this process's environment leads to it."""
    yield GoogleBucket(small_google.url, "box").enter(monkeypatch)
    small_google.forget("box")


@pytest.fixture
def place(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A container or a bucket."""
    if kind == "azurite":
        made = make_container(request.getfixturevalue("azurite_server"), f"box{abs(hash(tmp_path)):x}")
        return made.enter(monkeypatch)
    found: Place = request.getfixturevalue({"az": "container", "gs": "bucket"}[kind])
    return found


def make_uploads(place: Place) -> Uploads:
    return Uploads(open_store(place.url)[0])


# ---- both


def test_uploads_parts(place: Place) -> None:
    data = os.urandom(5 * MIB + 100)
    uploads, key = make_uploads(place), "a b/ü+&=?~'()*<.bin"
    upload_id = uploads.create(key, "stage")
    parts = [uploads.put_part(key, upload_id, n + 1, data[n * 5 * MIB :][: 5 * MIB]) for n in (1, 0)][::-1]
    assert uploads.put_part(key, upload_id, 1, data[: 5 * MIB]) == parts[0]  # as after a lost answer
    listed = uploads.list_parts(key, upload_id)
    assert listed == {part.number: (part.nbytes, part.etag, None) for part in parts}
    assert uploads.head(key) is None and place.read_all() == {}
    assert [(one, name) for one, name, _ in uploads.list_uploads("a b/")] == [(key, upload_id)]
    uploads.complete(key, upload_id, parts, "stage")
    uploads.complete(key, upload_id, parts, "stage")  # as after a lost answer, or a kill
    uploads.abort(key, upload_id)
    assert place.read_all() == {key: data} and place.list_parts() == set()
    assert not uploads.list_parts(key, upload_id) and not uploads.list_uploads("")
    there = uploads.head(key)
    assert there is not None and (there.nbytes, there.mark) == (len(data), "stage")
    status = open_store(place.url)[0].list_folder("a b").objects[key[4:]]
    assert bytes(open_store(place.url)[0].read(key, 7, 9, status)) == data[7:16]


def test_never_replaces_an_object_unasked(place: Place) -> None:
    place.put("model", b"older")
    uploads = make_uploads(place)
    upload_id = uploads.create("model", "stage")
    part = uploads.put_part("model", upload_id, 1, b"newer")
    with pytest.raises(OutputExistsError):
        uploads.complete("model", upload_id, [part], "stage")
    with pytest.raises(OutputExistsError):
        uploads.complete("model", upload_id, [part], "stage", condition='"0x99"')
    with pytest.raises(OutputExistsError):
        uploads.put_new("model", b"newer", "stage")
    assert place.read_all() == {"model": b"older"}
    there = uploads.head("model")
    assert there is not None
    uploads.complete("model", upload_id, [part], "stage", condition=there.etag)
    assert place.read_all() == {"model": b"newer"}
    uploads.put_new("model", b"newest", "other", condition=None)
    assert place.read_all() == {"model": b"newest"}
    other = uploads.create("other", "stage")
    part = uploads.put_part("other", other, 1, b"x")
    uploads.abort("other", other)
    assert place.list_parts() == set()
    with pytest.raises(IncompleteError):
        uploads.complete("other", other, [part], "stage")


def test_writes_the_version_that_it_read(place: Place) -> None:
    place.put("journal", b"1")
    store = open_store(place.url)[0]
    Uploads(store)
    old = store.head("journal").version
    new = store.put("journal", b"2", old)
    with pytest.raises(ContradictionError):
        store.put("journal", b"3", old)
    store.put("journal", b"4", new)
    with pytest.raises(OutputExistsError):
        store.put("journal", b"5", ABSENT)
    assert place.read_all() == {"journal": b"4"}


@pytest.mark.parametrize("fault", ["reset", "lost", "short", "wrong", "throttled", "broken"])
def test_gets_over_faults(place: Place, monkeypatch: pytest.MonkeyPatch, fault: FaultKind) -> None:
    numbers = (1, 4, 6) if isinstance(place, GoogleBucket) else (1, 3, 5)
    with open_proxy(place.server, choose_at(dict.fromkeys(numbers, fault))) as proxy:
        uploads = make_uploads(place.behind(proxy).enter(monkeypatch))
        upload_id = uploads.create("model", "stage")
        parts = [uploads.put_part("model", upload_id, 1, b"some bytes")]
        uploads.complete("model", upload_id, parts, "stage")
        uploads.put_new("small", b"more bytes", "stage")
    assert place.read_all() == {"model": b"some bytes", "small": b"more bytes"}
    assert place.list_parts() == set()
    assert sum(one.fault is not None for one in proxy.requests) > 1


@pytest.mark.parametrize(("fixture", "credential"), [("container", "key"), ("container", "sas"), ("bucket", "token")])
def test_no_secret_is_written(
    fixture: str,
    credential: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither in a report, an error, an object nor a log: the key, a shared access signature, a token."""
    place: Place = request.getfixturevalue(fixture)
    if credential == "sas":
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", SAS)
    monkeypatch.setenv("XRANK_STORE_TIMEOUT", "3")
    states = leave_states(tmp_path / "states", rows=26)
    caplog.set_level(logging.DEBUG)
    seen = []
    for rate in (0.0, 0.1):
        with open_proxy(place.server, choose_by_seed(1, rate)) as proxy:
            proxy.stall_seconds = 1
            for name in ("AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL"):
                if name in os.environ:
                    monkeypatch.setenv(name, place.behind(proxy).environment()[name])
            try:
                report = xrank.gather_checkpoint(states, f"{place.url}/{rate}", max_shard_size="200KB")
                seen.append(str(report.to_dict()))
            except XrankError as error:
                seen.append(repr(error.__dict__) + str(error))
            sent = [one for one in proxy.requests if "comp=block" in one.path or "compose" in one.path]
            assert sent and all(("sig=" in one.path) == (credential == "sas") for one in sent)
    printed = capfd.readouterr()
    text = "".join(seen) + "".join(map(repr, place.read_all().items()))
    text += caplog.text + "".join(str(record.__dict__) for record in caplog.records) + printed.out + printed.err
    for secret in (KEY, KEY[:20], SAS, TOKEN, "marked", "sig="):
        assert secret not in text


def test_writes_what_s3_takes_too(place: Place, tmp_path: Path) -> None:
    check_kinds_of_outputs(place, tmp_path)
    assert place.list_parts() == set()


class TestStates(WorkspaceContract):
    @pytest.fixture(params=["container", "bucket"])
    def make_workspace(self, request: pytest.FixtureRequest) -> MakeWorkspace:
        place: Place = request.getfixturevalue(request.param)

        def make(rank: int = 0, world_size: int = 1, run_id: str | None = "run") -> xrank.ObjectWorkspace:
            return xrank.ObjectWorkspace(f"{place.url}/states", rank=rank, world_size=world_size, run_id=run_id)

        return make

    @pytest.fixture
    def uninitialized(self) -> xrank.ObjectWorkspace:
        return xrank.ObjectWorkspace()


# ---- Azure


def test_azure_refuses_without_permission(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XRANK_ALLOW_HTTP")
    with pytest.raises(UsageError, match="plain http"):
        open_store(container.url)
    with monkeypatch.context() as patch:
        patch.delenv("AZURE_STORAGE_ENDPOINT")
        patch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")  # object_store itself would allow this one plain http
        with pytest.raises(UsageError, match="plain http"):
            open_store(container.url)
    monkeypatch.setenv("XRANK_ALLOW_HTTP", "1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64")
    with pytest.raises(UsageError, match="settings in the environment"):
        open_store(container.url)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(UsageError, match="settings in the environment"):
        make_uploads(container)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(UsageError, match="settings in the environment"):
        make_uploads(container)


def test_takes_tokens_by_https_only(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    class Credential:
        def get_token(self, *scopes: str) -> None:
            raise AssertionError(scopes)

    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    identity = ModuleType("azure.identity")
    monkeypatch.setattr(identity, "DefaultAzureCredential", Credential, raising=False)
    monkeypatch.setitem(sys.modules, "azure.identity", identity)
    with pytest.raises(UsageError, match="settings in the environment") as refused:
        make_uploads(container)
    assert refused.value.got == "a token"
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://host.invalid")
    make_uploads(container)


# ---- Google


def test_joins_more_parts_than_one_request_composes(
    bucket: GoogleBucket, small_google: SmallGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice over, in any order, and more than an answer lists."""
    monkeypatch.setattr(small_google, "page_nkeys", 100)
    small_google.composed.clear()
    pieces = [os.urandom(10 + n % 3) for n in range(32 * 32 + 1)]
    uploads = make_uploads(bucket)
    upload_id = uploads.create("model", "stage")
    parts = [uploads.put_part("model", upload_id, n + 1, pieces[n]) for n in reversed(range(len(pieces)))][::-1]
    uploads.complete("model", upload_id, parts, "stage")
    assert small_google.composed == [*[32] * 32, 32, 2]
    assert bucket.read_all() == {"model": b"".join(pieces)} and bucket.list_parts() == set()


def test_composes_the_parts_that_were_checked(bucket: GoogleBucket, small_google: SmallGoogle) -> None:
    """A part that another program writes between the list and the request is not taken."""
    uploads = make_uploads(bucket)
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


def test_google_refuses_without_permission(
    bucket: GoogleBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_google(bucket, allow_http=False)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    with pytest.raises(UsageError, match="settings in the environment") as caught:
        Uploads(store)
    assert caught.value.got == "FileNotFoundError"
    (tmp_path / "key.json").write_text(json.dumps({"gcs_base_url": bucket.server}))
    monkeypatch.delenv("GOOGLE_BASE_URL")
    with pytest.raises(UsageError, match="plain http"):
        Uploads(store)
    bucket.enter(monkeypatch)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "another")
    monkeypatch.setenv("XRANK_STORE_TIMEOUT", "3")
    with pytest.raises(UsageError, match="may not be") as refused:
        make_uploads(bucket).head("model")
    assert "another" not in str(refused.value.to_dict())
    monkeypatch.delenv("XRANK_ALLOW_HTTP")
    with pytest.raises(UsageError, match="plain http"):
        open_store(bucket.url)


def open_google(bucket: GoogleBucket, *, allow_http: bool) -> ObjectStore:
    settings = StoreSettings(allow_http=allow_http, timeout_seconds=3)
    return ObjectStore(bucket.url, GoogleBackend(bucket.client(), bucket.url, settings), settings)


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
    with pytest.raises(UsageError, match="settings in the environment"):
        Uploads(store)
    monkeypatch.setattr(service_account.Credentials, "from_service_account_info", lambda *_, **__: Failing(None))
    with pytest.raises(UsageError) as refused:
        Uploads(store).head("model")
    assert refused.value.got == "google-auth: RefreshError" and "secret" not in str(refused.value.to_dict())
