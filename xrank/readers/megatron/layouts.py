"""The layouts of Megatron-core's tensors over tensor-parallel ranks, as data: name -> layout.

The axis ``tp`` is tensor parallelism, ``etp`` that of the experts, ``ep`` expert parallelism. Sources in megatron/core:
column parallel layers cut rows, row parallel layers cut columns (tensor_parallel/layers.py); a gated linear_fc1 holds
its own gate and up halves on every rank (transformer/mlp.py: glu); attention's linear_qkv is cut between query groups,
whose rows are adjacent (transformer/attention.py). Norms, the router and biases added after the sum are replicas.

A vision-language model holds a decoder as ``language_model``, which pipeline stages share, and on the first stage a
vision tower: another decoder of Megatron's (``vision_model.decoder``), or Hugging Face's module, whole on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from xrank.layout import TensorLayout

_LANGUAGE = r"(?:[A-Za-z]\w*\.)*language_model\."
_TOWER = rf"(?:{_LANGUAGE}|(?:[A-Za-z]\w*\.)*vision_model\.)?"
DECODER = re.compile(rf"(?:{_LANGUAGE})?decoder\.layers(?=\.)", re.ASCII)
"""The stack of layers that pipeline stages share."""
LAYER = re.compile(rf"{DECODER.pattern}\.(0|[1-9]\d{{0,8}})\.(.*)", re.ASCII)
"""A layer of it: its number, and the rest of the name."""

_LAYER = r"(?:decoder|mtp)\.layers\.\d+\.(?:transformer_layer\.)?"
_PROJECTION = r"(?:vision_)?projection\.encoder\."
_MLP = rf"(?:{_LAYER}mlp\.(?:shared_experts\.)?|{_PROJECTION})"
_MIXER = rf"{_LAYER}(?:mixer|self_attention)\."
_EXPERT = rf"{_LAYER}mlp\.experts\."
_LOCAL = rf"{_EXPERT}local_experts\.\d+\."

_RULES: Sequence[tuple[str, str]] = (
    (r"embedding\.word_embeddings\.weight", "[v/tp, h]"),
    (r"output_layer\.weight", "[v/tp, h]"),
    (r"output_layer\.bias", "[v/tp]"),
    (r"embedding\.(?:position|tokentype)_embeddings\.weight", "[n, h]"),
    (r"decoder\.final_(?:layer)?norm\.(?:weight|bias)", "[h]"),
    (r"mtp\.layers\.\d+\.(?:enorm|hnorm|final_layernorm)\.(?:weight|bias)", "[h]"),
    (r"mtp\.layers\.\d+\.eh_proj\.weight", "[h/tp, two]"),
    (rf"{_LAYER}(?:input|pre_mlp|post_self_attn|post_mlp)_layernorm\.(?:weight|bias)", "[h]"),
    (rf"{_LAYER}ls[12]", "[h]"),
    (r"(?:vision_projection\.mm_input_projection|multi_modal_projector\.proj)\.weight", "[h/tp, c]"),
    # Mamba's mixer, and the gated delta net (ssm/mamba_mixer.py, ssm/gated_delta_net.py); `layout_of_packed` has what
    # holds several projections side by side.
    (rf"{_LAYER}norm\.(?:weight|bias)", "[h]"),
    (rf"{_MIXER}in_proj\.layer_norm_(?:weight|bias)", "[h]"),
    (rf"{_MIXER}out_proj\.weight", "[h, n/tp]"),
    (rf"{_MIXER}(?:A_log|D|dt_bias)|{_LAYER}mixer\.norm\.weight", "[n/tp]"),
    (rf"{_LAYER}self_attention\.out_norm\.weight", "[d]"),
    (rf"{_LAYER}self_attention\.(?:q|k)_layernorm\.(?:weight|bias)", "[d]"),
    (rf"{_LAYER}self_attention\.linear_qkv\.layer_norm_(?:weight|bias)", "[h]"),
    (rf"{_LAYER}self_attention\.linear_qkv\.weight", "[rows/tp, h]"),
    (rf"{_LAYER}self_attention\.linear_qkv\.bias", "[rows/tp]"),
    (rf"{_LAYER}self_attention\.linear_proj\.weight", "[h, cols/tp]"),
    (rf"{_LAYER}self_attention\.linear_proj\.bias", "[h]"),
    (rf"{_LAYER}self_attention\.core_attention\.softmax_offset", "[a/tp]"),
    # Megatron-Bridge's norms of a layer's outputs (gemma2_provider.py: TERowParallelLinearLayerNorm), and mbridge's.
    (rf"{_LAYER}(?:self_attention\.linear_proj|mlp\.linear_fc2)\.post_layernorm\.(?:weight|bias)", "[h]"),
    (rf"{_LAYER}post_(?:attention|feedforward)_layernorm\.(?:weight|bias)", "[h]"),
    # Latent attention (transformer/multi_latent_attention.py); `layout_of_down_projection` has its linear_*_down_proj.
    (rf"{_LAYER}self_attention\.kv_layernorm\.(?:weight|bias)", "[r]"),
    (rf"{_LAYER}self_attention\.linear_(?:q|kv)_up_proj\.layer_norm_(?:weight|bias)", "[r]"),
    (rf"{_LAYER}self_attention\.linear_q_proj\.weight", "[rows/tp, h]"),
    (rf"{_LAYER}self_attention\.linear_(?:q|kv)_up_proj\.weight", "[rows/tp, r]"),
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
        (re.compile(rf"{_TOWER}(?:{pattern})", re.ASCII), TensorLayout.parse(text))
        for pattern, text in (*_RULES, *(_GATED if is_gated else _PLAIN))
    )
    for is_gated in (False, True)
}

_DOWN = re.compile(rf"{_TOWER}{_LAYER}self_attention\.linear_(q|kv)_down_proj\.weight")
_DOWN_ROWS = {"q": ("q_lora_rank",), "kv": ("kv_lora_rank", "qk_pos_emb_head_dim")}
_DOWN_WHOLE, _DOWN_CUT = TensorLayout.parse("[r, h]"), TensorLayout.parse("[r/tp, h]")
_PACKED = re.compile(rf"({_TOWER}{_MIXER})(in_proj\.weight|conv1d\.(?:weight|bias))", re.ASCII)
_EXPERT_NUMBER = re.compile(rf"({_TOWER}{_EXPERT}(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{{1,9}})(\..*)?")
_ANY_EXPERT = re.compile(r".*\.experts\..*")
_GROUPED = re.compile(rf"{_TOWER}{_EXPERT}weight([12])")
_VISION = re.compile(
    r"(?:[A-Za-z]\w*\.)*(?:visual|vision_model|vision_tower|vision_projection|multi_modal_projector)\..*", re.ASCII
)
_STACK = re.compile(rf"({_TOWER}{_PROJECTION}|{_TOWER})", re.ASCII)
_FC1 = re.compile(r"(linear_fc1)(?=\.weight\d*$)|(?<=experts\.)(weight1)$")


@lru_cache(maxsize=64)
def plain_layout(num_dims: int, cut: int | None = None, stride: int = 1) -> TensorLayout:
    """Return the layout of a whole tensor, or with one cut along one dim of `stride` pieces end to end."""
    dims = [f"d{dim}" for dim in range(num_dims)]
    if cut is not None:
        dims[cut] = f"{stride} n/tp" if stride > 1 else f"{dims[cut]}/tp"
    return TensorLayout.parse(f"[{', '.join(dims)}]")


def layout_of(name: str, *, is_gated: bool) -> TensorLayout | None:
    """Return the layout of a tensor by its global name; None for a name that the table lacks."""
    return next((layout for pattern, layout in _LAYOUTS[is_gated] if pattern.fullmatch(name)), None)


def layout_of_down_projection(name: str, num_rows: int, args: Mapping[str, Any], num_ways: int) -> TensorLayout | None:
    """Return the layout of latent attention's projection into fewer dims; None for another name or number of rows.

    Megatron's own linear layers cut it, Transformer Engine's repeat it. The rows of a part show which layers the run
    used.
    """
    found = _DOWN.fullmatch(name)
    keys = () if found is None else _DOWN_ROWS[found[1]]
    rows = [args.get(key) for key in keys]
    whole = sum(n for n in rows if type(n) is int)
    if not keys or not all(type(n) is int for n in rows) or whole not in (num_rows, num_rows * num_ways):
        return None
    return _DOWN_WHOLE if whole == num_rows else _DOWN_CUT


def layout_of_packed(name: str, shapes: Mapping[str, tuple[int, ...]], num_ways: int) -> TensorLayout | None:
    """Return the layout of several projections side by side, of which each rank has its part; None for another name.

    The shapes of the mixer's other tensors give the sizes: out_proj has the columns of x or of the values, A_log the
    heads, and conv1d the rows that it mixes.

    Example:
        >>> shapes = {"mixer.in_proj.weight": (19, 3), "mixer.conv1d.bias": (10,), "mixer.out_proj.weight": (3, 6)}
        >>> shapes = {f"decoder.layers.0.{name}": shape for name, shape in shapes.items()}
        >>> shapes["decoder.layers.0.mixer.conv1d.weight"] = (10, 1, 4)
        >>> shapes["decoder.layers.0.mixer.A_log"] = (3,)
        >>> print(layout_of_packed("decoder.layers.0.mixer.conv1d.bias", shapes, 2))
        [<x: 12/tp | B: 4/tp | C: 4/tp>]
    """
    found = _PACKED.fullmatch(name)
    if found is None:
        return None
    needed = (f"{found[1]}{own}" for own in ("in_proj.weight", "conv1d.weight", "out_proj.weight", "A_log"))
    projected, mixed, out, heads = (shapes.get(one, ()) for one in needed)
    if (len(projected), len(mixed), len(out), len(heads)) != (2, 3, 2, 1):
        return None
    inner, (state, rest) = out[1], divmod(mixed[0] - out[1], 2)
    if found[1].endswith("mixer."):
        parts = {"z": inner, "x": inner, "B": state, "C": state, "dt": heads[0]}
        in_conv: tuple[str, ...] = ("x", "B", "C")
    else:
        parts = {"query": state, "key": state, "value": inner, "z": inner, "beta": heads[0], "alpha": heads[0]}
        in_conv = ("query", "key", "value")
    if rest or state < 1 or sum(parts.values()) != projected[0]:
        return None
    if found[2].startswith("conv1d"):
        parts = {part: parts[part] for part in in_conv}
    rows = " | ".join(f"{part}: {number * num_ways}/tp" for part, number in parts.items())
    others = {"in_proj.weight": ", h", "conv1d.weight": ", one, k", "conv1d.bias": ""}[found[2]]
    return TensorLayout.parse(f"[<{rows}>{others}]")


def expert_in(name: str) -> tuple[str, int, str] | None:
    """Return (text before an expert's number, the number, text after it); None for a name without an expert."""
    found = _EXPERT_NUMBER.fullmatch(name)
    if found is not None:
        return found[1], int(found[2]), found[3] or ""
    if _ANY_EXPERT.fullmatch(name) and not _GROUPED.fullmatch(name) and "shared_experts" not in name:
        raise ValueError(name)
    return None


def count_experts(names: Iterable[str]) -> int:
    """Return the number of experts per layer, counting those with a number in their names; 0 without experts."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        found = expert_in(name)
        if found is not None:
            numbers.setdefault(f"{found[0]}#{found[2]}", set()).add(found[1])
    # The largest number and the count agree only without gaps.
    counts = {max(each) + 1 for each in numbers.values()} | {len(each) for each in numbers.values()}
    if len(counts) > 1:
        raise ValueError(f"{sorted(counts)} experts")
    return counts.pop() if counts else 0


def whole_name(name: str, first_layer: int, first_expert: int) -> tuple[str, bool]:
    """Return a tensor's name in the whole model, and whether it belongs to one expert.

    The given name counts the layers of its chunk and the experts of its rank from 0. In the whole model, the chunk
    begins with `first_layer`, and the rank with `first_expert`.
    """
    found = LAYER.fullmatch(name)
    if found is not None:
        name = f"{name[: found.start(1)]}{first_layer + int(found[1])}.{found[2]}"
    expert = expert_in(name)
    if expert is None:
        return name, False
    return f"{expert[0]}{first_expert + expert[1]}{expert[2]}", True


def is_kept_whole(name: str) -> bool:
    """Return whether a tensor that the table lacks belongs to Hugging Face's own vision module: whole on each rank.

    Megatron-Bridge and mbridge hold such modules beside their language models (Megatron-Bridge 0.3.1:
    models/qwen_vl/modeling_qwen25_vl.py; mbridge 0.15.1: models/glm4_vl/model.py).
    """
    return in_vision_tower(name) and ".decoder." not in name


def in_vision_tower(name: str) -> bool:
    """Return whether a tensor belongs to a vision tower, which lies whole on the first stage."""
    return _VISION.fullmatch(name) is not None


def stack_of(name: str) -> str:
    """Return the text before a tensor's name in its stack of layers; a stack's blocks are gated alike.

    >>> stack_of("vision_model.decoder.layers.0.mlp.linear_fc1.weight")
    'vision_model.'
    """
    found = _STACK.match(name)
    assert found is not None  # it matches "", too
    return found[1]


def is_projection(name: str) -> bool:
    """Return whether it is the weight of a linear_fc1, which may be a gate and an up projection."""
    return _FC1.search(name) is not None and layout_of(name, is_gated=True) is not None


def projections(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int, int]]:
    """Yield (name of a linear_fc1's weight, its rows, the rows of one projection).

    The rows of one projection equal the columns of linear_fc2; without a linear_fc2 nothing is yielded. `shapes` are
    those of all weights, cut or whole; GroupedMLP's as from `shape_of_grouped`.
    """
    for name, one in shapes.items():
        pair = _FC1.sub(lambda found: "linear_fc2" if found[1] else "weight2", name)
        other = shapes.get(pair, ())
        if not is_projection(name) or min(len(one), len(other)) < 2:
            continue
        # GroupedMLP has the projections as columns, all others as rows.
        yield name, one[0] if len(one) == 2 else one[2], other[1]


def shape_of_grouped(name: str, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...] | None:
    """Return the shape of GroupedMLP's tensor with its experts as a dim; None for any other tensor.

    GroupedMLP stores all experts in one matrix, and views it as one matrix per expert (transformer/moe/experts.py:
    forward).
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
