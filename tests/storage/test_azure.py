"""Azure's blob storage: requests that it authorises, uploads that appear whole, and secrets that appear nowhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import xrank
from tests.storage.azure_servers import KEY, Container, make_container
from tests.storage.fault_proxy import FaultKind, choose_at, choose_by_seed
from tests.storage.servers import open_proxy
from tests.storage.small_azure import ACCOUNT, SmallAzure
from tests.storage.written import check_kinds_of_outputs, leave_states
from xrank.errors import OutputExistsError, UsageError, XrankError
from xrank.storage.client import open_store
from xrank.storage.uploads import Uploads
from xrank.testing.workspace_contract import MakeWorkspace, WorkspaceContract

MIB = 1 << 20
SAS = "sv=2023-11-03&ss=b&srt=sco&sp=rwdlac&se=2036-01-01&sig=marked%2Bsignature%3D"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        metafunc.parametrize("server", ("az", "azurite") if metafunc.config.getoption("soak") else ("az",))


@pytest.fixture
def container(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Container:
    address = request.getfixturevalue("azurite_server") if server == "azurite" else None
    address = address or request.getfixturevalue("small_azure").url
    return enter(make_container(address, f"box{abs(hash(tmp_path)):x}"), monkeypatch)


@pytest.fixture
def small_container(small_azure: SmallAzure, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    yield enter(make_container(small_azure.url, "small"), monkeypatch)
    small_azure.forget("small")


def enter(container: Container, monkeypatch: pytest.MonkeyPatch) -> Container:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    for name, value in container.environment().items():
        monkeypatch.setenv(name, value)
    return container


def test_uploads_parts(container: Container) -> None:
    data = os.urandom(5 * MIB + 100)
    uploads = Uploads(open_store(container.url)[0])
    key = "a b/ü+&=?~'()*.bin"
    upload_id = uploads.create(key, "stage")
    parts = [uploads.put_part(key, upload_id, n + 1, data[n * 5 * MIB :][: 5 * MIB]) for n in (1, 0)][::-1]
    listed = uploads.list_parts(key, upload_id)
    assert listed == {part.number: (part.nbytes, part.etag, None) for part in parts}
    assert uploads.head(key) is None and container.read_all() == {}
    assert [(one, name) for one, name, _ in uploads.list_uploads("a b/")] == [(key, upload_id)]
    uploads.complete(key, upload_id, parts, "stage")
    uploads.complete(key, upload_id, parts, "stage")  # as after a lost answer
    uploads.abort(key, upload_id)
    assert container.read_all() == {key: data}
    assert (uploads.list_parts(key, upload_id), [*uploads.list_uploads("")]) == (None, [])
    there = uploads.head(key)
    assert there is not None and (there.nbytes, there.mark) == (len(data), "stage")
    status = open_store(container.url)[0].list_folder("a b").objects[key[4:]]
    assert bytes(open_store(container.url)[0].read(key, 7, 9, status)) == data[7:16]


def test_never_replaces_a_blob(container: Container) -> None:
    container.put("model", b"older")
    uploads = Uploads(open_store(container.url)[0])
    upload_id = uploads.create("model", "stage")
    part = uploads.put_part("model", upload_id, 1, b"newer")
    with pytest.raises(OutputExistsError):
        uploads.complete("model", upload_id, [part], "stage")
    with pytest.raises(OutputExistsError):
        uploads.complete("model", upload_id, [part], "stage", if_version='"0x99"')
    with pytest.raises(OutputExistsError):
        uploads.put_new("model", b"newer", "stage")
    uploads.abort("model", upload_id)
    assert container.read_all() == {"model": b"older"}
    there = uploads.head("model")
    assert there is not None
    uploads.complete("model", upload_id, [part], "stage", if_version=there.etag)
    assert container.read_all() == {"model": b"newer"}
    other = uploads.create("other", "stage")
    uploads.put_part("other", other, 1, b"x")
    uploads.abort("other", other)
    assert container.list_parts() == set()


@pytest.mark.parametrize("fault", ["reset", "lost", "short", "wrong", "throttled", "broken"])
def test_gets_over_faults(container: Container, monkeypatch: pytest.MonkeyPatch, fault: FaultKind) -> None:
    with open_proxy(container.server, choose_at(dict.fromkeys((1, 3, 5), fault))) as proxy:
        enter(container.behind(proxy), monkeypatch)
        uploads = Uploads(open_store(container.url)[0])
        upload_id = uploads.create("model", "stage")
        parts = [uploads.put_part("model", upload_id, 1, b"some bytes")]
        uploads.complete("model", upload_id, parts, "stage")
        uploads.put_new("small", b"more bytes", "stage")
    assert container.read_all() == {"model": b"some bytes", "small": b"more bytes"}
    assert sum(one.fault is not None for one in proxy.requests) > 1


def test_refuses_without_permission(small_container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XRANK_ALLOW_HTTP")
    with pytest.raises(UsageError, match="plain http"):
        open_store(small_container.url)
    with monkeypatch.context() as patch:
        patch.delenv("AZURE_STORAGE_ENDPOINT")
        patch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")  # object_store itself would allow this one plain http
        with pytest.raises(UsageError, match="plain http"):
            open_store(small_container.url)
    monkeypatch.setenv("XRANK_ALLOW_HTTP", "1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64")
    with pytest.raises(UsageError, match="what the environment says"):
        open_store(small_container.url)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(UsageError, match="what the environment says"):
        Uploads(open_store(small_container.url)[0])
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(UsageError, match="what the environment says"):
        Uploads(open_store(small_container.url)[0])


def test_takes_tokens_by_https_only(small_container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    class Credential:
        def get_token(self, *scopes: str) -> None:
            raise AssertionError(scopes)

    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    identity = ModuleType("azure.identity")
    monkeypatch.setattr(identity, "DefaultAzureCredential", Credential, raising=False)
    monkeypatch.setitem(sys.modules, "azure.identity", identity)
    with pytest.raises(UsageError, match="what the environment says") as refused:
        Uploads(open_store(small_container.url)[0])
    assert refused.value.got == "a token"
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://host.invalid")
    Uploads(open_store(small_container.url)[0])


@pytest.mark.parametrize("kind", ["key", "sas"])
def test_no_secret_is_written(
    small_container: Container,
    small_azure: SmallAzure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """Neither in a report, an error, a blob nor a log: the key, a shared access signature, a token."""
    monkeypatch.setenv("XRANK_STORE_TIMEOUT", "3")
    if kind == "sas":
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", SAS)
    states = leave_states(tmp_path / "states", rows=26)
    caplog.set_level(logging.DEBUG)
    seen = []
    for rate in (0.0, 0.1):
        with open_proxy(small_container.server, choose_by_seed(1, rate)) as proxy:
            proxy.stall_seconds = 1
            monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.url}/{ACCOUNT}")
            try:
                report = xrank.gather_checkpoint(states, f"{small_container.url}/{rate}", max_shard_size="200KB")
                seen.append(str(report.to_dict()))
            except XrankError as error:
                seen.append(repr(error.__dict__) + str(error))
            sent = [one for one in proxy.requests if "comp=block" in one.path]
            assert sent and all(("sig=" in one.path) == (kind == "sas") for one in sent)
    printed = capfd.readouterr()
    text = "".join(seen) + "".join(map(repr, small_azure.read_all(small_container.name).items()))
    text += caplog.text + "".join(str(record.__dict__) for record in caplog.records) + printed.out + printed.err
    for secret in (KEY, KEY[:20], SAS, "marked", "sig="):
        assert secret not in text


def test_writes_what_s3_takes_too(small_container: Container, small_azure: SmallAzure, tmp_path: Path) -> None:
    check_kinds_of_outputs(small_container, tmp_path)
    assert small_azure.list_blocks("small") == {}


class TestStates(WorkspaceContract):
    @pytest.fixture
    def make_workspace(self, small_container: Container) -> MakeWorkspace:
        def make(rank: int = 0, world_size: int = 1, run_id: str | None = "run") -> xrank.ObjectWorkspace:
            url = f"{small_container.url}/states"
            return xrank.ObjectWorkspace(url, rank=rank, world_size=world_size, run_id=run_id)

        return make

    @pytest.fixture
    def uninitialized(self) -> xrank.ObjectWorkspace:
        return xrank.ObjectWorkspace()
