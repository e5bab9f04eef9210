"""Files that hold no model checkpoint of torch, by name and by first bytes: a refusal then names their format.

Sources: gguf-py/gguf/constants.py (GGUF_MAGIC); tensorizer/serialization.py (_TensorizerFile magic);
flax/serialization.py and transformers/utils (FLAX_WEIGHTS_NAME, TF2_WEIGHTS_NAME); the superblock of HDF5;
tensorflow/core/util/tensor_bundle; orbax/checkpoint (_CHECKPOINT_METADATA, manifest.ocdbt).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from xrank.errors import UnknownFormatError, XrankError
from xrank.formats.regular_file import LFS_MAGIC, open_regular
from xrank.readers.hugging_face.rank_parts import ENGINE_PART
from xrank.stores import places
from xrank.words import list_text

_CONVERTED = "give the checkpoint or the Hugging Face folder that was converted into it"
_MAX_OPENED_FILES = 64
_MAX_MAGIC_NBYTES = 64


@dataclass(frozen=True, slots=True)
class _ForeignKind:
    noun: str
    next_step: str
    name: re.Pattern[str] | None = None
    """Names of such files or folders."""
    magic: bytes = b""
    """First bytes of such files."""


_KINDS = (
    _ForeignKind("a GGUF file of llama.cpp", _CONVERTED, re.compile(r".*\.gguf"), b"GGUF"),
    _ForeignKind("a file of tensorizer", _CONVERTED, magic=b"|TZR|"),
    _ForeignKind(
        "a rank's part of a model that an inference engine saved",
        "gather the checkpoint that was trained, or give the Hugging Face folder that the engine loaded",
        ENGINE_PART,
    ),
    _ForeignKind("a pointer of git-lfs in the place of a file", "fetch the files (git lfs pull)", magic=LFS_MAGIC),
    _ForeignKind("a graph of ONNX", _CONVERTED, re.compile(r".*\.onnx(_data|\.data)?")),
    _ForeignKind(
        "a msgpack file of Flax",
        "give the model's safetensors files; transformers 4 makes them (from_pretrained with from_flax=True, then "
        "save_pretrained)",
        re.compile(r".*\.msgpack(\.index\.json)?"),
    ),
    _ForeignKind(
        "a file of TensorFlow or Keras",
        "give the model's safetensors files; transformers 4 makes them of its own models (from_pretrained with "
        "from_tf=True, then save_pretrained)",
        re.compile(r"saved_model\.pb(txt)?|.*\.h5|.*\.data-\d{5}-of-\d{5}|.*\.keras"),
        b"\x89HDF\r\n\x1a\n",
    ),
    _ForeignKind(
        "a part of a checkpoint of Orbax that is not finished, or has no tree of arrays",
        "give another step's folder, or the folder of an item with _METADATA in it",
        re.compile(r"manifest\.ocdbt|ocdbt\.process_\d+|_CHECKPOINT_METADATA|.*\.orbax-checkpoint-tmp.*"),
    ),
)


_SMALL = re.compile(
    r"config\.json|generation_config\.json|(preprocessor|processor)_config\.json|tokenizer.*|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|spiece\.model|chat_template\..*|adapter_config\.json"
)
"""Files beside a model's weights."""


def find_foreign_kind(path: str, folders_below: Iterable[str]) -> UnknownFormatError | None:
    """Return the error that names the format of files which no reader recognises; None if it is unknown here, too.

    Args:
        path: the user's path.
        folders_below: the folders to search besides.
    """
    if _is_empty(path):
        return UnknownFormatError(
            f"{path} contains no file",
            file=path,
            got="an empty folder",
            want="a checkpoint",
            next_step="check the path",
        )
    entries = [path, *(os.path.join(folder, name) for folder in (path, *folders_below) for name in _list(folder))]
    found = [(place, kind) for place in entries if (kind := _kind_of_name(place)) is not None]
    if not found:
        # A folder may hold a million files of data, so that only the first ones are opened.
        files = [place for place in entries if places.is_file(place)][:_MAX_OPENED_FILES]
        found = [(file, kind) for file in files if (kind := _kind_of_content(file)) is not None]
    if not found:
        return _describe_weightless(path, entries)
    file, kind = found[0]
    return UnknownFormatError(
        f"{file} is {kind.noun}, which xrank does not read",
        file=file,
        got=list_text(os.path.relpath(place, path) for place, other in found if other == kind)
        if path != file
        else None,
        want="a checkpoint of a framework on torch, or a Hugging Face folder",
        next_step=kind.next_step,
    )


def _describe_weightless(path: str, entries: Iterable[str]) -> UnknownFormatError | None:
    """Return the error for a folder with small files of a model, and no weights; None for other ones."""
    small = [os.path.relpath(place, path) for place in entries if _SMALL.fullmatch(os.path.basename(place))]
    if not small or not places.is_folder(path):
        return None
    return UnknownFormatError(
        f"{path} contains small files of a model, and no weights",
        file=path,
        got=list_text(small, 4),
        want="a checkpoint, or the model's weights beside them",
        next_step="give the folder with the weights; if this is where they belong, their download or save is not done",
    )


def _is_empty(path: str) -> bool:
    """Return whether a folder holds no file, and no link that may lead to one, at any depth."""
    return places.is_folder(path) and not any(
        files or any(places.is_link(os.path.join(folder, name)) for name in folders)
        for folder, folders, files in places.walk(path)
    )


def _list(folder: str) -> list[str]:
    try:
        return sorted(places.list_names(folder))
    except (NotADirectoryError, FileNotFoundError):  # a file, or a folder that a trainer has just removed
        return []


def _kind_of_name(place: str) -> _ForeignKind | None:
    name = os.path.basename(place)
    return next((kind for kind in _KINDS if kind.name is not None and kind.name.fullmatch(name)), None)


def _kind_of_content(file: str) -> _ForeignKind | None:
    try:
        with open_regular(file) as content:
            start = content.read(0, min(content.nbytes, _MAX_MAGIC_NBYTES))
    except XrankError:
        return None
    return next((kind for kind in _KINDS if kind.magic and start.startswith(kind.magic)), None)
