"""Signatures of gathers, as model-signing's own command judges them, and its signatures as xrank does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands.made_workspaces import leave
from tests.commands.test_signing import flip, make_keys
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model

pytest.importorskip("model_signing")


def model_signing(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_model_signing_accepts_a_bundle_and_refuses_a_flipped_byte(tmp_path: Path) -> None:
    leave(tmp_path / "run")
    private, public = make_keys(tmp_path)
    gather_checkpoint(tmp_path / "run", tmp_path / "model", recipe="none", sign=private, attest=True)
    verify = ("verify", "key", tmp_path / "model", "--signature", tmp_path / "model" / "model.sig")
    accepted = model_signing(*verify, "--public_key", public)
    assert accepted.returncode == 0 and "Verification succeeded" in accepted.stdout, accepted
    weights = next((tmp_path / "model").glob("*.safetensors"))
    flip(weights, weights.stat().st_size - 1)
    refused = model_signing(*verify, "--public_key", public)
    assert refused.returncode != 0 and weights.name in refused.stdout + refused.stderr, refused


def test_a_bundle_of_model_signing_is_verified(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "inner").mkdir(parents=True)
    torch.save(torch.ones(3), model / "weights.bin")
    (model / "inner" / "config.json").write_text("{}")
    private, public = make_keys(tmp_path)
    signature = tmp_path / "model.sig"
    made = model_signing("sign", "key", model, "--signature", signature, "--private_key", private)
    assert made.returncode == 0, made
    assert verify_model(model, signature=signature, public_key=public).ok
    flip(model / "inner" / "config.json", 0)
    report = verify_model(model, signature=signature, public_key=public)
    assert report.exit_code == 4 and "inner/config.json" in str(report.fault)
