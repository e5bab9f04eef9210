"""The contract of workspaces for messages, as tests: a subclass with one fixture runs all of them on its workspace.

    class TestMine(MessageWorkspaceContract):
        @pytest.fixture
        def make_workspace(self, tmp_path):
            made = []

            def make(rank=0, world_size=2):
                made.append(MyWorkspace(tmp_path, rank=rank, world_size=world_size))
                return made[-1]

            yield make
            for workspace in made:
                workspace.close()

Tests of a single medium (files, mappings, remains of a killed process) belong to the tests of that workspace.
"""

# ruff: noqa: D102, S311 (a test's name describes the test; random numbers are seeded)

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import pytest

from xrank.errors import CorruptError, IncompleteError
from xrank.ranks.wire import MessageWorkspace
from xrank.testing.workspace_contract import has_same_bytes, tensor_zoo

if TYPE_CHECKING:
    import torch


class MakeMessageWorkspace(Protocol):
    """Makes the workspace of a rank; all of them share one place, as those of a run's processes do."""

    def __call__(self, rank: int = 0, world_size: int = 2) -> MessageWorkspace:
        """Return that rank's workspace."""
        ...


def fill_tensor(value: int, nbytes: int) -> torch.Tensor:
    """Return a tensor of that many bytes, all of them `value`."""
    import torch

    return torch.full((nbytes,), value, dtype=torch.uint8)


def tensor_of(buffer: memoryview, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over a buffer with the dtype and shape of `like`, as a reader would make it."""
    import torch

    if len(buffer) == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(like.dtype).view(like.shape)


class MessageWorkspaceContract:
    """The tests; a subclass provides `make_workspace`.

    All ranks are objects of this process. Each workspace's own tests show that a second process can read.
    """

    @pytest.fixture
    def make_workspace(self) -> MakeMessageWorkspace:
        """Return the maker of each rank's workspace."""
        raise NotImplementedError("override this fixture with one that makes your workspace")

    @pytest.fixture
    def reader(self, make_workspace: MakeMessageWorkspace) -> MessageWorkspace:
        """Return rank 0's workspace, which gathers."""
        return make_workspace(0)

    @pytest.fixture
    def sender(self, make_workspace: MakeMessageWorkspace) -> MessageWorkspace:
        """Return rank 1's workspace, which sends."""
        return make_workspace(1)

    def test_is_a_workspace_for_messages(self, sender: MessageWorkspace) -> None:
        assert isinstance(sender, MessageWorkspace)
        assert sender.patience_seconds > 0

    # ---- sent values arrive unchanged

    def test_every_tensor_comes_bit_for_bit(self, sender: MessageWorkspace, reader: MessageWorkspace) -> None:
        zoo = tensor_zoo()
        # Later messages may reuse memory of earlier ones, which takes other paths than fresh memory.
        for names in (list(zoo), list(zoo), list(reversed(zoo))):
            receipt = sender.publish("zoo", [zoo[name] for name in names])
            header, buffers = reader.fetch(1, receipt)
            sender.retire(receipt)
            assert header == "zoo" and len(buffers) == len(names)
            for name, buffer in zip(names, buffers, strict=True):
                assert buffer.nbytes == zoo[name].nbytes, name
                assert has_same_bytes(tensor_of(buffer, zoo[name]), zoo[name]), name

    @pytest.mark.parametrize("sizes", [[3, 100, 1, 5], [3, 5_000_001, 7, 70_001]])
    def test_every_buffer_is_aligned(
        self, sender: MessageWorkspace, reader: MessageWorkspace, sizes: list[int]
    ) -> None:
        # As aligned as torch's own memory, so that tensors of any dtype may lie there.
        _, buffers = reader.fetch(1, sender.publish("", [fill_tensor(1, size) for size in sizes]))
        assert all(tensor_of(buffer, fill_tensor(1, len(buffer))).data_ptr() % 16 == 0 for buffer in buffers)

    @pytest.mark.parametrize("header", ["", "{}", "\0", "\u00fc\u4e16\U0001f600 'q\" \\ \n", "long \u00fc" * 300_000])
    def test_the_header_comes_as_it_is(self, sender: MessageWorkspace, reader: MessageWorkspace, header: str) -> None:
        assert reader.fetch(1, sender.publish(header, []))[0] == header
        assert reader.fetch(1, sender.publish(header, [fill_tensor(1, 100)]))[0] == header

    def test_a_message_without_tensors(self, sender: MessageWorkspace, reader: MessageWorkspace) -> None:
        assert reader.fetch(1, sender.publish("null", [])) == ("null", [])

    def test_a_message_of_many_tensors(self, sender: MessageWorkspace, reader: MessageWorkspace) -> None:
        import torch

        sizes = [number % 130 for number in range(3000)]
        numbers = torch.arange(3000, dtype=torch.int32)
        tensors = [numbers[:1].expand(0) if size == 0 else numbers[-size:] for size in sizes]
        _, buffers = reader.fetch(1, sender.publish("many", tensors))
        assert len(buffers) == 3000
        for tensor, buffer in zip(tensors, buffers, strict=True):
            assert torch.equal(tensor_of(buffer, tensor), tensor)

    def test_sizes_grow_and_shrink(self, sender: MessageWorkspace, reader: MessageWorkspace) -> None:
        chance = random.Random(5)
        for value in range(60):
            sizes = [int(2 ** chance.uniform(0, 21)) - 1 for _ in range(chance.randrange(4))]
            receipt = sender.publish(str(value), [fill_tensor(value, size) for size in sizes])
            _assert_message(reader.fetch(1, receipt), value, sizes)
            sender.retire(receipt)

    def test_messages_in_flight_together_come_in_any_order(
        self, sender: MessageWorkspace, reader: MessageWorkspace
    ) -> None:
        sizes = [10 << value for value in range(15)]
        receipts = [sender.publish(str(value), [fill_tensor(value, size)]) for value, size in enumerate(sizes)]
        for value in random.Random(3).sample(range(15), 15):
            _assert_message(reader.fetch(1, receipts[value]), value, [sizes[value]])

    def test_each_sender_and_each_reader_has_its_own(self, make_workspace: MakeMessageWorkspace) -> None:
        ranks = [make_workspace(rank, 3) for rank in range(3)]
        for turn in range(5):
            pairs = [(sender, reader) for sender in range(3) for reader in range(3) if sender != reader]
            receipts = {
                pair: ranks[pair[0]].publish(str(number + turn), [fill_tensor(number + turn, 300_000)])
                for number, pair in enumerate(pairs)
            }
            for number, (sender, reader) in enumerate(pairs):
                message = ranks[reader].fetch(sender, receipts[sender, reader])
                _assert_message(message, number + turn, [300_000])
                ranks[sender].retire(receipts[sender, reader])

    # ---- the reader owns what it fetched

    @pytest.mark.parametrize("nbytes", [100, 70_000, 5_000_000])
    def test_what_was_fetched_stays_whatever_becomes_of_the_message(
        self, sender: MessageWorkspace, reader: MessageWorkspace, nbytes: int
    ) -> None:
        receipt = sender.publish("7", [fill_tensor(7, nbytes), fill_tensor(7, 9)])
        message = reader.fetch(1, receipt)
        sender.retire(receipt)
        for number in range(20):
            size = nbytes >> number % 3 if number % 2 else nbytes
            receipt = sender.publish("later", [fill_tensor(100 + number, size), fill_tensor(99, 9)])
            reader.fetch(1, receipt)
            sender.retire(receipt)
            _assert_message(message, 7, [nbytes, 9])
        sender.close()
        reader.close()
        _assert_message(message, 7, [nbytes, 9])

    @pytest.mark.parametrize("nbytes", [100, 3_000_000])
    def test_the_reader_may_write_into_it(
        self, sender: MessageWorkspace, reader: MessageWorkspace, nbytes: int
    ) -> None:
        messages = []
        for value in range(4):
            message = reader.fetch(
                1, sender.publish(str(value), [fill_tensor(value, nbytes), fill_tensor(value, nbytes)])
            )
            first, second = message[1]
            assert not first.readonly and not second.readonly
            tensor_of(first, fill_tensor(0, nbytes)).fill_(200 + value)
            messages.append(message)
        for value, (_, (first, second)) in enumerate(messages):
            assert bytes(first) == bytes([200 + value]) * nbytes and bytes(second) == bytes([value]) * nbytes

    @pytest.mark.parametrize("nbytes", [50, 1_000_000])
    def test_some_are_held_and_some_are_dropped(
        self, sender: MessageWorkspace, reader: MessageWorkspace, nbytes: int
    ) -> None:
        chance = random.Random(11)
        held: dict[int, tuple[tuple[str, list[memoryview]], list[int]]] = {}
        for value in range(40):
            sizes = [nbytes + chance.randrange(nbytes), chance.randrange(50)]
            receipt = sender.publish(str(value), [fill_tensor(value, size) for size in sizes])
            held[value] = (reader.fetch(1, receipt), sizes)
            sender.retire(receipt)
            for number in [number for number in held if chance.random() < 0.3]:
                # Keep only the last part of some, which lies in the same memory.
                (header, buffers), sizes = held.pop(number)
                if len(buffers) == 2 and chance.random() < 0.5:
                    held[1000 + number] = ((header, buffers[1:]), sizes[1:])
                del buffers
            for number, (message, its_sizes) in held.items():
                _assert_message(message, number % 1000, its_sizes)

    # ---- receipts

    def test_no_receipt_is_given_twice(self, make_workspace: MakeMessageWorkspace, reader: MessageWorkspace) -> None:
        receipts = []
        for _ in range(3):
            sender = make_workspace(1)
            for _ in range(10):
                receipts.append(sender.publish("a", [fill_tensor(1, 1000)]))
                reader.fetch(1, receipts[-1])
                sender.retire(receipts[-1])
            receipts.append(sender.publish("not fetched", []))
            sender.close()
        assert len(set(receipts)) == len(receipts)

    @pytest.mark.parametrize("nbytes", [0, 10, 1_000_000])
    def test_a_retired_message_is_incomplete_for_ever(
        self, sender: MessageWorkspace, reader: MessageWorkspace, nbytes: int
    ) -> None:
        retired = sender.publish("a", [fill_tensor(1, nbytes)])
        reader.fetch(1, retired)
        sender.retire(retired)
        # Other messages take its place: first a fetched one, then a waiting one.
        for is_fetched in (True, False):
            with pytest.raises(IncompleteError, match="rank 1") as caught:
                reader.fetch(1, retired)
            assert caught.value.rank == 1
            receipt = sender.publish("b", [fill_tensor(2, nbytes)])
            if is_fetched:
                reader.fetch(1, receipt)
        with pytest.raises(IncompleteError):
            reader.fetch(1, retired)
        _assert_message(reader.fetch(1, sender.publish("3", [fill_tensor(3, nbytes)])), 3, [nbytes])

    def test_a_message_fetched_again_is_the_same_or_not_there(
        self, sender: MessageWorkspace, reader: MessageWorkspace
    ) -> None:
        receipt = sender.publish("1", [fill_tensor(1, 1_000_000)])
        held = [reader.fetch(1, receipt)]
        for value in range(2, 7):
            sender.publish(str(value), [fill_tensor(value, 1_000_000)])
            with suppress(IncompleteError):
                held.append(reader.fetch(1, receipt))
            if value == 4:
                held.clear()
            for message in held:
                _assert_message(message, 1, [1_000_000])

    @pytest.mark.parametrize("was_read_before", [False, True])
    def test_a_closed_senders_message_is_incomplete(
        self, sender: MessageWorkspace, reader: MessageWorkspace, was_read_before: bool
    ) -> None:
        if was_read_before:
            reader.fetch(1, sender.publish("before", [fill_tensor(1, 100)]))
        receipt = sender.publish("a", [fill_tensor(1, 100)])
        sender.close()
        sender.close()
        with pytest.raises(IncompleteError, match="rank 1") as caught:
            reader.fetch(1, receipt)
        assert caught.value.rank == 1

    @pytest.mark.parametrize(
        "text", ["", "x", "{", "{}", "[]", "[1]", "3", "-1", '"a"', "null", "\0\u00fc", '{"a": {"b": [1, 2]}}']
    )
    def test_a_receipt_of_nonsense_is_corrupt(self, reader: MessageWorkspace, text: str) -> None:
        with pytest.raises(CorruptError, match="rank 1") as caught:
            reader.fetch(1, text)
        assert caught.value.rank == 1

    def test_a_receipt_without_an_end_is_corrupt(self, sender: MessageWorkspace, reader: MessageWorkspace) -> None:
        receipt = sender.publish("1", [fill_tensor(1, 100)])
        for damaged in (receipt[: len(receipt) // 2], receipt[:-1], receipt[1:], receipt * 2, "[" * 100_000):
            with pytest.raises(CorruptError, match="rank 1"):
                reader.fetch(1, damaged)
        _assert_message(reader.fetch(1, receipt), 1, [100])


def _assert_message(message: tuple[str, list[memoryview]], value: int, sizes: Sequence[int]) -> None:
    """Assert that a message has the header and all bytes of a value."""
    header, buffers = message
    assert header == str(value)
    assert [buffer.nbytes for buffer in buffers] == list(sizes)
    for buffer in buffers:
        assert bytes(buffer) == bytes([value]) * buffer.nbytes
