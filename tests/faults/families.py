"""Mutated configs and training arguments of every model family, through the choice of a recipe and the proofs."""

from __future__ import annotations

import json
import random
from math import prod

from msgspec.structs import replace

from tests.faults.mutation import Mutator
from tests.recipes.families import FAMILIES
from tests.recipes.test_there_and_back import model_of
from xrank.recipes.config_proof import find_hole, find_misfit
from xrank.recipes.proofs import prove_family
from xrank.recipes.recipe_choice import choose_recipe, follow_recipe
from xrank.recipes.ties import find_config_ties

__all__ = ["FamilyInputs"]


class FamilyInputs:
    """Makes inputs, each a family's number, a line end, and its config and arguments as JSON; and parses them."""

    def __init__(self) -> None:
        self._families = list(FAMILIES.values())
        texts = (
            json.dumps({"config": f.full_config(), "args": f.full_args(), "shapes": f.recorded["shapes"]}, default=str)
            for f in self._families
        )
        self._mutators = [Mutator([text.encode()], is_text=True) for text in texts]

    def __call__(self, rng: random.Random) -> bytes:
        """Return a mutated input of some family."""
        number = rng.randrange(len(self._families))
        return b"%d\n%s" % (number, self._mutators[number](rng))

    def parse(self, content: bytes) -> None:
        """Choose the family's recipe by the config and arguments, and prove what would be written."""
        _, _, text = content.partition(b"\n")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(values, dict) or not isinstance(config := values.get("config"), dict):
            return
        args, shapes = values.get("args"), _real_shapes(values.get("shapes"))
        model = replace(model_of(shapes), args=args if isinstance(args, dict) else {})
        found = choose_recipe(model, config, None)
        if found is not None:
            shapes = {shard.name: shard.shape for shard in follow_recipe(model, found, config).shards}
        find_config_ties(shapes, config)
        find_misfit(config, shapes)
        find_hole(shapes, config)
        prove_family([*shapes], config)


def _real_shapes(value: object) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a reader lets pass: counts, and no more elements than a file has bytes."""
    listed = value.items() if isinstance(value, dict) else ()
    return {
        name: tuple(shape)
        for name, shape in listed
        if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) and prod(shape) < 10**15
    }
