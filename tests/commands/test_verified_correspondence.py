"""``xrank verify --against`` where names or element types differ for a reason: tied, cast or left out as recorded."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.bench import Bench, Ended, refusal, run
from tests.commands.made_workspaces import CONFIG, leave, made_model
from xrank.commands.gather import gather_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {**CONFIG, "tie_word_embeddings": True}
LAYOUTS = {EMBEDDING: "[v/tp, h]", HEAD: "[v/tp, h]", "model.norm.weight": "[h]"}


def verify(one: Path, two: Path, *options: object) -> Ended:
    return run("verify", one, "--against", two, "--json", *options)


def good(one: Path, two: Path) -> dict[str, Any]:
    """Verify both ways round; return the second report, its notes by their codes."""
    for pair in ((two, one), (one, two)):
        ended = verify(*pair)
        assert ended.exit_code == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    report["notes"] = {note["code"]: note["message"] for note in report["notes"]}
    return report


def bad(one: Path, two: Path, says: str, *, tensor: str) -> dict[str, Any]:
    """Verify both ways round and see each refused for that tensor; return the second error."""
    refusal(verify(two, one), "ContradictionError", says=[says], tensor=tensor)
    return refusal(verify(one, two), "ContradictionError", says=[says], tensor=tensor)


class TestTied:
    """One model in every form that frameworks leave it in: the head shared, repeated, or not there."""

    @pytest.fixture
    def model(self) -> dict[str, torch.Tensor]:
        embedding = made_model()["embed.weight"]
        return {EMBEDDING: embedding, HEAD: embedding, "model.norm.weight": made_model()["norm.weight"]}

    def saved(self, folder: Path, model: dict[str, torch.Tensor], config: object = TIED) -> Path:
        """Save a model as transformers does: without its head."""
        folder.mkdir(exist_ok=True)
        save_file({name: tensor for name, tensor in model.items() if name != HEAD}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def binary(self, folder: Path, model: dict[str, torch.Tensor]) -> Path:
        folder.mkdir(exist_ok=True)
        torch.save(model, folder / "pytorch_model.bin")
        return folder

    def test_all_forms_of_one_model_are_equal(self, bench: Bench, model: dict[str, torch.Tensor]) -> None:
        transformers = self.saved(bench.folder / "transformers", model)
        shared = self.binary(bench.folder / "shared", model)
        leave(bench.workspace, model, layouts=LAYOUTS, config=TIED)  # under both names, each with bytes of its own
        forms = [transformers, shared, bench.workspace]
        for source in tuple(forms):
            out = bench.folder / f"{source.name}.gathered"
            gather_checkpoint(source, out, base_model=transformers)
            assert HEAD not in load_file(out / "model.safetensors")
            forms.append(out)
        for one, two in permutations(forms, 2):
            ended = verify(one, two)
            assert ended.exit_code == 0, (one.name, two.name, ended.stderr)
            assert json.loads(ended.stdout)["plan"]["num_tensors"] == 2, (one.name, two.name)
        said = f"{HEAD} is only in {shared}, where it is tied to {EMBEDDING}, with which it was compared"
        assert good(transformers, shared)["notes"]["tied"] == said
        said = f"{HEAD} is only in {bench.workspace}, where it is tied to {EMBEDDING}, with which it was compared"
        assert good(transformers, bench.workspace)["notes"]["tied"] == said
        assert "tied" not in good(shared, bench.workspace)["notes"]

    def test_a_head_that_is_not_its_embedding(self, bench: Bench, model: dict[str, torch.Tensor]) -> None:
        transformers = self.saved(bench.folder / "transformers", model)
        model[HEAD] = model[EMBEDDING].clone()
        model[HEAD][3, 5] += 0.5
        leave(bench.workspace, model, layouts=LAYOUTS, config=TIED)
        alone = f"{HEAD} is only in {bench.workspace}, where it differs from {EMBEDDING}"
        error = bad(transformers, bench.workspace, alone, tensor=HEAD)
        assert error["got"] == "1 of 64 elements differ, the first at element [3, 5], by at most 0.5"
        gather_checkpoint(transformers, bench.out)
        bad(bench.out, bench.workspace, alone, tensor=HEAD)

    def test_an_embedding_that_differs_is_named_itself(self, bench: Bench, model: dict[str, torch.Tensor]) -> None:
        shared = self.binary(bench.folder / "shared", model)
        gather_checkpoint(shared, bench.out)
        changed = {**model, EMBEDDING: model[EMBEDDING] * 2}
        transformers = self.saved(bench.folder / "transformers", changed)
        bad(transformers, shared, f"{EMBEDDING} differs between", tensor=EMBEDDING)
        bad(transformers, bench.out, f"{EMBEDDING} differs between", tensor=EMBEDDING)

    def test_what_nothing_ties_is_a_tensor_too_many(self, bench: Bench, model: dict[str, torch.Tensor]) -> None:
        model[HEAD] = model[EMBEDDING].clone()
        leave(bench.workspace, model, layouts=LAYOUTS)
        transformers = self.saved(bench.folder / "transformers", model, CONFIG)
        bad(transformers, bench.workspace, f"{HEAD} is only in {bench.workspace}", tensor=HEAD)

    def test_cast_besides(self, bench: Bench, model: dict[str, torch.Tensor]) -> None:
        shared = self.binary(bench.folder / "shared", model)
        transformers = self.saved(bench.folder / "transformers", model)
        leave(bench.workspace, model, layouts=LAYOUTS, config=TIED)
        for source in (shared, transformers):
            out = bench.folder / f"{source.name}.bf16"
            gather_checkpoint(source, out, dtype="bf16")
            for other in (shared, transformers, bench.workspace):
                assert good(out, other)["plan"]["num_tensors"] == 2
        model[HEAD] = model[EMBEDDING].clone()
        model[HEAD][0, 0] = 9
        leave(bench.workspace, model, layouts=LAYOUTS, config=TIED)
        bad(bench.folder / "transformers.bf16", bench.workspace, "where it differs from", tensor=HEAD)
        bad(bench.folder / "shared.bf16", bench.workspace, f"{HEAD} differs between", tensor=HEAD)


class TestRecorded:
    def test_casts_are_compared_as_they_were_made(self, bench: Bench) -> None:
        model = leave(bench.workspace)
        gather_checkpoint(bench.workspace, bench.out, dtype="bf16", keep_fp32="norm.*")
        report = good(bench.out, bench.workspace)
        assert report["plan"]["num_tensors"] == 5
        manifest = bench.out / "xrank_manifest.json"
        assert report["notes"]["cast"] == f"2 tensors were compared after the cast F32 -> BF16, as {manifest} says"
        held = load_file(bench.out / "model.safetensors")
        held["embed.weight"].view(torch.int16)[7, 2] ^= 1  # the last bit of a bfloat16
        save_file(held, bench.out / "model.safetensors")
        error = bad(bench.out, bench.workspace, "embed.weight differs between", tensor="embed.weight")
        assert error["index_range"] == "element [7, 2]" and error["got"].startswith("1 of 128 elements differ")
        # Bits that the cast drops make no difference.
        gather_checkpoint(bench.workspace, bench.out, dtype="bf16", overwrite=True)
        model["embed.weight"] = model["embed.weight"].bfloat16().float() + 2**-12
        leave(bench.workspace, model)
        good(bench.out, bench.workspace)

    def test_what_no_manifest_says_is_a_difference(self, bench: Bench) -> None:
        leave(bench.workspace)
        gather_checkpoint(bench.workspace, bench.out, dtype="bf16")
        (bench.out / "xrank_manifest.json").unlink()
        bad(bench.out, bench.workspace, "differs in type or shape", tensor="embed.weight")
        gather_checkpoint(bench.workspace, bench.out, dtype="bf16", overwrite=True)
        gather_checkpoint(bench.workspace, bench.folder / "halves", dtype="fp16")
        bad(bench.out, bench.folder / "halves", "differs in type or shape", tensor="embed.weight")

    def test_what_was_left_out_is_not_compared(self, bench: Bench) -> None:
        leave(bench.workspace)
        gather_checkpoint(bench.workspace, bench.out, exclude=("norm.*", "steps"))
        report = good(bench.out, bench.workspace)
        assert report["plan"]["num_tensors"] == 3
        told = f"not compared, as {bench.out / 'xrank_manifest.json'} says left out: norm.weight, steps"
        assert report["notes"]["excluded"] == told
        held = load_file(bench.out / "model.safetensors")
        del held["up.weight"]
        save_file(held, bench.out / "model.safetensors")
        bad(bench.out, bench.workspace, f"up.weight is only in {bench.workspace}", tensor="up.weight")
