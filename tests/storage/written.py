"""A checkpoint for gathers to stores, and what a reader of a store finds there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load

import xrank
from tests.storage.fault_proxy import Request
from tests.storage.servers import Bucket
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.workspace.nfs import NFSWorkspace

FILE_NBYTES = "12MB"
"""Two files of two parts and a rest each, and one small file."""
_LAYOUT = '[mesh]\ngrid = "tp=4"\n[tensors]\n".*norm.weight" = "[cols]"\n"[ab].weight" = "[rows, cols/tp]"\n'


class Place(Protocol):
    """An empty bucket or container."""

    @property
    def url(self) -> str:
        """Its URL."""

    def put_folder(self, folder: Path, prefix: str) -> str:
        """Write a folder's files and return their URL."""

    def read_all(self, prefix: str = "") -> dict[str, bytes]:
        """Return the bytes of all objects below a prefix, by key."""


def leave_states(folder: Path, *, seed: int = 0, rows: int = 1500, vectors: int = 1) -> Path:
    """Leave the states of two ranks: two matrices of 12 MB, and vectors of 8 KB."""
    generator = torch.Generator().manual_seed(seed)
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    whole = {}
    for name in ("a.weight", "b.weight"):
        layouts[name] = TensorLayout.parse("[rows/tp, cols]")
        whole[name] = torch.randn(rows, 2000, generator=generator)
    norms = [f"{number}.norm.weight" for number in range(vectors)]
    layouts.update({name: TensorLayout.parse("[cols]") for name in norms})
    for rank in range(2):
        weights = {name: tensor.chunk(2)[rank] for name, tensor in whole.items()}
        weights |= {name: torch.full((2000,), float(number)) for number, name in enumerate(norms)}
        workspace = NFSWorkspace(folder, rank=rank, world_size=2, run_id="run")
        workspace.write_configs_and_weights({"model_type": "llama"}, weights, layouts=layouts)
    return folder


def start(bucket: Bucket, *arguments: object) -> subprocess.Popen[str]:
    """Start a command of xrank whose requests go to the bucket's server."""
    command = [sys.executable, "-m", "xrank", *map(str, arguments)]
    environment = {**os.environ, **bucket.environment(), "XRANK_STORE_TIMEOUT": "20"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(bucket: Bucket, *arguments: object) -> tuple[int, str]:
    """Run a command of xrank; return its exit code and all that it printed."""
    with start(bucket, *arguments) as child:
        out, err = child.communicate(timeout=120)
    return child.returncode, out + err


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a folder's files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_model(objects: dict[str, bytes], prefix: str) -> dict[str, bytes] | None:
    """Return the files that a reader finds who follows the index; None where there is no index.

    A file that the index names and that is not there is a KeyError.
    """
    there = {key.removeprefix(f"{prefix}/"): data for key, data in objects.items() if key.startswith(f"{prefix}/")}
    index = there.get("model.safetensors.index.json")
    if index is None:
        return None
    names = {*json.loads(index)["weight_map"].values(), "config.json", "xrank_manifest.json"}
    return {"model.safetensors.index.json": index, **{name: there[name] for name in names}}


def part_of(bucket: Bucket, request: Request) -> tuple[str, int] | None:
    """Return the key and the number of the part that a request sent."""
    found = re.fullmatch(rf"/{bucket.name}/(.*)\?uploadId=.*&partNumber=(\d+)", request.path)
    return (found[1], int(found[2])) if found and request.method == "PUT" else None


def check_kinds_of_outputs(place: Place, folder: Path) -> None:
    """Check a gather from a store into it, states in another layout, and a live model's weights."""
    states = leave_states(folder / "states", rows=26)
    xrank.gather_checkpoint(states, folder / "model", max_shard_size="200KB")
    url = place.put_folder(states, "run/states")
    xrank.gather_checkpoint(url, f"{place.url}/model", max_shard_size="200KB")
    made = {key: data for key, data in place.read_all("model/").items() if "manifest" not in key}
    expected = {f"model/{name}": data for name, data in read_folder(folder / "model").items() if "manifest" not in name}
    assert made == expected
    layout = folder / "layout.toml"
    layout.write_text(_LAYOUT)
    xrank.reshard_checkpoint(url, layout, f"{place.url}/states")
    assert xrank.inspect(f"{place.url}/states").source["world_size"] == 4
    xrank.export_model(torch.nn.Linear(40, 30), f"{place.url}/live")
    assert load(place.read_all("live/")["live/model.safetensors"]).keys() == {"weight", "bias"}
