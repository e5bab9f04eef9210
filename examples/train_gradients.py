"""Trains a small model on replicas, tensor parallel ranks and pipeline stages, and checks every gradient of it.

The ranks form a mesh pp x dp x tp: stages hand activations on, replicas see other sentences, and ranks along tp hold
columns and rows of the MLPs and, between them, other tokens of a sentence. The model is written by hand, in plain
torch: what xrank needs to know of it is in `mark_parameters`, and what adds up the gradients is in `train`.

    python examples/train_gradients.py
    python examples/train_gradients.py --dp 4 --tp 1 --pp 1 --workspace /tmp/gradients
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xrank import NFSWorkspace
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    ParameterShards,
    check_gradients,
    export_gradients,
    finalize_model_grads,
    mark,
)
from xrank.layout import DeviceMesh, LayoutMap

WORDS, HIDDEN, WIDE, BLOCKS = 48, 16, 32, 4
SENTENCES, LENGTH, MICROBATCHES, STEPS = 8, 8, 2, 3
CUTS = {"up.weight": (0, "[f/tp, h]"), "up.bias": (0, "[f/tp]"), "down.weight": (1, "[h, f/tp]")}
"""What tp cuts: in which dim, and how a layout says it."""


class Tensors:
    """The ranks along tp, which hold parts of a block and tokens of a sentence."""

    def __init__(self, ranks: tuple[int, ...], rank: int, group: Any) -> None:
        self.size, self.place, self.group = len(ranks), ranks.index(rank), group

    def own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a dim."""
        return whole.chunk(self.size, dim)[self.place]

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return all tokens, of which each rank has some."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def added(self, addend: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of what the ranks have addends of."""
        if self.size == 1:
            return addend
        total = addend.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return self.own(total, 1)


class Gather(torch.autograd.Function):
    """All tokens, of which each rank has some; backward adds what the ranks made of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: Tensors) -> torch.Tensor:
        """Put tokens together."""
        ctx.along = along
        return along.whole(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Add gradients up."""
        return ctx.along.added(gradient), None


class Add(torch.autograd.Function):
    """This rank's tokens of a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: Tensors) -> torch.Tensor:
        """Add up."""
        ctx.along = along
        return along.added(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Put gradients together."""
        return ctx.along.whole(gradient), None


class Block(nn.Module):
    """A norm and an MLP, whose columns and rows are on ranks along tp."""

    def __init__(self, along: Tensors) -> None:
        super().__init__()
        self.along = along
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [sentences, tokens, hidden]."""
        wide = torch.tanh(self.up(Gather.apply(self.norm(x), self.along)))
        return x + Add.apply(wide @ self.down.weight.T, self.along) + self.down.bias


class Stage(nn.Module):
    """Some of the blocks; the first stage embeds words, the last one scores them, with copies of one table."""

    def __init__(self, number: int, num_stages: int, along: Tensors) -> None:
        super().__init__()
        self.is_first, self.is_last, self.along = number == 0, number == num_stages - 1, along
        per_stage = BLOCKS // num_stages
        random = torch.random.get_rng_state()
        torch.manual_seed(0)  # all ranks draw the whole model, and keep what is theirs
        if self.is_first or self.is_last:
            self.table = nn.Parameter(torch.empty(WORDS, HIDDEN))
        table, blocks = torch.randn(WORDS, HIDDEN) / 4, [Block(along) for _ in range(BLOCKS)]
        if self.is_first or self.is_last:
            self.table.data = table
        self.blocks = nn.ModuleList(blocks[number * per_stage : (number + 1) * per_stage])
        torch.random.set_rng_state(random)
        for name, parameter in self.named_parameters():
            parameter.data = own_part(name, parameter.data, along)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations, or in the last stage scores of words; of this rank's tokens."""
        if self.is_first:
            x = self.table[self.along.own(x, 1)]
        for block in self.blocks:
            x = block(x)
        return x @ self.table.T if self.is_last else x


def own_part(name: str, whole: torch.Tensor, along: Tensors) -> torch.Tensor:
    """Return what this rank holds of a parameter."""
    cut = next((dim for suffix, (dim, _) in CUTS.items() if name.endswith(suffix)), None)
    return whole if cut is None else along.own(whole, cut).clone()


def mark_parameters(stage: Stage) -> None:
    """Say what the mesh alone does not: whose gradients ranks along tp, and stages, have parts of."""
    for name, parameter in stage.named_parameters():
        if not name.endswith(tuple(CUTS)):
            # Each rank along tp saw other tokens. What tp cuts saw all of them.
            mark(parameter, over_tp="sum", tied="word" if name == "table" else None)


def loss_of(scores: torch.Tensor, words: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the part of the mean loss that these tokens make."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten(), reduction="sum") / num_tokens


def run_microbatch(ddp: DistributedDataParallel, mesh: DeviceMesh, rank: int, words: torch.Tensor) -> None:
    """Run a micro-batch forward and backward: activations go to the next stage, their gradients come back."""
    stage, at = ddp.module, mesh.coordinate(rank)
    shape = (len(words), LENGTH // stage.along.size, HIDDEN)
    x = words
    if not stage.is_first:
        before = mesh.rank_at({**at, "pp": at["pp"] - 1})
        x = torch.empty(shape)
        dist.recv(x, before)
        x.requires_grad_()
    y = ddp(x)
    if stage.is_last:
        targets = stage.along.own(words.roll(-1, 1), 1)
        loss_of(y, targets, MICROBATCHES * words.numel()).backward()
    else:
        after = mesh.rank_at({**at, "pp": at["pp"] + 1})
        dist.send(y.detach().contiguous(), after)
        gradient = torch.empty_like(y)
        dist.recv(gradient, after)
        y.backward(gradient)
    if not stage.is_first:
        dist.send(x.grad, before)


def train(mesh: DeviceMesh, rank: int, workspace: str | None) -> None:
    """Do what one rank does."""
    at = mesh.coordinate(rank)
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in mesh.groups("tp")]
    along = next(Tensors(ranks, rank, group) for ranks, group in groups if rank in ranks)
    num_stages, num_replicas = mesh.axis_length("pp"), mesh.axis_length("dp")

    stage = Stage(at["pp"], num_stages, along)
    mark_parameters(stage)
    config = GradientConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=1000)
    plan = GradientPlan.from_module(stage, mesh, config)
    ddp = DistributedDataParallel(stage, plan)
    shards = ParameterShards(ddp)
    optimizer = torch.optim.AdamW(shards.named_parameters(), lr=0.01)
    shards.attach(optimizer)

    alone = Stage(0, 1, Tensors((rank,), rank, None))  # the same model in one process
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)

    random = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        words = torch.randint(0, WORDS, (SENTENCES, LENGTH), generator=random)
        microbatches = words.chunk(num_replicas)[at["dp"]].chunk(MICROBATCHES)
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            for part in microbatches[:-1]:
                run_microbatch(ddp, mesh, rank, part)
        run_microbatch(ddp, mesh, rank, microbatches[-1])
        reductions = finalize_model_grads([ddp])

        alone_optimizer.zero_grad()
        loss = loss_of(alone(words), words.roll(-1, 1), words.numel())
        loss.backward()
        reference = {
            name: own_part(name, alone.get_parameter(whole_name(name, at["pp"], num_stages)).grad, along)
            for name, _ in stage.named_parameters()
        }
        gradients = {name: ddp.main_grad(name) for name, _ in stage.named_parameters()}
        check = check_gradients(gradients, plan, reference=reference)
        check.raise_if_wrong()
        if rank == 0:
            show(step, plan, reductions, check, loss)
        if workspace is not None and step == STEPS - 1:
            leave(workspace, ddp, at["pp"], num_stages)

        optimizer.step()
        alone_optimizer.step()
    ddp.start_param_sync(force_sync=True)
    furthest = max(
        (parameter - own_part(name, alone.get_parameter(whole_name(name, at["pp"], num_stages)).data, along))
        .abs()
        .max()
        for name, parameter in stage.named_parameters()
    )
    dist.all_reduce(furthest := furthest.detach(), op=dist.ReduceOp.MAX)
    if furthest > 1e-3:
        raise SystemExit(f"the models differ by {furthest:g}")
    if rank == 0:
        print(f"after {STEPS} steps no parameter of any rank differs from one process' by more than 1e-3")


def whole_name(name: str, stage: int, num_stages: int) -> str:
    """Return a stage's parameter's name in the whole model, where blocks are counted over all stages."""
    first, *rest = name.split(".")
    if first != "blocks":
        return name
    return ".".join([first, str(int(rest[0]) + stage * BLOCKS // num_stages), *rest[1:]])


def show(step: int, plan: GradientPlan, reductions: list[Any], check: Any, loss: torch.Tensor) -> None:
    """Print what rank 0 did in a step."""
    if step == 0:
        print(f"mesh      {plan.views.main.grid}; rank 0 has {len(plan.parameters)} parameters in these buckets")
        for bucket in plan.buckets:
            start, stop = plan.shard(bucket)
            print(f"bucket    {bucket.id}: {bucket.numel} elements, of which this rank owns {stop - start}")
        for one in reductions:
            along = f"along {', '.join(one.axes)} over ranks {', '.join(map(str, one.ranks))}"
            print(f"reduced   {one.kind:6} {one.operation} {along}: {len(one.names)} tensors, {one.numel} elements")
        print(plan.explain("table"))
    print(f"step {step}    loss {loss:.4f}; {check}")


def leave(folder: str, ddp: DistributedDataParallel, stage: int, num_stages: int) -> None:
    """Leave this rank's gradients where ``xrank gather`` finds them."""
    own = LayoutMap()
    for suffix, (_, layout) in CUTS.items():
        own[rf".*\.{suffix.replace('.', chr(92) + '.')}"] = layout
    names = functools.partial(whole_name, stage=stage, num_stages=num_stages)
    tensors, layouts = export_gradients(ddp, names=names, layouts=own)
    NFSWorkspace(folder).write_configs_and_weights({"model_type": "mlp"}, tensors, layouts=layouts)


def start_rank(rank: int, rendezvous: str, mesh: DeviceMesh, workspace: str | None) -> None:
    """Be one of the ranks that `main` starts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=mesh.size)
    train(mesh, rank, workspace)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dp", type=int, default=2, help="replicas (default: 2)")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel ranks (default: 2)")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default: 2)")
    parser.add_argument("--workspace", help="leave the gradients of the last step there")
    options = parser.parse_args()
    wanted = {"dp": SENTENCES // MICROBATCHES, "tp": LENGTH, "pp": BLOCKS}
    for name, most in wanted.items():
        length = getattr(options, name)
        if length < 1 or most % length:
            parser.error(f"--{name} {length}: want a divisor of {most}")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # saves gloo looking up the name of this host
    mesh = DeviceMesh((options.pp, options.dp, options.tp), ("pp", "dp", "tp"))
    with tempfile.TemporaryDirectory() as folder:
        rank_arguments = (os.path.join(folder, "rendezvous"), mesh, options.workspace)
        torch.multiprocessing.spawn(start_rank, rank_arguments, nprocs=mesh.size)


if __name__ == "__main__":
    main()
