"""How a request to a store fails, and the errors that name the object."""

from __future__ import annotations

import enum

from xrank.errors import (
    AGAIN,
    ContradictionError,
    IncompleteError,
    OutputExistsError,
    UsageError,
    XrankError,
)

# Amazon S3 API Reference, "Error responses".
THROTTLED_CODES = frozenset({"SlowDown", "ServerBusy", "RequestLimitExceeded", "Throttling", "ThrottlingException"})
PASSING_CODES = frozenset(
    {
        *("BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"),
        *("RequestTimeout", "InternalError", "OperationAborted"),
    }
)
"""Codes whose request may succeed the next time: a damaged body is sent again whole."""


class FaultKind(enum.Enum):
    """Kinds of failures, by what helps."""

    MISSING = "missing"
    DENIED = "denied"
    CHANGED = "changed"
    """A condition on the object's etag does not hold."""
    EXISTS = "exists"
    """A condition that there is no object does not hold."""
    PASSING = "passing"
    """A connection or a server failed; the next request may succeed."""
    THROTTLED = "throttled"
    """The store asks for fewer requests."""
    REFUSED = "refused"
    """The store or the client does not accept the request, however often it is sent."""


class FaultError(Exception):
    """A failed request, as a backend reports it: its kind, and a text without URLs, headers and credentials."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


def make_error(fault: FaultError, url: str, what: str, *, tries: int = 1, seconds: float = 0.0) -> XrankError:
    """Return the error for a request that failed for good.

    Args:
        fault: the last failure.
        url: the object or the folder.
        what: the request, as a participle: ``"read at bytes 0 to 99"``.
        tries: number of requests that were sent.
        seconds: time from the first request to the last failure.
    """
    if fault.kind is FaultKind.MISSING:
        return IncompleteError(
            f"{url}: there is no such object",
            file=url,
            got=fault.text,
            next_step="check the URL, or wait until it is there",
        )
    if fault.kind is FaultKind.DENIED:
        return UsageError(
            f"{url} may not be {what}",
            file=url,
            got=fault.text,
            next_step="check the credentials in the environment, and their rights on this bucket",
        )
    if fault.kind is FaultKind.CHANGED:
        return ContradictionError(
            f"{url} changed while it was being read",
            file=url,
            got=fault.text,
            want="the object that was there at the start",
            next_step=f"let its writer finish, then {AGAIN}",
        )
    if fault.kind is FaultKind.EXISTS:
        return OutputExistsError(
            f"{url} exists", file=url, got=fault.text, next_step="give another output, or look who else writes there"
        )
    if fault.kind is FaultKind.REFUSED:
        return UsageError(
            f"{url} cannot be {what}", file=url, got=fault.text, next_step="check the URL and the endpoint"
        )
    times = "once" if tries == 1 else f"{tries} times in {seconds:.0f} s"
    return XrankError(
        f"{url} could not be {what}, tried {times}",
        file=url,
        got=fault.text,
        next_step=f"check the network and the store; then {AGAIN}, which goes on from finished files",
    )
