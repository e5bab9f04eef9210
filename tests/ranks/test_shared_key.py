"""The key exchange, by the examples of RFC 7748 and against another implementation."""

from __future__ import annotations

import pytest

from xrank.errors import CorruptError
from xrank.ranks.meeting import KeyPair, x25519

EXAMPLES = [
    (
        "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
        "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
        "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
    ),
    (
        "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
        "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
        "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
    ),
]


@pytest.mark.parametrize(("private", "public", "shared"), EXAMPLES)
def test_the_examples_of_the_rfc(private: str, public: str, shared: str) -> None:
    assert x25519(bytes.fromhex(private), bytes.fromhex(public)).hex() == shared


def test_another_implementation_agrees() -> None:
    keys = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.x25519")
    for number in range(20):
        private, other = bytes([number] * 32), bytes([number + 100] * 32)
        public = keys.X25519PrivateKey.from_private_bytes(other).public_key()
        want = keys.X25519PrivateKey.from_private_bytes(private).exchange(public)
        assert x25519(private, public.public_bytes_raw()) == want


def test_only_the_owner_of_the_key_unseals() -> None:
    a, b, stranger, secret = KeyPair(), KeyPair(), KeyPair(), bytes(range(32))
    sealed = a.seal(secret, b.public, "meeting 1")
    assert b.unseal(sealed, a.public, "meeting 1") == secret
    assert b.unseal(sealed, a.public, "meeting 2") != secret
    assert stranger.unseal(sealed, a.public, "meeting 1") != secret
    assert sealed not in (secret.hex(), a.seal(secret, b.public, "meeting 2"))
    with pytest.raises(CorruptError):
        a.seal(secret, bytes(32).hex(), "meeting 3")
