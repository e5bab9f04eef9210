"""Makes the pickles that `tests.faults.pickles` mutates; a process of its own, since those who read them lack torch.

``python -m tests.faults.pickle_seeds FOLDER`` writes them as one file.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.faults.corruptions import SOURCES

__all__: list[str] = []

_SAME_AS_OTHERS = ("ZeRO-2", "safetensors", "orbax")


def make_seeds(folder: Path) -> list[tuple[str, bytes, list[bytes]]]:
    """Return (reader, pickle, the archive's records) of each kind of file."""
    for source in SOURCES:
        if source.name not in _SAME_AS_OTHERS:
            source.make(folder / source.name.replace(" ", "-"))
    _save_ranks(folder)
    found: dict[bytes, tuple[str, bytes, list[bytes]]] = {}
    for path in sorted(folder.rglob("*")):
        if path.name == ".metadata":
            found[path.read_bytes()] = ("metadata", path.read_bytes(), [])
        elif path.is_file() and zipfile.is_zipfile(path):
            reader = {".pth": "state", ".rank": "rank file"}.get(path.suffix, "archive")
            with zipfile.ZipFile(path) as archive:
                members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
            pickled = members["data.pkl"]
            records = [members[f"data/{key}"] for key in range(sum(name.startswith("data/") for name in members))]
            found.setdefault(pickled, (reader, pickled, records))
    values = {"args": argparse.Namespace(a=1, b=[2.5, None]), "model": OrderedDict(w=(1, 2)), 3: {4, "é"}, "b": b"\0"}
    plain = [values, [2**70, -1, True, 1 - 2j], {"d": defaultdict(list, a=[1]), "f": frozenset([1, (2,)])}]
    return [*found.values(), *(("pickle", pickle.dumps(value, p), []) for value in plain for p in (2, 4, 5))]


def _save_ranks(folder: Path) -> None:
    """Save as one of two ranks what FSDP2, FSDP1 and their optimizers hold."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    part = torch.arange(6.0).reshape(2, 3)
    cut = {"a.weight": DTensor.from_local(part, mesh, [Shard(0)]), "b": DTensor.from_local(part, mesh, [Replicate()])}
    torch.save(cut, folder / "dtensors.rank")
    torch.save({"state": {0: {"step": torch.tensor(3.0), "exp_avg": cut["a.weight"]}}}, folder / "optimizer.rank")
    places = [ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu") for rank in range(2)]
    whole = ShardedTensorMetadata(places, torch.Size((4, 3)), TensorProperties(torch.float32))
    sharded = ShardedTensor._init_from_local_shards_and_global_metadata([LocalShard(part, places[1])], whole)
    torch.save({"a": sharded, "b": nn.Parameter(part.T)}, folder / "sharded.rank")
    shared = torch.zeros(8, dtype=torch.bfloat16)
    torch.save({"a": shared[:4], "b": shared[4:], "c": torch.zeros(2).to(torch.float8_e5m2)}, folder / "shared.rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    made = make_seeds(Path(sys.argv[1]) / "sources")
    Path(sys.argv[1], "seeds").write_bytes(pickle.dumps(made))
