"""The pytest plugin: ``@pytest.mark.ranks(4)`` runs a test's body as four real ranks.

    pytest_plugins = ["xrank.testing.plugin"]

    @pytest.mark.ranks(4)
    def test_sum(rank, world_size, tmp_path): ...

The body runs in processes of a session-wide `RankPool`, inside an initialised gloo world. It gets its ``rank`` and
``world_size`` where it asks for them, parameters, and fixtures whose values can be pickled, one value for all ranks:
``tmp_path`` is shared. The marker takes ``timeout_seconds`` too; a hang is an error that says where each rank stands.

The fixture ``virtual_cluster`` makes clusters of virtual devices, on threads of the test's process if nothing else is
said, so that what a test does on them costs milliseconds:

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
    from xrank.virtual.mesh import MeshLike

__all__ = ["rank", "rank_pool", "virtual_cluster", "world_size"]

for _name in ("workspace_contract", "message_contract", "reader_contract"):
    if f"xrank.testing.{_name}" not in sys.modules:
        # So that a contract's failed assert shows its values, as those of the tests beside it do.
        pytest.register_assert_rewrite(f"xrank.testing.{_name}")

_POOL = pytest.StashKey[RankPool]()
_OF_THIS_PROCESS = ("capfd", "capfdbinary", "caplog", "capsys", "capsysbinary", "monkeypatch", "recwarn", "request")
"""Fixtures that act on the process of the test, not on its ranks', whether or not they can be pickled."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; the pool starts ranks when a test asks for them."""
    config.addinivalue_line(
        "markers", f"ranks(count, timeout_seconds=45): run the test's body as 1 to {MAX_RANKS} real gloo ranks"
    )
    config.stash[_POOL] = RankPool()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, before pytest looks for what nobody closed."""
    config.stash[_POOL].close()


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> RankPool:
    """Return the session's pool, for tests that run functions of their own on ranks."""
    return request.config.stash[_POOL]


@pytest.fixture
def virtual_cluster() -> Callable[..., VirtualCluster]:
    """Return what makes a `VirtualCluster` of its arguments; ``engine="in-process"`` and 30 seconds if not told."""
    from xrank.virtual.cluster import VirtualCluster

    def make(mesh: MeshLike, *, engine: str = "in-process", timeout_seconds: float = 30.0, **options: Any) -> Any:
        return VirtualCluster(mesh, engine=engine, timeout_seconds=timeout_seconds, **options)

    return make


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Stand for the rank, which each rank is told in its own process."""
    _demand_marker(request, "rank")
    yield -1


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks that the marker asks for."""
    _demand_marker(request, "world_size")
    return _read_marker(request.node.get_closest_marker("ranks"))[0]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test's body on the ranks instead of here."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    count, timeout_seconds = _read_marker(marker)
    names = pyfuncitem._fixtureinfo.argnames
    parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    told = tuple(name for name in ("rank", "world_size") if name in names and name not in parameters)
    values = {name: pyfuncitem.funcargs[name] for name in names if name not in told}
    for name, value in values.items():
        _demand_picklable(name, value)
    function = inspect.unwrap(pyfuncitem.obj)
    try:
        pyfuncitem.config.stash[_POOL].run_by_name(
            count,
            pyfuncitem.module.__name__,
            pyfuncitem.module.__file__,
            function.__qualname__,
            (),
            values,
            told=told,
            is_test=True,
            timeout_seconds=timeout_seconds,
        )
    except RankFailedError as error:
        # pytest's outcomes say that they are builtins, so they cannot be pickled: their text tells.
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


def _demand_marker(request: pytest.FixtureRequest, name: str) -> None:
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"the fixture {name!r} is for tests with @pytest.mark.ranks(n)", pytrace=False)


def _demand_picklable(name: str, value: Any) -> None:
    reason = "it acts on this process, and the body runs in others" if name in _OF_THIS_PROCESS else None
    if reason is None:
        try:
            pickle.dumps(value)
        except Exception as error:
            reason = f"its value cannot be pickled ({error})"
    if reason is not None:
        pytest.fail(
            f"a test with @pytest.mark.ranks cannot take the fixture {name!r}: {reason}; "
            "build what the ranks need inside the body",
            pytrace=False,
        )
