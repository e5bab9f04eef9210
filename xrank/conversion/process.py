"""What the process has used so far."""

from __future__ import annotations

import resource

__all__ = ["peak_rss_nbytes"]


def peak_rss_nbytes() -> int:
    """Return the most memory this process has held, in bytes.

    From /proc where it is: getrusage's figure also counts the program that started this one.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
