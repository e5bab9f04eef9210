"""Activates the rank pool for all tests, and reads how long they may take."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# A shell's background job ignores Ctrl-C, and so would every program that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes any example slow, and a slow one is no failure: the time limit of the whole test is.
hypothesis.settings.register_profile(
    "xrank", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.register_profile("sample", hypothesis.settings.get_profile("xrank"), max_examples=25)

pytest_plugins = ["xrank.testing.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="try every seeded moment and repeat thousands of times")
    parser.addoption("--sample", action="store_true", help="repeat as little as make test does, in slow tests too")
    parser.addoption("--seed", type=int, help="of the mixed gathers, to repeat what a soak found")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("xrank" if runs_in_full(config) else "sample")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a quick test before they are imported: that alone would take longer than the tests."""
    if config.option.markexpr != "quick" or collection_path.suffix != ".py":
        return None
    return "mark.quick" not in collection_path.read_text() or None


def runs_in_full(config: pytest.Config) -> bool:
    """Return whether tests repeat all they can; with --sample or -m, as in `make test`, they take a sample."""
    return bool(config.option.soak or not (config.option.sample or config.option.markexpr))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give ranks the time that a busy machine takes; one that hangs is still told before the test's own limit.

    Tests of more than four ranks are slow: each rank is an interpreter that imports torch.
    """
    if config.option.sample:
        left_out = [item for item in items if item.get_closest_marker("repeats")]
        items[:] = [item for item in items if not item.get_closest_marker("repeats")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        marker = item.get_closest_marker("ranks")
        if marker is not None and marker.args[:1] > (4,):
            item.add_marker(pytest.mark.slow)
        if marker is not None and "timeout_seconds" not in marker.kwargs:
            item.add_marker(pytest.mark.ranks(*marker.args, timeout_seconds=150), append=False)


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether there is time to try everything."""
    return request.config.getoption("soak")


@pytest.fixture(scope="session")
def in_full(request: pytest.FixtureRequest) -> bool:
    """Whether tests repeat all they can, as in `make test-all`, or a sample is enough."""
    return runs_in_full(request.config)


@pytest.fixture(scope="session")
def every(in_full: bool) -> int:
    """How many calls lie between two of those at which work is killed, or fails."""
    return 1 if in_full else 9


@pytest.fixture(scope="module", autouse=True)
def settled() -> Iterator[None]:
    """Let no collection look at what was there before a module's tests: torch, transformers, thousands of tests.

    Many tests collect, to see that they leave nothing: half a second each in a process that has imported all that.
    What was garbage is gone first, and what the tests themselves make is collected as ever.
    """
    gc.collect()
    gc.freeze()
    yield
