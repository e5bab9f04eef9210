"""URLs of objects and folders: which paths are URLs, and their parts.

A URL is a plain string, like a path: `os.path.join`, `dirname`, `basename` and `split` work on it. Credentials belong
into the environment, never into a URL; so a URL may be printed anywhere.
"""

from __future__ import annotations

import os
import re

from msgspec import Struct

from xrank.errors import UsageError

# pathlib makes one slash of two. A single letter is a drive of other systems, and no scheme.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_SLIP = re.compile(r"(s3a?|gs|gcs|az|azure|abfss?|hf|https?)(//|:(?!/))")
_GIVE = "omit it, and set credentials in the environment, as for the store's own tools"
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "azure": "az"}


class Location(Struct, frozen=True):
    """The parts of a URL."""

    scheme: str
    root: str
    """The bucket, container, host or repository, as a URL without a slash at its end."""
    key: str
    """Path of the object or the folder below the root, without slashes at its ends; empty for the root itself."""


def is_url(path: str) -> bool:
    """Return whether a path is a URL, also one whose slashes pathlib has merged.

    >>> is_url("s3://bucket/model"), is_url("models/s3"), is_url("C:/models")
    (True, False, False)
    """
    return ":/" in path and _URL.match(path) is not None


def clean_path(path: str | os.PathLike[str]) -> str:
    """Return a path as its user gave it, and a URL in the form that all of xrank uses, without ``file://``.

    UsageError if the URL contains a name, a password or a signature (the error does not repeat them), or if it has no
    bucket or no colon.
    """
    text = os.fspath(path)
    match = _URL.match(text) if ":/" in text else None
    if match is None:
        if (slip := _SLIP.match(text)) is not None:
            next_step = f"give {slip[1]}://{text[slip.end() :]}, or ./{text} for a folder of this machine"
            raise UsageError(f"{text} is a URL without '://'", file=text, next_step=next_step)
        return text
    scheme, rest = match[1].lower(), text[match.end() :]
    if scheme == "file":
        path = text[len("file:") :]
        host, _, below = path[2:].partition("/") if path.startswith("//") else ("", "", path.lstrip("/"))
        if host not in ("", "localhost"):
            next_step = "give a path of this machine"
            raise UsageError(f"{text} is on another machine", file=text, got=host, next_step=next_step)
        from urllib.parse import unquote  # few paths are URLs

        return "/" + unquote(below)
    # A query may be a signature; names of objects may contain question marks.
    name, mark, query = rest.partition("?")
    is_signed = re.search(r"(^|&)(X-Amz-|sig=|Signature=|AWSAccessKeyId=|token=)", query, re.IGNORECASE)
    if mark and (is_signed or scheme in ("http", "https")):
        url = f"{scheme}://{name.rpartition('@')[2]}"
        raise UsageError(f"{url} has a query, which may be a signature", file=url, next_step=_GIVE)
    host, slash, below = rest.partition("/")
    if not host:
        what = f"{text} contains no {'host' if scheme in ('http', 'https') else 'bucket'}"
        raise UsageError(what, file=text, next_step=f"give one, as in {scheme}://NAME/folder")
    # abfs://container@account.dfs.core.windows.net/path is the only scheme whose "@" is not a user's name.
    user, at, host_only = host.rpartition("@")
    if at and (scheme not in ("abfs", "abfss", "az", "azure", "hf") or ":" in user):
        what = f"{scheme}://...@{host_only}{slash}{below} contains a user name or a password"
        raise UsageError(what, file=f"{scheme}://{host_only}{slash}{below}", next_step=_GIVE)
    return f"{_ALIASES.get(scheme, scheme)}://{host}{slash}{below.rstrip('/')}".rstrip("/")


def can_list(url: str) -> bool:
    """Return whether the store of a URL lists folders; a web server does not."""
    return not url.startswith(("http:", "https:"))


def split_url(url: str) -> Location:
    """Return the parts of a cleaned URL.

    >>> split_url("s3://bucket/runs/step-10").key
    'runs/step-10'
    """
    match = _URL.match(url)
    assert match is not None, url
    scheme, rest = match[1].lower(), url[match.end() :].rstrip("/")
    parts = rest.split("/")
    # hf://org/name, hf://datasets/org/name: huggingface_hub, hf_file_system.py
    depth = 1 if scheme != "hf" else 3 if parts[0] in ("datasets", "spaces") else 2
    return Location(scheme, f"{scheme}://{'/'.join(parts[:depth])}", "/".join(parts[depth:]))
