"""A URL is refused where a path of this machine is wanted; as a path it would be a folder named s3: here.

Sources may be URLs: tests/storage.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import xrank
from xrank.cli.main import cli
from xrank.errors import UsageError

URL = "s3://bucket/run"
COMMANDS = {
    "gather, output": ["gather", "here", "--out", URL],
    "gather, dry run": ["gather", "here", "--out", URL, "--dry-run"],
    "reshard, output": ["reshard", "here", "--layout", "layout.toml", "--out", URL],
    "layout show, page": ["layout", "show", "here", "--html", URL],
    "clean": ["clean", URL],
}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # No credentials from anywhere: then no request is sent.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    (tmp_path / "here").mkdir()
    save_file({"up": torch.ones(4, 2)}, tmp_path / "here" / "model.safetensors")
    (tmp_path / "layout.toml").write_text('[mesh]\ntp = 2\n\n[layout]\n"up" = "tp, -"\n')
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_exit_2_and_write_nothing(room: Path, name: str) -> None:
    before = sorted(os.listdir(room))
    ended = CliRunner().invoke(cli, COMMANDS[name])
    assert ended.exit_code == 2, ended.output
    assert sorted(os.listdir(room)) == before
    assert URL in ended.output


@pytest.mark.parametrize("url", ["abfs+s://b/x"])
def test_stores_that_are_not_written_to_are_named(room: Path, url: str) -> None:
    with pytest.raises(UsageError, match="outputs are not written to") as caught:
        xrank.gather_checkpoint("here", url)
    assert caught.value.next_step
    with pytest.raises(UsageError, match="outputs are not written to"):
        xrank.gather_checkpoint("here", Path(url))  # of whose two slashes pathlib leaves one


@pytest.mark.parametrize(
    ("url", "variables", "cause"),
    [
        ("az://b/x", {}, "MissingAccount"),
        ("az://b/x", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "?"}, "InvalidAccessKey"),
        ("abfs://b@a/x", {"AZURE_STORAGE_ACCOUNT_KEY": "?"}, "InvalidAccessKey"),
        ("gs://b/x", {"GOOGLE_SERVICE_ACCOUNT": "absent.json"}, "OpenCredentials"),
        ("s3://b/x", {"AWS_ACCESS_KEY_ID": "a"}, "PartialCredentialsError"),
    ],
)
def test_environments_that_open_no_store_are_told_what_to_set(
    room: Path, monkeypatch: pytest.MonkeyPatch, url: str, variables: dict[str, str], cause: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="cannot be opened with the settings in the environment") as caught:
        xrank.inspect(url)
    assert caught.value.got == cause
    assert next(iter(variables), "AZURE_STORAGE_ACCOUNT_NAME") in caught.value.next_step


def test_calls_refuse_urls(room: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="is a URL"):
        xrank.NFSWorkspace(URL, rank=0, world_size=1)
    with pytest.raises(UsageError, match="cannot be opened with the settings in the environment") as caught:
        xrank.export_model(model, URL)
    assert (caught.value.file, caught.value.got) == (URL, "no credentials")
    assert sorted(os.listdir(room)) == ["here", "layout.toml"]


def test_a_colon_is_allowed_in_a_path(room: Path) -> None:
    os.rename("here", "run:12")
    assert xrank.gather_checkpoint("run:12", "a:b").num_tensors == 1
