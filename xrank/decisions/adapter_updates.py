"""The updates that a LoRA adapter makes to its base model's weights, proven to fit them."""

from __future__ import annotations

from collections.abc import Mapping

from xrank import dtypes
from xrank.decisions.adapted_parameters import find_parameter_updates, is_parameter_pair
from xrank.decisions.adapter_config import AdapterConfig, is_turned
from xrank.decisions.adapter_names import AdapterNames, Pair
from xrank.errors import ContradictionError, UsageError, option
from xrank.plan.low_rank import LowRank
from xrank.plan.source import StoredShard
from xrank.words import list_text


def find_updates(
    names: AdapterNames,
    config: AdapterConfig,
    base: Mapping[str, StoredShard],
    shards: Mapping[str, StoredShard],
) -> dict[str, LowRank]:
    """Return the update that each adapted weight gets, by the weight's name.

    Args:
        names: the adapter's names.
        config: the adapter's configuration.
        base: the weights by the names that the base model has for them.
        shards: all shards of the source by their names, the adapter's halves among them.

    Raises:
        ContradictionError: an adapter's shapes do not fit its weight.
        UsageError: a weight or a half is of a kind to which nothing can be added.
    """
    fits = {}
    stacked = [pair for pair in names.pairs if is_parameter_pair(pair, config, base)]
    plain = [pair for pair in names.pairs if pair not in stacked]
    for pair in plain:
        weight = _weight_of(pair, base, shards)
        a, b = shards[pair.a].shape, shards[pair.b].shape
        straight, turned = (b[0], a[1]), (a[1], b[0])
        fits[pair.module] = ((not pair.is_embedding and weight.shape == straight), weight.shape == turned)
        if not any(fits[pair.module]):
            raise ContradictionError(
                f"{pair.module}.weight: its adapter is of another shape",
                tensor=f"{pair.module}.weight",
                file=config.path,
                got=f"lora_A {list(a)} and lora_B {list(b)} for a weight {list(weight.shape)}",
                want=f"a weight {list(turned if pair.is_embedding else straight)}",
                next_step="check that adapter and base model belong together",
            )
    kinds = {fits[pair.module] for pair in plain if not pair.is_embedding} - {(True, True)}
    found = {
        f"{pair.module}.weight": LowRank(
            pair.a, pair.b, config.scale_of(pair.module), is_turned(pair.module, fits[pair.module], kinds, config)
        )
        for pair in plain
    }
    return found | find_parameter_updates(stacked, config, base, shards)


def _weight_of(pair: Pair, base: Mapping[str, StoredShard], shards: Mapping[str, StoredShard]) -> StoredShard:
    """Return the weight that a pair is added to, after a check that both allow the calculation."""
    name = f"{pair.module}.weight"
    weight = base.get(name)
    if weight is None or not dtypes.dtype(weight.dtype).is_float:
        held = [other for other in base if other.rpartition(".")[0] == pair.module]
        raise UsageError(
            f"{name}: is quantised, so nothing can be added to it" if held else f"{name}: is not in the source",
            tensor=name,
            got=f"{weight.dtype} {list(weight.shape)}" if weight is not None else list_text(held),
            want="a weight of floating-point numbers",
            next_step=f"use {option('adapter', 'separate')}; or merge the adapter into the model that was not "
            "quantised, with peft",
        )
    for half in (shards[pair.a], shards[pair.b]):
        if len(half.shape) != 2 or len(weight.shape) != 2 or not dtypes.dtype(half.dtype).is_float:
            raise UsageError(
                f"{half.name}: an adapter of this kind is not merged",
                tensor=half.name,
                got=f"{half.dtype} {list(half.shape)} for a weight {list(weight.shape)}",
                want="matrices of floating-point numbers",
                next_step=f"use {option('adapter', 'separate')}, and merge it with peft",
            )
    return weight
