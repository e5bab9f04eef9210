"""Requests to stores by other ranks, which the first rank adds to its own for the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any


def take_traffic() -> list[int]:
    """Return the requests and bytes of this process since the last call, as numbers for a message."""
    # A command without a URL never imports the client.
    client: Any = sys.modules.get("xrank.stores.client")
    return [] if client is None else [*astuple(client.take_traffic())]


def add_traffic(counts: Sequence[int]) -> None:
    """Add the requests and bytes of another rank to this process's."""
    if any(counts):
        from xrank.stores.client import Traffic, add_traffic

        add_traffic(Traffic(*counts))
