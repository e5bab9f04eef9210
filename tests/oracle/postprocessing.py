"""ModelOpt's post-processing with gathers of one's choice in place of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from modelopt.torch.export import distribute, postprocess
from modelopt.torch.export.model_config import ModelConfig

import xrank
from tests.oracle.made_models import NUM_STAGES

__all__ = ["GATHERS", "merged", "using"]

_NAMES = ("get_tensors_parallel", "get_configs_parallel")
GATHERS: dict[str, dict[str, Any]] = {
    "ModelOpt": {name: getattr(distribute, name) for name in _NAMES},
    "xrank": {name: getattr(xrank, name) for name in _NAMES},
}


def merged(part: ModelConfig, workspace_path: Path | None = None) -> list[ModelConfig]:
    """Merge the parts of all ranks into one model, which rank 0 gets; the part is changed.

    Args:
        part: this rank's.
        workspace_path: the directory through which the stages' configs go; None for shared memory.
    """
    return postprocess.postprocess_model_config(
        part, training_pipeline_parallel=NUM_STAGES, workspace_path=workspace_path
    )


@contextmanager
def using(gathers: dict[str, Any]) -> Iterator[None]:
    """Let ModelOpt gather with these functions; every rank must come.

    ModelOpt's own get segments of this run's own: their names are the same for all jobs of a host.
    """
    run = [uuid.uuid4().hex]
    dist.broadcast_object_list(run)

    def named(name: str, create: bool = False, size: int = 0) -> SharedMemory:
        return SharedMemory(f"{run[0]}_{name}", create, size)

    with patch.multiple(postprocess, **gathers), patch.object(distribute, "SharedMemory", named):
        yield
