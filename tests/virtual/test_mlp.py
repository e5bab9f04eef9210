"""The MLP that a pipeline trains: its gradients and steps are those of the whole model in one process."""

import numpy as np
import pytest
import torch

from tests.sampled import sampled_rows
from tests.virtual.whole_model import (
    NUM_ROWS,
    SCHEDULES,
    arguments,
    check_gradients,
    step,
    whole_gradients,
    whole_model,
)
from xrank import dtypes
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import ArraySpec, find_kernel, spec_of
from xrank.virtual.mlp import MLP, SGD, Adam
from xrank.virtual.pipeline import Pipeline


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("runs", [1, 2, 3, 4, 8])
def test_gradients_are_those_of_the_whole_model(runs, stages):
    activations, parameters = arguments((7, 9, 8, 11, 5, 6, 4, 8, 5))
    results = []
    for name, chunks in SCHEDULES:
        mlp = MLP(Pipeline(stages, runs, stages, schedule=name, num_chunks=chunks), num_layers=8)
        result, _ = step(mlp, activations, parameters)
        check_gradients(result, activations, parameters)
        assert len(result.losses) == runs and not result.parameters and not result.states
        results.append(result)
    for other in results[1:]:  # to the last bit: the runs' gradients are summed in one order
        assert all(map(np.array_equal, other.gradients, results[0].gradients))
        assert np.array_equal(other.input_gradients, results[0].input_gradients)


@pytest.mark.parametrize("algorithm", ["push", "ring"])
@pytest.mark.parametrize(
    "grid", ["dp=3", "tp=3", "tp=5", "pp=2 tp=2", "dp=2 tp=2", "pp=4 dp=2", "tp=2 dp=2 pp=2", "pp=1 dp=1 tp=1"]
)
def test_rows_and_columns_are_shared_unevenly(grid, algorithm):
    activations, parameters = arguments()
    for name, runs in (("gpipe", 1), ("1f1b", 3)):
        mlp = MLP(Pipeline(DeviceMesh.parse_grid(grid), runs, schedule=name))
        result, _ = step(mlp, activations, parameters, algorithm=algorithm)
        check_gradients(result, activations, parameters)


def test_each_run_has_the_loss_of_its_rows():
    activations, parameters = arguments()
    result, _ = step(MLP(Pipeline(DeviceMesh.parse_grid("pp=2 dp=2 tp=2"), 3)), activations, parameters)
    outputs = whole_model(torch.tensor(activations[0]), [torch.tensor(parameter) for parameter in parameters])
    squares = ((outputs - torch.tensor(activations[1])) ** 2).sum(1) / activations[1].size
    want = [squares[rows].sum().item() for rows in np.array_split(np.arange(NUM_ROWS), 3)]
    np.testing.assert_allclose(result.losses, want, atol=1e-6)


@pytest.mark.parametrize("layers", [2, 3, 5, 7])
def test_layers_are_shared_out_however_many_there_are(layers):
    activations, parameters = arguments((6, *range(4, 4 + layers)))
    result, _ = step(MLP(Pipeline(2, 3), num_layers=layers), activations, parameters)
    check_gradients(result, activations, parameters)


def test_relu_may_follow_the_last_layer_and_has_no_gradient_at_zero():
    activations, parameters = arguments()
    parameters[3][:] = 0  # a column of zeros into relu, exactly
    parameters[2][:, 4] = 0
    result, _ = step(MLP(Pipeline(2, 2), relu_last=True), activations, parameters)
    check_gradients(result, activations, parameters, relu_last=True)
    assert not result.gradients[2][:, 4].any() and result.gradients[2][:, 3].any()


OPTIMIZERS = {
    "sgd": (SGD(0.1), lambda leaves: torch.optim.SGD(leaves, lr=0.1)),
    "momentum": (SGD(0.1, momentum=0.9), lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9)),
    "adam": (Adam(0.01, (0.8, 0.95), 1e-6), lambda leaves: torch.optim.Adam(leaves, 0.01, (0.8, 0.95), 1e-6)),
}


@pytest.mark.parametrize(
    ("engine", "kind", "name"),
    sampled_rows(
        [
            ("processes", "torch", "momentum"),
            ("processes", "numpy", "adam"),
            ("in-process", "numpy", "sgd"),
            ("in-process", "torch", "adam"),
            ("in-process", "numpy", "momentum"),
        ],
        3,
    ),
)
def test_eight_devices_train_as_one_process(engine, kind, name):
    optimizer, of_torch = OPTIMIZERS[name]
    _, parameters = arguments(dtype=np.float64)
    batches = [arguments(dtype=np.float64, num_rows=23, seed=seed)[0] for seed in range(1, 6)]
    mlp = MLP(Pipeline(DeviceMesh.parse_grid("pp=2 dp=2 tp=2"), 3, schedule="1f1b"), optimizer=optimizer)
    leaves = [torch.tensor(parameter, requires_grad=True) for parameter in parameters]
    whole = of_torch(leaves)
    make = torch.tensor if kind == "torch" else np.array
    parameters = tuple(map(make, parameters))
    for activations in batches:
        result, _ = step(mlp, list(map(make, activations)), parameters, engine=engine)
        parameters = result.next_parameters
        whole.zero_grad()
        loss = torch.nn.functional.mse_loss(
            whole_model(torch.tensor(activations[0]), leaves), torch.tensor(activations[1])
        )
        loss.backward()
        whole.step()
        assert result.loss == pytest.approx(loss.item(), abs=1e-12)
    assert len(result.parameters) == 8 and len(result.states) == len(mlp.state_names)
    for got, want in zip(result.parameters, leaves, strict=True):
        assert isinstance(got, torch.Tensor if kind == "torch" else np.ndarray)
        np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), rtol=0, atol=1e-12)
    if optimizer.counts_steps:
        assert result.states[-1] == 5


def test_a_learning_rate_alone_is_plain_sgd():
    activations, parameters = arguments()
    result, _ = step(MLP(Pipeline(2, 2), 0.5), activations, parameters)
    for old, gradient, new in zip(parameters, result.gradients, result.parameters, strict=True):
        np.testing.assert_allclose(new, old - np.float32(0.5) * gradient, atol=1e-6)
    assert result.next_parameters == result.parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_float_stays_itself(dtype, kind):
    activations, parameters = arguments()
    exact = whole_gradients(activations, parameters)
    if kind == "torch":
        activations, parameters = ([torch.tensor(x).to(dtype) for x in xs] for xs in (activations, parameters))
    else:
        name = dtypes.by_torch_name(str(dtype).removeprefix("torch.")).name
        activations, parameters = ([x.astype(dtypes.numpy_dtype(name)) for x in xs] for xs in (activations, parameters))
    mlp = MLP(Pipeline(DeviceMesh.parse_grid("pp=2 dp=2"), 2), optimizer=Adam())
    first, _ = step(mlp, activations, parameters)
    second, _ = step(mlp, activations, first.next_parameters)
    for result in (first, second):
        for like, got in zip(parameters, result.parameters, strict=True):
            assert (got.dtype, got.shape) == (like.dtype, like.shape)
    assert {spec_of(state).dtype for state in second.states[:-1]} == {"F64" if dtype is torch.float64 else "F32"}
    assert first.loss == pytest.approx(exact[0], rel=1e-6 if dtype is torch.float64 else 0.02)
    assert second.loss < first.loss


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_narrow_floats_are_summed_wide(kind):
    # Numpy's own sum of bfloat16 ones ends at 256, where the next one is rounded away.
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    if kind == "numpy":
        ones = ones.float().numpy().astype(dtypes.numpy_dtype("BF16"))
    loss = find_kernel("squared_error")(ones, ones * 0, size=64 * 64)
    assert spec_of(loss) == ArraySpec((), "BF16") and loss == 1


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_eight_layers_over_four_stages_of_processes(name, chunks):
    widths = (6, 5, 7, 4, 8, 3, 6, 5, 4)
    activations, parameters = arguments(widths)
    mlp = MLP(Pipeline((2, 2), 8, 4, schedule=name, num_chunks=chunks), num_layers=8)
    apart, _ = step(mlp, activations, parameters, engine="processes")
    check_gradients(apart, activations, parameters)
    within, _ = step(mlp, activations, parameters)
    assert all(map(np.array_equal, apart.gradients, within.gradients))
    assert np.array_equal(apart.losses, within.losses)
