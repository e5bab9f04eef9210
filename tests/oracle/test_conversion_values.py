"""Models of distinct conversions are saved and loaded as transformers does, value by value, with known exceptions."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.oracle.conversion_values import compare_class, list_converted_classes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[2] / "docs" / "conversions.md"
NUM_PARTS = 28
"""About ten classes each, so that a run that is cut loses one part; ``ARGS="-m slow -k 17-of-28"`` repeats it."""
EXCEPTIONS = {
    "GroundingDinoForObjectDetection": "files differ",
    "MMGroundingDinoForObjectDetection": "files differ",
    "MllamaForCausalLM": "not made",
    "PixioBackbone": "transformers does not load it either",
    "TimmWrapperForImageClassification": "not made",
    "Gemma3ForConditionalGeneration of shieldgemma2": "transformers does not load it either",
}
"""docs/conversions.md has their reasons."""


@cache
def list_classes() -> list[tuple[str, str]]:
    return list(list_converted_classes())


def expect(model_type: str, name: str) -> str:
    """Return the kind of outcome that a class of a model type has."""
    return EXCEPTIONS.get(f"{name} of {model_type}", EXCEPTIONS.get(name, "equal"))


@pytest.mark.parametrize("part", range(NUM_PARTS), ids=[f"{part}-of-{NUM_PARTS}" for part in range(NUM_PARTS)])
def test_files_and_memory_are_those_of_transformers(part: int, tmp_path: Path) -> None:
    chosen = list_classes()[part::NUM_PARTS]
    found = [compare_class(*each, tmp_path / "model") for each in chosen]
    assert [each for each in found if each.kind != expect(each.model_type, each.name)] == []
    assert len(found) > 5


def test_the_docs_count_them() -> None:
    counts = Counter(expect(*each) for each in list_classes())
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", DOCS.read_text(), re.MULTILINE)
    assert {kind: int(count) for kind, count in rows} == counts
    names = {name for _, name in list_classes()}
    assert {name.partition(" ")[0] for name in EXCEPTIONS} <= names
