"""Writes ``xrank/recipes/tied_weights.json``: the ties of every class of transformers, and which configs declare them.

    .venv-oracle/bin/python tests/oracle/make_tied_weights.py

The ties are the classes' own (``_tied_weights_keys``), also those of models inside models. Each class is made from its
default config, without memory. A config is asked for its ``tie_word_embeddings`` with and without the key, at its top
and in ``text_config``: classes differ in the default, and in which of both counts.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import logging
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

PATH = Path(__file__).parents[2] / "xrank" / "recipes" / "tied_weights.json"
KEY, TEXT = "tie_word_embeddings", "text_config"
HEAD = re.compile(r"(?:.*\.)?lm_head\.weight")
TENSOR = re.compile(r"[A-Za-z0-9_.]+\.(weight|bias)")
STATES = (None, False, True)
"""States of the key: absent, false, true."""


def classes() -> Iterator[type[PreTrainedModel]]:
    """Yield the model classes of transformers, in the order of their modules."""
    for info in pkgutil.walk_packages(transformers.models.__path__, "transformers.models."):
        if ".modeling_" not in info.name:
            continue
        with suppress(ImportError):
            module = importlib.import_module(info.name)
            for one in vars(module).values():
                if inspect.isclass(one) and issubclass(one, PreTrainedModel) and one.__module__ == module.__name__:
                    yield one


def declared(config_class: Any) -> str:
    """Return, for each state of the key at the top and in text_config, whether the config is tied: nine of F and T."""
    default = made(config_class)
    found = ""
    for top, text in itertools.product(STATES, STATES):
        values: dict[str, Any] = {} if top is None else {KEY: top}
        if getattr(default, TEXT, None) is not None:
            inner = {key: value for key, value in getattr(default, TEXT).to_dict().items() if key != KEY}
            values[TEXT] = inner if text is None else {**inner, KEY: text}
        config = made(config_class, **values) if default is not None else None
        # A class whose config cannot be made by itself declares its default, which the key overrides.
        simple = bool(getattr(config_class, KEY, False)) if top is None else top
        is_tied = simple if config is None else bool(getattr(config, KEY, False))
        # T5's kind overrides a false key; its models without ties have both tensors, so the key is believed.
        found += "T" if is_tied and (top is not False or text is True) else "F"
    return found


def made(config_class: Any, **values: Any) -> Any:
    """Return a config of a class; None if it cannot be made."""
    try:
        return config_class(**values)
    except Exception:  # of any kind: each class checks its values in its own way
        return None


def ties(cls: type[PreTrainedModel]) -> dict[str, dict[str, str]]:
    """Return the ties of a class by the attribute of the config that declares them; "" is the config itself.

    A class with a head that it never ties has an empty entry.
    """
    config = made(cls.config_class)
    try:
        with torch.device("meta"):
            model = cls(config)
    except Exception:  # a class that cannot be made by its default config, or needs another library
        own = cls._tied_weights_keys
        pairs = named("", own) if isinstance(own, Mapping) else {}
        return {"": pairs} if pairs else {}
    inner = {id(getattr(config, name)): name for name in config.sub_configs if hasattr(config, name)}
    found: dict[str, dict[str, str]] = {}
    for prefix, module in model.named_modules():
        own = getattr(module, "_tied_weights_keys", None)
        place = "" if getattr(module, "config", None) is config else inner.get(id(getattr(module, "config", None)))
        if isinstance(module, PreTrainedModel) and isinstance(own, Mapping) and place is not None:
            # The outer model's own ties come first, and count.
            found[place] = {**named(prefix and f"{prefix}.", own), **found.get(place, {})}
    found = {place: pairs for place, pairs in found.items() if pairs}
    return found or ({"": {}} if has_untied_head(model) else {})


def has_untied_head(model: PreTrainedModel) -> bool:
    """Return whether a model has a head of its own though its config ties it, and no class in it lists any ties."""
    model.config.tie_word_embeddings = True
    try:
        model.tie_weights()
    except Exception:  # ties that need more than the default config
        return False
    lists = [getattr(module, "_tied_weights_keys", None) for module in model.modules()]
    # A parameter that two modules share is given once, under the first name.
    return not any(lists) and any(HEAD.fullmatch(name) for name, _ in model.named_parameters())


def named(begin: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return a class' ties in a model in which the class' names begin so.

    Patterns and whole modules are left out: those of detectors depend on the config (``with_box_refine``).
    """
    return {begin + a: begin + b for a, b in own.items() if TENSOR.fullmatch(a) and TENSOR.fullmatch(b)}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    groups: dict[str, list[str]] = {}
    defaults: dict[str, bool] = {}
    flags: dict[Any, str] = {}
    for cls in classes():
        if not inspect.isclass(cls.config_class):
            continue
        if cls.config_class not in flags:
            flags[cls.config_class] = declared(cls.config_class)
        is_tied = flags[cls.config_class]
        defaults[cls.config_class.model_type] = is_tied[0] == "T"
        if found := ties(cls):
            groups.setdefault(json.dumps({"declared": is_tied, "ties": found}), []).append(cls.__name__)
    content = {
        "transformers": transformers.__version__,
        "tied": sorted(name for name, is_tied in defaults.items() if name and is_tied),
        "untied": sorted(name for name, is_tied in defaults.items() if name and not is_tied),
        "classes": [{"names": sorted(names), **json.loads(group)} for group, names in sorted(groups.items())],
    }
    PATH.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{sum(map(len, groups.values()))} classes, {len(groups)} kinds", file=sys.stderr)


if __name__ == "__main__":
    main()
