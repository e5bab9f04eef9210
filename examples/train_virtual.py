"""Trains a small model on 8 virtual devices, as stages, replicas and columns, and compares with one process.

Every device is a process of this machine. The schedule, the messages and the bytes are known before anything runs; at
the end the weights are those of the same training written down in plain numpy.

    python examples/train_virtual.py
    python examples/train_virtual.py --mesh "pp=2 tp=4" --schedule interleaved --chunks 2 --runs 8
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import numpy as np

from xrank.layout import DeviceMesh
from xrank.virtual import MLP, SGD, Pipeline, VirtualCluster, plan

WIDTHS = (32, 64, 64, 48, 16)
ROWS = 96
STEPS = 5
LEARNING_RATE, MOMENTUM = 0.5, 0.9


def new_parameters() -> tuple[np.ndarray, ...]:
    """Return weight and bias of each layer; a seed makes them the same every time."""
    random = np.random.default_rng(7)
    pairs = ((random.normal(size=(a, b)) / a**0.5, np.zeros(b)) for a, b in pairwise(WIDTHS))
    return tuple(array for pair in pairs for array in pair)


def new_batch() -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets."""
    inputs = np.random.default_rng(8).normal(size=(ROWS, WIDTHS[0]))
    return inputs, np.sin(inputs[:, : WIDTHS[-1]])


def train_whole(parameters: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Train in this process, without xrank."""
    inputs, targets = new_batch()
    velocities = [np.zeros_like(parameter) for parameter in parameters]
    last = len(parameters) // 2 - 1
    for _ in range(STEPS):
        outputs = [inputs]
        for layer in range(last + 1):
            y = outputs[-1] @ parameters[2 * layer] + parameters[2 * layer + 1]
            outputs.append(np.maximum(y, 0) if layer < last else y)
        gradient = 2 * (outputs[-1] - targets) / targets.size
        gradients = []
        for layer in reversed(range(last + 1)):
            if layer < last:
                gradient = gradient * (outputs[layer + 1] > 0)
            gradients = [outputs[layer].T @ gradient, gradient.sum(0), *gradients]
            gradient = gradient @ parameters[2 * layer].T
        velocities = [MOMENTUM * v + g for v, g in zip(velocities, gradients, strict=True)]
        parameters = tuple(p - LEARNING_RATE * v for p, v in zip(parameters, velocities, strict=True))
    return parameters


def main() -> None:
    """Train on the virtual devices, say what they do, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", default="pp=2 dp=2 tp=2", help='axes among pp, dp and tp (default: "pp=2 dp=2 tp=2")')
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b (default) or interleaved")
    parser.add_argument("--chunks", type=int, default=1, help="chunks of the model on each stage, if interleaved")
    parser.add_argument("--runs", type=int, default=4, help="micro-batches of a batch (default: 4)")
    parser.add_argument("--engine", default="processes", help="processes (default) or in-process")
    options = parser.parse_args()

    mesh = DeviceMesh.parse_grid(options.mesh)
    pipeline = Pipeline(mesh, options.runs, schedule=options.schedule, num_chunks=options.chunks)
    mlp = MLP(pipeline, optimizer=SGD(LEARNING_RATE, MOMENTUM), num_layers=len(WIDTHS) - 1)
    cluster = VirtualCluster(mesh, engine=options.engine, algorithm="ring")
    schedule = pipeline.schedule
    print(f"mesh      {mesh.grid}: {mesh.size} devices, {pipeline.num_stages} stages")
    print(f"schedule  {schedule.name}: {schedule.num_cycles} cycles, {schedule.bubble_fraction:.1%} of them idle")
    print(f"live      {' '.join(map(str, schedule.peak_live_activations))} activations, by stage")

    parameters, batch = new_parameters(), new_batch()
    for step in range(STEPS):
        planned = plan(mlp, mesh, activations=batch, parameters=parameters, algorithm="ring")
        run = cluster.run(mlp, activations=batch, parameters=parameters)
        if run.statistics != planned:
            raise SystemExit("the devices did otherwise than planned")
        result = mlp.result(run.outputs)
        parameters = result.next_parameters
        print(f"step {step + 1}    loss {result.loss:.6f}")

    for name, traffic in sorted(run.statistics.by_collective().items()):
        if traffic.sent_messages:
            print(f"sent      {traffic.sent_nbytes:>9,} bytes in {traffic.sent_messages:>4} messages: {name}")
    print(f"in all    {run.statistics.nbytes:>9,} bytes and {run.statistics.flops:,} flops a step, as planned")

    whole = train_whole(new_parameters())
    worst = max(abs(ours - theirs).max() for ours, theirs in zip(result.parameters, whole, strict=True))
    if worst > 1e-12:
        raise SystemExit(f"the weights differ by {worst:.1e} from those of one process")
    print(f"after {STEPS} steps no weight differs by more than 1e-12 from a training in one process")


if __name__ == "__main__":
    main()
