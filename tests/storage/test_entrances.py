"""Every call and option that reads takes URLs, and its report counts the requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import xrank
from tests.storage.servers import SECRET, Bucket
from xrank.cli.main import cli
from xrank.errors import IncompleteError, UsageError
from xrank.testing.reader_contract import read_model, whole

MODEL = {"up.weight": torch.arange(32.0).reshape(8, 4), "bias": torch.ones(8)}
EXPECTED = {name: whole(tensor) for name, tensor in MODEL.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    save_file(MODEL, made / "model.safetensors")
    (made / "config.json").write_text('{"model_type": "llama"}')
    (made / "tokenizer").mkdir()
    (made / "tokenizer" / "extra.txt").write_text("a companion of a base model")
    (tmp_path / "layout.toml").write_text(
        '[mesh]\ngrid = "tp=2"\n\n[tensors]\n"up.weight" = "[o/tp, h]"\nbias = "[o]"\n'
    )
    return made


def test_calls(small_bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    url = small_bucket.put_folder(folder, "run")
    layout = small_bucket.put("layout.toml", (tmp_path / "layout.toml").read_bytes())
    xrank.gather_checkpoint(url, tmp_path / "out", base_model=url)
    assert read_model(tmp_path / "out") == EXPECTED
    assert (tmp_path / "out" / "tokenizer" / "extra.txt").read_text() == "a companion of a base model"
    xrank.reshard_checkpoint(url, layout, tmp_path / "states")
    xrank.gather_checkpoint(tmp_path / "states", tmp_path / "again")
    assert read_model(tmp_path / "again") == EXPECTED
    assert torch.equal(xrank.open_checkpoint(url)["up.weight"][:], MODEL["up.weight"])
    module = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8, bias=False)})
    module.register_parameter("bias", torch.nn.Parameter(torch.zeros(8)))
    xrank.load_model(module, url)
    assert torch.equal(module["up"].weight, MODEL["up.weight"])
    assert xrank.verify_model(tmp_path / "out", against=url).ok
    copy = small_bucket.put_folder(tmp_path / "out", "copy")
    assert xrank.verify_model(copy).ok  # by its manifest


def test_a_file_behind_http(
    small_bucket: Bucket, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_bucket.put_folder(folder, "run")
    url = f"{small_bucket.server}/{small_bucket.name}/run/model.safetensors"
    monkeypatch.delenv("XRANK_ALLOW_HTTP")
    with pytest.raises(UsageError, match="plain http"):
        xrank.gather_checkpoint(url, tmp_path / "out")
    command = ["gather", url, "--out", str(tmp_path / "out")]
    assert "--allow-http" in CliRunner().invoke(cli, command).output
    assert CliRunner().invoke(cli, [*command, "--allow-http"]).exit_code == 0
    assert read_model(tmp_path / "out") == EXPECTED
    with pytest.raises(IncompleteError):
        xrank.gather_checkpoint(url.replace("model.s", "absent.s"), tmp_path / "absent")


def test_commands_count_their_requests(small_bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    url = small_bucket.put_folder(folder, "run")
    planned = CliRunner().invoke(cli, ["gather", url, "--out", str(tmp_path / "out"), "--dry-run", "--json"])
    traffic = json.loads(planned.output)["traffic"]
    assert traffic["planned_requests"] == 1 and traffic["planned_nbytes"] == 160
    done = CliRunner().invoke(cli, ["gather", url, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "requests to the store" in done.output and SECRET not in done.output
    seen = CliRunner().invoke(cli, ["inspect", str(tmp_path / "out"), "--json"])
    assert "traffic" not in json.loads(seen.output)
