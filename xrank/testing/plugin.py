"""The pytest plugin: ``@pytest.mark.ranks(4)`` runs a test's body as four real ranks.

    pytest_plugins = ["xrank.testing.plugin"]

    @pytest.mark.ranks(4)
    def test_sum(rank, world_size, tmp_path): ...

The body runs in processes of a session-wide `RankPool`, inside an initialized gloo world. Its parameters may be
``rank``, ``world_size``, test parameters, and fixtures whose values can be pickled, with one value for all ranks:
``tmp_path`` is shared. The marker also takes ``timeout_seconds``. A hang is an error with the stacks of the ranks.

The fixture ``virtual_cluster`` makes clusters of virtual devices, by default on threads of the test's process, so that
tests on them take milliseconds:

    def test_mean(virtual_cluster):
        run = virtual_cluster((2, 4)).run(lambda device, x: device.all_reduce(x, "y", reduction="mean"), np.ones(3))
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from xrank.errors import RankFailedError
from xrank.testing.rank_pool import MAX_RANKS, RankPool

if TYPE_CHECKING:
    from xrank.virtual.cluster import VirtualCluster
    from xrank.virtual.sharding import MeshLike

for _name in ("workspace_contract", "reader_contract"):
    if f"xrank.testing.{_name}" not in sys.modules:
        # A contract's failed assert then shows its values, as in the tests beside it.
        pytest.register_assert_rewrite(f"xrank.testing.{_name}")

_POOL = pytest.StashKey[RankPool]()
_OF_THIS_PROCESS = ("capfd", "capfdbinary", "caplog", "capsys", "capsysbinary", "monkeypatch", "recwarn", "request")
"""Fixtures that act on the test's own process, not on the ranks, whether or not their values can be pickled."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker. The pool starts ranks when a test needs them."""
    config.addinivalue_line(
        "markers", f"ranks(count, timeout_seconds=45): run the test's body as 1 to {MAX_RANKS} real gloo ranks"
    )
    config.stash[_POOL] = RankPool()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, before pytest checks for unclosed resources."""
    config.stash[_POOL].close()


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> RankPool:
    """Return the session's pool, for tests that run other functions on ranks."""
    return request.config.stash[_POOL]


@pytest.fixture
def virtual_cluster() -> Callable[..., VirtualCluster]:
    """Return a maker of `VirtualCluster`, by default with ``engine="in-process"`` and 30 seconds."""
    from xrank.virtual.cluster import VirtualCluster

    def make(mesh: MeshLike, *, engine: str = "in-process", timeout_seconds: float = 30.0, **options: Any) -> Any:
        return VirtualCluster(mesh, engine=engine, timeout_seconds=timeout_seconds, **options)

    return make


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Stand for the rank, which each rank's process provides."""
    _require_marker(request, "rank")
    yield -1


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks of the marker."""
    _require_marker(request, "world_size")
    return _read_marker(request.node.get_closest_marker("ranks"))[0]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test's body on the ranks instead of in this process."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    __tracebackhide__ = True  # a failure's report is of the ranks: pytest leaves this process' frames out
    count, timeout_seconds = _read_marker(marker)
    names = pyfuncitem._fixtureinfo.argnames
    parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    by_rank = tuple(name for name in ("rank", "world_size") if name in names and name not in parameters)
    values = {name: pyfuncitem.funcargs[name] for name in names if name not in by_rank}
    for name, value in values.items():
        _require_picklable(name, value)
    function = inspect.unwrap(pyfuncitem.obj)
    try:
        pyfuncitem.config.stash[_POOL].run_by_name(
            count,
            pyfuncitem.module.__name__,
            pyfuncitem.module.__file__,
            function.__qualname__,
            (),
            values,
            by_rank=by_rank,
            is_test=True,
            timeout_seconds=timeout_seconds,
        )
    except RankFailedError as error:
        # pytest's outcomes cannot be pickled, because they claim to be builtins: only their text arrives.
        if error.cause is not None and error.cause.startswith("Skipped: "):
            pytest.skip(error.cause.removeprefix("Skipped: "))
        raise
    return True


def _read_marker(marker: pytest.Mark) -> tuple[int, float]:
    def read(count: int, timeout_seconds: float = 45.0) -> tuple[int, float]:
        return count, timeout_seconds

    try:
        count, timeout_seconds = read(*marker.args, **marker.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"pytest.mark.ranks: {error}") from None
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_RANKS:
        raise pytest.UsageError(f"pytest.mark.ranks({count!r}): a pool has 1 to {MAX_RANKS} ranks")
    return count, timeout_seconds


def _require_marker(request: pytest.FixtureRequest, name: str) -> None:
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"the fixture {name!r} is for tests with @pytest.mark.ranks(n)", pytrace=False)


def _require_picklable(name: str, value: Any) -> None:
    reason = "it acts on this process, and the body runs in others" if name in _OF_THIS_PROCESS else None
    if reason is None:
        try:
            pickle.dumps(value)
        except Exception as error:
            reason = f"its value cannot be pickled ({error})"
    if reason is not None:
        pytest.fail(
            f"a test with @pytest.mark.ranks cannot take the fixture {name!r}: {reason}; "
            "create what the ranks need inside the body",
            pytrace=False,
        )
