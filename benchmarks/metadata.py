"""How long a large torch DCP ``.metadata`` takes to read, and how much memory: 1,000 tensors by 1,024 ranks.

    python benchmarks/metadata.py [--tensors 1000] [--ranks 1024]

The file is made with torch's own classes, as `FileSystemWriter.finish` does, of what the ranks gathered: every rank's
entries were pickled on that rank, so no two ranks share a text. Cold processes read it in turn, one without torch, and
one by torch's own reader.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_READ = """
import resource, sys, time
start = time.perf_counter()
from xrank.formats.dcp_metadata import read_metadata
metadata = read_metadata(sys.argv[1])
seconds, cpu_seconds = time.perf_counter() - start, time.process_time()
pieces = sum(len(tensor.start) for tensor in metadata.tensors.values())
assert "torch" not in sys.modules
"""
_READ_BY_TORCH = """
import os, resource, sys, time
start = time.perf_counter()
from torch.distributed.checkpoint import FileSystemReader
metadata = FileSystemReader(os.path.dirname(sys.argv[1])).read_metadata()
seconds, cpu_seconds = time.perf_counter() - start, time.process_time()
pieces = len(metadata.storage_data)
"""
_PRINT = """
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print(f"{pieces:,} pieces: {seconds:.2f} s ({cpu_seconds:.2f} s of CPU), peak memory {peak:.0f} MB")
"""


def make(path: Path, num_tensors: int, num_ranks: int) -> None:
    """Write the metadata of tensors cut by rows over ranks."""
    import torch
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    names = [f"model.layers.{k // 10}.mlp.experts.{k % 10}.down_proj.weight" for k in range(num_tensors)]
    rows, columns = 16, 8192
    listed = {}
    for name in names:
        chunks = [
            ChunkStorageMetadata(torch.Size([rank * rows, 0]), torch.Size([rows, columns])) for rank in range(num_ranks)
        ]
        size = torch.Size([rows * num_ranks, columns])
        listed[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), size, chunks)
    stored = {}
    nbytes = 2 * rows * columns + 1600
    for rank in range(num_ranks):
        # Texts of its own, as they come out of the pickles that the ranks sent.
        own: tuple[str, list[str]] = pickle.loads(pickle.dumps((f"__{rank}_0.distcp", names)))
        for k, name in enumerate(own[1]):
            index = MetadataIndex(name, torch.Size([rank * rows, 0]), rank)
            stored[index] = _StorageInfo(own[0], k * nbytes, nbytes)
    planner_data = {name: (name,) for name in names}
    metadata = Metadata(listed, planner_data, stored, StorageMeta(path.parent, "save"), CURRENT_DCP_VERSION)
    with path.open("wb") as file:
        pickle.dump(metadata, file)


def main() -> None:
    """Make the file, then read it in three cold processes each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1024)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ".metadata"
        start = time.perf_counter()
        command = [sys.executable, __file__, "--make", str(path), str(given.tensors), str(given.ranks)]
        subprocess.run(command, check=True)
        print(f"{os.path.getsize(path) / 1e6:.0f} MB, made by torch in {time.perf_counter() - start:.0f} s")
        for _ in range(3):
            for reader, code in (("xrank", _READ), ("torch", _READ_BY_TORCH)):
                print(reader, end=" ", flush=True)
                subprocess.run([sys.executable, "-W", "ignore", "-c", code + _PRINT, str(path)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
