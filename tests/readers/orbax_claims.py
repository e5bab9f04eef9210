"""Orbax checkpoints of a few bytes that claim much: made and gathered in a process whose memory is measured."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zstandard

__all__ = ["CLAIMS"]

_SCALAR = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}


def _tree(folder: Path) -> None:
    (folder / "w").mkdir(parents=True)
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": {"('w',)": _SCALAR}}))


def _zarr2(
    folder: Path, shape: list[int], chunks: list[int], *, is_compressed: bool = False, dtype: str = "|u1"
) -> None:
    _tree(folder)
    compressor = {"id": "zstd", "level": 1} if is_compressed else None
    value = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": dtype, "order": "C", "filters": None}
    (folder / "w" / ".zarray").write_text(json.dumps({**value, "compressor": compressor, "fill_value": None}))


def _zarr3(folder: Path, shape: list[int], chunks: list[int], parts: list[int]) -> None:
    _tree(folder)
    index: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": parts, "codecs": index[:1], "index_codecs": index, "index_location": "end"}
    value = {
        "zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "uint8", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }  # fmt: skip
    (folder / "w" / "zarr.json").write_text(json.dumps(value))


def _one_chunk(folder: Path) -> None:
    _zarr2(folder, [10**9], [1])
    (folder / "w" / "0").write_bytes(b"x")


def _no_elements(folder: Path) -> None:
    _zarr2(folder, [0, 1 << 40], [1, 1])


def _no_elements_last(folder: Path) -> None:
    _zarr2(folder, [1 << 40, 0], [1, 1])


def _parts(folder: Path) -> None:
    _zarr3(folder, [10**9], [10**9], [1])
    (folder / "w" / "c").mkdir()
    (folder / "w" / "c" / "0").write_bytes(bytes(160))


def _parts_of_a_sparse_file(folder: Path) -> None:
    _zarr3(folder, [10**9], [10**9], [1])
    (folder / "w" / "c").mkdir()
    with (folder / "w" / "c" / "0").open("wb") as file:
        file.truncate(1 << 36)


def _wide_chunk(folder: Path) -> None:
    _zarr2(folder, [4], [1 << 50], is_compressed=True)
    (folder / "w" / "0").write_bytes(zstandard.compress(bytes(1000)))


def _wide_plain_chunk(folder: Path) -> None:
    _zarr2(folder, [4], [1 << 50])
    (folder / "w" / "0").write_bytes(bytes(1000))


def _too_many_bytes(folder: Path) -> None:
    _zarr2(folder, [1 << 61], [1 << 61], dtype="<f8")
    (folder / "w" / "0").write_bytes(bytes(8))


def _too_many_dims(folder: Path) -> None:
    _zarr2(folder, [1] * 65, [1] * 65)
    (folder / "w" / ".".join("0" * 65)).write_bytes(b"x")


def _row_beyond_the_edge(folder: Path) -> None:
    """A file of holes whose last byte, beyond the shape's edge, is not 0."""
    _zarr2(folder, [1, 300_000_000], [2, 300_000_000])
    with (folder / "w" / "0.0").open("wb") as file:
        file.truncate(600_000_000)
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


def _frame_of_zeros(folder: Path) -> None:
    """A frame of 60 KB that holds 2 GB of zeros, and ends where the edge's check begins."""
    _zarr2(folder, [1, 1 << 31], [2, 1 << 31], is_compressed=True)
    frame = zstandard.ZstdCompressor(level=1).compressobj()
    parts = [frame.compress(bytes(1 << 24)) for _ in range(32)]
    (folder / "w" / "0.0").write_bytes(b"".join([*parts, frame.flush()]))


def _inline_frame(folder: Path) -> None:
    """A value inside of OCDBT's metadata, of 65 KB, that decodes to 2 GB."""
    import tensorstore

    _tree(folder)
    frame = zstandard.ZstdCompressor(level=1).compressobj()
    parts = [frame.compress(bytes(1 << 24)) for _ in range(128)]
    value = b"".join([*parts, frame.flush()])
    text = {"zarr_format": 2, "shape": [1 << 31], "chunks": [1 << 31], "dtype": "|u1", "order": "C", "filters": None}
    text |= {"compressor": {"id": "zstd", "level": 1}, "fill_value": None}
    spec = {"driver": "ocdbt", "base": f"file://{folder}/", "config": {"max_inline_value_bytes": 1 << 20}}
    store = tensorstore.KvStore.open(spec).result()
    store.write("w/.zarray", json.dumps(text)).result()
    store.write("w/0", value).result()


CLAIMS: Mapping[str, tuple[Callable[[Path], None], int]] = {
    "a chunk of a billion": (_one_chunk, 3),
    "no elements in many columns": (_no_elements, 0),
    "many rows without elements": (_no_elements_last, 0),
    "a billion parts in 160 bytes": (_parts, 4),
    "a billion parts in a file of holes": (_parts_of_a_sparse_file, 4),
    "a chunk wider than its array": (_wide_chunk, 4),
    "a plain chunk wider than its array": (_wide_plain_chunk, 4),
    "more bytes than 63 bits count": (_too_many_bytes, 4),
    "65 dims": (_too_many_dims, 4),
    "a row beyond the edge": (_row_beyond_the_edge, 4),
    "a frame of zeros": (_frame_of_zeros, 4),
    "a value inside of metadata": (_inline_frame, 4),
}
"""Name -> what makes the checkpoint, and the exit code of a gather."""


def main(folder: Path) -> None:
    """Make each checkpoint, gather it, and print how that ended."""
    from tests.cli.bench import run
    from xrank.system import peak_rss_nbytes

    for name, (make, _) in CLAIMS.items():
        place = folder / name.replace(" ", "-")
        make(place)
        started = time.monotonic()
        ended = run("gather", place, "--out", folder / "out", "--recipe", "none")
        text = ended.stderr.splitlines()[0] if ended.stderr else ""
        rest = sorted(path.name for path in folder.glob(".out*"))
        row = {"name": name, "code": ended.exit_code, "seconds": time.monotonic() - started}
        print(json.dumps({**row, "rss_nbytes": peak_rss_nbytes(), "text": text, "rest": rest}), flush=True)
        shutil.rmtree(folder / "out", ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
