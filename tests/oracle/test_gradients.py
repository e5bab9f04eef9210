"""Gradients as Megatron-core itself adds them up: the same to the last bit, in every way to exchange them.

Its DistributedDataParallel and finalize_model_grads run on the ranks beside ours, over gloo, on the same gradients
(`replay_gradients`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

# Up to four processes import Megatron.
pytestmark = pytest.mark.timeout(240)

_SCRIPT = Path(__file__).with_name("replay_gradients.py")
_ALWAYS = {"layer.weight", "layer.bias", "layer.norm", "attention.q_layernorm", "attention.mean", "experts.weight"}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_are_megatrons_to_the_last_bit(tmp_path: Path, num_ranks: int) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in range(num_ranks)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            command = [sys.executable, "-W", "ignore", str(_SCRIPT), str(rank), str(num_ranks), str(tmp_path)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))
    try:
        codes = [process.wait(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * num_ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    kinds, names = set(), set()
    for case in found[0]:
        for rank, cases in enumerate(found):
            checks = [row["findings"] for row in cases[case] if row["name"] == "check"]
            assert checks == ["", ""], (case, rank, checks)
            doubled = [row["kinds"] for row in cases[case] if row["name"] == "doubled"]
            assert doubled == [[["scale", "layer.weight"]]], (case, rank, doubled)
            rows = [row for row in cases[case] if row["name"] not in ("check", "doubled")]
            for row in rows:
                assert row["equal"], (case, rank, row)
                if row["name"] != "router":
                    assert row["nonzero"], (case, rank, row)
                    assert row["range"] == row["owned"] or case.startswith(("tp-dp r", "tp-ep r")), (case, rank, row)
                    kinds.update(row["kinds"])
            assert {row["name"] for row in rows} >= _ALWAYS | {"router"}
            assert any(row["nonzero"] for row in rows if row["name"] == "router"), (case, rank)
            names.update(row["name"] for row in rows)
    assert names == {*_ALWAYS, "router", "table", "embedder"}
    assert kinds == {"data", "tensor", "word", "conditional", "router", "tokens"}
