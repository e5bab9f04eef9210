"""Parts of tensors, padding, and files with bytes between their tensors: planned, proven, executed."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from tests.engine.engine_cases import (
    MadeModel,
    MemorySource,
    add_random,
    box_nest,
    cut_boxes,
    pairs_of,
    plain_digest,
    use_as_store,
)
from xrank import dtypes
from xrank.engine import executor, planner, windows
from xrank.engine.buffers import MemoryTarget
from xrank.engine.executor import Budget, execute
from xrank.engine.object_records import ObjectSource
from xrank.engine.planner import Pieces, compose, make_plan
from xrank.engine.windows import digest_of_file
from xrank.errors import ContradictionError
from xrank.layout.coverage import find_fault
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest
from xrank.layout.output_files import OutputFile, OutputTensor, TensorPart


def by_meaning(pieces: NestTable, part: Sequence[Nest]) -> set[tuple[int, int, int]]:
    """Return (row, address in the record, address in the part) of every element that both know."""
    where = {int(y): int(x) for nest in part for x, y in zip(*pairs_of(nest), strict=True)}
    return {
        (row, int(x), where[int(y)])
        for row in range(len(pieces))
        for x, y in zip(*pairs_of(pieces[row]), strict=True)
        if int(y) in where
    }


def test_composition_is_what_it_means():
    rng = random.Random(20261122)
    for _ in range(300):
        shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
        order = rng.sample(range(len(shape)), len(shape))
        pieces = NestTable.from_nests(
            [box_nest(box, shape, order) for box in cut_boxes(rng.randint, shape, rng.randint(0, 5))]
        )
        boxes = cut_boxes(rng.randint, shape, rng.randint(0, 3))
        part = tuple(box_nest(box, shape) for box in boxes[:1])
        rows, nests = compose(Pieces(pieces.x, pieces), part)
        found = {
            (int(rows[i]), int(x), int(y)) for i in range(len(rows)) for x, y in zip(*pairs_of(nests[i]), strict=True)
        }
        assert found == by_meaning(pieces, part)
        assert nests.y.tolist() == sorted(nests.y.tolist())


def test_coverage_of_what_is_wanted():
    rng = random.Random(5)
    for _ in range(300):
        shape = [rng.randint(1, 8) for _ in range(rng.randint(1, 3))]
        wanted = [box_nest(box, shape) for box in cut_boxes(rng.randint, shape, 4)[: rng.randint(1, 4)]]
        nests = [box_nest(box, shape) for box in cut_boxes(rng.randint, shape, 5)]
        times = np.zeros(math.prod(shape), np.int64)
        for nest in nests:
            times[pairs_of(nest)[1]] += 1
        for nest in wanted:
            times[pairs_of(nest)[1]] -= 1
        fault = find_fault(NestTable.from_nests(nests), len(times), NestTable.from_nests(wanted))
        bad = np.flatnonzero(times)
        assert (fault.address if fault else None) == (int(bad[0]) if len(bad) else None)
        if fault:
            assert fault.kind == ("overlap" if times[fault.address] > 0 else "gap")
    some = NestTable.from_nests([Nest(0, 3, ((4, 1, 1),))])
    assert find_fault(NestTable.from_nests([]), 9, some).address == 3
    assert find_fault(NestTable.from_nests([]), 9, NestTable.from_nests([])) is None


def padded_part(rng: random.Random, shape: Sequence[int]) -> tuple[tuple[int, ...], TensorPart]:
    """Return some rows of a tensor with padding before and after."""
    row = math.prod(shape[1:])
    low = rng.randint(0, shape[0])
    high = rng.randint(low, shape[0])
    before = rng.randint(0, 3)
    nests = (Nest(before * row, low * row, ((((high - low) * row, 1, 1),) if (high - low) * row > 1 else ())),)
    nests = nests if high > low else ()
    return (before + high - low + rng.randint(0, 3), *shape[1:]), TensorPart(tuple(shape), nests, nests)


@pytest.mark.parametrize("in_store", [False, True], ids=["memory", "store"])
@pytest.mark.parametrize("workers", [1, 3])
def test_files_of_parts_with_bytes_between_them(monkeypatch, tmp_path, workers, in_store):
    for module in (windows, executor):
        monkeypatch.setattr(module, "WINDOW_NBYTES", 512)
    use_as_store(tmp_path, monkeypatch)
    rng = random.Random(workers)
    for _ in range(40):
        made = MadeModel()
        for i in range(rng.randint(1, 4)):
            shape = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
            add_random(made, rng.randint, f"t{i}", shape, dtype=rng.choice(["F32", "BF16", "U8", "I64"]))
        header = rng.randbytes(rng.choice([0, 13, 700]))
        offset, tensors, fragments, want = len(header), [], [], bytearray(header)
        for shard in made.shards:
            shape, part = padded_part(rng, shard.shape)
            width = dtypes.dtype(shard.dtype).nbytes
            fragments.append((offset + 3, rng.randbytes(rng.randint(1, 900))))
            start = -(-(offset + 3 + len(fragments[-1][1])) // 64) * 64
            output = OutputTensor(shard.name, shard.dtype, shape, start, part)
            whole = np.frombuffer(made.whole[shard.name], f"u{width}")
            elements = np.zeros(math.prod(shape), f"u{width}")
            for nest in part.nests:
                x, y = pairs_of(nest)
                elements[x] = whole[y]
            want += bytes(3) + fragments[-1][1]
            want += bytes(start - len(want)) + elements.tobytes()
            assert output.is_padded == (sum(len(pairs_of(n)[0]) for n in part.nests) < math.prod(shape))
            tensors.append(output)
            offset = start + output.nbytes
        contents = [want[t.offset : t.offset + t.nbytes] for t in tensors]
        nbytes = offset + 5 + 4 * len(tensors)

        def ending(crcs: Sequence[int], at: int = offset) -> list[tuple[int, bytes]]:
            return [(at + 5, b"".join(crc.to_bytes(4, "little") for crc in crcs))]

        file = OutputFile("made", header, tuple(tensors), nbytes, tuple(fragments), ending)
        last = ending([zlib.crc32(content) for content in contents])[0][1]
        want += bytes(5) + last
        room = bytearray(b"\xff" * nbytes)
        plan = make_plan(made.in_store(tmp_path) if in_store else made.in_memory(), [file])
        source = ObjectSource(plan.source) if in_store else MemorySource(made.views)
        outcome = execute(plan, source, MemoryTarget([memoryview(room)]), budget=Budget(workers, 4096))
        if in_store:
            source.close()
        assert room == want
        around = b"".join((header, *(data for _, data in fragments), last))
        assert outcome.files[0].digest == digest_of_file(around, [plain_digest(bytes(c)) for c in contents])


def test_replicas_are_compared_where_the_part_says_and_named_in_the_whole():
    made = MadeModel()
    whole = np.arange(24, dtype=np.uint32)
    made.add("w", "F32", (6, 4), whole, [(0, [Nest(0, 0, ((24, 1, 1),))]), (1, [Nest(0, 0, ((24, 1, 1),))])])
    other = bytearray(made.records[1])
    other[4 * 18] ^= 1
    made.records[1], made.crc32[1] = bytes(other), zlib.crc32(other)
    rows = Nest(0, 16, ((8, 1, 1),))
    output = OutputTensor("w", "F32", (2, 4), 0, TensorPart((6, 4), (rows,), (rows,)))
    assert (output.global_shape, output.global_address(2), output.is_padded) == ((6, 4), 18, False)

    def run(output: OutputTensor) -> None:
        file = OutputFile("made", b"", (output,), output.nbytes)
        target = MemoryTarget([memoryview(bytearray(output.nbytes))])
        execute(make_plan(made.in_memory(), [file]), MemorySource(made.views), target, budget=Budget(1, 4096))

    with pytest.raises(ContradictionError) as caught:
        run(output)
    assert caught.value.index_range == "element [4, 2]"
    assert output.part is not None
    run(replace(output, part=replace(output.part, compared=())))


def test_a_part_that_is_not_covered_is_a_fault_of_ours(monkeypatch):
    made = MadeModel()
    made.add("w", "F32", (8,), np.arange(8, dtype=np.uint32), [(0, [Nest(0, 0, ((8, 1, 1),))])])
    part = TensorPart((8,), (Nest(0, 2, ((4, 1, 1),)),), ())
    file = OutputFile("made", b"", (OutputTensor("w", "F32", (4,), 0, part),), 16)
    real = planner.compose
    monkeypatch.setattr(planner, "compose", lambda pieces, nests: real(pieces, (Nest(0, 2, ((3, 1, 1),)),)))
    with pytest.raises(ContradictionError, match="not covered exactly once") as caught:
        make_plan(made.in_memory(), [file])
    assert caught.value.got == "gap at elements 3-3"
