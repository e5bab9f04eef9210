"""Write xrank/recipes/single_tensors.json: the tensors that every model of a type has once.

Run it from the repository root with the environment of ``make oracle``, whenever that environment gets another
transformers; review the difference as you would review code. A run that was cut short goes on if it is started again:

    PYTHONPATH=. .venv-oracle/bin/python tests/oracle/make_single_tensors.py

Everything comes from transformers itself. Each class of a model type is made small on the meta device. The classes that
generate or classify are made again with each flag turned, each empty key filled, each size zero, one, or the hidden
size, and each word that the module compares with a key of the config. A tensor counts if all of these have it, under a
name that differs in outer modules at most.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from tests.oracle.config_models import (
    build,
    build_small,
    change,
    find_classes,
    find_flags,
    find_sizes,
    list_classes,
    read_config,
    read_defaults,
    read_shapes,
)
from tests.oracle.resumable import map_resumably

_OUT = Path(__file__).parents[2] / "xrank" / "recipes" / "single_tensors.json"
_RECORD = Path("build/single_tensors.jsonl")
_TYPES = (
    *("apertus", "arcee", "bamba", "bart", "bert", "bitnet", "bloom", "codegen", "cohere", "cohere2", "dbrx"),
    *("deberta-v2", "distilbert", "electra", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1"),
    *("falcon_mamba", "flex_olmo", "gemma3n_text", "gemma4_text", "glm", "glm4", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "jamba"),
    *("lfm2", "lfm2_moe", "mamba", "mamba2", "mbart", "minimax_m2", "modernbert", "mpt", "mt5", "nanochat", "olmo"),
    *("olmo2", "olmo3", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen3_5_moe_text", "qwen3_5_text"),
    *("recurrent_gemma", "roberta", "seed_oss", "smollm3", "stablelm", "starcoder2", "t5", "whisper", "xglm"),
    *("xlm-roberta", "zamba2"),
)
"""Model types of languages without a recipe, whose tensors nothing else lists."""
_NUMBERED = re.compile(r"\.\d+\.|^\d+\.")


def read_singles(model: Any) -> dict[str, int]:
    """Return the names, without those in lists, of the parameters that a model saves, each with its number of dims."""
    buffers = {name for name, _ in model.named_buffers()}
    ignored = [*(model._keys_to_ignore_on_save or ()), *(model._keys_to_ignore_on_load_missing or ())]
    return {
        name: len(shape)
        for name, shape in read_shapes(model).items()
        if name not in buffers and not _NUMBERED.search(name) and not any(re.search(each, name) for each in ignored)
    }


def list_ends(names: Mapping[str, int]) -> dict[str, int]:
    """Return the names with and without their outer modules; a word such as ``weight`` alone is no name."""
    ends: dict[str, int] = {}
    for name, num_dims in names.items():
        parts = name.split(".")
        last = 1 if len(parts) == 1 or parts[-1] not in ("weight", "bias") else 2
        ends.update(dict.fromkeys((".".join(parts[k:]) for k in range(len(parts) - last + 1)), num_dims))
    return ends


def find_words(model: Any, config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the texts in a config, each with another text that a module of the model compares it with."""
    modules = {type(module).__module__ for module in model.modules()}
    source = "\n".join(inspect.getsource(sys.modules[name]) for name in modules if name.startswith("transformers.mod"))
    for path, value in _find_texts(config):
        compared = re.findall(rf"\b{path[-1]}\s*(?:==|!=|in|not in)\s*([^:\n]+)", source)
        words = {word for text in compared for word in re.findall(r"[\"']([\w-]+)[\"']", text)}
        yield from ((path, word) for word in sorted(words - {value}))


def _find_texts(config: Mapping[str, Any], outer: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _find_texts(value, (*outer, key))
        elif isinstance(value, str) and key not in ("model_type", "dtype", "transformers_version"):
            yield (*outer, key), value


def make_models(model_type: str, name: str, *, varied: bool) -> Iterator[Any]:
    """Yield a small model of a class, then one for each change of its config."""
    try:
        values = read_defaults(transformers.CONFIG_MAPPING[model_type])
    except Exception:  # a config class that asks for arguments
        return
    default = build(model_type, name, None, "meta")
    model = build_small(model_type, name, values) or default
    if model is None:
        return
    yield from (each for each in (model, default) if each is not None)
    if varied:
        config = read_config(model, name)
        sizes = dict(find_sizes(config))
        hidden = {size for path, size in sizes.items() if path[-1] in ("hidden_size", "d_model", "n_embd")}
        changes: list[tuple[tuple[str, ...], object]] = [*find_flags(config), *find_words(model, config)]
        changes += [(path, size) for path, own in sizes.items() for size in {0, 1, *hidden} - {own}]
        made = (build(model_type, name, change(config, path, value), "meta") for path, value in changes)
        yield from (other for other in made if other is not None)


def describe_type(model_type: str, varied: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Return the classes of a model type that were made, the tensors of all of them, and the names of other ones.

    Args:
        model_type: the model type.
        varied: classes whose configs are changed.
        others: classes that are made once.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    classes: list[str] = []
    common: dict[str, int] | None = None
    seen: dict[str, int] = {}
    tied: set[tuple[str, str]] = set()
    for name in [*varied, *others]:
        for number, model in enumerate(make_models(model_type, name, varied=name in varied)):
            classes += [name] if number == 0 else []
            names = read_singles(model)
            seen |= names
            ends = list_ends(names)
            common = ends if common is None else {end: common[end] for end in common.keys() & ends.keys()}
            ties = getattr(model, "all_tied_weights_keys", None) or {}
            tied |= {(source, target) for target, source in ties.items() if not _NUMBERED.search(target)}
    needed = {end: n for end, n in (common or {}).items() if not any(each.endswith(f".{end}") for each in common or {})}
    with_ties = {
        "|".join([end, *sorted({_shorten(target) for source, target in tied if _ends_with(source, end)})]): num_dims
        for end, num_dims in sorted(needed.items())
    }
    rest = sorted({_shorten(name) for name in seen if not any(_ends_with(name, end) for end in needed)})
    return {"classes": classes, "needed": with_ties, "others": rest}


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _shorten(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def main() -> None:
    """Write the entries of the model types."""
    types: dict[str, tuple[list[str], list[str]]] = {}
    for model_type, name in list_classes():
        types.setdefault(model_type, ([], []))[0].append(name)
    for model_type, name in find_classes():
        if name not in types[model_type][0]:
            types[model_type][1].append(name)
    work = {key: (key, *types[key]) for key in _TYPES if key in types}
    about = f"transformers {transformers.__version__}"
    found = map_resumably(describe_type, work, _RECORD, about)
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(each)}" for key, each in sorted(found.items()) if each["needed"]
    )
    _OUT.write_text(f'{{"transformers": {json.dumps(transformers.__version__)}, "types": {{\n{lines}\n}}}}\n')
    _RECORD.unlink()


if __name__ == "__main__":
    main()
