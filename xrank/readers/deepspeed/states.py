"""Reads the training states of DeepSpeed: ZeRO 1 to 3, whose moments are cut as the fp32 weights, and universal ones.

A model's tensors are those of `DeepSpeedReader`; a trained one is its fp32 weights, which are the optimizer's, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

from msgspec.structs import replace

from xrank.errors import ContradictionError
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.layout.stored_model import StoredShard
from xrank.layout.training_state import MASTER, MOMENTS, LeftOut, ParameterGroup, TrainingState, state_name
from xrank.readers.adam_states import (
    STEP,
    check_step,
    foreign_error,
    make_group,
    make_training_state,
    read_number,
    refuse_other_kinds,
    why_not_plain,
)
from xrank.readers.base import Hints
from xrank.readers.deepspeed.files import CheckpointFiles, Shapes, check_table, list_files, read_table, resolve_folder
from xrank.readers.deepspeed.reader import Content, DeepSpeedReader, locate_universal, read_content
from xrank.readers.deepspeed.tensors import FlatRows, groups_of_slices, locate_trained, piece_numel
from xrank.readers.records import Records
from xrank.storage import places
from xrank.storage.regular_file import Origin, quote
from xrank.words import plural

_MODEL_KEYS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "num_experts"}
    | {"frozen_param_fragments", "sparse_tensor_module_names", "dp_world_size", "mp_world_size", "ds_version"}
    | {"checkpoint_parallel_dimensions"}
)
"""Keys of model states that describe the model and the ranks."""
_OF_RANKS = {"data_sampler": "positions of data samplers", "random_ltd": "the state of random layer dropping"}


def read_deepspeed_state(path: str, hints: Hints) -> TrainingState:
    """Return the training state in a checkpoint; errors as `xrank.readers.training_states` has them."""
    files, records = list_files(resolve_folder(path)), Records()
    content, origin = read_content(files, records), Origin(files.folder)
    if content.num_stages > 1 or content.num_experts:
        what = "a pipeline" if content.num_stages > 1 else "a model with experts"
        problem, want = f"is the training state of {what}, which is not converted", "a model in whole modules"
        raise origin.usage(
            problem, what, want, "continue on the same number of ranks; xrank gather writes only the model"
        )
    facts = content.modules.state.facts
    # deepspeed/runtime/engine.py: _configure_basic_optimizer: Adam is AdamW, too, unless its options deny it.
    named = str(facts.get("ds_config.optimizer.type", "")).lower()
    if named not in ("", "adam", "adamw"):
        raise foreign_error(content.modules.state.origin, f"optimizer {quote(named)}", named)
    is_plain = named == "adam" and facts.get("ds_config.optimizer.params.adam_w_mode") is False
    read = _read_universal if files.is_universal else _read_partitions
    moments, steps, groups = read(files, content, records)
    shards, states = list[StoredShard](), dict[str, dict[str, str]]()
    for name, kinds in moments.items():
        kinds[MASTER] = content.trained[name]
        states[name] = {kind: state_name(name, kind) for kind in kinds}
        shards += [replace(shard, name=state_name(name, kind)) for kind, shard in kinds.items()]
    stored = DeepSpeedReader().describe(path, files, content, records)
    values, left_out = _read_values(files)
    step, skipped = (facts.get(key) for key in ("global_steps", "skipped_steps"))
    counts = {step, step - skipped} if isinstance(step, int) and isinstance(skipped, int) else {step}
    if steps and step is not None and max(steps.values()) not in counts:
        problem, want = "belongs to a different step than the optimizer", f"{max(steps.values()):.0f} steps of Adam"
        raise content.modules.state.origin.contradiction(problem, f"global_steps {step}", want)
    return make_training_state(
        replace(stored, shards=(*stored.shards, *shards)),
        states,
        steps,
        groups,
        origin,
        optimizer={"": None, "adam": "Adam" if is_plain else "AdamW"}.get(named, "AdamW"),
        values=values,
        left_out=left_out,
    )


_Read: TypeAlias = tuple[dict[str, dict[str, StoredShard]], dict[str, float], list[ParameterGroup]]
"""Moments of each parameter by kind, steps, and groups."""


def _read_partitions(files: CheckpointFiles, content: Content, records: Records) -> _Read:
    partitions = content.partitions
    if partitions is None:
        problem, step = "has an optimizer without ZeRO, which is not converted", "save with ZeRO stage 1, 2 or 3"
        raise Origin(files.folder).usage(problem, "no *_optim_states.pt", "ZeRO's partitions", step)
    first, shapes = partitions.all[0], content.modules.state.groups
    if shapes is None:  # as `read_content`
        whole = {name: tensor.shape for name, tensor in content.modules.state.module.items()}
        shapes = groups_of_slices(partitions, whole)
    # In stage 3 older versions cut parameters at the borders of sub-groups, so that these do not show the groups.
    sizes = [sum(piece_numel(prod(shape), len(partitions.all)) for shape in group.values()) for group in shapes]
    if first.is_interleaved and sizes != partitions.flats.length[0].tolist():
        got, step = f"{len(first.flats)} sub-groups", "load it, and save it again with a newer DeepSpeed"
        raise first.origin.usage("has sub-groups that cut parameters", got, f"{len(shapes)}, of param_shapes", step)
    states = [_list_states(partition.base, len(first.flats), partition.origin) for partition in partitions.all]
    kinds = {kind: None for own in states[0] for kind in own if kind != STEP}
    moments: dict[str, dict[str, StoredShard]] = {name: {} for group in shapes for name in group} if kinds else {}
    for kind in kinds:
        rows = FlatRows([f"{kind} of group {number}" for number in range(len(first.flats))], len(partitions.all))
        for rank, (partition, own) in enumerate(zip(partitions.all, states, strict=True)):
            flats = [tensor for each in own if isinstance(tensor := each.get(kind), ArchivedTensor)]
            if len(flats) < len(own):
                problem, want = f"lacks {kind} of some groups", f"{len(own)} groups, as of the fp32 weights"
                step = "use a checkpoint with a finished save"
                raise partition.origin.incomplete(problem, f"{len(flats)} groups", want, step)
            rows.add(rank, flats, records.add_archive(partition.archive), partition.origin)
        try:
            located = locate_trained(replace(partitions, flats=rows.table()), shapes)
        except ContradictionError as error:
            error.rename("fp32 weights", kind)
            raise
        for name, shard in located.items():
            moments[name][kind] = shard
    # Fused optimizers count in their groups. The ranks' steps were compared (`Agreement`).
    table = check_table(first.base, "the optimizer's state", first.origin)
    groups, steps = _read_groups(table, shapes, first.origin)
    steps |= {name: own[STEP] for group, own in zip(shapes, states[0], strict=True) if STEP in own for name in group}
    return moments, _read_steps({name: (step, first.archive) for name, step in steps.items()}), groups


def _list_states(base: object, count: int, origin: Origin) -> list[dict[str, object]]:
    """Return the state of each group or sub-group; empty ones before the first step."""
    if isinstance(base, list):  # stage_1_and_2.py: _get_base_optimizer_state
        problem = "was saved with elastic_checkpoint, which omits the optimizer's options"
        want = "the optimizer's groups"
        step = "load it with DeepSpeed, and save it again without elastic_checkpoint"
        raise origin.usage(problem, f"the states of {plural(len(base), 'group')}", want, step)
    state = check_table(base, "the optimizer's state", origin).get("state")
    if not isinstance(state, dict) or not set(state) <= set(range(count)):
        raise origin.corrupt("the optimizer's state is not that of its groups", want=f"states of {count} groups")
    found = [check_table(state.get(number, {}), "a group's state", origin) for number in range(count)]
    refuse_other_kinds({f"group {number}": own for number, own in enumerate(found)}, origin)
    return found


def _read_groups(
    saved: Mapping[str, object], shapes: Sequence[Shapes], origin: Origin
) -> tuple[list[ParameterGroup], dict[str, object]]:
    """Return the groups, and the step of each parameter whose group counts it."""
    groups, steps = list[ParameterGroup](), dict[str, object]()
    listed = saved.get("param_groups")
    for group in listed if isinstance(listed, list) else ():
        options = dict(check_table(group, "a group of the optimizer", origin))
        numbers = options.pop("params", None)
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < len(shapes) for n in numbers):
            problem, want = "a group has other parameters than the model states", f"numbers below {len(shapes)}"
            raise origin.contradiction(problem, quote(str(numbers)), want)
        names = [name for number in numbers for name in shapes[number]]
        if STEP in options:
            steps |= dict.fromkeys(names, options.pop(STEP))
        groups.append(make_group(names, options, origin))
    return groups, steps


def _read_steps(found: Mapping[str, tuple[object, TorchArchive]]) -> dict[str, float]:
    """Return each parameter's step, which is a number or a tensor in an archive."""
    read: dict[int, object] = {}  # parameters of a group share an object
    for step, archive in found.values():
        if id(step) not in read:
            read[id(step)] = read_number(archive, step)
    return {name: check_step(read[id(step)], name, Origin(archive.path)) for name, (step, archive) in found.items()}


def _read_universal(files: CheckpointFiles, content: Content, records: Records) -> _Read:
    place, shapes = os.path.join(files.folder, "zero"), content.modules.state.groups or ()
    archive, origin, saved = read_table(os.path.join(place, "optimizer_state.pt"), "the optimizer's state")
    groups, counted = _read_groups(saved, shapes, origin)
    steps = {name: (step, archive) for name, step in counted.items()}
    # ds_to_universal.py: _save_optimizer_state_stage3 keeps the first rank's whole state, and writes no step.pt.
    if "optimizer_state_dict" in saved:
        states = _list_states(saved["optimizer_state_dict"], len(shapes), origin)
        steps |= {
            n: (own[STEP], archive) for group, own in zip(shapes, states, strict=True) if STEP in own for n in group
        }
    moments: dict[str, dict[str, StoredShard]] = {}
    listed = {name: places.list_names(os.path.join(place, name)) for name in content.trained}
    has_steps = any(f"{STEP}.pt" in entries for entries in listed.values())
    for name, shard in content.trained.items():
        folder, entries = os.path.join(place, name), listed[name]
        if has_steps and {"fp32.pt", *entries} == {"fp32.pt"}:
            continue  # ds_to_universal.py: main: it has not received a gradient
        kinds = {entry.removesuffix(".pt") for entry in entries if entry.endswith(".pt")} - {"fp32", STEP}
        refuse_other_kinds({name: kinds}, Origin(folder))
        moments[name] = {
            kind: locate_universal(files.folder, name, shard.shape, records, is_sliced=len(files.models) > 1, kind=kind)
            for kind in sorted({*MOMENTS[:2], *kinds})
        }
        if f"{STEP}.pt" in entries:
            own = read_archive(os.path.join(folder, f"{STEP}.pt"))
            steps[name] = own.value, own
    return moments, _read_steps(steps), groups


def _read_values(files: CheckpointFiles) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return the values in the model states that do not describe the model, and those that are not converted."""
    models = files.rank_models or files.models
    _, _, saved = read_table(models[min(models)], "the state")
    kept = {key: value for key, value in saved.items() if key not in _MODEL_KEYS and value is not None}
    odd = {key: why for key, value in kept.items() if (why := _OF_RANKS.get(key) or why_not_plain(value))}
    return {key: value for key, value in kept.items() if key not in odd}, [LeftOut(*each) for each in odd.items()]
