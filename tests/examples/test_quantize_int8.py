"""Four real ranks quantize, and the folder is what one process makes of the whole model; a failure leaves no folder."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.slow

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples")
SCRIPT = os.path.join(EXAMPLES, "quantize_int8.py")


def run(*command):
    done = subprocess.run([sys.executable, "-W", "error", *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def read_model(folder):
    """Return all tensors, after a look at the files: the index names each once, and no file is over the limit."""
    from safetensors.numpy import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(os.listdir(folder)) == sorted(
        ["config.json", "model.safetensors.index.json", "xrank_manifest.json", *files]
    )
    tensors = {}
    for file in files:
        shard = load_file(folder / file)
        assert sum(tensor.nbytes for tensor in shard.values()) <= 200_000
        assert shard.keys() == {name for name, where in index["weight_map"].items() if where == file}
        tensors |= shard
    assert len(files) > 1 and index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


@pytest.fixture(scope="module")
def unsharded():
    """The whole model, in this process alone."""
    spec = importlib.util.spec_from_file_location("quantize_int8", SCRIPT)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return {name: weight.numpy() for layer in example.LAYERS for name, weight in example.new_layer(layer).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized") / "new" / "int8"
    done = run(SCRIPT, "--out", folder)
    assert done.stderr == ""
    assert done.stdout == f"gathered  1,189,376 bytes from 4 ranks (tp 2 x pp 2) into {folder}\n"
    assert os.listdir(folder.parent) == ["int8"]
    return folder


def check_tensors(found, unsharded):
    """Compare with another quantizer, NumPy's arithmetic, of the whole weights."""
    wanted = {}
    for name, weight in unsharded.items():
        if "_proj." in name:
            scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
            wanted[name], wanted[f"{name}_scale"] = np.rint(weight / scale).astype(np.int8), scale
        else:
            wanted[name] = weight
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        assert found[name].tobytes() == want.tobytes(), name


def test_the_folder_equals_the_unsharded_model_quantized(folder, unsharded):
    check_tensors(read_model(folder), unsharded)


def test_no_weight_is_off_by_more_than_half_a_scale(folder, unsharded):
    found = read_model(folder)
    scales = [name for name in found if name.endswith("_scale")]
    assert len(scales) == 7 * 5
    for name in scales:
        weight = name.removesuffix("_scale")
        assert found[weight].dtype == np.int8 and found[name].shape == (len(found[weight]), 1)
        scale = found[name].astype(np.float64)
        off = np.abs(found[weight] * scale - unsharded[weight]) / scale
        assert off.max() <= 0.5 + 127 * 2**-24, weight  # the division that was rounded is of float32


def test_the_config_says_what_engines_need(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 5
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["format"]) == ("compressed-tensors", "int-quantized")
    assert quantization["ignore"] == ["lm_head"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert weights == {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}


def test_another_number_of_ranks_under_torchrun_makes_the_same_folder(folder, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = run(*launcher, SCRIPT, "--out", tmp_path / "int8")
    assert "from 2 ranks (tp 2 x pp 1)" in done.stdout
    assert sorted(os.listdir(tmp_path / "int8")) == sorted(os.listdir(folder))
    for file in os.listdir(folder):
        assert (tmp_path / "int8" / file).read_bytes() == (folder / file).read_bytes(), file


# What `spawn` starts, one process for each rank and nobody who ends the others: each has to hear of the failure.
FAILING_RANK = """
import sys, time
rank, num_ranks, failing = map(int, sys.argv[1:4])
where, folder = sys.argv[4:]
import quantize_int8 as example

gather = example.get_tensors_parallel

def fail(*arguments, **options):
    print(time.monotonic(), flush=True)
    raise OSError("no more of this")

def gather_or_fail(part, ranks, *, key):
    return fail() if key == where else gather(part, ranks, key=key)

if rank == failing and where == "writing":
    example.save_model = fail
elif rank == failing:
    example.get_tensors_parallel = gather_or_fail
example.run_rank(rank, num_ranks, f"file://{folder}/rendezvous", f"{folder}/models/int8")
"""


# Of 4 ranks, layer 3 is the second of the second stage, which rank 2 gathers and quantizes.
@pytest.mark.parametrize(("num_ranks", "failing", "where"), [(4, 3, "layer 3"), (2, 0, "writing")])
def test_a_rank_that_raises_is_named_by_all_and_leaves_nothing(tmp_path, num_ranks, failing, where):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([EXAMPLES, *sys.path]), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", FAILING_RANK, *map(str, (rank, num_ranks, failing, where, tmp_path))],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert time.monotonic() - float(said[failing][0]) < 60, "far less than any deadline"
    for rank, (_, errors) in enumerate(said):
        assert ranks[rank].returncode == 1, errors
        wanted = "OSError: no more of this" if rank == failing else f"RankFailedError: rank {failing} failed: "
        # Below its last line stands what an error got, wanted, and what to do.
        assert wanted in errors[errors.rindex("Traceback") :]
    assert not (tmp_path / "models").exists()
