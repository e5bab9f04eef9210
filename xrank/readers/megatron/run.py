"""A run of Megatron-LM: its arguments and sizes, its folder, and the places of ranks, stages and layers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct

from xrank.errors import UnsafeError
from xrank.formats.pickles import InertRecord, inert_error
from xrank.storage import places
from xrank.storage.regular_file import Origin, open_regular, quote

_MAX_DEPTH = 8


class ParallelSizes(Struct, frozen=True):
    """Number of parts into which the run cut its model, by dimension; 1 if its arguments do not record it."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Number of chunks of layers on each pipeline stage."""
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    world: int | None = None

    def __str__(self) -> str:
        named = {
            "TP": self.tensor, "PP": self.pipeline, "VPP": self.virtual, "EP": self.expert, "ETP": self.expert_tensor
        }  # fmt: skip
        if self.expert == 1 and self.expert_tensor in (1, self.tensor):
            del named["ETP"]
        return ", ".join(f"{key} {size}" for key, size in named.items())


def plain_args(value: object, origin: Origin) -> dict[str, Any] | None:
    """Return the arguments as plain values; None without arguments. Classes and enum members become texts."""
    if value is None:
        return None
    if isinstance(value, InertRecord):
        if (value.module, value.name) not in (("argparse", "Namespace"), ("types", "SimpleNamespace")):
            raise inert_error(value, origin, "its args, which should be an argparse.Namespace:")
        value = value.state if isinstance(value.state, dict) else value.kwargs
    if not isinstance(value, dict):
        raise origin.corrupt("its args are not a table", type(value).__name__, "argparse.Namespace")
    return {key: _plain(part, 0) for key, part in value.items() if isinstance(key, str)}


def _plain(value: object, depth: int) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple() if depth < _MAX_DEPTH:
            return [_plain(part, depth + 1) for part in value]
        case dict() if depth < _MAX_DEPTH:
            return {str(key): _plain(part, depth + 1) for key, part in value.items()}
        case InertRecord(args=(bool() | int() | str() as member,)):
            return f"{value.module}.{value.name}({member!r})"
        case InertRecord():
            return f"{value.module}.{value.name}"
    return f"<{type(value).__name__}>"


def parallel_sizes(args: Mapping[str, Any], origin: Origin) -> ParallelSizes:
    """Return the parallel sizes in the arguments."""

    def size(*keys: str) -> int:
        for key in keys:
            number = args.get(key)
            if number is not None:
                if type(number) is not int or not 1 <= number <= 1 << 20:
                    raise origin.corrupt(f"its args have an invalid {key}", quote(str(number)), "1 or more")
                return number
        return 1

    world = args.get("world_size")
    return ParallelSizes(
        tensor=size("tensor_model_parallel_size"),
        pipeline=size("pipeline_model_parallel_size"),
        virtual=size("virtual_pipeline_model_parallel_size"),
        expert=size("expert_model_parallel_size"),
        # megatron/training/arguments.py: by default the dense layers' size.
        expert_tensor=size("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        context=size("context_parallel_size"),
        world=world if type(world) is int and world > 0 else None,
    )


TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_([0-9]{7,18})", re.ASCII)
_MAX_TRACKER_NBYTES = 64


def explain_mismatch(path: str, holds: Callable[[str], bool], what: str) -> str | None:
    """Return None if a folder is a checkpoint, or its marker names one; otherwise the reason against it."""
    if not places.is_folder(path):
        return "not a folder"
    if holds(path):
        return None
    if not places.is_present(os.path.join(path, TRACKER)):
        return f"no {what} and no {TRACKER}"
    with suppress(UnsafeError, ValueError, OSError):
        named = os.path.join(path, _read_marker(path))
        if places.is_folder(named):
            return None if holds(named) else f"its {TRACKER} names a folder without {what}"
    # If this format owns the marker, `resolve_folder` reports damage to it.
    below = [os.path.join(path, entry) for entry in [*sibling_iterations(path), _RELEASE]]
    return None if any(map(holds, below)) else f"a {TRACKER}, but no {what} below it"


def resolve_folder(path: str, holds: Callable[[str], bool]) -> str:
    """Return the folder that contains the files: the path itself, or the one that its marker names."""
    if holds(path):
        return path
    tracker = os.path.join(path, TRACKER)
    if not places.is_present(tracker):
        raise Origin(path).incomplete(
            "contains no Megatron checkpoint",
            want=f"a checkpoint's files, or a {TRACKER} that names their folder",
            next_step="check the path",
        )
    name = _read_marker(path)
    folder = os.path.join(path, name)
    if not places.is_folder(folder) or not holds(folder):
        problem = f"names {name}, which contains no checkpoint of this kind"
        got = ", ".join(sibling_iterations(path)[-5:]) or "no iter_* folder"
        step = "copy that folder here, or give the path of the checkpoint's own folder"
        raise Origin(tracker).incomplete(problem, got, name, step)
    return folder


def _read_marker(path: str) -> str:
    """Return the name of the folder that the marker means (megatron/training/checkpointing.py: read_metadata)."""
    with open_regular(os.path.join(path, TRACKER)) as file:
        if not 0 < file.nbytes <= _MAX_TRACKER_NBYTES:
            raise file.origin.corrupt("is not a marker", f"{file.nbytes} bytes", "a number, or release")
        text = file.read(0, file.nbytes).decode("latin1").strip()
        if text == _RELEASE:
            return text
        if not re.fullmatch("[0-9]{1,18}", text, re.ASCII):
            raise file.origin.corrupt("is not a marker", quote(text), "a number, or release")
        # Made of the number alone, so no marker can lead out of the folder.
        return f"iter_{int(text):07d}"


def sibling_iterations(path: str) -> list[str]:
    """Return the names of the iterations' folders in a folder, in rising order."""
    names = places.list_names(path) if places.is_folder(path) else []
    return sorted(filter(_ITERATION.fullmatch, names), key=lambda entry: int(entry[5:]))


def describe_iteration(folder: str) -> dict[str, Any]:
    """Return, for `inspect`, the name of a checkpoint's folder and of those beside it."""
    own = os.path.basename(places.real(folder))
    siblings = sibling_iterations(os.path.dirname(places.real(folder)))
    return {"iteration": own, "iterations": siblings if own in siblings else [own]}


def check_iteration(folder: str, recorded: object, file: str) -> int | None:
    """Return the iteration that a checkpoint's file records; None if it records none, like converters' files."""
    step = recorded if type(recorded) is int and recorded >= 0 else None
    name = os.path.basename(places.real(folder))
    found = _ITERATION.fullmatch(name)
    if found is not None and step is not None and step != int(found[1]):
        raise Origin(file).contradiction(
            "belongs to a different iteration than its folder",
            f"iteration {step}",
            f"iteration {int(found[1])}, as in the folder's name",
            f"copy {name} again from where it was written",
        )
    return step
