"""Each class of torch.nn, with each dim of its parameters cut, computes and trains as the whole module does."""

import pytest
from torch import nn

from tests.distribution.every_module import LEFT_OUT, WITH_PARAMETERS, WITHOUT_PARAMETERS
from tests.distribution.whole_results import check_all

EXAMPLES = WITH_PARAMETERS | WITHOUT_PARAMETERS


def test_every_class_of_torch_nn_has_an_example():
    classes = {name for name, value in vars(nn).items() if isinstance(value, type) and not name.startswith("Lazy")}
    assert classes - set(EXAMPLES) - set(LEFT_OUT) == set()


@pytest.mark.ranks(2, timeout_seconds=120)
@pytest.mark.parametrize(("shape", "axis"), [((1, 2), "model"), pytest.param((2, 1), "batch", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_on_two_ranks(shape, axis):
    check_all(EXAMPLES, shape, axis)


def pytest_generate_tests(metafunc):
    """Give the axes of two by two ranks: all in `make soak`, else both at once, which cuts along either."""
    if metafunc.function is test_on_two_by_two_ranks:
        alone = ["model", "batch"] if metafunc.config.getoption("soak") else []
        metafunc.parametrize("axis", [*alone, "model/~batch"])


@pytest.mark.ranks(4, timeout_seconds=120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_on_two_by_two_ranks(axis):
    check_all(EXAMPLES, (2, 2), axis)
