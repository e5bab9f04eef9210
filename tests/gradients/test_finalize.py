"""The end of a step: each exchange runs once and in order, and all ranks raise the faults of any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.wires import assert_raises_everywhere
from xrank.errors import UsageError
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    Reduction,
    check_gradients,
    finalize_model_grads,
    mark,
)
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(90)


class Parts(nn.Module):
    """Parameters of every kind, each with the gradient that a test gives it."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        if stage == 0 or stage == num_stages - 1:
            self.word = nn.Parameter(torch.zeros(3, 2))
            self.position = nn.Parameter(torch.zeros(5))
            mark(self.word, tied="word")
            mark(self.position, tied="position")
        self.norm = nn.Parameter(torch.zeros(4))
        self.other_norm = nn.Parameter(torch.zeros(2))
        self.average = nn.Parameter(torch.zeros(3))
        self.embedder = nn.Parameter(torch.zeros(2))
        self.frozen_norm = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.weight = nn.Parameter(torch.zeros(7))
        mark(self.norm, over_tp="sum")
        mark(self.other_norm, over_tp="sum")
        mark(self.frozen_norm, over_tp="sum")
        mark(self.average, over_tp="average")
        mark(self.embedder, over_pp=True)


def fill(ddp: DistributedDataParallel, value: float) -> None:
    """Run a backward in which every gradient is ``value``."""
    ddp.zero_grad_buffer()
    sum((one * value).sum() for one in ddp.module.parameters() if one.requires_grad).backward()


def value_of(ddp: DistributedDataParallel, name: str) -> float:
    """Return the one value that a gradient has in its owned elements; NaN if there are none."""
    owned = ddp.main_grad(name).flatten()[slice(*ddp.plan[name].owned)]
    if not owned.numel():
        return float("nan")
    assert (owned == owned[0]).all()
    return float(owned[0])


def wrap(module: nn.Module, shape: tuple[int, ...], axes: tuple[str, ...], **options: Any) -> DistributedDataParallel:
    """Return a module on a mesh."""
    return DistributedDataParallel(
        module, GradientPlan.from_module(module, DeviceMesh(shape, axes), GradientConfig(**options))
    )


@pytest.mark.ranks(4, timeout_seconds=60)
def test_each_kind_is_reduced_over_its_ranks_and_in_megatrons_order(rank: int) -> None:
    stage = rank // 2
    for is_sharded in (False, True):  # no replicas here, so that each rank owns all
        ddp = wrap(Parts(stage, 2), (2, 2), ("pp", "tp"), use_distributed_optimizer=is_sharded)
        for _ in range(2):
            fill(ddp, 10.0**rank)
            done = finalize_model_grads(ddp)
            along_tp, along_pp = (2 * stage, 2 * stage + 1), (rank % 2, rank % 2 + 2)
            assert done == [
                Reduction("conditional", "sum", ("pp",), along_pp, ("embedder",), 2),
                Reduction("tensor", "sum", ("tp",), along_tp, ("norm", "other_norm"), 6),
                Reduction("tensor", "average", ("tp",), along_tp, ("average",), 3),
                Reduction("word", "sum", ("pp",), along_pp, ("word",), 6),
                Reduction("position", "sum", ("pp",), along_pp, ("position",), 5),
            ]
            over_tp, over_pp = (sum(10.0**other for other in ranks) for ranks in (along_tp, along_pp))
            assert value_of(ddp, "weight") == 10.0**rank
            assert value_of(ddp, "norm") == value_of(ddp, "other_norm") == over_tp
            assert value_of(ddp, "average") == over_tp / 2
            assert value_of(ddp, "embedder") == value_of(ddp, "word") == value_of(ddp, "position") == over_pp


@pytest.mark.ranks(4, timeout_seconds=60)
def test_shards_of_replicas_are_reduced_later_alone(rank: int) -> None:
    # Replicas first, then tp: each rank owns half of a bucket, and of some parameters nothing.
    for axes in (("dp", "tp"), ("tp", "dp")):
        ddp = wrap(Parts(0, 1), (2, 2), axes, use_distributed_optimizer=True)
        place = dict(zip(axes, divmod(rank, 2), strict=True))
        fill(ddp, 10.0**rank)
        done = finalize_model_grads([ddp])
        assert {one.kind for one in done} <= {"data", "tensor"}
        assert sum(one.numel for one in done if one.kind == "data") == sum(one.numel for one in ddp.plan.buckets)
        sees = [r for r in range(4) if dict(zip(axes, divmod(r, 2), strict=True))["tp"] == place["tp"]]
        for name, wanted in (("weight", sum(10.0**r for r in sees) / 2), ("norm", 1111 / 2), ("average", 1111 / 4)):
            found = value_of(ddp, name)
            assert found == wanted or ddp.plan[name].owned == (0, 0)
        # Some rank owns each element, and only owners exchange it.
        owned = [None] * 4
        dist.all_gather_object(owned, {name: ddp.plan[name].owned for name in ("weight", "norm", "average")})
        assert all(
            sum(one[name][1] - one[name][0] for one in owned) == 2 * n
            for name, n in (("weight", 7), ("norm", 4), ("average", 3))
        )
        exchanged = {name for one in done if one.kind == "tensor" for name in one.names}
        assert exchanged == {name for name in ("norm", "other_norm", "average") if ddp.plan[name].owned != (0, 0)}


@pytest.mark.ranks(2, timeout_seconds=60)
def test_chunks_of_one_rank_fold_the_embedders_that_each_of_them_has(rank: int) -> None:
    """As two models, and as one model of two chunks, with and without shards."""

    class Chunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedder = nn.Linear(2, 2, bias=False)
            self.own = nn.Parameter(torch.zeros(3))
            self.embedder.weight.pipeline_parallel = True

    for is_sharded in (False, True):
        for is_one in (False, True):
            config = GradientConfig(use_distributed_optimizer=is_sharded)
            modules = [Chunk(), Chunk()]
            mesh = DeviceMesh((2,), ("pp",))
            groups = [modules] if is_one else [[module] for module in modules]
            models = [
                DistributedDataParallel(given, GradientPlan.from_module(given, mesh, config))
                for given in (group if is_one else group[0] for group in groups)
            ]
            for model in models:
                model.zero_grad_buffer()
            for number, module in enumerate(modules):
                (module.embedder.weight * 10.0 ** (2 * rank + number)).sum().backward()
                (module.own * (rank + 1.0)).sum().backward()
            done = finalize_model_grads(models)
            assert done == [Reduction("conditional", "sum", ("pp",), (0, 1), ("0.embedder.weight",), 4)]
            for module in modules:
                assert (module.embedder.weight.main_grad == 1111).all()
                assert (module.own.main_grad == rank + 1).all()


@pytest.mark.ranks(2, timeout_seconds=60)
def test_chunks_whose_embedders_are_no_copies_are_named(rank: int) -> None:
    models = []
    for size in (2, 3):
        module = nn.Module()
        module.register_parameter("embedder", nn.Parameter(torch.zeros(size)))
        mark(module.embedder, over_pp=True)
        models.append(wrap(module, (2,), ("pp",)))
    error = assert_raises_everywhere(lambda: finalize_model_grads(models))
    assert str(error) == "embedder: its shapes in chunks 0 and 1 of rank 0 differ"
    for model in models:
        model.zero_grad_buffer(discard=True)  # all chunks are finished: none is left half way


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_second_call_in_a_step_raises_and_sums_nothing_twice(rank: int) -> None:
    for options in ({"calculate_per_token_loss": True}, {}, {"overlap_grad_reduce": True}):
        ddp = wrap(Parts(0, 1), (2,), ("dp",), **options)
        tokens = 3 if "calculate_per_token_loss" in options else None
        for _ in range(2):
            fill(ddp, 1.0 + rank)
            finalize_model_grads(ddp, tokens)
            before = value_of(ddp, "weight")
            error = assert_raises_everywhere(lambda ddp=ddp, tokens=tokens: finalize_model_grads(ddp, tokens))
            assert str(error) == "word: gradients of this step were exchanged already"
            assert error.got == "finalize_model_grads after it, or after finish_grad_sync"
            assert value_of(ddp, "weight") == before == (0.5 if tokens else 1.5)
    fill(ddp, 1.0)
    ddp.finish_grad_sync()
    assert_raises_everywhere(
        lambda: finalize_model_grads(ddp, 3)
    )  # not that 3 is one too many: nothing is looked at any more
    fill(ddp, 1.0)
    finalize_model_grads(ddp)


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_step_that_leaves_out_the_later_reductions_is_named_by_the_next_one(rank: int) -> None:
    """Megatron's users step with norms that differ along tp then, and see neither a crash nor a NaN."""
    ddp = wrap(Parts(0, 1), (2,), ("tp",))
    fill(ddp, 1.0)
    ddp.finish_grad_sync()
    error = assert_raises_everywhere(ddp.zero_grad_buffer)
    assert str(error) == "norm: its gradients of this step were added up over replicas, and not along tp"
    ddp.zero_grad_buffer(discard=True)
    fill(ddp, 1.0)
    finalize_model_grads(ddp)
    ddp.zero_grad_buffer()
    assert ddp.release() > 0
    ddp.restore()


@pytest.mark.ranks(4, timeout_seconds=60)
def test_token_losses_are_divided_by_the_tokens_that_last_stages_saw(rank: int) -> None:
    axes = ("pp", "dp")
    for tokens in (3 + rank, torch.tensor([3 + rank]), torch.tensor(3.0 + rank)):
        ddp = wrap(Parts(rank // 2, 2), (2, 2), axes, calculate_per_token_loss=True)
        fill(ddp, 1.0)
        # The first stage has not seen the loss, so its number is ignored.
        given = tokens if rank // 2 == 1 else (None, 77)[rank]
        done = finalize_model_grads(ddp, given)
        assert [(one.ranks, one.axes) for one in done if one.kind == "tokens"] == [
            ((rank % 2, rank % 2 + 2), ("pp",)),
            ((rank // 2 * 2, rank // 2 * 2 + 1), ("dp",)),
        ]
        assert done[-1].kind == "tokens"
        assert value_of(ddp, "weight") == pytest.approx(2 / (5 + 6), rel=1e-6)
        assert value_of(ddp, "word") == pytest.approx(4 / (5 + 6), rel=1e-6)
    ddp.zero_grad_buffer()
    finalize_model_grads(ddp, 0)  # no token, and nothing is divided by 0
    assert value_of(ddp, "weight") == 0


@pytest.mark.ranks(2, timeout_seconds=60)
def test_all_ranks_raise_for_missing_or_surplus_token_counts(rank: int) -> None:
    ddp = wrap(Parts(0, 1), (2,), ("dp",), calculate_per_token_loss=True)
    for missing in (0, 1):
        fill(ddp, 1.0)
        error = assert_raises_everywhere(
            lambda missing=missing: finalize_model_grads(ddp, None if rank == missing else 3)
        )
        assert (
            str(error)
            == f"rank {missing} gives no num_tokens, but calculate_per_token_loss=True divides gradients by it"
        )
    for wrong in (-1, float("nan"), [3], 1j, 10**400, torch.tensor([])):
        fill(ddp, 1.0)
        error = assert_raises_everywhere(lambda wrong=wrong: finalize_model_grads(ddp, wrong if rank else 3))
        assert str(error) == "num_tokens of rank 1 is not a count"
    ddp = wrap(Parts(0, 1), (2,), ("dp",))
    fill(ddp, 1.0)
    error = assert_raises_everywhere(lambda: finalize_model_grads(ddp, 3 if rank else None))
    assert "were divided by the number of ranks already" in str(error)
    fill(ddp, 1.0)
    finalize_model_grads(ddp)


class Router(nn.Module):
    """The buffers of Megatron's router beside its weight."""

    def __init__(self, counts: list[float], rate: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(counts)))
        self.register_buffer("expert_bias", torch.zeros(len(counts)))
        self.register_buffer("local_tokens_per_expert", torch.tensor(counts))
        self.global_tokens = 5
        if rate is not None:
            self.config = SimpleNamespace(moe_router_bias_update_rate=rate)

    def reset_global_aux_loss_tracker(self) -> None:
        self.global_tokens = 0


@pytest.mark.ranks(4, timeout_seconds=60)
def test_biases_of_routers_move_towards_experts_with_few_tokens(rank: int) -> None:
    # Over tp, cp and dp: every rank saw other tokens. By its own counts, rank 0 would move the first one up.
    counts = [[1.0, 5.0, 3.0, 3.0], [9.0, 1.0, 1.0, 1.0], [4.0, 0.0, 4.0, 4.0], [4.0, 0.0, 4.0, 4.0]][rank]
    module = nn.ModuleDict({"moe": Router(counts, 0.25), "few": Router([1.0, 1.0 + rank], 0.5)})
    module["frozen"] = Router(counts, None).requires_grad_(False)
    dense = nn.Module()
    dense.expert_bias = dense.local_tokens_per_expert = None  # as Megatron's, where biases are off
    module["off"] = dense
    ddp = wrap(module, (1, 2, 2), ("dp", "cp", "tp"))
    for step in (1, 2):
        ddp.zero_grad_buffer()
        done = finalize_model_grads(ddp)
        assert [one for one in done if one.kind == "router"] == [
            Reduction("router", "sum", ("cp", "tp"), (0, 1, 2, 3), ("moe", "few", "frozen"), 10)
        ]
        # 18, 6, 12, 12 tokens: the mean of 12 stays where it is. In the second step nothing was counted.
        assert module["moe"].expert_bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
        assert module["few"].expert_bias.tolist() == [0.5, -0.5]
        assert module["frozen"].expert_bias.tolist() == [0.0] * 4
        assert not any(module[name].local_tokens_per_expert.any() for name in ("moe", "few", "frozen"))
        assert module["moe"].global_tokens == 0, step


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_router_without_a_rate_is_named(rank: int) -> None:
    module = nn.ModuleDict({"moe": Router([1.0, 2.0], None)})
    ddp = wrap(module, (2,), ("dp",))
    error = assert_raises_everywhere(lambda: finalize_model_grads(ddp))
    assert str(error) == "moe: the rate at which its expert_bias moves is unknown"
    module["moe"].expert_bias_update_rate = 0.5
    ddp.zero_grad_buffer()
    finalize_model_grads(ddp)
    assert module["moe"].expert_bias.tolist() == [0.5, -0.5]


@pytest.mark.ranks(2, timeout_seconds=60)
def test_a_model_that_is_frozen_goes_through_every_step(rank: int) -> None:
    for axes in (("dp",), ("tp",), ("pp",)):
        module = nn.ModuleDict({"parts": Parts(rank, 2) if axes == ("pp",) else Parts(0, 1)})
        module["moe"] = Router([1.0, 2.0], 0.5)
        module.requires_grad_(False)
        ddp = wrap(module, (2,), axes, calculate_per_token_loss=True)
        ddp.zero_grad_buffer()
        kinds = [one.kind for one in finalize_model_grads(ddp, 3)]
        assert set(kinds) <= {"router", "tokens"}
        assert not module["moe"].expert_bias.any()


def test_models_that_are_not_wrapped_are_refused() -> None:
    for models in (nn.Linear(2, 2), [nn.Linear(2, 2)], []):
        with pytest.raises(UsageError, match="models must be wrapped before their gradients"):
            finalize_model_grads(models)


@pytest.mark.ranks(2)
def test_stages_may_register_their_tables_in_another_order(rank: int) -> None:
    for config in (GradientConfig(), GradientConfig(use_distributed_optimizer=True)):
        module = nn.Module()
        for kind in ("word", "position") if rank == 0 else ("position", "word"):
            module.register_parameter(f"{kind}_{rank}", nn.Parameter(torch.zeros(4)))
            mark(module.get_parameter(f"{kind}_{rank}"), tied=kind)
        ddp = DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((2,), ("pp",)), config))
        word, position = (module.get_parameter(f"{kind}_{rank}") for kind in ("word", "position"))
        (word.sum() * (1 + rank) + position.sum() * (10 + rank)).backward()
        finalize_model_grads(ddp)
        assert ddp.main_grad(f"word_{rank}").tolist() == [3.0] * 4
        assert ddp.main_grad(f"position_{rank}").tolist() == [21.0] * 4
        assert check_gradients(ddp, ddp.plan)
