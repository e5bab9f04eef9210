"""Fitting: rates are recovered from their predictions."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tests.virtual.simulation.test_prediction import traffic
from xrank.errors import UsageError
from xrank.virtual.simulation.traffic import (
    FROM_FILES,
    NO_LIMIT,
    ConversionTraffic,
    Rates,
    Sample,
    fit_rates,
    predict,
    read_rates,
)


def exports() -> list[ConversionTraffic]:
    """Return exports of two ranks, of several sizes and shares in the other rank's memory."""
    found = []
    for number, (size, share) in enumerate(itertools.product((10**6, 10**7, 10**8), (0.1, 0.5, 0.9))):
        away, messages = int(size * share), 7 * number + 3
        rows = [(0, 1, away, messages), (1, 0, away, messages), (0, 0, size - away, 1), (1, 1, size - away, 1)]
        found.append(traffic(([size, size], rows), compared=[away * (number % 3)] * 2))
    return found


def test_rates_are_found_again() -> None:
    rates = read_rates("write=500MB/s memory=4GB/s bandwidth=800MB/s latency=20us start=200ms")
    found = fit_rates([Sample(each, predict(each, rates, None).seconds) for each in exports()])
    larger = traffic(([10**9] * 2, [(0, 1, 10**8, 10), (1, 0, 10**8, 10), (0, 0, 9 * 10**8, 1), (1, 1, 9 * 10**8, 1)]))
    assert predict(larger, found, None).seconds == pytest.approx(predict(larger, rates, None).seconds, rel=1e-6)
    assert found.start_seconds == pytest.approx(0.2) and found.read is None


def test_noise_does_not_make_nonsense() -> None:
    rates, noise = read_rates("write=500MB/s memory=4GB/s bandwidth=800MB/s start=200ms"), random.Random(7)
    samples = [Sample(each, predict(each, rates, None).seconds * noise.uniform(0.9, 1.1)) for each in exports()]
    found = fit_rates(samples)
    assert found.start_seconds >= 0 and found.link.latency_seconds >= 0
    for rate in (found.write, found.memory, found.link.link()[1]):
        assert rate is not None and rate > 0
    for sample in samples:
        assert predict(sample.traffic, found, None).seconds == pytest.approx(sample.seconds, rel=0.2)


def test_free_work_has_no_limit_and_unused_rates_are_unknown() -> None:
    each = [traffic(([0], [(0, FROM_FILES, size, 1)])) for size in (10**6, 10**7)]
    found = fit_rates([Sample(one, predict(one, Rates(read=1e8), None).seconds) for one in each])
    assert found.read == pytest.approx(1e8) and found.write is None and found.memory is None
    flat = fit_rates([Sample(one, 2.0) for one in each])
    assert flat.start_seconds == pytest.approx(2) and (flat.read or 0) >= 1e15
    assert np.isfinite(NO_LIMIT) and Rates(read=NO_LIMIT).to_dict()["read_nbytes_per_second"] is None


@pytest.mark.parametrize("samples", [[], [Sample(traffic(([1], [])), 0.0)]], ids=["none", "no time"])
def test_samples_need_positive_times(samples: list[Sample]) -> None:
    with pytest.raises(UsageError, match="measured times"):
        fit_rates(samples)
