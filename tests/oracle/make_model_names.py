"""Write xrank/recipes/model_names.json: how the names of tensors begin in each model type of transformers.

Run it from the repository root with the environment of ``make oracle``, whenever that environment gets another
transformers; review the difference as you would review code:

    PYTHONPATH=. .venv-oracle/bin/python tests/oracle/make_model_names.py

Every class is made on the meta device, as for `tests.oracle.make_conversion_table`. The entry of a type has its
``base_model_prefix``, its classes, and the stems (`xrank.recipes.model_names.find_stem`) of all names of these classes.
Stems of the base class have the prefix that the other classes put before them. The script lists the classes that it
cannot make, for lack of a package; xrank knows no names of these.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from tests.oracle.make_conversion_table import UNMADE, find_classes, make_meta_models
from xrank.recipes.model_names import find_stem

_OUT = Path(__file__).parents[2] / "xrank" / "recipes" / "model_names.json"
_OPEN = {
    *("encoder-decoder", "rag", "speech-encoder-decoder", "timm_backbone", "timm_wrapper"),
    *("vision-encoder-decoder", "vision-text-dual-encoder"),
}
"""Types that hold any other model, so that only the first part of their names is known."""


def is_base(model: Any) -> bool:
    """Return whether the other classes of a model's type put its prefix before its names."""
    base, prefix = modeling_auto.MODEL_MAPPING_NAMES.get(model.config.model_type, ()), model.base_model_prefix
    is_mapped = type(model).__name__ in ((base,) if isinstance(base, str) else base)
    return is_mapped and bool(prefix) and not hasattr(model, prefix)


def list_stems(model: Any, prefix: str) -> Iterator[str]:
    """Yield the stems of the names of a model, whose type has this prefix."""
    for name in model.state_dict():
        if model.config.model_type in _OPEN:
            yield name.partition(".")[0]
        else:
            yield find_stem(f"{prefix}.{name}" if is_base(model) else name)


def make_names() -> dict[str, list[str]]:
    """Return model type -> its prefix, its classes and its stems, each joined by spaces."""
    models: dict[str, list[Any]] = defaultdict(list)
    for cls in find_classes():
        try:
            models[cls.config_class.model_type] += [] if cls.__name__ in UNMADE else make_meta_models(cls)
        except Exception as error:  # its constructor lacks a package here
            print(f"not made: {cls.__name__}: {str(error).strip().partition(chr(10))[0][:100]}")
    found = {}
    for kind in sorted(kind for kind, made in models.items() if made):
        prefix = max(models[kind], key=is_base).base_model_prefix
        classes = {type(model).__name__ for model in models[kind]}
        stems = {stem for model in models[kind] for stem in list_stems(model, prefix)}
        found[kind] = [prefix, " ".join(sorted(classes)), " ".join(sorted(stems))]
    return found


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in make_names().items())
    _OUT.write_text(f'{{"transformers": "{transformers.__version__}", "types": {{\n{lines}\n}}}}\n')
