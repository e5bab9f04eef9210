"""Reads Megatron-core's distributed checkpoints (``torch_dist``).

On disk: ``metadata.json``, which names the format; torch DCP's ``.metadata`` and ``.distcp`` files, with global names
and shapes; ``common.pt`` with the values that are not tensors, such as the run's arguments
(megatron/core/dist_checkpointing/strategies); with ``--verify-integrity``, ``integrity.json``, which lists the SHA-256
of each file (validation.py: save_integrity_manifest). Optimizer, random states and ``_extra_state`` are left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from xrank.errors import AGAIN, ContradictionError
from xrank.formats.dcp_metadata import DcpMetadata, DcpTensor, read_metadata
from xrank.formats.pickles import inert_error
from xrank.formats.torch_archive import read_archive
from xrank.layout.stored_model import RecordedHash, StoredModel
from xrank.readers.base import Faults, Hints
from xrank.readers.dcp import DcpPieces, file_notes, find_other_files, locate, rank_of_file, read_backend
from xrank.readers.megatron.layouts import DECODER, LAYER
from xrank.readers.megatron.run import (
    ParallelSizes,
    check_iteration,
    describe_iteration,
    explain_mismatch,
    parallel_sizes,
    plain_args,
    resolve_folder,
)
from xrank.readers.records import note_bare_files, note_foreign_names, outside_error, read_small, read_start
from xrank.storage import places
from xrank.storage.entries import parse_json
from xrank.storage.regular_file import Origin, quote
from xrank.words import list_text, plural, size_text

_CONFIG, _COMMON, _METADATA, _INTEGRITY = "metadata.json", "common.pt", ".metadata", "integrity.json"
_BACKEND = "torch_dist"
_MAX_CONFIG_NBYTES = 1 << 16
_MAX_INTEGRITY_NBYTES = 1 << 26
# Keys of other saved state: megatron/training/checkpointing.py: generate_state_dict; optimizers' own prefixes.
_LEFT_OUT = re.compile(
    r"(?:optimizer|chained_\d+|(?:.*\.)?rng_state|opt_param_scheduler|rerun_state_machine_state|layer_wise_optimizer_\d+)"
    r"(?:[./].*)?"
)
_LAYER = re.compile(r"(.*\blayers)\.(\d{1,9})\..*")
_HASH = re.compile(r"[0-9a-f]{64}")
_PREFIX = "module."


class MegatronDistReader:
    """The reader of Megatron-core's distributed checkpoints (`xrank.readers.base.Reader`)."""

    name = "megatron-dist"

    def recognize(self, path: str) -> str | None:
        """Return None for a checkpoint's folder, or a folder whose marker names a checkpoint."""
        if places.is_folder(path):
            backend = read_backend(path)
            if backend not in (None, _BACKEND):
                return f"a Megatron checkpoint of the backend {quote(backend)}, not {_BACKEND}"
        return explain_mismatch(path, _holds, f"{_CONFIG} that names {_BACKEND}")

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of a checkpoint lies; errors as in `Reader.read`."""
        return self.read_all(path, hints)[0]

    def read_all(self, path: str, hints: Hints) -> tuple[StoredModel, DcpMetadata]:
        """Return the model, and the metadata of all tensors; errors as in `read`."""
        folder = resolve_folder(path, _holds)
        faults, origin = hints.faults, Origin(os.path.join(folder, _COMMON))
        step = args = sizes = None
        foreign: list[tuple[str, str]] = []
        with faults.losing(os.path.join(folder, _CONFIG)):
            _check_config(os.path.join(folder, _CONFIG))
        with faults.losing(origin.path):
            archive = read_archive(origin.path)
            if not isinstance(archive.value, dict):
                raise inert_error(archive.value, origin)
            foreign = note_foreign_names({origin.path: archive.foreign})
            step = check_iteration(folder, archive.value.get("iteration"), origin.path)
            args = plain_args(archive.value.get("args"), origin)
            sizes = None if args is None else parallel_sizes(args, origin)
        metadata = read_metadata(os.path.join(folder, _METADATA))
        tensors = _model_tensors(metadata)
        with faults.losing():
            _check_layers(tensors, args, metadata.path)
        pieces = locate(folder, metadata, tensors, faults)
        read = [os.path.relpath(file.path, folder) for file in pieces.files]
        hashes: tuple[RecordedHash, ...] = ()
        hash_notes: list[tuple[str, str]] = []
        with faults.losing(os.path.join(folder, _INTEGRITY)):
            hashes, hash_notes = _read_hashes(folder, [_CONFIG, _COMMON, _METADATA, *read], faults)
        kept_nbytes = sum(int(tensor.nbytes.sum()) for tensor in tensors.values())
        ranks = sorted({rank for name in metadata.files if (rank := rank_of_file(name)) is not None})
        world = sizes.world if sizes is not None and sizes.world else ranks[-1] + 1 if ranks else None
        notes = _notes(folder, metadata, tensors, pieces, args, faults)
        model = StoredModel(
            format=self.name,
            path=path,
            files=pieces.files,
            records=pieces.records,
            shards=pieces.shards,
            world_size=world,
            step=step,
            args=args,
            nbytes=int(pieces.records.nbytes.sum()),
            skipped_nbytes=metadata.nbytes - kept_nbytes,
            notes=(*foreign, *notes, *hash_notes),
            hashes=hashes,
            details=_details(folder, metadata, tensors, args, sizes),
        )
        return model, metadata


def _holds(path: str) -> bool:
    """Return whether a folder is such a checkpoint, possibly with a missing file."""
    if read_backend(path) == _BACKEND:
        return True
    common, *shards = (places.is_present(os.path.join(path, name)) for name in (_COMMON, _METADATA, "__0_0.distcp"))
    return common and any(shards)


def _check_config(path: str) -> None:
    # megatron/core/dist_checkpointing/core.py: CheckpointingConfig.
    origin = Origin(path)
    try:
        content: Any = json.loads(read_start(path, _MAX_CONFIG_NBYTES))
    except (ValueError, RecursionError) as error:
        raise origin.corrupt("is not JSON", quote(str(error)), "a JSON object") from None
    if not isinstance(content, dict) or "sharded_backend" not in content:
        raise origin.corrupt("does not name the checkpoint's format", want='an object with "sharded_backend"')
    version, common = content.get("sharded_backend_version", 1), content.get("common_backend", "torch")
    found = (content["sharded_backend"], version, common)
    if found != (_BACKEND, 1, "torch"):
        problem = "names a Megatron format that is not supported"
        want = f"{_BACKEND}, version 1, with {_COMMON}"
        raise origin.usage(problem, quote(str(found)), want, f"save with --ckpt-format {_BACKEND}")


def _read_hashes(
    folder: str, read: Sequence[str], faults: Faults
) -> tuple[tuple[RecordedHash, ...], list[tuple[str, str]]]:
    """Return the hashes that ``integrity.json`` records, if it is there, and notes on files that it does not list."""
    path = os.path.join(folder, _INTEGRITY)
    if not places.is_present(path):
        return (), []
    origin, text = Origin(path), read_small(path, _MAX_INTEGRITY_NBYTES)
    try:
        content = parse_json(text)
        algorithm, listed = content.get("algorithm", "sha256"), content["files"].items()
        digests = {name: _HASH.fullmatch(digest) for name, digest in listed}
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        got = f"{type(error).__name__}: {quote(str(error))}"
        raise origin.corrupt("is not a list of hashes", got, "algorithm, and files with hashes") from None
    if algorithm != "sha256":
        step = "use a version of xrank that supports it, or save the checkpoint with sha256"
        problem = "lists hashes of an algorithm that is not supported"
        raise origin.usage(problem, quote(str(algorithm)), "sha256", step)
    for name, digest in digests.items():
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise outside_error(path, name, "list of hashes")
        if digest is None:
            raise origin.corrupt(f"has no SHA-256 of {quote(name)}", want="64 hexadecimal digits")
    missing = sorted(name for name in digests if not places.is_present(os.path.join(folder, name)))
    for name in missing:
        absence = Origin(os.path.join(folder, name)).incomplete(
            f"is missing, and {_INTEGRITY} lists it",
            f"{len(missing)} missing: {list_text(missing)}",
            f"the {plural(len(digests), 'file')} that {_INTEGRITY} lists",
            f"copy the checkpoint whole from where it was written, then {AGAIN}",
        )
        if os.path.join(folder, name) not in faults.files:
            faults.lose(absence, os.path.join(folder, name))
    unlisted = sorted(name for name in places.list_names(folder) if name not in digests and name != _INTEGRITY)
    surplus = next((name for name in read if name not in digests), None)
    if surplus is not None:
        raise Origin(os.path.join(folder, surplus)).contradiction(
            f"holds a part of the model, and {_INTEGRITY} does not list it",
            f"{plural(len(digests), 'file')} in {_INTEGRITY}",
            "the hash of each file of the checkpoint",
            f"copy the checkpoint again with its own {_INTEGRITY}: the two belong to different saves",
        )
    notes = []
    if unlisted:
        names = list_text([quote(name)[1:-1] for name in unlisted], 3)
        notes.append(("unlisted-files", f"{_INTEGRITY} does not list {names}; no part of the model is read from there"))
    hashes = [
        RecordedHash(os.path.join(folder, name), algorithm, bytes.fromhex(digest[0]), path)
        for name, digest in digests.items()
        if digest is not None and os.path.join(folder, name) not in faults.files
    ]
    return tuple(hashes), notes


def _model_tensors(metadata: DcpMetadata) -> Mapping[str, DcpTensor]:
    kept = {name: tensor for name, tensor in metadata.tensors.items() if not _LEFT_OUT.fullmatch(name)}
    if not kept:
        raise Origin(metadata.path).usage(
            "this checkpoint contains no model",
            list_text(sorted(quote(name)[1:-1] for name in metadata.tensors), empty="no tensor at all"),
            "tensors that are not an optimizer's",
            "give the path of a checkpoint that was saved with its model",
        )
    # NeMo saves the wrapped module.
    is_wrapped = all(name.startswith(_PREFIX) for name in kept)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in kept.items()} if is_wrapped else kept


def _check_layers(tensors: Mapping[str, DcpTensor], args: Mapping[str, Any] | None, path: str) -> None:
    """Check that all layers of the decoder are present, as numbers in names or as a leading dim."""
    count = (args or {}).get("num_layers")
    if type(count) is not int or count < 1:
        return
    # A stage that wrote nothing leaves metadata that are complete in themselves, without its layers.
    numbered = {int(found[1]) for name in tensors if (found := LAYER.fullmatch(name))}
    stack = next((found[0] for name in tensors if (found := DECODER.match(name))), "decoder.layers")
    if numbered:
        missing = next((layer for layer in range(count) if layer not in numbered), None)
        if missing is not None:
            raise Origin(path).contradiction(
                f"lists nothing of {stack}.{missing}",
                f"{len(numbered)} layers",
                f"{count}, as in args.num_layers",
                "use a checkpoint with a finished save; in this one a pipeline stage wrote nothing",
                tensor=f"{stack}.{missing}",
            )
        if max(numbered) >= count:
            raise _layer_error(f"{stack}.{max(numbered)}", str(max(numbered) + 1), count, path)
    for name, tensor in tensors.items():
        if name.startswith(f"{stack}.") and not _LAYER.fullmatch(name) and tensor.shape[:1] != (count,):
            raise _layer_error(name, f"shape {list(tensor.shape)}", count, path)


def _layer_error(name: str, got: str, count: int, path: str) -> ContradictionError:
    return Origin(path).contradiction(
        f"{name} does not fit the number of layers in {_COMMON}",
        got,
        f"{count} layers, as in args.num_layers",
        f"copy the checkpoint again: .metadata and {_COMMON} belong to two models",
        tensor=name,
    )


def _notes(
    folder: str,
    metadata: DcpMetadata,
    tensors: Mapping[str, DcpTensor],
    pieces: DcpPieces,
    args: object,
    faults: Faults,
) -> tuple[tuple[str, str], ...]:
    notes = file_notes(folder, metadata, find_other_files(folder, metadata)[0], faults)
    left = len(metadata.tensors) - len(tensors)
    if left:
        notes.append(("left-out", f"{left:,} tensors of the optimizer and the like were left out"))
    extra = sum("_extra_state" in name for name in metadata.byte_items)
    if extra:
        notes.append(("extra-state", f"{extra:,} _extra_state objects (Transformer Engine's own) were left out"))
    others = sorted(n for n in metadata.byte_items if "_extra_state" not in n and not _LEFT_OUT.fullmatch(n))
    if others:
        text = list_text([quote(name)[1:-1] for name in others], 3)
        notes.append(("byte-items", f"{len(others):,} values that are not tensors were left out: {text}"))
    notes += note_bare_files(pieces.unchecked)
    if args is None:
        notes.append(("no-args", f"{_COMMON} holds no args: sizes must come from a config.json or a base model"))
    return tuple(notes)


def _details(
    folder: str,
    metadata: DcpMetadata,
    tensors: Mapping[str, DcpTensor],
    args: Mapping[str, Any] | None,
    sizes: ParallelSizes | None,
) -> dict[str, Any]:
    known = args or {}
    vocab_size = known.get("vocab_size")
    true = "the number of rows without padding is not recorded" if vocab_size is None else f"{vocab_size} true"
    num_rows = next((t.shape[0] for n, t in tensors.items() if n.endswith("word_embeddings.weight") and t.shape), None)
    left = [tensor for name, tensor in metadata.tensors.items() if _LEFT_OUT.fullmatch(name)]
    size = size_text(sum(int(tensor.nbytes.sum()) for tensor in left))
    experts = re.compile(r".*experts\..*(?:local_experts\.\d+\..*|weight\d+|bias\d+)")
    return {
        **describe_iteration(folder),
        "parallel": None if sizes is None else str(sizes),
        "layers": _form(tensors, _LAYER, "decoder.layers."),
        "experts": _form(tensors, experts, ".experts."),
        "vocabulary": None if num_rows is None else f"{num_rows} rows stored, {true}",
        "optimizer": f"{plural(len(left), 'tensor')} left out, {size}" if left else None,
    }


def _form(tensors: Mapping[str, DcpTensor], numbered: re.Pattern[str], part: str) -> str:
    names: Sequence[str] = [name for name in tensors if part in f".{name}"]
    if not names:
        return "none"
    count = sum(numbered.fullmatch(name) is not None for name in names)
    return "numbered in names" if count == len(names) else "the first dim of each tensor" if not count else "both ways"
