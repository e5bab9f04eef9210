"""Quantization schemes: which tensors of a model are quantized, and what its config records about them.

The decision needs names, dtypes and shapes only. `xrank.engine.encodings` has the arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from xrank import dtypes
from xrank.errors import UsageError, option
from xrank.layout.output_files import OutputTensor
from xrank.words import repr_text

Dialect: TypeAlias = Literal["compressed-tensors", "deepseek", "modelopt"]
"""The tools whose names, shapes and configuration a folder has."""


class Scheme(Struct, frozen=True):
    """A way to quantize the matrices of a model without calibration."""

    name: str
    """llm-compressor's name, such as ``"FP8_BLOCK"``."""
    dialect: Dialect = "compressed-tensors"
    is_fused: bool = False
    """Whether the matrices that an engine computes together, such as q, k and v, share a scale."""


_SCHEMES = {
    (each.name, each.dialect): each
    for each in (
        Scheme("FP8_DYNAMIC"),
        Scheme("FP8_BLOCK"),
        Scheme("W8A8"),
        Scheme("W8A16"),
        Scheme("W4A16"),
        Scheme("NVFP4A16", is_fused=True),
        Scheme("MXFP4A16"),
        Scheme("MXFP8"),
        Scheme("DEEPSEEK_FP8", "deepseek"),
        Scheme("FP8", "modelopt", is_fused=True),
        Scheme("NVFP4", "modelopt", is_fused=True),
    )
}
_CALIBRATED = re.compile("GPTQ|AWQ|SMOOTH|AUTOROUND|SPINQUANT|IMATRIX|^INT4|^FP8$|^NVFP4$|_STATIC")
"""Names of methods and schemes that need data."""

IGNORED = (
    "re:.*embed.*",
    "re:.*norm.*",
    "re:.*(lm_head|shared_head).*",
    "re:.*[.](gate|router|shared_expert_gate)([.].*)?$",
    "re:.*conv1d.*",
    "re:.*(vision|visual|audio|projector|connector).*",
)
"""Modules that llm-compressor's examples ignore: embeddings, norms, heads, routers, and the towers of other inputs."""

_FUSED = (
    (r"(.*(?:attn|attention))\.(?:q_proj|k_proj|v_proj)\.weight", 3),
    (r"(.*(?:attn|attention))\.(?:wq_a|wkv_a_with_mqa)\.weight", 2),
    (r"(.*mlp)\.(?:gate_proj|up_proj)\.weight", 2),
    (r"(.*)w[13]\.weight", 2),
)
"""Names that share a global scale if their group is the same, and the number of names of a whole set."""


class Quantizing(Struct, frozen=True):
    """The decision about the quantization of one model."""

    scheme: Scheme
    groups: tuple[tuple[str, ...], ...]
    """The tensors to quantize; those of one group share a global scale, and groups of one share none."""
    ignored: tuple[str, ...]
    """Modules with a matrix that stays in floating point."""
    config: Mapping[str, Any]
    """``quantization_config`` of config.json."""


def find_scheme(name: str, dialect: str | None = None) -> Scheme:
    """Return the scheme of that name, in any case; `dialect` is ``"modelopt"`` or None.

    Raises:
        UsageError: there is no such scheme, or it needs calibration.
    """
    wanted = name.upper().replace("-", "_")
    known = {each.name: each for each in _SCHEMES.values() if (each.dialect == "modelopt") == (dialect == "modelopt")}
    if wanted in known:
        return known[wanted]
    listed = ", ".join(known)
    step = f"choose with {option('quantize')} one of these"
    if _CALIBRATED.search(wanted):
        step = f"{step}; or gather without {option('quantize')}, then let llm-compressor calibrate and quantize"
    problem = f"there is no scheme {repr_text(name, 40)} that quantizes without calibration"
    raise UsageError(problem, got=repr_text(name, 40), want=f"one of {listed}", next_step=step)


def plan_quantization(scheme: Scheme, outputs: Sequence[OutputTensor], ignore: Iterable[str] = ()) -> Quantizing:
    """Decide which tensors of a model are quantized.

    Args:
        scheme: the scheme.
        outputs: the tensors as they would be written without quantization.
        ignore: modules to leave in floating point, besides `IGNORED`: regular expressions for their whole names, or
            llm-compressor's ``re:`` patterns, which match the beginning of a name.
    """
    patterns = [*IGNORED, *ignore]
    compiled = [_compile(pattern) for pattern in patterns]
    names, ignored = list[str](), list[str]()
    for output in outputs:
        module, _, last = output.name.rpartition(".")
        if last != "weight" or len(output.shape) != 2 or not _is_plain(output.dtype):
            continue
        is_ignored = any(pattern.match(module) for pattern in compiled)
        (ignored if is_ignored else names).append(module if is_ignored else output.name)
    return Quantizing(scheme, _find_groups(scheme, names), tuple(ignored), {"ignore": patterns})


def _is_plain(dtype: str) -> bool:
    kind = dtypes.dtype(dtype)
    return kind.is_float and kind.nbytes > 1


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else f"(?:{pattern})\\Z")


def _find_groups(scheme: Scheme, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    groups: dict[tuple[int, str], list[str]] = {}
    for name in names:
        found = ((index, re.fullmatch(pattern, name)) for index, (pattern, _) in enumerate(_FUSED))
        key = next(((index, match[1]) for index, match in found if match is not None), (-1, name))
        groups.setdefault(key if scheme.is_fused else (-1, name), []).append(name)
    return tuple(map(tuple, groups.values()))
