"""Addresses of this host for other hosts."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_GET_ADDRESS = 0x8915  # linux/sockios.h: SIOCGIFADDR
_GLOBAL_SCOPE = "00"
_LOOPBACK = "127.0.0.1"


def used_addresses(store_host: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of this host at which the other hosts of a job reach it.

    These are the addresses of the interfaces that gloo was told to use; else the one from which this host reaches the
    ranks' store; else, as where the store is on this host and known by a loopback address, all.

    Args:
        store_host: of the ranks' store, as its clients know it; None if there is none.
        environ: the environment of this process.
    """
    named = [name.strip() for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",")]
    if found := [address for name, address in _interfaces() if name in named and not _is_loopback(address)]:
        return found
    for family, _, _, _, place in _resolve(store_host):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it asks the kernel for the route
            address: str = probe.getsockname()[0]
            if not _is_loopback(address):
                return [address]
    return host_addresses()


def _resolve(host: str | None) -> list[tuple[Any, ...]]:
    try:
        return [] if host is None else socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def host_addresses() -> list[str]:
    """Return the numeric addresses of this host's interfaces, IPv4 first. Other hosts may not reach all of them.

    The loopback address is returned only without any other.
    """
    return [address for _, address in _interfaces() if not _is_loopback(address)] or [_LOOPBACK]


def _interfaces() -> list[tuple[str, str]]:
    """Return names and numeric addresses of this host's interfaces, IPv4 first."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                # struct ifreq (netdevice(7)): 16 bytes of name, family and port, then the address.
                request = struct.pack("256s", name.encode()[:15])
                found.append((name, socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, request)[20:24])))
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:  # no such file: no IPv6
        for line in lines:
            digits, _, _, scope, _, name = line.split()
            if scope == _GLOBAL_SCOPE:
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found
