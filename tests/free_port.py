"""A port that nobody has, for a rank that opens its store at a place told beforehand."""

import contextlib
import random
import socket

__all__ = ["free_port"]

_PORTS = range(10_000, 32_000)
"""Below those that Linux gives to whoever asks for any, or connects (ip(7): ip_local_port_range): nobody gets one of
them between the look here and the moment when the rank opens it."""


def free_port() -> int:
    """Return a port of this host that nothing listens at; two tests that run at once draw one by chance alone."""
    chance = random.SystemRandom()  # two suites may run from one seed
    while True:
        port = chance.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
