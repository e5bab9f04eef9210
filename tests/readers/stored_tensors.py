"""Reads the tensors of a stored model by the engine, which proves each covered exactly once and compares checksums."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import torch

from xrank.dtypes import dtype
from xrank.engine.buffers import MemoryTarget
from xrank.engine.executor import execute
from xrank.engine.planner import make_plan
from xrank.engine.sources import open_source
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import StoredModel
from xrank.layout.training_state import TrainingState
from xrank.recipes.options import GatherOptions


def read_tensors(stored: StoredModel, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Return whole tensors by name: these, or all."""
    wanted = None if names is None else set(names)
    outputs = [OutputTensor(s.name, s.dtype, s.shape) for s in stored.shards if wanted is None or s.name in wanted]
    plan = make_plan(stored, [OutputFile.bare(output) for output in outputs])
    memory = [torch.empty(output.nbytes, dtype=torch.uint8) for output in outputs]
    with closing(open_source(stored)) as source:
        execute(plan, source, MemoryTarget([each.numpy().data for each in memory]), budget=GatherOptions().budget)
    found = {}
    for output, raw in zip(outputs, memory, strict=True):
        element = getattr(torch, dtype(output.dtype).torch_name)
        found[output.name] = raw.view(element).view(output.shape) if output.nbytes else torch.empty(output.shape)
    return found


def read_moments(state: TrainingState) -> dict[str, dict[str, torch.Tensor]]:
    """Return each parameter's tensors by kind."""
    tensors = read_tensors(state.stored)
    return {name: {kind: tensors[own] for kind, own in kinds.items()} for name, kinds in state.states.items()}
