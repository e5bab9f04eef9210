"""The demo piece by piece: four real ranks train, the gather equals torch's own copy, damage is refused."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,  # and `make demo` is the same
    pytest.mark.timeout(180),  # each of five processes imports torch and transformers
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the examples need transformers"),
]

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples")


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)


def run_example(name, *arguments):
    return run(os.path.join(EXAMPLES, name), *arguments)


def gather(workspace, out):
    return run("-m", "xrank", "gather", "--workspace", workspace, "--out", out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the workspace of four ranks, the reference, and what the training printed."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_example(
        "train_shards.py", "--ranks", 4, "--workspace", folder / "workspace", "--reference", folder / "reference"
    )
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "printed").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def model(trained):
    done = gather(trained / "workspace", trained / "model")
    assert done.returncode == 0, done.stderr
    assert "30 tensors, every element exactly once" in done.stdout
    return trained / "model"


def raw_tensors(file):
    """Return dtype, shape, first and last place of each tensor of a safetensors file, and the file's bytes."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in header.items()
    }, content


def test_the_training_trains(trained):
    losses = [float(word) for word in (trained / "printed").read_text().splitlines()[0].partition("loss ")[2].split()]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1


def test_the_gather_equals_what_torch_puts_together(trained, model):
    import torch

    wanted = torch.load(trained / "reference" / "reference.pt", weights_only=True)["state_dict"]
    found, content = raw_tensors(model / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, (dtype, shape, start, end) in found.items():
        assert (dtype, shape) == ("BF16", list(wanted[name].shape)), name
        assert content[start:end] == wanted[name].view(torch.uint8).numpy().tobytes(), name


def test_the_comparison_passes(trained, model):
    done = run_example("compare_model.py", model, trained / "reference")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "equal    30 names and dtypes, 830,400 bytes of tensors, 64,064 logits\n"


def test_the_comparison_fails_on_one_byte_of_the_result(trained, model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    name = "model.layers.2.self_attn.v_proj.weight"
    _, _, start, _ = raw_tensors(file)[0][name]
    with open(file, "r+b") as content:
        content.seek(start)
        byte = content.read(1)[0]
        content.seek(start)
        content.write(bytes([byte ^ 1]))
    done = run_example("compare_model.py", tmp_path / "model", trained / "reference")
    assert done.returncode == 1
    assert f"{name}: 1 of 6,144 bytes differ" in done.stderr


# A part of a norm lies on two ranks, the other two parts on one.
@pytest.mark.parametrize(
    ("rank", "tensor"),
    [(0, "lm_head.weight"), (2, "model.layers.1.mlp.up_proj.weight"), (3, "model.norm.weight")],
)
def test_a_flipped_bit_in_the_workspace_is_refused(trained, tmp_path, rank, tensor):
    flipped = run_example(
        "flip_byte.py", trained / "workspace", tmp_path / "damaged", "--rank", rank, "--tensor", tensor
    )
    assert flipped.returncode == 0, flipped.stderr
    done = gather(tmp_path / "damaged", tmp_path / "out")
    assert done.returncode == 4
    assert done.stdout == ""
    assert f"CorruptError: {tensor}, " in done.stderr
    assert f"rank {rank}'s {tmp_path / 'damaged'}/rank_{rank}_state.pth" in done.stderr
    assert os.listdir(tmp_path) == ["damaged"]
