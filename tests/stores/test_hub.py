"""Models on the Hub are read by ranges, and its token stays with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save

from tests.stores.fake_hub import FakeHub
from xrank.testing.reader_contract import read_model, whole

TOKEN = "hf_markedsecret0123456789"


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
