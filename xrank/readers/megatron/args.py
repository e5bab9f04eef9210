"""The run's arguments in Megatron's checkpoints: an ``argparse.Namespace``, read as plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xrank.errors import ContradictionError
from xrank.formats.pickles import InertRecord, inert_error
from xrank.formats.regular_file import Origin, quote

_MAX_DEPTH = 8
# Arguments in which ranks of one run may differ: identity, place and time.
_OWN = re.compile(r"(?:.*_)?(?:rank|host|hostname|device|pid|port|addr|time|start_time|timestamp)(?:_.*)?")


@dataclass(frozen=True, slots=True)
class ParallelSizes:
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
    """Return the arguments as plain values; None without arguments. Classes and enum members become texts.

    Raises:
        UnsafeError: they are an object of another class.
    """
    if value is None:
        return None
    if isinstance(value, InertRecord):
        if (value.module, value.name) not in (("argparse", "Namespace"), ("types", "SimpleNamespace")):
            raise inert_error(value, origin, "its args, which should be an argparse.Namespace:")
        value = value.state if isinstance(value.state, dict) else value.kwargs
    if not isinstance(value, dict):
        raise origin.corrupt("its args are not a table", got=type(value).__name__, want="argparse.Namespace")
    return {key: _plain(part, 0) for key, part in value.items() if isinstance(key, str)}


def _plain(value: object, depth: int) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple() if depth < _MAX_DEPTH:
            return [_plain(part, depth + 1) for part in value]
        case dict() if depth < _MAX_DEPTH:
            return {str(key): _plain(part, depth + 1) for key, part in value.items()}
        case InertRecord(args=None):
            return f"{value.module}.{value.name}"
        case InertRecord(args=(bool() | int() | str() as member,)):
            return f"{value.module}.{value.name}({member!r})"
        case InertRecord():
            return f"{value.module}.{value.name}"
    return f"<{type(value).__name__}>"


def parallel_sizes(args: Mapping[str, Any], origin: Origin) -> ParallelSizes:
    """Return the parallel sizes in the arguments.

    Raises:
        CorruptError: a size is not a positive count.
    """

    def size(*keys: str) -> int:
        for key in keys:
            number = args.get(key)
            if number is not None:
                if type(number) is not int or not 1 <= number <= 1 << 20:
                    raise origin.corrupt(f"its args have an invalid {key}", got=quote(str(number)), want="1 or more")
                return number
        return 1

    tensor = size("tensor_model_parallel_size")
    world = args.get("world_size")
    return ParallelSizes(
        tensor=tensor,
        pipeline=size("pipeline_model_parallel_size"),
        virtual=size("virtual_pipeline_model_parallel_size"),
        expert=size("expert_model_parallel_size"),
        # megatron/training/arguments.py: by default the dense layers' size.
        expert_tensor=size("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        context=size("context_parallel_size"),
        world=world if type(world) is int and world > 0 else None,
    )


def check_agreement(first: Mapping[str, Any], first_file: str, args: Mapping[str, Any], file: str) -> None:
    """Check that two ranks' arguments are those of one run.

    Raises:
        ContradictionError: they differ in more than a rank's identity, place and time.
    """
    for key in sorted({*first, *args}):
        if _OWN.fullmatch(key):
            continue
        ours, theirs = (values.get(key, "<missing>") for values in (args, first))
        # repr compares types, too, and makes NaN equal NaN.
        if repr(ours) != repr(theirs):
            raise ContradictionError(
                f"{file} belongs to another run than {first_file}: args.{quote(key)[1:-1]} differs",
                file=file,
                got=ascii(ours)[:200],
                want=f"{ascii(theirs)[:200]}, as in {first_file}",
                next_step="all files must come from one save of one run; copy them again",
            )
