"""Digests against their definition, computed plainly."""

import itertools
import random

import pytest
import xxhash

from tests.engine.engine_cases import plain_digest
from xrank.engine.windows import BLOCK_NBYTES, TensorDigest, digest_of_file


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


def test_a_digest_of_missing_bytes_is_not_given():
    digest = TensorDigest(100_000)
    digest.add(0, memoryview(bytes(70_000)))
    with pytest.raises(AssertionError, match="1 blocks"):
        digest.digest()
    digest.add(70_000, memoryview(bytes(30_000)))
    assert digest.digest() == plain_digest(bytes(100_000))


def test_a_file_is_its_header_and_its_tensors():
    one, two = plain_digest(b"one"), plain_digest(b"two")
    assert digest_of_file(b"head", [one, two]) == xxhash.xxh3_128_digest(b"head" + one + two)
    assert digest_of_file(b"head", []) == xxhash.xxh3_128_digest(b"head")
    assert digest_of_file(b"head", [two, one]) != digest_of_file(b"head", [one, two])
