"""Modules of one rank of a training: cut parameters have the size of the rank's part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from xrank.gradients import mark
from xrank.layout import MeshViews

KINDS = ("replica", "cut", "copy", "average", "expert", "word", "position", "conditional", "frozen")


@dataclass(frozen=True)
class MarkedParameter:
    """One parameter of a module."""

    kind: str
    numel: int
    dtype: torch.dtype = torch.float32


def module_of(told: list[MarkedParameter], views: MeshViews, rank: int) -> nn.Module:
    """Return the module of a rank; cut parameters are one element larger on the first rank along tp or etp."""
    dense, expert = views.main.coordinate(rank), views.view("expert").coordinate(rank)
    num_stages = views.main.axis_length("pp")
    module = nn.Module()
    for number, one in enumerate(told):
        if one.kind in ("word", "position") and dense["pp"] not in (0, num_stages - 1):
            continue
        numel = one.numel
        if one.kind in ("cut", "word"):
            numel += dense["tp"] == 0
        if one.kind == "expert":
            numel += expert["etp"] == 0
        parameter = nn.Parameter(torch.zeros(numel, dtype=one.dtype), requires_grad=one.kind != "frozen")
        if one.kind == "expert":
            parameter.allreduce = False
        elif one.kind == "copy":
            parameter.sequence_parallel = True
        elif one.kind == "average":
            parameter.average_gradients_across_tp_domain = True
        elif one.kind == "word":
            parameter.shared_embedding = True
        elif one.kind == "position":
            mark(parameter, tied="position")
        elif one.kind == "conditional":
            parameter.pipeline_parallel = True
        module.register_parameter(f"{one.kind}_{number}", parameter)
    return module
