"""Signed requests to one S3 bucket."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from xrank.stores.faults import PASSING_CODES, THROTTLED_CODES, FaultError, FaultKind
from xrank.stores.http_connection import MOST_NBYTES, Answer, HttpConnection, encode_path, encode_query
from xrank.stores.object_connection import ObjectConnection
from xrank.stores.settings import StoreSettings, check_https
from xrank.stores.signature import find_credentials, sign_request

_CODE = re.compile(rb"<Code>(\w{1,60})</Code>")


class S3Connection(ObjectConnection):
    """Sends signed requests to one bucket; any thread may call it. Idle connections are kept until `close`.

    Args:
        bucket: name of the bucket.
        settings: patience, and whether plain http is allowed.
        variables: the environment: credentials, ``AWS_REGION``, ``AWS_ENDPOINT_URL``.
        url: for errors.

    Raises:
        UsageError: there are no credentials, or plain http is not allowed.
    """

    def __init__(self, bucket: str, settings: StoreSettings, variables: Mapping[str, str], url: str) -> None:
        self._region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
        endpoint = find_endpoint(variables)
        self._credentials = find_credentials(variables, url)
        in_host = variables.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("1", "true", "yes")
        if endpoint is None:
            endpoint = f"https://s3.{self._region}.amazonaws.com"
            # A certificate for *.s3.amazonaws.com does not hold for names with dots.
            in_host = "." not in bucket
        parts = urlsplit(endpoint)
        is_plain = parts.scheme == "http"
        allowed = settings.allow_http or variables.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
        check_https(endpoint, url, allow_http=allowed)
        host = f"{bucket}.{parts.netloc}" if in_host else parts.netloc
        self._path = parts.path.rstrip("/") + ("/" if in_host else f"/{bucket}/")
        self._http = HttpConnection(host, is_plain=is_plain, timeout_seconds=settings.timeout_seconds)

    def send(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
        into: memoryview | None = None,
        most_nbytes: int = MOST_NBYTES,
    ) -> Answer:
        """Send one request and return its answer; see `HttpConnection.exchange`.

        Raises:
            FaultError: the request failed.
        """
        path, text = encode_path(self._path + key), encode_query(query or {})
        # A list of parts that arrives damaged makes an object of other parts; parts have a checksum in their headers.
        payload_sha256 = hashlib.sha256(body).hexdigest() if method == "POST" else None
        signed = sign_request(
            method,
            self._http.host,
            path,
            text,
            headers or {},
            self._credentials(),
            region=self._region,
            payload_sha256=payload_sha256,
        )
        answer = self._http.exchange(
            method, f"{path}?{text}" if text else path, signed, body, into, most_nbytes=most_nbytes
        )
        code = _CODE.search(answer.body[:4096])
        # A completion may fail after the store has begun a good answer (S3 API reference, CompleteMultipartUpload).
        is_error = method == "POST" and code is not None and b"<Error>" in answer.body[:4096]
        if answer.status >= 300 or is_error:
            raise make_fault(answer.status, answer.reason, code[1].decode() if code else "")
        return answer


def find_endpoint(variables: Mapping[str, str]) -> str | None:
    """Return the address that the environment sends requests to S3 to; None: Amazon's."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((text for name in names if (text := variables.get(name))), None)


def make_fault(status: int, reason: str, code: str) -> FaultError:
    """Return the fault of an answer that S3 has refused a request with."""
    shown = " ".join(filter(None, (str(status), reason, code)))
    if code in THROTTLED_CODES or status in (429, 503):
        return FaultError(FaultKind.THROTTLED, shown)
    if code in PASSING_CODES or status >= 500 or status in (200, 408):
        return FaultError(FaultKind.PASSING, shown)
    kinds = {404: FaultKind.MISSING, 401: FaultKind.DENIED, 403: FaultKind.DENIED, 412: FaultKind.CHANGED}
    # Two requests with conditions at one time: S3 answers one of them so, and asks for it again.
    if status == 409:
        return FaultError(FaultKind.PASSING, shown)
    if status in (301, 307):
        shown += ": the bucket is in another region; set AWS_REGION"
    return FaultError(kinds.get(status, FaultKind.REFUSED), shown)


def crc32_text(crc32: int) -> str:
    """Return a checksum as headers and bodies of S3 have it."""
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()
