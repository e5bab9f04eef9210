"""A trainer rank's tensors in another form: cast, quantised, or made by a caller's function.

The rank lends these copies in place of its own tensors. They have the same names, shapes and layouts, so that recipes
and plans stay the same; tensors that are made anew, such as scales, have Hugging Face's names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xrank import dtypes
from xrank.decisions.quantization import Quantization
from xrank.errors import UsageError
from xrank.lending.lent_model import LentModel
from xrank.lending.local_bytes import LocalBytes, local_bytes
from xrank.lending.peer_source import MemoryOffer, PeerSource
from xrank.plan.planner import TensorPlan
from xrank.refit.offer_card import MADE
from xrank.refit.quantized_part import Maxima, QuantizedPart, plan_quantized
from xrank.refit.transformed_part import TransformedPart, find_dropped, list_own
from xrank.teams.team import Team

if TYPE_CHECKING:
    import torch

_SILENT_SECONDS = 1.5
_GRACE_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class PreparedPart:
    """A rank's tensors as they are lent; see `prepare_part`. All ranks `measure`, and then all ranks `fill`."""

    description: str
    """As `LocalModel.describe`, of the tensors that are lent."""
    views: list[LocalBytes]
    """Bytes of the tensors; the last ones are those of the rank's maxima."""
    dropped: tuple[str, ...]
    """Names, as Hugging Face's, of tensors that engines do not get. They are the same on all ranks."""
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Own tensor, and the copy or cast that is lent."""
    quantized: QuantizedPart | None
    transformed: TransformedPart | None
    own_source: PeerSource
    """Reads all ranks' own tensors in place."""
    maxima_source: PeerSource | None = None
    """Reads all ranks' maxima: record i is of the rank at position i."""

    @property
    def is_shared(self) -> bool:
        """Whether ranks read each other's memory for it."""
        return self.quantized is not None or self.transformed is not None

    def connect(
        self, own: MemoryOffer, team: Team, offers: Sequence[Mapping[str, Any]], check: Callable[[], object]
    ) -> None:
        """Make the source of the ranks' maxima, once all ranks have described their offers.

        Args:
            own: this rank's offer.
            team: the trainer's ranks.
            offers: by position, the ranks' offers, whose last views are the maxima, the outcome and the status.
            check: raises if a rank has failed.
        """
        self.maxima_source = PeerSource(
            own,
            team.rank,
            {rank: dict(offer) for rank, offer in zip(team.ranks, offers, strict=True)},
            list(team.ranks),
            [len(offer["views"]) - 3 for offer in offers],
            check=check,
            timeout_seconds=_SILENT_SECONDS,
            grace_seconds=_GRACE_SECONDS,
        )

    def measure(self) -> None:
        """Measure the maxima of the present values, for the other ranks."""
        if self.quantized is not None:
            self.quantized.measure()

    def fill(self) -> None:
        """Fill everything that is lent from the present values.

        Raises:
            ContradictionError: a value that is to be quantised is not finite.
            XrankError: of the caller's function, or a rank has failed.
        """
        for tensor, copy in self.copies:
            copy.copy_(tensor)
        if self.quantized is not None:
            self.quantized.encode(self._read_maxima)
        if self.transformed is not None:
            self.transformed.fill(self.own_source)

    def close(self) -> None:
        """Close all connections to other ranks."""
        self.own_source.close()
        if self.maxima_source is not None:
            self.maxima_source.close()

    def _read_maxima(self, position: int, start: int, count: int) -> Maxima:
        assert self.maxima_source is not None
        numbers = np.empty(count, np.float32)
        self.maxima_source.read_into(position, 4 * start, numbers.view(np.uint8).data)
        return numbers


def prepare_part(
    lent: LentModel,
    tensors: Sequence[torch.Tensor],
    quantization: Quantization | None,
    team: Team,
    *,
    is_snapshot: bool,
) -> PreparedPart:
    """Return a rank's tensors in the form in which they are lent; nothing is filled yet.

    Args:
        lent: the model, with the plan of its tensors after casts and transforms.
        tensors: this rank's tensors in place, by view.
        quantization: of matrices, part by part.
        team: the trainer's ranks.
        is_snapshot: whether tensors that keep their form are copied, too.

    Raises:
        UsageError: a tensor cannot be quantised part by part, or a made tensor has the name of another one.
    """
    import torch

    gather, position = lent.gather, team.position
    transforms = gather.transforms
    apart = set() if transforms is None else transforms.files
    plans = [one for i, file in enumerate(gather.plan.files) if i not in apart for one in file.tensors]
    own_tensors = json.loads(lent.parts[position]["model"])["tensors"]
    forms = _choose_forms(lent, plans, quantization, {name: view for name, (_, _, view) in own_tensors.items()})

    lent_views: list[torch.Tensor] = []
    copies, codes = [], {}
    for view, tensor in enumerate(tensors):
        form = forms.get(view, "")
        if form is None or (form == "" and not is_snapshot):
            lent_views.append(tensor)
            continue
        kind = tensor.dtype if form == "" else getattr(torch, dtypes.dtype(form).torch_name)
        lent_views.append(torch.zeros(tensor.shape, dtype=kind, device="cpu"))
        if quantization is not None and form == quantization.code_dtype:
            codes[view] = lent_views[-1]
        else:
            copies.append((tensor, lent_views[-1]))

    made: dict[str, torch.Tensor] = {}
    quantized, transformed, num_maxima = None, None, 0
    maxima = torch.zeros(0, dtype=torch.float32)
    if quantization is not None:
        parts, num_maxima = plan_quantized(plans, quantization, lent.holder, position)
        maxima = torch.zeros(num_maxima, dtype=torch.float32)
        shapes = {one.output.name: one.output.shape for one in plans}
        scales = {
            part.name: torch.zeros(quantization.find_scale_shape(shapes[part.name]), dtype=torch.float32)
            for part in parts
            if part.owns_scales
        }
        made |= {quantization.name_scales(name): scale for name, scale in scales.items()}
        quantized = QuantizedPart(quantization, parts, maxima.numpy(), tensors, codes, scales)
    names = [shard.name for shard in gather.source.shards]
    dropped: list[str] = []
    if transforms is not None:
        own = list_own(transforms, position, team.size)
        made |= {
            output.name: torch.zeros(output.shape, dtype=getattr(torch, dtypes.dtype(output.dtype).torch_name))
            for one in own
            for output in one.outputs
        }
        ties = {other: name for name, others in gather.selection.tied.items() for other in others}
        dropped = list(find_dropped(transforms, names, ties))
        transformed = TransformedPart(transforms, own, made)
    _check_names(made, set(names) - set(dropped))
    lent_views += made.values()
    return PreparedPart(
        _describe(str(lent.parts[position]["model"]), lent_views, list(made)),
        [local_bytes(view) for view in (*lent_views, maxima)],
        tuple(dropped),
        copies,
        quantized,
        transformed,
        lent.source,
    )


def _choose_forms(
    lent: LentModel, plans: Sequence[TensorPlan], quantization: Quantization | None, views: Mapping[str, int]
) -> dict[int, str | None]:
    """Return the element type in which each view is lent: "" as it is, None if engines do not get it.

    It is the same for all parts of one tensor of the trainer. A tensor that becomes several ones of different types
    stays as it is; engines cast their parts.

    Args:
        lent: the model.
        plans: of the tensors that engines get as the ranks have them.
        quantization: of matrices.
        views: name of this rank's tensor -> its view.

    Raises:
        UsageError: a quantised tensor shares its memory with one that is not.
    """
    wanted: list[set[tuple[str | None, str]]] = [set() for _ in lent.holder]
    if lent.gather.transforms is not None:
        for one in lent.gather.transforms.sources.tensors:
            _want(wanted, one, None)
    for one in plans:
        form = ""
        if quantization is not None and quantization.applies_to(one.output.name, one.source_dtype, one.output.shape):
            form = quantization.code_dtype
        elif one.source_dtype != one.output.dtype and not one.changed and one.update is None:
            form = one.output.dtype
        _want(wanted, one, form)
    records = {shard.name: np.unique(shard.record).tolist() for shard in lent.stored.shards}
    by_view: dict[int, set[tuple[str | None, str]]] = {}
    for name, view in views.items():
        by_view.setdefault(view, set()).update(*(wanted[record] for record in records.get(name, ())))
    return {view: _choose_form(names, quantization) for view, names in by_view.items()}


def _want(wanted: list[set[tuple[str | None, str]]], one: TensorPlan, form: str | None) -> None:
    for part in one.read:
        for record in np.unique(part.record).tolist():
            wanted[record].add((form, one.output.name))


def _choose_form(wanted: set[tuple[str | None, str]], quantization: Quantization | None) -> str | None:
    forms = {form for form, _ in wanted if form is not None}
    code = None if quantization is None else quantization.code_dtype
    if code in forms and len(forms) > 1:
        ours, other = (min(name for form, name in wanted if (form == code) == is_code) for is_code in (True, False))
        raise UsageError(
            f"{ours} cannot be quantised part by part",
            tensor=ours,
            got=f"one tensor of the trainer for it and {other}, which stays as it is",
            want="tensors of the trainer that are quantised as a whole, or not at all",
            next_step="name both in keep of the Quantization, or give a function as transform=: it gets whole tensors",
        )
    if not forms:
        return None if wanted else ""
    return forms.pop() if len(forms) == 1 else ""


def _check_names(made: Mapping[str, object], names: set[str]) -> None:
    for name in made:
        if name in names:
            raise UsageError(
                f"{name}: two tensors would have this name",
                tensor=name,
                got="a tensor of the model, and one that transform makes",
                want="one tensor of a name",
                next_step="let transform give other names, or give another scale_suffix",
            )


def _describe(own: str, views: Sequence[torch.Tensor], made: Sequence[str]) -> str:
    """Return the description of a rank's own tensors, changed for those that are lent."""
    described = json.loads(own)
    described["views"] = [view.numel() * view.element_size() for view in views]
    num_own = len(views) - len(made)
    tensors = {name: [_torch_name(views[view]), shape, view] for name, (_, shape, view) in described["tensors"].items()}
    for number, name in enumerate(made, num_own):
        tensors[MADE + name] = [_torch_name(views[number]), list(views[number].shape), number]
    return json.dumps({**described, "tensors": tensors}, separators=(",", ":"))


def _torch_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
