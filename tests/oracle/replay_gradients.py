"""One rank of gradients that Megatron-core and xrank add up side by side: ``replay_gradients.py RANK WORLD FOLDER``.

In every case both get modules of the same parameters, and both are given the same gradients, micro-batch by
micro-batch, for some steps. What each has in ``main_grad`` after its own finalize is compared bit by bit, as a whole
that replicas put together of the shards which are theirs by each one's own count: with tp, the shards are others, for
ours keep what is reduced along tp in buffers of its own. The rank leaves what it found in ``FOLDER/<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel as Theirs
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig

from xrank import gradients as ours
from xrank.layout.mesh import megatron_views

NUM_STEPS, NUM_MICROBATCHES, NUM_EXPERTS = 3, 2, 4

WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "all-reduce-overlap": {"overlap_grad_reduce": True, "bucket_size": 300},
    "reduce-scatter": {"use_distributed_optimizer": True},
    "reduce-scatter-overlap": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 300},
    "average": {"average_in_collective": True},
    "fp32": {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True},
}
_FOUR = ("all-reduce", "all-reduce-overlap", "reduce-scatter", "reduce-scatter-overlap")


@dataclass(frozen=True)
class Case:
    """One mesh, and what is trained on it."""

    lengths: dict[str, int] = field(default_factory=dict)
    ways: tuple[str, ...] = _FOUR
    per_token: bool = False
    has_conditional: bool = False
    dtype: torch.dtype = torch.float32


CASES: dict[int, dict[str, Case]] = {
    2: {
        "dp": Case(ways=(*_FOUR, "average")),
        "dp-bf16": Case(ways=("fp32",), dtype=torch.bfloat16),
        "dp-per-token": Case(per_token=True),
        "tp": Case({"tp": 2}),
        "cp": Case({"cp": 2}),
        "pp": Case({"pp": 2}, ways=("all-reduce", "reduce-scatter"), has_conditional=True),
        "ep": Case({"ep": 2}, ways=(*_FOUR, "average")),
    },
    4: {
        "dp": Case(ways=(*_FOUR, "average")),
        "ep2": Case({"ep": 2}, ways=(*_FOUR, "average")),
        "ep4": Case({"ep": 4}),
        "tp-dp": Case({"tp": 2}),
        "tp-ep": Case({"tp": 2, "ep": 2}, per_token=True),
        "pp-dp": Case({"pp": 2}, ways=("all-reduce", "reduce-scatter"), per_token=True),
        "tp-pp": Case({"tp": 2, "pp": 2}, ways=("all-reduce", "reduce-scatter"), has_conditional=True),
        "cp-dp": Case({"cp": 2}, per_token=True),
    },
}


class Part(torch.nn.Module):
    """What one stage holds: parameters of every kind that Megatron tells apart by attributes and names."""

    def __init__(self, case: Case, config: TransformerConfig) -> None:
        super().__init__()
        at, last = parallel_state.get_pipeline_model_parallel_rank(), case.lengths.get("pp", 1) - 1
        self.pre_process, self.post_process = at == 0, at == last
        self.share_embeddings_and_output_weights = last > 0
        if at in (0, last):
            self._add("table", (13, 5), case, shared_embedding=last > 0)
        self._add("layer.weight", (17, 11), case)
        self._add("layer.bias", (17,), case)
        self._add("layer.norm", (11,), case, sequence_parallel=True)
        self._add("attention.q_layernorm", (7,), case)
        self._add("attention.mean", (9,), case, average_gradients_across_tp_domain=True)
        self._add("experts.weight", (6, 19), case, allreduce=False)
        self._add("frozen", (8,), case)
        self.get_parameter("frozen").requires_grad_(False)
        if case.has_conditional:
            self._add("embedder", (3, 7), case, pipeline_parallel=True)
        self.router = torch.nn.Module()
        self.router.config = config
        self.router.register_buffer("expert_bias", torch.zeros(NUM_EXPERTS))
        self.router.register_buffer("local_tokens_per_expert", torch.zeros(NUM_EXPERTS))

    def _add(self, name: str, shape: tuple[int, ...], case: Case, **marks: bool) -> None:
        owner = self
        *path, last = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=case.dtype))
        for key, value in marks.items():
            setattr(parameter, key, value)
        owner.register_parameter(last, parameter)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        return self.table

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a loss that has these gradients."""
        told = [(one * gradients[name]).sum() for name, one in self.named_parameters() if one.requires_grad]
        return torch.stack(told).sum()


def told(module: Part, rank: int, step: int, microbatch: int) -> dict[str, torch.Tensor]:
    """Return the gradients that a rank's micro-batch gives."""
    random = torch.Generator().manual_seed(1000 * rank + 10 * step + microbatch)
    return {name: torch.randn(one.shape, generator=random).to(one.dtype) for name, one in module.named_parameters()}


def run_step(ddp: Any, module: Part, rank: int, step: int) -> None:
    """Run a step up to its last backward."""
    ddp.zero_grad_buffer()
    module.router.local_tokens_per_expert.copy_(torch.arange(NUM_EXPERTS).add(rank + step).remainder(3))
    with ddp.no_sync():
        for microbatch in range(NUM_MICROBATCHES - 1):
            ddp(told(module, rank, step, microbatch)).backward()
    ddp(told(module, rank, step, NUM_MICROBATCHES - 1)).backward()


def valid_ranges(ddp: Theirs, is_sharded: bool) -> dict[Any, tuple[int, int]]:
    """Return what this rank owns of each parameter after a reduce-scatter, by Megatron's own buffers."""
    found = {}
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
        for parameter, (start, stop, number) in buffer.param_index_map.items():
            low, high = start, stop
            if is_sharded:
                bucket = buffer.buckets[number]
                shard = bucket.grad_data.numel() // size
                low = min(max(start, bucket.offset + rank * shard), stop)
                high = max(min(stop, bucket.offset + (rank + 1) * shard), low)
            found[parameter] = (low - start, high - start) if high > low else (0, 0)
    return found


def put_together(gradient: torch.Tensor, owned: tuple[int, int], is_expert: bool) -> torch.Tensor:
    """Return the whole gradient of which each replica has a part; adding zeros changes no bit of the others."""
    whole = torch.zeros_like(gradient).flatten()
    whole[slice(*owned)] = gradient.flatten()[slice(*owned)]
    state = parallel_state
    dist.all_reduce(
        whole,
        group=state.get_expert_data_parallel_group()
        if is_expert
        else state.get_data_parallel_group(with_context_parallel=True),
    )
    return whole


def _without_shards(config: ours.GradientConfig) -> ours.GradientConfig:
    return replace(config, use_distributed_optimizer=False)


def replay(world: int, rank: int, case: Case, way: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give both the same gradients, and yield what came of each parameter."""
    config = TransformerConfig(
        num_layers=max(2, case.lengths.get("pp", 1)),
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        qk_layernorm=True,
        tensor_model_parallel_size=case.lengths.get("tp", 1),
        sequence_parallel=case.lengths.get("tp", 1) > 1,
        pipeline_model_parallel_size=case.lengths.get("pp", 1),
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=case.per_token,
    )
    config.moe_router_enable_expert_bias, config.moe_router_bias_update_rate = True, 0.25
    config.has_cond_embedder = case.has_conditional
    their_module, our_module = Part(case, config), Part(case, config)
    theirs = Theirs(config, DistributedDataParallelConfig(**way), their_module)
    told_config = ours.GradientConfig(
        **way, calculate_per_token_loss=case.per_token, qk_layernorm=True, sequence_parallel=config.sequence_parallel
    )
    plan = ours.GradientPlan.from_module(our_module, megatron_views(world, **case.lengths), told_config)
    mine = ours.DistributedDataParallel(our_module, plan)
    is_sharded = "use_distributed_optimizer" in way
    ranges = valid_ranges(theirs, is_sharded)
    for step in range(NUM_STEPS):
        run_step(theirs, their_module, rank, step)
        run_step(mine, our_module, rank, step)
        # Ranks along tp, which are adjacent, see the same tokens.
        num_tokens = torch.tensor(11 + 3 * (rank // case.lengths.get("tp", 1)) + step) if case.per_token else None
        done = ours.finalize_model_grads([mine], num_tokens)
        finalize_model_grads([theirs], num_tokens)
        wholes: dict[str, torch.Tensor] = {}
        for name, parameter in their_module.named_parameters():
            if not parameter.requires_grad:
                continue
            owned, is_expert = plan[name].owned, name == "experts.weight"
            first, second = parameter.main_grad, mine.main_grad(name)
            if is_sharded:
                first = put_together(first, ranges[parameter], is_expert)
                second = put_together(second, owned, is_expert)
            wholes[name] = second.view(parameter.shape).clone()
            yield {
                "step": step,
                "name": name,
                "range": list(ranges[parameter]),
                "owned": list(owned),
                "equal": first.dtype == second.dtype and torch.equal(first, second),
                "furthest": (first - second).abs().max().item(),
                "nonzero": bool((first != 0).all()),
                "kinds": sorted({one.kind for one in done}),
            }
        if step == NUM_STEPS - 1:
            # The wrapper shows its own slices, whatever the plan's config; a plan without shards has none that fit.
            for one in (plan, ours.GradientPlan.from_module(our_module, plan.views, _without_shards(told_config))):
                check = ours.check_gradients(theirs, one, reference=wholes)
                yield {"step": step, "name": "check", "findings": str(check) if check.findings else ""}
            doubled = {**wholes, "layer.weight": wholes["layer.weight"] / 2}
            found = ours.check_gradients(theirs, plan, reference=doubled).findings
            yield {"step": step, "name": "doubled", "kinds": [(one.kind, one.name) for one in found]}
        first, second = their_module.router.expert_bias, our_module.router.expert_bias
        yield {"step": step, "name": "router", "equal": torch.equal(first, second), "nonzero": bool(first.any())}


def main(rank: int, world: int, folder: str) -> None:
    """Replay all cases of a world."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # Megatron asks for it where there is no GPU
    found: dict[str, list[dict[str, Any]]] = {}
    for name, case in CASES[world].items():
        lengths = SimpleNamespace(**{"tp": 1, "pp": 1, "ep": 1, "cp": 1, **case.lengths})
        parallel_state.initialize_model_parallel(
            lengths.tp,
            lengths.pp,
            context_parallel_size=lengths.cp,
            expert_model_parallel_size=lengths.ep,
            expert_tensor_parallel_size=lengths.tp,
        )
        for way in case.ways:
            found[f"{name} {way}"] = list(replay(world, rank, case, WAYS[way]))
        parallel_state.destroy_model_parallel()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
