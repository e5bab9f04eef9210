"""Frameworks with model code of their own: one step of an optimizer each, then the framework's own save on a CPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn

from tests.recipes.made_checkpoints import as_megatron

__all__ = ["gather_torchtitan", "let_torchtitan_run_on_cpu", "run_megatron", "run_torchtitan", "train_torchtitan"]

Trained = tuple[nn.Module, dict[str, torch.Tensor]]
_PADDED_ROWS = 256
_LOCAL_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def run_torchtitan(options: dict[str, Any], folder: Path, load: Callable[[], Any], batches: object) -> Trained:
    """Take a step with torchtitan's Trainer, and save with its checkpoint manager."""
    plain = load()
    trainer, adapter = train_torchtitan(options, folder, plain)
    trainer.checkpointer.save(curr_step=2, last_step=True)
    trainer.checkpointer.close()
    return plain, gather_torchtitan(trainer, adapter)


def train_torchtitan(options: dict[str, Any], folder: Path, plain: Any) -> tuple[Any, Any]:
    """Load a base model into torchtitan's Llama 3 and take a step; return its Trainer and adapter.

    torchtitan's attention has no gradient on a CPU, so that the gradients are ones.
    """
    let_torchtitan_run_on_cpu()
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers, config_registry, model_registry

    assets = _write_assets(Path(plain.name_or_path), folder.with_name(f"assets-{os.environ['RANK']}"))
    config = config_registry.llama3_debugmodel()
    sizes, made = plain.config, model_registry("debugmodel")
    model: Any = made.model
    assert isinstance(model, Llama3Model.Config)
    model.dim, model.vocab_size = sizes.hidden_size, sizes.vocab_size
    model.tok_embeddings = replace(model.tok_embeddings, num_embeddings=model.vocab_size, embedding_dim=model.dim)
    model.lm_head = replace(model.lm_head, in_features=model.dim, out_features=model.vocab_size)
    model.norm = replace(model.norm, normalized_shape=model.dim)
    model.layers = _build_llama3_layers(
        n_layers=sizes.num_hidden_layers,
        dim=model.dim,
        n_heads=sizes.num_attention_heads,
        n_kv_heads=sizes.num_key_value_heads,
        hidden_dim=sizes.intermediate_size,
        rope=ComplexRoPE.Config(dim=sizes.head_dim, max_seq_len=128, theta=10000.0),
        attn_backend="flex",
    )
    config.model_spec, config.hf_assets_path, config.dump_folder = made, str(assets), str(folder)
    config.dataloader.dataset_path = str(assets / "data")
    config.training.seq_len, config.training.steps = 32, 2
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.parallelism.spmd_backend = "full_dtensor"
    config.parallelism.pipeline_parallel_degree = options["pp"]
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.training.local_batch_size = 2
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=2,
        initial_load_path=plain.name_or_path,
        initial_load_in_hf=True,
        last_save_model_only=False,
    )
    trainer = config.build()
    trainer.checkpointer.load()
    for part in trainer.model_parts:
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
    trainer.optimizers.step()
    trainer.step = 2
    return trainer, made.state_dict_adapter(model, str(assets))


def gather_torchtitan(trainer: Any, adapter: Any) -> dict[str, torch.Tensor]:
    """Return the whole state of all stages under Hugging Face's names."""
    state = trainer.checkpointer.states["model"].state_dict()
    own = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stages, own)
    whole = {name: tensor for stage in stages for name, tensor in stage.items()}
    return {name: tensor.contiguous() for name, tensor in adapter.to_hf(whole).items()}


def let_torchtitan_run_on_cpu() -> None:
    """Answer for a CPU what torchtitan asks of a GPU, and leave out its kernels in Triton."""
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: torch.cpu
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    cpu.memory_stats = lambda *_: {}


def _write_assets(base: Path, folder: Path) -> Path:
    """Write a tokenizer and a data set, which each rank of torchtitan asks for."""
    from tests.oracle.trainers.train import _make_tokenizer

    _make_tokenizer().save_pretrained(folder)
    shutil.copy(base / "config.json", folder)
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "data.json").write_text("\n".join([json.dumps({"text": "11 12 13 " * 30})] * 50))
    return folder


def run_megatron(options: dict[str, Any], folder: Path, load: Callable[[], Any], batches: object) -> Trained:
    """Fill Megatron-core's GPTModel, cut over the ranks, and save it with `dist_checkpointing`.

    The values are the base model's with noise, in the order that `as_megatron` derives from Megatron-core's code.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    # Calls without which nothing is made or saved where there is no GPU.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        options["tp"], options["pp"], expert_model_parallel_size=options["ep"], expert_tensor_parallel_size=1
    )
    plain = load()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model, args = _make_megatron(plain.config, options)
    # transformers saves, which it needs to, on the first rank alone.
    sent = [as_megatron(plain, vocab=_PADDED_ROWS) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(sent)
    pieces = {"model": model.sharded_state_dict()}
    apply_factories(pieces)
    for piece in nested_values(pieces):
        if isinstance(piece, ShardedTensor):
            _fill(piece, sent[0])
    place = folder / "iter_0000002"
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 2}
    dist_checkpointing.save({"model": model.sharded_state_dict(), **common}, str(place))
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    for helper in multiprocessing.active_children():  # which would keep the launch's output open
        helper.kill()
    return plain, {name: tensor.detach() for name, tensor in plain.state_dict().items()}


def _fill(piece: Any, whole: dict[str, torch.Tensor]) -> None:
    """Copy a piece of a tensor from the whole one; a stack of layers or experts is found by their numbers."""
    numbers = piece.global_offset[: piece.prepend_axis_num]
    starts = piece.global_offset[piece.prepend_axis_num :]
    name = piece.key.removeprefix("model.")
    for kind, number in zip(("layers", "local_experts"), numbers, strict=False):
        name = name.replace("experts.experts", "experts.local_experts").replace(f"{kind}.", f"{kind}.{number}.", 1)
    for ours, theirs in _LOCAL_NORMS.items():  # the layers' own map of keys (gpt_layer_specs.py)
        name = name.replace(theirs, ours)
    part = whole[name][tuple(slice(first, first + n) for first, n in zip(starts, piece.local_shape, strict=True))]
    piece.data.detach().copy_(part.reshape(piece.data.shape))


def _make_megatron(config: Any, options: dict[str, Any]) -> tuple[nn.Module, Namespace]:
    """Return a rank's part of a GPTModel, and the arguments of a training script that made it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_gpt2 = config.model_type == "gpt2"
    groups = getattr(config, "num_key_value_heads", config.num_attention_heads)
    num_experts = getattr(config, "num_experts", None)
    norm = "LayerNorm" if is_gpt2 else "RMSNorm"
    has_qk_norm = config.model_type.startswith("qwen3")
    inner = config.n_inner or 4 * config.n_embd if is_gpt2 else config.intermediate_size
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=groups,
        kv_channels=width,
        ffn_hidden_size=inner,
        gated_linear_unit=not is_gpt2,
        activation_func=torch.nn.functional.gelu if is_gpt2 else torch.nn.functional.silu,
        add_bias_linear=is_gpt2,
        qk_layernorm=has_qk_norm,
        normalization=norm,
        use_cpu_initialization=True,
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        expert_model_parallel_size=options["ep"],
        expert_tensor_parallel_size=1,
        pipeline_dtype=torch.float32,
        **(
            {"num_moe_experts": num_experts, "moe_ffn_hidden_size": config.moe_intermediate_size} if num_experts else {}
        ),
    )
    is_tied = bool(config.tie_word_embeddings)
    model = GPTModel(
        sizes,
        get_gpt_layer_local_spec(num_experts=num_experts, normalization=norm, qk_layernorm=has_qk_norm),
        vocab_size=_PADDED_ROWS,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        share_embeddings_and_output_weights=is_tied,
    )
    args = Namespace(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=groups,
        group_query_attention=groups != config.num_attention_heads,
        kv_channels=width,
        ffn_hidden_size=inner,
        max_position_embeddings=config.max_position_embeddings,
        swiglu=not is_gpt2,
        normalization=norm,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        add_bias_linear=is_gpt2,
        vocab_size=config.vocab_size,
        padded_vocab_size=_PADDED_ROWS,
        untie_embeddings_and_output_weights=not is_tied,
        tensor_model_parallel_size=options["tp"],
        pipeline_model_parallel_size=options["pp"],
        expert_model_parallel_size=options["ep"],
        num_experts=num_experts,
        moe_ffn_hidden_size=getattr(config, "moe_intermediate_size", None),
    )
    return model, args
