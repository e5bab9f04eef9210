"""Merge a checkpoint from a bucket into a bucket: straight, and by way of a disk with the same clients.

    python -m benchmarks.stores_writing [--gigabytes 1] [--latency 0.02] [--rounds 3]

The server is the tests' small one, in a process of its own, with a latency before each answer. Prints the times of
both ways and their ratio, and the peak memory of the straight one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import xrank
from tests.stores.servers import make_bucket
from tests.stores.small_s3 import SmallS3
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout

RANKS = 8
COLUMNS = 4096


def serve(sender: Connection, latency_seconds: float) -> None:
    """Serve until the parent ends it."""
    server = SmallS3()
    server.latency_seconds = latency_seconds
    server.is_cheap = True
    sender.send(server.url)
    sender.recv()


def leave_states(folder: Path, nbytes: int) -> None:
    """Leave the states of eight ranks, cut by rows."""
    rows, count = 4096, max(1, nbytes // (4096 * COLUMNS * 2))
    layouts = LayoutMap(DeviceMesh((RANKS,), ("tp",)))
    names = [f"layers.{number}.weight" for number in range(count)]
    layouts.update({name: TensorLayout.parse("[rows/tp, cols]") for name in names})
    for rank in range(RANKS):
        weights = {name: torch.randn(rows // RANKS, COLUMNS).to(torch.bfloat16) for name in names}
        workspace = xrank.NFSWorkspace(folder, rank=rank, world_size=RANKS, run_id="run")
        workspace.write_configs_and_weights({"model_type": "llama"}, weights, layouts=layouts)


def gather(source: str | Path, out: str | Path) -> int:
    """Gather in a process of its own; return its peak memory in bytes."""
    command = [sys.executable, "-m", "xrank", "gather", str(source), "--out", str(out), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout)["peak_rss_nbytes"])


def copy_up(store: object, folder: Path, prefix: str) -> None:
    """Upload a folder's files."""
    import obstore

    for path in sorted(folder.iterdir()):
        obstore.put(store, f"{prefix}/{path.name}", path, chunk_size=8 << 20, max_concurrency=16)  # type: ignore[arg-type]


def copy_down(store: object, prefix: str, folder: Path) -> None:
    """Download a prefix's objects by ranges, 16 at once."""
    import obstore

    folder.mkdir()
    piece = 8 << 20

    def fetch(row: tuple[str, int, int]) -> None:
        path, start, end = row
        with open(folder / path.rpartition("/")[2], "r+b") as file:
            file.seek(start)
            file.write(obstore.get_range(store, path, start=start, end=end))  # type: ignore[arg-type]

    rows = []
    for page in obstore.list(store, prefix):  # type: ignore[arg-type]
        for one in page:
            (folder / one["path"].rpartition("/")[2]).touch()
            rows += [(one["path"], at, min(at + piece, one["size"])) for at in range(0, one["size"], piece)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(fetch, rows))


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    receiver, sender = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(sender, options.latency), daemon=True)
    server.start()
    bucket = make_bucket(receiver.recv())
    os.environ |= bucket.environment()
    from obstore.store import S3Store

    store = S3Store(bucket.name, region="us-east-1", client_options={"allow_http": True})
    straight, around, memory = [], [], []
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        leave_states(room / "states", int(options.gigabytes * 1e9))
        copy_up(store, room / "states", "states")
        for number in range(options.rounds):
            started = time.monotonic()
            memory.append(gather(f"{bucket.url}/states", f"{bucket.url}/straight-{number}"))
            straight.append(time.monotonic() - started)
            started = time.monotonic()
            copy_down(store, "states", room / f"copy-{number}")
            gather(room / f"copy-{number}", room / f"model-{number}")
            copy_up(store, room / f"model-{number}", f"around-{number}")
            around.append(time.monotonic() - started)
            print(f"straight {straight[-1]:.1f} s, around {around[-1]:.1f} s, {memory[-1] / 1e6:.0f} MB", flush=True)
            for prefix in ("straight", "around"):
                paths = [one["path"] for page in store.list(f"{prefix}-{number}") for one in page]
                store.delete(paths)
            for made in ("copy", "model"):
                subprocess.run(["rm", "-r", room / f"{made}-{number}"], check=True)
    one, other = statistics.median(straight), statistics.median(around)
    print(f"median {one:.2f} s and {other:.2f} s: {one / other:.2f} x; peak {max(memory) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
