"""Megatron's checkpoints, synthesised in their two formats from whole models in Megatron-core's global names.

Here tensors are cut by plain slicing, as the modules of Megatron-core do it, so that no layout of xrank's is asked.
"""

from __future__ import annotations

import json
import pickle
import re
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["Run", "chunk_state", "whole_model", "write_config", "write_dist", "write_legacy"]

TOWER = re.compile(r"visual\.|vision_|multi_modal_projector\.")
LINEAR = re.compile(r"decoder\.|projection\.encoder\.|projector\.proj\.|mm_input_projection\.weight")
"""Within a tower: Megatron's own layers, which tensor parallelism cuts."""
HIDDEN, FFN, HEADS, GROUPS, HEAD, VOCAB, EXPERTS = 8, 12, 4, 2, 2, 16, 4


@dataclass(frozen=True)
class Run:
    """How a model was trained."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    chunks: tuple[tuple[int, ...], ...] = ((2,),)
    """Layers by virtual chunk, then by stage."""
    has_experts: bool = False
    grouped: bool = False
    """Experts as Transformer Engine's grouped linear layers name them."""
    in_one: bool = False
    """Experts of a rank as one tensor, as GroupedMLP has them."""
    gated: bool = True
    bias: bool = False
    tied: bool = False
    iteration: int = 10
    dp: int = 1
    args: dict[str, Any] = field(default_factory=dict)
    packed: dict[str, list[int]] = field(default_factory=dict)
    """Part of a name -> rows of the projections side by side in such a tensor."""
    plain: tuple[str, ...] = ("vision_projection.", "vision_model.projection.")
    """Prefixes of blocks with one projection in linear_fc1, whatever `gated` is."""

    @property
    def num_layers(self) -> int:
        return sum(map(sum, self.chunks))

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.ep * self.dp

    def namespace(self, rank: int) -> Namespace:
        told = {
            "num_layers": self.num_layers,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "num_attention_heads": HEADS,
            "num_query_groups": GROUPS,
            "padded_vocab_size": VOCAB,
            "swiglu": self.gated,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": len(self.chunks) if len(self.chunks) > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.tp if self.etp is None else self.etp,
            "context_parallel_size": 1,
            "untie_embeddings_and_output_weights": not self.tied,
            "world_size": self.world,
            "rank": rank,
            "local_rank": rank % 8,
            "params_dtype": torch.bfloat16,
            "num_experts": EXPERTS if self.has_experts else None,
        }
        return Namespace(**{**told, **self.args})


def write_config(folder: Path, run: Run) -> None:
    """Write the config.json of a Llama of these sizes."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "num_hidden_layers": run.num_layers,
        "tie_word_embeddings": run.tied,
    }
    (folder / "config.json").write_text(json.dumps(config))


def whole_model(run: Run) -> dict[str, torch.Tensor]:
    """Return a model's tensors, in the order in which a gather writes them."""
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random).bfloat16()

    model = {"embedding.word_embeddings.weight": some(VOCAB, HIDDEN)}
    for layer in range(run.num_layers):
        at = f"decoder.layers.{layer}."
        model[f"{at}self_attention.linear_proj.weight"] = some(HIDDEN, HEADS * HEAD)
        model[f"{at}self_attention.linear_qkv.layer_norm_weight"] = some(HIDDEN)
        model[f"{at}self_attention.linear_qkv.weight"] = some((HEADS + 2 * GROUPS) * HEAD, HIDDEN)
        if run.bias:
            model[f"{at}self_attention.linear_proj.bias"] = some(HIDDEN)
            model[f"{at}self_attention.linear_qkv.bias"] = some((HEADS + 2 * GROUPS) * HEAD)
        model[f"{at}pre_mlp_layernorm.weight"] = some(HIDDEN)
        halves = 2 if run.gated else 1
        if not run.has_experts:
            model[f"{at}mlp.linear_fc1.weight"] = some(halves * FFN, HIDDEN)
            model[f"{at}mlp.linear_fc2.weight"] = some(HIDDEN, FFN)
            if run.bias:
                model[f"{at}mlp.linear_fc1.bias"] = some(halves * FFN)
                model[f"{at}mlp.linear_fc2.bias"] = some(HIDDEN)
            continue
        model[f"{at}mlp.router.weight"] = some(EXPERTS, HIDDEN)
        if run.in_one:
            model[f"{at}mlp.experts.weight1"] = some(EXPERTS, HIDDEN, halves * FFN)
            model[f"{at}mlp.experts.weight2"] = some(EXPERTS, FFN, HIDDEN)
        for expert in range(0 if run.in_one else EXPERTS):
            for fc, shape in (("linear_fc1", (halves * FFN, HIDDEN)), ("linear_fc2", (HIDDEN, FFN))):
                own = f"{fc}.weight{expert}" if run.grouped else f"local_experts.{expert}.{fc}.weight"
                model[f"{at}mlp.experts.{own}"] = some(*shape)
    model["decoder.final_layernorm.weight"] = some(HIDDEN)
    model["output_layer.weight"] = model["embedding.word_embeddings.weight"] if run.tied else some(VOCAB, HIDDEN)
    if run.tied and run.pp == 1:
        del model["output_layer.weight"]
    return model


def part_of(name: str, tensor: torch.Tensor, run: Run, tp: int) -> torch.Tensor:
    """Return a tensor-parallel rank's part."""
    if TOWER.match(name) and not LINEAR.search(name):
        return tensor.clone()  # Hugging Face's own module, which each rank has
    packed = next((rows for own, rows in run.packed.items() if own in name and not name.endswith("_weight")), None)
    if packed is not None:
        return torch.cat([part.chunk(run.tp)[tp] for part in tensor.split(packed)])
    if name.endswith("mixer.norm.weight"):
        return tensor.chunk(run.tp)[tp].clone()
    is_expert = ".experts." in name
    ways = run.tp if run.etp is None or not is_expert else run.etp
    tp %= ways
    if re.search(r"norm|router|gate_weight|position_embeddings|linear_(proj|fc2)\.bias|\.ls[12]$", name):
        return tensor.clone()
    if re.search(r"(linear_(proj|fc2)|out_proj)\.weight", name):
        return tensor.chunk(ways, dim=1)[tp].contiguous()
    if "linear_fc1" in name and run.gated and not name.startswith(run.plain):
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(ways)[tp], up.chunk(ways)[tp]])
    return tensor.chunk(ways)[tp].contiguous()


def _grouped_part(name: str, experts: torch.Tensor, run: Run, tp: int) -> torch.Tensor:
    """Return a rank's experts as the matrix of GroupedMLP, which it views as these."""
    ways = run.tp if run.etp is None else run.etp
    if name.endswith("weight2"):
        return experts.chunk(ways, dim=1)[tp % ways].reshape(-1, HIDDEN).contiguous()
    halves = experts.chunk(2, dim=2) if run.gated else [experts]
    own = torch.cat([half.chunk(ways, dim=2)[tp % ways] for half in halves], dim=2).contiguous()
    return own.view(HIDDEN, -1).clone()


_EXPERT = re.compile(r"(.*(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")


def chunk_state(run: Run, model: dict[str, torch.Tensor], tp: int, stage: int, ep: int, chunk: int) -> dict[str, Any]:
    order = [(v, p) for v in range(len(run.chunks)) for p in range(run.pp)]
    first = sum(run.chunks[v][p] for v, p in order[: order.index((chunk, stage))])
    count = run.chunks[chunk][stage]
    state: dict[str, Any] = OrderedDict()
    for name, tensor in model.items():
        found = re.fullmatch(r"((?:language_model\.)?decoder\.layers\.)(\d+)\.(.*)", name)
        if found is None:
            is_first = "embedding" in name or TOWER.match(name) is not None
            # The stage that predicts further tokens has the embedding, too.
            is_copied = name.startswith("embedding.") and any(other.startswith("mtp.") for other in model)
            if (chunk, stage) not in {order[0] if is_first else order[-1], *(order[-1:] if is_copied else ())}:
                continue
        layer = int(found[2]) - first if found else 0
        if found and not 0 <= layer < count:
            continue
        local = f"{found[1]}{layer}.{found[3]}" if found else name
        if "experts.weight" in name:
            state[local] = _grouped_part(name, tensor.chunk(run.ep)[ep], run, tp)
            continue
        expert = _EXPERT.fullmatch(local) if ".experts." in name else None
        if expert is not None:
            each = EXPERTS // run.ep
            if int(expert[2]) // each != ep:
                continue
            local = f"{expert[1]}{int(expert[2]) % each}{expert[3]}"
        state[local] = part_of(name, tensor, run, tp)
        if local.endswith("linear_proj.weight"):
            state[local.replace("weight", "_extra_state")] = None
    return state


def write_legacy(folder: Path, run: Run, model: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a checkpoint of one file a rank, and the marker beside it; return the iteration's folder."""
    model = model or whole_model(run)
    place = folder / f"iter_{run.iteration:07d}"
    for rank in range(run.world):
        tp, rest = rank % run.tp, rank // run.tp
        ep, stage = rank // (run.etp or run.tp) % run.ep, rest // (run.ep * run.dp)
        name = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if run.pp > 1 else "") + (f"_{ep:03d}" if run.ep > 1 else "")
        if (place / name).exists():
            continue  # of the first data-parallel rank
        (place / name).mkdir(parents=True)
        chunks = [chunk_state(run, model, tp, stage, ep, chunk) for chunk in range(len(run.chunks))]
        state = {"args": run.namespace(rank), "checkpoint_version": 3.0, "iteration": run.iteration}
        state |= {"model": chunks[0]} if len(chunks) == 1 else {f"model{v}": chunk for v, chunk in enumerate(chunks)}
        state |= {"optimizer": {"state": {0: {"exp_avg": torch.rand(5)}}}, "rng_state": [{"random": (3, None)}]}
        torch.save(state, place / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(run.iteration))
    return place


class _Files:
    """Writes items one after the other, as torch's FileSystemWriter does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content: dict[str, BytesIO] = {}
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, rank: int, index: MetadataIndex, value: object) -> None:
        name = f"__{rank}_0.distcp"
        stream = self.content.setdefault(name, BytesIO())
        item = BytesIO()
        torch.save(value, item)
        self.places[index] = _StorageInfo(name, stream.tell(), len(item.getvalue()))
        stream.write(item.getvalue())

    def finish(self) -> None:
        for name, stream in self.content.items():
            (self.folder / name).write_bytes(stream.getvalue())


def write_dist(folder: Path, run: Run, model: dict[str, torch.Tensor], *, prefix: str = "") -> Path:
    """Write a distributed checkpoint with layers and experts as they are in the names, and the marker beside it.

    Rows lie on as many ranks as there is tensor parallelism; of linear_fc1 each has a piece of gate and one of up.
    """
    place = folder / f"iter_{run.iteration:07d}"
    place.mkdir(parents=True)
    listed: dict[str, Any] = {}
    files = _Files(place)
    rest = {"optimizer.state.exp_avg." + name: tensor for name, tensor in list(model.items())[:2]}
    for name, tensor in {**{prefix + n: t for n, t in model.items()}, **rest}.items():
        # Without their numbers' dims in front, tensors are cut in the first dim that tp divides.
        dim = next((d for d in range(tensor.dim()) if tensor.shape[d] % (2 * run.tp) == 0), None)
        pieces = 1 if dim is None or "norm" in name else (2 * run.tp if "linear_fc1" in name else run.tp)
        chunks = []
        for number in range(pieces):
            part = tensor if dim is None else tensor.chunk(pieces, dim)[number].contiguous().clone()
            offset = tuple(part.shape[d] * number if d == dim else 0 for d in range(tensor.dim()))
            chunks.append(ChunkStorageMetadata(torch.Size(offset), part.shape))
            files.add(number % run.tp, MetadataIndex(name, torch.Size(offset), number), part)
        listed[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for layer in range(run.num_layers):
        name = f"{prefix}decoder.layers.self_attention.linear_qkv._extra_state/shard_{layer}_{run.num_layers}"
        files.add(0, MetadataIndex(name), BytesIO())
        listed[name] = BytesStorageMetadata()
    files.finish()
    (place / ".metadata").write_bytes(pickle.dumps(Metadata(listed, None, files.places)))
    told = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (place / "metadata.json").write_text(json.dumps({**told, "common_backend": "torch", "common_backend_version": 1}))
    common = {"args": run.namespace(0), "checkpoint_version": 3.0, "iteration": run.iteration}
    torch.save({**common, "opt_param_scheduler": {"max_lr": 1e-3}}, place / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(run.iteration))
    return place
