"""The watch: what the host sees of devices that wait, from the board and the rings alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from xrank.virtual.channels.board import Wait
from xrank.virtual.channels.channel import HOST
from xrank.virtual.channels.message_ring import num_sent
from xrank.virtual.channels.shared_channel import SharedLinks
from xrank.virtual.engines.failures import awaited

__all__ = ["find_deadlock", "told", "waits_of"]


def waits_of(links: SharedLinks, devices: Collection[int]) -> dict[int, Wait]:
    """Return the waits of those devices that wait for what was not sent yet.

    Args:
        links: the host's.
        devices: that have not finished.
    """
    waits: dict[int, Wait] = {}
    for device in devices:
        end = links.end_of(device)
        wait = links.board.read(end)
        if wait is not None and num_sent(links.segment, links.segment.ring(wait.source, end)) == wait.num_taken:
            waits[device] = wait
    return waits


def find_deadlock(links: SharedLinks, devices: Sequence[int], running: Collection[int]) -> dict[int, str]:
    """Return which devices wait for what nobody will send, each with what that is, in words.

    Args:
        links: the host's, which sends no more.
        devices: all, in the order of their ends.
        running: those that have not finished.
    """
    names = (*devices, HOST)
    waits = waits_of(links, running)
    while True:
        free = {device for device in running if device not in waits}
        hopeful = {device for device, wait in waits.items() if names[wait.source] in free}
        if not hopeful:
            break
        waits = {device: wait for device, wait in waits.items() if device not in hopeful}
    # A wait that has kept its number was one wait throughout, so all of these waited at the same moment.
    again = waits_of(links, waits)
    if any(device not in again or again[device].turn != wait.turn for device, wait in waits.items()):
        return {}
    return told(devices, running, waits)


def told(devices: Sequence[int], running: Collection[int], waits: dict[int, Wait]) -> dict[int, str]:
    """Return waits in the words of `xrank.virtual.engines.failures`."""
    names = (*devices, HOST)
    now = time.monotonic()
    return {
        device: awaited(names[wait.source], running, f"{wait.heading or 'an object'}, since {now - wait.since:.1f} s")
        for device, wait in sorted(waits.items())
    }
