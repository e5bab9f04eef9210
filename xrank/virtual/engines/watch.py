"""The host's view of waiting devices, read from the board and the rings alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from xrank.virtual.channels.board import Wait
from xrank.virtual.channels.channel import HOST
from xrank.virtual.channels.message_ring import num_sent
from xrank.virtual.channels.shared_channel import SharedLinks
from xrank.virtual.engines.failures import describe_wait


def find_waits(links: SharedLinks, devices: Collection[int]) -> dict[int, Wait]:
    """Return the waits of those devices whose awaited message was not sent yet.

    Args:
        links: the host's links.
        devices: devices that have not finished.
    """
    waits: dict[int, Wait] = {}
    for device in devices:
        end = links.end_of(device)
        wait = links.board.read(end)
        if wait is not None and num_sent(links.segment, links.segment.ring(wait.source, end)) == wait.num_taken:
            waits[device] = wait
    return waits


def find_deadlock(links: SharedLinks, devices: Sequence[int], running: Collection[int]) -> dict[int, str]:
    """Return the devices whose awaited message can never be sent, each with a description of its wait.

    Args:
        links: the host's links; the host sends no more messages.
        devices: all devices, in the order of their ends.
        running: the devices that have not finished.
    """
    names = (*devices, HOST)
    waits = find_waits(links, running)
    # Remove devices that wait for a free one, directly or through others; the rest can never continue.
    while True:
        free = {device for device in running if device not in waits}
        hopeful = {device for device, wait in waits.items() if names[wait.source] in free}
        if not hopeful:
            break
        waits = {device: wait for device, wait in waits.items() if device not in hopeful}
    # The board is read device by device. A wait that kept its number lasted throughout, so all these waits coincided.
    again = find_waits(links, waits)
    if any(device not in again or again[device].turn != wait.turn for device, wait in waits.items()):
        return {}
    return describe_waits(devices, running, waits)


def describe_waits(devices: Sequence[int], running: Collection[int], waits: dict[int, Wait]) -> dict[int, str]:
    """Describe waits for the errors of `xrank.virtual.engines.failures`."""
    names = (*devices, HOST)
    now = time.monotonic()
    return {
        device: describe_wait(
            names[wait.source], running, f"{wait.heading or 'an object'}, since {now - wait.since:.1f} s"
        )
        for device, wait in sorted(waits.items())
    }
