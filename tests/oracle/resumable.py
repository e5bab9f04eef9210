"""Long runs over many items, in processes of their own: a run that was cut short goes on where it ended."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

__all__ = ["map_resumably"]

_NUM_PROCESSES = 2
_NUM_ITEMS_PER_POOL = 50
"""Processes that make hundreds of classes keep gigabytes of them.

Not ``max_tasks_per_child``: such a pool ends no run (github.com/python/cpython/issues/115634).
"""
_MAX_BYTES = 6 << 30
"""A class whose model would need more memory raises MemoryError, instead of ending the run."""


def map_resumably(
    function: Callable[..., Any], items: Mapping[str, Sequence[Any]], record: Path, about: str
) -> dict[str, Any]:
    """Return the result of a function for each item.

    Args:
        function: a function of a module, whose result JSON can hold.
        items: name -> arguments.
        record: file of the results of this run and of earlier ones, one line each. Remove it to begin anew.
        about: the versions on which the results depend. A record of other versions is refused.
    """
    record.parent.mkdir(exist_ok=True)
    lines = record.read_text().splitlines() if record.exists() else []
    if lines and json.loads(lines[0]) != about:
        raise SystemExit(f"{record} is of {lines[0]}, not of {about}: remove it")
    found = dict(json.loads(line) for line in lines[1:])
    missing = [name for name in items if name not in found]
    with record.open("a") as file:
        if not lines:
            print(json.dumps(about), file=file, flush=True)
        for start in range(0, len(missing), _NUM_ITEMS_PER_POOL):
            with ProcessPoolExecutor(_NUM_PROCESSES, get_context("spawn"), _limit_memory) as pool:
                names = {pool.submit(function, *items[n]): n for n in missing[start : start + _NUM_ITEMS_PER_POOL]}
                for future in as_completed(names):
                    name = names[future]
                    found[name] = future.result()
                    print(json.dumps([name, found[name]]), file=file, flush=True)
                    print(f"{len(found)}/{len(items)} {name}", file=sys.stderr, flush=True)
    return {name: found[name] for name in items}


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
