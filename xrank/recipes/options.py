"""The options of a conversion, checked before any file is read."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from xrank.engine.executor import Budget
from xrank.engine.replicas import ReplicaChoice
from xrank.errors import UsageError, option
from xrank.layout.tensor_name import compile_pattern
from xrank.system import count_cores
from xrank.words import repr_text

DTypeChoice: TypeAlias = Literal["keep", "base", "bf16", "fp16", "fp32"]
AdapterChoice: TypeAlias = Literal["separate", "merge", "both"]

_UNITS = {
    "": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip

_TORCH_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
KINDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""`DTypeChoice` -> safetensors name of the type."""


def parse_size(text: str | int, name: str) -> int:
    """Return the number of bytes in a text such as ``5GB`` or ``5G`` (decimal), ``1GiB`` (binary) or a plain number."""
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", str(text))
    nbytes = 0 if match is None else int(float(match[1]) * _UNITS.get(match[2].upper(), 0))
    if nbytes <= 0:
        raise wrong_value(name, text, "a size", "a size such as 5GB, 512MB or 1GiB")
    return nbytes


def wrong_value(name: str, value: object, must_be: str, want: str = "", *, got: str = "", step: str = "") -> UsageError:
    """Return the error that an option has a value that it may not have."""
    text = repr_text(value, 80)
    problem = f"{option(name)} must be {must_be}; got {got or text}"
    return UsageError(problem, got=text, want=want or must_be, next_step=step or "give such a value")


def dtype_choice(dtype: Any) -> DTypeChoice:
    """Return a dtype as `GatherOptions` takes it: the short name for torch's dtype or its name, ``"keep"`` for None."""
    # GatherOptions refuses values that it does not know.
    return cast(DTypeChoice, "keep" if dtype is None else _TORCH_NAMES.get(str(dtype).removeprefix("torch."), dtype))


def default_workers() -> int:
    """Return the default number of threads of a process: NFS servers choke on more than a few."""
    return min(4, count_cores())


class GatherOptions(Struct, frozen=True):
    """The options of a gather, named as `gather_checkpoint` names them. Creating the object checks every value."""

    dtype: DTypeChoice = "keep"
    keep_fp32: Sequence[str] = ()
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    max_shard_size: str | int = "5GB"
    max_memory: str | int = "64MB"
    workers: int | None = None
    replicas: ReplicaChoice = "verify"
    adapter: AdapterChoice | None = None
    """Treatment of LoRA adapters; None: separate, and a note names the other."""
    adapter_config: str | os.PathLike[str] | None = None
    """PEFT's ``adapter_config.json``, or a JSON object with r and lora_alpha; None: the one in the source."""
    overwrite: bool = False
    resume: bool = True
    verify: bool | None = None
    """Whether to read the stage back before the rename; None: only if the rename replaces an output."""
    dry_run: bool = False
    sign: str | os.PathLike[str] | None = None
    """File of the private key that signs the output."""
    attest: bool = False
    """Whether to add a signed statement about the origin of the output."""
    dequantize: bool = False
    """Whether quantized weights become floating-point tensors."""
    strict_pickles: bool = False
    """Whether to refuse a source whose pickles name classes or functions that frameworks do not write."""
    quantize: str | None = None
    """Name of the quantization scheme of the output, such as ``"FP8_BLOCK"``."""
    quantize_ignore: Sequence[str] = ()
    """Regular expressions of modules that are not quantized, besides embeddings, norms, heads, routers and towers."""
    quantization_error: bool = False
    """Whether to measure how far the quantized values are from the others."""
    dialect: str | None = None
    """Tool whose form the quantized folder has: ``"modelopt"``; None: llm-compressor, or DeepSeek by the scheme."""
    salvage: bool = False
    """Whether to write the whole tensors of a damaged source, with a list of the missing ones."""
    fill_from_base: Sequence[str] = ()
    """Regular expressions of the names that the base model fills in where the source's tensors are not whole."""
    missing: Collection[str] = ()
    """Names that are left out because they are not whole; a salvage finds them."""
    filled: Sequence[str] = ()
    """Names of the base model's tensors in place of the source's; a salvage finds them."""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> GatherOptions:
        """Return the options among a function's arguments, such as its ``locals()``; other names are left alone."""
        return cls(**{name: arguments[name] for name in cls.__struct_fields__ if name in arguments})

    def __post_init__(self) -> None:
        fill = partial(force_setattr, self)
        fill("dtype", dtype_choice(self.dtype))
        for name, allowed in (("dtype", DTypeChoice), ("replicas", ReplicaChoice), ("adapter", AdapterChoice)):
            value, choices = getattr(self, name), get_args(allowed)
            if value not in choices and (name, value) != ("adapter", None):
                listed = ", ".join(choices)
                raise wrong_value(name, value, f"one of {listed}", listed, step="give one of these values")
        for name in ("keep_fp32", "include", "exclude", "quantize_ignore", "fill_from_base"):
            given = getattr(self, name)
            fill(name, (given,) if isinstance(given, str) else tuple(given))
            for pattern in getattr(self, name):
                try:
                    compile_pattern(pattern.removeprefix("re:") if name == "quantize_ignore" else pattern)
                except ValueError as error:
                    want = "a regular expression for whole names, as Python's re takes them"
                    step = f"correct the expression ({error}); escape characters that are meant literally"
                    raise wrong_value(name, pattern, "a regular expression", want, step=step) from None
        if self.keep_fp32 and self.dtype == "keep":
            keep, dtype = option("keep_fp32"), option("dtype")
            raise UsageError(
                f"{keep} was given, but nothing is cast",
                got=option("keep_fp32", self.keep_fp32[0]),
                want=f"{dtype} with it",
                next_step=f"choose with {dtype} what others are cast to: base, bf16, fp16 or fp32; or leave {keep} out",
            )
        self._check_quantization()
        changing = next((option(name) for name in ("quantize", "dequantize", "sign") if getattr(self, name)), None)
        if changing is not None and (self.salvage or self.fill_from_base):
            asked = option("salvage", True) if self.salvage else option("fill_from_base")
            step = f"leave {changing} out, and do that to the whole model afterwards"
            raise UsageError(f"{asked} and {changing} were both given", got=changing, want=asked, next_step=step)
        if self.sign is not None:  # a key that cannot sign is refused now, not after the weights are written
            from xrank.formats.signature import read_signing_key

            read_signing_key(os.fspath(self.sign))
        elif self.attest:
            attest = option("attest", True)
            step = f"add {option('sign', metavar='KEY')}, or leave {attest} out"
            raise UsageError(
                f"{attest} was given without {option('sign')}", got="no key", want="a key that signs it", next_step=step
            )
        for name in ("max_shard_size", "max_memory"):
            parse_size(getattr(self, name), name)
        if self.workers is not None and self.workers < 1:
            raise wrong_value("workers", self.workers, "1 or more", step="give such a number, or leave it out")

    def _check_quantization(self) -> None:
        if self.dialect not in (None, "modelopt"):
            raise wrong_value("dialect", self.dialect, "modelopt", step="give this value, or leave it out")
        if self.quantize is not None:
            from xrank.recipes.schemes import find_scheme  # few calls need this module

            find_scheme(self.quantize, self.dialect)
            return
        for name in ("quantize_ignore", "quantization_error", "dialect"):
            if getattr(self, name):
                raise UsageError(
                    f"{option(name)} was given, but nothing is quantized",
                    got=option(name),
                    want=f"{option('quantize')} with it",
                    next_step=f"choose a scheme with {option('quantize')}, or leave {option(name)} out",
                )

    def leaves_out(self, name: str) -> bool:
        """Return whether `include` or `exclude` leaves out a tensor of that name."""
        is_excluded = name in self.missing or matches(self.exclude, name)
        return is_excluded or bool(self.include and not matches(self.include, name))

    def with_keep_fp32(self, patterns: Iterable[str]) -> GatherOptions:
        """Return these options with `keep_fp32` set to these patterns, unless the caller set it or nothing is cast."""
        return self if self.keep_fp32 or self.dtype == "keep" else replace(self, keep_fp32=tuple(patterns))

    @property
    def max_shard_nbytes(self) -> int:
        """Bytes of tensors in a file."""
        return parse_size(self.max_shard_size, "max_shard_size")

    @property
    def max_memory_nbytes(self) -> int:
        """Bytes of all buffers."""
        return parse_size(self.max_memory, "max_memory")

    @property
    def num_workers(self) -> int:
        """Threads of a process."""
        return default_workers() if self.workers is None else self.workers

    @property
    def budget(self) -> Budget:
        """Threads and buffers of a process."""
        return Budget.from_memory(self.max_memory_nbytes, self.num_workers)


def matches(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of these regular expressions matches a whole name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
