"""A vLLM follows the versions that a trainer's ranks leave in a folder, and never connects to them.

    python -m tests.oracle.deltas_vllm KIND TRAINER ENGINE_RANKS STEPS FOLDER

Arguments and comparisons are those of `tests.oracle.refit_vllm`: after each step the engine's tokens, and the digests
of its tensors, must be those of a vLLM that has loaded the step's folder of ``save_pretrained``. At last a weight is
changed behind the engine's back, which its check must name.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.oracle.refit_trainer import TRAINERS, Trainer, locate_trained
from tests.oracle.refit_vllm import EngineClient, install_plugin, make_wanted, serve

WHOLE_EVERY = 8


def _train(rank: int, *arguments: Any) -> None:
    try:
        _train_rank(rank, *arguments)
    except BaseException:
        traceback.print_exc()  # torch shows that of one rank only
        raise


def _train_rank(rank: int, kind: str, trainer: str, steps: int, folder: str) -> None:
    import xrank

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TRAINERS[trainer])
    part, engine = Trainer(kind, trainer, Path(folder).parent), EngineClient(f"{folder}/pipe")
    base = str(locate_trained(kind, 0, Path(folder).parent)) if part.mesh is not None else None
    found = []
    deltas = f"{folder}/deltas"
    with xrank.offer_weights(
        part.model,
        f"{folder}/address",
        mesh=part.mesh,
        base_model=base,
        snapshot=True,
        deltas=deltas,
        whole_every=WHOLE_EVERY,
    ) as offer:
        for step in range(1, steps + 1):
            part.set_step(step)
            offer.publish(step)
            if rank == 0:
                if step == 1:
                    engine.init_weight_transfer_engine({"deltas": deltas, "proof": True})
                engine.start_weight_update()
                engine.update_weights({"step": step})
                engine.finish_weight_update()
                found.append(engine.call("look"))
            dist.barrier()
    if rank == 0:
        found[-1]["spoiled"] = engine.call("spoil")
        engine.call("close")
        Path(f"{folder}/found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(kind: str, trainer: str, ranks: int, steps: int, folder: Path) -> None:
    """Compare all steps, and print one line."""
    install_plugin(folder / "plugin")
    wanted = make_wanted(kind, ranks, steps, folder)
    with tempfile.TemporaryDirectory(dir=folder) as run:
        engine = mp.get_context("spawn").Process(target=serve, args=(kind, ranks, run))
        engine.start()
        while not Path(f"{run}/pipe").exists():
            assert engine.is_alive(), "the engine did not start"
            engine.join(0.1)
        try:
            mp.spawn(_train, (kind, trainer, steps, run), nprocs=TRAINERS[trainer])
            engine.join(60)
        finally:
            engine.kill()
        found = json.loads(Path(f"{run}/found.json").read_text())
        sizes = [
            sum(file.stat().st_size for file in folder.iterdir()) for folder in sorted(Path(f"{run}/deltas").iterdir())
        ]
    for step, (got, expected) in enumerate(zip(found, wanted, strict=True), 1):
        assert got["digests"] == expected["digests"], step
        assert got["tokens"] == expected["tokens"], step
        assert [report["step"] for report in got["reports"]] == [step] * ranks
        assert got["checks"] == [{"match": True, "mismatches": []}] * ranks, got["checks"]
    *_, name = found[-1]["spoiled"][0]
    *_, (mismatch,) = found[-1]["spoiled"][1]
    assert mismatch.startswith(f"{name}, engine rank {ranks - 1}: row"), mismatch
    assert len({json.dumps(each["tokens"]) for each in found}) == len(found)  # the steps differ
    print(f"{kind} {trainer} -> {ranks}: {len(found)} steps equal; versions of {min(sizes):,} to {max(sizes):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]).resolve())
