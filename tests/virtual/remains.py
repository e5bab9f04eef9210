"""Possible leftovers of a run: processes, names in shared memory, descriptors, mappings of a run's memory."""

import contextlib
import gc
import os

from tests.named_memory import named_memory
from tests.open_files import open_files

# Torch alone makes half a million objects, which the collections below need not look at each time.
gc.collect()
gc.freeze()


def remains():
    """Everything of this process that a run has a part in, as a set; a run adds nothing to it.

    Others may take from it meanwhile: connections and processes of earlier tests end at any time.
    """
    gc.collect()
    found = {("process", child) for child in children()}
    found |= {("named memory", name) for name in named_memory()}
    found |= {("open file", *item) for item in open_files().items()}
    return found | {("mapping", number) for number in range(num_mapped())}


def children():
    """The processes that this one has started and not reaped, whatever their state."""
    while True:
        # A thread that ends between two reads hands its children to another, which may have been read before it.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return sorted(child for task in os.listdir("/proc/self/task") for child in _children_of(task))


def _children_of(task):
    with open(f"/proc/self/task/{task}/children") as file:
        return file.read().split()


def num_mapped():
    """How many pieces of shared memory without a name are mapped."""
    with open("/proc/self/maps") as maps:
        return sum("/dev/zero" in line for line in maps)


def own_nbytes():
    """The memory of this process, that which it shares included, but for files: their pages come and go."""
    with open("/proc/self/status") as file:
        told = dict(line.split(":", 1) for line in file)
    return 1024 * sum(int(told[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap"))
