"""``xrank verify --against`` of models that were gathered with ``--adapter``, and the checkpoints they were made of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.bench import Bench, Ended, refusal, run
from tests.commands.adapted_models import (
    ALPHA,
    ATTENTION,
    BASE,
    DOWN,
    RANK,
    P,
    adapter,
    base_model,
    leave_adapted,
    merged,
    saved_names,
    wrapped,
    write_json,
)
from tests.commands.made_workspaces import flip, leave, raw, rewrite, state_of
from xrank.commands.gather import gather_checkpoint

WEIGHTS = "adapter/adapter_model.safetensors"
META = "lora_train_meta.json"
SAVED_A = f"{P}{ATTENTION}.lora_A.weight"
LORA_A = f"{P}{ATTENTION}.lora_A.default.weight"


def verify(one: Path, two: Path, *options: object) -> Ended:
    return run("verify", one, "--against", two, "--json", *options)


def good(one: Path, two: Path, *options: object) -> dict[str, Any]:
    """Verify both ways round; return the second report, its notes by their codes."""
    for pair in ((two, one), (one, two)):
        ended = verify(*pair, *options)
        assert ended.exit_code == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    report["notes"] = {note["code"]: note["message"] for note in report["notes"]}
    return report


def bad(one: Path, two: Path, says: str, *, tensor: str, kind: str = "ContradictionError") -> dict[str, Any]:
    """Verify both ways round and see each refused for that tensor; return the second error."""
    refusal(verify(two, one), kind, says=[says], tensor=tensor)
    return refusal(verify(one, two), kind, says=[says], tensor=tensor)


def gathered(bench: Bench, choice: str, name: str | None = None, **options: Any) -> Path:
    out = bench.folder / (name or choice)
    gather_checkpoint(bench.workspace, out, adapter=choice, **options)
    return out


def edit(file: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    tensors = load_file(file)
    change(tensors[name])
    save_file(tensors, file)


class TestSeparate:
    @pytest.mark.parametrize("max_shard_size", ["5GB", "300"])
    def test_what_was_gathered_is_as_its_source(self, bench: Bench, max_shard_size: str) -> None:
        model, lora = leave_adapted(bench.workspace)
        out = gathered(bench, "separate", max_shard_size=max_shard_size)
        report = good(out, bench.workspace)
        assert report["proof"] == {"against": str(bench.workspace), "num_adapter_tensors": 4, "num_checksums": 36}
        assert report["plan"]["num_tensors"] == len(model) + len(lora)
        assert report["plan"]["nbytes"] == sum(tensor.nbytes for tensor in (*model.values(), *lora.values()))
        assert report["notes"]["adapter"] == "4 of the compared tensors belong to an adapter"
        assert "adapter-beside" not in report["notes"]
        assert "every value as in" in run("verify", out, "--against", bench.workspace).stdout

    @pytest.mark.parametrize("name", saved_names(adapter()))
    def test_a_changed_byte_of_the_adapter(self, bench: Bench, name: str) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "separate")
        edit(out / WEIGHTS, name, lambda tensor: tensor.view(torch.uint8)[1, 6].bitwise_xor_(1))
        error = bad(out, bench.workspace, f"{name} differs between", tensor=name)
        assert error["got"].startswith("1 of ") and error["index_range"] == "element [1, 1]"

    @pytest.mark.parametrize("name", base_model())
    def test_a_changed_byte_of_the_base_model(self, bench: Bench, name: str) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "separate")
        edit(out / "model.safetensors", name, lambda tensor: tensor.view(torch.uint8).view(-1)[-1].bitwise_xor_(4))
        bad(out, bench.workspace, f"{name} differs between", tensor=name)

    def test_of_two_gathers_the_adapters_are_compared_too(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        one, two = gathered(bench, "separate", "one"), gathered(bench, "separate", "two")
        assert good(one, two)["proof"]["num_adapter_tensors"] == 4
        edit(two / WEIGHTS, SAVED_A, lambda tensor: tensor.mul_(2))
        bad(one, two, "differs between", tensor=SAVED_A)
        (two / "xrank_manifest.json").unlink()
        bad(one, two, "differs between", tensor=SAVED_A)
        (one / "xrank_manifest.json").unlink()
        bad(one, two, "differs between", tensor=SAVED_A)

    def test_a_folder_that_is_gone(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "separate")
        shutil.rmtree(out / "adapter")
        for pair in ((out, bench.workspace), (bench.workspace, out), (out, out)):
            says = [f"{WEIGHTS} is in the manifest but not in"]
            refusal(verify(*pair), "IncompleteError", says=says, file="adapter_model.safetensors")
        (out / "xrank_manifest.json").unlink()  # then nothing says that there was one: it must have been merged
        bad(out, bench.workspace, "differs from the merge of the adapter in", tensor=f"{ATTENTION}.weight")

    @pytest.mark.parametrize("change", ["less", "more"])
    def test_a_tensor_too_few_or_many(self, bench: Bench, change: str) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "separate")
        tensors = load_file(out / WEIGHTS)
        name = f"{P}score.weight"
        if change == "more":
            tensors[name] = torch.ones(2)
        else:
            for name in [name for name in tensors if DOWN in name]:
                del tensors[name]
        save_file(tensors, out / WEIGHTS)
        ended = verify(out, bench.workspace)
        assert ended.exit_code == 4 and "is only in" in ended.stderr, ended.stderr

    def test_another_alpha(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "separate")
        config = json.loads((out / "adapter/adapter_config.json").read_text())
        write_json(out / "adapter/adapter_config.json", {**config, "lora_alpha": 2 * ALPHA})
        says = [f"{ATTENTION}: the scale of its adapter differs"]
        error = refusal(verify(out, bench.workspace), "ContradictionError", says=says, tensor=SAVED_A)
        assert error["got"].startswith("5, as ") and error["want"].startswith("2.5, as ")

    def test_a_configuration_that_the_gather_was_given(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        config = (bench.workspace / META).rename(bench.folder / "config.json")
        out = gathered(bench, "separate", adapter_config=config)
        notes = good(out, bench.workspace)["notes"]
        assert notes["adapter-config"].startswith("rank and alpha were not compared: no file contains the rank")
        assert "adapter-config" not in good(out, bench.workspace, "--adapter-config", config)["notes"]
        other = write_json(bench.folder / "other.json", {"r": RANK, "lora_alpha": 1})
        ended = verify(out, bench.workspace, "--adapter-config", other)
        refusal(ended, "ContradictionError", says=["the scale of its adapter differs", "other.json says"])
        ended = verify(out, bench.workspace, "--adapter-config", bench.folder / "none.json")
        refusal(ended, "UsageError", says=["cannot be read"])

    def test_an_adapter_alone(self, bench: Bench) -> None:
        state = {P + name: tensor for name, tensor in adapter().items()}
        leave(bench.workspace, state, layouts=dict.fromkeys(state, "[m, n]"))
        write_json(bench.workspace / META, {"r": RANK, "lora_alpha": ALPHA})
        out = gathered(bench, "separate")
        assert "adapter-alone" not in good(out, bench.workspace)["notes"]
        edit(out / "adapter_model.safetensors", SAVED_A, lambda tensor: tensor.neg_())
        bad(out, bench.workspace, "differs between", tensor=SAVED_A)

    def test_the_adapters_folder_alone(self, bench: Bench) -> None:
        model, _ = leave_adapted(bench.workspace)
        out = gathered(bench, "separate")
        for other in (bench.workspace, out):
            report = good(out / "adapter", other)
            left = f"{len(model)} tensors of {other} were not compared: {out / 'adapter'} has no base model"
            assert report["notes"]["adapter-alone"] == left and report["plan"]["num_tensors"] == 4
        edit(out / WEIGHTS, SAVED_A, lambda tensor: tensor.neg_())
        bad(out / "adapter", bench.workspace, "differs between", tensor=SAVED_A)

    def test_dora_and_what_was_trained_whole(self, bench: Bench) -> None:
        state = wrapped(base_model(), adapter())
        magnitude, score = f"{P}{DOWN}.lora_magnitude_vector", P + "score.weight"
        state[magnitude + ".default.weight"] = torch.rand(8)
        state[P + "score.original_module.weight"] = torch.rand(2, 8)
        state[P + "score.modules_to_save.default.weight"] = torch.rand(2, 8)
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        write_json(bench.workspace / META, {"r": RANK, "lora_alpha": ALPHA})
        out = gathered(bench, "separate")
        assert good(out, bench.workspace)["proof"]["num_adapter_tensors"] == 6
        for file, name in ((WEIGHTS, magnitude), (WEIGHTS, score), ("model.safetensors", "score.weight")):
            edit(out / file, name, lambda tensor: tensor.neg_())
            bad(out, bench.workspace, f"{name} differs between", tensor=name)
            edit(out / file, name, lambda tensor: tensor.neg_())
        good(out, bench.workspace)
        assert good(out / "adapter", bench.workspace)["plan"]["num_tensors"] == 6
        edit(out / WEIGHTS, score, lambda tensor: tensor.neg_())
        bad(out / "adapter", bench.workspace, f"{score} differs between", tensor=score)

    def test_names_that_were_tied(self, bench: Bench) -> None:
        base = base_model()
        base["lm_head.weight"] = base["model.embed_tokens.weight"].clone()
        config = {"model_type": "toy", "tie_word_embeddings": True}
        leave_adapted(bench.workspace, base, layouts={"lm_head.weight": "[v/tp, h]"}, config=config)
        for choice in ("separate", "merge"):
            out = gathered(bench, choice)
            assert not [file for file in out.rglob("*.safetensors") if "lm_head.weight" in load_file(file)]
            num_saved = 4 if choice == "separate" else 0
            assert good(out, bench.workspace)["plan"]["num_tensors"] == len(base) - 1 + num_saved  # a tie is one tensor
        good(bench.folder / "separate", bench.folder / "merge")

    def test_an_adapter_that_belongs_to_neither_is_told(self, bench: Bench) -> None:
        leave(bench.workspace)
        gather_checkpoint(bench.workspace, bench.out)
        (bench.workspace / "adapter").mkdir()
        save_file(saved_names(adapter()), bench.workspace / WEIGHTS)
        notes = good(bench.out, bench.workspace)["notes"]
        assert notes["adapter-beside"].startswith(
            f"{bench.workspace}: {WEIGHTS} belongs to an adapter, and is left out"
        )


class TestMerge:
    @pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_what_was_gathered_is_what_a_merge_gives(self, bench: Bench, base: torch.dtype) -> None:
        model, _ = leave_adapted(bench.workspace, base_model(base))
        out = gathered(bench, "merge")
        report = good(out, bench.workspace)
        assert report["proof"] == {"against": str(bench.workspace), "num_merged": 2, "num_checksums": 36}
        assert report["plan"]["num_tensors"] == len(model)
        assert "compared as merged: 2 LoRA pairs are merged: W + 2.5 * B @ A" in report["notes"]["adapter"]
        assert f"{META} says r 4 and lora_alpha 10" in report["notes"]["adapter-config"]

    @pytest.mark.parametrize("name", base_model())
    def test_a_changed_byte_of_the_result(self, bench: Bench, name: str) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "merge")
        edit(out / "model.safetensors", name, lambda tensor: tensor.view(torch.uint8).view(-1)[-2].bitwise_xor_(1))
        is_merged = name in (f"{ATTENTION}.weight", f"{DOWN}.weight")
        says = f"{name} in {out} differs from the merge of the adapter in" if is_merged else f"{name} differs between"
        error = bad(out, bench.workspace, says, tensor=name)
        assert error["got"].startswith("1 of ") and Path(error["file"]).parent in (out, bench.workspace)

    @pytest.mark.parametrize("half", ["A", "B"])
    @pytest.mark.parametrize("module", [ATTENTION, DOWN])
    def test_another_adapter(self, bench: Bench, module: str, half: str) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "merge")
        lora = adapter()
        lora[f"{module}.lora_{half}.default.weight"][-1, -1] += 1
        leave_adapted(bench.workspace, None, lora)
        bad(out, bench.workspace, "differs from the merge", tensor=f"{module}.weight")

    def test_where_in_a_tensor_of_many_windows(self, bench: Bench) -> None:
        made = torch.Generator().manual_seed(2)
        base = {"up.weight": torch.randn(3001, 1000, generator=made).bfloat16()}
        lora = {"up.lora_A.default.weight": torch.randn(3, 1000, generator=made)}
        lora["up.lora_B.default.weight"] = torch.randn(3001, 3, generator=made)
        layouts = {"up.weight": "[f/~tp/~dp, h]", **dict.fromkeys(lora, "[r, n]")}
        leave_adapted(bench.workspace, base, lora, layouts=layouts, meta={"r": 3, "lora_alpha": 1})
        out = gathered(bench, "merge")
        few = ("--workers", 1, "--max-memory", "2MB")
        good(out, bench.workspace, *few)
        edit(out / "model.safetensors", "up.weight", lambda tensor: tensor[2900:, 7].fill_(torch.nan))
        for options in ((), few):
            ended = verify(out, bench.workspace, *options)
            error = refusal(ended, "ContradictionError", says=["differs from the merge"], tensor="up.weight")
            assert error["index_range"] == "element [2900, 7]"
            assert error["got"].startswith("101 of 3,001,000 elements differ, the first at element [2900, 7]")
            assert error["got"].endswith("101 of them by NaN")

    def test_another_alpha_than_the_manifest_says(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "merge")
        write_json(bench.workspace / META, {"r": RANK, "lora_alpha": 2 * ALPHA})
        error = bad(out, bench.workspace, "differs from the merge", tensor=f"{ATTENTION}.weight")
        assert "xrank_manifest.json says W + 2.5 * (" in error["got"] and error["want"].startswith("W + 5.0 * (")
        assert "--adapter-config" in error["try"]

    def test_a_configuration_that_the_gather_was_given(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        config = (bench.workspace / META).rename(bench.folder / "config.json")
        out = gathered(bench, "merge", adapter_config=config)
        says = ["the merge of the adapter in", "cannot be computed: no file contains the rank", "--adapter-config"]
        refusal(verify(out, bench.workspace), "UsageError", says=says)
        good(out, bench.workspace, "--adapter-config", config)

    def test_a_base_model_alone_is_no_merge(self, bench: Bench) -> None:
        model, _ = leave_adapted(bench.workspace)
        bench.out.mkdir()
        save_file(model, bench.out / "model.safetensors")
        bad(bench.out, bench.workspace, "differs from the merge", tensor=f"{ATTENTION}.weight")

    def test_what_no_gather_merges_is_refused_by_name(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        out = gathered(bench, "merge")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_qalora": True}
        write_json(bench.workspace / "adapter_config.json", config)
        says = ["cannot be computed", "is more than W + scale * B @ A", "merged the same way"]
        assert refusal(verify(out, bench.workspace), "UsageError", says=says)["got"] == "use_qalora"

    def test_a_model_kept_apart_against_one_merged(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        apart, merge = gathered(bench, "separate"), gathered(bench, "merge")
        assert good(apart, merge)["proof"]["num_merged"] == 2
        edit(merge / "model.safetensors", f"{DOWN}.weight", lambda tensor: tensor.neg_())
        bad(apart, merge, "differs from the merge", tensor=f"{DOWN}.weight")

    def test_what_was_trained_whole_is_the_models(self, bench: Bench) -> None:
        state = wrapped(base_model(), adapter())
        state[P + "score.original_module.weight"] = torch.rand(2, 8)
        state[P + "score.modules_to_save.default.weight"] = torch.rand(2, 8)
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        write_json(bench.workspace / META, {"r": RANK, "lora_alpha": ALPHA})
        out = gathered(bench, "merge")
        notes = good(out, bench.workspace)["notes"]
        assert "score.original_module.weight: left out" in notes["adapter-trained"]
        edit(out / "model.safetensors", "score.weight", lambda tensor: tensor.neg_())
        bad(out, bench.workspace, "score.weight differs", tensor="score.weight")
        apart = gathered(bench, "separate")
        good(apart, bench.workspace)
        bad(apart, out, "score.weight differs", tensor="score.weight")
        good(apart, gathered(bench, "merge", overwrite=True))

    def test_damage_and_doubt_in_the_checkpoint_are_its_own(self, bench: Bench) -> None:
        _, lora = leave_adapted(bench.workspace)
        out = gathered(bench, "merge")
        rewrite(bench.workspace, 2, lambda state: state["weight"][LORA_A].mul_(2))
        for pair in ((out, bench.workspace), (bench.workspace, out)):
            says = [f"{LORA_A}: rank 2 holds different values than rank 0"]
            refusal(verify(*pair), "ContradictionError", says=says, rank=2, tensor=LORA_A)
        leave_adapted(bench.workspace)
        part = lora[LORA_A.removeprefix(P)]
        path = state_of(bench.workspace, 3)
        flip(path, path.read_bytes().index(raw(part)) + 3)
        for pair in ((out, bench.workspace), (bench.workspace, out)):
            refusal(verify(*pair), "CorruptError", says=["checksum of rank 3's"], rank=3, tensor=LORA_A)


def test_a_merged_checkpoint_that_disagrees_with_itself(bench: Bench) -> None:
    model, lora = leave_adapted(bench.workspace)
    other, name = bench.folder / "other", f"{DOWN}.weight"
    leave(other, merged(model, lora), layouts=BASE)
    good(other, bench.workspace)
    rewrite(other, 2, lambda state: state["weight"][name].mul_(2))  # a replica of rank 0's
    bad(other, bench.workspace, f"{name}: rank 2 holds different values than rank 0", tensor=name)


def test_names_of_the_model_itself_are_no_adapter(bench: Bench) -> None:
    """Such as Phi-4-multimodal's, whose own layers are named as PEFT's."""
    model = {"x.base_layer.weight": torch.rand(4, 4), "x.lora_A.vision.weight": torch.rand(2, 4)}
    model["x.lora_B.vision.weight"] = torch.rand(4, 2)
    leave(bench.workspace, model, layouts=dict.fromkeys(model, "[m/tp, n]"))
    (bench.folder / "base").mkdir()
    save_file(model, bench.folder / "base/model.safetensors")
    gather_checkpoint(bench.workspace, bench.out, base_model=bench.folder / "base")
    assert "adapter" not in good(bench.out, bench.workspace)["notes"]
    edit(bench.out / "model.safetensors", "x.lora_A.vision.weight", lambda tensor: tensor.neg_())
    bad(bench.out, bench.workspace, "differs between", tensor="x.lora_A.vision.weight")


def test_damage_of_the_other_side_is_told_in_its_names(bench: Bench) -> None:
    model = leave(bench.workspace)
    gather_checkpoint(bench.workspace, bench.out)
    path = state_of(bench.workspace, 0)
    flip(path, path.read_bytes().index(raw(model["up.weight"].chunk(2)[0].chunk(2)[0])))
    error = refusal(verify(bench.out, bench.workspace), "CorruptError", tensor="up.weight", rank=0)
    assert error["message"].startswith("up.weight, ")


def test_a_configuration_of_no_adapter(bench: Bench) -> None:
    leave(bench.workspace)
    gather_checkpoint(bench.workspace, bench.out)
    config = write_json(bench.folder / "config.json", {"r": RANK, "lora_alpha": ALPHA})
    ended = verify(bench.out, bench.workspace, "--adapter-config", config)
    refusal(ended, "UsageError", says=["contains an adapter to configure", "leave --adapter-config out"])
    ended = run("verify", bench.out, "--json", "--adapter-config", config)
    refusal(ended, "UsageError", says=["--adapter-config was given without --against"])
