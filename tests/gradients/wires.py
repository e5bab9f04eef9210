"""Wires that record sent tensors, and small modules whose gradients one process can compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xrank.errors import GradientError
from xrank.gradients.wire import Combination


class Small(torch.nn.Module):
    """A few layers, the second with a parameter that only some calls use."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(width)
        self.extra = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(self.extra(x) if use_extra else x)


def make_module(width: int = 8, depth: int = 3, dtype: torch.dtype = torch.float32) -> Small:
    """Return a module, the same on every rank."""
    torch.manual_seed(7)
    return Small(width, depth).to(dtype)


def batch_of(rows: int = 16, width: int = 8) -> torch.Tensor:
    """Return the whole batch."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(11))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """Return the mean over rows of something that no gradient of is zero."""
    weights = torch.linspace(-1.0, 2.0, out.shape[-1], dtype=out.dtype)
    return (out * weights).sin().sum(-1).mean()


def mean_gradients(module: torch.nn.Module, batch: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of one process that sees the whole batch."""
    loss_of(module(batch, **options)).backward()
    return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in module.named_parameters()}


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective, as it was asked for."""

    kind: str
    start: int
    """In elements from the start of the tensor's memory."""
    numel: int
    ranks: tuple[int, ...]
    how: str


class RecordingWire:
    """A wire to ranks with the same values as this one. A collective takes effect when its handle is waited for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.outstanding: list[Sent] = []
        self.most_outstanding = 0

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], how: Combination) -> Later:
        """Add as many of the same as there are ranks."""
        return self._send("all_reduce", tensor, ranks, how, lambda: _combine(tensor, ranks, how))

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...], how: Combination
    ) -> Later:
        """Add, and spoil what is not this rank's."""

        def act() -> None:
            own = shard.clone()
            whole.fill_(float("nan"))
            shard.copy_(own)
            _combine(shard, ranks, how)

        return self._send("reduce_scatter", whole, ranks, how, act)

    def all_to_all(self, received: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Later:
        """Receive the same from all."""
        return self._send("all_to_all", whole, ranks, "", lambda: received.copy_(whole))

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, ranks: tuple[int, ...]) -> Later:
        """Put this rank's part into every place."""
        return self._send("all_gather", whole, ranks, "", lambda: whole.copy_(shard.clone().repeat(len(ranks))))

    def broadcast(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Later:
        """Send what is the same."""
        return self._send("broadcast", tensor, ranks, "", lambda: None)

    def exchange(self, text: str, ranks: tuple[int, ...]) -> Mapping[int, str]:
        """Hear the same from all."""
        return dict.fromkeys(ranks, text)

    def buckets(self, kind: str = "all_reduce") -> list[tuple[int, int]]:
        """Return where buckets started, in elements, and how long they were, in the order in which they were sent."""
        return [(sent.start, sent.numel) for sent in self.sent if sent.kind == kind and sent.how != "max"]

    def _send(
        self, kind: str, tensor: torch.Tensor, ranks: tuple[int, ...], how: str, act: Callable[[], object]
    ) -> Later:
        sent = Sent(kind, tensor.storage_offset(), tensor.numel(), ranks, how)
        self.sent.append(sent)
        self.outstanding.append(sent)
        self.most_outstanding = max(self.most_outstanding, len(self.outstanding))
        return Later(self, sent, act)


class Later:
    """A handle that acts when it is waited for, which it may be once."""

    def __init__(self, wire: RecordingWire, sent: Sent, act: Callable[[], object]) -> None:
        self._wire, self._sent, self._act = wire, sent, act

    def wait(self) -> None:
        """Act."""
        index = next(i for i, sent in enumerate(self._wire.outstanding) if sent is self._sent)
        del self._wire.outstanding[index]
        self._act()


def _combine(tensor: torch.Tensor, ranks: tuple[int, ...], how: str) -> None:
    if how == "sum":
        tensor.mul_(len(ranks))


def assert_raises_everywhere(call: Callable[[], Any]) -> GradientError:
    """Return the error that a call raises, the same on all ranks."""
    with pytest.raises(GradientError) as caught:
        call()
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, [str(caught.value), caught.value.tensor, *caught.value.__notes__])
    assert texts == [texts[0]] * len(texts)
    return caught.value
