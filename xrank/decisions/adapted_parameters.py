"""LoRA on parameters of modules, such as fused experts: which pair adapts which parameter, and how it is added.

PEFT wraps a module once for each parameter in `target_parameters`, in the order in which the module registers them, and
no name contains the parameter's (peft/tuners/tuners_utils.py: _inject_parameters). The shapes decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import permutations

from xrank import dtypes
from xrank.decisions.adapter_config import AdapterConfig
from xrank.decisions.adapter_names import Pair
from xrank.errors import UsageError, option
from xrank.plan.low_rank import LowRank
from xrank.plan.source import StoredShard
from xrank.words import list_text


def is_parameter_pair(pair: Pair, config: AdapterConfig, base: Collection[str]) -> bool:
    """Return whether a pair adapts a parameter that `target_parameters` names, and not a layer's weight."""
    return pair.depth > 0 or any(name in base for name in config.parameters_of(pair.module))


def find_parameter_updates(
    pairs: Sequence[Pair],
    config: AdapterConfig,
    base: Mapping[str, StoredShard],
    shards: Mapping[str, StoredShard],
) -> dict[str, LowRank]:
    """Return the update of each adapted parameter.

    Args:
        pairs: the pairs that adapt parameters.
        config: the adapter's configuration.
        base: the base model's tensors under its own names.
        shards: the adapter's tensors under the source's names.

    Raises:
        UsageError: no parameter fits a pair, or shapes leave several ways.
    """
    of_module: dict[str, list[Pair]] = {}
    for pair in pairs:
        of_module.setdefault(pair.module, []).append(pair)
    # A model's experts all lie one way: [out, in], or, in a module that is_transposed, [in, out].
    ways = [
        {
            module: list(_assign(each, config, base, shards, is_transposed=is_transposed))
            for module, each in of_module.items()
        }
        for is_transposed in (False, True)
    ]
    fitting = [number for number, way in enumerate(ways) if all(way.values())]
    if pairs and (len(fitting) != 1 or any(len(found) != 1 for found in ways[fitting[0]].values())):
        raise _unclear_error(pairs[0], config, base, shards)
    chosen = ways[fitting[0]] if pairs else {}
    found = {name: pair for (one,) in chosen.values() for name, pair in one.items()}
    blocks = {name: base[name].shape[0] if len(base[name].shape) > 2 else 1 for name in found}
    return {
        name: LowRank(pair.a, pair.b, config.scale_of(name), fitting[0] == 1, blocks[name])
        for name, pair in found.items()
    }


def _assign(
    pairs: Sequence[Pair],
    config: AdapterConfig,
    base: Mapping[str, StoredShard],
    shards: Mapping[str, StoredShard],
    *,
    is_transposed: bool,
) -> Iterator[dict[str, Pair]]:
    """Yield each way to give every pair of a module a parameter of its own that fits."""
    names = [name for name in config.parameters_of(pairs[0].module) if name in base]
    for order in permutations(names, len(pairs)):
        if all(
            _fits(base[name], shards[pair.a], shards[pair.b], config.rank_of(name), is_transposed=is_transposed)
            for name, pair in zip(order, pairs, strict=True)
        ):
            yield dict(zip(order, pairs, strict=True))


def _fits(weight: StoredShard, a: StoredShard, b: StoredShard, rank: int, *, is_transposed: bool) -> bool:
    """Return whether a pair can be added to a parameter (peft/tuners/lora/layer.py: ParamWrapper)."""
    if len(a.shape) != 2 or len(b.shape) != 2 or not all(dtypes.dtype(each.dtype).is_float for each in (weight, a, b)):
        return False
    if len(weight.shape) == 2 and not is_transposed:
        num_blocks, rows, columns = 1, *weight.shape
    elif len(weight.shape) == 3:
        num_blocks, rows, columns = weight.shape
    else:
        return False
    wide = (columns, rows) if is_transposed else (rows, columns)
    return a.shape[0] == b.shape[1] == num_blocks * rank and (b.shape[0], a.shape[1]) == wide


def _unclear_error(
    pair: Pair, config: AdapterConfig, base: Mapping[str, StoredShard], shards: Mapping[str, StoredShard]
) -> UsageError:
    names = config.parameters_of(pair.module)
    held = [f"{name} {base[name].dtype} {list(base[name].shape)}" for name in names if name in base]
    return UsageError(
        f"{pair.module}: which of its parameters the adapter is added to, and how, does not follow from the shapes",
        tensor=pair.a,
        file=config.path,
        got=f"lora_A {list(shards[pair.a].shape)}, lora_B {list(shards[pair.b].shape)} and {list_text(held, 4)}",
        want=f"one way for each of {list_text(names, 4, empty='target_parameters')}",
        next_step=f"use {option('adapter', 'separate')}, and merge it with peft",
    )
