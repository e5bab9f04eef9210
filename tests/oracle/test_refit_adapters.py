"""Adapters that an engine has taken are those that PEFT saves, for its options, under ZeRO-3 and FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.oracle.save_peft import make_adapted, make_base

pytestmark = [
    pytest.mark.timeout(400),  # importing DeepSpeed and starting ranks takes most of it
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

KINDS = ("named", "saved", "dora")
TOKENS = torch.arange(24).reshape(2, 12)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that an engine wrote of each kind's two steps."""
    root = tmp_path_factory.mktemp("refit")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launch, "-m", "tests.oracle.refit_adapters", str(root), *KINDS],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=380,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return root


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_steps_are_what_peft_saves(folder: Path, tmp_path: Path, kind: str, engine: str) -> None:
    model = make_adapted(kind)
    for step in (1, 2):
        model.save_pretrained(tmp_path / str(step))
        saved = next((tmp_path / str(step)).rglob(WEIGHTS))
        wanted, found = load_file(saved), load_file(folder / kind / engine / str(step) / WEIGHTS)
        assert found.keys() == wanted.keys() and all(found[name].equal(tensor) for name, tensor in wanted.items())
        loaded = PeftModel.from_pretrained(make_base(), folder / kind / engine / str(step)).eval()
        with torch.no_grad():
            assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(1)
