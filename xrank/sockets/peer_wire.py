"""Messages over a socket between a rank that lends bytes and a reader.

    lender: a challenge of 32 bytes                          on connection
    reader: a nonce of 32 bytes, proof that it knows the token
    lender: proof that it knows the token too                so a reader never accepts another process's bytes
    reader: view, start, nbytes                              one request at a time, any number of them
    lender: (kind, nbytes, that many bytes), …               data until all has been sent, or a text with the reason

Neither connections nor the ranks' store carry the token: it derives from a secret that the ranks share. Bytes cross the
network unencrypted, like all tensors of a training.
"""

from __future__ import annotations

import hmac
from enum import IntEnum
from struct import Struct

NONCE_NBYTES = PROOF_NBYTES = TOKEN_NBYTES = 32
HELLO_NBYTES = NONCE_NBYTES + PROOF_NBYTES
REQUEST = Struct("<QQQ")
PART = Struct("<BQ")


class AnswerKind(IntEnum):
    """The content of a part of an answer."""

    DATA = 0
    REFUSED = 1
    """Reason of a refusal: the requested bytes do not exist."""
    FAILED = 2
    """Reason why no more can be sent: reading the bytes failed."""


def derive_token(secret: bytes, name: str) -> bytes:
    """Return the token of the service of that name, for processes that share a secret."""
    return hmac.digest(secret, b"service" + name.encode(), "sha256")


def reader_proof(token: bytes, challenge: bytes, nonce: bytes) -> bytes:
    """Return the answer to a lender's challenge that requires the token."""
    return hmac.digest(token, b"reader" + challenge + nonce, "sha256")


def lender_proof(token: bytes, challenge: bytes, nonce: bytes) -> bytes:
    """Return the answer to a reader's nonce that requires the token."""
    return hmac.digest(token, b"lender" + challenge + nonce, "sha256")
