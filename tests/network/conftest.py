"""Mounts of network file systems, made once per session; each test gets a directory of its own on them."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.network.mounts import FILE_SYSTEMS, MissingError, TwoMounts, mount_twice

_numbers = itertools.count()


@pytest.fixture(scope="session", params=FILE_SYSTEMS)
def network_file_system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoMounts]:
    """Mount the file system's root twice, or skip where this machine cannot."""
    try:
        with mount_twice(request.param, tmp_path_factory.mktemp(request.param)) as mounts:
            yield mounts
    except MissingError as error:
        pytest.skip(f"{request.param}: {error}")


@pytest.fixture
def two_mounts(network_file_system: TwoMounts) -> TwoMounts:
    """Return a new directory as two hosts see it, one for each of two ranks: ``paths[rank]``."""
    # Neither host has ever asked for this name, so neither can remember that it was absent.
    name = f"test-{next(_numbers)}"
    (network_file_system.paths[0] / name).mkdir()
    first, second = network_file_system.paths
    return replace(network_file_system, paths=(first / name, second / name), served=network_file_system.served / name)
