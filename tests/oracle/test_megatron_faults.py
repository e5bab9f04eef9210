"""Silent faults of Megatron-core that its users reported: `check_gradients` names each, and nothing in right steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.timeout(240)

_SCRIPT = Path(__file__).with_name("megatron_faults.py")


def test_reported_faults_are_named_with_their_factor(tmp_path: Path) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            command = [sys.executable, "-W", "ignore", str(_SCRIPT), str(rank), "2", str(tmp_path)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))
    try:
        codes = [process.wait(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    names = {fault: {(one["kind"], one["name"]) for one in found} for fault, found in first.items()}
    assert names == {
        "right head": set(),
        "label smoothing": {("reference", "weight"), ("reference", "scale")},
        "gathered logits": {("reference", "weight"), ("reference", "scale")},
        "norm of heads": {("reference", "out_norm")},
        "right router": set(),
        "masked router": {("scale", "router.weight")},
        "right parts": set(),
        "masked parts": {("reference", "scale")},
        "right predictions": set(),
        "predictions by token": {("scale", "all gradients")},
        "masked predictions": names["masked predictions"],
    }
    (router,) = first["masked router"]
    assert router["factor"] == pytest.approx(2, rel=1e-4)
    assert "as many as ranks along tp:" in router["message"]
    (further,) = first["predictions by token"]
    assert further["factor"] == pytest.approx(14 / 16, rel=1e-4)  # further tokens by main ones
    assert "check the numbers of micro-batches and tokens" in further["message"]
    masked = {name for kind, name in names["masked predictions"] if kind == "reference"}
    assert {"embedding.word_embeddings.weight", "mtp.layers.0.eh_proj.weight", "output_layer.weight"} <= masked
    heads: list[dict[str, Any]] = first["norm of heads"]
    assert all("its sum along tp is right: that sum is missing" in one["message"] for one in heads)
