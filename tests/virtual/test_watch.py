"""What the host sees of devices that wait: a circle is one only if nothing is under way and nobody works."""

import numpy as np
import pytest

from tests.virtual.shared_ends import shared_ends
from xrank.virtual.channels.channel import HOST, make_heading
from xrank.virtual.engines import watch
from xrank.virtual.engines.watch import find_deadlock

HEADING = make_heading("broadcast", root=0, group=(0, 1, 2), call=3)


@pytest.fixture
def ends():
    with shared_ends(3) as (links, _):
        yield links


def waits(ends, device, source):
    """Let a device wait, as far as others see."""
    end, reader = ends[device], ends[device].from_device(source)._reader
    end.board.begin(end.end, end.end_of(source), reader.num_taken, HEADING)


def test_a_wait_for_a_working_device_is_not_a_deadlock(ends):
    waits(ends, 1, 0)
    waits(ends, 2, 1)
    assert find_deadlock(ends[-1], (0, 1, 2), {0, 1, 2}) == {}
    told = find_deadlock(ends[-1], (0, 1, 2), {1, 2})
    assert list(told) == [1, 2]
    assert told[1].startswith("device 0, which has ended (broadcast with root 0 by push, call 3 of group #")
    assert told[2].startswith("device 1 (broadcast")


def test_sent_messages_end_a_wait(ends):
    ends[0].to_device(1).send(np.zeros(3))
    waits(ends, 1, 0)
    waits(ends, 0, 1)
    assert find_deadlock(ends[-1], (0, 1, 2), {0, 1}) == {}
    ends[1].board.finish(1)
    ends[1].from_device(0).receive()
    waits(ends, 1, 0)
    assert list(find_deadlock(ends[-1], (0, 1, 2), {0, 1})) == [0, 1]


def test_the_host_sends_no_more(ends):
    ends[-1].to_device(2).send(np.zeros(3))
    ends[2].from_host.receive()
    waits(ends, 2, HOST)
    assert find_deadlock(ends[-1], (0, 1, 2), {0, 2})[2].startswith("the host (broadcast")


def test_deadlock_check_ignores_a_circle_that_ended_meanwhile(ends, monkeypatch):
    """Device 0 waits for another message when it is looked at again: it was not waiting all the time."""
    waits(ends, 0, 1)
    waits(ends, 1, 0)
    look = watch.find_waits
    looks = []

    def look_and_go_on(links, devices):
        found = look(links, devices)
        if not looks:
            ends[0].board.finish(0)
            waits(ends, 0, 1)
        looks.append(found)
        return found

    monkeypatch.setattr(watch, "find_waits", look_and_go_on)
    assert find_deadlock(ends[-1], (0, 1, 2), {0, 1}) == {}
    assert list(find_deadlock(ends[-1], (0, 1, 2), {0, 1})) == [0, 1]
