"""Sorting of a source's tensors into a LoRA adapter's and the base model's, by the names that PEFT gives them.

base_model.model.<module>.base_layer.weight             the base's (peft/tuners/tuners_utils.py: BaseTunerLayer)
base_model.model.<module>.lora_A.<adapter>.weight       [r, in]; lora_B [out, r] (peft/tuners/lora/layer.py: Linear)
base_model.model.<module>.lora_embedding_A.<adapter>    [r, rows]; lora_embedding_B [columns, r]: Embedding
base_model.model.<module>.lora_magnitude_vector.<adapter>.weight    DoRA's
base_model.model.<module>.lora_A.<adapter>.weight       [experts * r, in]; lora_B [out, r * experts]: a parameter of the
                                                        module; each further parameter has one base_layer more
                                                        (peft/tuners/lora/layer.py: ParamWrapper)
base_model.model.<module>.modules_to_save.<adapter>.weight          trained whole, in place of
base_model.model.<module>.original_module.weight                    (peft/utils/other.py: ModulesToSaveWrapper)
base_model.model.<module>.token_adapter.trainable_tokens_delta.<adapter>    rows that replace some rows of
base_model.model.<module>.token_adapter.base_layer.weight           (peft/tuners/trainable_tokens/layer.py)

The names in a folder that PEFT saves contain neither the adapter's name nor "modules_to_save"
(peft/utils/save_and_load.py: get_peft_model_state_dict). It saves trained biases of the base under their own names
(peft/tuners/tuners_utils.py: _get_learnable_bias_state_dict).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct, field

from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    UsageError,
    XrankError,
    either,
    make_sentence,
    needs,
    option,
)
from xrank.layout.tensor_name import compile_pattern
from xrank.readers.records import find_checkpoint_folders
from xrank.recipes.found_source import read_config
from xrank.storage import places

CONFIG_NAME = "adapter_config.json"
PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(embedding_A|embedding_B|magnitude_vector|A|B)(?:\.(.+))?")
_TRAINED = re.compile(r"(.+)\.modules_to_save\.([^.]+)\.(.+)")
# PEFT's bias="all" saves the biases of modules_to_save two times more, and reads neither (peft/tuners/tuners_utils.py).
_REPEATED = re.compile(r"(.+)\.modules_to_save\.bias")
_ORIGINAL = re.compile(r"(.+)\.original_module\.(.+)")
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.([^.]+))?")
_MARKS = (".lora_", ".modules_to_save.", ".token_adapter.trainable_tokens_delta")
_WRAPPER = ".base_layer"
_WRAPPERS = re.compile(r"(\.base_layer)+$")
_BASE = f"{_WRAPPER}."
# Other adapters: the first word of a parameter's name -> kind (peft/tuners; Megatron-Bridge: peft/utils.py).
_OTHERS = (
    r"(?:^|\.)(?:(ia3)_l|(hada)_[wt]\d(?:_[ab])?|(lokr)_[wt]\d(?:_[ab])?|(b?oft)_[rRs]|(lora)_E|(vera)_lambda_[bd]"
    r"|(fourierft)_spectrum|(ln)_tuning_layers|(?<!\.token_adapter\.)(trainable)_tokens_delta|(adaption)_(?:prompt|gate)"
    # SAM has a prompt_encoder too, but not with an adapter's name and these tables.
    r"|(prompt)_(?:embeddings$|encoder\.[^.]+\.(?:embedding\.weight|trainable_embedding|delta_embedding\.weight)$)"
    r"|(to)_wrap|(adapter)\.linear_(?:in|out))(?:\.|$)"
)
_BRIDGE = "Megatron-Bridge's LoRA"
_PROMPT = "a prompt (prompt tuning, prefix tuning or P-tuning)"
_KINDS = {"ia3": "IA3", "hada": "LoHa", "lokr": "LoKr", "oft": "OFT", "boft": "BOFT", "lora": "AdaLoRA", "vera": "VeRA"}
_KINDS |= {"fourierft": "FourierFT", "ln": "LN tuning", "trainable": "trainable tokens without LoRA"}
_KINDS |= {"adaption": "an adaption prompt", "prompt": _PROMPT, "to": _BRIDGE, "adapter": _BRIDGE}
_MERGE = "load it with PEFT, save the result of merge_and_unload(), and gather that"
_KEEP = "keep the folder that PEFT's save_pretrained writes, for PeftModel.from_pretrained: no model can contain it"
_NEXT_STEPS = {
    "an adaption prompt": _KEEP,
    _PROMPT: _KEEP,
    _BRIDGE: "merge it into its model with Megatron-Bridge, or export it for PEFT with Megatron-Bridge; then gather "
    "the result",
}


class Pair(Struct, frozen=True):
    """A module's adapter; all fields but `module` are names in the source."""

    module: str
    """The module's name in the base model."""
    a: str
    b: str
    is_embedding: bool = False
    magnitude: str | None = None
    """Name of DoRA's magnitude vector."""
    biases: tuple[str, ...] = ()
    """Names of the biases of lora_A and lora_B."""
    depth: int = 0
    """Number of wrappers around this one, where several parameters of the module are adapted."""


class AdapterNames(Struct, frozen=True):
    """The one adapter in a source, as far as the source's names describe it."""

    adapter: str | None
    """The adapter's name; None where the tensors' names lack it, as in a folder that PEFT saved."""
    pairs: tuple[Pair, ...]
    saved: Mapping[str, str]
    """Name in the source -> name in a PEFT folder, for each tensor of the adapter."""
    base: Mapping[str, str]
    """Name in the source -> name in the base model, for each other tensor."""
    trained: Mapping[str, str] = field(default_factory=dict)
    """Name in the base model -> name in the source, of tensors trained whole beside the original (modules_to_save)."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Module with trained rows -> name of those rows in the source (trainable_token_indices)."""

    @property
    def modules(self) -> frozenset[str]:
        """The base model's modules that have tensors in this source."""
        return frozenset(name.rpartition(".")[0] for name in self.base.values())

    def biases_of(self, trained: object) -> dict[str, str]:
        """Return the biases that PEFT saves with the adapter: name in the source -> name in a PEFT folder."""
        adapted = {pair.module for pair in self.pairs}
        return {
            name: PREFIX + name.removeprefix(PREFIX)
            for name, bare in self.base.items()
            if bare.endswith(".bias")
            and (trained == "all" or (trained == "lora_only" and bare[:-5] in adapted))
            and bare not in self.trained
        }

    @property
    def is_alone(self) -> bool:
        """Whether the source does not hold a base model, but only the part of one that PEFT saves.

        That part may be the base of adapted embeddings (peft/utils/save_and_load.py: save_embedding_layers), and
        biases. The weights of other modules decide, if there are any.
        """
        if not self.pairs:
            return not self.base
        modules = {name.rpartition(".")[0] for name in self.base.values() if not name.endswith(".bias")}
        matrices = [pair.module for pair in self.pairs if not pair.is_embedding]
        if not matrices:
            return modules <= {pair.module for pair in self.pairs}
        return modules.isdisjoint(matrices)


def find_adapter(names: Sequence[str], path: str, own: Collection[str] = ()) -> AdapterNames | None:
    """Return the names of a LoRA adapter, or None if there is no adapter."""
    marked = [name for name in names if any(mark in name for mark in _MARKS) and name not in own]
    if not marked:
        return None
    refuse_other_kinds(names, path, own, is_lora=True)
    return _Sorting(names, marked, path).result()


def refuse_other_kinds(names: Iterable[str], path: str, own: Collection[str] = (), *, is_lora: bool = False) -> None:
    """Refuse adapters that are not PEFT's LoRA; a plain model has no such names.

    Beside names of a LoRA (`is_lora`), PEFT's prefix is no sign of another kind.
    """
    foreign = [name for name in names if name not in own]
    text = "\n".join(foreign)  # the pattern takes a second for 100,000 names, and most models have no such words
    is_likely = any(f"{word}_" in text or f".{word}." in text for word in _KINDS)
    found = next(filter(None, map(re.compile(_OTHERS).search, foreign)), None) if is_likely else None
    generic = next((name for name in foreign if name.startswith(PREFIX) and not is_lora), None)
    if found is None and generic is None:
        return
    kind = _KINDS[found[found.lastindex or 0]] if found is not None else "an adapter of PEFT that is not LoRA"
    name = found.string if found is not None else generic
    step = _NEXT_STEPS.get(kind, _MERGE)
    problem = f"{path} contains {kind}, which xrank can neither copy nor merge"
    raise UsageError(
        problem, tensor=name, file=path, got=name, want="only the model's own tensors, or those of LoRA", next_step=step
    )


class _Sorting:
    """Sorts a source's names into the adapter's and the base model's."""

    def __init__(self, names: Sequence[str], marked: Sequence[str], path: str) -> None:
        self._path = path
        self._halves: dict[str, dict[str, str]] = {}
        self._biases: dict[str, list[str]] = {}
        self._saved: dict[str, str] = {}
        self._trained: dict[str, str] = {}
        self._tokens: dict[str, str] = {}
        self._names = {_bare(name) for name in names}
        self._adapters: dict[str | None, str] = {}
        for name in marked:
            self._take(name)
        if len(self._adapters) > 1:
            named = (f"{adapter or 'one without a name'} ({name})" for adapter, name in self._adapters.items())
            step = "let the trainer save one, or merge the others with PEFT"
            raise UsageError(
                f"{path} holds several adapters", file=path, got=", ".join(named), want="one adapter", next_step=step
            )
        adapted = {*self._halves, *(f"{module}.token_adapter" for module in self._tokens)}
        self._base = self._base_names([name for name in names if name not in self._saved], adapted)

    def result(self) -> AdapterNames:
        pairs = tuple(self._pair(module, kinds) for module, kinds in self._halves.items())
        return AdapterNames(next(iter(self._adapters)), pairs, self._saved, self._base, self._trained, self._tokens)

    def _take(self, name: str) -> None:
        whole = _TRAINED.fullmatch(name)
        if whole is not None and ".lora_" not in name:
            trained = f"{_bare(whole[1])}.{whole[3]}"
            self._trained[trained] = name
            self._saved[name] = PREFIX + trained
            self._adapters.setdefault(whole[2], name)
            return
        rows = _TOKENS.fullmatch(name)
        if rows is not None:
            module = _bare(rows[1])
            self._tokens[module] = name
            self._saved[name] = f"{PREFIX}{module}.token_adapter.trainable_tokens_delta"
            self._adapters.setdefault(rows[2], name)
            return
        if _REPEATED.fullmatch(name):
            self._saved[name] = name
            return
        match = _LORA.fullmatch(name)
        found = None if match is None else _adapter_and_leaf(match[2], match[3])
        if match is None or found is None:
            want = "LoRA as PEFT names it: <module>.lora_A.<adapter>.weight and lora_B"
            step = "merge the adapter with the library that trained it, then gather the result"
            problem = f"{name} is an adapter's tensor of an unknown kind"
            raise UsageError(problem, tensor=name, file=self._path, got=name, want=want, next_step=step)
        module, kind, (adapter, leaf) = _bare(match[1]), match[2], found
        self._adapters.setdefault(adapter, name)
        self._saved[name] = f"{PREFIX}{module}.lora_{kind}{leaf}"
        if leaf == ".bias":
            self._biases.setdefault(module, []).append(name)
        else:
            self._halves.setdefault(module, {})[kind] = name

    def _pair(self, module: str, kinds: Mapping[str, str]) -> Pair:
        for a, b in (("A", "B"), ("embedding_A", "embedding_B")):
            if a in kinds and b in kinds:
                biases = tuple(self._biases.get(module, ()))
                bare = _WRAPPERS.sub("", module)
                depth = (len(module) - len(bare)) // len(_WRAPPER)
                return Pair(bare, kinds[a], kinds[b], a != "A", kinds.get("magnitude_vector"), biases, depth)
        found, halves = next(iter(kinds.values())), ", ".join(f"lora_{kind}" for kind in kinds)
        raise self._gap(found, "the other half of its pair is missing", f"{halves} of {module}", "lora_A and lora_B")

    def _gap(
        self, name: str, problem: str, got: str, want: str, step: str = "check that the checkpoint is whole"
    ) -> ContradictionError:
        return ContradictionError(
            make_sentence(name, problem), tensor=name, file=self._path, got=got, want=want, next_step=step
        )

    def _base_names(self, names: Iterable[str], modules: Collection[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in names:
            bare = _bare(name)
            if _BASE in name:
                module, _, rest = bare.partition(_BASE)
                rest = rest.removeprefix(_BASE[1:] * rest.count(_BASE[1:]))
                if module not in modules:
                    problem = "the adapter of its module is missing"
                    raise self._gap(name, problem, f"no lora_A and lora_B of {module}", "both")
                bare = f"{module.removesuffix('.token_adapter')}.{rest}"
            original = _ORIGINAL.fullmatch(bare)
            if original is not None:
                bare = f"{original[1]}.{original[2]}"
                if bare in self._names:  # as PEFT saves them with bias="all"
                    self._saved[name] = name
                    continue
                if bare not in self._trained:
                    saved = f"{original[1]}.modules_to_save"
                    problem = "the trained tensor that replaces it is missing"
                    raise self._gap(name, problem, f"no {saved}", f"{saved}.<adapter>.{original[2]}")
            if bare in taken:
                step = "check that the files are those of one model"
                raise self._gap(bare, "two tensors would have this name", f"{taken[bare]} and {name}", "one", step)
            taken[bare] = name
            found[name] = bare
        return found


def _bare(name: str) -> str:
    return name.removeprefix(PREFIX)


def _adapter_and_leaf(kind: str, rest: str | None) -> tuple[str | None, str] | None:
    """Return the adapter's name, if present, and the ending of the name in a PEFT folder; None for other names."""
    pieces = rest.split(".") if rest else []
    if kind in ("A", "B"):
        if pieces and pieces[-1] in ("weight", "bias") and len(pieces) <= 2:
            return (pieces[0] if len(pieces) == 2 else None), f".{pieces[-1]}"
        return None
    # PEFT's folders contain the older form of DoRA's names, without "weight" (peft/tuners/lora/model.py).
    if kind == "magnitude_vector" and pieces[-1:] == ["weight"]:
        pieces.pop()
    return (pieces[0] if pieces else None, "") if len(pieces) <= 1 else None


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


class AdapterConfig(Struct, frozen=True):
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
        """Return the file to write beside the adapter, as PEFT writes it (peft/config.py: save_pretrained)."""
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
    """Return the adapter's configuration: the given file, else the file in the source, or in its checkpoint's root."""
    found = search_config(given, place, names, shapes)
    if found is None:
        got = f"no {', no '.join(_PLACES)} in it, nor in the checkpoint's root"
        problem = f"no file contains the rank and alpha of the adapter in {place}"
        raise UsageError(problem, file=place, got=got, want="r and lora_alpha", next_step=_NEXT_STEP)
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
        problem = f"the adapter's configuration {path} cannot be read: No such file"
        raise UsageError(problem, file=path, next_step=_NEXT_STEP) from error
    return parse_adapter_config(values, path, names, shapes)


def read_kind(given: str | os.PathLike[str] | None, place: str) -> str | None:
    """Return the `peft_type` that an adapter's configuration states; None where no file of it states one."""
    with suppress(XrankError, KeyError):
        path = _find_path(given, place) if places.exists(place) else None
        return None if path is None else str(read_config(path)["peft_type"])[:80]
    return None


def _find_path(given: str | os.PathLike[str] | None, place: str) -> str | None:
    lying = (os.path.join(folder, name) for folder in find_checkpoint_folders(place, place) for name in _PLACES)
    return os.fspath(given) if given is not None else next(filter(places.is_file, lying), None)


def parse_adapter_config(
    values: Mapping[str, Any], path: str, names: AdapterNames, shapes: Mapping[str, Sequence[int]]
) -> AdapterConfig:
    """Parse the content of an adapter_config.json as the configuration of these tensors."""
    missing = [key for key in ("r", "lora_alpha") if values.get(key) is None]
    if missing:
        problem = f"{path} has no {' and no '.join(missing)}"
        got = f"the keys {', '.join(sorted(values)) or 'none'}"
        raise UsageError(problem, file=path, got=got, want="r and lora_alpha", next_step=_NEXT_STEP)
    if values.get("peft_type", "LORA") != "LORA":
        problem = f"{path} is not a LoRA configuration"
        raise UsageError(problem, file=path, got=f"peft_type {values['peft_type']}", want="LORA", next_step=_NEXT_STEP)
    _check(values, path)
    is_completed = "peft_type" not in values
    config = AdapterConfig(_complete(values, names, shapes) if is_completed else values, path, is_completed)
    check_ranks(config, names.pairs, shapes)
    for key, kind, tensors in (
        ("use_dora", "lora_magnitude_vector", [pair.magnitude for pair in names.pairs if pair.magnitude is not None]),
        ("lora_bias", "lora_B.bias", [bias for pair in names.pairs for bias in pair.biases]),
        ("trainable_token_indices", "trainable_tokens_delta", list(names.tokens.values())),
    ):
        if bool(tensors) == bool(config.values.get(key)) or not names.pairs:
            continue
        if is_completed and key == "trainable_token_indices":
            raise UsageError(
                f"{path} does not list the tokens of the rows that {tensors[0]} replaces",
                tensor=tensors[0],
                file=path,
                got=f"no {key}",
                want=f"the {key} of the training",
                next_step=_WHOLE,
            )
        tensor = tensors[0] if tensors else names.pairs[0].a
        want = f"{'a value' if tensors else 'none'}, as there are {len(tensors)} tensors {kind}"
        problem = f"{path} and the adapter's tensors disagree about {key}"
        raise _mismatch(config, problem, tensor, f"{key} {config.values.get(key)}", want)
    return config


def _check(values: Mapping[str, Any], path: str) -> None:
    """Check the types of the values that enter calculations."""
    numbers = {key: [values[key]] for key in ("r", "lora_alpha")}
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = {} if values.get(key) is None else values[key]
        if not isinstance(patterns, dict):
            raise _wrong(path, key, patterns, "an object")
        for pattern in patterns:
            try:
                compile_pattern(pattern)
            except ValueError:
                raise _wrong(path, key, pattern, "regular expressions as keys") from None
        numbers[key] = list(patterns.values())
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


def _wrong(path: str, key: str, got: object, want: str) -> CorruptError:
    return CorruptError(
        f"{path}: {key} is not what PEFT writes", file=path, got=repr(got)[:200], want=want, next_step=_NEXT_STEP
    )


def _mismatch(config: AdapterConfig, problem: str, tensor: str, got: str, want: str) -> ContradictionError:
    return ContradictionError(problem, tensor=tensor, file=config.path, got=got, want=want, next_step=_TRAINED_WITH)


def check_ranks(config: AdapterConfig, pairs: Sequence[Pair], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that every pair has its rank from the configuration."""
    for pair in pairs:
        a, b = shapes[pair.a], shapes[pair.b]
        rank = config.rank_of(pair.module)
        # A parameter of experts has the rows of all of them.
        is_stack = any(a[0] % config.rank_of(name) == 0 for name in config.parameters_of(pair.module)) if a else False
        if len(a) < 2 or len(b) < 2 or a[0] != b[1] or not (a[0] == rank or is_stack):
            got, want = f"lora_A {list(a)} and lora_B {list(b)}", f"[{rank}, …] and [… , {rank}]"
            problem = f"{pair.module}: its adapter does not have the rank in {os.path.basename(config.path)}"
            raise _mismatch(config, problem, pair.a, got, want)


def _complete(values: Mapping[str, Any], names: AdapterNames, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return a whole configuration from PEFT's defaults and from names and shapes."""
    adapted = {pair.module for pair in names.pairs}
    last = {module.rpartition(".")[2] for module in adapted}
    # PEFT adapts every module with such an ending. If unadapted modules share an ending, only whole paths are exact.
    also = {module for module in names.modules if module.rpartition(".")[2] in last} - adapted
    if names.is_alone:
        # Adapted modules show that others exist: the same module in another layer, up to the last one.
        numbers = [re.findall(r"(?<=\.)\d+(?=\.)", f".{module}.") for module in adapted]
        count = 1 + max((int(found[0]) for found in numbers if len(found) == 1), default=-1)
        layered = {re.sub(r"(?<=\.)\d+(?=\.)", "{}", module) for module in adapted}
        every = {each.replace("{}", str(k)) for each in layered if each.count("{}") == 1 for k in range(count)}
        also |= every - adapted
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
        other = "names that occur for both kinds of layers" if is_doubtful else "other weights that are transposed"
        step = either(
            f"give PEFT's own adapter_config.json as {option('adapter_config')}",
            f"use {option('adapter', 'separate')}, and merge it with PEFT",
        )
        got = f"a square weight, fan_in_fan_out {str(says).lower()}, and {other}"
        problem = f"{module}.weight: whether it is stored [in, out] or [out, in] is not known"
        raise UsageError(
            problem, tensor=f"{module}.weight", file=config.path, got=got, want="weights of one kind", next_step=step
        )
    return says
