"""Times a step whose gradients are exchanged: xrank beside torch's DDP at equal buckets and one flat all-reduce.

``--wire emulated`` (one process): a collective of n bytes occupies a wire for n / bandwidth seconds, one after another,
and takes no CPU; what a step does not wait for was hidden. With ``--clock cpu`` waiting is added up instead of slept
through and computing is counted in CPU seconds, so that other work on the machine spoils little. ``--wire gloo`` (two
processes): the real thing, in wall seconds. ``lazily`` spares zeros; ``sharded`` scatters gradients and gathers
parameters while the next forward runs; ``first`` is the first batch that a wrapped module sees. Contenders take turns,
round after round; quote the ratios and the machine's load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xrank.gradients import DistributedDataParallel, GradientConfig, GradientPlan
from xrank.layout import DeviceMesh

Step = Callable[[], None]


class Clock:
    """Seconds of the wall, or of this thread's CPU with what it would have waited."""

    def __init__(self, kind: str) -> None:
        self._read = time.perf_counter if kind == "wall" else time.thread_time
        self._is_wall = kind == "wall"
        self.waited = 0.0

    def now(self) -> float:
        """Return the time."""
        return self._read() + (0.0 if self._is_wall else self.waited)

    def wait_until(self, then: float) -> None:
        """Return at a time."""
        left = max(0.0, then - self.now())
        if self._is_wall and left:  # a sleep of nothing would still let others run
            time.sleep(left)
        self.waited += left


class FakeWire:
    """A wire to ranks that do nothing: it only takes time. Also what the other contenders send on."""

    device = torch.device("cpu")

    def __init__(self, clock: Clock, bandwidth: float) -> None:
        self.clock, self._bandwidth, self._free_at = clock, bandwidth, 0.0

    def send(self, tensor: torch.Tensor, share: float = 1.0) -> Arrival:
        """Occupy the wire after all that was sent before."""
        seconds = share * tensor.numel() * tensor.element_size() / self._bandwidth
        self._free_at = max(self._free_at, self.clock.now()) + seconds
        return Arrival(self.clock, self._free_at)

    def drain(self) -> None:
        """Wait until the wire is free."""
        self.clock.wait_until(self._free_at)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: str) -> Any:
        """Send a bucket; what ranks tell each other beside it costs nothing."""
        return self.send(tensor) if how != "max" else Arrival(self.clock, self.clock.now())

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: str) -> Any:
        """Send half of what an all-reduce sends."""
        return self.send(whole, 0.5)

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Send half of what an all-reduce sends."""
        return self.send(whole, 0.5)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Send half of what an all-reduce sends."""
        return self.send(whole, 0.5)

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Send a tensor."""
        return self.send(tensor)

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Hear the same from all."""
        return dict.fromkeys(ranks, text)


class Arrival:
    """The handle of what is on the fake wire."""

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self._at = clock, at

    def wait(self) -> None:
        """Return when it is there."""
        self._clock.wait_until(self._at)


class Residual(torch.nn.Module):
    """Layers of one weight each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def main() -> None:
    """Run one kind of wire and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", choices=("emulated", "gloo"), default="emulated")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the emulated wire")
    parser.add_argument("--gigabytes-per-second", type=float, default=1.15, help="of the emulated wire")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-megabytes", type=float, nargs="*", default=[25.0, 50.0])
    parser.add_argument("--sharded", action="store_true", help="reduce-scatter beside all-reduce")
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {vars(arguments)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.wire == "gloo":
            mp.spawn(_be_rank, (2, folder, arguments), 2)
        else:
            _be_rank(0, 1, folder, arguments)


def _be_rank(rank: int, num_ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=num_ranks)
    clock = Clock("wall" if arguments.wire == "gloo" else arguments.clock)
    wire = FakeWire(clock, arguments.gigabytes_per_second * 1e9) if arguments.wire == "emulated" else None
    x = torch.randn(arguments.rows, arguments.width)
    steps: dict[str, Step] = {"compute": _compute(_made(arguments), x), "naive": _naive(_made(arguments), x, wire)}
    for megabytes in arguments.bucket_megabytes:
        steps[f"xrank {megabytes:g} MB"] = _xrank(_made(arguments), x, wire, megabytes)
        steps[f"xrank lazily {megabytes:g} MB"] = _xrank(_made(arguments), x, wire, megabytes, lazily=True)
        if arguments.sharded:
            steps[f"xrank sharded {megabytes:g} MB"] = _xrank(_made(arguments), x, wire, megabytes, is_sharded=True)
        steps[f"torch {megabytes:g} MB"] = _torch(_made(arguments), x, wire, megabytes)
    first: dict[str, list[float]] = {name: [] for name in steps if name.startswith("xrank")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    waits: dict[str, list[float]] = {name: [] for name in steps}
    backward: list[float] = []
    for number in range(arguments.rounds + 2):  # torch's second step is the first with its final buckets
        for name, step in steps.items():
            if num_ranks > 1:
                dist.barrier()
            seconds, waited = _seconds(step, clock, wire)
            if number == 0 and name in first:
                first[name].append(seconds)
            if number > 1:
                times[name].append(seconds)
                waits[name].append(waited)
        backward.append(_backward_seconds(steps["compute"], clock))
    if rank == 0:
        _print(times, waits, first, statistics.median(backward), _wire_seconds(arguments) if wire else None)
    dist.destroy_process_group()


def _made(arguments: argparse.Namespace) -> Residual:
    torch.manual_seed(0)
    return Residual(arguments.layers, arguments.width)


def _seconds(step: Step, clock: Clock, wire: FakeWire | None) -> tuple[float, float]:
    """Return what a step takes, and how much of that is waiting for the wire."""
    if wire is not None:
        wire.drain()
    started, waited = clock.now(), clock.waited
    step()
    return clock.now() - started, clock.waited - waited


def _backward_seconds(step: Any, clock: Clock) -> float:
    loss = step.loss()
    started = clock.now()
    loss.backward()
    return clock.now() - started


def _wire_seconds(arguments: argparse.Namespace) -> float:
    return 4 * arguments.layers * arguments.width**2 / (arguments.gigabytes_per_second * 1e9)


def _compute(module: torch.nn.Module, x: torch.Tensor) -> Step:
    def loss() -> torch.Tensor:
        module.zero_grad()
        return module(x).square().mean()

    def step() -> None:
        loss().backward()

    step.loss = loss  # type: ignore[attr-defined]
    return step


def _naive(module: torch.nn.Module, x: torch.Tensor, wire: FakeWire | None) -> Step:
    """Flatten, send once, copy back: what a loop without any of this does."""

    def step() -> None:
        module.zero_grad()
        module(x).square().mean().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat.div_(2)
        if wire is None:
            dist.all_reduce(flat)
        else:
            wire.send(flat).wait()
        for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    return step


def _xrank(
    module: torch.nn.Module,
    x: torch.Tensor,
    wire: FakeWire | None,
    megabytes: float,
    *,
    lazily: bool = False,
    is_sharded: bool = False,
) -> Step:
    config = GradientConfig(
        overlap_grad_reduce=True,
        bucket_size=round(megabytes * 1e6 / 4),
        use_distributed_optimizer=is_sharded,
        overlap_param_gather=is_sharded,
    )
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config, rank=dist.get_rank())
    ddp = DistributedDataParallel(module, plan, wire=wire)
    ddp.zero_grad_buffer()  # its pages are there from now on, as those of all later steps

    def step() -> None:
        ddp.start_param_sync()  # of what the last step made, while this forward runs
        ddp.zero_grad_buffer(lazily=lazily)
        ddp(x).square().mean().backward()
        ddp.finish_grad_sync()

    return step


def _torch(module: torch.nn.Module, x: torch.Tensor, wire: FakeWire | None, megabytes: float) -> Step:
    """Return torch's step. Over a fake wire nothing is divided, for its own divides while it copies."""
    ddp = torch.nn.parallel.DistributedDataParallel(
        module, bucket_cap_mb=megabytes * 1e6 / 2**20, gradient_as_bucket_view=True
    )
    if wire is not None:

        def send(_, bucket):  # type: ignore[no-untyped-def]  # torch demands its own annotations, or none
            wire.send(bucket.buffer())
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, send)

    def step() -> None:
        ddp.zero_grad(set_to_none=True)
        ddp(x).square().mean().backward()
        if wire is not None:
            wire.drain()

    return step


def _print(
    times: Mapping[str, Sequence[float]],
    waits: Mapping[str, Sequence[float]],
    first: Mapping[str, Sequence[float]],
    backward: float,
    wire: float | None,
) -> None:
    compute = statistics.median(times["compute"])
    told = f"; wire {wire:.3f} s: at most {min(1.0, backward / wire):.0%} can be hidden" if wire else ""
    print(f"compute {compute:.3f} s, {backward:.3f} s of it backward{told}")
    print("| step | min, s | median, s | first, s | min / torch | median / torch | waited, s | hidden | / can be |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, seconds in times.items():
        best, middle, waited = min(seconds), statistics.median(seconds), statistics.median(waits[name])
        beside = times.get(f"torch {' '.join(name.split()[-2:])}") if name.startswith("xrank") else None
        ratios = f"{best / min(beside):.3f} | {middle / statistics.median(beside):.3f}" if beside else " | "
        hidden = 1 - waited / wire if wire and name != "compute" else None
        shares = f"{hidden:.0%} | {hidden / min(1.0, backward / wire):.2f}" if wire and hidden is not None else " | "
        begun = f"{first[name][0]:.3f}" if name in first else ""
        print(f"| {name} | {best:.3f} | {middle:.3f} | {begun} | {ratios} | {waited:.3f} | {shares} |")


if __name__ == "__main__":
    main()
