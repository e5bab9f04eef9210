"""transformers' own conversions, as data: which names and forms tensors have in files, and which in memory.

``transformers.json`` beside this module is generated from an installed transformers by
``tests/oracle/make_conversion_table.py``. A conversion is a sequence of transforms, each with one side for loading and
one for saving, as transformers reverses it (transformers/core_model_loading.py: reverse_transform). Models on the Hub
have one tensor for each expert's projection, and often older names than the module has. `save_pretrained` undoes the
conversions that loading made, and, for a model made from scratch, all that transformers has for its class, without
those that add or remove a prefix (transformers/core_model_loading.py: revert_weight_conversion).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import count
from math import ceil, prod
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.errors import LayoutError, UsageError, option
from xrank.layout.nests import Nest, canonical, intersect, row_major
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.recipes.found_source import OwnConfig
from xrank.recipes.options import GatherOptions
from xrank.recipes.recipe_choice import make_shard
from xrank.recipes.recipe_file import read_shipped_table

_read_table = partial(read_shipped_table, "transformers.json")


class Rearrangement(Struct, frozen=True):
    """A rearrangement of tensors; `xrank.recipes.conversions` carries it out."""

    kind: str
    """Name of transformers' class."""
    arguments: tuple[tuple[str, Any], ...]
    """Arguments that differ from the class' defaults."""


class Direction(Struct, frozen=True):
    """One direction of a transform."""

    patterns: tuple[str, ...]
    """Regular expressions of names; ``*.`` stands for an index and all before it."""
    targets: tuple[str, ...]
    """Text that replaces a match; ``\\1`` stands for the text of the pattern's group."""
    operations: tuple[Rearrangement, ...] = ()
    offset: int = 0
    """Number to add to an index that the group matches."""


class Conversion(Struct, frozen=True):
    """One entry of transformers' table, for a model or for a model inside it."""

    kind: str
    """``rename``, ``prefix``, ``convert``, ``offset``, or ``group``: renamings that count only after the first one."""
    load: Direction
    save: Direction
    scope: str | None = None
    """Path of the inner model without `prefix`; None: all names."""
    prefix: str = ""
    """The outer model's ``base_model_prefix``."""

    @property
    def is_converter(self) -> bool:
        """Whether the transform rearranges tensors."""
        return self.kind == "convert"


def find_transforms(config: Mapping[str, Any]) -> tuple[Conversion, ...]:
    """Return the transforms of a model, in the order of loading; none for a model that has the same names in files.

    The order and the scopes are those of transformers/conversion_mapping.py: get_model_conversion_mapping.
    """
    root, models, mappings = _find_class(config), _read_table("models"), _read_table("mappings")
    if root in _read_table("unmade"):
        problem = f"the conversion of {root} is not in xrank's table: transformers cannot make such a model"
        step = f"keep the names with {option('recipe', 'none')}"
        raise LayoutError(problem, got=f"{root}, and transformers {_read_table('transformers')}", next_step=step)
    prefix = models[root][0] if root in models else ""
    claimed: dict[str, list[str]] = defaultdict(list)
    found: list[Conversion] = []
    for path, name, model_type in _walk(root, config, ""):
        if _is_inside(path, claimed[name]):
            continue
        numbers, is_own = mappings.get(name), True
        if numbers is None:
            if _is_inside(path, claimed[model_type]):
                continue
            numbers, is_own = mappings.get(model_type), False
        if numbers is None:
            continue
        scope = path.removeprefix(prefix).removeprefix(".") if path else None
        found += (replace(_transform(number), scope=scope, prefix=prefix) for number in numbers)
        claimed[name].append(path)
        if not is_own:
            claimed[model_type].append(path)
    return tuple(found)


def find_num_heads(config: Mapping[str, Any], key: str | None) -> int:
    """Return the number of attention heads in a config, or in the one inside it under `key`."""
    inner = config.get(key) if key is not None else None
    config = inner if isinstance(inner, Mapping) else config
    name, default = _read_table("heads").get(config.get("model_type"), ("num_attention_heads", 1))
    return int(config.get(name, config.get("num_attention_heads", default)))


def is_known_size(model_type: object, key: str) -> bool:
    """Return whether a model type's config has a size under that key; for unknown types each key counts.

    Config files also contain keys that no model reads, such as ``num_key_value_heads`` for GPT-NeoX.
    """
    known = _read_table("sizes").get(model_type) if isinstance(model_type, str) else None
    return known is None or key in known


def is_known_type(model_type: object) -> bool:
    """Return whether transformers has this model type."""
    return isinstance(model_type, str) and model_type in _read_table("sizes")


def _is_inside(path: str, outer: list[str]) -> bool:
    return any(seen == "" or path.startswith(seen + ".") for seen in outer)


def _find_class(config: Mapping[str, Any]) -> str:
    """Return the model's class; "" if the config names none that transformers has."""
    architectures = config.get("architectures")
    name = str(architectures[0]).removeprefix("FSDP") if isinstance(architectures, list) and architectures else ""
    if name in _read_table("models") or name in _read_table("mappings") or "auto_map" in config:
        return name
    model_type = config.get("model_type")
    return next((kinds[model_type] for kinds in reversed(_read_table("auto").values()) if model_type in kinds), name)


def _walk(name: str, config: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path, class, model type) of a model and of all models in it, outer ones first."""
    models = _read_table("models")
    _, known_type, parts = models.get(name, ("", "", ()))
    yield path, name, str(config.get("model_type") or known_type)
    for inner_path, inner, key, kind in parts:
        inner_known = models.get(inner, ("", "", ()))[1]
        inner_config = config if key == "" else config.get(key)
        if not isinstance(inner_config, Mapping):
            inner_config = {}
        model_type = inner_config.get("model_type")
        if kind is not None and model_type not in (None, inner_known):
            inner = _read_table("auto")[kind].get(model_type, "")
        elif model_type is None:
            inner_config = {**inner_config, "model_type": inner_known}
        yield from _walk(inner, inner_config, f"{path}.{inner_path}" if path else inner_path)


@cache
def _transform(number: int) -> Conversion:
    each = _read_table("transforms")[number]
    return Conversion(each["kind"], _parse_side(each["load"]), _parse_side(each["save"]))


def _parse_side(side: Mapping[str, Any]) -> Direction:
    operations = []
    for each in side.get("operations", ()):
        arguments = ((key, tuple(value) if isinstance(value, list) else value) for key, value in each.items())
        operations.append(Rearrangement(each["op"], tuple(item for item in arguments if item[0] != "op")))
    return Direction(tuple(side["from"]), tuple(side["to"]), tuple(operations), side.get("offset", 0))


class TensorGroup(Struct, frozen=True):
    """Tensors that are converted together; a tensor that is only renamed is a group of its own."""

    name: str
    """The new name; of a converter, the one with its first target in it."""
    side: Direction | None
    """The converter; None: the tensor is only renamed."""
    inputs: dict[str, list[str]] = field(default_factory=dict)
    """Pattern of the converter -> names that match it, in natural order."""


class NamePass:
    """One pass over the names of a model in one direction; keeps which transforms it used."""

    def __init__(self, transforms: Sequence[Conversion], *, is_save: bool) -> None:
        self._prefix = transforms[0].prefix if transforms else ""
        # Inner models' transforms were applied last when loading, so they are undone first.
        ordered = list(enumerate(transforms))[:: -1 if is_save else 1]
        self._is_save = is_save
        self._renamings = [(number, each) for number, each in ordered if not each.is_converter]
        self._converters = [(number, each) for number, each in ordered if each.is_converter]
        self._active: set[int] = set()
        self.used: set[int] = set()
        """Numbers of the transforms that matched a name."""

    def find_groups(self, names: Iterable[str], wanted: Collection[str] = ()) -> list[TensorGroup]:
        """Return the groups of all names of a model.

        When loading into a module with the names `wanted`, the base model's prefix is added or removed where that fits.
        """
        groups: dict[str, TensorGroup] = {}
        for name in sorted(names, key=_natural_key):
            if self._is_save:
                new, side, pattern = self._apply_converters(name)
                new, pattern = (self.rename(name), name) if side is None else (new, pattern)
            else:
                new, side, pattern = self._apply_converters(self.rename(name))
                pattern = pattern or name
            if not self._is_save and wanted:
                new = _fit_prefix(new, self._prefix, wanted)
                if new not in wanted and name in wanted:
                    new, side, pattern = name, None, name
            group = groups.setdefault(new, TensorGroup(new, side))
            group.inputs.setdefault(pattern, []).append(name)
        return list(groups.values())

    def rename(self, name: str) -> str:
        """Return a name after all renamings."""
        for number, transform in self._renamings:
            name, _ = self._apply(number, transform, name)
        return name

    def _apply_converters(self, name: str) -> tuple[str, Direction | None, str]:
        for number, transform in self._converters:
            new, pattern = self._apply(number, transform, name)
            if pattern is not None:
                return new, self._side(transform), pattern
        return name, None, ""

    def _side(self, transform: Conversion) -> Direction:
        return transform.save if self._is_save else transform.load

    def _apply(self, number: int, transform: Conversion, name: str) -> tuple[str, str | None]:
        """Return the new name and the pattern that matched; the name itself and None without a match."""
        start = _find_scope(transform, name)
        if start is None:
            return name, None
        side, rest = self._side(transform), name[len(start) :]
        compiled = _compile(side.patterns)
        found = compiled.search(rest)
        if found is None:
            return name, None
        label = next(key for key, value in found.groupdict().items() if value is not None)
        index = int(label[1:])
        if transform.kind == "group" and index == 0:
            self._active.add(number)
        elif transform.kind == "group" and number not in self._active:
            return name, None
        self.used.add(number)
        target = side.targets[index if transform.kind == "group" else 0]
        if "\\" in target:
            first = compiled.groupindex[label]
            if transform.kind == "offset":
                target = target.replace(r"\1", str(int(found.group(first + 1)) + side.offset))
            else:
                target = re.sub(r"\\(\d+)", lambda at: found.group(first + int(at[1])), target)
        return start + rest.replace(found.group(0), target, 1), side.patterns[index]


def _natural_key(name: str) -> list[tuple[object, ...]]:
    """Return the key by which transformers sorts names: numbers by value, before text."""
    key: list[tuple[object, ...]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        if part.isdigit():
            key.append((0, int(part)))
        elif len(text) < len(part):
            key.append((1, text, int(part[len(text) :])))
        else:
            key.append((1, text))
    return key


def _find_scope(transform: Conversion, name: str) -> str | None:
    """Return the start of a name that the transform leaves alone; None if the name is outside its scope."""
    if transform.scope is None:
        return ""
    scope = f"{transform.scope}." if transform.scope else ""
    prefix = f"{transform.prefix}." if transform.prefix else ""
    return next((start for start in (prefix + scope, scope) if name.startswith(start)), None)


def _fit_prefix(name: str, prefix: str, wanted: Collection[str]) -> str:
    """Return a name with the base model's prefix added or removed, if the module has it only so."""
    if name.startswith(prefix) and (shorter := re.sub(f"^{prefix}.", "", name, count=1)) in wanted:
        return shorter
    return longer if (longer := f"{prefix}.{name}") in wanted else name


@lru_cache(maxsize=1024)
def _compile(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return one expression for all patterns; a longer one counts before a shorter one."""
    branches = []
    for index, pattern in sorted(enumerate(patterns), key=lambda each: -len(each[1])):
        pattern = pattern.replace("*.", r".*\.")
        # A pattern that ends in a word ends at the end of a word in the name.
        end = r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", pattern) else ""
        branches.append(f"(?P<g{index}>{pattern}{end})")
    return re.compile("|".join(branches))


class Placed(Struct, frozen=True):
    """A tensor made of elements of inputs."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, Nest], ...]
    """(name of the input, nest from its elements to the tensor's)."""

    def map(self, nest: Nest, shape: Sequence[int]) -> Placed:
        """Return the tensor of that shape to which `nest` copies elements of this one."""
        parts = tuple((name, piece) for name, part in self.parts for piece in intersect(part, nest))
        return Placed(tuple(shape), parts)


Shape = tuple[int, ...]
_Tensors = dict[str, list[Placed]]


def place_input(name: str, shape: Sequence[int]) -> Placed:
    """Return an input as it is."""
    return Placed(tuple(shape), ((name, canonical(Nest(0, 0, ((prod(shape), 1, 1),)))),))


def run_operations(
    side: Direction,
    inputs: Mapping[str, Sequence[Placed]],
    config: Mapping[str, Any],
    *,
    is_save: bool,
    module_shapes: Mapping[str, Shape | None] | None = None,
) -> dict[str, Placed]:
    """Return the outputs of a converter, under its targets.

    `inputs` are the tensors that match each pattern, in natural order; `module_shapes`, when loading, the module's.
    """
    tensors: _Tensors = {pattern: list(each) for pattern, each in inputs.items()}
    for operation in side.operations:
        function = _FUNCTIONS.get(operation.kind)
        if function is None:
            raise _misfit(f"transformers' operation {operation.kind} is unknown to xrank")
        tensors = function(_Chain(side, config, dict(operation.arguments), is_save, module_shapes or {}), tensors)
    if any(len(each) != 1 for each in tensors.values()):
        raise _misfit(f"a converter of {side.patterns[0]} leaves lists of tensors")
    return {name: each[0] for name, each in tensors.items()}


class _Chain(Struct, frozen=True):
    """The converter that an operation belongs to, and the operation's arguments."""

    side: Direction
    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    is_save: bool
    module_shapes: Mapping[str, Shape | None]

    @property
    def dim(self) -> int:
        """The operation's dim."""
        return int(self.arguments.get("dim", 0))

    @property
    def target(self) -> str:
        """The only target."""
        if len(self.side.targets) > 1:
            raise _misfit(f"one result is wanted for {len(self.side.targets)} targets of {self.side.patterns[0]}")
        return self.side.targets[0]

    def key_of(self, source: str) -> str:
        """Return the key of a result that has one input: the source's inside a chain, else the target."""
        return source if (len(self.side.targets) > 1) != (len(self.side.patterns) > 1) else self.target

    def count_shards(self) -> int | None:
        """Return how many tensors a config asks for; None where the converter has a fixed number."""
        key = self.arguments.get("num_shards_attribute")
        if key is None:
            return None
        text = self.config.get("text_config")
        return int((text if isinstance(text, Mapping) and key in text else self.config)[key])


def _misfit(problem: str) -> LayoutError:
    step = f"keep the names with {option('recipe', 'none')}, or convert the model with transformers itself"
    return LayoutError(problem, want="tensors that transformers could convert", next_step=step)


def _single(tensors: _Tensors) -> Placed:
    (first, *more), *others = tensors.values()
    if more or others:
        raise _misfit(f"one tensor is wanted; got {sum(map(len, tensors.values()))} of {next(iter(tensors))}")
    return first


def _concatenate(values: Sequence[Placed], dim: int) -> Placed:
    first = values[0].shape
    dim %= len(first)
    if any((*v.shape[:dim], *v.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]) for v in values):
        raise _misfit(f"tensors of shapes {[list(v.shape) for v in values][:4]} cannot be joined along dim {dim}")
    length = sum(value.shape[dim] for value in values)
    # The dims before `dim` are one loop, and those behind it one run: two loops are enough for any number of dims.
    outer, inner = prod(first[:dim]), prod(first[dim + 1 :])
    shape = (*first[:dim], length, *first[dim + 1 :])
    parts: list[tuple[str, Nest]] = []
    start = 0
    for value in values:
        run = value.shape[dim] * inner
        parts += value.map(Nest(0, start, ((outer, run, length * inner), (run, 1, 1))), shape).parts
        start += run
    return Placed(shape, tuple(parts))


def _split(value: Placed, sizes: Sequence[int], dim: int) -> list[Placed]:
    dim %= len(value.shape)
    outer, inner = prod(value.shape[:dim]), prod(value.shape[dim + 1 :])
    found, start = [], 0
    for size in sizes:
        nest = Nest(start, 0, ((outer, value.shape[dim] * inner, size * inner), (size * inner, 1, 1)))
        found.append(value.map(nest, (*value.shape[:dim], size, *value.shape[dim + 1 :])))
        start += size * inner
    return found


def _swap_dims(value: Placed, one: int, other: int) -> Placed:
    order = list(range(len(value.shape)))
    order[one], order[other] = order[other], order[one]
    shape = tuple(value.shape[dim] for dim in order)
    old, new = row_major(value.shape), row_major(shape)
    nest = Nest(0, 0, tuple((value.shape[dim], old[dim], new[at]) for at, dim in enumerate(order)))
    return value.map(canonical(nest), shape)


def _reshape(value: Placed, shape: Sequence[int]) -> Placed:
    if prod(shape) != prod(value.shape):
        raise _misfit(f"a tensor of shape {list(value.shape)} cannot have shape {list(shape)}")
    return Placed(tuple(shape), value.parts)


def _chunk(chain: _Chain, tensors: _Tensors) -> _Tensors:
    value, targets = _single(tensors), list(chain.side.targets)
    count = chain.count_shards()
    if count is not None:
        targets = [chain.target.replace("*", str(index)) for index in range(count)]
    length = value.shape[chain.dim]
    size = ceil(length / len(targets))  # as torch.chunk
    sizes = [min(size, length - start) for start in range(0, length, size)]
    if len(sizes) != len(targets):
        raise _misfit(f"{length} rows cannot be split into {len(targets)} tensors for {chain.side.targets[0]}")
    return {target: [part] for target, part in zip(targets, _split(value, sizes, chain.dim), strict=True)}


def _split_by_module(chain: _Chain, tensors: _Tensors) -> _Tensors:
    """Cut a tensor into its targets, each as long as the module's own tensor."""
    value, dim = _single(tensors), chain.dim
    shapes = [chain.module_shapes.get(target) for target in chain.side.targets]
    lengths = [shape[dim] for shape in shapes if shape is not None]
    if len(lengths) < len(shapes):
        raise _misfit(f"only a module shows how {chain.side.patterns[0]} is split into {len(shapes)} tensors")
    if sum(lengths) != value.shape[dim]:
        own = " + ".join(map(str, lengths))
        raise _misfit(f"{value.shape[dim]} rows of {chain.side.patterns[0]} are not the module's {own}")
    parts = _split(value, lengths, dim)
    return {target: [part] for target, part in zip(chain.side.targets, parts, strict=True)}


def _join(chain: _Chain, tensors: _Tensors) -> _Tensors:
    if missing := [pattern for pattern in chain.side.patterns if pattern not in tensors]:
        raise _misfit(f"nothing matches {missing[0]}, which belongs to {chain.target}")
    values = [value for pattern in chain.side.patterns for value in tensors[pattern]]
    count = chain.count_shards()
    if count is not None and len(values) != count:
        raise _misfit(f"{len(values)} tensors match {chain.side.patterns[0]}; config.json wants {count}")
    return {chain.target: [_concatenate(values, chain.dim)]}


def _stack(values: Sequence[Placed], dim: int) -> Placed:
    return _concatenate([_reshape(v, (*v.shape[:dim], 1, *v.shape[dim:])) for v in values], dim)


def _unstack(value: Placed, dim: int) -> list[Placed]:
    parts = _split(value, [1] * value.shape[dim], dim)
    return [_reshape(part, (*part.shape[:dim], *part.shape[dim + 1 :])) for part in parts]


def _merge(chain: _Chain, tensors: _Tensors) -> _Tensors:
    return {
        chain.target if len(tensors) == 1 else pattern: [_stack(values, chain.dim)]
        for pattern, values in tensors.items()
    }


def _unmerge(chain: _Chain, tensors: _Tensors) -> _Tensors:
    found: _Tensors = {}
    for pattern, values in tensors.items():
        name = chain.target if len(tensors) == 1 else pattern
        for index, part in enumerate(_unstack(values[0], chain.dim)):
            found[name.replace("*", str(index))] = [part]
    return found


def _interleave(chain: _Chain, tensors: _Tensors) -> _Tensors:
    value, dim = _single(tensors), chain.dim
    half = value.shape[dim] // 2
    pair = (2, half) if chain.arguments.get("inverse", False) else (half, 2)
    apart = _reshape(value, (*value.shape[:dim], *pair, *value.shape[dim + 1 :]))
    return {chain.side.targets[0]: [_reshape(_swap_dims(apart, dim, dim + 1), value.shape)]}


def _transpose(chain: _Chain, tensors: _Tensors) -> _Tensors:
    value = _single(tensors)
    name = chain.side.patterns[0] if len(chain.side.targets) > 1 else chain.target
    if chain.arguments.get("check_dims", False):
        # transformers compares with the module's shape; a tensor that is saved has it.
        want = value.shape if chain.is_save else chain.module_shapes.get(chain.side.targets[0])
        if want is None:
            raise _misfit(f"only a module shows whether {name} is transposed in files")
        if value.shape == want:
            return {name: [value]}
    return {name: [_swap_dims(value, chain.arguments.get("dim0", 0), chain.arguments.get("dim1", 1))]}


def _permute_heads(chain: _Chain, tensors: _Tensors) -> _Tensors:
    names = chain.arguments.get("permute_layer_names")
    heads = find_num_heads(chain.config, chain.arguments.get("subconfig_key"))
    found: _Tensors = {}
    for pattern, values in tensors.items():
        value = values[0]
        # A head's two halves lie apart in one form and alternate in the other, so a swap of two dims leads over.
        if names is None or any(name in pattern for name in names):
            half = value.shape[0] // heads // 2
            pair = (2, half) if chain.arguments.get("inverse", False) else (half, 2)
            apart = _reshape(value, (heads, *pair, *value.shape[1:]))
            value = _reshape(_swap_dims(apart, 1, 2), value.shape)
        found[chain.key_of(pattern)] = [value]
    return found


def _fuse_kinds(chain: _Chain, tensors: _Tensors) -> _Tensors:
    """Stack the first part of each list for the first target, and so on; join what the lists give to a target."""
    stack, join = chain.arguments.get("stack_dim", 0), chain.arguments.get("concat_dim", 1)
    count = len(chain.side.targets)
    found: dict[str, list[Placed]] = {target: [] for target in chain.side.targets}
    for pattern in chain.side.patterns:
        values = tensors.get(pattern, [])
        size = ceil(len(values) / count)
        for index, target in enumerate(chain.side.targets):
            found[target].append(_stack(values[index * size : (index + 1) * size], stack))
    return {target: [_concatenate(values, join)] for target, values in found.items()}


def _part_kinds(chain: _Chain, tensors: _Tensors) -> _Tensors:
    """Undo `_fuse_kinds`."""
    stack, join = chain.arguments.get("stack_dim", 0), chain.arguments.get("concat_dim", 1)
    count = len(chain.side.targets)
    found: _Tensors = {}
    for index, target in enumerate(chain.side.targets):
        values: list[Placed] = []
        for pattern in chain.side.patterns:
            whole = tensors[pattern][0]
            part = _split(whole, [whole.shape[join] // count] * count, join)[index]
            values += _unstack(part, stack)
        found |= {target.replace("*", str(at)): [value] for at, value in enumerate(values)}
    return found


_FUNCTIONS: Mapping[str, Callable[[_Chain, _Tensors], _Tensors]] = {
    "Chunk": _chunk,
    "Concatenate": _join,
    "ErnieFuseAndSplitTextVisionExperts": _fuse_kinds,
    "ErnieSplitAndDecoupleTextVisionExperts": _part_kinds,
    "Interleave": _interleave,
    "MergeModulelist": _merge,
    "PermuteForRope": _permute_heads,
    "Split": _split_by_module,
    "SplitModulelist": _unmerge,
    "Transpose": _transpose,
}


class Converted(Struct, frozen=True, eq=False):
    """A model in its other form."""

    model: StoredModel
    renamed: Mapping[str, str]
    """Old name -> new name, of tensors that are only renamed."""


def is_loaded_as(transforms: Sequence[Conversion], file_names: Iterable[str], names: Collection[str]) -> bool:
    """Return whether loading files with some names gives tensors that are all among `names`."""
    groups = NamePass(transforms, is_save=False).find_groups(file_names, names)
    return all(group.name.replace("*", "0") in names for group in groups)


def convert_model(
    source: StoredModel,
    transforms: Sequence[Conversion],
    config: Mapping[str, Any],
    *,
    is_save: bool,
    module_shapes: Mapping[str, Shape | None] | None = None,
) -> Converted:
    """Return the model with the names and tensors that saving (from memory to files) or loading gives it.

    Each tensor of the source is whole; `transforms` are in the order of loading. When loading, `module_shapes` has the
    names in the module, with global shapes where they are known; None: there is no module.
    """
    names = NamePass(transforms, is_save=is_save)
    shards = {shard.name: shard for shard in source.shards}
    wanted = module_shapes or {}
    made: dict[str, StoredShard] = {}
    renamed: dict[str, str] = {}
    known: dict[tuple[Any, ...], dict[str, Placed]] = {}  # equal layers are computed once
    for group in names.find_groups(shards, wanted):
        labels = [name for each in group.inputs.values() for name in each]
        outputs: list[tuple[str, StoredShard]] = []
        try:
            if group.side is None:
                if len(labels) > 1:
                    raise _collision(group.name, f"{labels[0]} and {labels[1]}")
                renamed[labels[0]] = group.name
                outputs.append((group.name, replace(shards[labels[0]], name=group.name)))
            else:
                for name, value in _convert_group(group, group.side, shards, config, wanted, known, is_save).items():
                    parts = [(shards[labels[int(label)]], nest) for label, nest in value.parts]
                    new = names.rename(name) if is_save else name  # when saving, renamings follow the converters
                    outputs.append((new, make_shard(new, value.shape, parts)))
            for new, shard in outputs:
                if new in made:
                    raise _collision(new, "a tensor of that name, and a converted one")
                made[new] = shard
        except LayoutError as error:
            error.about(tensor=labels[0], file=source.path)
            raise
    at = {name: number for number, name in enumerate(shards)}
    order = sorted(made, key=lambda name: at.get(name, len(at)))
    aliases = {renamed[a]: renamed[b] for a, b in source.aliases.items() if a in renamed and b in renamed}
    return Converted(replace(source, shards=tuple(made[name] for name in order), aliases=aliases), renamed)


def _collision(name: str, got: str) -> LayoutError:
    step = f"keep the names with {option('recipe', 'none')}"
    return LayoutError(f"two tensors would become {name}", tensor=name, got=got, want="one", next_step=step)


def _convert_group(
    group: TensorGroup,
    side: Direction,
    shards: Mapping[str, StoredShard],
    config: Mapping[str, Any],
    module_shapes: Mapping[str, Shape | None],
    known: dict[tuple[Any, ...], dict[str, Placed]],
    is_save: bool,
) -> dict[str, Placed]:
    """Return the outputs of a converter under whole names; their parts name inputs by number."""
    for pattern, names in group.inputs.items():
        if "*" not in pattern or len(names) < 2:
            continue
        pieces = [name.split(".") for name in names]
        at = next((i for i, (a, b) in enumerate(zip(pieces[0], pieces[-1], strict=True)) if a != b), 0)
        numbers = [each[at] for each in pieces]
        if numbers != [str(index) for index in range(len(names))]:  # transformers would close the gap
            raise LayoutError(
                f"{names[-1]}: some of these tensors are missing",
                tensor=names[-1],
                got=f"{len(names)} tensors with the numbers {numbers[0]} to {numbers[-1]}",
                want="each number once, from 0",
                next_step="check that the checkpoint is whole",
            )
    shapes = tuple((p, tuple(shards[name].shape for name in names)) for p, names in group.inputs.items())
    # As transformers finds the module's tensors (core_model_loading.py: Split, Transpose).
    wanted = {to: module_shapes.get(group.name.replace(side.targets[0], to)) for to in side.targets}
    key = (side, shapes, *wanted.values())
    if key not in known:
        number = count()
        inputs = {p: [place_input(str(next(number)), shape) for shape in each] for p, each in shapes}
        known[key] = run_operations(side, inputs, config, is_save=is_save, module_shapes=wanted)
    # All around the first target stays as in the group's name.
    whole = group.name.replace("*.", "0.")
    target = next((each for each in known[key] if each in whole), None)
    start, _, end = whole.partition(target) if target is not None else ("", "", "")
    return {start + each + end: value for each, value in known[key].items()}


TABLE = "transformers"
"""Name by which `recipe` asks for the conversion."""

_SAVED_FORMATS = ("safetensors", "hf-shards", "deltas")
"""Formats whose names are those of files already, unless a base model shows otherwise."""
_SCALE = re.compile(r"[._:].*(scale|absmax|quant|zero_?point|blocks|packed|qdata)")
_ROUTERS = (r".*\.mlp\.gate\.weight", r".*\.block_sparse_moe\.gate\.weight")


def convert_to_files(
    source: StoredModel,
    config: Mapping[str, Any] | None,
    *,
    base_names: Collection[str] = (),
    own: OwnConfig | None = None,
    is_asked: bool = False,
) -> Converted | None:
    """Return the model as `save_pretrained` would write it; None where the names stay.

    `base_names` are those in the files that a module was loaded from; without any, it was made from scratch. A misfit
    is an error if the caller asked for the conversion. `own` is the knowledge of a live module about itself.
    """
    names = {shard.name for shard in source.shards}
    if config is None and is_asked:
        raise _config_error(source)
    if not names or config is None or "quantization_config" in config or (base_names and names <= set(base_names)):
        return None
    if source.format in _SAVED_FORMATS and not base_names and not is_asked:
        return None
    transforms = find_transforms(config)
    if not transforms:
        return None
    chosen = _choose(transforms, names, base_names, own)
    try:
        converted = convert_model(source, chosen, config, is_save=True)
    except LayoutError:
        if is_asked:
            raise
        return None
    new = {shard.name for shard in converted.model.shards}
    is_closer = not base_names or len(new.intersection(base_names)) > len(names.intersection(base_names))
    if new == names or not is_closer or not is_loaded_as(chosen, new, names):
        return None
    if not base_names and own is None and _is_in_files_form(source, chosen, config):
        return None
    return _describe(source, converted, config)


def convert_to_module(
    source: StoredModel, config: Mapping[str, Any] | None, module_shapes: Mapping[str, Shape | None]
) -> Converted | None:
    """Return the model of files under a module's names; None where it has them."""
    if config is None or "quantization_config" in config or not _count_misfits(source, module_shapes):
        return None
    transforms = find_transforms(config)
    converted = convert_model(source, transforms, config, is_save=False, module_shapes=module_shapes)
    is_closer = _count_misfits(converted.model, module_shapes) < _count_misfits(source, module_shapes)
    return _describe(source, converted, config) if is_closer else None


def _count_misfits(source: StoredModel, module_shapes: Mapping[str, Shape | None]) -> int:
    """Return how many of a module's tensors the source lacks, or has with their dims in another order.

    Other shapes are no conversion's doing: rows of padding, or another model.
    """
    held = {shard.name: shard.shape for shard in source.shards}
    num_missing = sum(name not in held for name in module_shapes)
    pairs = ((shape, held[name]) for name, shape in module_shapes.items() if name in held and shape is not None)
    return num_missing + sum(want != got and sorted(want) == sorted(got) for want, got in pairs)


def convert_states(source: StoredModel, config: Mapping[str, Any] | None) -> Converted | None:
    """Return the model in its other form: from memory to files, or from files to memory; None if both are one."""
    if config is None:
        raise _config_error(source)
    transforms = [each for each in find_transforms(config) if each.kind != "prefix"]
    if not _is_in_files_form(source, transforms, config):
        return convert_to_files(source, config, is_asked=True)
    return _describe(source, convert_model(source, transforms, config, is_save=False), config)


STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parameters with all experts of a layer -> the matrices of each expert."""


def split_experts(
    source: StoredModel, outputs: Sequence[OutputTensor], is_kept: Callable[[str], bool]
) -> tuple[StoredModel, tuple[OutputTensor, ...]]:
    """Return a model and its outputs with matrices [out, in] for each expert, as engines read quantized experts.

    Names and rows are those of llm-compressor (llmcompressor/entrypoints/model_free/converter.py:
    split_fused_moe_experts). Stacks [experts, in, out], such as Llama 4's, are transposed, as llm-compressor does it
    where it knows the model's class. Others stay whole: those with biases, whose gate and up alternate, those of
    modules that `is_kept` names, and those without a counterpart that shows which dim is which.
    """
    shards = {shard.name: shard for shard in source.shards}
    shapes = {name: shard.shape for name, shard in shards.items()}
    known: dict[tuple[str, Shape, bool], dict[str, Placed]] = {}  # equal layers are computed once
    made: dict[str, list[StoredShard]] = {}
    for output in outputs:
        module, _, last = output.name.rpartition(".")
        pair = [shapes.get(f"{module}.{name}", ()) for name in STACKS]
        if last not in STACKS or any(len(shape) != 3 for shape in pair) or is_kept(module):
            continue
        (_, rows, columns), (_, *down) = pair
        forms = [rows == 2 * down[1] and columns == down[0], columns == 2 * down[0] and rows == down[1]]
        if not any(forms) or f"{output.name}_bias" in shapes:
            continue
        key = last, output.shape, forms[1]
        if key not in known:
            known[key] = _place_experts(*key)
        made[output.name] = [
            make_shard(f"{module}.{name}.weight", value.shape, [(shards[output.name], nest) for _, nest in value.parts])
            for name, value in known[key].items()
        ]
    new = [
        [OutputTensor(shard.name, output.dtype, shard.shape) for shard in made[output.name]]
        if output.name in made
        else [output]
        for output in outputs
    ]
    split = tuple(each for shard in source.shards for each in made.get(shard.name, [shard]))
    return replace(source, shards=split), tuple(output for each in new for output in each)


def _place_experts(parameter: str, shape: Shape, is_transposed: bool) -> dict[str, Placed]:
    """Return the matrices of a stack of experts, by number and name."""
    whole = place_input("", shape)
    found: dict[str, Placed] = {}
    for number, expert in enumerate(_unstack(_swap_dims(whole, 1, 2) if is_transposed else whole, 0)):
        names = STACKS[parameter]
        parts = _split(expert, [expert.shape[0] // len(names)] * len(names), 0)
        found |= {f"{number}.{name}": part for name, part in zip(names, parts, strict=True)}
    return found


def keep_routers(model: StoredModel, options: GatherOptions) -> GatherOptions:
    """Return options under which a cast leaves the routers of experts alone."""
    names = [shard.name for shard in model.shards]
    return options.with_keep_fp32([each for each in _ROUTERS if any(re.fullmatch(each, name) for name in names)])


def _choose(
    transforms: tuple[Conversion, ...], names: Collection[str], base_names: Collection[str], own: OwnConfig | None
) -> list[Conversion]:
    """Return the transforms that saving undoes."""
    if base_names:
        loading = NamePass(transforms, is_save=False)  # uses the transforms that ``from_pretrained`` remembers
        loading.find_groups(base_names, names)
        return [each for number, each in enumerate(transforms) if number in loading.used]
    if own is not None and own.conversions is not None:
        transforms = tuple(each for each in transforms if "\n".join(each.load.patterns) in own.conversions)
        if own.is_loaded:
            return list(transforms)
    return [each for each in transforms if each.kind != "prefix"]


def _is_in_files_form(source: StoredModel, transforms: list[Conversion], config: Mapping[str, Any]) -> bool:
    """Return whether loading would change the names, and saving would then give them back.

    Without that, text that both forms share, as ``language_model``, would be replaced a second time.
    """
    names = {shard.name for shard in source.shards}
    try:
        loaded = convert_model(source, transforms, config, is_save=False).model
        saved = convert_model(loaded, transforms, config, is_save=True).model
    except LayoutError:
        return False
    return names != {shard.name for shard in loaded.shards} and names == {shard.name for shard in saved.shards}


def _describe(source: StoredModel, converted: Converted, config: Mapping[str, Any]) -> Converted | None:
    """Return a converted source with its note; None if a tensor that is taken apart or joined has scales.

    The scales would have to be taken apart or joined as well.
    """
    names = {shard.name for shard in source.shards}
    moved = names - converted.renamed.keys()
    for name in names - moved:
        if any(sign in "._:" and name[:at] in moved and _SCALE.match(name, at) for at, sign in enumerate(name)):
            return None
    name = f"{TABLE}-{config.get('model_type')}"
    note = ("recipe", f"tensors are renamed and split by the recipe {name}")
    return replace(converted, model=replace(converted.model, recipe=name, notes=(*converted.model.notes, note)))


def _config_error(source: StoredModel) -> UsageError:
    step = f"name the folder that has one with {option('base_model')}, or put it into the checkpoint's folder"
    got = f"{option('recipe', TABLE)}, and no config.json"
    problem = f"{source.path}: no config.json names the class of this model"
    return UsageError(problem, file=source.path, got=got, want="the config.json of the model", next_step=step)
