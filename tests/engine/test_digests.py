"""Digests against their definition, computed plainly."""

import itertools
import random
import threading

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.engine_cases import plain_digest
from xrank.engine.windows import BLOCK_NBYTES, TensorDigest, digest_of_file, digest_text


def digest_of(data: bytes, cuts: list[int], rng: random.Random) -> bytes:
    bounds = sorted({0, len(data), *cuts})
    parts = list(itertools.pairwise(bounds))
    rng.shuffle(parts)
    digest = TensorDigest(len(data))
    for start, end in parts:
        digest.add(start, memoryview(data)[start:end])
    return digest.digest()


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 131_072, 300_001])
def test_any_split_in_any_order(nbytes):
    rng = random.Random(nbytes)
    data = rng.randbytes(nbytes)
    for num_cuts in (0, 1, 5, 60):
        cuts = [rng.randint(0, nbytes) for _ in range(num_cuts)] + [BLOCK_NBYTES] * (nbytes > BLOCK_NBYTES)
        assert digest_of(data, cuts, rng) == plain_digest(data)


@given(st.binary(min_size=1, max_size=3), st.lists(st.integers(0, 140_000), max_size=8), st.randoms())
@settings(deadline=None)
def test_cuts_that_hypothesis_makes(pattern, cuts, rng):
    data = (pattern * 140_000)[:140_000]
    assert digest_of(data, cuts, rng) == plain_digest(data)


def test_each_byte_counts():
    data = bytearray(200_000)
    digests = {plain_digest(data)}
    for position in (0, 65_535, 65_536, 199_999):
        data[position] ^= 1
        digests.add(digest_of(bytes(data), [100], random.Random(1)))
    assert len(digests) == 5


def test_a_digest_of_missing_bytes_is_not_given():
    digest = TensorDigest(100_000)
    digest.add(0, memoryview(bytes(70_000)))
    with pytest.raises(AssertionError, match="1 blocks"):
        digest.digest()
    digest.add(70_000, memoryview(bytes(30_000)))
    assert digest.digest() == plain_digest(bytes(100_000))


def test_many_threads():
    data = random.Random(4).randbytes(1_000_000)
    digest = TensorDigest(len(data))
    parts = [(start, min(start + 777, len(data))) for start in range(0, len(data), 777)]
    random.Random(5).shuffle(parts)

    def work(own: list[tuple[int, int]]) -> None:
        for start, end in own:
            digest.add(start, memoryview(data)[start:end])

    threads = [threading.Thread(target=work, args=(parts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digest.digest() == plain_digest(data)


def test_a_file_is_its_header_and_its_tensors():
    one, two = plain_digest(b"one"), plain_digest(b"two")
    assert digest_of_file(b"head", [one, two]) == xxhash.xxh3_128_digest(b"head" + one + two)
    assert digest_of_file(b"head", []) == xxhash.xxh3_128_digest(b"head")
    assert digest_of_file(b"head", [two, one]) != digest_of_file(b"head", [one, two])


def test_text():
    assert digest_text(bytes(range(16))) == "xxh3:000102030405060708090a0b0c0d0e0f"
