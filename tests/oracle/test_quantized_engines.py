"""transformers and vLLM compute from a quantized folder what they compute from the folder of the scheme's own tool.

vLLM asks for a torch of its own, so ``VLLM_PYTHON`` names an interpreter with it; without one its tests are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.cli.bench import run
from tests.oracle.quantized_folders import MODELOPT_SCHEMES, SCHEMES, quantize_by_modelopt, quantize_folder
from tests.oracle.quantized_models import KEPT, MODELS, make_model

pytestmark = pytest.mark.timeout(300)

PYTHON = os.environ.get("VLLM_PYTHON")
ROOT = Path(__file__).parents[2]
EXPERTS = ("qwen3-moe", "deepseek-v3")
UNLOADED = {*product(EXPERTS, ("FP8_BLOCK", "W8A8", "MXFP8"))}
"""(model, scheme) that transformers 5.23 cannot load: it merges experts' weights while they are quantized."""
REFUSED = {
    "W8A16": "Quant type (uint8b128) not supported by CPUWNA16",
    "NVFP4A16": "Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported: Marlin FP4 not available",
    "MXFP4A16": "Failed to find a kernel that can implement the MXFP4 linear layer",
    "MXFP8": "Failed to find a kernel that can implement the MXFP8 linear layer",
}
"""Scheme -> the words in which vLLM 0.32 on a CPU refuses it, whatever the model."""
UNSERVED = {"deepseek-v3": "No Int8 MoE backend supports", "qwen3-vl": "Model architectures ['Qwen3VLFor"}
"""Model -> the words in which it refuses int8; the other one needs torchvision, of which there is no matching build."""


class Folders:
    """The quantized folders of all models, by xrank and by the scheme's own tool; each is made once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def plain(self, name: str) -> Path:
        """Return the folder of a model."""
        folder = self.root / name / "plain"
        if not folder.exists():
            make_model(name).save_pretrained(folder)
        return folder

    def pair(self, name: str, scheme: str) -> tuple[Path, Path]:
        """Return the folders that xrank and the tool make of a model; ModelOpt's schemes begin with its name."""
        made, wanted = (self.root / name / scheme / tool for tool in ("xrank", "tool"))
        if not made.exists():
            tool, _, own = scheme.rpartition(" ")
            options = ["--dialect", "modelopt"] if tool else []
            options += [word for each in KEPT.get(name, ()) for word in ("--quantize-ignore", each)]
            ended = run("gather", self.plain(name), "--out", made, "--quantize", own, *options)
            assert ended.exit_code == 0, ended.stderr
            quantization = json.loads((made / "config.json").read_text())["quantization_config"]
            if tool:
                quantize_by_modelopt(MODELS[name], self.plain(name), wanted, own)
            else:
                ignored = quantization["ignore" if "ignore" in quantization else "modules_to_not_convert"]
                quantize_folder(self.plain(name), wanted, own, ignored)
        return made, wanted


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("engines"))


def compute(name: str, folder: Path) -> torch.Tensor:
    """Return the logits of a folder's model in transformers."""
    kind = getattr(transformers, MODELS[name].auto_class)
    model, told = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.arange(4, 20)[None]).logits
    return logits


def list_cells() -> list[Any]:
    """Return all models x schemes; those are not slow in which each model and each scheme occur."""
    chosen = {("llama", scheme) for scheme in SCHEMES} | {(name, SCHEMES[i]) for i, name in enumerate(MODELS)}
    slow = pytest.mark.slow
    return [pytest.param(*cell, marks=() if cell in chosen else slow) for cell in product(MODELS, SCHEMES)]


@pytest.mark.parametrize(("name", "scheme"), list_cells())
def test_transformers_computes_the_same_logits(folders: Folders, name: str, scheme: str) -> None:
    made, wanted = folders.pair(name, scheme)
    if (name, scheme) in UNLOADED:
        for folder in (made, wanted):
            with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
                compute(name, folder)
        return
    logits = compute(name, made)
    assert torch.equal(logits, compute(name, wanted))
    assert logits.isfinite().all() and logits.std() > 0.01


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("name", MODELS)
def test_vllm_generates_the_same_tokens(folders: Folders, tmp_path: Path, name: str) -> None:
    schemes = [*SCHEMES, *(f"modelopt {scheme}" for scheme in MODELOPT_SCHEMES if name not in KEPT)]
    pairs = {scheme: folders.pair(name, scheme) for scheme in schemes}
    paths = [str(folder) for pair in pairs.values() for folder in pair]
    command = [str(PYTHON), "-m", "tests.oracle.load_quantized_vllm", str(tmp_path / "found.json"), *paths]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1150)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for scheme, (made, wanted) in pairs.items():
        print(name, scheme, found[str(made)].get("error", "loads"))
        assert found[str(made)] == found[str(wanted)], scheme
    int8 = found[str(pairs["W8A8"][0])]
    assert "tokens" in int8 if name not in UNSERVED else UNSERVED[name] in int8["error"]
    for scheme, words in REFUSED.items() if name != "qwen3-vl" else ():
        assert words in found[str(pairs[scheme][0])]["error"]
