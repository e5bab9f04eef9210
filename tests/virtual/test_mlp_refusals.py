"""Invalid MLPs are refused by name before any device starts; limit cases are accepted."""

import numpy as np
import pytest
import torch

from tests.virtual.whole_model import arguments, check_gradients, step
from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.cluster import VirtualCluster
from xrank.virtual.mlp import MLP, SGD, Adam
from xrank.virtual.pipeline import Pipeline
from xrank.virtual.programs import plan


def check_refusal(error, match, activations, parameters, mlp=None):
    """See a step refused before any device starts, and by the plan alike."""
    mlp = mlp or MLP(Pipeline(2, 3), optimizer=Adam())
    with pytest.raises(error, match=match) as failure:
        VirtualCluster(mlp.pipeline.mesh).run(mlp, activations=activations, parameters=parameters)
    with pytest.raises(error, match=match):
        plan(mlp, mlp.pipeline.mesh, activations=activations, parameters=parameters)
    return failure.value


def test_fewer_layers_than_parts_are_refused():
    for stages, chunks in ((5, 1), (2, 3)):
        with pytest.raises(LayoutError, match="4 layers cannot be divided") as failure:
            MLP(Pipeline(stages, 8, schedule="interleaved", num_chunks=chunks))
        assert f"{stages} stages x {chunks} chunks" in failure.value.want


def test_a_learning_rate_beside_an_optimizer_is_refused():
    with pytest.raises(UsageError, match="one learning rate"):
        MLP(Pipeline(2, 3), 0.1, optimizer=SGD(0.2))
    for make in (lambda: SGD(0.1, momentum=1.0), lambda: Adam(betas=(0.9, -0.1))):
        with pytest.raises(UsageError, match="of an optimizer is out of range"):
            make()


def test_invalid_pipelines_rates_and_numbers_are_refused():
    for make, message in (
        (lambda: MLP(4, 0.1), "MLP takes a Pipeline"),
        (lambda: MLP(Pipeline(2, 3), float("nan")), "must be a number"),
        (lambda: MLP(Pipeline(2, 3), "0.1"), "must be a number"),
        (lambda: Adam(float("inf")), "must be a number"),
        (lambda: MLP(Pipeline(2, 3), 0.1, num_layers=4.5), "number of layers must"),
    ):
        with pytest.raises(UsageError, match=message):
            make()


def test_batches_without_rows_for_a_device_are_refused():
    activations, parameters = arguments(num_rows=11)
    replicas = MLP(Pipeline(DeviceMesh.parse_grid("pp=2 dp=3"), 4))
    failure = check_refusal(LayoutError, "a batch of 11 rows has no rows for some", activations, parameters, replicas)
    assert (failure.got, failure.want) == ("11 rows", "12 rows or more")
    activations, parameters = arguments(num_rows=12)
    result, _ = step(replicas, activations, parameters)
    check_gradients(result, activations, parameters)


def test_layers_with_fewer_columns_than_places_are_refused():
    activations, parameters = arguments()
    failure = check_refusal(
        LayoutError, "weight.3 does not fit", activations, parameters, MLP(Pipeline(DeviceMesh((6,), ("tp",)), 2))
    )
    assert failure.tensor == "weight.3" and "6 columns or more" in failure.want


def test_arguments_of_other_shapes_types_and_numbers_are_refused():
    activations, parameters = arguments()
    inputs, targets = activations

    def changed(number, array):
        return [*parameters[:number], array, *parameters[number + 1 :]]

    cases = [
        ("targets does not fit", (inputs, targets[:-1]), parameters),
        ("targets does not fit", (inputs, targets[:, :-1]), parameters),
        ("inputs does not fit", (inputs[0], targets), parameters),
        ("inputs does not fit", (inputs.astype(np.int32), targets), parameters),
        ("weight.0 does not fit", (inputs[:, :-1], targets), parameters),
        ("weight.1 does not fit", activations, changed(2, parameters[2].T)),
        ("weight.1 does not fit", activations, changed(2, parameters[2][0])),
        ("weight.1 does not fit", activations, changed(2, parameters[2].astype(np.float64))),
        ("bias.2 does not fit", activations, changed(5, parameters[5][:-1])),
        ("bias.2 does not fit", activations, changed(5, parameters[5][:, None])),
    ]
    for match, given, kept in cases:
        assert check_refusal(LayoutError, match, given, kept).tensor == match.split()[0]
    assert check_refusal(UsageError, "inputs and targets", (inputs,), parameters).got == "1 arrays"
    assert check_refusal(UsageError, "weight and bias of each", activations, parameters[:-1]).want == "8 or 25 arrays"


def test_arrays_of_two_kinds_are_refused():
    activations, parameters = arguments()
    mlp = MLP(Pipeline(2, 3), 0.1)
    with pytest.raises(UsageError, match="is a different kind of array") as failure:
        VirtualCluster(2).run(mlp, activations=activations, parameters=[*parameters[:-1], torch.tensor(parameters[-1])])
    assert (failure.value.tensor, failure.value.got, failure.value.want) == ("bias.3", "torch", "numpy, as inputs")


def test_outputs_of_something_else_are_no_result():
    mlp = MLP(Pipeline(2, 3), 0.1)
    with pytest.raises(UsageError, match="all devices' outputs") as failure:
        mlp.result([])
    assert (failure.value.got, failure.value.want) == ("0 outputs", "2, as Run.outputs has them")
    with pytest.raises(UsageError, match="no device returned 'losses'"):
        mlp.result([None, np.ones(3)])


def test_states_of_other_shapes_are_refused():
    activations, parameters = arguments()
    mlp = MLP(Pipeline(2, 3), optimizer=Adam())
    kept = step(mlp, activations, parameters)[0].next_parameters
    assert len(kept) == 25
    failure = check_refusal(
        LayoutError, "mean.weight.0 does not fit", activations, [*kept[:8], kept[10], *kept[9:]], mlp
    )
    assert failure.tensor == "mean.weight.0" and failure.want == "(7, 9) F32"
    check_refusal(LayoutError, "steps does not fit", activations, [*kept[:-1], np.float32(1)], mlp)
    plain = MLP(Pipeline(2, 3), 0.1)
    check_refusal(UsageError, "weight and bias of each", activations, kept, plain)
