"""Quantized folders in stores: each byte is fetched about once, although windows share scales and borders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import xrank
from tests.storage.servers import Bucket, open_proxy


def test_codes_are_fetched_once(small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(8)]
    made = {name: torch.randn(1000, 3001).to(torch.float8_e4m3fn) for name in names}
    scales = {f"{name}_scale_inv": torch.rand(8, 24) for name in names}
    (tmp_path / "q").mkdir()
    save_file(made | scales, tmp_path / "q/model.safetensors")
    config = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    (tmp_path / "q/config.json").write_text(config)
    small_bucket.put_folder(tmp_path / "q", "q")
    with open_proxy(small_bucket.server) as proxy:
        for name, value in small_bucket.behind(proxy).environment().items():
            monkeypatch.setenv(name, value)
        proxy.restart()
        xrank.gather_checkpoint(f"{small_bucket.url}/q", tmp_path / "out", dequantize=True, max_memory="48MB")
        fetched_nbytes = sum(request.answered_nbytes for request in proxy.requests)
    xrank.gather_checkpoint(tmp_path / "q", tmp_path / "want", dequantize=True)
    got, want = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "want"))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    nbytes = (tmp_path / "q/model.safetensors").stat().st_size
    assert fetched_nbytes < 1.2 * nbytes
