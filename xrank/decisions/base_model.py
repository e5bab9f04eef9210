"""The base model a user names: its companions, its config, and the names and shapes the result must have."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xrank.environment import environ, hub_cache
from xrank.errors import ContradictionError, CorruptError, UsageError, either, needs, option
from xrank.formats.pickles import is_extra_state
from xrank.formats.regular_file import open_regular
from xrank.plan.output import OutputTensor
from xrank.readers.hugging_face.folder import HfFolderReader, read_headers
from xrank.recipes.tied_weights import list_unsaved
from xrank.stores import places
from xrank.words import likewise_text, list_text
from xrank.writers.companions import CompanionFile, find_hub_snapshot, list_base_companions

_MAX_CONFIG_NBYTES = 4 << 20
"""As Python's objects up to 160 MB. The largest known have some hundred KB, lists of modules left unquantized."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A model folder that defines the names and shapes of the result."""

    path: str
    companions: tuple[CompanionFile, ...]
    config: Mapping[str, Any] | None
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Name -> (dtype, global shape); empty where the folder holds no safetensors weights."""


def open_base_model(name: str | os.PathLike[str]) -> BaseModel:
    """Open the base model in a folder, or in the local Hugging Face cache where `name` is an ID.

    Raises:
        UsageError: `name` is neither a folder nor in the cache (xrank downloads nothing), or not a model's folder.
        CorruptError, ContradictionError, IncompleteError: its files are damaged or disagree.
    """
    text = places.enter(name)
    if places.is_file(text):
        raise UsageError(
            f"{text} is a file, no base model",
            file=text,
            got="a file",
            want="a model's folder, as from_pretrained takes it",
            next_step=f"give {option('base_model')} the folder that holds it: {os.path.dirname(text) or os.curdir}",
        )
    path = text if places.is_folder(text) else find_hub_snapshot(text, hub_cache(environ()))
    config_path = os.path.join(path, "config.json")
    tensors = {}
    if HfFolderReader().recognise(path) is None:
        found = (tensor for header in read_headers(path) for tensor in header.tensors)
        tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in found if not is_extra_state(tensor.name)}
    config = read_config(config_path) if places.exists(config_path) else None
    tensors = {name: tensor for name, tensor in tensors.items() if name not in list_unsaved(config)}
    if not tensors and config is None:
        raise UsageError(
            f"{path} is no base model: it holds neither safetensors weights nor a config.json",
            file=path,
            got=list_text(sorted(places.list_names(path)), empty="an empty folder"),
            want="a model's folder, as from_pretrained takes it",
            next_step=f"give {option('base_model')} the folder of the model itself",
        )
    return BaseModel(path, list_base_companions(path), config, tensors)


def read_config(path: str) -> Mapping[str, Any]:
    """Read the JSON object in a config.json.

    Raises:
        CorruptError: it is not a JSON object in a regular file, or too large for a model's config.
        IncompleteError, UsageError: the file is missing, or the user may not read it.
    """
    with open_regular(path) as file:
        if file.nbytes > _MAX_CONFIG_NBYTES:
            raise file.origin.corrupt(
                "is too large for a config", got=f"{file.nbytes:,} bytes", want=f"at most {_MAX_CONFIG_NBYTES:,}"
            )
        content = file.read(0, file.nbytes)
    try:
        config = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is no JSON", file=path, got=str(error)[:200], next_step="repair the file") from None
    if not isinstance(config, dict):
        raise CorruptError(f"{path} holds no object", file=path, got=type(config).__name__, next_step="repair the file")
    return config


def check_against(base: BaseModel, outputs: list[OutputTensor], excluded: set[str], tied: set[str]) -> str | None:
    """Check that a result has the base model's names and shapes; return the checked facts as text.

    Args:
        base: the base model.
        outputs: the result's tensors.
        excluded: names left out on purpose.
        tied: names that the result holds under another name.

    Raises:
        ContradictionError: one of the two has a tensor that the other lacks, or a shape differs.
    """
    if not base.tensors:
        return None
    found = {output.name: output for output in outputs}
    missing = [name for name in base.tensors if name not in found and name not in excluded and name not in tied]
    if missing:
        raise ContradictionError(
            f"{missing[0]} is in the base model but not in the source{likewise_text(missing[1:])}",
            tensor=missing[0],
            got=f"{len(found)} tensors",
            want=f"the {len(base.tensors)} tensors of {base.path}",
            next_step=either(
                "name the right base model",
                "give a source that has it too",
                f"leave it out by name with {option('exclude')} if the model works without it, as without a draft head",
                needs("model_or_state_dict", f"leave {option('base_model')} out"),
            ),
        )
    surplus = [name for name in found if name not in base.tensors]
    if surplus:
        raise ContradictionError(
            f"{surplus[0]} is not in the base model{likewise_text(surplus[1:])}",
            tensor=surplus[0],
            got=f"{found[surplus[0]].dtype} {list(found[surplus[0]].shape)}",
            want=f"only the {len(base.tensors)} names of {base.path}",
            next_step=either(
                "name the right base model",
                f"leave the tensor out with {option('exclude')}",
                needs("model_or_state_dict", "leave the tensor out of what is given"),
            ),
        )
    for name, output in found.items():
        shape = base.tensors[name][1]
        if output.shape != shape:
            raise ContradictionError(
                f"{name} has another shape than in the base model",
                tensor=name,
                got=str(list(output.shape)),
                want=f"{list(shape)}, as in {base.path}",
                next_step="name the right base model, or correct the layout",
            )
    return "names and shapes"
