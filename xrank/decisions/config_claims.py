"""The claims of a config.json about tensors: each size with the lengths of the dims or lists that must contain it.

The keys and the names of modules are those of transformers (models/*/configuration_*.py, modeling_*.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xrank.decisions.config_sections import Section


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors have a length."""

    tensor: str
    text: str
    """``in dim 0 of model.norm.weight``, or ``layers under model.layers``."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A number that follows from config.json, and the lengths that the tensors have for it."""

    kind: str
    """The key that has this meaning in most families."""
    keys: tuple[str, ...]
    """The keys that give the number."""
    numbers: tuple[int, ...]
    """The number, and others that are as good."""
    found: Mapping[int, Place]
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


def make_claims(section: Section) -> Iterator[Claim]:
    """Yield the claims of an object in config.json; those that no tensor can show are left out or have no lengths."""
    for keys, witnesses in _DIMS:
        if "hidden_size" in keys and section.size("embed_dim") is not None:
            continue  # a vision tower whose hidden_size is that of its output
        yield from _claim(section, keys, _lengths(section, *witnesses))
    yield from _claim_mlp(section)
    yield from _claim_layers(section)
    yield from _claim_heads(section)
    yield from _claim_experts(section)
    yield from _claim_positions(section)
    yield from _claim_patches(section)
    yield from _claim_outputs(section)


def _lengths(section: Section, *witnesses: tuple[str, tuple[int, ...]]) -> dict[int, Place]:
    """Return the lengths of dims of tensors, each with its first place; of gate_up_proj the halves.

    Where either dim of a matrix may have the size, as in the two layers of an MLP, the other one has the hidden size:
    a dim of that length counts only if both have it.
    """
    found: dict[int, Place] = {}
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
                found.setdefault(length, Place(kind.names[0], f"in dim {dim % len(kind.shape)} of {kind.names[0]}"))
    return found


def _claim(section: Section, keys: Sequence[str], found: Mapping[int, Place], *offsets: int) -> Iterator[Claim]:
    """Yield the claim of each key that has a size."""
    for key in keys:
        size = section.size(key)
        if size is not None:
            yield Claim(keys[0], (key,), (size, *(size + offset for offset in offsets)), found)


def _claim_mlp(section: Section) -> Iterator[Claim]:
    # Without a size of their own, experts have that of dense blocks.
    witnesses = [(_DENSE, (0, 1)), (_VISUAL, (0, 1))]
    if section.find_size(*_EXPERT_SIZES) is None:
        witnesses.append((_EXPERTS, (-1, -2)))
    yield from _claim(section, ("intermediate_size", "ffn_dim", "n_inner", "d_ff"), _lengths(section, *witnesses))


def _claim_layers(section: Section) -> Iterator[Claim]:
    lists: dict[str, set[int]] = {}
    first: dict[str, str] = {}
    for kind in section.kinds:
        place = re.match(r"((?:[^*]*\.)?(?:layers?|h|blocks?|resblocks))\.\*\.", kind.pattern)
        if place is not None:
            at = len(place[1]) + 1
            lists.setdefault(place[1], set()).update(int(name[at:].partition(".")[0]) for name in kind.names)
            first.setdefault(place[1], kind.names[0])
    found = {path: (len(indices), Place(first[path], f"layers under {path}")) for path, indices in lists.items()}
    parts = {
        "encoder": ("encoder_layers", "num_encoder_layers"),
        "decoder": ("decoder_layers", "num_decoder_layers"),
    }
    for part, keys in parts.items():
        own = dict(each for path, each in found.items() if part in path.split("."))
        yield from _claim(section, keys, own)
    if section.find_size("encoder_layers") is not None:
        return  # BART's and Whisper's num_hidden_layers repeats it, and an edited config may have forgotten to
    if section.find_size(*parts["decoder"]) is not None:
        found = {path: each for path, each in found.items() if "decoder" not in path.split(".")}
    of_all = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
    # Layers of multi-token prediction follow the others in the same list.
    yield from _claim(section, of_all, dict(found.values()), section.size("num_nextn_predict_layers") or 0)


def _claim_heads(section: Section) -> Iterator[Claim]:
    heads = section.find_size("num_attention_heads", "n_head", "n_heads", "num_heads")
    width = section.find_size("head_dim", "d_kv", "kv_channels", "attention_head_dim")
    if heads is None:
        return
    if all(section.size(key) for key in _LATENT):
        yield from _claim_latent(section, *heads)
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
    yield Claim("num_attention_heads", named, (heads[1] * width[1],), inner)
    norms = _lengths(section, (_ATTENTION + r"(?:q_norm|q_layernorm|query_layernorm)\.weight", (-1,)))
    yield Claim("head_dim", named, (width[1], heads[1] * width[1]), norms)
    groups = section.find_size("num_key_value_heads")
    if groups is not None:
        lengths = _lengths(section, (_ATTENTION + r"(?:k_proj|key|k_lin|k)\.weight", (0,)))
        yield Claim("num_key_value_heads", (groups[0], *named[1:]), (groups[1] * width[1],), lengths)
    fused = _lengths(section, (_ATTENTION + r"(?:qkv_proj|qkv|Wqkv|query_key_value|c_attn)\.weight", (0, 1)))
    rows = (heads[1] + 2 * (heads if groups is None else groups)[1]) * width[1]
    yield Claim("fused heads", (*named, *(() if groups is None else groups[:1])), (rows,), fused)


def _claim_latent(section: Section, key: str, num_heads: int) -> Iterator[Claim]:
    """Yield the claims of multi-head latent attention."""
    for other, expression in (
        ("v_head_dim", r"(?:.*\.)?kv_b_proj\.weight"),
        ("qk_rope_head_dim", r"(?:.*\.)?(?:self_attn|attention)\.q(?:_b)?_proj\.weight"),
    ):
        number = num_heads * ((section.size(_LATENT[0]) or 0) + (section.size(other) or 0))
        yield Claim(_LATENT[0], (key, _LATENT[0], other), (number,), _lengths(section, (expression, (0,))))


def _claim_experts(section: Section) -> Iterator[Claim]:
    found: dict[int, Place] = {}
    for kind in section.kinds:
        if ".experts.*." in f".{kind.pattern}":
            at = re.compile(r"(?:^|\.)experts\.(\d+)\.")
            indices = {match[1] for name in kind.names if (match := at.search(name)) is not None}
            found.setdefault(len(indices), Place(kind.names[0], f"experts of {kind.pattern}"))
        elif len(kind.shape) == 3 and re.fullmatch(r"(?:.*\.)?experts\." + _MLP, kind.pattern):
            found.setdefault(kind.shape[0], Place(kind.names[0], f"in dim 0 of {kind.names[0]}"))
    yield from _claim(section, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), found)
    shared = section.find_size("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    width = section.find_size("moe_intermediate_size")
    if shared and width and not section.size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        numbers = (shared[1] * width[1],)
        yield Claim("n_shared_experts", (shared[0], width[0]), numbers, _lengths(section, (_SHARED, (0, 1))))


def _claim_positions(section: Section) -> Iterator[Claim]:
    for keys, path in (
        (("max_position_embeddings", "n_positions"), r"(?:.*\.)?"),
        (("max_source_positions",), r"(?:.*\.)?encoder\."),
        (("max_target_positions",), r"(?:.*\.)?decoder\."),
    ):
        rows = _lengths(section, (path + _POSITIONS, (0,)))
        # BART's and OPT's tables begin with two rows of padding.
        has_padding = any("embed_positions" in place.tensor for place in rows.values())
        yield from _claim(section, keys, rows, *((2,) if has_padding else ()))


def _claim_patches(section: Section) -> Iterator[Claim]:
    convolutions = Section(section.prefix, section.values, tuple(k for k in section.kinds if len(k.shape) > 3), ())
    yield from _claim(section, ("patch_size",), _lengths(convolutions, (_PATCHES, (-1,))))
    yield from _claim(section, ("num_channels", "in_channels"), _lengths(convolutions, (_PATCHES, (1,))))
    image, patch = section.size("image_size"), section.size("patch_size")
    if image and patch:
        rows = _lengths(section, (r"(?:.*\.)?embeddings\.position_embedding\.weight", (0,)))
        number = (image // patch) ** 2
        yield Claim("image_size", ("image_size", "patch_size"), (number, number + 1), rows)


def _claim_outputs(section: Section) -> Iterator[Claim]:
    name = section.architecture
    if name.endswith(_CLASSIFIERS):
        labels = section.values.get("id2label")
        stated = section.size("num_labels", "_num_labels")
        number = len(labels) if isinstance(labels, Mapping) else stated or _DEFAULT_NUM_LABELS
        rows = _lengths(section, (r"(?:score|classifier|classifier\.out_proj)\.weight", (0,)))
        yield Claim("num_labels", ("id2label",), (number, stated or number), rows)
    words = section.size("vocab_size")
    is_generating = name.endswith(("ForCausalLM", "ForConditionalGeneration"))
    if is_generating and section.values.get("tie_word_embeddings") is False:
        embedding = next((kind for kind in section.kinds if re.fullmatch(_WORDS, kind.pattern)), None)
        wide = [kind for kind in section.kinds if len(kind.shape) == 2 and words in kind.shape]
        if embedding is not None and wide == [embedding]:
            found = {1: Place(embedding.names[0], f"tensor with {words} rows, {embedding.names[0]}")}
            yield Claim("tie_word_embeddings", ("tie_word_embeddings",), (2,), found)
