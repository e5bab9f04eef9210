"""Models in parts: the experts of deepspeed.moe.layer.MoE, and the stages and layers of a pipeline."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from xrank.dtypes import dtype
from xrank.errors import ContradictionError, IncompleteError
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive
from xrank.layout.nest_table import int_array
from xrank.layout.stored_model import StoredShard
from xrank.readers.deepspeed.files import (
    EXPERT_NAME,
    EXPERTS_LAST,
    SLICES,
    Agreement,
    CheckpointFiles,
    ModelState,
    Shape,
    Shapes,
    check_same_step,
    check_tensors,
    read_model_state,
    read_table,
)
from xrank.readers.deepspeed.tensors import (
    Modules,
    Partitions,
    check_copies,
    groups_of_slices,
    locate_group,
    locate_trained,
    locate_whole,
    read_partitions,
    shapes_of_slices,
)
from xrank.readers.records import ONE_SAVE, Records, Subject, is_telling
from xrank.storage.regular_file import Origin, quote
from xrank.words import list_text, numbers_text, plural

_COPY = "copy the {}' files from the nodes that saved them; nodes without a shared disk keep their own"


class Expert(Struct, frozen=True):
    """Content of the file of one expert, or of one layer of a pipeline."""

    origin: Origin
    archive: TorchArchive
    tensors: Mapping[str, ArchivedTensor]
    """Tensors under their names in the whole model."""


class Experts(Struct, frozen=True):
    """The experts of all layers."""

    files: tuple[Expert, ...]
    counts: Mapping[str, int]
    """Name of a layer up to the expert's number -> the layer's number of experts."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of all experts' tensors."""
        return {name: tensor.shape for expert in self.files for name, tensor in expert.tensors.items()}


def read_experts(files: CheckpointFiles, state: ModelState) -> Experts:
    """Return the experts of all layers."""
    _check_numbers(files, state)
    found: list[Expert] = []
    names: dict[str, set[int]] = {}
    for (_, number), path in sorted(files.experts.items()):
        archive, origin, table = read_table(path, "the expert")
        tensors = check_tensors(table, origin)
        for name in tensors:
            match = EXPERT_NAME.search(name)
            if match is None or int(match[0]) != number:
                raise origin.contradiction(
                    f"contains a tensor of another expert than {number}: {quote(name)[1:-1]}",
                    name,
                    f"names with deepspeed_experts.{number}.",
                    "copy the experts' files again from where they were saved",
                    tensor=name,
                )
            names.setdefault(name[: match.start()], set()).add(number)
        found.append(Expert(origin, archive, tensors))
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
    return Origin(os.path.join(files.folder, what) if what.endswith(".pt") else files.folder).incomplete(
        f"{files.folder} contains no {what}",
        f"experts {numbers_text(there)}" if there else "no expert of this layer",
        "a file of each expert of each layer",
        _COPY.format("experts"),
    )


def _beyond_error(path: str, want: str) -> ContradictionError:
    return Origin(path).contradiction(
        "belongs to an expert that the model states do not count", os.path.basename(path), want, ONE_SAVE
    )


def locate_trained_experts(
    partitions: Partitions, state: ModelState, experts: Experts, dense: Mapping[str, Shape]
) -> dict[str, StoredShard]:
    """Return every tensor in the partitions of a model with experts, in stages 0 to 2; `dense` are other shapes."""
    first, num_ranks = partitions.all[0], len(partitions.all)
    found: dict[str, StoredShard] = {}
    shapes_of_experts = experts.shapes
    for number, count in enumerate(first.counts):
        num_groups = num_ranks // count  # group e has the e-th share of the experts
        groups = [list(range(place, num_ranks, num_groups)) for place in range(num_groups)]
        if state.facts.get(f"ds_config.{EXPERTS_LAST}") is True:
            groups = [list(range(place * count, (place + 1) * count)) for place in range(num_groups)]
        shapes: Shapes
        if state.groups is not None:
            shapes = state.groups[number] if number < len(state.groups) else {}
        else:
            shapes = shapes_of_slices(partitions.of(groups[0]).all, number, {**dense, **shapes_of_experts})
        for place, ranks in enumerate(groups):
            local = locate_group(partitions.of(ranks), number, shapes)
            for name, shard in local.items():
                own = _global_name(name, place, num_groups, experts, first.origin)
                shape = shapes_of_experts.get(own)
                if EXPERT_NAME.search(own) is not None and shape != shard.shape:
                    problem = f"records another shape of {own} than the expert's file"
                    want = "a tensor in the expert's file" if shape is None else str(list(shape))
                    raise first.origin.contradiction(problem, str(list(shard.shape)), want, tensor=own)
                found[own] = replace(shard, name=own, rank=int_array(ranks)[shard.rank])
    check_copies(partitions)
    return found


def _global_name(name: str, place: int, num_groups: int, experts: Experts, origin: Origin) -> str:
    """Return the name in the whole model of a tensor in a group's partitions."""
    match = EXPERT_NAME.search(name)
    count = experts.counts.get(name[: match.start()]) if match is not None else None
    if match is None and num_groups == 1:
        return name  # a dense tensor
    if match is None or count is None or count % num_groups or int(match[0]) >= count // num_groups:
        raise origin.contradiction(
            f"records {quote(name)[1:-1]}, which the experts' files do not have",
            f"{name} in a group that {num_groups} sets of ranks have",
            f"a number of experts that {num_groups} divides" if count else "the tensor of an expert",
            tensor=name,
        )
    number = place * (count // num_groups) + int(match[0])
    return f"{name[: match.start()]}{number}{name[match.end() :]}"


def locate_untrained(
    parts: Iterable[Expert], trained: Mapping[str, StoredShard], records: Records
) -> tuple[dict[str, StoredShard], tuple[StoredShard, ...]]:
    """Return the parts' tensors without fp32 weights, and a small one of each part's others, to compare them."""
    shards: dict[str, StoredShard] = {}
    roundings: list[StoredShard] = []
    for part in parts:
        index = records.add_archive(part.archive)
        for name, tensor in part.tensors.items():
            if name not in trained and name not in shards:  # a tied layer may have several files
                shards[name] = locate_whole(name, tensor, part.origin, index)
        telling = {n: t for n, t in part.tensors.items() if n in trained and is_telling(part.archive, t)}
        if telling:
            name = min(telling, key=lambda name: prod(telling[name].shape))
            roundings.append(locate_whole(name, telling[name], part.origin, index))
    return shards, tuple(roundings)


_TIED = "tied_modules."


class Layer(Expert, frozen=True):
    """Content of a ``layer_<number>-model_states.pt``; its tensors have the names in the layer."""

    number: int


def is_tied(name: str) -> bool:
    """Return whether a tensor belongs to a tied layer, of which several stages have a copy."""
    return name.startswith(_TIED)


def find_prefixes(
    layers: Mapping[int, Layer], trained: Mapping[str, Shape | None], buffers: Iterable[str], folder: str
) -> dict[int, str]:
    """Return the prefix of each layer's names in the pipeline's state dict."""
    plain: dict[int, dict[str, Shape | None]] = {}
    tied: dict[str, dict[str, Shape | None]] = {}
    for name, shape in {**dict.fromkeys(buffers), **trained}.items():
        first, _, rest = name.removeprefix(_TIED).partition(".")
        if is_tied(name):
            tied.setdefault(first, {})[rest] = shape
        elif first.isdecimal():
            plain.setdefault(int(first), {})[rest] = shape
        else:
            raise Origin(folder).usage(
                f"{name} belongs to no layer of the pipeline",
                name,
                f"names like 0.weight or {_TIED}embed.weight",
                "make the module with this parameter, such as the loss, a layer, and save again",
                tensor=name,
            )
    for number, tensors in plain.items():
        if number not in layers:
            raise _absent_layer_error(f"{number}.{next(iter(tensors))}", f"layer_{number:02d}*-model_states.pt", folder)
        _check_tensors(layers[number], tensors)
    found = {number: f"{number}." for number in layers}
    looks: dict[tuple[str, ...], list[int]] = {}
    for number, layer in layers.items():
        keys = tuple(key for key, tensors in tied.items() if _fits(layer, tensors))
        if number not in plain and keys:
            looks.setdefault(keys, []).append(number)
    for keys, numbers in looks.items():
        # Keys come in the order of first use. Their values are compared later (`StoredModel.roundings`).
        if len(keys) > 1 and len(keys) != len(numbers):
            raise layers[numbers[0]].origin.usage(
                f"may be any of {len(keys)} tied layers, which have tensors of the same names and shapes",
                list_text(keys),
                "one",
                "give the layers tensors of different names, and save again",
            )
        for at, number in enumerate(numbers):
            found[number] = f"{_TIED}{keys[min(at, len(keys) - 1)]}."
    _check_tied_copies([layers[number] for number in sorted(layers)], found)
    # A tied layer may leave no file, but its buffers lie in no other place.
    for name in buffers:
        if is_tied(name) and not any(name.startswith(prefix) for prefix in found.values()):
            raise _absent_layer_error(name, "the file of a layer with it", folder)
    return found


def _fits(layer: Layer, tensors: Mapping[str, Shape | None]) -> bool:
    """Return whether a layer's file has all of these names, in these shapes."""
    held = layer.tensors
    return all(name in held and shape in (None, held[name].shape) for name, shape in tensors.items())


def _check_tensors(layer: Layer, tensors: Mapping[str, Shape | None]) -> None:
    for name, shape in tensors.items():
        held = layer.tensors.get(name)
        if held is None or shape not in (None, held.shape):
            raise layer.origin.contradiction(
                f"differs from the model states in {layer.number}.{name}",
                "no such tensor" if held is None else str(list(held.shape)),
                "a tensor" if shape is None else str(list(shape)),
                tensor=f"{layer.number}.{name}",
            )


def _check_tied_copies(layers: Sequence[Layer], prefixes: Mapping[int, str]) -> None:
    """Check that layers under one tied key have equal tensors: a pipeline may tie some of a layer's tensors alone."""
    first: dict[str, Layer] = {}
    for layer in layers:
        other = first.setdefault(prefixes[layer.number], layer)
        for name, tensor in layer.tensors.items():
            if name in other.tensors and _differs(layer, tensor, other, other.tensors[name]):
                full = prefixes[layer.number] + name
                problem = (
                    f"contains other values of {full} than {other.origin.path}: its pipeline ties other tensors alone"
                )
                step = "give each layer a key of its own, or tie the tensor (tied_weight_attr), and save again"
                raise layer.origin.usage(problem, f"two tensors named {full}", "one", step)


def _differs(one: Layer, a: ArchivedTensor, other: Layer, b: ArchivedTensor) -> bool:
    crc32s = set()
    for layer, tensor in ((one, a), (other, b)):
        record = layer.archive.records[tensor.key]
        if not layer.archive.has_checksums or record.nbytes != prod(tensor.shape) * dtype(tensor.dtype).nbytes:
            return False  # a part of a record has no checksum of its own
        crc32s.add(record.crc32)
    return len(crc32s) > 1


def _absent_layer_error(name: str, file: str, folder: str) -> IncompleteError:
    problem = f"{folder} contains no {file}, which holds {name}" if "*" in file else f"no file of {folder} holds {name}"
    return Subject(name, None, folder).incomplete(problem, None, file, _COPY.format("layers"))


def note_absent_layers(layers: Mapping[int, Layer]) -> tuple[tuple[str, str], ...]:
    """Return a note about numbers below the highest that have no file, if there are any."""
    absent = [number for number in range(max(layers, default=0)) if number not in layers]
    if not absent:
        return ()
    text = f"{plural(len(absent), 'layer')} without a file: {numbers_text(absent)}"
    return (("absent-layers", f"{text}. Functions and tied layers leave none; any other file must be copied, too"),)


class PipelineFiles(Struct, frozen=True):
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


def read_pipeline(files: CheckpointFiles, records: Records, agreement: Agreement) -> PipelineFiles:
    """Return the tensors of a pipeline."""
    states = _read_states(files, agreement)
    stages = [_read_partitions(files, stage, records) for stage in range(len(states))]
    layers = {}
    for number, path in sorted(files.layers.items()):
        archive, origin, table = read_table(path, "the layer")
        layers[number] = Layer(origin, archive, check_tensors(table, origin), number)
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
        groups = groups_of_slices(partitions, held) if state.groups is None else state.groups
        # Under the ranks in the run; what an earlier stage has is its tied copy.
        for name, shard in locate_trained(partitions, groups).items():
            trained.setdefault(name, replace(shard, rank=shard.rank + stage * len(partitions.all)))
        notes += check_same_step(files.tag, state.facts, state.origin, partitions.all[0].facts)
    parts = []
    for number, layer in layers.items():
        parts.append(replace(layer, tensors={prefixes[number] + name: t for name, t in layer.tensors.items()}))
    shards, roundings = locate_untrained(parts, trained, records)
    names = dict.fromkeys((*held, *trained))
    whole_state = replace(states[0], buffer_names=tuple(dict.fromkeys(buffers)), frozen={}, shared={})
    modules = Modules(whole_state, shards, {}, tuple(dict.fromkeys(notes)), tuple(names))
    return PipelineFiles(modules, trained, stages[0], len(states), roundings)


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
        raise states[max(states)].origin.contradiction(
            f"belongs to stage {max(states)}, but the pipeline has {num_stages}",
            f"files of stages {numbers_text(states)}",
            f"stages {numbers_text(range(num_stages))}",
            ONE_SAVE,
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
        raise Origin(files.folder).incomplete(
            "lacks files of layers: the optimizer trained tensors that none of them contains",
            f"layers {numbers_text(layers)}, with {held[shape]} tensors of shape {list(shape)}",
            f"{wanted[shape]} tensors of this shape",
            _COPY.format("layers"),
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
                    raise state.origin.contradiction(
                        f"trains {name}, which an earlier stage trains, too",
                        str(list(shape)),
                        f"layers of its own, or a tied layer of equal shape (there: {list(other or ())})",
                        ONE_SAVE,
                        tensor=name,
                    )
                found[name] = shape
    return found


def _absent_stage(files: CheckpointFiles, stage: int, kind: str) -> IncompleteError:
    prefix = "" if kind == "model_states" else "zero_pp_rank_0_"
    name = f"{prefix}mp_rank_{stage:02d}_{kind}.pt"
    return Origin(os.path.join(files.folder, name)).incomplete(
        f"is missing, which stage {stage} wrote",
        f"files of stages {numbers_text(files.models)}" if files.models else "none",
        "files of every stage",
        _COPY.format("stages"),
    )
