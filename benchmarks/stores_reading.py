"""Measures reading from a store: bytes and requests, memory, and what connections bring, against a local S3 server.

The server and a proxy that adds the latency run in this process; each gather is a process of its own. Ratios of one
run count: the server is Python, and the machine is shared.

Run it at the repository's root: PYTHONPATH=. python benchmarks/stores_reading.py
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import xrank
from tests.storage.fault_proxy import FaultProxy
from tests.storage.servers import Bucket, make_bucket, open_proxy
from tests.storage.small_s3 import SmallS3
from tests.storage.stored_objects import StoredObject
from xrank.layout import LayoutMap
from xrank.storage.places import open_store

LATENCY_SECONDS = 0.02
CUTS = {
    "row shards, 8 ranks": ("dp=8", "[o/dp, h]"),
    "FSDP x TP, 4 x 2": ("dp=4 tp=2", "[o/~dp, h/tp]"),
}


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=int, default=256 << 20, help="of the model")
    arguments = parser.parse_args()
    server = SmallS3()
    bucket = make_bucket(server.url)
    with tempfile.TemporaryDirectory() as folder, open_proxy(server.url, latency_seconds=LATENCY_SECONDS) as proxy:
        through = bucket.behind(proxy)
        for name, (grid, layout) in CUTS.items():
            url = _put_states(bucket, Path(folder) / name.partition(" ")[0], arguments.nbytes, grid, layout)
            row = _gather(through, proxy, url)
            print(f"{name}: read {row['read'] / arguments.nbytes:.3f} x the model, {row['requests']} requests, "
                  f"{row['seconds']:.1f} s, peak {row['peak'] / 1e6:.0f} MB")  # fmt: skip
        one, many = (_read_ranges(through, url, connections) for connections in (1, 16))
        print(f"400 ranges of 64 KiB: 1 connection {one:.2f} s, 16 {many:.2f} s: {one / many:.1f} x")
        nbytes, requests = _inspect_large(server, through, proxy, Path(folder))
        print(f"inspect of 8 x 1 GB: {nbytes / 1e6:.2f} MB, {requests} requests")


def _put_states(bucket: Bucket, folder: Path, nbytes: int, grid: str, layout: str) -> str:
    """Write a model, cut it into ranks' states, and put these into the bucket."""
    source = folder / "model"
    source.mkdir(parents=True)
    rows = nbytes // 8 // (2048 * 4)
    random = np.random.default_rng(0)
    tensors = {f"layers.{k}.weight": random.random((rows, 2048), "f4") for k in range(8)}
    save_file(tensors, source / "model.safetensors")
    text = f'[mesh]\ngrid = "{grid}"\n\n[tensors]\n"layers.*.weight" = "{layout}"\n'
    (folder / "layout.toml").write_text(text)
    xrank.reshard_checkpoint(source, LayoutMap.read(folder / "layout.toml"), folder / "states")
    return bucket.put_folder(folder / "states", folder.name)


def _gather(bucket: Bucket, proxy: FaultProxy, url: str) -> dict[str, Any]:
    proxy.restart()
    variables = {**os.environ, **bucket.environment()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as out:
        started = time.monotonic()
        command = [sys.executable, "-m", "xrank", "gather", url, "--out", f"{out}/model", "--json"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(done.stderr)
    report = json.loads(done.stdout)
    read = sum(one.answered_nbytes for one in proxy.requests)
    return {
        "seconds": seconds,
        "peak": report["peak_rss_nbytes"],
        "read": read,
        "requests": len(proxy.requests),
    }


def _read_ranges(bucket: Bucket, url: str, connections: int) -> float:
    """Return the seconds for ranges of one object, asked for by more threads than connections."""
    os.environ.update(bucket.environment() | {"XRANK_STORE_CONNECTIONS": str(connections)})
    store, key = open_store(f"{url}/rank_0_state.pth")
    status = store.head(key)
    started = time.monotonic()
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda k: store.read(key, k * 4096, 64 << 10, status), range(400)))
    del os.environ["XRANK_STORE_CONNECTIONS"]
    return time.monotonic() - started


def _inspect_large(server: SmallS3, bucket: Bucket, proxy: FaultProxy, folder: Path) -> tuple[int, int]:
    """Return bytes and requests of an inspect of eight sparse files of 1 GB."""
    names = {}
    for k in range(8):
        tensors = {f"layers.{8 * k + j}.weight": ((4096, 8192), 4096 * 8192 * 4) for j in range(8)}
        header, at = {}, 0
        for name, (shape, nbytes) in tensors.items():
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header).encode()
        file = f"model-{k + 1:05}-of-00008.safetensors"
        names |= dict.fromkeys(tensors, file)
        path = folder / file
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            # The last bytes are not zeros: a tail of zeros would be searched for its first byte.
            stream.seek(len(text) + at)
            stream.write(b"\x01" * 8)
        with path.open("rb") as stream:
            data: Any = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        server.objects[bucket.name, f"large/{file}"] = StoredObject(memoryview(data), f'"{k:032x}"')
    index = json.dumps({"metadata": {}, "weight_map": names}).encode()
    bucket.put("large/model.safetensors.index.json", index)
    proxy.restart()
    os.environ.update(bucket.environment())
    report = xrank.inspect(f"{bucket.url}/large")
    assert report.details["problems"] == [] and report.source.num_tensors == 64
    return sum(one.answered_nbytes for one in proxy.requests), len(proxy.requests)


if __name__ == "__main__":
    main()
