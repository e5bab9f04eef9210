"""The states of Adam and AdamW as frameworks save them: checked for each parameter; other optimizers are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from isal import isal_zlib
from msgspec.structs import replace

from xrank.dtypes import dtype, numpy_dtype
from xrank.errors import UsageError
from xrank.formats.pickles import InertRecord
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, walk_leaves
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.layout.training_state import MASTER, MOMENTS, LeftOut, ParameterGroup, TrainingState
from xrank.readers.records import Subject
from xrank.storage.regular_file import Origin, RegularFile, open_regular, quote
from xrank.words import list_text

STEP = "step"
_KINDS = frozenset({*MOMENTS, MASTER, STEP})
_OF_OTHERS = {
    key: optimizer
    for optimizer, keys in {
        "SGD or Muon": "momentum_buffer momentum",
        "Muon": "ns_steps",
        "Adafactor": "exp_avg_sq_row exp_avg_sq_col row_var col_var beta2_decay scale_parameter",
        "an 8-bit optimizer of bitsandbytes": "state1 state2",
        "NAdam": "mu_product momentum_decay",
        "RMSprop or Adadelta": "square_avg alpha rho",
        "Adagrad": "sum lr_decay",
        "LAMB": "max_coeff grad_averaging",
        "Adamax": "exp_inf",
        "Adan": "exp_avg_diff",
        "Prodigy": "d_coef",
    }.items()
    for key in keys.split()
}
"""Kind of state, or option of a group, that Adam does not have -> optimizer that has it."""


def foreign_error(origin: Origin, got: str, optimizer: str, parameter: str | None = None) -> UsageError:
    """Return the error for the state of another optimizer than Adam and AdamW."""
    step = "continue in the framework that saved it; xrank gather writes only the model"
    problem = f"is the state of {optimizer}, which is not converted"
    return origin.usage(problem, got, "a state of Adam or AdamW", step, tensor=parameter)


def refuse_other_kinds(kinds: Mapping[str, Iterable[str]], origin: Origin) -> None:
    """Refuse states that Adam does not keep; `kinds` has the kinds of each parameter."""
    for parameter, own in kinds.items():
        for kind in own:
            if kind not in _KINDS:
                who = _OF_OTHERS.get(kind, "an optimizer other than Adam and AdamW")
                raise foreign_error(origin, f"{quote(kind)[1:-1]} of {quote(parameter)[1:-1]}", who, parameter)


def make_group(parameters: object, options: Mapping[Any, object], origin: Origin) -> ParameterGroup:
    """Return a group of parameters, of Adam's by its options."""
    if not isinstance(parameters, (list, tuple)):
        raise origin.corrupt("a group of the optimizer does not list its parameters", type(parameters).__name__)
    names = [name for name in parameters if isinstance(name, str)]
    if len(names) < len(parameters):
        raise origin.usage(
            "the optimizer numbers its parameters, so their names are unknown",
            f"params {quote(str(parameters[:4]))[1:-1]}",
            "names",
            "save the result of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
        )
    for key in options:
        if key in _OF_OTHERS:
            raise foreign_error(origin, f"the option {key}", _OF_OTHERS[str(key)])
    betas, lacking = options.get("betas"), next((key for key in ("lr", "betas", "eps") if key not in options), None)
    if lacking or not isinstance(betas, (list, tuple)) or len(betas) != 2:
        got = f"no option {lacking}" if lacking else f"betas {quote(str(betas))[1:-1]}"
        raise foreign_error(origin, got, "an optimizer other than Adam and AdamW")
    # torch/optim/radam.py has Adam's moments, and no amsgrad; Adam and AdamW have both options.
    if "decoupled_weight_decay" in options and "amsgrad" not in options:
        raise foreign_error(origin, "decoupled_weight_decay without amsgrad", "RAdam")
    if problem := why_not_plain(options):
        raise origin.usage("the optimizer has an option that is not a plain value", problem, "numbers, texts")
    return ParameterGroup(tuple(names), {str(key): value for key, value in options.items()})


def why_not_plain(value: object) -> str | None:
    """Return None if a value of an archive is of plain values alone; otherwise what it contains."""
    for keys, leaf in walk_leaves(value):
        if isinstance(leaf, (InertRecord, ArchivedTensor)):
            what = "a tensor" if isinstance(leaf, ArchivedTensor) else f"an object of {leaf.module}.{leaf.name}"
            return f"{'.'.join(map(str, keys))} is {what}".removeprefix(" ")
    return None


def add_shards(
    model: StoredModel, files: Sequence[SourceFile], records: RecordTable, shards: Sequence[StoredShard]
) -> StoredModel:
    """Return a model with the tensors of further files and records besides its own."""
    shifted = (replace(shard, record=shard.record + len(model.records)) for shard in shards)
    nbytes = int(records.nbytes.sum())
    return replace(
        model,
        files=(*model.files, *files),
        records=model.records.join(records, len(model.files)),
        shards=(*model.shards, *shifted),
        nbytes=model.nbytes + nbytes,
        skipped_nbytes=max(model.skipped_nbytes - nbytes, 0),
        # A gather's notes on what it leaves out.
        notes=tuple(note for note in model.notes if note[0] not in ("left-out", "byte-items")),
    )


def read_numbers(files: Sequence[SourceFile], records: RecordTable, shards: Sequence[StoredShard]) -> dict[str, float]:
    """Return the number in each tensor of one element."""
    found: dict[str, float] = {}
    placed = [(int(records.file[shard.record[0]]), shard) for shard in shards if len(shard.record)]
    for number, mine in groupby(sorted(placed, key=lambda each: each[0]), key=lambda each: each[0]):
        with open_regular(files[number].path) as file:
            for _, shard in mine:
                row, at = int(shard.record[0]), int(shard.nests.x[0])
                place = int(records.offset[row]), int(records.nbytes[row])
                found[shard.name] = _read_number(file, place, int(records.crc32[row]), shard.dtype, at)
    return found


def read_number(archive: TorchArchive, value: object) -> object:
    """Return a value of an archive, or in place of a tensor of one element the number in it."""
    if not isinstance(value, ArchivedTensor):
        return value
    record = archive.records[value.key]
    crc32 = record.crc32 if archive.has_checksums else NO_CHECKSUM
    with open_regular(archive.path) as file:
        return _read_number(file, (record.offset, record.nbytes), crc32, value.dtype, value.storage_offset)


def _read_number(file: RegularFile, place: tuple[int, int], crc32: int, element: str, at: int) -> float:
    kind, data = numpy_dtype(element), file.read(*place)
    if crc32 not in (NO_CHECKSUM, isal_zlib.crc32(data)):
        raise file.origin.corrupt(f"a number at byte {place[0]:,} fails its checksum")
    return float(np.frombuffer(data[at * kind.itemsize : (at + 1) * kind.itemsize], kind)[0])


def check_step(value: object, parameter: str, origin: Origin) -> float:
    """Return a parameter's number of steps."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 53 or value % 1:
        problem = f"the step of {parameter} is not a count"
        raise origin.corrupt(problem, quote(str(value)), "a whole number", tensor=parameter)
    return float(value)


def make_training_state(
    stored: StoredModel,
    states: Mapping[str, Mapping[str, str]],
    steps: Mapping[str, float],
    groups: Sequence[ParameterGroup],
    origin: Origin,
    *,
    optimizer: str | None = None,
    values: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
    left_out: Sequence[LeftOut] = (),
) -> TrainingState:
    """Return a training state after the check of each parameter's tensors, step and group.

    Errors as `xrank.readers.training_states` has them.
    """
    if not states:
        raise origin.usage("the optimizer has taken no step", "no moments", "a state after the first step")
    shards = {shard.name: shard for shard in stored.shards}
    group_of: dict[str, ParameterGroup] = {}
    for group in groups:
        for name in group.parameters:
            if name not in shards:
                problem = f"the optimizer trains {quote(name)[1:-1]}, which is not in the model"
                raise origin.contradiction(problem, name, "a tensor of the model", tensor=name)
            if group_of.setdefault(name, group) is not group:
                raise origin.corrupt(f"{quote(name)[1:-1]} is in two groups of the optimizer", tensor=name)
    for name, kinds in states.items():
        if name not in group_of:
            problem = f"no group of the optimizer has {quote(name)[1:-1]}"
            raise origin.contradiction(problem, list_text(kinds), "a group with the parameter's options", tensor=name)
        wanted = {*MOMENTS[: 3 if group_of[name].options.get("amsgrad") else 2]}
        absent = sorted(wanted - kinds.keys())
        absent += [STEP] if name not in steps else []
        if absent:
            raise Subject(name, None, origin.path).incomplete(
                f"the optimizer's state lacks {list_text(absent)}",
                list_text(kinds),
                list_text([*sorted(wanted), STEP]),
                "use a checkpoint with a finished save",
            )
        for kind, own in kinds.items():
            if shards[own].shape != shards[name].shape:
                problem, want = f"{kind} of {name} does not have the parameter's shape", str(list(shards[name].shape))
                raise origin.contradiction(problem, str(list(shards[own].shape)), want, tensor=name)
            if not dtype(shards[own].dtype).is_float:
                got = f"{kind} of {name} in {shards[own].dtype}"
                raise foreign_error(origin, got, "an optimizer with quantized moments", name)
    decoupled = {group.options.get("decoupled_weight_decay") for group in groups}
    if optimizer is None and len(decoupled) == 1:
        optimizer = {True: "AdamW", False: "Adam"}.get(decoupled.pop())  # type: ignore[arg-type]
    steps = {name: steps[name] for name in states}
    return TrainingState(stored, optimizer, states, steps, tuple(groups), values or {}, tuple(others), tuple(left_out))
