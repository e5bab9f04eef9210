"""A source as it was read, its model's config, and the recipe that would give its tensors Hugging Face's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xrank.decisions.base_model import BaseModel, read_config
from xrank.decisions.recipe_choice import choose_recipe, follow_recipe
from xrank.decisions.selection import embedding_of
from xrank.errors import UsageError
from xrank.layout import LayoutMap
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints, Reader
from xrank.readers.checkpoint_folders import checkpoint_folders
from xrank.readers.discovery import find_source
from xrank.readers.own_readers import WORKSPACE
from xrank.recipes.shape_proof import prove_shapes
from xrank.writers.companions import Companion, companions_in

__all__ = ["NamedSource", "companions_of", "read_found", "read_source"]


@dataclass(frozen=True, slots=True, eq=False)
class NamedSource:
    """A source under its own names."""

    model: StoredModel
    config: Mapping[str, Any] | None
    """The model's config.json: the one beside the source, the base model's, or the one in the source."""
    config_path: str | None
    """Where it lies, if it is a file."""
    companions: tuple[Companion, ...]
    """Beside the source."""
    notes: tuple[tuple[str, str], ...] = ()
    """Which of several companions of a name was taken."""

    def renamed(self, config: Mapping[str, Any] | None = None) -> StoredModel:
        """Return the model under Hugging Face's names; as it is, if no recipe is needed.

        Args:
            config: in place of one that the source has not.

        Raises:
            UsageError: what `choose_recipe` raises, or nothing says a size.
            ContradictionError, IncompleteError, LayoutError: as `follow_recipe`.
        """
        known = self.config or config
        found = choose_recipe(self.model, known, None)
        return self.model if found is None else follow_recipe(self.model, found, known)

    def renamed_if_clear(self) -> StoredModel:
        """Return the same, and the model under its own names where the user would have to make a choice first."""
        try:
            return self.renamed()
        except UsageError:
            return self.model


def read_source(path: str, *, base: BaseModel | None = None, layouts: LayoutMap | None = None) -> NamedSource:
    """Read what lies at a path, from metadata alone. Errors are those of `find_source` and of readers."""
    place, reader = find_source(path)
    return read_found(path, place, reader, base=base, layouts=layouts)


def read_found(
    asked: str,
    place: str,
    reader: Reader,
    *,
    base: BaseModel | None = None,
    layouts: LayoutMap | None = None,
    is_left_out: Callable[[str], bool] | None = None,
    for_layouts: bool = False,
    beside: tuple[tuple[Companion, ...], tuple[tuple[str, str], ...]] | None = None,
) -> NamedSource:
    """Read what lies where it was found, by its reader.

    Args:
        asked: what the user gave.
        place: where it was found.
        reader: of its format.
        base: tells whole shapes, and the config where none lies beside the source.
        layouts: for tensors that record none.
        is_left_out: whether the caller will leave a tensor out, so that it need not be placed.
        for_layouts: whether what ranks say of their layouts is wanted, and their config is not.
        beside: what `companions_of` gave, where the caller has it; None: it is asked for here.
    """
    companions, notes = companions_of(asked, place, reader) if beside is None else beside
    candidates = (*companions, *(base.companions if base is not None else ()))
    config_path = next((companion.path for companion in candidates if companion.name == "config.json"), None)
    config = read_config(config_path) if config_path is not None else None
    hints = Hints(
        layouts=layouts,
        shapes={name: shape for name, (_, shape) in base.tensors.items()} if base is not None else {},
        tied_to=lambda name: embedding_of(name, base.tensors if base is not None else (), config),
        is_left_out=is_left_out,
        needs_config=config_path is None and not for_layouts,
        needs_layouts=for_layouts,
        prove_shapes=lambda shapes: prove_shapes(shapes, config),
    )
    model = reader.read(place, hints)
    return NamedSource(model, config if config_path is not None else model.config, config_path, companions, notes)


def companions_of(asked: str, place: str, reader: Reader) -> tuple[tuple[Companion, ...], tuple[tuple[str, str], ...]]:
    """Return the companions of what was found at a place, and notes on those that were not taken.

    Raises:
        IncompleteError: one is a link to nothing.
    """
    # The states of a workspace hold a config, which one in a folder above does not overrule.
    folders = (
        (place, os.path.join(place, "huggingface"))
        if reader.name == WORKSPACE.name
        else checkpoint_folders(asked, place)
    )
    found, others = companions_in(folders)
    return found, tuple(("companion", text) for text in others)
