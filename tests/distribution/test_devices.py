import json
import os
import subprocess
import sys

from tests.free_port import free_port
from xrank.ranks.store import KerasJobs, read_keras_jobs

RANK = """
import json
import torch.distributed as dist
from xrank.distribution import get_device_count, initialize, list_devices
initialize(*json.loads(input()))
print(json.dumps([dist.get_rank(), list_devices("CPU"), get_device_count("cpu"), dist.get_backend()]))
dist.barrier()  # who ends now would break the other's connection while it is made
dist.destroy_process_group()
"""


def test_processes_start_by_keras_variables_and_arguments_beat_them():
    address = f"localhost:{free_port()}"
    told = {"KERAS_DISTRIBUTION_JOB_ADDRESSES": f"{address},localhost:1", "KERAS_DISTRIBUTION_PROCESS_ID": "1"}
    environ = {**os.environ, **told, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    arguments = ([address, 2, 0], [None, None, None])  # one address, and how many; or all of them, and who
    for process, values in zip(ranks, arguments, strict=True):
        process.stdin.write(json.dumps(values) + "\n")
        process.stdin.flush()
    try:
        # The last line: gloo of torch 2.10 prints its connections before.
        said = [json.loads(process.communicate(timeout=150)[0].splitlines()[-1]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [answer[0] for answer in said] == [0, 1]
    assert all(answer[1:3] == [["cpu:0", "cpu:1"], 2] for answer in said)


def test_keras_variables():
    assert read_keras_jobs({}) == KerasJobs(None, None, None)
    environ = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": "0",
    }
    assert read_keras_jobs(environ) == KerasJobs("a:1", 2, 0)
