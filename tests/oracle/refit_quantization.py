"""Compares `xrank.Quantization` with vLLM's own functions; run it with a Python that has vLLM 0.32."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization.utils.int8_utils import per_token_quant_int8
from vllm.utils.deep_gemm import per_block_cast_to_fp8

import xrank


def main() -> None:
    """Print the shapes and types that were equal bit by bit."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((256, 384), (130, 257), (1, 5), (512, 64)):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
            weight[0, 0] = 0
            made = xrank.Quantization("fp8", (128, 128))("w", weight)
            codes, scales = per_block_cast_to_fp8(weight, [128, 128])
            assert made["w"].view(torch.uint8).equal(codes.view(torch.uint8)), (shape, dtype)
            assert made["w_scale_inv"].equal(scales), (shape, dtype)
            print(f"fp8 by block, {dtype}, {shape}: equal")
            if torch.cuda.is_available():  # Triton runs on GPUs alone
                made = xrank.Quantization("int8", "channel")("w", weight)
                codes, scales = (part.cpu() for part in per_token_quant_int8(weight.cuda()))
                assert made["w_scale"].equal(scales), (shape, dtype)
                assert (made["w"].int() - codes.int()).abs().max() <= 1  # Triton rounds half away from zero
                print(f"int8 by channel, {dtype}, {shape}: equal scales")


if __name__ == "__main__":
    main()
