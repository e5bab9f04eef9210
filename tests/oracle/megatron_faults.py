"""Silent faults of Megatron-core, found by `check_gradients`: ``megatron_faults.py RANK WORLD FOLDER`` is one rank.

The faults are findings 1, 2, 3, 9, 10 and 11 of NVIDIA/Megatron-LM#7452, which reports each with a script of its own.
Two CPU ranks show their gradients with the installed version. Megatron's own functions, wrapper and finalizer run; the
check gets the wrapper, and gradients of one process. The rank leaves its findings in ``FOLDER/<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from xrank.gradients import GradientConfig, GradientPlan, check_gradients
from xrank.layout.mesh import megatron_views

WIDTH, VOCABULARY, ROWS, SMOOTHING = 4, 6, 5, 0.2
_TOKENS = 4


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return values that are the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Head(torch.nn.Module):
    """A scale that ranks along tp share, and an output layer that they cut by classes."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(1 + draw(WIDTH, seed=1))
        self.weight = torch.nn.Parameter(draw(VOCABULARY, WIDTH, seed=2).chunk(world)[rank].clone())
        self.weight.tensor_model_parallel, self.weight.partition_dim = world > 1, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits."""
        return mappings.copy_to_tensor_model_parallel_region(x * self.scale) @ self.weight.T


class Heads(torch.nn.Module):
    """A norm's scale of one head, which each rank uses for its heads, before a sum over the heads (finding 11)."""

    def __init__(self) -> None:
        super().__init__()
        self.out_norm = torch.nn.Parameter(1 + draw(WIDTH, seed=3))
        self.other = torch.nn.Parameter(draw(WIDTH, seed=4))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the output of all ranks' heads."""
        return mappings.reduce_from_tensor_model_parallel_region((heads * self.out_norm).sin().sum(1)) * self.other


class Scale(torch.nn.Module):
    """A scale, and a loss of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(1 + draw(WIDTH, seed=9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token."""
        return (x * self.scale).sin().sum(-1)


def smoothed_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss that Megatron documents, of whole logits (cross_entropy.py)."""
    logs = torch.log_softmax(logits, -1)
    smoothing = SMOOTHING * VOCABULARY / (VOCABULARY - 1)
    own = -logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return ((1 - smoothing) * own - smoothing * logs.mean(-1)).mean()


def gradients_alone(module: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> dict[str, Any]:
    """Return the gradients of one process."""
    loss(module).backward()
    return {name: one.grad for name, one in module.named_parameters()}


def check(
    module: torch.nn.Module,
    loss: Callable[[Any], torch.Tensor],
    reference: dict[str, Any],
    config: TransformerConfig,
    num_tokens: int | None = None,
    *,
    along: str | None = "tp",
) -> list[dict[str, Any]]:
    """Train a step with Megatron's wrapper and finalizer, and return what the check finds."""
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), module)
    loss(ddp).backward()
    finalize_model_grads([ddp], None if num_tokens is None else torch.tensor(num_tokens))
    ours = GradientConfig(sequence_parallel=config.sequence_parallel, calculate_per_token_loss=num_tokens is not None)
    world = dist.get_world_size()
    lengths = {"tp": 1, "etp": 1} | ({along: world} if along else {})
    plan = GradientPlan.from_module(module, megatron_views(world, **lengths), ours)
    found = check_gradients(ddp, plan, reference=reference).findings
    return [
        {"kind": one.kind, "name": one.name, "ranks": one.ranks, "factor": one.factor, "message": one.message}
        for one in found
    ]


def make_config(world: int, *, per_token: bool = False, **options: Any) -> TransformerConfig:
    """Return the config of a model on ranks along tp."""
    return TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=world,
        calculate_per_token_loss=per_token,
        **options,
    )


def check_head(rank: int, world: int, *, smoothing: float = 0.0, gathers: bool = False) -> list[dict[str, Any]]:
    """Return the findings of a loss over cut classes (findings 1 and 2; without options, of right gradients)."""
    x, target = draw(ROWS, 1, WIDTH, seed=5), torch.arange(ROWS).remainder(VOCABULARY).unsqueeze(1)

    def loss(module: Any) -> torch.Tensor:
        logits = module(x)
        if gathers:
            logits = mappings.gather_from_tensor_model_parallel_region(logits)
        return vocab_parallel_cross_entropy(logits.float(), target, smoothing).mean()

    def loss_alone(module: Any) -> torch.Tensor:
        logits = (x * module.scale) @ module.weight.T
        if smoothing:
            return smoothed_loss(logits, target)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    whole = gradients_alone(Head(0, 1), loss_alone)
    whole["weight"] = whole["weight"].chunk(world)[rank]
    return check(Head(rank, world), loss, whole, make_config(world))


def check_heads(rank: int, world: int) -> list[dict[str, Any]]:
    """Return the findings of a norm of heads that no attribute marks (finding 11)."""
    heads = draw(ROWS, 2 * world, WIDTH, seed=6)
    whole = gradients_alone(
        Heads(), lambda module: ((heads * module.out_norm).sin().sum(1) * module.other).square().mean()
    )
    own = heads.chunk(world, 1)[rank]
    return check(Heads(), lambda module: module(own).square().mean(), whole, make_config(world))


def check_router(rank: int, world: int, *, masked: bool) -> list[dict[str, Any]]:
    """Return the findings of a router's loss for balance, with a padding mask or without (finding 10)."""
    config = make_config(
        world,
        per_token=True,
        sequence_parallel=True,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_aux_loss_coeff=1.0,
        moe_router_load_balancing_type="aux_loss",
        moe_router_dtype="fp64",
        add_bias_linear=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    # A common part, so that the experts have different numbers of tokens, and the loss a gradient.
    tokens = (1 + draw(_TOKENS * world, 1, WIDTH, seed=7)).chunk(world)[rank]

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = TopKRouter(config=config, pg_collection=groups)
            with torch.no_grad():
                self.router.weight.copy_(draw(4, WIDTH, seed=8))

        def forward(self, masked: bool) -> torch.Tensor:
            mask = torch.zeros(len(tokens), 1, dtype=torch.bool) if masked else None
            probabilities, _ = self.router(tokens, mask)
            return probabilities.sum() * 0

    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(()))
    # Without a mask the count is right: its gradients, summed over the parts of the sequence, are the reference.
    right = Routed()
    right.train()
    right(False).backward()
    whole = right.router.weight.grad.clone()
    dist.all_reduce(whole)
    num_tokens = _TOKENS * world
    reference = {"router.weight": whole / num_tokens}
    return check(Routed().train(), lambda module: module(masked), reference, config, num_tokens)


def check_parts(rank: int, world: int, *, masked: bool) -> list[dict[str, Any]]:
    """Return the findings of a loss of parts of a sequence along cp, with unequal numbers of tokens or not (finding 9).

    The schedule divides the sum of each rank by that rank's own number of tokens.
    """
    config = TransformerConfig(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=2, use_cpu_initialization=True, context_parallel_size=world
    )
    tokens = draw(_TOKENS * world, WIDTH, seed=10)
    is_counted = torch.arange(len(tokens)) < len(tokens) - (_TOKENS - 1 if masked else 0)
    own, counted = tokens.chunk(world)[rank], is_counted.chunk(world)[rank]

    def loss(module: Any) -> torch.Tensor:
        total = (module(own) * counted).sum()
        return forward_step_calc_loss(
            module, total, lambda total: (total, counted.sum().int(), {}), config, None, False, 1, []
        )[0]

    whole = gradients_alone(Scale(), lambda module: (module(tokens) * is_counted).sum() / is_counted.sum())
    return check(Scale(), loss, whole, config, along="cp")


def check_predictions(rank: int, world: int, *, masked: bool = False, per_token: bool = False) -> list[dict[str, Any]]:
    """Return the findings of predictions of further tokens (finding 3; without options, of right gradients).

    Megatron divides the further loss of each rank by that rank's own number of tokens, or with `per_token` by the
    number of the main loss' tokens. The main loss is nothing here, so that no fault of its own hides the other's.
    """
    length = 2 * _TOKENS
    tokens = draw(world, length, seed=11).mul(100).long().remainder(VOCABULARY)
    is_counted = torch.ones(world, length)
    if masked:
        is_counted[0, _TOKENS:] = 0

    def make_config(per_token: bool) -> TransformerConfig:
        return TransformerConfig(
            num_layers=1,
            hidden_size=2 * WIDTH,
            num_attention_heads=2,
            use_cpu_initialization=True,
            mtp_num_layers=1,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            calculate_per_token_loss=per_token,
        )

    def build(config: TransformerConfig) -> GPTModel:
        torch.manual_seed(12)
        spec = get_gpt_layer_local_spec()
        further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        return GPTModel(config, spec, VOCABULARY, length, mtp_block_spec=further)

    def loss(module: Any, rows: slice = slice(None)) -> torch.Tensor:
        places = torch.arange(length).expand(tokens[rows].shape)
        is_hidden = torch.ones(1, 1, length, length).tril() < 0.5
        losses = module(tokens[rows], places, is_hidden, labels=tokens[rows], loss_mask=is_counted[rows])
        return losses.sum() * 0

    MTPLossAutoScaler.set_loss_scale(torch.ones(()))
    whole = gradients_alone(build(make_config(False)), loss)
    config, own = make_config(per_token), slice(rank, rank + 1)
    num_tokens = int(is_counted.sum()) // world if per_token else None  # of one rank: the finalizer adds them
    return check(build(config), lambda module: loss(module, own), whole, config, num_tokens, along=None)


def main(rank: int, world: int, folder: str) -> None:
    """Check all faults, and the same steps without them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # Megatron asks for it where there is no GPU
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # no dropout here, which it is for
    moe_utils.te_general_gemm = None  # the name that it forgets to set without Transformer Engine
    parallel_state.initialize_model_parallel(world, 1)
    found = {
        "right head": check_head(rank, world),
        "label smoothing": check_head(rank, world, smoothing=SMOOTHING),
        "gathered logits": check_head(rank, world, gathers=True),
        "norm of heads": check_heads(rank, world),
        "right router": check_router(rank, world, masked=False),
        "masked router": check_router(rank, world, masked=True),
    }
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 1, context_parallel_size=world)
    found |= {
        "right parts": check_parts(rank, world, masked=False),
        "masked parts": check_parts(rank, world, masked=True),
    }
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 1)
    found |= {
        "right predictions": check_predictions(rank, world),
        "predictions by token": check_predictions(rank, world, per_token=True),
        "masked predictions": check_predictions(rank, world, masked=True),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
