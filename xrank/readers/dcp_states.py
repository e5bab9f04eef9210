"""Reads the training states of torch DCP: model and optimizer in one checkpoint, or in the two folders of accelerate.

torch.distributed.checkpoint.state_dict names the optimizer's tensors ``state.<parameter>.exp_avg``, behind the keys
that lead to it. Options are ``param_groups.0.lr``; flattened, which torchtitan does, ``param_groups.<parameter>.lr``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import XrankError
from xrank.formats.dcp_metadata import DcpMetadata
from xrank.formats.torch_archive import read_archive_in
from xrank.layout.stored_model import NO_CHECKSUM, StoredModel
from xrank.layout.training_state import LeftOut, ParameterGroup, TrainingState, state_name
from xrank.readers.adam_states import (
    STEP,
    add_shards,
    check_step,
    foreign_error,
    make_group,
    make_training_state,
    read_numbers,
    refuse_other_kinds,
    why_not_plain,
)
from xrank.readers.base import Hints
from xrank.readers.dcp import MODEL_FOLDER, DcpReader, locate, read_folder
from xrank.readers.records import compute_repeated_crc32
from xrank.storage import places
from xrank.storage.regular_file import Origin, open_regular, quote
from xrank.words import list_text

_STATE, _GROUPS, _PARAMETERS = "state", "param_groups", "params"
_OF_RANKS = {
    **dict.fromkeys(("rng", "rng_state", "rng_states", "cuda_rng_state", "random_states"), "random states of ranks"),
    **dict.fromkeys(("dataloader", "sampler"), "positions of the ranks' data loaders"),
}
"""Key of values that other ranks cannot take -> what they are."""


def read_dcp_state(path: str, hints: Hints) -> TrainingState:
    """Return the training state in a folder of torch DCP; errors as `xrank.readers.training_states` has them."""
    metadata = read_folder(path)
    model, part = DcpReader().read_part(path, metadata, hints)
    own, folder = {*part.tensors.values(), *part.values.values()}, path
    left_out = [LeftOut(name, "a value next to the model's tensors") for name in part.values.values()]
    around, name = os.path.split(places.absolute(path))
    if MODEL_FOLDER.fullmatch(name):
        folder, own = os.path.join(around, name.replace("pytorch_model_fsdp", "optimizer")), set()
        if not places.is_folder(folder):
            want, step = "the optimizer's folder next to the model's", "copy it from where it was saved"
            raise Origin(folder).incomplete("is missing", list_text(places.list_names(around)), want, step)
        metadata = read_folder(folder)
    saved, origin = _find_optimizer(metadata, own), Origin(metadata.path)
    of_ranks = {name: _OF_RANKS[root] for name in saved.others if (root := name.split(".")[0]) in _OF_RANKS}
    left_out += [LeftOut(name, why) for name, why in of_ranks.items()]
    others = [name for name in saved.others if name not in of_ranks]
    named = {state_name(*key): flat for key, flat in saved.states.items()}
    named |= {flat: flat for flat in (*saved.options, *others)}
    tensors = {name: metadata.tensors[flat] for name, flat in named.items() if flat in metadata.tensors}
    pieces = locate(folder, metadata, tensors)
    numbers = {state_name(*key) for key in saved.states if key[1] == STEP} | saved.options.keys()
    plain: dict[str, Any] = _read_values(folder, metadata, named)
    plain |= read_numbers(pieces.files, pieces.records, [shard for shard in pieces.shards if shard.name in numbers])
    steps: dict[str, float] = {}
    states: dict[str, dict[str, str]] = {}
    for parameter, kind in saved.states:
        name = state_name(parameter, kind)
        if kind == STEP:
            steps[parameter] = check_step(plain.get(name), parameter, origin)
        else:
            states.setdefault(parameter, {})[kind] = name
    groups = _make_groups({keys: plain[flat] for flat, keys in saved.options.items()}, origin)
    objects = {flat: problem for flat in others if flat in plain and (problem := why_not_plain(plain[flat]))}
    left_out += [LeftOut(flat, problem) for flat, problem in objects.items()]
    kept = {_keys(metadata, flat): plain[flat] for flat in others if flat in plain and flat not in objects}
    model = replace(model, aliases=_find_ties(model, states))
    return make_training_state(
        add_shards(model, pieces.files, pieces.records, [s for s in pieces.shards if s.name not in numbers]),
        states,
        steps,
        groups,
        origin,
        values=_nest(kept, origin),
        others=[flat for flat in others if flat in metadata.tensors],
        left_out=left_out,
    )


def _find_ties(model: StoredModel, trained: Collection[str]) -> dict[str, str]:
    """Return the names of matrices that checksums show to be trained ones: torch saves a tied tensor under each name.

    Training leaves no two matrices equal by chance, but it may leave zeros.
    """
    owners: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for shard in sorted(model.shards, key=lambda shard: shard.name not in trained):
        rows = shard.record[np.argsort(shard.nests.y, kind="stable")]
        crc32, nbytes = model.records.crc32[rows], model.records.nbytes[rows]
        key = (shard.dtype, shard.shape, nbytes.tobytes(), crc32.tobytes())
        if len(shard.shape) < 2 or not len(rows) or (crc32 == NO_CHECKSUM).any():
            continue
        if shard.name in trained:
            owners.setdefault(key, shard.name)
        elif key in owners and compute_repeated_crc32(b"\0", int(nbytes[0])) != crc32[0]:
            found[shard.name] = owners[key]
    return found


class _SavedOptimizer(Struct, frozen=True):
    """The flat names of what is not the model's."""

    states: Mapping[tuple[str, str], str]
    """(Parameter, kind) of each tensor, or step that is none."""
    options: Mapping[str, tuple[str | int, ...]]
    """Flat name -> keys below ``param_groups``."""
    others: Sequence[str]


def _find_optimizer(metadata: DcpMetadata, own: set[str]) -> _SavedOptimizer:
    origin = Origin(metadata.path)
    names = [name for name in (*metadata.tensors, *metadata.byte_items) if name not in own]
    # By text: the same keys are joined in names, whether a planner or the optimizer's state flattened them.
    split = [name.split(".") for name in names]
    roots = {tuple(keys[: keys.index(_GROUPS)]) for keys in split if _GROUPS in keys}
    if len(roots) != 1:
        found = sorted(".".join(root) or "(top)" for root in roots)
        problem = "contains more than one optimizer" if roots else "contains no optimizer with its groups"
        step = "give a checkpoint of one optimizer" if roots else "give the checkpoint that has the optimizer, too"
        raise origin.usage(problem, list_text(map(quote, found), empty="no param_groups"), "one optimizer", step)
    (root,) = roots
    above = "".join(f"{key}." for key in root)
    states, options, others = dict[tuple[str, str], str](), dict[str, tuple[str | int, ...]](), list[str]()
    for name in names:
        rest = name.removeprefix(above) if name.startswith(above) else ""
        parameter, _, kind = rest.removeprefix(f"{_STATE}.").rpartition(".")
        if rest == _GROUPS or rest.startswith(f"{_GROUPS}."):
            keys = _keys(metadata, name)
            # Nested keys go on after `param_groups`; flattened ones have the parameter's name in the same key.
            options[name] = keys[keys.index(_GROUPS) + 1 :] if _GROUPS in keys else (rest.removeprefix(f"{_GROUPS}."),)
        elif rest.startswith(f"{_STATE}.") and parameter:
            states[parameter, kind] = name
        else:
            others.append(name)
    for (parameter, kind), name in states.items():
        refuse_other_kinds({parameter: [kind]}, origin)
        if kind != STEP and name not in metadata.tensors:
            got = f"{quote(name)[1:-1]}, pickled whole"
            raise foreign_error(origin, got, "an optimizer with quantized moments", parameter)
    return _SavedOptimizer(states, options, others)


def _keys(metadata: DcpMetadata, name: str) -> tuple[str | int, ...]:
    """Return the keys that lead to a flat name, as its planner recorded them, or else by its dots."""
    if metadata.paths is not None:
        return metadata.paths[name]
    return tuple(int(key) if key.isdecimal() else key for key in name.split("."))


def _read_values(folder: str, metadata: DcpMetadata, named: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that are not tensors; `named` has their flat names."""
    by_file: dict[int, list[tuple[int, int, str]]] = {}
    for name, flat in named.items():
        if flat in metadata.byte_items:
            number, start, nbytes = metadata.byte_items[flat]
            by_file.setdefault(number, []).append((start, nbytes, name))
    found: dict[str, Any] = {}
    known: dict[bytes | str, Any] = {}  # a flattened optimizer repeats each option for each parameter
    for number, items in by_file.items():
        with open_regular(os.path.join(folder, metadata.files[number])) as file:
            for start, nbytes, name in sorted(items):
                try:
                    key = file.read(start, nbytes) if nbytes < 1 << 16 else name
                    if key not in known:
                        known[key] = read_archive_in(file, start=start, nbytes=nbytes).value
                    found[name] = known[key]
                except XrankError as error:
                    error.about(f"the item of {quote(name)[1:-1]} at byte {start:,}")
                    raise
    return found


def _nest(values: Mapping[tuple[str | int, ...], Any], origin: Origin) -> dict[Any, Any]:
    """Return values under their keys as nested dicts, and lists where all keys are numbers."""
    top: dict[Any, Any] = {}
    for keys, value in values.items():
        here = top
        for number, key in enumerate(keys[:-1]):
            here = here.setdefault(key, {})
            if keys[: number + 1] in values:
                raise origin.corrupt(f"{'.'.join(map(str, keys))} lies in a value that is not a dict")
        here[keys[-1]] = value
    return {key: _listed(value) for key, value in top.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(each) for key, each in value.items()}
    if inner and set(inner) == set(range(len(inner))):
        return [inner[number] for number in range(len(inner))]
    return inner


def _make_groups(options: Mapping[tuple[str | int, ...], Any], origin: Origin) -> list[ParameterGroup]:
    nested = options.get(())
    if nested is None and any(isinstance(keys[0], int) for keys in options):
        nested = _listed(_nest(options, origin))
    if nested is not None:
        if not isinstance(nested, list) or not all(isinstance(group, dict) for group in nested):
            raise origin.corrupt("the optimizer's groups are not a list of dicts", type(nested).__name__)
        return [
            make_group(group.get(_PARAMETERS), {k: v for k, v in group.items() if k != _PARAMETERS}, origin)
            for group in nested
        ]
    # Flattened, every parameter has its own copy of its group's options.
    own: dict[str, dict[str, Any]] = {}
    for keys, value in options.items():
        parameter, _, key = ".".join(map(str, keys)).rpartition(".")
        own.setdefault(parameter, {})[key] = value
    alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for parameter, group in own.items():
        alike.setdefault(repr(sorted(group.items())), ([], group))[0].append(parameter)
    return [make_group(names, group, origin) for names, group in alike.values()]
