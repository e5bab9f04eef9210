"""Versions applied by a few plain lines, which know the format and nothing of xrank."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file

CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "blake3": lambda data: blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def read_model(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return name -> dtype, shape, bytes of a whole model."""
    files = sorted(folder.glob("*.safetensors"))
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    return {name: (str(one.dtype), tuple(one.shape), as_bytes(one)) for name, one in found.items()}


def read_index(version: Path) -> dict[str, Any]:
    return json.loads((version / "model.safetensors.index.json").read_text())


def apply_version(
    version: Path, base: dict[str, tuple[str, tuple[int, ...], bytes]], *, may_be_equal: bool = False
) -> dict[str, Any]:
    """Return the model that a version makes of its base, after every checksum was compared."""
    index = read_index(version)
    facts, made = index["metadata"], dict(base)
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    for file in files:
        with safe_open(version / file, "np") as opened:
            checksums = opened.metadata()
            assert set(opened.keys()) == set(checksums)
            for name in opened.keys():  # noqa: SIM118  a file of safetensors is not a mapping
                assert index["weight_map"][name] == file
                frame = opened.get_tensor(name)
                assert frame.dtype == np.uint8
                assert frame.ndim == 1
                size = zstandard.get_frame_parameters(frame.tobytes()).content_size
                body = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.tobytes()), np.uint8)
                assert len(body) == size  # SGLang asks the header for it
                dtype, shape, old = base[name]
                new = np.frombuffer(old, np.uint8).copy()
                if facts["delta_encoding"] == "xor":
                    new ^= body
                else:
                    count = int(body[:4].view("<u4")[0])
                    new[body[4 : 4 + 4 * count].view("<u4")] = body[4 + 4 * count :]
                assert may_be_equal or new.tobytes() != old, f"{name} is there and has not changed"
                assert CHECKSUMS[facts["checksum_format"]](new.tobytes()) == checksums[name]
                made[name] = dtype, shape, new.tobytes()
    return made
