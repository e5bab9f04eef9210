"""Prove config.json by the tensors, and the tensors by the model's own layers, its type and its base model.

A model with another number of layers, or another size, would not be this model. Formats that record whole tensors
record no list of a model's names, and transformers gives random values to those that it does not find.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import pairwise
from operator import or_
from typing import Any

from msgspec import Struct

from xrank.errors import AGAIN, ContradictionError, either, needs, option
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import StoredModel
from xrank.recipes.adapter_names import find_adapter
from xrank.recipes.conversions import is_known_size, is_known_type
from xrank.recipes.found_source import BaseModel, FoundSource
from xrank.recipes.model_names import names_of_class
from xrank.recipes.proofs import lost_tensor, prove_family
from xrank.recipes.quantization import check_quantization, find_packed
from xrank.recipes.recipe_file import read_shipped_table
from xrank.recipes.ties import embedding_of
from xrank.words import likewise_text, plural

_Shape = tuple[int, ...]
# A longer number is not the index of a layer, and would make a mask of as many bits.
_LAYER_INDEX = re.compile(r"\.(\d{1,5})(?=\.)")
_OF_QUANTIZER = r"[._:][^.]*(scale|absmax|quant|zero_?point|zeros|g_idx|blocks|packed|qdata|amax)[^.]*$"
_UNEVEN = ".*modernv?bert.*|longcat_flash|pp_doclayout_v3|udop"
"""Model types whose first layer lacks a norm, or whose lists hold modules without tensors, or with tied ones."""
_OF_LAYERS = "layer|dense|share|skip|period|interval|freq|step|every|pattern|stride|ratio|sparse"


class Hole(Struct, frozen=True):
    """A tensor, or a module of a list, that a model lacks."""

    name: str
    like: str
    """Name of a tensor that the model has in its place in another module of the list."""
    num_others: int
    """Number of modules that have it, and are otherwise as the one that lacks it."""


class _Modules(Struct, frozen=True):
    """A list of modules: for each name in a module, the numbers of the modules that have it, as bits."""

    path: str
    masks: Mapping[str, int]

    @property
    def numbers(self) -> int:
        """Bits of all modules that have any tensor."""
        return reduce(or_, self.masks.values(), 0)


_Kind = tuple[frozenset[tuple[str, _Shape]], list[int]]
"""Names in a module with their shapes, and the numbers of the modules that have exactly these."""


def find_hole(shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None) -> Hole | None:
    """Return the first tensor that a model lacks as far as its layers show; None: they show none.

    A module of a list has a hole if it has only a part of the tensors of most others, in the same shapes, except where
    config.json gives layers of that place another form: by a list with an entry for each layer, or by a number
    (``num_kv_shared_layers``, ``layer_period``). Modules of several forms, such as stages of a vision tower, or layers
    of attention and of Mamba, show nothing of each other.
    """
    if any(re.fullmatch(_UNEVEN, kind) for kind in _list_types(config or {})):
        return None
    masks: dict[str, dict[str, int]] = {}
    for name in shapes:
        for match in _LAYER_INDEX.finditer(name):
            own, inner = masks.setdefault(name[: match.start()], {}), name[match.end() + 1 :]
            own[inner] = own.get(inner, 0) | 1 << int(match[1])
    # Lists of modules that have modules in them: a list of plain layers may have functions in between.
    lists = [_Modules(path, own) for path, own in masks.items() if any("." in inner for inner in own)]
    slots = _find_slots(lists)
    for modules in lists:
        numbers = modules.numbers
        is_numbered = numbers & (numbers + 1) == 0
        if is_numbered and all(mask == numbers for mask in modules.masks.values()):
            continue
        kinds = _group(modules, shapes)
        has_gap = not is_numbered and modules.path not in slots
        hole = (_find_gap(modules, kinds) if has_gap else None) or _find_lack(modules, kinds, config or {})
        if hole is not None:
            return hole
    return None


def _list_types(config: Mapping[str, Any]) -> Iterator[str]:
    yield str(config.get("model_type"))
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _list_types(value)


def _find_slots(lists: Sequence[_Modules]) -> set[str]:
    """Return the paths of lists with slots that another layer fills.

    Blocks that several layers share have a list with a slot for each layer, and weights in the slots of their own
    layers alone (Zamba2's adapters with ``num_mem_blocks``). So lists of one name in two layers have no number in
    common, and all numbers together.
    """
    kinds: dict[str, list[_Modules]] = {}
    for modules in lists:
        if (pattern := _LAYER_INDEX.sub(".*", f"{modules.path}.")) != f"{modules.path}.":
            kinds.setdefault(pattern, []).append(modules)
    found: set[str] = set()
    for alike in kinds.values():
        masks = {modules.numbers for modules in alike}
        total = reduce(or_, masks)
        if len(masks) > 1 and sum(mask.bit_count() for mask in masks) == total.bit_count() and total & (total + 1) == 0:
            found |= {modules.path for modules in alike}
    return found


def _group(modules: _Modules, shapes: Mapping[str, _Shape]) -> list[_Kind]:
    found: dict[frozenset[tuple[str, _Shape]], list[int]] = {}
    for number in _list_bits(modules.numbers):
        names = (inner for inner, mask in modules.masks.items() if mask >> number & 1)
        tensors = frozenset((inner, shapes[f"{modules.path}.{number}.{inner}"]) for inner in names)
        found.setdefault(tensors, []).append(number)
    return list(found.items())


def _list_bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _find_gap(modules: _Modules, kinds: Sequence[_Kind]) -> Hole | None:
    """Return the first number that a list leaves out in which most modules are equal."""
    tensors, numbers = max(kinds, key=lambda kind: len(kind[1]))
    if len(numbers) < 2 or 2 * len(numbers) <= modules.numbers.bit_count():
        return None
    absent = next(_list_bits(~modules.numbers & (1 << modules.numbers.bit_length()) - 1))
    like = f"{modules.path}.{numbers[0]}.{min(tensors)[0]}"
    return Hole(f"{modules.path}.{absent}", like, len(numbers))


def _find_lack(modules: _Modules, kinds: Sequence[_Kind], config: Mapping[str, Any]) -> Hole | None:
    """Return the first name that a module lacks and that more modules, otherwise as this one, have."""
    for tensors, numbers in kinds:
        for more, others in kinds:
            if len(others) > len(numbers) and tensors < more:
                names = sorted(name for name, _ in more - tensors if not re.search(_OF_QUANTIZER, f".{name}"))
                if names and not _is_explained(numbers, modules.numbers.bit_length(), config):
                    lacked, had = (f"{modules.path}.{number}.{names[0]}" for number in (numbers[0], others[0]))
                    return Hole(lacked, had, len(others))
    return None


def _is_explained(numbers: Sequence[int], count: int, config: Mapping[str, Any]) -> bool:
    """Return whether config.json gives some of a list's layers another form than the others."""
    is_run = numbers[-1] - numbers[0] + 1 == len(numbers) and (numbers[0] == 0 or numbers[-1] == count - 1)
    steps = {second - first for first, second in pairwise(numbers)}
    forms = {*steps} if len(steps) == 1 else set()
    forms |= {len(numbers), count - len(numbers)} if is_run else set()
    for key, value in config.items():
        if isinstance(value, Mapping):
            if _is_explained(numbers, count, value):
                return True
        elif isinstance(value, list):
            own = [value[number] for number in numbers] if len(value) >= count else []
            others = [each for number, each in enumerate(value[:count]) if number not in numbers]
            if value == list(numbers) or (own and not any(each in others for each in own)):
                return True
        elif type(value) is int and value in forms and re.search(_OF_LAYERS, key):
            return True
    return False


_NUMBERED = re.compile(r"\.\d+\.|^\d+\.")


def find_absent(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> str | None:
    """Return the first name that every model of config.json's type has and this one lacks; None of an unknown type.

    Older versions of transformers gave some tensors other names. So a tensor is absent only if the model has no other
    one with as many dims whose name the type does not know.
    """
    entry = read_shipped_table("single_tensors.json", "types").get(str(config.get("model_type")))
    if entry is None or not set(config.get("architectures") or ()) <= set(entry["classes"]):
        return None
    singles = {name: shape for name, shape in shapes.items() if not _NUMBERED.search(name)}
    needed: Mapping[str, int] = entry["needed"]
    known = [*(end for ends in needed for end in ends.split("|")), *entry["others"]]
    dims = {len(shape) for name, shape in singles.items() if not _has_end(name, known)}
    lost = (ends for ends, num_dims in needed.items() if num_dims not in dims)
    return next(
        (ends.split("|")[0] for ends in lost if not any(_has_end(name, ends.split("|")) for name in singles)), None
    )


def _has_end(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def check_against(base: BaseModel, outputs: list[OutputTensor], excluded: set[str], tied: set[str]) -> str | None:
    """Check that a result has the base model's names and shapes; return the checked facts as text."""
    if not base.tensors:
        return None
    found = {output.name: output for output in outputs}
    missing = [name for name in base.tensors if name not in found and name not in excluded and name not in tied]
    if missing:
        raise ContradictionError(
            f"{missing[0]} is in the base model but not in the source{likewise_text(missing[1:])}",
            tensor=missing[0],
            got=f"{len(found)} tensors",
            want=f"the {len(base.tensors)} tensors of {base.path}",
            next_step=either(
                "give the right base model",
                "give a source that has it too",
                f"leave it out by name with {option('exclude')} if the model works without it, as without a draft head",
                needs("model_or_state_dict", f"leave {option('base_model')} out"),
            ),
        )
    surplus = [name for name in found if name not in base.tensors]
    if surplus:
        step = either(
            "give the right base model",
            f"leave the tensor out with {option('exclude')}",
            needs("model_or_state_dict", "omit the tensor"),
        )
        first = found[surplus[0]]
        raise ContradictionError(
            f"{surplus[0]} is not in the base model{likewise_text(surplus[1:])}",
            tensor=surplus[0],
            got=f"{first.dtype} {list(first.shape)}",
            want=f"only the {len(base.tensors)} names of {base.path}",
            next_step=step,
        )
    for name, output in found.items():
        shape = base.tensors[name][1]
        if output.shape != shape:
            raise ContradictionError(
                f"{name} does not have its shape in the base model",
                tensor=name,
                got=str(list(output.shape)),
                want=f"{list(shape)}, as in {base.path}",
                next_step="give the right base model, or correct the layout",
            )
    return "names and shapes"


def check_source(base: BaseModel, model: StoredModel, config: Mapping[str, Any] | None) -> str | None:
    """Check a source's names and shapes; return the checked facts as text, or None (see `describe_skipped_check`)."""
    names = [shard.name for shard in model.shards]
    if find_adapter(names, model.path, base.tensors) is not None:
        return None  # its tensors' names depend on the choice to keep or merge it
    tied = {name for name in names if name in model.aliases or embedding_of(name, names, config) is not None}
    outputs = [OutputTensor(s.name, s.dtype, s.shape) for s in model.shards if s.name not in tied]
    return check_against(base, outputs, set(), tied)


def describe_skipped_check(base: BaseModel, path: str) -> tuple[str, str]:
    """Return the note that a source was not compared with a base model."""
    if not base.tensors:
        return "base-model", f"{base.path} contains no safetensors weights: names and shapes were not compared with it"
    return "base-model", f"{path} contains an adapter: names and shapes were not compared with {base.path}"


SIZE_KEYS = (
    *("vocab_size", "hidden_size", "d_model", "n_embd", "embed_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size", "expert_dim"),
    *("moe_shared_expert_intermediate_size", "type_vocab_size", "kv_lora_rank", "q_lora_rank", "intermediate_size"),
    *("ffn_dim", "n_inner", "d_ff", "encoder_layers", "num_encoder_layers", "decoder_layers", "num_decoder_layers"),
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_attention_heads", "n_head", "n_heads"),
    *("num_heads", "d_kv", "kv_channels", "attention_head_dim", "num_key_value_heads", "num_experts"),
    *("num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts", "num_shared_experts"),
    *("moe_num_shared_experts", "max_position_embeddings", "n_positions", "max_source_positions"),
    *("max_target_positions", "patch_size", "num_channels", "in_channels", "image_size", "shared_intermediate_size"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
"""Keys of sizes that count only if the model's config class knows them.

``head_dim`` counts always: many models read it although their config class does not name it. So do layers of
multi-token prediction, which transformers does not load.
"""

_INDEX = re.compile(r"\.\d+(?=\.|$)")
# Modules whose names differ from those of their configs.
_MODULES = {"vision": "vis|image|vit|pixel", "audio": "audio|speech|sound", "text": "text|language|llm"}


class TensorKind(Struct, frozen=True):
    """Tensors of one shape whose names differ in indices alone."""

    pattern: str
    """Their name, with ``*`` for each index."""
    shape: _Shape
    names: tuple[str, ...]


class Section(Struct, frozen=True):
    """An object in config.json, and the tensors that it sizes."""

    prefix: str
    """``text_config.``; empty for the outermost object."""
    values: Mapping[str, Any]
    kinds: tuple[TensorKind, ...]
    model_types: tuple[str, ...]
    """Its model_type, and those of the objects around it."""
    architecture: str = ""
    """The model's class, for the object that sizes its words."""

    def find_size(self, *keys: str) -> tuple[str, int] | None:
        """Return the first of these keys that has a positive integer, and the integer."""
        own_type = self.values.get("model_type")
        found = ((key, self.values.get(key)) for key in keys if key not in SIZE_KEYS or is_known_size(own_type, key))
        return next(((key, value) for key, value in found if type(value) is int and value > 0), None)

    def size(self, *keys: str) -> int | None:
        """Return the positive integer of the first of these keys that has one."""
        found = self.find_size(*keys)
        return None if found is None else found[1]


def group_tensors(shapes: Mapping[str, _Shape]) -> tuple[TensorKind, ...]:
    """Return the kinds of tensors of a model, in the order of their first names."""
    groups: dict[tuple[str, _Shape], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((_INDEX.sub(".*", name), shape), []).append(name)
    return tuple(TensorKind(pattern, shape, tuple(names)) for (pattern, shape), names in groups.items())


def split_config(
    config: Mapping[str, Any], kinds: Sequence[TensorKind], prefix: str = "", outer: tuple[str, ...] = ()
) -> Iterator[Section]:
    """Yield the objects of a config.json, each with its tensors: those in modules that are named after the object.

    `prefix` is the path of the object, as in `Section`; `outer` are the model types of the objects around it.
    """
    model_type = config.get("model_type")
    types = (*outer, model_type) if isinstance(model_type, str) else outer
    inner = {
        key: value
        for key, value in config.items()
        if isinstance(value, Mapping) and (key.endswith("_config") or "model_type" in value)
    }
    text = inner.pop("text_config", None)
    for key, values in inner.items():
        own = tuple(kind for kind in kinds if _is_within(kind, key.removesuffix("_config")))
        kinds = [kind for kind in kinds if kind not in own]
        yield from split_config(values, own, f"{prefix}{key}.", types)
    if text is not None:
        # A text model's tensors may lie in no module of their own, and its head lies outside.
        own = tuple(kind for kind in kinds if _is_within(kind, "text") or kind.pattern.startswith("lm_head."))
        flags = [values["tie_word_embeddings"] for values in (config, text) if "tie_word_embeddings" in values]
        is_tied = True in flags if flags else None
        text = {**text, "architectures": config.get("architectures"), "tie_word_embeddings": is_tied}
        yield from split_config(text, own or kinds, f"{prefix}text_config.", types)
        kinds = [kind for kind in kinds if own and kind not in own]
        config = {key: value for key, value in config.items() if key not in text}
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    yield Section(prefix, config, tuple(kinds), types, name if isinstance(name, str) else "")


def _is_within(kind: TensorKind, word: str) -> bool:
    """Return whether a module around tensors is named after an object of config.json."""
    expression = _MODULES.get(word, re.escape(word))
    return any(re.search(expression, module) for module in kind.pattern.split(".")[:-1])


class LengthPlace(Struct, frozen=True):
    """Where tensors have a length."""

    tensor: str
    text: str
    """``in dim 0 of model.norm.weight``, or ``layers under model.layers``."""


class ConfigClaim(Struct, frozen=True):
    """A number that follows from config.json, and the lengths that the tensors have for it."""

    kind: str
    """The key that has this meaning in most families."""
    keys: tuple[str, ...]
    numbers: tuple[int, ...]
    """The number, and others that are as good."""
    found: Mapping[int, LengthPlace]
    """Lengths; empty where no tensor shows the number."""

    @property
    def holds(self) -> bool:
        """Whether the tensors show the number, or nothing about it."""
        return not self.found or any(number in self.found for number in self.numbers)


_NOT_CROSS = r"(?!.*(?:cross|encoder_attn|EncDec|linear_at))"
_ATTENTION = _NOT_CROSS + r"(?:.*[._])?(?:self_at+n|attn|attention|SelfAttention)\.(?:\w+\.)?"
_WORDS = r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared|token_embedding)\.weight"
_HEADS = r"(?:.*\.)?(?:lm_head|embed_out)\.weight"
_NORMS = (
    r"(?!.*\bmask_embed\.)(?:.*\.)?(?:input_layernorm|post_attention_layernorm|self_attn_layer_norm|final_layer_norm"
    r"|ln_[12f]|norm[12]|layer_?norm[12]|layernorm_before|layernorm_after|attention_norm|ffn_norm|LayerNorm)\.weight"
)
_MLP = (
    r"(?:gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|c_fc|w[123]|wi|wi_[01]|wo|dense_h_to_4h|dense_4h_to_h|fc_in"
    r"|fc_out|lin[12]|intermediate\.dense)(?:\.weight)?"
)
_DENSE = r"(?!.*\bexperts?\.)(?!.*shared_)(?!.*at+n)(?:.*\.)?" + _MLP
_VISUAL = r"(?:.*\.)?visual\.(?:.*\.)?mlp\.linear_fc[12]\.weight"
_EXPERTS = r"(?:.*\.)?experts\.(?:.*\.)?" + _MLP
_SHARED = r"(?:.*\.)?shared_(?:experts?|mlp)\.(?:.*\.)?" + _MLP
_PATCHES = r"(?:.*\.)?(?:patch_embed\w*\.(?:proj|projection)|patch_embedding)\.weight"
_POSITIONS = r"(?:wpe|position_embeddings|embed_positions)\.weight"

_DIMS: tuple[tuple[tuple[str, ...], tuple[tuple[str, tuple[int, ...]], ...]], ...] = (
    (("vocab_size",), ((_WORDS, (0,)), (_HEADS, (0,)))),
    (("hidden_size", "d_model", "n_embd"), ((_WORDS, (1,)), (_NORMS, (0,)))),
    (("encoder_ffn_dim",), ((rf"(?:.*\.)?encoder\.(?:.*\.)?{_MLP}", (0, 1)),)),
    (("decoder_ffn_dim",), ((rf"(?:.*\.)?decoder\.(?:.*\.)?{_MLP}", (0, 1)),)),
    (("moe_intermediate_size", "expert_ffn_hidden_size"), ((_EXPERTS, (-1, -2)),)),
    (("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), ((_SHARED, (0, 1)),)),
    (("type_vocab_size",), ((r"(?:.*\.)?token_type_embeddings\.weight", (0,)),)),
    (("kv_lora_rank",), ((r"(?:.*\.)?kv_a_layernorm\.weight", (0,)),)),
    (("q_lora_rank",), ((r"(?:.*\.)?q_a_layernorm\.weight", (0,)),)),
)
"""Keys, each with expressions for names and the dims there that have the size."""
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
_DEFAULT_NUM_LABELS = 2  # transformers/configuration_utils.py: config.json has id2label for other numbers only
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERT_SIZES = ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_dim", "shared_intermediate_size")


def make_claims(section: Section) -> Iterator[ConfigClaim]:
    """Yield the claims of an object in config.json; those that no tensor can show are left out or have no lengths."""
    for keys, places in _DIMS:
        if "hidden_size" in keys and section.size("embed_dim") is not None:
            continue  # a vision tower whose hidden_size is that of its output
        yield from _claim(section, keys, _lengths(section, *places))
    # Without a size of their own, experts have that of dense blocks.
    witnesses = [(_DENSE, (0, 1)), (_VISUAL, (0, 1))]
    if section.find_size(*_EXPERT_SIZES) is None:
        witnesses.append((_EXPERTS, (-1, -2)))
    yield from _claim(section, ("intermediate_size", "ffn_dim", "n_inner", "d_ff"), _lengths(section, *witnesses))
    yield from _claim_layers(section)
    yield from _claim_heads(section)
    yield from _claim_experts(section)
    yield from _claim_positions(section)
    yield from _claim_patches(section)
    yield from _claim_outputs(section)


def _lengths(section: Section, *witnesses: tuple[str, tuple[int, ...]]) -> dict[int, LengthPlace]:
    """Return the lengths of dims of tensors, each with its first place; of gate_up_proj the halves.

    Where either dim of a matrix may have the size, as in the two layers of an MLP, the other one has the hidden size:
    a dim of that length counts only if both have it.
    """
    found: dict[int, LengthPlace] = {}
    hidden = section.size("embed_dim", "hidden_size", "d_model", "n_embd")
    for expression, dims in witnesses:
        for kind in section.kinds:
            if re.fullmatch(expression, kind.pattern) is None:
                continue
            own = [dim for dim in dims if -len(kind.shape) <= dim < len(kind.shape)]
            if len(own) == 2 and hidden in (first := [kind.shape[dim] for dim in own]):
                del own[first.index(hidden)]
            for dim in own:
                length = kind.shape[dim] // 2 if "gate_up_proj" in kind.pattern else kind.shape[dim]
                found.setdefault(length, _place_of(kind, dim % len(kind.shape)))
    return found


def _place_of(kind: TensorKind, dim: int) -> LengthPlace:
    return LengthPlace(kind.names[0], f"in dim {dim} of {kind.names[0]}")


def _claim(
    section: Section, keys: Sequence[str], found: Mapping[int, LengthPlace], *offsets: int
) -> Iterator[ConfigClaim]:
    """Yield the claim of each key that has a size."""
    for key in keys:
        size = section.size(key)
        if size is not None:
            yield ConfigClaim(keys[0], (key,), (size, *(size + offset for offset in offsets)), found)


def _claim_layers(section: Section) -> Iterator[ConfigClaim]:
    lists: dict[str, tuple[set[int], LengthPlace]] = {}
    for kind in section.kinds:
        place = re.match(r"((?:[^*]*\.)?(?:layers?|h|blocks?|resblocks))\.\*\.", kind.pattern)
        if place is not None:
            own = lists.setdefault(place[1], (set(), LengthPlace(kind.names[0], f"layers under {place[1]}")))
            own[0].update(int(name[place.end(1) + 1 :].partition(".")[0]) for name in kind.names)
    found = {path: (len(indices), each) for path, (indices, each) in lists.items()}
    parts = {part: (f"{part}_layers", f"num_{part}_layers") for part in ("encoder", "decoder")}
    for part, keys in parts.items():
        yield from _claim(section, keys, dict(each for path, each in found.items() if part in path.split(".")))
    if section.find_size("encoder_layers") is not None:
        return  # BART's and Whisper's num_hidden_layers repeats it, and an edited config may have forgotten to
    if section.find_size(*parts["decoder"]) is not None:
        found = {path: each for path, each in found.items() if "decoder" not in path.split(".")}
    of_all = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
    # Layers of multi-token prediction follow the others in the same list.
    yield from _claim(section, of_all, dict(found.values()), section.size("num_nextn_predict_layers") or 0)


def _claim_heads(section: Section) -> Iterator[ConfigClaim]:
    heads = section.find_size("num_attention_heads", "n_head", "n_heads", "num_heads")
    width = section.find_size("head_dim", "d_kv", "kv_channels", "attention_head_dim")
    if heads is None:
        return
    if all(section.size(key) for key in _LATENT):
        # Multi-head latent attention.
        for other, expression in (
            ("v_head_dim", r"(?:.*\.)?kv_b_proj\.weight"),
            ("qk_rope_head_dim", r"(?:.*\.)?(?:self_attn|attention)\.q(?:_b)?_proj\.weight"),
        ):
            number = heads[1] * ((section.size(_LATENT[0]) or 0) + (section.size(other) or 0))
            keys = (heads[0], _LATENT[0], other)
            yield ConfigClaim(_LATENT[0], keys, (number,), _lengths(section, (expression, (0,))))
        return
    hidden = section.find_size("embed_dim", "hidden_size", "d_model", "n_embd")
    if width is None:
        if hidden is None:
            return
        width = hidden[0], hidden[1] // heads[1]
    named = (heads[0], width[0])
    inner = _lengths(
        section,
        (_ATTENTION + r"(?:q_proj|query|q_lin|q)\.weight", (0,)),
        (_ATTENTION + r"(?:o_proj|out_proj|out_lin|o)\.weight", (1,)),
    )
    yield ConfigClaim("num_attention_heads", named, (heads[1] * width[1],), inner)
    norms = _lengths(section, (_ATTENTION + r"(?:q_norm|q_layernorm|query_layernorm)\.weight", (-1,)))
    yield ConfigClaim("head_dim", named, (width[1], heads[1] * width[1]), norms)
    groups = section.find_size("num_key_value_heads")
    if groups is not None:
        lengths = _lengths(section, (_ATTENTION + r"(?:k_proj|key|k_lin|k)\.weight", (0,)))
        yield ConfigClaim("num_key_value_heads", (groups[0], *named[1:]), (groups[1] * width[1],), lengths)
    fused = _lengths(section, (_ATTENTION + r"(?:qkv_proj|qkv|Wqkv|query_key_value|c_attn)\.weight", (0, 1)))
    rows = (heads[1] + 2 * (heads if groups is None else groups)[1]) * width[1]
    yield ConfigClaim("fused heads", (*named, *(() if groups is None else groups[:1])), (rows,), fused)


def _claim_experts(section: Section) -> Iterator[ConfigClaim]:
    found: dict[int, LengthPlace] = {}
    for kind in section.kinds:
        if ".experts.*." in f".{kind.pattern}":
            at = re.compile(r"(?:^|\.)experts\.(\d+)\.")
            indices = {match[1] for name in kind.names if (match := at.search(name)) is not None}
            found.setdefault(len(indices), LengthPlace(kind.names[0], f"experts of {kind.pattern}"))
        elif len(kind.shape) == 3 and re.fullmatch(r"(?:.*\.)?experts\." + _MLP, kind.pattern):
            found.setdefault(kind.shape[0], _place_of(kind, 0))
    yield from _claim(section, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), found)
    shared = section.find_size("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    width = section.find_size("moe_intermediate_size")
    if shared and width and not section.size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        numbers = (shared[1] * width[1],)
        yield ConfigClaim("n_shared_experts", (shared[0], width[0]), numbers, _lengths(section, (_SHARED, (0, 1))))


def _claim_positions(section: Section) -> Iterator[ConfigClaim]:
    for keys, path in (
        (("max_position_embeddings", "n_positions"), r"(?:.*\.)?"),
        (("max_source_positions",), r"(?:.*\.)?encoder\."),
        (("max_target_positions",), r"(?:.*\.)?decoder\."),
    ):
        rows = _lengths(section, (path + _POSITIONS, (0,)))
        # BART's and OPT's tables begin with two rows of padding.
        has_padding = any("embed_positions" in place.tensor for place in rows.values())
        yield from _claim(section, keys, rows, *((2,) if has_padding else ()))


def _claim_patches(section: Section) -> Iterator[ConfigClaim]:
    convolutions = Section(section.prefix, section.values, tuple(k for k in section.kinds if len(k.shape) > 3), ())
    yield from _claim(section, ("patch_size",), _lengths(convolutions, (_PATCHES, (-1,))))
    yield from _claim(section, ("num_channels", "in_channels"), _lengths(convolutions, (_PATCHES, (1,))))
    image, patch = section.size("image_size"), section.size("patch_size")
    if image and patch:
        rows = _lengths(section, (r"(?:.*\.)?embeddings\.position_embedding\.weight", (0,)))
        number = (image // patch) ** 2
        yield ConfigClaim("image_size", ("image_size", "patch_size"), (number, number + 1), rows)


def _claim_outputs(section: Section) -> Iterator[ConfigClaim]:
    name = section.architecture
    if name.endswith(_CLASSIFIERS):
        labels = section.values.get("id2label")
        stated = section.size("num_labels", "_num_labels")
        number = len(labels) if isinstance(labels, Mapping) else stated or _DEFAULT_NUM_LABELS
        rows = _lengths(section, (r"(?:score|classifier|classifier\.out_proj)\.weight", (0,)))
        yield ConfigClaim("num_labels", ("id2label",), (number, stated or number), rows)
    words = section.size("vocab_size")
    is_generating = name.endswith(("ForCausalLM", "ForConditionalGeneration"))
    if is_generating and section.values.get("tie_word_embeddings") is False:
        embedding = next((kind for kind in section.kinds if re.fullmatch(_WORDS, kind.pattern)), None)
        wide = [kind for kind in section.kinds if len(kind.shape) == 2 and words in kind.shape]
        if embedding is not None and wide == [embedding]:
            found = {1: LengthPlace(embedding.names[0], f"tensor with {words} rows, {embedding.names[0]}")}
            yield ConfigClaim("tie_word_embeddings", ("tie_word_embeddings",), (2,), found)


Lengths = Mapping[str, tuple[int, LengthPlace]]
"""Left side of an equation -> the length that the tensors have."""

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


class Equation(Struct, frozen=True):
    """A length: a product of sizes in config.json, or of their squares, and of divisors, with a constant added."""

    length: str
    factor: Fraction
    exponents: Mapping[str, int]
    """Path of a key -> its power, negative for a divisor."""
    offset: int = 0

    def __str__(self) -> str:
        number = [] if self.factor.numerator == 1 else [str(self.factor.numerator)]
        above = [*number, *(key for key, power in self.exponents.items() for _ in range(power))]
        divisor = [] if self.factor.denominator == 1 else [str(self.factor.denominator)]
        below = [*divisor, *(key for key, power in self.exponents.items() for _ in range(-power))]
        text = "*".join(above or ["1"]) + "".join(f"/{each}" for each in below)
        return f"{self.length} = {text}" + (f"{self.offset:+d}" if self.offset else "")

    def compute(self, sizes: Mapping[str, int]) -> Fraction:
        """Return the length for sizes by key."""
        product = self.factor
        for key, exponent in self.exponents.items():
            product *= Fraction(sizes[key]) ** exponent
        return product + self.offset


@lru_cache(maxsize=1024)
def parse_equation(text: str) -> Equation:
    """Return the equation of a text, as ``str`` writes it."""
    length, _, right = text.partition(" = ")
    product, offset = re.fullmatch(r"(.*?)([+-]\d+)?", right).groups()  # type: ignore[union-attr]
    factor, exponents = Fraction(1), dict[str, int]()
    for sign, term in re.findall(r"([*/]?)([^*/]+)", product):
        exponent = -1 if sign == "/" else 1
        if term.isdecimal():
            factor *= Fraction(int(term)) ** exponent
        else:
            exponents[term] = exponents.get(term, 0) + exponent
    return Equation(length, factor, exponents, int(offset or 0))


def make_family_claims(config: Mapping[str, Any], kinds: Sequence[TensorKind]) -> Iterator[tuple[Section, ConfigClaim]]:
    """Yield the claims of a config.json that are known of its model type alone, each with its values.

    An equation counts only if config.json has all its keys, and the tensors its length.
    """
    texts: Sequence[str] = read_shipped_table("config_sizes.json", "equations").get(str(config.get("model_type")), ())
    # Moshi's depth_decoder has layers of its own sizes, under the names of Moshi's.
    inner = {key.removesuffix("_config") for key, value in config.items() if isinstance(value, Mapping)}
    lengths = measure(kinds, inner) if texts else {}
    for equation in map(parse_equation, texts):
        sizes = {key: _look_up(config, key) for key in equation.exponents}
        found = lengths.get(equation.length)
        if found is None or not all(type(size) is int and size > 0 for size in sizes.values()):
            continue
        number = equation.compute(sizes)  # type: ignore[arg-type]
        if number.denominator == 1:  # transformers refuses other numbers, or rounds them
            claim = ConfigClaim(next(iter(sizes)), tuple(sizes), (number.numerator,), {found[0]: found[1]})
            yield Section("", sizes, (), ()), claim


def measure(kinds: Sequence[TensorKind], inner: Collection[str] = ()) -> Lengths:
    """Return the lengths that tensors have, by the left sides of equations.

    Names of modules count with and without the outermost one, which is the base model's in classes with a head. A
    length that differs between tensors of one name, or pattern, is left out. Where a shape is that of one tensor alone,
    such as ``mlp.2.weight``, its own name counts besides.

    Names in the outermost modules `inner`, which hold inner models, count whole alone.
    """
    found, short = defaultdict[str, dict[int, LengthPlace]](dict), defaultdict[str, dict[int, LengthPlace]](dict)
    lists: dict[str, tuple[set[str], str]] = {}
    for kind in kinds:
        for dim, length in enumerate(kind.shape):
            for name in {kind.pattern, *kind.names} if len(kind.names) == 1 else [kind.pattern]:
                found[f"{name}[{dim}]"].setdefault(length, _place_of(kind, dim))
                if name.count(".") > 1 and name.partition(".")[0] not in inner:
                    short[f"{name}[{dim}]".partition(".")[2]].setdefault(length, _place_of(kind, dim))
        for name in kind.names:
            for match in _NUMBER.finditer(name):
                path = _NUMBER.sub(".*", name[: match.start()])
                lists.setdefault(path, (set(), name))[0].add(match[1])
    for path, (indices, name) in lists.items():
        place = LengthPlace(name, f"modules under {path}")
        found[path].setdefault(len(indices), place)
        if "." in path and path.partition(".")[0] not in inner:
            short[path.partition(".")[2]].setdefault(len(indices), place)
    return {key: next(iter(each.items())) for key, each in {**short, **found}.items() if len(each) == 1}


def _look_up(config: Mapping[str, Any], path: str) -> object:
    value: object = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


MISSING_TENSOR = "missing-tensor"
"""Code of the note on a tensor that a model of no known family may lack."""

_Notes = tuple[tuple[str, str], ...]

_OTHER_MEANINGS = {
    "vocab_size": "csm_depth_decoder_model|kyutai_speech_to_text|marian|mllama_text_model|moshi",
    "hidden_size": "clap_audio_model|neomme|perceiver|pp_ocrv6_tiny_rec",
    "intermediate_size": "lfm2|mobilebert|omdet-turbo|recurrent_gemma",
    "decoder_ffn_dim": "deimv2",
    "num_hidden_layers": "align_vision_model|bridgetower_vision_model|clap_audio_model|donut-swin"
    "|efficientnet|hrm_text|janus_vision_model|maskformer|qwen2_5_omni_dit|swin"
    "|swinv2|xlstm",
    "encoder_layers": "seamless_m4t|seamless_m4t_v2",
    "decoder_layers": "mask2former|oneformer|seamless_m4t|seamless_m4t_v2",
    "num_attention_heads": "blt_.*|convbert|glm5_next_text|inkling_text|laguna|mobilebert"
    "|pix2struct_text_model|pixtral|reformer|zamba2",
    "num_key_value_heads": "blt_.*|glm5_next_text|granite_speech5_encoder|hunyuan_vl_vision|inkling_text"
    "|pixtral|zamba2",
    "head_dim": "deepseek_v4|esmc|inkling_text|olmoe",
    "qk_nope_head_dim": "axk2|bailing_hybrid|kimi_linear|longcat_flash",
    "fused heads": "cosmos3_omni|falcon|gpt_bigcode|minimax|unlimited_ocr_text",
    "num_experts": "dots3_note_vision_encoder",
    "n_shared_experts": "dots3_note_text|inkling_text",
    "max_position_embeddings": "mra|nystromformer|yoso",
    "patch_size": "depth_pro|focalnet",
    "num_channels": "swin2sr",
    "tie_word_embeddings": "higgs_audio_v2|ovis2",
    "num_labels": "pvt",
}
"""Kinds of claims, each with the model types in which the key does not give the length of these tensors."""
_OF_ADAPTER = re.compile(r"\.lora_|\.modules_to_save\.")
_UNPROVEN = "(mm-)?grounding-dino"


def prove_config(
    found: FoundSource,
    model: StoredModel,
    *,
    base: BaseModel | None = None,
    config: Mapping[str, Any] | None = None,
    left_out: Collection[str] = (),
    apart: Collection[str] = (),
    written: Collection[OutputTensor] | None = None,
) -> _Notes:
    """Check the config.json of a model against its tensors, and that the model lacks none, as far as they show it.

    Tensors show the sizes of dims, and the lengths of lists of layers and experts, but no rotary base, and no number of
    heads that changes no shape. Sizes of a model with code of its own (``auto_map``) are not checked. A model that no
    recipe and no base model proves has its layers compared with one another.

    `model` has Hugging Face's names, and `config` is to be written, where it is not the source's. The config may count
    the names that the user leaves out (`left_out`), or not; names `apart` are not the model's, such as an adapter's.
    `written` are the tensors that a caller's function makes of the model; None: no function changes them. The returned
    notes are about a tensor that a model of no known family seems to lack, and a quantization that only others know of.
    """
    config = found.config if config is None else config
    # Without the shapes of tensors that save_pretrained leaves out, their absence would be taken for another config.
    if found.unsaved:
        return ()
    shards = [s for s in model.shards if s.name not in apart and not _OF_ADAPTER.search(s.name)]
    kept = [shard for shard in shards if shard.name not in left_out]
    notes = check_quantization(found, kept if written is None else written, config, is_transformed=written is not None)
    own = {shard.name: shard.shape for shard in shards}
    # A base model has shown all names, except those that the user leaves out.
    is_shown = base is not None and bool(base.tensors)
    is_foreign = model.format.startswith("megatron") and model.recipe is None
    if config is None or "auto_map" in config or is_foreign:
        return notes if is_shown else notes + _judge_holes(own, config, found)
    # An adapter may lie in a few layers.
    packed = find_packed(shards, config)
    shapes = {name: shape for name, shape in own.items() if name not in packed}
    misfit = find_misfit(config, {name: shape for name, shape in shapes.items() if name not in left_out})
    if misfit is None or (left_out and find_misfit(config, shapes) is None):
        if is_shown and not left_out:
            return notes
        # The user leaves some names out; any other name that the source lacks is a hole.
        names, known = [shard.name for shard in model.shards if shard.name not in apart], names_of_class(config)
        # A recipe that gave the names has proven the shapes, which another recipe of the type may lay out otherwise.
        sizes = shapes if model.recipe is None else {}
        is_proven = prove_family(names, config, sizes)
        within = [] if known is None else known.list_within(names)
        if not is_proven and 3 * len(names) < 4 * len(within) < 4 * len(names):
            # A head of the trainer's own beside the model, such as a critic's, must not hide that it lacks a tensor.
            is_proven = prove_family(within, config, sizes)
        if is_proven or is_shown:
            return notes
        # All models of a type of transformers have some tensors once.
        absent = find_absent(own, config)
        if absent is not None:
            want = f"the tensor that each {config['model_type']} of transformers has"
            raise lost_tensor(absent, plural(len(own), "other tensor"), want, file=found.place)
        return notes + _judge_holes(own, config, found)
    section, claim = misfit
    file = found.config_path or ("the model's config" if found.place is None else f"the config in {found.place}")
    hidden = section.size("hidden_size", "d_model", "n_embd")
    # The other dim of the tensors has the hidden size.
    length, place = next((each for each in claim.found.items() if each[0] != hidden), next(iter(claim.found.items())))
    keys = " and ".join(f"{section.prefix}{key} = {section.values.get(key)}" for key in claim.keys)
    # Fewer layers are what a lost stage of a pipeline leaves, too. Then another config.json would hide the loss.
    are_few = place.text.startswith("layers under") and length < min(claim.numbers)
    stages = "copy the files of the other layers, such as those of a pipeline stage, or use an earlier checkpoint"
    raise ContradictionError(
        f"{file}: {section.prefix}{claim.keys[0]} contradicts the tensors, such as {place.tensor}",
        tensor=place.tensor,
        file=found.config_path,
        got=f"{length} {place.text}",
        want=f"{' or '.join(map(str, dict.fromkeys(claim.numbers)))}, by {keys}",
        next_step=f"{stages}; if the model has {length}, {_advise(found, base)}" if are_few else _advise(found, base),
    )


def _judge_holes(shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None, found: FoundSource) -> _Notes:
    """Return a note on a tensor that the layers of a model show as missing."""
    hole = find_hole(shapes, config)
    if hole is None:
        return ()
    who = f"{plural(hole.num_others, 'equal module')} next to it, such as that of {hole.like}"
    if config is None or "auto_map" in config or not is_known_type(config.get("model_type")):
        return ((MISSING_TENSOR, f"{hole.name} may be missing: the model has {who}; give a base model to find out"),)
    raise lost_tensor(hole.name, f"a model that has {who}", "the same tensors in equal layers", file=found.place)


def _advise(found: FoundSource, base: BaseModel | None) -> str:
    if found.config_path is not None and base is not None and found.config_path.startswith(base.path):
        return f"give the model that the training started from as {option('base_model')}, then {AGAIN}"
    if found.config_path is not None:
        return f"put the model's own config.json in place of {found.config_path}, then {AGAIN}"
    if found.place is not None:
        return f"put the model's own config.json into {found.place}, then {AGAIN}"
    return "correct the config of the model, or its overrides"


def find_misfit(config: Mapping[str, Any], shapes: Mapping[str, _Shape]) -> tuple[Section, ConfigClaim] | None:
    """Return the first claim of a config.json that the tensors contradict, with the object in it; None: all hold."""
    if config.get("model_type") == "dpt" and isinstance(config.get("backbone_config"), Mapping):
        # The backbone stands in the place of DPT's own layers, whose sizes remain in the config.
        config = {key: value for key, value in config.items() if key not in SIZE_KEYS}
    kinds = group_tensors(shapes)
    for section in split_config(config, kinds):
        if any(re.fullmatch(_UNPROVEN, kind) for kind in section.model_types):
            continue
        # Without numbers, an object makes claims by its class alone.
        if not section.architecture and not any(type(value) is int for value in section.values.values()):
            continue
        for claim in make_claims(section):
            others = _OTHER_MEANINGS.get(claim.kind)
            if not claim.holds and (others is None or not any(re.fullmatch(others, t) for t in section.model_types)):
                return section, claim
    return next((each for each in make_family_claims(config, kinds) if not each[1].holds), None)
