"""A vLLM server takes a trainer's steps by vLLM's own HTTP client, and answers over HTTP.

    python -m tests.oracle.refit_http FOLDER

The interpreter is one with vLLM. FOLDER is that of `tests.oracle.refit_vllm`. The first prompt's tokens after each step
must be those of a vLLM that has loaded the step's folder.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.oracle.refit_vllm import PROMPTS, install_plugin, make_wanted

STEPS = 3
_OPTIONS = (
    *("--weight-transfer-config", '{"backend": "xrank"}', "--skip-tokenizer-init", "--enforce-eager"),
    *("--dtype", "bfloat16", "--max-model-len", "64", "--max-num-seqs", "4", "--enable-scale-out"),
)


def _start_server(model: Path, port: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    # The command `vllm serve` looks for a package of that name, and the one for the CPU has another.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *_OPTIONS]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return subprocess.Popen(command, env=environment)


def main(folder: Path) -> None:
    """Serve, train and compare, and print one line."""
    install_plugin(folder / "plugin")
    wanted = make_wanted("llama", 1, STEPS, folder)
    import requests
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from xrank.integrations.vllm import register
    from xrank.integrations.vllm_trainer import XrankTrainerInitInfo

    register()
    models = folder / "llama"
    held = load_file(models / "0" / "model.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(dir=folder) as address, _start_server(models / "0", port) as server:
        try:
            while not _answers(requests, url):
                assert server.poll() is None, "the server did not start"
            info = XrankTrainerInitInfo(address, held, rank=0)
            client = HTTPVLLMWeightSyncClient(url)
            engine = WeightTransferTrainerFactory.trainer_init(info, client=client)
            for step in range(1, STEPS + 1):
                for name, tensor in load_file(models / str(step) / "model.safetensors").items():
                    held[name].copy_(tensor)
                engine.send_weights(step)
                assert _generate(requests, url) == wanted[step - 1]["tokens"][0], step
            # An update that fails leaves the engine as it was, and the next one is right.
            client.start_weight_update()
            try:
                client.update_weights({"step": 1})
            except requests.HTTPError as error:
                print(f"refused: {error}")
            else:
                raise AssertionError("a step that is past was taken")
            assert _generate(requests, url) == wanted[-1]["tokens"][0]
            engine.send_weights(STEPS + 1)
            assert _generate(requests, url) == wanted[-1]["tokens"][0]
            engine.shutdown()
        finally:
            server.terminate()
    print(f"a server took {STEPS} steps over HTTP")


def _generate(requests: Any, url: str) -> list[int]:
    sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": PROMPTS[0], "sampling_params": sampling}
    answer = requests.post(f"{url}/inference/v1/generate", json=body, timeout=60)
    answer.raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def _answers(requests: Any, url: str) -> bool:
    try:
        return bool(requests.get(f"{url}/health", timeout=1).ok)
    except requests.exceptions.RequestException:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
