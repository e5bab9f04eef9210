"""A key that two ranks share, although all that they exchange goes through a store which anyone may read.

X25519 (RFC 7748) in Python, which takes about a millisecond. It needs no package, and keeps the key from readers alone:
whoever writes into the store can put another public key in place of a rank's.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from functools import cache

from xrank.errors import CorruptError
from xrank.system import after_fork_in_child

_P = 2**255 - 19
_A24 = 121665
_BASE_POINT = (9).to_bytes(32, "little")
_NBYTES = 32


def x25519(private: bytes, public: bytes) -> bytes:
    """Return the shared secret of a private and a public key, each of 32 bytes (RFC 7748, section 5)."""
    k = int.from_bytes(private, "little") & ~7 & (1 << 255) - 1 | 1 << 254
    x1 = int.from_bytes(public, "little") & (1 << 255) - 1
    x2, z2, x3, z3, swap = 1, 0, x1, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % _P, b * b % _P, d * a % _P, c * b % _P
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % _P, x1 * (da - cb) ** 2 % _P
        x2, z2 = aa * bb % _P, e * (aa + _A24 * e) % _P
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, _P - 2, _P) % _P).to_bytes(_NBYTES, "little")


class KeyPair:
    """The key pair of a process."""

    def __init__(self) -> None:
        self._private = secrets.token_bytes(_NBYTES)
        self.public = x25519(self._private, _BASE_POINT).hex()
        """For the others, in hexadecimal digits."""
        self._shared: dict[str, bytes] = {}

    def seal(self, secret: bytes, public: str, purpose: str) -> str:
        """Return a secret of 32 bytes for the owner of a public key alone; `unseal` on its side gives it back.

        Args:
            secret: to be sealed.
            public: the other's public key.
            purpose: never used twice.
        """
        if public not in self._shared:
            shared = x25519(self._private, bytes.fromhex(public))
            if not any(shared):  # RFC 7748, section 6.1: the other's is no point of large order
                raise CorruptError(
                    "the public key of a rank is damaged",
                    got=public[:80],
                    next_step="let all ranks use the same version of xrank",
                )
            self._shared[public] = shared
        keys = "".join(sorted((public, self.public)))
        pad = hmac.digest(self._shared[public], f"{purpose} {keys}".encode(), hashlib.sha256)
        return bytes(a ^ b for a, b in zip(secret, pad, strict=True)).hex()

    def unseal(self, sealed: str, public: str, purpose: str) -> bytes:
        """Return the secret that the owner of a public key has sealed for this one."""
        return bytes.fromhex(self.seal(bytes.fromhex(sealed), public, purpose))


@cache
def own_key_pair() -> KeyPair:
    """Return the key pair of this process."""
    return KeyPair()


after_fork_in_child(own_key_pair.cache_clear)
