"""The trainer's model as its card describes it, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xrank.decisions.decision import Purpose, Request, decide
from xrank.decisions.found_source import FoundSource, find_live_source
from xrank.decisions.own_config import OwnConfig, choose_config
from xrank.plan.source import StoredModel
from xrank.readers.live.ranks import LiveModel, read_ranks
from xrank.refit.card import Card
from xrank.refit.offer_card import MADE, find_trainer_ranks


@dataclass(frozen=True, slots=True, eq=False)
class TrainerModel:
    """A trainer's model in the memory of its ranks."""

    live: LiveModel
    source: StoredModel
    """The model under Hugging Face's names."""
    config: Mapping[str, Any] | None
    padded_names: frozenset[str]
    """Tensors that may have more rows in an engine, as engines pad a vocabulary."""

    def name_as(self, module_shapes: Mapping[str, tuple[int, ...] | None]) -> StoredModel:
        """Return the model in the form that a module has in memory.

        Args:
            module_shapes: name in the module -> global shape; None where one rank does not know it.
        """
        found = FoundSource(self.source, self.config)
        return decide(found, Request(Purpose.MODULE, module_shapes=module_shapes)).source


def read_trainer_model(card: Card) -> TrainerModel:
    """Return the model of a trainer's card; nothing of the ranks' memory is read.

    Raises:
        CorruptError: the card does not describe a model.
        LayoutError, UsageError: no recipe fits the names; the trainer has raised it before.
    """
    content = card.describe("a model", "ranks, their parts, a recipe, aliases, a config and names")
    ranks, parts = [rank for rank, _ in find_trainer_ranks(card)], content["parts"].entries()
    own, _ = choose_config([OwnConfig.from_entry(part["own"]) for part in parts])
    recipe, config = content.get("recipe"), content.get("config")
    aliases = {name: target.text() for name, target in content["aliases"].items()}
    names, dropped = content["names"].texts(), frozenset(content["dropped"].texts())
    live = read_ranks([part["model"].text() for part in parts], ranks=ranks)
    own_shards = tuple(shard for shard in live.stored.shards if not shard.name.startswith(MADE))
    found = find_live_source(replace(live.stored, shards=own_shards), own, None)
    found = found if config is None else replace(found, config=config.table())
    decision = decide(
        found,
        Request(Purpose.MODEL, recipe=None if recipe is None else recipe.text(), aliases=aliases, file_names=names),
    )
    kept = [shard for shard in decision.source.shards if shard.name not in dropped]
    made = [
        replace(shard, name=shard.name.removeprefix(MADE))
        for shard in live.stored.shards
        if shard.name.startswith(MADE)
    ]
    source = replace(decision.source, shards=(*kept, *made))
    return TrainerModel(live, source, found.config, decision.padded_names)
