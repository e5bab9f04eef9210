"""Models on the Hub are read by ranges, and its token stays with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.storage.fake_hub import COMMIT, FakeHub
from tests.storage.written import leave_states, read_folder
from xrank.commands.gather import gather_checkpoint
from xrank.errors import UsageError
from xrank.testing.reader_contract import read_model, whole

TOKEN = "hf_markedsecret0123456789"


def start(hub: FakeHub, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command with all logs on; huggingface_hub reads its endpoint when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    environment |= {"XRANK_STORE_TIMEOUT": "5", "XRANK_ALLOW_HTTP": "1", "HF_HUB_DISABLE_XET": "1"}
    logging = "import logging, sys; logging.basicConfig(level=logging.DEBUG); from xrank.cli.main import main; main()"
    command = [sys.executable, "-c", logging, *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert TOKEN not in ended.stdout + ended.stderr
    return ended


def test_pushes_a_model_in_one_commit(tmp_path: Path) -> None:
    states, out = leave_states(tmp_path / "states", rows=26), tmp_path / "out"
    hub = FakeHub({})
    hub.exists, hub.fails = False, 1
    try:
        command = ("gather", states, "--out", out, "--push-to-hub", "org/name", "--max-shard-size", "200KB")
        refused = start(hub, *command)
        assert refused.returncode == 2 and "hf://org/name may not be written" in refused.stderr
        assert hub.files == {}
        made = start(hub, *command)  # which finds the folder made, and uploads what is missing
        assert made.returncode == 0, made.stderr
        files = read_folder(out)
        assert {name: data for name, data in hub.files.items() if name != "README.md"} == files
        card = hub.files["README.md"].decode()
        manifest = json.loads(files["xrank_manifest.json"])
        assert all(f"`{one['digest']}`" in card for one in manifest["files"])
        assert "written by 2 ranks" in card
        assert len(hub.commits) == 1 and hub.commits[0]["parentCommit"] == COMMIT
        again = start(hub, *command)
        assert again.returncode == 2 and "already contains a model" in again.stderr
        hub.files |= {"model.safetensors": b"older", "notes.txt": b"a user's", "README.md": b"a user's"}
        assert start(hub, *command, "--overwrite").returncode == 0
        assert {"model.safetensors", *files, "notes.txt"} - hub.files.keys() == {"model.safetensors"}
        assert hub.files["README.md"] == b"a user's"
        with_token = {path for _, path, token in hub.seen if TOKEN in (token or "")}
        assert with_token and not any(path.startswith("/lfs/") for path in with_token)  # another host, by its name
    finally:
        hub.close()


def test_gathers_onto_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    states, stage = leave_states(tmp_path / "states", rows=26), tmp_path / "home/xrank/org--name"
    hub = FakeHub({})
    hub.exists, hub.fails = False, 1
    command = ("gather", states, "--out", "hf://org/name")
    try:
        refused = start(hub, *command)
        assert refused.returncode == 2 and f"the complete model is in {stage}" in refused.stderr
        files = read_folder(stage)
        made = start(hub, *command, "--json")
        assert made.returncode == 0, made.stderr
        report = json.loads(made.stdout)
        assert report["output"]["path"] == "hf://org/name"
        assert {name: data for name, data in hub.files.items() if name != "README.md"} == files
        assert list(stage.parent.iterdir()) == []
        again = start(hub, *command)
        assert again.returncode == 2 and "already contains a model" in again.stderr
        assert list(stage.parent.iterdir()) == []
    finally:
        hub.close()


def test_refuses_two_repositories(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be uploaded to the Hub"):
        gather_checkpoint(tmp_path, "hf://org/name", push_to_hub="org/other")
    with pytest.raises(UsageError, match="not a repository"):
        gather_checkpoint(tmp_path, "hf://org/name@main")


def test_a_model_on_the_hub(tmp_path: Path) -> None:
    model = {"up.weight": torch.arange(64.0).reshape(8, 8)}
    hub = FakeHub({"model.safetensors": save(model), "config.json": b'{"model_type": "llama"}'})
    # huggingface_hub reads its endpoint when it is imported, so a process of its own does.
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    environment |= {"XRANK_STORE_TIMEOUT": "5", "XRANK_ALLOW_HTTP": "1"}
    logging = "import logging, sys; logging.basicConfig(level=logging.DEBUG); from xrank.cli.main import main; main()"
    command = [sys.executable, "-c", logging, "gather", "hf://org/name", "--out", str(tmp_path / "out"), "--json"]
    refused = subprocess.run(
        command, env=environment | {"XRANK_ALLOW_HTTP": ""}, capture_output=True, text=True, timeout=100
    )
    assert "plain http" in refused.stderr and hub.seen == []
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    hub.close()
    assert ended.returncode == 0, ended.stderr
    assert read_model(tmp_path / "out") == {name: whole(tensor) for name, tensor in model.items()}
    assert json.loads(ended.stdout)["traffic"]["requests"] > 0
    assert "DEBUG" in ended.stderr
    texts = [ended.stdout, ended.stderr, *(one.read_bytes().decode("latin1") for one in (tmp_path / "out").iterdir())]
    assert not any(TOKEN in text for text in texts)
    with_token = {path for _, path, token in hub.seen if TOKEN in (token or "")}
    elsewhere = {path for _, path, _ in hub.seen if path.startswith("/cdn/")}  # another host, by its name
    assert with_token and "/cdn/model.safetensors" in elsewhere and not with_token & elsewhere
