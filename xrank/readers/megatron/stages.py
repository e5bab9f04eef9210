"""Finds the layers of the model in each chunk of a pipeline stage; files count layers from 0 in every chunk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from xrank.dialects.megatron.layouts import LAYER
from xrank.errors import ContradictionError
from xrank.readers.megatron.args import ParallelSizes

Chunk = tuple[int, int]
"""Virtual chunk and pipeline stage. Sorted, the chunks contain a model's layers in order."""

_ENCODER_LAYER = re.compile(r"encoder\.layers\.(0|[1-9]\d{0,8})\..*", re.ASCII)

# With these settings, num_layers alone does not determine a stage's share (megatron/training/arguments.py).
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_split_rank",
)
_FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")


def count_layers(names: Iterable[str], file: str, rank: int) -> int:
    """Return the number of layers in a chunk: the decoder's, or in a model without one (BERT) the encoder's.

    Raises:
        ContradictionError: their numbers have a gap.
    """
    held = tuple(names)
    stack = "decoder" if any(map(LAYER.fullmatch, held)) else "encoder"
    pattern = LAYER if stack == "decoder" else _ENCODER_LAYER
    numbers = {int(found[1]) for name in held if (found := pattern.fullmatch(name))}
    missing = next((layer for layer in range(len(numbers)) if layer not in numbers), None)
    if missing is not None:
        raise ContradictionError(
            f"{file} contains nothing of {stack}.layers.{missing}, but contains later layers",
            tensor=f"{stack}.layers.{missing}",
            rank=rank,
            file=file,
            got=f"{len(numbers)} layers, up to {max(numbers)}",
            want="layers counted from 0 on",
            next_step="copy the file again from where it was written",
        )
    return len(numbers)


def has_encoder(names: Iterable[str]) -> bool:
    """Return whether there are layers of an encoder (BERT, T5)."""
    return any(map(_ENCODER_LAYER.fullmatch, names))


def first_layers(
    counts: Mapping[Chunk, int], sizes: ParallelSizes, args: Mapping[str, Any], file: str
) -> dict[Chunk, int]:
    """Return the number of each chunk's first layer in the whole model.

    Args:
        counts: number of layers in each chunk.
        sizes: number of stages and chunks.
        args: the run's arguments, which must agree.
        file: the file with the arguments.

    Raises:
        ContradictionError: the arguments record other numbers of layers.
    """
    num_layers = args.get("num_layers")
    if type(num_layers) is int and sum(counts.values()) != num_layers:
        total = sum(counts.values())
        raise _contradiction("all stages together do not contain", total, num_layers, "args.num_layers", file)
    # The files' own counts decide; the arguments can only contradict them, because they leave uneven splits open.
    expected = _expect_counts(sizes, args)
    first, total = {}, 0
    for chunk in sorted(counts):
        if expected is not None and counts[chunk] != expected[chunk]:
            where = f"pipeline stage {chunk[1]}" + (f", chunk {chunk[0]}," if sizes.virtual > 1 else "")
            raise _contradiction(f"{where} does not contain", counts[chunk], expected[chunk], "its args", file)
        first[chunk] = total
        total += counts[chunk]
    return first


def _contradiction(what: str, got: int, want: int, source: str, file: str) -> ContradictionError:
    return ContradictionError(
        f"{file}: {what} the number of layers in {source}",
        file=file,
        got=f"{got} layers",
        want=f"{want} layers",
        next_step="all files must come from one save of one run; copy them again",
    )


def _expect_counts(sizes: ParallelSizes, args: Mapping[str, Any]) -> dict[Chunk, int] | None:
    """Return each chunk's number of layers by the arguments; None if they do not determine it in a simple way."""
    total = args.get("num_layers")
    if type(total) is not int or any(args.get(key) for key in _UNEVEN):
        return None
    ends: dict[int, int] = {}
    for stage, keys in ((0, _FIRST), (sizes.pipeline - 1, _LAST)):
        number = next((args[key] for key in keys if args.get(key) is not None), None)
        if type(number) is int:
            ends[stage] = number
    middle = sizes.pipeline - len(ends)
    rest = total - sum(ends.values())
    if rest < 0 or (middle and rest % middle) or (not middle and rest):
        return None
    stages = {stage: ends.get(stage, rest // middle if middle else 0) for stage in range(sizes.pipeline)}
    if any(count % sizes.virtual for count in stages.values()):
        return None
    return {(chunk, stage): count // sizes.virtual for stage, count in stages.items() for chunk in range(sizes.virtual)}
