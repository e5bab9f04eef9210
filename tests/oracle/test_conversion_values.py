"""Models of distinct conversions are saved and loaded as transformers does, value by value, with known exceptions."""

import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.oracle import small_configs
from tests.oracle.conversion_values import compare_class, list_converted_classes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DOCS = Path(__file__).parents[2] / "docs" / "conversions.md"
NUM_PARTS = 28
"""About ten classes each, so that a run that is cut loses one part; ``ARGS="-m slow -k 17-of-28"`` repeats it."""
EXCEPTIONS = {
    "PixioBackbone": "transformers does not load it either",
    "Gemma3ForConditionalGeneration of shieldgemma2": "transformers does not load it either",
}
"""docs/conversions.md has their reasons."""
HAS_TIMM = find_spec("timm") is not None
"""Whether timm, pillow and torchvision are installed, which `make oracle` does without."""
OF_TIMM = re.compile(
    "ConditionalDetrForSeg|EdgeTam|FastVlm|Gemma3nForCond|OmDetTurbo|Pe(Audio)?Video|PerceptionLM|TimmWrapper"
)
_STAGES = {"out_features": [f"stage{number}" for number in range(1, 5)]}
_LAYERS = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96, **_STAGES}
BACKBONES: dict[str, dict[str, Any]] = {
    "swin": {"embed_dim": 16, "depths": [1] * 4, "num_heads": [1, 2, 2, 2], "image_size": 32, **_STAGES},
    "dinov2": {"image_size": 28, "patch_size": 14, **_LAYERS},
    "beit": {"image_size": 32, "patch_size": 8, **_LAYERS},
}
SEGMENTERS = {
    "upernet": "UperNetForSemanticSegmentation",
    "detr": "DetrForObjectDetection",
    "dpt": "DPTForDepthEstimation",
    "mask2former": "Mask2FormerForUniversalSegmentation",
}


@cache
def list_classes() -> list[tuple[str, str]]:
    return list(list_converted_classes())


def expect(model_type: str, name: str) -> str:
    """Return the kind of outcome that a class of a model type has."""
    if not HAS_TIMM and OF_TIMM.match(name):
        return "not made"
    return EXCEPTIONS.get(f"{name} of {model_type}", EXCEPTIONS.get(name, "equal"))


@pytest.mark.parametrize("part", range(NUM_PARTS), ids=[f"{part}-of-{NUM_PARTS}" for part in range(NUM_PARTS)])
def test_files_and_memory_are_those_of_transformers(part: int, tmp_path: Path) -> None:
    chosen = list_classes()[part::NUM_PARTS]
    found = [compare_class(*each, tmp_path / "model") for each in chosen]
    assert [each for each in found if each.kind != expect(each.model_type, each.name)] == []
    assert len(found) > 5


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", SEGMENTERS)
def test_backbones_of_other_types(name: str, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has one backbone of each class, and config.json any."""
    own = {**small_configs.OWN.get(name, {}), "backbone_config": {"model_type": backbone, **BACKBONES[backbone]}}
    monkeypatch.setitem(small_configs.OWN, name, own)
    assert compare_class(name, SEGMENTERS[name], tmp_path / "model").kind == "equal"


@pytest.mark.skipif(not HAS_TIMM, reason="the docs count models of timm, too")
def test_the_docs_count_them() -> None:
    counts = Counter(expect(*each) for each in list_classes())
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", DOCS.read_text(), re.MULTILINE)
    assert {kind: int(count) for kind, count in rows} == counts
    names = {name for _, name in list_classes()}
    assert {name.partition(" ")[0] for name in EXCEPTIONS} <= names
