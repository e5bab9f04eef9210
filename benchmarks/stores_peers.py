"""Other programs that merge or read a checkpoint in a bucket; `stores_writing` runs each in its own process.

    python -m benchmarks.stores_peers PEER SOURCE_URL [OUT_URL]

Prints the seconds of the work, without those of the imports, and the process's peak memory in bytes. A peer that is
not installed ends with status 3. The bucket is found by the variables ``AWS_*``.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_BLOCK_NBYTES = 8 << 20


def consolidate(source: str, out: str | None) -> Callable[[], None]:
    """Download by s3fs, merge by torch's consolidator, which reads and writes files, and upload by s3fs."""
    import s3fs  # type: ignore[import-not-found]
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    files: Any = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            files.get(source, f"{folder}/states", recursive=True)
            Path(folder, "model").mkdir()
            names = _tensor_names(Path(folder, "states"))
            consolidate_safetensors_files(f"{folder}/states", f"{folder}/model", dict.fromkeys(names, 1), num_threads=2)
            files.put(f"{folder}/model", out, recursive=True)

    return work


def connector(source: str, out: str | None) -> Callable[[], None]:
    """Read all objects by s3torchconnector, one after the other, as its checkpoints are loaded."""
    from s3torchconnector import S3IterableDataset  # type: ignore[import-not-found]

    objects: Any = S3IterableDataset.from_prefix(
        source + "/", region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], transform=_read_all
    )
    return lambda: [None for _ in objects].clear()


def _read_all(reader: Any) -> int:
    return len(reader.read())


def streamer(source: str, out: str | None) -> Callable[[], None]:
    """Read all tensors by Run:ai's model streamer, which has threads of its own."""
    from runai_model_streamer import SafetensorsStreamer, list_safetensors  # type: ignore[import-not-found]

    def work() -> None:
        with SafetensorsStreamer() as one:
            one.stream_files(list_safetensors(source))
            for _, tensor in one.get_tensors():
                tensor.view(-1)[0].item()

    return work


def xrank(source: str, out: str | None) -> Callable[[], None]:
    """Read all tensors by xrank into tensors of their shapes, as engines and trainers load a model."""
    import torch

    from xrank import load_model, open_checkpoint

    def work() -> None:
        # A module would know the shapes.
        shapes = {name: tensor.shape for name, tensor in open_checkpoint(source).tensors.items()}
        load_model({name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, source)

    return work


PEERS = {one.__name__: one for one in (consolidate, connector, streamer, xrank)}


def _tensor_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        return list(file.keys())


def main() -> None:
    """Run one peer."""
    name, source, *out = sys.argv[1:]
    try:
        work = PEERS[name](source, out[0] if out else None)
    except ImportError as error:
        print(error.name, file=sys.stderr)
        raise SystemExit(3) from None
    started = time.monotonic()
    work()
    print(time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main()
