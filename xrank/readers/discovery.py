"""Finds the source that a user's path means, at it, just above it or below it, and the reader that fits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from xrank.errors import IncompleteError, UnknownFormatError, UsageError, option
from xrank.readers.base import Reader
from xrank.readers.checkpoint_folders import EXPORT_FOLDER
from xrank.readers.foreign_kinds import find_foreign_kind
from xrank.readers.own_readers import OWN_READERS, TORCH_SAVE, WORKSPACE, ListedReader
from xrank.readers.plugins import plugin_readers
from xrank.readers.step_marker import find_marked_step
from xrank.stores import places
from xrank.stores.url import is_url
from xrank.words import list_text

_SEARCHED_LEVELS = 2
_UNFINISHED = re.compile(r"(^|/)tmp-|[.-]tmp(\.|-\d+|$|/)")
"""Paths of folders that a save renames once it has finished.

transformers 4.37, trainer.py: ``tmp-checkpoint-500``; orbax/checkpoint/_src/path/atomicity.py:
``5.orbax-checkpoint-tmp``.
"""
_STEP = re.compile(r"checkpoint-(\d+)")
# accelerate/utils/fsdp_utils.py: save_fsdp_model; torch/distributed/checkpoint/_hf_utils.py: SHARDED_DIR_NAME;
# verl/utils/checkpoint/checkpoint_manager.py: get_dist_checkpoint_path.
_PART = re.compile(r"pytorch_model_fsdp(_0)?|sharded|dist_ckpt")
"""Folders beside a whole model that hold the same checkpoint in shards."""
_STAGE = re.compile(r"(?i)(^|[/_.-])(pp|pipe|pipeline|stage|part)([_.-]?(rank|stage))?[_.-]?\d+(/|$)")
"""Paths of folders that may each hold a stage of a pipeline. Steps of training may be called so, too."""
_MAX_FILES = 16
"""Files of ``torch.save`` beside a source that are looked at."""
_MANIFEST = "xrank_manifest.json"  # in outputs: writers/output_place.py
_WHOLE = ("safetensors", "bin")
"""Formats of a whole model, best first: a trainer that saves one beside its sharded state saves the same values."""


class SourcePlace(NamedTuple):
    """Where a source lies, and the readers that recognise it."""

    path: str
    reader: Reader
    """The best reader."""
    others: tuple[tuple[str, Reader], ...] = ()
    """Further places with their readers, best first: the same model may lie there in several forms."""
    notes: tuple[tuple[str, str], ...] = ()
    """Notes on other checkpoints that lie there."""


_Found = tuple[str, list[Reader]]
"""A place, and the readers that recognise it."""


def find_source(path: str, *, format_name: str | None = None) -> SourcePlace:
    """Return the source that a path means and the readers that recognise it.

    The path itself comes first; a state file stands for its folder. A folder of unknown format is searched two levels
    down, or only in the step that its marker names. Outputs of xrank below the path are skipped. If several sources
    fit, the user must choose. If several readers fit one source, readers of whole models come first; without one, the
    user must choose.

    Args:
        path: the user's path.
        format_name: consider only this reader.

    Raises:
        IncompleteError: the path does not exist.
        UnknownFormatError: no reader recognises anything there; the error lists the reasons of likely readers.
        UsageError: several readers or several folders fit, a folder may not be read, or the URL contains a password.
    """
    path = places.enter(path)
    if not places.exists(path):
        raise IncompleteError(f"{path} does not exist", file=path, next_step="check the path")
    _check_readable(path)
    listed = [own for own in OWN_READERS if format_name in (None, own.name)]
    more: list[Reader] = []
    found = _search(path, lambda place: [own.load() for own in listed if _may_read(own, place, listed)])
    if found is None:
        # Plugins come second, because finding them reads the metadata of every installed package.
        more = [reader for reader in plugin_readers() if format_name in (None, reader.name)]
        found = _search(path, lambda place: more) if more else None
    if found is None and TORCH_SAVE in listed:
        # Any folder may contain a file of torch.save, also one that is not a model.
        found = _search(path, lambda place: [TORCH_SAVE.load()] if TORCH_SAVE.is_hinted_at(place) else [])
    if found is not None:
        return found._replace(others=(*found.others, *_find_others(path, found, listed)))
    readers: list[Reader] = [*(own.load() for own in listed), *more]
    if not readers:
        known = [*(own.name for own in OWN_READERS), *(reader.name for reader in plugin_readers())]
        raise UnknownFormatError(
            f"no format is called {format_name}",
            got=str(format_name),
            want=", ".join(known),
            next_step=f"leave {option('format')} out: formats are recognised",
        )
    if format_name is not None:
        raise UnknownFormatError(
            f"{path} is not of the format {format_name}: {readers[0].recognise(path)}",
            file=path,
            next_step=f"check the path, or leave {option('format')} out: formats are recognised",
        )
    raise _unknown_format_error(path, listed, readers)


def _unknown_format_error(path: str, listed: Sequence[ListedReader], readers: Sequence[Reader]) -> UnknownFormatError:
    """Return the error for a path that no reader recognises, with the reasons of likely ones."""
    unseen = [own.name for own in listed if not own.is_hinted_at(path)]
    reasons = [f"{reader.name}: {reader.recognise(path)}" for reader in readers if reader.name not in unseen]
    below = list(_folders_below(path, _SEARCHED_LEVELS))
    foreign = find_foreign_kind(path, below)
    if foreign is not None:
        foreign.about(got="; ".join(reasons))
        return foreign
    if unseen:
        reasons.append(f"no sign of: {', '.join(unseen)}")
    made = [place for place in below if _is_made_here(place)]
    return UnknownFormatError(
        f"{path} has no known format",
        file=path,
        got="; ".join([*reasons, *(f"{place}, which xrank made" for place in made[:1])]),
        want="a checkpoint, a workspace or a model at the path, or up to two folders below",
        next_step=f"check the path, or name {made[0]} itself" if made else "check the path",
    )


def _search(path: str, readers_for: Callable[[str], Sequence[Reader]]) -> SourcePlace | None:
    """Return the one source that a path means, and its readers; None if none fits."""
    for place in (path, *([os.path.dirname(places.absolute(path))] if places.is_file(path) else [])):
        fitting = [reader for reader in readers_for(place) if reader.recognise(place) is None]
        if fitting:
            chosen = _choose_reader(place, fitting)
            return chosen._replace(notes=_note_steps(place)) if chosen.reader.name in _WHOLE else chosen
    found: list[_Found] = []
    passed: str | None = None
    for place in _folders_below(find_marked_step(path) or path, _SEARCHED_LEVELS):
        # Folders below a source are parts of it, such as the folder that its marker names.
        if passed is not None and place.startswith(passed + os.sep):
            continue
        if _is_made_here(place):
            passed = place
            continue
        fitting = [reader for reader in readers_for(place) if reader.recognise(place) is None]
        if fitting:
            found.append((place, fitting))
            passed = place
    found = _drop_links(found)
    exported = _find_exported(found)
    if exported is not None:
        return exported
    begun = [place for place, _ in found if _UNFINISHED.search(os.path.relpath(place, path))]
    if 0 < len(begun) < len(found):
        found = [(place, fitting) for place, fitting in found if place not in begun]
    if len(found) > 1:
        paths = " or ".join(place for place, _ in found[:10])
        raise UsageError(
            f"{path} holds several sources",
            file=path,
            got=list_text((f"{place} ({fitting[0].name})" for place, fitting in found), 10),
            want="one",
            # diffusers/pipelines/pipeline_utils.py: DiffusionPipeline.config_name.
            next_step=f"gather each component by itself: give {paths} as the path"
            if places.is_file(os.path.join(path, "model_index.json"))
            else "if each is a stage of one model, gather each by itself, put the outputs into one folder as "
            f"model-00001-of-{len(found):05d}.safetensors and so on, and gather that folder; if each is a whole model, "
            "give the path of one of them"
            if all(_STAGE.search(os.path.relpath(place, path)) for place, _ in found)
            else "give the path of one of them",
        )
    if not found:
        return None
    doubt = "passed over" if found[0][0] not in begun else "read all the same"
    note = ("unfinished", f"a save that may not have finished, by its name, was {doubt}: {list_text(begun, 3)}")
    return _choose_reader(*found[0])._replace(notes=(note,) if begun else ())


def _drop_links(found: Sequence[_Found]) -> list[_Found]:
    """Return the sources without links to others of them, such as a trainer's ``latest`` to one of its steps."""
    own = {places.real(place) for place, _ in found if not places.is_link(place)}
    return [(place, readers) for place, readers in found if not places.is_link(place) or places.real(place) not in own]


def _note_steps(place: str) -> tuple[tuple[str, str], ...]:
    """Return a note on the checkpoints of a trainer in the folder of a whole model, which may be newer than it.

    transformers/trainer_utils.py: PREFIX_CHECKPOINT_DIR.
    """
    if not places.is_folder(place):
        return ()
    steps = sorted((int(found[1]), found[0]) for name in places.list_names(place) if (found := _STEP.fullmatch(name)))
    if not steps:
        return ()
    names = list_text((os.path.join(place, name) for _, name in reversed(steps)), 1)
    return (("also-here", f"the model in {place} itself is read; checkpoints lie there, too: {names}"),)


def _may_read(own: ListedReader, place: str, listed: Sequence[ListedReader]) -> bool:
    if own is not TORCH_SAVE:
        return own.is_hinted_at(place)
    # torch.save writes files under any name, those of ranks among them; a rank's file stands for its folder.
    folder = os.path.dirname(places.absolute(place))
    others = (other for other in listed if other is not TORCH_SAVE and other.is_hinted_at(place))
    return places.is_file(place) and not any(other.load().recognise(folder) is None for other in others)


def _is_made_here(place: str) -> bool:
    """Return whether a folder is the output of a gather or reshard; such a folder often lies beside the checkpoints."""
    return places.is_file(os.path.join(place, _MANIFEST))


def _choose_reader(place: str, fitting: Sequence[Reader]) -> SourcePlace:
    if len(fitting) > 1:  # a file of a format by its name
        fitting = [one for one in fitting if one.name != TORCH_SAVE.name]
    whole = sorted((one for one in fitting if one.name in _WHOLE), key=lambda one: _WHOLE.index(one.name))
    if len(fitting) > 1 and not whole:
        raise UsageError(
            f"{place} can be read in several ways",
            file=place,
            got=", ".join(reader.name for reader in fitting),
            next_step=f"choose one with {option('format')}",
        )
    reader, *others = (*whole, *(one for one in fitting if one not in whole))
    return SourcePlace(place, reader, tuple((place, other) for other in others))


def _find_others(path: str, found: SourcePlace, listed: Sequence[ListedReader]) -> Iterator[tuple[str, Reader]]:
    """Yield the places in and around a source's folder where the same model may lie in another form, with readers.

    They are folders that a trainer names as parts of the same checkpoint, and files of ``torch.save``.
    """
    if not places.is_folder(found.path) or found.reader.name in (TORCH_SAVE.name, WORKSPACE.name):
        return
    for name in sorted(filter(_PART.fullmatch, places.list_names(found.path))):
        place = os.path.join(found.path, name)
        readers = [own.load() for own in listed if own is not TORCH_SAVE and own.is_hinted_at(place)]
        yield from ((place, reader) for reader in readers if reader.recognise(place) is None)
    folders = [folder for folder in dict.fromkeys((found.path, path)) if places.is_folder(folder)]
    for folder in folders if TORCH_SAVE in listed else []:
        if TORCH_SAVE.is_hinted_at(folder):
            from xrank.readers.torch_save.reader import has_parts, list_models

            if has_parts(folder):
                yield folder, TORCH_SAVE.load()
                continue
            files = [os.path.join(folder, name) for name in list_models(folder)]
            # A folder may hold thousands of files of data.
            yield from ((file, TORCH_SAVE.load()) for file in files[:_MAX_FILES] if places.is_file(file))


def _find_exported(found: Sequence[_Found]) -> SourcePlace | None:
    """Return a whole model that a trainer left in ``huggingface`` beside its own state; None for other sources.

    verl/utils/checkpoint/megatron_checkpoint_manager.py: save_checkpoint writes both.
    """
    exported = [
        (place, readers)
        for place, readers in found
        if os.path.basename(place) == EXPORT_FOLDER and any(reader.name in _WHOLE for reader in readers)
    ]
    states = [(place, readers) for place, readers in found if (place, readers) not in exported]
    parents = {os.path.dirname(place) for place, _ in found}
    if len(exported) != 1 or len(states) != 1 or len(parents) != 1:
        return None
    whole = _choose_reader(*exported[0])
    place, readers = states[0]
    return whole._replace(others=(*whole.others, *((place, reader) for reader in readers)))


def _folders_below(path: str, levels: int) -> Iterator[str]:
    """Yield the folders below one, by name, except hidden ones, such as stages of xrank.

    Folders that a running trainer removes meanwhile are skipped.
    """
    if levels == 0 or not places.is_folder(path):
        return
    try:
        names = sorted(places.list_names(path))
    except FileNotFoundError:
        return
    for name in names:
        # Only root may read the lost+found of a disk, so it would end the search of the folders beside it.
        folder = os.path.join(path, name)
        if not name.startswith(".") and name != "lost+found" and places.is_folder(folder):
            try:
                _check_readable(folder)
            except FileNotFoundError:
                continue
            yield folder
            yield from _folders_below(folder, levels - 1)


def _check_readable(path: str) -> None:
    """Refuse an unreadable folder: it may contain the source, or a second one."""
    if is_url(path) or not places.is_folder(path):  # the store refuses by itself
        return
    try:  # os.access checks the real user, and on a network file system only the server knows
        with os.scandir(path):
            # To list a folder takes the right to read it, to open its files that to enter it: this needs the second.
            os.stat(os.path.join(path, os.curdir))
    except PermissionError:
        raise UsageError(
            f"{path} may not be read by this user",
            file=path,
            next_step="run as its owner, let this user read it, or name the checkpoint's own folder",
        ) from None
