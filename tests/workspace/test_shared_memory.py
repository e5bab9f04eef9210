import errno
import gc
import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.named_memory import named_memory
from tests.open_files import open_files, opened_since
from xrank import environment
from xrank.errors import CorruptError, IncompleteError, NoSpaceError, UsageError, XrankError
from xrank.ranks import memory_messages
from xrank.ranks.memory_messages import MemoryFile
from xrank.ranks.store import LocalStore
from xrank.testing.workspace_contract import WorkspaceContract
from xrank.workspace import shared_memory
from xrank.workspace.shared_memory import SharedMemoryWorkspace

NAME = "workspace/state/{}".format


@pytest.fixture
def environ(monkeypatch):
    """An environment of the test's own, empty at first."""
    values: dict[str, str] = {}
    monkeypatch.setattr(environment, "environ", lambda: values)
    return values


@pytest.fixture
def store():
    return LocalStore()


@pytest.fixture
def make(store):
    made = []

    def make(rank=0, world_size=1, run_id="run"):
        made.append(SharedMemoryWorkspace(store=store, rank=rank, world_size=world_size, run_id=run_id))
        return made[-1]

    yield make
    for workspace in made:
        workspace.close()
    assert not shared_memory._held


class TestContract(WorkspaceContract):
    @pytest.fixture
    def make_workspace(self, make):
        return make

    @pytest.fixture
    def uninitialized(self, environ):
        return SharedMemoryWorkspace(rank=0, world_size=2)


def opened():
    gc.collect()
    return open_files()


def named_segments():
    """What of this process, or by its name of xrank, lies in /dev/shm; other programs have their own there."""
    # pym-: the heap of Python's own multiprocessing, which other tests of this process may have used.
    mine = [
        link for link in open_files().values() if link.startswith("/dev/shm") and not link.startswith("/dev/shm/pym-")
    ]
    return mine + named_memory()


def told(store, rank=0):
    return json.loads(store.peek(NAME(rank)))


def tell(store, rank=0, **changes):
    store.put(NAME(rank), json.dumps({**told(store, rank), **changes}))


# ---- real ranks


@pytest.mark.ranks(4)
def test_every_rank_reads_all_others(rank, world_size):
    import torch.distributed as dist

    before = opened()
    workspace = SharedMemoryWorkspace()
    assert workspace.is_initialized and (workspace.rank, workspace.world_size) == (rank, 4) and workspace.run_id
    for turn in range(3):
        workspace.write_configs_and_weights({"rank": rank, "turn": turn}, {"a": torch.full((1000,), rank + turn)})
        dist.barrier()
        for other in range(world_size):
            config, weights = workspace.read_configs_and_weights_from_rank(other)
            assert config == {"rank": other, "turn": turn} and weights["a"].tolist() == [other + turn] * 1000
        dist.barrier()
    assert not named_segments()
    if rank == 2:
        workspace.close()
        workspace.close()
    dist.barrier()
    for other in range(world_size):
        assert (workspace.read_configs_and_weights_from_rank(other) == (None, None)) is (other == 2)
    dist.barrier()
    workspace.close()
    gc.collect()
    assert not opened_since(before)


@pytest.mark.ranks(4)
def test_dtensors(rank, world_size):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(60.0).view(10, 6)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    workspace = SharedMemoryWorkspace()
    workspace.write_configs_and_weights({}, {"up": distribute_tensor(whole, mesh, [Shard(0), Shard(1)])})
    dist.barrier()
    parts = [workspace.read_configs_and_weights_from_rank(other)[1]["up"] for other in range(world_size)]
    assert all(type(part) is torch.Tensor and part.shape == (5, 3) for part in parts)
    assert torch.equal(torch.cat([torch.cat(parts[:2], 1), torch.cat(parts[2:], 1)]), whole)
    dist.barrier()
    workspace.close()


@pytest.mark.ranks(2)
def test_a_group_tells_only_its_members(rank):
    import torch.distributed as dist

    group = dist.new_group([1])
    workspace = SharedMemoryWorkspace(group)
    assert workspace.is_initialized is (rank == 1)
    if rank == 1:
        workspace.write_configs_and_weights({"a": 1}, {})
        assert workspace.read_configs_and_weights_from_rank(1)[0] == {"a": 1}
        workspace.close()
    dist.barrier()
    assert SharedMemoryWorkspace().read_configs_and_weights_from_rank(1) == (None, None)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_reader_while_a_rank_writes_sees_whole_states(rank):
    import torch.distributed as dist

    workspace = SharedMemoryWorkspace()
    if rank == 0:
        workspace.write_configs_and_weights({"n": 0}, {"a": torch.zeros(5000)})
    dist.barrier()
    seen = []
    for n in range(1, 150):
        if rank == 0:
            workspace.write_configs_and_weights({"n": n}, {"a": torch.full((5000,), float(n))})
        else:
            config, weights = workspace.read_configs_and_weights_from_rank(0)
            assert bool((weights["a"] == config["n"]).all())
            seen.append(config["n"])
    assert seen == sorted(seen)
    dist.barrier()
    workspace.close()


# ---- writers that are gone, and numbers that are used again


def test_the_state_of_a_killed_process_is_gone(make, store):
    code = (
        "import os, sys; from xrank.ranks.store import LocalStore;"
        "from xrank.workspace.shared_memory import SharedMemoryWorkspace; store = LocalStore();"
        "w = SharedMemoryWorkspace(store=store, rank=1, world_size=2, run_id='run');"
        "w.write_configs_and_weights({'a': 1}, {}); print(store.peek('workspace/state/1'), flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        store.put(NAME(1), process.stdout.readline().decode())
        reader = make(0, 2)
        assert reader.read_configs_and_weights_from_rank(1)[0] == {"a": 1}
        process.kill()
    assert reader.read_configs_and_weights_from_rank(1) == (None, None)
    assert make(1, 2).read_configs_and_weights_from_rank(1) == (None, None)
    assert store.peek(NAME(1)) is None


def test_a_closed_state_is_gone_even_where_its_number_is_used_again(make, store):
    make().write_configs_and_weights({"a": 1}, {})
    text, fd = store.peek(NAME(0)), told(store)["fd"]
    make().close()
    store.put(NAME(0), text)
    another = MemoryFile()
    os.write(another.fd, b"x" * told(store)["nbytes"])
    another.seal()
    assert another.fd == fd
    assert make().read_configs_and_weights_from_rank(0) == (None, None)
    another.close()


@pytest.mark.parametrize("part", ["pid", "fd", "device", "inode", "nbytes", "nonce"])
def test_what_is_not_what_was_told_is_not_taken(make, store, part):
    workspace = make()
    workspace.write_configs_and_weights({"a": 1}, {})
    text = store.peek(NAME(0))
    # The next process number may be a thread of this very process, whose descriptors are the same.
    wrong = {"nonce": "0" * 32, "pid": 1 << 23}
    tell(store, **{part: wrong[part] if part in wrong else told(store)[part] + 1})
    assert workspace.read_configs_and_weights_from_rank(0) == (None, None)
    store.put(NAME(0), text)
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"a": 1}


def test_another_users_file_is_not_taken(make, store, monkeypatch):
    workspace = make()
    workspace.write_configs_and_weights({}, {})
    monkeypatch.setattr(memory_messages.os, "geteuid", lambda: os.getuid() + 1)
    assert workspace.read_configs_and_weights_from_rank(0) == (None, None)


def test_files_that_are_not_sealed_or_not_memory_are_not_taken(make, store, tmp_path):
    workspace = make()
    workspace.write_configs_and_weights({"a": 1}, {})
    with open(f"/proc/self/fd/{told(store)['fd']}", "rb") as file:
        content = file.read()
    text = store.peek(NAME(0))
    unsealed = os.memfd_create("xrank-state-" + told(store)["nonce"], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    on_disk = os.open(tmp_path / "state", os.O_RDWR | os.O_CREAT)
    for fd in (unsealed, on_disk):
        os.write(fd, content)
        status = os.fstat(fd)
        tell(store, fd=fd, device=status.st_dev, inode=status.st_ino)
        assert workspace.read_configs_and_weights_from_rank(0) == (None, None)
        os.close(fd)
    store.put(NAME(0), text)


def test_a_rank_on_another_host_is_an_error_that_names_both(make, store):
    make(1, 2).write_configs_and_weights({}, {})
    text = store.peek(NAME(1))
    tell(store, 1, space="elsewhere", host="node7", inode=1)
    with pytest.raises(UsageError, match=rf"rank 1 .*node7.*{socket.gethostname()}") as caught:
        make(0, 2).read_configs_and_weights_from_rank(1)
    assert caught.value.rank == 1 and caught.value.host == "node7"
    store.put(NAME(1), text)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"pid": 1}', "[" * 100_000])
def test_what_no_rank_told_is_corrupt(make, store, text):
    store.put(NAME(1), text)
    with pytest.raises(CorruptError, match="rank 1"):
        make(0, 2).read_configs_and_weights_from_rank(1)
    make(1, 2).write_configs_and_weights({}, {})
    tell(store, 1, fd="../../etc")
    with pytest.raises(CorruptError, match="rank 1"):
        make(0, 2).read_configs_and_weights_from_rank(1)
    shared_memory._held.popitem()[1].close()


def test_a_state_that_was_replaced_before_it_was_opened_is_looked_up_again(make, store, monkeypatch):
    workspace = make()
    workspace.write_configs_and_weights({"n": 1}, {})
    open_place, n = shared_memory.open_place, [1]

    def replace(place):
        n[0] += 1
        if n[0] <= last:
            workspace.write_configs_and_weights({"n": n[0]}, {})
        return open_place(place)

    monkeypatch.setattr(shared_memory, "open_place", replace)
    last = 4
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"n": 4}
    last = 10_000
    with pytest.raises(IncompleteError, match="replaced"):
        workspace.read_configs_and_weights_from_rank(0)


# ---- what is left, what fails


def test_two_hundred_writes_leave_one_descriptor_and_no_name(make, store):
    before = opened()
    workspace = make()
    workspace.write_configs_and_weights({}, {})
    for n in range(200):
        workspace.write_configs_and_weights({"n": n}, {"a": torch.ones(n)})
        workspace.read_configs_and_weights_from_rank(0)
        assert not named_segments()
    gc.collect()
    [kept] = opened_since(before)  # the last state, in place of the one before
    assert "memfd" in kept


def test_a_fork_does_not_keep_the_state(make, store):
    make().write_configs_and_weights({}, {})
    fd = told(store)["fd"]
    child = os.fork()
    if child == 0:
        os._exit(int(os.path.exists(f"/proc/self/fd/{fd}") or bool(shared_memory._held)))
    assert os.waitpid(child, 0)[1] == 0
    assert make().read_configs_and_weights_from_rank(0) == ({}, {})


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ENOMEM])
@pytest.mark.parametrize("at", [0, 1])
def test_a_failure_leaves_the_old_state_and_nothing_else(make, monkeypatch, number, at):
    workspace = make()
    workspace.write_configs_and_weights({"n": 1}, {"a": torch.ones(3)})
    before, write, calls = opened(), os.write, []

    def fail(fd, data):
        calls.append(fd)
        if len(calls) > at:
            raise OSError(number, os.strerror(number))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(XrankError) as caught:
            workspace.write_configs_and_weights({"n": 2}, {"a": torch.zeros(1000)})
    if number == errno.EIO:
        assert "the state of rank 0 cannot be written to memory" in str(caught.value)
    else:
        assert isinstance(caught.value, NoSpaceError) and caught.value.rank == 0
        assert caught.value.needed_nbytes == 4000 and caught.value.free_nbytes > 0
    gc.collect()
    assert not opened_since(before) and len(shared_memory._held) == 1
    assert workspace.read_configs_and_weights_from_rank(0)[0] == {"n": 1}


# ---- states of others


# ---- who and where


def test_alone_a_process_is_its_own_store(environ):
    workspace = SharedMemoryWorkspace(run_id="alone")
    assert workspace.is_initialized and (workspace.rank, workspace.world_size) == (0, 1)
    workspace.write_configs_and_weights({"a": 1}, {})
    assert SharedMemoryWorkspace(run_id="alone").read_configs_and_weights_from_rank(0)[0] == {"a": 1}
    assert SharedMemoryWorkspace().read_configs_and_weights_from_rank(0) == (None, None)
    assert not shared_memory._held
