"""What a rank that lends bytes, and one that asks for them, say over a socket.

    lender: a challenge of 32 bytes                          as soon as one connects
    reader: 32 bytes of its own, proof that it knows the token
    lender: proof that it does, too                          so a reader never takes another's bytes for these
    reader: view, start, nbytes                              as often as it likes, one request at a time
    lender: (kind, nbytes, that many bytes), …               data until all has been sent, or a text that says why not

The token itself never crosses a network; who may read the store that told it is one of the ranks. What is lent crosses
it as it is, like every tensor of a training.
"""

from __future__ import annotations

import hmac
from enum import IntEnum
from struct import Struct

__all__ = [
    "HELLO_NBYTES",
    "NONCE_NBYTES",
    "PART",
    "PROOF_NBYTES",
    "REQUEST",
    "TOKEN_NBYTES",
    "Part",
    "lender_proof",
    "reader_proof",
]

NONCE_NBYTES = PROOF_NBYTES = TOKEN_NBYTES = 32
HELLO_NBYTES = NONCE_NBYTES + PROOF_NBYTES
REQUEST = Struct("<QQQ")
PART = Struct("<BQ")


class Part(IntEnum):
    """What a part of an answer holds."""

    DATA = 0
    REFUSED = 1
    """Why nothing of it will be sent: the request is for bytes that there are not."""
    FAILED = 2
    """Why no more can be sent: to read them failed."""


def reader_proof(token: bytes, challenge: bytes, nonce: bytes) -> bytes:
    """Return what only who knows the token can answer to a lender's challenge."""
    return hmac.digest(token, b"reader" + challenge + nonce, "sha256")


def lender_proof(token: bytes, challenge: bytes, nonce: bytes) -> bytes:
    """Return what only who knows the token can answer to a reader's nonce."""
    return hmac.digest(token, b"lender" + challenge + nonce, "sha256")
