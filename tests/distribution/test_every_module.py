"""Each class of torch.nn, with each dim of its parameters cut, computes and trains as the whole module does."""

import copy
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.distribution.every_module import LEFT_OUT, WITH_PARAMETERS, WITHOUT_PARAMETERS
from xrank.distribution import DeviceMesh, LayoutMap, ModelParallel, list_devices

EXAMPLES = WITH_PARAMETERS | WITHOUT_PARAMETERS


def test_every_class_of_torch_nn_has_an_example():
    classes = {name for name, value in vars(nn).items() if isinstance(value, type) and not name.startswith("Lazy")}
    assert classes - set(EXAMPLES) - set(LEFT_OUT) == set()


def lay_out(module: nn.Module, shape: tuple[int, int], axis: str, dim: int) -> tuple[ModelParallel, nn.Module]:
    """Cut that dim of all parameters that have it, evenly or not."""
    layout_map = LayoutMap(DeviceMesh(shape, ("batch", "model"), list_devices()))
    for name, parameter in module.named_parameters():
        if parameter.ndim > dim:
            sizes = [f"d{i}" for i in range(parameter.ndim)]
            is_uneven = "/" in axis and parameter.shape[dim] % 4  # torch takes such cuts only where they are even
            sizes[dim] += "/~model" if is_uneven else f"/~{axis}"
            layout_map[name] = f"[{', '.join(sizes)}]"
    distribution = ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    return distribution, distribution.distribute_module(copy.deepcopy(module))


def run(module: nn.Module, inputs) -> tuple[list[torch.Tensor], torch.Tensor]:
    outputs = [
        leaf for leaf in pytree.tree_leaves(module(*inputs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    loss = sum(output.square().mean() if output.ndim else output for output in outputs)
    loss.backward()
    return outputs, loss.detach()


def take_part(whole: torch.Tensor, like: torch.Tensor, count: int, part: int) -> torch.Tensor:
    """Return the part of an output that a part of the batch makes."""
    for dim, (size, wanted) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if size != wanted:
            return whole.chunk(count, dim)[part]
    return whole


def average(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def check_example(name: str, shape: tuple[int, int], axis: str, dim: int) -> None:
    make, make_inputs = EXAMPLES[name]
    torch.manual_seed(5)
    whole, inputs = make(), make_inputs()
    distribution, model = lay_out(whole, shape, axis, dim)
    count, part = shape[0], distribution.data_shard_id
    wanted, wanted_loss = run(whole, inputs)
    found, loss = run(model, [x.chunk(count)[part] for x in inputs])
    for output, expected in zip(found, wanted, strict=True):
        assert type(output) is torch.Tensor
        if output.ndim == 0:  # a mean of this rank's part
            output = average(output.detach())
        torch.testing.assert_close(output, take_part(expected, output, count, part))
    torch.testing.assert_close(average(loss), wanted_loss)
    for key, parameter in whole.named_parameters():
        gradient = model.get_parameter(key).grad
        if parameter.grad is None:  # no sample was in this cluster of classes
            assert gradient is None, key
            continue
        assert isinstance(gradient, DTensor), key
        assert gradient.placements == model.get_parameter(key).placements, (key, gradient.placements)
        torch.testing.assert_close(
            gradient.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    for key, buffer in whole.named_buffers():
        torch.testing.assert_close(model.get_buffer(key), buffer)


def check_all(shape: tuple[int, int], axis: str) -> None:
    failures = []
    for name, (make, _) in EXAMPLES.items():
        for dim in range(max((parameter.ndim for parameter in make().parameters()), default=0)):
            try:
                check_example(name, shape, axis, dim)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                text = " ".join(str(error).split())[:300]
                failures.append(f"{name}, dim {dim}: {type(error).__name__}: {text} at {place.name}: {place.line}")
    assert not failures, "\n".join(failures)


@pytest.mark.ranks(2, timeout_seconds=120)
@pytest.mark.parametrize(("shape", "axis"), [((1, 2), "model"), ((2, 1), "batch")])
@pytest.mark.filterwarnings("ignore")
def test_on_two_ranks(shape, axis):
    check_all(shape, axis)


@pytest.mark.ranks(4, timeout_seconds=120)
@pytest.mark.parametrize("axis", ["model", "batch", "model/~batch"])
@pytest.mark.filterwarnings("ignore")
def test_on_two_by_two_ranks(axis):
    check_all((2, 2), axis)
