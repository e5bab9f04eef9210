"""Convert a model between its tensors in memory and in files, by transformers' own table; no bytes are moved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from xrank.errors import LayoutError, option
from xrank.plan.source import StoredModel, StoredShard
from xrank.recipes.conversion_names import Group, NamePass
from xrank.recipes.conversion_table import Side, Transform
from xrank.recipes.tensor_operations import Placed, Shape, place_input, run_operations


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """A model in its other form."""

    model: StoredModel
    renamed: Mapping[str, str]
    """Old name -> new name, of tensors that are only renamed."""


def find_used(transforms: Sequence[Transform], file_names: Iterable[str], module_names: Collection[str]) -> set[int]:
    """Return the numbers of the transforms that loading these files uses, as ``from_pretrained`` remembers them.

    Args:
        transforms: the model's transforms.
        file_names: names in the files.
        module_names: names in memory.
    """
    names = NamePass(transforms, is_save=False)
    names.find_groups(file_names, module_names, _prefix_of(transforms))
    return names.used


def is_loaded_as(transforms: Sequence[Transform], file_names: Iterable[str], names: Collection[str]) -> bool:
    """Return whether loading files with some names gives tensors that are all among `names`."""
    groups = NamePass(transforms, is_save=False).find_groups(file_names, names, _prefix_of(transforms))
    return all(group.name.replace("*", "0") in names for group in groups)


def convert_model(
    source: StoredModel,
    transforms: Sequence[Transform],
    config: Mapping[str, Any],
    *,
    is_save: bool,
    module_shapes: Mapping[str, Shape | None] | None = None,
) -> Converted:
    """Return the model with the names and tensors that saving (or loading) gives it.

    Args:
        source: the model as it is; each tensor whole.
        transforms: the transforms to apply, in the order of loading.
        config: the model's config.json.
        is_save: whether to go from memory to files.
        module_shapes: when loading, name in the module -> global shape, or None where it is not known; None: no module
            is there.

    Raises:
        LayoutError: a converter does not fit the tensors, or two tensors would have one name.
        ContradictionError: tensors that become one differ in type.
    """
    names = NamePass(transforms, is_save=is_save)
    shards = {shard.name: shard for shard in source.shards}
    wanted = module_shapes or {}
    groups = names.find_groups(shards, wanted, _prefix_of(transforms))
    made: dict[str, StoredShard] = {}
    renamed: dict[str, str] = {}
    run = _GroupRun(config, is_save, wanted)
    for group in groups:
        labels = [name for each in group.inputs.values() for name in each]
        try:
            if group.side is None:
                old = _find_single(group.name, labels)
                renamed[old] = group.name
                _add(made, replace(shards[old], name=group.name))
                continue
            _check_indices(group)
            placed = run.convert(group, group.side, shards)
            for name, value in _name_outputs(group.name, placed).items():
                _add(made, _make_shard(names.finish_name(name), value, [shards[label] for label in labels]))
        except LayoutError as error:
            error.about(tensor=labels[0], file=source.path)
            raise
    at = {name: number for number, name in enumerate(shards)}
    order = sorted(made, key=lambda name: at.get(name, len(at)))
    aliases = {renamed[a]: renamed[b] for a, b in source.aliases.items() if a in renamed and b in renamed}
    model = replace(source, shards=tuple(made[name] for name in order), aliases=aliases)
    return Converted(model, renamed)


def _prefix_of(transforms: Sequence[Transform]) -> str:
    return transforms[0].prefix if transforms else ""


def _find_single(group_name: str, names: Sequence[str]) -> str:
    """Return the only name of a group that is renamed."""
    if len(names) > 1:
        raise _collision(group_name, f"{names[0]} and {names[1]}")
    return names[0]


def _collision(name: str, got: str) -> LayoutError:
    return LayoutError(
        f"two tensors would become {name}",
        tensor=name,
        got=got,
        want="one tensor of a name",
        next_step=f"keep the names as they are with {option('recipe', 'none')}",
    )


def _add(made: dict[str, StoredShard], shard: StoredShard) -> None:
    if shard.name in made:
        raise _collision(shard.name, "a tensor of that name, and a converted one")
    made[shard.name] = shard


def _check_indices(group: Group) -> None:
    """Refuse lists of tensors with a gap: transformers would close it."""
    for pattern, names in group.inputs.items():
        if "*" not in pattern or len(names) < 2:
            continue
        parts = [name.split(".") for name in names]
        at = next((i for i, (a, b) in enumerate(zip(parts[0], parts[-1], strict=True)) if a != b), 0)
        found = [each[at] for each in parts]
        if found != [str(index) for index in range(len(names))]:
            raise LayoutError(
                f"{names[-1]}: of such tensors some are missing",
                tensor=names[-1],
                got=f"{len(names)} tensors with the numbers {found[0]} to {found[-1]}",
                want="each number once, from 0",
                next_step="check that the checkpoint is whole",
            )


@dataclass(frozen=True, slots=True)
class _GroupRun:
    """The converters of a model on groups of its tensors; equal layers are computed once."""

    config: Mapping[str, Any]
    is_save: bool
    module_shapes: Mapping[str, Shape | None]
    known: dict[tuple[Any, ...], dict[str, Placed]] = field(default_factory=dict)

    def convert(self, group: Group, side: Side, shards: Mapping[str, StoredShard]) -> dict[str, Placed]:
        """Return the outputs, whose parts name inputs by number."""
        shapes = tuple((p, tuple(shards[name].shape for name in names)) for p, names in group.inputs.items())
        # As transformers finds the module's tensors (core_model_loading.py: Split, Transpose).
        wanted = {to: self.module_shapes.get(group.name.replace(side.targets[0], to)) for to in side.targets}
        key = (side, shapes, *wanted.values())
        if key not in self.known:
            number = count()
            inputs = {p: [place_input(str(next(number)), shape) for shape in each] for p, each in shapes}
            self.known[key] = run_operations(side, inputs, self.config, is_save=self.is_save, module_shapes=wanted)
        return self.known[key]


def _name_outputs(group_name: str, placed: Mapping[str, Placed]) -> dict[str, Placed]:
    """Return outputs under whole names: all around the first target stays as in the group's name."""
    name = group_name.replace("*.", "0.")
    target = next((each for each in placed if each in name), None)
    if target is None:
        return dict(placed)
    start, _, end = name.partition(target)
    return {start + each + end: value for each, value in placed.items()}


def _make_shard(name: str, value: Placed, sources: Sequence[StoredShard]) -> StoredShard:
    parts: dict[str, list[Any]] = {}
    for label, nest in value.parts:
        parts.setdefault(label, []).append(nest)
    from xrank.recipes.rewriting import join_shards, move_shard

    return join_shards(
        name, [move_shard(sources[int(label)], name, value.shape, *each) for label, each in parts.items()]
    )
