"""The contents of an unfinished output of xrank, and whether its gather still runs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from xrank.plan.report import InspectDetails, Report, SourceFacts
from xrank.system import process_state
from xrank.writers.journal import Journal, read_journal


def inspect_stage(path: str) -> Report | None:
    """Return the report of a stage, or None if the path is not a stage."""
    journal = read_journal(path)
    if journal is None:
        return None
    done = sum(line.nbytes for line in journal.lines)
    total = done
    try:
        unfinished = [entry for entry in os.scandir(path) if entry.name.endswith(".part")]
    except FileNotFoundError:  # its gather runs, and has committed it meanwhile
        return None
    for entry in unfinished:
        with suppress(FileNotFoundError):  # finished meanwhile
            total += entry.stat(follow_symlinks=False).st_size
    return Report(
        command="inspect",
        path=path,
        source=SourceFacts(path=path, format="stage of xrank"),
        details=InspectDetails(
            stage={
                "files": [{"name": line.file, "nbytes": line.nbytes, "digest": line.digest} for line in journal.lines],
                "finished_nbytes": done,
                "begun_nbytes": total,
                "host": journal.host,
                "pid": journal.pid,
                "owner": owner_state(journal),
            },
            problems=[],
            tensors=[],
            companions=[],
        ),
    )


def owner_state(journal: Journal) -> str:
    """Return ``alive``, ``gone``, or ``unknown`` for an owner on another host."""
    if journal.host != socket.gethostname():
        return "unknown"
    return process_state(journal.pid)
