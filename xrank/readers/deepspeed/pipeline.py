"""A pipeline's checkpoint: model states and partitions of each stage, and a file of each layer.

A stage is a model-parallel rank, with a data-parallel group of its own (deepspeed/runtime/pipe/topology.py). A tied
layer has a copy on each of its stages; as in DeepSpeed's own `load_checkpoint`, the first stage's copy counts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from xrank.errors import ContradictionError, IncompleteError
from xrank.plan.source import StoredShard
from xrank.readers.advice import ONE_SAVE
from xrank.readers.copies import is_telling
from xrank.readers.deepspeed.agreement import Agreement
from xrank.readers.deepspeed.folder import CheckpointFiles
from xrank.readers.deepspeed.layers import Layer, find_prefixes, is_tied, note_absent_layers, read_layer
from xrank.readers.deepspeed.modules import Modules, locate_whole
from xrank.readers.deepspeed.moment import check_moment
from xrank.readers.deepspeed.slices import shapes_of_slices
from xrank.readers.deepspeed.states import ModelState, Shape, read_model_state
from xrank.readers.deepspeed.unread import SLICES
from xrank.readers.deepspeed.zero import Partitions, locate_trained, read_partitions
from xrank.readers.records import Records
from xrank.words import numbers_text


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The files of all stages, combined."""

    modules: Modules
    """All layers' tensors without fp32 weights; its state is the first stage's, with all stages' names."""
    trained: Mapping[str, StoredShard]
    """The fp32 weights."""
    partitions: Partitions | None
    """The first stage's partitions."""
    num_stages: int
    roundings: tuple[StoredShard, ...]
    """A small tensor of each layer's file with fp32 weights elsewhere."""


def read_pipeline(files: CheckpointFiles, records: Records, agreement: Agreement) -> Pipeline:
    """Return the tensors of a pipeline.

    Args:
        files: the checkpoint's files.
        records: collects the files.
        agreement: collects the facts of model states.

    Raises:
        IncompleteError: a stage's or layer's file is missing.
        ContradictionError: stages disagree.
        CorruptError, UnsafeError, UsageError: as `read_model_state`, `read_partition` and `find_prefixes`.
    """
    states = _read_states(files, agreement)
    stages = [_read_partitions(files, stage, records) for stage in range(len(states))]
    layers = {number: read_layer(number, path) for number, path in sorted(files.layers.items())}
    named = _trained_names(files, states, stages)
    buffers = [name for state in states for name in state.buffer_names]
    prefixes = find_prefixes(layers, named, buffers, files.folder)
    if not files.stage_partitions:
        _check_moments(files, states, layers)
    held = {prefixes[n] + name: t.shape for n, layer in layers.items() for name, t in layer.tensors.items()}
    trained: dict[str, StoredShard] = {}
    notes = list(note_absent_layers(layers))
    for stage, (state, partitions) in enumerate(zip(states, stages, strict=True)):
        if partitions is None:
            continue
        groups = state.groups
        if groups is None:
            numbers = range(len(partitions.all[0].flats))
            groups = tuple(shapes_of_slices(partitions.all, number, held) for number in numbers)
        _add_stage(trained, locate_trained(partitions, groups), partitions, stage)
        notes += check_moment(files.tag, state.facts, state.origin, partitions.all[0].facts)
    shards, roundings = _locate_layers(layers, prefixes, trained, records)
    names = dict.fromkeys((*held, *trained))
    whole_state = replace(states[0], buffer_names=tuple(dict.fromkeys(buffers)), frozen={}, shared={})
    modules = Modules(whole_state, shards, {}, tuple(dict.fromkeys(notes)), tuple(names))
    return Pipeline(modules, trained, stages[0], len(states), roundings)


def _read_states(files: CheckpointFiles, agreement: Agreement) -> list[ModelState]:
    """Return the model states of all stages."""
    if not files.models:
        raise _absent_stage(files, 0, "model_states")
    states = {stage: read_model_state(path) for stage, path in sorted(files.models.items())}
    first = states[min(states)]
    for state in states.values():
        agreement.add(state.facts, state.origin)
        if not state.is_stage:
            raise SLICES.make_error(state.origin, "a module beside the files of a pipeline's layers")
    num_slices = first.facts.get("checkpoint_parallel_dimensions.tp_degree")
    num_stages = first.facts.get("mp_world_size")
    if type(num_slices) is int and num_slices > 1:
        raise SLICES.make_error(first.origin, f"layers in {num_slices} slices (tp_degree)")
    for stage in range(num_stages if type(num_stages) is int else max(states) + 1):
        if stage not in states:
            raise _absent_stage(files, stage, "model_states")
    if type(num_stages) is int and max(states) >= num_stages:
        raise ContradictionError(
            states[max(states)].origin.locate(f"belongs to stage {max(states)}, but the pipeline has {num_stages}"),
            file=files.models[max(states)],
            got=f"files of stages {numbers_text(states)}",
            want=f"stages {numbers_text(range(num_stages))}",
            next_step=ONE_SAVE,
        )
    return list(states.values())


def _read_partitions(files: CheckpointFiles, stage: int, records: Records) -> Partitions | None:
    """Return a stage's partitions; None if no stage has any, as without ZeRO and bf16."""
    if not files.stage_partitions:
        return None
    if stage not in files.stage_partitions:
        raise _absent_stage(files, stage, "optim_states")
    # Stages have groups of their own, so that their facts differ.
    return read_partitions(files.folder, files.stage_partitions[stage], records, Agreement())


def _check_moments(files: CheckpointFiles, states: Sequence[ModelState], layers: Mapping[int, Layer]) -> None:
    """Check that the layers have a tensor for each moment of the optimizer; without ZeRO nothing else counts them."""
    wanted = Counter(shape for shape, _ in {moment for state in states for moment in state.moments})
    held = Counter(tensor.shape for layer in layers.values() for tensor in layer.tensors.values())
    lacking = wanted - held
    if lacking:
        shape = next(iter(lacking))
        raise IncompleteError(
            f"{files.folder} lacks files of layers: the optimizer trained tensors that none of them contains",
            file=files.folder,
            got=f"layers {numbers_text(layers)}, with {held[shape]} tensors of shape {list(shape)}",
            want=f"{wanted[shape]} tensors of this shape",
            next_step="copy the layers' files from the nodes that saved them; each node may have its own disk",
        )


def _trained_names(
    files: CheckpointFiles, states: Sequence[ModelState], stages: Sequence[Partitions | None]
) -> dict[str, Shape | None]:
    """Return the trained parameters' names, stage by stage, with their shapes where these are recorded."""
    found: dict[str, Shape | None] = {}
    for stage, (state, partitions) in enumerate(zip(states, stages, strict=True)):
        if partitions is None and state.groups is not None:
            raise _absent_stage(files, stage, "optim_states")
        for partition in partitions.all if partitions is not None and state.groups is None else ():
            found.update(dict.fromkeys(name for group in partition.slices or () for name in group))
        for group in state.groups or ():
            for name, shape in group.items():
                other = found.get(name)
                if name in found and (other != shape or not is_tied(name)):
                    raise _two_stages(name, state, shape, other)
                found[name] = shape
    return found


def _two_stages(name: str, state: ModelState, shape: Shape, other: Shape | None) -> ContradictionError:
    return ContradictionError(
        state.origin.locate(f"trains {name}, which an earlier stage trains, too"),
        tensor=name,
        file=state.origin.path,
        got=str(list(shape)),
        want=f"layers of its own, or a tied layer of equal shape (there: {list(other or ())})",
        next_step=ONE_SAVE,
    )


def _add_stage(
    trained: dict[str, StoredShard], found: Mapping[str, StoredShard], partitions: Partitions, stage: int
) -> None:
    """Add a stage's tensors under their ranks in the run; what an earlier stage has is its tied copy."""
    first_rank = stage * len(partitions.all)
    for name, shard in found.items():
        trained.setdefault(name, replace(shard, rank=shard.rank + first_rank))


def _locate_layers(
    layers: Mapping[int, Layer], prefixes: Mapping[int, str], trained: Mapping[str, StoredShard], records: Records
) -> tuple[dict[str, StoredShard], tuple[StoredShard, ...]]:
    """Return the layers' tensors that have no fp32 weights, and a small one of each layer's others, to compare them."""
    shards: dict[str, StoredShard] = {}
    roundings: list[StoredShard] = []
    for number, layer in layers.items():
        index = records.add_archive(layer.archive)
        named = {prefixes[number] + name: tensor for name, tensor in layer.tensors.items()}
        shards |= {
            name: locate_whole(name, tensor, layer.origin, index)
            for name, tensor in named.items()
            if name not in trained and name not in shards  # a tied layer may have several files
        }
        telling = {n: t for n, t in named.items() if n in trained and is_telling(layer.archive, t)}
        if telling:
            name = min(telling, key=lambda name: prod(telling[name].shape))
            roundings.append(locate_whole(name, telling[name], layer.origin, index))
    return shards, tuple(roundings)


def _absent_stage(files: CheckpointFiles, stage: int, kind: str) -> IncompleteError:
    prefix = "" if kind == "model_states" else "zero_pp_rank_0_"
    name = f"{prefix}mp_rank_{stage:02d}_{kind}.pt"
    return IncompleteError(
        f"{files.folder} contains no {name} of stage {stage}",
        file=os.path.join(files.folder, name),
        got=f"files of stages {numbers_text(files.models)}" if files.models else "none",
        want="files of every stage",
        next_step="copy the stage's files from the nodes that saved them; nodes without a shared disk keep their own",
    )
