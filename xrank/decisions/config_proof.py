"""Prove config.json by the tensors: a model with another number of layers, or another size, would not be this model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xrank.decisions.config_claims import Claim, make_claims
from xrank.decisions.config_sections import SIZE_KEYS, Section, group_tensors, split_config
from xrank.decisions.config_sizes import make_family_claims
from xrank.decisions.found_source import FoundSource
from xrank.decisions.layer_holes import find_hole
from xrank.decisions.quantized_tensors import check_quantization, find_packed
from xrank.decisions.single_tensors import find_absent
from xrank.errors import AGAIN, ContradictionError, IncompleteError, option
from xrank.plan.output import OutputTensor
from xrank.plan.source import StoredModel, StoredShard
from xrank.recipes.conversion_table import is_known_type
from xrank.recipes.model_names import names_of_class
from xrank.recipes.name_proof import BRING_FILES, prove_family
from xrank.words import plural

if TYPE_CHECKING:
    from xrank.decisions.base_model import BaseModel

MISSING_TENSOR = "missing-tensor"
"""Code of the note on a tensor that a model of no known family may lack."""

_Shape = tuple[int, ...]
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
_UNPROVEN = re.compile("(mm-)?grounding-dino")


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

    Only what tensors show is checked: sizes of dims, and lengths of lists of layers and experts. A rotary base, and
    heads whose number changes no shape, are not visible. Sizes of a model with code of its own (``auto_map``) are not
    checked. A model that no recipe and no base model proves has its layers compared with one another.

    Args:
        found: the source with its config.
        model: the source under Hugging Face's names.
        base: the base model, which may have given the config.
        config: the config.json that will be written, where it is not the source's.
        left_out: names that the user leaves out; the config may count them, or not.
        apart: names that are not the model's, such as those of an adapter.
        written: the tensors that a caller's function makes of the model; None: no function changes them.

    Returns:
        Notes: a tensor that a model of no known family seems to lack, a quantization that only others know of.

    Raises:
        ContradictionError: a size is not that of the tensors; the error names the tensor and the key.
        IncompleteError: the model lacks a tensor.
    """
    config = found.config if config is None else config
    # Without the shapes of tensors that save_pretrained leaves out, their absence would be taken for another config.
    if found.unsaved:
        return ()
    shards = [s for s in model.shards if s.name not in apart and not _OF_ADAPTER.search(s.name)]
    kept = [shard for shard in shards if shard.name not in left_out]
    notes = check_quantization(found, kept if written is None else written, config, is_transformed=written is not None)
    return notes + _prove_sizes(found, model, shards, config, base, left_out, apart)


def _prove_sizes(
    found: FoundSource,
    model: StoredModel,
    shards: Sequence[StoredShard],
    config: Mapping[str, Any] | None,
    base: BaseModel | None,
    left_out: Collection[str],
    apart: Collection[str],
) -> _Notes:
    """Check sizes and names; arguments, notes and errors are those of `prove_config`, `shards` the model's own."""
    own = {shard.name: shard.shape for shard in shards}
    # A base model has shown all names, except those that the user leaves out.
    is_shown = base is not None and bool(base.tensors)
    is_foreign = model.format.startswith("megatron") and model.recipe is None
    if config is None or "auto_map" in config or is_foreign:
        return () if is_shown else _judge_holes(own, config, found)
    # An adapter may lie in a few layers.
    packed = find_packed(shards, config)
    shapes = {name: shape for name, shape in own.items() if name not in packed}
    misfit = find_misfit(config, {name: shape for name, shape in shapes.items() if name not in left_out})
    if misfit is None or (left_out and find_misfit(config, shapes) is None):
        if is_shown and not left_out:
            return ()
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
            return ()
        _refuse_absent(own, config, found)
        return _judge_holes(own, config, found)
    section, claim = misfit
    file = found.config_path or ("the model's config" if found.place is None else f"the config in {found.place}")
    hidden = section.size("hidden_size", "d_model", "n_embd")
    # The other dim of the tensors has the hidden size.
    length, place = next((each for each in claim.found.items() if each[0] != hidden), next(iter(claim.found.items())))
    keys = " and ".join(f"{section.prefix}{key} = {section.values.get(key)}" for key in claim.keys)
    # Fewer layers are what a lost stage of a pipeline leaves, too. Then another config.json would hide the loss.
    are_few = place.text.startswith("layers under") and length < min(claim.numbers)
    stages = "bring the files of the other layers, such as another pipeline stage's, or take an earlier checkpoint"
    raise ContradictionError(
        f"{file}: {section.prefix}{claim.keys[0]} is not that of the tensors, such as {place.tensor}",
        tensor=place.tensor,
        file=found.config_path,
        got=f"{length} {place.text}",
        want=f"{' or '.join(map(str, dict.fromkeys(claim.numbers)))}, by {keys}",
        next_step=f"{stages}; if the model has {length}, {_advise(found, base)}" if are_few else _advise(found, base),
    )


def _refuse_absent(shapes: Mapping[str, _Shape], config: Mapping[str, Any], found: FoundSource) -> None:
    """Refuse a model without a tensor that all models of its type have once."""
    name = find_absent(shapes, config)
    if name is not None:
        raise IncompleteError(
            f"{name}: no file holds any of it",
            tensor=name,
            file=found.place,
            got=f"{plural(len(shapes), 'other tensor')}",
            want=f"the tensor that each {config['model_type']} of transformers has",
            next_step=BRING_FILES,
        )


def _judge_holes(shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None, found: FoundSource) -> _Notes:
    """Return a note on a tensor that the layers of a model show as missing.

    Raises:
        IncompleteError: transformers has this family, so that its layers are known to show it.
    """
    hole = find_hole(shapes, config)
    if hole is None:
        return ()
    who = f"{plural(hole.num_others, 'equal module')} beside it, such as that of {hole.like}"
    if config is None or "auto_map" in config or not is_known_type(config.get("model_type")):
        return ((MISSING_TENSOR, f"{hole.name} may be missing: the model has {who}; a base model would show it"),)
    raise IncompleteError(
        f"{hole.name}: no file holds any of it",
        tensor=hole.name,
        file=found.place,
        got=f"a model that has {who}",
        want="the same tensors in equal layers",
        next_step=BRING_FILES,
    )


def _advise(found: FoundSource, base: BaseModel | None) -> str:
    if found.config_path is not None and base is not None and found.config_path.startswith(base.path):
        return f"name the base model that was trained with {option('base_model')}, then {AGAIN}"
    if found.config_path is not None:
        return f"put the model's own config.json in place of {found.config_path}, then {AGAIN}"
    if found.place is not None:
        return f"put the model's own config.json into {found.place}, then {AGAIN}"
    return "correct the config of the model, or what overrides it"


def find_misfit(config: Mapping[str, Any], shapes: Mapping[str, _Shape]) -> tuple[Section, Claim] | None:
    """Return the first claim of a config.json that the tensors contradict, with the object in it; None: all hold."""
    if config.get("model_type") == "dpt" and isinstance(config.get("backbone_config"), Mapping):
        # The backbone stands in the place of DPT's own layers, whose sizes remain in the config.
        config = {key: value for key, value in config.items() if key not in SIZE_KEYS}
    kinds = group_tensors(shapes)
    for section in split_config(config, kinds):
        if any(map(_UNPROVEN.fullmatch, section.model_types)):
            continue
        for claim in make_claims(section):
            others = _OTHER_MEANINGS.get(claim.kind)
            if not claim.holds and (others is None or not any(re.fullmatch(others, t) for t in section.model_types)):
                return section, claim
    return next((each for each in make_family_claims(config, kinds) if not each[1].holds), None)
