import pytest
import torch
from torch import nn

from tests.gradients.planned_modules import MarkedParameter, module_of
from xrank.errors import GradientError
from xrank.gradients import GradientConfig, GradientPlan
from xrank.gradients.agreement import agreement_lines, check_lines
from xrank.layout import DeviceMesh
from xrank.layout.mesh import megatron_views

MESH = DeviceMesh((2,), ("dp",))


def lines_of(module: nn.Module, rank: int, **options) -> tuple[str, ...]:
    return agreement_lines(GradientPlan.from_module(module, MESH, GradientConfig(**options), rank))[0, 1]


def difference(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, str]:
    with pytest.raises(GradientError, match="ranks 0 and 1 do not lay out the same gradients") as caught:
        check_lines({1: second, 0: first})
    assert caught.value.rank == 1 and caught.value.next_step
    return caught.value.got.removeprefix("on rank 1: "), caught.value.want.removeprefix("as on rank 0: ")


def test_equal_modules_agree():
    check_lines({rank: lines_of(nn.Linear(2, 3), rank) for rank in (0, 1)})


def test_the_first_difference_is_shown():
    frozen = nn.Linear(2, 3)
    frozen.bias.requires_grad = False
    got, want = difference(lines_of(nn.Linear(2, 3), 0), lines_of(frozen, 1))
    assert (got, want) == ("weight of shape (3, 2)", "bias of shape (3,)")
    # Equal sizes, other shapes.
    got, want = difference(lines_of(nn.Linear(2, 3, bias=False), 0), lines_of(nn.Linear(3, 2, bias=False), 1))
    assert got == "weight of shape (2, 3)" and want == "weight of shape (3, 2)"
    got, want = difference(lines_of(nn.Linear(2, 3), 0), lines_of(nn.Linear(2, 3, dtype=torch.float64), 1))
    assert "torch.float64" in got and "torch.float32" in want
    got, want = difference(lines_of(nn.Linear(2, 3), 0), lines_of(nn.Linear(2, 3), 1, check_for_nan_in_grad=True))
    assert "check_for_nan_in_grad=True" in got and "check_for_nan_in_grad=False" in want
    assert difference(("a", "b"), ("a",)) == ("nothing more", "b")
    assert difference((), ("a",)) == ("a", "nothing more")


@pytest.mark.parametrize("sharded", [False, True])
def test_later_reductions_are_among_the_lines_of_their_ranks(sharded):
    views = megatron_views(8, tp=2, pp=2)
    told = [MarkedParameter("word", 5), MarkedParameter("copy", 4), MarkedParameter("cut", 3)]
    lines = agreement_lines(
        GradientPlan.from_module(
            module_of(told, views, 0), views, GradientConfig(use_distributed_optimizer=sharded), rank=0
        )
    )
    assert set(lines) == {(0, 2), (0, 4), (0, 1)}
    assert lines[0, 4] == (f"a word parameter, sum over ('pp',): elements 0 to {6} of shape (6,) in torch.float32",)
    assert lines[0, 1] == ("copy_1, sum over ('tp',): elements 0 to 4 of shape (4,) in torch.float32",)
