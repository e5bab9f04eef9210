"""The process that forks the ranks of a pool, so that torch is imported once and not by each rank.

Started as ``python -m xrank.testing.rank_starter <requests fd> <module>...``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time

from xrank import environment

_REQUEST = struct.Struct("<qd")
"""A rank's pid and the seconds to wait for its end; pid 0 asks for a new rank."""
_ANSWER = struct.Struct("<q")
_STILL_RUNS = 1 << 32
_LAUNCH_VARIABLES = ("TORCHELASTIC_", "SLURM_", "OMPI_", "XRANK_")
_IMPORTED_EARLY = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
"""Modules that the starter imports if the pool's process has imported them: its ranks need them, too."""


class RankStarter:
    """The process, from the view of the pool; one thread uses it at a time.

    Args:
        log_path: file that records its output.
    """

    def __init__(self, log_path: str) -> None:
        self.log_path = log_path
        self._socket, there = socket.socketpair()
        modules = [name for name in _IMPORTED_EARLY if name in sys.modules]
        with there, open(log_path, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
                [sys.executable, "-m", "xrank.testing.rank_starter", str(there.fileno()), *modules],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environ_of_ranks(),
            )

    def fork(self, fds: tuple[int, int, int, int], timeout_seconds: float) -> int | None:
        """Start a rank and return its pid, or None if the process has ended or does not answer.

        Args:
            fds: the rank's descriptors: its log, its connection to the pool, a pipe for its stacks, and a pipe whose
                other end is open while the pool's process runs.
            timeout_seconds: time for the imports.
        """
        self._socket.settimeout(timeout_seconds)
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [_REQUEST.pack(0, 0.0)], fds)
            return self._answer()
        return None

    def await_end(self, pid: int, timeout_seconds: float) -> int | None:
        """Return the exit status of a rank, negative if a signal killed it, or None if it still runs."""
        self._socket.settimeout(None)
        with contextlib.suppress(OSError):
            self._socket.sendall(_REQUEST.pack(pid, timeout_seconds))
            status = self._answer()
            return None if status == _STILL_RUNS else status
        return None

    def close(self) -> None:
        """End the process, after its ranks."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _answer(self) -> int | None:
        content = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
        return int(_ANSWER.unpack(content)[0]) if len(content) == _ANSWER.size else None


def _environ_of_ranks() -> dict[str, str]:
    environ = {k: v for k, v in environment.environ().items() if not k.startswith(_LAUNCH_VARIABLES)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    if sys.platform == "linux":
        # Without this, gloo looks up the host's name, which takes seconds without a name server.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environ


def _await_end(pid: int, timeout_seconds: float) -> int:
    deadline = time.monotonic() + timeout_seconds
    while True:
        with contextlib.suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return _STILL_RUNS
        time.sleep(0.002)


def main() -> None:
    """Serve the pool until it hangs up."""
    # Ctrl-C reaches the whole terminal group; the pool decides about the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in ("torch.distributed", *sys.argv[2:]):
        importlib.import_module(name)

    import torch

    from xrank.testing.rank_worker import run_rank

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else a collection in a rank visits all imported objects, which copies their pages
    while True:
        request, fds, *_ = socket.recv_fds(requests, _REQUEST.size, 4)
        if not request:
            return
        pid, timeout_seconds = _REQUEST.unpack(request)
        if pid:
            answer = _await_end(pid, timeout_seconds)
        else:
            answer = os.fork()
            if not answer:
                requests.close()
                run_rank(*fds)
            for fd in fds:
                os.close(fd)
        requests.sendall(_ANSWER.pack(answer))


if __name__ == "__main__":
    main()
