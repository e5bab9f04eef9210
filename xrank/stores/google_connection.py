"""Authorised requests to one bucket of Google Cloud Storage, by its XML API, by which obstore reads, too.

The variables are those that object_store takes for reading (its GoogleConfigKey).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from xrank.errors import UsageError
from xrank.stores.answer_xml import decode_text, find_text
from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.http_connection import Answer, HttpConnection, encode_path, encode_query
from xrank.stores.object_connection import ObjectConnection, md5_text
from xrank.stores.settings import StoreSettings, check_https

CONDITION = "x-goog-if-generation-match"
"""A header with the generation of the object to replace; 0 allows a new object only."""
GENERATION = "x-goog-generation"
"""A header of answers."""
_ENDPOINT = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_CODE = re.compile(r"\w{1,60}")


class GoogleConnection(ObjectConnection):
    """Sends requests to one bucket; any thread may call it. Idle connections are kept until `close`.

    Args:
        root: ``gs://bucket``.
        settings: patience, and whether plain http is allowed.
        variables: the environment: credentials, endpoint.
        url: for errors.

    Raises:
        UsageError: there are no credentials, or plain http is not allowed.
    """

    def __init__(self, root: str, settings: StoreSettings, variables: Mapping[str, str], url: str) -> None:
        account = _read_account(variables, url)
        endpoint = variables.get("GOOGLE_BASE_URL") or account.get("gcs_base_url") or _ENDPOINT
        check_https(endpoint, url, allow_http=settings.allow_http)
        token = variables.get("GOOGLE_BEARER_TOKEN")
        self._token: Callable[[], str] = (lambda: token) if token else _find_tokens(account, url)
        parts = urlsplit(endpoint)
        self._path = f"{parts.path.rstrip('/')}/{root.partition('://')[2]}"
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
        """Send one request and return its answer; all methods raise FaultError where one fails."""
        path = encode_path(f"{self._path}/{key}" if key else self._path)
        full = {**(headers or {}), "Authorization": f"Bearer {self._token()}"}
        answer = self._http.exchange(method, f"{path}?{encode_query(query)}" if query else path, full, body)
        if answer.status >= 300:
            raise make_fault(answer)
        return answer

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """Make an object; the store refuses a body whose MD5 is another."""
        md5 = md5_text(body)
        answer = self.send("PUT", key, query, {**headers, "Content-MD5": md5}, body)
        found = re.search(r"md5=([\w+/=]+)", answer.headers.get("x-goog-hash", ""))
        if found is not None and found[1] != md5 and not query:  # composed objects have none
            raise FaultError(FaultKind.PASSING, "the store received other bytes")
        return answer

    def find_condition(self, key: str, *, replaces: bool, if_version: str | None) -> dict[str, str]:
        """Return the header that lets a request make an object only in the right place: a generation, not an etag."""
        if if_version is None:
            return {} if replaces else {CONDITION: "0"}
        there = self.look_at(key)
        if there is None or there.get("etag") != if_version:
            raise FaultError(FaultKind.CHANGED, "it has another version")
        return {CONDITION: there[GENERATION]}


def make_fault(answer: Answer) -> FaultError:
    """Return the fault of an answer that Google has refused a request with.

    Source: Cloud Storage documentation, "HTTP status and error codes for XML API".
    """
    status = answer.status
    found = _CODE.fullmatch(find_text(decode_text(answer), "Code") or "")
    code = found[0] if found else ""
    shown = " ".join(filter(None, (str(status), answer.reason, code)))
    # 409: another request changes the same object at this moment.
    if code == "BadDigest" or status >= 500 or status in (408, 409):
        return FaultError(FaultKind.THROTTLED if status == 503 else FaultKind.PASSING, shown)
    kinds = {
        401: FaultKind.DENIED,
        403: FaultKind.DENIED,
        404: FaultKind.MISSING,
        412: FaultKind.CHANGED,
        429: FaultKind.THROTTLED,
    }
    return FaultError(kinds.get(status, FaultKind.REFUSED), shown)


def _read_account(variables: Mapping[str, str], url: str) -> dict[str, Any]:
    """Return the service account that the environment names; empty where it names none."""
    text = variables.get("GOOGLE_SERVICE_ACCOUNT_KEY")
    path = variables.get("GOOGLE_SERVICE_ACCOUNT") or variables.get("GOOGLE_SERVICE_ACCOUNT_PATH")
    try:
        if not text and path:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        account = json.loads(text) if text else {}
    except (OSError, ValueError, RecursionError) as error:
        account = type(error).__name__
    if not isinstance(account, dict):
        raise UsageError(
            f"{url}: the service account in the environment cannot be read",
            file=url,
            got=account if isinstance(account, str) else "another JSON value",
            want="the JSON of a service account's key",
            next_step="set GOOGLE_SERVICE_ACCOUNT to the file of the key that Google made",
        ) from None
    return account


def _find_tokens(account: Mapping[str, Any], url: str) -> Callable[[], str]:
    """Return a function that gives a token of a service account, or of the credentials that google-auth finds."""
    try:
        import google.auth
        from google.auth.transport.requests import Request
        from google.oauth2.service_account import Credentials
    except ImportError:
        raise UsageError(
            f"{url} cannot be written without credentials",
            file=url,
            next_step="set GOOGLE_BEARER_TOKEN, or install google-auth and requests, which read service accounts, "
            "logins and roles",
        ) from None
    try:
        if account:
            credentials: Any = Credentials.from_service_account_info(account, scopes=[_SCOPE])
        else:
            credentials = google.auth.default(scopes=[_SCOPE])[0]
    except Exception as error:  # its text may show parts of credentials
        raise UsageError(
            f"{url} cannot be written with the credentials that google-auth finds",
            file=url,
            got=type(error).__name__,
            next_step="set GOOGLE_APPLICATION_CREDENTIALS, or log in by gcloud auth application-default login",
        ) from None
    lock = threading.Lock()

    def get_token() -> str:
        try:
            with lock:
                if not credentials.valid:
                    credentials.refresh(Request())
                return str(credentials.token)
        except Exception as error:  # its text may show parts of credentials
            raise FaultError(FaultKind.DENIED, f"google-auth: {type(error).__name__}") from None

    return get_token
