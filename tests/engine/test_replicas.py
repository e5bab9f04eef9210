"""Replicas in ranks' memories: digests tell equal from different however they lie; the near one is read."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.engine.engine_cases import MadeModel, MemorySource, box_nest, expected_file, lay_out, outputs_of, shuffled
from xrank.engine import replicas
from xrank.engine.buffers import MemoryTarget
from xrank.engine.executor import Budget, execute
from xrank.engine.planner import Plan, make_plan
from xrank.engine.replicas import digest_twins, find_different_twin, prefer_own_copies


class Watched(MemorySource):
    """Notes what is read."""

    def __init__(self, views) -> None:
        super().__init__(views)
        self.records: set[int] = set()

    def read_into(self, record, start, into):
        self.records.add(record)
        super().read_into(record, start, into)

    def fetch(self, record, start, nbytes, staging):
        self.records.add(record)
        return super().fetch(record, start, nbytes, staging)


def made_replicas(rng: random.Random, num_ranks: int = 4) -> tuple[MadeModel, Plan, np.ndarray]:
    """Return tensors in row blocks, each on several ranks, stored in any order of dims; and who holds each record."""
    made = MadeModel()
    for number in range(rng.randint(1, 4)):
        shape = (rng.randint(1, 9), rng.randint(1, 7), rng.randint(1, 5))
        whole = np.frombuffer(rng.randbytes(2 * int(np.prod(shape))), np.uint16)
        at = rng.randint(0, shape[0])
        pieces = []
        for low, high in ((0, at), (at, shape[0])):
            box = ((low, high), (0, shape[1]), (0, shape[2]))
            for rank in sorted(rng.sample(range(num_ranks), rng.randint(1, num_ranks))) if low < high else ():
                order = shuffled(rng.randint, range(3)) if rng.random() < 0.5 else range(3)
                pieces.append((rank, [box_nest(box, shape, order)]))
        made.add(f"t{number}", "BF16", shape, whole, pieces, has_checksum=False, noise=rng.randint(0, 3))
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made)))
    return made, plan, np.array(made.ranks, np.int64)


def digests(made: MadeModel, plan: Plan, holder: np.ndarray, num_ranks: int = 4) -> list[bytes]:
    found = []
    for rank in range(num_ranks):
        source = Watched(made.views)
        found.append(digest_twins(plan, holder, rank, source))
        assert all(holder[record] == rank for record in source.records), "a rank digests its own alone"
    return found


@pytest.mark.parametrize("chunk", [16, 64, 1 << 20])
def test_equal_replicas_have_equal_digests_and_any_change_is_found(monkeypatch, chunk) -> None:
    monkeypatch.setattr(replicas, "_CHUNK_NBYTES", chunk)
    rng, num_found = random.Random(7), 0
    for _ in range(60):
        made, plan, holder = made_replicas(rng)
        assert find_different_twin(plan, holder, digests(made, plan, holder)) is None
        # One byte of one replica, where the tensor has an element.
        tensor = next((t for t in plan.tensors if len(t.replicas)), None)
        if tensor is None:
            continue
        row = rng.randrange(len(tensor.replicas))
        record, nest = int(tensor.replicas.record[row]), tensor.replicas.nests[row]
        x = nest.x + sum(rng.randrange(n) * xs for n, xs, _ in nest.loops)
        content = bytearray(made.records[record])
        content[2 * x + rng.randint(0, 1)] ^= 4
        made.records[record] = bytes(content)
        different = find_different_twin(plan, holder, digests(made, plan, holder))
        assert different is not None
        assert (different[0].output.name, different[1]) == (tensor.output.name, row)
        num_found += 1
    assert num_found > 40


def test_each_rank_reads_its_own_and_makes_the_same() -> None:
    rng, num_own = random.Random(8), 0
    for _ in range(60):
        made, plan, holder = made_replicas(rng)
        want = expected_file(plan.files[0].output, made.whole)
        for rank in range(4):
            near = prefer_own_copies(plan, holder, rank)
            source, room = Watched(made.views), bytearray(len(want))
            execute(near, source, MemoryTarget([memoryview(room)]), budget=Budget(1, 4096))
            assert bytes(room) == want
            assert all(len(tensor.replicas) == 0 for tensor in near.tensors)
            for shard in plan.source.shards:
                own = set(shard.record[holder[shard.record] == rank].tolist())
                assert own <= source.records, "what a rank holds it reads"
                num_own += len(own)
    assert num_own > 100


def test_a_tied_tensor_that_is_cut_otherwise_is_left_to_be_compared() -> None:
    made = MadeModel()
    whole = np.arange(24, dtype=np.uint16)
    rows = [(r, [box_nest(((2 * r, 2 * r + 2), (0, 6)), (4, 6))]) for r in range(2)]
    columns = [(r, [box_nest(((0, 4), (3 * r, 3 * r + 3)), (4, 6))]) for r in range(2)]
    made.add("embed", "BF16", (4, 6), whole, rows, has_checksum=False)
    made.add("head", "BF16", (4, 6), whole, columns, has_checksum=False)
    outputs = [output for output in outputs_of(made) if output.name == "embed"]
    plan = make_plan(made.in_memory(), lay_out(outputs), tied={"embed": ["head"]})
    holder = np.array(made.ranks, np.int64)
    assert digests(made, plan, holder, 2) == [b"", b""]
    near = prefer_own_copies(plan, holder, 1)
    assert len(next(iter(near.tensors)).replicas) == 2


def test_one_place_under_two_names_is_not_compared_with_itself() -> None:
    made = MadeModel()
    made.add("embed", "BF16", (2, 3), np.arange(6, dtype=np.uint16), [(0, [box_nest(((0, 2), (0, 3)), (2, 3))])])
    shard = made.shards[0]
    made.shards.append(type(shard)("head", *(getattr(shard, f) for f in ("dtype", "shape", "rank", "record", "nests"))))
    outputs = [output for output in outputs_of(made) if output.name == "embed"]
    plan = make_plan(made.in_memory(), lay_out(outputs), tied={"embed": ["head"]})
    assert digests(made, plan, np.zeros(1, np.int64), 1) == [b""]
