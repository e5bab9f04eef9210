"""Messages in memory: who holds what, for how long, and in which processes."""

import gc
import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.workspace.child import Child
from tests.workspace.memory_use import NBYTES, arenas, holds, num_mapped, place_of
from xrank.errors import IncompleteError
from xrank.ranks.memory_messages import MemoryMessages
from xrank.testing.workspace_contract import fill_tensor, tensor_of

# ---- leases


def test_what_is_held_is_not_written_over(writer, reader):
    _, (held,) = reader.fetch(1, writer.publish("", [fill_tensor(1, NBYTES)]))
    for value in range(2, 12):
        _, (buffer,) = reader.fetch(1, writer.publish("", [fill_tensor(value, NBYTES)]))
        assert holds(buffer, value) and holds(held, 1)
        del buffer
    # The one that is held, and one for all others.
    assert len(arenas()) == 2


KEEPERS = {
    "a buffer": lambda first, second: first,
    "the other buffer": lambda first, second: second,
    "a slice": lambda first, second: first[5:6],
    "a slice of a slice": lambda first, second: second[1:][2:3][:1],
    "a cast": lambda first, second: first.cast("i"),
    "a tensor": lambda first, second: tensor_of(first, fill_tensor(0, len(first))),
    "a view of a view": lambda first, second: tensor_of(first, fill_tensor(0, len(first)))[4:].view(torch.int32)[::2][
        3
    ],
    "a parameter": lambda first, second: torch.nn.Parameter(torch.frombuffer(first, dtype=torch.float32)),
    "a storage": lambda first, second: tensor_of(first, fill_tensor(0, len(first))).untyped_storage(),
    "a numpy array": lambda first, second: np.frombuffer(first, np.int16)[7:],
    "a tensor's numpy array": lambda first, second: tensor_of(second, fill_tensor(0, len(second)))[1:].numpy()[::3],
    "a tensor of a numpy array": lambda first, second: torch.from_numpy(np.asarray(first)[2:]).view(-1, 2),
    "a tensor by dlpack": lambda first, second: torch.from_dlpack(tensor_of(first, fill_tensor(0, len(first)))[9:]),
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS.keys())
def test_the_last_part_of_it_holds_it(writer, reader, keep):
    first = writer.publish("", [fill_tensor(1, NBYTES // 2), fill_tensor(1, NBYTES // 2)])
    kept = keep(*reader.fetch(1, first)[1])
    second = writer.publish("", [fill_tensor(2, NBYTES)])
    reader.fetch(1, second)
    assert place_of(second) != place_of(first)
    del kept
    # The writer takes the first of those that are free.
    third = writer.publish("", [fill_tensor(3, NBYTES)])
    assert place_of(third) == place_of(first)
    assert holds(reader.fetch(1, third)[1][0], 3)


def test_who_holds_everything_gets_copies_in_the_end(writer, reader):
    held = []
    for value in range(30):
        held += reader.fetch(1, writer.publish("", [fill_tensor(value, NBYTES)]))[1]
        assert len(arenas()) <= 3
    assert all(holds(buffer, value) for value, buffer in enumerate(held))
    # With them goes what they held, and the writer has arenas enough.
    del held
    for value in range(5):
        assert holds(reader.fetch(1, writer.publish("", [fill_tensor(value, NBYTES)]))[1][0], value)
    assert len(arenas()) <= 3


def test_what_the_reader_holds_outlives_both_ends(writer, reader):
    _, (held,) = reader.fetch(1, writer.publish("", [fill_tensor(1, NBYTES)]))
    tensor = tensor_of(held, fill_tensor(0, NBYTES))
    writer.close()
    reader.close()
    assert len(arenas()) == num_mapped() == 1 and holds(held, 1)
    tensor += 1
    assert holds(held, 2)


# ---- forks


def test_a_child_sees_its_bytes_while_the_parent_gathers_on(writer, reader):
    for turn in range(50):
        value = turn + 1
        _, (lent,) = reader.fetch(1, writer.publish("", [fill_tensor(value, NBYTES)]))
        child = Child(lambda lent=lent, value=value: holds(lent, value))
        del lent
        for _ in range(2):
            _, (buffer,) = reader.fetch(1, writer.publish("", [fill_tensor(200, NBYTES)]))
            assert holds(buffer, 200)
            del buffer
        assert child.is_content()
        assert len(arenas()) <= 2 and num_mapped() <= 4


def test_a_child_that_drops_it_does_not_end_the_parents_lease(writer, reader):
    parts = reader.fetch(1, writer.publish("", [fill_tensor(1, NBYTES)]))[1]
    # The child lets go of the very objects, as a data loader does that clears its cache.
    child = Child(lambda: parts.clear() is None and gc.collect() >= 0)
    assert child.is_content()
    for value in range(2, 6):
        reader.fetch(1, writer.publish("", [fill_tensor(value, NBYTES)]))
        assert holds(parts[0], 1)


def test_a_child_holds_none_of_the_writers_memory(writer, reader):
    writer.publish("", [fill_tensor(1, NBYTES)])
    reader.fetch(1, writer.publish("", [fill_tensor(2, NBYTES)]))
    assert Child(lambda: gc.collect() >= 0 and not arenas() and num_mapped() == 0).is_content()


def test_a_child_that_closes_ends_no_message_of_its_parents(writer, reader):
    reader.fetch(1, writer.publish("", [fill_tensor(1, NBYTES)]))
    receipt = writer.publish("", [fill_tensor(2, NBYTES)])
    assert Child(lambda: writer.close() is None and reader.close() is None).is_content()
    assert holds(reader.fetch(1, receipt)[1][0], 2)


# ---- other processes

WRITER = """
import sys
from xrank.testing.workspace_contract import fill_tensor
from xrank.ranks.memory_messages import MemoryMessages
messages = MemoryMessages()
for value in (1, 2):
    print(messages.publish(str(value), [fill_tensor(value, int(sys.argv[1]))]), flush=True)
sys.stdin.read()
"""


def test_what_came_from_a_killed_process_stays_and_nothing_more_comes(reader):
    command = [sys.executable, "-c", WRITER, str(NBYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        first, second = process.stdout.readline(), process.stdout.readline()
        header, (buffer,) = reader.fetch(1, first)
        process.kill()
    assert header == "1" and holds(buffer, 1)
    tensor_of(buffer, fill_tensor(0, NBYTES)).fill_(3)
    assert holds(buffer, 3)
    for receipt in (second, second, first):
        with pytest.raises(IncompleteError, match="rank 1 is gone") as caught:
            MemoryMessages().fetch(1, receipt)
        assert caught.value.file == f"/proc/{process.pid}/fd/{place_of(receipt)['fd']}"
        assert f"pid {process.pid}" in caught.value.next_step


READER = """
import hashlib, json, sys
from xrank.ranks.memory_messages import MemoryMessages
messages, held = MemoryMessages(), []
for line in sys.stdin:
    receipt, is_held = json.loads(line)
    header, buffers = messages.fetch(1, receipt)
    print(json.dumps([header] + [hashlib.sha256(buffer).hexdigest() for buffer in buffers]), flush=True)
    held += buffers if is_held else []
    del buffers
print(json.dumps([hashlib.sha256(buffer).hexdigest() for buffer in held]))
assert "torch" not in sys.modules
"""


def test_another_process_reads_and_holds(writer):
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        held = []
        for value in range(20):
            tensors = [torch.randn(NBYTES // 4), torch.randn(3)]
            digests = [hashlib.sha256(tensor.numpy()).hexdigest() for tensor in tensors]
            held += digests if value % 5 == 0 else []
            receipt = writer.publish(f"number {value}", tensors)
            process.stdin.write(json.dumps([receipt, value % 5 == 0]) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == [f"number {value}", *digests]
            assert len(arenas()) <= 3
        process.stdin.close()
        assert json.loads(process.stdout.readline()) == held
    assert process.returncode == 0
