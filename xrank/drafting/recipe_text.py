"""A draft as the text of a recipe file; what is not decided is named in comments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xrank.drafting.draft import Draft, DraftedRule, Undecided
from xrank.recipes.layer_choice import parse_layers
from xrank.recipes.terms import look_up
from xrank.words import plural

_LAYER_TERMS = (
    "from first_k_dense_replace",
    "before first_k_dense_replace",
    "every decoder_sparse_step and not in mlp_only_layers",
    "every decoder_sparse_step",
    "every interleave_moe_layer_step",
    "in moe_layers",
    "not in moe_layers",
    "in mlp_only_layers",
    "not in mlp_only_layers",
    "before num_hidden_layers",
)


def write_recipe(draft: Draft, config: Mapping[str, Any], source: str, base: str) -> str:
    """Return the text of a recipe file.

    Args:
        draft: the rules, and what is not decided.
        config: the content of the base model's config.json.
        source: the source's path, for the first comment.
        base: the base model's path.
    """
    groups = _find_groups(draft.rules)
    terms = {name: _layer_term(layers, config) for layers, name in groups.items()}
    model_type = config.get("model_type")
    lines = [f"# Drafted from {_comment(source)} and the base model {_comment(base)}."]
    lines += [
        "# In rules without a comment, all sampled values are equal. Sizes are named after keys with their numbers:"
    ]
    lines += ["# where two keys have one number, a name may be of the wrong one."]
    if draft.undecided or draft.missing:
        lines.append("# Complete it: the tensors at its end have no rule yet.")
    lines += ['framework = "own"']
    if isinstance(model_type, str):
        lines.append(f"model_types = [{json.dumps(model_type)}]")
    if draft.padded:
        lines.append(f"padded = {json.dumps(draft.padded)}")
    found = {**draft.config, **{name: (term,) for name, term in terms.items() if term is not None}}
    if found:
        lines += ["", "[config]"]
        lines += [f"{name} = {json.dumps(one[0] if len(one) == 1 else list(one))}" for name, one in found.items()]
    if draft.sizes:
        lines += ["", "[sizes]", *(f"{name} = {number}" for name, number in draft.sizes.items())]
    lines += ["", "[tensors]"]
    short = [rule for rule in draft.rules if _is_short(rule)]
    for rule in short:
        lines.append(f"{_inline(rule)}{'' if rule.evidence == 'equal values' else f'  # by {rule.evidence}'}")
    for rule in draft.rules:
        if rule not in short:
            lines += ["", *_table(rule, groups)]
    lines += _comments("Undecided: no rule has these tensors of the source.", draft.undecided)
    lines += _comments("Nothing becomes these tensors of the base model.", draft.missing)
    return "\n".join(lines) + "\n"


def _find_groups(rules: Sequence[DraftedRule]) -> dict[frozenset[int], str]:
    """Return layers -> the name of a group, for the rules of some layers only."""
    found: dict[frozenset[int], str] = {}
    for rule in rules:
        if rule.layers is not None and rule.layers not in found:
            own = [text for other in rules if other.layers == rule.layers for text in other.targets.values()]
            is_sparse = any("expert" in text for text in own)
            name = "experts" if is_sparse else "dense"
            found[rule.layers] = name if name not in found.values() else f"part{len(found)}"
    return found


def _layer_term(layers: frozenset[int], config: Mapping[str, Any]) -> str | None:
    lists = [key for key, value in config.items() if isinstance(value, list) and len(value) > 1]
    entries = [
        f"{key} = {value}" for key in lists for value in dict.fromkeys(map(str, config[key])) if " " not in value
    ]
    count = config.get("num_hidden_layers")
    for term in (*_LAYER_TERMS, *entries):
        choice = parse_layers(f"layers {term}", lambda key: look_up(config, key), "config.json")
        if choice is not None and isinstance(count, int) and {i for i in range(count) if i in choice} == layers:
            return choice.text
    return None


def _is_short(rule: DraftedRule) -> bool:
    return len(rule.targets) == 1 and "" in rule.targets and rule.layers is None and len(_inline(rule)) <= 120


def _inline(rule: DraftedRule) -> str:
    target = json.dumps(rule.targets[""])
    if rule.unless is not None:
        target = f"{{ to = {target}, unless = {json.dumps(rule.unless)} }}"
    return f"{json.dumps(rule.source)} = {target}"


def _table(rule: DraftedRule, groups: Mapping[frozenset[int], str]) -> Iterator[str]:
    if rule.evidence != "equal values":
        yield f"# by {rule.evidence}"
    yield f"[tensors.{json.dumps(rule.source)}]"
    if rule.layers is not None:
        yield f"group = {json.dumps(groups[rule.layers])}"
    if rule.unless is not None:
        yield f"unless = {json.dumps(rule.unless)}"
    if [*rule.targets] == [""]:
        yield f"to = {json.dumps(rule.targets[''])}"
        return
    for key, text in rule.targets.items():
        yield f"to.{key} = {json.dumps(text)}"


def _comments(title: str, kinds: Sequence[Undecided]) -> Iterator[str]:
    if kinds:
        yield ""
        yield f"# {title}"
    for kind in kinds:
        more = f" and {plural(len(kind.names) - 1, 'more tensor')} alike" if len(kind.names) > 1 else ""
        reason = f": {_comment(kind.reason)}" if kind.reason else ""
        yield f"# {_comment(kind.names[0])} {list(kind.shape)}{more}{reason}"


def _comment(text: str) -> str:
    """Return a text without characters that may not be in a comment of TOML."""
    return "".join(c if c.isprintable() else "?" for c in text)
