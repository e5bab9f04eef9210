"""The logits that tests of recipes compare with are those that Megatron-core says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.mark.timeout(180)
def test_recorded_logits_are_megatrons(tmp_path: Path) -> None:
    out = tmp_path / "logits.json"
    command = [sys.executable, "-W", "ignore", str(_HERE / "forward_megatron.py"), str(out)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(out.read_text())
    recorded = json.loads((_HERE.parent / "recipes" / "megatron_logits.json").read_text())
    assert found.keys() == recorded.keys()
    for family, expected in recorded.items():
        assert found[family]["shapes"] == expected["shapes"]
        assert found[family]["logits"] == pytest.approx(expected["logits"], abs=1e-5)
