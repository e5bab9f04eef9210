"""Makes the files of what is transformed: each rank reads some tensors whole, one at a time, and writes their outputs.

Order of events, on every rank: all share out the tensors of a round alike, by bytes, each to a rank that holds much of
it; every rank makes its own and sends the first rank digests of what it wrote; the first finishes the files. Where
several hosts share the file system no two of them write to one page: what lies in a page with other outputs goes to the
first rank with the digests, and that writes it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from xrank import dtypes
from xrank.decisions.transformed_plan import TransformedTensor, Transforms
from xrank.decisions.transforms import apply_transform
from xrank.layout.nest_table import IntArray
from xrank.lending.local_bytes import local_bytes
from xrank.making.partial_results import PartialResults
from xrank.making.rounds import Finish, Outputs, finish_nothing
from xrank.making.whole_tensors import WholeTensors
from xrank.making.work import Work
from xrank.plan.digests import TensorDigest
from xrank.plan.division import ROUND_NBYTES, group_files
from xrank.plan.executor import Outcome
from xrank.plan.file_parts import FilePart, JoinedFile
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan, TensorPlan
from xrank.plan.replicas import prefer_own_copies

if TYPE_CHECKING:
    import torch

    from xrank.teams.team import Team

__all__ = ["make_transformed"]

_PAGE_NBYTES = 4096
_CHUNK_NBYTES = 1 << 20


def make_transformed(
    team: Team,
    work: Work,
    files: Sequence[int],
    outputs: Outputs,
    *,
    what: str,
    finish: Finish = finish_nothing,
) -> Outcome:
    """Make files of what is transformed together with all other ranks, which make the same call.

    Args:
        team: the ranks.
        work: this rank's.
        files: indices of the files to make, all of them of what is transformed.
        outputs: where this rank's shares go.
        what: is made, in a word that errors name.
        finish: ends a file, on the first rank.

    Returns:
        On the first rank what one process would have found; an empty outcome elsewhere.

    Raises:
        UsageError: the transform makes something else than it told. What it raises itself goes on.
        XrankError: as `make_in_rounds`.
    """
    plan, transforms, holder = work.plan, work.transforms, work.holder
    assert transforms is not None
    size, position = team.size, team.position
    sources = (
        transforms.sources if holder is None or size == 1 else prefer_own_copies(transforms.sources, holder, position)
    )
    whole = WholeTensors(sources, work.source, work.budget)
    shares_pages = not team.is_one_host
    failures = team.make_failure_check()
    outcome = Outcome()
    rounds = list(group_files(plan, files, size * ROUND_NBYTES))
    for number, group in enumerate(rounds):
        tensors = transforms.find_by_files(group)
        makers = _makers(transforms.sources, tensors, holder, size)
        made = _RoundOutputs(outputs, shares_pages)
        try:
            if position == 0:
                for index in group:
                    made.put(index, 0, memoryview(plan.files[index].output.header))
            for tensor, maker in zip(tensors, makers, strict=True):
                if maker == position:
                    failures()
                    _make(tensor, transforms, whole, made, failures)
            parts = made.finish()
        except BaseException:
            outputs.close()
            raise
        found = _collect(team, f"{what} of transform, round {number + 1}", parts, made.odd)
        if position == 0:
            _finish(plan, group, found, outputs, finish, outcome)
    if rounds and size > 1:  # a process alone checks its source after the last file
        work.source.check_unchanged()  # no rank reads any more
        team.meet(f"{what} of transform, all of it")
    return outcome


def _makers(sources: Plan, tensors: Sequence[TransformedTensor], holder: IntArray | None, num_ranks: int) -> list[int]:
    """Return for each tensor the position of the rank that makes it: the largest first, each to whom it costs least."""
    loads = np.zeros(num_ranks, np.int64)
    makers = [0] * len(tensors)
    plans = [sources.files[tensor.number].tensors[0] for tensor in tensors]
    for i in sorted(range(len(tensors)), key=lambda i: (-_source_nbytes(plans[i]), i)):
        # A byte that comes from another rank counts twice: it is read, and moved.
        cost = 2 * _source_nbytes(plans[i]) - _count_held(plans[i], holder, num_ranks)
        makers[i] = int((loads + cost).argmin())
        loads[makers[i]] += cost[makers[i]]
    return makers


def _source_nbytes(tensor: TensorPlan) -> int:
    return tensor.output.nbytes


def _count_held(tensor: TensorPlan, holder: IntArray | None, num_ranks: int) -> IntArray:
    """Return how many bytes of a tensor each rank holds itself."""
    held = np.zeros(num_ranks, np.int64)
    width = dtypes.dtype(tensor.source_dtype).nbytes
    for copies in (tensor.copies, tensor.replicas) if holder is not None else ():
        assert holder is not None
        np.add.at(held, holder[copies.record], copies.nests.sizes * width)
    return np.minimum(held, tensor.output.nbytes)


@dataclass(slots=True)
class _RoundOutputs:
    """What a rank has made of the files of a round."""

    outputs: Outputs
    shares_pages: bool
    """Whether other hosts write to the same files."""
    digests: dict[int, dict[int, TensorDigest]] = field(default_factory=dict)
    """File -> its tensor -> digest; a file is there once it was begun."""
    odd: list[tuple[int, int, bytes]] = field(default_factory=list)
    """(File, offset, bytes) of pages that are shared with other outputs."""

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of whole pages."""
        with self.outputs.explain_errors():  # what the transform raises is nothing of the disk's
            if file not in self.digests:
                self.outputs.begin(file)
                self.digests[file] = {}
            self.outputs.target.write(file, offset, data)

    def put_tensor(self, file: int, slot: int, output: OutputTensor, tensor: torch.Tensor, staging: memoryview) -> None:
        """Write a tensor to its place, and take its digest."""
        digest = TensorDigest(output.nbytes)
        content = local_bytes(tensor)
        first, last = output.offset, output.offset + output.nbytes
        low, high = (-(-first // _PAGE_NBYTES), last // _PAGE_NBYTES) if self.shares_pages else (first, last)
        if self.shares_pages:
            low, high = low * _PAGE_NBYTES, high * _PAGE_NBYTES
        start = first
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
        if file not in self.digests:
            self.put(file, output.offset, memoryview(b""))
        self.digests[file][slot] = digest

    def _keep(self, file: int, offset: int, data: memoryview) -> None:
        if data:
            self.odd.append((file, offset, bytes(data)))

    def finish(self) -> tuple[FilePart, ...]:
        """Make all files last, and return what is known of them."""
        parts = tuple(
            FilePart(file, tuple((slot, digest.part()) for slot, digest in sorted(digests.items())), ())
            for file, digests in self.digests.items()
        )
        with self.outputs.explain_errors():
            for part in parts:
                self.outputs.finish_share(part)
        return parts


def _make(
    tensor: TransformedTensor,
    transforms: Transforms,
    whole: WholeTensors,
    made: _RoundOutputs,
    failures: Callable[[], bool],
) -> None:
    """Read a tensor, transform it, and write what that gives."""
    (source,) = whole.make([tensor.number], failures)
    results = apply_transform(transforms.function, tensor.name, source, tensor.outputs)
    del source
    staging = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
    for slot, output in zip(tensor.slots, tensor.outputs, strict=True):
        made.put_tensor(tensor.file, slot, output, results.pop(0), staging)


_Found = tuple[tuple[FilePart, ...], Sequence[tuple[int, int, bytes]]]


def _collect(team: Team, key: str, parts: tuple[FilePart, ...], odd: Sequence[tuple[int, int, bytes]]) -> list[_Found]:
    """Return on the first rank what all ranks made, and nothing on the others."""
    if team.size == 1:
        return [(parts, odd)]
    import torch

    told: dict[str, Any] = {
        "parts": PartialResults(parts, (), 0, {}).to_message(),
        "odd": torch.tensor([(file, offset, len(data)) for file, offset, data in odd], dtype=torch.int64).view(-1, 3),
        "bytes": torch.frombuffer(bytearray(b"".join(data for _, _, data in odd)) or bytearray(1), dtype=torch.uint8),
    }
    with team.collect(key, told) as messages:
        return [_read_message(message) for message in messages]


def _read_message(message: dict[str, Any]) -> _Found:
    data, odd, position = message["bytes"].numpy().tobytes(), [], 0
    for file, offset, nbytes in message["odd"].tolist():
        odd.append((file, offset, data[position : position + nbytes]))
        position += nbytes
    return PartialResults.from_message(message["parts"]).parts, odd


def _finish(
    plan: Plan, files: Sequence[int], found: Sequence[_Found], outputs: Outputs, finish: Finish, outcome: Outcome
) -> None:
    """Join what all ranks made of some files, write what was left to the first, and finish them."""
    joined = {index: JoinedFile(plan.files[index].output, index) for index in files}
    rest: dict[int, list[tuple[int, bytes]]] = {}
    for parts, odd in found:
        for part in parts:
            joined[part.index].join(part)
        for file, offset, data in odd:
            rest.setdefault(file, []).append((offset, data))
    try:
        with outputs.explain_errors():
            for file, places in rest.items():
                outputs.begin(file)  # opened anew: what other hosts wrote in the meantime is seen
                for offset, data in places:
                    outputs.target.write(file, offset, memoryview(data))
                outputs.finish_share(FilePart(file, (), ()))
    except BaseException:
        outputs.close()
        raise
    for index, whole in joined.items():
        outcome.files[index] = finish(whole, index)
