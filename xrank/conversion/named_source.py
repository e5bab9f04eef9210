"""A source as it was read, its model's config, and the recipe that would give its tensors Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xrank.conversion.base_model import BaseModel, read_config
from xrank.conversion.gather_plan import companions_beside
from xrank.conversion.recipe_choice import choose_recipe, follow_recipe
from xrank.errors import UsageError
from xrank.layout import LayoutMap
from xrank.plan.source import StoredModel
from xrank.readers.base import Hints, Reader
from xrank.readers.discovery import find_source
from xrank.recipes.shape_proof import prove_shapes
from xrank.writers.companions import Companion

__all__ = ["NamedSource", "read_found", "read_source"]


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
    return read_found(place, reader, base=base, layouts=layouts)


def read_found(
    place: str, reader: Reader, *, base: BaseModel | None = None, layouts: LayoutMap | None = None
) -> NamedSource:
    """Read what lies where it was found, by its reader."""
    beside = companions_beside(place)
    candidates = (*beside, *(base.companions if base is not None else ()))
    config_path = next((companion.path for companion in candidates if companion.name == "config.json"), None)
    config = read_config(config_path) if config_path is not None else None
    hints = Hints(
        layouts=layouts,
        shapes={name: shape for name, (_, shape) in base.tensors.items()} if base is not None else {},
        needs_config=config_path is None,
        prove_shapes=lambda shapes: prove_shapes(shapes, config),
    )
    model = reader.read(place, hints)
    return NamedSource(model, config if config_path is not None else model.config, config_path, beside)
