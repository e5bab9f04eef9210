"""Rank, alpha and kind of an adapter, which its tensors lack: adapter_config.json, as PEFT writes it, or completed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from xrank.decisions.adapter_names import CONFIG_NAME, AdapterNames, Pair
from xrank.decisions.base_model import read_config
from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    UsageError,
    XrankError,
    either,
    needs,
    option,
)
from xrank.layout.tensor_name import compile_pattern
from xrank.readers.checkpoint_folders import find_checkpoint_folders
from xrank.stores import places

# verl writes the first beside its states, older versions the other (verl/utils/checkpoint/fsdp_checkpoint_manager.py).
_PLACES = (CONFIG_NAME, os.path.join("lora_adapter", CONFIG_NAME), "lora_train_meta.json")
_NEXT_STEP = either(
    f"give {option('adapter_config', metavar='FILE')}: PEFT's adapter_config.json, or a JSON object with r and "
    "lora_alpha",
    needs("model_or_state_dict", "correct the configuration of the PeftModel's active adapter"),
)
_TRAINED_WITH = either(
    f"give the configuration that this adapter was trained with as {option('adapter_config')}",
    needs("model_or_state_dict", "give a PeftModel with the configuration that its adapter was trained with"),
)
_WHOLE = either(
    f"give PEFT's whole adapter_config.json as {option('adapter_config')}",
    needs("model_or_state_dict", "give the PeftModel"),
)
# They change the base's weights before training, and a state contains the changed weights (peft/tuners/lora/layer.py:
# update_layer). An adapter that was saved with those weights loads as any other.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Layers that are Conv1D, stored [in, out], in GPT-2 and its kin, and Linear in others (transformers/pytorch_utils.py).
_CONV1D = ("c_attn", "c_fc", "c_proj", "q_attn")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The content of an adapter_config.json, with checked numbers and patterns."""

    values: Mapping[str, Any]
    path: str
    is_completed: bool
    """Whether the file gives only rank and alpha, and the rest follows from names and shapes."""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's pair."""
        return int(self._look_up(module, "rank_pattern", "r"))

    def scale_of(self, module: str) -> float:
        """Return the factor of B @ A (peft/tuners/lora/layer.py: update_layer)."""
        rank, alpha = self.rank_of(module), self._look_up(module, "alpha_pattern", "lora_alpha")
        return alpha / math.sqrt(rank) if self.values.get("use_rslora") else alpha / rank

    def parameters_of(self, module: str) -> list[str]:
        """Return the names that `target_parameters` adapts in a module, which may have other parameters beside them.

        PEFT compares the ends of names (peft/tuners/tuners_utils.py: _inject_parameters).
        """
        targets = [target.rpartition(".") for target in self.values.get("target_parameters") or ()]
        return sorted({f"{module}.{name}" for of, _, name in targets if not of or f".{module}".endswith(f".{of}")})

    def _look_up(self, module: str, patterns: str, key: str) -> float:
        # peft/utils/other.py: get_pattern_key
        for pattern, value in (self.values.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        return float(self.values[key])

    def text(self, *, has_own_base: bool) -> str:
        """Return the file to write beside the adapter, as PEFT writes it (peft/config.py: save_pretrained).

        Args:
            has_own_base: whether the output contains the base model as the source holds it.
        """
        values = dict(self.values)
        if has_own_base and _changes_base(values):
            values["init_lora_weights"] = True
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    def notes(self, *, has_own_base: bool) -> list[tuple[str, str]]:
        """Return the report's notes on the file."""
        found = []
        if self.is_completed:
            says = f"{os.path.basename(self.path)} says r {self.values['r']} and lora_alpha {self.values['lora_alpha']}"
            assumed = "that it is not rslora" + (", and that no bias was trained," if has_own_base else "")
            found.append(f"{says}; the rest follows from names and shapes, and {assumed} is assumed")
        if has_own_base and _changes_base(self.values):
            kind = self.values["init_lora_weights"]
            says = f"{CONFIG_NAME} says true, that it may not be changed again"
            found.append(f"init_lora_weights {kind} changed the base model, which is written so; {says}")
        if has_own_base and self.values.get("bias", "none") != "none":
            found.append(f"biases were trained too ({self.values['bias']}); adapter and base model both contain them")
        return [("adapter-config", text) for text in found]


def _changes_base(values: Mapping[str, Any]) -> bool:
    kind = values.get("init_lora_weights")
    return isinstance(kind, str) and kind.lower().startswith(_CHANGES_BASE)


def find_config(
    given: str | os.PathLike[str] | None, place: str, names: AdapterNames, shapes: Mapping[str, Sequence[int]]
) -> AdapterConfig:
    """Return the adapter's configuration: the given file, else the file in the source, or in its checkpoint's root.

    Args:
        given: path of a configuration file; None: search for one.
        place: path of the source.
        names: names of the adapter's tensors.
        shapes: shapes of the source's tensors by name.

    Raises:
        UsageError: there is no configuration, or it lacks a required value, or it is not a LoRA's.
        CorruptError: the file is not a JSON object, or PEFT does not write such values.
        ContradictionError: the configuration and the adapter's tensors disagree.
    """
    found = search_config(given, place, names, shapes)
    if found is None:
        raise UsageError(
            f"no file states the rank and alpha of the adapter in {place}",
            file=place,
            got=f"no {', no '.join(_PLACES)} in it, nor in the checkpoint's root",
            want="r and lora_alpha",
            next_step=_NEXT_STEP,
        )
    return found


def search_config(
    given: str | os.PathLike[str] | None, place: str, names: AdapterNames, shapes: Mapping[str, Sequence[int]]
) -> AdapterConfig | None:
    """Return the adapter's configuration as `find_config` does; None where no file of it lies. Other errors are its."""
    path = _find_path(given, place)
    if path is None:
        return None
    try:
        values = read_config(path)
    except IncompleteError as error:
        raise UsageError(
            f"the adapter's configuration {path} cannot be read: No such file",
            file=path,
            next_step=_NEXT_STEP,
        ) from error
    return parse_adapter_config(values, path, names, shapes)


def read_kind(given: str | os.PathLike[str] | None, place: str) -> str | None:
    """Return the `peft_type` that an adapter's configuration states; None where no file of it states one."""
    with suppress(XrankError, KeyError):
        path = _find_path(given, place) if places.exists(place) else None
        return None if path is None else str(read_config(path)["peft_type"])[:80]
    return None


def _find_path(given: str | os.PathLike[str] | None, place: str) -> str | None:
    folders = find_checkpoint_folders(place, place)
    lying = (os.path.join(folder, name) for folder in folders for name in _PLACES)
    return os.fspath(given) if given is not None else next(filter(places.is_file, lying), None)


def parse_adapter_config(
    values: Mapping[str, Any], path: str, names: AdapterNames, shapes: Mapping[str, Sequence[int]]
) -> AdapterConfig:
    """Parse the content of an adapter_config.json as the configuration of these tensors.

    Args:
        values: the content.
        path: path of the file; without a file, the name of the content in errors.
        names: names of the adapter's tensors.
        shapes: shapes of the source's tensors by name.

    Raises:
        UsageError: the content lacks a required value, or is not a LoRA's.
        CorruptError: PEFT does not write such values.
        ContradictionError: the content and the adapter's tensors disagree.
    """
    missing = [key for key in ("r", "lora_alpha") if values.get(key) is None]
    if missing or values.get("peft_type", "LORA") != "LORA":
        raise UsageError(
            f"{path}: says no {' and no '.join(missing)}" if missing else f"{path}: is not the configuration of a LoRA",
            file=path,
            got=f"peft_type {values['peft_type']}"
            if not missing
            else f"the keys {', '.join(sorted(values)) or 'none'}",
            want="LORA" if not missing else "r and lora_alpha",
            next_step=_NEXT_STEP,
        )
    _check(values, path)
    is_completed = "peft_type" not in values
    config = AdapterConfig(_complete(values, names, shapes) if is_completed else values, path, is_completed)
    check_ranks(config, names.pairs, shapes)
    for key, kind, tensors in _optional_tensors(names):
        if bool(tensors) == bool(config.values.get(key)) or not names.pairs:
            continue
        if is_completed and key == "trainable_token_indices":
            raise UsageError(
                f"{path}: says not which tokens' rows {tensors[0]} replaces",
                tensor=tensors[0],
                file=path,
                got=f"no {key}",
                want=f"the {key} that the adapter was trained with",
                next_step=_WHOLE,
            )
        raise ContradictionError(
            f"{path} and the adapter's tensors disagree about {key}",
            tensor=tensors[0] if tensors else names.pairs[0].a,
            file=path,
            got=f"{key} {config.values.get(key)}",
            want=f"{'a value' if tensors else 'none'}, as there are {len(tensors)} tensors {kind}",
            next_step=_TRAINED_WITH,
        )
    return config


def _optional_tensors(names: AdapterNames) -> tuple[tuple[str, str, list[str]], ...]:
    """Return (key, kind, names in the source) of tensors that an adapter has if its configuration has the key."""
    return (
        ("use_dora", "lora_magnitude_vector", [pair.magnitude for pair in names.pairs if pair.magnitude is not None]),
        ("lora_bias", "lora_B.bias", [bias for pair in names.pairs for bias in pair.biases]),
        ("trainable_token_indices", "trainable_tokens_delta", list(names.tokens.values())),
    )


def _check(values: Mapping[str, Any], path: str) -> None:
    """Check the types of the values that enter calculations."""
    numbers = {
        "r": [values["r"]],
        "lora_alpha": [values["lora_alpha"]],
        **{key: _values_of(values.get(key), key, path) for key in ("rank_pattern", "alpha_pattern")},
    }
    for key, found in numbers.items():
        for number in found:
            kinds = (int,) if key in ("r", "rank_pattern") else (int, float)
            if type(number) not in kinds or not 0 < number < 1e9:
                raise _wrong(path, key, number, "a number above 0")
    for key in ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"):
        if values.get(key) not in (None, True, False):
            raise _wrong(path, key, values[key], "true or false")
    targets = values.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _wrong(path, "target_parameters", targets, "a list of names")


def _values_of(patterns: Any, key: str, path: str) -> list[Any]:
    if patterns is None:
        return []
    if not isinstance(patterns, dict):
        raise _wrong(path, key, patterns, "an object")
    for pattern in patterns:
        try:
            compile_pattern(pattern)
        except ValueError:
            raise _wrong(path, key, pattern, "regular expressions as keys") from None
    return list(patterns.values())


def _wrong(path: str, key: str, got: object, want: str) -> CorruptError:
    return CorruptError(
        f"{path}: {key} is not what PEFT writes", file=path, got=repr(got)[:200], want=want, next_step=_NEXT_STEP
    )


def check_ranks(config: AdapterConfig, pairs: Sequence[Pair], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that every pair has its rank from the configuration.

    Raises:
        ContradictionError: a pair has another rank, or its halves do not fit each other.
    """
    for pair in pairs:
        a, b = shapes[pair.a], shapes[pair.b]
        rank = config.rank_of(pair.module)
        # A parameter of experts has the rows of all of them.
        is_stack = any(a[0] % config.rank_of(name) == 0 for name in config.parameters_of(pair.module)) if a else False
        if len(a) < 2 or len(b) < 2 or a[0] != b[1] or not (a[0] == rank or is_stack):
            raise ContradictionError(
                f"{pair.module}: its adapter has another rank than {os.path.basename(config.path)} says",
                tensor=pair.a,
                file=config.path,
                got=f"lora_A {list(a)} and lora_B {list(b)}",
                want=f"[{rank}, …] and [… , {rank}]",
                next_step=_TRAINED_WITH,
            )


def _complete(values: Mapping[str, Any], names: AdapterNames, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return a whole configuration from PEFT's defaults and from names and shapes."""
    adapted = {pair.module for pair in names.pairs}
    last = {module.rpartition(".")[2] for module in adapted}
    # PEFT adapts every module with such an ending. If unadapted modules share an ending, only whole paths are exact.
    also = {module for module in names.modules if module.rpartition(".")[2] in last} - adapted
    if names.is_alone:
        also |= _find_unadapted_layers(adapted)
    trained = {name.rpartition(".")[0] for name in names.trained}
    biases: set[str] = set()
    if names.is_alone:
        # PEFT's names do not contain modules_to_save, and biases that were trained lack their module's weight.
        held = [name.rpartition(".") for name in names.base.values()]
        weights = {module for module, _, leaf in held if leaf != "bias"} - adapted - names.tokens.keys()
        biases = {module for module, _, leaf in held if leaf == "bias"} - weights - trained
        trained |= weights if names.adapter is None else set()
    return {
        "base_model_name_or_path": None,
        "bias": "none" if not biases else "lora_only" if biases <= adapted else "all",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_bias": any(pair.biases for pair in names.pairs),
        "lora_dropout": 0.0,
        "modules_to_save": sorted(trained) or None,
        "task_type": None,
        "use_dora": any(pair.magnitude is not None for pair in names.pairs),
        "use_rslora": False,
        **values,
        "peft_type": "LORA",
        "target_modules": sorted(adapted if also else last),
    }


def _find_unadapted_layers(adapted: set[str]) -> set[str]:
    """Return modules that adapted ones show to exist: the same as an adapted module in another layer up to the last."""
    numbers = [re.findall(r"(?<=\.)\d+(?=\.)", f".{module}.") for module in adapted]
    last = max((int(found[0]) for found in numbers if len(found) == 1), default=-1)
    layered = {re.sub(r"(?<=\.)\d+(?=\.)", "{}", module) for module in adapted}
    return {each.replace("{}", str(k)) for each in layered if each.count("{}") == 1 for k in range(last + 1)} - adapted


def is_turned(module: str, fit: tuple[bool, bool], kinds: Collection[tuple[bool, bool]], config: AdapterConfig) -> bool:
    """Return whether a weight is stored [in, out]: by its shape, or, if it is square, by `kinds` of the other weights.

    PEFT decides by the layer's class and sets fan_in_fan_out to the value of the last layer (peft/tuners/lora/model.py:
    _create_new_module): in a model with both kinds, that value does not describe a square weight.
    """
    straight, turned = fit
    if not straight:
        return True
    if not turned:
        return False
    says = bool(config.values.get("fan_in_fan_out"))
    if config.is_completed and len(kinds) == 1:
        return (False, True) in kinds
    is_doubtful = config.is_completed and not says and module.rpartition(".")[2] in _CONV1D
    if is_doubtful or any(kind != (not says, says) for kind in kinds):
        other = "names of layers that are either" if is_doubtful else "other weights that lie the other way"
        raise UsageError(
            f"{module}.weight: whether it is stored [in, out] or [out, in] is not known",
            tensor=f"{module}.weight",
            file=config.path,
            got=f"a square weight, fan_in_fan_out {str(says).lower()}, and {other}",
            want="weights of one kind, or PEFT's own adapter_config.json",
            next_step=either(
                f"give that as {option('adapter_config')}",
                f"use {option('adapter', 'separate')}, and merge it with peft",
            ),
        )
    return says
