"""How Megatron-core's modules cut their tensors over tensor-parallel ranks, as data: name -> layout.

The axis ``tp`` is tensor parallelism, ``etp`` that of the experts, ``ep`` expert parallelism. What each module does is
in megatron/core: column parallel layers cut rows, row parallel ones columns (tensor_parallel/layers.py); a gated
linear_fc1 holds its own gate and up halves on every rank (transformer/mlp.py: glu); attention's linear_qkv is cut
between query groups, whose rows stand together (transformer/attention.py). Norms, the router and biases that are added
after the sum are replicas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from xrank.layout import TensorLayout

__all__ = ["expert_in", "grouped_shape", "layout_of"]

_LAYER = r"(?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?"
_MLP = rf"{_LAYER}mlp\.(?:shared_experts\.)?"
_EXPERT = rf"{_LAYER}mlp\.experts\."
_LOCAL = rf"{_EXPERT}local_experts\.\d+\."

_RULES: Sequence[tuple[str, str]] = (
    (r"embedding\.word_embeddings\.weight", "[v/tp, h]"),
    (r"output_layer\.weight", "[v/tp, h]"),
    (r"output_layer\.bias", "[v/tp]"),
    (r"embedding\.(?:position|tokentype)_embeddings\.weight", "[n, h]"),
    (r"decoder\.final_layernorm\.(?:weight|bias)", "[h]"),
    (rf"{_LAYER}(?:input|pre_mlp|post_self_attn|post_mlp)_layernorm\.(?:weight|bias)", "[h]"),
    (rf"{_LAYER}self_attention\.(?:q|k)_layernorm\.(?:weight|bias)", "[d]"),
    (rf"{_LAYER}self_attention\.linear_qkv\.layer_norm_(?:weight|bias)", "[h]"),
    (rf"{_LAYER}self_attention\.linear_qkv\.weight", "[rows/tp, h]"),
    (rf"{_LAYER}self_attention\.linear_qkv\.bias", "[rows/tp]"),
    (rf"{_LAYER}self_attention\.linear_proj\.weight", "[h, cols/tp]"),
    (rf"{_LAYER}self_attention\.linear_proj\.bias", "[h]"),
    (rf"{_MLP}linear_fc1\.layer_norm_(?:weight|bias)", "[h]"),
    (rf"{_MLP}linear_fc2\.weight", "[h, f/tp]"),
    (rf"{_MLP}linear_fc2\.bias", "[h]"),
    (rf"{_LAYER}mlp\.shared_experts\.gate_weight", "[one, h]"),
    (rf"{_LAYER}mlp\.router\.weight", "[e, h]"),
    (rf"{_LAYER}mlp\.router\.(?:bias|expert_bias|local_tokens_per_expert)", "[e]"),
    (rf"{_LOCAL}linear_fc2\.weight|{_EXPERT}linear_fc2\.weight\d+", "[h, f/etp]"),
    (rf"{_EXPERT}weight2", "[e/ep, f/etp, h]"),
    (rf"{_LOCAL}linear_fc2\.bias|{_EXPERT}linear_fc2\.bias\d+", "[h]"),
)
_PLAIN: Sequence[tuple[str, str]] = (
    (rf"{_EXPERT}weight1", "[e/ep, h, f/etp]"),
    (rf"{_MLP}linear_fc1\.weight", "[f/tp, h]"),
    (rf"{_MLP}linear_fc1\.bias", "[f/tp]"),
    (rf"{_LOCAL}linear_fc1\.weight|{_EXPERT}linear_fc1\.weight\d+", "[f/etp, h]"),
    (rf"{_LOCAL}linear_fc1\.bias|{_EXPERT}linear_fc1\.bias\d+", "[f/etp]"),
)
_GATED = tuple(
    (pattern, layout.replace("f/tp", "<gate: f/tp | up: f/tp>").replace("f/etp", "<gate: f/etp | up: f/etp>"))
    for pattern, layout in _PLAIN
)
_LAYOUTS = {
    is_gated: tuple(
        (re.compile(pattern), TensorLayout.parse(text))
        for pattern, text in (*_RULES, *(_GATED if is_gated else _PLAIN))
    )
    for is_gated in (False, True)
}

_EXPERT_NUMBER = re.compile(rf"({_EXPERT}(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{{1,9}})(\..*)?")
_ANY_EXPERT = re.compile(r".*\.experts\..*")
_GROUPED = re.compile(rf"{_EXPERT}weight([12])")


def layout_of(name: str, *, is_gated: bool) -> TensorLayout | None:
    """Return how a tensor is cut, by its global name; None for a name that the table does not know.

    Args:
        name: the tensor's name, with its layer's number.
        is_gated: whether linear_fc1 is a gate and an up projection.
    """
    return next((layout for pattern, layout in _LAYOUTS[is_gated] if pattern.fullmatch(name)), None)


def expert_in(name: str) -> tuple[str, int, str] | None:
    """Return what stands before an expert's number, the number, and what follows; None where there is none.

    Raises:
        ValueError: it is a tensor of experts that has no number, so that several experts share it.
    """
    found = _EXPERT_NUMBER.fullmatch(name)
    if found is not None:
        return found[1], int(found[2]), found[3] or ""
    if _ANY_EXPERT.fullmatch(name) and not _GROUPED.fullmatch(name) and "shared_experts" not in name:
        raise ValueError(name)
    return None


def grouped_shape(name: str, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...] | None:
    """Return what the tensor of several experts really is; None for any other tensor.

    GroupedMLP has its weights as matrices that it views as one for each expert (transformer/moe/experts.py: forward).

    Args:
        name: the tensor's name.
        shape: as it is stored.
        num_experts: how many experts' it is.

    Raises:
        ValueError: the shape is not that of as many experts.
    """
    found = _GROUPED.fullmatch(name)
    if found is None:
        return None
    if len(shape) != 2 or num_experts < 1 or shape[2 - int(found[1])] % num_experts:
        raise ValueError(f"{list(shape)} for {num_experts} experts")
    rows, columns = shape
    return (
        (num_experts, rows, columns // num_experts) if found[1] == "1" else (num_experts, rows // num_experts, columns)
    )
