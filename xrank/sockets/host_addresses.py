"""Addresses of this host for other hosts."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

__all__ = ["host_addresses"]

_GET_ADDRESS = 0x8915  # linux/sockios.h: SIOCGIFADDR
_GLOBAL_SCOPE = "00"
_LOOPBACK = "127.0.0.1"


def host_addresses() -> list[str]:
    """Return the numeric addresses of this host's interfaces, IPv4 first. Other hosts may not reach all of them.

    The loopback address is returned only without any other.
    """
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                # struct ifreq (netdevice(7)): 16 bytes of name, family and port, then the address.
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, request)[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:  # no such file: no IPv6
        for line in lines:
            digits, _, _, scope, *_ = line.split()
            if scope == _GLOBAL_SCOPE:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return [address for address in found if not address.startswith("127.")] or [_LOOPBACK]
