"""Layouts of modules' outputs, where a LayoutMap has a rule for ``<name of the module>/output``, as in Keras."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from xrank.distribution.devices import live_mesh
from xrank.distribution.placed import fit_layout, placements_for
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """A hook that redistributes the DTensors that a module returns to a caller that gave it DTensors.

    Inside a model activations are plain tensors, for which the layout changes no value: it is only checked.
    """

    layout: TensorLayout
    mesh: DeviceMesh

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output in its layout."""
        return pytree.tree_map_only(torch.Tensor, self._redistribute, output)

    def _redistribute(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            fit_layout(self.layout, tensor.ndim)
            return tensor
        return tensor.redistribute(live_mesh(self.mesh), placements_for(self.layout, self.mesh, tensor.shape))


def output_rules(layout_map: LayoutMap, roots: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return the output rule of each module that has one; the path of the outermost module's output is ``output``."""
    found: dict[nn.Module, str] = {}
    for root in roots:
        for name, module in root.named_modules():
            rule = layout_map.rule_for(f"{name}/output" if name else "output")
            if rule is not None:
                found[module] = rule
    return found
