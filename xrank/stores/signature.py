"""Signatures of requests to S3, version 4, and the credentials that make them.

Source: Amazon S3 API Reference, "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)".
The payload of objects is left unsigned, as the reference allows: they carry a checksum of their own.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from xrank.errors import UsageError

_UNSIGNED = "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key that signs requests; its text never shows the secrets."""

    key_id: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def find_credentials(variables: Mapping[str, str], url: str) -> Callable[[], Credentials]:
    """Return a function that gives the credentials now: those of the environment, else what botocore finds.

    botocore looks where Amazon's own tools do: profiles, single sign-on, roles of containers and instances.

    Raises:
        UsageError: there are none.
    """
    key_id, secret = variables.get("AWS_ACCESS_KEY_ID"), variables.get("AWS_SECRET_ACCESS_KEY")
    if key_id and secret:
        known = Credentials(key_id, secret, variables.get("AWS_SESSION_TOKEN") or variables.get("AWS_TOKEN"))
        return lambda: known
    try:
        import botocore.session
    except ImportError:
        found: Any = None
        next_step = (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or install botocore, which reads profiles and roles"
        )
    else:
        found = botocore.session.get_session().get_credentials()
        next_step = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if found is None:
        raise UsageError(f"{url} cannot be written without credentials", file=url, next_step=next_step)

    def refresh() -> Credentials:
        frozen = found.get_frozen_credentials()  # which fetches new ones before they expire
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    return refresh


@lru_cache(maxsize=8)
def _derive_key(secret: str, scope: str) -> bytes:
    """Return the key of a day, a region and a service."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def sign_request(
    method: str,
    host: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    credentials: Credentials,
    *,
    region: str,
    payload_sha256: str | None = None,
    now_seconds: float | None = None,
) -> dict[str, str]:
    """Return the headers of a request with its signature.

    Args:
        method: such as ``PUT``.
        host: host and port, as in the request's ``Host`` header.
        path: encoded path.
        query: encoded query, sorted.
        headers: the headers to sign; all of ``x-amz-*`` must be among them.
        credentials: the key.
        region: such as ``us-east-1``.
        payload_sha256: SHA-256 of the body in hex, which the store compares; None: the body is not signed.
        now_seconds: time since the epoch; None: now.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_seconds))
    payload = payload_sha256 or _UNSIGNED
    full = {**headers, "Host": host, "x-amz-content-sha256": payload, "x-amz-date": stamp}
    if credentials.token:
        full["x-amz-security-token"] = credentials.token
    lowered = {name.lower(): " ".join(text.split()) for name, text in full.items()}
    names = ";".join(sorted(lowered))
    lines = "".join(f"{name}:{lowered[name]}\n" for name in sorted(lowered))
    canonical = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}"
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(_derive_key(credentials.secret, scope), text.encode(), "sha256").hex()
    full["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return full
