"""Every config class of transformers, PEFT and ModelOpt, and how a test makes one of it."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from modelopt.torch import quantization
from modelopt.torch.export import model_config
from modelopt.torch.quantization.config import QuantizeConfig
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedConfig
from transformers.utils.quantization_config import GPTQConfig

__all__ = ["NOT_MADE", "REFUSED", "is_same", "make_model_configs", "make_other_configs"]

PACKAGES = ("transformers", "peft", "modelopt")

ARGUMENTS: dict[str, dict[str, Any]] = {
    "peft.tuners.adalora.config:AdaLoraConfig": {"total_step": 10},
    "peft.tuners.cpt.config:CPTConfig": {"task_type": "CAUSAL_LM"},
    "transformers.generation.configuration_utils:SynthIDTextWatermarkingConfig": {"ngram_len": 5, "keys": [1, 2]},
    "transformers.utils.quantization_config:GPTQConfig": {"bits": 4},
    "transformers.utils.quantization_config:QuantizationConfigMixin": {"quant_method": "awq"},
    "transformers.utils.quantization_config:TorchAoConfig": {"quant_type": "int4_weight_only"},
}
"""Arguments of classes that have no default for all of them."""

NOT_MADE = {
    "Gemma4AssistantConfig": "its defaults fail its own checks",
    "NougatConfig": "transformers maps its encoder's type to no class",
    "ModeloptBaseRuleConfig": "abstract",
    "BaseWatermarkingConfig": "abstract",
    "PeftConfigLike": "a protocol",
    "WhisperGenerationConfigLike": "a protocol",
    "AutoConfig": "a factory",
    "AdamssConfig": "needs scikit-learn",
    "CompressedTensorsConfig": "needs compressed-tensors",
    "HqqConfig": "needs hqq",
    "QuarkConfig": "needs quark",
    "TorchAoConfig": "needs torchao",
    "SubConfigSpec": "the description of a class",
    "HfDeepSpeedConfig": "not a config: it configures DeepSpeed's process",
    "HfTrainerDeepSpeedConfig": "not a config: it configures DeepSpeed's process",
    "_LazyConfigMapping": "a table of classes",
    "_PerLayerConfigView": "a view of a config",
    "_RawConfig": "a file as read",
    "ModelTypeConfig": "a table's row, whose values are functions",
}
"""Classes of which the test makes no instance, and why."""

REFUSED = {
    "GenerationConfig": "not a dataclass",
    "BarkCoarseGenerationConfig": "not a dataclass",
    "BarkFineGenerationConfig": "not a dataclass",
    "BarkGenerationConfig": "not a dataclass",
    "BarkSemanticGenerationConfig": "not a dataclass",
    "KernelConfig": "not a dataclass",
    "ConfigArgs": "not a dataclass: the texts of docstrings",
    "AutoQuantizationConfig": "not a dataclass: a factory",
    "NeptuneMissingConfiguration": "an exception",
    "BackboneConfigMixin": "without a config, not a dataclass",
    "HeterogeneousConfigMixin": "without a config, not a dataclass",
    "RotaryEmbeddingConfigMixin": "without a config, not a dataclass",
    "PEFTAttributeConfig": "a field is a function",
    "PEFTConfig": "a field is a function",
    "ShiraConfig": "a field is a function",
}
"""Classes that gathers refuse by name, and why."""


def make_model_configs() -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield the name and a config of every model of transformers, with attributes that are not fields."""
    _import_all("transformers.models", "configuration_")
    classes = sorted(_subclasses(PreTrainedConfig), key=_name)
    for name, config in _instances(classes):
        # from_pretrained leaves these on configs of quantized and remote models.
        config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        config.auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
        config.unknown_key = {"nested": [1, (2.5, None)], "size": torch.Size([2])}
        config._name_or_path = "folder/model"
        yield name, config


def make_other_configs() -> Iterator[tuple[str, Any]]:
    """Yield the name and an instance of every other class of the three packages that is called a config."""
    _import_all("peft", "config")
    _import_all("modelopt.torch", "config")
    _import_all("transformers.utils", "quantization_config")
    found = {
        _name(item): item
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").split(".")[0] in PACKAGES
        for item in list(vars(module).values())
        if isinstance(item, type) and "Config" in item.__name__ and item.__module__.split(".")[0] in PACKAGES
    }
    classes = [found[name] for name in sorted(found) if not issubclass(found[name], PreTrainedConfig)]
    yield from _instances(classes)
    yield (
        "LoRA",
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 2}, task_type="CAUSAL_LM"),
    )
    yield "GPTQ", GPTQConfig(bits=4, dataset=["some text"])
    for name in sorted(name for name in vars(quantization) if name.endswith("_CFG")):
        yield name, QuantizeConfig(**getattr(quantization, name))
    linear = model_config.LinearConfig(weight=torch.ones(2, 3).half(), weights_scaling_factor=torch.tensor(0.5))
    qkv = model_config.QKVConfig(q=linear, k=linear, v=model_config.LinearConfig(weight=torch.zeros(1, 3)))
    attention = model_config.AttentionConfig(qkv=qkv, dense=linear, rotary_dim=2)
    yield "a layer", model_config.DecoderLayerConfig(attention=attention, num_attention_heads=4)


def _instances(classes: list[type]) -> Iterator[tuple[str, Any]]:
    for kind in classes:
        if kind.__name__ in NOT_MADE:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make: Callable[..., Any] = kind
            yield _name(kind), make(**ARGUMENTS.get(_name(kind), {}))


def _import_all(package: str, part: str) -> None:
    """Import the package's modules that have this part in the last part of their name."""
    transformers.logging.set_verbosity_error()
    path = importlib.import_module(package).__path__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(path, f"{package}.", onerror=lambda name: None):
            if part in module.name.rpartition(".")[2]:
                importlib.import_module(module.name)


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*(_subclasses(one) for one in kind.__subclasses__()))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same, class by class and attribute by attribute."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, float):
        return repr(one) == repr(other)  # also where it is not a number
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if hasattr(one, "__dict__") and not isinstance(one, type):
        slots = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
        return is_same(vars(one), vars(other)) and all(
            is_same(getattr(one, slot, None), getattr(other, slot, None)) for slot in slots
        )
    return bool(one == other)
