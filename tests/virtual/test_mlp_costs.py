"""What an MLP over many devices costs: flops, messages and bytes in closed forms, bubbles, and what lives how long."""

from itertools import pairwise, product

import pytest

from tests.virtual.whole_model import NUM_ROWS, SCHEDULES, WIDTHS, arguments, step
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import ArraySpec
from xrank.virtual.link_model import LinkModel
from xrank.virtual.mlp import MLP, SGD
from xrank.virtual.pipeline import Pipeline
from xrank.virtual.programs import find_last_uses, list_outputs


def flops_of(widths, num_rows):
    return 6 * num_rows * sum(a * b for a, b in pairwise(widths))


def test_no_flop_is_done_twice():
    activations, parameters = arguments()
    for grid in ("pp=1", "pp=4", "dp=3", "tp=3", "pp=2 dp=2 tp=2"):
        _, statistics = step(MLP(Pipeline(DeviceMesh.parse_grid(grid), 3)), activations, parameters)
        assert statistics.flops == flops_of(WIDTHS, NUM_ROWS)


def test_stages_send_the_rows_between_them_and_nothing_else():
    activations, parameters = arguments()
    for name, chunks, edges in (("gpipe", 1, WIDTHS[2:3]), ("interleaved", 2, WIDTHS[1:4])):
        mlp = MLP(Pipeline(2, 3, schedule=name, num_chunks=chunks), 0.1)
        _, statistics = step(mlp, activations, parameters)
        assert statistics.messages == 2 * 3 * len(edges)
        assert statistics.nbytes == 2 * 4 * NUM_ROWS * sum(edges)


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_send_their_gradients_once_however_many_runs_there_are(size):
    activations, parameters = arguments()
    num_parameters = sum(parameter.size for parameter in parameters)
    for runs in (1, 4):
        mlp = MLP(Pipeline(DeviceMesh((size,), ("dp",)), runs))
        for algorithm, rounds in (("push", size * (size - 1)), ("ring", 2 * (size - 1))):
            _, statistics = step(mlp, activations, parameters, algorithm=algorithm)
            assert statistics.nbytes == 4 * rounds * (num_parameters + runs)
            assert statistics.by_collective().keys() == {"all_reduce"}
            assert statistics.devices[0].collectives["all_reduce"].calls == len(parameters) + 1


@pytest.mark.parametrize("size", [2, 3])
def test_columns_cost_a_gather_and_a_scatter_for_each_layer_but_the_first(size):
    activations, parameters = arguments()
    inner = NUM_ROWS * sum(WIDTHS[1:4])
    mlp = MLP(Pipeline(DeviceMesh((size,), ("tp",)), 2))
    _, push = step(mlp, activations, parameters)
    _, ring = step(mlp, activations, parameters, algorithm="ring")
    for statistics, rounds in ((push, size * (size - 1)), (ring, 2 * (size - 1))):
        kinds = statistics.by_collective()
        assert kinds["all_gather"].sent_nbytes == kinds["reduce_scatter"].sent_nbytes == 4 * (size - 1) * inner
        # The gradients of the inputs, and the losses of two runs.
        assert kinds["all_reduce"].sent_nbytes == 4 * rounds * (NUM_ROWS * WIDTHS[0] + 2)
        assert kinds.keys() == {"all_gather", "reduce_scatter", "all_reduce"}


def test_between_stages_each_device_sends_its_columns_alone():
    activations, parameters = arguments()
    for size in (1, 2, 4):
        mlp = MLP(Pipeline(DeviceMesh((2, size), ("pp", "tp")), 2))
        _, statistics = step(mlp, activations, parameters)
        assert statistics.by_collective()["send"].sent_nbytes == 2 * 4 * NUM_ROWS * WIDTHS[2]


def test_the_host_sends_shards_and_gets_each_result_once():
    activations, parameters = arguments()
    mlp = MLP(Pipeline(DeviceMesh.parse_grid("pp=2 dp=2 tp=2"), 3), optimizer=SGD(0.1, 0.9))
    _, statistics = step(mlp, activations, parameters)
    num_parameters = sum(parameter.size for parameter in parameters)
    to_host = sum(device.to_host.sent_nbytes for device in statistics.devices)
    assert to_host == 4 * (3 * num_parameters + activations[0].size + 3)  # gradients, velocities, parameters; losses
    from_host = sum(device.from_host.received_nbytes for device in statistics.devices)
    assert from_host == 4 * (2 * num_parameters + 2 * activations[0].size + activations[1].size)


def live_activations(program):
    """Return the most stage inputs that a program's registers hold at once."""
    held, peak = set(), 0
    for instruction, ends in zip(program.instructions, find_last_uses(program), strict=True):
        held |= {name for name, _ in list_outputs(instruction) if name.startswith(("inputs.", "forward."))}
        peak = max(peak, len(held))
        held -= set(ends)
    return peak


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_registers_hold_as_many_activations_as_the_schedule_says(name, chunks):
    activations, parameters = arguments((4,) * 9)
    for stages, runs in product((2, 4) if chunks > 1 else (1, 2, 4), (1, 3, 8)):
        mlp = MLP(Pipeline(stages, runs, stages, schedule=name, num_chunks=chunks), num_layers=8)
        specs = [[ArraySpec(x.shape) for x in xs] for xs in (activations, parameters)]
        programs = mlp.compile(mlp.pipeline.mesh, *specs)
        assert tuple(map(live_activations, programs)) == mlp.pipeline.schedule.peak_live_activations


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_clocks_show_the_bubble_of_the_schedule(name, chunks):
    # Equal layers, links that cost nothing; a backward takes twice as long as a forward, which changes no share.
    for stages, runs in product((1, 2, 4), (1, 3, 8)):
        activations, parameters = arguments((4,) * 9, num_rows=2 * runs)
        mlp = MLP(Pipeline(stages, runs, stages, schedule=name, num_chunks=chunks), num_layers=8)
        specs = [[ArraySpec(x.shape) for x in xs] for xs in (activations, parameters)]
        timeline = LinkModel(flops_per_second=1e9).play(mlp.compile(mlp.pipeline.mesh, *specs))
        assert timeline.idle_fraction == pytest.approx(mlp.pipeline.schedule.bubble_fraction)
        assert sum(device.compute_seconds for device in timeline.devices) == pytest.approx(
            flops_of((4,) * 9, 2 * runs) / 1e9
        )


def test_1f1b_holds_less_in_a_run():
    activations, parameters = arguments((32,) * 5, num_rows=256)
    peaks = {}
    for name in ("gpipe", "1f1b"):
        _, statistics = step(MLP(Pipeline(4, 16, 4, schedule=name)), activations, parameters)
        peaks[name] = [device.peak_nbytes for device in statistics.devices]
    row = 256 // 16 * 32 * 4
    # The last stage keeps the inputs and the gradient of its outputs: of one run, and not of 16. The rest of the
    # difference is what it holds beside them when it does its step.
    assert peaks["gpipe"][-1] - peaks["1f1b"][-1] >= 2 * 13 * row
    assert all(less < more for less, more in zip(peaks["1f1b"], peaks["gpipe"], strict=True))
