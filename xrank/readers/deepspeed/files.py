"""The files of a DeepSpeed checkpoint: their names, the facts in which they agree, and the content of each.

The keys are those of deepspeed/checkpoint/constants.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import UsageError
from xrank.formats.pickles import InertRecord, PickleFamilies, fill_blanks, inert_error, is_extra_state
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.readers.names import LIGHTNING_VERSION
from xrank.readers.records import ONE_SAVE, is_telling, outside_error
from xrank.storage import places
from xrank.storage.regular_file import Origin, open_regular, quote
from xrank.words import list_text


class Unread(Struct, frozen=True):
    """A kind of parallelism whose files are not read."""

    what: str
    """Description of such a file's content, in the plural."""
    needed: str
    """Requirement for reading it."""
    next_step: str

    def make_error(self, origin: Origin, got: str | None = None) -> UsageError:
        """Return the error for such a file; ``got`` is the evidence, if not the file's name."""
        return origin.usage(
            f"{self.what} are not read",
            got or self.what,
            f"whole modules; this would need {self.needed}",
            self.next_step,
        )


SLICES = Unread(
    "slices of tensor-parallel ranks",
    "a map of how each tensor was sliced",
    "convert the checkpoint with DeepSpeed's ds_to_universal.py, then gather the result",
)
UNIVERSAL_STAGES = Unread(
    "the universal checkpoints of pipelines",
    "the layers' buffers and frozen parameters, which ds_to_universal.py leaves out",
    "gather the checkpoint from which the universal one was made",
)
AUTO_EXPERTS = Unread(
    "the experts of AutoEP",
    "the joined shards of each expert",
    "load it in a job with the same number of ranks, and call xrank.export_model on each of them, with a state dict "
    "that names the experts by their global index",
)


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


class CheckpointFiles(Struct, frozen=True):
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
    """Return the folder that contains the files: the path itself, or the one that its marker names."""
    if _holds_states(path):
        return path
    markers = [marker for marker in _MARKERS if places.is_present(os.path.join(path, marker))]
    if not markers:
        raise Origin(path).incomplete(
            "contains no DeepSpeed checkpoint",
            want="*_optim_states.pt and *_model_states.pt files, or a latest that names their folder",
            next_step="check the path",
        )
    tags = {marker: _tag_of(os.path.join(path, marker)) for marker in markers}
    if len(markers) > 1:
        raise Origin(path).usage(
            "contains two checkpoints, a plain and a universal one",
            " and ".join(tags.values()),
            "one",
            f"give the path of one of them, such as {os.path.join(path, tags[markers[0]])}",
        )
    folder = os.path.join(path, tags[markers[0]])
    if not _holds_states(folder):
        entries = places.list_names(path)
        raise Origin(os.path.join(path, markers[0])).incomplete(
            f"names {tags[markers[0]]}, which contains no checkpoint",
            list_text(sorted(filter(lambda e: places.is_folder(os.path.join(path, e)), entries)), empty="no folder"),
            f"{tags[markers[0]]} with *_optim_states.pt and *_model_states.pt files",
            "copy that folder here, or give the path of the checkpoint's own folder",
        )
    return folder


def _tag_of(file: str) -> str:
    with open_regular(file) as stream:
        want = "the name of a folder"
        if stream.nbytes > _MAX_TAG_NBYTES + 1:
            raise stream.origin.corrupt("is not a tag", f"{stream.nbytes} bytes", want)
        raw = stream.read(0, stream.nbytes)
        try:
            tag = raw.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise stream.origin.corrupt("is not a tag", quote(raw), want) from None
    step = "give the path of the checkpoint's own folder"
    if not tag:
        raise Origin(file).corrupt("is empty", want=want, next_step=step)
    if os.path.basename(tag) != tag or tag in (".", "..") or not tag.isprintable():
        step = "give the path of the checkpoint's own folder; this marker was tampered with"
        raise outside_error(file, tag, next_step=step)
    return tag


def list_files(folder: str) -> CheckpointFiles:
    """Return the files of a checkpoint's folder by kind and rank."""
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
    if is_universal and models:
        rank_models = {}  # xrank writes the same under both names, for engines of all stages
    first = sliced[0] if sliced else None
    return CheckpointFiles(folder, models, rank_models, partitions, layers, experts, is_universal, first)


_Key = TypeVar("_Key")


def _set(place: dict[_Key, str], key: _Key, path: str, whose: str) -> None:
    other = place.setdefault(key, path)
    if other != path:
        problem = f"it and {os.path.basename(other)} both belong to {whose}"
        raise Origin(path).contradiction(problem, "two files", "one", ONE_SAVE)


class Agreement:
    """Compares each file's facts with those of the first file that has them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Origin]] = {}

    def add(self, facts: Mapping[str, object], origin: Origin) -> None:
        """Add a file's facts."""
        for path, value in facts.items():
            known, other = self._known.setdefault(path, (value, origin))
            # repr compares types, too, and makes NaN equal NaN.
            if repr(known) != repr(value):
                raise origin.contradiction(
                    f"is not from the same save as {other.path}: {quote(path)[1:-1]} differs",
                    ascii(value)[:200],
                    f"{ascii(known)[:200]}, as in {other.path}",
                )


def flatten_facts(value: object, archive: TorchArchive, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of a tree's numbers and texts; single elements, such as steps, give their checksums."""
    if depth > 6:
        return
    if value is None or isinstance(value, (bool, int, float, str)):
        yield path, value
    elif isinstance(value, ArchivedTensor):
        record = archive.records[value.key]
        if value.shape == () and record.nbytes <= 16 and archive.has_checksums:
            yield path, f"{value.dtype} of CRC {record.crc32:08x}"
    elif isinstance(value, InertRecord):
        if isinstance(value.state, dict):
            yield from flatten_facts(value.state, archive, path, depth + 1)
        elif value.args:
            yield from flatten_facts(value.args, archive, path, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flatten_facts(part, archive, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from flatten_facts(part, archive, f"{path}.{number}", depth + 1)


def read_table(
    path: str, what: str, rank: int | None = None, families: PickleFamilies | None = None
) -> tuple[TorchArchive, Origin, dict[str, object]]:
    """Return a file's archive, without its value, its origin and its dict of names.

    A file must not be another rank's: torch writes the file's original name into the archive.
    """
    archive, origin = read_archive(path, rank=rank, families=families), Origin(path, rank)
    table = check_table(fill_blanks(archive.value, archive.own or ()), what, origin)
    own, saved = parse_owner(os.path.basename(path)), parse_owner(f"{archive.name}.pt")
    if own is not None and saved is not None and own != saved:
        raise origin.contradiction(
            "is a different file, renamed or copied",
            f"a file saved as {archive.name}.pt",
            f"a file saved as {os.path.basename(path)}",
            "copy both files again from where they were saved",
        )
    return replace(archive, value=None), origin, table  # a thousand ranks' trees would fill memory


def check_table(value: object, what: str, origin: Origin) -> dict[str, object]:
    """Return a value that must be a dict of names."""
    if isinstance(value, InertRecord):
        raise inert_error(value, origin, what)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise origin.corrupt(f"{what} is not a dict of names", type(value).__name__)
    return value


def check_tensors(module: Mapping[str, object], origin: Origin) -> dict[str, ArchivedTensor]:
    """Return the tensors of a state dict."""
    for name, value in module.items():
        # A parameter of its own class (quantized, sparse) is pickled as code; without it the model would have a gap.
        if isinstance(value, InertRecord) and not is_extra_state(name):
            error = inert_error(value, origin, quote(name)[1:-1])
            error.about(tensor=name)
            raise error
    return {name: value for name, value in module.items() if isinstance(value, ArchivedTensor)}


Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]

EXPERT_NAME = re.compile(r"(?<=\.deepspeed_moe\.experts\.deepspeed_experts\.)[0-9]{1,9}(?=\.)")
"""An expert's number in a tensor's name (deepspeed/moe/experts.py)."""
_MAX_NUMEL = (1 << 62) - 1
_MAX_EXPERTS = 1 << 20
_SHARED_FACTS = (
    *("ds_version", "global_steps", "skipped_steps", "global_samples", "dp_world_size", "mp_world_size"),
    "checkpoint_parallel_dimensions",
    LIGHTNING_VERSION,
)
DEALS = "round_robin_gradients"
"""The option of ZeRO 1 and 2 that deals parameters to ranks in turn."""
EXPERTS_LAST = "use_data_before_expert_parallelism"
"""The option by which ranks with the same experts follow each other."""
_CONFIG_FACTS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16", "optimizer", "scheduler"),
    EXPERTS_LAST,
)
_ALIGNMENTS, _SLICES = "param_alignment_paddings", "param_slice_mappings"
_OPTIMIZER_FACTS = (
    *("zero_stage", "partition_count", "ds_version", "clip_grad", "dynamic_loss_scale", "overflow", "loss_scaler"),
    *("base_optimizer_state_step", _ALIGNMENTS),
)


class ModelState(Struct, frozen=True):
    """Content of a ``*_model_states.pt``."""

    origin: Origin
    archive: TorchArchive
    module: Mapping[str, ArchivedTensor]
    """The state dict; in stage 3 an empty tensor stands for each tensor in the partitions."""
    num_others: int
    """Number of entries of the state dict that are not tensors."""
    buffer_names: tuple[str, ...]
    groups: tuple[Shapes, ...] | None
    """Whole shapes of the parameters in the partitions, by group, in their order; None without ZeRO."""
    frozen: Shapes
    """Whole shapes of frozen parameters."""
    fragments: Mapping[str, ArchivedTensor]
    """Tensors of the frozen parameters: in stage 3 this rank's pieces, otherwise whole."""
    shared: Mapping[str, str]
    """Alias -> the name that holds the data; only rank 0 records it."""
    facts: Mapping[str, object]
    """Values that are equal in all files of one save."""
    config_stage: int | None
    """The ZeRO stage in the configuration."""
    is_stage: bool
    """Whether it is a pipeline's stage: its layers' tensors lie in files of their own."""
    num_experts: tuple[int, ...]
    """Number of experts of each layer with experts; their tensors lie in files of their own, and are not named here."""
    moments: frozenset[tuple[Shape, int]] = frozenset()
    """Shape and checksum of a moment of each parameter, without ZeRO; stages with a tied tensor have equal ones."""
    is_lost: bool = False
    """As of a `Partition`."""


class Partition(Struct, frozen=True):
    """Content of a ``*_optim_states.pt``."""

    origin: Origin
    archive: TorchArchive
    stage: int | None
    """None if `BF16_Optimizer` wrote it, which does not record its stage."""
    counts: tuple[int, ...]
    """Number of partitions of each group, or one number for all."""
    flats: tuple[ArchivedTensor, ...]
    """The fp32 weights: a partition per group, or in stage 3 per sub-group."""
    is_interleaved: bool
    """Whether it is cut as in stage 3."""
    paddings: tuple[int, ...] | None
    """For each group: number of padding elements at this partition's end."""
    alignments: tuple[tuple[int, ...], ...] | None
    """For each group: number of padding elements behind each parameter."""
    slices: tuple[Mapping[str, tuple[int, int]], ...] | None
    """For each group: (start, elements) in this partition of every parameter with a part in it."""
    facts: Mapping[str, object]
    """Values that are equal in all files of one save."""
    base: object
    """State of the wrapped optimizer: its moments by group, or in stage 3 by sub-group."""
    is_lost: bool = False
    """Whether it stands for a lost file, whose content is as that of another rank's but for the weights."""


def read_model_state(path: str, rank: int | None = None, families: PickleFamilies | None = None) -> ModelState:
    """Return the content of a ``*_model_states.pt``, from its metadata alone."""
    archive, origin, state = read_table(path, "the state", rank, families)
    if "module" not in state:
        raise origin.corrupt("is not a model state", "no module", "a dict with module")
    if state.get("ds_autoep_layers") or state.get("autoep_layers"):
        raise AUTO_EXPERTS.make_error(origin)
    # runtime/pipe/engine.py: module_state_dict returns None.
    is_stage = state["module"] is None
    module = {} if is_stage else check_table(state["module"], "module", origin)
    tensors = check_tensors(module, origin)
    num_experts = _num_experts(state.get("num_experts"), origin)
    own = {name for name in tensors if num_experts and EXPERT_NAME.search(name)}
    if own:
        raise origin.corrupt("contains experts, which belong into separate files", quote(min(own)))
    buffers = state.get("buffer_names") or ()
    buffers = sorted(buffers) if isinstance(buffers, set) else buffers
    if not isinstance(buffers, (list, tuple)) or not all(isinstance(name, str) for name in buffers):
        raise origin.corrupt("buffer_names is not a list of names", type(buffers).__name__)
    shared = check_table(state.get("shared_params") or {}, "shared_params", origin)
    if not all(isinstance(name, str) for name in shared.values()):
        raise origin.corrupt("shared_params does not tie names to names")
    fragments: dict[str, ArchivedTensor] = {}
    for name, value in check_table(state.get("frozen_param_fragments") or {}, "frozen_param_fragments", origin).items():
        if not isinstance(value, ArchivedTensor):
            problem = f"{quote(name)} among frozen_param_fragments is not a tensor"
            raise origin.corrupt(problem, type(value).__name__)
        fragments[name] = value
    facts = flatten_facts({key: state[key] for key in _SHARED_FACTS if key in state}, archive)
    config = state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return ModelState(
        origin=origin,
        archive=archive,
        module=tensors,
        num_others=len(module) - len(tensors),
        buffer_names=tuple(name for name in buffers if not EXPERT_NAME.search(name)),
        groups=_groups(state.get("param_shapes"), origin),
        frozen=_without_experts(_shapes(state.get("frozen_param_shapes") or {}, "frozen_param_shapes", origin)),
        fragments=_without_experts(fragments),
        shared={name: str(owner) for name, owner in shared.items()},
        facts={**dict(facts), **dict(_config_facts(state, archive))},
        config_stage=stage if type(stage) is int else None,
        is_stage=is_stage,
        num_experts=num_experts,
        moments=frozenset(_moments(state.get("optimizer"), archive)),
    )


def _moments(optimizer: object, archive: TorchArchive) -> Iterator[tuple[Shape, int]]:
    """Yield the shape and checksum of one moment of each parameter (torch/optim), unless all of it is zero."""
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    for moments in states.values() if isinstance(states, dict) and archive.has_checksums else ():
        for key in ("exp_avg", "momentum_buffer"):
            moment = moments.get(key) if isinstance(moments, dict) else None
            if isinstance(moment, ArchivedTensor) and is_telling(archive, moment):
                yield moment.shape, archive.records[moment.key].crc32


_Value = TypeVar("_Value")


def _without_experts(named: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name: value for name, value in named.items() if not EXPERT_NAME.search(name)}


def _num_experts(value: object, origin: Origin) -> tuple[int, ...]:
    # engine.py: a list with a number for each layer of experts; older versions write [0] without any.
    values = value if isinstance(value, (list, tuple)) else ()
    if not all(type(each) is int and 0 <= each <= _MAX_EXPERTS for each in values):
        raise origin.corrupt("num_experts is not a list of counts", ascii(value)[:200])
    return tuple(each for each in values if isinstance(each, int) and each)


def _groups(value: object, origin: Origin) -> tuple[Shapes, ...] | None:
    listed = [value] if isinstance(value, dict) else value
    if listed is None:
        return None
    shapes = tuple(_shapes(group, "param_shapes", origin) for group in _check_list(listed, "param_shapes", origin))
    names = [name for group in shapes for name in group]
    if len(set(names)) < len(names):
        raise origin.corrupt("a parameter is in two groups of param_shapes")
    return shapes


def _shapes(value: object, what: str, origin: Origin) -> Shapes:
    table = check_table(value, what, origin)
    found: dict[str, Shape] = {}
    for name, shape in table.items():
        # A torch.Size is a tuple here (`read_archive`); some callers save lists.
        sizes = tuple(shape) if isinstance(shape, (list, tuple)) else (-1,)
        if not all(type(size) is int and size >= 0 for size in sizes) or len(sizes) > 64 or prod(sizes) > _MAX_NUMEL:
            raise origin.corrupt(f"{what} gives {quote(name)} an invalid shape", ascii(shape)[:200])
        found[name] = sizes
    return found


def read_partition(path: str, rank: int, families: PickleFamilies | None = None) -> Partition:
    """Return the content of a ``*_optim_states.pt``, from its metadata alone."""
    archive, origin, state = read_table(path, "the state", rank, families)
    optimizer = check_table(state.get("optimizer_state_dict"), "optimizer_state_dict", origin)
    is_interleaved = "fp32_flat_groups" in optimizer
    flats = optimizer.get("fp32_flat_groups" if is_interleaved else "single_partition_of_fp32_groups")
    if flats is None:
        raise origin.usage(
            "contains no fp32 weights",
            list_text(map(quote, optimizer), 8),
            "fp32_flat_groups or single_partition_of_fp32_groups",
            "gather a checkpoint that a ZeRO optimizer saved",
        )
    listed = _check_list(flats, "the fp32 weights", origin)
    tensors = tuple(tensor for tensor in listed if isinstance(tensor, ArchivedTensor))
    if len(tensors) != len(listed):
        raise origin.corrupt("its fp32 weights are not tensors")
    counts = optimizer.get("partition_count")
    counts = (counts,) if type(counts) is int else tuple(_check_list(counts, "partition_count", origin))
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise origin.corrupt("partition_count is not a count", ascii(counts)[:200])
    paddings, alignments = optimizer.get("group_paddings"), optimizer.get(_ALIGNMENTS)
    slices = optimizer.get(_SLICES)
    return Partition(
        origin=origin,
        archive=archive,
        stage=_stage_of(optimizer.get("zero_stage"), origin),
        counts=tuple(count for count in counts if isinstance(count, int)),
        flats=tensors,
        is_interleaved=is_interleaved,
        paddings=None if paddings is None else _numbers(paddings, "group_paddings", origin),
        alignments=None
        if alignments is None
        else tuple(_numbers(group, _ALIGNMENTS, origin) for group in _check_list(alignments, _ALIGNMENTS, origin)),
        slices=tuple(_slices(group, origin) for group in _check_list(slices, _SLICES, origin)) if slices else None,
        facts=dict(_partition_facts(state, optimizer, archive)),
        base=_base_of(optimizer),
    )


def _base_of(optimizer: Mapping[str, object]) -> object:
    # Adam's state has one key in stages 1 and 2 and another in stage 3.
    return optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))


def _check_list(value: object, what: str, origin: Origin) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise origin.corrupt(f"{what} is not a list", type(value).__name__)
    return value


def _numbers(value: object, what: str, origin: Origin) -> tuple[int, ...]:
    listed = _check_list(value, what, origin)
    numbers = tuple(number for number in listed if type(number) is int and 0 <= number <= _MAX_NUMEL)
    if len(numbers) != len(listed):
        raise origin.corrupt(f"{what} is not a list of counts", ascii(listed)[:200])
    return numbers


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""Names of ZeroStageEnum's members."""


def _stage_of(value: object, origin: Origin) -> int | None:
    match value:
        case None:
            return None
        # A member of deepspeed.runtime.zero.config.ZeroStageEnum; older versions write a number.
        case InertRecord(name="ZeroStageEnum", args=(int(stage),)) | int(stage):
            return int(stage)
        case InertRecord(name="ZeroStageEnum", args=(str(member),)) if member in _STAGES:
            return _STAGES.index(member)
    raise origin.corrupt("its zero_stage is not a stage", ascii(value)[:200])


def _slices(value: object, origin: Origin) -> Mapping[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for name, address in check_table(value, _SLICES, origin).items():
        # deepspeed/utils/tensor_fragment.py: fragment_address(numel, start).
        match address:
            case InertRecord(name="fragment_address", state={"numel": int(numel), "start": int(start)}):
                found[name] = (start, numel)
            case _:
                raise origin.corrupt(f"{quote(name)} has no address in the partition", type(address).__name__)
    return found


def _partition_facts(
    state: Mapping[str, object], optimizer: Mapping[str, object], archive: TorchArchive
) -> Iterator[tuple[str, object]]:
    yield from flatten_facts({key: optimizer[key] for key in _OPTIMIZER_FACTS if key in optimizer}, archive)
    yield from _config_facts(state, archive)
    inner = _base_of(optimizer)
    per_group: object = inner
    if isinstance(inner, dict):
        per_group = inner.get("state")
        groups = inner.get("param_groups")
        if isinstance(groups, (list, tuple)):
            for number, group in enumerate(groups):
                if isinstance(group, dict):
                    kept = {key: value for key, value in group.items() if key != "params"}
                    yield from flatten_facts(kept, archive, f"param_groups.{number}")
    if isinstance(per_group, (list, tuple)):
        per_group = dict(enumerate(per_group))
    for number, moments in per_group.items() if isinstance(per_group, dict) else ():
        if isinstance(moments, dict) and "step" in moments:
            yield from flatten_facts({"step": moments["step"]}, archive, f"state.{number}")


def _config_facts(state: Mapping[str, object], archive: TorchArchive) -> Iterator[tuple[str, object]]:
    """Yield the settings of the run's configuration that both kinds of files contain."""
    config = state.get("ds_config")
    if isinstance(config, dict):
        kept = {key: config[key] for key in (*_CONFIG_FACTS, "data_types") if key in config}
        if isinstance(zero := config.get("zero_optimization"), dict):
            kept["zero_optimization"] = {key: zero[key] for key in ("stage", DEALS) if key in zero}
        yield from flatten_facts(kept, archive, "ds_config")
