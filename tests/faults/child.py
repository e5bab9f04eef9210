"""Runs a part of the campaign in a forked process: without the rights of root, and with a limit of memory."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import traceback
from collections.abc import Callable

from tests.faults.findings import Findings

__all__ = ["run_in_child"]

_NOBODY = 65534


def run_in_child(work: Callable[[], Findings], *, is_nobody: bool = False, max_nbytes: int | None = None) -> Findings:
    """Run the work in a child, and return its findings; the end of the child without an answer is a finding.

    Args:
        work: any callable.
        is_nobody: whether root becomes another user first: commands with any options could write anywhere.
        max_nbytes: address space that the child may add to that of this process.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if max_nbytes is not None:
                with open("/proc/self/statm", encoding="ascii") as file:
                    now = int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + max_nbytes, resource.RLIM_INFINITY))
            if is_nobody and os.geteuid() == 0:
                _become_nobody()
            content = pickle.dumps(work())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        with open(write, "wb") as pipe:
            pipe.write(content)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        content = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not content:
        findings = Findings()
        findings.report(f"a child ended with {status}", "its traceback is above, if it had one")
        return findings
    found: Findings = pickle.loads(content)
    return found


def _become_nobody() -> None:
    """Leave root's rights but that to read: this interpreter may lie in root's home."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(8, 1, 0, 0, 0)  # linux/prctl.h: PR_SET_KEEPCAPS
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    read_search = 1 << 2  # linux/capability.h: CAP_DAC_READ_SEARCH, version 3 of the header
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)(read_search, read_search, 0, 0, 0, 0)
    if library.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")
