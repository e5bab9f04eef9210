"""No right config.json of a transformers family is refused: all its model types, small enough to save or on meta."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.oracle.config_models import (
    build,
    build_small,
    change,
    find_sizes,
    list_classes,
    read_config,
    read_shapes,
    shrink,
)
from xrank.commands.gather import gather_checkpoint
from xrank.errors import ContradictionError, XrankError
from xrank.recipes.config_proof import find_absent, find_hole, find_misfit

NUM_PARTS = 8
PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))]
_MAX_ELEMENTS = 4_000_000
KNOWN = (
    *("albert", "aria_text", "bert", "deepseek_v3", "gemma3", "gpt2", "gpt_oss", "llama", "llava", "mamba", "mixtral"),
    *("phi3", "qwen2_5_vl", "qwen3_moe", "qwen3_next", "t5", "whisper"),
)
"""Model types whose sizes are all changed; of the others, only in the slow parts."""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.timeout(1200)
def test_default_sizes_of_all_families(part: int) -> None:
    refused, num_checked = [], 0
    for model_type, name in list_classes()[part::NUM_PARTS]:
        model = build(model_type, name, None, "meta")
        if model is None:
            continue
        config, shapes = read_config(model, name), read_shapes(model)
        misfit, hole, absent = find_misfit(config, shapes), find_hole(shapes, config), find_absent(shapes, config)
        num_checked += 1
        if misfit is not None or hole is not None or absent is not None:
            refused.append((name, misfit and misfit[1], hole, absent))
    assert not refused and num_checked > 30


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.timeout(1200)
def test_saved_folders_of_small_models(part: int, tmp_path: Path) -> None:
    """Gather what `save_pretrained` writes, then the same with another number of layers."""
    refused, unseen, num_saved, num_seen = [], [], 0, 0
    for number, (model_type, name) in enumerate(list_classes()[part::NUM_PARTS]):
        default = build(model_type, name, None, "meta")
        values = None if default is None else shrink(json.loads(default.config.to_json_string()))
        tiny = None if values is None else build(model_type, name, values, "meta")
        if tiny is None or sum(parameter.numel() for parameter in tiny.parameters()) > _MAX_ELEMENTS:
            continue
        model, folder = build(model_type, name, values, "cpu"), tmp_path / f"{number}"
        try:
            model.save_pretrained(folder)
        except Exception:  # a class that cannot save itself
            continue
        num_saved += 1
        try:
            assert gather_checkpoint(folder, tmp_path / f"{number}-out").ok
        except XrankError as error:
            refused.append((name, error.message, error.got, error.want))
            continue
        config = json.loads((folder / "config.json").read_text())
        if config.get("num_hidden_layers") == 2:
            (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
            num_seen += 1
            try:
                gather_checkpoint(folder, tmp_path / f"{number}-wrong")
            except ContradictionError:
                continue
            unseen.append(name)
    assert not refused and num_saved > 10
    assert len(unseen) <= num_seen / 10, unseen  # families whose lists of layers have other names


@pytest.mark.parametrize("part", ["known", *(pytest.param(part, marks=pytest.mark.slow) for part in range(16))])
@pytest.mark.timeout(1200)
def test_changed_sizes_are_refused(part: str | int) -> None:
    """Change each size in the config of a small model: where that makes another model, it must be refused."""
    classes = list_classes()
    chosen = [each for each in classes if each[0] in KNOWN] if isinstance(part, str) else classes[part::16]
    unseen, num_visible = [], 0
    for model_type, name in chosen:
        default = build(model_type, name, None, "meta")
        model = default and build_small(model_type, name, read_config(default, name))
        if model is None:
            continue
        config, shapes = read_config(model, name), read_shapes(model)
        for path, size in find_sizes(config):
            for new in (size * 2, size + 2, size + 1):
                changed = change(config, path, new)
                other = build(model_type, name, changed, "meta")
                if other is not None:
                    is_visible = read_shapes(other) != shapes
                    num_visible += is_visible
                    if is_visible and find_misfit(changed, shapes) is None:
                        unseen.append(f"{name}: {'.'.join(path)} {new} for {size}")
                    break
    print(f"{num_visible - len(unseen)} of {num_visible} sizes are refused; not:", *unseen, sep="\n  ")
    assert num_visible > 100 and len(unseen) <= num_visible / 10, unseen
