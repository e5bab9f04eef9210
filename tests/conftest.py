"""Activates the rank pool for all tests, and reads how long they may take."""

import hypothesis
import pytest

# A busy machine makes any example slow, and a slow one is no failure: the time limit of the whole test is.
hypothesis.settings.register_profile(
    "xrank", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("xrank")

pytest_plugins = ["xrank.testing.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="try every seeded moment and repeat thousands of times")


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether there is time to try everything."""
    return request.config.getoption("soak")
