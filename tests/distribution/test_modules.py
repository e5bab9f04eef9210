import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.distribution.trained_models import (
    DECODER_RULES,
    PERCEPTRON_RULES,
    Decoder,
    Perceptron,
    assert_same_state,
    decoder_batches,
    perceptron_batches,
    take_part,
    token_loss,
    train,
)
from xrank.distribution import (
    DeviceMesh,
    LayoutMap,
    ModelParallel,
    TensorLayout,
    distribute_tensor,
    distributions,
    list_devices,
    set_distribution,
)
from xrank.distribution import distribution as current_distribution
from xrank.distribution.distributions import GATHERS_PIECES, placements_for
from xrank.errors import ContradictionError, LayoutError, UsageError


def model_parallel(shape, rules, **options) -> ModelParallel:
    layout_map = LayoutMap(DeviceMesh(shape, ("batch", "model"), list_devices()))
    layout_map.update(rules)
    return ModelParallel(layout_map=layout_map, batch_dim_name="batch", **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_both(distribution, make, batches, loss_of, make_optimizer=sgd) -> tuple[nn.Module, nn.Module]:
    """Train a model laid out in a scope, and a whole one; losses must be the same."""
    torch.manual_seed(3)
    whole = make()
    expected = train(whole, make_optimizer(whole), batches, loss_of)
    torch.manual_seed(3 + dist.get_rank())  # all ranks get the first rank's values
    with distribution.scope():
        model = make()
        optimizer = make_optimizer(model)  # made before the parameters are laid out
    parts = take_part(batches, distribution.num_model_replicas, distribution.data_shard_id)
    losses = torch.stack(train(model, optimizer, parts, loss_of))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), torch.stack(expected))
    return model, whole


@pytest.mark.ranks(8)
def test_two_by_four_ranks_train_as_one_process_does():
    model, whole = train_both(
        model_parallel((2, 4), PERCEPTRON_RULES), Perceptron, perceptron_batches(3), functional.mse_loss
    )
    assert_same_state(model, whole)
    assert model.dense[0].weight.placements == (Replicate(), Shard(0))
    assert model.dense[0].weight.to_local().shape == (4, 8)
    assert model.dense[1].weight.to_local().shape == (4, 4)
    assert model.norm.weight.placements == (Replicate(), Replicate())


@pytest.mark.ranks(4)
def test_parameters_that_the_batch_axis_cuts_train_as_one_process_does():
    """As FSDP over tensor parallelism: cut by both axes in one dim, in two, by the batch axis alone, unevenly."""
    rules = {
        "dense.0.weight": "[f/model/batch, h]",
        "dense.0.bias": "[f/~batch/~model]",
        "dense.1.weight": ("batch", "model"),
        "norm.weight": ("batch",),
    }
    model, whole = train_both(
        model_parallel((2, 2), rules),
        Perceptron,
        perceptron_batches(3),
        functional.mse_loss,
        lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    )
    assert_same_state(model, whole)
    assert model.dense[0].weight.to_local().shape == (4, 8) and model.norm.weight.to_local().shape == (4,)


@pytest.mark.ranks(4)
def test_inputs_and_outputs_of_modules():
    distribution = model_parallel((2, 2), PERCEPTRON_RULES)
    torch.manual_seed(0)
    model, whole = Perceptron(), Perceptron()
    whole.load_state_dict(model.state_dict())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert distribution.distribute_module(model) is model
    assert list(model.state_dict()) == list(before)
    (batch,) = perceptron_batches(1)
    part = batch[0].chunk(2)[distribution.data_shard_id].requires_grad_()
    # Plain: this rank's part, and the gradient of this rank's loss.
    output = model(part)
    assert type(output) is torch.Tensor and output.shape == (4, 4)
    torch.testing.assert_close(output, whole(part))
    (gradient,) = torch.autograd.grad(output.square().mean(), part)
    torch.testing.assert_close(gradient, torch.autograd.grad(whole(part).square().mean(), part)[0])
    # A part of the model, called from outside.
    torch.testing.assert_close(model.dense[0](part), whole.dense[0](part))
    # DTensors stay DTensors.
    data = distribute_tensor(batch[0], distribution.get_data_layout(batch[0].shape))
    assert isinstance(model(data), DTensor)
    torch.testing.assert_close(model(data).full_tensor(), whole(batch[0]))
    # A chain of two calls, and a copy.
    chained, expected = (m(m.dense[0](m.norm(part))[:, :8].tanh()).square().mean() for m in (model, whole))
    chained.backward()
    torch.testing.assert_close(chained, expected)
    again = copy.deepcopy(model)
    torch.testing.assert_close(again(part), whole(part))
    expected.backward()
    for name, parameter in whole.named_parameters():
        wanted = parameter.grad
        dist.all_reduce(wanted)
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), wanted / 4)


@pytest.mark.ranks(2)
def test_outputs_are_laid_out_by_their_path():
    rules = {**PERCEPTRON_RULES, "dense.0/output": ("batch",), "output": ("batch", "model")}
    model = model_parallel((1, 2), rules).distribute_module(Perceptron())
    data = distribute_tensor(torch.ones(4, 8), TensorLayout(("batch", None), model_parallel((1, 2), {}).device_mesh))
    assert model(data).placements == (Shard(0), Shard(1))
    assert model.dense[0](data).placements == (Shard(0), Replicate())
    # Plain outputs are this rank's part of the batch, and whole in the other dims.
    assert model(torch.ones(4, 8)).shape == (4, 4)


class Dropping(nn.Module):
    """Drops from a part, from a partial sum, and from recomputed activations."""

    def __init__(self, is_again: bool) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 4)
        self.drop = nn.Dropout()
        self.is_again = is_again

    def forward(self, x):
        x = self.drop(self.down(self.drop(self.up(x)) + 1))

        def rest(x):
            return self.last(functional.dropout(x, training=self.training))

        return checkpoint(rest, x, use_reentrant=False) if self.is_again else rest(x)


@pytest.mark.ranks(4)
def test_replicas_drop_alike(rank):
    distribution = model_parallel(
        (2, 2), {"up.weight": ("model",), "up.bias": ("model",), "down.weight": (None, "model")}
    )
    gradients = []
    for is_again in (False, True):
        torch.manual_seed(0)
        model = distribution.distribute_module(Dropping(is_again))
        torch.manual_seed(rank)  # each rank has a seed of its own
        output = model(torch.ones(64, 8))
        following = torch.rand(3)
        torch.manual_seed(rank)
        torch.randint(1 << 62, ())
        assert torch.rand(3).equal(following)  # a call draws one number of the rank's own
        every = [torch.empty(64, 4) for _ in range(4)]
        dist.all_gather(every, output.detach())
        assert every[0].equal(every[1]) and every[2].equal(every[3])
        assert not every[0].equal(every[2])  # of equal parts of the batch other elements are dropped
        assert not model(torch.ones(64, 8)).equal(output)
        torch.manual_seed(rank)
        model(torch.ones(64, 8)).square().mean().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        for parameter in (model.last.weight, model.last.bias):
            copies = [torch.empty(parameter.shape) for _ in range(4)]
            dist.all_gather(copies, parameter.grad.redistribute(placements=[Replicate()] * 2).to_local())
            assert all(copy_.equal(copies[0]) for copy_ in copies)
    torch.testing.assert_close(gradients[0], gradients[1])  # recomputed activations dropped the same elements
    model.eval()
    assert model(torch.ones(4, 8)).equal(model(torch.ones(4, 8)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_scoped", [True, False])
def test_copies_made_in_a_scope_are_laid_out(is_scoped):
    distribution = model_parallel((1, 2), PERCEPTRON_RULES)
    torch.manual_seed(0)
    with distribution.scope() if is_scoped else nullcontext():
        if not is_scoped:
            set_distribution(distribution)
        model = Perceptron()
        twin = copy.deepcopy(model)
        third = copy.deepcopy(twin)
        optimizer = sgd(twin)
        if not is_scoped:
            set_distribution(None)
    ((x, y),) = perceptron_batches(1)
    for one in (model, twin, third):
        assert all(isinstance(parameter, DTensor) for parameter in one.parameters())
        assert one.dense[0].weight.placements == (Replicate(), Shard(0))
        assert not any("FirstUse" in type(hook).__name__ for hook in one._forward_pre_hooks.values())
        torch.testing.assert_close(one(x), model(x))
    train(twin, optimizer, [(x, y)], functional.mse_loss)
    assert not torch.equal(twin(x), model(x)) and torch.equal(third(x), model(x))
    # A layer that a model copies for itself is part of it.
    with model_parallel((1, 2), {"layers..*linear1.weight": ("model", None)}).scope():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        del layer
    assert encoder.layers[1].linear1.weight.to_local().shape == (8, 8)


@pytest.mark.ranks(1)
def test_a_world_of_one_rank():
    model, whole = train_both(
        model_parallel((1, 1), PERCEPTRON_RULES), Perceptron, perceptron_batches(2), functional.mse_loss
    )
    assert_same_state(model, whole)
    assert isinstance(model.norm.weight, DTensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_scoped", [True, False])
def test_a_model_is_laid_out_before_it_is_used(is_scoped, rank):
    distribution = model_parallel((2, 1), PERCEPTRON_RULES)
    ((x, y),) = perceptron_batches(1)
    torch.manual_seed(0)
    whole = Perceptron()
    torch.manual_seed(0)
    with distribution.scope() if is_scoped else nullcontext():
        if not is_scoped:
            set_distribution(distribution)
        model = Perceptron()
        optimizer, others = sgd(model), sgd(whole)
        for _ in range(2):
            torch.testing.assert_close(model(x.chunk(2)[rank]), whole(x).chunk(2)[rank])
            train(model, optimizer, take_part([(x, y)], 2, rank), functional.mse_loss)
            train(whole, others, [(x, y)], functional.mse_loss)
            assert isinstance(model.norm.weight, DTensor)
    set_distribution(None)
    assert_same_state(model, whole)


@pytest.mark.ranks(2)
def test_parts_of_other_shapes_are_refused(rank):
    distribution = model_parallel((2, 1), PERCEPTRON_RULES)
    model = distribution.distribute_module(Perceptron())
    with pytest.raises(ContradictionError, match="have different shapes") as caught:
        model(torch.ones(3 + rank, 8))
    assert caught.value.rank == rank
    assert model(torch.ones(3, 8)).shape == (3, 4)
    # An exception in the middle leaves nothing behind.
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 7))
    assert model(torch.ones(3, 8)).shape == (3, 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("called", ["the model", "a part of the model", "another model"])
@pytest.mark.parametrize("is_first_call", [False, True])
def test_a_call_after_ctrl_c_is_no_part_of_the_interrupted_call(called, is_first_call, rank):
    distribution = model_parallel((2, 1), PERCEPTRON_RULES)
    set_distribution(distribution)
    model = Perceptron()
    set_distribution(None)
    other = distribution.distribute_module(Perceptron())
    if not is_first_call:
        model(torch.ones(3, 8))
    module = {"the model": model, "a part of the model": model.dense[0], "another model": other}[called]
    expected = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    hook = model.dense[1].register_forward_pre_hook(_interrupt)
    # torch runs no hook after Ctrl-C. The frames of the call live on in the traceback, as in an interactive session.
    with pytest.raises(KeyboardInterrupt) as caught:
        model(torch.ones(3, 8))
    hook.remove()
    with pytest.raises(ContradictionError, match="have different shapes"):
        module(torch.ones(3 + rank, 8))
    output = module(
        DTensor.from_local(torch.ones(3, 8), distribution.device_mesh.backend_mesh, [Shard(0), Replicate()])
    )
    assert isinstance(output, DTensor) and output.shape[0] == 6
    # Each call draws one number.
    for _ in range(3):
        torch.randint(1 << 62, (), generator=expected)
    assert torch.equal(torch.get_rng_state(), expected.get_state())
    del caught


class _CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        return self.layer(x) if depth == 0 else self(x, depth - 1)


@pytest.mark.ranks(1)
def test_a_model_that_calls_itself_is_refused():
    model = model_parallel((1, 1), {"layer.weight": (None, "model")}).distribute_module(_CallsItself())
    for _ in range(2):
        with pytest.raises(UsageError, match="this _CallsItself calls itself") as caught:
            model(torch.ones(3, 8))
        assert caught.value.next_step == "call self.forward(...) in its forward instead"
    assert model(torch.ones(3, 8), depth=0).shape == (3, 8)


def _interrupt(module: nn.Module, args: object) -> None:
    raise KeyboardInterrupt


class GlobalLoss(nn.Module):
    """Returns what is not cut by the batch: the loss, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, *, y):
        return {"loss": functional.mse_loss(self.layer(x), y), "scale": self.scale * 1}


@pytest.mark.ranks(2)
def test_outputs_that_the_batch_does_not_cut_are_whole():
    distribution = model_parallel((2, 1), {"layer.weight": ("model",)})
    torch.manual_seed(0)
    with distribution.scope():
        model = GlobalLoss()
    torch.manual_seed(0)
    whole, ((x, y),) = GlobalLoss(), perceptron_batches(1)
    wanted = whole(x, y=y)
    (part,) = take_part([(x, y)], 2, distribution.data_shard_id)
    found = model(part[0], y=part[1])
    torch.testing.assert_close(found["loss"], wanted["loss"])
    found["loss"].backward()
    wanted["loss"].backward()
    torch.testing.assert_close(model.layer.weight.grad.full_tensor(), whole.layer.weight.grad)
    # A whole output in a loss of each rank's own part: gradients are averaged.
    (model(part[0], y=part[1])["scale"] * part[1].mean()).backward()
    (whole(x, y=y)["scale"] * y.mean()).backward()
    torch.testing.assert_close(model.scale.grad.full_tensor(), whole.scale.grad)


class Losses(nn.Module):
    """Computes one loss inside, as many models do."""

    def __init__(self, loss_of) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.loss_of = loss_of

    def forward(self, x, y, classes):
        return self.loss_of(self.layer(x), y, classes)


def weights() -> torch.Tensor:
    return torch.linspace(0.5, 2, 4)


LOSSES = {
    "mse": lambda x, y, classes: functional.mse_loss(x, y),
    "module": lambda x, y, classes: nn.MSELoss()(x, y),
    "l1": lambda x, y, classes: functional.l1_loss(x, y),
    "smooth l1": lambda x, y, classes: functional.smooth_l1_loss(x, y),
    "huber": lambda x, y, classes: functional.huber_loss(x, y, delta=0.7),
    "soft margin": lambda x, y, classes: functional.soft_margin_loss(x, y.sign()),
    "bce": lambda x, y, classes: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce with logits": lambda x, y, classes: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "cross entropy": lambda x, y, classes: functional.cross_entropy(x, classes),
    "class weights": lambda x, y, classes: functional.cross_entropy(x, classes, weights(), label_smoothing=0.1),
    "nll": lambda x, y, classes: functional.nll_loss(x.log_softmax(1), classes),
    "soft classes": lambda x, y, classes: functional.cross_entropy(x, y.softmax(1)),
    "kl": lambda x, y, classes: functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
}


@pytest.mark.ranks(2)
def test_losses_inside_a_model_are_means_of_the_whole_batch():
    distribution = model_parallel((2, 1), {})
    ((x, y),) = perceptron_batches(1)
    classes = torch.tensor([-100, -100, -100, 0, 1, 2, 3, 0])  # the ranks ignore different numbers of them
    part = [tensor.chunk(2)[distribution.data_shard_id] for tensor in (x, y, classes)]
    for name, loss_of in LOSSES.items():
        whole = Losses(loss_of)
        model = distribution.distribute_module(copy.deepcopy(whole))
        whole.load_state_dict({key: tensor.full_tensor() for key, tensor in model.state_dict().items()})
        wanted, found = whole(x, y, classes), model(*part)
        torch.testing.assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")
        wanted.backward()
        found.backward()
        gradient = model.layer.weight.grad.full_tensor()
        torch.testing.assert_close(
            gradient, whole.layer.weight.grad, msg=lambda text, name=name: f"gradient of {name}: {text}"
        )


# Refusals leave a model as it was.


@pytest.mark.ranks(2)
def test_a_rule_that_decides_for_nothing_is_refused():
    distribution = model_parallel((1, 2), {**PERCEPTRON_RULES, "dense.*kernel": (None, "model")})
    message = r"'dense.\*kernel' of the LayoutMap matches no parameter"
    with pytest.raises(LayoutError, match=message), distribution.scope():
        Perceptron()
    assert current_distribution() is None
    with model_parallel((1, 2), {**PERCEPTRON_RULES, "x": ("model",)}, strict=False).scope():
        model = Perceptron()
    assert isinstance(model.norm.weight, DTensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"dense.0.weight": (None, None, "model")}, "dense.0.weight, of shape .*more dims than the tensor"),
        ({"dense.0.weight": "[f/~model, h]", "dense.1.bias": ("model",)}, None),
        ({"norm.bias": "[f/model]", "dense.0.*": ("model",), "dense.0.bias": (None,)}, None),
        ({"norm.*": ("model",), ".*bias": ("model",)}, "matches multiple layout specification keys"),
        ({"dense.0.weight": "[f, 7]"}, "dense.0.weight"),
    ],
)
def test_a_layout_that_does_not_fit_changes_nothing(rules, message):
    model = Perceptron()
    distribution = model_parallel((1, 2), rules)
    if message is None:
        distribution.distribute_module(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return
    with pytest.raises(LayoutError, match=message):
        distribution.distribute_module(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.ranks(2)
def test_uneven_parts_have_to_be_written():
    model = nn.Linear(4, 5)
    with pytest.raises(ValueError, match="is not divisible by 2"):
        model_parallel((1, 2), {"weight": ("model",)}).distribute_module(model)
    model_parallel((1, 2), {"weight": "[f/~model, h]"}).distribute_module(model)
    assert model.weight.to_local().shape == ((3, 4) if dist.get_rank() == 0 else (2, 4))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        ("[f/~batch/~model, h]", 5),
        ("[f/~batch/~model, h]", 6),
        ("[f/model/batch, h]", 8),
        pytest.param("[2 f/model, h]", 8, marks=pytest.mark.skipif(not GATHERS_PIECES, reason="of torch 2.13")),
    ],
)
def test_a_dim_cut_by_both_axes_or_in_pieces(rule, rows):
    """Over a flattened mesh, torch 2.13 gathers the first two layouts wrongly, and the third not at all.

    Nor may the batch be gathered in place of a parameter that its axis cuts: each rank wants its own part back.
    """
    torch.manual_seed(0)
    whole = nn.Linear(4, rows, bias=False)
    distribution = model_parallel((2, 2), {"weight": rule})
    model = distribution.distribute_module(copy.deepcopy(whole))
    assert torch.equal(model.weight.full_tensor(), whole.weight)
    x = torch.randn(6, 4)
    part = x.chunk(2)[distribution.data_shard_id]
    output = model(part)
    assert output.shape == (3, rows)
    torch.testing.assert_close(output, whole(part))
    output.square().mean().backward()
    whole(x).square().mean().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), whole.weight.grad)


def test_pieces_that_torch_does_not_gather_are_refused(monkeypatch):
    """torch 2.10 stops at an assertion; all versions gather parts of one cut, in whatever order."""
    monkeypatch.setattr(distributions, "GATHERS_PIECES", False)
    mesh = DeviceMesh((2, 2), ("batch", "model"))
    with pytest.raises(LayoutError, match=r"does not gather dim 0 .* part of several pieces"):
        placements_for(TensorLayout.parse("[2 f/model, h]", mesh), mesh, (8, 4))
    for text in ("[f/model/batch, h]", "[f/~batch/~model, h]", "[f/model, h]"):
        assert placements_for(TensorLayout.parse(text, mesh), mesh, (8, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.ranks(2)
def test_names_of_one_parameter_agree():
    with pytest.raises(LayoutError, match="several names, which have different layouts"):
        model_parallel((1, 2), {"embed.weight": ("model",), "head.weight": (None, "model")}).distribute_module(Tied())
    model = model_parallel((1, 2), {"head.weight": ("model",)}).distribute_module(Tied())
    assert model.embed.weight is model.head.weight and model.embed.weight.placements[1] == Shard(0)


@pytest.mark.ranks(2)
def test_parameters_that_cannot_be_laid_out_are_named():
    distribution = model_parallel((1, 2), {"weight": ("model",)})
    with pytest.raises(UsageError, match="weight has no shape yet"):
        distribution.distribute_module(nn.LazyLinear(4))
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UsageError, match="weight already has a gradient"):
        distribution.distribute_module(model)
    laid_out = distribution.distribute_module(nn.Linear(4, 4))
    assert distribution.distribute_module(laid_out) is laid_out
    with pytest.raises(LayoutError, match="weight already has a different layout"):
        model_parallel((1, 2), {"weight": (None, "model")}).distribute_module(laid_out)


@pytest.mark.ranks(2)
def test_a_mesh_has_the_ranks_of_the_group():
    for mesh, message in (
        (DeviceMesh((2, 4), ("batch", "model")), "Shape does not match the number of devices"),
        (DeviceMesh((2,), ("model",), [0, 2]), "Device not found: rank 2"),
        (DeviceMesh((2,), ("model",), [1, 0]), "the ranks along 'model' descend"),
    ):
        layout_map = LayoutMap(mesh)
        layout_map["weight"] = ("model",)
        with pytest.raises(ValueError, match=message):
            ModelParallel(layout_map=layout_map).distribute_module(nn.Linear(4, 8))


@pytest.mark.ranks(2)
def test_tensors():
    mesh = DeviceMesh((2,), ("model",), list_devices())
    layout = TensorLayout(("model",), mesh)
    whole = torch.arange(8.0).view(4, 2)
    placed = distribute_tensor(whole, layout)
    assert placed.to_local().equal(whole.chunk(2)[dist.get_rank()])
    assert distribute_tensor(placed, layout) is placed
    other = distribute_tensor(placed, TensorLayout((None, "model"), mesh))
    assert other.placements == (Shard(1),) and other.full_tensor().equal(whole)
    distribution = ModelParallel(layout_map=LayoutMap(mesh))
    assert str(distribution.get_variable_layout(other)) == "[d0, d1/~model]"


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_a_decoder_with_masks_positions_and_tied_weights():
    distribution = model_parallel((2, 2), DECODER_RULES)
    model, whole = train_both(
        distribution, Decoder, decoder_batches(3), token_loss, lambda model: torch.optim.AdamW(model.parameters(), 0.01)
    )
    assert_same_state(model, whole)
    assert model.head.weight is model.embed.weight and isinstance(model.head.weight, DTensor)
