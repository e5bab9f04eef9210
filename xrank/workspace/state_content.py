"""What of a rank's config and tensors a state can hold: everything checked first, then made plain.

The tensor is kept, not its storage: a slice of a large buffer becomes its own few bytes, and nothing is copied for it
where its bytes already lie in a row. Only strided, expanded and device tensors are copied.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xrank.dtypes import by_torch_name
from xrank.errors import LayoutError, UsageError
from xrank.formats.rank_state import MeshRecord, TensorRecord
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.binding import names_of_dim
from xrank.layout.companion import inlined
from xrank.layout.companion_base import base_layout
from xrank.layout.notation import Flat
from xrank.layout.tensor_layout import flat_of
from xrank.layout.tensor_name import TensorName, name_table

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

__all__ = ["StateContent", "plain_config", "state_content"]


@dataclass(frozen=True, slots=True)
class StateContent:
    """Tensors ready for torch.save, and what is known of their places."""

    weights: dict[str, torch.Tensor]
    """Plain, detached, contiguous, on the CPU, each with a storage of its own size; tied names share one object."""
    meshes: tuple[MeshRecord, ...]
    tensors: dict[str, TensorRecord]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, tied ones once."""
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self.weights.values()}.values())


def plain_config(config: object) -> dict[str, Any]:
    """Return a config as JSON would give it back: its own copy, of plain dicts, lists, texts and numbers.

    Raises:
        UsageError: a part of it is nothing that JSON holds; its place is named.
    """
    if not isinstance(config, dict):
        raise UsageError(f"the config is a {type(config).__name__}", got=type(config).__name__, want="a dict")
    try:
        plain: dict[str, Any] = _plain_value(config, "config")
    except RecursionError:
        raise UsageError("the config contains itself, or is nested too deep for JSON", want="a tree") from None
    return plain


def _plain_value(value: object, where: str) -> Any:
    # Subclasses (an Enum of texts, numpy's float64) would be pickled as classes that no careful reader allows.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list | tuple):
        return [_plain_value(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        plain = {}
        for key, item in value.items():
            text = _key_text(key, where)
            if text in plain:
                raise UsageError(
                    f"{where} has two keys that JSON writes as {text!r}", got=repr(key), want="each key once"
                )
            plain[text] = _plain_value(item, f"{where}[{key!r}]")
        return plain
    raise UsageError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold",
        got=type(value).__name__,
        want="dict, list, str, int, float, bool or None",
        next_step="put a text or a number in its place, or the tensor among the weights",
    )


def _key_text(key: object, where: str) -> str:
    """Return a key as `json.dumps` writes it: transformers' ``config.to_dict()`` has numbers for keys (id2label)."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise UsageError(
        f"{where} has the key {key!r}, a {type(key).__name__}",
        got=type(key).__name__,
        want="texts, numbers, booleans or None for keys, as JSON takes them",
        next_step="give the keys as texts",
    )


def state_content(weights: object, layouts: LayoutMap | None, rank: int) -> StateContent:
    """Return what a state holds of these tensors; nothing is copied before everything has been checked.

    Args:
        weights: tensors by name. Of a DTensor the local tensor is kept, with its layout; one whose mesh this rank is
            not in is left out, for this rank holds nothing of it.
        layouts: the layouts of the plain tensors.
        rank: whose tensors they are.

    Raises:
        UsageError: a name or a tensor that no state can hold.
        LayoutError: a layout that no notation can say, or that does not fit its tensor.
    """
    if not isinstance(weights, Mapping):
        raise UsageError(f"the weights are a {type(weights).__name__}", got=type(weights).__name__, want="a mapping")
    places = _Places(layouts, rank)
    held: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise UsageError(f"the weights have the name {name!r}", got=type(name).__name__, want="texts for names")
        local = places.locate(str.__str__(name), tensor)
        if local is not None:
            held[str.__str__(name)] = local
    return StateContent(dict(_plain_tensors(held)), tuple(places.meshes), places.tensors)


class _Places:
    """Checks tensor after tensor, and collects where each one belongs."""

    def __init__(self, layouts: LayoutMap | None, rank: int) -> None:
        self.layouts = layouts
        self.rank = rank
        self.meshes: dict[MeshRecord, int] = {}
        self.tensors: dict[str, TensorRecord] = {}

    def locate(self, name: str, tensor: object) -> torch.Tensor | None:
        """Return the plain tensor to keep under that name, or None where this rank holds nothing of it."""
        # Where the module was never imported, nothing can be of its class, and importing it costs seconds.
        module = sys.modules.get("torch.distributed.tensor")
        if module is None or not isinstance(tensor, module.DTensor):
            local = _checked(name, tensor)
            if self.layouts is not None:
                self._locate_plain(name, local, self.layouts)
            return local
        from xrank.dialects.placements import describe_mesh, from_placements

        try:
            mesh = describe_mesh(tensor.device_mesh)
            # The order of cuts is no part of torch's public face; older torch has only the mesh's own.
            order = getattr(tensor._spec, "shard_order", None)
            placed = from_placements(mesh, tensor.placements, tensor.ndim, order)
            if placed.tree.sums:
                raise LayoutError(
                    f"the ranks along {placed.tree.sums[0]!r} hold a sum of addends, not parts or replicas",
                    got=str(tensor.placements),
                    want="Shard or Replicate",
                    next_step="reduce the tensor before it is saved: redistribute it to Replicate or Shard",
                )
            layout = str(placed)
        except LayoutError as error:
            raise _about(name, error) from None
        import torch

        with torch.no_grad():
            local = _checked(name, tensor.to_local())
        if tensor.device_mesh.get_coordinate() is None:
            return None
        self.tensors[name] = TensorRecord(layout, self._mesh(mesh), tuple(tensor.shape))
        return local

    def _locate_plain(self, name: str, local: torch.Tensor, layouts: LayoutMap) -> None:
        layout = layouts[name]
        companion_rule = None if layout is not None else layouts.companion_rule_for(name)
        companion = None if companion_rule is None else layouts.companions[companion_rule]
        if companion is not None:
            layout = base_layout(companion, layouts)
        if layout is None:
            return
        mesh = layout.device_mesh or layouts.device_mesh
        if len(layout.axes) != local.ndim:
            raise LayoutError(
                f"{name}: its layout {layout} has {len(layout.axes)} dims, the tensor {local.ndim}",
                tensor=name,
                got=f"shape {tuple(local.shape)}",
                want=f"{len(layout.axes)} dims",
                next_step="correct the layout map",
            )
        # A state is read without the map, so its sizes go into the text.
        sized = layout.with_sizes(layouts.sizes)
        rule = layouts.rule_for(name) or companion_rule
        pattern = None if rule is None else layouts.name_of(rule)
        try:
            if mesh is not None:
                mesh.coordinate(self.rank)
            if pattern is not None:
                pattern = pattern.with_sizes(layouts.sizes)
                _check_name(name, pattern, sized, mesh, self.rank)
            if (flat := flat_of(sized)) is not None:
                _check_members(flat)
        except LayoutError as error:
            raise _about(name, error) from None
        # A sharded dim's global size is the sum over ranks that may hold unequal parts: no rank knows it alone.
        # Nor can a padded part's shape be told from the whole one's.
        shape = None if any(layout.axes) or layout.has_pads else tuple(local.shape)
        self.tensors[name] = TensorRecord(
            str(sized if companion is None else inlined(companion, sized.tree)),
            None if mesh is None else self._mesh(mesh),
            shape,
            None if layout.view_mesh is None else self._mesh(layout.view_mesh),
            None if pattern is None else str(pattern),
        )

    def _mesh(self, mesh: Any) -> int:
        record = (tuple(mesh.axis_names), tuple(mesh.shape), tuple(int(rank) for rank in mesh.ranks))
        return self.meshes.setdefault(record, len(self.meshes))


def _check_name(name: str, pattern: TensorName, layout: TensorLayout, mesh: DeviceMesh | None, rank: int) -> None:
    """Check that a rank knows a tensor by a name that a name with dims gives it."""
    if mesh is None:
        raise LayoutError(
            f"its name has dims, {pattern}, and nothing says the mesh that counts them",
            got=str(layout),
            next_step="give the LayoutMap a mesh",
        )
    table = name_table(pattern, layout, mesh, mesh.coordinate(rank))
    if table is None:
        raise LayoutError("the layout leaves this rank out", got=f"a part on rank {rank}", want=f"none, by {layout}")
    table.global_name(name)


def _check_members(flat: Flat) -> None:
    """Check that a flat buffer's layout tells its members' shapes, which no rank's buffer does."""
    for member in flat.members:
        unknown = [size for dim in member.dims for size in names_of_dim(dim)]
        if unknown:
            raise LayoutError(
                f"the shape of {member.name}, which lies in it, is not told",
                got=f"no number for {unknown[0]!r}",
                want="numbers in the layout, or sizes of the LayoutMap",
                next_step=f"set layouts.sizes[{unknown[0]!r}]",
            )


def _checked(name: str, tensor: object) -> torch.Tensor:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UsageError(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}",
            tensor=name,
            got=type(tensor).__qualname__,
            want="a plain tensor, a Parameter or a DTensor",
            next_step="write the plain tensors that it is made of",
        )
    assert isinstance(tensor, torch.Tensor)
    kind = (
        "a meta tensor"
        if tensor.is_meta
        else "a nested tensor"
        if tensor.is_nested
        else "quantised"
        if tensor.is_quantized
        else f"of layout {tensor.layout}"
        if tensor.layout != torch.strided
        else None
    )
    if kind is not None:
        raise UsageError(
            f"{name} is {kind}",
            tensor=name,
            got=kind,
            want="a dense tensor with data",
            next_step="write the dense tensors that it is made of, or leave it out",
        )
    try:
        by_torch_name(str(tensor.dtype).removeprefix("torch."))
    except UsageError as error:
        raise _about(name, error) from None
    return tensor


def _about(name: str, error: UsageError | LayoutError) -> UsageError | LayoutError:
    """Return an error as one about that tensor."""
    return type(error)(
        f"{name}: {error.message}", tensor=name, got=error.got, want=error.want, next_step=error.next_step
    )


def _plain_tensors(held: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as torch.save shall see them; names of the very same view get one object."""
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    storages: set[int] = set()
    dtypes: dict[int, torch.dtype] = {}
    for name, tensor in held.items():
        # The storage's identity, not the address: every empty tensor has address 0.
        view = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if view not in made:
            plain = _plain_tensor(tensor)
            # A storage becomes one record of one dtype (torch/serialization.py: _save refuses two dtypes at one
            # address), so names that share bytes without being the same tensor are taken apart.
            if plain.untyped_storage()._cdata in storages:
                plain = _own_view(plain)
            if plain.data_ptr() != 0 and dtypes.setdefault(plain.data_ptr(), plain.dtype) != plain.dtype:
                plain = plain.clone()
            storages.add(plain.untyped_storage()._cdata)
            made[view] = plain
        yield name, made[view]


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.numel() == 0:
        return torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    # Through one dim and back: a dim of size 1 may have any stride and still count as contiguous.
    plain = plain.contiguous().view(-1).view(plain.shape)
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else _own_view(plain)


def _own_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor whose storage is exactly these bytes, and keeps the larger one alive."""
    import torch

    # DLPack exports an address and a shape, so what is imported knows nothing of the storage around it. As bytes,
    # because DLPack lacks some dtypes (torch/csrc/.../DLConvertor: float8, unsigned 16 to 64).
    nbytes = torch.utils.dlpack.from_dlpack(tensor.reshape(-1).view(torch.uint8))
    return nbytes.view(tensor.dtype).view(tensor.shape)
