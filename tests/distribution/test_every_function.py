"""Each function that models apply to parameters gives the whole result where a dim of the parameters is cut."""

from pathlib import Path

import pytest
from torch import nn

from tests.distribution.every_function import FUNCTIONAL, OPERATIONS
from tests.distribution.test_every_module import EXAMPLES as CLASSES
from tests.distribution.whole_results import check_all

EXAMPLES = FUNCTIONAL | OPERATIONS


@pytest.mark.ranks(2, timeout_seconds=120)
@pytest.mark.parametrize(("shape", "axis"), [((1, 2), "model"), pytest.param((2, 1), "batch", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_on_two_ranks(shape, axis):
    check_all(EXAMPLES, shape, axis)


@pytest.mark.ranks(4, timeout_seconds=120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_on_two_by_two_ranks():
    check_all(EXAMPLES, (2, 2), "model/~batch")


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="the page counts the classes of torch 2.13")
@pytest.mark.filterwarnings("ignore")
def test_page_gives_the_counts_of_the_examples():
    page = (Path(__file__).parents[2] / "docs" / "keras-distribution.md").read_text()
    for examples in (CLASSES, FUNCTIONAL, OPERATIONS):
        dims = [max((parameter.ndim for parameter in make().parameters()), default=0) for make, _ in examples.values()]
        assert f"| {len(examples)} | {sum(dims)} | {sum(dims)} | 0 | 0 |" in page
