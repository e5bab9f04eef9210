"""The quantization that a folder has: what its config files declare, and what inspect says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import xrank
from tests.cli.bench import run
from xrank.engine import encodings
from xrank.errors import UsageError
from xrank.recipes.quantization import StoredScheme, find_stored_scheme

_WRITTEN = json.loads((Path(__file__).parent / "quantization_configs.json").read_text())
_SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "NVFP4A16", "MXFP4A16", "MXFP8")


def group(kind: str, num_bits: int, strategy: str | None, form: str, **more: Any) -> dict[str, Any]:
    """Return what compressed-tensors declares of weights; the top of the config has the format, as of old."""
    weights = {"type": kind, "num_bits": num_bits, "symmetric": True, "strategy": strategy, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize("name", _SCHEMES)
def test_schemes_are_read_as_they_are_written(name):
    scheme = StoredScheme(_WRITTEN[name])
    assert scheme.names == (name,)
    assert scheme.ignored == ("lm_head", "re:.*embed.*", "re:.*norm.*")
    assert scheme.find_encodings() == (getattr(encodings, name),)


@pytest.mark.parametrize(
    ("declared", "block", "suffixes"),
    [
        (group("float", 8, "tensor", "float-quantized"), (0, 0), ("", "_scale")),
        (group("float", 8, None, "naive-quantized"), (0, 0), ("", "_scale")),
        (group("float", 8, "block", "float-quantized", block_structure="64x32"), (64, 32), ("", "_scale")),
        (group("int", 8, "channel", "naive-quantized"), (1, 0), ("", "_scale")),
        (group("int", 4, "group", "int-quantized", group_size=32), (1, 32), ("", "_scale")),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, (64, 128), ("", "_scale_inv")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, (0, 0), ("", "_scale_inv")),
        ({"quant_method": "fbgemm_fp8"}, (1, 0), ("", "_scale")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (0, 0), ("", "_scale")),
        (_WRITTEN["modelopt FP8"], (1, 0), ("", "_scale")),
        (_WRITTEN["modelopt NVFP4"], (1, 16), ("", "_scale", "_scale_2")),
        ({"quant_method": "mxfp4"}, (1, 32), ("_blocks", "_scales")),
    ],
)
def test_other_blocks_are_read(declared, block, suffixes):
    found = StoredScheme(declared).find_encodings()[0]
    assert (found.block, found.suffixes) == (block, suffixes)


def test_groups_of_several_kinds_are_all_read():
    groups = {
        "a": _WRITTEN["FP8_BLOCK"]["config_groups"]["FP8_BLOCK"],
        "b": {**_WRITTEN["W8A8"]["config_groups"]["W8A8"], "targets": ["re:.*down_proj$"]},
        "kv": {"weights": None, "output_activations": {"num_bits": 8}, "targets": ["Attention"]},
    }
    mixed = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    assert StoredScheme(mixed).names == ("FP8_BLOCK", "W8A8")
    assert StoredScheme(mixed).find_encodings() == (encodings.FP8_BLOCK, encodings.W8A8)


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, "fp8"),
        (group("int", 4, "group", "pack-quantized", group_size=128, symmetric=False), "pack-quantized"),
        (group("int", 4, "group", "pack-quantized", group_size=128, actorder="group"), "pack-quantized"),
        (group("int", 8, "channel", "marlin-24"), "marlin-24"),
        ({**_WRITTEN["W8A8"], "sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed-tensors"),
        ({}, "unnamed"),
    ],
)
def test_what_is_not_decoded_is_named(declared, named):
    with pytest.raises(UsageError, match="not decoded") as caught:
        StoredScheme(declared).find_encodings()
    assert named in str(caught.value)


def test_declarations_are_found_in_objects_and_beside_the_config(tmp_path):
    scheme = find_stored_scheme({"text_config": {"quantization_config": _WRITTEN["W8A8"]}})
    assert scheme is not None and scheme.names == ("W8A8",)
    folder = save_folder(tmp_path / "model", None)
    details = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": details}))
    facts = xrank.inspect(folder).details["quantization"]
    assert (facts["schemes"], facts["place"], facts["ignored"]) == (["NVFP4"], "hf_quant_config.json", ["lm_head"])


def save_folder(folder: Path, declared: dict[str, Any] | None) -> Path:
    folder.mkdir()
    up, down = ("layers.0.up.weight", "layers.0.down.weight")
    tensors = {"head.weight": torch.zeros(4, 8), "norm.weight": torch.zeros(8)}
    tensors |= {name: torch.zeros(16, 8, dtype=torch.int8) for name in (up, down)}
    tensors |= {f"{name}_scale": torch.ones(16, 1) for name in (up, down)}
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "mine", **({} if declared is None else {"quantization_config": declared})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_inspect_says_the_scheme_and_the_bytes(tmp_path):
    folder = save_folder(tmp_path / "model", _WRITTEN["W8A8"])
    ended = run("inspect", folder)
    assert "W8A8 in config.json: 2 weights, 1 not quantized; 256 B and 128 B of scales" in ended.stdout
    facts = json.loads(run("inspect", folder, "--json").stdout)["quantization"]
    assert (facts["num_quantized"], facts["num_ignored"], facts["weight_nbytes"], facts["scale_nbytes"]) == (
        2,
        1,
        256,
        128,
    )


def test_inspect_is_silent_about_models_that_are_not_quantized(tmp_path):
    save_file({"up.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    assert "quantized" not in run("inspect", tmp_path).stdout
    assert xrank.inspect(tmp_path).details["quantization"] is None
