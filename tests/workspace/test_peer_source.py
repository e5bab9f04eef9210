"""Bytes of other processes: right by every way there is, and never taken from a process that does not lend them."""

import ctypes
import gc
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, suppress

import pytest
import torch

from tests.open_files import open_files, opened_since
from tests.sampled import sampled
from tests.workspace.lender import CONTENT, NBYTES, Row, assert_right, lender, source, views
from xrank.errors import ContradictionError, CorruptError, RankFailedError, RankTimeoutError
from xrank.ranks import byte_service, loans
from xrank.ranks.byte_service import AnswerKind, PeerConnection, PeerGoneError, PeerRefusalError, connect
from xrank.ranks.loans import LendingSign, MemoryOffer, PeerSource
from xrank.ranks.memory import local_bytes


@pytest.fixture(autouse=True)
def nothing_left(request):
    """See that a test leaves no descriptor and no thread that serves."""
    if request.node.get_closest_marker("ranks"):
        yield
        return
    before = open_files()
    yield
    if new_files(before):
        gc.collect()  # a caught error's frames hold what was in use
    assert [thread.name for thread in threading.enumerate() if thread.name == "xrank lender"] == []
    assert not new_files(before)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(loans, "_GRACE_SECONDS", 0.1)


def new_files(before: dict[int, str]) -> list[str]:
    # But for pipes: pytest's, and the rank pool's.
    return [path for path in opened_since(before) if not path.startswith("pipe:")]


@pytest.mark.parametrize("way", ["memory", "unix", "tcp", "network"])
def test_every_range_of_another_process_is_right_by_every_way(way):
    with lender() as other, source(other.told, way=way) as made:
        assert made.direct_ranks == ([1] if way == "memory" else [])
        assert_right(made, seed=1)
        threads_are_right(made)


def threads_are_right(made: PeerSource) -> None:
    wrong = []

    def work(seed: int) -> None:
        try:
            assert_right(made, seed, repeats=15)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.ranks(3)
@pytest.mark.parametrize("direct", [True, False])
def test_ranks_read_each_others_tensors(rank, world_size, direct):
    def tensors_of(r: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(r)
        x = torch.randn(300, 500, generator=generator)
        return [x, x.T, x.to(torch.bfloat16)[::3], torch.tensor(r), x[:0], torch.nn.Parameter(x[:, 7])]

    def row_major(tensor: torch.Tensor) -> bytes:
        return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    offer = MemoryOffer([local_bytes(tensor) for tensor in tensors_of(rank)])
    told: list = [None] * world_size
    torch.distributed.all_gather_object(told, json.dumps(offer.describe()))
    offers = {r: json.loads(text) for r, text in enumerate(told)}
    ranks, view_numbers = (list(column) for column in zip(*[(r, v) for r in range(3) for v in range(6)], strict=True))
    with closing(
        PeerSource(offer, rank, offers, ranks, view_numbers, check=lambda: None, timeout_seconds=20, direct=direct)
    ) as made:
        assert made.direct_ranks == ([r for r in range(3) if r != rank] if direct else [])
        staging = memoryview(bytearray(600_000))
        for record, (r, v) in enumerate(zip(ranks, view_numbers, strict=True)):
            want = row_major(tensors_of(r)[v])
            assert made.fetch(record, 0, len(want), staging) == want, (r, v)
            if len(want) > 10:
                assert made.fetch(record, 3, len(want) - 7, staging) == want[3:-4], (r, v)
        made.check_unchanged()
        torch.distributed.barrier()  # no rank closes an offer that another still reads
    offer.close()


def test_a_tensor_that_was_changed_meanwhile_is_refused():
    x = torch.zeros(10)
    with closing(MemoryOffer([local_bytes(torch.zeros(3)), local_bytes(x)])) as mine:
        made = PeerSource(mine, 0, {}, [0], [1], check=lambda: None, timeout_seconds=1)
        made.check_unchanged()
        x += 1
        with pytest.raises(ContradictionError, match="tensor 1 "):
            made.check_unchanged()


# Wrong identities


def test_a_process_number_that_is_anothers_is_not_read():
    with lender() as other, lender() as stranger:
        with source({**other.told, "pid": stranger.told["pid"]}) as made:
            assert made.direct_ranks == []
            assert_right(made, seed=2, repeats=3)  # by the service, which proves itself
        with source({**other.told, "space": "another host"}) as made:
            assert made.direct_ranks == []


def test_a_read_that_the_close_overtakes_gives_nothing(monkeypatch):
    sign = LendingSign()
    memory = loans.PeerMemory(os.getpid(), sign.address, sign.content)
    data = Row(b"x" * 1000)
    into = memoryview(bytearray(1000))
    memory.read_into(data.address, into)
    assert into == b"x" * 1000
    real = loans._process_vm_readv

    def slow(pid, here, num_here, there, num_there, flags):
        # As the kernel does it, one span after another, with the close between them.
        assert num_here == 2
        first = real(pid, here, 1, there, 1, flags)
        sign.end()
        second = real(pid, here + 16, 1, there + 16, 1, flags)
        return first + second

    monkeypatch.setattr(loans, "_process_vm_readv", slow)
    with pytest.raises(loans.LendingEndedError):
        memory.read_into(data.address, into)
    monkeypatch.undo()
    with pytest.raises(loans.LendingEndedError):
        memory.read_into(data.address, into)
    with pytest.raises(loans.LendingEndedError):
        loans.PeerMemory(os.getpid(), sign.address, sign.content)


def test_memory_that_the_kernel_cannot_read_is_asked_for():
    with lender() as other:
        told = json.loads(json.dumps(other.told))
        told["views"][0][0] = 4096  # nothing is ever there
        with source(told) as made:
            assert made.direct_ranks == [1]
            assert_right(made, seed=4, repeats=3)


def test_without_permission_the_service_is_asked():
    reader = """
import json, sys
from tests.workspace.lender import assert_right, source
told = json.loads(sys.stdin.read())
with source(told) as made:
    print(made.direct_ranks)
    assert_right(made, seed=5, repeats=3)
print("right")
"""

    def give_up_tracing() -> None:  # which root may do with any process
        ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_PTRACE

    with lender("undumpable") as other:
        run = subprocess.run(
            [sys.executable, "-c", reader],
            input=json.dumps(other.told),
            capture_output=True,
            text=True,
            preexec_fn=give_up_tracing,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert run.stdout == "[]\nright\n", run.stderr


def test_yama_allows_readers_while_any_sign_stands(monkeypatch, tmp_path):
    scope = tmp_path / "ptrace_scope"
    told = []

    class Libc:
        def prctl(self, option, who, *zeros):
            told.append((option.value, who.value))

    monkeypatch.setattr(loans, "_YAMA", str(scope))
    monkeypatch.setattr(loans, "_LIBC", Libc())
    LendingSign().end()
    assert told == []  # no Yama
    scope.write_text("1\n")
    first, second = LendingSign(), LendingSign()
    assert told == [(0x59616D61, 2**64 - 1)]
    first.end()
    first.end()
    assert len(told) == 1
    second.end()
    assert told[1:] == [(0x59616D61, 0)]


@pytest.mark.parametrize("kind", ["--pid", "--net"])
def test_a_lender_in_another_namespace_is_read_as_far_as_it_can_be(kind):
    unshare = ("unshare", kind, "--fork", *(["--mount-proc"] if kind == "--pid" else []))
    try:
        usable = subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        usable = False
    if not usable:
        pytest.skip(f"needs unshare {kind}")
    with lender(within=unshare) as other, source(other.told) as made:
        assert made.direct_ranks == ([] if kind == "--pid" else [1])
        if kind == "--pid":
            assert_right(made, seed=7, repeats=3)
            return
        staging = memoryview(bytearray(max(NBYTES)))
        assert made.fetch(0, 0, NBYTES[0], staging) == CONTENT[0]
        with pytest.raises(RankFailedError, match=r"on this host: nothing listens; at .* port"):
            made.fetch(1, 0, 10, staging)  # it has no network


# Missing answers


@pytest.mark.parametrize("view", [0, 1])
def test_a_killed_peer_is_named(view):
    with lender() as other, source(other.told) as made:
        made.read_into(view, 0, memoryview(bytearray(100)))
        other.kill()
        with pytest.raises(RankFailedError) as caught:
            made.read_into(view, 0, memoryview(bytearray(100)))
    error = caught.value
    assert (error.rank, error.host, error.pid) == (1, socket.gethostname(), other.told["pid"])
    assert error.cause == "its process ended" and "lending" in error.got


@pytest.mark.parametrize("view", [0, 1])
def test_a_known_reason_of_a_peers_end_is_raised_instead(view, monkeypatch):
    monkeypatch.setattr(loans, "_GRACE_SECONDS", 30.0)
    has_ended, asked = [], []

    def check() -> None:  # a failure is reported a moment after the failed rank has gone
        asked.extend(has_ended)
        if len(asked) == 4:
            raise RankFailedError("rank 1 failed: no space on its device", rank=1)

    with lender() as other, source(other.told, check=check) as made:
        made.read_into(view, 0, memoryview(bytearray(100)))
        has_ended.append(1)
        other.end()
        with pytest.raises(RankFailedError, match="no space on its device"):
            made.read_into(view, 0, memoryview(bytearray(100)))


@pytest.mark.parametrize("way", sampled(["unix", "tcp"], 2))
def test_a_stopped_peer_runs_out_of_time(way):
    with lender() as other, source(other.told, way=way) as made:
        into = memoryview(bytearray(NBYTES[0]))
        plenty = made._timeout_seconds
        for is_open_socket in (True, False):
            if is_open_socket:
                made.read_into(0, 0, into[:10])
            other.stop()
            made._timeout_seconds = 2
            with pytest.raises(RankTimeoutError, match="for 2 s") as caught:
                made.read_into(0, 0, into)
            assert caught.value.waiting_for == (1,) and caught.value.rank == 1
            assert str(other.told["pid"]) in caught.value.got
            made._timeout_seconds = plenty
            other.go_on()
        made.read_into(0, 0, into)
        assert into == CONTENT[0]


def test_a_stopped_peer_of_this_host_is_still_read():
    with lender() as other, source(other.told) as made:
        other.stop()
        assert made.fetch(0, 0, NBYTES[0], memoryview(bytearray(NBYTES[0]))) == CONTENT[0]


def test_a_failure_elsewhere_ends_a_wait():
    def check() -> None:
        if stopped:
            raise RankFailedError("rank 2 failed", rank=2)

    stopped = []
    with lender() as other, source(other.told, way="unix", check=check) as made:
        made.read_into(0, 0, memoryview(bytearray(10)))
        other.stop()
        stopped.append(1)
        with pytest.raises(RankFailedError, match="rank 2 failed"):
            made.read_into(0, 0, memoryview(bytearray(10)))


def test_a_killed_peer_whose_child_holds_its_connections_is_named():
    with lender("fork") as other, source(other.told, way="unix") as made:
        made.read_into(0, 0, memoryview(bytearray(10)))
        other.fork()
        other.kill()
        with pytest.raises(RankFailedError, match="its process ended"):
            made.read_into(0, 0, memoryview(bytearray(10)))


def test_a_peer_that_was_killed_before_anybody_watched_it_is_named():
    with lender("fork") as other:
        other.fork()  # the child holds the listening sockets
        other.kill()
        with (
            source(other.told, way="unix") as made,
            pytest.raises(RankFailedError, match=r"rank 1.*its process ended"),
        ):
            made.read_into(0, 0, memoryview(bytearray(10)))


def test_a_silent_place_is_left_for_the_next_and_finally_given_up(monkeypatch):
    monkeypatch.setattr(byte_service, "_PLACE_SECONDS", 1.5)
    with lender() as other, socket.create_server(("127.0.0.2", 0)) as silent:
        address, port = silent.getsockname()
        # The first address leads to another program's port, as a container's address may on another host.
        with closing(connect_to(other.told, ["127.0.0.2", "127.0.0.1"], silence_at=(address, port))):
            pass
        told = {**other.told, "socket": "nobody", "port": port, "addresses": [address]}
        with source(told, way="network", timeout_seconds=2) as made, pytest.raises(RankTimeoutError):
            made.read_into(0, 0, memoryview(bytearray(10)))


def test_a_reader_that_was_stopped_while_connecting_connects_again(monkeypatch):
    monkeypatch.setattr(byte_service, "_STRANGER_SECONDS", 0.3)
    monkeypatch.setattr(byte_service, "_PLACE_SECONDS", 0.2)
    real, sent_away = byte_service._open_socket, []

    def stop_meanwhile(family, place, tick):
        sock = real(family, place, tick)
        if not sent_away:
            end = select.poll()
            end.register(sock, select.POLLRDHUP)
            sent_away.extend(end.poll(50_000))
        return sock

    monkeypatch.setattr(byte_service, "_open_socket", stop_meanwhile)
    with closing(MemoryOffer(views(), across_hosts=False)) as offer, source(offer.describe(), way="unix") as made:
        into = memoryview(bytearray(10))
        made.read_into(0, 5, into)
        assert sent_away and into == CONTENT[0][5:15]


def connect_to(told: dict, addresses: list[str], silence_at=None) -> PeerConnection:
    tick = lambda seconds: None  # noqa: E731
    if silence_at is None:
        return connect(told["socket"], told["port"], addresses, bytes.fromhex(told["token"]), tick)
    real = byte_service._open_socket

    def mislead(family, place, tick):
        return real(family, silence_at if place == (addresses[0], told["port"]) else place, tick)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_service, "_open_socket", mislead)
        return connect("nobody", told["port"], addresses, bytes.fromhex(told["token"]), tick)


# Refusals


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_wrong_token_is_refused_on_both_sides(way):
    with lender() as other, lender() as stranger:
        with source({**other.told, "token": "00" * 32}, way=way) as made, pytest.raises(RankFailedError):
            made.read_into(0, 0, memoryview(bytearray(10)))
        mistaken = {**other.told, "socket": stranger.told["socket"], "port": stranger.told["port"]}
        with source(mistaken, way=way) as made, pytest.raises(RankFailedError, match="closed the connection"):
            made.read_into(0, 0, memoryview(bytearray(10)))
        with source(other.told, way=way) as made:
            assert_right(made, seed=8, repeats=2)


def test_a_service_that_only_pretends_is_refused():
    a, b = socket.socketpair()
    with b:
        b.sendall(bytes(32) + bytes(32))  # a challenge, and a proof of nothing
        with pytest.raises(PeerGoneError, match="a different process"):
            PeerConnection(a, b"token" * 6, lambda seconds: None)


def test_silent_and_nonsensical_connections_are_closed(monkeypatch):
    with closing(MemoryOffer(views())) as offer:
        strangers = []
        for said in (b"", b"x", b"x" * 64, b"GET / HTTP/1.1\r\n\r\n" * 10):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"\0{offer.describe()['socket']}")
            stranger.sendall(said)
            strangers.append(stranger)
        monkeypatch.setattr(
            byte_service, "_STRANGER_SECONDS", 0.3
        )  # from now on: earlier guests have proven themselves
        for stranger in strangers:
            stranger.settimeout(50)
            with stranger, suppress(ConnectionResetError):
                assert len(stranger.recv(32)) == 32
                assert stranger.recv(1) == b""


@pytest.mark.parametrize(
    ("view", "start", "nbytes"), [(4, 0, 1), (0, NBYTES[0], 1), (0, 0, NBYTES[0] + 1), (1, 2**64 - 5, 10), (2, 0, 1)]
)
def test_a_request_out_of_range_is_refused_by_the_service_and_before_it(view, start, nbytes):
    into = memoryview(bytearray(nbytes))
    with closing(MemoryOffer(views())) as offer:
        told = offer.describe()
        with closing(connect_to(told, [])) as connection:
            with pytest.raises(PeerRefusalError) as caught:
                connection.read_into(view, start, into, lambda seconds: None)
            assert caught.value.kind == AnswerKind.REFUSED
            connection.read_into(0, 5, into[:1], lambda seconds: None)
            assert into[:1] == CONTENT[0][5:6]
        if view < 4:
            with source(told) as made, pytest.raises(ContradictionError) as caught_here:
                made.read_into(view, start, into)
            assert caught_here.value.rank == 1
        told["views"][view % 4][1] = 2**62  # a rank that describes more than it lends
        if start < 2**62:
            with source(told, way="unix") as made, pytest.raises(ContradictionError, match="rank 1"):
                made.read_into(view % 4, start, into) if view < 4 else made.read_into(0, 2**61, into)


def test_failures_of_the_lender_are_sent_and_the_service_goes_on():
    with lender() as other, source(other.told) as made:
        for _ in range(2):
            with pytest.raises(RankFailedError, match="ArithmeticError: the device is lost") as caught:
                made.read_into(3, 0, memoryview(bytearray(40)))
            assert caught.value.rank == 1
            assert_right(made, seed=9, repeats=2)


@pytest.mark.parametrize(
    "change",
    [{"pid": None}, {"nonce": "no hex"}, {"views": [[1]]}, {"views": [["a", "b"]]}, {"port": "http"}, {"token": 3}],
    ids=lambda change: f"{change}",
)
def test_invalid_descriptions_of_offers_are_refused(change):
    with closing(MemoryOffer(views())) as offer:
        with pytest.raises(CorruptError) as caught, source({**offer.describe(), **change}):
            pass
        assert caught.value.rank == 1


# Many at once


@pytest.mark.parametrize("is_known", [True, False], ids=["known readers", "strangers"])
def test_the_limit_of_descriptors_grows_with_the_connections(is_known, request):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before))
    num_open = len(os.listdir("/proc/self/fd"))  # other tests' imports and caches, too
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 48, before[1]))
    with closing(MemoryOffer(views())) as offer, ExitStack() as loan:
        told = offer.describe()
        for _ in range(150):
            if is_known:
                loan.enter_context(closing(connect_to(told, []))).read_into(0, 0, memoryview(bytearray(9)), wait)
            else:
                connect_stranger(told, loan)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > num_open + 300  # both ends are this process's


def test_a_connection_that_was_closed_for_others_is_made_again():
    """Where no more descriptors are to be had, readers that have proven themselves take turns."""
    into = memoryview(bytearray(10))
    with lender("few descriptors") as other, source(other.told, way="unix") as made, ExitStack() as loan:
        for view in (0, 1):
            made.read_into(view, 5, into)
            first = made._idle[0][1]
            for _ in range(64):
                loan.enter_context(closing(connect_to(other.told, []))).read_into(0, 0, into, wait)
            made.read_into(view, 5, into)
            assert into == CONTENT[view][5:15] and made._idle[0][1] is not first


def connect_stranger(told: dict, loan: ExitStack) -> None:
    """Connect and keep silent, as a port scanner does."""
    stranger = loan.enter_context(closing(socket.socket(socket.AF_UNIX)))
    stranger.settimeout(20)
    stranger.connect(f"\0{told['socket']}")
    with suppress(ConnectionResetError):  # another stranger came
        stranger.recv(32)


def test_strangers_change_nothing_for_known_readers():
    """1,500 of them come to each of two services, one of which has hardly a descriptor left."""
    into = memoryview(bytearray(10))
    with closing(MemoryOffer(views())) as offer, ExitStack() as loan:
        told = offer.describe()
        known = [loan.enter_context(closing(connect_to(told, []))) for _ in range(20)]
        for _ in range(1500):
            connect_stranger(told, loan)
        for connection in known:  # these connections, not new ones
            connection.read_into(0, 5, into, wait)
            assert into == CONTENT[0][5:15]
        with closing(connect_to(told, [])) as new:
            new.read_into(0, 5, into, wait)
    with lender("few descriptors") as other, ExitStack() as loan:
        known = [loan.enter_context(closing(connect_to(other.told, []))) for _ in range(12)]
        for _ in range(1500):
            connect_stranger(other.told, loan)
        for connection in known:
            connection.read_into(1, 5, into, wait)
            assert into == CONTENT[1][5:15]


def wait(seconds: float) -> None:
    assert seconds < 20


def fill_answer(connection: PeerConnection, into: memoryview) -> None:
    """Receive the answer to a request that was sent earlier."""
    while into:
        kind, nbytes = byte_service.PART.unpack(connection._receive(byte_service.PART.size, wait))
        assert kind == AnswerKind.DATA
        connection._fill(into[:nbytes], wait)
        into = into[nbytes:]


def test_readers_that_stop_do_not_delay_others():
    """As many as one likes, and of tensors that pass a buffer: strided ones, or a device's."""
    with closing(MemoryOffer(views())) as offer, source(offer.describe(), way="unix") as made:
        stopped = [connect_to(offer.describe(), []) for _ in range(30)]
        for number, connection in enumerate(stopped):  # ask for much, and take nothing
            view = 0 if number % 10 == 0 else 1
            connection._send(byte_service.REQUEST.pack(view, 0, NBYTES[view]), wait)
        assert_right(made, seed=10, repeats=5)
        threads_are_right(made)
        whole = memoryview(bytearray(NBYTES[1]))
        for connection in stopped[1:4]:  # one that goes on gets the rest, as if nothing had been
            fill_answer(connection, whole)
            assert whole == CONTENT[1]
        for connection in stopped:
            connection.close()
        assert_right(made, seed=11, repeats=3)


def test_a_service_of_one_host_opens_no_port():
    with lender("one host") as other, source(other.told, way="unix") as made:
        assert other.told["port"] is None and other.told["addresses"] == []
        assert_right(made, seed=12, repeats=2)


def test_an_idle_service_does_not_run():
    def times_run(thread: int) -> str:
        with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as numbers:
            return numbers.read()

    with closing(MemoryOffer(views())) as offer, closing(connect_to(offer.describe(), [])):
        thread = offer._service._thread.native_id
        for _ in range(20):  # it may still have something to finish
            before = times_run(thread)
            select.select([], [], [], 0.2)
            if times_run(thread) == before:
                return
        pytest.fail("it runs all the time")
