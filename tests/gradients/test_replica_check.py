"""Digests of replicas: of the bits of tensors of any shape and strides."""

import torch

from xrank.gradients.comparisons import _digest


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


def test_a_digest_is_of_values_that_are_yet_to_be_conjugated_or_negated() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert _digest(value.conj()) == _digest(torch.tensor([1 - 2j, 3 + 4j])) != _digest(value)
    assert _digest(value.conj().imag) == _digest(torch.tensor([-2.0, 4.0]))
