"""Times the channels between virtual devices beside a plain copy and a multiprocessing.Queue.

Two devices, each a process, send large arrays one way, then both ways at once (each sends before it receives), and a
small array to and fro. All ways take turns, round after round, in the same two processes; quoted are medians. A copy is
``numpy.copyto`` between warm arrays of one process, by one core; for both ways, by both processes at once. Memory that
a channel takes for the first time is taken in a round that is not counted, as is the copy's. Quote the ratios:
absolute times belong to one machine and its noise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from xrank.virtual import VirtualCluster, VirtualDevice

NUM_TRIPS = 300
"""Of the small array, in each round."""


def main() -> None:
    """Run all rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="of a large array")
    parser.add_argument("--count", type=int, default=8, help="large arrays in a row")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("fork")
    queues = [context.Queue(), context.Queue()]
    run = VirtualCluster(2, timeout_seconds=600).run(_measure, queues, arguments)
    times: dict[str, list[float]] = run.outputs[0]
    middle = {name: statistics.median(values) for name, values in times.items()}
    moved = arguments.megabytes * 2**20 * arguments.count
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, medians of {arguments.rounds} rounds")
    print("| | channel | copy | Queue | channel / copy | channel / Queue |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way in ("one way", "both ways"):
        channel, copy, queue = (middle[f"{way}, {what}"] for what in ("channel", "copy", "Queue"))
        cells = " | ".join(f"{moved / seconds / 1e9:.2f} GB/s" for seconds in (channel, copy, queue))
        print(f"| {arguments.megabytes} MiB, {way}, each | {cells} | {copy / channel:.2f} | {queue / channel:.1f} |")
    channel, queue = (middle[f"round trip, {what}"] / NUM_TRIPS * 1e6 for what in ("channel", "Queue"))
    print(f"| 1 KiB, to and fro | {channel:.0f} µs | | {queue:.0f} µs | | {queue / channel:.1f} |")


def _measure(device: VirtualDevice, queues: list[Any], arguments: argparse.Namespace) -> dict[str, list[float]]:
    mine, other = device.index, 1 - device.index
    large = np.random.default_rng(mine).random(arguments.megabytes << 17)
    small, there, count = np.zeros(1024, np.uint8), np.empty_like(large), arguments.count

    def copy() -> None:
        for _ in range(count):
            np.copyto(there, large)

    def send(put: Callable[[Any], None], get: Callable[[], Any], *, both: bool) -> None:
        if both or mine == 1:
            for _ in range(count):
                put(large)
        if both or mine == 0:
            for _ in range(count):
                get()

    def bounce(put: Callable[[Any], None], get: Callable[[], Any]) -> None:
        for _ in range(NUM_TRIPS):
            if mine == 0:
                put(small)
                get()
            else:
                put(get())

    def to_other(array: Any) -> None:
        device.send(array, other)

    def from_other() -> Any:
        return device.receive(other)

    queue = (queues[other].put, queues[mine].get)
    ways: dict[str, Callable[[], None]] = {
        "one way, copy": lambda: copy() if mine == 0 else None,
        "one way, channel": lambda: send(to_other, from_other, both=False),
        "one way, Queue": lambda: send(*queue, both=False),
        "both ways, copy": copy,
        "both ways, channel": lambda: send(to_other, from_other, both=True),
        "both ways, Queue": lambda: send(*queue, both=True),
        "round trip, channel": lambda: bounce(to_other, from_other),
        "round trip, Queue": lambda: bounce(*queue),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, way in ways.items():
            device.all_gather(small[:1])
            begin = time.perf_counter()
            way()
            device.all_gather(small[:1])
            if number:
                times[name].append(time.perf_counter() - begin)
    for one in queues:
        one.cancel_join_thread()
    return times


if __name__ == "__main__":
    main()
