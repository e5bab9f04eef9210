"""A run of Megatron-LM: its arguments and sizes, its folder, and the places of ranks, stages and layers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from msgspec import Struct

from xrank.errors import AGAIN, ContradictionError, IncompleteError, UnsafeError
from xrank.formats.pickles import InertRecord, inert_error
from xrank.readers.megatron.layouts import LAYER
from xrank.storage import places
from xrank.storage.regular_file import Origin, open_regular, quote
from xrank.words import list_text

_MAX_DEPTH = 8
# Arguments in which ranks of one run may differ: identity, place and time.
_OWN = re.compile(r"(?:.*_)?(?:rank|host|hostname|device|pid|port|addr|time|start_time|timestamp)(?:_.*)?")


class ParallelSizes(Struct, frozen=True):
    """Number of parts into which the run cut its model, by dimension; 1 if its arguments do not record it."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Number of chunks of layers on each pipeline stage."""
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    world: int | None = None

    def __str__(self) -> str:
        named = {
            "TP": self.tensor, "PP": self.pipeline, "VPP": self.virtual, "EP": self.expert, "ETP": self.expert_tensor
        }  # fmt: skip
        if self.expert == 1 and self.expert_tensor in (1, self.tensor):
            del named["ETP"]
        return ", ".join(f"{key} {size}" for key, size in named.items())


def plain_args(value: object, origin: Origin) -> dict[str, Any] | None:
    """Return the arguments as plain values; None without arguments. Classes and enum members become texts."""
    if value is None:
        return None
    if isinstance(value, InertRecord):
        if (value.module, value.name) not in (("argparse", "Namespace"), ("types", "SimpleNamespace")):
            raise inert_error(value, origin, "its args, which should be an argparse.Namespace:")
        value = value.state if isinstance(value.state, dict) else value.kwargs
    if not isinstance(value, dict):
        raise origin.corrupt("its args are not a table", type(value).__name__, "argparse.Namespace")
    return {key: _plain(part, 0) for key, part in value.items() if isinstance(key, str)}


def _plain(value: object, depth: int) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple() if depth < _MAX_DEPTH:
            return [_plain(part, depth + 1) for part in value]
        case dict() if depth < _MAX_DEPTH:
            return {str(key): _plain(part, depth + 1) for key, part in value.items()}
        case InertRecord(args=(bool() | int() | str() as member,)):
            return f"{value.module}.{value.name}({member!r})"
        case InertRecord():
            return f"{value.module}.{value.name}"
    return f"<{type(value).__name__}>"


def parallel_sizes(args: Mapping[str, Any], origin: Origin) -> ParallelSizes:
    """Return the parallel sizes in the arguments."""

    def size(*keys: str) -> int:
        for key in keys:
            number = args.get(key)
            if number is not None:
                if type(number) is not int or not 1 <= number <= 1 << 20:
                    raise origin.corrupt(f"its args have an invalid {key}", quote(str(number)), "1 or more")
                return number
        return 1

    world = args.get("world_size")
    return ParallelSizes(
        tensor=size("tensor_model_parallel_size"),
        pipeline=size("pipeline_model_parallel_size"),
        virtual=size("virtual_pipeline_model_parallel_size"),
        expert=size("expert_model_parallel_size"),
        # megatron/training/arguments.py: by default the dense layers' size.
        expert_tensor=size("expert_tensor_parallel_size", "tensor_model_parallel_size"),
        context=size("context_parallel_size"),
        world=world if type(world) is int and world > 0 else None,
    )


def check_agreement(first: Mapping[str, Any], first_file: str, args: Mapping[str, Any], file: str) -> None:
    """Check that two ranks' arguments are those of one run."""
    for key in sorted({*first, *args}):
        ours, theirs = (values.get(key, "<missing>") for values in (args, first))
        # repr compares types, too, and makes NaN equal NaN.
        if not _OWN.fullmatch(key) and repr(ours) != repr(theirs):
            problem = f"belongs to another run than {first_file}: args.{quote(key)[1:-1]} differs"
            raise Origin(file).contradiction(problem, ascii(ours)[:200], f"{ascii(theirs)[:200]}, as in {first_file}")


TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_([0-9]{7,18})", re.ASCII)
_MAX_TRACKER_NBYTES = 64


def explain_mismatch(path: str, holds: Callable[[str], bool], what: str) -> str | None:
    """Return None if a folder is a checkpoint, or its marker names one; otherwise the reason against it."""
    if not places.is_folder(path):
        return "not a folder"
    if holds(path):
        return None
    if not places.is_present(os.path.join(path, TRACKER)):
        return f"no {what} and no {TRACKER}"
    with suppress(UnsafeError, ValueError, OSError):
        named = os.path.join(path, _read_marker(path))
        if places.is_folder(named):
            return None if holds(named) else f"its {TRACKER} names a folder without {what}"
    # If this format owns the marker, `resolve_folder` reports damage to it.
    below = [os.path.join(path, entry) for entry in [*sibling_iterations(path), _RELEASE]]
    return None if any(map(holds, below)) else f"a {TRACKER}, but no {what} below it"


def resolve_folder(path: str, holds: Callable[[str], bool]) -> str:
    """Return the folder that contains the files: the path itself, or the one that its marker names."""
    if holds(path):
        return path
    tracker = os.path.join(path, TRACKER)
    if not places.is_present(tracker):
        raise Origin(path).incomplete(
            "contains no Megatron checkpoint",
            want=f"a checkpoint's files, or a {TRACKER} that names their folder",
            next_step="check the path",
        )
    name = _read_marker(path)
    folder = os.path.join(path, name)
    if not places.is_folder(folder) or not holds(folder):
        problem = f"names {name}, which contains no checkpoint of this kind"
        got = ", ".join(sibling_iterations(path)[-5:]) or "no iter_* folder"
        step = "copy that folder here, or give the path of the checkpoint's own folder"
        raise Origin(tracker).incomplete(problem, got, name, step)
    return folder


def _read_marker(path: str) -> str:
    """Return the name of the folder that the marker means (megatron/training/checkpointing.py: read_metadata)."""
    with open_regular(os.path.join(path, TRACKER)) as file:
        if not 0 < file.nbytes <= _MAX_TRACKER_NBYTES:
            raise file.origin.corrupt("is not a marker", f"{file.nbytes} bytes", "a number, or release")
        text = file.read(0, file.nbytes).decode("latin1").strip()
        if text == _RELEASE:
            return text
        if not re.fullmatch("[0-9]{1,18}", text, re.ASCII):
            raise file.origin.corrupt("is not a marker", quote(text), "a number, or release")
        # Made of the number alone, so no marker can lead out of the folder.
        return f"iter_{int(text):07d}"


def sibling_iterations(path: str) -> list[str]:
    """Return the names of the iterations' folders in a folder, in rising order."""
    names = places.list_names(path) if places.is_folder(path) else []
    return sorted(filter(_ITERATION.fullmatch, names), key=lambda entry: int(entry[5:]))


def check_iteration(folder: str, recorded: object, file: str) -> int | None:
    """Return the iteration that a checkpoint's file records; None if it records none, like converters' files."""
    step = recorded if type(recorded) is int and recorded >= 0 else None
    name = os.path.basename(places.real(folder))
    found = _ITERATION.fullmatch(name)
    if found is not None and step is not None and step != int(found[1]):
        raise Origin(file).contradiction(
            "belongs to another iteration than its folder",
            f"iteration {step}",
            f"iteration {int(found[1])}, as in the folder's name",
            f"copy {name} again from where it was written",
        )
    return step


FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?", re.ASCII)
_MAX_RANKS = 1 << 20


class GridPlace(Struct, frozen=True, order=True):
    """Place of a file's rank in the grid; places sort like the ranks of a run without data parallelism."""

    pipeline: int
    expert: int
    tensor: int

    def rank(self, sizes: ParallelSizes) -> int:
        """Return the rank's number; tensor-parallel ranks vary fastest."""
        return self.tensor + sizes.tensor * (self.expert + sizes.expert * self.pipeline)

    def folder(self, sizes: ParallelSizes) -> str:
        """Return the name of the rank's folder."""
        name = f"mp_rank_{self.tensor:02d}"
        if sizes.pipeline > 1:
            name += f"_{self.pipeline:03d}"
        return f"{name}_{self.expert:03d}" if sizes.expert > 1 else name


def list_folders(folder: str) -> list[str]:
    """Return the names of the ranks' folders in a checkpoint."""
    names = filter(_FOLDER.fullmatch, places.list_names(folder))
    return sorted(name for name in names if places.is_folder(os.path.join(folder, name)))


def places_of(sizes: ParallelSizes, folder: str) -> tuple[GridPlace, ...]:
    """Return the places for which a run writes files."""
    if sizes.tensor * sizes.pipeline * sizes.expert > _MAX_RANKS:
        step = "copy the folder again from where it was written"
        raise Origin(folder).usage("its args record more than a million ranks", str(sizes), next_step=step)
    pairs: Iterable[tuple[int, int]] = product(range(sizes.tensor), range(sizes.expert))
    if sizes.expert > 1 and sizes.expert_tensor != sizes.tensor:
        if sizes.tensor % sizes.expert_tensor or sizes.world is None or sizes.world % sizes.pipeline:
            raise Origin(folder).usage(
                "its experts are cut over another number of ranks than other layers, which is not supported",
                f"{sizes}, world size {sizes.world}",
                "ETP that divides TP, and a world size",
                "save with --ckpt-format torch_dist",
            )
        pairs = _list_writers(sizes, sizes.world // sizes.pipeline)
    return tuple(sorted(GridPlace(p, expert, tensor) for tensor, expert in set(pairs) for p in range(sizes.pipeline)))


def _list_writers(sizes: ParallelSizes, stage_size: int) -> Iterable[tuple[int, int]]:
    """Yield tensor and expert ranks of the writers: the first rank of each data-parallel group.

    Dense layers and experts divide the ranks of a stage in two ways (parallel_state.py: RankGenerator); tensor
    parallelism varies fastest in both.
    """
    # The world size comes from a file, which may be damaged: the loop must end.
    for rank in range(min(stage_size, _MAX_RANKS)):
        if rank < sizes.tensor * sizes.context or rank < sizes.expert_tensor * sizes.expert:
            yield rank % sizes.tensor, rank // sizes.expert_tensor % sizes.expert


def check_grid(folder: str, found: Sequence[str], sizes: ParallelSizes, cells: Sequence[GridPlace]) -> None:
    """Check that exactly the files of the run's ranks are present."""
    wanted = {place.folder(sizes): place for place in cells}
    missing = [name for name in wanted if not places.is_present(os.path.join(folder, name, FILE))]
    if missing:
        place = wanted[missing[0]]
        files = list_text((f"{name}/{FILE}" for name in missing), 3)
        raise IncompleteError(
            f"{files}: not in {folder} (TP {place.tensor}, PP {place.pipeline}, EP {place.expert})",
            rank=place.rank(sizes),
            file=os.path.join(folder, missing[0], FILE),
            got=f"{len(wanted) - len(missing)} files; missing: {list_text(missing, 16)}",
            want=f"{len(wanted)}, for {sizes}",
            next_step=f"copy {missing[0]} from where it was written, then {AGAIN}; nothing was written",
        )
    surplus = [name for name in found if name not in wanted]
    if surplus:
        raise Origin(os.path.join(folder, surplus[0])).contradiction(
            "is not a rank of this run",
            list_text(surplus),
            f"{len(wanted)} folders for {sizes}",
            "move the folders of another run elsewhere, or give the path of the checkpoint's own folder",
        )


def grid_text(found: Sequence[str], sizes: ParallelSizes, cells: Sequence[GridPlace]) -> list[str]:
    """Return, for display, the tensor-parallel ranks with and without files, by stage and expert rank."""
    there = set(found)
    rows: dict[tuple[int, int], list[GridPlace]] = {}
    for place in cells:
        rows.setdefault((place.pipeline, place.expert), []).append(place)
    return [
        f"PP {pipeline}, EP {expert}: "
        + ", ".join(f"TP {p.tensor} {'present' if p.folder(sizes) in there else 'missing'}" for p in row)
        for (pipeline, expert), row in sorted(rows.items())
    ]


Chunk = tuple[int, int]
"""Virtual chunk and pipeline stage. Sorted, the chunks contain a model's layers in order."""

_ENCODER_LAYER = re.compile(r"encoder\.layers\.(0|[1-9]\d{0,8})\..*", re.ASCII)

# With these settings, num_layers alone does not determine a stage's share (megatron/training/arguments.py).
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_split_rank",
)
_FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")


def count_layers(names: Iterable[str], file: str, rank: int) -> int:
    """Return the number of layers in a chunk: the decoder's, or in a model without one (BERT) the encoder's."""
    held = tuple(names)
    stack = "decoder" if any(map(LAYER.fullmatch, held)) else "encoder"
    pattern = LAYER if stack == "decoder" else _ENCODER_LAYER
    numbers = {int(found[1]) for name in held if (found := pattern.fullmatch(name))}
    missing = next((layer for layer in range(len(numbers)) if layer not in numbers), None)
    if missing is not None:
        raise Origin(file, rank).contradiction(
            f"contains nothing of {stack}.layers.{missing}, but contains later layers",
            f"{len(numbers)} layers, up to {max(numbers)}",
            "layers counted from 0 on",
            "copy the file again from where it was written",
            tensor=f"{stack}.layers.{missing}",
        )
    return len(numbers)


def has_encoder(names: Iterable[str]) -> bool:
    """Return whether there are layers of an encoder (BERT, T5)."""
    return any(map(_ENCODER_LAYER.fullmatch, names))


def first_layers(
    counts: Mapping[Chunk, int], sizes: ParallelSizes, args: Mapping[str, Any], file: str
) -> dict[Chunk, int]:
    """Return the number of each chunk's first layer in the whole model."""
    num_layers = args.get("num_layers")
    if type(num_layers) is int and sum(counts.values()) != num_layers:
        total = sum(counts.values())
        raise _contradiction("all stages together do not contain", total, num_layers, "args.num_layers", file)
    # The files' own counts decide; the arguments can only contradict them, because they leave uneven splits open.
    expected = _expect_counts(sizes, args)
    first, total = {}, 0
    for chunk in sorted(counts):
        if expected is not None and counts[chunk] != expected[chunk]:
            where = f"pipeline stage {chunk[1]}" + (f", chunk {chunk[0]}," if sizes.virtual > 1 else "")
            raise _contradiction(f"{where} does not contain", counts[chunk], expected[chunk], "its args", file)
        first[chunk] = total
        total += counts[chunk]
    return first


def _contradiction(what: str, got: int, want: int, source: str, file: str) -> ContradictionError:
    return Origin(file).contradiction(f"{what} the number of layers in {source}", f"{got} layers", f"{want} layers")


def _expect_counts(sizes: ParallelSizes, args: Mapping[str, Any]) -> dict[Chunk, int] | None:
    """Return each chunk's number of layers by the arguments; None if they do not determine it in a simple way."""
    total = args.get("num_layers")
    if type(total) is not int or any(args.get(key) for key in _UNEVEN):
        return None
    ends: dict[int, int] = {}
    for stage, keys in ((0, _FIRST), (sizes.pipeline - 1, _LAST)):
        number = next((args[key] for key in keys if args.get(key) is not None), None)
        if type(number) is int:
            ends[stage] = number
    middle = sizes.pipeline - len(ends)
    rest = total - sum(ends.values())
    if rest < 0 or (middle and rest % middle) or (not middle and rest):
        return None
    stages = {stage: ends.get(stage, rest // middle if middle else 0) for stage in range(sizes.pipeline)}
    if any(count % sizes.virtual for count in stages.values()):
        return None
    return {(chunk, stage): count // sizes.virtual for stage, count in stages.items() for chunk in range(sizes.virtual)}
