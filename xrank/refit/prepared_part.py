"""A trainer rank's tensors in another form: cast, quantized, or made by a caller's function.

The rank lends these copies in place of its own tensors. They have the same names, shapes and layouts, so that recipes
and plans stay the same; tensors that are made anew, such as scales, have Hugging Face's names.

A rank quantizes its own elements with the scales of whole tensors. Ranks that hold parts of one block read each other's
maxima of it; a block on one rank takes no exchange. A function gets whole tensors: each rank makes its share of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from xrank import dtypes
from xrank.engine.encoded_tensors import make_transformed_tensors
from xrank.engine.executor import Budget
from xrank.engine.planner import TensorPlan
from xrank.engine.rounds import deal
from xrank.engine.transforms import TransformedTensor, Transforms
from xrank.errors import UsageError
from xrank.ranks.loans import PeerSource
from xrank.ranks.memory import LocalBytes, local_bytes
from xrank.ranks.team import Team
from xrank.recipes.lent_model import LentModel
from xrank.recipes.options import default_workers
from xrank.refit.directory import MADE

if TYPE_CHECKING:
    import torch


_BUFFERS_NBYTES = 16_000_000


class PreparedPart(Struct, eq=False):
    """A rank's tensors as they are lent; see `prepare_part`. `fill` reads other ranks' tensors, if `is_shared`."""

    description: str
    """As `LocalModel.describe`, of the tensors that are lent."""
    views: list[LocalBytes]
    """Bytes of the tensors."""
    dropped: tuple[str, ...]
    """Names, as Hugging Face's, of tensors that engines do not get. They are the same on all ranks."""
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Own tensor, and the copy or cast that is lent."""
    transforms: Transforms | None
    transformed: list[TransformedTensor]
    """The tensors that this rank transforms."""
    made: dict[str, torch.Tensor]
    """Tensors that this rank makes anew."""
    own_source: PeerSource
    """Reads all ranks' own tensors in place."""

    @property
    def is_shared(self) -> bool:
        """Whether ranks read each other's memory for it."""
        return self.transforms is not None

    def fill(self) -> None:
        """Fill everything that is lent from the present values."""
        for tensor, copy in self.copies:
            copy.copy_(tensor)
        if self.transforms is not None:
            budget = Budget.from_memory(_BUFFERS_NBYTES, default_workers())
            make_transformed_tensors(self.transforms, self.transformed, self.own_source, budget, self.made)

    def close(self) -> None:
        """Close all connections to other ranks."""
        self.own_source.close()


def prepare_part(lent: LentModel, tensors: Sequence[torch.Tensor], team: Team, *, is_snapshot: bool) -> PreparedPart:
    """Return a rank's tensors in the form in which they are lent; nothing is filled yet."""
    import torch

    gather, position = lent.gather, team.position
    transforms = gather.transforms
    apart = set() if transforms is None else transforms.files
    plans = [one for i, file in enumerate(gather.plan.files) if i not in apart for one in file.tensors]
    described = json.loads(str(lent.parts[position]["model"]))
    views = {name: view for name, (_, _, view) in described["tensors"].items()}
    forms = _choose_forms(lent, plans, views)

    def make(shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtypes.dtype(dtype).torch_name), device="cpu")

    lent_views: list[torch.Tensor] = []
    copies = []
    for view, tensor in enumerate(tensors):
        form = forms.get(view, "")
        if form is None or (form == "" and not is_snapshot):
            lent_views.append(tensor)
            continue
        copy = make(tensor.shape, form) if form else torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        lent_views.append(copy)
        copies.append((tensor, copy))

    made: dict[str, torch.Tensor] = {}
    names = [shard.name for shard in gather.source.shards]
    dropped: list[str] = []
    transformed: list[TransformedTensor] = []
    if transforms is not None:
        sizes = [file.output.nbytes for file in transforms.sources.files]
        groups: dict[int, list[TransformedTensor]] = {}
        for one in transforms.tensors:
            groups.setdefault(one.group, []).append(one)
        owners = deal([sum(sizes[one.number] for one in ones) for ones in groups.values()], team.size)
        for ones, owner in zip(groups.values(), owners, strict=True):
            if owner == position:
                transformed += ones
        made |= {output.name: make(output.shape, output.dtype) for one in transformed for output in one.outputs}
        ties = {other: name for name, others in gather.selection.tied.items() for other in others}
        copied = set(transforms.order) - {one.name for one in transforms.tensors}
        dropped = [name for name in names if name not in copied and ties.get(name) not in copied]
    kept = set(names) - set(dropped)
    for name in made:
        if name in kept:
            raise UsageError(
                f"{name}: two tensors would have this name",
                tensor=name,
                got="a tensor of the model, and one that transform makes",
                next_step="let transform give other names, or give another scale_suffix",
            )

    def kind_of(view: int) -> str:
        return str(lent_views[view].dtype).removeprefix("torch.")

    kinds = {name: [kind_of(view), shape, view] for name, (_, shape, view) in described["tensors"].items()}
    for name, tensor in made.items():
        lent_views.append(tensor)
        kinds[MADE + name] = [kind_of(-1), list(tensor.shape), len(lent_views) - 1]
    sizes_of_views = [view.numel() * view.element_size() for view in lent_views]
    return PreparedPart(
        json.dumps({**described, "views": sizes_of_views, "tensors": kinds}, separators=(",", ":")),
        [local_bytes(view) for view in lent_views],
        tuple(dropped),
        copies,
        transforms,
        transformed,
        made,
        lent.source,
    )


def _choose_forms(lent: LentModel, plans: Sequence[TensorPlan], views: Mapping[str, int]) -> dict[int, str | None]:
    """Return the element type in which each view is lent: "" as it is, None if engines do not get it.

    It is the same for all parts of one tensor of the trainer. A tensor that becomes several ones of different types
    stays as it is; engines cast their parts.
    """
    wanted: list[set[str | None]] = [set() for _ in lent.holder]
    if lent.gather.transforms is not None:
        for one in lent.gather.transforms.sources.tensors:
            _want(wanted, one, None)
    for one in plans:
        is_cast = one.source_dtype != one.output.dtype and not one.changed and one.update is None
        _want(wanted, one, one.output.dtype if is_cast else "")
    records = {shard.name: np.unique(shard.record).tolist() for shard in lent.stored.shards}
    by_view: dict[int, set[str | None]] = {}
    for name, view in views.items():
        by_view.setdefault(view, set()).update(*(wanted[record] for record in records.get(name, ())))
    return {view: _choose_form(forms) for view, forms in by_view.items()}


def _want(wanted: list[set[str | None]], one: TensorPlan, form: str | None) -> None:
    for part in one.read:
        for record in np.unique(part.record).tolist():
            wanted[record].add(form)


def _choose_form(wanted: set[str | None]) -> str | None:
    forms = {form for form in wanted if form is not None}
    if not forms:
        return None if wanted else ""
    return forms.pop() if len(forms) == 1 else ""
