"""The generated equations, and their grammar."""

from __future__ import annotations

from fractions import Fraction

import pytest

from xrank.recipes import config_proof
from xrank.recipes.config_proof import Equation, group_tensors, make_family_claims, measure, parse_equation
from xrank.recipes.recipe_file import read_shipped_table


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("layers.*.w[0] = hidden_size", 12),
        ("layers = num_layers", 2),
        ("w[1] = 2*num_heads*head_dim", 24),
        ("w[0] = hidden_size*num_heads/head_dim", 9),
        ("w[0] = image_size*image_size/patch_size/patch_size+1", 17),
        ("w[0] = text_config.size/2-1", 9),
    ],
)
def test_texts_are_read_as_they_are_written(text: str, length: int) -> None:
    sizes = {"hidden_size": 12, "num_layers": 2, "num_heads": 3, "head_dim": 4, "image_size": 8, "patch_size": 2}
    equation = parse_equation(text)
    assert (str(equation), equation.compute({**sizes, "text_config.size": 20})) == (text, length)


def test_every_equation_of_the_file_is_read() -> None:
    entries = read_shipped_table("config_sizes.json", "equations")
    texts = {text for found in entries.values() for text in found}
    assert len(texts) > 200
    assert [text for text in texts if str(parse_equation(text)) != text] == []
    assert all(parse_equation(text).exponents for text in texts)


def test_lengths_are_those_of_names_with_and_without_the_base_model() -> None:
    shapes = {
        "bert.layers.0.w": (4, 3),
        "bert.layers.1.w": (4, 5),
        "bert.norm.weight": (4,),
        "head.norm.weight": (6,),
        "head.experts.0.up.3.w": (2,),
    }
    lengths = {key: length for key, (length, _) in measure(group_tensors(shapes)).items()}
    assert lengths["bert.layers.*.w[0]"] == lengths["layers.*.w[0]"] == 4
    assert lengths["bert.norm.weight[0]"] == 4
    assert lengths["bert.layers"] == lengths["layers"] == 2
    assert lengths["head.experts.*.up"] == 1
    # Lengths that differ are those of no pattern, and a name alone is too short.
    assert not lengths.keys() & {"bert.layers.*.w[1]", "layers.*.w[1]", "norm.weight[0]", "weight[0]"}


def test_claims_need_their_keys_and_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"mine": ["layers.*.w[0] = inner.width", "layers.*.w[1] = size/heads"]}
    monkeypatch.setattr(config_proof, "read_shipped_table", lambda name, table: entries)
    kinds = group_tensors({"model.layers.0.w": (4, 3)})

    def claims(**values: object) -> list[tuple[str, bool]]:
        found = make_family_claims({"model_type": "mine", **values}, kinds)
        return [(claim.kind, claim.holds) for _, claim in found]

    assert claims(inner={"width": 4}, size=6, heads=2) == [("inner.width", True), ("size", True)]
    assert claims(inner={"width": 5}, size=8, heads=2) == [("inner.width", False), ("size", False)]
    assert claims(inner={"width": None}, size=7, heads=2) == []
    assert claims(inner=4, size=6) == []
    assert list(make_family_claims({"model_type": "other", "size": 1}, kinds)) == []


def test_an_equation_is_a_product() -> None:
    equation = Equation("w[0]", Fraction(3, 2), {"a": 2, "b": -1}, 1)
    assert equation.compute({"a": 4, "b": 8}) == 4
    assert parse_equation(str(equation)) == equation
