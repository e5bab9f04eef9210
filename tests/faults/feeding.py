"""Feeds inputs to parsers: each must end with a value or one of xrank's errors, soon."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.faults.findings import Findings
from xrank.errors import XrankError

__all__ = ["Target", "feed_targets"]

SLOW_SECONDS = 2.0
HUNG_SECONDS = 60


class HungError(BaseException):
    """A parser did not end."""


@dataclass(frozen=True)
class Target:
    """A parser, and what to feed it.

    Args:
        name: of the parser.
        mutate: makes an input.
        call: parses it.
        share: how often it is called, relative to the others.
    """

    name: str
    mutate: Callable[[random.Random], bytes]
    call: Callable[[bytes], object]
    share: int


def feed_targets(
    targets: Sequence[Target],
    seed: int,
    count: int,
    findings: Findings,
    *,
    slow_seconds: float = SLOW_SECONDS,
    after: Callable[[str], object] = lambda example: None,
) -> None:
    """Feed so many inputs to parsers.

    Args:
        targets: the parsers.
        seed: of the first input.
        count: number of inputs.
        findings: gets counts and reports.
        slow_seconds: longest time of an input.
        after: called with a description of each input after it was parsed.
    """
    order = [target for target in targets for _ in range(target.share)]

    def hang(number: int, frame: object) -> None:
        raise HungError

    signal.signal(signal.SIGALRM, hang)
    for number in range(seed, seed + count):
        rng = random.Random(number)
        target = order[number % len(order)]
        content = target.mutate(rng)
        example = f"seed {number}: {target.name} of {content[:200]!r}"
        signal.setitimer(signal.ITIMER_REAL, HUNG_SECONDS)
        started = time.process_time()
        try:
            target.call(content)
            findings.counts[f"{target.name}: taken"] += 1
        except XrankError:
            findings.counts[f"{target.name}: refused"] += 1
        except HungError:
            findings.report(f"hung: {target.name}", example)
        except Exception as error:
            findings.report_raw(error, example)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        # A call may also read tables that all later ones share, so a slow one is timed again.
        if time.process_time() - started > slow_seconds and (seconds := _time_again(target, content)) > slow_seconds:
            findings.report(f"slow: {target.name}", f"{example}: {seconds:.1f} s")
        after(example)
    findings.count("inputs", count)


def _time_again(target: Target, content: bytes) -> float:
    started = time.process_time()
    with suppress(Exception):
        target.call(content)
    return time.process_time() - started
