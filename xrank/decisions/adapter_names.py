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

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xrank.errors import ContradictionError, UsageError

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
_OTHERS = re.compile(
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
_MERGE = "let PEFT load it, save what merge_and_unload() returns, and gather that"
_KEEP = "keep the folder that PEFT's save_pretrained writes, for PeftModel.from_pretrained: no model can contain it"
_NEXT_STEPS = {
    "an adaption prompt": _KEEP,
    _PROMPT: _KEEP,
    _BRIDGE: "merge it into its model with Megatron-Bridge, or let that export it for PEFT; then gather what it writes",
}


@dataclass(frozen=True, slots=True)
class Pair:
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


@dataclass(frozen=True, slots=True)
class AdapterNames:
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
        """Return the biases that PEFT saves with the adapter: name in the source -> name in a PEFT folder.

        Args:
            trained: the value of `bias` in the adapter's configuration.
        """
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
    """Find the names that are a LoRA adapter's; return None if there are none.

    Args:
        names: names of the source's tensors.
        path: path of the source, for errors.
        own: names that are the model's own, even if they look like an adapter's.

    Raises:
        ContradictionError: half of a pair, or all of it, is missing.
        ContradictionError: two names mean one tensor of the base model.
        UsageError: there are several adapters, or an adapter's tensor is of another kind than LoRA.
    """
    marked = [name for name in names if any(mark in name for mark in _MARKS) and name not in own]
    if not marked:
        return None
    refuse_other_kinds(names, path, own, is_lora=True)
    return _Sorting(names, marked, path).result()


def refuse_other_kinds(names: Iterable[str], path: str, own: Collection[str] = (), *, is_lora: bool = False) -> None:
    """Refuse adapters that are not PEFT's LoRA; a plain model has no such names.

    Args:
        names: names of the source's tensors.
        path: path of the source, for errors.
        own: names that are the model's own.
        is_lora: whether there are names of a LoRA too, beside which PEFT's prefix is no sign of another kind.

    Raises:
        UsageError: there is a name that only another kind of adapter has, or that only PEFT gives.
    """
    foreign = [name for name in names if name not in own]
    text = "\n".join(foreign)  # the pattern takes a second for 100,000 names, and most models have no such words
    is_likely = any(f"{word}_" in text or f".{word}." in text for word in _KINDS)
    found = next(filter(None, map(_OTHERS.search, foreign)), None) if is_likely else None
    generic = next((name for name in foreign if name.startswith(PREFIX) and not is_lora), None)
    if found is None and generic is None:
        return
    kind = _KINDS[found[found.lastindex or 0]] if found is not None else "an adapter of PEFT that is not LoRA"
    name = found.string if found is not None else generic
    raise UsageError(
        f"{path} contains {kind}, which xrank neither copies nor merges",
        tensor=name,
        file=path,
        got=name,
        want="a model's own names, or LoRA's as PEFT gives them",
        next_step=_NEXT_STEPS.get(kind, _MERGE),
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
            raise UsageError(
                f"{path} holds several adapters",
                file=path,
                got=", ".join(
                    f"{adapter or 'one without a name'} ({name})" for adapter, name in self._adapters.items()
                ),
                want="one adapter",
                next_step="let the trainer save one, or merge the others with peft",
            )
        adapted = {*self._halves, *(f"{module}.token_adapter" for module in self._tokens)}
        self._base = self._base_names([name for name in names if name not in self._saved], adapted)

    def result(self) -> AdapterNames:
        pairs = tuple(self._pair(module, kinds) for module, kinds in self._halves.items())
        return AdapterNames(next(iter(self._adapters)), pairs, self._saved, self._base, self._trained, self._tokens)

    def _take(self, name: str) -> None:
        """Sort one of the adapter's names."""
        whole = _TRAINED.fullmatch(name)
        if whole is not None and ".lora_" not in name:
            module, adapter, rest = _bare(whole[1]), whole[2], whole[3]
            self._trained[f"{module}.{rest}"] = name
            self._saved[name] = f"{PREFIX}{module}.{rest}"
            self._adapters.setdefault(adapter, name)
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
            raise UsageError(
                f"{name}: is an adapter's tensor of no kind that is known",
                tensor=name,
                file=self._path,
                got=name,
                want="LoRA as PEFT names it: <module>.lora_A.<adapter>.weight and lora_B",
                next_step="merge the adapter with what trained it, then gather what it saves",
            )
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
        found = next(iter(kinds.values()))
        raise ContradictionError(
            f"{found}: the other half of its pair is missing",
            tensor=found,
            file=self._path,
            got=f"{', '.join(f'lora_{kind}' for kind in kinds)} of {module}",
            want="lora_A and lora_B",
            next_step="check that the checkpoint is whole",
        )

    def _base_names(self, names: Iterable[str], modules: Collection[str]) -> dict[str, str]:
        """Map the base model's tensors to its own names."""
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in names:
            bare = _bare(name)
            if _BASE in name:
                module, _, rest = bare.partition(_BASE)
                rest = rest.removeprefix(_BASE[1:] * rest.count(_BASE[1:]))
                if module not in modules:
                    raise ContradictionError(
                        f"{name}: its module has an adapter, and nothing of that is here",
                        tensor=name,
                        file=self._path,
                        got=f"no lora_A and lora_B of {module}",
                        want="both",
                        next_step="check that the checkpoint is whole",
                    )
                bare = f"{module.removesuffix('.token_adapter')}.{rest}"
            original = _ORIGINAL.fullmatch(bare)
            if original is not None:
                bare = f"{original[1]}.{original[2]}"
                if bare in self._names:  # as PEFT saves them with bias="all"
                    self._saved[name] = name
                    continue
                if bare not in self._trained:
                    raise ContradictionError(
                        f"{name}: the tensor that was trained in its place is missing",
                        tensor=name,
                        file=self._path,
                        got=f"no {original[1]}.modules_to_save",
                        want=f"{original[1]}.modules_to_save.<adapter>.{original[2]}",
                        next_step="check that the checkpoint is whole",
                    )
            if bare in taken:
                raise ContradictionError(
                    f"{bare}: two tensors would have this name",
                    tensor=bare,
                    file=self._path,
                    got=f"{taken[bare]} and {name}",
                    want="one",
                    next_step="check that the files are those of one model",
                )
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
