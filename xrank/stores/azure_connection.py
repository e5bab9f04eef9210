"""Authorised requests to one container of Azure's blob storage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from xrank.stores.azure_account import AzureAccount
from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.http_connection import Answer, HttpConnection, encode_path, encode_query
from xrank.stores.object_connection import ObjectConnection, md5_text
from xrank.stores.settings import StoreSettings, check_https

_CODE = re.compile(r"\w{1,60}")
# Azure Storage REST reference, "Status and error codes" and "Blob service error codes".
_PASSING = frozenset({"Md5Mismatch", "InternalError", "OperationTimedOut", "RequestBodyIncomplete"})
_THROTTLED = frozenset({"ServerBusy"})
_MISSING = frozenset({"InvalidBlockList"})
_CHANGED = frozenset({"BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet"})


class AzureConnection(ObjectConnection):
    """Sends requests to one container; any thread may call it. Idle connections are kept until `close`.

    Args:
        root: ``az://container`` or ``abfs://container@account``.
        settings: patience, and whether plain http is allowed.
        variables: the environment: account, credentials, endpoint.
        url: for errors.

    Raises:
        UsageError: there are no credentials, or plain http is not allowed.
    """

    def __init__(self, root: str, settings: StoreSettings, variables: Mapping[str, str], url: str) -> None:
        container, _, host = root.partition("://")[2].partition("@")
        self._account = AzureAccount.from_environment(variables, host.partition(".")[0], url)
        check_https(self._account.endpoint, url, allow_http=settings.allow_http)
        parts = urlsplit(self._account.endpoint)
        self._path = f"{parts.path.rstrip('/')}/{container}"
        is_plain = parts.scheme == "http"
        self._http = HttpConnection(parts.netloc, is_plain=is_plain, timeout_seconds=settings.timeout_seconds)

    def send(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
    ) -> Answer:
        """Send one request and return its answer.

        Raises:
            FaultError: the request failed.
        """
        query = query or {}
        path = encode_path(f"{self._path}/{key}" if key else self._path)
        full = self._account.authorise(method, path, query, headers or {}, nbytes=len(body))
        text = "&".join(filter(None, (encode_query(query), self._account.sas)))
        answer = self._http.exchange(method, f"{path}?{text}" if text else path, full, body)
        if answer.status >= 300:
            raise make_fault(answer)
        return answer

    def put(self, key: str, data: bytes | memoryview, headers: Mapping[str, str]) -> Answer:
        """Write a small object; errors as `send_checked`."""
        return self.send_checked("PUT", key, {}, {"x-ms-blob-type": "BlockBlob", **headers}, data)

    def send_checked(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes | memoryview,
        md5: str | None = None,
    ) -> Answer:
        """Send a body with its MD5, which the store compares; errors as `send`. Damage on the way may pass."""
        md5 = md5 or md5_text(body)
        try:
            answer = self.send(method, key, query, {**headers, "Content-MD5": md5}, body)
        except FaultError as fault:
            # Azurite has other names for Azure's Md5Mismatch.
            if fault.text.endswith(("InvalidOperation", "InvalidXmlDocument", "Bad Request")):
                raise FaultError(FaultKind.PASSING, fault.text) from None
            raise
        # The store has compared the request's already.
        if answer.headers.get("content-md5") not in (None, md5):
            raise FaultError(FaultKind.PASSING, "the store received other bytes")
        return answer


def make_fault(answer: Answer) -> FaultError:
    """Return the fault of an answer that Azure has refused a request with."""
    status = answer.status
    found = _CODE.fullmatch(answer.headers.get("x-ms-error-code", ""))
    code = found[0] if found else ""
    shown = " ".join(filter(None, (str(status), answer.reason, code)))
    if code in _THROTTLED or status in (429, 503):
        return FaultError(FaultKind.THROTTLED, shown)
    if code in _PASSING or status >= 500 or status == 408:
        return FaultError(FaultKind.PASSING, shown)
    if code in _CHANGED or status == 412:
        return FaultError(FaultKind.CHANGED, shown)
    if code in _MISSING or status == 404:
        return FaultError(FaultKind.MISSING, shown)
    return FaultError(FaultKind.DENIED if status in (401, 403) else FaultKind.REFUSED, shown)
