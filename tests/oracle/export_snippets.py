"""Calls what docs/integrations.md shows for torchtitan and verl, in trainers of these packages: run by torchrun.

    torchrun --nproc-per-node 2 -m tests.oracle.export_snippets FOLDER CASE...

A case's folder then holds ``made``, what the snippet exported, and ``want``: what save_pretrained writes of the state
that the package gathers.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from tests.oracle.trainers.families import FAMILIES, load_model, write_base_model
from tests.oracle.trainers.frameworks import gather_state
from tests.oracle.trainers.own_models import gather_torchtitan, let_torchtitan_run_on_cpu, train_torchtitan
from tests.oracle.trainers.train import allow_fsdp_on_cpu, write_reference

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
FAMILY = FAMILIES["llama"]


def read_snippets() -> dict[str, Any]:
    """Return the functions of the page."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "def export_verl" in block)
    names: dict[str, Any] = {}
    exec(compile(block, PAGE.name, "exec"), names)
    return names


def run_torchtitan(kind: str, folder: Path, base: Path, export: Callable[..., Any]) -> None:
    plain = load_model(FAMILY, base)
    trainer, adapter = train_torchtitan({"pp": 2 if kind == "pp" else 1}, folder / "run", plain)
    exported = export(trainer, folder / "made", base_model=base)
    want = gather_torchtitan(trainer, adapter)
    with torch.no_grad():
        for part in trainer.model_parts:
            for parameter in part.parameters():
                parameter.zero_()  # the next step
    assert exported.result().ok
    write_want(plain, want, folder)


def let_verl_run_on_cpu() -> None:
    """Answer for a CPU what verl asks of a GPU: it takes a machine without one for a GPU's driver process."""
    from verl.plugin.platform import get_platform

    let_torchtitan_run_on_cpu()
    platform: Any = type(get_platform())
    platform.device_name, platform.device_module = "cpu", torch.cpu
    platform.current_device = lambda self: torch.device("cpu")
    # verl lets FSDP1 send rank 0's values, which torch refuses on a CPU; here all ranks load the same.
    fsdp1: Any = torch.distributed.fsdp._init_utils
    fsdp1._check_module_states_for_sync_module_states = lambda states: None


def run_verl(kind: str, folder: Path, base: Path, export: Callable[..., Any]) -> None:
    let_verl_run_on_cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

    if "cpu" not in EngineRegistry._engines["language_model"]["fsdp"]:
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(FSDPEngineWithLMHead)
    override = {"attn_implementation": "eager"}
    model = HFModelConfig(path=str(base), load_tokenizer=False, use_remove_padding=False, override_config=override)
    engine = FSDPEngineConfig(strategy=kind, use_torch_compile=False, use_remove_padding=False)
    optimizer, checkpoint = FSDPOptimizerConfig(lr=1e-2, total_training_steps=2), CheckpointConfig()
    worker = TrainingWorker(TrainingWorkerConfig(None, "language_model", model, engine, optimizer, checkpoint))
    worker.reset()
    for parameter in worker.engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    worker.engine.optimizer.step()
    exported = export(worker, folder / "made")
    want = gather_state(worker.engine.module)
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.zero_()  # the next step
    assert exported.result().ok
    plain = load_model(FAMILY, base)
    plain.config = worker.engine.module.config  # verl adds to it
    write_want(plain, want, folder)


def write_want(plain: Any, state: dict[str, torch.Tensor], folder: Path) -> None:
    if dist.get_rank() == 0:
        write_reference(plain, state, folder / "want")
    dist.barrier()


def main(root: str, *cases: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    allow_fsdp_on_cpu()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    base, snippets = Path(root, "base"), read_snippets()
    if dist.get_rank() == 0:
        write_base_model(FAMILY, base, is_tied=False)
    dist.barrier()
    for case in cases:
        framework, kind = case.split("-")
        run = run_torchtitan if framework == "torchtitan" else run_verl
        run(kind, Path(root, case), base, snippets[f"export_{framework}"])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # a gloo thread that drops its last tensor while Python closes aborts or hangs
