"""A job of 4 ranks that train, one of which is killed at a seeded moment: many jobs, one after another.

``python -m tests.gradients.training_kills FIRST STOP`` prints for each seed what each rank said, as JSON. Ranks are
forked from this process, which has imported torch: its start takes seconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import select
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # what a rank imports late is not to be killed first

from tests.gradients.wires import batch_of, loss_of, make_module
from xrank.errors import XrankError
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    ParameterShards,
    clip_grad_norm,
    finalize_model_grads,
    mark,
)
from xrank.layout import DeviceMesh

NUM_RANKS = 4
_MOMENT_SECONDS = 0.3
_WAIT_SECONDS = 100


def train(rank: int, seed: int, ready: int) -> None:
    """Train without an end, and report on the descriptor when a few steps are done."""
    draw = random.Random(seed)
    mesh = DeviceMesh((2, 2), ("dp", "tp")) if draw.random() < 0.7 else DeviceMesh((4,), ("dp",))
    config = GradientConfig(
        use_distributed_optimizer=draw.random() < 0.5,
        overlap_grad_reduce=(overlap := draw.random() < 0.5),
        bucket_size=64 if overlap else None,
    )
    module = make_module()
    for parameter in module.norm.parameters():
        mark(parameter, over_tp="average")
    ddp = DistributedDataParallel(module, GradientPlan.from_module(module, mesh, config))
    shards = ParameterShards(ddp)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=1e-3)
    shards.attach(optimizer)
    step = 0
    while True:
        ddp.zero_grad_buffer()
        loss_of(ddp(batch_of())).backward()
        finalize_model_grads(ddp)
        clip_grad_norm(ddp, 1.0)
        optimizer.step()
        step += 1
        if step == 3:
            os.write(ready, b".")


def run_rank(rank: int, seed: int, port: int, ready: int) -> dict[str, Any]:
    """Return the error that ends a rank's training."""
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(str(seed), server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    try:
        train(rank, seed, ready)
    except XrankError as error:
        return {"error": type(error).__name__, "rank": error.rank, "when": time.monotonic()}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}", "rank": None, "when": time.monotonic()}
    raise AssertionError


def run_job(seed: int, port: int) -> dict[str, Any]:
    """Run one job, and return its victim, the answers of the others, and the seconds from the kill to each."""
    ready, is_ready = os.pipe()
    ranks = []
    for rank in range(NUM_RANKS):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(_WAIT_SECONDS, exit=True)
            answer: dict[str, Any] = {"error": "no answer", "rank": None, "when": 0.0}
            try:
                answer = run_rank(rank, seed, port, is_ready)
            except BaseException as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            os.write(writing, json.dumps(answer).encode())
            os._exit(1)
        os.close(writing)
        ranks.append((pid, reading))
    for _ in range(NUM_RANKS):
        if not select.select([ready], [], [], _WAIT_SECONDS)[0]:
            break
        os.read(ready, 1)
    draw = random.Random(f"kill {seed}")
    victim, moment = draw.randrange(NUM_RANKS), draw.random() * _MOMENT_SECONDS
    time.sleep(moment)  # the seeded moment itself
    os.kill(ranks[victim][0], signal.SIGKILL)
    killed = time.monotonic()
    answers = []
    for pid, reading in ranks:
        content = b""
        while part := os.read(reading, 65536):
            content += part
        os.close(reading)
        os.waitpid(pid, 0)
        answer = json.loads(content) if content else None
        answers.append(None if answer is None else {**answer, "seconds": answer["when"] - killed})
    os.close(ready)
    os.close(is_ready)
    return {"seed": seed, "victim": victim, "answers": answers}


def main(first: int, stop: int) -> None:
    """Run the jobs of these seeds."""
    torch.set_num_threads(1)
    reading, writing = os.pipe()
    life, _held = os.pipe()
    if os.fork() == 0:
        # The store's threads are not those of a process that forks ranks; no rank that may be killed keeps it.
        os.close(_held)
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(server.port).encode())
        os.read(life, 1)
        os._exit(0)
    port = int(os.read(reading, 10))
    print(json.dumps([run_job(seed, port) for seed in range(first, stop)]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
