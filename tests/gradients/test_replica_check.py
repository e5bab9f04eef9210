"""What ranks tell of their replicas: digests of bits, of tensors of any shape and strides."""

import torch

from xrank.gradients.checking.replica_check import _digest


def test_a_digest_is_of_the_elements_alone() -> None:
    base = torch.arange(6.0)
    for tensor in (
        torch.tensor(4.0),
        base[4:5],
        base[4::2],
        base.view(2, 3)[1:, 1::2],
    ):  # one element, strides of all kinds
        assert _digest(tensor) == _digest(torch.tensor([4.0])) != _digest(torch.tensor([5.0]))
    assert _digest(base[::2]) == _digest(torch.tensor([0.0, 2.0, 4.0]))
