"""Number the layers and experts of a Megatron chunk in the whole model: a chunk counts its own from 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xrank.dialects.megatron.cuts import refusal
from xrank.dialects.megatron.layouts import LAYER, count_experts, expert_in, in_vision_tower
from xrank.dialects.megatron.mesh import MegatronMesh
from xrank.errors import LayoutError

if TYPE_CHECKING:
    import torch

CONFIG_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Axis -> its name in Megatron's configs (megatron/core/model_parallel_config.py)."""


def configs_of(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Return the Megatron configs of the chunks that have one."""
    return [chunk.config for chunk in chunks if hasattr(getattr(chunk, "config", None), CONFIG_SIZES["tp"])]


def num_experts(chunk: torch.nn.Module, names: Mapping[str, object], mesh: MegatronMesh, rank: int) -> int:
    """Return the number of experts that this rank holds in each layer, counting those with a number in their names."""
    for name in names:
        try:
            expert_in(name)
        except ValueError:
            raise refusal(
                name,
                rank,
                "the cut of an expert's tensor of this name is not known",
                got="experts without a number in their name",
                want="a name that xrank's table has",
                next_step="export from a checkpoint of --ckpt-format torch_dist, which records it",
            ) from None
    try:
        count = count_experts(names)
    except ValueError as error:
        raise LayoutError(
            f"rank {rank} holds experts with gaps, or not the same in all layers",
            rank=rank,
            got=str(error),
            want="experts counted from 0 on, as many in each layer",
            next_step="export the chunks as Megatron makes them",
        ) from None
    total = next((getattr(config, "num_moe_experts", None) for config in configs_of([chunk])), None)
    ways = mesh.lengths["ep"]
    if count and type(total) is int and total != count * ways:
        raise LayoutError(
            f"rank {rank} does not hold its share of the experts",
            rank=rank,
            got=f"{count} experts, ep={ways}",
            want=f"{total} experts in all, as in the module's config",
            next_step="give the mesh of the run, with its axis ep",
        )
    return count


def first_layer(chunk: torch.nn.Module, names: Mapping[str, object], rank: int, *, is_whole: bool) -> int:
    """Return the number of the chunk's first layer in the whole model, from the layer_number of its layers."""
    stages = {name: found for name in names if (found := LAYER.fullmatch(name))}
    other = next((name for name in names if ".layers." in name and name not in stages and not _is_counted(name)), None)
    if other is not None and not is_whole:
        raise refusal(
            other,
            rank,
            "which layer of the whole model this is, is not known",
            got="layers outside of decoder.layers, of a chunk of the model",
            want="decoder.layers",
            next_step="export the part that has a decoder of its own, as model.language_model",
        )
    modules = {int(found[1]): name[: found.end(1)] for name, found in stages.items()}
    layer_numbers = {
        number: getattr(chunk.get_submodule(modules[number]), "layer_number", None) for number in sorted(modules)
    }
    # Transformer layers are counted from 1 over all stages (megatron/core/transformer/transformer_layer.py).
    firsts = {layer - 1 - number if type(layer) is int else None for number, layer in layer_numbers.items()}
    # Layers that disagree about the first one give -1, which is refused below.
    first = firsts.pop() if len(firsts) == 1 else (0 if not firsts else -1)
    if first is None and is_whole:
        return 0
    if first is None or first < 0:
        raise refusal(
            modules[min(modules)],
            rank,
            "which layer of the whole model this is, is not known",
            got=f"layer_number {', '.join(map(str, layer_numbers.values()))}",
            want="rising by 1, counted from 1 over all stages",
            next_step="set layer_number on each module of decoder.layers, as Megatron's TransformerLayer does",
        )
    return first


def _is_counted(name: str) -> bool:
    """Return whether every stage numbers a layer as the whole model does: multi-token prediction's, a tower's."""
    return name.startswith("mtp.") or ".mtp." in name or in_vision_tower(name)
