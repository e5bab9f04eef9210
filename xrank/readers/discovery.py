"""Finds the source that a user's path means, at it, just above it or below it, and the reader that fits."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from xrank.errors import IncompleteError, UnknownFormatError, UsageError, XrankError, option
from xrank.formats.deltas import version_name, version_of
from xrank.layout.stored_model import StoredModel
from xrank.readers.base import Hints, Reader
from xrank.readers.records import ENGINE_PART, EXPORT_FOLDER, read_start
from xrank.storage import places
from xrank.storage.regular_file import LFS_MAGIC, Origin, quote
from xrank.storage.url import is_url
from xrank.words import list_text, one_line, plural

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def _list(path: str, otherwise: Sequence[str] = ()) -> Sequence[str]:
    try:
        return places.list_names(path)
    except (NotADirectoryError, FileNotFoundError):  # a file, or a folder that a trainer has just removed
        return otherwise


class ListedReader(Struct, frozen=True):
    """A reader's place, and the file names that hint at its format."""

    name: str
    """The format."""
    sign: str
    """A regular expression. A folder of this format has an entry with a matching name; a single file matches itself."""
    module: str
    """Name below `xrank.readers`."""
    class_name: str

    def is_hinted_at(self, path: str) -> bool:
        """Return whether the reader may recognize a path."""
        return any(map(re.compile(self.sign).fullmatch, _list(path, [os.path.basename(path)])))

    def load(self) -> Reader:
        """Import the reader."""
        reader: Reader = getattr(import_module(f"xrank.readers.{self.module}"), self.class_name)()
        return reader


WORKSPACE = ListedReader("workspace", r"rank_.*_state\.pth", "workspace", "WorkspaceReader")
TORCH_SAVE = ListedReader("torch-save", r".*\.(pt|pth|ckpt|th|bin|tar)", "torch_save", "TorchSaveReader")
OWN_READERS = (
    WORKSPACE,
    ListedReader("safetensors", r".*\.safetensors(\.index\.json)?", "deltas", "VersionReader"),
    ListedReader("hf-shards", r"shard-.*\.safetensors|sharded", "hugging_face.shards", "HfShardsReader"),
    ListedReader("vllm", r"model-(rank|pp)-.*\.safetensors", "vllm", "VllmReader"),
    ListedReader(
        "bin", r"(diffusion_)?pytorch_model.*\.bin|(ft-)?model-\d{5}-of-\d{5}\.bin", "torch_save", "BinFolderReader"
    ),
    ListedReader("dcp", r"\.metadata|.*\.distcp", "dcp", "DcpReader"),
    ListedReader(
        "megatron-dist",
        r"metadata\.json|common\.pt|latest_checkpointed_iteration\.txt",
        "megatron.dist",
        "MegatronDistReader",
    ),
    ListedReader(
        "megatron-legacy", r"mp_rank_.*|latest_checkpointed_iteration\.txt", "megatron.legacy", "MegatronLegacyReader"
    ),
    ListedReader("deepspeed", r".*_states\.pt|latest|latest_universal", "deepspeed.reader", "DeepSpeedReader"),
    ListedReader("verl", r"model_world_size_.*\.pt", "fsdp.reader", "VerlReader"),
    ListedReader(
        "torch-checkpointing",
        r"metadata\.pkl|(?!model_world_size_).+_\d+\.(pt|safetensors)",
        "torch_checkpointing",
        "TorchCheckpointingReader",
    ),
    ListedReader(
        "orbax",
        r"_METADATA|_CHECKPOINT_METADATA|_sharding|array_metadatas|manifest\.ocdbt|ocdbt\.process_\d+",
        "orbax",
        "OrbaxReader",
    ),
    ListedReader("accelerate-ranks", r"pytorch_model_fsdp.*rank.*\.bin", "fsdp.reader", "AccelerateRanksReader"),
    TORCH_SAVE,
)
"""In the order in which they are tried, before the readers of other packages."""


GROUP = "xrank.readers"

_logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def plugin_readers() -> tuple[Reader, ...]:
    """Return the readers of installed packages; a reader that fails to load becomes a warning with its package's name.

    The search reads the metadata of every installed package. So it happens once, and only if no own reader fits.
    """
    found: list[Reader] = []
    for package, point, reader, fault in _load_all():
        if reader is not None:
            found.append(reader)
        else:
            _logger.warning("the reader %s of the package %s fails to load: %s", point.name, package, fault)
    return tuple(found)


def find_plugins() -> list[tuple[str, str, str | None]]:
    """Return (package, reader, why it does not load) for each reader of another package, sorted."""
    return sorted((package, point.name, fault) for package, point, _, fault in _load_all())


def _load_all() -> Iterator[tuple[str, EntryPoint, Reader | None, str | None]]:
    """Yield (package, entry point, reader, None); for a reader that does not load, None and the reason in one line."""
    from importlib.metadata import entry_points  # slow, because it imports the email package

    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist is not None else point.module
        try:
            made = point.load()
            reader: Reader = made() if isinstance(made, type) else made
            for name in ("name", "recognize", "read"):
                if not hasattr(reader, name):
                    raise TypeError(f"{point.value} lacks {name!r}, which a reader needs")
            if not isinstance(reader.name, str):
                raise TypeError(f"the name of {point.value} is {reader.name!r}, not a text")
            yield package, point, _PluginReader(reader, package), None
        except Exception as error:  # another package's code may raise anything
            yield package, point, None, one_line(f"{type(error).__name__}: {error}")


class _PluginReader:
    """Another package's reader, whose failures name that package."""

    def __init__(self, reader: Reader, package: str) -> None:
        self.name = reader.name
        self._reader, self._package = reader, package

    def recognize(self, path: str) -> str | None:
        """Return what the reader returns; a failure counts as a reason why not."""
        try:
            reason: object = self._reader.recognize(path)
        except XrankError:
            raise
        except Exception as error:  # another package's code may raise anything
            return self._describe(error)
        return reason if reason is None or isinstance(reason, str) else f"{self.name}: {reason!r}"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return what the reader returns."""
        try:
            model: object = self._reader.read(path, hints)
            if not isinstance(model, StoredModel):
                raise TypeError(f"read returned {type(model).__name__}, not StoredModel")
            return model
        except XrankError:
            raise
        except Exception as error:
            kind: type[XrankError] = XrankError
            next_step = f"report it to the authors of {self._package}, with its traceback"
            if isinstance(error, FileNotFoundError):
                kind, next_step = IncompleteError, "copy the missing file"
            elif isinstance(error, PermissionError):
                kind, next_step = UsageError, "run as its owner, or let this user read it"
            raise kind(f"{path} cannot be read: {self._describe(error)}", file=path, next_step=next_step) from error

    def _describe(self, error: Exception) -> str:
        failure = one_line(f"{type(error).__name__}: {error}")
        return f"the reader {self.name} of the package {self._package} failed: {failure}"


# verl/utils/checkpoint/checkpoint_manager.py: get_checkpoint_tracker_filename; skyrl_train/trainer.py.
_MARKERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
_STEP_NAME = re.compile(r"global_step_\d{1,18}", re.ASCII)
_MAX_NBYTES = 64


def find_marked_step(path: str) -> str | None:
    """Return the folder that a marker names; None without such folders or a marker."""
    entries = places.list_names(path) if places.is_folder(path) else []
    steps = sorted((e for e in entries if _STEP_NAME.fullmatch(e)), key=lambda entry: int(entry[12:]))
    # Megatron has a marker of the same name, beside folders with other names.
    marker = next((os.path.join(path, name) for name in _MARKERS if name in entries), None)
    if not steps or marker is None:
        return None
    text = read_start(marker, _MAX_NBYTES).decode("latin1").strip()
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise Origin(marker).corrupt("is not a step marker", quote(text), "a number")
    folder = os.path.join(path, f"global_step_{int(text)}")
    if not places.is_folder(folder):
        want = f"global_step_{int(text)}"
        next_step = "copy that folder here, or give the path of the step's folder that you want"
        raise Origin(marker).incomplete(f"names {want}, which is missing", ", ".join(steps[-5:]), want, next_step)
    return folder


_CONVERTED = "give the checkpoint or the Hugging Face folder that was converted into it"
_MAX_OPENED_FILES = 64
_MAX_MAGIC_NBYTES = 64


class _ForeignKind(Struct, frozen=True):
    noun: str
    next_step: str
    name: str | None = None
    """Names of such files or folders, as a regular expression."""
    magic: bytes = b""
    """First bytes of such files."""


_KINDS = (
    _ForeignKind("a GGUF file of llama.cpp", _CONVERTED, r".*\.gguf", b"GGUF"),
    _ForeignKind("a file of tensorizer", _CONVERTED, magic=b"|TZR|"),
    _ForeignKind(
        "a rank's part of a model that an inference engine saved",
        "gather the checkpoint that was trained, or give the Hugging Face folder that the engine loaded",
        ENGINE_PART,
    ),
    _ForeignKind("a git-lfs pointer instead of a file", "fetch the files (git lfs pull)", magic=LFS_MAGIC),
    _ForeignKind("a graph of ONNX", _CONVERTED, r".*\.onnx(_data|\.data)?"),
    _ForeignKind(
        "a msgpack file of Flax",
        "give the model's safetensors files; transformers 4 makes them (from_pretrained with from_flax=True, then "
        "save_pretrained)",
        r".*\.msgpack(\.index\.json)?",
    ),
    _ForeignKind(
        "a file of TensorFlow or Keras",
        "give the model's safetensors files; transformers 4 makes them of its own models (from_pretrained with "
        "from_tf=True, then save_pretrained)",
        r"saved_model\.pb(txt)?|.*\.h5|.*\.data-\d{5}-of-\d{5}|.*\.keras",
        b"\x89HDF\r\n\x1a\n",
    ),
    _ForeignKind(
        "a part of a checkpoint of Orbax that is not finished, or has no tree of arrays",
        "give another step's folder, or the folder of an item with _METADATA in it",
        r"manifest\.ocdbt|ocdbt\.process_\d+|_CHECKPOINT_METADATA|.*\.orbax-checkpoint-tmp.*",
    ),
)


_SMALL = (
    r"config\.json|generation_config\.json|(preprocessor|processor)_config\.json|tokenizer.*|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|spiece\.model|chat_template\..*|adapter_config\.json"
)
"""Files beside a model's weights."""


def find_foreign_kind(path: str, folders_below: Iterable[str]) -> UnknownFormatError | None:
    """Return the error that names the format of files which no reader recognizes; None if it is unknown here, too."""
    is_folder = places.is_folder(path)
    # A link may lead to a file.
    if is_folder and not any(
        files or any(places.is_link(os.path.join(folder, name)) for name in folders)
        for folder, folders, files in places.walk(path)
    ):
        return UnknownFormatError(
            f"{path} contains no file",
            file=path,
            got="an empty folder",
            want="a checkpoint",
            next_step="check the path",
        )
    entries = [path, *(os.path.join(at, name) for at in (path, *folders_below) for name in sorted(_list(at)))]
    names = [(place, os.path.basename(place)) for place in entries]
    kinds = [(kind, re.compile(kind.name).fullmatch) for kind in _KINDS if kind.name]
    found = [(place, kind) for place, name in names for kind, fits in kinds if fits(name)]
    if not found:
        # A folder may hold a million files of data, so that only the first ones are opened.
        for file in [place for place in entries if places.is_file(place)][:_MAX_OPENED_FILES]:
            with suppress(XrankError):
                start = read_start(file, _MAX_MAGIC_NBYTES)
                found += ((file, kind) for kind in _KINDS if kind.magic and start.startswith(kind.magic))
    if found:
        file, kind = found[0]
        alike = list_text(os.path.relpath(place, path) for place, other in found if other == kind)
        return UnknownFormatError(
            f"{file} is {kind.noun}, which xrank does not read",
            file=file,
            got=alike if path != file else None,
            want="a checkpoint of a framework on torch, or a Hugging Face folder",
            next_step=kind.next_step,
        )
    small = [os.path.relpath(place, path) for place, name in names if re.fullmatch(_SMALL, name)]
    if not small or not is_folder:
        return None
    return UnknownFormatError(
        f"{path} contains small files of a model, but no weights",
        file=path,
        got=list_text(small, 4),
        want="a checkpoint, or the model's weights in the same folder",
        next_step="give the folder with the weights; if they belong here, their download or save was not completed",
    )


_SEARCHED_LEVELS = 2
_UNFINISHED = r"(^|/)tmp-|[.-]tmp(\.|-\d+|$|/)"
"""Paths of folders that a save renames once it has finished.

transformers 4.37, trainer.py: ``tmp-checkpoint-500``; orbax/checkpoint/_src/path/atomicity.py:
``5.orbax-checkpoint-tmp``.
"""
_STEP = re.compile(r"checkpoint-(\d+)")
# accelerate/utils/fsdp_utils.py: save_fsdp_model; torch/distributed/checkpoint/_hf_utils.py: SHARDED_DIR_NAME;
# verl/utils/checkpoint/checkpoint_manager.py: get_dist_checkpoint_path.
_PART = re.compile(r"pytorch_model_fsdp(_0)?|sharded|dist_ckpt")
"""Folders beside a whole model that hold the same checkpoint in shards."""
_STAGE = r"(?i)(^|[/_.-])(pp|pipe|pipeline|stage|part)([_.-]?(rank|stage))?[_.-]?\d+(/|$)"
"""Paths of folders that may each hold a stage of a pipeline. Steps of training may be called so, too."""
_MAX_FILES = 16
"""Files of ``torch.save`` beside a source that are looked at."""
_MANIFEST = "xrank_manifest.json"  # in outputs: writers/output_place.py
_WHOLE = ("safetensors", "bin")
"""Formats of a whole model, best first: a trainer that saves one beside its sharded state saves the same values."""


class SourcePlace(NamedTuple):
    """Where a source lies, and the readers that recognize it."""

    path: str
    reader: Reader
    """The best reader."""
    others: tuple[tuple[str, Reader], ...] = ()
    """Further places with their readers, best first: the same model may lie there in several forms."""
    notes: tuple[tuple[str, str], ...] = ()
    """Notes on other checkpoints that lie there."""


_Found = tuple[str, list[Reader]]
"""A place, and the readers that recognize it."""


def find_source(path: str, *, format_name: str | None = None) -> SourcePlace:
    """Return the source that a path means and the readers that recognize it.

    The path itself comes first; a state file stands for its folder. A folder of unknown format is searched two levels
    down, or only in the step that its marker names. Outputs of xrank below the path are skipped. If several sources
    fit, the user must choose. If several readers fit one source, readers of whole models come first; without one, the
    user must choose.
    """
    path = places.enter(path)
    if not places.exists(path):
        raise Origin(path).incomplete("does not exist", next_step="check the path")
    _check_readable(path)
    listed = [own for own in OWN_READERS if format_name in (None, own.name)]
    newest = _find_newest(path) if any(own.name in _WHOLE for own in listed) else None
    if newest is not None:
        return newest
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
            next_step=f"omit {option('format')}: formats are recognized automatically",
        )
    if format_name is not None:
        raise UnknownFormatError(
            f"{path} is not of the format {format_name}: {readers[0].recognize(path)}",
            file=path,
            next_step=f"check the path, or omit {option('format')}: formats are recognized automatically",
        )
    raise _unknown_format_error(path, listed, readers)


def _find_newest(path: str) -> SourcePlace | None:
    """Return the newest version in a folder of versions of weights; None for another folder."""
    if not any(version_of(name) is not None for name in _list(path)):
        return None
    from xrank.readers.deltas import list_versions  # few folders contain any

    versions = list_versions(path)
    reader = next(own for own in OWN_READERS if own.name in _WHOLE).load()
    if not versions or reader.recognize(path) is None:
        return None
    number = max(versions)
    note = f"the newest of {plural(len(versions), 'version')} in {path} is read: {version_name(number)}"
    return SourcePlace(versions[number], reader, notes=(("newest-version", note),))


def _unknown_format_error(path: str, listed: Sequence[ListedReader], readers: Sequence[Reader]) -> UnknownFormatError:
    """Return the error for a path that no reader recognizes, with the reasons of likely ones."""
    unseen = [own.name for own in listed if not own.is_hinted_at(path)]
    reasons = [f"{reader.name}: {reader.recognize(path)}" for reader in readers if reader.name not in unseen]
    below = list(_folders_below(path, _SEARCHED_LEVELS))
    foreign = find_foreign_kind(path, below)
    if foreign is not None:
        foreign.about(got="; ".join(reasons))
        return foreign
    if unseen:
        reasons.append(f"none of {', '.join(unseen)} matches")
    made = [place for place in below if _is_made_here(place)]
    return UnknownFormatError(
        f"{path} has no known format",
        file=path,
        got="; ".join([*reasons, *(f"{place}, which xrank made" for place in made[:1])]),
        want="a checkpoint, a workspace or a model at the path, or up to two folders below",
        next_step=f"check the path, or give {made[0]} itself" if made else "check the path",
    )


def _search(path: str, readers_for: Callable[[str], Sequence[Reader]]) -> SourcePlace | None:
    """Return the one source that a path means, and its readers; None if none fits."""
    for place in (path, *([os.path.dirname(places.absolute(path))] if places.is_file(path) else [])):
        fitting = [reader for reader in readers_for(place) if reader.recognize(place) is None]
        if fitting:
            chosen = _choose_reader(place, fitting)
            # Checkpoints of a trainer in the folder of a whole model may be newer than it
            # (transformers/trainer_utils.py: PREFIX_CHECKPOINT_DIR).
            names = places.list_names(place) if chosen.reader.name in _WHOLE and places.is_folder(place) else []
            steps = sorted((int(step[1]), step[0]) for name in names if (step := _STEP.fullmatch(name)))
            newest = list_text((os.path.join(place, name) for _, name in reversed(steps)), 1)
            note = f"the model in {place} itself is read; the folder also contains checkpoints: {newest}"
            return chosen._replace(notes=(("also-here", note),) if steps else ())
    found: list[_Found] = []
    passed: str | None = None
    for place in _folders_below(find_marked_step(path) or path, _SEARCHED_LEVELS):
        # Folders below a source are parts of it, such as the folder that its marker names.
        if passed is not None and place.startswith(passed + os.sep):
            continue
        if _is_made_here(place):
            passed = place
            continue
        fitting = [reader for reader in readers_for(place) if reader.recognize(place) is None]
        if fitting:
            found.append((place, fitting))
            passed = place
    # A trainer's "latest" may be a link to one of its steps.
    own = {places.real(place) for place, _ in found if not places.is_link(place)}
    found = [one for one in found if not places.is_link(one[0]) or places.real(one[0]) not in own]
    exported = _find_exported(found)
    if exported is not None:
        return exported
    begun = [place for place, _ in found if re.search(_UNFINISHED, os.path.relpath(place, path))]
    if 0 < len(begun) < len(found):
        found = [(place, fitting) for place, fitting in found if place not in begun]
    if len(found) > 1:
        paths = " or ".join(place for place, _ in found[:10])
        raise UsageError(
            f"{path} contains several sources",
            file=path,
            got=list_text((f"{place} ({fitting[0].name})" for place, fitting in found), 10),
            want="one",
            # diffusers/pipelines/pipeline_utils.py: DiffusionPipeline.config_name.
            next_step=f"gather each component separately: give {paths} as the path"
            if places.is_file(os.path.join(path, "model_index.json"))
            else "if each is a stage of one model, gather each separately, put the outputs into one folder as "
            f"model-00001-of-{len(found):05d}.safetensors and so on, and gather that folder; if each is a whole model, "
            "give the path of one of them"
            if all(re.search(_STAGE, os.path.relpath(place, path)) for place, _ in found)
            else "give the path of one of them",
        )
    if not found:
        return None
    doubt = "passed over" if found[0][0] not in begun else "read all the same"
    note = f"a save with a name that suggests that it did not finish was {doubt}: {list_text(begun, 3)}"
    return _choose_reader(*found[0])._replace(notes=(("unfinished", note),) if begun else ())


def _may_read(own: ListedReader, place: str, listed: Sequence[ListedReader]) -> bool:
    if own is not TORCH_SAVE:
        return own.is_hinted_at(place)
    # torch.save writes files under any name, those of ranks among them; a rank's file stands for its folder.
    folder = os.path.dirname(places.absolute(place))
    others = (other for other in listed if other is not TORCH_SAVE and other.is_hinted_at(place))
    return places.is_file(place) and not any(other.load().recognize(folder) is None for other in others)


def _is_made_here(place: str) -> bool:
    """Return whether a folder is the output of a gather or reshard; such a folder often lies beside the checkpoints."""
    return places.is_file(os.path.join(place, _MANIFEST))


def _choose_reader(place: str, fitting: Sequence[Reader]) -> SourcePlace:
    if len(fitting) > 1:  # a file of a format by its name
        fitting = [one for one in fitting if one.name != TORCH_SAVE.name]
    whole = sorted((one for one in fitting if one.name in _WHOLE), key=lambda one: _WHOLE.index(one.name))
    if len(fitting) > 1 and not whole:
        raise Origin(place).usage(
            "can be read in several ways",
            ", ".join(reader.name for reader in fitting),
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
        yield from ((place, reader) for reader in readers if reader.recognize(place) is None)
    folders = [folder for folder in dict.fromkeys((found.path, path)) if places.is_folder(folder)]
    for folder in folders if TORCH_SAVE in listed else []:
        if TORCH_SAVE.is_hinted_at(folder):
            from xrank.readers.torch_save import has_parts, list_models

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
    if len(exported) != 1 or len(found) != 2 or len({os.path.dirname(place) for place, _ in found}) != 1:
        return None
    whole = _choose_reader(*exported[0])
    ((place, readers),) = [one for one in found if one not in exported]
    return whole._replace(others=(*whole.others, *((place, reader) for reader in readers)))


def _folders_below(path: str, levels: int) -> Iterator[str]:
    """Yield the folders below one, by name, except hidden ones, such as stages of xrank.

    Folders that a running trainer removes meanwhile are skipped.
    """
    if levels == 0 or not places.is_folder(path):
        return
    for name in sorted(_list(path)):
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
        raise Origin(path).usage(
            "may not be read by this user",
            next_step="run as its owner, let this user read it, or give the checkpoint's own folder",
        ) from None
