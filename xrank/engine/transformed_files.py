"""Makes transformed files: each rank reads some tensors whole, one at a time, and writes their outputs.

Order of events, on every rank: all assign the tensors of a round alike, by bytes, each to a rank that holds much of
it; every rank makes its own and sends the first rank digests of its outputs; the first finishes the files. Where
several hosts share the file system, no two of them write to one page: the rank sends the bytes of a page that other
outputs share to the first rank with the digests, and the first rank writes them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field

from xrank import dtypes
from xrank.engine.executor import Outcome
from xrank.engine.planner import Plan
from xrank.engine.replicas import prefer_own_copies
from xrank.engine.rounds import ROUND_NBYTES, Outputs, PartialResults, Work, exchange, group_files
from xrank.engine.tensor_target import make_whole_tensors
from xrank.engine.transforms import TransformedTensor, apply_transform
from xrank.engine.windows import FilePart, JoinedFile, TensorDigest
from xrank.layout.nest_table import IntArray
from xrank.layout.output_files import OutputTensor
from xrank.ranks.memory import local_bytes

if TYPE_CHECKING:
    import torch

    from xrank.ranks.team import Team

_PAGE_NBYTES = 4096
_CHUNK_NBYTES = 1 << 20


def make_transformed(team: Team, work: Work, files: Sequence[int], outputs: Outputs, *, what: str) -> Outcome:
    """Make transformed files, as `make_in_rounds`; UsageError if an output differs from the one that was probed."""
    plan, transforms, holder = work.plan, work.transforms, work.holder
    assert transforms is not None
    size, position, sources = team.size, team.position, transforms.sources
    if holder is not None and size > 1:
        sources = prefer_own_copies(sources, holder, position)
    staging = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
    shares_pages = not team.is_one_host and outputs.writes_anywhere
    failures = team.make_failure_check()
    outcome = Outcome()
    rounds = list(group_files(plan, files, size * ROUND_NBYTES))
    for number, group in enumerate(rounds):
        tensors = [tensor for tensor in transforms.tensors if tensor.file in group]
        if outputs.writes_anywhere:
            owners = dict.fromkeys(group, 0)
            makers = _makers(transforms.sources, tensors, holder, size)
        else:
            # One rank makes all of a file: the largest first, each by the least loaded.
            loads, owners = [0] * size, {}
            for index in sorted(group, key=lambda index: (-plan.files[index].output.nbytes, index)):
                owners[index] = loads.index(min(loads))
                loads[owners[index]] += plan.files[index].output.nbytes
            makers = [owners[tensor.file] for tensor in tensors]
        made = _RoundOutputs(outputs, shares_pages)
        try:
            for index in group:
                if position == owners[index]:
                    made.put(index, 0, memoryview(plan.files[index].output.header))
            for tensor, maker in zip(tensors, makers, strict=True):
                if maker != position:
                    continue
                failures()
                (source,) = make_whole_tensors(sources, work.source, work.budget, [tensor.number], failures)
                values = apply_transform(transforms.function, tensor.name, source, tensor.outputs)
                del source  # the outputs may not need it any more: its memory is free before they are written
                for slot, output in zip(tensor.slots, tensor.outputs, strict=True):
                    made.put_tensor(tensor.file, slot, output, values.pop(0), staging)
            results = PartialResults(made.finish(), (), 0, {}, odd=made.odd)
        except BaseException:
            outputs.close()
            raise
        found = [results]
        if size > 1:
            with exchange(team, f"{what} of transform, round {number + 1}", outputs, results) as every:
                found = every
        if position == 0:
            _finish(plan, group, found, outputs, outcome)
    if rounds and size > 1:  # one process checks its source after the last file
        work.source.check_unchanged()  # all ranks have finished reading
        team.meet(f"{what} of transform, all of it")
    return outcome


def _makers(sources: Plan, tensors: Sequence[TransformedTensor], holder: IntArray | None, num_ranks: int) -> list[int]:
    """Return the position of the rank that makes each tensor: the largest first, each to the rank of least cost."""
    loads = np.zeros(num_ranks, np.int64)
    makers = [0] * len(tensors)
    plans = [sources.files[tensor.number].tensors[0] for tensor in tensors]
    for i in sorted(range(len(tensors)), key=lambda i: (-plans[i].output.nbytes, i)):
        held = np.zeros(num_ranks, np.int64)
        if holder is not None:
            width = dtypes.dtype(plans[i].source_dtype).nbytes
            for copies in (plans[i].copies, plans[i].replicas):
                np.add.at(held, holder[copies.record], copies.nests.sizes * width)
        # A byte from another rank counts twice: it is read, and moved.
        cost = 2 * plans[i].output.nbytes - np.minimum(held, plans[i].output.nbytes)
        makers[i] = int((loads + cost).argmin())
        loads[makers[i]] += cost[makers[i]]
    return makers


class _RoundOutputs(Struct):
    """The outputs that a rank has made of the files of a round."""

    outputs: Outputs
    shares_pages: bool
    """Whether other hosts write to the same files."""
    digests: dict[int, dict[int, TensorDigest]] = field(default_factory=dict)
    """File -> its tensor -> digest; contains each file that was begun."""
    odd: list[tuple[int, int, bytes]] = field(default_factory=list)
    """(File, offset, bytes) of pages that other outputs share."""

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of whole pages."""
        with self.outputs.explain_errors():  # exceptions of the transform are not disk errors, so they stay outside
            if file not in self.digests:
                self.outputs.begin(file)
                self.digests[file] = {}
            self.outputs.target.write(file, offset, data)

    def put_tensor(self, file: int, slot: int, output: OutputTensor, tensor: torch.Tensor, staging: memoryview) -> None:
        digest = TensorDigest(output.nbytes)
        content = local_bytes(tensor)
        start = first = low = output.offset
        last = high = first + output.nbytes
        if self.shares_pages:
            low, high = -(-first // _PAGE_NBYTES) * _PAGE_NBYTES, last // _PAGE_NBYTES * _PAGE_NBYTES
        while start < last:
            stop = min(last, (start // _CHUNK_NBYTES + 1) * _CHUNK_NBYTES)
            data = staging[: stop - start]
            content.read_into(start - first, data)
            digest.add(start - first, data)
            own_start, own_stop = max(start, low), min(stop, high)
            if own_start < own_stop:
                self.put(file, own_start, data[own_start - start : own_stop - start])
                self._keep(file, start, data[: own_start - start])
                self._keep(file, own_stop, data[own_stop - start :])
            else:
                self._keep(file, start, data)
            start = stop
        # All of it went to the first rank, or it is empty; `finish` still expects a file that was begun.
        if file not in self.digests:
            self.put(file, output.offset, memoryview(b""))
        self.digests[file][slot] = digest

    def _keep(self, file: int, offset: int, data: memoryview) -> None:
        if data:
            self.odd.append((file, offset, bytes(data)))

    def finish(self) -> tuple[FilePart, ...]:
        parts = tuple(
            FilePart(file, tuple((slot, digest.part()) for slot, digest in sorted(digests.items())), ())
            for file, digests in self.digests.items()
        )
        with self.outputs.explain_errors():
            for part in parts:
                self.outputs.finish_share(part)
        return parts


def _finish(
    plan: Plan, files: Sequence[int], found: Sequence[PartialResults], outputs: Outputs, outcome: Outcome
) -> None:
    """Join the outputs of all ranks for some files, write the bytes that came to the first, and finish the files."""
    joined = {index: JoinedFile(plan.files[index].output, index) for index in files}
    rest: dict[int, list[tuple[int, bytes]]] = {}
    for results in found:
        for part in results.parts:
            joined[part.index].join(part)
        for file, offset, data in results.odd:
            rest.setdefault(file, []).append((offset, data))
    try:
        with outputs.explain_errors():
            for file, places in rest.items():
                outputs.begin(file)  # opened again, to see the data that other hosts wrote meanwhile
                for offset, data in places:
                    outputs.target.write(file, offset, memoryview(data))
                outputs.finish_share(FilePart(file, (), ()))
    except BaseException:
        outputs.close()
        raise
    for index, whole in joined.items():
        outcome.files[index], ending = whole.finish()
        outputs.finish(outcome.files[index], ending)
