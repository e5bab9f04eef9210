"""Two pods on one machine: namespaces of their own for network, processes, memory and host name, joined by a cable.

Each pod has its own `/dev/shm`, sees only its own processes, and reaches the other over a pair of virtual network
devices (veth(4)). Only root can make them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

_UNSHARE = ("unshare", "--net", "--pid", "--ipc", "--uts", "--mount", "--fork", "--mount-proc", "--kill-child")
_BEGIN = """
set -e
mount -t tmpfs -o size=64m none /dev/shm
# torch looks names up, and no name server answers here.
printf '127.0.0.1 localhost\\n10.77.0.1 pod0\\n10.77.0.2 pod1\\n' > /dev/shm/hosts
printf 'hosts: files\\n' > /dev/shm/nsswitch
mount --bind /dev/shm/hosts /etc/hosts
mount --bind /dev/shm/nsswitch /etc/nsswitch.conf
hostname pod{pod}
ip link set lo up
until ip link show {device} > /dev/null 2>&1; do sleep 0.02; done
ip addr add 10.77.0.{address}/24 dev {device}
ip link set {device} up
"$@" || true
# With the last process of a pod its network would end, and the other end of the cable, with the other pod's address.
exec sleep 1000
"""


def why_no_pods() -> str:
    """Return why this machine makes no pods; "" if it does."""
    name = f"xr{os.getpid()}t"
    for command in ((*_UNSHARE, "true"), ("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}2")):
        try:
            made = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            return str(error)
        if made.returncode:
            return made.stderr.strip()[:200]
    subprocess.run(["ip", "link", "del", name], check=True)
    return ""


def run_pods(program: str, *arguments: str, folder: Path, is_over: Callable[[], bool], timeout_seconds: float) -> str:
    """Run a program with torchrun over both pods, two ranks in each; return what was written.

    Args:
        program: a module.
        arguments: of the program.
        folder: for what the launchers write.
        is_over: whether the program has done its work. A launcher stays for minutes if a rank of the other pod died.
        timeout_seconds: longest time.
    """
    devices = [f"xr{os.getpid()}{end}" for end in "ab"]
    logs = [folder / f"pod{pod}.log" for pod in range(2)]
    subprocess.run(["ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1]], check=True)
    with ExitStack() as undo:
        # A device goes with its pod's network; before it has moved there it must be removed.
        undo.callback(subprocess.run, ["ip", "link", "del", devices[0]], capture_output=True)
        pods = []
        for pod, device in enumerate(devices):
            launch = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={pod}"]
            place = ["--master-addr=10.77.0.1", "--master-port=29471"]
            command = [sys.executable, "-W", "ignore", *launch, *place, "-m", program, *arguments]
            begin = _BEGIN.format(pod=pod, device=device, address=pod + 1)
            environ = {**os.environ, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
            log = undo.enter_context(logs[pod].open("w"))
            made = subprocess.Popen(
                [*_UNSHARE, "sh", "-c", begin, "sh", *command], env=environ, stdout=log, stderr=subprocess.STDOUT
            )
            undo.callback(made.wait)
            undo.callback(made.kill)  # and with it all processes of the pod
            pods.append(made)
            subprocess.run(["ip", "link", "set", device, "netns", str(_first_process(made.pid))], check=True)
        end = time.monotonic() + timeout_seconds
        while not is_over() and any(pod.poll() is None for pod in pods) and time.monotonic() < end:
            time.sleep(0.1)
    return "\n".join(log.read_text() for log in logs)


def _first_process(unshare: int) -> int:
    """Return the number, outside, of a pod's first process."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            if children := Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split():
                return int(children[0])
        time.sleep(0.01)
    raise TimeoutError("unshare started no process")


def sent_nbytes() -> int:
    """Return the bytes that this pod has sent to the other (proc_net(5): /proc/net/dev)."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("xr"))
