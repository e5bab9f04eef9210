"""Gathers to a store: the files of a folder, appearing with the index last, never over another's."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load

import xrank
from tests.sampled import sampled
from tests.storage.fault_proxy import choose_by_seed
from tests.storage.servers import KEY_ID, SECRET, Bucket, open_proxy
from tests.storage.small_s3 import SmallS3
from tests.storage.written import FILE_NBYTES, leave_states, read_folder, read_model, start
from xrank.errors import OutputExistsError, UsageError, XrankError
from xrank.storage import bucket_stage
from xrank.storage.bucket_stage import BucketJournal, BucketPlace, make_owned, put_journal, read_journal
from xrank.storage.commit import seal, unseal
from xrank.storage.places import open_store
from xrank.storage.uploads import Uploads


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_states(tmp_path_factory.mktemp("writing") / "states")


@pytest.fixture(scope="module")
def expected(states: Path) -> dict[str, bytes]:
    gather(states, states.parent / "model")
    return read_folder(states.parent / "model")


def gather(source: Path, out: str | Path, **options: Any) -> Any:
    return xrank.gather_checkpoint(source, out, **{"max_shard_size": FILE_NBYTES, **options})


def placed(prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{prefix}/{name}": data for name, data in files.items()}


def test_writes_the_files_of_a_folder(states: Path, expected: dict[str, bytes], bucket: Bucket) -> None:
    report = gather(states, f"{bucket.url}/models/one")
    assert bucket.read_all() == placed("models/one", expected)
    assert bucket.list_uploads() == []
    assert report.to_dict()["output"]["path"] == f"{bucket.url}/models/one"
    again = gather(states, f"{bucket.url}/models/one")
    assert "made-before" in dict(again.notes)
    with pytest.raises(OutputExistsError, match="exists already"):
        gather(states, f"{bucket.url}/models/one", max_shard_size="1GB")
    assert bucket.read_all() == placed("models/one", expected)


def test_index_comes_last(states: Path, small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_proxy(small_bucket.server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        gather(states, f"{small_bucket.url}/one")
        gather(states, f"{small_bucket.url}/two", max_shard_size="1GB")
    named = [request.path for request in proxy.requests if request.method in ("PUT", "POST")]
    visible = [path for path in named if ".xrank" not in path and "partNumber" not in path and "?uploads" not in path]
    names = [path.partition("?")[0].rpartition("/")[2] for path in visible if "?delete" not in path]
    assert names[3:] == [
        *("config.json", "xrank_manifest.json", "model.safetensors.index.json"),
        *("model.safetensors", "xrank_manifest.json", "config.json"),
    ]


def test_exports_a_live_model(small_bucket: Bucket) -> None:
    model = torch.nn.Linear(1500, 1000)
    xrank.export_model(model, f"{small_bucket.url}/one")
    doubled = {"transform": lambda name, tensor: {f"{name}.twice": tensor * 2}}
    xrank.export_model(model, f"{small_bucket.url}/two", **doubled)
    files = small_bucket.read_all()
    one, two = load(files["one/model.safetensors"]), load(files["two/model.safetensors"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(one[name], tensor)
        assert torch.equal(two[f"{name}.twice"], tensor * 2)


def test_plans_without_writing(states: Path, small_bucket: Bucket) -> None:
    report = gather(states, f"{small_bucket.url}/one", dry_run=True)
    assert report.plan["num_tensors"] == 3
    assert small_bucket.read_all() == {}


@pytest.mark.parametrize("out", ["", "/"])
def test_refuses_a_whole_bucket(states: Path, small_bucket: Bucket, out: str) -> None:
    with pytest.raises(UsageError, match="whole bucket"):
        gather(states, small_bucket.url + out)


def test_refuses_what_a_store_cannot(
    states: Path, small_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="https:// stores"):
        gather(states, "https://host/one")
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="replaces any existing object"):
        patch.setenv("AWS_ENDPOINT_URL_S3", "https://storage.googleapis.com")
        Uploads(open_store(small_bucket.url)[0])
    layout = tmp_path / "layout.toml"
    layout.write_text('[mesh]\ntp = 2\n[layout]\n"*" = "-, -"\n')
    with pytest.raises(UsageError, match="states of ranks"):
        xrank.reshard_checkpoint(states, layout, f"{small_bucket.url}/one", overwrite=True)
    assert small_bucket.read_all() == {}


def leave_journal(bucket: Bucket, content: BucketJournal) -> BucketPlace:
    place = BucketPlace.from_url(f"{bucket.url}/one")
    put_journal(place, content, None)
    return place


def test_leaves_a_running_gather_alone(states: Path, small_bucket: Bucket) -> None:
    with start(small_bucket, "--help") as other:
        os.kill(other.pid, signal.SIGSTOP)
        try:
            leave_journal(small_bucket, replace(make_owned(BucketJournal("s", "plan")), pid=other.pid))
            with pytest.raises(OutputExistsError, match=rf"is running .host .*, pid {other.pid}"):
                gather(states, f"{small_bucket.url}/one")
            assert xrank.clean(f"{small_bucket.url}/one").details["num_removed"] == 0
        finally:
            os.kill(other.pid, signal.SIGCONT)
            other.communicate()
    assert list(small_bucket.read_all()) == [".one.xrank/journal.json"]


@pytest.mark.parametrize("beats", [False, True])
def test_watches_an_owner_on_another_host(
    states: Path, expected: dict[str, bytes], small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    monkeypatch.setattr(bucket_stage, "_SILENT_SECONDS", 1.2)
    content = BucketJournal("s", "plan", "elsewhere", 1)
    place = leave_journal(small_bucket, content)
    if beats:
        monkeypatch.setattr(bucket_stage, "_BEAT_SECONDS", 0.5)
        found = read_journal(place)
        assert found is not None
        other = bucket_stage.OpenJournal(place, content, found[1])
        with pytest.raises(OutputExistsError, match=r"is running .host elsewhere"):
            gather(states, f"{small_bucket.url}/one")
        other.release()
    gather(states, f"{small_bucket.url}/one")
    assert small_bucket.read_all() == placed("one", expected)


def test_stops_after_another_took_over(states: Path, small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    place = BucketPlace.from_url(f"{small_bucket.url}/one")

    def take_over(done: int, total: int) -> None:
        found = read_journal(place)
        assert found is not None and found[0] is not None
        if done == total and found[0].host != "elsewhere":
            put_journal(place, replace(found[0], host="elsewhere", pid=1), found[1])

    with pytest.raises(OutputExistsError, match="took over"):
        gather(states, f"{small_bucket.url}/one", progress=take_over)
    assert read_model(small_bucket.read_all(), "one") is None


def test_another_plan_starts_over(states: Path, small_bucket: Bucket) -> None:
    with pytest.raises(ZeroDivisionError):
        gather(states, f"{small_bucket.url}/one", progress=lambda done, total: 1 // (total // 2 > done))
    assert small_bucket.list_uploads()
    report = gather(states, f"{small_bucket.url}/one", max_shard_size="1GB")
    assert "had a different plan" in dict(report.notes)["stage"]
    assert small_bucket.list_uploads() == []
    assert "one/model.safetensors" in small_bucket.read_all()


@pytest.mark.parametrize(
    "change",
    sampled(
        [
            {"digest": "xxh3:" + "1" * 32},
            {"digest": 3},
            {"tensors": []},
            {"tensors": "zz"},
            {"tensors": ["2" * 32]},
            {"parts": [{"number": 1}]},
            {"parts": None},
            {"nbytes": 2**64},
            {"nbytes": 1},
            {"more": 1},
        ],
        4,
    ),
)
def test_a_record_that_was_changed_makes_no_wrong_manifest(
    states: Path, expected: dict[str, bytes], small_bucket: Bucket, change: dict[str, Any]
) -> None:
    """The file's digest must be that of its tensors'; otherwise the file is made again."""
    url = f"{small_bucket.url}/one"
    with pytest.raises(ZeroDivisionError):
        gather(states, url, progress=lambda done, total: 1 // (total - done))
    kept = {name: data for name, data in small_bucket.read_all().items() if name.endswith(".safetensors.json")}
    assert kept
    for name, data in kept.items():
        record = {**(unseal(data) or {}), **change}
        store, key = open_store(f"{small_bucket.url}/{name}")
        store.put(key, seal(record))
    gather(states, url)
    assert small_bucket.read_all() == placed("one", expected)


@pytest.mark.parametrize(
    "change",
    sampled(
        [
            {"pid": 2**70},
            {"beat": 1.5},
            {"uploads": {"a": "x"}},
            {"uploads": {"a": {"upload_id": "u", "part_nbytes": -1, "name": "a"}}},
            {"replaced": {"last": "x"}},
            {"replaced": {"last": 1, "version": "v", "manifest_version": "m", "weights": 3, "small": []}},
            {"stage": None},
        ],
        3,
    ),
)
def test_a_journal_that_was_changed_counts_as_damaged(
    states: Path,
    expected: dict[str, bytes],
    small_bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
) -> None:
    monkeypatch.setattr(bucket_stage, "_SILENT_SECONDS", 0.5)
    place = leave_journal(small_bucket, make_owned(BucketJournal("s", "plan")))
    store, key = open_store(f"{small_bucket.url}/{place.journal_key}")
    record = unseal(small_bucket.read_all()[place.journal_key])
    assert record is not None
    store.put(key, seal({**record, **change}))
    gather(states, f"{small_bucket.url}/one")
    assert small_bucket.read_all() == placed("one", expected)


def test_cleans_what_a_stopped_gather_left(states: Path, small_bucket: Bucket) -> None:
    with pytest.raises(ZeroDivisionError):
        gather(states, f"{small_bucket.url}/one", progress=lambda done, total: 1 // (total // 2 > done))
    listed = xrank.clean(f"{small_bucket.url}/one", dry_run=True).details
    assert listed["removed_nbytes"] >= 5 << 20
    assert small_bucket.list_uploads()
    assert xrank.clean(f"{small_bucket.url}/one").details["num_removed"] == listed["num_removed"] >= 2
    assert (small_bucket.list_uploads(), small_bucket.read_all()) == ([], {})


def test_clean_leaves_an_upload_of_another_program(small_bucket: Bucket, small_server: SmallS3) -> None:
    """S3 does not record which program began an upload, however old it is."""
    store, key = open_store(f"{small_bucket.url}/one/data.bin")
    uploads = Uploads(store, f"{small_bucket.url}/one")
    identifier = uploads.create(key, "another program's")
    uploads.put_part(key, identifier, 1, bytes(5 << 20))
    small_server.uploads[identifier].begun = "2020-01-01T00:00:00.000+00:00"
    details = xrank.clean(f"{small_bucket.url}/one").details
    assert details["num_removed"] == 0 and "no journal names it" in details["stages"][0]["why"]
    assert len(small_bucket.list_uploads()) == 1
    uploads.abort(key, identifier)


@pytest.mark.parametrize("token", sampled(["marked-session-token-51c4", None], 2))
def test_no_secret_is_written(
    states: Path,
    small_bucket: Bucket,
    small_server: SmallS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    token: str | None,
) -> None:
    """Neither in a report, an error, an object nor a log; with a token, botocore finds the credentials in a file."""
    monkeypatch.setenv("XRANK_STORE_TIMEOUT", "3")
    if token is not None:
        (tmp_path / "credentials").write_text(
            f"[default]\naws_access_key_id={KEY_ID}\naws_secret_access_key={SECRET}\naws_session_token={token}\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    caplog.set_level(logging.DEBUG)
    seen = []
    for rate in (0.0, 0.1):
        with open_proxy(small_bucket.server, choose_by_seed(1, rate)) as proxy:
            proxy.stall_seconds = 1
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            try:
                seen.append(str(gather(states, f"{small_bucket.url}/{rate}").to_dict()))
            except XrankError as error:
                seen.append(repr(error.__dict__) + str(error))
    printed = capfd.readouterr()
    text = "".join(seen) + "".join(map(repr, small_server.read_all(small_bucket.name).items()))
    text += caplog.text + "".join(str(record.__dict__) for record in caplog.records) + printed.out + printed.err
    for secret in (SECRET, KEY_ID, *([token] if token else ())):
        assert secret not in text
