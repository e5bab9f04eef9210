"""Quantization: a transform to 8 bits with scales in fp32, and what sources declare of the quantization they have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.companions import CompanionFile
from xrank.errors import AGAIN, ContradictionError, IncompleteError, UsageError, either, option
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.recipes.conversions import is_known_type
from xrank.recipes.found_source import FoundSource, read_config
from xrank.words import plural

if TYPE_CHECKING:
    import torch

    from xrank.engine.encodings import Encoding


_KEPT = ("*embed*", "*lm_head*", "*norm*", "*.gate.weight", "*router*")
"""Embeddings, heads, norms and routers, which engines keep in 16 or 32 bits."""


class Quantization(Struct, frozen=True):
    """A transform that quantizes weights to fp8 or int8, with scales in fp32, for ``transform=`` of any call.

    A matrix ``name`` becomes ``name`` in the new type and a tensor of scales in fp32; ``name * scale`` is about the old
    value. If ranks hold parts of a matrix, it is quantized band by band, and no rank holds all of it.

    Attributes:
        dtype: ``"fp8"`` (e4m3, largest magnitude 448) or ``"int8"`` (127, rounded half to even).
        blocks: one scale for a ``"tensor"``, a ``"channel"`` (row), or each block of (rows, columns). Tensors of more
            than two dims are stacks of matrices, each with its own scales.
        keep: patterns of names that are not quantized, in addition to tensors of one dim and integers; None:
            embeddings, heads, norms and routers.
        scale_suffix: appended to the name for the scales; None: ``"_scale_inv"`` for blocks, as in checkpoints of
            DeepSeek and transformers' ``fp8``, else ``"_scale"``, as in those of ModelOpt and compressed-tensors.

    Raises:
        UsageError: an attribute has an invalid value.

    Example:
        >>> import torch, xrank
        >>> quantize = xrank.Quantization("int8", "channel")
        >>> made = quantize("up_proj.weight", torch.tensor([[1.0, -2.0], [0.0, 4.0]]))
        >>> {name: tensor.tolist() for name, tensor in made.items()}["up_proj.weight"]
        [[64, -127], [0, 127]]
    """

    dtype: Literal["fp8", "int8"] = "fp8"
    blocks: Literal["tensor", "channel"] | tuple[int, int] = "tensor"
    keep: Sequence[str] | None = None
    scale_suffix: str | None = None

    def __post_init__(self) -> None:
        is_pair = isinstance(self.blocks, tuple) and len(self.blocks) == 2
        if self.dtype not in ("fp8", "int8") or not (
            self.blocks in ("tensor", "channel") or (is_pair and all(isinstance(n, int) and n > 0 for n in self.blocks))
        ):
            raise UsageError(
                f"there is no quantization to {self.dtype!r} by {self.blocks!r}",
                got=f"{self.dtype!r}, {self.blocks!r}",
                want="'fp8' or 'int8', and 'tensor', 'channel' or (rows, columns)",
                next_step="give one of these",
            )

    @property
    def encoding(self) -> Encoding:
        """The same arithmetic, for tensors that are quantized band by band."""
        from xrank.engine import encodings  # sources that are not quantized do not need this module

        return encodings.fp32_encoding(self.dtype, self.blocks, self.name_scales(""))

    def applies_to(self, name: str, dtype: str, shape: Sequence[int]) -> bool:
        """Return whether a tensor is quantized; `dtype` is a safetensors name."""
        kept = _KEPT if self.keep is None else self.keep
        kind = dtypes.dtype(dtype)
        is_matrix = len(shape) >= 2 and prod(shape) > 0 and kind.is_float and kind.nbytes > 1
        return is_matrix and not any(fnmatchcase(name, pattern) for pattern in kept)

    def name_scales(self, name: str) -> str:
        """Return the name of a tensor's scales."""
        suffix = "_scale_inv" if isinstance(self.blocks, tuple) else "_scale"
        return name + (suffix if self.scale_suffix is None else self.scale_suffix)

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a whole tensor quantized, with its scales; or as it is, if it is kept."""
        import torch

        def kind_of(dtype: str) -> torch.dtype:
            found: torch.dtype = getattr(torch, dtypes.dtype(dtype).torch_name)
            return found

        dtype = dtypes.by_torch_name(str(tensor.dtype).removeprefix("torch.")).name
        if not self.applies_to(name, dtype, tensor.shape):
            return {name: tensor}
        encoding, (*_, rows, columns) = self.encoding, tensor.shape
        outputs = encoding.outputs(name, dtype, tensor.shape)
        made = [torch.empty(each.shape, dtype=kind_of(each.dtype), device=tensor.device) for each in outputs]
        if not tensor.is_meta:
            content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            values = content.view(dtypes.numpy_dtype(dtype)).reshape(-1, columns)
            for row in range(0, len(values), rows):
                matrix = values[row : row + rows]
                maximum = encoding.measure(matrix) if encoding.is_shared else None
                for number, first, array in encoding.encode(matrix, row, tensor.shape, maximum, name=name):
                    part = torch.from_numpy(array.reshape(-1).view("u1")).view(made[number].dtype)
                    made[number].view(-1)[first : first + array.size] = part
        return {each.name: one for each, one in zip(outputs, made, strict=True)}


_Tensor = StoredShard | OutputTensor

_NOT_PAYLOADS = ("I64", "U64", "BOOL", "C64")
"""Element types of indices and masks, besides the plain floating-point ones."""
_SCALE = re.compile(r"scale|absmax|quant_map|quant_state|zero|amax|\bSCB\b|\bs\b|\bscb\b")
_ZEROS = ("qzeros", "zeros", "zero_point", "weight_zero_point")
"""Zero points, which do not replace scales."""
_FORM = re.compile(r"[._:]?(?:_blocks|_packed|_?qdata|_data)$")
_OF_ACTIVATIONS = re.compile(r".*\.(?:[qkv]|kv_cache|prob|input|output)_(?:scale|zero_point)")
"""Scales of activations and of the KV cache, whose module may hold no weight."""
DECLARING_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json, and of the objects in it, that declare a quantization."""
DECLARING_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json that declare a quantization, and their methods."""
_METHODS = {
    "bitsandbytes": "absmax or SCB",
    "fp8": "weight_scale_inv",
    "fbgemm_fp8": "weight_scale",
    "gptq": "scales",
    "awq": "scales",
    "mxfp4": "_scales",
    "compressed-tensors": "weight_scale",
    "modelopt": "weight_scale",
}
"""Methods in transformers' ``quantization_config``, with the ends of their scales' names."""


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_payload(tensor: _Tensor) -> bool:
    if tensor.dtype.startswith("F8"):
        return True
    return not dtypes.dtype(tensor.dtype).is_float and tensor.dtype not in _NOT_PAYLOADS and len(tensor.shape) > 1


def find_scales(tensors: Iterable[_Tensor]) -> set[str]:
    """Return the float tensors that scale quantized payloads. If rounded, they would scale to other weights."""
    listed = list(tensors)
    payloads = {tensor.name for tensor in listed if _is_payload(tensor)}
    if not payloads:
        return set()
    places = payloads | {_module(name) for name in payloads}
    return {
        tensor.name
        for tensor in listed
        if dtypes.dtype(tensor.dtype).is_float
        and not tensor.name.endswith("bias")
        and (
            # The outermost module may be a whole model, where only a name shows what is a scale.
            (_module(tensor.name) in places and (_module(tensor.name) != "" or _SCALE.search(tensor.name)))
            or _OF_ACTIVATIONS.fullmatch(tensor.name)
        )
    }


def is_quantized(model: StoredModel) -> bool:
    """Return whether some tensors of a model are quantized."""
    return holds_codes(OutputTensor(shard.name, shard.dtype, shard.shape) for shard in model.shards)


def holds_codes(tensors: Iterable[OutputTensor]) -> bool:
    """Return whether some tensors are quantized: a model in fp8, or with scales of payloads."""
    listed = list(tensors)
    ends = ("_packed", "_blocks")
    return any(t.dtype.startswith("F8") or t.name.endswith(ends) for t in listed) or bool(find_scales(listed))


class StoredScheme(Struct, frozen=True):
    """The quantization that config.json, or a file beside it, declares of a model."""

    values: Mapping[str, Any]
    """The declaration, as transformers takes it: ``quant_method`` and what the method has."""
    place: str = "config.json"
    """Name of the file that declares it."""

    @property
    def method(self) -> str:
        """The ``quant_method`` of transformers."""
        return str(self.values.get("quant_method", "bitsandbytes" if self.is_four_bit else ""))

    @property
    def is_four_bit(self) -> bool:
        """Whether bitsandbytes packs two weights into a byte, of any type for storage."""
        return self.values.get("load_in_4bit") is True or self.values.get("_load_in_4bit") is True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the schemes, such as ``("FP8_BLOCK",)``: xrank's, else the method's or the format's.

        Example:
            >>> StoredScheme({"quant_method": "modelopt", "quant_algo": "NVFP4"}).names
            ('NVFP4',)
        """
        from xrank.recipes.schemes import name_group  # sources that are not quantized do not need this module

        found = [name_group(group, self._format) for group in self._groups]
        if self.method == "modelopt":
            found = [str(algorithm) for algorithm in self._algorithms]
        elif self.method == "fp8" and self.values.get("weight_block_size") == [128, 128]:
            found = ["DEEPSEEK_FP8"]
        return tuple(dict.fromkeys(found)) or (self.method,)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names and patterns of modules that are not quantized, as they are declared."""
        keys = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
        return tuple(next((map(str, found) for key in keys if isinstance(found := self.values.get(key), list)), ()))

    def find_encodings(self) -> tuple[Encoding, ...]:
        """Return the encodings of its weights; the names, types and shapes of tensors show which one a weight has.

        Raises:
            UsageError: the quantization is not one of those that xrank decodes.
        """
        from xrank.engine import encodings  # sources that are not quantized do not need this module

        found: list[Encoding | None] = []
        if self.method == "compressed-tensors":
            found = [_find_encoding(group, self._format) for group in self._groups]
            is_sparse = self.values.get("sparsity_config", {}).get("format", "dense") != "dense"
            found += [None] if is_sparse else []
        elif self.method == "modelopt":
            names = [_ALGORITHMS.get(str(algorithm).upper()) for algorithm in self._algorithms]
            found = [None if name is None else getattr(encodings, name) for name in names]
        elif self.method == "mxfp4":
            found = [encodings.GPT_OSS]
        elif self.method == "fbgemm_fp8":
            found = [replace(encodings.DEEPSEEK_FP8, block=(1, 0), suffixes=("", "_scale"))]
        elif self.method == "fp8" and self.values.get("expert_dtype", "fp8") == "fp8":
            whole = replace(encodings.DEEPSEEK_FP8, block=tuple(self.values.get("weight_block_size") or (0, 0)))
            found = [whole]
            if whole.block == (0, 0):  # where transformers has _scale_inv, AutoFP8 had _scale
                found.append(replace(whole, suffixes=("", "_scale")))
        known = tuple(dict.fromkeys(each for each in found if each is not None))
        if not known or None in found:
            named = f"{self.method or 'an unnamed method'} ({', '.join(self.names)})"
            raise UsageError(
                f"weights quantized by {named} are not decoded",
                file=self.place,
                got=named,
                want="compressed-tensors without zero points, fp8, modelopt (FP8, NVFP4, MXFP8) or mxfp4",
                next_step=COPY_CODES,
            )
        return known

    @property
    def _groups(self) -> list[Mapping[str, Any]]:
        """Groups of compressed-tensors whose weights are quantized."""
        groups = self.values.get("config_groups") if self.method == "compressed-tensors" else None
        listed = groups.values() if isinstance(groups, Mapping) else ()
        return [each for each in listed if isinstance(each, Mapping) and isinstance(each.get("weights"), Mapping)]

    @property
    def _format(self) -> str:
        return str(self.values.get("format", ""))

    @property
    def _algorithms(self) -> list[Any]:
        """``quant_algo`` of ModelOpt, or those of its layers."""
        layers = self.values.get("quantized_layers")
        listed = layers.values() if isinstance(layers, Mapping) else (self.values,)
        return [each.get("quant_algo") for each in listed if isinstance(each, Mapping)]


COPY_CODES = either(f"omit {option('dequantize', True)} to copy them", "decode them with the tool that made them")
"""The next step for weights that xrank does not decode."""
_ALGORITHMS = {
    "FP8": "MODELOPT_FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "MODELOPT_FP8_CHANNEL",
    "FP8_PC_PT": "MODELOPT_FP8_CHANNEL",
    "NVFP4": "MODELOPT_NVFP4",
    "W4A16_NVFP4": "MODELOPT_NVFP4",
    "MXFP8": "MXFP8",
}
"""ModelOpt's ``quant_algo`` of weights that no factors smooth."""


def _find_encoding(group: Mapping[str, Any], default: str) -> Encoding | None:
    """Return the encoding of a group of compressed-tensors; None if xrank does not have it."""
    from xrank.engine import encodings  # sources that are not quantized do not need this module

    weights, form = group["weights"], group.get("format") or default
    kind, num_bits, size = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("group_size")
    # A group's order of columns would be in weight_g_idx, and zero points in weight_zero_point.
    if weights.get("symmetric") is False or weights.get("actorder") in (True, "group", "dynamic"):
        return None
    strategy = weights.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
    shape = {"tensor": (0, 0), "channel": (1, 0), "block": weights.get("block_structure")}.get(strategy, (1, size))
    known = {
        ("float-quantized", "float", 8): "FP8_DYNAMIC",
        ("int-quantized", "int", 8): "W8A8",
        ("int-quantized", "int", 4): "W8A8",  # four bits, each code in a byte
        ("pack-quantized", "int", 8): "W8A16",
        ("pack-quantized", "int", 4): "W4A16",
        ("nvfp4-pack-quantized", "float", 4): "NVFP4A16",
        ("mxfp4-pack-quantized", "float", 4): "MXFP4A16",
        ("mxfp8-quantized", "float", 8): "MXFP8",
    }
    form = f"{kind}-quantized" if form == "naive-quantized" else form
    name = known.get((form, kind, num_bits))
    if isinstance(shape, str):  # as older versions wrote it: 128x128
        shape = tuple(map(int, shape.split("x")))
    return None if name is None or shape is None else replace(getattr(encodings, name), block=tuple(shape))


def find_stored_scheme(
    config: Mapping[str, Any] | None, companions: Iterable[CompanionFile] = ()
) -> StoredScheme | None:
    """Return the quantization that a model's config.json, an object in it, or a file beside it declares."""
    for section in (config or {}, *(each for each in (config or {}).values() if isinstance(each, Mapping))):
        for key in DECLARING_KEYS:
            if isinstance(values := section.get(key), Mapping) and values:
                return StoredScheme(values)
    file = next((each for each in companions if each.name in DECLARING_FILES), None)
    if file is None:
        return None
    values = read_config(file.path)
    inner = values.get("quantization", values)
    details = inner if isinstance(inner, Mapping) else {}
    return StoredScheme({"quant_method": DECLARING_FILES[file.name], **details}, file.name)


def describe_quantization(scheme: StoredScheme | None, tensors: Iterable[_Tensor]) -> dict[str, Any] | None:
    """Return the facts about a model's quantization for a report; None if no file declares one and no tensor shows one.

    ``num_ignored`` counts the matrices that are not quantized.
    """
    nbytes = Counter[str]()
    counts = Counter[str]()
    for tensor in tensors:
        is_scale = _SCALE.search(tensor.name.rpartition(".")[2]) or tensor.name.endswith(("_shape", "_g_idx"))
        is_code = not is_scale and _is_payload(tensor)
        kind = "scales" if is_scale else "weights" if is_code else "others" if len(tensor.shape) > 1 else "vectors"
        counts[kind] += 1
        nbytes[kind] += prod(tensor.shape) * dtypes.dtype(tensor.dtype).nbytes
    if scheme is None and not counts["weights"]:
        return None
    return {
        "schemes": [] if scheme is None else list(scheme.names),
        "method": None if scheme is None else scheme.method,
        "place": None if scheme is None else scheme.place,
        "num_quantized": counts["weights"],
        "num_ignored": counts["others"],
        "weight_nbytes": nbytes["weights"],
        "scale_nbytes": nbytes["scales"] if counts["weights"] else 0,
        "ignored": [] if scheme is None else list(scheme.ignored),
    }


def find_packed(tensors: Iterable[_Tensor], config: Mapping[str, Any] | None) -> set[str]:
    """Return the tensors whose shapes are not those of the weights that they contain.

    They are integer payloads, and 4-bit weights of bitsandbytes, which trainers store as bf16 for FSDP
    (``bnb_4bit_quant_storage``).
    """
    listed = list(tensors)
    declared = find_stored_scheme(config)
    packed = {tensor.name for tensor in listed if not dtypes.dtype(tensor.dtype).is_float}
    if declared is not None and declared.is_four_bit:
        packed |= {tensor.name for tensor in listed if len(tensor.shape) == 2 and tensor.shape[1] == 1}
    return packed | {tensor.name.removesuffix(".absmax") for tensor in listed if tensor.name.endswith(".absmax")}


def check_quantization(
    found: FoundSource, tensors: Iterable[_Tensor], config: Mapping[str, Any] | None, *, is_transformed: bool = False
) -> tuple[tuple[str, str], ...]:
    """Hold the quantization that config.json declares against the tensors of a model, in both directions.

    Tensors that a function of the caller makes (`is_transformed`) may have a quantization that only the caller knows.
    """
    listed = list(tensors)
    if config is None or not listed:
        return ()
    declared = find_stored_scheme(config, found.companions)
    packed = find_packed(listed, config)
    payloads = [each for each in listed if _is_payload(each) or (each.name in packed and len(each.shape) > 1)]
    # A scale may be a payload by its type, as in MXFP4 and NVFP4.
    payloads = [each for each in payloads if not _SCALE.search(each.name.rpartition(".")[2])]
    scaled, bare = _divide(payloads, listed) if payloads else ([], [])
    if declared is None:
        if not scaled:
            return ()
        if is_transformed or not is_known_type(config.get("model_type")):
            text = f"{plural(len(scaled), 'tensor')} with scales, such as {scaled[0]}, and config.json has no "
            text += "quantization_config: the program that loads the model needs to know the quantization"
            return (("quantization-not-declared", text),)
        raise ContradictionError(
            f"{scaled[0]} is quantized, and config.json has no quantization_config: transformers would read the "
            f"quantized values as weights",
            tensor=scaled[0],
            file=found.config_path,
            got=f"{plural(len(scaled), 'tensor')} with scales",
            want="a config.json that declares it",
            next_step=_edit_config(found, "with its quantization_config"),
        )
    # Files beside config.json may be left from another form of the model.
    method = declared.method if declared.place == "config.json" else ""
    if bare and method in _METHODS and any(len(each.shape) > 1 for each in payloads if each.name in bare):
        told = "save what the modules' state_dict() returns, which includes quant_state; or "
        step = (told if declared.is_four_bit else "") + "gather only the adapter, if there is one: "
        step += option("include", ".*lora_.*")
        got = f"{plural(len(bare), 'quantized tensor')} without scales, of {plural(len(listed), 'tensor')}"
        want = f"{_METHODS[method]} for it, as config.json declares {method}"
        problem = f"{bare[0]}: no file holds the scales of this quantized tensor"
        raise IncompleteError(problem, tensor=bare[0], file=found.place, got=got, want=want, next_step=step)
    has_any = bool(payloads) or any(_SCALE.search(each.name.rpartition(".")[2]) for each in listed)
    if has_any or is_transformed or declared.values.get("config_groups", True) in ({}, None):
        return ()
    if method not in _METHODS:
        named = f"by {method}" if method else "in " + declared.place
        return (("quantization-not-seen", f"a quantization {named} is declared, but no tensor shows it"),)
    got = f"{plural(len(listed), 'tensor')} without a scale, such as {listed[0].name} in {listed[0].dtype}"
    want = f"quantized weights with {_METHODS[method]}"
    step = _edit_config(found, "without quantization_config")
    problem = f"config.json declares weights quantized by {method}, but none is"
    raise ContradictionError(problem, tensor=listed[0].name, file=found.config_path, got=got, want=want, next_step=step)


def _divide(payloads: Sequence[_Tensor], listed: Iterable[_Tensor]) -> tuple[list[str], list[str]]:
    """Return the names of payloads that have a scale, and of those that have none."""
    of_module: dict[str, list[str]] = {}
    for each in listed:
        last = each.name.rpartition(".")[2]
        if _SCALE.search(last) and last not in _ZEROS:
            of_module.setdefault(_module(each.name), []).append(each.name)
    counts = Counter(_module(each.name) for each in payloads)
    scaled, bare = list[str](), list[str]()
    for each in payloads:
        beside = of_module.get(_module(each.name), ())
        # A module of experts has several payloads, each with scales of its own.
        stem = _FORM.sub("", each.name)
        is_found = any(name.startswith(stem) for name in beside) or (bool(beside) and counts[_module(each.name)] == 1)
        (scaled if is_found or each.name in of_module else bare).append(each.name)
    return scaled, bare


def _edit_config(found: FoundSource, how: str) -> str:
    if found.place is not None:
        return f"put the model's config.json {how} into {found.place}, then {AGAIN}"
    return f"give the module a config {how}"
