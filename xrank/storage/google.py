"""Buckets of Google Cloud Storage: obstore reads them; writing goes by sessions of google-auth and the XML API.

obstore would send no checksum along, and google-cloud-storage sends names and marks in a body that no checksum covers.
The parts of KEY are objects of their own, .xrank-parts/KEY/UPLOAD-NUMBER-MD5, so that no reader of a folder finds them,
and a list of them says all that a later run must know. Each is written where none is, with its MD5, which the store
compares: a name has one content. A request composes at most 32 objects, so that the parts of a large object are joined
in steps. Each request names the generations of its sources: those that were listed, with their sizes. The last one has
the condition on the object. Google's own uploads in parts are no way: their last request knows no condition.

Source: Cloud Storage documentation, XML API: "Upload an object", "Compose objects", "List objects", "Request
preconditions", "XML API multipart uploads" (limitations). The variables are those that object_store takes for reading.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from msgspec import Struct

from xrank.environment import environ
from xrank.errors import require
from xrank.storage.client import (
    ABSENT,
    FaultError,
    FaultKind,
    check_https,
    hide_debug_logs,
    make_credentials_error,
    make_fault,
    make_session,
    or_none,
)
from xrank.storage.obstore_backend import PartsBackend
from xrank.storage.uploads import PART_NAME, Body, KnownParts, UploadedObject, UploadedPart, part_name

PARTS = ".xrank-parts"
"""Prefix in the bucket of all parts."""
_CONDITION = "x-goog-if-generation-match"
"""A header with the generation of the object to replace; 0 allows a new object only."""
_GENERATION = "x-goog-generation"
_MARK = "x-goog-meta-xrank-stage"
_ENDPOINT = "https://storage.googleapis.com"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_MOST_SOURCES = 32
_MOST_LISTS = 4
"""Lists of an object's parts until one of them is empty."""
_SENDERS = 8
"""Requests at once that join or delete parts."""
_LISTED = re.compile(rf"{re.escape(PARTS)}/(.+)/([0-9a-f]{{22}})-(?:\d{{5}}|joined)-[0-9a-f]{{32}}", re.DOTALL)


class _Source(Struct, frozen=True):
    """An object that is to become a piece of another one."""

    key: str
    nbytes: int
    generation: str | None
    """None where the store lists none."""


class GoogleBackend(PartsBackend):
    """One bucket; see `xrank.storage.uploads.WritableBackend`."""

    _session: Any = None
    _address = ""

    def check_writable(self, url: str) -> None:
        """Make the session; raise UsageError without google-auth or credentials."""
        if self._session is not None:
            return
        variables = environ()
        account = _read_account(variables, url)
        endpoint = variables.get("GOOGLE_BASE_URL") or account.get("gcs_base_url") or _ENDPOINT
        check_https(endpoint, url, allow_http=self._settings.allow_http)
        require("google.auth", f"writing {url}")
        from google.auth.transport.requests import AuthorizedSession

        hide_debug_logs("google", "urllib3.connectionpool")
        self._address = f"{endpoint.rstrip('/')}/{self._root.partition('://')[2]}"
        session = AuthorizedSession(_find_credentials(variables, account, url))
        self._session = make_session(session, self._settings.connections)

    def put(self, key: str, data: bytes | memoryview, condition: str | None, mark: str = "") -> str:
        """Write an object at one instant and return its version; the store refuses it if its MD5 is another."""
        headers = self._condition(key, condition) | ({_MARK: mark} if mark else {})
        return self._put(key, Body(data), headers, hashlib.md5(data, usedforsecurity=False).digest())

    def _delete(self, key: str) -> None:
        self._send("DELETE", key)

    def look(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent."""
        found = self._look(key)
        if found is None:
            return None
        return UploadedObject(int(found.get("content-length", -1)), found.get("etag", ""), found.get(_MARK))

    def put_part(self, key: str, upload_id: str, part: UploadedPart, data: Body) -> str:
        """Upload a part; the store refuses it if its MD5 is another."""
        name = f"{PARTS}/{key}/{part_name(upload_id, part)}"
        try:
            self._put(name, data, {_CONDITION: "0"}, bytes.fromhex(part.etag.strip('"')))
        except FaultError as fault:
            if fault.kind is not FaultKind.CHANGED:
                raise
            there = self._look(name)  # an answer was lost; an object of this name has this content
            if there is None or there.get("content-length") != str(part.nbytes):
                raise FaultError(FaultKind.PASSING, fault.text) from None
        return part.etag

    def list_parts(self, key: str, upload_id: str) -> KnownParts:
        """Return the parts that are in the store; an upload that has only its id has none."""
        found: KnownParts = {}
        for source in self._list(f"{PARTS}/{key}/{upload_id}-"):
            match = PART_NAME.fullmatch(source.key.rpartition("/")[2])
            if match is not None:
                found[int(match[2])] = source.nbytes, f'"{match[3]}"', None
        return found

    def complete(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], mark: str, condition: str | None
    ) -> None:
        """Make the object of the parts, and remove them."""
        there = {(one.key, one.nbytes): one for one in self._list(f"{PARTS}/{key}/{upload_id}-")}
        names = [f"{PARTS}/{key}/{part_name(upload_id, part)}" for part in parts]
        wanted = [(name, part.nbytes) for name, part in zip(names, parts, strict=True)]
        sources = [there[one] for one in wanted if one in there]
        if len(sources) < len(parts):  # they go once the object is there: this stage may have made it
            raise FaultError(FaultKind.MISSING, f"{len(sources)} of {len(parts)} parts")
        while len(sources) > _MOST_SOURCES:
            groups = [sources[start : start + _MOST_SOURCES] for start in range(0, len(sources), _MOST_SOURCES)]
            sources = _run(lambda group: self._join(f"{PARTS}/{key}/{upload_id}", group), groups)
        self._compose(key, sources, {_MARK: mark, **self._condition(key, condition)})
        self._clear(key, names)

    def abort(self, key: str, upload_id: str) -> None:
        """Remove the parts of an upload; they may be gone.

        Those of other uploads go, too, where readers see the object: a damaged record may have left them.
        """
        self._clear(key, (), upload_id if self._look(key) is None else "")

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return (key, id) of the uploads below a prefix."""
        matches = [_LISTED.fullmatch(source.key) for source in self._list(f"{PARTS}/{prefix}")]
        return [*dict.fromkeys((match[1], match[2]) for match in matches if match is not None)]

    def _look(self, key: str) -> Mapping[str, str] | None:
        """Return the headers of an object; None if it is absent."""
        answer = or_none(lambda: self._send("HEAD", key))
        return None if answer is None else answer.headers

    def _condition(self, key: str, condition: str | None) -> dict[str, str]:
        """Return the header that lets a request make an object only in the right place: a generation, not an etag."""
        if condition is None:
            return {}
        if condition == ABSENT:
            return {_CONDITION: "0"}
        there = self._look(key)
        if there is None or there.get("etag") != condition:
            raise FaultError(FaultKind.CHANGED, "it has another version")
        return {_CONDITION: there.get(_GENERATION, "")}

    def _put(
        self, key: str, data: Body, headers: Mapping[str, str], md5: bytes, query: Mapping[str, str] | None = None
    ) -> str:
        """Make an object and return its etag; the store refuses a body whose MD5 is another."""
        text = base64.b64encode(md5).decode()
        answer = self._send("PUT", key, query, {**headers, "Content-MD5": text}, data)
        found = re.search(r"md5=([\w+/=]+)", answer.headers.get("x-goog-hash", ""))
        if found is not None and found[1] != text and not query:  # composed objects have none
            raise FaultError(FaultKind.PASSING, "the store received other bytes")
        return str(answer.headers.get("etag", ""))

    def _join(self, stem: str, sources: Sequence[_Source]) -> _Source:
        """Compose the sources into an object named after them, unless it is there from an interrupted run."""
        if len(sources) == 1:
            return sources[0]
        names = "\n".join(source.key for source in sources)
        key = f"{stem}-joined-{hashlib.md5(names.encode(), usedforsecurity=False).hexdigest()}"
        nbytes = sum(source.nbytes for source in sources)
        try:
            self._compose(key, sources, {_CONDITION: "0"})
        except FaultError as fault:
            if fault.kind is not FaultKind.CHANGED:
                raise
        there = self._look(key)
        if there is None or there.get("content-length") != str(nbytes):
            raise FaultError(FaultKind.PASSING, "the store has not composed the parts")
        return _Source(key, nbytes, there.get(_GENERATION))

    def _compose(self, key: str, sources: Sequence[_Source], headers: Mapping[str, str]) -> None:
        pieces = ""
        for one in sources:
            generation = f"<Generation>{one.generation}</Generation>" if one.generation else ""
            pieces += f"<Component><Name>{escape(one.key)}</Name>{generation}</Component>"
        body = f"<ComposeRequest>{pieces}</ComposeRequest>".encode()
        self._put(key, Body(body), headers, hashlib.md5(body, usedforsecurity=False).digest(), {"compose": ""})

    def _clear(self, key: str, known: Sequence[str], upload_id: str = "") -> None:
        """Delete the known parts of an object, and all others of an upload, or of all."""
        for _ in range(_MOST_LISTS):  # a list that arrived damaged may lack some
            matches = [_LISTED.fullmatch(source.key) for source in self._list(f"{PARTS}/{key}/{upload_id}")]
            names = {*known, *(match[0] for match in matches if match is not None and match[1] == key)}
            if not names:
                return
            _run(self.delete, names)
            known = ()

    def _list(self, prefix: str) -> list[_Source]:
        found: list[_Source] = []
        query = {"list-type": "2", "prefix": prefix}
        while True:
            try:
                page = ElementTree.fromstring(self._send("GET", "", query).content)  # noqa: S314  expat bounds entities
                for one in page.iterfind("{*}Contents"):
                    key, nbytes, generation = (one.findtext(f"{{*}}{name}") for name in ("Key", "Size", "Generation"))
                    found.append(_Source(key or "", int(nbytes or ""), generation))
            except (ElementTree.ParseError, ValueError):
                raise FaultError(FaultKind.PASSING, "an incomplete response") from None
            if page.findtext("{*}IsTruncated") != "true":
                return found
            query["continuation-token"] = page.findtext("{*}NextContinuationToken") or ""

    def _send(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        data: Body | None = None,
    ) -> Any:
        import google.auth.exceptions
        import requests

        address = f"{self._address}/{quote(key, safe='/-._~')}" if key else self._address
        try:
            answer = self._session.request(
                method, address, params=query, headers=headers, data=data, timeout=self._settings.answer_seconds
            )
        except requests.exceptions.TooManyRedirects:
            raise FaultError(FaultKind.REFUSED, "a redirect") from None
        except requests.exceptions.Timeout:
            raise FaultError(FaultKind.PASSING, "no answer in time") from None
        except (requests.exceptions.RequestException, google.auth.exceptions.TransportError) as error:
            raise FaultError(FaultKind.PASSING, type(error).__name__) from None
        except google.auth.exceptions.GoogleAuthError as error:  # its text may show parts of credentials
            raise FaultError(FaultKind.DENIED, f"google-auth: {type(error).__name__}") from None
        if answer.status_code < 300:
            return answer
        code = re.search(rb"<Code>(\w{1,60})</Code>", answer.content)
        raise make_fault(answer.status_code, answer.reason, code[1].decode() if code else "")


def _run(work: Callable[[Any], Any], tasks: Iterable[Any]) -> list[Any]:
    """Return the results of requests that are sent at once, each of which is repeated a few times."""

    def insist(task: Any) -> Any:
        for pause in (0.1, 0.5, 2.0):
            try:
                return work(task)
            except FaultError as fault:
                if fault.kind not in (FaultKind.PASSING, FaultKind.THROTTLED):
                    raise
            time.sleep(pause)
        return work(task)

    with ThreadPoolExecutor(_SENDERS, thread_name_prefix="xrank-join") as pool:
        return list(pool.map(insist, tasks))


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
        got = account if isinstance(account, str) else "another JSON value"
        next_step = "set GOOGLE_SERVICE_ACCOUNT to the file of the service account's key that Google made"
        raise make_credentials_error(url, next_step, got)
    return account


def _find_credentials(variables: Mapping[str, str], account: Mapping[str, Any], url: str) -> Any:
    """Return a token of the environment, a service account, or what google-auth finds."""
    import google.auth
    from google.oauth2 import credentials, service_account

    token = variables.get("GOOGLE_BEARER_TOKEN")
    if token:
        return credentials.Credentials(token)
    try:
        if account:
            return service_account.Credentials.from_service_account_info(account, scopes=[_SCOPE])
        return google.auth.default(scopes=[_SCOPE])[0]
    except Exception as error:  # its text may show parts of credentials
        next_step = "set GOOGLE_APPLICATION_CREDENTIALS, or log in with gcloud auth application-default login"
        raise make_credentials_error(url, next_step, type(error).__name__) from None
