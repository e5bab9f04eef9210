"""Keras' own tests of its distribution API, with `xrank.distribution` in the place of Keras' module."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

LEFT_OUT = {
    "test_data_shard_id": "patches numbers of processes that contradict the mesh; here each device is a process",
    "test_distribute_tf_dataset_multiple_replicas_per_process": "TensorFlow's datasets",
    "test_distribute_tf_dataset_error_not_divisible": "TensorFlow's datasets",
    "test_unknown_batch_size": "TensorFlow's datasets",
    "test_num_model_replicas_one": "TensorFlow's datasets",
    "test_unsupported_dataset_type": "patches a private attribute of Keras' class",
}

# The file imports TensorFlow for its datasets; the tests that run make none.
RUNNER = """
import sys, pathlib, pytest
import keras.src.distribution.distribution_lib as lib
import xrank.distribution
from xrank.distribution.distributions import Distribution
xrank.distribution.Distribution = Distribution  # Keras does not export it either
source = pathlib.Path(lib.__file__).with_name("distribution_lib_test.py").read_text()
line = "from keras.src.distribution import distribution_lib\\n"
assert line in source and "import tensorflow as tf" in source
source = source.replace("import tensorflow as tf", "tf = None")
folder = pathlib.Path(sys.argv[1])
source = source.replace(line, "from xrank import distribution as distribution_lib\\n")
(folder / "test_keras_file.py").write_text(source)
left_out = " or ".join(sys.argv[2:])
options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-W", "ignore", "-rA"]
sys.exit(pytest.main([*options, "-k", f"not ({left_out})", str(folder)]))
"""


def test_keras_own_tests_pass(tmp_path):
    environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUNNER), str(tmp_path), *LEFT_OUT],
        capture_output=True, text=True, env=environment, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = done.stdout.count("PASSED ")
    assert passed == 13, done.stdout[-3000:]
