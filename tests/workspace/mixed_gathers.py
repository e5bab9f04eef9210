"""Mixed gathers drawn from a seed: the ranks and values of each, the planned failures, and the expected results.

Every rank draws the same, so that who receives knows each byte; of all bytes there is one pool, also the seed's.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NUM_RANKS = 4
_POOL_NBYTES = 12 << 20
_MAX_NBYTES = 8 << 20
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)


class Color(enum.Enum):
    """Levels of a config."""

    RED = 1
    BLUE = 2


@dataclass
class Config:
    """A config with whatever may be in one."""

    name: str
    weight: torch.Tensor | None
    items: list[Any]
    color: Color
    path: Path


class Pool:
    """Bytes that all ranks have alike."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self._bytes = torch.randint(0, 256, (_POOL_NBYTES,), generator=made, dtype=torch.uint8)
        self._bools = (self._bytes & 1).bool()

    def sum(self) -> int:
        """Return what changes if anyone writes to it."""
        return int(self._bytes.view(torch.int64).sum()) ^ int(self._bools.sum())

    def tensor(self, chosen: random.Random, nbytes: int) -> torch.Tensor:
        """Return a tensor of about so many bytes of the pool: of any dtype, shape and strides."""
        dtype = chosen.choice(_DTYPES)
        width = dtype.itemsize
        count = nbytes // width
        start = chosen.randrange((_POOL_NBYTES - _MAX_NBYTES) // 64) * 64
        if dtype is torch.bool:
            flat = self._bools[start : start + count]
        else:
            flat = self._bytes[start : start + count * width].view(dtype)
        how = chosen.randrange(6)
        if count < 4 or how == 0:
            return flat.reshape(()) if count == 1 and how == 0 else flat
        rows = chosen.choice((1, 2, 3, 5, 16))
        if how == 1:
            return flat[: count // rows * rows].view(rows, -1).t()
        if how == 2:
            return flat[:: chosen.choice((2, 3))]
        if how == 3:
            return flat[: count // rows * rows].view(rows, 1, -1)[:, :, 1:]
        if how == 4 and nbytes < 1 << 16:
            return flat.view(1, -1).expand(3, -1)
        return flat[: count // rows * rows].view(rows, -1)


def _nbytes(chosen: random.Random) -> int:
    """Return a size: mostly small, some of the arena's, few large."""
    kind = chosen.random()
    if kind < 0.1:
        return 0
    most = 12 if kind < 0.75 else 17 if kind < 0.97 else 20 if kind < 0.995 else 23
    return int(2 ** chosen.uniform(0, most))


@dataclass(frozen=True)
class Plan:
    """One gather, as all ranks draw it."""

    number: int | str
    ranks: tuple[int, ...]
    is_config: bool
    early: tuple[bool, ...]
    """By rank."""
    is_through_directory: bool
    inner: tuple[int, ...] | None
    """Ranks of a gather in its body."""
    raises: int | None
    """The rank whose body raises."""

    @classmethod
    def draw(cls, seed: int, number: int, lists: list[tuple[int, ...]]) -> Plan:
        """Draw the number-th gather among these lists of ranks."""
        chosen = random.Random(f"{seed} {number}")
        ranks = chosen.choice(lists)
        raises = chosen.choice(ranks) if chosen.random() < 0.01 else None
        return cls(
            number,
            ranks,
            chosen.random() < 0.3,
            tuple(chosen.random() < 0.3 and raises is None for _ in range(NUM_RANKS)),
            chosen.random() < 0.03,
            chosen.choice(lists) if chosen.random() < 0.05 and raises is None else None,
            raises,
        )

    @classmethod
    def further(cls, seed: int, number: str, lists: list[tuple[int, ...]]) -> Plan:
        """Draw a gather of all ranks that lasts until a rank is killed, without other failures."""
        chosen = random.Random(f"{seed} {number}")
        early = tuple(chosen.random() < 0.3 for _ in range(NUM_RANKS))
        return cls(number, chosen.choice(lists), chosen.random() < 0.3, early, False, None, None)

    def value(self, pool: Pool, seed: int, rank: int, part: str = "") -> Any:
        """Return what a rank gives."""
        kind = random.Random(f"{seed} {self.number} {part}")
        chosen = random.Random(f"{seed} {self.number} {rank} {part}")

        def tensor() -> torch.Tensor:
            return pool.tensor(chosen, _nbytes(chosen))

        if not self.is_config:
            way = kind.randrange(6)
            if way == 0:
                return None if chosen.random() < 0.5 else tensor()
            if way == 1:
                return {f"{i}.weight": tensor() if chosen.random() < 0.9 else None for i in range(chosen.randrange(20))}
            if way == 2:
                return [tensor() if chosen.random() < 0.9 else None for _ in range(chosen.randrange(6))]
            return tensor()
        way = kind.randrange(3)
        if way == 0:
            items = [chosen.random(), chosen.getrandbits(60), None, {"dtype": torch.bfloat16, 3: (tensor(), "é" * 9)}]
            return Config(f"of {rank}", tensor(), items, chosen.choice(list(Color)), Path(f"some/{rank}"))
        if way == 1:
            return {"rank": rank, "deep": [[[{"weight": tensor()}]]], "text": "x" * int(2 ** chosen.uniform(0, 16))}
        return chosen.choice((None, rank, "text", [], {}, (1, 2.5, True)))


def differs(got: Any, want: Any) -> str:
    """Return what is not as it should be; "" where all is, to the last byte."""
    if type(got) is not type(want):
        return f"{type(got)} for {type(want)}"
    if isinstance(want, torch.Tensor):
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            return f"{got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}"
        same = torch.equal(_bytes(got), _bytes(want))
        return "" if same else f"wrong bytes in {want.dtype} {tuple(want.shape)} of strides {want.stride()}"
    if isinstance(want, Config):
        return differs(vars(got), vars(want))
    if isinstance(want, dict):
        if list(got) != list(want):
            return f"keys {list(got)} for {list(want)}"
        return next(filter(None, (differs(got[key], item) for key, item in want.items())), "")
    if isinstance(want, list | tuple):
        if len(got) != len(want):
            return f"{len(got)} items for {len(want)}"
        return next(filter(None, map(differs, got, want)), "")
    return "" if got == want else f"{got!r} for {want!r}"[:200]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def lists_of(chosen: random.Random, count: int) -> list[tuple[int, ...]]:
    """Draw lists of ranks; the first are of all ranks, each of another first one."""
    lists = [tuple((first + rank) % NUM_RANKS for rank in range(NUM_RANKS)) for first in range(NUM_RANKS)]
    while len(lists) < count:
        ranks = tuple(chosen.sample(range(NUM_RANKS), chosen.choice((2, 3, 4))))
        lists += [ranks] if ranks not in lists else []
    return lists
