"""Activates the rank pool for all tests, and reads how long they may take."""

import pytest

pytest_plugins = ["xrank.testing.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="try every seeded moment and repeat thousands of times")


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether there is time to try everything."""
    return request.config.getoption("soak")
