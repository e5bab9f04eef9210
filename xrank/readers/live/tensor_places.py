"""Finds where a rank's tensors belong in the whole, from DTensors or a layout map, and checks every tensor."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from xrank.dtypes import by_torch_name
from xrank.errors import LayoutError, UsageError
from xrank.formats.rank_state import MeshRecord, TensorRecord
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import base_layout, inline_base
from xrank.layout.local_part import names_of_dim
from xrank.layout.notation import Flat
from xrank.layout.tensor_layout import flat_of
from xrank.layout.tensor_name import TensorName, name_table
from xrank.ranks.memory import check_dense

if TYPE_CHECKING:
    import torch


class LocatedTensors(Struct, frozen=True, eq=False):
    """A rank's tensors, not copied, and their places."""

    local: dict[str, torch.Tensor]
    """Tensors by name; for a DTensor its local tensor."""
    meshes: tuple[MeshRecord, ...]
    records: dict[str, TensorRecord]
    """Records of the tensors with a known place."""


def locate_tensors(weights: object, layouts: LayoutMap | None, rank: int) -> LocatedTensors:
    """Return a rank's local tensors and their places.

    A DTensor becomes its local tensor and brings its layout. If its mesh does not contain this rank, it is left out,
    because the rank holds no part of it. `layouts` are those of the plain tensors.

    Raises:
        UsageError: a state cannot hold a name or a tensor.
        LayoutError: the notation cannot express a layout, or a layout does not fit its tensor.
    """
    if not isinstance(weights, Mapping):
        raise UsageError(f"the weights are a {type(weights).__name__}", want="a dict from names to tensors")
    places = _Places(layouts, rank)
    local: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise UsageError(f"the weights have the name {name!r}", got=type(name).__name__, want="texts for names")
        # A plain text: a subclass would be pickled as a class; and not by str(), which gives an enum's label.
        plain = str.__str__(name)
        try:
            part = places.locate(plain, tensor)
        except (UsageError, LayoutError) as error:
            error.about("" if error.tensor == plain else plain, tensor=plain)
            raise
        if part is not None:
            local[plain] = part
    return LocatedTensors(local, tuple(places.meshes), places.tensors)


def view_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tied names, that is for tensors that are the same view of one storage."""
    # The storage's identity, not the address: every empty tensor has address 0.
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


class _Places:
    """Checks tensors one by one, and collects their places."""

    def __init__(self, layouts: LayoutMap | None, rank: int) -> None:
        self.layouts = layouts
        self.rank = rank
        self.meshes: dict[MeshRecord, int] = {}
        self.tensors: dict[str, TensorRecord] = {}
        self._cuts: dict[tuple[Any, ...], tuple[str, DeviceMesh]] = {}

    def locate(self, name: str, tensor: object) -> torch.Tensor | None:
        """Return the plain tensor to keep under that name, or None if this rank holds no part of it."""
        # Importing the module costs seconds; as long as it is not imported, no tensor can be a DTensor.
        module = sys.modules.get("torch.distributed.tensor")
        if module is None or not isinstance(tensor, module.DTensor):
            local = _check_tensor(name, tensor)
            if self.layouts is not None:
                self._locate_plain(name, local, self.layouts)
            return local
        # A model has thousands of tensors but few combinations of mesh and placements.
        order = getattr(tensor._spec, "shard_order", None)
        kind = (tensor.device_mesh, tensor.placements, tensor.ndim, repr(order))
        if kind not in self._cuts:
            self._cuts[kind] = _cut_of(tensor, order)
        layout, mesh = self._cuts[kind]
        import torch

        with torch.no_grad():
            local = _check_tensor(name, tensor.to_local())
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
            what = f"its layout {layout} has {len(layout.axes)} dims, the tensor {local.ndim}"
            raise LayoutError(what, got=f"shape {tuple(local.shape)}", next_step="correct the layout map")
        # The state is read without the map, so the text contains the sizes.
        sized = layout.with_sizes(layouts.sizes)
        rule = layouts.rule_for(name) or companion_rule
        pattern = None if rule is None else layouts.name_of(rule)
        if mesh is not None:
            mesh.coordinate(self.rank)
        if pattern is not None:
            pattern = pattern.with_sizes(layouts.sizes)
            _check_name(name, pattern, sized, mesh, self.rank)
        if (flat := flat_of(sized)) is not None:
            _check_members(flat)
        # The global size of a sharded dim is the sum over the ranks' parts, which may be unequal: one rank does not
        # know it. Nor does a padded part determine the whole shape.
        shape = None if any(layout.axes) or layout.has_pads else tuple(local.shape)
        self.tensors[name] = TensorRecord(
            str(sized if companion is None else inline_base(companion, sized.tree)),
            None if mesh is None else self._mesh(mesh),
            shape,
            None if layout.view_mesh is None else self._mesh(layout.view_mesh),
            None if pattern is None else str(pattern),
        )

    def _mesh(self, mesh: Any) -> int:
        record = (tuple(mesh.axis_names), tuple(mesh.shape), tuple(int(rank) for rank in mesh.ranks))
        return self.meshes.setdefault(record, len(self.meshes))


def _cut_of(tensor: Any, order: Any) -> tuple[str, DeviceMesh]:
    """Return a DTensor's layout and mesh; `order` of its cuts is a private attribute of torch that older ones lack."""
    from xrank.layout.terms.tensors import describe_mesh, from_placements

    mesh = describe_mesh(tensor.device_mesh)
    layout = from_placements(mesh, tensor.placements, tensor.ndim, order)
    if layout.tree.sums:
        raise LayoutError(
            f"the ranks along {layout.tree.sums[0]!r} hold addends of a sum, not parts or replicas",
            got=str(tensor.placements),
            next_step="reduce the tensor before it is saved: redistribute it to Replicate or Shard",
        )
    return str(layout), mesh


def _check_name(name: str, pattern: TensorName, layout: TensorLayout, mesh: DeviceMesh | None, rank: int) -> None:
    """Check that the rank's name for a tensor matches the pattern with dims."""
    if mesh is None:
        what = f"its name has dims, {pattern}, but no mesh counts them"
        raise LayoutError(what, got=str(layout), next_step="give the LayoutMap a mesh")
    table = name_table(pattern, layout, mesh, mesh.coordinate(rank))
    if table is None:
        step = "correct it, or leave the tensor out on this rank"
        raise LayoutError(f"the layout {layout} leaves rank {rank} out", next_step=step)
    table.global_name(name)


def _check_members(flat: Flat) -> None:
    """Check that a flat buffer's layout gives the members' shapes, which the buffer itself does not contain."""
    for member in flat.members:
        unknown = [size for dim in member.dims for size in names_of_dim(dim)]
        if unknown:
            what = f"the shape of {member.name}, a member of the buffer, is unknown"
            step = f"set layouts.sizes[{unknown[0]!r}]"
            raise LayoutError(what, got=f"no number for {unknown[0]!r}", next_step=step)


def _check_tensor(name: str, tensor: object) -> torch.Tensor:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind, want = type(tensor), "a plain tensor, a Parameter or a DTensor"
        raise UsageError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}", tensor=name, got=kind.__qualname__, want=want
        )
    assert isinstance(tensor, torch.Tensor)
    check_dense(tensor, name, name=name)
    by_torch_name(str(tensor.dtype).removeprefix("torch."))
    return tensor
