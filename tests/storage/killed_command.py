"""Runs a command of xrank that is killed at a call that changes the disk: NUMBER before|after ARGUMENT..."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

from tests.storage.kill_points import STATE_CHANGING
from xrank.cli.main import main


def kill_at(point: int, when: str) -> None:
    """Kill this process at its so manieth call that changes the disk."""
    numbers = itertools.count(1)

    def watched(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            is_moment = next(numbers) == point
            if is_moment and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **named)
            if is_moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in STATE_CHANGING:
        if hasattr(os, name):
            setattr(os, name, watched(getattr(os, name)))


if __name__ == "__main__":
    kill_at(int(sys.argv[1]), sys.argv[2])
    del sys.argv[1:3]
    sys.exit(main())
