"""Channels of shared memory: arrays arrive unchanged; ownership and amount of their memory."""

import errno
import mmap
import os
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from tests.virtual.shared_ends import shared_ends
from xrank import dtypes
from xrank.errors import NoSpaceError, UsageError
from xrank.virtual import processes, shared_channels
from xrank.virtual.arrays import ArraySpec, bytes_of, from_bytes, kind_of, spec_of
from xrank.virtual.engine import HOST, make_heading
from xrank.virtual.shared_channels import ArrayArena, DeviceWait

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5), (100_003,), (2, 33, 1025)]


def filled(shape, dtype, kind):
    spec = ArraySpec(shape, dtype)
    content = np.random.default_rng(spec.nbytes).integers(0, 2 if dtype == "BOOL" else 256, spec.nbytes, np.uint8)
    return from_bytes(content, spec, kind)


def same(a, b):
    return kind_of(a) == kind_of(b) and spec_of(a) == spec_of(b) and np.array_equal(bytes_of(a), bytes_of(b))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_element_type_and_shape_comes_as_it_was(kind):
    with shared_ends() as (sender, receiver, host):
        for dtype in dtypes.DTYPES:
            if dtypes.dtype(dtype).num_packed > 1:  # nothing computes with it
                continue
            if kind == "torch" and not hasattr(torch, dtypes.dtype(dtype).torch_name):
                continue
            for shape in SHAPES:
                array = filled(shape, dtype, kind)
                for target, end in ((1, receiver), (HOST, host)):
                    sender.to_device(target).send(array)
                    got = end.from_device(0).receive()
                    assert same(got, array), (dtype, shape, target)
                    assert got is not array and tuple(got.shape) == shape
                    if kind == "numpy":
                        assert got.flags.writeable and got.flags.aligned and got.dtype == array.dtype
        assert sender.to_device(1).sent == receiver.from_device(0).received
        assert sender.to_device(1).sent.nbytes > 0


def test_noncontiguous_views_arrive_contiguous():
    base = np.arange(600_000, dtype=np.float32).reshape(600, 1000)
    tensor = torch.from_numpy(base.copy())
    numbers = torch.complex(tensor, tensor + 1)
    arrays = [
        base.T, base[::2, ::-3], np.asfortranarray(base), np.broadcast_to(base[:1], (50, 1000)), base[3, 4],
        np.lib.stride_tricks.as_strided(base, (500, 500), (4, 4)),
        tensor.T, tensor[::2, ::3], tensor[:1].expand(50, 1000), tensor.clone().requires_grad_(), tensor[3, 4],
        torch.nn.Parameter(tensor), numbers.conj(), numbers.conj().imag, numbers[:2, :2].conj(), base[:0].T,
    ]  # fmt: skip
    with shared_ends() as (sender, receiver, _):
        for _ in range(2):  # into fresh memory, then into used
            for array in arrays:
                sender.to_device(1).send(array)
                got = receiver.from_device(0).receive()
                wanted = array.detach().resolve_conj().resolve_neg() if isinstance(array, torch.Tensor) else array
                assert same(got, wanted.contiguous() if isinstance(array, torch.Tensor) else np.array(array))
                assert not isinstance(got, torch.Tensor) or (not got.requires_grad and got.is_contiguous())


@pytest.mark.parametrize("size", [10, 1_000_000])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_was_sent_may_be_changed_on_both_sides(size, kind):
    array = filled((size,), "I32", kind)
    before = bytes_of(array).tobytes()
    with shared_ends(3) as (sender, *receivers, _):
        for target in (1, 2):
            sender.to_device(target).send(array)
        array[:] = 7
        first = receivers[0].from_device(0).receive()
        assert bytes_of(first).tobytes() == before
        first[:] = 8
        assert bytes_of(receivers[1].from_device(0).receive()).tobytes() == before
        assert (array == 7).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_memory_is_used_again_only_when_its_last_view_is_gone(kind):
    with shared_ends() as (sender, receiver, _):
        out, into = sender.to_device(1), receiver.from_device(0)
        out.send(filled((1 << 20,), "F32", kind))
        kept = into.receive()[5:7]
        wanted = bytes_of(kept).tobytes()
        for number in range(5):
            out.send(filled((1 << 20,), "I32", kind) * 0 + number)
            assert (into.receive() == number).all()
        assert bytes_of(kept).tobytes() == wanted
        del kept
        where = set()
        for _ in range(5):
            receiver.push_returned()
            out.send(filled((1 << 20,), "F32", kind))
            got = into.receive()
            where.add(bytes_of(got).ctypes.data)
            del got
        assert len(where) == 1


def test_memory_is_that_of_what_is_held_at_once():
    array = filled((1 << 22,), "U8", "numpy")
    with shared_ends() as (sender, receiver, host):
        for _ in range(40):
            sender.to_device(1).send(array)
            receiver.from_device(0).receive()
            receiver.push_returned()
            sender.to_device(HOST).send(array)
            host.from_device(0).receive()
            host.push_returned()
        assert sender.arena._warm == array.nbytes
        held = []
        for _ in range(4):
            sender.to_device(1).send(array)
            held.append(receiver.from_device(0).receive())
        assert sender.arena._warm == 4 * array.nbytes
        # Pieces of other sizes lie where those lay.
        held.clear()
        receiver.push_returned()
        for size in (3 << 20, 5 << 20, 1 << 20, 7 << 20, 100_000):
            sender.to_device(1).send(np.zeros(size, np.uint8))
            held.append(receiver.from_device(0).receive())
        assert sender.arena._warm < 4.2 * array.nbytes


def test_many_messages_come_in_order_and_leave_no_memory_taken():
    """More than the pipe has room for wait in the sender."""
    sizes = np.random.default_rng(5).integers(0, 1000, 5_000)
    sizes[::1000] = 50_000
    with shared_ends() as (sender, receiver, _):
        for number, size in enumerate(sizes):
            sender.to_device(1).send(np.full(size, number, np.int32))
            if number % 100 == 0:
                sender.to_device(1).send_object((number, "object"))
        for number, size in enumerate(sizes):
            while not receiver.from_device(0).arrays:
                sender.exchange(0)
                receiver.collect()
            got = receiver.from_device(0).receive()
            assert got.shape == (size,) and (got == number).all()
        assert [receiver.from_device(0).receive_object() for _ in range(50)] == [
            (number, "object") for number in range(0, 5_000, 100)
        ]
        del got
        receiver.push_returned()
        sender.collect()
        assert sender.arena.taken == []


def test_the_hosts_arrays_outlive_the_run():
    array = filled((1 << 20,), "BF16", "torch")
    with shared_ends() as (sender, _, host):
        sender.to_device(HOST).send(array)
        sender.to_device(HOST).send_object({"t": array, "n": [filled((300, 400), "F64", "numpy")]})
        got, value = host.from_device(0).receive(), host.from_device(0).receive_object()
        host.push_returned()
        sender.collect()
        assert sender.arena.taken == []
    assert same(got, array) and same(value["t"], array)
    assert same(value["n"][0], filled((300, 400), "F64", "numpy"))


def test_objects_bring_their_arrays_and_what_they_share():
    small, large = filled((3, 4), "F8_E4M3", "torch"), filled((1 << 18,), "F32", "torch")
    brain = np.arange(9).astype(ml_dtypes.bfloat16)
    plain = np.arange(100_000.0)
    value = {
        "small": small, "large": [large, large], "brain": brain, "plain": plain,
        "order": np.asfortranarray(plain.reshape(10, -1)), "weight": torch.nn.Parameter(torch.ones(3)),
        "words": ("a", 1, None), "scalar": np.float32(3), "empty": np.zeros((0, 3)), "function": same,
        "grad": torch.ones(2, requires_grad=True), "conj": torch.ones(2, dtype=torch.complex64).conj(),
    }  # fmt: skip
    with shared_ends() as (sender, receiver, host):
        for _ in range(2):
            sender.to_device(1).send_object(value)
            sender.to_device(HOST).send_object(value)
            for got in (receiver.from_device(0).receive_object(), host.from_device(0).receive_object()):
                for name in ("small", "brain", "plain", "order", "empty"):
                    assert same(got[name], value[name]), name
                assert got["large"][0] is got["large"][1] and same(got["large"][0], large)
                assert isinstance(got["weight"], torch.nn.Parameter) and got["grad"].requires_grad
                assert torch.equal(got["conj"].resolve_conj(), torch.ones(2, dtype=torch.complex64))
                assert (got["words"], got["scalar"], got["function"]) == (("a", 1, None), 3, same)
                got["plain"][0] = got["small"][0, 0] = 1  # of its own
        assert plain[0] == 0


def test_a_message_of_something_else_is_refused_by_both_names():
    with shared_ends() as (sender, receiver, _):
        sender.to_device(1).send(np.zeros(3), make_heading("all_reduce", reduction="sum", group=(0, 1), call=4))
        with pytest.raises(UsageError, match=r"device 1 expects broadcast .* device 0 sent it all_reduce sum .*call 4"):
            receiver.from_device(0).receive(make_heading("broadcast", root=0, group=(0, 1), call=4))


def test_a_receiver_that_forks_never_gives_back_what_it_has():
    with shared_ends() as (sender, receiver, _):
        sender.to_device(1).send(filled((1 << 20,), "U8", "numpy"))
        got = receiver.from_device(0).receive()
        if (pid := os.fork()) == 0:
            del got
            os._exit(0)
        os.waitpid(pid, 0)
        del got  # the child might have it still
        for _ in range(3):
            sender.to_device(1).send(np.ones(1 << 20, np.uint8))
            receiver.from_device(0).receive()
            receiver.push_returned()
        sender.collect()
        assert sender.arena.taken == [(0, 1 << 20)]


def test_the_host_is_told_of_a_wait_and_of_its_end():
    with shared_ends() as (sender, receiver, host):
        got = []
        heading = make_heading("send", call=9)
        thread = threading.Thread(target=lambda: got.append(receiver.from_device(0).receive(heading)))
        thread.start()
        wait = host.from_device(1).receive_object()
        assert (wait.source, wait.num_taken, wait.message) == (0, 0, str(heading))
        sender.to_device(1).send(np.arange(3), heading)
        thread.join()
        assert got[0].tolist() == [0, 1, 2] and host.from_device(1).receive_object() is None


@pytest.mark.parametrize("number", [errno.EFAULT, errno.ENOMEM])
def test_memory_that_is_full_is_an_error_and_no_signal(monkeypatch, number):
    with shared_ends() as (sender, receiver, _):
        sender.to_device(1).send(np.zeros(5))
        memory = sender.arena._memory
        sender.arena._memory = FullMemory(number)
        for send in (sender.to_device(1).send, sender.to_device(1).send_object):
            with pytest.raises(NoSpaceError, match="the shared memory is full") as caught:
                send(np.zeros(1 << 20))
            assert 8 << 20 <= caught.value.needed_nbytes < 9 << 20
        assert sender.arena.taken == []
        # The next one goes well, where there is memory again.
        sender.arena._memory = memory
        sender.to_device(1).send(np.ones(1 << 20))
        assert receiver.from_device(0).receive().shape == (5,)
        assert (receiver.from_device(0).receive() == 1).all()


class FullMemory:
    """Has addresses, and no pages for them."""

    def __init__(self, number):
        self._number = number

    def __len__(self):
        return 1 << 40

    def madvise(self, *_):
        raise OSError(self._number, "no pages")


def test_a_limit_on_addresses_makes_arenas_smaller(monkeypatch):
    monkeypatch.setattr(shared_channels, "mmap", FewAddresses())
    with shared_ends() as (sender, receiver, _):
        assert 64 << 20 <= len(sender.arena._memory) <= 512 << 20
        sender.to_device(1).send(np.ones(1 << 20))
        assert receiver.from_device(0).receive().sum() == 1 << 20
        with pytest.raises(NoSpaceError):
            sender.to_device(1).send(np.broadcast_to(np.zeros(1), (65 << 20,)))


class FewAddresses:
    """Maps no more than half a gigabyte."""

    def __getattr__(self, name):
        return getattr(mmap, name)

    def mmap(self, fd, nbytes, **options):
        if nbytes > 512 << 20:
            raise OSError(errno.ENOMEM, "no addresses")
        return mmap.mmap(fd, nbytes, **options)


STEPS = st.lists(st.one_of(st.integers(0, 300_000), st.floats(0, 1, exclude_max=True)), max_size=60)


@settings(max_examples=count_of(60))
@given(STEPS)
def test_no_byte_has_two_users_and_no_room_is_lost(steps):
    """Whole numbers take a place of that size; a fraction gives back one of those that are in use."""
    arena = ArrayArena(mmap.mmap(-1, 64 << 20))
    places, most, held = [], 0, 0
    for step in steps:
        if isinstance(step, float):
            if places:
                start, room = places.pop(int(step * len(places)))
                arena.give_back(start)
                held -= room
            continue
        start, room = arena.take(step), max(64, -(-step // 64) * 64)
        assert start % 64 == 0
        assert all(start + room <= other or other + its <= start for other, its in places)
        places.append((start, room))
        held += room
        most = max(most, held)
        assert held <= arena._warm
    for start, _ in places:
        arena.give_back(start)
    assert arena.take(most) == 0 and len(arena.taken) == 1


@pytest.mark.parametrize(
    ("running", "told", "found"),
    [
        ({0, 1, 2}, {1: DeviceWait(0, "", 0, 0, {}), 2: DeviceWait(1, "", 0, 0, {})}, []),  # for a device that works
        ({1, 2}, {1: DeviceWait(0, "", 0, 0, {}), 2: DeviceWait(1, "", 0, 0, {})}, [1, 2]),  # for one that has ended
        ({0, 1}, {0: DeviceWait(1, "", 0, 0, {}), 1: DeviceWait(0, "", 0, 0, {})}, [0, 1]),
        ({0, 1}, {0: DeviceWait(1, "", 0, 0, {}), 1: DeviceWait(0, "", 0, 2, {0: 1})}, []),  # a message is under way
        ({0, 1}, {0: DeviceWait(1, "", 0, 1, {1: 2}), 1: DeviceWait(0, "", 0, 2, {0: 1})}, [0, 1]),
        ({0, 1}, {0: DeviceWait(HOST, "", 0, 1, {}), 1: DeviceWait(0, "", 0, 0, {})}, [0, 1]),  # the host sends no more
        ({0, 1}, {0: DeviceWait(HOST, "", 0, 0, {}), 1: DeviceWait(0, "", 0, 0, {})}, []),  # but what it sent will come
    ],
)
def test_a_deadlock_is_one_only_if_no_message_is_under_way(running, told, found):
    with shared_ends(3) as (*_, links):
        links.to_device(0).send(np.zeros(3))
        host = processes._Host(links, [], 1.0, 0.0)
        host._running, host._waits = running, told
        host._finished = {device: processes.DeviceResult(None, {}, {}) for device in {0, 1, 2} - running}
        assert sorted(host._find_deadlock()) == found
