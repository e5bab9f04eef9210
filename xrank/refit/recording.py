"""The copies that an engine's own loader makes, found by running it once on stand-ins without memory.

A view of a tensor on the meta device keeps the offset and the strides into the stand-in. So each ``copy_`` of such a
view into a parameter is one nest from a Hugging Face tensor to the parameter, whatever narrow, view, transpose or chunk
came before. A result that is not a view ends the chain: the loader then takes that tensor whole at each update, as do
all tensors of the same parameters. Nothing is written to a parameter while the loader runs on stand-ins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from xrank import dtypes
from xrank.errors import UsageError
from xrank.layout.nests import Nest, canonical
from xrank.plan.output import OutputTensor, TensorPart
from xrank.refit.recorded_coverage import prove_coverage, row_major_steps, span_nbytes

if TYPE_CHECKING:
    from xrank.refit.targets import Loader

_aten = torch.ops.aten
_SAME_VALUES = {_aten.clone.default, _aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCopy:
    """One copy of a part of a Hugging Face tensor into a part of a parameter."""

    output: OutputTensor
    """The part of the Hugging Face tensor, in the parameter's element type."""
    target: torch.Tensor
    """The part of the parameter, in place."""
    parameter: str


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A part of a parameter that the loader sets to a constant, such as the padding of a vocabulary."""

    target: torch.Tensor
    value: float
    parameter: str
    is_first: bool
    """Whether nothing was written to the parameter before."""


@dataclass(slots=True, eq=False)
class Recording:
    """The copies of a loader."""

    copies: list[RecordedCopy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    """Tensor that the loader must take whole -> the reason."""


def record_loader(
    load: Loader, parameters: Sequence[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Recording:
    """Run a loader on stand-ins, and return its copies, proven to write each element of each parameter once.

    Args:
        load: takes (Hugging Face name, tensor) pairs; it need not use all of them.
        parameters: the tensors that it fills, with names.
        shapes: Hugging Face name -> safetensors name of its element type, and shape.

    Raises:
        UsageError: elements of a parameter are written twice or never.
    """
    recorder = _Recorder(parameters, shapes)
    failed: dict[str, str] = {}
    try:
        recorder.run(load, list(shapes))
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        # One tensor after another, to learn which of them the loader cannot take without values.
        recorder = _Recorder(parameters, shapes)
        for name in shapes:
            try:
                recorder.run(load, [name])
            except Exception as failure:
                failed[name] = f"{type(failure).__name__}: {failure}"[:200]
    recording = recorder.finish(failed)
    regions = recorder.list_regions(recording.whole)
    prove_coverage(regions, recording.fills, parameters, may_have_gaps=bool(failed))
    return recording


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows stand-ins through the operations of a loader."""

    def __init__(
        self, parameters: Sequence[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = shapes
        self._parameters = sorted(
            (*_start(tensor), _start(tensor)[1] + span_nbytes(tensor), name) for name, tensor in parameters
        )
        """Storage, first byte and end in it, and name of each parameter."""
        self._storages = {storage for storage, *_ in self._parameters}
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._owner: dict[int, str] = {}
        """Storage of a stand-in -> its name."""
        self._derived: dict[int, frozenset[str]] = {}
        """Storage of a result that is not a view -> the stand-ins it is made of."""
        self._kept: list[torch.Tensor] = []
        """Keeps storages alive, whose addresses are the keys above."""
        self.copies: list[tuple[str, RecordedCopy]] = []
        self.fills: list[Fill] = []
        self.whole: dict[str, str] = {}
        self.whole_regions: list[tuple[str, frozenset[str], torch.Tensor]] = []
        """Parameter, names and part of it that is filled from whole tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import torch._dynamo, a second of work and 73 MB."""
        return False

    def run(self, load: Loader, names: Sequence[str]) -> None:
        """Run the loader on the stand-ins of these names."""
        for name in names:
            dtype, shape = self._shapes[name]
            stand_in = torch.empty(shape, dtype=getattr(torch, dtypes.dtype(dtype).torch_name), device="meta")
            self._stand_ins[name] = stand_in
            self._owner[_key(stand_in)] = name
        with torch.no_grad(), self:
            load(iter([(name, self._stand_ins[name]) for name in names]))

    def finish(self, failed: Mapping[str, str]) -> Recording:
        """Return the copies, without those of parameters that are filled from whole tensors."""
        whole = {**self.whole, **failed}
        while True:
            mixed = {parameter for parameter, names, _ in self.whole_regions if names & whole.keys()}
            mixed |= {copy.parameter for name, copy in self.copies if name in whole}
            more = {name: copy.parameter for name, copy in self.copies if copy.parameter in mixed and name not in whole}
            if not more:
                break
            whole |= {name: f"it shares {parameter} with a whole tensor" for name, parameter in more.items()}
        copies = [copy for name, copy in self.copies if name not in whole]
        return Recording(copies, self.fills, whole)

    def list_regions(self, whole: Mapping[str, str]) -> dict[str, list[torch.Tensor]]:
        """Return by parameter the parts that the loader fills from tensors, some of which it takes whole."""
        regions: dict[str, list[torch.Tensor]] = {}
        for _, copy in self.copies:
            regions.setdefault(copy.parameter, []).append(copy.target)
        for parameter, names, target in self.whole_regions:
            if names & whole.keys():
                regions.setdefault(parameter, []).append(target)
        return regions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and not args[0].numel():
            return args[0]  # such as a rank's part of a vocabulary that is padding alone
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        names = frozenset[str]().union(*(self._names_of(tensor) for tensor in tensors))
        written = [value for value in _written(func, args, kwargs) if isinstance(value, torch.Tensor)]
        parameter = next((found for value in written if (found := self._find_parameter(value)) is not None), None)
        if parameter is not None:
            return self._write(func, args, kwargs, names, parameter)
        if not names:
            return func(*args, **kwargs)
        if func in _SAME_VALUES or (func is _aten._to_copy.default and _keeps_dtype(args, kwargs)):
            return args[0].as_strided(args[0].shape, args[0].stride(), args[0].storage_offset())
        if written:
            self._end(names, f"{func} changes it in place")
        args, kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        result = func(*args, **kwargs)
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and not self._names_of(value):
                self._kept.append(value)
                self._derived[_key(value)] = names
        return result

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: frozenset[str], parameter: str
    ) -> Any:
        """Record a write to a parameter, which is not carried out."""
        target = args[0]
        if func is _aten.copy_.default and names:
            source = args[1]
            name = self._owner.get(_key(source))
            copy = None if name is None else _make_copy(name, self._shapes[name], source, target, parameter)
            if copy is not None and name is not None:
                self.copies.append((name, copy))
            else:
                self._end(names, "it is changed before it is copied")
                self.whole_regions.append((parameter, names, target))
        elif names:
            self._end(names, f"{func} is not a copy")
            self.whole_regions.append((parameter, names, target))
        elif func in (_aten.zero_.default, _aten.fill_.Scalar):
            value = 0.0 if func is _aten.zero_.default else args[1]
            before = {copy.parameter for _, copy in self.copies} | {region[0] for region in self.whole_regions}
            self.fills.append(Fill(target.detach(), value, parameter, is_first=parameter not in before))
        else:
            raise UsageError(
                f"{parameter}: the loader writes values to it that are not of a checkpoint",
                tensor=parameter,
                got=str(func),
                want="copies of the checkpoint's tensors, or a constant",
                next_step="give the engine's tensors with layouts=, or feed it by iter_model",
            )
        return target

    def _end(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self.whole.setdefault(name, why)

    def _names_of(self, tensor: torch.Tensor) -> frozenset[str]:
        if tensor.device.type != "meta":
            return frozenset()
        key = _key(tensor)
        name = self._owner.get(key)
        return frozenset((name,)) if name is not None else self._derived.get(key, frozenset())

    def _find_parameter(self, tensor: torch.Tensor) -> str | None:
        start = _start(tensor)
        if start[0] not in self._storages or not tensor.numel():
            return None
        at = bisect_right(self._parameters, start, key=lambda parameter: parameter[:2]) - 1
        storage, _, end, name = self._parameters[at]
        return name if at >= 0 and storage == start[0] and start[1] < end else None


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _start(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the storage of a tensor and its first byte there, which the meta device has, too."""
    return _key(tensor), int(tensor.storage_offset()) * tensor.element_size()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the arguments that an operation changes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def _keeps_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("dtype") in (None, args[0].dtype)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a stand-in for one with values: operations take one device."""
    return tensor if tensor.device.type == "meta" else torch.empty_like(tensor, device="meta")


def _make_copy(
    name: str, kind: tuple[str, tuple[int, ...]], source: torch.Tensor, target: torch.Tensor, parameter: str
) -> RecordedCopy | None:
    """Return the copy of a view of a stand-in; None if it is broadcast, or not a cast of floating-point numbers."""
    dtype, shape = kind
    new = dtypes.by_torch_name(str(target.dtype).removeprefix("torch."))
    if source.numel() != target.numel() or (dtype != new.name and not (new.is_float and dtypes.dtype(dtype).is_float)):
        return None
    if str(source.dtype).removeprefix("torch.") != dtypes.dtype(dtype).torch_name or source.is_conj():
        return None  # a view as another element type
    source = source.expand(target.shape)
    strides = source.stride()
    steps = row_major_steps(target.shape)
    loops = [(n, x, y) for n, x, y in zip(target.shape, steps, strides, strict=True) if n != 1]
    if any(y <= 0 for _, _, y in loops):
        return None
    nest = canonical(Nest(0, int(source.storage_offset()), tuple(loops)))
    part = None
    if tuple(target.shape) != shape or nest != canonical(_whole_nest(shape)):
        part = TensorPart(shape, (nest,), (nest,))
    output = OutputTensor(name, new.name, tuple(target.shape), part=part)
    return RecordedCopy(output, target.detach(), parameter)


def _whole_nest(shape: Sequence[int]) -> Nest:
    loops = tuple((n, s, s) for n, s in zip(shape, row_major_steps(shape), strict=True) if n != 1)
    return Nest(0, 0, loops)
