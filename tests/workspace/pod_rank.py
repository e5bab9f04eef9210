"""A rank in one of two pods: it gathers, is intruded on, dies or names the one that died, and writes what it saw.

python -m tests.workspace.pod_rank FOLDER VICTIM, by torchrun. `VICTIM` is the rank that dies.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.workspace.forked_ranks import attempt, gather, kill_self
from tests.workspace.pods import sent_nbytes
from xrank.ranks.byte_service import TOKEN_NBYTES, SocketMessages
from xrank.workspace.parallel import get_tensors_parallel

NBYTES = 32 << 20
_WAIT_SECONDS = 150
ALL = [0, 1, 2, 3]


def gather_on_all(rank: int) -> list[bool]:
    """Return for each gather whether the first rank got the right values, and the others none."""
    seen = []
    for ranks in (ALL, [3, 1], [2, 0], [1, 0], [2, 3], ALL[::-1]):
        for size in (1, 5000, 300_000):
            if rank in ranks:
                with get_tensors_parallel(torch.full((size,), rank), ranks) as parts:
                    got = [(len(part), int(part.min()), int(part.max())) for part in parts]
                    seen.append(got == ([(size, r, r) for r in ranks] if rank == ranks[0] else []))
    return seen


def measure_traffic(rank: int) -> int:
    """Return the bytes that this pod sent to the other while all ranks gathered large tensors on rank 0."""
    dist.barrier()
    before = sent_nbytes()
    with get_tensors_parallel(torch.zeros(NBYTES, dtype=torch.uint8), ALL):
        pass
    dist.barrier()
    return sent_nbytes() - before


def intrude(rank: int) -> dict[str, Any]:
    """Let rank 1, in the other pod, ask for a message of rank 2, without the token; return what it got."""
    receipts: list[Any] = [None]
    messages = SocketMessages()
    if rank == 2:
        receipts[0] = messages.publish("a secret", [torch.ones(1000)])
    dist.broadcast_object_list(receipts, 2)
    got: dict[str, Any] = {}
    if rank == 1:
        fields = json.loads(receipts[0])
        service = fields["service"]
        with socket.create_connection((service["addresses"][0], service["port"])) as stranger:
            stranger.settimeout(20)
            got["challenge"] = len(stranger.recv(10_000))
            stranger.sendall(bytes(64))
            got["after a false proof"] = len(stranger.recv(10_000))
        false = json.dumps({**fields, "service": {**service, "token": bytes(TOKEN_NBYTES).hex()}})
        got["with a false token"] = attempt(lambda: messages.fetch(2, false))["error"]
        got["with the token"] = messages.fetch(2, receipts[0])[0]
    dist.barrier()
    messages.close()
    return got


def main(folder: str, victim: str) -> None:
    """Write this rank's results."""
    faulthandler.dump_traceback_later(_WAIT_SECONDS, exit=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends a pod in which a rank died; this one names it first
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
    result |= {"right": gather_on_all(rank), "sent": measure_traffic(rank), "intruder": intrude(rank)}
    dist.barrier()
    if rank == int(victim):
        kill_self()
    result["death"] = attempt(lambda: gather(rank, ALL))
    Path(folder, f"{rank}.part").write_text(json.dumps(result))
    os.rename(Path(folder, f"{rank}.part"), Path(folder, f"{rank}.json"))
    # The first pod has the store: it stays until the others have written.
    end = time.monotonic() + 60
    while rank < 2 and len(list(Path(folder).glob("*.json"))) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
