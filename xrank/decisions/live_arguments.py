"""The arguments of live conversions, checked; and what errors say of options, in the words of Python's callers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from xrank.errors import UsageError, XrankError
from xrank.layout import DeviceMesh, LayoutMap, MeshViews

__all__ = ["check_calling", "check_mesh", "check_said", "dtype_choice", "in_python", "notes_in_python"]

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_OPTION = re.compile(
    r"--([a-z]+(?:-[a-z0-9]+)*)(?: (separate|merge|keep|base|none|bf16|fp16|fp32)\b| (?:NAME|FILE|DIR|SIZE)\b)?"
)
_OTHERWISE = {
    "overwrite": "overwrite=True",
    "out": "out",
    "layout": "layouts=",
    "ckpt_format": "--ckpt-format",  # Megatron's own
}
_PHRASES = {
    "correct the option; --help says what it takes": "correct the argument",
    "gather again with": "call again with",
    "run the same command": "make the same call",
    "the same command goes on": "the same call goes on",
    # What follows has no argument of its own. A base model, and names, are looked at before any transform.
    "leave it out by name with --exclude": "leave base_model= out",
    "leave it out with --exclude": "leave it out of what is given",
    "leave the tensor out with --exclude": "leave the tensor out of what is given",
    "change --include or --exclude": "give a model with tensors",
    "look at --include and --exclude": "let transform= keep one",
    "--dtype bf16 or keep, or --keep-fp32 with this tensor's name": "--dtype bf16 or --dtype keep",
    " (64MB is the default) or --workers": " (64MB is the default)",
    "leave --adapter and --adapter-config out": "leave --adapter out",
    "give that as --adapter-config; or use": "use",
    "give the configuration that this adapter was trained with as --adapter-config": (
        "give a PeftModel with the configuration that its adapter was trained with"
    ),
    "give --adapter-config FILE: PEFT's adapter_config.json, or a JSON object with r and lora_alpha": (
        "correct the configuration of the PeftModel's active adapter"
    ),
}


def dtype_choice(dtype: Any) -> Any:
    """Return a dtype as `GatherOptions` takes it, be it torch's or its name, or none."""
    # GatherOptions refuses what it does not know.
    return "keep" if dtype is None else _DTYPES.get(str(dtype).removeprefix("torch."), dtype)


def check_calling(group: Any, timeout_seconds: float) -> None:
    """Refuse what no ranks can meet by.

    Raises:
        UsageError: it names the argument.
    """
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs leave much out
    if group is not None and distributed.is_available() and not isinstance(group, int | distributed.ProcessGroup):
        raise _wrong("group", group, "a process group of torch's, or None: all ranks")
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float):
        raise _wrong("timeout_seconds", timeout_seconds, "a number of seconds")


def check_said(layouts: Any, mesh: Any, config_overrides: Any = None) -> None:
    """Refuse arguments of other types than they are to have.

    Raises:
        UsageError: it names the argument.
    """
    if layouts is not None and not isinstance(layouts, LayoutMap):
        raise _wrong("layouts", layouts, "a LayoutMap; of a file: LayoutMap.read")
    check_mesh(mesh)
    if config_overrides is not None and not isinstance(config_overrides, Mapping):
        raise _wrong("config_overrides", config_overrides, "a mapping")


def check_mesh(mesh: Any) -> None:
    """Refuse what is no mesh; torch's are known by what they have.

    Raises:
        UsageError: it is none.
    """
    is_torchs = hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "mesh")
    if not (mesh is None or is_torchs or isinstance(mesh, DeviceMesh | MeshViews)):
        raise _wrong("mesh", mesh, "xrank's or torch's DeviceMesh")


def _wrong(name: str, value: object, want: str) -> UsageError:
    return UsageError(
        f"{name}= takes no {type(value).__name__}",
        got=repr(value)[:100],
        want=want,
        next_step="make the call with such a value",
    )


def _in_python_words(text: str) -> str:
    """Return a text in which options of the command stand as arguments: ``--base-model`` is ``base_model=``."""
    for phrase, other in _PHRASES.items():
        text = text.replace(phrase, other)

    def said(match: re.Match[str]) -> str:
        name, value = match[1].replace("-", "_"), match[2]
        return f'{name}="{value}"' if value else _OTHERWISE.get(name, f"{name}=")

    return _OPTION.sub(said, text)


@contextmanager
def in_python() -> Iterator[None]:
    """Let the errors of the body speak of arguments where they speak of the command's options."""
    try:
        yield
    except XrankError as error:
        error.message = _in_python_words(error.message)
        for part in ("got", "want", "next_step"):
            if (text := getattr(error, part)) is not None:
                setattr(error, part, _in_python_words(text))
        raise


def notes_in_python(notes: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return notes of a report in those words."""
    return tuple((code, _in_python_words(message)) for code, message in notes)
