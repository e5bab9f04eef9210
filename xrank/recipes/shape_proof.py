"""Proof of shapes that no format records: they solve a recipe's symbolic shapes to one set of sizes, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["prove_shapes"]


def prove_shapes(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any] | None = None) -> str | None:
    """Return the name of a recipe whose symbolic shapes these solve to one set of sizes; None if no recipe knows them.

    For formats that record no global shapes, where these are inferred from the pieces that are there: a piece that is
    missing at the end of a tensor makes it shorter, and then its sizes contradict those of others: a norm of 56 against
    64 columns. The names may be Hugging Face's or a training framework's. Every layer that there is must be whole.

    Sizes that config says must be met. Without config, a size that nothing but rows say, such as the vocabulary, is
    believed where all others agree: a missing rank shortens them, too. A caller who can lose a piece of one tensor
    alone should ask for a config.

    Args:
        shapes: name -> inferred global shape, all tensors of the model.
        config: config.json's content, if it is known.

    Returns:
        The recipe's name, or None: no recipe knows all of the names, and nothing is proven. The caller then asks for
        ``--base-model`` or refuses.

    Raises:
        IncompleteError: a tensor is shorter than others or the config say, or is not there at all; both are named.
        ContradictionError: a tensor is longer than the config says, or no sizes solve the shapes.
    """
    raise NotImplementedError
