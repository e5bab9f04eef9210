"""The campaign of faults: its counts, and one example of each kind of finding, with the seed that repeats it.

python -m tests.faults                          every part, in half an hour
python -m tests.faults texts --count 1000000    one part, with as many inputs
python -m tests.faults kills --seed 17          what that seed draws
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from tests.faults.child import run_in_child
from tests.faults.findings import Findings

_Part = Callable[[Path, int, int], Findings]

PARTS: dict[str, tuple[str, str, int]] = {
    "texts": ("texts", "fuzz_texts", 300_000),
    "documents": ("documents", "fuzz_documents", 300_000),
    "pickles": ("pickles", "fuzz_pickles", 300_000),
    "commands": ("commands", "fuzz_commands", 6_000),
    "corruptions": ("corruptions", "corrupt_sources", 6_000),
    "kills": ("stops", "kill_jobs", 2_500),
    "errors": ("stops", "fail_jobs", 2_500),
    "ranks": ("rank_stops", "stop_ranks", 200),
    "clock": ("clocks", "jump_clocks", 400),
    "power": ("power", "lose_power", 9_000),
    "images": ("images", "lose_images", 300),
}
"""Part -> module, function, and how much `make faults` tries."""
_UNPRIVILEGED = ("texts", "documents", "pickles", "commands")
_MAX_NBYTES = 3 << 30


def run_part(name: str, seed: int, count: int) -> Findings:
    """Run a part of the campaign in a child and a folder of its own."""
    module, function, _ = PARTS[name]
    work: _Part = getattr(import_module(f"tests.faults.{module}"), function)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        place = Path(folder)
        is_nobody = name in _UNPRIVILEGED
        if is_nobody:
            place.chmod(0o777)
        max_nbytes = _MAX_NBYTES if is_nobody else None
        return run_in_child(partial(work, place, seed, count), is_nobody=is_nobody, max_nbytes=max_nbytes)


def main() -> int:
    """Run the parts that the command line names; return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--count", type=int, help="inputs or points of each part")
    given = parser.parse_args()
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {unknown[0]}")
    found = Findings()
    for name in given.parts or PARTS:
        started = time.monotonic()
        part = run_part(name, given.seed, given.count or PARTS[name][2])
        print(f"{name}, seed {given.seed}, {time.monotonic() - started:.0f} s")
        for what, number in sorted(part.counts.items()):
            print(f"  {number:>12,} {what}")
        found.add(part)
        sys.stdout.flush()
    for kind, example in found.wrong.items():
        print(f"\nWRONG {kind}\n    {example}")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
