"""Tensors that a model lacks, as its own layers show: a number that a list leaves out, a name that equal layers have.

Formats that record whole tensors record no list of a model's names, and transformers gives random values to those that
it does not find. Where no recipe and no base model knows all names, layers are still compared with one another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any

from msgspec import Struct

from xrank.errors import ContradictionError, either, needs, option
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import StoredModel
from xrank.recipes.adapter_names import find_adapter
from xrank.recipes.found_source import BaseModel
from xrank.recipes.recipe_file import read_shipped_table
from xrank.recipes.ties import embedding_of
from xrank.words import likewise_text

_Shape = tuple[int, ...]
# A longer number is not the index of a layer, and would make a mask of as many bits.
_INDEX = re.compile(r"\.(\d{1,5})(?=\.)")
_OF_QUANTIZER = re.compile(r"[._:][^.]*(scale|absmax|quant|zero_?point|zeros|g_idx|blocks|packed|qdata|amax)[^.]*$")
_UNEVEN = re.compile(".*modernv?bert.*|longcat_flash|pp_doclayout_v3|udop")
"""Model types whose first layer lacks a norm, or whose lists hold modules without tensors, or with tied ones."""
_OF_LAYERS = re.compile("layer|dense|share|skip|period|interval|freq|step|every|pattern|stride|ratio|sparse")


class Hole(Struct, frozen=True):
    """A tensor, or a module of a list, that a model lacks."""

    name: str
    like: str
    """Name of a tensor that the model has in its place in another module of the list."""
    num_others: int
    """Number of modules that have it, and are otherwise as the one that lacks it."""


class _Modules(Struct, frozen=True):
    """A list of modules: for each name in a module, the numbers of the modules that have it, as bits."""

    path: str
    masks: Mapping[str, int]

    @property
    def numbers(self) -> int:
        """Bits of all modules that have any tensor."""
        return reduce(or_, self.masks.values(), 0)


_Kind = tuple[frozenset[tuple[str, _Shape]], list[int]]
"""Names in a module with their shapes, and the numbers of the modules that have exactly these."""


def find_hole(shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None) -> Hole | None:
    """Return the first tensor that a model lacks as far as its layers show; None: they show none.

    A module of a list has a hole if it has only a part of the tensors of most others, in the same shapes, except where
    config.json gives layers of that place another form: by a list with an entry for each layer, or by a number
    (``num_kv_shared_layers``, ``layer_period``). Modules of several forms, such as stages of a vision tower, or layers
    of attention and of Mamba, show nothing of each other.
    """
    if any(map(_UNEVEN.fullmatch, _list_types(config or {}))):
        return None
    masks: dict[str, dict[str, int]] = {}
    for name in shapes:
        for match in _INDEX.finditer(name):
            own, inner = masks.setdefault(name[: match.start()], {}), name[match.end() + 1 :]
            own[inner] = own.get(inner, 0) | 1 << int(match[1])
    # Lists of modules that have modules in them: a list of plain layers may have functions in between.
    lists = [_Modules(path, own) for path, own in masks.items() if any("." in inner for inner in own)]
    slots = _find_slots(lists)
    for modules in lists:
        numbers = modules.numbers
        is_numbered = numbers & (numbers + 1) == 0
        if is_numbered and all(mask == numbers for mask in modules.masks.values()):
            continue
        kinds = _group(modules, shapes)
        has_gap = not is_numbered and modules.path not in slots
        hole = (_find_gap(modules, kinds) if has_gap else None) or _find_lack(modules, kinds, config or {})
        if hole is not None:
            return hole
    return None


def _list_types(config: Mapping[str, Any]) -> Iterator[str]:
    yield str(config.get("model_type"))
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _list_types(value)


def _find_slots(lists: Sequence[_Modules]) -> set[str]:
    """Return the paths of lists with slots that another layer fills.

    Blocks that several layers share have a list with a slot for each layer, and weights in the slots of their own
    layers alone (Zamba2's adapters with ``num_mem_blocks``). So lists of one name in two layers have no number in
    common, and all numbers together.
    """
    kinds: dict[str, list[_Modules]] = {}
    for modules in lists:
        if (pattern := _INDEX.sub(".*", f"{modules.path}.")) != f"{modules.path}.":
            kinds.setdefault(pattern, []).append(modules)
    found: set[str] = set()
    for alike in kinds.values():
        masks = {modules.numbers for modules in alike}
        total = reduce(or_, masks)
        if len(masks) > 1 and sum(mask.bit_count() for mask in masks) == total.bit_count() and total & (total + 1) == 0:
            found |= {modules.path for modules in alike}
    return found


def _group(modules: _Modules, shapes: Mapping[str, _Shape]) -> list[_Kind]:
    found: dict[frozenset[tuple[str, _Shape]], list[int]] = {}
    for number in _list_bits(modules.numbers):
        names = (inner for inner, mask in modules.masks.items() if mask >> number & 1)
        tensors = frozenset((inner, shapes[f"{modules.path}.{number}.{inner}"]) for inner in names)
        found.setdefault(tensors, []).append(number)
    return list(found.items())


def _list_bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _find_gap(modules: _Modules, kinds: Sequence[_Kind]) -> Hole | None:
    """Return the first number that a list leaves out in which most modules are equal."""
    tensors, numbers = max(kinds, key=lambda kind: len(kind[1]))
    if len(numbers) < 2 or 2 * len(numbers) <= modules.numbers.bit_count():
        return None
    absent = next(_list_bits(~modules.numbers & (1 << modules.numbers.bit_length()) - 1))
    like = f"{modules.path}.{numbers[0]}.{min(tensors)[0]}"
    return Hole(f"{modules.path}.{absent}", like, len(numbers))


def _find_lack(modules: _Modules, kinds: Sequence[_Kind], config: Mapping[str, Any]) -> Hole | None:
    """Return the first name that a module lacks and that more modules, otherwise as this one, have."""
    for tensors, numbers in kinds:
        for more, others in kinds:
            if len(others) > len(numbers) and tensors < more:
                names = sorted(name for name, _ in more - tensors if not _OF_QUANTIZER.search(f".{name}"))
                if names and not _is_explained(numbers, modules.numbers.bit_length(), config):
                    lacked, had = (f"{modules.path}.{number}.{names[0]}" for number in (numbers[0], others[0]))
                    return Hole(lacked, had, len(others))
    return None


def _is_explained(numbers: Sequence[int], count: int, config: Mapping[str, Any]) -> bool:
    """Return whether config.json gives some of a list's layers another form than the others."""
    is_run = numbers[-1] - numbers[0] + 1 == len(numbers) and (numbers[0] == 0 or numbers[-1] == count - 1)
    steps = {second - first for first, second in pairwise(numbers)}
    forms = {*steps} if len(steps) == 1 else set()
    forms |= {len(numbers), count - len(numbers)} if is_run else set()
    for key, value in config.items():
        if isinstance(value, Mapping):
            if _is_explained(numbers, count, value):
                return True
        elif isinstance(value, list):
            own = [value[number] for number in numbers] if len(value) >= count else []
            others = [each for number, each in enumerate(value[:count]) if number not in numbers]
            if value == list(numbers) or (own and not any(each in others for each in own)):
                return True
        elif type(value) is int and value in forms and _OF_LAYERS.search(key):
            return True
    return False


_NUMBERED = re.compile(r"\.\d+\.|^\d+\.")


def find_absent(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> str | None:
    """Return the first name that every model of config.json's type has and this one lacks; None of an unknown type.

    Older versions of transformers gave some tensors other names. So a tensor is absent only if the model has no other
    one with as many dims whose name the type does not know.
    """
    entry = read_shipped_table("single_tensors.json")["types"].get(str(config.get("model_type")))
    if entry is None or not set(config.get("architectures") or ()) <= set(entry["classes"]):
        return None
    singles = {name: shape for name, shape in shapes.items() if not _NUMBERED.search(name)}
    needed: Mapping[str, int] = entry["needed"]
    known = [*(end for ends in needed for end in ends.split("|")), *entry["others"]]
    dims = {len(shape) for name, shape in singles.items() if not _has_end(name, known)}
    lost = (ends for ends, num_dims in needed.items() if num_dims not in dims)
    return next(
        (ends.split("|")[0] for ends in lost if not any(_has_end(name, ends.split("|")) for name in singles)), None
    )


def _has_end(name: str, ends: Iterable[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def check_against(base: BaseModel, outputs: list[OutputTensor], excluded: set[str], tied: set[str]) -> str | None:
    """Check that a result has the base model's names and shapes; return the checked facts as text."""
    if not base.tensors:
        return None
    found = {output.name: output for output in outputs}
    missing = [name for name in base.tensors if name not in found and name not in excluded and name not in tied]
    if missing:
        raise ContradictionError(
            f"{missing[0]} is in the base model but not in the source{likewise_text(missing[1:])}",
            tensor=missing[0],
            got=f"{len(found)} tensors",
            want=f"the {len(base.tensors)} tensors of {base.path}",
            next_step=either(
                "name the right base model",
                "give a source that has it too",
                f"leave it out by name with {option('exclude')} if the model works without it, as without a draft head",
                needs("model_or_state_dict", f"leave {option('base_model')} out"),
            ),
        )
    surplus = [name for name in found if name not in base.tensors]
    if surplus:
        step = either(
            "name the right base model",
            f"leave the tensor out with {option('exclude')}",
            needs("model_or_state_dict", "leave the tensor out of what is given"),
        )
        first = found[surplus[0]]
        raise ContradictionError(
            f"{surplus[0]} is not in the base model{likewise_text(surplus[1:])}",
            tensor=surplus[0],
            got=f"{first.dtype} {list(first.shape)}",
            want=f"only the {len(base.tensors)} names of {base.path}",
            next_step=step,
        )
    for name, output in found.items():
        shape = base.tensors[name][1]
        if output.shape != shape:
            raise ContradictionError(
                f"{name} has another shape than in the base model",
                tensor=name,
                got=str(list(output.shape)),
                want=f"{list(shape)}, as in {base.path}",
                next_step="name the right base model, or correct the layout",
            )
    return "names and shapes"


def check_source(base: BaseModel, model: StoredModel, config: Mapping[str, Any] | None) -> str | None:
    """Check a source's names and shapes; return the checked facts as text, or None (see `describe_skipped_check`)."""
    names = [shard.name for shard in model.shards]
    if find_adapter(names, model.path, base.tensors) is not None:
        return None  # its tensors' names depend on the choice to keep or merge it
    tied = {name for name in names if name in model.aliases or embedding_of(name, names, config) is not None}
    outputs = [OutputTensor(s.name, s.dtype, s.shape) for s in model.shards if s.name not in tied]
    return check_against(base, outputs, set(), tied)


def describe_skipped_check(base: BaseModel, path: str) -> tuple[str, str]:
    """Return the note that a source was not compared with a base model."""
    if not base.tensors:
        return "base-model", f"{base.path} holds no safetensors weights: names and shapes were not compared with it"
    return "base-model", f"{path} holds an adapter: names and shapes were not compared with {base.path}"
