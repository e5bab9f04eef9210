"""Files of a model folder besides weights: configuration, tokenizer, templates, code, license."""

from __future__ import annotations

import filecmp
import os
import re
import stat
from collections.abc import Iterable

from msgspec import Struct

from xrank import system
from xrank.errors import CorruptError, IncompleteError, UnsafeError, UsageError, option
from xrank.storage import places
from xrank.storage.disk import explain_errors
from xrank.storage.entries import check_json_object
from xrank.storage.output_place import ATTESTATION_NAME, MANIFEST_NAME, SIGNATURE_NAME
from xrank.storage.places import hash_file
from xrank.storage.url import is_url

# Weights are listed and not companions: new kinds of companions appear every year.
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data"),
    *(".ot", ".npz", ".tflite", ".distcp", ".lock", ".part"),
)
# model.safetensors.index.json, pytorch_model.bin.index.fp16.json, and NeMo Automodel's two lists in .hf_metadata; not
# just any index: an unknown one may be needed.
_WEIGHT_INDEX = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack)\.index(\.[^.]+)?\.json|fqn_to_(dtype|file_index)_mapping\.json"
)
_OWN = {MANIFEST_NAME, SIGNATURE_NAME, ATTESTATION_NAME}

_WELL_KNOWN = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
    *("image_processor_config.json", "video_preprocessor_config.json"),
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json"),
)

_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


class CompanionFile(Struct, frozen=True):
    """A file to copy byte for byte."""

    name: str
    """Path in the output, with ``/`` between folders."""
    path: str
    """Path of the source; may be a link, like every file of a Hugging Face cache snapshot."""


def list_base_companions(folder: str) -> tuple[CompanionFile, ...]:
    """List every file of a model folder that is neither weights nor hidden, by name.

    Folders inside are included, as for chat templates and code, unless they contain weights: such a folder is another
    model, or a checkpoint. Links to files are followed, links to folders are not; FIFOs, sockets and devices are left
    out.

    UsageError if the path is not a folder, or may not be read; IncompleteError if a companion is a broken link.
    """
    if not places.is_folder(folder):
        next_step = f"give a model folder as {option('base_model')}"
        raise UsageError(f"{folder} is not a folder", file=folder, next_step=next_step)
    return tuple(sorted(_walk(folder, ""), key=lambda companion: companion.name))


def list_source_companions(folder: str) -> tuple[CompanionFile, ...]:
    """List the well-known companions in a checkpoint folder, else in its ``huggingface`` child."""
    return find_companions((folder, os.path.join(folder, "huggingface")))[0]


def find_companions(folders: Iterable[str]) -> tuple[tuple[CompanionFile, ...], tuple[str, ...]]:
    """List the well-known companions in some folders, each from the first that has it, and notes on differing ones.

    IncompleteError if one is a broken link.
    """
    found: dict[str, CompanionFile] = {}
    others = []
    for folder in folders:
        for name in _WELL_KNOWN:
            path = os.path.join(folder, name)
            if name in found:
                first = found[name].path
                if places.is_file(path) and not _is_same(first, path):
                    others.append(f"{first} was used; {path} differs from it")
            elif places.is_present(path) and _is_file(path):
                found[name] = CompanionFile(name, path)
    return tuple(found[name] for name in sorted(found)), tuple(others)


def check_companions(companions: Iterable[CompanionFile]) -> tuple[CompanionFile, ...]:
    """Check that the well-known JSON files among the companions are whole; return all companions.

    Those in Hugging Face's cache are compared with the hashes that they are named by: CorruptError if they differ.
    """
    listed = tuple(companions)
    for companion in listed:
        if companion.name in _WELL_KNOWN and companion.name.endswith(".json"):
            check_json_object(companion.path)
        _check_blob(companion.path)
    return listed


def _check_blob(path: str) -> None:
    # huggingface_hub/utils/_verification.py: names of blobs are SHA-256 for large files, else git's SHA-1.
    if is_url(path):
        return
    folder, name = os.path.split(places.real(path))
    if os.path.basename(folder) != "blobs" or not _BLOB.fullmatch(name):
        return
    with explain_errors(path):
        head = b"blob %d\0" % places.nbytes_of(path)
        found = hash_file(path, "sha1", head=head) if len(name) == 40 else hash_file(path)
    if found.hex() != name:
        what = f"{path} is not the file that was downloaded: its hash is {found.hex()}, not {name} as in the cache"
        next_step = "download the model again, with hf download into another cache"
        raise CorruptError(what, file=path, got=found.hex(), want=name, next_step=next_step)


def find_hub_snapshot(identifier: str, cache: str) -> str:
    """Return the folder of a model in the local Hugging Face cache. Nothing is downloaded.

    UsageError if this is no identifier, or the cache lacks the model; UnsafeError if it names a folder outside itself.
    """
    # The cache writes / as --, so a name with -- would stand for two models.
    if not _IDENTIFIER.fullmatch(identifier) or ".." in identifier or "--" in identifier:
        raise UsageError(
            f"{identifier!r} is neither a folder nor a model's name",
            got=identifier,
            want="organization/name",
            next_step="give the path of a model folder, or a name as on the Hugging Face Hub",
        )
    # huggingface_hub/file_download.py: repo_folder_name, _get_pointer_path
    place = os.path.join(cache, "models--" + identifier.replace("/", "--"))
    reference = os.path.join(place, "refs", "main")
    try:
        with open(os.open(reference, system.READ), "rb") as file:  # of a FIFO, too, it returns at once
            # A name of 255 bytes, a newline, and one more byte by which a longer text is seen to be too long.
            revision = file.read(257).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise _make_cache_error(identifier, place) from None
    except OSError as error:
        next_step = "change its owner or mode, or download the model again with hf download"
        raise UsageError(f"{reference}: {error.strerror}", file=reference, next_step=next_step) from error
    if not _REVISION.fullmatch(revision) or len(revision) > 255:
        raise UnsafeError(
            f"{reference} does not name a snapshot",
            file=reference,
            got=repr(revision),
            want="a commit's hash",
            next_step="download the model again with hf download",
        )
    snapshot = os.path.join(place, "snapshots", revision)
    if not places.is_folder(snapshot):
        raise _make_cache_error(identifier, snapshot)
    return snapshot


def _is_same(first: str, path: str) -> bool:
    if is_url(first) or is_url(path):
        return places.read_content(first) == places.read_content(path)
    return filecmp.cmp(first, path, shallow=False)


def _walk(folder: str, prefix: str) -> list[CompanionFile]:
    found = []
    with explain_errors(folder):
        names = sorted(name for name in places.list_names(folder) if not name.startswith("."))
    for name in names:
        path = os.path.join(folder, name)
        if places.is_file(path) if is_url(path) else os.path.islink(path) or not os.path.isdir(path):
            found += [CompanionFile(prefix + name, path)] if not _is_weight(name) and _is_file(path) else []
            continue
        files = (file for _, _, files in places.walk(path) for file in files)
        holds_weights = any(file.lower().endswith(_WEIGHT_SUFFIXES) for file in files)
        # It would be in the place of a file that xrank writes, and that a signature leaves out.
        if prefix + name in _OWN and not (holds_weights and is_url(path)):
            what = f"{path} is a folder with the name of a file that a gather writes"
            next_step = "give the folder a different name, or copy the model without it"
            want = f"no folder named {prefix}{name}"
            raise UsageError(what, file=path, got="a folder", want=want, next_step=next_step)
        found += [] if holds_weights else _walk(path, f"{prefix}{name}/")
    return found


def _is_weight(name: str) -> bool:
    lower = name.lower()
    return lower.endswith(_WEIGHT_SUFFIXES) or _WEIGHT_INDEX.fullmatch(lower) is not None or name in _OWN


def _is_file(path: str) -> bool:
    if is_url(path):
        return True
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        got = f"a link to {os.readlink(path)!r}" if places.is_link(path) else "nothing"
        next_step = "complete the folder (a download may have been interrupted), or correct the link"
        raise IncompleteError(f"{path} is a broken link", file=path, got=got, next_step=next_step) from None
    except OSError:
        return False  # a link in a circle


def _make_cache_error(identifier: str, place: str) -> UsageError:
    return UsageError(
        f"{identifier} is not in the local Hugging Face cache: no {place}",
        file=place,
        got="nothing there",
        next_step=f"run `hf download {identifier}` where there is a network, or give a folder; xrank downloads nothing",
    )
