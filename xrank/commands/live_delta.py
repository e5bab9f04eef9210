"""The delta from a folder to a model in ranks' memory: each rank reads its tensors from all ranks, window by window.

Tensors that a quantization or a caller's function replaces are made before they are compared, some at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING

from msgspec.structs import replace

from xrank.commands.delta_writing import (
    NewVersion,
    check_same_tensors,
    make_unfit_error,
    plan_version,
    write_delta,
)
from xrank.engine.buffers import OpenSource
from xrank.engine.encoded_tensors import make_transformed_tensors
from xrank.engine.executor import execute
from xrank.engine.planner import Plan, make_plan, select_tensors
from xrank.engine.replicas import prefer_own_copies
from xrank.engine.report import Report
from xrank.engine.sources import open_source
from xrank.engine.tensor_pairs import TensorSide
from xrank.engine.tensor_target import TensorTarget, empty_tensor
from xrank.engine.transforms import TransformedTensor
from xrank.layout.nest_table import IntArray
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.ranks.loans import PeerSource
from xrank.ranks.team import Team
from xrank.recipes.decision import FolderPlan, digest_of_plan
from xrank.recipes.sources import read_source

if TYPE_CHECKING:
    import torch

_BATCH_NBYTES = 32 << 20
"""Bytes of made tensors that are in memory at once, unless one takes more."""


class LiveTensors:
    """The tensors of a folder that ranks hold the parts of, as one rank reads them.

    Args:
        gather: the plan of the folder.
        source: reads all ranks' memory.
        holder: by record, the position in the team of the rank that holds it.
        team: the ranks.
    """

    def __init__(self, gather: FolderPlan, source: OpenSource, holder: IntArray, team: Team) -> None:
        self._gather, self._source, self._transforms = gather, source, gather.transforms
        self.outputs = [replace(one, offset=0) for file in gather.plan.files for one in file.output.tensors]
        """Tensors of the folder; their places are their numbers."""
        number = {output.name: place for place, output in enumerate(self.outputs)}
        whole = select_tensors(gather.plan, chain.from_iterable(file.tensors for file in gather.plan.files))
        self.plan = prefer_own_copies(whole, holder, team.position) if team.size > 1 else whole
        self._made = () if self._transforms is None else self._transforms.tensors
        self._numbers = {one.number: [number[output.name] for output in one.outputs] for one in self._made}
        groups: dict[int, list[int]] = {}
        for one in self._made:
            groups.setdefault(one.group, []).extend(self._numbers[one.number])
        alone = set(range(len(self.outputs))) - {*chain.from_iterable(groups.values())}
        self.units = [*([one] for one in sorted(alone)), *groups.values()]
        """Tensors, by number, that one rank makes together."""

    def sides(self, numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], TensorSide]]:
        """Yield parts of some units of tensors, by number, and their values."""
        chosen = set(numbers)
        made = [one for one in self._made if chosen.issuperset(self._numbers[one.number])]
        plain = sorted(chosen - {number for one in made for number in self._numbers[one.number]})
        if plain:
            yield plain, TensorSide(self.plan, self._source)
        while made:
            batch, nbytes = list[TransformedTensor](), 0
            # A group's tensors follow each other, and share what is read of them first.
            while made and (nbytes < _BATCH_NBYTES or made[0].group == batch[-1].group):
                batch.append(made.pop(0))
                nbytes += sum(output.nbytes for output in batch[-1].outputs)
            yield self._make(batch)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill some units of tensors, by name, which are in a row on the CPU."""
        filled = {number: tensors[one.name] for number, one in enumerate(self.outputs) if one.name in tensors}
        made = [one for one in self._made if filled.keys() >= {*self._numbers[one.number]}]
        plain = [number for number in filled if number not in {n for one in made for n in self._numbers[one.number]}]
        budget = self._gather.options.budget
        execute(self.plan, self._source, TensorTarget(filled), budget=budget, files=plain)
        if self._transforms is not None:
            make_transformed_tensors(self._transforms, made, self._source, budget, tensors)

    def _make(self, batch: Sequence[TransformedTensor]) -> tuple[Sequence[int], TensorSide]:
        assert self._transforms is not None
        numbers = [number for one in batch for number in self._numbers[one.number]]
        outputs = [self.outputs[number] for number in numbers]
        tensors = {output.name: empty_tensor(output) for output in outputs}
        budget = self._gather.options.budget
        make_transformed_tensors(self._transforms, batch, self._source, budget, tensors)
        rows = {number: row_of(tensors[output.name]) for number, output in zip(numbers, outputs, strict=True)}
        return numbers, TensorSide(self.plan, self._source, rows)


def row_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor that is in a row on the CPU; they keep it alive."""
    import torch

    row: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return row


def check_model_alone(gather: FolderPlan, new: str, out: str) -> None:
    """Refuse a folder with an adapter in a folder within, which no delta has."""
    for file in gather.plan.files:
        if "/" in file.output.name:
            name = file.output.tensors[0].name
            raise make_unfit_error(name, f"an adapter, in {file.output.name}", "a model's own tensors", new, out)


def export_delta(
    gather: FolderPlan,
    source: PeerSource,
    holder: IntArray,
    base: str,
    out: str,
    team: Team,
    *,
    started: float,
    progress: Callable[[int, int], None] | None,
    timeout_seconds: float,
) -> Report:
    """Write the delta from the model in a folder to the one in ranks' memory; each rank of a team makes this call."""
    facts = plan_version(out, base)
    live = LiveTensors(gather, source, holder, team)

    def plan_base() -> Plan:
        check_model_alone(gather, "the model", out)
        model = read_source(base).model
        known = [OutputTensor(one.name, one.dtype, one.shape) for one in model.shards if one.name not in model.aliases]
        check_same_tensors(live.outputs, known, "memory", base, out)
        return make_plan(model, [OutputFile.bare(output) for output in live.outputs])

    plan, _ = team.agree("the base", plan_base, digest_of_plan, team.check_plans)
    with closing(open_source(plan.source)) as base_source:

        def read(numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], tuple[TensorSide, TensorSide]]]:
            for part, side in live.sides(numbers):
                yield part, (side, TensorSide(plan, base_source))
            source.check_unchanged()
            base_source.check_unchanged()

        version = NewVersion(
            team,
            live.outputs,
            facts,
            gather.source,
            out,
            gather.options,
            command="export",
            started=started,
            notes=gather.notes,
            timeout_seconds=timeout_seconds,
        )
        return write_delta(version, read, units=live.units, progress=progress)
