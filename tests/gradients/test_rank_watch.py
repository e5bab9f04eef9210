"""Waits for collectives end when a rank's process has, on devices whose handles do not block the host, too."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from xrank.errors import RankFailedError, RankTimeoutError
from xrank.gradients.wire import RankWatch
from xrank.ranks.processes import Peer
from xrank.ranks.store import LocalStore

pytestmark = pytest.mark.timeout(60)


class Work:
    """A collective that is done after some looks, or never, or fails."""

    def __init__(self, num_looks: int | None = None, error: str = "") -> None:
        self.num_looks, self.error, self.waits = num_looks, error, 0

    def is_completed(self) -> bool:
        if self.num_looks is None:
            return False
        self.num_looks -= 1
        return self.num_looks < 0

    def wait(self, timeout: object = None) -> None:
        self.waits += 1
        if self.error or timeout is not None:
            raise RuntimeError(self.error or "Operation timed out!")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def watch_of(process: subprocess.Popen[bytes], store: LocalStore) -> RankWatch:
    """Return rank 0's watch of a world of two; the process is rank 1's."""
    return RankWatch(store, 0, [Peer.from_this_process(0), replace(Peer.from_this_process(1), pid=process.pid)])


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_wait_ends_when_a_rank_has_ended(process: subprocess.Popen[bytes], is_on_host: bool) -> None:
    store = LocalStore()
    watch = watch_of(process, store)
    done = Work(3)
    watch.wait(done, is_on_host=is_on_host)
    assert done.waits
    process.kill()
    begun = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 failed: its process ended without a report") as caught:
        watch.wait(Work(), is_on_host=is_on_host)
    assert caught.value.rank == 1 and caught.value.pid == process.pid
    assert time.monotonic() - begun < 10


def test_an_error_of_torch_is_explained_by_the_rank_that_ended(process: subprocess.Popen[bytes]) -> None:
    watch = watch_of(process, LocalStore())
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        watch.wait(Work(0, "Connection closed by peer"), is_on_host=True)
    with pytest.raises(RankTimeoutError, match="did not all come"):
        watch.wait(Work(0, "Timed out waiting 1000ms for recv operation to complete"), is_on_host=True)
    process.kill()
    with pytest.raises(RankFailedError, match="rank 1 failed"):
        watch.wait(Work(0, "Connection closed by peer"), is_on_host=True)


def test_the_first_death_is_named_whatever_a_rank_sees_itself(process: subprocess.Popen[bytes]) -> None:
    """A rank that raises because another died ends, too; a third rank that looks later must not name it."""
    store = LocalStore()
    watch = watch_of(process, store)
    record = '{"rank": 2, "host": "far", "pid": 7, "cause": "it died", "call": "a step", "id": "1", "absent": []}'
    store.claim(watch._name, record)
    process.kill()
    with pytest.raises(RankFailedError, match="rank 2 failed: it died"):
        watch.wait(Work(), is_on_host=True)
