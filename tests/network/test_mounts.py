import os
import subprocess
import sys
import time

MOUNT = """
import os, sys
from pathlib import Path
from tests.network.mounts import mount_twice
with mount_twice(sys.argv[1], Path(sys.argv[2])) as mounts:
    holder = mounts.paths[0].parts[2]
    print(os.readlink(f"/proc/{holder}/ns/pid_for_children"), flush=True)
    sys.stdin.read()
"""


def processes_in(namespace: str) -> list[str]:
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{number}/ns/pid") == namespace:
                found.append(number)
        except OSError:
            pass  # it has ended, or is not to be looked at
    return found


def test_killed_tests_leave_no_process(network_file_system, tmp_path):
    command = [sys.executable, "-c", MOUNT, network_file_system.file_system, str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as tests:
        namespace = tests.stdout.readline().strip()
        assert len(processes_in(namespace)) > 3  # the holder's child, and each mount's
        tests.kill()
    deadline = time.monotonic() + 40
    while processes_in(namespace):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with open("/proc/self/mounts") as mounts:
        assert str(tmp_path) not in mounts.read()
