"""A trainer rank's share of the tensors that a caller's function transforms: it makes them whole, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from xrank.decisions.options import default_workers
from xrank.decisions.transformed_plan import TransformedTensor, Transforms
from xrank.decisions.transforms import apply_transform
from xrank.lending.peer_source import PeerSource
from xrank.making.whole_tensors import WholeTensors
from xrank.plan.executor import Budget

if TYPE_CHECKING:
    import torch

_BUFFERS_NBYTES = 16_000_000


class TransformedPart:
    """Transforms this rank's share of the tensors at each step.

    Args:
        transforms: the transforms of the whole model.
        own: those of this rank.
        outputs: name -> tensor that receives the output, and is lent.
    """

    def __init__(self, transforms: Transforms, own: list[TransformedTensor], outputs: dict[str, torch.Tensor]) -> None:
        self._transforms, self._own, self._outputs = transforms, own, outputs

    def fill(self, source: PeerSource) -> None:
        """Fill the outputs from all ranks' present values.

        Args:
            source: reads the tensors of all ranks in place.

        Raises:
            XrankError: as `apply_transform`, or a rank has failed.
        """
        budget = Budget.from_memory(_BUFFERS_NBYTES, default_workers())
        whole = WholeTensors(self._transforms.sources, source, budget)
        for tensor in self._own:
            (made,) = whole.make([tensor.number])
            results = apply_transform(self._transforms.function, tensor.name, made, tensor.outputs)
            for output, result in zip(tensor.outputs, results, strict=True):
                self._outputs[output.name].copy_(result.detach())


def list_own(transforms: Transforms, position: int, size: int) -> list[TransformedTensor]:
    """Return the tensors that the rank at a position transforms: about equal bytes for each rank."""
    loads = [0] * size
    own = []
    for tensor in sorted(transforms.tensors, key=lambda one: -transforms.sources.files[one.number].output.nbytes):
        least = loads.index(min(loads))
        loads[least] += transforms.sources.files[tensor.number].output.nbytes
        if least == position:
            own.append(tensor)
    return own


def find_dropped(transforms: Transforms, names: list[str], ties: dict[str, str]) -> Iterator[str]:
    """Yield the names of tensors that a transform replaces or leaves out.

    Args:
        transforms: the transforms.
        names: all tensors of the model.
        ties: tied name -> name.
    """
    replaced = {tensor.name for tensor in transforms.tensors}
    copied = set(transforms.order) - replaced
    for name in names:
        if name not in copied and ties.get(name) not in copied:
            yield name
