"""Checks that model states and optimizer belong to one step. No field ties the two, but both count steps."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

import numpy as np

from xrank.errors import ContradictionError
from xrank.formats.regular_file import Origin

_STEP = re.compile(r"(?:state|param_groups)\.[^.]*\.step")
_TAG = re.compile(r"global_step(\d{1,18})", re.ASCII)


def check_moment(
    tag: str, modules: Mapping[str, object], origin: Origin, partition: Mapping[str, object] | None
) -> tuple[tuple[str, str], ...]:
    """Return notes on files that may belong to different steps.

    Args:
        tag: name of the checkpoint's folder.
        modules: facts of the model states.
        origin: origin of the model states.
        partition: facts of an optimizer state, if any.

    Raises:
        ContradictionError: the optimizer is ahead of the model states.
    """
    step = modules.get("global_steps")
    if type(step) is not int:
        return ()
    notes = []
    named = _TAG.match(tag)
    # The user chooses the tag, so it proves nothing.
    if named is not None and int(named[1]) != step:
        notes.append(("another-step", f"the folder is named {tag}, and the model states in it are of step {step:,}"))
    skipped = modules.get("skipped_steps")
    # A step with overflowing gradients is counted but skipped.
    wanted = {step, step - skipped} if type(skipped) is int else {step}
    recorded = [value for path, value in (partition or {}).items() if _STEP.fullmatch(path)]
    counts = [int(value) for value in recorded if isinstance(value, (int, float)) and not isinstance(value, bool)]
    # An optimizer that is behind may have been begun anew; one that is ahead cannot be of this save.
    if counts and max(counts) > step:
        raise ContradictionError(
            origin.locate("belongs to an earlier step than the optimizer states"),
            rank=origin.rank,
            file=origin.path,
            got=f"global_steps {step:,}",
            want=f"{max(counts):,} or more, the steps that the optimizer has taken",
            next_step="all files must come from one save of one run; copy them again",
        )
    if recorded and wanted.isdisjoint(counts) and not {_as_fact(count) for count in wanted} & {*map(str, recorded)}:
        problem = f"the optimizer has not taken the {step:,} steps of the model states"
        notes.append(("another-step", f"{problem}: it was begun anew, or its files are of another step"))
    return tuple(notes)


def _as_fact(count: int) -> str:
    """Return a partition's fact for a step that torch's optimizers count in a tensor."""
    return f"F32 of CRC {zlib.crc32(np.float32(count).tobytes()):08x}"
