"""FSDP1's ShardedTensors in a pickle: a rank's own boxes, and the places of all ranks' boxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrank.dialects.boxes import Box, box_text
from xrank.errors import ContradictionError
from xrank.formats.pickles import InertRecord
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor
from xrank.readers.fsdp.pickled import Wrapper, attributes, is_object, read_local_tensor, sizes_of
from xrank.words import list_text


@dataclass(frozen=True, slots=True)
class ShardedPart:
    """A rank's part of a ShardedTensor."""

    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    shards: tuple[tuple[Box, ArchivedTensor], ...]
    """The rank's own boxes and their elements; empty if the tensor ends before the rank's share."""
    boxes: tuple[Box, ...]
    """Boxes of all ranks of its process group."""
    world_size: int
    """Number of ranks of the run."""


def read_sharded_part(name: str, wrapper: Wrapper, origin: Origin) -> ShardedPart:
    """Return a rank's part of a ShardedTensor (torch/distributed/_shard/sharded_tensor/api.py: __getstate__).

    Raises:
        ContradictionError: the file is another rank's.
        CorruptError, UnsafeError: it is not a ShardedTensor as torch writes it.
    """
    state = wrapper.state
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], list):
        raise origin.corrupt(f"{quote(name)}: the ShardedTensor's state is invalid", got=type(state).__name__)
    locals_, metadata, group = state[0], attributes(state[1]), attributes(state[2])
    rank, world_size = group.get("global_rank"), group.get("global_world_size")
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise origin.corrupt(f"{quote(name)}: the ShardedTensor records no rank", got=f"{rank} of {world_size}")
    if rank != origin.rank:
        raise ContradictionError(
            f"{origin.path} is a copy of another rank's file",
            rank=origin.rank,
            file=origin.path,
            got=f"rank {rank}",
            want=f"rank {origin.rank}",
            next_step=f"copy the file of rank {origin.rank} again, or let all ranks write again",
        )
    if sizes_of(metadata.get("size"), origin) != wrapper.shape:
        raise origin.corrupt(
            f"{quote(name)}: the ShardedTensor records two shapes",
            got=f"{metadata.get('size')} in its metadata",
            want=f"{wrapper.shape}",
        )
    listed = metadata.get("shards_metadata")
    boxes = tuple(_box(name, value, wrapper.shape, origin) for value in (listed if isinstance(listed, list) else []))
    shards = []
    for value in locals_:
        fields = attributes(value)
        if not is_object(value, "Shard"):
            raise origin.corrupt(f"{quote(name)}: a shard is invalid", got=type(value).__name__)
        box = _box(name, fields.get("metadata"), wrapper.shape, origin)
        tensor = read_local_tensor(fields.get("tensor"), quote(name), wrapper.dtype, origin)
        if box not in boxes or tensor.shape != tuple(high - low for low, high in box):
            raise origin.corrupt(
                f"{quote(name)}: a shard is not among the tensor's shards",
                got=f"{box_text(box)} of shape {tensor.shape}",
                want=f"one of {list_text(map(box_text, boxes), 8)}",
            )
        shards.append((box, tensor))
    return ShardedPart(wrapper.dtype, wrapper.shape, tuple(shards), boxes, world_size)


def _box(name: str, value: Any, shape: tuple[int, ...], origin: Origin) -> Box:
    if not isinstance(value, InertRecord) or not is_object(value, "ShardMetadata"):
        raise origin.corrupt(f"{quote(name)}: a shard has no metadata", got=type(value).__name__)
    fields = attributes(value)
    offsets, sizes = (sizes_of(fields.get(key), origin) for key in ("shard_offsets", "shard_sizes"))
    # Unequal numbers of dims are refused below, by an error that names the file.
    box = tuple(zip(offsets, (a + n for a, n in zip(offsets, sizes, strict=False)), strict=False))
    if not len(offsets) == len(sizes) == len(shape) or any(high > n for (_, high), n in zip(box, shape, strict=True)):
        raise origin.corrupt(
            f"{quote(name)}: a shard is not within its tensor", got=f"{offsets} + {sizes}", want=f"within {shape}"
        )
    return box
