"""The program that NeMo Automodel's `consolidate.sh` runs in place of its own tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from tests.readers.test_hf_shards import LLAMA, LLAMA_CONFIG

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own save

EXAMPLE = Path(__file__).parents[2] / "examples" / "consolidate_automodel.py"
NORMS = [name for name in LLAMA if name.endswith("norm.weight")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make what Automodel leaves: shards, and a hidden folder with config, tokenizer and two lists."""
    folder = tmp_path / "model"
    writer = dcp.HuggingFaceStorageWriter(str(folder), dict.fromkeys(LLAMA, 1), save_distributed=True)
    dcp.save({name: torch.rand(shape) for name, shape in LLAMA.items()}, storage_writer=writer, no_dist=True)
    texts = {
        "config.json": LLAMA_CONFIG,
        "tokenizer_config.json": {"model_max_length": 8},
        "fqn_to_dtype_mapping.json": {name: "F32" if name in NORMS else "BF16" for name in LLAMA},
        "fqn_to_file_index_mapping.json": dict.fromkeys(LLAMA, 1),
    }
    (folder / ".hf_metadata").mkdir()
    for name, value in texts.items():
        (folder / ".hf_metadata" / name).write_text(json.dumps(value))
    return folder


def consolidate(model: Path, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(EXAMPLE), "--backend", "gloo", "--num-threads", "5"]
    command += ["--model-name", "org/name", "--input-dir", str(model), "--output-dir", str(model / "consolidated")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options], env=environ, capture_output=True, text=True, check=False)


def test_tensors_get_the_types_of_the_base_model(model: Path) -> None:
    done = consolidate(model)
    assert done.returncode == 0, done.stderr
    out = model / "consolidated"
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
        "xrank_manifest.json",
    ]
    saved = load_file(next(model.glob("shard-*")))
    for name, tensor in load_file(out / "model.safetensors").items():
        assert tensor.equal(saved[name] if name in NORMS else saved[name].bfloat16()), name


@pytest.mark.slow
def test_ranks_share_the_work_and_a_cast_is_for_all(model: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = consolidate(model, "--cast-dtype", "bf16", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert {tensor.dtype for tensor in load_file(model / "consolidated" / "model.safetensors").values()} == {
        torch.bfloat16
    }


def test_what_it_cannot_do_is_refused(model: Path) -> None:
    assert "--diffusers-compatible" in consolidate(model, "--diffusers-compatible").stderr
    mapping = model / ".hf_metadata" / "fqn_to_dtype_mapping.json"
    mapping.write_text(json.dumps(dict.fromkeys(LLAMA, "F8_E4M3")))
    done = consolidate(model)
    assert done.returncode == 2 and "F8_E4M3: set CAST_DTYPE=bf16" in done.stderr
    assert not (model / "consolidated").exists()
