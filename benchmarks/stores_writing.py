"""Merge a checkpoint from a bucket into a bucket, and read one: xrank beside others that do the same.

    python -m benchmarks.stores_writing [--gigabytes 1] [--latency 0.02] [--busy 0.002] [--rounds 3] [--peers PYTHON]

The server is the tests' small one, in a process of its own, with a latency before each answer and some answers of 503.
The checkpoint is eight ranks' Hugging Face shards of torch's distributed checkpoints, which all of the programs read.
Each round runs every program once. ``--peers`` names a Python that has s3fs, torch, s3torchconnector and
runai-model-streamer[s3]; a program that it lacks is left out. Peak memory is that of the process (``ru_maxrss``).
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.storage.servers import Bucket, make_bucket
from tests.storage.small_s3 import SmallS3

RANKS = 8
ROWS, COLUMNS = 4096, 4096
TENSOR_NBYTES = ROWS * COLUMNS * 2


def serve(connection: Connection, latency_seconds: float, busy_share: float) -> None:
    """Serve until the parent ends it; drop the objects below each prefix that the parent sends."""
    server = SmallS3()
    server.is_cheap = True
    connection.send(server.url)
    connection.recv()  # the checkpoint is there
    server.latency_seconds, server.busy_share = latency_seconds, busy_share
    while True:
        prefix = connection.recv()
        with server.lock:
            server.objects = {key: one for key, one in server.objects.items() if not key[1].startswith(prefix)}
        connection.send(None)


def leave_shards(folder: Path, nbytes: int) -> None:
    """Leave the files of eight ranks, cut by rows, as torch's HuggingFaceStorageWriter makes them."""
    folder.mkdir()
    names = [f"model.layers.{number}.weight" for number in range(max(1, nbytes // TENSOR_NBYTES))]
    part = TENSOR_NBYTES // RANKS
    for rank in range(RANKS):
        offsets = {name: {"saved_offsets": [rank * ROWS // RANKS, 0]} for name in names}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        header: dict[str, Any] = {"__metadata__": metadata}
        for number, name in enumerate(names):
            place = [number * part, (number + 1) * part]
            header[name] = {"dtype": "BF16", "shape": [ROWS // RANKS, COLUMNS], "data_offsets": place}
        text = json.dumps(header).encode()
        with (folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in names:
                file.write(os.urandom(part))


def gather(source: str | Path, out: str | Path, *options: str) -> int:
    """Gather in a process of its own; return its peak memory in bytes."""
    command = [
        sys.executable,
        "-m",
        "xrank",
        "gather",
        str(source),
        "--out",
        str(out),
        "--json",
        "--world-size",
        f"{RANKS}",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(json.loads(done.stdout)["peak_rss_nbytes"])


def copy_up(store: Any, folder: Path, prefix: str) -> None:
    """Upload a folder's files."""
    import obstore

    for path in sorted(folder.iterdir()):
        obstore.put(store, f"{prefix}/{path.name}", path, chunk_size=8 << 20, max_concurrency=16)


def copy_down(store: Any, prefix: str, folder: Path) -> None:
    """Download a prefix's objects by ranges, 16 at once."""
    import obstore

    folder.mkdir()
    piece = 8 << 20

    def fetch(row: tuple[str, int, int]) -> None:
        path, start, end = row
        with open(folder / path.rpartition("/")[2], "r+b") as file:
            file.seek(start)
            file.write(obstore.get_range(store, path, start=start, end=end))

    rows = []
    for page in obstore.list(store, prefix):
        for one in page:
            (folder / one["path"].rpartition("/")[2]).touch()
            rows += [(one["path"], at, min(at + piece, one["size"])) for at in range(0, one["size"], piece)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(fetch, rows))


def boto_down(bucket: Bucket, prefix: str, folder: Path) -> None:
    """Download a prefix's objects with boto3's transfers, each by ten threads."""
    import boto3

    folder.mkdir()
    client = boto3.client("s3")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, Prefix=f"{prefix}/"):
        for one in page["Contents"]:
            client.download_file(bucket.name, one["Key"], str(folder / one["Key"].rpartition("/")[2]))


def boto_up(bucket: Bucket, folder: Path, prefix: str) -> None:
    """Upload a folder's files with boto3's transfers, each by ten threads."""
    import boto3

    client = boto3.client("s3")
    for path in sorted(folder.iterdir()):
        client.upload_file(str(path), bucket.name, f"{prefix}/{path.name}")


def go_around(down: Callable[[str, Path], None], up: Callable[[Path, str], None]) -> int:
    """Download, gather and upload with the same client, by way of a disk; return the gather's peak memory."""
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        down("states", room / "states")
        peak = gather(room / "states", room / "model")
        up(room / "model", "out")
    return peak


def run_peer(python: str, name: str, source: str, out: str = "") -> tuple[float, int] | None:
    """Return the seconds and the peak memory of another program; None where it is not installed."""
    command = [python, "-m", "benchmarks.stores_peers", name, source, *filter(None, [out])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        print(f"{name}: left out, {done.stderr.strip()} is not installed")
        return None
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    seconds, peak = done.stdout.split()[-2:]
    return float(seconds), int(peak)


def measure(run: Callable[[], int]) -> tuple[float, int]:
    """Return the seconds of a call, and the peak memory that it returns."""
    started = time.monotonic()
    peak = run()
    return time.monotonic() - started, peak


def choose_runs(bucket: Bucket, store: Any, peers: str) -> dict[str, Callable[[], tuple[float, int] | None]]:
    """Return the programs by name; those that read a merged model come last."""
    states, model, out = (f"{bucket.url}/{name}" for name in ("states", "model", "out"))
    return {
        "xrank, straight": lambda: measure(lambda: gather(states, out)),
        "by way of a disk, obstore": lambda: measure(
            lambda: go_around(partial(copy_down, store), partial(copy_up, store))
        ),
        "by way of a disk, boto3": lambda: measure(
            lambda: go_around(partial(boto_down, bucket), partial(boto_up, bucket))
        ),
        "s3fs and torch's consolidator": lambda: run_peer(peers, "consolidate", states, out),
        "xrank reads": lambda: run_peer(sys.executable, "xrank", model),
        "s3torchconnector reads": lambda: run_peer(peers, "connector", model),
        "runai-model-streamer reads": lambda: run_peer(peers, "streamer", model),
    }


def main() -> None:
    """Run the rounds and print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before each answer")
    parser.add_argument("--busy", type=float, default=0.002, help="share of requests that are answered with 503")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=sys.executable, help="Python with the other programs")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs, options.latency, options.busy), daemon=True)
    server.start()
    bucket = make_bucket(ours.recv())
    os.environ |= bucket.environment()
    from obstore.store import S3Store

    store = S3Store(bucket.name, region="us-east-1", client_options={"allow_http": True})
    with tempfile.TemporaryDirectory() as name:
        leave_shards(Path(name, "states"), int(options.gigabytes * 1e9))
        gather(Path(name, "states"), Path(name, "model"), "--max-shard-size", f"{int(options.gigabytes * 1e9 / RANKS)}")
        for prefix in ("states", "model"):
            copy_up(store, Path(name, prefix), prefix)
        ours.send(None)
        run_rounds(choose_runs(bucket, store, options.peers), options.rounds, ours)


def run_rounds(runs: dict[str, Callable[[], tuple[float, int] | None]], rounds: int, server: Connection) -> None:
    """Run every program once a round, and print a row for each."""
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for _ in range(rounds):
        for program, run in list(runs.items()):
            found = run()
            if found is None:
                del runs[program]
                continue
            seconds.setdefault(program, []).append(found[0])
            peaks[program] = max(found[1], peaks.get(program, 0))
            print(f"{program}: {found[0]:.2f} s, {found[1] / 1e6:.0f} MB", flush=True)
            server.send("out")
            server.recv()
    medians = {program: statistics.median(each) for program, each in seconds.items()}
    for program, median in medians.items():
        own = medians["xrank reads" if program.endswith("reads") else "xrank, straight"]
        print(f"{program}: median {median:.2f} s, {median / own:.2f} x xrank's, peak {peaks[program] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
