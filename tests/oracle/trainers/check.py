"""Gathers cells as a user does, and compares the models with what the framework saves of its own live model.

    python -m tests.oracle.trainers.check FOLDER [TEXT...] [--table FILE]

The command is ``xrank gather CHECKPOINT --out MODEL``, with ``--base-model`` where the checkpoint lacks config.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

from tests.oracle.trainers.cells import CELLS, Cell, choose_cells
from tests.oracle.trainers.families import FAMILIES, Family, load_model, make_batch
from tests.oracle.trainers.make import REPOSITORY
from tests.oracle.trainers.results import write_table

__all__ = ["Result", "check_cell"]


@dataclass(frozen=True)
class Result:
    """The result of a cell.

    Attributes:
        name: of the cell.
        exit_code: of xrank.
        fault: the first difference or the error; empty where all is equal.
    """

    name: str
    exit_code: int
    fault: str


def check_cell(cell: Cell, root: Path) -> Result:
    """Gather a cell's folder and compare the model with its reference."""
    return _compare(cell, root, _gather(cell, root))


def _gather(cell: Cell, root: Path) -> subprocess.CompletedProcess[str]:
    """Run the command that a user types."""
    out = root / "gathered" / cell.name
    shutil.rmtree(out, ignore_errors=True)
    checkpoint, base = root / cell.name / cell.checkpoint, root / "base" / cell.base_model
    command = [sys.executable, "-m", "xrank", "gather", str(checkpoint), "--out", str(out)]
    command += [] if any(checkpoint.rglob("config.json")) else ["--base-model", str(base)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=900)


def _compare(cell: Cell, root: Path, ended: subprocess.CompletedProcess[str]) -> Result:
    """Return the first difference between what was gathered and the reference."""
    out, base = root / "gathered" / cell.name, root / "base" / cell.base_model
    if ended.returncode:
        first = ended.stderr.partition("xrank: ")[2].partition("\n")[0] or ended.stderr[-300:]
        return Result(cell.name, ended.returncode, " ".join(first.replace(f"{root}/", "").split())[:400])
    compare = _compare_adapters if cell.is_adapter else _compare_models
    try:
        fault = next(compare(FAMILIES[cell.family], out, root / cell.name / "reference", base), "")
    except Exception as error:  # transformers raises errors of every kind, and each is a fault of this one model
        fault = f"{type(error).__name__}: {error}"
    return Result(cell.name, 0, " ".join(fault.replace(f"{root}/", "").split())[:400])


def _compare_models(family: Family, out: Path, reference: Path, base: Path) -> Iterator[str]:
    """Yield every difference between two model folders."""
    yield from _compare_tensors(
        _read_tensors(out, "model"), _name_as_trainer(_read_tensors(reference, "model"), reference)
    )
    got, loading = load_model(family, out, output_loading_info=True, dtype=torch.float32)
    yield from (f"from_pretrained: {kind} {sorted(map(str, names))[:3]}" for kind, names in loading.items() if names)
    yield from _compare_outputs(family, got, load_model(family, reference, dtype=torch.float32))


def _name_as_trainer(want: dict[str, torch.Tensor], reference: Path) -> dict[str, torch.Tensor]:
    """Return the reference's tensors under the names in the Trainer's own model file, if these are older ones.

    Within ZeRO-3, from_pretrained counts LayerNorm.gamma as converted although the file had none, and the Trainer's
    save_pretrained writes it.
    """
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): n for n in want
    }
    files = [path.parent for path in (reference.parent / "run").rglob("model*.safetensors")]
    if files and _read_tensors(files[0], "model").keys() == old.keys():
        return {name: want[new] for name, new in old.items()}
    return want


def _compare_adapters(family: Family, out: Path, reference: Path, base: Path) -> Iterator[str]:
    """Yield every difference between PEFT folders, and between a base model and the one that was written beside."""
    folder = next((path.parent for path in out.rglob("adapter_model*.safetensors")), out)
    yield from _compare_tensors(_read_tensors(folder, "adapter_model"), _read_tensors(reference, "adapter_model"))
    if not (folder / "adapter_config.json").exists():  # FSDP's shards have none beside them
        shutil.copy(reference / "adapter_config.json", folder)
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in (folder, reference)]
    for name in ("r", "lora_alpha", "target_modules", "target_parameters", "fan_in_fan_out", "peft_type"):
        got, want = (sorted(c[name]) if isinstance(c.get(name), list) else c.get(name) for c in configs)
        if got != want:
            yield f"adapter_config.json: {name} is {got}, not {want}"
    if (out / "config.json").exists() and folder != out:
        yield from _compare_tensors(_read_tensors(out, "model"), _read_tensors(base, "model"))
    models = [PeftModel.from_pretrained(load_model(family, base), path) for path in (folder, reference)]
    yield from _compare_outputs(family, *models)


def _read_tensors(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a folder."""
    files = sorted(folder.glob(f"{stem}*.safetensors"))
    assert files, f"{folder} holds no {stem}*.safetensors, but {sorted(p.name for p in folder.iterdir())}"
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _compare_tensors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield every difference in names, shapes, dtypes and values."""
    if missing := sorted(want.keys() - got.keys()):
        yield f"{len(missing)} names are missing, such as {missing[0]}"
    if more := sorted(got.keys() - want.keys()):
        yield f"{len(more)} names too many, such as {more[0]}"
    for name in sorted(want.keys() & got.keys()):
        if got[name].shape != want[name].shape:
            yield f"{name}: shape {list(got[name].shape)}, not {list(want[name].shape)}"
        elif got[name].dtype != want[name].dtype:
            yield f"{name}: {got[name].dtype}, not {want[name].dtype}"
        elif not torch.equal(got[name], want[name]):
            yield f"{name}: other values"


def _compare_outputs(family: Family, got: torch.nn.Module, want: torch.nn.Module) -> Iterator[str]:
    """Yield a difference between what two models compute."""
    batch = {name: tensor[None] for name, tensor in make_batch(family).items()}
    with torch.no_grad():
        if not torch.equal(got.eval()(**batch).logits, want.eval()(**batch).logits):
            yield "the logits differ"


def main() -> int:
    """Check the chosen cells that have been made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--table", type=Path, help="Markdown file that receives these results and earlier ones")
    arguments = parser.parse_args()
    _silence()
    results: list[Result] = []
    root = arguments.root.resolve()
    record = root / "results.json"
    earlier = json.loads(record.read_text()) if record.exists() else []
    found = {fields["name"]: Result(**fields) for fields in earlier}
    cells = [cell for cell in choose_cells(arguments.texts) if (root / cell.name / "reference").exists()]
    with ThreadPoolExecutor(2) as pool:  # gathers run ahead; transformers itself is not safe in threads
        for cell, ended in zip(cells, pool.map(_gather, cells, [root] * len(cells)), strict=True):
            results.append(result := _compare(cell, root, ended))
            found[result.name] = result  # a run that is cut short leaves what it found
            record.write_text(json.dumps([vars(each) for each in found.values()], indent=1))
            print(f"{result.name}  {f'exit {result.exit_code}  ' if result.fault else 'ok'}{result.fault}", flush=True)
    if arguments.table:
        arguments.table.write_text(write_table(found[name] for name in CELLS if name in found))
    print(f"{sum(not result.fault for result in results)} of {len(results)} cells are right")
    return any(result.fault for result in results)


def _silence() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
