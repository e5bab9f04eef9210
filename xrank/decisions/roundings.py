"""Compares tensors with the rounded copies of them that a source holds in files that record no step.

DeepSpeed's files of layers and of experts contain tensors alone. Where the optimizer states have the fp32 weights, what
else such a file holds is of the same save if its weights are the rounded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from math import prod

from xrank.dtypes import dtype
from xrank.errors import ContradictionError
from xrank.plan.buffers import NullTarget
from xrank.plan.decoding import open_source
from xrank.plan.executor import Budget, execute
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.planner import make_plan
from xrank.plan.source import StoredModel, StoredShard

_MAX_NBYTES = 256 << 20
_BUDGET = Budget.from_memory(4 << 20, 1)


def check_roundings(model: StoredModel) -> StoredModel:
    """Return the model without its rounded copies, of which the smallest were compared with its tensors.

    Raises:
        ContradictionError: a copy has other values.
    """
    if not model.roundings:
        return model
    chosen: list[StoredShard] = []
    nbytes = 0
    for shard in sorted(model.roundings, key=lambda shard: (prod(shard.shape), shard.name)):
        nbytes += prod(shard.shape) * (dtype(shard.dtype).nbytes + 4)
        if chosen and nbytes > _MAX_NBYTES:
            break
        chosen.append(shard)
    plain = replace(model, roundings=())
    # A tied layer's copies have one name, so each copy is compared by itself.
    for shard in chosen:
        outputs = [OutputTensor(shard.name, shard.dtype, shard.shape)]
        rounded = replace(plain, shards=(shard,), aliases={}, absent=())
        if compute_digests(plain, outputs) != compute_digests(rounded, outputs):
            file = model.files[int(model.records.file[int(shard.record[0])])].path
            raise ContradictionError(
                f"{file}: belongs to another save than the fp32 weights, or to another layer or expert",
                tensor=shard.name,
                file=file,
                got=f"other values of {shard.name}",
                want=f"the fp32 weights, rounded to {shard.dtype}",
                next_step="all files must come from one save of one run; copy them again from where they were saved",
            )
    return plain


def compute_digests(model: StoredModel, outputs: Sequence[OutputTensor], budget: Budget = _BUDGET) -> list[bytes]:
    """Return the digests of whole tensors in the outputs' dtypes."""
    plan = make_plan(model, [OutputFile.bare(output) for output in outputs])
    with closing(open_source(model)) as files:
        made = execute(plan, files, NullTarget(), budget=budget)
    return [made.files[number].digest for number in range(len(outputs))]
