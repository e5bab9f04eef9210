"""The unsplit model that an MLP over many devices is compared with, in torch, and a step that is held to its plan."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from xrank.virtual.cluster import VirtualCluster
from xrank.virtual.programs import plan

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
WIDTHS = (7, 9, 8, 11, 5)
NUM_ROWS = 17  # no count of runs, replicas or columns here divides it


def arguments(widths=WIDTHS, num_rows=NUM_ROWS, dtype=np.float32, seed=0):
    """Return activations and parameters."""
    random = np.random.default_rng(seed)
    activations = [random.normal(size=(num_rows, width)).astype(dtype) for width in (widths[0], widths[-1])]
    shapes = [shape for sizes in pairwise(widths) for shape in (sizes, sizes[1:])]
    return activations, [random.normal(size=shape, scale=0.5).astype(dtype) for shape in shapes]


def whole_model(inputs, parameters, relu_last=False):
    """Return the outputs of the unsplit model."""
    for layer in range(len(parameters) // 2):
        inputs = inputs @ parameters[2 * layer] + parameters[2 * layer + 1]
        if relu_last or layer < len(parameters) // 2 - 1:
            inputs = torch.relu(inputs)
    return inputs


def whole_gradients(activations, parameters, relu_last=False):
    """Return torch's loss, the gradient of the inputs, and those of the parameters."""
    inputs, targets = map(torch.tensor, activations)
    inputs.requires_grad_()
    leaves = [torch.tensor(parameter, requires_grad=True) for parameter in parameters]
    loss = torch.nn.functional.mse_loss(whole_model(inputs, leaves, relu_last), targets)
    loss.backward()
    return loss.item(), inputs.grad.numpy(), [leaf.grad.numpy() for leaf in leaves]


def step(mlp, activations, parameters, **options):
    """Run one step and check it against the plan and the channels' counts."""
    cluster = VirtualCluster(mlp.pipeline.mesh, **{"engine": "in-process", **options})
    run = cluster.run(mlp, activations=activations, parameters=parameters)
    planned = plan(mlp, mlp.pipeline.mesh, activations=activations, parameters=parameters, algorithm=cluster.algorithm)
    assert run.statistics == planned
    passed = run.channels.between_devices
    assert (passed.messages, passed.nbytes) == (run.statistics.messages, run.statistics.nbytes)
    return mlp.result(run.outputs), run.statistics


def check_gradients(result, activations, parameters, relu_last=False, tolerance=1e-5):
    loss, by_inputs, by_parameters = whole_gradients(activations, parameters, relu_last)
    assert result.loss == pytest.approx(loss, abs=tolerance)
    np.testing.assert_allclose(result.input_gradients, by_inputs, rtol=0, atol=tolerance)
    for got, want in zip(result.gradients, by_parameters, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
