"""Real ranks quantize while they export: the folder dequantizes to the whole model, within the format's error."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import xrank

SCRIPT = Path(__file__).parents[2] / "examples" / "export_quantized.py"


def example():
    spec = importlib.util.spec_from_file_location("export_quantized", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Half the distance to the next value: e4m3 has 3 bits after the leading one, and below 2^-6 steps of 2^-9.
FORMATS = {
    "fp8": (torch.float8_e4m3fn, 448, lambda weight, scale: torch.maximum(weight.abs() * 2**-4, scale * 2**-10)),
    "int8": (torch.int8, 127, lambda weight, scale: scale / 2),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_folder_of_four_ranks_dequantizes_to_the_whole_model(rank, tmp_path, kind):
    script = example()
    script.export_quantized(kind, tmp_path / "out")
    if rank == 0:
        check_folder(tmp_path / "out", kind, script)


def check_folder(out, kind, script):
    dtype, largest, bound = FORMATS[kind]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= load_file(out / file)
    assert found.keys() == index["weight_map"].keys()
    scales = [name for name in found if name.endswith("_scale")]
    assert len(scales) == 7 * 3 and len(found) == len(script.SHAPES) + len(scales)
    for name in script.SHAPES:
        weight, value = script.weight(name), found[name]
        if f"{name}_scale" not in found:
            assert torch.equal(value, weight), name
            continue
        scale = found[f"{name}_scale"]
        assert value.dtype == dtype and scale.dtype == torch.float32 and scale.shape == (len(weight), 1), name
        assert (value.float().abs().amax(1) == largest).all(), name
        error = (value.double() * scale.double() - weight).abs()
        # The division that was rounded is of float32.
        assert (error <= bound(weight.double(), scale.double()) * (1 + 1e-5)).all(), name
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 3
    quantization = config["quantization_config"]
    assert quantization["format"] == {"fp8": "float-quantized", "int8": "int-quantized"}[kind]
    assert quantization["config_groups"]["group_0"]["weights"] == {
        "num_bits": 8, "type": {"fp8": "float", "int8": "int"}[kind], "symmetric": True, "strategy": "channel",
        "dynamic": False,
    }  # fmt: skip
    assert xrank.verify_model(out).ok


@pytest.mark.slow
def test_the_script_starts_its_ranks(tmp_path):
    command = [sys.executable, "-W", "error", str(SCRIPT), "--ranks", "2", "--out", str(tmp_path / "fp8")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote  51 tensors, 409,472 bytes, of 2 ranks into {tmp_path / 'fp8'}\n"
    check_folder(tmp_path / "fp8", "fp8", example())
