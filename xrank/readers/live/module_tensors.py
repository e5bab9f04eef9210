"""The tensors of a module that is to be filled: those that checkpoints contain, and those that they never contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from xrank.errors import UsageError

if TYPE_CHECKING:
    import torch

FilledModule: TypeAlias = "torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any]"
"""A module, Megatron's chunks of one, or a state dict."""


def check_model(model: object) -> None:
    """Check that the argument is a model.

    Raises:
        UsageError: it is not a module, a mapping or a list of modules.
    """
    import torch

    is_chunks = isinstance(model, list | tuple) and all(isinstance(chunk, torch.nn.Module) for chunk in model)
    if not (isinstance(model, torch.nn.Module | Mapping) or (is_chunks and model)):
        what = type(model).__name__
        what = f"an empty {what}" if is_chunks else f"a {what}{_elements(model)}"
        raise UsageError(
            f"the model is {what}",
            got=what,
            want="a module, tensors by name, or Megatron's chunks of one module",
            next_step="give the module, or its state dict",
        )


def _elements(model: object) -> str:
    if not isinstance(model, list | tuple):
        return ""
    return " of " + " and ".join(f"{name}s" for name in sorted({type(element).__name__ for element in model}))


def check_materialised(module: FilledModule) -> None:
    """Check that a module has memory to fill.

    Raises:
        UsageError: a parameter or a persistent buffer is on the meta device, or the argument is not a model.
    """
    check_model(module)
    for name, tensor in list_tensors(module):
        if tensor.device.type == "meta":
            raise UsageError(
                f"{name} is on the meta device: it has no memory to fill",
                tensor=name,
                got="a tensor without values",
                want="a tensor in memory, whatever its values",
                next_step='materialise the module first: module.to_empty(device="cpu"), or on its final device',
            )


def names_left_out(module: FilledModule) -> list[str]:
    """Return the names of buffers that no state dict contains."""
    return [] if isinstance(module, Mapping) else [name for chunk in _chunks(module) for name in _list_left_out(chunk)]


def count_changes(module: FilledModule, views: Sequence[torch.Tensor]) -> None:
    """Inform autograd that all tensors were changed in place; a DTensor and its local tensor count separately.

    Args:
        module: the filled module.
        views: the local tensors that were written to.
    """
    import torch

    changed = [*(tensor for _, tensor in list_tensors(module)), *views]
    # Inference tensors have no version to count.
    torch.autograd.graph.increment_version([tensor for tensor in changed if not tensor.is_inference()])


def list_tensors(module: FilledModule) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that checkpoints contain, with their names: parameters and persistent buffers."""
    import torch

    if isinstance(module, Mapping):
        return [(name, tensor) for name, tensor in module.items() if isinstance(tensor, torch.Tensor)]
    found: list[tuple[str, torch.Tensor]] = []
    for chunk in _chunks(module):
        left_out = set(_list_left_out(chunk))
        found += chunk.named_parameters()
        found += ((name, buffer) for name, buffer in chunk.named_buffers() if name not in left_out)
    return found


def _chunks(module: torch.nn.Module | Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
    import torch

    return [module] if isinstance(module, torch.nn.Module) else module


def _list_left_out(module: torch.nn.Module) -> Iterator[str]:
    for prefix, child in module.named_modules():
        for name in sorted(child._non_persistent_buffers_set):
            if child._buffers.get(name) is not None:
                yield f"{prefix}.{name}" if prefix else name
