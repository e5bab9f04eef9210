"""Settings of the connections to stores, from the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xrank.environment import setting
from xrank.errors import UsageError, either, option

CONNECTIONS = 16
"""Requests under way at once, at most: at 20 ms latency and 1 MiB each, they move 800 MB/s."""
TIMEOUT_SECONDS = 300.0
"""Patience for one request with all its repetitions."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How xrank talks to stores."""

    connections: int = CONNECTIONS
    """Requests under way at once, at most."""
    timeout_seconds: float = TIMEOUT_SECONDS
    """Patience for one request with all its repetitions."""
    allow_http: bool = False
    """Whether requests may go over plain http, where any host on the way can read and change them."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> StoreSettings:
        """Return the settings of ``XRANK_STORE_CONNECTIONS``, ``XRANK_STORE_TIMEOUT`` and ``XRANK_ALLOW_HTTP``.

        Raises:
            UsageError: one of them is not a number in its range.
        """
        return cls(
            int(_number(environ, "XRANK_STORE_CONNECTIONS", int, CONNECTIONS)),
            _number(environ, "XRANK_STORE_TIMEOUT", float, TIMEOUT_SECONDS),
            (setting(environ, "XRANK_ALLOW_HTTP") or "").lower() in ("1", "true", "yes"),
        )


def check_https(endpoint: str, url: str, *, allow_http: bool) -> None:
    """Refuse plain http without permission.

    Args:
        endpoint: the address that requests are sent to.
        url: the place in the store, for people.
        allow_http: whether plain http is permitted.

    Raises:
        UsageError: the endpoint is plain http, and that is not permitted.
    """
    if endpoint.lower().startswith("http:") and not allow_http:
        raise UsageError(
            f"{url} would be reached over plain http, where others can read and change the bytes and the credentials",
            file=url,
            want="https",
            next_step="give an endpoint with https; or, if the network is yours, "
            + either(f"give {option('allow_http', True)}", "set XRANK_ALLOW_HTTP=1"),
        )


def _number(environ: Mapping[str, str], name: str, kind: Callable[[str], float], default: float) -> float:
    text = setting(environ, name)
    try:
        number = default if text is None else kind(text)
    except ValueError:
        number = 0
    if not 0 < number < 1e6:
        raise UsageError(f"{name} must be a number above 0", got=text, next_step=f"set {name} to a number, or unset it")
    return number
