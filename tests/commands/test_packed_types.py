"""Tensors of 4-bit values, two in a byte (torch's float4_e2m1fn_x2, safetensors' F4), from every kind of source."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import xrank
from tests.cli.bench import run
from xrank.errors import UsageError

FORMS = ["safetensors", "several files", "bin", "pt", "dcp", "workspace", "live"]


def model() -> dict[str, torch.Tensor]:
    packed = torch.arange(48, dtype=torch.uint8).reshape(6, 8).view(torch.float4_e2m1fn_x2)
    return {"up.weight": packed, "gate.weight": torch.full((6, 1), 0.3), "norm.weight": torch.ones(4).bfloat16()}


def leave(folder: Path, form: str) -> None:
    state = model()
    folder.mkdir()
    if form == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif form == "several files":
        for number, (name, tensor) in enumerate(state.items(), 1):
            save_file({name: tensor}, folder / f"model-{number:05d}-of-00003.safetensors")
    elif form in ("bin", "pt"):
        torch.save(state, folder / {"bin": "pytorch_model.bin", "pt": "model.pt"}[form])
    elif form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, no_dist=True)
    else:
        workspace = xrank.NFSWorkspace(str(folder), rank=0, world_size=1)
        workspace.write_configs_and_weights({}, state)


@pytest.mark.parametrize("form", FORMS)
def test_four_bit_tensors_come_out_as_they_are(tmp_path: Path, form: str) -> None:
    out = tmp_path / "model"
    if form == "live":
        report = xrank.export_model(model(), out)
    else:
        leave(tmp_path / "source", form)
        report = xrank.gather_checkpoint(tmp_path / "source", out, dtype="bf16")
    found = load_file(out / "model.safetensors")
    for name, tensor in model().items():
        want = tensor.bfloat16() if tensor.dtype == torch.float32 and form != "live" else tensor
        assert found[name].dtype == want.dtype and found[name].shape == want.shape
        assert torch.equal(found[name].view(torch.uint8), want.view(torch.uint8))
    assert report.num_parameters == 6 * 16 + 6 + 4
    assert xrank.verify_model(out).ok
    (tmp_path / "model" / "config.json").write_text("{}")
    again = xrank.gather_checkpoint(out, tmp_path / "again", base_model=out)
    assert again.proof["base_model"] is not None
    shown = json.loads(run("inspect", out, "--json", "--tensors").stdout)
    assert shown["problems"] == [] and shown["source"]["num_parameters"] == 6 * 16 + 6 + 4
    assert torch.equal(
        xrank.open_checkpoint(out)["up.weight"].view(torch.uint8), model()["up.weight"].view(torch.uint8)
    )


def test_a_damaged_four_bit_tensor_is_seen(tmp_path: Path) -> None:
    leave(tmp_path / "source", "pt")
    xrank.gather_checkpoint(tmp_path / "source", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    at = content.index(bytes(range(48)))
    content[at + 3] ^= 1
    file.write_bytes(content)
    report = xrank.verify_model(tmp_path / "model")
    assert report.exit_code == 4 and str(report.fault).startswith("up.weight: its bytes differ from those")


def test_six_bit_values_are_refused_by_name(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(UsageError, match="F6_E2M3"):
        xrank.gather_checkpoint(tmp_path / "model.safetensors", tmp_path / "out")
