"""A small transformer of plain torch modules, cut along pp, dp, cp, tp and ep by hand; whole on a mesh of one rank.

Sequences are mixed by their mean, so that cp matters; norms see a part of the sequence on each rank along tp, and the
norm of queries a part of the heads; tables are on the first and on the last stage; each token has one expert by its id.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xrank.gradients import finalize_model_grads, mark
from xrank.gradients.roles import MeshPlace
from xrank.gradients.wire import make_wire
from xrank.layout.mesh import MeshViews, megatron_views

VOCABULARY, WIDTH, LENGTH, NUM_HEADS, NUM_EXPERTS, NUM_LAYERS, ROWS = 12, 8, 8, 4, 4, 2, 8
RATE = 0.125


@dataclass
class Place:
    """Where a rank stands, with a group and its place in it for each axis."""

    views: MeshViews
    rank: int
    groups: dict[str, Any] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)


def place_of(
    rank: int, world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, connects: bool = True
) -> Place:
    """Return a rank's place on a mesh; on all ranks at once if it connects them by process groups."""
    views = megatron_views(world_size, tp=tp, pp=pp, cp=cp, ep=ep, etp=1)
    found, place = MeshPlace(views, rank), Place(views, rank)
    for axis in ("pp", "dp", "cp", "tp", "ep"):
        place.ranks[axis] = found.ranks([axis], axis == "ep")
        place.places[axis] = place.ranks[axis].index(rank)
        place.lengths[axis] = len(place.ranks[axis])
    if world_size > 1 and connects:
        groups = make_wire(place.ranks.values()).groups
        place.groups = {axis: groups.get(ranks) for axis, ranks in place.ranks.items()}
    return place


class _Exchange(torch.autograd.Function):
    """One exchange forward, and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: Place, axis: str, dim: int, there: str, back: str) -> torch.Tensor:
        ctx.told = place, axis, dim, back
        return _exchanged(x, place, axis, dim, there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        place, axis, dim, back = ctx.told
        return _exchanged(gradient, place, axis, dim, back), None, None, None, None, None


def _exchanged(x: torch.Tensor, place: Place, axis: str, dim: int, how: str) -> torch.Tensor:
    x = x.contiguous()
    if how == "gather":
        parts = [torch.empty_like(x) for _ in range(place.lengths[axis])]
        dist.all_gather(parts, x, group=place.groups[axis])
        return torch.cat(parts, dim)
    if "sum" in how:
        x = x.clone()
        dist.all_reduce(x, group=place.groups[axis])
    if "split" in how:
        x = x.chunk(place.lengths[axis], dim)[place.places[axis]].contiguous()
    return x


def _exchange(x: torch.Tensor, place: Place, axis: str, dim: int, there: str, back: str) -> torch.Tensor:
    if place.lengths[axis] == 1:
        return x
    return _Exchange.apply(x, place, axis, dim, there, back)


class Router(nn.Module):
    """Chooses by ids, weighs by values, and counts as Megatron's does."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.expert_bias_update_rate = RATE
        self.register_buffer("expert_bias", torch.zeros(NUM_EXPERTS))
        self.register_buffer("local_tokens_per_expert", torch.zeros(NUM_EXPERTS))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        self.local_tokens_per_expert += torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
        return torch.sigmoid((x * self.weight[chosen]).sum(-1, keepdim=True))


class Layer(nn.Module):
    """Norm, a cut MLP with a norm of its heads, a condition that all stages know, experts, and a mean over tokens."""

    def __init__(self, number: int, place: Place, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.number, self.place = number, place
        for name in ("norm", "up", "down", "down_bias", "q_norm", "experts", "frozen", "unused"):
            self.register_parameter(name, nn.Parameter(weights[f"layers.{number}.{name}"]))
        self.router = Router(weights[f"layers.{number}.router.weight"])
        self.frozen.requires_grad_(False)
        self.experts.allreduce = False
        self.up.tensor_model_parallel = self.down.tensor_model_parallel = True
        for part in (self.norm, self.down_bias, self.router.weight):
            part.sequence_parallel = True

    def forward(self, x: torch.Tensor, ids: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        place = self.place
        y = _exchange(_norm(x) * self.norm * self.frozen, place, "tp", 1, "gather", "sum split")
        heads = (y @ self.up.T).unflatten(-1, (NUM_HEADS // place.lengths["tp"], -1))
        z = torch.tanh(heads * self.q_norm).flatten(-2) @ self.down.T
        x = x + _exchange(z, place, "tp", 1, "sum split", "gather") + self.down_bias + condition
        total = x.sum(1, keepdim=True)
        for axis in ("tp", "cp"):
            total = _exchange(total, place, axis, 1, "sum", "sum")
        x = torch.sin(x + total / LENGTH)
        chosen = (ids + self.number) % NUM_EXPERTS
        scale = self.router(x, chosen)
        # Every rank along ep sees the tokens of all of them, and answers for its experts.
        everywhere = _exchange(x, place, "ep", 0, "gather", "sum split")
        of_all = _exchanged(chosen, place, "ep", 0, "gather") if place.lengths["ep"] > 1 else chosen
        out = torch.zeros_like(everywhere)
        for i, weight in enumerate(self.experts):
            mine = (of_all == place.places["ep"] * len(self.experts) + i).unsqueeze(-1)
            out = out + torch.tanh(everywhere @ weight) * mine
        return x + _exchange(out, place, "ep", 0, "sum split", "gather") * scale


class Stage(nn.Module):
    """The part of the model that a rank holds, under the names of the whole."""

    def __init__(self, place: Place, dtype: torch.dtype = torch.float32, seed: int = 3) -> None:
        super().__init__()
        weights = {name: cut(name, whole, place).to(dtype) for name, whole in whole_weights(seed)}
        stage, num_stages = place.places["pp"], place.lengths["pp"]
        self.place = place
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if self.is_first or self.is_last:
            self.table, self.position = nn.Parameter(weights["table"]), nn.Parameter(weights["position"])
            self.table.shared_embedding = True
            mark(self.position, tied="position")
        self.condition = nn.Parameter(weights["condition"])
        self.condition.pipeline_parallel = self.condition.sequence_parallel = True
        numbers = range(stage * NUM_LAYERS // num_stages, (stage + 1) * NUM_LAYERS // num_stages)
        self.layers = nn.ModuleDict({str(number): Layer(number, place, weights) for number in numbers})
        if self.is_last:
            self.final, self.gate = nn.Parameter(weights["final"]), nn.Parameter(weights["gate"])
            self.final.sequence_parallel = True
            self.gate.average_gradients_across_tp_domain = True

    def forward(self, x: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        """Return activations, or on the last stage the loss of each token; ``ids`` are this rank's by dp and cp."""
        place, tp = self.place, "tp"
        if x is None:
            x = _exchange(self.table[ids] + self._positions(ids), place, tp, 1, "split", "gather")
        own = _exchanged(ids, place, tp, 1, "split")
        for layer in self.layers.values():
            x = layer(x, own, self.condition)
        if not self.is_last:
            return x
        # Ranks along tp have the same from here on.
        x = _exchange(_norm(x) * self.final, place, tp, 1, "gather", "split")
        logits = (x * self.gate + self._positions(ids)) @ self.table.T
        targets = (ids * 5 + 1) % VOCABULARY
        return nn.functional.cross_entropy(_widen(logits.flatten(0, 1)), targets.flatten(), reduction="none")

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        start = self.place.places["cp"] * ids.shape[1]
        return self.position[start : start + ids.shape[1]]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(x, (WIDTH,))


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def whole_weights(seed: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of the whole model, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"table": (VOCABULARY, WIDTH), "position": (LENGTH, WIDTH)}
    for name in ("condition", "final", "gate"):
        shapes[name] = (WIDTH,)
    for number in range(NUM_LAYERS):
        for name, shape in (
            *((one, (WIDTH,)) for one in ("norm", "down_bias", "frozen", "unused")),
            ("up", (NUM_HEADS * 2, WIDTH)),
            ("down", (WIDTH, NUM_HEADS * 2)),
            ("q_norm", (2,)),
            ("experts", (NUM_EXPERTS, WIDTH, WIDTH)),
            ("router.weight", (NUM_EXPERTS, WIDTH)),
        ):
            shapes[f"layers.{number}.{name}"] = shape
    for name, shape in shapes.items():
        yield name, torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5


def cut(name: str, whole: torch.Tensor, place: Place) -> torch.Tensor:
    """Return what a rank has of a whole weight, or of its gradient."""
    for ending, axis, dim in ((".up", "tp", 0), (".down", "tp", 1), (".experts", "ep", 0)):
        if name.endswith(ending):
            whole = whole.chunk(place.lengths[axis], dim)[place.places[axis]]
    return whole.contiguous()


def whole_batch(seed: int = 3) -> torch.Tensor:
    """Return the ids of the whole batch."""
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed + 6))


def take_batch(place: Place, seed: int = 3) -> torch.Tensor:
    """Return the rows and the part of the sequence that a rank sees."""
    rows = whole_batch(seed).chunk(place.lengths["dp"])[place.places["dp"]]
    return rows.chunk(place.lengths["cp"], 1)[place.places["cp"]]


def count(ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens count in a loss by tokens: not the same number on each rank."""
    return (ids % 3 > 0).flatten()


def run_microbatch(model: Any, place: Place, ids: torch.Tensor, *, by_tokens: bool, share: float) -> int:
    """Run one micro-batch forward and backward through all stages, and return its tokens, 0 before the last stage."""
    stage, dtype = place.places["pp"], next(model.parameters()).dtype
    x, before, after = None, place.ranks["pp"][stage - 1], place.ranks["pp"][(stage + 1) % place.lengths["pp"]]
    if stage:
        x = torch.empty(len(ids), ids.shape[1] // place.lengths["tp"], WIDTH, dtype=dtype)
        dist.recv(x, before)
        x.requires_grad_()
    out = model(x, ids)
    num_tokens = 0
    if stage < place.lengths["pp"] - 1:
        dist.send(out.detach().contiguous(), after)
        gradient = torch.empty_like(out)
        dist.recv(gradient, after)
        out.backward(gradient)
    elif by_tokens:
        num_tokens = int(count(ids).sum())
        (out * count(ids)).sum().backward()
    else:
        (out.mean() * share).backward()
    if x is not None:
        dist.send(x.grad.contiguous(), before)
    return num_tokens


def run_step(ddp: Any, place: Place, num_microbatches: int = 1, *, by_tokens: bool = False, seed: int = 3) -> Any:
    """Run a step over this rank's part of the batch, and return the exchanges."""
    num_tokens, share = 0, 1 / num_microbatches
    ddp.zero_grad_buffer()
    for number, ids in enumerate(take_batch(place, seed).chunk(num_microbatches), 1):
        with ddp.no_sync() if number < num_microbatches else nullcontext():
            num_tokens += run_microbatch(ddp, place, ids, by_tokens=by_tokens, share=share)
    return finalize_model_grads(ddp, num_tokens if by_tokens else None)


def whole_place() -> Place:
    """Return the place of one process that holds and sees all."""
    place = Place(megatron_views(1, tp=1, ep=1), 0)
    for axis in ("pp", "dp", "cp", "tp", "ep"):
        place.places[axis], place.lengths[axis], place.ranks[axis] = 0, 1, (0,)
    return place


def reference_gradients(
    *, by_tokens: bool = False, dtype: torch.dtype = torch.float64, seed: int = 3
) -> tuple[dict[str, torch.Tensor], Stage]:
    """Return the gradients of one process that sees the whole batch, and its model."""
    place = whole_place()
    model, ids = Stage(place, dtype, seed), whole_batch(seed)
    num_tokens = run_microbatch(model, place, ids, by_tokens=by_tokens, share=1.0)
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad / max(num_tokens, 1)
        for name, one in model.named_parameters()
    }, model
