"""Write xrank/recipes/transformers.json: how the installed transformers renames and rearranges tensors.

Run it from the repository root with the environment of ``make oracle``, whenever that environment gets another
transformers; review the difference as you would review code:

    PYTHONPATH=. .venv-oracle/bin/python tests/oracle/make_conversion_table.py

It needs timm, pillow and torchvision, too (``pip install timm torchvision``); a class that it cannot make fails it.

Everything comes from transformers itself: its table of conversions (transformers/conversion_mapping.py), the reverse
of each as ``reverse_transform`` gives it (transformers/core_model_loading.py), and the nesting of models, which decides
whose conversions apply under which prefix (``get_model_conversion_mapping``), from a model of every class on the meta
device. `xrank.recipes.conversions` reads the file.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers import conversion_mapping as mappings
from transformers import core_model_loading as loading
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.models.dinat import modeling_dinat
from transformers.models.layoutlmv2 import modeling_layoutlmv2

from tests.oracle.config_models import build_small, read_defaults
from tests.oracle.small_configs import OWN
from xrank.recipes.config_proof import SIZE_KEYS

_OUT = Path(__file__).parents[2] / "xrank" / "recipes" / "transformers.json"
_KINDS = {
    loading.GroupWeightRename: "group",
    loading.Inkling2IndexOffsetWeightRename: "offset",
    loading.PrefixChange: "prefix",
    loading.WeightRenaming: "rename",
    loading.WeightConverter: "convert",
}
UNMADE = {
    # Each of their layers shares another's cache, and transformers 5.23 refuses configs without a layer that has one.
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
}
"""Classes that transformers itself cannot make; a conversion that they would need is refused by name."""
_PARTS = {"Qwen3OmniMoeCode2WavDecoderBlock", "UVDocBridge"}
"""Parts of models that take more than a config; they are in no config.json."""
_AUTO = {
    "backbone": modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES,
    "base": modeling_auto.MODEL_MAPPING_NAMES,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
"""Kinds of models whose class follows from a config; a config without a class is one of the last kind that has it."""


def describe_operation(operation: loading.ConversionOps) -> dict[str, Any]:
    """Return an operation as JSON: its class, and the arguments that differ from the defaults."""
    parameters = inspect.signature(type(operation).__init__).parameters
    given = {
        name: getattr(operation, name)
        for name, parameter in parameters.items()
        if name != "self" and getattr(operation, name) != parameter.default
    }
    return {"op": type(operation).__name__, **given}


def describe_side(transform: loading.WeightTransform) -> dict[str, Any]:
    """Return one direction of a transform as JSON."""
    side: dict[str, Any] = {"from": transform.source_patterns, "to": transform.target_patterns}
    if hasattr(transform, "operations"):
        side["operations"] = [describe_operation(operation) for operation in transform.operations]
    if hasattr(transform, "offset"):
        side["offset"] = transform.offset
    return side


def describe_transform(transform: loading.WeightTransform) -> dict[str, Any]:
    """Return a transform as JSON."""
    return {
        "kind": _KINDS[type(transform)],
        "load": describe_side(transform),
        "save": describe_side(transform.reverse_transform()),
    }


def find_classes() -> Iterator[type[PreTrainedModel]]:
    """Yield the model classes that transformers exports, under the names that config.json gives them."""
    found: dict[str, type[PreTrainedModel]] = {}
    for name in dir(transformers):
        cls = getattr(transformers, name, None)
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.config_class is not None:
            found[cls.__name__] = cls
    for name, cls in sorted(found.items()):
        if "PreTrainedModel" not in name and name not in _PARTS:  # bases of others
            yield cls


def make_meta_model(cls: type[PreTrainedModel]) -> PreTrainedModel:
    """Return a model without values: of the default config, or of small sizes where the class takes only those."""
    try:
        with torch.device("meta"):
            return cls(cls.config_class())
    except Exception:
        model = build_small(cls.config_class.model_type, cls.__name__, read_defaults(cls.config_class))
        if model is None:
            raise
        return model


def make_meta_models(cls: type[PreTrainedModel]) -> Iterator[PreTrainedModel]:
    """Yield models without values: one as `make_meta_model` makes it, and one of the type's own small sizes, if any.

    The second may hold a model where the first holds layers of another package, as DETR's backbone.
    """
    yield make_meta_model(cls)
    if cls.config_class.model_type in OWN:
        small = build_small(cls.config_class.model_type, cls.__name__, read_defaults(cls.config_class))
        if small is not None:
            yield small


def find_parts(model: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield (path, module) of the models directly inside a model, not those inside them."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if path and isinstance(module, PreTrainedModel) and not any(path.startswith(p + ".") for p in inside):
            inside.append(path)
            yield path, module


def describe_model(model: PreTrainedModel, models: dict[str, Any]) -> None:
    """Add a model's class, and those of the models in it, to `models`."""
    parts = []
    for path, part in find_parts(model):
        cls, kind = type(part).__name__, part.config.model_type
        # "" stands for the outer model's config, which may have been copied.
        key = "" if kind == model.config.model_type else None
        key = next((k for k, v in vars(model.config).items() if v is part.config), key)
        auto = [name for name, table in _AUTO.items() if cls in _names(table.get(kind, ()))]
        parts.append([path, cls, key, auto[0] if auto and key else None])
        describe_model(part, models)
    known = models.setdefault(type(model).__name__, [model.base_model_prefix, model.config.model_type, []])[2]
    known += [part for part in parts if part[0] not in {each[0] for each in known}]


def _names(classes: str | Iterable[str]) -> tuple[str, ...]:
    return (classes,) if isinstance(classes, str) else tuple(classes)


def describe_heads(model_types: Iterable[str]) -> dict[str, list[Any]]:
    """Return where a config keeps its number of attention heads, and the default, by model type."""
    found = {}
    for model_type in model_types:
        config_class = configuration_auto.CONFIG_MAPPING[model_type]
        key = config_class.attribute_map.get("num_attention_heads", "num_attention_heads")
        found[model_type] = [key, getattr(config_class(), "num_attention_heads", 1)]
    return found


def describe_sizes() -> dict[str, list[str]]:
    """Return, by model type, the keys of config.json that its config class knows, of those that xrank proves."""
    found = {}
    for model_type in sorted(configuration_auto.CONFIG_MAPPING):
        config_class = configuration_auto.CONFIG_MAPPING[model_type]
        try:
            known = {*vars(config_class()), *config_class.attribute_map}
        except Exception:  # a config without defaults: all keys count
            continue
        found[model_type] = sorted(known.intersection(SIZE_KEYS))
    return found


def make_table() -> dict[str, Any]:
    """Return the whole table.

    Raises:
        RuntimeError: a class cannot be made on this machine, so that the models in it are unknown.
    """
    _make_layers_of_absent_packages()
    numbers: dict[str, int] = {}
    mappings.get_checkpoint_conversion_mapping("llama")  # fills the cache
    keys = {
        key: [numbers.setdefault(json.dumps(describe_transform(t)), len(numbers)) for t in transforms]
        for key, transforms in sorted(mappings._checkpoint_conversion_mapping_cache.items())
        if key != "legacy"
    }
    models: dict[str, Any] = {}
    permuted: set[str] = set()
    failed: list[str] = []
    for cls in find_classes():
        if cls.__name__ in UNMADE:
            continue
        try:
            made = list(make_meta_models(cls))
        except Exception as error:  # its constructor lacks something here
            failed.append(f"{cls.__name__}: {type(error).__name__}: {str(error)[:80]!r}")
            continue
        for model in made:
            describe_model(model, models)
            permuted.update(find_permuted(model))
    if failed:
        raise RuntimeError("\n  ".join([f"{len(failed)} classes cannot be made:", *failed]))
    known = find_needed(models, keys)
    return {
        "transformers": transformers.__version__,
        "transforms": [json.loads(text) for text in numbers],
        "mappings": keys,
        "models": {name: models[name] for name in sorted(known)},
        "auto": {
            kind: {m: _names(c)[0] for m, c in sorted(table.items()) if _names(c)[0] in known or m in keys}
            for kind, table in _AUTO.items()
        },
        "heads": describe_heads(sorted(permuted)),
        "sizes": describe_sizes(),
        "unmade": sorted(UNMADE),
    }


def _make_layers_of_absent_packages() -> None:
    """Let models be made that use natten or detectron2, which need a GPU; neither holds a model of transformers."""
    modeling_dinat.requires_backends = modeling_layoutlmv2.requires_backends = lambda *_: None  # type: ignore[assignment]
    modeling_layoutlmv2.LayoutLMv2VisualBackbone = lambda config: torch.nn.Identity()  # type: ignore[assignment, misc]


def find_permuted(model: PreTrainedModel) -> Iterator[str]:
    """Yield the types of the configs whose heads a model's conversions permute."""
    for transform in mappings.get_model_conversion_mapping(model, add_legacy=False):
        for operation in getattr(transform, "operations", ()):
            if isinstance(operation, loading.PermuteForRope):
                yield getattr(model.config, operation.subconfig_key or "", model.config).model_type


def find_needed(models: dict[str, Any], keys: dict[str, Any]) -> set[str]:
    """Return the classes with conversions of their own, or in models inside them."""
    known = {name for name, (_, kind, _) in models.items() if name in keys or kind in keys}
    while True:
        more = {
            name
            for name, (_, _, parts) in models.items()
            if name not in known and any(part[1] in known or part[3] for part in parts)
        }
        if not more:
            return known
        known |= more


def write_table(table: dict[str, Any]) -> str:
    """Return the table as JSON with one entry a line."""
    lines = []
    for key, value in table.items():
        if isinstance(value, list):
            lines.append(f'"{key}": [\n' + ",\n".join(json.dumps(each) for each in value) + "\n]")
        elif isinstance(value, dict):
            entries = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f'"{key}": {{\n{entries}\n}}')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    _OUT.write_text(write_table(make_table()))
