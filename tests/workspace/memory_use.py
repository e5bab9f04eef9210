"""What tests of messages in memory look at: how much memory this process has of xrank's, and what lies in it."""

import json

from tests.open_files import open_files

NBYTES = 1_200_000
"""Large enough to be lent: more than half of the smallest arena."""


def arenas():
    """The arenas that this process has: its own, and those of others that it maps (a mapping keeps a descriptor)."""
    return {name for name in open_files().values() if name.startswith("/memfd:xrank-")}


def num_mapped():
    with open("/proc/self/maps") as maps:
        return sum("/memfd:xrank-" in line for line in maps)


def place_of(receipt):
    return json.loads(json.loads(receipt)["place"])


def holds(buffer, value, nbytes=NBYTES):
    return bytes(buffer) == bytes([value]) * nbytes
