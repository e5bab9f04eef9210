"""xrank's files are those that mbridge exports, and mbridge loads xrank's as the model that they came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent

DIFFERENT: dict[str, dict[str, list[str]]] = {
    # The Hub's files of GLM 4.5 and DeepSeek V3 hold these copies; mbridge writes only DeepSeek's.
    "glm4-moe-mtp": {
        "exported": ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"], "loaded": []
    },
    # The two halves of MiMo's projection are the other way round than Megatron's; mbridge copies them as they are.
    "mimo": {"exported": ["model.mtp_layers.0.input_proj.weight"], "loaded": ["mtp.layers.0.eh_proj.weight"]},
}  # fmt: skip
"""Tensors by family that mbridge 0.15.1 converts in another way."""

FAMILIES = {
    "llama", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe", "mixtral", "deepseek-v3", "deepseek-v3-mtp", "glm4-moe",
    "glm4-moe-mtp", "mimo", "qwen2-5-vl", "glm4v", "glm4v-moe", "internvl-chat",
}  # fmt: skip
"""All that mbridge 0.15.1 converts, but Gemma 3's vision-language model."""


@pytest.mark.timeout(480)
def test_names_and_values_are_mbridges(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(_HERE / "export_by_mbridge.py"), str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=450, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads((tmp_path / "differences.json").read_text())
    assert found.keys() == FAMILIES
    assert all(its["tensors"] >= 20 for its in found.values())
    differ = {name: {key: its[key] for key in ("exported", "loaded")} for name, its in found.items()}
    assert {name: its for name, its in differ.items() if any(its.values())} == DIFFERENT
