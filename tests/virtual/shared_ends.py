"""Channel ends of several devices in this process: a message that was sent first is received without a wait."""

import contextlib

from xrank.virtual.engine import HOST
from xrank.virtual.shared_channels import SharedLinks, SharedMemory


@contextlib.contextmanager
def shared_ends(num_devices=2):
    """Give the links of each device and, last, of the host."""
    shared = SharedMemory(range(num_devices))
    try:
        yield [SharedLinks(shared, device) for device in (*range(num_devices), HOST)]
    finally:
        shared.close()
