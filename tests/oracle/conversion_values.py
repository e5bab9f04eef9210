"""Small models of transformers' classes, saved by xrank beside `save_pretrained`, and loaded again: value by value.

Run as a module, it prints a row for each class of a distinct conversion, as docs/conversions.md counts them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import CONFIG_MAPPING

from tests.oracle import config_models
from tests.oracle.config_models import parse_config, read_defaults
from tests.oracle.make_conversion_table import UNMADE, find_classes
from xrank import export_model, load_model
from xrank.errors import XrankError
from xrank.recipes.conversions import find_transforms

__all__ = ["Outcome", "compare_class", "list_converted_classes"]

MAX_PARAMETERS = 250_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one class: ``equal``, or the kind of an exception and its reason."""

    model_type: str
    name: str
    kind: str
    reason: str = ""


def list_converted_classes() -> Iterator[tuple[str, str]]:
    """Yield model types and classes whose names or tensors differ in files; one class for each distinct conversion.

    First those of auto classes, then the others that transformers exports.
    """
    seen: set[tuple[str, Any]] = set()
    listed = config_models.find_classes()
    known = {name for _, name in listed}
    others = [(cls.config_class.model_type, cls.__name__) for cls in find_classes() if cls.__name__ not in known]
    for model_type, name in [*listed, *(each for each in others if each[0] in CONFIG_MAPPING)]:
        if name in UNMADE:
            continue
        config = {**read_defaults(CONFIG_MAPPING[model_type]), "architectures": [name]}
        key = (model_type, find_transforms(config))
        if key[1] and key not in seen:
            seen.add(key)
            yield model_type, name


def compare_class(model_type: str, name: str, folder: Path) -> Outcome:
    """Save a small model of the class twice and load it; see whether all names, shapes and values are equal.

    Args:
        model_type: the type in config.json.
        name: the class.
        folder: a folder to write to; nothing remains there.
    """
    kind, reason = _compare(model_type, name, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(model_type, name, kind, reason)


def _compare(model_type: str, name: str, folder: Path) -> tuple[str, str]:
    meta = config_models.build_small(model_type, name, read_defaults(CONFIG_MAPPING[model_type]))
    if meta is None or meta.num_parameters() > MAX_PARAMETERS:
        # Auto classes also list classes that take the config of another type, such as an inner one.
        model_type = getattr(transformers, name).config_class.model_type
        meta = config_models.build_small(model_type, name, read_defaults(CONFIG_MAPPING[model_type]))
    if meta is None:
        return "not made", "the class does not take small sizes, or needs a package"
    if meta.num_parameters() > MAX_PARAMETERS:
        return "not made", f"{meta.num_parameters() / 1e6:,.0f} million parameters with few layers"
    small = parse_config(meta.config.to_json_string())
    model_type = small.get("model_type", model_type)  # of the inner config, where the class takes that of an outer one
    model, other = (config_models.build(model_type, name, small, "cpu") for _ in range(2))
    if model is None or other is None:
        return "not made", "the class cannot be made on a CPU"
    fill(model, 1)
    fill(other, 2)
    try:
        model.save_pretrained(folder / "theirs")
    except Exception as error:
        return "transformers cannot save it", f"{type(error).__name__}: {error}"[:200]
    try:
        export_model(model, folder / "ours")
    except XrankError as error:
        return "export refused", str(error).splitlines()[0][:200]
    wrong = differing(read_files(folder / "theirs"), read_files(folder / "ours"))
    if wrong:
        return "files differ", ", ".join(wrong[:3])
    try:
        load_model(other, folder / "theirs")
    except XrankError as error:
        return _blame(model, other, folder / "theirs", "load refused", str(error).splitlines()[0][:200])
    wrong = differing(model.state_dict(), other.state_dict())
    return _blame(model, other, folder / "theirs", "load differs", ", ".join(wrong[:3])) if wrong else ("equal", "")


def fill(model: Any, seed: int) -> None:
    """Give all tensors random values, in bf16."""
    torch.manual_seed(seed)
    model.to(torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()


def _blame(model: Any, other: Any, folder: Path, kind: str, reason: str) -> tuple[str, str]:
    """Return the kind and reason; or a kind for models that transformers saves but cannot load."""
    try:
        loaded = type(other).from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    except Exception as error:
        return "transformers does not load it either", f"{type(error).__name__}: {error}"[:120] + f"; xrank: {reason}"
    wrong = differing(model.state_dict(), loaded)
    if wrong:
        return "transformers does not load it either", f"{', '.join(wrong[:2])}; xrank: {reason}"
    return kind, reason


def differing(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    """Return the names that only one has, and those of other shapes, types or values."""
    return [
        name
        for name in sorted(want.keys() | got.keys())
        if name not in want
        or name not in got
        or want[name].dtype != got[name].dtype
        or not torch.equal(want[name], got[name])
    ]


def read_files(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all weight files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 -- not a dict
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        for each in list_converted_classes():
            found = compare_class(*each, Path(place) / "model")
            print(f"| {found.kind} | `{found.name}` | {found.reason} |", flush=True)
