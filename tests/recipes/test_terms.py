"""Terms over the keys of config.json and of the trainer's arguments."""

from __future__ import annotations

import pytest

from tests.recipes.families import FAMILIES
from tests.recipes.test_there_and_back import RECIPES
from xrank.errors import ContradictionError
from xrank.recipes.recipe_file import evaluate, look_up
from xrank.recipes.sizes import check_requirements


@pytest.mark.parametrize(
    ("term", "value"), [("a / b", None), ("a // b", 4), ("a // b * b", 8), ("a // c", None), ("a - b // b", 8)]
)
def test_division(term: str, value: int | None) -> None:
    assert evaluate({"a": 9, "b": 2, "c": 0}, [term]) == value


def test_paths_go_through_the_language_model() -> None:
    config = {"rope": {"base": 1}, "text_config": {"rope": {"theta": 3, "base": 2}}}
    assert look_up(config, "rope.theta") == 3
    assert look_up(config, "rope.base") == 1
    assert look_up(config, "rope.other") is None


def test_a_condition_names_the_key() -> None:
    family = FAMILIES["nemotron-h"]
    config, args = family.full_config(), {**family.full_args(), "moe_router_score_function": "softmax"}
    recipe = RECIPES["megatron-nemotron-h"]
    with pytest.raises(ContradictionError, match="disagree about moe_router_score_function"):
        check_requirements(recipe, config, args, "folder")
    without_experts = {key: value for key, value in args.items() if key != "num_experts"}
    check_requirements(recipe, config, {**without_experts, "moe_router_topk": 1}, "folder")
