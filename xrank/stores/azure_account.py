"""An Azure storage account: its endpoint, and what authorises requests, from the environment.

The variables are those that object_store takes for reading (its AzureConfigKey). Source of the signature: Azure Storage
REST reference, "Authorize with Shared Key".
"""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xrank.errors import UsageError
from xrank.stores.faults import FaultError, FaultKind

_EMULATOR_ACCOUNT = "devstoreaccount1"
_SCOPE = "https://storage.azure.com/.default"
_VERSION = "2023-11-03"
_SIGNED = (
    *("Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date"),
    *("If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"),
)


def endpoint_of(variables: Mapping[str, str], account: str) -> str:
    """Return the address that requests to an account are sent to; empty where nothing names one."""
    if _is_emulated(variables):
        address = variables.get("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000"
        return f"{address.rstrip('/')}/{account or _EMULATOR_ACCOUNT}"
    named = variables.get("AZURE_STORAGE_ENDPOINT") or variables.get("AZURE_ENDPOINT")
    if named:
        return named.rstrip("/")
    return f"https://{account}.blob.core.windows.net" if account else ""


@dataclass(frozen=True, slots=True)
class AzureAccount:
    """A storage account; its text never shows the secrets."""

    name: str
    endpoint: str
    key: bytes | None = field(default=None, repr=False)
    sas: str | None = field(default=None, repr=False)
    """A shared access signature: the text of a query."""
    token: Callable[[], str] | None = field(default=None, repr=False)
    """Gives a bearer token that is valid now."""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str], account: str, url: str) -> AzureAccount:
        """Return the account that the environment names, or `account` where that is not empty.

        Raises:
            UsageError: there is no account, or nothing that authorises requests to it.
        """
        name = account or variables.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        if _is_emulated(variables):
            name = name or _EMULATOR_ACCOUNT
        endpoint = endpoint_of(variables, name)
        if not endpoint or not name:
            raise UsageError(
                f"{url}: the environment names no storage account", file=url, next_step="set AZURE_STORAGE_ACCOUNT_NAME"
            )
        token = variables.get("AZURE_STORAGE_TOKEN")
        if token:
            return cls(name, endpoint, token=lambda: token)
        key = _first(variables, "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")
        if key:
            return cls(name, endpoint, key=_decode_key(key, url))
        sas = _first(variables, "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN")
        if sas:
            return cls(name, endpoint, sas=sas.lstrip("?"))
        return cls(name, endpoint, token=_find_tokens(url))

    def authorise(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        *,
        nbytes: int,
        now_seconds: float | None = None,
    ) -> dict[str, str]:
        """Return the headers of a request with what authorises it; a shared access signature belongs into the query.

        Args:
            method: such as ``PUT``.
            path: encoded path of the request.
            query: its query, not encoded.
            headers: its other headers.
            nbytes: bytes of its body.
            now_seconds: time since the epoch; None: now.

        Raises:
            FaultError: no token can be had.
        """
        stamp = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(now_seconds))
        full = {**headers, "x-ms-date": stamp, "x-ms-version": _VERSION}
        if self.token is not None:
            full["Authorization"] = f"Bearer {self.token()}"
        elif self.key is not None:
            text = _text_to_sign(self.name, method, path, query, full, nbytes)
            signature = base64.b64encode(hmac.digest(self.key, text.encode(), "sha256")).decode()
            full["Authorization"] = f"SharedKey {self.name}:{signature}"
        return full


def _text_to_sign(
    account: str, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], nbytes: int
) -> str:
    known = {**headers, "Content-Length": str(nbytes) if nbytes else ""}
    lines = [method, *(known.get(name, "") for name in _SIGNED)]
    lines += sorted(f"{name.lower()}:{text.strip()}" for name, text in headers.items() if name.startswith("x-ms-"))
    lines.append(f"/{account}{path}")
    lines += [f"{name.lower()}:{query[name]}" for name in sorted(query)]
    return "\n".join(lines)


def _find_tokens(url: str) -> Callable[[], str]:
    """Return a function that gives a token of the credentials that azure-identity finds: a role, a login, a secret."""
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        raise UsageError(
            f"{url} cannot be written without credentials",
            file=url,
            next_step="set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or install azure-identity, which "
            "reads logins and roles",
        ) from None
    credential: Any = DefaultAzureCredential()

    def get_token() -> str:
        try:
            return str(credential.get_token(_SCOPE).token)  # which is kept, and fetched anew before it expires
        except Exception as error:  # its text may show parts of credentials
            raise FaultError(FaultKind.DENIED, f"azure-identity: {type(error).__name__}") from None

    return get_token


def _decode_key(key: str, url: str) -> bytes:
    try:
        return base64.b64decode(key, validate=True)
    except ValueError:
        raise UsageError(
            f"{url}: the storage account's key in the environment is not base64",
            file=url,
            next_step="set AZURE_STORAGE_ACCOUNT_KEY to the key that Azure shows",
        ) from None


def _first(variables: Mapping[str, str], *names: str) -> str | None:
    return next((text for name in names if (text := variables.get(name))), None)


def _is_emulated(variables: Mapping[str, str]) -> bool:
    return variables.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true", "yes", "on")
