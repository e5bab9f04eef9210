"""Makes the folders of cells: python -m tests.oracle.trainers.make FOLDER [TEXT...] (cells that contain a text).

Cells of a framework that is not installed are left out. Lightning and TRL: ``pip install lightning trl datasets``. verl
asks for older versions: ``pip install --no-deps verl``, then ``ray tensordict codetiming orjson pillow``; its workers
(tests/oracle/test_integrations.py) also ask for ``hydra-core uvicorn fastapi datasets tensorboard opentelemetry-sdk``.
torchtitan asks for nothing that changes torch: ``pip install --no-deps torchtitan tyro torchdata tomli spmd_types
tensorboard``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from tests.oracle.trainers.cells import CELLS, ENGINES, FRAMEWORKS, Cell, choose_cells
from tests.oracle.trainers.families import FAMILIES, write_base_model

__all__ = ["make_cells"]

NUM_RANKS = 2
REPOSITORY = Path(__file__).parents[3]


def make_cells(root: Path, cells: list[Cell]) -> dict[str, str]:
    """Make the folders of cells that are not there yet.

    Returns:
        Name of each cell that its trainer could not train -> the end of its error.
    """
    root = root.resolve()
    missing = [cell for cell in cells if not (root / cell.name / "reference").exists()]
    absent = {cell.framework for cell in missing if cell.framework and find_spec(cell.framework) is None}
    if absent:
        print(f"left out, because they are not installed: {', '.join(sorted(absent))}")
    missing = [cell for cell in missing if cell.framework not in absent]
    for cell in missing:
        base = root / "base" / cell.base_model
        if not base.exists():
            write_base_model(FAMILIES[cell.family], base, is_tied=cell.is_tied, dtype=cell.dtype)
    failed: dict[str, str] = {}
    for _, group in groupby(sorted(missing, key=lambda cell: cell.engine), key=lambda cell: cell.engine):
        _train([cell.name for cell in group], root, failed)
    return failed


def _train(names: list[str], root: Path, failed: dict[str, str]) -> None:
    """Train cells in one launch; where one fails, its ranks end, and another launch goes on behind it."""
    num_ranks = (ENGINES | FRAMEWORKS)[CELLS[names[0]].engine].get("num_ranks", NUM_RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    while names:
        command = [*launch, "-m", "tests.oracle.trainers.train", str(root), *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        with open(root / "errors.txt", "w+", errors="replace") as errors:
            subprocess.run(command, stderr=errors, env=environment, cwd=REPOSITORY)
            errors.seek(0)
            text = errors.read()
        names = [name for name in names if not (root / name / "reference").exists()]
        if not names:
            return
        failed[names[0]] = _first_error(text)
        print(f"{names[0]} FAILED: {failed[names[0]]}", flush=True)
        (root / "failed").mkdir(exist_ok=True)
        (root / "failed" / f"{names[0]}.txt").write_text(text)
        names = names[1:]


def _first_error(text: str) -> str:
    """Return the error of the first traceback."""
    lines = [line.split("]: ", 1)[-1] for line in text.splitlines()]
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    after = lines[begins[0] + 1 :] if begins else lines
    return next((line for line in after if line[:1].strip() and ":" in line), text[-300:])[:300]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    make_cells(folder, choose_cells(sys.argv[2:]))
