"""A model in attributes of other modules, as real frameworks save it: transformers finds all of it in the result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.oracle.save_wrapped import ENGINES, PATHS, make_base
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model

# Importing DeepSpeed and starting ranks takes most of it.
pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with every path and engine, and the base model in ``base``."""
    folder = tmp_path_factory.mktemp("wrapped")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launch, "-m", "tests.oracle.save_wrapped", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=380,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    make_base().save_pretrained(folder / "base")
    return folder


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", PATHS)
def test_transformers_finds_all_tensors(saved: Path, tmp_path: Path, path: str, engine: str) -> None:
    out = source = saved / path / engine
    if engine == "live":
        out /= "model"
    else:
        report = gather_checkpoint(source, tmp_path / "out")
        out = tmp_path / "out"
        assert "wrapper-names" in dict(report.notes)
        # The bare names are the base model's, and an independent comparison finds the values.
        gather_checkpoint(source, tmp_path / "checked", base_model=saved / "base")
        verify_model(out, against=source)
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    want = make_base().state_dict()
    assert model.state_dict().keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
