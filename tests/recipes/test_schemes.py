"""Quantization schemes: the tensors that are quantized, their groups, and what config.json records."""

import pytest

from xrank.errors import UsageError
from xrank.layout.output_files import OutputTensor
from xrank.recipes.options import GatherOptions
from xrank.recipes.schemes import find_scheme, plan_quantization


def test_find_scheme_takes_any_case():
    assert find_scheme("fp8_block").name == "FP8_BLOCK"
    assert find_scheme("nvfp4", "modelopt").dialect == "modelopt"


@pytest.mark.parametrize("name", ["GPTQ", "FP8", "w4a16_awq"])
def test_schemes_with_calibration_are_refused(name):
    with pytest.raises(UsageError, match="llm-compressor"):
        find_scheme(name)


def test_unknown_scheme_lists_the_known_ones():
    with pytest.raises(UsageError, match="FP8_DYNAMIC, FP8_BLOCK, W8A8") as caught:
        find_scheme("FP9")
    assert "llm-compressor" not in str(caught.value)


def test_plan_fuses_q_k_v_and_keeps_the_head():
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkvo"]
    outputs = [OutputTensor(name, "BF16", (256, 256)) for name in ["lm_head.weight", *names]]
    planned = plan_quantization(find_scheme("NVFP4A16"), outputs)
    assert planned.groups == (tuple(names[:3]), (names[3],))
    assert planned.ignored == ("lm_head",)


def test_options_without_a_scheme_are_refused():
    with pytest.raises(UsageError, match="nothing is quantized"):
        GatherOptions(quantize_ignore=[".*o_proj"])
    assert GatherOptions(quantize="w8a8", quantize_ignore="re:.*o_proj$").quantize_ignore == ("re:.*o_proj$",)
