import math
import time
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from tests.virtual.random_programs import RandomOperation
from tests.virtual.stepwise import as_messages
from xrank.errors import UsageError
from xrank.layout import DeviceMesh
from xrank.virtual import ArraySpec, LinkModel, MatMul, MatMulSharding, Program
from xrank.virtual.link_model import LinkSample
from xrank.virtual.programs import Communicate, Compute, Receive, Return, Send, Take

L, B = 0.25, 1000.0
MODEL = LinkModel(L, B)


def collective(name, size, nbytes, *, root=None, reduction=None, axes=()):
    """Return the programs of one collective in which every member has this many bytes, in existing registers."""
    whole = ArraySpec((nbytes,), "U8")
    group, brought = tuple(range(size)), (whole,) * size
    return [
        Program(
            member,
            (
                Compute("made", (), ("x",), (whole,)),
                Communicate(name, group, "x", "", brought, whole, 0, reduction, root, axes),
            ),
        )
        for member in group
    ]


@pytest.mark.parametrize("size", [2, 4, 5])
def test_the_times_of_collectives_are_the_closed_forms(size):
    n = 2000 * size
    one, part = n / B, n / size / B
    times = {
        ("all_gather", "ring"): (size - 1) * (one + L),
        ("all_gather", "push"): (size - 1) * one + L,
        ("all_reduce", "ring"): 2 * (size - 1) * (part + L),
        ("all_reduce", "push"): (size - 1) * one + L,
        ("reduce_scatter", "ring"): (size - 1) * (part + L),
        ("reduce_scatter", "push"): (size - 1) * part + L,
        ("broadcast", "ring"): (size - 1) * (one + L),
        ("broadcast", "push"): (size - 1) * one + L,
        ("scatter", "push"): (size - 1) * part + L,
        ("scatter", "ring"): (size - 1) * part + L if size == 2 else None,
        ("gather", "push"): one + L,
        ("all_to_all", "ring"): (size - 1) * part + L,
    }
    for (name, algorithm), wanted in times.items():
        if wanted is not None:
            programs = collective(name, size, n, root=0 if name in ("broadcast", "scatter", "gather") else None)
            assert MODEL.seconds(programs, algorithm) == pytest.approx(wanted), (name, algorithm)


def test_on_a_chain_pieces_follow_each_other():
    """The farthest piece leaves first: the last arrives when all have left the root, no later than it itself can."""
    n, size = 4000, 4
    part = n / size / B
    programs = collective("scatter", size, n, root=0)
    assert MODEL.seconds(programs, "ring") == pytest.approx(3 * (part + L))
    assert LinkModel(0.0, B).seconds(programs, "ring") == pytest.approx(3 * part)


def forwards(stages, runs, flops):
    """Return the programs of a pipeline that computes forwards alone and sends next to nothing."""
    x = ArraySpec((0,), "U8")
    programs = []
    for stage in range(stages):
        steps = []
        for run in range(runs):
            inputs = ()
            if stage:
                steps.append(Take(f"x{run}", stage - 1, x))
                inputs = (f"x{run}",)
            steps.append(Compute("layer", inputs, (f"y{run}",), (x,), flops))
            if stage < stages - 1:
                steps.append(Send(f"y{run}", stage + 1, x))
        programs.append(Program(stage, tuple(steps)))
    return programs


@pytest.mark.parametrize(("stages", "runs"), [(1, 1), (1, 4), (4, 1), (2, 8), (4, 8)])
def test_waiting_shows_the_bubble_of_a_pipeline(stages, runs):
    timeline = LinkModel(flops_per_second=100.0).play(forwards(stages, runs, 50))
    assert timeline.seconds == pytest.approx((runs + stages - 1) * 0.5)
    assert timeline.idle_fraction == pytest.approx((stages - 1) / (runs + stages - 1))
    assert [d.wait_seconds for d in timeline.devices] == pytest.approx([stage * 0.5 for stage in range(stages)])
    assert all(d.compute_seconds == pytest.approx(runs * 0.5) for d in timeline.devices)


def test_a_straggler_delays_all():
    model = LinkModel(flops_per_second=100.0, slowdowns={1: 3.0})
    assert model.seconds(forwards(3, 4, 100)) == pytest.approx(1 + 4 * 3 + 1)


def test_axes_have_links_of_their_own_and_the_slowest_of_several_counts():
    model = LinkModel(1.0, 10.0, {"tp": (0.5, 100.0), "dp": (2.0, 50.0)})
    assert model.link() == model.link(["pp"]) == (1.0, 10.0)
    assert model.link(["tp"]) == (0.5, 100.0)
    assert model.link(["tp", "dp"]) == (2.0, 50.0)
    assert model.link(["tp", "pp"]) == (1.0, 10.0)
    assert model.message_seconds(200, ["tp"]) == 2.5
    programs = collective("all_gather", 2, 200, axes=("tp",))
    assert model.seconds(programs) == pytest.approx(2.5)
    x = ArraySpec((200,), "U8")
    sent = [Program(0, (Compute("made", (), ("x",), (x,)), Send("x", 1, x, ("dp",)))), Program(1, (Take("y", 0, x),))]
    assert model.play(sent).devices[0].send_seconds == pytest.approx(4.0)
    assert model.seconds(sent) == pytest.approx(6.0)


def test_the_host_sends_to_one_device_after_another():
    x, y = ArraySpec((100,), "U8"), ArraySpec((50,), "U8")
    program = (Receive("x", x), Compute("made", ("x",), ("y",), (y,), 10), Return("y", "y", y))
    model = LinkModel(9.0, 9.0, host=(1.0, 100.0), flops_per_second=5.0)
    timeline = model.play([Program(0, program), Program(1, program)])
    assert [device.seconds for device in timeline.devices] == pytest.approx([1 + 1 + 2 + 0.5, 2 + 1 + 2 + 0.5])
    assert timeline.seconds == pytest.approx(6.5)
    assert LinkModel(1.0, 100.0, flops_per_second=5.0).seconds([Program(0, program)]) == pytest.approx(5.5)


@settings(max_examples=count_of(40))
@given(st.sampled_from([(2,), (3, 2), (2, 2, 2)]), st.integers(0, 1 << 30), st.sampled_from(["push", "ring"]))
def test_random_programs_come_to_an_end_whatever_the_order(shape, seed, algorithm):
    mesh = DeviceMesh(shape, "abc"[: len(shape)])
    programs = RandomOperation(mesh, seed).compile(mesh, (), ())
    model = LinkModel(1e-3, 1e4, {"a": (2e-3, 1e3)}, host=(0.0, math.inf), flops_per_second=100.0, slowdowns={1: 2.0})
    timeline = model.play(programs, algorithm)
    turned = model.play(programs[::-1], algorithm)
    assert turned.devices[::-1] == timeline.devices and turned.seconds == timeline.seconds
    for device in timeline.devices:
        assert device.seconds == pytest.approx(device.compute_seconds + device.send_seconds + device.wait_seconds)
        assert device.seconds <= timeline.seconds
    assert 0 <= timeline.idle_fraction <= 1
    assert LinkModel().seconds(programs, algorithm) == 0
    assert LinkModel().play(programs, algorithm).idle_fraction == 0


def test_programs_that_would_wait_for_ever_are_refused():
    x = ArraySpec((4,))
    with pytest.raises(UsageError, match="device 0 waits forever: device 1 does not send") as raised:
        MODEL.seconds([Program(0, (Take("x", 1, x),)), Program(1, (Take("x", 0, x),))])
    assert raised.value.rank == 0
    with pytest.raises(UsageError, match="'tree'"):
        MODEL.seconds([], "tree")


@pytest.mark.parametrize("algorithm", ["push", "ring"])
@pytest.mark.parametrize("name", ["all_gather", "all_scatter", "all_reduce", "reduce_scatter", "all_to_all"])
def test_groups_are_timed_at_once_as_message_by_message(name, algorithm):
    size = 12
    uneven = name in ("all_gather", "all_scatter", "all_to_all")
    brought = tuple(ArraySpec((50 + 37 * (device % 7) if uneven else 77, 3), "U8") for device in range(size))
    call = Communicate(name, tuple(range(size)), "x", "y", brought, brought[0], dim=0, reduction="sum")
    first = brought[0]
    again = Communicate("all_reduce", tuple(reversed(range(size))), "z", "", (first,) * size, first)
    programs = [
        Program(device, (Compute("made", (), ("x",), (first,), 13 * device % 29), call, Send("x", 0, first), again))
        for device in range(1, size)
    ]
    taken = [Take(f"t{device}", device, first) for device in range(1, size)]
    programs.insert(0, Program(0, (call, *taken, again)))
    model = LinkModel(0.5, 100.0, flops_per_second=3.0)
    at_once = model.play(programs, algorithm)
    one_by_one = model.play(
        [
            Program(
                one.device,
                tuple(
                    message
                    for each in one.instructions
                    for message in (
                        as_messages(each, one.device, algorithm) if isinstance(each, Communicate) else [each]
                    )
                ),
            )
            for one in programs
        ]
    )
    for found, want in zip(at_once.devices, one_by_one.devices, strict=True):
        assert astuple(found) == pytest.approx(astuple(want))
    assert at_once.seconds == pytest.approx(one_by_one.seconds)


def test_an_operation_is_played_by_its_programs():
    matmul = MatMul(MatMulSharding(("[m, k/x]", "[k/x, n]", "[m, n]")))
    with pytest.raises(UsageError, match="plays programs") as raised:
        MODEL.seconds(matmul)
    assert "compile" in raised.value.next_step
    specs = (ArraySpec((10, 4), "F64"),), (ArraySpec((4, 5), "F64"),)
    free_host = LinkModel(L, B, host=(0.0, math.inf))
    assert free_host.seconds(matmul.compile(DeviceMesh((2,), ("x",)), *specs)) == pytest.approx(10 * 5 * 8 / B + L)


def test_a_missing_member_of_a_large_group_is_reported():
    call = Communicate("all_gather", tuple(range(40)), "x", "y", (ArraySpec((1,)),) * 40, ArraySpec((40,)))
    programs = [Program(device, (call,) if device else ()) for device in range(40)]
    with pytest.raises(UsageError, match="device 1 waits forever: a member of its group does not send"):
        LinkModel().play(programs)


@pytest.mark.parametrize("algorithm", ["push", "ring"])
def test_one_group_of_thousands_takes_seconds(algorithm):
    size, n = 4096, 4096 * 16
    begin = time.process_time()
    timeline = MODEL.play(collective("all_reduce", size, n), algorithm)
    assert time.process_time() - begin < 15, "about 1 second where nothing else runs"
    want = (size - 1) * n / B + L if algorithm == "push" else 2 * (size - 1) * (n / size / B + L)
    assert timeline.seconds == pytest.approx(want)


# Words


def test_a_model_is_read_from_words_or_a_file(tmp_path):
    wanted = LinkModel(5e-6, 25e9, {"tp": (1e-6, 300e9), "dp": (2e-3, 25e9)}, (5e-6, 2.0**30), 2e12)
    words = "latency=5us bandwidth=25GB/s tp.bandwidth=300GB/s tp.latency=1us dp.latency=2ms host.bandwidth=1GiB/s"
    assert LinkModel.read(f"{words} flops=2TFLOP/s") == wanted
    file = tmp_path / "links.toml"
    file.write_text(
        'latency = "5us"\nbandwidth = "25GB/s"\nflops = "2TFLOP/s"\n[tp]\nbandwidth = "300GB/s"\nlatency = "1us"\n'
        '[dp]\nlatency = "2ms"\n[host]\nbandwidth = "1GiB/s"\n'
    )
    assert LinkModel.read(file) == LinkModel.read(str(file)) == wanted
    assert LinkModel.read("bandwidth=1.5e3MB/s") == LinkModel(0.0, 1.5e9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("speed=5GB/s", "unknown name 'speed'"),
        ("tp.speed=5GB/s", r"unknown name 'tp\.speed'"),
        ("bandwidth=5", "bandwidth = '5'"),
        ("bandwidth=5GB", "bandwidth = '5GB'"),
        ("bandwidth=0GB/s", "bandwidth = '0GB/s'"),
        ("bandwidth=-1GB/s", "bandwidth = '-1GB/s'"),
        ("bandwidth=1e999GB/s", "bandwidth = '1e999GB/s'"),
        ("bandwidth=1iB/s", "bandwidth = '1iB/s'"),
        ("latency=5", "latency = '5'"),
        ("latency=5m", "latency = '5m'"),
        ("flops=1GB/s", "flops = '1GB/s'"),
        ("tp.flops=1GFLOP/s", "only links have axes"),
        ("latency=5us latency=6us", "'latency' occurs twice"),
        (".latency=5us", r"unknown name '\.latency'"),
        ("tp..latency=5us", r"unknown name 'tp\.\.latency'"),
        ("latency", "file latency cannot be read: No such file"),
        ("", "cannot be read: nothing"),
        ("latency = 5us", "'latency' has no value"),
        ("latency=5us 25GB/s", "'25GB/s' has no value"),
        ("a\0b", "cannot be read"),
    ],
)
def test_words_that_cannot_be_read_are_named(words, message):
    with pytest.raises(UsageError, match=message) as raised:
        LinkModel.read(words)
    assert raised.value.want


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"latency = 5", "latency = 5"),
        (b"[tp]\nlatency = 5.0", r"tp\.latency = 5\.0"),
        (b"latency = '5us", "not TOML"),
        (b"\xff", "not TOML"),
        (b"[tp.x]\nspeed = '1s'", r"tp\.x\.speed"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, content, message):
    file = tmp_path / "links.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        LinkModel.read(file)
    assert raised.value.file == str(file)


@pytest.mark.parametrize(
    "arguments",
    [
        {"latency_seconds": -1.0},
        {"latency_seconds": math.inf},
        {"latency_seconds": math.nan},
        {"bandwidth_nbytes_per_second": 0.0},
        {"bandwidth_nbytes_per_second": math.nan},
        {"axes": {"tp": (0.0, -1.0)}},
        {"host": (-1.0, 1.0)},
        {"flops_per_second": 0.0},
        {"slowdowns": {3: 0.0}},
    ],
)
def test_invalid_models_are_refused(arguments):
    with pytest.raises(UsageError, match="is impossible"):
        LinkModel(**arguments)


def test_four_thousand_devices_take_seconds():
    mesh = DeviceMesh((16, 16, 16), ("pp", "dp", "tp"))
    x = ArraySpec((1600,), "F32")
    steps = {device: [Compute("made", (), ("x0",), (x,), 1000)] for device in mesh.ranks}
    for number, axis in enumerate(mesh.axis_names):
        for group in mesh.groups(axis):
            for device in group:
                call = Communicate(
                    "all_reduce", group, f"x{number}", f"x{number + 1}", (x,) * 16, x, reduction="sum", axes=(axis,)
                )
                steps[device].append(call)
    programs = [Program(device, tuple(instructions)) for device, instructions in steps.items()]
    model = LinkModel(1e-6, 1e9, {"tp": (1e-7, 1e10)}, flops_per_second=1e9)
    begin = time.process_time()
    seconds = model.seconds(programs, "ring")
    assert time.process_time() - begin < 30, "about 2 seconds where nothing else runs"
    assert seconds == pytest.approx(1e-6 + 2 * 30 * (1e-6 + 400e-9) + 30 * (1e-7 + 40e-9))


def test_a_fit_recovers_the_model_of_the_samples():
    told = LinkModel(3e-6, 2e9, flops_per_second=5e10)
    samples = [
        LinkSample(m, n, m * 3e-6 + n / 2e9 + f / 5e10, f)
        for m, n, f in [(1, 1000, 0), (10, 10**6, 10**6), (100, 10**8, 0), (2, 64, 10**9), (7, 10**7, 10**7)]
    ]
    found = LinkModel.from_samples(samples)
    assert found.latency_seconds == pytest.approx(told.latency_seconds)
    assert found.bandwidth_nbytes_per_second == pytest.approx(told.bandwidth_nbytes_per_second)
    assert found.flops_per_second == pytest.approx(told.flops_per_second)


def test_a_fit_weighs_short_and_long_alike_and_takes_no_rate_that_cannot_be():
    noise = [1.1, 0.9, 1.05, 0.95]
    samples = [LinkSample(1, n, (2e-5 + n / 1e9) * f) for n, f in zip([10, 10**4, 10**6, 10**8], noise, strict=True)]
    found = LinkModel.from_samples(samples)
    assert found.latency_seconds == pytest.approx(2e-5, rel=0.15)
    assert found.bandwidth_nbytes_per_second == pytest.approx(1e9, rel=0.15)
    assert found.flops_per_second == math.inf
    # A line through these would have a latency below 0.
    found = LinkModel.from_samples([LinkSample(1, 1000, 0.5), LinkSample(1, 3000, 2.0)])
    assert found.latency_seconds == 0 and 1000 < found.bandwidth_nbytes_per_second < 3000
    assert LinkModel.from_samples([LinkSample(4, 0, 2.0)]) == LinkModel(0.5)


@pytest.mark.parametrize("samples", [[], [LinkSample(1, 1, 0.0)], [LinkSample(1, 1, 1.0), LinkSample(1, 1, -1.0)]])
def test_a_fit_needs_times(samples):
    with pytest.raises(UsageError, match="measured times"):
        LinkModel.from_samples(samples)
