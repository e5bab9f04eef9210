"""Checkpoints as Orbax 0.12 lays them out, written by tensorstore alone; tests/oracle compares with Orbax itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

__all__ = ["Keys", "save_step", "save_tree"]

Keys = tuple[str | int, ...]


def save_tree(
    folder: Path,
    tree: Mapping[Keys, np.ndarray],
    *,
    chunks: Mapping[Keys, Sequence[int]] | None = None,
    is_ocdbt: bool = True,
    is_zarr3: bool = False,
    is_compressed: bool = True,
    parts: int = 1,
    processes: int = 1,
    inline_nbytes: int = 1024,
) -> Path:
    """Write a tree of arrays.

    Args:
        folder: the folder to make.
        tree: keys -> array.
        chunks: keys -> shape of a chunk; an array without one is one chunk.
        is_ocdbt: whether all lies in one OCDBT store.
        is_zarr3: whether arrays are zarr 3, in shards.
        is_compressed: whether chunks are compressed with zstd.
        parts: number of parts of a shard in its first dim.
        processes: number of processes; each writes every so manieth array.
        inline_nbytes: largest value that a node of the OCDBT store contains.
    """
    folder.mkdir(parents=True)
    transactions = [tensorstore.Transaction() for _ in range(processes)]
    for number, (keys, value) in enumerate(tree.items()):
        chunk = list((chunks or {}).get(keys, value.shape))
        store = _store(folder, number % processes, inline_nbytes) if is_ocdbt else f"file://{folder}/"
        metadata = _zarr3(value, chunk, parts, is_compressed) if is_zarr3 else _zarr2(value, chunk, is_compressed)
        spec = {
            "driver": "zarr3" if is_zarr3 else "zarr",
            "kvstore": {"driver": "ocdbt", **store, "path": _name(keys)} if isinstance(store, dict) else None,
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
            "create": True,
        }
        if spec["kvstore"] is None:
            spec["kvstore"] = f"{store}{_name(keys)}/"
        transaction = transactions[number % processes]
        array = tensorstore.open(spec, dtype=value.dtype, shape=value.shape, transaction=transaction).result()
        array.write(value).result()
    for transaction in transactions:
        transaction.commit_sync()
    if is_ocdbt:
        _merge(folder, inline_nbytes)
    for process in range(processes):
        (folder / "array_metadatas").mkdir(exist_ok=True)
        (folder / "array_metadatas" / f"process_{process}").write_text("{}")
    entries = {str(keys): _entry(keys, "jax.Array") for keys in tree}
    (folder / "_METADATA").write_text(
        json.dumps(
            {
                "tree_metadata": entries,
                "use_ocdbt": is_ocdbt,
                "use_zarr3": is_zarr3,
                "store_array_data_equal_to_fill_value": True,
                "custom_metadata": None,
            }
        )
    )
    return folder


def save_step(folder: Path, items: Mapping[str, Mapping[Keys, np.ndarray]], **options: Any) -> Path:
    """Write a step of a CheckpointManager with these items."""
    for name, tree in items.items():
        save_tree(folder / name, tree, **options)
    handlers = dict.fromkeys(items, "orbax.checkpoint._src.handlers.standard_checkpoint_handler")
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": handlers, "metrics": {}}))
    return folder


def _name(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _entry(keys: Keys, kind: str) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": False},
    }


def _store(folder: Path, process: int, inline_nbytes: int) -> dict[str, Any]:
    config = {"max_inline_value_bytes": inline_nbytes, "max_decoded_node_bytes": 100_000_000}
    return {"base": f"file://{folder}/ocdbt.process_{process}/", "config": config}


def _merge(folder: Path, inline_nbytes: int) -> None:
    context = tensorstore.Context()
    parent = tensorstore.KvStore.open(
        {
            "driver": "ocdbt",
            "base": f"file://{folder}/",
            "config": {"max_inline_value_bytes": inline_nbytes, "max_decoded_node_bytes": 100_000_000},
        },
        context=context,
    ).result()
    transaction = tensorstore.Transaction(atomic=True)
    for child in sorted(folder.glob("ocdbt.process_*")):
        own = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{child}/"}, context=context).result()
        own.experimental_copy_range_to(parent.with_transaction(transaction)).result()
    transaction.commit_sync()


def _zarr2(value: np.ndarray, chunk: Sequence[int], is_compressed: bool) -> dict[str, Any]:
    return {
        "shape": list(value.shape),
        "chunks": list(chunk),
        "compressor": {"id": "zstd", "level": 1} if is_compressed else None,
    }


def _zarr3(value: np.ndarray, chunk: Sequence[int], parts: int, is_compressed: bool) -> dict[str, Any]:
    inner = [chunk[0] // parts, *chunk[1:]] if chunk and not chunk[0] % parts else list(chunk)
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if is_compressed:
        codecs.append({"name": "zstd", "configuration": {"level": 3}})
    shards = {"chunk_shape": inner, "codecs": codecs}
    shards["index_codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    return {
        "shape": list(value.shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "codecs": [{"name": "sharding_indexed", "configuration": shards}],
    }
