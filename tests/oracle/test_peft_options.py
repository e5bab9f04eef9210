"""PEFT's options under ZeRO-2, ZeRO-3, FSDP2 and alive: kept apart as PEFT saves them, merged as PEFT merges them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import xrank
from tests.oracle.save_peft import ENGINES, KINDS, make_adapted, make_base
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model
from xrank.errors import UsageError, XrankError

pytestmark = [
    pytest.mark.timeout(400),  # importing DeepSpeed and starting ranks takes most of it
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

TOKENS = torch.arange(24).reshape(2, 12)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
REFUSED = {
    # PEFT's merge is not W + scale * B @ A of these: rows are replaced, the norms of rows are set, biases are added.
    "cannot be merged": {"use_dora", "trainable_token_indices", "lora_bias"},
    # One of two tied tensors changes. PEFT's merge_and_unload changes both, or unties what save_pretrained ties.
    "is tied to": {"tied"},
}
MERGED_TIED = {"saved, both tied"}


def refusal_of(kind: str) -> str | None:
    """Return what the refusal to merge says; None for kinds that are merged."""
    found = [says for says, options in REFUSED.items() if options & KINDS[kind].keys() and kind not in MERGED_TIED]
    return found[0] if found else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all kinds of adapters, saved by two ranks, with what PEFT saves of the same models."""
    root = tmp_path_factory.mktemp("peft")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launch, "-m", "tests.oracle.save_peft", str(root), *KINDS],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        timeout=380,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    for name, is_tied in (("base", False), ("base-tied", True)):
        make_base(tied=is_tied).save_pretrained(root / name)
    for kind in KINDS:
        make_adapted(kind).save_pretrained(root / kind / "peft")
        for engine in ENGINES:
            for source in ("whole", "alone"):
                shutil.copy(saved_by_peft(root, kind) / CONFIG, root / kind / engine / source)
            shutil.copy(base_of(root, kind) / "config.json", root / kind / engine / "whole")
    return root


def saved_by_peft(folder: Path, kind: str) -> Path:
    """Return the folder of PEFT's files, which for an adapter with a name is a folder of that name."""
    return folder / kind / "peft" / KINDS[kind].get("adapter_name", "")


def base_of(folder: Path, kind: str) -> Path:
    return folder / ("base-tied" if KINDS[kind].get("tied") else "base")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


@cache
def trained_logits(kind: str) -> torch.Tensor:
    return logits(make_adapted(kind))


def load(base: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    return model if adapter is None else PeftModel.from_pretrained(model, str(adapter))


def assert_peft_saves(ours: Path, theirs: Path) -> None:
    """Check that a folder has the tensors and the configuration that PEFT saved.

    Only folders of PEFT's own names have what PEFT saves besides, and does not read or train: the biases of
    modules_to_save once more, and the base of an adapted embedding.
    """
    found, expected = load_file(ours / WEIGHTS), load_file(theirs / WEIGHTS)
    unread = re.compile(r".*\.((modules_to_save|original_module)\.bias|embed_tokens\.base_layer\.weight)")
    assert all(unread.fullmatch(name) for name in expected.keys() - found.keys())
    assert found.keys() <= expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    values = [json.loads((each / CONFIG).read_text()) for each in (ours, theirs)]
    for each in values:
        each["target_modules"] = sorted(each["target_modules"])
        del each["auto_mapping"]  # of a class's name, for AutoPeftModel
    assert values[0] == values[1]


def assert_separate(out: Path, adapter: Path, folder: Path, kind: str) -> None:
    assert_peft_saves(adapter, saved_by_peft(folder, kind))
    bases = [base_of(folder, kind), *([out] if adapter != out else [])]
    for base in bases:
        assert torch.equal(logits(load(base, adapter)), trained_logits(kind)), base


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
class TestEngines:
    def test_whole_model_kept_apart(self, folder: Path, tmp_path: Path, kind: str, engine: str) -> None:
        source = folder / kind / engine / "whole"
        gather_checkpoint(source, tmp_path / "out", adapter="separate")
        assert_separate(tmp_path / "out", tmp_path / "out/adapter", folder, kind)
        assert verify_model(tmp_path / "out", against=source).ok

    def test_adapter_alone(self, folder: Path, tmp_path: Path, kind: str, engine: str) -> None:
        source = folder / kind / engine / "alone"
        gather_checkpoint(source, tmp_path / "out")
        assert_separate(tmp_path / "out", tmp_path / "out", folder, kind)
        assert verify_model(tmp_path / "out", against=source).ok

    @pytest.mark.parametrize("source", ["whole", "alone"])
    def test_merged(self, folder: Path, tmp_path: Path, kind: str, engine: str, source: str) -> None:
        path = folder / kind / engine / source
        base = base_of(folder, kind) if source == "alone" else None
        assert_merges(kind, tmp_path / "out", gather_checkpoint, path, base_model=base)


def assert_merges(kind: str, out: Path, gather: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Check that a gather or export merges as PEFT does, or refuses to."""
    if (says := refusal_of(kind)) is not None:
        with pytest.raises(UsageError, match=says) as caught:
            gather(*args, out, adapter="merge", **options)
        assert "separate" in str(caught.value.next_step) and not out.exists()
        return
    gather(*args, out, adapter="merge", **options)
    merged = make_adapted(kind).merge_and_unload()
    torch.testing.assert_close(logits(load(out)), logits(merged), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
class TestOthers:
    def test_folder_that_peft_saved(self, folder: Path, tmp_path: Path, kind: str) -> None:
        source = folder / kind / "peft"
        gather_checkpoint(source, tmp_path / "out")
        assert_separate(tmp_path / "out", tmp_path / "out", folder, kind)
        assert verify_model(tmp_path / "out", against=source).ok
        assert_merges(kind, tmp_path / "merged", gather_checkpoint, source, base_model=base_of(folder, kind))

    def test_live_model(self, folder: Path, tmp_path: Path, kind: str) -> None:
        assert xrank.export_model(make_adapted(kind), tmp_path / "out").ok
        assert_separate(tmp_path / "out", tmp_path / "out/adapter", folder, kind)
        assert_merges(kind, tmp_path / "merged", xrank.export_model, make_adapted(kind))

    @pytest.mark.parametrize("engine", ["fsdp2", "peft", "zero3"])
    def test_configuration_of_rank_and_alpha(self, folder: Path, tmp_path: Path, kind: str, engine: str) -> None:
        """It is completed rightly, or refused with the whole configuration as the next step."""
        source = tmp_path / "run"
        shutil.copytree(saved_by_peft(folder, kind) if engine == "peft" else folder / kind / engine / "alone", source)
        (source / CONFIG).unlink()
        (tmp_path / "given.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
        options = KINDS[kind].keys() & {"rank_pattern", "trainable_token_indices"}
        try:
            gather_checkpoint(source, tmp_path / "out", adapter_config=tmp_path / "given.json")
        except XrankError as error:
            assert options and "adapter_config" in str(error.next_step)
            return
        assert not options
        if kind == "rslora":  # no tensor shows it
            return
        again = logits(load(base_of(folder, kind), tmp_path / "out"))
        assert torch.equal(again, trained_logits(kind))
