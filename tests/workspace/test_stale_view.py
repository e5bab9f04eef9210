"""Messages through clients that remember everything wrongly: first that they do, then that it does no harm."""

import contextlib
import json
import os

import pytest
import torch

from tests.workspace.stale_view import Server, StaleClient
from xrank.errors import IncompleteError
from xrank.ranks import directory_messages
from xrank.ranks.directory_messages import DirectoryMessages, MessageName
from xrank.storage import shared_directory
from xrank.testing.workspace_contract import fill_tensor
from xrank.workspace import nfs
from xrank.workspace.nfs import NFSWorkspace

NUM_LAYERS = 12
NUM_TIMES = 100


@pytest.fixture
def server():
    return Server()


class Host:
    """One rank's messages, on a host of its own."""

    def __init__(self, path, rank, server):
        self.client = StaleClient(server)
        self._server = server
        with self.serving():
            self.messages = DirectoryMessages(path, rank)

    def serving(self):
        return self.client.serving(directory_messages, shared_directory)

    def publish(self, header, tensors):
        with self.serving():
            return self.messages.publish(header, tensors)

    def retire(self, receipt):
        with self.serving():
            self.messages.retire(receipt)

    def fetch(self, rank, receipt):
        """Fetch a message as a gather does: again each second, for as long as it may stay invisible."""
        start = self._server.seconds
        while True:
            try:
                with self.serving():
                    return self.messages.fetch(rank, receipt)
            except IncompleteError:
                if self._server.seconds - start > self.messages.patience_seconds:
                    raise
                self._server.seconds += 1


@pytest.fixture
def hosts(tmp_path, server):
    """The hosts of rank 0, which gathers, and of rank 1; each has listed the directory when it was empty."""
    return Host(tmp_path, 0, server), Host(tmp_path, 1, server)


# ---- what these clients do: without it, the tests below would prove nothing


def write(client, path, content):
    fd = client.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    client.pwrite(fd, content, 0)
    client.close(fd)


def read(client, path):
    fd = client.open(str(path), os.O_RDONLY)
    try:
        return os.pread(fd, 1000, 0)
    finally:
        client.close(fd)


@pytest.mark.parametrize(
    ("gap_seconds", "seen"),
    [(0, [0] * NUM_LAYERS), (20, [0, 0, 0, None, None, None, 6, 6, 6, None, 10, 10])],
)
def test_one_name_for_each_rank_is_read_wrongly(tmp_path, server, gap_seconds, seen):
    """What NVIDIA ModelOpt does for each layer: unlink rank_1_state.pth, write it anew, all wait, the other looks.

    Where rank 1 has None (layer 3) it leaves no file, and the other takes a file that is not there for None.
    """
    here, there = StaleClient(server), StaleClient(server)
    name, values = tmp_path / "rank_1_state.pth", []
    for layer in range(NUM_LAYERS):
        with contextlib.suppress(FileNotFoundError):
            here.unlink(str(name))
        if layer != 3:
            write(here, name, json.dumps(layer).encode())
        try:
            there.stat(str(name))
        except OSError:  # as os.path.exists has it
            values.append(None)
        else:
            values.append(json.loads(read(there, name)))
        server.seconds += gap_seconds
    assert values == seen


# ---- messages


def test_every_layer_is_its_own(tmp_path, hosts, server):
    """The same through messages, a hundred times: each of its own file, each right at the first look."""
    first, second = hosts
    for number in range(NUM_TIMES):
        for layer in range(NUM_LAYERS):
            value = number * NUM_LAYERS + layer
            config, tensors = {"layer": value}, [torch.tensor([value], dtype=torch.int32)]
            if layer == 3:
                config, tensors = None, []
            receipt = second.publish(json.dumps(config), tensors)
            header, buffers = first.fetch(1, receipt)
            second.retire(receipt)
            assert json.loads(header) == config
            assert [buffer.cast("i").tolist() for buffer in buffers] == [tensor.tolist() for tensor in tensors]
        assert os.listdir(tmp_path) == []
    assert set(first.client.looks.values()) == {1} and len(first.client.looks) == NUM_TIMES * NUM_LAYERS
    assert server.seconds == 0


def test_who_looked_too_early_has_patience_enough(tmp_path, hosts, server):
    first, second = hosts
    receipt = second.publish("late", [fill_tensor(5, 1000)])
    (name,) = os.listdir(tmp_path)
    os.rename(tmp_path / name, tmp_path / "on its way")
    with pytest.raises(IncompleteError), first.client.serving(directory_messages):
        first.messages.fetch(1, receipt)
    os.rename(tmp_path / "on its way", tmp_path / name)
    header, (buffer,) = first.fetch(1, receipt)
    assert header == "late" and bytes(buffer) == b"\5" * 1000
    assert server.seconds == 60 < DirectoryMessages.patience_seconds


def test_who_saw_half_of_it_has_patience_enough(tmp_path, hosts, server):
    first, second = hosts
    receipt = second.publish("half", [fill_tensor(5, 1000)])
    (name,) = os.listdir(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:500])
    with pytest.raises(IncompleteError, match="not visible"), first.client.serving(directory_messages):
        first.messages.fetch(1, receipt)
    (tmp_path / name).write_bytes(content)
    assert first.fetch(1, receipt)[0] == "half" and server.seconds == 60


def test_a_stale_handle_is_looked_up_anew(tmp_path, hosts, server):
    first, second = hosts
    receipt = second.publish("moved", [fill_tensor(5, 1000)])
    (name,) = os.listdir(tmp_path)
    assert first.fetch(1, receipt)[0] == "moved"
    # A server that was restored from a copy: the same file by its name, another by its number.
    (tmp_path / "copy").write_bytes((tmp_path / name).read_bytes())
    os.rename(tmp_path / "copy", tmp_path / name)
    server.bearers[str(tmp_path / name)] += 1
    server.seconds = 60
    assert first.fetch(1, receipt)[0] == "moved"
    assert first.client.looks[name] == 3 and server.seconds == 61


def test_an_old_listing_is_in_no_starts_way(tmp_path, server):
    left = tmp_path / MessageName(0).new().replace(f".{os.getpid()}.", f".{1 << 23}.")
    left.touch()
    first = Host(tmp_path, 0, server)
    assert not left.exists()
    with first.serving():
        assert first.client.listdir(str(tmp_path)) == [left.name]
        assert DirectoryMessages(tmp_path, 0).publish("", [])


def test_what_is_gone_is_missed_in_the_end(hosts, server):
    first, second = hosts
    receipt = second.publish("gone", [])
    second.retire(receipt)
    with pytest.raises(IncompleteError):
        first.fetch(1, receipt)
    assert DirectoryMessages.patience_seconds < server.seconds < DirectoryMessages.patience_seconds + 2


def test_a_state_whose_rename_was_answered_to_nobody_is_there(tmp_path, server):
    client = StaleClient(server)
    workspace = NFSWorkspace(tmp_path, rank=0, world_size=1, run_id="run")
    for number in range(3):
        client.loses_next_rename = True
        with client.serving(nfs, directory_messages, shared_directory):
            workspace.write_configs_and_weights({"number": number}, {"a": fill_tensor(number, 10)})
        assert not client.loses_next_rename
        assert workspace.read_configs_and_weights_from_rank(0)[0] == {"number": number}
