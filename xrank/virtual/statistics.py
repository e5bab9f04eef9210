"""Statistics of a run, measured or planned: calls, messages, bytes and flops, per device and collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls, messages and bytes of one kind of exchange."""

    calls: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    sent_nbytes: int = 0
    """Bytes of the arrays' elements; headers and shapes are not counted."""
    received_nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.calls + other.calls,
            self.sent_messages + other.sent_messages,
            self.received_messages + other.received_messages,
            self.sent_nbytes + other.sent_nbytes,
            self.received_nbytes + other.received_nbytes,
        )


_NOTHING: Mapping[str, Traffic] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Statistics of one device."""

    collectives: Mapping[str, Traffic] = field(default_factory=lambda: _NOTHING)
    """Traffic between devices by collective name, including ``"send"`` and ``"receive"``."""
    from_host: Traffic = Traffic()
    to_host: Traffic = Traffic()
    flops: int = 0
    peak_nbytes: int | None = None
    """Largest number of bytes in registers at once; None for a function that never reported it."""

    @property
    def traffic(self) -> Traffic:
        """Traffic with other devices, over all collectives."""
        return sum(self.collectives.values(), Traffic())


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of all devices, in mesh order."""

    devices: tuple[DeviceStatistics, ...]

    @property
    def flops(self) -> int:
        """Number of floating-point operations of all devices."""
        return sum(device.flops for device in self.devices)

    @property
    def traffic(self) -> Traffic:
        """Traffic between all devices."""
        return sum((device.traffic for device in self.devices), Traffic())

    @property
    def messages(self) -> int:
        """Number of messages sent between devices."""
        return self.traffic.sent_messages

    @property
    def nbytes(self) -> int:
        """Number of bytes sent between devices."""
        return self.traffic.sent_nbytes

    def by_collective(self) -> dict[str, Traffic]:
        """Return the traffic of all devices, summed by collective name."""
        return merge_traffic(device.collectives for device in self.devices)


def merge_traffic(many: Iterable[Mapping[str, Traffic]]) -> dict[str, Traffic]:
    """Sum traffic by collective name."""
    total: dict[str, Traffic] = {}
    for one in many:
        for name, traffic in one.items():
            total[name] = total.get(name, Traffic()) + traffic
    return total
