"""What a run of a virtual cluster did, or will do: calls, messages, bytes and flops, per device and collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["DeviceStatistics", "Statistics", "Traffic"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one kind of exchange."""

    calls: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    sent_nbytes: int = 0
    """Of the arrays' elements alone: neither shapes nor other words are counted."""
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
    """Of one device."""

    collectives: Mapping[str, Traffic] = field(default_factory=lambda: _NOTHING)
    """Between devices, by the collective's name; ``"send"`` and ``"receive"`` are among them."""
    from_host: Traffic = Traffic()
    to_host: Traffic = Traffic()
    flops: int = 0
    peak_nbytes: int | None = None
    """The most that its registers hold at once; None where no program says it."""

    @property
    def traffic(self) -> Traffic:
        """All between devices."""
        return sum(self.collectives.values(), Traffic())


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of all devices, in mesh order."""

    devices: tuple[DeviceStatistics, ...]

    @property
    def flops(self) -> int:
        """Of all devices together."""
        return sum(device.flops for device in self.devices)

    @property
    def traffic(self) -> Traffic:
        """All between devices."""
        return sum((device.traffic for device in self.devices), Traffic())

    @property
    def messages(self) -> int:
        """Sent between devices."""
        return self.traffic.sent_messages

    @property
    def nbytes(self) -> int:
        """Sent between devices."""
        return self.traffic.sent_nbytes

    def by_collective(self) -> dict[str, Traffic]:
        """Return the sums over all devices, by the collective's name."""
        return merged(device.collectives for device in self.devices)


def merged(many: Iterable[Mapping[str, Traffic]]) -> dict[str, Traffic]:
    """Return the sums by name."""
    total: dict[str, Traffic] = {}
    for one in many:
        for name, traffic in one.items():
            total[name] = total.get(name, Traffic()) + traffic
    return total
