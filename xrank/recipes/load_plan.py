"""The plan of a load and its check: for each tensor of a rank's module the copies that fill it; no tensor is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from operator import le
from typing import Any

import numpy as np
import xxhash
from msgspec import Struct, field

from xrank import dtypes
from xrank.engine.planner import Plan, make_plan
from xrank.errors import AGAIN, ContradictionError, LayoutError, UsageError, XrankError, option
from xrank.formats.rank_state import TensorRecord
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.layout_map import base_of_shape
from xrank.layout.nests import restrict, swap
from xrank.layout.output_files import OutputFile, OutputTensor, TensorPart
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.layout.tensor_layout import axis_lengths, flat_of
from xrank.readers.live.models import LocalModel, make_held_tensor
from xrank.readers.placement import Claim, Claims, find_global_name, whole
from xrank.recipes.quantization import find_scales
from xrank.recipes.reshard_plan import NewPart, new_parts
from xrank.words import likewise_text, list_text


class Load(Struct, frozen=True, eq=False):
    """The proven load of one rank; no byte of a tensor is read yet."""

    plan: Plan
    """One file for each view to fill, without a header."""
    views: tuple[int, ...]
    """File of the plan -> the view of the `LocalModel` that it fills."""
    names: tuple[str, ...]
    """Global names of all tensors of the source that this rank has a part of, also tied ones."""
    missing: tuple[str, ...]
    """Global names of the rank's tensors that the source lacks."""
    cast: Mapping[str, str]
    """Name -> change of the element type, as ``"F32 -> BF16"``."""
    padded: Mapping[str, int]
    """Name -> number of the module's rows beyond the source's, which become zeros."""

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Notes on tensors with another element type, or more rows, than in the source."""
        notes = []
        if self.cast:
            kinds = ", ".join(sorted(set(self.cast.values())))
            text = f"{len(self.cast)} tensors have the module's element type, not the source's: {kinds}"
            notes.append(("cast", text))
        if self.padded:
            rows = ", ".join(f"{rows:,} of {name}" for name, rows in self.padded.items())
            notes.append(("padded", f"rows that the source lacks are zeros: {rows}"))
        return notes


class _Wanted(Struct, frozen=True):
    """One name of the module, and the tensor that the rank holds under it."""

    name: str
    """Global name of the tensor."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the rank's part."""
    global_shape: tuple[int, ...] | None
    """Global shape from a DTensor; None for other tensors."""
    claim: Claim | None
    """Layout that cuts the tensor; None: the rank has it whole."""


def plan_load(local: LocalModel, source: StoredModel, layouts: LayoutMap | None, may_pad: Collection[str] = ()) -> Load:
    """Plan the copies from a source that fill a rank's tensors.

    Names of one view are one tensor: the source needs only one of them; if it has several, the load compares them.
    Tensors in `may_pad` may have more rows in the module, as trainers pad a vocabulary.
    """
    shards = {shard.name: shard for shard in source.shards}
    shapes = {name: shard.shape for name, shard in shards.items()}
    fitting = _Fitting(local.record.rank, layouts, shapes, may_pad, find_scales(source.shards))
    files: list[OutputFile] = []
    views: list[int] = []
    names: list[str] = []
    missing: list[str] = []
    cast: dict[str, str] = {}
    tied: dict[str, tuple[str, ...]] = {}
    errors: list[XrankError] = []
    for view, group in _group_by_view(local, layouts).items():
        there = [wanted for wanted in group if wanted.name in shards]
        names += [wanted.name for wanted in there]
        if not there:
            missing += [wanted.name for wanted in group]
            continue
        first = there[0]
        parts: list[TensorPart | None] = []
        try:
            for wanted in there:
                parts.append(fitting.part(wanted, shards[wanted.name]))
                if parts[-1] != parts[0]:
                    problem = (
                        f"{wanted.name} is the same tensor as {first.name} on this rank, but has a different layout"
                    )
                    got, want, step = str(wanted.claim or "whole"), str(first.claim or "whole"), "give both one layout"
                    raise LayoutError(problem, tensor=wanted.name, got=got, want=want, next_step=step)
        except (UsageError, LayoutError) as error:
            errors.append(error)  # the loop goes on for the other tensors' refusals
            continue
        if 0 in first.shape:
            continue
        files.append(OutputFile.bare(OutputTensor(first.name, first.dtype, first.shape, part=parts[0])))
        views.append(view)
        if (source_dtype := shards[first.name].dtype) != first.dtype:
            cast[first.name] = f"{source_dtype} -> {first.dtype}"
        if len(there) > 1:
            tied[first.name] = tuple(wanted.name for wanted in there[1:])
    if errors:
        refusal, *others = errors
        refusal.about(got=likewise_text([error.tensor or "?" for error in others]).removeprefix("; "))
        raise refusal
    plan = make_plan(source, files, tied=tied)
    return Load(plan, tuple(views), tuple(names), tuple(missing), cast, fitting.padded)


def _group_by_view(local: LocalModel, layouts: LayoutMap | None) -> dict[int, list[_Wanted]]:
    claims, rank = Claims(layouts), local.record.rank
    meshes = [DeviceMesh(shape, names, ranks) for names, shape, ranks in local.record.meshes]
    found: dict[int, list[_Wanted]] = {}
    for own_name, tensor in local.tensors.items():
        known = local.record.tensors.get(own_name, TensorRecord())
        dtype, view = str(tensor.dtype).removeprefix("torch."), local.view_of[own_name]
        held = make_held_tensor(rank, view, dtype, tuple(tensor.shape), known, meshes)
        claim = claims.find(own_name, held)
        name = find_global_name(claim, own_name, held)
        if claim is not None and claim.companion is not None:
            claim = claims.find_in_file(own_name)  # the claim has the rule of the tensor that this one follows
        if name is not None:  # padding does not belong to a tensor
            found.setdefault(view, []).append(_Wanted(name, held.dtype, held.shape, known.shape, claim))
    return found


class _Fitting(Struct, frozen=True):
    rank: int
    layouts: LayoutMap | None
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the source's tensors by name."""
    may_pad: Collection[str]
    scales: Collection[str]
    """Names of the source's tensors that scale quantized payloads."""
    padded: dict[str, int] = field(default_factory=dict)

    def part(self, wanted: _Wanted, shard: StoredShard) -> TensorPart | None:
        """Return the part of a tensor that the rank must hold; None: the whole."""
        ours, theirs = dtypes.dtype(wanted.dtype), dtypes.dtype(shard.dtype)
        got = f"{wanted.dtype} in the module"
        if wanted.dtype != shard.dtype and not (ours.is_float and theirs.is_float):
            raise UsageError(
                f"{wanted.name}: {shard.dtype} in the source cannot be converted to {wanted.dtype}",
                tensor=wanted.name,
                got=got,
                want=f"{shard.dtype}, or a float type on both sides",
                next_step="create the module with the source's dtypes",
            )
        if wanted.name in self.scales and ours.nbytes < theirs.nbytes:
            problem = f"{wanted.name}: as {wanted.dtype}, this scale of a quantized tensor would give other weights"
            step = "make the module's scales in this type (tensor.float()); a cast of the whole module rounds them, too"
            raise UsageError(
                problem, tensor=wanted.name, got=got, want=f"{shard.dtype}, as in the source", next_step=step
            )
        shape, claim = self._pad_shape(wanted, shard), wanted.claim
        if claim is None:
            _check_shape(wanted, "shape", wanted.shape, shape)
            part = None if shape == shard.shape else TensorPart(shape, whole(shape), whole(shape))
        else:
            if wanted.global_shape is not None:
                _check_shape(wanted, "global shape", wanted.global_shape, shape)
            new = self._new_part(wanted, claim, shape)
            if not (0 in wanted.shape and 0 in new.shape):  # FSDP2 over TP cuts all dims of an empty part
                _check_shape(wanted, f"part on rank {self.rank}", wanted.shape, new.shape)
            part = new.part
        if part is None or shape == shard.shape:
            return part
        self.padded[wanted.name] = shape[0] - shard.shape[0]
        end = prod(shard.shape)  # rows of padding come last, in the tensor and in any part of it
        nests, compared = (
            tuple(swap(piece) for nest in each for piece in restrict(swap(nest), 0, end))
            for each in (part.nests, part.compared)
        )
        return TensorPart(shard.shape, nests, compared)

    def _pad_shape(self, wanted: _Wanted, shard: StoredShard) -> tuple[int, ...]:
        """Return the global shape of the module's tensor, which may have more rows than the source's."""
        if wanted.name not in self.may_pad or len(wanted.shape) != len(shard.shape) or not shard.shape:
            return shard.shape
        num_rows = (wanted.global_shape or wanted.shape)[0]
        if wanted.global_shape is None and wanted.claim is not None:
            layout = wanted.claim.layout
            lengths = axis_lengths(wanted.claim.mesh, layout.view_mesh)
            num_rows *= prod(lengths[axis] for axis in layout.cut_axes[0])
        return (max(num_rows, shard.shape[0]), *shard.shape[1:])

    def _new_part(self, wanted: _Wanted, claim: Claim, shape: tuple[int, ...]) -> NewPart:
        if flat_of(claim.layout) is not None:
            problem = f"{wanted.name}: its layout is a flat buffer, which is read and not filled"
            step = "give the members, which are views of the buffer, layouts of their own"
            want = "the layout of one tensor"
            raise LayoutError(problem, tensor=wanted.name, got=str(claim), want=want, next_step=step)
        base = None
        if claim.companion is not None:
            assert self.layouts is not None  # a companion is not a DTensor
            base = base_of_shape(claim.companion, self.layouts, wanted.name, shape, self.shapes)
        new = new_parts(wanted.name, claim, shape, base).get(self.rank)
        if new is None:
            raise LayoutError(
                f"{wanted.name}: rank {self.rank} has a part, but its layout gives it none",
                tensor=wanted.name,
                rank=self.rank,
                got=f"a part of shape {list(wanted.shape)}",
                want=f"none, by {claim} on {claim.mesh.grid}",
                next_step="correct the layouts",
            )
        return new


def _check_shape(wanted: _Wanted, what: str, got: tuple[int, ...], want: tuple[int, ...]) -> None:
    if got == want:
        return
    is_cut = wanted.claim is None and len(got) == len(want) and all(map(le, got, want))
    step = "make the module with the sizes of the source's config.json"
    step = "describe how the plain tensor is split, with layouts=" if is_cut else step
    problem, text = f"{wanted.name}: its {what} differs from that of the source's tensor", f"{list(got)} in the module"
    raise UsageError(problem, tensor=wanted.name, got=text, want=f"{list(want)}", next_step=step)


_MAX_MISSING = 20
"""Maximum number of names missing in the source that a rank describes."""


def describe_load(source: StoredModel, load: Load) -> dict[str, Any]:
    """Describe a load for the first rank's check: the source, a bit for each tensor held, missing names."""
    held = set(load.names)
    bits = np.packbits([shard.name in held for shard in source.shards])
    return {"source": _digest(source), "held": bits.tobytes().hex(), "missing": list(load.missing[:_MAX_MISSING])}


def check_loads(source: StoredModel, ranks: Sequence[int], loads: Sequence[dict[str, Any]]) -> None:
    """Check that ranks see one source, and together hold all of its names and no others."""
    first_digest = loads[0]["source"]
    for rank, digest in zip(ranks, (load["source"] for load in loads), strict=True):
        if digest != first_digest:
            wait = "if its clients cache metadata, wait a minute"
            raise ContradictionError(
                f"rank {rank} sees a different source than rank {ranks[0]}, or its call differs",
                rank=rank,
                got=f"source {digest}",
                want=f"source {first_digest}, as on rank {ranks[0]}: the same names, sizes and times of change",
                next_step=f"let all ranks see one file system; {wait}; then let all ranks {AGAIN}",
            )
    # Names that ranks have and the source lacks, and names that no rank has.
    missing = list(dict.fromkeys(name for load in loads for name in load["missing"]))
    held = np.zeros(-(-len(source.shards) // 8), np.uint8)
    for load in loads:
        held |= np.frombuffer(bytes.fromhex(load["held"]), np.uint8)
    bits = np.unpackbits(held, count=len(source.shards))
    unexpected = [shard.name for shard, bit in zip(source.shards, bits.tolist(), strict=True) if not bit]
    if not missing and not unexpected:
        return
    first = (*missing, *unexpected)[0]
    wrong = [f"{list_text(missing)} only in the module"] if missing else []
    wrong += [f"{list_text(unexpected)} only in the source"] if unexpected else []
    problem = f"{first}: {'the source has no such tensor' if missing else 'no rank has such a tensor'}"
    got, want = "; ".join(wrong), "the same names on both sides"
    step = "make the module with the source's config.json, and tie again what to_empty separated; if one side has a "
    step += f"trainer's names, give {option('recipe')}"
    raise UsageError(problem, tensor=first, file=source.path, got=got, want=want, next_step=step)


def _digest(source: StoredModel) -> str:
    state = xxhash.xxh3_128()
    for file in source.files:
        state.update(repr(file.identity).encode())
    for shard in source.shards:
        state.update(repr((shard.name, shard.dtype, shard.shape)).encode())
    return state.hexdigest()
