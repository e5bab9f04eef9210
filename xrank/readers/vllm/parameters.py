"""vLLM's parameters: the tensors of Hugging Face that each of a rank's parameters consists of, and how they are cut.

vllm/model_executor/layers/linear.py: QKVParallelLinear puts a rank's heads of queries, keys and values below each
other, MergedColumnParallelLinear its rows of gate and up. Ranks share a head of keys and values if there are fewer
heads than ranks. vocab_parallel_embedding.py pads the vocabulary to a multiple of 64. All other parameters of the model
types below are replicas, or cut along their columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from xrank.errors import AGAIN, ContradictionError, IncompleteError, LayoutError
from xrank.layout import DeviceMesh
from xrank.layout.nests import row_major
from xrank.readers.held_tensor import HeldTensor

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose parameters are known. Other types have other parameters under the same names, as Phi-3 in its files."""
_SCALE = re.compile(r".*\.attn\._(k|v|q|prob)_scale")
"""Scales of quantised attention (vllm/model_executor/layers/attention), which are no weights."""
_VOCABULARY = re.compile(r"(model\.embed_tokens|lm_head)\.weight")
_BY_COLUMNS = re.compile(r".*\.(o_proj|down_proj)\.weight")
_FUSED = re.compile(r"(?P<module>.*\.)(?P<kind>qkv_proj|gate_up_proj)(?P<rest>\.(weight|bias))")
_FIX = "put the config.json of this model into the folder"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model by config.json, and the number of ranks that share its tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tp_size: int

    @property
    def num_replicas(self) -> int:
        """Number of ranks that share a head of keys and values."""
        return max(1, self.tp_size // self.num_kv_heads)

    def mesh(self, first_rank: int) -> DeviceMesh:
        """Return the mesh of a stage's ranks; those with the same heads of keys and values follow each other."""
        shape = (self.tp_size // self.num_replicas, self.num_replicas)
        return DeviceMesh(shape, ("kvs", "rep"), list(range(first_rank, first_rank + self.tp_size)))


def is_left_out(name: str) -> bool:
    """Return whether a parameter belongs to the engine and not to the model."""
    return _SCALE.fullmatch(name) is not None


def read_sizes(config: Mapping[str, Any], tp_size: int, folder: str) -> Sizes:
    """Return the sizes in a model's config.

    Raises:
        LayoutError: the type of model is not known, or a size is missing.
        IncompleteError: this number of ranks cannot share the heads.
    """
    if config.get("model_type") not in MODEL_TYPES:
        raise LayoutError(
            f"{folder}: it is unknown how vLLM cuts the parameters of model_type {config.get('model_type')!r}",
            file=folder,
            got=repr(config.get("model_type")),
            want=f"model_type {', '.join(MODEL_TYPES)}",
            next_step="gather the checkpoint that was trained, or give the Hugging Face folder that the engine loaded",
        )
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or (_divide(hidden, heads))
    found: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}
    found["vocab_size"] = config.get("vocab_size")
    for key, size in found.items():
        if type(size) is not int or size < 1:
            raise LayoutError(
                f"{folder}: config.json gives no {key}, which determines how parameters were cut",
                file=folder,
                got=repr(size),
                want=f"a number for {key}",
                next_step=f"{_FIX}, then {AGAIN}",
            )
    sizes = Sizes(
        num_heads=found["num_attention_heads"],
        num_kv_heads=found["num_key_value_heads"],
        head_dim=found["head_dim"],
        vocabulary=found["vocab_size"],
        tp_size=tp_size,
    )
    shared = sizes.num_kv_heads % tp_size and tp_size % sizes.num_kv_heads
    if sizes.num_heads % tp_size or shared:
        raise IncompleteError(
            f"{tp_size} ranks cannot share {sizes.num_heads} heads with {sizes.num_kv_heads} of keys and values",
            file=folder,
            got=f"files of {tp_size} ranks",
            want="the files of all ranks, and this model's config.json",
            next_step="copy the missing ranks' files from the nodes that saved them",
        )
    return sizes


def _divide(a: object, b: object) -> int | None:
    return a // b if type(a) is int and type(b) is int and b > 0 and a % b == 0 else None


def split_parameter(name: str, held: HeldTensor, sizes: Sizes) -> Iterator[tuple[str, HeldTensor]]:
    """Yield the tensors of Hugging Face in a rank's parameter, each with its layout.

    Args:
        name: vLLM's name.
        held: the parameter, on the mesh of its stage.
        sizes: the model's sizes.

    Raises:
        ContradictionError: the parameter has another size than config.json gives it.
        IncompleteError: the ranks have too few rows of the vocabulary.
    """
    fused = _FUSED.fullmatch(name)
    if fused is None or not held.shape:
        yield name, replace(held, layout=_layout_of(name, held, sizes))
        return
    kv_heads = max(1, sizes.num_kv_heads // sizes.tp_size)
    if fused["kind"] == "qkv_proj":
        q, kv = sizes.num_heads // sizes.tp_size * sizes.head_dim, kv_heads * sizes.head_dim
        parts = [("q_proj", q, "n/kvs/rep"), ("k_proj", kv, "n/kvs"), ("v_proj", kv, "n/kvs")]
    else:
        half = held.shape[0] // 2
        parts = [("gate_proj", half, "n/kvs/rep"), ("up_proj", half, "n/kvs/rep")]
    rows = sum(count for _, count, _ in parts)
    if rows != held.shape[0]:
        raise _rows_error(name, held, rows, sizes)
    first, width = 0, row_major(held.shape)[0]
    for module, count, cut in parts:
        start = held.storage_offset + first * width
        shape = (count, *held.shape[1:])
        layout = f"[{', '.join((cut, *('m' for _ in held.shape[1:])))}]"
        own = replace(held, shape=shape, strides=row_major(shape), storage_offset=start, layout=layout)
        yield f"{fused['module']}{module}{fused['rest']}", own
        first += count


def _rows_error(name: str, held: HeldTensor, rows: int, sizes: Sizes) -> ContradictionError | IncompleteError:
    # More ranks would have fewer rows each.
    kind = IncompleteError if held.shape[0] < rows else ContradictionError
    return kind(
        f"{name}: rank {held.rank} has another number of rows than config.json gives each of {sizes.tp_size} ranks",
        tensor=name,
        rank=held.rank,
        file=held.file,
        got=f"{held.shape[0]} rows",
        want=f"{rows} rows",
        next_step=f"copy the files of missing ranks into the folder; if all are there, {_FIX}",
    )


def _layout_of(name: str, held: HeldTensor, sizes: Sizes) -> str:
    if _VOCABULARY.fullmatch(name) and len(held.shape) == 2:
        total = held.shape[0] * sizes.tp_size
        if total < sizes.vocabulary:
            raise IncompleteError(
                f"{name}: {sizes.tp_size} ranks have {total} rows of it, fewer than the vocabulary",
                tensor=name,
                rank=held.rank,
                file=held.file,
                got=f"{total} rows",
                want=f"vocab_size {sizes.vocabulary} or more, by config.json",
                next_step="copy the missing ranks' files from the nodes that saved them",
            )
        if total - sizes.vocabulary >= 64 * sizes.tp_size:
            raise ContradictionError(
                f"{name}: {sizes.tp_size} ranks have more rows of it than a padded vocabulary",
                tensor=name,
                rank=held.rank,
                file=held.file,
                got=f"{total} rows",
                want=f"vocab_size {sizes.vocabulary}, padded",
                next_step=_FIX,
            )
        return f"[pad({sizes.vocabulary}, {total})/kvs/rep, h]"
    if _BY_COLUMNS.fullmatch(name) and len(held.shape) == 2:
        return "[h, n/kvs/rep]"
    return f"[{', '.join(f'd{dim}' for dim in range(len(held.shape)))}]"
