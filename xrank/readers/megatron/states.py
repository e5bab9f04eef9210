"""Reads the training states in Megatron-core's distributed checkpoints, if each moment has its parameter's shape.

The optimizer's tensors are ``optimizer.state.exp_avg.<parameter>`` and so on, with fp32 weights (``param`` or
``fp32_param``); options and steps are in ``common.pt`` (megatron/core/optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from xrank.formats.torch_archive import read_archive
from xrank.layout.stored_model import StoredModel
from xrank.layout.training_state import MASTER, LeftOut, TrainingState, state_name
from xrank.readers.adam_states import (
    STEP,
    add_shards,
    check_step,
    make_group,
    make_training_state,
    read_number,
    refuse_other_kinds,
    why_not_plain,
)
from xrank.readers.base import Hints
from xrank.readers.dcp import locate
from xrank.readers.megatron.dist import MegatronDistReader
from xrank.storage.regular_file import Origin, quote
from xrank.words import plural

_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
_OPTIMIZER = re.compile(r"(optimizer|chained_\d+|layer_wise_optimizer_\d+)[./].*")
_STACKED = re.compile(r".*\blayers\.(?!\d)", re.ASCII)
"""Start of the names whose tensors have a leading dim for layers."""
_NOT_OURS = frozenset({"optimizer", "args", "checkpoint_version"})
# megatron/training/checkpointing.py: _build_sharded_state_dict_metadata.
_OPTION = "save with --dist-ckpt-optim-fully-reshardable set, and convert that"


def read_megatron_state(path: str, hints: Hints) -> TrainingState:
    """Return the training state in a checkpoint; errors as `xrank.readers.training_states` has them."""
    model, metadata = MegatronDistReader().read_all(path, hints)
    folder, origin = os.path.dirname(metadata.path), Origin(metadata.path)
    names = {shard.name for shard in model.shards}
    states: dict[str, dict[str, str]] = {}
    flat: dict[str, str] = {}
    for name in metadata.tensors:
        found = _STATE.fullmatch(name)
        if found is None and _OPTIMIZER.fullmatch(name):
            what = "holds several optimizers" if not name.startswith("optimizer.") else "holds buckets of moments"
            want = "one optimizer, with a tensor of each moment of each parameter"
            raise origin.usage(f"{what}, which are not converted", quote(name), want, _OPTION)
        if found is not None:
            kind = MASTER if found[1] == "param" else found[1]
            parameter = found[2] if found[2] in names else found[2].removeprefix("module.")
            states.setdefault(parameter, {})[kind] = state_name(parameter, kind)
            flat[state_name(parameter, kind)] = name
    refuse_other_kinds(states, origin)
    pieces = locate(folder, metadata, {own: metadata.tensors[name] for own, name in flat.items()})
    archive = read_archive(os.path.join(folder, "common.pt"))
    common, where = archive.value, Origin(archive.path)
    held: Any = common.get("optimizer") if isinstance(common, dict) else None
    # A distributed or mixed-precision optimizer holds torch's; an fp32 one has its keys.
    held = held.get("optimizer", held) if isinstance(held, dict) else None
    listed = held.get("param_groups") if isinstance(held, dict) else None
    if not isinstance(common, dict) or not isinstance(listed, list) or not all(isinstance(g, dict) for g in listed):
        raise where.usage("contains no optimizer with its groups", None, "optimizer.param_groups", _OPTION)
    counted = held["state"].get("common_step") if isinstance(held.get("state"), dict) else None
    steps: dict[str, float] = {}
    groups = []
    for own, group in zip(_divide(listed, states, model, where), listed, strict=True):
        step = read_number(archive, group.get(STEP, counted))
        options = {key: value for key, value in group.items() if key not in (STEP, "params")}
        groups.append(make_group(own, options, where))
        steps |= {name: check_step(step, name, where) for name in own if step is not None}
    done, scaled = max(steps.values(), default=0), "grad_scaler" in common["optimizer"]
    if steps and model.step is not None and (done > model.step or (done < model.step and not scaled)):
        problem, want = "belongs to a different step than the optimizer", f"{done:.0f} steps of Adam"
        raise where.contradiction(problem, f"iteration {model.step}", want)
    ours = {key: value for key, value in common.items() if key not in _NOT_OURS}
    objects = {key: why for key, value in ours.items() if (why := why_not_plain(value))}
    left_out = [LeftOut(*each) for each in objects.items()]
    left_out += [LeftOut(name, "an object of ranks") for name in metadata.byte_items if "_extra_state" not in name]
    stored = add_shards(model, pieces.files, pieces.records, pieces.shards)
    if len(groups) > 1:
        text = "which group has which parameter is not recorded: biases and vectors are taken to be those without decay"
        stored = replace(stored, notes=(*stored.notes, ("assumed-groups", text)))
    values = {key: value for key, value in ours.items() if key not in objects}
    return make_training_state(stored, states, steps, groups, origin, values=values, left_out=left_out)


def _divide(
    groups: Sequence[Mapping[str, Any]], states: Mapping[str, object], model: StoredModel, origin: Origin
) -> list[list[str]]:
    """Return the parameters of each group, by the rule of megatron/core/optimizer (get_standard_config_overrides)."""
    if len(groups) == 1:
        return [[*states]]
    decays = [group.get("wd_mult") for group in groups]
    alike = [{k: v for k, v in group.items() if k not in ("wd_mult", "weight_decay")} for group in groups]
    if sorted(decays, key=repr) != [0.0, 1.0] or alike[0] != alike[1]:
        problem, step = "does not record which parameters are in which group", "train with one learning rate for all"
        raise origin.usage(problem, plural(len(groups), "group"), "two, with and without weight decay", step)
    found: dict[float, list[str]] = {0.0: [], 1.0: []}
    keeps_norms = bool((model.args or {}).get("apply_wd_to_qk_layernorm"))
    for shard in model.shards:
        num_dims = len(shard.shape) - (_STACKED.match(shard.name) is not None)
        is_norm = re.search(r"[qk]_layernorm\.", shard.name) is not None
        is_plain = (num_dims == 1 or shard.name.endswith(".bias")) and not (keeps_norms and is_norm)
        if shard.name in states:
            found[0.0 if is_plain else 1.0].append(shard.name)
    return [found[float(each)] for each in decays if each is not None]
