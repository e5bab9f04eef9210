"""Megatron-Bridge's own mappings give the names and values that xrank's recipes give.

``BRIDGE_PACKAGES`` names a folder with megatron-bridge and mbridge, unpacked without their dependencies, which need
GPUs (``pip install --no-deps --target``); without it the tests are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.bridge_mappings import BRIDGES, TEXT_BRIDGES

PACKAGES = os.environ.get("BRIDGE_PACKAGES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PACKAGES is None, reason="BRIDGE_PACKAGES names no folder with megatron-bridge"),
]

UNEXPORTED = {
    # The Hub's files of GLM 4.5 hold these copies of embedding and head.
    "glm4-moe-mtp": ["model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"],
}
"""Tensors by family that Megatron-Bridge 0.3.1 does not write."""


def compare(family: str) -> dict[str, tuple[int, list[str]]]:
    """Return, by family, the number of the bridge's tensors and the names that differ."""
    script = Path(__file__).with_name("bridge_mappings.py")
    paths = os.pathsep.join([*str(PACKAGES).split(os.pathsep), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), family],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode in (0, 1), ended.stderr[-3000:]
    rows = re.findall(r"^(\S+): (\d+) tensors, (\d+) differ(.*)$", ended.stdout, re.MULTILINE)
    assert rows, ended.stdout + ended.stderr[-3000:]
    return {name: (int(count), words.split()) for name, count, _, words in rows}


@pytest.mark.parametrize("family", ["text", *BRIDGES])
def test_names_and_values_are_bridges(family: str) -> None:
    found = compare(family)
    assert found.keys() == (TEXT_BRIDGES.keys() if family == "text" else {family})
    assert all(count >= 15 for count, _ in found.values())
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == (UNEXPORTED if family == "text" else {})
