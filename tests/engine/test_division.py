"""Plans divided among ranks: every window made once, and what the ranks find joined to what one execution finds."""

import random
from itertools import chain, pairwise

import numpy as np
import pytest

from tests.engine.engine_cases import MadeModel, MemorySource, add_random, expected_file, lay_out, outputs_of
from xrank.engine import executor, windows
from xrank.engine.buffers import MemoryTarget
from xrank.engine.executor import Budget, Outcome, execute
from xrank.engine.planner import Plan, make_plan
from xrank.engine.rounds import divide
from xrank.engine.windows import JoinedFile, RecordChecksums, read_rest


@pytest.fixture
def small_windows(monkeypatch):
    for module in (windows, executor):
        monkeypatch.setattr(module, "WINDOW_NBYTES", 512)
    monkeypatch.setattr(windows, "BLOCK_NBYTES", 200)  # some lie in a window, some across two ranks'


def random_plan(rng: random.Random) -> tuple[MadeModel, Plan]:
    made = MadeModel()
    for i in range(rng.randint(1, 6)):
        shape = [rng.randint(0 if rng.random() < 0.1 else 1, 40) for _ in range(rng.randint(0, 3))]
        add_random(made, rng.randint, f"t{i}", shape, dtype=rng.choice(["F32", "BF16", "U8"]), num_cuts=4)
    files = lay_out(outputs_of(made), rng.randint(1, 4), rng.choice([8, 100, 2000]))
    return made, make_plan(made.in_memory(), files)


def refuse(record: int, crc: int) -> None:
    raise AssertionError(f"record {record} is right, and {crc:08x} was computed")


class Reading(MemorySource):
    """Knows which records were read."""

    def __init__(self, views):
        super().__init__(views)
        self.records = set()

    def read_into(self, record, start, into):
        self.records.add(record)
        super().read_into(record, start, into)

    def fetch(self, record, start, nbytes, staging):
        self.records.add(record)
        return super().fetch(record, start, nbytes, staging)


def random_holder(rng: random.Random, plan: Plan, num_ranks: int) -> np.ndarray | None:
    """Return who holds each record, or None: files."""
    if rng.random() < 0.5:
        return None
    return np.array([rng.randrange(num_ranks) for _ in range(len(plan.source.records))], np.int64)


def run_shared(made: MadeModel, plan: Plan, files: list[int], num_ranks: int, round_nbytes: int, holder):
    """Make files as so many ranks would; return the files' bytes, what is said of them, and who read what."""
    room = [bytearray(file.output.nbytes) for file in plan.files]
    target = MemoryTarget([memoryview(view) for view in room])
    division = divide(plan, files, num_ranks, round_nbytes=round_nbytes, holder=holder)
    own = [RecordChecksums(plan.source.records, refuse, left_open=division.left_open) for _ in range(num_ranks)]
    sources = [Reading(made.views) for _ in range(num_ranks)]
    whole, staging = RecordChecksums(plan.source.records, refuse), memoryview(bytearray(64))
    finished = {}
    for number, round_ in enumerate(division.rounds):
        joined = {index: JoinedFile(plan.files[index].output, index) for index in round_.files}
        for rank in random.Random(number).sample(range(num_ranks), num_ranks):
            parts = []
            outcome: Outcome = execute(
                plan, sources[rank], target, budget=Budget(2, 4096), shares=round_.shares[rank],
                checksums=own[rank], finish_share=parts.append,
            )  # fmt: skip
            assert outcome.files == {} and sorted(part.index for part in parts) == sorted(round_.shares[rank])
            read_rest(own[rank], sources[rank], division.find_records(number, rank), staging)
            for part in parts:
                joined[part.index].join(part)
            for part in own[rank].take_parts(division.find_records(number)):
                whole.join(*part)
        read_rest(whole, MemorySource(made.views), division.find_records(number), staging)
        finished |= {index: file.finish()[0] for index, file in joined.items()}
    num_checksums = sum(checksums.num_checked for checksums in own) + whole.num_checked
    return room, finished, num_checksums, division, sources


def test_ranks_make_what_one_execution_makes(small_windows):
    rng = random.Random(20261122)
    some_open = some_rounds = 0
    for _ in range(150):
        made, plan = random_plan(rng)
        files = sorted(rng.sample(range(len(plan.files)), rng.randint(0, len(plan.files))))
        num_ranks = rng.randint(1, 5)
        room, finished, num_checksums, division, sources = run_shared(
            made, plan, files, num_ranks, rng.choice([1, 700, 1 << 30]), random_holder(rng, plan, num_ranks)
        )
        alone = execute(
            plan, MemorySource(made.views), MemoryTarget([memoryview(bytearray(len(r))) for r in room]),
            budget=Budget(1, 4096), files=files,
        )  # fmt: skip
        assert finished == alone.files
        assert num_checksums == alone.num_checksums
        for index, file in enumerate(plan.files):
            want = expected_file(file.output, made.whole) if index in files else bytes(file.output.nbytes)
            assert bytes(room[index]) == want
        # The proof needs it: what two ranks read, none of them compares alone.
        for record in range(len(plan.source.records)):
            readers = [rank for rank, source in enumerate(sources) if record in source.records]
            assert all(division.first_rank[record] <= rank <= division.last_rank[record] for rank in readers)
        some_open += division.left_open.any()
        some_rounds += len(division.rounds) > 1
    assert some_open > 50 and some_rounds > 20


def test_each_window_is_of_one_rank_and_all_ranks_have_as_many(small_windows):
    rng = random.Random(20261123)
    for _ in range(200):
        _, plan = random_plan(rng)
        num_ranks, files = rng.randint(1, 7), list(range(len(plan.files)))
        holder = random_holder(rng, plan, num_ranks)
        for round_ in divide(plan, files, num_ranks, round_nbytes=rng.choice([1, 2000, 1 << 30]), holder=holder).rounds:
            made = [(i, w) for share in round_.shares for i, stretches in share.items() for w in chain(*stretches)]
            wanted = [(i, w) for i in round_.files for w in range(-(-plan.files[i].output.nbytes // 512))]
            assert (made if holder is None else sorted(made)) == wanted
            counts = [sum(map(len, chain(*share.values()))) for share in round_.shares]
            if holder is None:
                assert max(counts) - min(counts) <= 1
            else:
                assert max(counts) <= -(-105 * len(wanted) // (100 * num_ranks))
            for stretches in (stretches for share in round_.shares for stretches in share.values()):
                assert stretches and all(stretches)
                assert all(a.stop < b.start for a, b in pairwise(stretches))


def test_rounds_have_the_bytes_that_were_asked_for():
    made = MadeModel()
    for i in range(10):
        add_random(made, random.Random(i).randint, f"t{i}", (100,), dtype="U8")
    plan = make_plan(made.in_memory(), lay_out(outputs_of(made), 10, 96))  # files of about 200 bytes
    files = [0, 1, 3, 4, 5, 7, 9]
    assert [r.files for r in divide(plan, files, 2, round_nbytes=250).rounds] == [(0, 1, 3), (4, 5, 7), (9,)]
    assert [r.files for r in divide(plan, files, 2).rounds] == [tuple(files)]
    assert divide(plan, [], 2).rounds == ()
    last = [divide(plan, files, 2, round_nbytes=250).last_round[i] for i in range(len(plan.source.records))]
    assert all(a <= b for a, b in pairwise(n for n in last if n >= 0)) and -1 in last
