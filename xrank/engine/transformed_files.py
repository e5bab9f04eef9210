"""Makes transformed files: each rank makes the outputs of some tensors, by bands or of one whole tensor at a time.

Order of events, on every rank: all assign the tensors of a round alike, by bytes, each to a rank that holds much of
it; every rank makes its own and sends the first rank digests of its outputs; the first finishes the files. Where
several hosts share the file system, no two of them write to one page: the rank sends the bytes of a page that other
outputs share to the first rank with the digests, and the first rank writes them.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.encoded_tensors import add_error, encode_tensors
from xrank.engine.encodings import EncodingError
from xrank.engine.executor import Outcome
from xrank.engine.planner import Plan
from xrank.engine.replicas import prefer_own_copies
from xrank.engine.rounds import ROUND_NBYTES, Outputs, PartialResults, Work, deal, exchange, group_files
from xrank.engine.tensor_target import make_whole_tensors
from xrank.engine.transforms import TransformedTensor, apply_transform
from xrank.engine.windows import FilePart, JoinedFile, RecordChecksums, TensorDigest
from xrank.layout.nest_table import IntArray
from xrank.layout.stored_model import NO_CHECKSUM
from xrank.ranks.memory import local_bytes

if TYPE_CHECKING:
    import torch

    from xrank.ranks.team import Team

_PAGE_NBYTES = 4096
_CHUNK_NBYTES = 1 << 20


def make_transformed(
    team: Team,
    work: Work,
    files: Sequence[int],
    outputs: Outputs,
    outcome: Outcome,
    *,
    what: str,
    checksums: RecordChecksums | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Make transformed files as `make_in_rounds`, and add what was found to the outcome of the other files.

    `checksums` has what a process alone has read of the source. UsageError if an output of a caller's function differs
    from the one that was probed.
    """
    plan, transforms, holder = work.plan, work.transforms, work.holder
    assert transforms is not None
    size, position, whole = team.size, team.position, transforms.sources
    sources = whole
    if holder is not None and size > 1:
        sources = prefer_own_copies(sources, holder, position)
    transforms = replace(transforms, sources=sources)
    staging = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
    shares_pages = not team.is_one_host and outputs.writes_anywhere
    failures = team.make_failure_check()
    rounds = list(group_files(plan, files, size * ROUND_NBYTES))
    made_nbytes, before = sum(plan.files[index].output.nbytes for index in files), 0
    source_nbytes = sum(sources.files[tensor.number].output.nbytes for tensor in transforms.tensors)
    for number, group in enumerate(rounds):
        tensors = [tensor for tensor in transforms.tensors if tensor.file in group]
        if outputs.writes_anywhere:
            owners = dict.fromkeys(group, 0)
            makers = _makers(whole, tensors, holder, size)
        else:
            # One rank makes all of a file.
            own_files = sorted(group)
            owners = dict(zip(own_files, deal([plan.files[i].output.nbytes for i in own_files], size), strict=True))
            makers = [owners[tensor.file] for tensor in tensors]
        made = _RoundOutputs(outputs, shares_pages)
        own = [tensor for tensor, maker in zip(tensors, makers, strict=True) if maker == position]

        def count(done: int, before: int = before) -> None:
            # In bytes of the output; rank 0 assumes that the others are equally far.
            progress(min(made_nbytes, (before + done * size) * made_nbytes // max(1, source_nbytes)))

        try:
            for index in group:
                if position == owners[index]:
                    made.put(index, 0, memoryview(plan.files[index].output.header))
            encoded = encode_tensors(
                transforms,
                [tensor.number for tensor in own if tensor.encoding is not None],
                work.source,
                work.budget,
                made.put_bytes,
                measures_errors=work.measures_errors,
                checksums=checksums,
                replicas=work.replicas,
                cancelled=failures,
                progress=count if position == 0 else lambda done: None,
            )
            for tensor in own:
                if tensor.encoding is not None:
                    continue
                failures()
                (source,) = make_whole_tensors(sources, work.source, work.budget, [tensor.number], failures)
                assert transforms.function is not None
                values = apply_transform(transforms.function, tensor.name, source, tensor.outputs)
                del source  # the outputs may not need it any more: its memory is free before they are written
                for place in range(len(tensor.outputs)):
                    made.put_tensor(tensor, place, values.pop(0), staging)
            results = PartialResults(made.finish(), (), 0, encoded.differences, 0, made.odd, encoded.errors)
        except BaseException:
            outputs.close()
            raise
        found = [results]
        if size > 1:
            with exchange(team, f"{what} of transform, round {number + 1}", outputs, results) as every:
                found = every
        if position == 0:
            _finish(plan, group, found, outputs, outcome)
        before += sum(sources.files[tensor.number].output.nbytes for tensor in tensors)
    if position == 0 and size > 1:
        outcome.num_checksums += _count_checksums(work, files)
    if rounds and size > 1:  # one process checks its source after the last file
        work.source.check_unchanged()  # all ranks have finished reading
        team.meet(f"{what} of transform, all of it")


def _makers(sources: Plan, tensors: Sequence[TransformedTensor], holder: IntArray | None, num_ranks: int) -> list[int]:
    """Return the position of the rank that makes each tensor: the largest groups first, to the rank of least cost."""
    loads = np.zeros(num_ranks, np.int64)
    costs: dict[int, IntArray] = {}
    for tensor in tensors:
        plan, held = sources.files[tensor.number].tensors[0], np.zeros(num_ranks, np.int64)
        if holder is not None:
            width = dtypes.dtype(plan.source_dtype).nbytes
            for copies in (plan.copies, plan.replicas):
                np.add.at(held, holder[copies.record], copies.nests.sizes * width)
        # A byte from another rank counts twice: it is read, and moved.
        cost = 2 * plan.output.nbytes - np.minimum(held, plan.output.nbytes)
        costs[tensor.group] = costs.get(tensor.group, 0) + cost
    makers: dict[int, int] = {}
    for group, cost in sorted(costs.items(), key=lambda item: (-int(item[1].max()), item[0])):
        makers[group] = int((loads + cost).argmin())
        loads[makers[group]] += cost[makers[group]]
    return [makers[tensor.group] for tensor in tensors]


def _count_checksums(work: Work, files: Collection[int]) -> int:
    """Return the number of checksums of records that these files alone are made of; all of them were compared."""
    assert work.transforms is not None
    records, copied = work.plan.source.records, set(range(len(work.plan.files))) - work.transforms.files
    is_read = np.zeros(len(records), np.bool_)
    for tensor in work.transforms.tensors:
        for copies in work.transforms.sources.files[tensor.number].tensors[0].read if tensor.file in files else ():
            is_read[copies.record] = True
    for copies in (copies for index in copied for one in work.plan.files[index].tensors for copies in one.read):
        is_read[copies.record] = False
    return int(np.count_nonzero(is_read & (records.crc32 != NO_CHECKSUM)))


class _RoundOutputs:
    """The outputs that a rank has made of the files of a round. Any thread may put bytes."""

    def __init__(self, outputs: Outputs, shares_pages: bool) -> None:
        self._outputs, self._shares_pages = outputs, shares_pages  # whether other hosts write to the same files
        self._digests: dict[int, dict[int, TensorDigest]] = {}
        """File -> its tensor -> digest; contains each file that was begun."""
        self.odd: list[tuple[int, int, bytes]] = []
        """(File, offset, bytes) of pages that other outputs share."""
        self._lock = threading.Lock()

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Write bytes of whole pages."""
        with self._outputs.explain_errors():  # exceptions of the transform are not disk errors, so they stay outside
            with self._lock:
                if file not in self._digests:
                    self._outputs.begin(file)
                    self._digests[file] = {}
            self._outputs.target.write(file, offset, data)

    def put_tensor(self, tensor: TransformedTensor, number: int, values: torch.Tensor, staging: memoryview) -> None:
        """Write a whole output."""
        output, content = tensor.outputs[number], local_bytes(values)
        if not output.nbytes:
            self.put_bytes(tensor, number, 0, memoryview(b""))
        start, end = output.offset, output.offset + output.nbytes
        while start < end:
            stop = min(end, (start // _CHUNK_NBYTES + 1) * _CHUNK_NBYTES)
            data = staging[: stop - start]
            content.read_into(start - output.offset, data)
            self.put_bytes(tensor, number, start - output.offset, data)
            start = stop

    def put_bytes(self, tensor: TransformedTensor, number: int, first: int, data: memoryview) -> None:
        """Write bytes of an output from its byte `first` on."""
        output, file, slot = tensor.outputs[number], tensor.file, tensor.slots[number]
        start = output.offset + first
        stop, low, high = start + len(data), output.offset, output.offset + output.nbytes
        if self._shares_pages:
            low, high = -(-low // _PAGE_NBYTES) * _PAGE_NBYTES, high // _PAGE_NBYTES * _PAGE_NBYTES
        own_start, own_stop = max(start, low), min(stop, high)
        if own_start < own_stop:
            self.put(file, own_start, data[own_start - start : own_stop - start])
            self._keep(file, start, data[: own_start - start])
            self._keep(file, own_stop, data[own_stop - start :])
        else:
            # All of it goes to the first rank, or it is empty; `finish` still expects a file that was begun.
            self.put(file, start, memoryview(b""))
            self._keep(file, start, data)
        with self._lock:
            digest = self._digests[file].setdefault(slot, TensorDigest(output.nbytes))
        digest.add(first, data)

    def _keep(self, file: int, offset: int, data: memoryview) -> None:
        if data:
            with self._lock:
                self.odd.append((file, offset, bytes(data)))

    def finish(self) -> tuple[FilePart, ...]:
        """Flush what was written, and return it."""
        parts = tuple(
            FilePart(file, tuple((slot, digest.part()) for slot, digest in sorted(digests.items())), ())
            for file, digests in self._digests.items()
        )
        with self._outputs.explain_errors():
            for part in parts:
                self._outputs.finish_share(part)
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
        for name, ranks in results.differences.items():
            known = outcome.differences.setdefault(name, {})
            known |= {rank: known.get(rank, 0) + count for rank, count in ranks.items()}
        for kind, error in results.errors.items():
            add_error(outcome.errors, kind, EncodingError(*error))
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
