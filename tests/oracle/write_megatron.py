"""One rank of a run of Megatron-core on CPU, which writes checkpoints: ``write_megatron.py RANK FOLDER CASE``.

The single process (CASE ends in ``-single``) makes the model and saves it, by Megatron's `dist_checkpointing` and as
plain tensors. The ranks of the parallel run then load what it saved, so that Megatron itself cuts the model, and save
theirs: in ``dist/``, in ``legacy/`` as megatron/training/checkpointing.py would, and by xrank in ``live/``. Nothing is
imported at the top: Megatron starts a helper process by importing this file again.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any

LAYERS, HIDDEN, VOCAB, EXPERTS, ITERATION = 4, 16, 64, 4, 10

CASES: dict[str, dict[str, Any]] = {
    "dense": {"tp": 2, "pp": 2, "vpp": 2, "tied": True, "bias": True},
    "experts": {"pp": 2, "ep": 2, "experts": True, "numbered": True, "qk_norm": True},
    "experts-tp": {"tp": 2, "ep": 2, "experts": True},
    # Two ranks in all: tensor parallel in attention, and each with experts of its own.
    "experts-whole": {"tp": 2, "ep": 2, "etp": 1, "experts": True},
}


def world_size(case: dict[str, Any]) -> int:
    """Return how many ranks a case has; experts share theirs with data parallelism."""
    tp = case.get("tp", 1)
    return int(max(tp, case.get("etp", tp) * case.get("ep", 1)) * case.get("pp", 1))


def main(rank: int, folder: str, name: str) -> None:
    """Be one rank of a case."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    is_single = name.endswith("-single")
    case = {"tp": 1, "pp": 1, "ep": 1, "vpp": None, "tied": False, "experts": False}
    case |= {"numbered": False, "bias": False, "qk_norm": False}
    case |= CASES[name.removesuffix("-single")]
    if is_single:
        case |= {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "vpp": None}
    case.setdefault("etp", case["tp"])
    world = world_size(case)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=world)
    # Calls without which nothing is made or saved where there is no GPU.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    parallel_state.initialize_model_parallel(
        case["tp"],
        case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"],
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["etp"],
    )
    torch.manual_seed(rank)  # a run that does not load has other values
    chunks = [_model(case, chunk) for chunk in range(case["vpp"] or 1)]
    metadata = {"non_homogeneous_layers": True} if case["numbered"] else None

    def state() -> dict[str, Any]:
        keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        return {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(keys, chunks, strict=True)}

    args = _args(case, rank, world)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    base = os.path.join(folder, "single")
    place = base if is_single else os.path.join(folder, "dist", f"iter_{ITERATION:07d}")
    if rank == 0:
        os.makedirs(place)
    torch.distributed.barrier()
    if not is_single:
        loaded = dist_checkpointing.load(state(), base)
        for number, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{number}"])
    dist_checkpointing.save({**state(), **common}, place)
    if is_single:
        torch.save(_plain(chunks[0].state_dict()), os.path.join(folder, "named.pt"))
        torch.save(_global(state()["model"]), os.path.join(folder, "global.pt"))
    else:
        import xrank

        # Where its ranks stand, xrank reads from Megatron's own process groups.
        xrank.export_model(chunks, os.path.join(folder, "live"), recipe="none")
        _save_legacy(os.path.join(folder, "legacy"), case, chunks, common)
        if rank == 0:
            for kind in ("dist", "legacy"):
                with open(os.path.join(folder, kind, "latest_checkpointed_iteration.txt"), "w") as file:
                    file.write(str(ITERATION))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # Megatron's helper process keeps a rank from ending for a while


def _model(case: dict[str, Any], chunk: int) -> Any:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    stage = chunk if case["vpp"] else None
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=case["bias"],
        qk_layernorm=case["qk_norm"],
        normalization="RMSNorm",
        use_cpu_initialization=True,
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"],
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["etp"],
        pipeline_dtype=torch.float32,
        **({"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 12} if case["experts"] else {}),
    )
    num_experts = EXPERTS if case["experts"] else None
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=num_experts, normalization="RMSNorm", qk_layernorm=case["qk_norm"]),
        vocab_size=VOCAB,
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case["tied"],
        vp_stage=stage,
    )


def _args(case: dict[str, Any], rank: int, world: int) -> Namespace:
    return Namespace(
        rank=rank,
        local_rank=rank,
        world_size=world,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        group_query_attention=True,
        kv_channels=4,
        ffn_hidden_size=24,
        num_experts=EXPERTS if case["experts"] else None,
        moe_ffn_hidden_size=12 if case["experts"] else None,
        add_qkv_bias=case["bias"],
        qk_layernorm=case["qk_norm"],
        normalization="RMSNorm",
        swiglu=True,
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"],
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["etp"],
        context_parallel_size=1,
        untie_embeddings_and_output_weights=not case["tied"],
    )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach() for name, value in state.items() if "_extra_state" not in name}


def _global(state: dict[str, Any]) -> dict[str, Any]:
    """Return whole tensors by global names, put together of one process' pieces."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)
    found: dict[str, Any] = {}
    for piece in nested_values(state):
        if isinstance(piece, ShardedTensor):
            whole = found.setdefault(piece.key, torch.full(piece.global_shape, torch.nan))
            numbers = piece.global_offset[: piece.prepend_axis_num]
            rest = zip(piece.global_offset[piece.prepend_axis_num :], piece.local_shape, strict=True)
            whole[(*numbers, *(slice(first, first + n) for first, n in rest))] = piece.data.detach()
    return found


def _save_legacy(folder: str, case: dict[str, Any], chunks: list[Any], common: dict[str, Any]) -> None:
    import torch
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_rank() and parallel_state.get_expert_data_parallel_rank():
        return
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if case["pp"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if case["ep"] > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    place = os.path.join(folder, f"iter_{ITERATION:07d}", name)
    os.makedirs(place)
    keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    state = {key: chunk.state_dict_for_save_checkpoint() for key, chunk in zip(keys, chunks, strict=True)}
    torch.save({**common, **state}, os.path.join(place, "model_optim_rng.pt"))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
