"""Modules whose parameters are cut compute and train as whole ones do: the comparison."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from xrank.distribution import DeviceMesh, LayoutMap, ModelParallel, list_devices

Example = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]
"""How a module is made, and inputs whose dim 0 is the batch."""


def lay_out(module: nn.Module, shape: tuple[int, int], axis: str, dim: int) -> tuple[ModelParallel, nn.Module]:
    """Cut that dim of all parameters that have it, evenly or not."""
    layout_map = LayoutMap(DeviceMesh(shape, ("batch", "model"), list_devices()))
    for name, parameter in module.named_parameters():
        if parameter.ndim > dim:
            sizes = [f"d{i}" for i in range(parameter.ndim)]
            is_uneven = "/" in axis and parameter.shape[dim] % 4  # torch takes such cuts only where they are even
            sizes[dim] += "/~model" if is_uneven else f"/~{axis}"
            layout_map[name] = f"[{', '.join(sizes)}]"
    distribution = ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    return distribution, distribution.distribute_module(copy.deepcopy(module))


def run(module: nn.Module, inputs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    outputs = [
        leaf for leaf in pytree.tree_leaves(module(*inputs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    loss = sum(output.square().mean() if output.ndim else output for output in outputs)
    loss.backward()
    return outputs, loss.detach()


def take_part(whole: torch.Tensor, like: torch.Tensor, count: int, part: int) -> torch.Tensor:
    """Return the part of an output that a part of the batch makes."""
    for dim, (size, wanted) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if size != wanted:
            return whole.chunk(count, dim)[part]
    return whole


def average(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def check_example(example: Example, shape: tuple[int, int], axis: str, dim: int) -> None:
    """Compare outputs, loss, gradients and buffers with those of the whole module."""
    make, make_inputs = example
    torch.manual_seed(5)
    whole, inputs = make(), make_inputs()
    distribution, model = lay_out(whole, shape, axis, dim)
    count, part = shape[0], distribution.data_shard_id
    wanted, wanted_loss = run(whole, inputs)
    found, loss = run(model, [x.chunk(count)[part] for x in inputs])
    for output, expected in zip(found, wanted, strict=True):
        assert type(output) is torch.Tensor
        if output.ndim == 0:  # a mean of this rank's part
            output = average(output.detach())
        torch.testing.assert_close(output, take_part(expected, output, count, part))
    torch.testing.assert_close(average(loss), wanted_loss)
    for key, parameter in whole.named_parameters():
        gradient = model.get_parameter(key).grad
        if parameter.grad is None:  # no sample was in this cluster of classes
            assert gradient is None, key
            continue
        assert isinstance(gradient, DTensor), key
        assert gradient.placements == model.get_parameter(key).placements, (key, gradient.placements)
        torch.testing.assert_close(
            gradient.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    for key, buffer in whole.named_buffers():
        torch.testing.assert_close(model.get_buffer(key), buffer)


def check_all(examples: Mapping[str, Example], shape: tuple[int, int], axis: str) -> None:
    """Cut each dim of each example's parameters in turn, and name all that differ."""
    failures = []
    for name, example in examples.items():
        for dim in range(max((parameter.ndim for parameter in example[0]().parameters()), default=0)):
            try:
                check_example(example, shape, axis, dim)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                text = " ".join(str(error).split())[:300]
                failures.append(f"{name}, dim {dim}: {type(error).__name__}: {text} at {place.name}: {place.line}")
    assert not failures, "\n".join(failures)
