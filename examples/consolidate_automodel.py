"""Lets the `consolidate.sh` that NeMo Automodel writes beside each checkpoint merge it with xrank.

    CONSOLIDATION_TOOL=examples/consolidate_automodel.py bash checkpoints/epoch_0_step_20/model/consolidate.sh

Tensors get the types of the model that training started from, as with Automodel's own tool.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

DTYPES = {"": "keep", "F32": "fp32", "BF16": "bf16", "BF16, F32": "bf16", "F16": "fp16", "F16, F32": "fp16"}
parser = argparse.ArgumentParser()  # refuses options that the script passes for more, such as --diffusers-compatible
for name in ("--input-dir", "--output-dir", "--cast-dtype", "--model-name", "--num-threads", "--backend"):
    parser.add_argument(name)
options = parser.parse_args()
metadata = Path(options.input_dir, ".hf_metadata")  # config and tokenizer, as training left them
types = metadata / "fqn_to_dtype_mapping.json"
types = json.loads(types.read_text()) if types.exists() else {}
found = ", ".join(sorted({*types.values()}))
dtype = options.cast_dtype or DTYPES.get(found)
if dtype is None:
    parser.error(f"the base model has tensors of {found}: set CAST_DTYPE=bf16")
command = [sys.executable, "-m", "xrank", "gather", options.input_dir, "--out", options.output_dir]
command += ["--base-model", str(metadata), "--dtype", dtype]
if not options.cast_dtype and dtype in ("bf16", "fp16"):
    command += [f"--keep-fp32={re.escape(name)}" for name in types if types[name] == "F32"]
os.execv(sys.executable, command)
