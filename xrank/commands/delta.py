"""Deltas of models on disk: what has changed from one model, or one version of it, to the next."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TypeAlias

from xrank.commands.comparison import ComparedSide, correspond, pair_plain, read_sides
from xrank.commands.delta_writing import NewVersion, make_unfit_error, plan_version, write_delta
from xrank.commands.report import counts_requests
from xrank.engine.file_writing import hash_beside
from xrank.engine.planner import make_plan
from xrank.engine.report import Report
from xrank.engine.sources import open_source
from xrank.engine.tensor_pairs import TensorSide
from xrank.errors import ContradictionError, UsageError, names_own_arguments
from xrank.formats.deltas import INDEX_NAME
from xrank.layout import LayoutMap
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import StoredModel
from xrank.ranks.team import Team
from xrank.readers.hugging_face.folder import HfFolderReader
from xrank.recipes.decision import read_layouts
from xrank.recipes.options import GatherOptions
from xrank.recipes.sources import open_base_model
from xrank.storage import places
from xrank.storage.staging import check_output
from xrank.storage.url import clean_path


@names_own_arguments
@counts_requests
def make_delta(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    step: int | None = None,
    base_model: str | os.PathLike[str] | None = None,
    layouts: str | os.PathLike[str] | LayoutMap | None = None,
    recipe: str | os.PathLike[str] | None = None,
    max_shard_size: str | int = "5GB",
    max_memory: str | int = "64MB",
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Write the changes from one model to the next as a version: a folder that SGLang, slime and others apply.

    Each tensor that has changed is a compressed body under its Hugging Face name; the others are absent. The folder
    records a checksum of each tensor's new bytes, and digests of both whole models, so readers refuse any other base.
    It appears by one rename.

    Args:
        old: the model on which the delta is applied: a folder, or a checkpoint of any format that xrank reads.
        new: the model that it makes. It must have the same tensors, of the same shapes and types.
        out: the version's folder, ``deltas/weight_v000001``, or its URL in a store. Its name gives the version; that
            of `old`, if it is a version, gives the base's, which else is the version before.
        encoding: ``"xor"``, the old bytes xor the new ones, or ``"overwrite"``, positions and new bytes, which takes
            memory for all changes of a tensor.
        checksum: ``"xxh3-128"``, ``"blake3"`` (which needs the package of this name), or ``"adler32"``.
        step: the training step to record.
        base_model: names and shapes that neither side records, as of `xrank.gather_checkpoint`; so are `layouts`.
        layouts: a layout file, or its content.
        recipe: from training names to Hugging Face's, for the sides that it fits.
        max_shard_size: bytes of bodies in a file.
        max_memory: bytes of all buffers.
        workers: number of threads; None: ``min(4, cores)``.
        overwrite: whether an existing version may be replaced.
        resume: whether to keep the finished parts of an interrupted run.
        progress: called with (bytes compared so far, bytes in all).

    Raises:
        UsageError: the models have different tensors, which no delta can contain; or the call must change.
        XrankError: as `xrank.gather_checkpoint`.

    Example:
        >>> import torch, xrank
        >>> for number, value in enumerate([0.0, 1.0]):
        ...     _ = xrank.save_model({"norm.weight": torch.full((4,), value)}, f"deltas/step-{number}")
        >>> report = xrank.make_delta("deltas/step-0", "deltas/step-1", "deltas/weight_v000001")
        >>> report.details.version, report.details.num_changed
        (1, 1)
    """
    started = time.monotonic()
    options = GatherOptions(
        max_shard_size=max_shard_size, max_memory=max_memory, workers=workers, overwrite=overwrite, resume=resume
    )
    old_path, new_path, path = places.enter(old), places.enter(new), clean_path(out)
    facts = plan_version(path, old_path, encoding=encoding, checksum=checksum, step=step)
    base = None if base_model is None else open_base_model(base_model)
    given = layouts if isinstance(layouts, LayoutMap) or layouts is None else read_layouts(layouts)
    sides = read_sides(new_path, old_path, base=base, layouts=given)
    for side in sides:
        _check_side(side, path)
    outputs, models, notes = _pair(sides, recipe, path)
    files = [OutputFile.bare(output) for output in outputs]
    plans = [make_plan(model, files, tied=tied) for model, tied in models]
    # An index may be what this call made before; a store is asked anew.
    if not places.exists(os.path.join(places.enter(path), INDEX_NAME)):
        check_output(path, overwrite=overwrite)
    with (
        hash_beside([hashed for model, _ in models for hashed in model.hashes], Team()) as finish_hashes,
        closing(open_source(plans[0].source)) as new_source,
        closing(open_source(plans[1].source)) as old_source,
    ):

        def read(numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], tuple[TensorSide, TensorSide]]]:
            yield numbers, (TensorSide(plans[0], new_source), TensorSide(plans[1], old_source))
            finish_hashes()
            new_source.check_unchanged()
            old_source.check_unchanged()

        version = NewVersion(
            Team(), outputs, facts, plans[0].source, path, options, command="delta make", started=started, notes=notes
        )
        return write_delta(version, read, progress=progress)


def _check_side(side: ComparedSide, out: str) -> None:
    """Refuse a model of which a delta would lack a part, or whose bytes are made while it is read."""
    if side.has_adapter_apart:
        got, want = "also an adapter, in a subfolder", "only a model, or only an adapter"
    elif side.model.records.quantized:
        got, want = "quantized weights only on this side", "quantized weights on both sides, or on neither"
    else:
        return
    raise UsageError(
        f"{side.path}: a delta has the bytes of one folder's weights",
        file=side.path,
        got=got,
        want=want,
        next_step=f"gather both models to new folders, which gives them one form, then make {out} again",
    )


_Tied: TypeAlias = dict[str, tuple[str, ...]]


def _pair(
    sides: tuple[ComparedSide, ComparedSide], recipe: str | os.PathLike[str] | None, out: str
) -> tuple[list[OutputTensor], list[tuple[StoredModel, _Tied]], Sequence[tuple[str, str]]]:
    """Return the tensors of a new and an old model under the old one's names, both models, and notes.

    A tied name without a tensor of its own in the old folder is not among them; it is compared with its tensor.
    """
    new, old = sides
    is_folder = old.model.format in (HfFolderReader.name, "deltas")
    try:
        pair = pair_plain(new, old, recipe)
        ours, theirs = pair.ours, old.with_tied(old.model) if is_folder else pair.theirs
        found = correspond((ours, theirs))
    except ContradictionError as error:
        raise make_unfit_error(error.tensor, error.got, error.want or "the same tensors", new.path, out) from error
    stored = set(old.shards) if is_folder else set()
    names = [name for name in found.names if name not in found.aliases or name in stored]
    for name in (*found.cast, *sorted(stored - set(names))):
        kinds = [f"{side.shards[name].dtype}" if name in side.shards else "no such tensor" for side in (ours, theirs)]
        raise make_unfit_error(name, kinds[0], f"{kinds[1]}, as in {old.path}", new.path, out)
    tied: list[_Tied] = [{}, {}]
    both = [(one.side, one.name, one.target) for one in found.tied]
    for side, model in enumerate((ours.model, theirs.model)):
        shards = {shard.name for shard in model.shards}
        both += [(side, name, model.aliases.get(name, "")) for name in set(found.names) - set(names) if name in shards]
    for side, name, target in both:
        if target in names:
            tied[side][target] = (*tied[side].get(target, ()), name)
    outputs = [OutputTensor(name, theirs.shards[name].dtype, theirs.shards[name].shape) for name in names]
    notes = (*pair.notes, *found.notes, *new.notes, *old.notes)
    return outputs, [(ours.model, tied[0]), (theirs.model, tied[1])], notes
