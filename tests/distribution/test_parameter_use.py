"""Uses of laid out models beside plain steps: branches, recomputation, states, options that are refused."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.distribution.test_modules import model_parallel
from xrank import NFSWorkspace, gather_checkpoint, open_checkpoint
from xrank.distribution import DataParallel
from xrank.errors import LayoutError, UsageError


class Branches(nn.Module):
    """Uses one of two layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return self.shared(getattr(self, branch)(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["data", "model"])
def test_ranks_that_use_different_parameters(kind, rank):
    torch.manual_seed(0)
    whole = Branches()
    made = DataParallel() if kind == "data" else model_parallel((2, 1), {"left.weight": ("model",)})
    model = made.distribute_module(copy.deepcopy(whole))
    x = torch.randn(4, 4)
    for step in range(3):  # gradients accumulate
        branches = ("left", "right") if step % 2 else ("right", "left")
        loss = sum(whole(part, branch).square().mean() for part, branch in zip(x.chunk(2), branches, strict=True)) / 2
        loss.backward()
        model(x.chunk(2)[rank], branches[rank]).square().mean().backward()
        for name, parameter in whole.named_parameters():
            gradient = model.get_parameter(name).grad
            found = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(found, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks(2)
def test_gradients_of_autograd_grad_are_averages():
    torch.manual_seed(0)
    whole = nn.Linear(4, 4)
    distribution = model_parallel((2, 1), {})
    model = distribution.distribute_module(copy.deepcopy(whole))
    x = torch.randn(4, 4)
    wanted = torch.autograd.grad(whole(x).square().mean(), whole.weight)[0]
    part = x.chunk(2)[distribution.data_shard_id]
    (found,) = torch.autograd.grad(model(part).square().mean(), model.weight)
    assert found.placements == (Partial("avg"), Replicate())
    torch.testing.assert_close(found.full_tensor(), wanted)


@pytest.mark.ranks(4)
def test_batch_norm_has_the_statistics_of_the_whole_batch():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    rules = {"[03].weight": ("model", None, None, None), "1.weight": ("model",)}
    distribution = model_parallel((2, 2), rules)
    model = distribution.distribute_module(copy.deepcopy(whole))
    for _ in range(2):
        x = torch.randn(4, 3, 8, 8)
        part = model(x.chunk(2)[distribution.data_shard_id])
        torch.testing.assert_close(part, whole(x).chunk(2)[distribution.data_shard_id])
    torch.testing.assert_close(model[1].running_var, whole[1].running_var)
    assert model[1].num_batches_tracked == 2
    model.eval(), whole.eval()
    torch.testing.assert_close(model(part.new_ones(2, 3, 8, 8)), whole(part.new_ones(2, 3, 8, 8)))


@pytest.mark.ranks(2)
def test_autograd_keeps_no_gathered_parameter():
    model = model_parallel((1, 2), {"weight": ("model", None, None)}).distribute_module(nn.Conv1d(64, 64, 3))
    output = model(torch.ones(1, 64, 4))
    assert isinstance(output.grad_fn._raw_saved_weight.data, torch.Tensor) is False
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(UsageError, match="weight was changed in place between forward and backward"):
        output.sum().backward()


class Exponential(nn.Module):
    """Has an operation whose backward needs its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, changes: bool = False) -> torch.Tensor:
        x = self.first(x).exp()
        if changes:
            with torch.no_grad():
                x.add_(1)
        return self.last(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_a_dropped_model_is_freed(shape):
    for end in ("forward", "backward"):
        model = model_parallel(shape, {"first.weight": ("model", None)}).distribute_module(Exponential())
        held = [weakref.ref(parameter) for parameter in model.parameters()]
        output = model(torch.ones(2, 4))
        if end == "backward":
            output.sum().backward()
        del model, output
        gc.collect()
        assert [reference() for reference in held] == [None] * 4


@pytest.mark.ranks(2)
def test_a_change_of_a_saved_activation_is_refused():
    model = model_parallel((1, 2), {"first.weight": ("model", None)}).distribute_module(Exponential())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(2, 4), changes=True).sum().backward()


@pytest.mark.ranks(2)
def test_embeddings_that_need_the_whole_batch_are_refused():
    model = model_parallel((1, 2), {"weight": ("model",)}).distribute_module(nn.Embedding(6, 4, max_norm=1.0))
    with pytest.raises(UsageError, match="weight cannot be sharded with max_norm"):
        model(torch.tensor([[1, 2]]))


@pytest.mark.ranks(4)
def test_a_cut_that_torch_cannot_hold_is_refused():
    with pytest.raises(LayoutError, match=r"weight, of shape .*neither scatters nor gathers dim 0"):
        model_parallel((2, 2), {"weight": "[f/~model/~batch, h]"}).distribute_module(nn.Linear(4, 7))


@pytest.mark.ranks(4)
def test_states_are_saved_gathered_and_loaded(tmp_path, rank):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    distribution = model_parallel((2, 2), {"0.weight": ("model",), "0.bias": ("model",)})
    model = distribution.distribute_module(copy.deepcopy(whole))
    x = torch.randn(4, 4)
    whole(x), model(x.chunk(2)[distribution.data_shard_id])
    state = model.state_dict()
    assert state["1.running_mean"].placements == (Replicate(), Replicate())
    workspace = NFSWorkspace(tmp_path / "states", rank=rank, world_size=4, run_id="1")
    workspace.write_configs_and_weights({"model_type": "mlp"}, state)
    dist.barrier()
    if rank == 0:
        gather_checkpoint(tmp_path / "states", tmp_path / "model")
        for name, tensor in open_checkpoint(tmp_path / "model").items():
            torch.testing.assert_close(tensor, whole.state_dict()[name])
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    state = {name: tensor.clone() for name, tensor in state.items()}
    model.load_state_dict(other.state_dict())
    assert model[0].weight.full_tensor().equal(other[0].weight)
    model.load_state_dict(state)
    torch.testing.assert_close(model[1].running_mean, whole[1].running_mean)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**other.state_dict(), "0.weight": torch.ones(5, 4)})


@pytest.mark.ranks(2)
def test_the_state_of_a_replicated_model_is_plain(rank):
    """It may be saved, and loaded into the same model in one process."""
    whole = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    model = DataParallel().distribute_module(copy.deepcopy(whole))
    model(torch.randn(4, 4).chunk(2)[rank])
    state = model.state_dict()
    assert all(not isinstance(tensor, DTensor) for tensor in state.values())
    whole.load_state_dict(state)
    assert whole[1].running_mean.equal(model[1].running_mean)


class Masked(nn.Module):
    """Recomputes a method that makes a mask and uses a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.conv = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=1)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = functional.scaled_dot_product_attention(self.q(x), self.k(x), x, attn_mask=mask)
        return self.conv(y.transpose(1, 2)).transpose(1, 2)

    def forward(self, x: torch.Tensor, is_again: bool) -> torch.Tensor:
        return checkpoint(self.mix, x, use_reentrant=False) if is_again else self.mix(x)


@pytest.mark.ranks(4)
def test_recomputed_activations_have_the_same_gradients():
    torch.manual_seed(0)
    whole = Masked()
    distribution = model_parallel(
        (2, 2), {"q.weight": ("model",), "k.weight": (None, "model"), "conv.weight": ("model", None, None)}
    )
    x = torch.randn(4, 5, 8)
    whole(x, False).square().mean().backward()
    for is_again in (False, True):
        model = distribution.distribute_module(copy.deepcopy(whole))
        model.zero_grad()
        model(x.chunk(2)[distribution.data_shard_id], is_again).square().mean().backward()
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
