"""The plan of a reshard of a whole training state, model and optimizer: it reads metadata alone, and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.engine.planner import make_plan
from xrank.errors import ContradictionError, UsageError, option
from xrank.layout import LayoutMap
from xrank.layout.output_files import OutputTensor, Selection
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.layout.training_state import MASTER, TrainingState, state_name
from xrank.readers.placement import Claim, Claims
from xrank.readers.training_states import read_training_state
from xrank.recipes.decision import read_layouts
from xrank.recipes.options import GatherOptions
from xrank.recipes.recipe_choice import follow_recipe, match_asked_recipe
from xrank.recipes.reshard_plan import Reshard, new_claim
from xrank.recipes.state_targets import Grid, StateTarget, lay_out_target
from xrank.storage.regular_file import Origin
from xrank.words import list_text


class StateChoices(Struct, frozen=True):
    """What a caller asks of a training state's new form."""

    to: StateTarget
    layouts: str | os.PathLike[str] | LayoutMap | None = None
    dp: int | None = None
    tp: int | None = None
    tag: str | None = None
    """Name of the folder with DeepSpeed's files."""
    optimizer: str | None = None
    """``Adam`` or ``AdamW``, for a source that does not record it."""
    recipe: str | os.PathLike[str] | None = None
    part: str | None = None


def plan_state(source: str, options: GatherOptions, choices: StateChoices) -> Reshard:
    """Return the proven plan of a training state in another form; errors as in `reshard_checkpoint`."""
    _check_choices(options, choices)
    state = read_training_state(source, part=choices.part)
    state = _rename(state, choices.recipe)
    state = _name_optimizer(state, choices)
    made = lay_out_target(state, choices.to, grid=_find_grid(choices), tag=choices.tag)
    stored = state.stored
    plan = make_plan(stored, made.files)
    written = {tensor.output.name: tensor for tensor in plan.tensors}
    _check_whole(state, written)
    shapes = {shard.name: shard.shape for shard in stored.shards}
    outputs = tuple(OutputTensor(name, one.output.dtype, shapes[name]) for name, one in written.items())
    cast = {
        name: f"{one.source_dtype} -> {one.output.dtype}"
        for name, one in written.items()
        if one.source_dtype != one.output.dtype
    }
    return Reshard(
        options,
        stored,
        Selection(outputs, {}, (), cast, ()),
        outputs,
        {},
        plan,
        "",
        choices.to,
        tuple(made.companions),
        {},
        (*stored.notes, *made.notes),
    )


def _check_choices(options: GatherOptions, choices: StateChoices) -> None:
    """Refuse choices that a training state, or the target, has no use for."""
    is_grid = any(one is not None for one in (choices.layouts, choices.dp, choices.tp))
    problem = None
    if options.dtype != "keep" or options.dequantize:
        problem = option("dequantize") if options.dequantize else option("dtype"), "a training state keeps its values"
    elif is_grid and choices.to == "deepspeed-universal":
        name = next(name for name in ("layouts", "dp", "tp") if getattr(choices, name) is not None)
        problem = option(name), "DeepSpeed cuts a universal checkpoint while it loads"
    elif choices.layouts is not None and (choices.dp is not None or choices.tp is not None):
        problem = option("dp"), f"{option('layouts')} gives the cuts"
    elif choices.tag is not None and choices.to != "deepspeed-universal":
        problem = option("tag"), "only DeepSpeed's checkpoints have tag folders"
    if problem is not None:
        name, why = problem
        raise UsageError(f"{name} does not go with {option('to', choices.to)}: {why}", next_step=f"leave {name} out")


def _find_grid(choices: StateChoices) -> Grid | None:
    if choices.layouts is None:
        sizes = [1 if size is None else size for size in (choices.dp, choices.tp)]
        return None if choices.dp is None is choices.tp else Grid.of_axes(*sizes)
    layouts = choices.layouts if isinstance(choices.layouts, LayoutMap) else read_layouts(choices.layouts)
    claims = Claims(layouts)

    def find_claim(name: str, num_dims: int) -> Claim:
        claim = new_claim(name, claims)
        if claim is None:
            problem, step = f"{name}: no rule of the layout file gives its layout", f'add a rule for "{name}"'
            raise UsageError(
                problem, tensor=name, got=f"{len(layouts)} rules", want="one for every parameter", next_step=step
            )
        return claim

    return Grid(find_claim)


def _name_optimizer(state: TrainingState, choices: StateChoices) -> TrainingState:
    """Return the state with the optimizer's class; UsageError if it decides the values, and nothing says which."""
    origin = Origin(state.stored.path)
    if state.optimizer is None:
        asked = choices.optimizer or ("AdamW" if all(not g.options.get("weight_decay") for g in state.groups) else None)
        if asked is None and choices.to != "deepspeed-universal":
            got, step = "groups with weight decay, which the two apply in different ways", option("optimizer", "AdamW")
            want, problem = option("optimizer", metavar="Adam|AdamW"), "does not record whether it is of Adam or AdamW"
            raise origin.usage(problem, got, want, f"add {step}, or Adam, as the training had it")
        return replace(state, optimizer=asked)
    if choices.optimizer not in (None, state.optimizer):
        problem, step = (
            f"is a state of {state.optimizer}, not of {choices.optimizer}",
            f"leave {option('optimizer')} out",
        )
        raise origin.contradiction(problem, state.optimizer, choices.optimizer, step)
    return state


def _check_whole(state: TrainingState, written: Collection[str]) -> None:
    """Check that each tensor of the state is written, but for parameters whose masters are, or which are tied."""
    masters = {name for name, kinds in state.states.items() if MASTER in kinds}
    masters |= {name for name, target in state.stored.aliases.items() if target in masters or target in written}
    names = (shard.name for shard in state.stored.shards if prod(shard.shape))  # no bytes are copied of empty ones
    lost = [name for name in names if name not in written and name not in masters]
    if lost:
        problem, step = f"the target has no place for {list_text(lost)}", f"use {option('to', 'dcp')}"
        raise Origin(state.stored.path).usage(problem, "a tensor", "all tensors of the state", step, tensor=lost[0])


# ---- recipes


def _rename(state: TrainingState, recipe: str | os.PathLike[str] | None) -> TrainingState:
    """Return the state under a recipe's names; moments are split, fused and permuted as their parameters are."""
    stored = state.stored
    shards = {shard.name: shard for shard in stored.shards}
    moments = {name for kinds in state.states.values() for name in kinds.values()}
    model = [shard for shard in stored.shards if shard.name not in moments and shard.name not in state.others]
    matched = match_asked_recipe(replace(stored, shards=tuple(model)), recipe)
    if matched is None:
        return state

    def follow(tensors: Sequence[StoredShard]) -> StoredModel:
        return follow_recipe(replace(stored, shards=tuple(tensors)), matched, stored.config)

    # Each tensor as one record of its own shows which tensors become which.
    probe = follow([StoredShard.from_record(s.name, s.dtype, s.shape, number) for number, s in enumerate(model)])
    sources = {s.name: [model[number].name for number in dict.fromkeys(s.record.tolist())] for s in probe.shards}
    renamed = follow(model)
    trained = {new for new, olds in sources.items() if any(old in state.states for old in olds)}
    changed = [s.name for s in renamed.shards if s.name in trained and (s.factor, s.added) != (1.0, 0)]
    if changed:
        problem = f"the recipe {renamed.recipe} multiplies {list_text(changed)}, or adds to it; moments cannot follow"
        want, step = "a recipe that names, splits and permutes", f"keep the names with {option('recipe', 'none')}"
        raise Origin(stored.path).usage(problem, "a factor or an addition", want, step, tensor=changed[0])
    found: list[StoredShard] = [*renamed.shards, *(shards[name] for name in state.others)]
    states: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys(kind for kinds in state.states.values() for kind in kinds):
        of = {name: shards[kinds[kind]] for name, kinds in state.states.items() if kind in kinds}
        # A parameter that has none stands for itself, and is not taken.
        for shard in follow([replace(of.get(one.name, one), name=one.name) for one in model]).shards:
            if _agree(shard.name, sources[shard.name], lambda old: old in of, "was stepped"):  # noqa: B023
                states.setdefault(shard.name, {})[kind] = name = state_name(shard.name, kind)
                found.append(replace(shard, name=name))
    steps = {new: _agree(new, sources[new], state.steps.get, "number of steps") for new in states}
    group_of = {name: number for number, group in enumerate(state.groups) for name in group.parameters}
    grouped: dict[int | None, list[str]] = {}
    for new, olds in sources.items():
        grouped.setdefault(_agree(new, olds, group_of.get, "group of the optimizer"), []).append(new)
    groups = tuple(replace(g, parameters=tuple(grouped.get(n, ()))) for n, g in enumerate(state.groups))
    return replace(state, stored=replace(renamed, shards=tuple(found)), states=states, steps=steps, groups=groups)


def _agree(new: str, olds: Sequence[str], find: Callable[[str], Any], what: str) -> Any:
    """Return a fact that all parts of a tensor must have in common."""
    facts = {old: find(old) for old in olds}
    if len(set(facts.values())) > 1:
        raise ContradictionError(
            f"{new}: the recipe makes it from tensors with different values of {what}",
            tensor=new,
            got=", ".join(f"{old}: {fact}" for old, fact in facts.items()),
            want="the same of each",
            next_step=f"keep the names with {option('recipe', 'none')}",
        )
    return next(iter(facts.values()), None)
