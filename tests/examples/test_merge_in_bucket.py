"""The example merges a checkpoint from a bucket into a bucket."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "merge_in_bucket.py"


def test_it_merges(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "models/step-10/model.safetensors" in done.stdout
    assert list(tmp_path.iterdir()) == []
