"""The folder of a DeepSpeed checkpoint: resolves a path's marker, and assigns each file to its rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from xrank.errors import ContradictionError, CorruptError, IncompleteError, UnsafeError, UsageError
from xrank.formats.regular_file import Origin, open_regular, quote
from xrank.readers.advice import ONE_SAVE
from xrank.readers.deepspeed.unread import SLICES
from xrank.stores import places
from xrank.words import list_text

# deepspeed/runtime/engine.py: _get_ckpt_name, _get_rank_zero_ckpt_name; older versions lack the "_" before "optim".
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,7})_)?mp_rank_([0-9]{2,7})_model_states\.pt")
_PARTITION = re.compile(r"(?:(?:bf16|fp16)_)?zero_pp_rank_([0-9]{1,7})_mp_rank_([0-9]{2,7})_?optim_states\.pt")
# engine.py: _get_expert_ckpt_name, whose older form has no layer, and _get_optimizer_ckpt_name.
_EXPERT = re.compile(r"(?:layer_([0-9]{1,7})_)?expert_([0-9]{1,7})_mp_rank_([0-9]{2,7})_model_states\.pt")
_MOMENTS = re.compile(r"expp_rank_([0-9]{1,7})_mp_rank_([0-9]{2,7})_optim_states\.pt")
# runtime/pipe/module.py: ckpt_layer_path. Topologies with a model axis have its coordinate in the name.
_LAYER = re.compile(r"layer_([0-9]{2,7})(?:-model_([0-9]{2,7}))?-model_states\.pt")
_OTHER_LAYER = re.compile(r"layer_[0-9]{2,7}-.*-model_states\.pt")

_MARKERS = ("latest", "latest_universal")
_SCRIPT = "zero_to_fp32.py"
# The longest name of a file on Linux.
_MAX_TAG_NBYTES = 255


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of one checkpoint, as paths."""

    folder: str
    models: Mapping[int, str]
    """Model states by model-parallel rank, of stages 0 to 2; each contains whole modules, or belongs to a stage."""
    rank_models: Mapping[int, str]
    """Model states by rank, of stage 3."""
    stage_partitions: Mapping[int, Mapping[int, str]]
    """Optimizer states with the fp32 weights, by model-parallel rank and then by rank in its data-parallel group."""
    layers: Mapping[int, str]
    """A pipeline's layers."""
    experts: Mapping[tuple[int, int], str]
    """Experts by layer of experts and number; the layer is -1 in older checkpoints, whose files have all layers."""
    is_universal: bool
    sliced: str | None = None
    """A file of a further model-parallel rank, which is a pipeline's stage or a slice of every module."""

    @property
    def tag(self) -> str:
        """Return the checkpoint's name."""
        return os.path.basename(places.absolute(self.folder))

    @property
    def partitions(self) -> Mapping[int, str]:
        """Optimizer states of the first model-parallel rank."""
        return self.stage_partitions.get(0, {})


class Owner(NamedTuple):
    """Kind of a file and its place in the run, from its name."""

    kind: str
    rank: int | None
    """Rank in the data-parallel group; None: all ranks share the file."""
    slice: int
    """Model-parallel rank."""
    layer: int = -1
    expert: int = -1


def parse_owner(name: str) -> Owner | None:
    """Return the owner of a file from its name, or None for another name."""
    if model := _MODEL.fullmatch(name):
        return Owner("model states", None if model[1] is None else int(model[1]), int(model[2]))
    if partition := _PARTITION.fullmatch(name):
        return Owner("optimizer states", int(partition[1]), int(partition[2]))
    if layer := _LAYER.fullmatch(name):
        return Owner("layer", None, int(layer[2] or 0), int(layer[1]))
    if expert := _EXPERT.fullmatch(name):
        return Owner("expert", None, int(expert[3]), -1 if expert[1] is None else int(expert[1]), int(expert[2]))
    return None


def explain_mismatch(path: str) -> str | None:
    """Return None for a DeepSpeed checkpoint, or a folder whose marker names one; otherwise the reason against it."""
    if not places.is_folder(path):
        return "not a folder"
    entries = places.list_names(path)
    if any(map(_is_state, entries)):
        return None
    if not any(marker in entries for marker in _MARKERS):
        return "no *_optim_states.pt or *_model_states.pt, and no latest"
    # Other programs write a `latest`, too; DeepSpeed also puts its script beside it, and its files below.
    if _SCRIPT in entries or any(_holds_states(os.path.join(path, entry)) for entry in entries):
        return None
    return "a latest, but no DeepSpeed checkpoint below it"


def _is_state(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_MODEL, _PARTITION, _EXPERT, _MOMENTS, _OTHER_LAYER, _LAYER))


def _holds_states(path: str) -> bool:
    return places.is_folder(path) and any(map(_is_state, places.list_names(path)))


def resolve_folder(path: str) -> str:
    """Return the folder that contains the files: the path itself, or the one that its marker names.

    Raises:
        UnsafeError: the marker names a place outside the folder.
        IncompleteError: the folder that the marker names is missing.
        UsageError: there are two markers.
    """
    if _holds_states(path):
        return path
    markers = [marker for marker in _MARKERS if places.is_present(os.path.join(path, marker))]
    if not markers:
        raise IncompleteError(
            f"{path} holds no DeepSpeed checkpoint",
            file=path,
            want="*_optim_states.pt and *_model_states.pt files, or a latest that names their folder",
            next_step="check the path",
        )
    tags = {marker: _tag_of(os.path.join(path, marker)) for marker in markers}
    if len(markers) > 1:
        raise UsageError(
            f"{path} holds two checkpoints, a plain and a universal one",
            file=path,
            got=" and ".join(tags.values()),
            want="one",
            next_step=f"give the path of one of them, such as {os.path.join(path, tags[markers[0]])}",
        )
    folder = os.path.join(path, tags[markers[0]])
    if not _holds_states(folder):
        raise IncompleteError(
            f"{os.path.join(path, markers[0])} names {tags[markers[0]]}, which contains no checkpoint",
            file=os.path.join(path, markers[0]),
            got=list_text(
                sorted(e for e in places.list_names(path) if places.is_folder(os.path.join(path, e))), empty="no folder"
            ),
            want=f"{tags[markers[0]]} with *_optim_states.pt and *_model_states.pt files",
            next_step="copy that folder here, or give the path of the checkpoint's own folder",
        )
    return folder


def _tag_of(file: str) -> str:
    with open_regular(file) as stream:
        if stream.nbytes > _MAX_TAG_NBYTES + 1:
            raise stream.origin.corrupt("is not a tag", got=f"{stream.nbytes} bytes", want="the name of a folder")
        raw = stream.read(0, stream.nbytes)
        try:
            tag = raw.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise stream.origin.corrupt("is not a tag", got=quote(raw), want="the name of a folder") from None
    if not tag:
        raise CorruptError(
            f"{file}: is empty",
            file=file,
            want="the name of a folder",
            next_step="give the path of the checkpoint's own folder",
        )
    if os.path.basename(tag) != tag or tag in (".", "..") or not tag.isprintable():
        raise UnsafeError(
            f"{file}: names a place outside its folder",
            file=file,
            got=quote(tag),
            want="the name of a folder beside it",
            next_step="give the path of the checkpoint's own folder; this marker was tampered with",
        )
    return tag


def list_files(folder: str) -> CheckpointFiles:
    """Return the files of a checkpoint's folder by kind and rank.

    Raises:
        UsageError: a layer or an expert is cut into slices.
        ContradictionError: two files belong to one rank.
    """
    models: dict[int, str] = {}
    rank_models: dict[int, str] = {}
    partitions: dict[int, dict[int, str]] = {}
    layers: dict[int, str] = {}
    experts: dict[tuple[int, int], str] = {}
    sliced: list[str] = []
    entries = sorted(places.list_names(folder))
    is_universal = "zero" in entries and places.is_folder(os.path.join(folder, "zero"))
    for entry in entries:
        owner, path = parse_owner(entry), os.path.join(folder, entry)
        if owner is None:
            if _OTHER_LAYER.fullmatch(entry):
                raise SLICES.make_error(Origin(path))
            continue
        if owner.slice and owner.kind in ("layer", "expert"):
            raise SLICES.make_error(Origin(path))
        # Universal weights are whole; there the slices' model states only show which parameters exist.
        if owner.slice and not (is_universal and owner.rank is None):
            sliced.append(path)
        if owner.kind == "layer":
            _set(layers, owner.layer, path, f"layer {owner.layer}")
        elif owner.kind == "expert":
            _set(experts, (owner.layer, owner.expert), path, f"expert {owner.expert} of layer {owner.layer}")
        elif owner.rank is None:
            _set(models, owner.slice, path, f"model-parallel rank {owner.slice}")
        elif owner.kind == "optimizer states":
            _set(partitions.setdefault(owner.slice, {}), owner.rank, path, f"rank {owner.rank}")
        elif not owner.slice:
            _set(rank_models, owner.rank, path, f"rank {owner.rank}")
    first = sliced[0] if sliced else None
    return CheckpointFiles(folder, models, rank_models, partitions, layers, experts, is_universal, first)


_Key = TypeVar("_Key")


def _set(place: dict[_Key, str], key: _Key, path: str, whose: str) -> None:
    other = place.setdefault(key, path)
    if other != path:
        raise ContradictionError(
            f"{path} and {os.path.basename(other)} both belong to {whose}",
            file=path,
            got="two files",
            want="one",
            next_step=ONE_SAVE,
        )
