"""The shapes and logits that tests of recipes compare with are those of Megatron-core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.families import FAMILIES

_HERE = Path(__file__).parent


@pytest.mark.timeout(240)
def test_recorded_logits_are_megatrons(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(_HERE / "forward_megatron.py"), str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert {file.stem for file in tmp_path.iterdir()} == FAMILIES.keys()
    for name, family in FAMILIES.items():
        found, expected = json.loads((tmp_path / f"{name}.json").read_text()), family.recorded
        assert found["shapes"] == expected["shapes"]
        assert found["logits"] == pytest.approx(expected["logits"], abs=1e-5)
