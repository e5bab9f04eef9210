"""transformers' table as xrank ships it, beside transformers' own conversions: names, shapes and values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers import conversion_mapping as mappings
from transformers import core_model_loading as loading

from tests.oracle.make_conversion_table import describe_transform, find_classes, make_meta_model
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, addresses, canonical
from xrank.layout.stored_model import RecordTable, StoredModel, StoredShard
from xrank.recipes.conversions import (
    Conversion,
    Direction,
    convert_model,
    find_transforms,
    is_loaded_as,
    place_input,
    run_operations,
)


def store(tensors: Mapping[str, torch.Tensor]) -> StoredModel:
    """Return a source with one whole piece for each tensor."""
    shards = []
    for index, (name, tensor) in enumerate(tensors.items()):
        nests = NestTable.from_nests([canonical(Nest(0, 0, ((prod(tensor.shape), 1, 1),)))])
        shards.append(StoredShard(name, "F32", tuple(tensor.shape), int_array([0]), int_array([index]), nests))
    zeros = np.zeros(len(shards), np.int64)
    return StoredModel("dcp", "made", (), RecordTable(zeros, zeros, zeros, zeros), tuple(shards))


def shapes(model: StoredModel) -> dict[str, tuple[int, ...]]:
    return {shard.name: shard.shape for shard in model.shards}


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    return {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}


def make_small_model(cls: type[PreTrainedModel]) -> PreTrainedModel:
    """Return a model of few layers and experts on the meta device; of the default size where the class wants that."""
    try:
        config = cls.config_class(num_hidden_layers=4, num_experts=4, num_local_experts=4, n_routed_experts=8)
        with torch.device("meta"):
            return cls(config)
    except Exception:
        return make_meta_model(cls)


def models_with_conversions() -> Iterator[tuple[PreTrainedModel, Sequence[Conversion]]]:
    """Yield a model on the meta device for each distinct sequence of transforms in transformers."""
    seen = set()
    for cls in find_classes():
        try:
            config = {**json.loads(cls.config_class().to_json_string()), "architectures": [cls.__name__]}
            transforms = find_transforms(config)
            if not transforms or transforms in seen:
                continue
            model = make_small_model(cls)
        except Exception:  # listed in the table as one that cannot be made here
            continue
        seen.add(transforms)
        yield model, transforms


@pytest.mark.timeout(900)
def test_every_model_is_saved_and_loaded_under_the_same_names_and_shapes() -> None:
    num_converted = 0
    for model, transforms in models_with_conversions():
        name, config, state = type(model).__name__, config_of(model), model.state_dict()
        want = {n: tuple(t.shape) for n, t in loading.revert_weight_conversion(model, dict(state)).items()}
        chosen = [each for each in transforms if each.kind != "prefix"]
        saved = convert_model(store(state), chosen, config, is_save=True).model
        assert shapes(saved) == want, name
        if want.keys() == state.keys():
            continue
        num_converted += 1
        assert is_loaded_as(chosen, want, state), name
        wanted = {n: tuple(t.shape) for n, t in state.items()}
        assert shapes(convert_model(saved, transforms, config, is_save=False, module_shapes=wanted).model) == wanted, (
            name
        )
    assert num_converted > 140


def converters() -> Iterable[Any]:
    """Return transformers' distinct converters."""
    mappings.get_checkpoint_conversion_mapping("llama")  # fills the cache
    found = {}
    for transforms in mappings._checkpoint_conversion_mapping_cache.values():
        for each in transforms:
            if isinstance(each, loading.WeightConverter):
                found.setdefault(json.dumps(describe_transform(each)), each)
    return [pytest.param(each, id=each.source_patterns[0][:60]) for each in found.values()]


class _Config:
    """A config as transformers' operations read it."""

    num_attention_heads = 2
    split_ngram_parts = 2

    def get_text_config(self) -> _Config:
        return self


class _Module:
    """A module whose tensors have these shapes, as transformers' operations read them."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name])


@pytest.mark.parametrize("converter", converters())
def test_every_converter_moves_the_same_values(converter: Any) -> None:
    for is_save in (True, False):
        compare(deepcopy(converter).reverse_transform() if is_save else deepcopy(converter), is_save=is_save)


def compare(converter: Any, *, is_save: bool) -> None:
    side = as_side(converter)
    is_list = any("*" in pattern for pattern in side.patterns) or "shards" in str(side.operations)
    torch.manual_seed(len(side.patterns[0]))
    inputs = {p: [torch.randn(24, 8, 4) for _ in range(4 if is_list and not is_save else 1)] for p in side.patterns}
    if any(op.kind == "PermuteForRope" for op in side.operations) or (is_list and not is_save):
        inputs = {p: [each[..., 0] for each in values] for p, values in inputs.items()}
    if is_save and "shards" in str(side.operations):
        inputs = {p: values[:1] for p, values in inputs.items()}
    if not is_save and "shards" in str(side.operations):
        inputs = {p: values[:2] for p, values in inputs.items()}
    for pattern, values in inputs.items():
        for value in values:
            converter.add_tensor(side.targets[0], pattern, pattern, value)
    # A module's tensors of unequal lengths, or with their last dims the other way round; as they are, when saving.
    lengths = dict(zip(side.targets, (12, 8, 4), strict=False))
    is_split = any(op.kind == "Split" for op in side.operations)
    wanted = {to: (lengths[to], 8, 4) if is_split else (24, 8, 4) if is_save else (24, 4, 8) for to in lengths}
    want = converter.convert(side.targets[0], model=_Module(wanted), config=_Config())
    placed = run_operations(
        side,
        {p: [place_input(f"{p}/{i}", v.shape) for i, v in enumerate(values)] for p, values in inputs.items()},
        {"num_attention_heads": 2, "split_ngram_parts": 2},
        is_save=is_save,
        module_shapes=wanted,
    )
    sources = {f"{p}/{i}": v.flatten() for p, values in inputs.items() for i, v in enumerate(values)}
    assert placed.keys() == want.keys()
    for name, made in placed.items():
        expected = want[name][0] if isinstance(want[name], list) else want[name]
        flat = torch.full((prod(made.shape),), torch.nan)
        for source, nest in made.parts:
            for x, y in addresses(nest):
                flat[y] = sources[source][x]
        assert torch.equal(flat.view(made.shape), expected), name


def as_side(converter: Any) -> Direction:
    """Return a converter of transformers as xrank's table has it."""
    from xrank.recipes.conversions import _parse_side

    described = describe_transform(converter)["load"]
    return _parse_side(json.loads(json.dumps(described)))


def test_the_table_is_of_this_version() -> None:
    from xrank.recipes.conversions import _read_table

    assert _read_table("transformers") == transformers.__version__
