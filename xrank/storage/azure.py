"""Containers of Azure's blob storage: obstore reads them, azure-storage-blob writes.

obstore would send no checksum along, so that a body that arrives damaged would be stored. Parts are blocks that no
reader sees until a list of them makes the blob. A block's name contains its upload, number and MD5, so that a list of
the blocks in the store says all that a later run must know, and two uploads to one blob never mix. Blocks begin
without a request of their own; Azure removes those that no list has taken after a week.

The variables are those that object_store takes for reading (its AzureConfigKey).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from xrank.environment import environ
from xrank.errors import require
from xrank.storage.client import (
    ABSENT,
    FaultError,
    FaultKind,
    check_https,
    hide_debug_logs,
    is_set,
    make_credentials_error,
    make_fault,
    make_session,
    or_none,
)
from xrank.storage.obstore_backend import PartsBackend
from xrank.storage.uploads import PART_NAME, Body, KnownParts, UploadedObject, UploadedPart, part_name

_EMULATOR_ACCOUNT = "devstoreaccount1"
_MARK = "xrank_stage"
_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")
_VERSION = "2023-11-03"


def find_endpoint(variables: Mapping[str, str], account: str) -> str:
    """Return the address that requests to an account are sent to; empty where nothing names one."""
    if is_set(variables.get("AZURE_STORAGE_USE_EMULATOR")):
        address = variables.get("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000"
        return f"{address.rstrip('/')}/{account or _EMULATOR_ACCOUNT}"
    named = variables.get("AZURE_STORAGE_ENDPOINT") or variables.get("AZURE_ENDPOINT")
    if named:
        return named.rstrip("/")
    return f"https://{account}.blob.core.windows.net" if account else ""


class AzureBackend(PartsBackend):
    """One container; see `xrank.storage.uploads.WritableBackend`."""

    _client: Any = None

    def check_writable(self, url: str) -> None:
        """Make the client; raise UsageError without its package, an account or credentials."""
        if self._client is not None:
            return
        require("azure.storage.blob", f"writing {url}")
        from azure.core.pipeline.transport import RequestsTransport
        from azure.storage.blob import ContainerClient

        hide_debug_logs("azure", "urllib3.connectionpool")  # which show addresses with signatures
        variables = environ()
        container, _, host = self._root.partition("://")[2].partition("@")
        account = host.partition(".")[0] or variables.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        endpoint = find_endpoint(variables, account)
        account = account or (_EMULATOR_ACCOUNT if is_set(variables.get("AZURE_STORAGE_USE_EMULATOR")) else "")
        if not endpoint or not account:
            raise make_credentials_error(url, "set AZURE_STORAGE_ACCOUNT_NAME", "no storage account")
        check_https(endpoint, url, allow_http=self._settings.allow_http)
        credential = _find_credential(variables, account, url)
        if hasattr(credential, "get_token") and not endpoint.startswith("https:"):
            raise make_credentials_error(url, "give a key or a signature, or an endpoint with https", "a token")
        import requests

        seconds = self._settings.answer_seconds
        session = make_session(requests.Session(), self._settings.connections)
        self._client = ContainerClient(
            endpoint,
            container,
            credential=credential,
            api_version=_VERSION,
            retry_total=0,  # `Store` repeats
            permit_redirects=False,
            transport=RequestsTransport(session=session, session_owner=False),
            connection_timeout=seconds,
            read_timeout=seconds,
        )

    def put(self, key: str, data: bytes | memoryview, condition: str | None, mark: str = "") -> str:
        """Write an object at one instant and return its version; the store refuses it if its MD5 is another."""
        options = {"metadata": {_MARK: mark} if mark else None, "overwrite": True, **_condition(condition)}
        with _faults():
            answer = self._ask(key, "upload_blob", bytes(data), length=len(data), validate_content=True, **options)
            return str(answer["etag"])

    def look(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent, or of uncommitted blocks only."""
        found = or_none(lambda: self._ask(key, "get_blob_properties"))
        if found is None:
            return None
        return UploadedObject(int(found.size), str(found.etag), (found.metadata or {}).get(_MARK))

    def _delete(self, key: str) -> None:
        self._ask(key, "delete_blob")

    def put_part(self, key: str, upload_id: str, part: UploadedPart, data: Body) -> str:
        """Upload a part; the store refuses it if its MD5 is another."""
        name = part_name(upload_id, part)
        self._ask(key, "stage_block", name, data, length=len(data), validate_content=True)
        return part.etag

    def list_parts(self, key: str, upload_id: str) -> KnownParts | None:
        """Return the parts that are in the store; None where none is."""
        return self._list_blocks(key).get(upload_id)

    def complete(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], mark: str, condition: str | None
    ) -> None:
        """Make the object of the parts; the store forgets all other blocks of that name."""
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(part_name(upload_id, part)) for part in parts]
        options = {"metadata": {_MARK: mark}, "validate_content": True, **_condition(condition)}
        self._ask(key, "commit_block_list", blocks, **options)

    def abort(self, key: str, upload_id: str) -> None:
        """Remove the blocks of a blob that is nothing but blocks of uploads; Azure has no other way to remove blocks.

        Beside a blob that readers see they stay for a week, and Azure removes them.
        """
        if upload_id in self._list_blocks(key) and self.look(key) is None:
            self.delete(key)

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return (key, id) of the uploads below a prefix to blobs that no reader sees."""
        with _faults():
            listed = self._client.list_blobs(prefix, include=["uncommittedblobs"])
            empty = [one.name for one in listed if not one.size]
        return [(key, one) for key in empty if self.look(key) is None for one in self._list_blocks(key)]

    def _list_blocks(self, key: str) -> dict[str, KnownParts]:
        """Return the blocks of each upload to a blob that no list has taken; none of other programs."""
        found: dict[str, KnownParts] = {}
        _, blocks = or_none(lambda: self._ask(key, "get_block_list", "uncommitted")) or ((), ())
        for block in blocks:
            match = PART_NAME.fullmatch(block.id)
            if match is not None:
                found.setdefault(match[1], {})[int(match[2])] = int(block.size), f'"{match[3]}"', None
        return found

    def _ask(self, key: str, method: str, *arguments: Any, **options: Any) -> Any:
        with _faults():
            return getattr(self._client.get_blob_client(key), method)(*arguments, **options)


def _find_credential(variables: Mapping[str, str], account: str, url: str) -> Any:
    """Return the credential of the environment, a token, key or signature; else the one that azure-identity finds."""
    from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential

    token = variables.get("AZURE_STORAGE_TOKEN")
    if token:
        return SimpleNamespace(get_token=lambda *_, **__: AccessToken(token, 1 << 40))
    key = next((text for name in _KEYS if (text := variables.get(name))), None)
    if key:
        try:
            base64.b64decode(key, validate=True)
        except ValueError:
            next_step = "set AZURE_STORAGE_ACCOUNT_KEY to the key that Azure shows"
            raise make_credentials_error(url, next_step, "a key that is not base64") from None
        return AzureNamedKeyCredential(account, key)
    sas = variables.get("AZURE_STORAGE_SAS_KEY") or variables.get("AZURE_STORAGE_SAS_TOKEN")
    if sas:
        return AzureSasCredential(sas.lstrip("?"))
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        next_step = "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or install azure-identity for logins, "
        raise make_credentials_error(url, next_step + "roles", "no credentials") from None
    return DefaultAzureCredential()


def _condition(condition: str | None) -> dict[str, Any]:
    from azure.core import MatchConditions

    if condition is None:
        return {}
    if condition == ABSENT:
        return {"match_condition": MatchConditions.IfMissing}
    return {"match_condition": MatchConditions.IfNotModified, "etag": condition}


@contextmanager
def _faults() -> Iterator[None]:
    """Turn the client's exceptions into faults. Their texts contain URLs, so only known parts of them are kept."""
    from azure.core import exceptions

    try:
        yield
    except FaultError:
        raise
    except exceptions.HttpResponseError as error:
        if error.response is None or error.status_code is None:  # of azure-identity
            raise FaultError(FaultKind.DENIED, type(error).__name__) from None
        code = error.response.headers.get("x-ms-error-code", "")
        fault = make_fault(error.status_code, error.reason or "", code if code.isidentifier() else "")
        if error.status_code == 409 and fault.kind is FaultKind.PASSING:
            fault.kind = FaultKind.REFUSED
        if error.status_code == 400 and not code:  # as Azurite and servers answer a damaged body
            fault.kind = FaultKind.PASSING
        raise fault from None
    except exceptions.AzureError as error:  # a connection that failed or broke, or an MD5 that the answer contradicts
        raise FaultError(FaultKind.PASSING, type(error).__name__) from None
    except (KeyError, ValueError):
        raise FaultError(FaultKind.PASSING, "an incomplete response") from None
