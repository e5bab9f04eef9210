"""The experts of ``deepspeed.moe.layer.MoE``: a file of each expert, and fp32 weights in groups of their own.

deepspeed/runtime/engine.py: _save_moe_checkpoint writes a file for each expert of each layer, with the tensors' names
in the whole model. Everything else of a rank has its own numbers of experts, from 0. A group of experts has a partition
on each rank that holds the same experts; deepspeed/utils/groups.py: _create_expert_and_data_parallel chooses them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from xrank.errors import ContradictionError, IncompleteError
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.layout.nest_table import int_array
from xrank.plan.source import StoredShard
from xrank.readers.advice import ONE_SAVE
from xrank.readers.copies import is_telling
from xrank.readers.deepspeed.folder import CheckpointFiles
from xrank.readers.deepspeed.modules import locate_whole
from xrank.readers.deepspeed.slices import shapes_of_slices
from xrank.readers.deepspeed.state_dicts import check_name, check_table, check_tensors
from xrank.readers.deepspeed.states import EXPERT_NAME, EXPERTS_LAST, ModelState, Shape, Shapes
from xrank.readers.deepspeed.zero import Partitions, check_copies, locate_group
from xrank.readers.records import Records
from xrank.words import numbers_text


@dataclass(frozen=True, slots=True)
class Expert:
    """Content of one expert's file."""

    origin: Origin
    archive: TorchArchive
    tensors: Mapping[str, ArchivedTensor]
    """Tensors under their names in the whole model."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of all layers."""

    files: tuple[Expert, ...]
    counts: Mapping[str, int]
    """Name of a layer up to the expert's number -> the layer's number of experts."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of all experts' tensors."""
        return {name: tensor.shape for expert in self.files for name, tensor in expert.tensors.items()}


def read_experts(files: CheckpointFiles, state: ModelState) -> Experts:
    """Return the experts of all layers.

    Raises:
        IncompleteError: an expert's file is missing.
        ContradictionError: a file is another expert's.
        CorruptError, UnsafeError: a file is damaged, or contains code where data are needed.
    """
    _check_numbers(files, state)
    found: list[Expert] = []
    names: dict[str, set[int]] = {}
    for (_, number), path in sorted(files.experts.items()):
        archive, origin = read_archive(path), Origin(path)
        check_name(archive, origin)
        tensors = check_tensors(check_table(archive.value, "the expert", origin), origin)
        for name in tensors:
            match = EXPERT_NAME.search(name)
            if match is None or int(match[0]) != number:
                raise _number_error(origin, name, number)
            names.setdefault(name[: match.start()], set()).add(number)
        found.append(Expert(origin, replace(archive, value=None), tensors))
    for prefix, numbers in names.items():
        if numbers != set(range(len(numbers))):
            missing = min(set(range(max(numbers))) - numbers)
            raise _absent_error(files, f"expert {missing} of {prefix.removesuffix('.')}", numbers)
    return Experts(tuple(found), {prefix: len(numbers) for prefix, numbers in names.items()})


def _check_numbers(files: CheckpointFiles, state: ModelState) -> None:
    """Check that each expert that the model states count has a file."""
    is_old = any(layer < 0 for layer, _ in files.experts)
    layers = {-1: max(state.num_experts)} if is_old and state.num_experts else dict(enumerate(state.num_experts))
    for layer, count in layers.items():
        there = {expert for at, expert in files.experts if at == layer}
        missing = sorted(set(range(count)) - there)
        beyond = sorted(there - set(range(count)))
        if missing:
            raise _absent_error(files, _file_name(layer, missing[0]), there)
        if beyond:
            raise _beyond_error(files.experts[layer, beyond[0]], f"{count} experts in layer {layer} of experts")
    others = [path for (layer, _), path in files.experts.items() if layers and layer not in layers]
    if others:
        raise _beyond_error(others[0], f"{len(layers)} layers of experts")


def _file_name(layer: int, expert: int) -> str:
    return f"{f'layer_{layer}_' if layer >= 0 else ''}expert_{expert}_mp_rank_00_model_states.pt"


def _absent_error(files: CheckpointFiles, what: str, there: set[int]) -> IncompleteError:
    return IncompleteError(
        f"{files.folder} contains no {what}",
        file=os.path.join(files.folder, what) if what.endswith(".pt") else files.folder,
        got=f"experts {numbers_text(there)}" if there else "no expert of this layer",
        want="a file of each expert of each layer",
        next_step="copy the experts' files from the nodes that saved them; nodes without a shared disk keep their own",
    )


def _beyond_error(path: str, want: str) -> ContradictionError:
    return ContradictionError(
        f"{path} belongs to an expert that the model states do not count",
        file=path,
        got=os.path.basename(path),
        want=want,
        next_step=ONE_SAVE,
    )


def _number_error(origin: Origin, name: str, number: int) -> ContradictionError:
    return ContradictionError(
        origin.locate(f"contains a tensor of another expert than {number}: {quote(name)[1:-1]}"),
        tensor=name,
        file=origin.path,
        got=name,
        want=f"names with deepspeed_experts.{number}.",
        next_step="copy the experts' files again from where they were saved",
    )


def locate_trained_experts(
    partitions: Partitions, state: ModelState, experts: Experts, dense: Mapping[str, Shape]
) -> dict[str, StoredShard]:
    """Return every tensor in the partitions of a model with experts, in stages 0 to 2.

    Args:
        partitions: the partitions of all ranks.
        state: the model states, which have the shapes of rank 0's parameters if ZeRO was on.
        experts: the experts of all layers.
        dense: shapes of all other tensors.

    Raises:
        ContradictionError: the partitions' sizes do not match the shapes.
    """
    first, num_ranks = partitions.all[0], len(partitions.all)
    found: dict[str, StoredShard] = {}
    shapes_of_experts = experts.shapes
    for number, count in enumerate(first.counts):
        groups = _ranks_of_groups(num_ranks, count, is_last=state.facts.get(f"ds_config.{EXPERTS_LAST}") is True)
        shapes: Shapes
        if state.groups is not None:
            shapes = state.groups[number] if number < len(state.groups) else {}
        else:
            shapes = shapes_of_slices(partitions.of(groups[0]).all, number, {**dense, **shapes_of_experts})
        for place, ranks in enumerate(groups):
            local = locate_group(partitions.of(ranks), number, shapes)
            for name, shard in local.items():
                own = _global_name(name, place, len(groups), experts, first.origin)
                shard = replace(shard, name=own, rank=int_array(ranks)[shard.rank])
                _check_expert(shard, shapes_of_experts.get(own), first.origin)
                found[own] = shard
    check_copies(partitions)
    return found


def _ranks_of_groups(num_ranks: int, count: int, *, is_last: bool) -> list[list[int]]:
    """Return the ranks of each group with so many partitions; group e has the e-th share of the experts.

    Args:
        num_ranks: number of ranks.
        count: number of partitions of a group.
        is_last: whether a group's ranks follow each other (``use_data_before_expert_parallelism``).
    """
    num_groups = num_ranks // count
    if is_last:
        return [list(range(place * count, (place + 1) * count)) for place in range(num_groups)]
    return [list(range(place, num_ranks, num_groups)) for place in range(num_groups)]


def _global_name(name: str, place: int, num_groups: int, experts: Experts, origin: Origin) -> str:
    """Return the name in the whole model of a tensor in a group's partitions."""
    match = EXPERT_NAME.search(name)
    count = experts.counts.get(name[: match.start()]) if match is not None else None
    is_dense = match is None and num_groups == 1
    if is_dense:
        return name
    if match is None or count is None or count % num_groups or int(match[0]) >= count // num_groups:
        raise ContradictionError(
            origin.locate(f"records {quote(name)[1:-1]}, which the experts' files do not have"),
            tensor=name,
            rank=origin.rank,
            file=origin.path,
            got=f"{name} in a group that {num_groups} sets of ranks have",
            want=f"a number of experts that {num_groups} divides" if count else "the tensor of an expert",
            next_step="all files must come from one save of one run; copy them again",
        )
    number = place * (count // num_groups) + int(match[0])
    return f"{name[: match.start()]}{number}{name[match.end() :]}"


def _check_expert(shard: StoredShard, shape: Shape | None, origin: Origin) -> None:
    if EXPERT_NAME.search(shard.name) is not None and shape != shard.shape:
        raise ContradictionError(
            origin.locate(f"records another shape of {shard.name} than the expert's file"),
            tensor=shard.name,
            rank=origin.rank,
            file=origin.path,
            got=str(list(shard.shape)),
            want="a tensor in the expert's file" if shape is None else str(list(shape)),
            next_step="all files must come from one save of one run; copy them again",
        )


def locate_experts(
    experts: Experts, trained: Mapping[str, StoredShard], records: Records
) -> tuple[dict[str, StoredShard], tuple[StoredShard, ...]]:
    """Return the experts' tensors without fp32 weights, and a small one of each expert's others, to compare them."""
    shards: dict[str, StoredShard] = {}
    roundings: list[StoredShard] = []
    for expert in experts.files:
        index = records.add_archive(expert.archive)
        untrained = {name: tensor for name, tensor in expert.tensors.items() if name not in trained}
        shards |= {name: locate_whole(name, tensor, expert.origin, index) for name, tensor in untrained.items()}
        telling = {n: t for n, t in expert.tensors.items() if n in trained and is_telling(expert.archive, t)}
        if telling:
            name = min(telling, key=lambda name: prod(telling[name].shape))
            roundings.append(locate_whole(name, telling[name], expert.origin, index))
    return shards, tuple(roundings)
