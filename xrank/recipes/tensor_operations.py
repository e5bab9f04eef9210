"""The operations of transformers' conversions, on nests: each is a strided copy, so no byte moves here.

A `Placed` tensor knows which elements of which inputs are its own. Operations take and give tensors under the patterns
of their converter, as transformers/core_model_loading.py does: the last operation of a chain gives the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from xrank.errors import LayoutError, option
from xrank.layout.nests import Nest, canonical, intersect, row_major
from xrank.recipes.conversion_table import Side, find_num_heads


@dataclass(frozen=True, slots=True)
class Placed:
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
    side: Side,
    inputs: Mapping[str, Sequence[Placed]],
    config: Mapping[str, Any],
    *,
    is_save: bool,
    module_shapes: Mapping[str, Shape | None] | None = None,
) -> dict[str, Placed]:
    """Return the outputs of a converter, under its targets.

    Args:
        side: the converter.
        inputs: pattern -> the tensors that match it, in natural order.
        config: the model's config.json.
        is_save: whether the converter goes from memory to files.
        module_shapes: when loading, target -> global shape of the module's tensor, where it is known.

    Raises:
        LayoutError: the shapes do not fit, or the operation needs what only a module knows.
    """
    tensors: _Tensors = {pattern: list(each) for pattern, each in inputs.items()}
    for operation in side.operations:
        function = _FUNCTIONS.get(operation.kind)
        if function is None:
            raise _misfit(f"transformers' operation {operation.kind} is no copy that xrank knows")
        tensors = function(_Chain(side, config, dict(operation.arguments), is_save, module_shapes or {}), tensors)
    if any(len(each) != 1 for each in tensors.values()):
        raise _misfit(f"a converter of {side.patterns[0]} leaves lists of tensors")
    return {name: each[0] for name, each in tensors.items()}


@dataclass(frozen=True, slots=True)
class _Chain:
    """The converter that an operation belongs to, and the operation's arguments."""

    side: Side
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
    return LayoutError(
        problem,
        want="tensors that transformers could convert",
        next_step=f"keep the names as they are with {option('recipe', 'none')}, or convert the model with transformers "
        "itself",
    )


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
    shape = [value.shape[dim] for dim in order]
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
        raise _misfit(f"{length} rows cannot be cut in {len(targets)} tensors for {chain.side.targets[0]}")
    return {target: [part] for target, part in zip(targets, _split(value, sizes, chain.dim), strict=True)}


def _split_by_module(chain: _Chain, tensors: _Tensors) -> _Tensors:
    """Cut a tensor into its targets, each as long as the module's own tensor."""
    value, dim = _single(tensors), chain.dim
    shapes = [chain.module_shapes.get(target) for target in chain.side.targets]
    lengths = [shape[dim] for shape in shapes if shape is not None]
    if len(lengths) < len(shapes):
        raise _misfit(f"only a module shows how {chain.side.patterns[0]} is cut in {len(shapes)} tensors")
    if sum(lengths) != value.shape[dim]:
        raise _misfit(
            f"{value.shape[dim]} rows of {chain.side.patterns[0]} are not the module's {' + '.join(map(str, lengths))}"
        )
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
    if len(tensors) == 1:
        (values,) = tensors.values()
        return {chain.target: [_stack(values, chain.dim)]}
    return {pattern: [_stack(values, chain.dim)] for pattern, values in tensors.items()}


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
