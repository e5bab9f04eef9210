"""Quantization schemes: which tensors of a model are quantized, and what the config files record about them.

The decision needs names, dtypes and shapes only; `xrank.engine.encodings` has the arithmetic. What is quantized, what
shares a scale and what config.json records is as llm-compressor's ``model_free_ptq`` decides it (0.14;
llmcompressor/entrypoints/model_free), as DeepSeek-V3's own folder has it, or as ModelOpt's ``export_hf_checkpoint``
writes it (0.47; modelopt/torch/export) for weights that are quantized without data.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct

from xrank.errors import UsageError, option
from xrank.layout.output_files import OutputTensor
from xrank.words import likewise_text, repr_text

if TYPE_CHECKING:
    from xrank.engine.encodings import Encoding

Dialect: TypeAlias = Literal["compressed-tensors", "deepseek", "modelopt"]
"""The tool whose names of tensors and whose config a folder has."""

_VERSIONS = {"compressed-tensors": "0.20.1", "modelopt": "0.47.0"}
"""Versions of the tools whose folders these are like, which the config files record."""


class Scheme(Struct, frozen=True):
    """A way to quantize the matrices of a model without data."""

    name: str
    """llm-compressor's name, such as ``"FP8_BLOCK"``."""
    dialect: Dialect = "compressed-tensors"
    format: str = ""
    """compressed-tensors' ``format``, or ModelOpt's ``quant_algo``."""
    weights: Mapping[str, Any] = {}
    """compressed-tensors' arguments of weights."""
    activations: Mapping[str, Any] | None = None
    """compressed-tensors' arguments of activations; None: they are not quantized."""
    fused: tuple[tuple[str, int], ...] = ()
    """Sets of weights that share a global scale: a pattern whose first group is equal in a set, and the number of names
    without which the set does not count."""
    ignored: tuple[str, ...] = ()
    """Modules that are ignored besides `IGNORED`."""
    constant: str = ""
    """Name of the arithmetic in `xrank.engine.encodings`, if it is not the scheme's."""

    @property
    def encoding(self) -> Encoding:
        """The arithmetic."""
        from xrank.engine import encodings  # readers of a folder's config do not need this module

        found: Encoding = getattr(encodings, self.constant or self.name)
        return found


def _arguments(num_bits: int, kind: str, strategy: str, group_size: int | None = None, **more: Any) -> dict[str, Any]:
    """Return compressed-tensors' QuantizationArgs as it writes them."""
    known = {"num_bits": num_bits, "type": kind, "strategy": strategy, "group_size": group_size}
    return {**known, "symmetric": True, "dynamic": False, **more}


_FP8_TOKEN = _arguments(8, "float", "token", dynamic=True)
_E8M0 = {"scale_dtype": "torch.uint8"}

# llmcompressor/entrypoints/model_free/microscale.py: _DEFAULT_FUSED_MAPPINGS_LIST; experts' gate and up are apart.
_FUSED = (
    (r"(.*(?:attn|attention)\.)(?:q_proj|k_proj|v_proj)\.weight", 3),
    (r"(.*(?:attn|attention)\.)(?:wq_a|wkv_a_with_mqa)\.weight", 2),
    (r"(.*mlp\.)(?:gate_proj|up_proj)\.weight", 2),
    (r"(.*)w[13]\.weight", 2),
)
# modelopt/torch/export/unified_export_hf.py: requantize_resmooth_fused_llm_layers fuses what shares an input.
_MODELOPT_FUSED = (
    (r"(.*\.)(?:q_proj|k_proj|v_proj|q_a_proj|kv_a_proj_with_mqa)\.weight", 1),
    (r"(.*\.)(?:gate_proj|up_proj)\.weight", 1),
    (r"(.*\.)w[13]\.weight", 1),
    (r"(.*\.)in_proj_(?:qkv|z|a|b|qkvz|ba)\.weight", 1),
)

_SCHEMES = (
    Scheme("FP8_DYNAMIC", "compressed-tensors", "float-quantized", _arguments(8, "float", "channel"), _FP8_TOKEN),
    Scheme(
        "FP8_BLOCK",
        "compressed-tensors",
        "float-quantized",
        _arguments(8, "float", "block", block_structure=[128, 128]),
        _arguments(8, "float", "group", 128, dynamic=True),
    ),
    Scheme(
        "W8A8",
        "compressed-tensors",
        "int-quantized",
        _arguments(8, "int", "channel"),
        _arguments(8, "int", "token", dynamic=True),
    ),
    Scheme("W8A16", "compressed-tensors", "pack-quantized", _arguments(8, "int", "group", 128)),
    Scheme("W4A16", "compressed-tensors", "pack-quantized", _arguments(4, "int", "group", 128)),
    Scheme(
        "NVFP4A16",
        "compressed-tensors",
        "nvfp4-pack-quantized",
        _arguments(4, "float", "tensor_group", 16, scale_dtype="torch.float8_e4m3fn"),
        fused=_FUSED,
        # Engines compute both in one product, with one global scale, which these two do not share.
        ignored=("re:.*[.](q_a_proj|kv_a_proj_with_mqa)$",),
    ),
    Scheme("MXFP4A16", "compressed-tensors", "mxfp4-pack-quantized", _arguments(4, "float", "group", 32, **_E8M0)),
    Scheme(
        "MXFP8",
        "compressed-tensors",
        "mxfp8-quantized",
        _arguments(8, "float", "group", 32, **_E8M0),
        _arguments(8, "float", "group", 32, dynamic=True, **_E8M0),
    ),
    Scheme("DEEPSEEK_FP8", "deepseek"),
    # ModelOpt's FP8 and NVFP4 have scales of activations, which only data give; vLLM would compute with arbitrary ones.
    Scheme("FP8", "modelopt", "FP8_PER_CHANNEL_PER_TOKEN", constant="MODELOPT_FP8_CHANNEL"),
    Scheme("NVFP4", "modelopt", "W4A16_NVFP4", fused=_MODELOPT_FUSED, constant="MODELOPT_NVFP4"),
)
_CALIBRATED = re.compile("GPTQ|AWQ|SMOOTH|AUTOROUND|SPINQUANT|IMATRIX|^INT4|^FP8$|^NVFP4$|_STATIC")
"""Names of methods and schemes that need data."""


def list_schemes() -> list[str]:
    """Return the names that `find_scheme` takes, of either dialect."""
    return [scheme.name for scheme in _SCHEMES]


def find_scheme(name: str, dialect: str | None = None) -> Scheme:
    """Return the scheme of that name, in any case; `dialect` is ``"modelopt"`` or None.

    Raises:
        UsageError: there is no such scheme, or it needs data.

    Example:
        >>> find_scheme("fp8_block").format
        'float-quantized'
    """
    wanted = name.upper().replace("-", "_")
    known = {each.name: each for each in _SCHEMES if (each.dialect == "modelopt") == (dialect == "modelopt")}
    if wanted in known:
        return known[wanted]
    step = f"choose with {option('quantize')} one of these"
    if _CALIBRATED.search(wanted):
        step = f"{step}; or gather without {option('quantize')}, then let llm-compressor calibrate and quantize"
    problem = f"there is no data-free quantization scheme {repr_text(name, 40)}"
    raise UsageError(problem, got=repr_text(name, 40), want=f"one of {', '.join(known)}", next_step=step)


def name_group(group: Mapping[str, Any], default: str = "") -> str:
    """Return the name of the scheme of a group of compressed-tensors, or its format if it is no scheme of xrank's.

    `default` is the format of groups without one.
    """
    for scheme in _SCHEMES:
        pairs = ((scheme.weights, group.get("weights")), (scheme.activations, group.get("input_activations")))
        if scheme.weights and all(_has_arguments(mine or {}, theirs or {}) for mine, theirs in pairs):
            return scheme.name
    return str(group.get("format") or default)


def _has_arguments(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    # The types of scales are newer than the formats.
    return bool(mine) == bool(theirs) and all(theirs.get(key) == mine[key] for key in mine if key != "scale_dtype")


IGNORED = (
    "re:.*(embed|_emb).*",
    "re:(.*[.])?(wte|wpe|shared|relative_attention_bias)$",
    "re:.*(norm|conv)[^.]*$",
    "re:.*(lm_head|shared_head|eh_proj).*",
    "re:(.*[.])?(score|classifier|gate|router|shared_expert_gate)([.].*)?$",
    "re:.*(vision|visual|audio|projector|connector).*",
)
"""Modules that are never quantized, as llm-compressor's examples ignore them: embeddings, norms, convolutions, heads
with what leads to the heads of speculative layers, routers, and the towers of other inputs with their projectors.

config.json has them also where a model has no such module: a tied head has no tensor, and loaders ask whether it is
quantized. Of 302 classes of transformers that generate text no other module has a matrix without being a Linear.
"""


class Quantizing(Struct, frozen=True):
    """The decision about the quantization of one model."""

    scheme: Scheme
    groups: tuple[tuple[str, ...], ...]
    """The tensors to quantize; those of one group share a global scale, and groups of one share none."""
    patterns: tuple[str, ...]
    """Ignored modules as llm-compressor lists them: names, or ``re:`` and an expression for the beginning of names."""
    ignored: tuple[str, ...]
    """The modules with a matrix that stays in floating point."""

    @property
    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json, as the tool writes it."""
        scheme = self.scheme
        if scheme.dialect == "deepseek":
            # As in DeepSeek-V3's own; transformers and vLLM take modules by their names.
            known = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            return {**known, "weight_block_size": [128, 128], "modules_to_not_convert": self._names_with_head()}
        if scheme.dialect == "modelopt":
            details = self._details
            weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
            # modelopt/torch/export/convert_hf_config.py has groups for FP4 only
            groups = {"config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}
            return {
                **(groups if "group_size" in details else {}),
                "ignore": details["exclude_modules"],
                "quant_algo": scheme.format,
                "producer": _PRODUCER,
                "quant_method": "modelopt",
            }
        group = {
            "format": scheme.format,
            "input_activations": scheme.activations,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": scheme.weights,
        }
        return {
            "config_groups": {scheme.name: group},
            "format": scheme.format,
            "global_compression_ratio": None,
            "ignore": list(self.patterns),
            "kv_cache_scheme": None,
            "moe_sparsity_config": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "transform_config": {},
            "version": _VERSIONS["compressed-tensors"],
        }

    @property
    def _details(self) -> dict[str, Any]:
        """``quantization`` of ModelOpt's hf_quant_config.json."""
        sizes = {"group_size": 16} if self.scheme.name == "NVFP4" else {}
        excluded = _summarize(self._names_with_head(), {_module(name) for names in self.groups for name in names})
        return {"quant_algo": self.scheme.format, "kv_cache_quant_algo": None, **sizes, "exclude_modules": excluded}

    def _names_with_head(self) -> list[str]:
        """Return the ignored modules, and a tied head, which has no tensor."""
        has_head = any(name.endswith("lm_head") for name in self.ignored)
        return [*self.ignored, *(() if has_head else ("lm_head",))]

    def texts(self, config: Mapping[str, Any] | None) -> dict[str, str]:
        """Return the text of each config file; `config` is the model's config.json, None if it has none."""
        texts = {}
        if config is not None:
            merged = {**config, "quantization_config": self.config}
            texts["config.json"] = json.dumps(merged, indent=2, sort_keys=True) + "\n"
        if self.scheme.dialect == "modelopt":
            details = {"producer": _PRODUCER, "quantization": self._details}
            texts["hf_quant_config.json"] = json.dumps(details, indent=4)
        return texts


_PRODUCER = {"name": "modelopt", "version": _VERSIONS["modelopt"]}


def find_ignored_patterns(scheme: Scheme, ignore: Iterable[str]) -> tuple[str, ...]:
    """Return what a scheme ignores, and the caller's `ignore` of `plan_quantization` in llm-compressor's form."""
    given = [each if each.startswith("re:") or not _METACHARACTERS.search(each) else _anchor(each) for each in ignore]
    return tuple(dict.fromkeys((*IGNORED, *scheme.ignored, *given)))


def is_ignored(module: str, patterns: Iterable[str]) -> bool:
    """Return whether a module is ignored by such patterns."""
    return any(_matches(module, pattern) for pattern in patterns)


def plan_quantization(
    scheme: Scheme, outputs: Sequence[OutputTensor], ignore: Iterable[str] = (), model_type: object = None
) -> Quantizing:
    """Decide which tensors of a model are quantized: the matrices named ``weight`` of modules that are not ignored.

    Args:
        scheme: the scheme.
        outputs: the tensors as they would be written without quantization.
        ignore: modules to leave in floating point, besides `IGNORED`: their names, regular expressions for whole names,
            or llm-compressor's ``re:`` with a regular expression for the beginning of a name.
        model_type: that of config.json.

    Raises:
        UsageError: the model is quantized already, a weight's shape or type does not fit the scheme, an expression
            matches no module, or nothing is left to quantize.
    """
    known = next((each for each in outputs if each.dtype.startswith("F8") or _CODES.fullmatch(each.name)), None)
    if known is not None:
        got, step = f"{known.dtype} {list(known.shape)}", f"decode it with {option('dequantize', True)}"
        problem = f"{known.name}: the model is quantized already"
        raise UsageError(problem, tensor=known.name, got=got, want="weights in floating point", next_step=step)
    if model_type in _CONV1D:
        problem = f"the matrices of {model_type} are [in, out], which engines cannot load quantized"
        raise UsageError(problem, got=f"model_type {model_type}", next_step=f"gather without {option('quantize')}")
    patterns = find_ignored_patterns(scheme, ignore)
    _check_matches(patterns[len(IGNORED) + len(scheme.ignored) :], outputs)
    names, ignored, misfits = list[str](), list[str](), dict[str, str]()
    for output in outputs:
        module, _, last = output.name.rpartition(".")
        if last not in ("weight", *_STACKS) or len(output.shape) < 2 or output.dtype not in _PLAIN:
            continue
        if module.endswith("norm") or is_ignored(module, patterns):
            ignored.append(module)
        elif (misfit := _find_misfit(scheme, output)) is None:
            names.append(output.name)
        else:
            misfits[output.name] = misfit
    if misfits:
        raise _misfit_error(scheme, misfits)
    if not names:
        got = f"{len(ignored):,} modules with matrices, all of them ignored"
        step = f"give {option('quantize_ignore')} fewer modules, or gather without {option('quantize')}"
        raise UsageError("no tensor is left to quantize", got=got, want="matrices named weight", next_step=step)
    groups = _find_groups(scheme, names, [output.name for output in outputs])
    return Quantizing(scheme, groups, patterns, tuple(dict.fromkeys(ignored)))


_STACKS = ("gate_up_proj", "down_proj")
"""Parameters with all experts of a layer, where `xrank.recipes.conversions.split_experts` left them whole."""
_PLAIN = ("BF16", "F16", "F32")
_CODES = re.compile(r".*(weight_scale(_inv)?|weight_packed|proj_blocks|[._]qweight|weight\.absmax)")
"""Names of tensors that only a quantized model has."""
_METACHARACTERS = re.compile(r"[\\^$*+?{}\[\]|()]")
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Model types with transformers' Conv1D in the place of Linear."""


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _anchor(pattern: str) -> str:
    """Return a regular expression for whole names as llm-compressor's ``re:``."""
    return f"re:(?:{pattern})$" if "|" in pattern else f"re:{pattern.removesuffix('$')}$"


def _matches(module: str, pattern: str) -> bool:
    """compressed_tensors/utils/match.py: match_name."""
    return re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module


def _check_matches(patterns: Iterable[str], outputs: Sequence[OutputTensor]) -> None:
    modules = {_module(output.name) for output in outputs}
    for pattern in patterns:
        # A script may name lm_head for every model, also for one without it.
        if is_ignored(pattern.removeprefix("re:"), IGNORED) or any(_matches(each, pattern) for each in modules):
            continue
        example = _module(next((each.name for each in outputs if each.name.endswith(".weight")), "a.weight"))
        raise UsageError(
            f"{option('quantize_ignore')}: {pattern!r} matches no module",
            got=pattern,
            want=f"a name of a module, such as {example}, or a regular expression for whole names",
            next_step="xrank inspect --tensors lists the names; a module's is a tensor's without .weight",
        )


def _find_misfit(scheme: Scheme, output: OutputTensor) -> str | None:
    is_matrix = len(output.shape) == 2
    return scheme.encoding.misfit(output.shape) if is_matrix else f"shape {list(output.shape)}, not a matrix"


def _misfit_error(scheme: Scheme, misfits: Mapping[str, str]) -> UsageError:
    name, misfit = next(iter(misfits.items()))
    ends = dict.fromkeys(_module(each).rpartition(".")[2] + _stack_rest(each) for each in misfits)
    step = " and ".join(option("quantize_ignore", f".*{end}") for end in list(ends)[:3])
    return UsageError(
        f"{name} does not fit {scheme.name}{likewise_text([*misfits][1:], 3)}",
        tensor=name,
        got=misfit,
        want="matrices [out, in] with columns divisible by its group size",
        next_step=f"keep it in floating point with {step}",
    )


def _stack_rest(name: str) -> str:
    """Return the rest of an expression for a stack's module: vLLM asks for the experts' own names below it."""
    return ".*" if name.rpartition(".")[2] in _STACKS else ""


def _find_groups(scheme: Scheme, names: Sequence[str], known: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names to quantize in groups that share a global scale; a set counts if all its names are `known`."""
    sets: dict[tuple[int, str], list[str]] = {}
    for name in known:
        for number, (pattern, _) in enumerate(scheme.fused):
            if (match := re.fullmatch(pattern, name)) is not None:
                sets.setdefault((number, match[1]), []).append(name)
                break
    keys = {name: key for key, each in sets.items() if len(each) >= scheme.fused[key[0]][1] for name in each}
    groups: dict[tuple[int, str], list[str]] = {}
    for name in names:
        groups.setdefault(keys.get(name, (-1, name)), []).append(name)
    return tuple(map(tuple, groups.values()))


def _summarize(ignored: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Return modules as ModelOpt writes them: the shortest beginning that no quantized module shares, and a star.

    modelopt/torch/export/quant_utils.py: _prefix_wildcard_summarize_exclude_modules.
    """
    known = sorted(quantized)

    def is_shared(start: str) -> bool:
        at = bisect_left(known, start)
        return at < len(known) and known[at].startswith(start)

    found = set()
    for name in ignored:
        dots = [at for at, letter in enumerate(name) if letter == "."]
        # Both ends of each part: "visual" also begins the name of a "visualizer".
        starts = (name[:end] for at in dots for end in (at, at + 1))
        found.add(next((f"{start}*" for start in starts if not is_shared(start)), name))
    return sorted(found)
