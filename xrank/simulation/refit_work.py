"""The work of a refit: the ranks of a trainer, followed by those of an engine, and the bytes between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from xrank import dtypes
from xrank.layout.nest_table import IntArray
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.planner import FilePlan, Plan, make_plan
from xrank.plan.replicas import spread_copies
from xrank.refit.targets import count_runs
from xrank.simulation.planned_work import PlannedWork
from xrank.simulation.traffic import ConversionTraffic, Flow, build_round


def place_engine(work: PlannedWork) -> PlannedWork:
    """Return the export of a trainer's ranks as a refit: the plan's files are the parts of an engine's ranks.

    Each engine rank reads replicas of its own, as in `xrank.take_weights`.
    """
    plan = make_plan(work.plan.source, [_compare_all(file.output) for file in work.plan.files])
    spread = [spread_copies(replace(plan, files=(file,)), rank).files[0] for rank, file in enumerate(plan.files)]
    held = [sum(tensor.output.nbytes for tensor in file.tensors) for file in plan.files]
    return replace(
        work,
        operation="refit",
        plan=replace(plan, files=tuple(spread)),
        num_ranks=work.num_ranks + len(held),
        held_nbytes=np.concatenate((work.held_nbytes, np.array(held, np.int64))),
        mesh=None,  # no mesh has the ranks of both sides
    )


def _compare_all(file: OutputFile) -> OutputFile:
    """Return an engine rank's file with all replicas of its parts: a reshard compares those of equal parts once."""

    def compare(tensor: OutputTensor) -> OutputTensor:
        part = tensor.part
        return tensor if part is None else replace(tensor, part=replace(part, compared=part.nests))

    return replace(file, tensors=tuple(map(compare, file.tensors)))


def count_refit(work: PlannedWork) -> ConversionTraffic:
    """Count the bytes between the ranks of a refit in one round; a message is a run of bytes in both memories."""
    assert work.holder is not None
    none = np.zeros(work.num_ranks, np.int64)
    return ConversionTraffic((build_round(none, _flows(work.plan, work)),), none, is_each_read=True)


def _flows(plan: Plan, work: PlannedWork) -> Iterator[Flow]:
    assert work.holder is not None
    first = work.num_ranks - len(plan.files)
    for number, file in enumerate(plan.files):
        giver, nbytes, messages = _reads(file, work)
        yield Flow(np.full(len(giver), first + number), giver, nbytes, messages)


def _reads(file: FilePlan, work: PlannedWork) -> tuple[IntArray, IntArray, IntArray]:
    assert work.holder is not None
    givers, nbytes, messages = [], [], []
    for tensor in file.tensors:
        copies, width = tensor.copies, dtypes.dtype(tensor.source_dtype).nbytes
        givers.append(work.holder[copies.record])
        nbytes.append(copies.nests.sizes * width)
        messages.append(count_runs(copies.nests))
    if not givers:
        none = np.zeros(0, np.int64)
        return none, none, none
    return np.concatenate(givers), np.concatenate(nbytes), np.concatenate(messages)
