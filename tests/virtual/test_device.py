"""Every collective on threads against plain numpy, its counts, and contradictory calls."""

import functools
import time
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from tests.virtual.sample_arrays import NAMES, NUMPY_DTYPES, REDUCIBLE, made, of_kind, plain
from xrank.errors import LayoutError, RankFailedError, RankTimeoutError, UsageError
from xrank.layout import DeviceMesh
from xrank.virtual import VirtualCluster

UFUNCS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@dataclass(frozen=True)
class Case:
    """A mesh, a form of its groups, and the input of every member."""

    mesh: DeviceMesh
    axes: tuple[str, ...] | str | None
    explicit: bool
    algorithm: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    dim: int
    reduction: str
    seed: int

    def groups(self):
        axes = self.mesh.axis_names if self.axes is None else (self.axes,) if type(self.axes) is str else self.axes
        groups = self.mesh.groups(*axes)
        return [tuple(reversed(group)) for group in groups] if self.explicit else groups

    def group_of(self, device):
        return next(group for group in self.groups() if device in group)

    def how(self, device):
        """Return the arguments that name a device's group."""
        return {"group": self.group_of(device)} if self.explicit else {"axes": self.axes}

    def given(self, device, *, uneven=False, number=0):
        """Return what a device brings, as numpy."""
        shape = list(self.shape)
        if uneven:
            shape[self.dim] += device % 3
        return made(tuple(shape), self.dtype, self.seed + 100 * number + device)

    def root(self, device, which):
        group = self.group_of(device)
        return group[which % len(group)]

    def count_hops(self, which, nbytes_of):
        """Return the messages and bytes of a gather or scatter, in which each member's array passes the ring."""
        messages = nbytes = 0
        for group in self.groups():
            for member in group:
                distance = (group.index(member) - group.index(self.root(member, which))) % len(group)
                hops = distance if self.algorithm == "ring" else min(distance, 1)
                messages, nbytes = messages + hops, nbytes + hops * nbytes_of(member, group)
        return messages, nbytes

    def run(self, function):
        run = VirtualCluster(self.mesh, engine="in-process", algorithm=self.algorithm, timeout_seconds=20).run(function)
        check_counts(run)
        return run

    def check(self, run, wanted):
        """Compare each device's result with numpy's."""
        for device, output in zip(self.mesh.ranks, run.outputs, strict=True):
            want = wanted(device, self.group_of(device))
            if isinstance(want, list):
                assert [plain(a) for a in output] == [plain(of_kind(a, self.kind)) for a in want]
            else:
                assert (output is None) if want is None else plain(output) == plain(of_kind(want, self.kind))

    def split(self, array, group, device):
        parts = np.array_split(array, len(group), self.dim)
        return np.ascontiguousarray(parts[group.index(device)])

    def reduced(self, arrays, group):
        """Reduce the inputs of a group's members in the order of the algorithm."""
        dtype = NUMPY_DTYPES[self.dtype]

        def fold(several):
            with np.errstate(all="ignore"):
                total = np.asarray(functools.reduce(UFUNCS[self.reduction], several), dtype)
                return np.asarray(total / np.asarray(len(group), dtype)) if self.reduction == "mean" else total

        if self.algorithm == "push":
            return fold(arrays)
        pieces = [np.array_split(array.reshape(-1), len(group)) for array in arrays]
        turned = [[*range(p + 1, len(group)), *range(p + 1)] for p in range(len(group))]
        flat = [fold([pieces[member][p] for member in turned[p]]) for p in range(len(group))]
        return np.concatenate(flat).reshape(arrays[0].shape)

    def reduce_part(self, arrays, group, device):
        place = group.index(device)
        parts = [self.split(array, group, device) for array in arrays]
        if self.algorithm == "ring":
            parts = [*parts[place + 1 :], *parts[: place + 1]]
        push = Case(**{**self.__dict__, "algorithm": "push"})
        return push.reduced(parts, group)


def check_counts(run):
    """Check that the devices' counts equal those of the channels, and that every sent message was received."""
    total = run.statistics.traffic
    assert total.sent_messages == total.received_messages == run.channels.between_devices.messages
    assert total.sent_nbytes == total.received_nbytes == run.channels.between_devices.nbytes
    assert run.channels.sent == run.channels.received


def totals(case, run, collective):
    """Return the messages and bytes of a collective over all devices, having checked that nothing else was counted."""
    assert set(run.statistics.by_collective()) == {collective}
    traffic = run.statistics.by_collective()[collective]
    assert traffic.calls == case.mesh.size
    return traffic.sent_messages, traffic.sent_nbytes


@st.composite
def cases(draw, dtypes=NAMES, min_dims=1):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda shape: prod(shape) <= 12))
    names = ("a", "b", "c", "d")[: len(shape)]
    ranks = draw(st.permutations(range(0, 2 * prod(shape), 2)))
    axes = draw(st.none() | st.sampled_from(names) | st.permutations(names).flatmap(
        lambda order: st.integers(1, len(order)).map(lambda n: tuple(order[:n]))
    ))  # fmt: skip
    dtype = draw(st.sampled_from(dtypes))
    reductions = ["sum", "prod"] if dtype == "C64" else ["sum", "max", "min", "prod"]
    if dtype == "BF16" or (dtype[0] == "F"):
        reductions.append("mean")
    array_shape = tuple(draw(st.lists(st.integers(0, 5), min_size=min_dims, max_size=3)))
    return Case(
        DeviceMesh(shape, names, ranks), axes, draw(st.booleans()), draw(st.sampled_from(["push", "ring"])),
        draw(st.sampled_from(["numpy", "torch"])), dtype, array_shape,
        draw(st.integers(0, max(0, len(array_shape) - 1))), draw(st.sampled_from(reductions)),
        draw(st.integers(0, 1 << 20)),
    )  # fmt: skip


quick = settings(max_examples=count_of(40))


@quick
@given(cases(min_dims=0), st.booleans())
def test_all_gather_and_all_scatter_of_lists(case, scatter):
    def body(device):
        array = of_kind(case.given(device.index), case.kind)
        function = device.all_scatter if scatter else device.all_gather
        return function(array, **case.how(device.index))

    run = case.run(body)
    case.check(run, lambda device, group: [case.given(member) for member in group])
    sizes = [case.given(device).nbytes * (len(case.group_of(device)) - 1) for device in case.mesh.ranks]
    messages = sum(len(case.group_of(device)) - 1 for device in case.mesh.ranks)
    assert totals(case, run, "all_scatter" if scatter else "all_gather") == (messages, sum(sizes))


@quick
@given(cases())
def test_all_gather_joined_though_uneven(case):
    run = case.run(
        lambda device: device.all_gather(
            of_kind(case.given(device.index, uneven=True), case.kind),
            dim=case.dim - len(case.shape),
            **case.how(device.index),
        )
    )
    case.check(run, lambda _, group: np.concatenate([case.given(m, uneven=True) for m in group], case.dim))
    wanted = sum((len(case.group_of(d)) - 1) * case.given(d, uneven=True).nbytes for d in case.mesh.ranks)
    assert totals(case, run, "all_gather")[1] == wanted


@quick
@given(cases(REDUCIBLE, min_dims=0))
def test_all_reduce(case):
    run = case.run(
        lambda device: device.all_reduce(
            of_kind(case.given(device.index), case.kind), reduction=case.reduction, **case.how(device.index)
        )
    )
    if (case.dtype, case.reduction) == ("C64", "prod"):
        return  # torch and numpy round products of complex numbers each in their way
    case.check(run, lambda _, group: case.reduced([case.given(m) for m in group], group))
    g, nbytes = len(case.groups()[0]), case.given(0).nbytes
    if case.algorithm == "push":
        wanted = case.mesh.size * (g - 1), case.mesh.size * (g - 1) * nbytes
    else:  # 2 (g-1) / g of the array, by each of g
        wanted = case.mesh.size * 2 * (g - 1), len(case.groups()) * 2 * (g - 1) * nbytes
    assert totals(case, run, "all_reduce") == wanted


@quick
@given(cases(REDUCIBLE))
def test_reduce_scatter(case):
    run = case.run(
        lambda device: device.reduce_scatter(
            of_kind(case.given(device.index), case.kind),
            dim=case.dim - len(case.shape),
            reduction=case.reduction,
            **case.how(device.index),
        )
    )
    if (case.dtype, case.reduction) == ("C64", "prod"):
        return
    case.check(run, lambda device, group: case.reduce_part([case.given(m) for m in group], group, device))
    g = len(case.groups()[0])
    wanted = case.mesh.size * (g - 1), len(case.groups()) * (g - 1) * case.given(0).nbytes
    assert totals(case, run, "reduce_scatter") == wanted


@quick
@given(cases(min_dims=0), st.integers(0, 11))
def test_broadcast(case, which):
    def body(device):
        own, root = device.index, case.root(device.index, which)
        array = of_kind(case.given(own), case.kind) if own == root else None
        return device.broadcast(array, root, **case.how(own))

    run = case.run(body)
    case.check(run, lambda device, group: case.given(case.root(device, which)))
    g, n = len(case.groups()[0]), len(case.groups())
    assert totals(case, run, "broadcast") == (n * (g - 1), n * (g - 1) * case.given(0).nbytes)


@quick
@given(cases(), st.integers(0, 11), st.booleans())
def test_gather(case, which, joined):
    run = case.run(
        lambda device: device.gather(
            of_kind(case.given(device.index, uneven=True), case.kind),
            case.root(device.index, which),
            dim=case.dim if joined else None,
            **case.how(device.index),
        )
    )

    def wanted(device, group):
        arrays = [case.given(member, uneven=True) for member in group]
        return None if device != case.root(device, which) else np.concatenate(arrays, case.dim) if joined else arrays

    case.check(run, wanted)
    hops = case.count_hops(which, lambda member, group: case.given(member, uneven=True).nbytes)
    assert totals(case, run, "gather") == hops


@quick
@given(cases(), st.integers(0, 11))
def test_scatter(case, which):
    def part(device, group):
        return case.split(case.given(case.root(device, which)), group, device)

    run = case.run(
        lambda device: device.scatter(
            of_kind(case.given(device.index), case.kind),
            case.root(device.index, which),
            dim=case.dim,
            **case.how(device.index),
        )
    )
    case.check(run, part)
    assert totals(case, run, "scatter") == case.count_hops(which, lambda member, group: part(member, group).nbytes)


@quick
@given(cases(min_dims=0))
def test_all_to_all(case):
    def given_to(device, group):
        return [case.given(device, number=1 + place) for place in range(len(group))]

    run = case.run(
        lambda device: device.all_to_all(
            [of_kind(a, case.kind) for a in given_to(device.index, case.group_of(device.index))],
            **case.how(device.index),
        )
    )
    case.check(run, lambda device, group: [given_to(member, group)[group.index(device)] for member in group])
    g = len(case.groups()[0])
    wanted = case.mesh.size * (g - 1), case.mesh.size * (g - 1) * case.given(0).nbytes
    assert totals(case, run, "all_to_all") == wanted


# What a device can rely on


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("algorithm", ["push", "ring"])
def test_what_was_given_may_be_changed_and_what_was_got_is_ones_own(virtual_cluster, kind, algorithm):
    def body(device):
        array = of_kind(np.full((4, 3), float(device.index)), kind)
        whole = [of_kind(np.full((4, 3), 7.0), kind)] * 2
        results = [
            *device.all_gather(array),
            device.all_reduce(array),
            device.reduce_scatter(array),
            device.broadcast(array, 0),
            device.scatter(array, 0),
            *device.all_to_all(whole),
            *(device.gather(array, 0) or []),
            device.all_gather(array, dim=0),
        ]
        device.send(array, 1 - device.index)
        array[:] = -1
        results.append(device.receive(1 - device.index))
        before = [plain(result) for result in results]
        assert not any(b"\xbf\xf0" in raw[::-1] for *_, raw in before), "-1 came through"
        for number, result in enumerate(results):
            result[:] = 100.0 + number
        assert [float(result.reshape(-1)[0]) for result in results] == [100.0 + n for n in range(len(results))]
        assert float(array[0, 0]) == -1 and float(whole[0][0, 0]) == 7
        return before

    run = virtual_cluster(2, algorithm=algorithm).run(body)
    first, second = run.outputs
    assert first[:3] == second[:3] and first[0][1:3] == ((4, 3), "F64")


def test_alone_in_a_group_nothing_is_sent_and_results_are_copies(virtual_cluster):
    def body(device):
        array = np.arange(3.0)
        results = [
            *device.all_gather(array, "y"),
            *device.all_scatter(array, "y"),
            device.all_gather(array, "y", dim=0),
            device.all_reduce(array, "y"),
            device.all_reduce(array, "y", reduction="mean", algorithm="ring"),
            device.reduce_scatter(array, "y", algorithm="ring"),
            device.broadcast(array, device.index, "y"),
            device.scatter(array, device.index, "y"),
            *device.gather(array, device.index, "y"),
            *device.all_to_all([array], group=[device.index]),
        ]
        assert all(list(result) == [0, 1, 2] and not np.shares_memory(result, array) for result in results)

    run = virtual_cluster((2, 1)).run(body)
    counted = run.statistics.by_collective()
    assert run.statistics.messages == run.statistics.nbytes == 0 and run.channels.sent == {}
    assert {name: traffic.calls for name, traffic in counted.items()} == {
        "all_gather": 4, "all_scatter": 2, "all_reduce": 4, "reduce_scatter": 2, "broadcast": 2, "scatter": 2,
        "gather": 2, "all_to_all": 2,
    }  # fmt: skip


def test_send_and_receive_keep_their_order_and_sends_never_wait(virtual_cluster):
    def body(device):
        other = 1 - device.index
        for number in range(100):
            device.send(np.full(number, number), other)
        return [len(device.receive(other)) for _ in range(100)]

    run = virtual_cluster(2).run(body)
    assert run.outputs == [list(range(100))] * 2
    check_counts(run)
    one = run.statistics.devices[0].collectives
    assert one["send"].calls == one["send"].sent_messages == one["receive"].received_messages == 100
    assert one["send"].sent_nbytes == one["receive"].received_nbytes == 8 * sum(range(100))


def test_where_a_device_is(virtual_cluster):
    mesh = DeviceMesh((2, 2), ("dp", "tp"), [3, 1, 0, 2])
    run = virtual_cluster(mesh).run(lambda d: (d.index, d.coordinate, d.group("tp"), d.group(), d.mesh == mesh))
    assert run.outputs[1] == (1, {"dp": 0, "tp": 1}, (3, 1), (3, 1, 0, 2), True)
    assert [output[0] for output in run.outputs] == [3, 1, 0, 2]


def test_flops_and_peak_are_those_that_the_function_reports(virtual_cluster):
    def body(device):
        device.count_flops(10)
        device.count_flops(device.index)
        if device.index:
            device.count_held(5)
            device.count_held(3)

    statistics = virtual_cluster(2).run(body).statistics
    assert statistics.flops == 21
    assert [device.peak_nbytes for device in statistics.devices] == [None, 5]


# Calls that contradict each other

ONES = np.ones((4, 6), np.float32)

MISUSES = {
    "two collectives": (
        lambda d: d.all_gather(ONES) if d.index else d.all_reduce(ONES),
        r"all_gather .*all_reduce|all_reduce .*all_gather",
    ),
    "two orders": (
        lambda d: [d.gather(ONES, 2), d.all_gather(ONES)] if d.index else [d.all_gather(ONES), d.gather(ONES, 2)],
        "call 0 .*call 1|call 1 .*call 0|gather",
    ),
    "two groups": (
        lambda d: d.all_gather(ONES, group=[0, 1] if d.index == 0 else [0, 1, 2]) if d.index < 2 else None,
        "of a different group",
    ),
    "two orders of a group": (
        lambda d: d.all_reduce(ONES, group=[0, 1, 2] if d.index else [2, 1, 0]),
        "a different group",
    ),
    "two roots": (lambda d: d.broadcast(ONES, [0, 2, 0][d.index], algorithm="ring"), "with root 2 .*with root 0"),
    "two reductions": (lambda d: d.all_reduce(ONES, reduction="max" if d.index else "sum"), "max .*sum|sum .*max"),
    "two algorithms": (lambda d: d.all_reduce(ONES, algorithm="ring" if d.index else "push"), "by ring|by push"),
    "a send for a collective": (
        lambda d: d.all_gather(ONES) if d.index else [d.send(ONES, 1), d.send(ONES, 2)],
        "expects all_gather .* sent it send",
    ),
    "shapes to reduce": (lambda d: d.all_reduce(ONES[: 4 - d.index]), r"all_reduce: device .*\(3, 6\)"),
    "shapes to reduce on a ring": (
        lambda d: d.all_reduce(ONES if d.index else ONES.reshape(3, 8), algorithm="ring"),
        "with a different shape",
    ),
    "lengths to reduce on a ring": (
        lambda d: d.all_reduce(ONES[: 4 - d.index], algorithm="ring"),
        "with a different shape",
    ),
    "types to reduce": (lambda d: d.all_reduce(ONES.astype([float, int, float][d.index])), "I64"),
    "kinds to reduce": (lambda d: d.all_reduce(torch.ones(4, 6) if d.index else ONES), "torch F32"),
    "shapes to reduce and scatter": (lambda d: d.reduce_scatter(ONES[: 4 - d.index]), "reduce_scatter: device"),
    "types to reduce and scatter": (
        lambda d: d.reduce_scatter(ONES.astype([float, int, float][d.index]), algorithm="ring"),
        "I64",
    ),
    "shapes to join": (lambda d: d.all_gather(ONES[: 4 - d.index], dim=1), r"but for the length of dim 1|does not go"),
    "types to join": (lambda d: d.all_gather(ONES.astype([float, int, float][d.index]), dim=1), "I64"),
    "types to join on a ring": (
        lambda d: d.all_gather(ONES.astype([float, int, float][d.index]), dim=1, algorithm="ring"),
        "device 1 brings numpy I64|numpy F64",
    ),
    "dims to join": (lambda d: d.gather([ONES, ONES, ONES[0]][d.index], 0, dim=0), r"device 2 brings numpy F32 \(6\)"),
}  # fmt: skip

ALONE = {
    "no member": (lambda d: d.all_reduce(ONES, group=[1, 2]), "device 0 .*lacks the device itself"),
    "no dim": (lambda d: d.all_gather(ONES, dim=2), "has dim 2 of a shape"),
    "no dim of nothing": (lambda d: d.reduce_scatter(np.float32(1)), "has dim 0 of a shape"),
    "no array": (lambda d: d.all_reduce([1, 2]), "plain arrays"),
    "nothing": (lambda d: d.all_reduce(None), "has no array"),
    "nothing at the root": (lambda d: d.broadcast(None, 0), "has no array"),
    "no root": (lambda d: d.broadcast(ONES, 7), "has the root 7"),
    "a mean of integers": (lambda d: d.all_reduce(np.arange(3), reduction="mean"), "mean of I64"),
    "the largest complex number": (lambda d: d.all_reduce(np.ones(3, np.complex64), reduction="max"), "max of C64"),
    "no reduction at all": (lambda d: d.all_reduce(ONES, reduction=None), "has the reduction None"),
    "a dim in words": (lambda d: d.all_gather(ONES, dim="0"), "has dim '0' of a shape"),
    "half a dim": (lambda d: d.reduce_scatter(ONES, dim=0.5), r"has dim 0\.5 of a shape"),
    "no dim to cut": (lambda d: d.scatter(ONES, 0, dim=None), "scatter needs dim="),
    "no dim to reduce": (lambda d: d.reduce_scatter(ONES, dim=None), "reduce_scatter needs dim="),
    "a root outside of the mesh": (lambda d: d.gather(ONES, None), "has the root None"),
    "a number for axes": (lambda d: d.all_reduce(ONES, 0), "axes must be names, not 0"),
    "a number for a group": (lambda d: d.all_reduce(ONES, group=0), "device 0 calls a collective over no group"),
    "a group in a group": (lambda d: d.all_reduce(ONES, group=[[0, 1]]), r"has no device \[0, 1\]"),
    "no reduction": (lambda d: d.all_reduce(ONES, reduction="median"), "'median'"),
    "no algorithm": (lambda d: d.all_reduce(ONES, algorithm="tree"), "'tree'"),
    "too few for all": (lambda d: d.all_to_all([ONES]), "has 1 arrays"),
    "to itself": (lambda d: d.send(ONES, d.index), "names device 0"),
    "from a missing device": (lambda d: d.receive(9), "names device 9"),
    "no array to send": (lambda d: d.send("x", 1), "plain arrays"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_contradicting_calls_are_named_at_once(virtual_cluster, name):
    function, message = MISUSES[name]
    begin = time.monotonic()
    with pytest.raises((RankFailedError, RankTimeoutError), match=message) as raised:
        virtual_cluster(3).run(function)
    assert time.monotonic() - begin < 20, "long before the deadline; here it takes milliseconds"
    assert isinstance(raised.value, RankFailedError), "a device saw it before all were stuck"
    assert isinstance(raised.value.__cause__, UsageError)
    assert raised.value.rank == raised.value.__cause__.rank
    assert raised.value.next_step


@pytest.mark.parametrize("name", ALONE)
def test_invalid_calls_are_refused_before_anything_is_sent(virtual_cluster, name):
    function, message = ALONE[name]
    sent = []

    def body(device):
        if device.index == 0:
            with pytest.raises(UsageError, match=message) as raised:
                function(device)
            sent.append((device.statistics.traffic.sent_messages, raised.value.rank))

    virtual_cluster(3).run(body)
    assert sent[0][0] == 0 and sent[0][1] in (0, None)


def test_invalid_axes_are_refused(virtual_cluster):
    with pytest.raises(RankFailedError, match="has no axis 'tp'") as raised:
        virtual_cluster((2, 2)).run(lambda device: device.all_reduce(ONES, "tp"))
    assert isinstance(raised.value.__cause__, LayoutError)
