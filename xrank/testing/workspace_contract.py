"""The contracts of workspaces, as tests: a subclass with a fixture or two runs all of them on its workspace.

    class TestMine(WorkspaceContract):
        @pytest.fixture
        def make_workspace(self, tmp_path):
            def make(rank=0, world_size=1, run_id="run"):
                return MyWorkspace(tmp_path, rank=rank, world_size=world_size, run_id=run_id)

            return make

        @pytest.fixture
        def uninitialized(self):
            return MyWorkspace(None)

A `MessageWorkspaceContract` needs only `make_workspace`, whose maker takes the rank and the world size; the fixture
closes the workspaces that it made. Tests of a single medium (files, mappings, locks, remains of a killed process)
belong to the tests of that workspace.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import pytest
import torch

from xrank.dtypes import DTYPES
from xrank.errors import CorruptError, IncompleteError
from xrank.ranks.wire import MessageWorkspace
from xrank.workspace.base import Workspace

# ruff: noqa: D102, S311 (a test's name describes the test; random numbers are seeded)


class MakeWorkspace(Protocol):
    """Makes the workspace of a rank; all of them share one place, as those of a run's processes do."""

    def __call__(self, rank: int = 0, world_size: int = 1, run_id: str | None = "run") -> Workspace:
        """Return that rank's workspace."""
        ...


def has_same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits, including the bits of NaNs."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and (a.numel() == 0 or torch.equal(bits(a), bits(b)))


def tensor_zoo() -> dict[str, torch.Tensor]:
    """Return tensors of every dtype, and with every kind of strides and storage."""
    generator = torch.Generator().manual_seed(7)
    zoo: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 256, (6, 5 * dtype.nbytes), dtype=torch.uint8, generator=generator)
        zoo[f"dtype.{name}"] = (raw % 2 if name == "BOOL" else raw).view(getattr(torch, dtype.torch_name))
    base = torch.randn(8, 6, generator=generator)
    zoo |= {
        "zero_dim": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "empty.view": base[:, :0],
        "transposed": base.t(),
        "permuted": torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1),
        "channels_last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 5, generator=generator).expand(4, 5),
        "slice.rows": base[2:5],
        "slice.columns": base[:, 1:3],
        "slice.step": base[::2],
        "element": base[3, 3],
        "element.step": base[0, :2:2],
        "bf16.slice": base.to(torch.bfloat16)[1:2],
        "conjugated": torch.randn(4, dtype=torch.complex64, generator=generator).conj(),
        "negative": torch.randn(4, dtype=torch.complex64, generator=generator).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3, generator=generator)),
        "nan": torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
        "": torch.ones(1),
        "odd name/../\u00fc\0\n": torch.zeros(1),
    }
    return zoo


class WorkspaceContract:
    """The tests; a subclass provides `make_workspace` and `uninitialized`.

    They use neither a process group nor a second process: states are written and read without communication.
    """

    @pytest.fixture
    def make_workspace(self) -> MakeWorkspace:
        """Return the maker of each rank's workspace."""
        raise NotImplementedError("override this fixture with one that makes your workspace")

    @pytest.fixture
    def uninitialized(self) -> Workspace:
        """Return a workspace without a place."""
        raise NotImplementedError("override this fixture with a workspace that has no place")

    def test_is_a_workspace(self, make_workspace: MakeWorkspace) -> None:
        workspace = make_workspace()
        assert isinstance(workspace, Workspace)
        assert workspace.is_initialized is True

    def test_uninitialized_refuses_with_value_error(self, uninitialized: Workspace) -> None:
        assert uninitialized.is_initialized is False
        with pytest.raises(ValueError, match="not initialized"):
            uninitialized.write_configs_and_weights({}, {})
        with pytest.raises(ValueError, match="not initialized"):
            uninitialized.read_configs_and_weights_from_rank(0)

    def test_nothing_yet(self, make_workspace: MakeWorkspace) -> None:
        assert make_workspace(0, 2).read_configs_and_weights_from_rank(1) == (None, None)

    @pytest.mark.parametrize("target", [-1, 2, 10**12])
    def test_a_rank_outside_the_world_wrote_nothing(self, make_workspace: MakeWorkspace, target: int) -> None:
        make_workspace(3, 4).write_configs_and_weights({"size": 4}, {})
        make_workspace(2, 4).write_configs_and_weights({"size": 4}, {})
        assert make_workspace(0, 2).read_configs_and_weights_from_rank(target) == (None, None)

    def test_a_target_that_is_not_a_rank_is_refused(self, make_workspace: MakeWorkspace) -> None:
        for target in ("0", 0.0, None):
            with pytest.raises(ValueError, match="not a whole number"):
                make_workspace(0, 2).read_configs_and_weights_from_rank(target)  # type: ignore[arg-type]

    def test_every_tensor_comes_back_bit_for_bit(self, make_workspace: MakeWorkspace) -> None:
        zoo = tensor_zoo()
        workspace = make_workspace()
        workspace.write_configs_and_weights({"kind": "zoo"}, zoo)
        config, weights = _read(workspace, 0)
        assert config == {"kind": "zoo"}
        assert list(weights) == list(zoo)
        for name, tensor in zoo.items():
            back = weights[name]
            assert has_same_bytes(back, tensor), name
            assert type(back) is torch.Tensor and back.device.type == "cpu" and not back.requires_grad, name
            assert back.untyped_storage().nbytes() == back.nbytes and back.is_contiguous(), name

    def test_names_of_one_tensor_stay_one(self, make_workspace: MakeWorkspace) -> None:
        base = torch.arange(12.0)
        weights = {"embed": base[2:8], "head": base[2:8], "overlaps": base[4:], "whole": base, "bits": base.view(-1, 2)}
        weights["as_int"] = base.view(torch.int32)
        workspace = make_workspace()
        workspace.write_configs_and_weights({}, weights)
        _, back = _read(workspace, 0)
        assert all(has_same_bytes(back[name], weights[name]) for name in weights)
        back["embed"][0] = -1
        assert back["head"][0] == -1
        assert back["whole"][2] == 2 and back["bits"][1, 0] == 2

    def test_what_is_read_is_the_readers_own(self, make_workspace: MakeWorkspace) -> None:
        mine = torch.ones(3)
        workspace = make_workspace()
        workspace.write_configs_and_weights({"list": [1]}, {"a": mine})
        config, weights = _read(workspace, 0)
        mine += 1
        config["list"].append(2)
        weights["a"] += 5
        config, weights = _read(workspace, 0)
        assert config == {"list": [1]} and weights["a"].tolist() == [1, 1, 1]

    def test_config_values(self, make_workspace: MakeWorkspace) -> None:
        config = {
            "none": None,
            "true": True,
            "numbers": [0, -1, 2**80, 0.1, -0.0, 1e308, math.inf, -math.inf],
            "text": "\u00fc\0\ud800",
            "": {"nested": [{}, [], ""]},
        }
        workspace = make_workspace()
        workspace.write_configs_and_weights({**config, "nan": math.nan, "tuple": (1, (2,))}, {})
        back, weights = _read(workspace, 0)
        assert math.isnan(back.pop("nan")) and back.pop("tuple") == [1, [2]]
        assert back == config and weights == {}
        assert math.copysign(1, back["numbers"][4]) == -1 and back["true"] is True

    def test_the_last_write_counts_whole(self, make_workspace: MakeWorkspace) -> None:
        workspace = make_workspace()
        workspace.write_configs_and_weights(
            {"n": 1, "only": "first"}, {"a": torch.ones(4), "only.first": torch.ones(1)}
        )
        workspace.write_configs_and_weights({"n": 2}, {"a": torch.zeros(2)}, step=7)
        config, weights = _read(workspace, 0)
        assert config == {"n": 2} and list(weights) == ["a"] and weights["a"].tolist() == [0, 0]

    def test_each_rank_has_its_own_state(self, make_workspace: MakeWorkspace) -> None:
        ranks = [make_workspace(rank, 3) for rank in range(3)]
        for rank in (2, 0):
            ranks[rank].write_configs_and_weights({"rank": rank}, {"a": torch.full((2,), rank)})
        for reader in ranks:
            assert reader.read_configs_and_weights_from_rank(1) == (None, None)
            for rank in (0, 2):
                config, weights = _read(reader, rank)
                assert config == {"rank": rank} and weights["a"].tolist() == [rank, rank]

    def test_a_run_is_not_shown_an_earlier_runs_states(self, make_workspace: MakeWorkspace) -> None:
        for rank in range(2):
            make_workspace(rank, 2, "monday").write_configs_and_weights({"rank": rank}, {})
        tuesday = make_workspace(0, 2, "tuesday")
        assert tuesday.read_configs_and_weights_from_rank(0) == (None, None)
        assert tuesday.read_configs_and_weights_from_rank(1) == (None, None)

    def test_a_process_that_starts_again_in_a_run_finds_its_state(self, make_workspace: MakeWorkspace) -> None:
        make_workspace(1, 2, "run").write_configs_and_weights({"step": 3}, {})
        assert _read(make_workspace(1, 2, "run"), 1)[0] == {"step": 3}

    @pytest.mark.parametrize(
        "fault", ["sparse", "meta", "quantized", "nested", "complex128", "subclass", "no tensor", "name", "mapping"]
    )
    def test_bad_weights_are_named_and_leave_the_old_state(self, make_workspace: MakeWorkspace, fault: str) -> None:
        class Subclass(torch.Tensor):
            pass

        makers: dict[str, Callable[[], Any]] = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "meta": lambda: torch.empty(3, device="meta"),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "complex128": lambda: torch.ones(2, dtype=torch.complex128),
            "subclass": lambda: torch.ones(2).as_subclass(Subclass),
            "no tensor": lambda: [1.0, 2.0],
        }
        workspace = make_workspace()
        workspace.write_configs_and_weights({"old": 1}, {"good": torch.ones(1)})
        bad: Any = {"name": {3: torch.ones(1)}, "mapping": [("a", torch.ones(1))]}.get(fault)
        if bad is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch deprecates some of these kinds; users still have them
                bad = {"good": torch.zeros(1), "layers.0.bad": makers[fault]()}
        with pytest.raises(ValueError) as caught:
            workspace.write_configs_and_weights({"new": 1}, bad)
        if fault in makers:
            assert "layers.0.bad" in str(caught.value)
        config, weights = _read(workspace, 0)
        assert config == {"old": 1} and weights["good"].tolist() == [1]

    @pytest.mark.parametrize("fault", ["key", "object", "set", "deep", "no dict", "step"])
    def test_bad_configs_are_refused_and_leave_the_old_state(self, make_workspace: MakeWorkspace, fault: str) -> None:
        itself: dict[str, Any] = {}
        itself["a"] = {"b": itself}
        bad: Any = {
            "key": {"a": {(1, 2): 3}},
            "object": {"dtype": object()},
            "set": {"a": {1}},
            "deep": itself,
            "no dict": [],
            "step": {},
        }[fault]
        workspace = make_workspace()
        workspace.write_configs_and_weights({"old": 1}, {})
        with pytest.raises(ValueError):
            workspace.write_configs_and_weights(bad, {}, step=-1 if fault == "step" else None)
        assert _read(workspace, 0)[0] == {"old": 1}


def _read(workspace: Workspace, rank: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config, weights = workspace.read_configs_and_weights_from_rank(rank)
    assert config is not None and weights is not None
    return config, weights


class MakeMessageWorkspace(Protocol):
    """Makes the workspace of a rank; all of them share one place, as those of a run's processes do."""

    def __call__(self, rank: int = 0, world_size: int = 2) -> MessageWorkspace:
        """Return that rank's workspace."""
        ...


def fill_tensor(value: int, nbytes: int) -> torch.Tensor:
    """Return a tensor of that many bytes, all of them `value`."""
    return torch.full((nbytes,), value, dtype=torch.uint8)


def tensor_of(buffer: memoryview, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over a buffer with the dtype and shape of `like`, as a reader would make it."""
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

    # ---- fetched tensors belong to the reader

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
