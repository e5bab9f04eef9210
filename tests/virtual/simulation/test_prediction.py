"""Seconds: closed forms for traffic written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from xrank.errors import UsageError
from xrank.layout import DeviceMesh
from xrank.virtual.simulation.traffic import (
    FROM_FILES,
    PARTS,
    ConversionTraffic,
    Flow,
    build_round,
    predict,
    read_rates,
)


def flow(*rows: tuple[int, int, int, int]) -> Flow:
    """Return (taker, giver, bytes, messages), row by row."""
    return Flow(*np.array(rows, np.int64).reshape(-1, 4).T)


def traffic(
    *rounds: tuple[list[int], list[tuple[int, int, int, int]]], compared: list[int] | None = None
) -> ConversionTraffic:
    made = tuple(build_round(np.array(written, np.int64), [flow(*rows)]) for written, rows in rounds)
    return ConversionTraffic(made, np.array(compared or [0] * len(rounds[0][0]), np.int64), True)


ALL = "read=4MB/s write=2MB/s memory=10MB/s bandwidth=1MB/s latency=1ms start=3s"


def test_a_round_sorts_reads_by_where_they_are_from() -> None:
    one = build_round(
        np.array([5, 6, 7]),
        [flow((0, FROM_FILES, 10, 2), (1, 1, 20, 1)), flow((2, 0, 3, 1), (0, 1, 30, 1), (2, 0, 4, 2), (2, 1, 1, 1))],
    )
    assert (one.read_nbytes.tolist(), one.reads.tolist()) == ([10, 0, 0], [2, 0, 0])
    assert one.own_nbytes.tolist() == [0, 20, 0]
    exchange = one.exchange
    assert list(zip(exchange.taker, exchange.giver, exchange.nbytes, exchange.messages, strict=True)) == [
        (0, 1, 30, 1), (2, 0, 7, 3), (2, 1, 1, 1),
    ]  # fmt: skip
    assert one.taken_nbytes.tolist() == [30, 0, 8] and one.given_nbytes.tolist() == [7, 31, 0]
    assert one.messages.tolist() == [1, 0, 4] and one.written_nbytes.tolist() == [5, 6, 7]


def test_one_process_reads_then_writes() -> None:
    found = predict(traffic(([2_000_000], [(0, FROM_FILES, 4_000_000, 9)])), read_rates(ALL), None)
    assert found.seconds == pytest.approx(3 + 1 + 1)
    assert {name: found.parts[name].tolist() for name in PARTS} == {
        "compare": [0], "read": [1], "exchange": [0], "write": [1],
    }  # fmt: skip


def test_each_round_waits_for_its_slowest_rank() -> None:
    fast, slow = ([2_000_000, 0], []), ([0, 6_000_000], [])
    found = predict(traffic(fast, slow, compared=[10_000_000, 5_000_000]), read_rates(ALL), None)
    assert found.seconds == pytest.approx(3 + 1 + 1 + 3)
    assert found.busy.tolist() == [2, 3.5]


def test_who_gives_much_is_as_busy_as_who_takes_it() -> None:
    rows = [(taker, 0, 500_000, 10) for taker in (1, 2, 3)]
    found = predict(traffic(([0] * 4, rows)), read_rates(ALL), None)
    assert found.parts["exchange"].tolist() == pytest.approx([1.5, 0.51, 0.51, 0.51])


def test_the_slowest_axis_along_which_ranks_differ_counts() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    rates = read_rates(f"{ALL} tp.bandwidth=10MB/s dp.latency=0s dp.bandwidth=2MB/s")
    rows = [(0, 1, 1_000_000, 1), (0, 2, 1_000_000, 1), (0, 3, 1_000_000, 1)]
    found = predict(traffic(([0] * 4, rows)), rates, mesh)
    # Along tp its own bandwidth with the latency of all; along dp its own two; along both the slower of each.
    assert found.parts["exchange"].tolist() == pytest.approx([(0.1 + 0.001) + 0.5 + (0.5 + 0.001), 0.1, 0.5, 0.5])
    plain = predict(traffic(([0] * 4, rows)), read_rates(ALL), mesh)
    assert plain.parts["exchange"][0] == pytest.approx(3.003)


def test_an_axis_without_values_has_the_general_link() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    found = predict(traffic(([0] * 4, [(0, 2, 1_000_000, 0)])), read_rates(f"{ALL} tp.bandwidth=10MB/s"), mesh)
    assert found.parts["exchange"].tolist() == pytest.approx([1, 0, 1, 0])


def test_files_of_all_are_shared_by_those_that_use_them() -> None:
    rates = read_rates(f"{ALL} all_write=3MB/s all_read=100MB/s")
    found = predict(traffic(([1_500_000, 1_500_000, 0], [(0, FROM_FILES, 4_000_000, 1)])), rates, None)
    assert found.parts["write"].tolist() == [1, 1, 0] and found.parts["read"].tolist() == [1, 0, 0]
    alone = predict(traffic(([1_500_000, 0, 0], [])), rates, None)
    assert alone.parts["write"].tolist() == [0.75, 0, 0]


@pytest.mark.parametrize("name", ["read", "write", "memory", "bandwidth"])
def test_a_needed_rate_must_be_given(name: str) -> None:
    words = [word for word in ALL.split() if not word.startswith(f"{name}=")]
    moved = traffic(([1, 1], [(0, FROM_FILES, 1, 1), (0, 0, 1, 1), (0, 1, 1, 1)]))
    predict(moved, read_rates(ALL), None)
    with pytest.raises(UsageError, match=f"lacks {name}, which"):
        predict(moved, read_rates(" ".join(words)), None)
    # Rates that are not needed may be missing.
    predict(traffic(([0], [])), read_rates("start=1s"), None)


def test_an_axis_must_be_the_meshs() -> None:
    for mesh in (None, DeviceMesh((2,), ("tp",))):
        with pytest.raises(UsageError, match="the axis 'dp'"):
            predict(traffic(([0, 0], [(0, 1, 1, 1)])), read_rates(f"{ALL} dp.latency=1s"), mesh)
        # Reading only files needs no links.
        predict(traffic(([0, 0], [(0, FROM_FILES, 1, 1)])), read_rates(f"{ALL} dp.latency=1s"), mesh)


def test_rates_of_a_file_are_those_of_words(tmp_path) -> None:
    file = tmp_path / "link.toml"
    file.write_text('read = "4MB/s"\nstart = "3s"\n[tp]\nbandwidth = "1GiB/s"\n')
    found = read_rates(file)
    assert found == read_rates("read=4MB/s tp.bandwidth=1GiB/s start=3s")
    assert (found.read, found.write, found.start_seconds) == (4e6, None, 3.0)
    assert found.to_dict()["axes"] == {"tp": {"latency_seconds": 0.0, "bandwidth_nbytes_per_second": 2.0**30}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reed=1GB/s", "reed"),
        ("read=1GB", "read"),
        ("read=0GB/s", "read"),
        ("read=1GB/s read=2GB/s", "twice"),
        ("tp.read=1GB/s", "only links have axes"),
        ("start=1", "start"),
        ("nowhere.toml", "nowhere.toml"),
        ("", "cannot be read: nothing"),
        ("read = 2GB/s", "'read' has no value"),
        (".bandwidth=1GB/s", "bandwidth"),
        ("\0", "cannot be read"),
    ],
)
def test_invalid_rates_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read_rates(text)
    assert caught.value.next_step is not None
