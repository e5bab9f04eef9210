"""Models of many kinds take five steps over ranks as they do in one process."""

import copy

import pytest
import torch
from torch import nn

from tests.distribution.model_kinds import KINDS
from tests.distribution.trained_models import assert_same_state
from xrank.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, list_devices

STEPS = 5


def cut_all(model: nn.Module, shape: tuple[int, int]) -> ModelParallel:
    """Cut every parameter of two dims or more: rows here, columns there, evenly or not."""
    layout_map = LayoutMap(DeviceMesh(shape, ("batch", "model"), list_devices()))
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim > 1:
            sizes = [f"d{i}" for i in range(parameter.ndim)]
            sizes[index % 2] += "/~model" if index % 5 else "/~batch"
            layout_map[name] = f"[{', '.join(sizes)}]"
    return ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, eps=1e-4)


def train_both(kind: str, shape: tuple[int, int] | None) -> None:
    make, make_inputs = KINDS[kind]
    torch.manual_seed(11)
    whole = make().train()
    batches = [make_inputs() for _ in range(STEPS)]
    distribution = DataParallel() if shape is None else cut_all(whole, shape)
    model = distribution.distribute_module(copy.deepcopy(whole))
    count, part = distribution.num_model_replicas, distribution.data_shard_id
    optimizer, others = make_optimizer(model), make_optimizer(whole)
    for batch in batches:
        losses = []
        for trained, by, inputs in (
            (whole, others, batch),
            (model, optimizer, {key: value.chunk(count)[part] for key, value in batch.items()}),
        ):
            loss = trained(**inputs)["loss"]
            by.zero_grad()
            loss.backward()
            by.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    assert_same_state(model, whole)


SHAPES = ((2, 2), (1, 4), (4, 1), None)
QUICK = (("llama", (2, 2)), ("resnet", (2, 2)))


def pytest_generate_tests(metafunc):
    """Give all kinds: each on all meshes in `make soak`, else on one, in turn."""
    if "kind" in metafunc.fixturenames:
        cases = [(kind, shape) for kind in KINDS for shape in SHAPES]
        if not metafunc.config.getoption("soak"):
            in_turn = [(kind, SHAPES[i % len(SHAPES)]) for i, kind in enumerate(KINDS)]
            cases = [case for case in cases if case in in_turn or case in QUICK]
        marked = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in cases]
        metafunc.parametrize(("kind", "shape"), marked, ids=str)


@pytest.mark.ranks(4, timeout_seconds=150)
def test_a_kind_trains_as_in_one_process(kind, shape):
    train_both(kind, shape)
