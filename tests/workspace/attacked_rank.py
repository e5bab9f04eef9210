"""A rank whose job is attacked while others read its memory: it says when that is, and waits until it is over.

python -m tests.workspace.attacked_rank WORK FOLDER, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `WORK` is
"gather" or "export", or one of them after "far-": each rank is then on a host of its own, as far as it can tell.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import xrank
from tests.other_hosts import move_to_host

SECRET = 1234.5
"""Value of all weights."""


def say(folder: Path, what: str, wait_for: str) -> None:
    """Tell the attacker where the rank is, and wait for an answer."""
    (folder / what).touch()
    end = time.monotonic() + 120
    while not (folder / wait_for).exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def main(work: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if work.startswith("far-"):
        move_to_host(rank)
    say(folder, f"ready-{rank}", "go")
    mine = torch.full((300, 1000), SECRET)
    if work.endswith("gather"):
        for _ in range(3):
            with xrank.get_tensors_parallel(mine, [0, 1]) as parts:
                if parts and not (folder / "open").exists():
                    say(folder, "open", "attacked")
                assert all(bool((part == SECRET).all()) for part in parts)
    else:

        def show(done: int, total: int) -> None:
            if not (folder / "open").exists():
                say(folder, "open", "attacked")

        xrank.export_model(
            {f"{rank}.weight": mine}, folder / "out", config_overrides={"model_type": "own"}, progress=show
        )
    (folder / f"done-{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
