"""Tiny models of every family, as Megatron-core and as Hugging Face have them; a family's module adds its entries."""

from __future__ import annotations

from tests.recipes.families import hybrid, known, text, vision
from tests.recipes.families.family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    family.name: family for module in (known, text, vision, hybrid) for family in module.FAMILIES
}
