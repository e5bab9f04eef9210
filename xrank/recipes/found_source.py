"""A source with its config and small files, the base model that a user names, and the config of a live module."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from xrank.engine.companions import CompanionFile
from xrank.errors import CorruptError, UsageError
from xrank.layout.stored_model import StoredModel
from xrank.storage.entries import Entry, plain_config
from xrank.storage.regular_file import open_regular

if TYPE_CHECKING:
    import torch


_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "module")
"""Attributes in which wrappers keep the inner module: torch.compile's, FSDP1's; DistributedDataParallel's etc."""


class OwnConfig(Struct, frozen=True):
    """The configuration that a model carries; all fields are empty if it is not a transformers module."""

    config: Mapping[str, Any] | None = None
    generation_text: str | None = None
    adapter_text: str | None = None
    """Text of PEFT's adapter_config.json for the active adapter."""
    unsaved: tuple[str, ...] = ()
    """Names of tensors that `save_pretrained` leaves out."""
    tied: tuple[str, ...] = ()
    """Patterns of names that `save_pretrained` leaves out where another name has the same tensor."""
    conversions: tuple[str, ...] | None = None
    """The conversions that `save_pretrained` would undo: patterns, one per line; None if the module does not show them.
    """
    is_loaded: bool = False
    """Whether `from_pretrained` used those conversions; otherwise they are all that transformers has for the class."""

    @classmethod
    def from_entry(cls, fields: Entry) -> OwnConfig:
        """Return the config of a rank, whose fields have passed through JSON, which turns tuples into lists."""
        names = ("config", "generation_text", "adapter_text", "conversions")
        config, generation, adapter, conversions = map(fields.get, names)
        if adapter is not None:
            adapter.json().table()
        return cls(
            None if config is None else config.table(),
            None if generation is None else generation.text(),
            None if adapter is None else adapter.text(),
            fields["unsaved"].texts(),
            fields["tied"].texts(),
            None if conversions is None else conversions.texts(),
            fields["is_loaded"].flag(),
        )


def choose_config(ranks: Sequence[OwnConfig]) -> tuple[OwnConfig, dict[int, OwnConfig]]:
    """Return the first config that is not empty, and by position the others that differ from it.

    Ranks of a pipeline may lack the config.
    """
    held = {position: config for position, config in enumerate(ranks) if config != OwnConfig()}
    own = next(iter(held.values()), OwnConfig())
    return own, {position: config for position, config in held.items() if config != own}


def read_own_config(model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any]) -> OwnConfig:
    """Return the configuration that a transformers module carries; an empty one for any other object."""
    module = _find_model(_unwrap(model))
    adapter_text = None
    if callable(getattr(module, "get_base_model", None)) and isinstance(getattr(module, "peft_config", None), Mapping):
        # As PEFT writes it (peft/config.py: save_pretrained).
        values = {
            key: sorted(value) if isinstance(value, set | frozenset) else value
            for key, value in module.peft_config[module.active_adapter].to_dict().items()
        }
        adapter_text = _json("its adapter's configuration", lambda: json.dumps({**values, "inference_mode": True}))
        module = module.get_base_model()
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    if not callable(to_json):
        return OwnConfig(adapter_text=adapter_text)
    # Same steps as transformers (modeling_utils.py: save_pretrained), on a copy: the module's config stays as it is.
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    dtype = getattr(module, "dtype", None)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    generation = getattr(module, "generation_config", None)
    unsaved = getattr(module, "_keys_to_ignore_on_save", None) or ()
    tied = [  # as transformers/modeling_utils.py: _get_tied_weight_keys; a list in transformers 4
        f"{path}.{key}" if path else str(key)
        for path, part in module.named_modules()
        for key in getattr(part, "_tied_weights_keys", None) or ()
    ]
    generation_text = None
    if generation is not None and getattr(module, "can_generate", lambda: False)():
        write = partial(generation.to_json_string, keys_to_pop=["compile_config"])
        generation_text = _json("its generation_config", write)
    return OwnConfig(
        json.loads(_json("its config", config.to_json_string)),
        generation_text,
        adapter_text,
        tuple(sorted(map(str, unsaved))),
        tuple(sorted(tied)),
        *_find_conversions(module),
    )


def _find_conversions(module: Any) -> tuple[tuple[str, ...] | None, bool]:
    """Return the fields `conversions` and `is_loaded` for a module."""
    found = getattr(module, "_weight_conversions", None)  # set by `from_pretrained`; None for a newly made model
    is_loaded = found is not None
    if not is_loaded:
        mappings = sys.modules.get("transformers.conversion_mapping")  # transformers >= 5.0; its modules import it
        find = getattr(mappings, "get_model_conversion_mapping", None)
        # A private interface: where its signature differs, xrank's own table decides.
        with suppress(AttributeError, TypeError, KeyError, ValueError):
            found = None if find is None else find(module, add_legacy=False)
    if found is None:
        return None, is_loaded
    # A model made from scratch is saved without the prefixes that only loading could have removed.
    used = [each for each in found if is_loaded or type(each).__name__ != "PrefixChange"]
    return tuple("\n".join(each.source_patterns) for each in used), is_loaded


def override_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config merged with overrides; an object inside an object is merged, too."""
    merged = dict(config)
    for key, value in plain_config(overrides, "config_overrides").items():
        known = merged.get(key)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        merged[key] = override_config(known, value) if both and isinstance(known, Mapping) else value
    return merged


def _json(what: str, make: Callable[[], str]) -> str:
    try:
        return make()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{what} cannot be written as JSON",
            got=str(error)[:200],
            next_step="leave only objects, lists, texts, numbers, true, false and null in it",
        ) from error


def _find_model(module: Any) -> Any:
    """Return the model with a config in a module that has no tensors beside it, as a policy or a LightningModule."""
    if not callable(getattr(module, "named_modules", None)):
        return module
    configs = ((path, getattr(each, "config", None)) for path, each in module.named_modules())
    path = next((path for path, config in configs if callable(getattr(config, "to_json_string", None))), "")
    if path == "":
        return module
    # FSDP1 keeps the parameters of the modules in it in one of the outer module's.
    has_tensors = any(
        value is not None and own != left_out
        for name, each in module.named_modules()
        if not f"{name}.".startswith(f"{path}.")
        for left_out, tensors in (("_flat_param", each._parameters), ("n_averaged", each._buffers))
        for own, value in tensors.items()
    )
    return module if has_tensors else module.get_submodule(path)


def _unwrap(model: Any) -> Any:
    while True:
        inner = next((getattr(model, name) for name in _WRAPPED if name in getattr(model, "_modules", {})), None)
        if inner is None:  # not a wrapper, or one whose place is empty
            return model
        model = inner


_MAX_CONFIG_NBYTES = 4 << 20
"""As Python's objects up to 160 MB. The largest known have some hundred KB, lists of modules left unquantized."""


class BaseModel(Struct, frozen=True):
    """A model folder that defines the names and shapes of the result."""

    path: str
    companions: tuple[CompanionFile, ...]
    config: Mapping[str, Any] | None
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Name -> (dtype, global shape); empty where the folder holds no safetensors weights."""
    decode: Callable[[StoredModel], StoredModel] | None = None
    """Returns the model of the folder's files with floating-point weights in place of quantized ones, as `tensors` has
    them; None: they are as they are in the files."""


def read_config(path: str) -> Mapping[str, Any]:
    """Read the JSON object in a config.json."""
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


class FoundSource(Struct, frozen=True, eq=False):
    """A source under its own names: tensors that a reader found in files, or that ranks hold in memory."""

    model: StoredModel
    config: Mapping[str, Any] | None
    """The model's config.json: the one beside the source, the base model's, or the one in the source."""
    config_path: str | None = None
    companions: tuple[CompanionFile, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    """Notes on companions that share a name, so that only one is used."""
    place: str | None = None
    """Path of the source; None: memory."""
    own: OwnConfig | None = None
    """The knowledge of a live module about itself; None: files."""
    plain_names: Mapping[str, str] = field(default_factory=dict)
    """Name from a wrapper -> the model's own name, for a live model."""
    unsaved: tuple[str, ...] = ()
    """Names of a live module's tensors that `save_pretrained` leaves out, and therefore the source, too."""
