"""No mistake about a model passes in silence: in config.json, in the arguments, in the tensors, for every family."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.recipes.families import FAMILIES
from tests.recipes.families.wrong_models import Case, list_mistakes
from tests.recipes.made_checkpoints import leave
from tests.recipes.test_there_and_back import model_of
from tests.sampled import sampled
from xrank import gather_checkpoint
from xrank.errors import ContradictionError, IncompleteError, XrankError
from xrank.layout.nests import size
from xrank.recipes.config_proof import find_misfit
from xrank.recipes.recipe_choice import choose_recipe, follow_recipe
from xrank.recipes.ties import find_config_ties

pytestmark = pytest.mark.timeout(240)

DOCS = Path(__file__).parents[2] / "docs" / "config.md"
INVISIBLE = set(re.findall(r"^\| `((?:config|args) [^`]+)` \|", DOCS.read_text(), re.MULTILINE))
"""The table of docs/config.md: mistakes that no tensor and no argument contradicts."""


def is_accepted(case: Case) -> bool:
    """Return whether the case becomes a model, with a config.json that nothing contradicts."""
    model = replace(model_of(case.shapes), args=dict(case.args))
    found = choose_recipe(model, case.config, None)
    if found is None:
        return False
    renamed = follow_recipe(model, found, case.config)
    shapes = {shard.name: shard.shape for shard in renamed.shards}
    if find_config_ties(shapes, case.config):
        return False  # the two tensors' bytes are compared: test_a_head_that_config_ties
    for shard in renamed.shards:
        if sum(size(nest) for nest in shard.nests) < prod(shard.shape):
            return False  # elements are missing: test_an_expert_is_missing
    return find_misfit(case.config, shapes) is None


def list_accepted(cases: Iterable[Case]) -> tuple[set[str], int]:
    """Return the mistakes that became a model and that docs/config.md does not list, and how many were refused."""
    accepted, num_refused = set(), 0
    for case in cases:
        try:
            if is_accepted(case):
                accepted |= set() if is_invisible(case.mistake) else {case.mistake}
                continue
        except XrankError:
            pass
        num_refused += 1
    return accepted, num_refused


def is_invisible(mistake: str) -> bool:
    """Return whether the table has the mistake, for the model or for the text model in a config.json of more."""
    return bool({mistake, mistake.replace("text_config.", "")} & INVISIBLE)


@pytest.mark.parametrize("name", sampled(FAMILIES, 3))
def test_some_mistakes_are_refused(name: str) -> None:
    family = FAMILIES[name]
    shapes = {key: tuple(shape) for key, shape in family.recorded["shapes"].items()}
    assert is_accepted(Case(family.full_config(), family.full_args(), shapes))
    cases = list(list_mistakes(family))
    accepted, num_refused = list_accepted(random.Random(name).sample(cases, 16))
    assert not accepted
    assert num_refused > 4


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_mistakes_are_refused(name: str) -> None:
    accepted, num_refused = list_accepted(list_mistakes(FAMILIES[name]))
    assert not accepted
    assert num_refused > 50


def gather(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    gather_checkpoint(leave(folder / "ws", tensors, FAMILIES[name].full_config()), folder / "out")


def test_an_expert_is_missing(tmp_path: Path) -> None:
    tensors = {key: torch.from_numpy(array) for key, array in FAMILIES["gpt-oss"].weights().items()}
    left = {key: tensor for key, tensor in tensors.items() if "experts.3." not in key}
    with pytest.raises(IncompleteError, match="gate_up_proj, rows 3-3: no rank wrote these elements"):
        gather(tmp_path, "gpt-oss", left)


def test_a_head_that_config_ties(tmp_path: Path) -> None:
    tensors = {key: torch.from_numpy(array) for key, array in FAMILIES["gemma2"].weights().items()}
    head = tensors["embedding.word_embeddings.weight"] + 1
    with pytest.raises(ContradictionError, match=r"lm_head.weight is tied to model.embed_tokens.weight"):
        gather(tmp_path, "gemma2", {**tensors, "output_layer.weight": head})
