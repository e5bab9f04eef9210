"""Models, and how a model is trained: whole in one process, or laid out over ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional


class Perceptron(nn.Module):
    """Two dense layers, one cut by its outputs and one by its inputs, a norm that is on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])
        self.norm = nn.LayerNorm(8)
        self.register_buffer("offset", torch.linspace(0, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense[1](functional.relu(self.dense[0](self.norm(x)) + self.offset))


PERCEPTRON_RULES = {
    "dense.0.weight": ("model", None),
    "dense.0.bias": ("model",),
    "dense.1.weight": (None, "model"),
}


class Decoder(nn.Module):
    """A small language model: tied embeddings, attention with a mask made on the way, positions, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.position = nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(length))
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2) / 2).masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(-2))
        return self.head(x + self.down(functional.silu(self.gate(x)) * self.up(x)))


DECODER_RULES = {
    "[qkv].weight": ("model", None),
    "o.weight": (None, "model"),
    "(gate|up).weight": ("model", None),
    "(gate|up).bias": ("model",),
    "down.weight": (None, "model"),
}


def perceptron_batches(count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(7)
    return [(torch.randn(size, 8, generator=random), torch.randn(size, 4, generator=random)) for _ in range(count)]


def decoder_batches(count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(8)
    tokens = [torch.randint(0, 32, (size, 7), generator=random) for _ in range(count)]
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches, loss_of) -> list[torch.Tensor]:
    """Take a step a batch and return the losses."""
    losses = []
    for inputs, targets in batches:
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def take_part(batches, num_parts: int, part: int):
    return [tuple(tensor.chunk(num_parts)[part] for tensor in batch) for batch in batches]


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def assert_same_state(model: nn.Module, reference: nn.Module) -> None:
    found, wanted = whole_state(model), reference.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
