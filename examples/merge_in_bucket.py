"""Merge a sharded checkpoint from a bucket into a bucket, with a server that this script starts.

    pip install torch obstore botocore 'moto[server]'
    python examples/merge_in_bucket.py

With a bucket of your own, the command at the end is all that you type.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

import obstore
import torch
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

import xrank
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout

RANKS = 4


def train(folder: Path) -> None:
    """Leave the states of four ranks, each with a quarter of every matrix."""
    layouts = LayoutMap(DeviceMesh((RANKS,), ("tp",)))
    layouts["layers.0.up.weight"] = TensorLayout.parse("[rows/tp, cols]")
    whole = torch.randn(2048, 1024)
    for rank in range(RANKS):
        workspace = xrank.NFSWorkspace(folder, rank=rank, world_size=RANKS, run_id="example")
        weights = {"layers.0.up.weight": whole.chunk(RANKS)[rank]}
        workspace.write_configs_and_weights({"model_type": "toy"}, weights, layouts=layouts, step=10)


def start_server() -> ThreadedMotoServer:
    """Start a server, and let obstore and xrank find it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",  # the server is on this machine
        "AWS_ACCESS_KEY_ID": "example",
        "AWS_SECRET_ACCESS_KEY": "example",
        "AWS_REGION": "us-east-1",
    }
    return server


def main() -> None:
    """Train, upload, and merge."""
    server = start_server()
    try:
        urlopen(Request(f"{os.environ['AWS_ENDPOINT_URL']}/bucket", method="PUT")).close()
        store = S3Store("bucket")
        with tempfile.TemporaryDirectory() as room:
            train(Path(room))
            for path in sorted(Path(room).iterdir()):
                obstore.put(store, f"run/step-10/{path.name}", path)
        for command in (
            ["gather", "s3://bucket/run/step-10", "--out", "s3://bucket/models/step-10"],
            ["verify", "s3://bucket/models/step-10"],
        ):
            print("$ xrank", *command, flush=True)
            subprocess.run([sys.executable, "-m", "xrank", *command], check=True)
        for page in obstore.list(store, "models"):
            for one in page:
                print(f"{one['size']:>12,} {one['path']}")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
