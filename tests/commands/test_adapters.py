"""LoRA adapters: merged bit for bit as the formula says, kept apart as PEFT's folder, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from tests.cli.bench import Bench, run
from tests.commands.adapted_models import (
    ALPHA,
    ATTENTION,
    DOWN,
    RANK,
    P,
    adapter,
    added,
    base_model,
    leave_adapted,
    merged,
    saved_names,
    wrapped,
    write_json,
)
from tests.commands.forked_ranks import ForkedRanks, forked_ranks
from tests.commands.made_workspaces import assert_holds, flip, leave, model_in, raw, state_of
from xrank.commands.checkpoint import open_checkpoint
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.verify import verify_model
from xrank.errors import ContradictionError, CorruptError, UsageError, XrankError
from xrank.readers.base import Hints
from xrank.readers.workspace import WorkspaceReader
from xrank.recipes.adapters import adapt
from xrank.recipes.options import GatherOptions

SCALE = ALPHA / RANK
MERGE: dict[str, Any] = {"adapter": "merge"}
SEPARATE: dict[str, Any] = {"adapter": "separate"}
LORA_A, LORA_B = (f"{ATTENTION}.lora_{half}.default.weight" for half in "AB")


def notes_of(report: Any) -> dict[str, str]:
    return dict(report.notes)


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "xrank_manifest.json").read_text())
    return found


def refusal(bench: Bench, kind: type[XrankError], match: str, **options: Any) -> XrankError:
    """Gather the bench's workspace and see it refused, with nothing left behind; return the error."""
    before = bench.names()
    with pytest.raises(kind, match=match) as caught:
        gather_checkpoint(bench.workspace, bench.out, **options)
    assert type(caught.value) is kind and bench.names() == before
    assert caught.value.next_step and caught.value.got
    if 'adapter="separate"' in str(caught.value.next_step):
        follow_separate(bench, options)
    return caught.value


def follow_separate(bench: Bench, options: dict[str, Any]) -> None:
    """Follow the advice to keep the adapter apart: each tensor of the source is copied, or it is refused again."""
    out = bench.folder / "as-advised"
    try:
        gather_checkpoint(bench.workspace, out, **{**options, **SEPARATE})
    except XrankError:
        assert not out.exists()
        return
    assert verify_model(out, against=bench.workspace).ok
    shutil.rmtree(out)


class TestChoice:
    def test_without_one_it_is_kept_apart_and_the_other_is_named(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace)
        ended = run("gather", bench.workspace, "--out", bench.out)
        assert ended.exit_code == 0 and "--adapter merge writes one model" in ended.stdout
        assert_holds(bench.out, model)
        assert_holds(bench.out / "adapter", saved_names(pairs))
        chosen = gather_checkpoint(bench.workspace, bench.folder / "chosen", **SEPARATE)
        assert "adapter-choice" not in notes_of(chosen)

    def test_open_checkpoint_takes_none(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        with pytest.raises(UsageError, match="contains a model and its adapter") as caught:
            open_checkpoint(bench.workspace)
        assert "open the output with xrank.open_checkpoint" in (caught.value.next_step or "")
        gather_checkpoint(bench.workspace, bench.out)
        assert set(open_checkpoint(bench.out / "adapter")) == set(saved_names(adapter()))

    @pytest.mark.parametrize("options", [{"adapter": "merge"}, {"adapter": "separate", "adapter_config": "file"}])
    def test_where_there_is_no_adapter(self, bench: Bench, options: dict[str, Any]) -> None:
        leave(bench.workspace)
        refusal(bench, UsageError, "contains no adapter", **options)

    @pytest.mark.parametrize("is_alone", [False, True])
    def test_both(self, bench: Bench, is_alone: bool) -> None:
        """The model is that of a merge, and the folder in it that of an adapter kept apart."""
        model, _ = leave_adapted(bench.workspace)
        options: dict[str, Any] = {}
        if is_alone:
            gather_checkpoint(bench.workspace, bench.folder / "base", **SEPARATE)
            shutil.move(bench.folder / "base/adapter", bench.folder / "source")
            options = {"base_model": bench.folder / "base"}
        source = bench.folder / "source" if is_alone else bench.workspace
        for choice in ("separate", "merge", "both"):
            gather_checkpoint(source, bench.folder / choice, adapter=choice, **options)
        kept = bench.folder / "separate" / ("" if is_alone else "adapter")
        assert_holds(bench.folder / "both", model_in(bench.folder / "merge"))
        assert model_in(bench.folder / "both").keys() == model.keys()
        assert_holds(bench.folder / "both/adapter", model_in(kept))
        config = "adapter_config.json"
        assert (bench.folder / "both/adapter" / config).read_text() == (kept / config).read_text()
        assert verify_model(bench.folder / "both").ok
        if not is_alone:
            assert verify_model(bench.workspace, against=bench.folder / "both").ok

    def test_words_that_are_none(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        bench.refused("UsageError", "--adapter", "keep", says=["separate, merge, both"])
        bench.refused("UsageError", "--adapter-config", "file", says=["cannot be read: No such file"])

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("base_model.model.x.ia3_l.default", "IA3"),
            ("x.ia3_l", "IA3"),
            ("base_model.model.x.hada_w1_a", "LoHa"),
            ("base_model.model.x.lokr_w2_a.default", "LoKr"),
            ("base_model.model.x.oft_R.default.weight", "OFT"),
            ("base_model.model.x.boft_s", "BOFT"),
            ("base_model.model.x.lora_E.default", "AdaLoRA"),
            ("base_model.model.x.vera_lambda_b", "VeRA"),
            ("base_model.model.x.fourierft_spectrum", "FourierFT"),
            ("base_model.model.x.ln_tuning_layers.default.weight", "LN tuning"),
            ("base_model.model.x.trainable_tokens_delta.default", "trainable tokens without LoRA"),
            ("base_model.model.x.self_attn.adaption_gate", "an adaption prompt"),
            ("base_model.model.x.c3a_kernel.default", "an adapter of PEFT that is not LoRA"),
            ("base_model.model.x.base_layer.weight", "an adapter of PEFT that is not LoRA"),
            ("prompt_encoder.default.embedding.weight", "a prompt"),
            ("prompt_encoder.default.trainable_embedding", "a prompt"),
            ("prompt_embeddings", "a prompt"),
            ("decoder.layers.0.linear_qkv.to_wrap.weight", "Megatron-Bridge's LoRA"),
            ("decoder.layers.0.linear_qkv.adapter.linear_in.weight", "Megatron-Bridge's LoRA"),
        ],
    )
    def test_one_that_is_not_lora(self, bench: Bench, name: str, kind: str) -> None:
        model = {"x.weight": torch.rand(4, 4), name: torch.rand(2, 4)}
        leave(bench.workspace, model, layouts=dict.fromkeys(model, "[m/tp, n]"))
        for options in ({}, SEPARATE, MERGE):
            error = refusal(bench, UsageError, f"contains {kind}.*, which xrank can neither copy", **options)
            assert error.tensor == name
        (problem,) = inspect_source(bench.workspace).details["problems"]
        assert name == problem["tensor"]
        (bench.folder / "base").mkdir()
        save_file(model, bench.folder / "base/model.safetensors")
        gather_checkpoint(bench.workspace, bench.out, base_model=bench.folder / "base")
        assert_holds(bench.out, model)

    def test_a_prompt_encoder_that_is_not_pefts(self, bench: Bench) -> None:
        """As transformers' SamModel and SamHQModel have it (models/sam/modeling_sam.py: SamPromptEncoder)."""
        names = ("shared_embedding.positional_embedding", "mask_embed.conv1.weight", "no_mask_embed.weight")
        model = {f"prompt_encoder.{name}": torch.rand(4, 4) for name in (*names, "point_embed.0.weight")}
        save_file(model, bench.folder / "model.safetensors")
        gather_checkpoint(bench.folder / "model.safetensors", bench.out)
        assert_holds(bench.out, model)

    def test_one_that_lies_beside_the_model_is_told(self, bench: Bench) -> None:
        model = leave(bench.workspace)
        (bench.workspace / "lora_adapter").mkdir()
        save_file(saved_names(adapter()), bench.workspace / "lora_adapter/adapter_model.safetensors")
        report = gather_checkpoint(bench.workspace, bench.out)
        assert "lora_adapter/adapter_model.safetensors" in notes_of(report)["adapter-beside"]
        assert_holds(bench.out, model)


class TestMerge:
    @pytest.mark.parametrize("lora", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_every_bit(self, bench: Bench, base: torch.dtype, lora: torch.dtype) -> None:
        model, pairs = leave_adapted(bench.workspace, base_model(base), adapter(lora))
        report = gather_checkpoint(bench.workspace, bench.out, **MERGE)
        assert_holds(bench.out, merged(model, pairs))
        assert raw(model_in(bench.out)[f"{DOWN}.weight"]) != raw(model[f"{DOWN}.weight"])
        assert report.output is not None
        assert report.output["merged"] == [f"{ATTENTION}.weight", f"{DOWN}.weight"]
        assert report.output["num_tensors"] == len(model)
        assert "W + 2.5 * B @ A" in notes_of(report)["adapter"]

    def test_it_is_the_formula_in_float32(self, bench: Bench) -> None:
        """Whatever order a library takes the sums in: these are exact."""
        pairs = {name: (tensor * 4).round() / 4 for name, tensor in adapter().items()}
        model, pairs = leave_adapted(bench.workspace, None, pairs)
        gather_checkpoint(bench.workspace, bench.out, **MERGE)
        found = model_in(bench.out)
        for module in (ATTENTION, DOWN):
            a, b = (pairs[f"{module}.lora_{half}.default.weight"] for half in "AB")
            formula = (model[f"{module}.weight"].float() + SCALE * (b @ a)).bfloat16()
            assert torch.equal(found[f"{module}.weight"], formula)

    def test_one_rounding_where_a_cast_is_asked_for(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace, base_model(torch.float32))
        report = gather_checkpoint(bench.workspace, bench.out, dtype="bf16", **MERGE)
        expected = merged(model, pairs, dtype=torch.bfloat16)
        assert_holds(bench.out, expected)
        twice = {name: tensor.bfloat16() for name, tensor in model.items()}
        assert raw(merged(twice, pairs)[f"{DOWN}.weight"]) != raw(expected[f"{DOWN}.weight"])
        assert report.output is not None and report.output["cast"][f"{DOWN}.weight"] == "F32 -> BF16"

    @pytest.mark.parametrize(("stored", "dtype"), [(torch.bfloat16, "keep"), (torch.float32, "bf16")], ids=str)
    def test_many_windows_by_many_workers_in_any_split_of_files(
        self, bench: Bench, stored: torch.dtype, dtype: str
    ) -> None:
        made = torch.Generator().manual_seed(2)
        names = [f"layers.{i}.up" for i in range(3)]
        base = {f"{name}.weight": torch.randn(1101, 700, generator=made).to(stored) for name in names}
        lora = {}
        for name in names:
            lora[f"{name}.lora_A.default.weight"] = torch.randn(3, 700, generator=made)
            lora[f"{name}.lora_B.default.weight"] = torch.randn(1101, 3, generator=made)
        layouts = {**dict.fromkeys(base, "[f/~tp/~dp, h]"), **dict.fromkeys(lora, "[...]")}
        layouts = {name: "[r, n]" if "lora" in name else layout for name, layout in layouts.items()}
        leave_adapted(bench.workspace, base, lora, layouts=layouts, meta={"r": 3, "lora_alpha": 1})
        few: dict[str, Any] = {"workers": 1, "max_shard_size": "2MB", "max_memory": "2MB"}
        for index, options in enumerate([{"workers": 3}, few]):
            out = bench.folder / f"out{index}"
            gather_checkpoint(bench.workspace, out, dtype=dtype, **MERGE, **options)
            assert_holds(out, merged(base, lora, 1 / 3, torch.bfloat16))

    def test_an_embedding(self, bench: Bench) -> None:
        module, made = "model.embed_tokens", torch.Generator().manual_seed(4)
        lora = {
            f"{module}.lora_embedding_A.default": torch.randn(RANK, 16, generator=made),
            f"{module}.lora_embedding_B.default": torch.randn(8, RANK, generator=made),
        }
        layouts = {f"{module}.lora_embedding_A.default": "[r, v/tp]", f"{module}.lora_embedding_B.default": "[h, r]"}
        model, _ = leave_adapted(bench.workspace, None, lora, layouts=layouts)
        gather_checkpoint(bench.workspace, bench.out, **MERGE)
        a, b = lora.values()
        weight = added(model[f"{module}.weight"], b.T, a.T, SCALE).bfloat16()
        assert_holds(bench.out, {**model, f"{module}.weight": weight})

    @pytest.mark.parametrize("says", [True, None])
    def test_weights_that_lie_the_other_way(self, bench: Bench, says: bool | None) -> None:
        """As GPT-2's Conv1D: the one that is not square says it, or the configuration does."""
        made = torch.Generator().manual_seed(4)
        base = {
            "h.c_attn.weight": torch.randn(8, 24, generator=made),
            "h.c_proj.weight": torch.randn(8, 8, generator=made),
        }
        lora = {}
        for name, width in (("h.c_attn", 24), ("h.c_proj", 8)):
            lora[f"{name}.lora_A.default.weight"] = torch.randn(2, 8, generator=made)
            lora[f"{name}.lora_B.default.weight"] = torch.randn(width, 2, generator=made)
        meta = {"r": 2, "lora_alpha": 4, **({} if says is None else {"peft_type": "LORA", "fan_in_fan_out": says})}
        layouts = dict.fromkeys((*base, *lora), "[m, n]")
        leave_adapted(bench.workspace, base, lora, layouts=layouts, meta=meta)
        gather_checkpoint(bench.workspace, bench.out, **MERGE)
        a, b = (lora[f"h.c_proj.lora_{half}.default.weight"] for half in "AB")
        found = model_in(bench.out)
        assert torch.equal(found["h.c_proj.weight"], added(base["h.c_proj.weight"].T, a, b, 2.0).T)
        a, b = (lora[f"h.c_attn.lora_{half}.default.weight"] for half in "AB")
        assert torch.equal(found["h.c_attn.weight"], added(base["h.c_attn.weight"].T, a, b, 2.0).T)

    @pytest.mark.parametrize(
        ("more", "scale"),
        [({"use_rslora": True}, ALPHA / RANK**0.5), ({"alpha_pattern": {"q_proj|down_proj": 3}}, 3 / RANK)],
    )
    def test_scales(self, bench: Bench, more: dict[str, Any], scale: float) -> None:
        model, pairs = leave_adapted(bench.workspace, meta={})
        config = write_json(bench.folder / "c.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **more})
        gather_checkpoint(bench.workspace, bench.out, adapter_config=config, **MERGE)
        assert_holds(bench.out, merged(model, pairs, scale))

    def test_a_pair_of_another_rank(self, bench: Bench) -> None:
        pairs = adapter()
        pairs[LORA_A], pairs[LORA_B] = torch.rand(2, 8), torch.rand(12, 2)
        model, _ = leave_adapted(bench.workspace, None, pairs)
        refusal(bench, ContradictionError, f"{ATTENTION}: its adapter does not have the rank", **MERGE)
        patterns = {"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2}, "alpha_pattern": {"q_proj": 5}}
        write_json(bench.workspace / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA, **patterns})
        gather_checkpoint(bench.workspace, bench.out, **MERGE)
        assert_holds(bench.out, merged(model, pairs))

    def test_what_was_trained_whole_is_written_in_place_of_the_original(self, bench: Bench) -> None:
        head, pairs = torch.rand(16, 8), adapter()
        state = wrapped(base_model(), pairs)
        state[P + "lm_head.original_module.weight"] = torch.rand(16, 8)
        state[P + "lm_head.modules_to_save.default.weight"] = head
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        write_json(bench.workspace / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA})
        report = gather_checkpoint(bench.workspace, bench.out, **MERGE)
        assert_holds(bench.out, {**merged(base_model(), pairs), "lm_head.weight": head})
        assert "lm_head.original_module.weight" in notes_of(report)["adapter-trained"]

    def test_what_is_left_out_needs_no_update(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace)
        report = gather_checkpoint(bench.workspace, bench.out, exclude=r".*q_proj\.weight", **MERGE)
        expected = merged(model, pairs)
        del expected[f"{ATTENTION}.weight"]
        assert_holds(bench.out, expected)
        assert report.output is not None and report.output["merged"] == [f"{DOWN}.weight"]

    def test_the_base_models_names_and_companions(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace)
        (bench.folder / "base").mkdir()
        save_file(model, bench.folder / "base/model.safetensors")
        report = gather_checkpoint(bench.workspace, bench.out, base_model=bench.folder / "base", dtype="base", **MERGE)
        assert report.proof["base_model"] == "names and shapes"
        assert_holds(bench.out, merged(model, pairs))

    def test_the_manifest_says_of_what(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        gather_checkpoint(bench.workspace, bench.out, **MERGE)
        manifest = manifest_of(bench.out)
        assert manifest["merged"][f"{ATTENTION}.weight"] == f"W + 2.5 * ({P}{LORA_B} @ {P}{LORA_A})"
        tensors = manifest["tensors"]
        # Twice cut: four pieces of W; A is whole on each rank, B in halves: one and two pieces, the others replicas.
        assert len(tensors[f"{ATTENTION}.weight"]["sources"]) == 4 + 1 + 2
        assert tensors[f"{ATTENTION}.weight"]["replicas"] == 3 + 2
        assert tensors["model.norm.weight"]["replicas"] == 3
        assert verify_model(bench.out).ok

    def test_replicas_of_factors_are_counted(self, bench: Bench) -> None:
        """Of W's columns 2, of embedding, bias and norm 2, 2 and 3; of each A and B, cut as they are, as the pieces."""
        leave_adapted(bench.workspace)
        planned = gather_checkpoint(bench.workspace, bench.out, dry_run=True, **MERGE)
        done = gather_checkpoint(bench.workspace, bench.out, **MERGE)
        factors = 3 + 2 + 2 + 2
        assert planned.proof["num_replicas_to_compare"] == 2 + 2 + 2 + 3 + factors
        assert done.proof["num_replicas_compared"] == 2 + 2 + 2 + 3 + factors

    def test_the_plan_says_the_memory(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        plain = bench.folder / "plain"
        leave(plain)
        options: dict[str, Any] = {"dry_run": True, "workers": 2}
        merge = gather_checkpoint(bench.workspace, bench.out, **MERGE, **options).plan
        without = gather_checkpoint(plain, bench.out, **options).plan
        assert merge is not None and without is not None
        # Each worker: a window as stored, and the larger pair as stored (float32) and twice as float32.
        assert merge["peak_buffer_nbytes"] - without["peak_buffer_nbytes"] == 2 * ((1 << 20) + 3 * 4 * RANK * (20 + 8))
        # Room for one worker; its buffers are whole pages.
        merge = gather_checkpoint(bench.workspace, bench.out, **MERGE, **options, max_memory="2MB").plan
        without = gather_checkpoint(plain, bench.out, **options, max_memory="2MB").plan
        assert merge is not None and without is not None
        assert without["peak_buffer_nbytes"] == (1 << 20) + 2 * 116 * 4096 == 1_998_848
        assert merge["peak_buffer_nbytes"] - without["peak_buffer_nbytes"] == (1 << 20) + 3 * 4 * RANK * (20 + 8)


class TestInterrupted:
    def stopped(self, bench: Bench, **options: Any) -> None:
        """Gather until the first file is finished."""

        def stop(done: int, total: int) -> None:
            if 0 < done < total and any(bench.folder.glob(".model.xrank-*/model-00001*ors")):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            gather_checkpoint(
                bench.workspace, bench.out, max_shard_size=300, workers=1, progress=stop, **MERGE, **options
            )

    def test_the_next_run_goes_on(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace)
        self.stopped(bench)
        report = gather_checkpoint(bench.workspace, bench.out, max_shard_size=300, **MERGE)
        assert report.output is not None and report.output["resumed_nbytes"] > 0
        assert_holds(bench.out, merged(model, pairs))

    def test_another_alpha_is_another_plan(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace)
        self.stopped(bench)
        other = write_json(bench.folder / "other.json", {"r": RANK, "lora_alpha": 2 * ALPHA})
        report = gather_checkpoint(bench.workspace, bench.out, max_shard_size=300, adapter_config=other, **MERGE)
        assert report.output is not None and report.output["resumed_nbytes"] == 0
        assert_holds(bench.out, merged(model, pairs, 2 * SCALE))


class TestSeparate:
    def test_base_and_folder(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace)
        report = gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert_holds(bench.out, model)
        assert_holds(bench.out / "adapter", saved_names(pairs))
        assert sorted(path.name for path in bench.out.iterdir()) == [
            "adapter",
            "config.json",
            "model.safetensors",
            "xrank_manifest.json",
        ]
        config = json.loads((bench.out / "adapter/adapter_config.json").read_text())
        assert config["peft_type"] == "LORA" and (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
        assert config["target_modules"] == ["down_proj", "q_proj"] and config["modules_to_save"] is None
        assert "lora_train_meta.json says r 4 and lora_alpha 10" in notes_of(report)["adapter-config"]
        assert verify_model(bench.out).ok

    def test_the_index_is_the_base_models(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace)
        gather_checkpoint(bench.workspace, bench.out, max_shard_size=300, **SEPARATE)
        index = json.loads((bench.out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == model.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.values())
        assert_holds(bench.out, model)
        assert_holds(bench.out / "adapter", saved_names(pairs))
        assert verify_model(bench.out).ok

    def test_modules_that_only_whole_paths_tell_apart(self, bench: Bench) -> None:
        base = {**base_model(), "model.layers.1.mlp.down_proj.weight": torch.rand(8, 20)}
        leave_adapted(bench.workspace, base, layouts={"model.layers.1.mlp.down_proj.weight": "[h, f/tp]"})
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        config = json.loads((bench.out / "adapter/adapter_config.json").read_text())
        assert config["target_modules"] == [DOWN, ATTENTION]

    def test_the_configuration_is_kept_as_it_is(self, bench: Bench) -> None:
        _, pairs = leave_adapted(bench.workspace)
        wanted = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.05,
            "target_modules": "all-linear",
        }
        write_json(bench.workspace / "adapter_config.json", wanted)
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert json.loads((bench.out / "adapter/adapter_config.json").read_text()) == wanted
        given = write_json(bench.folder / "given.json", {**wanted, "init_lora_weights": "pissa_niter_16"})
        report = gather_checkpoint(bench.workspace, bench.folder / "b", adapter_config=given, **SEPARATE)
        written = json.loads((bench.folder / "b/adapter/adapter_config.json").read_text())
        assert written == {**wanted, "init_lora_weights": True}  # the base is written as it was changed
        assert "pissa_niter_16 changed the base model" in notes_of(report)["adapter-config"]
        assert_holds(bench.folder / "b/adapter", saved_names(pairs))

    def test_dora_and_what_was_trained_whole(self, bench: Bench) -> None:
        pairs = adapter()
        state = wrapped(base_model(), pairs)
        state[f"{P}{DOWN}.lora_magnitude_vector.default.weight"] = torch.rand(8)
        state[P + "score.original_module.weight"] = torch.rand(2, 8)
        state[P + "score.modules_to_save.default.weight"] = torch.rand(2, 8)
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        write_json(bench.workspace / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA})
        refusal(bench, UsageError, "cannot be merged", **MERGE)
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert_holds(bench.out, {**base_model(), "score.weight": state[P + "score.original_module.weight"]})
        trained = {
            **saved_names(pairs),
            f"{P}{DOWN}.lora_magnitude_vector": state[f"{P}{DOWN}.lora_magnitude_vector.default.weight"],
            P + "score.weight": state[P + "score.modules_to_save.default.weight"],
        }
        assert_holds(bench.out / "adapter", trained)
        config = json.loads((bench.out / "adapter/adapter_config.json").read_text())
        assert config["use_dora"] is True and config["modules_to_save"] == ["score"]

    @pytest.mark.parametrize(("bias", "num_copied"), [("none", 0), ("lora_only", 1), ("all", 2)])
    def test_trained_biases_of_a_whole_model(self, bench: Bench, bias: str, num_copied: int) -> None:
        """PEFT saves them with the adapter, under the names that they have in its model."""
        base = {**base_model(), "model.norm.bias": torch.rand(8)}
        leave_adapted(bench.workspace, base, layouts={"model.norm.bias": "[h]"})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": bias}
        write_json(bench.workspace / "adapter_config.json", config)
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        biases = {f"{P}{ATTENTION}.base_layer.bias": base[f"{ATTENTION}.bias"]}
        biases |= {f"{P}model.norm.bias": base["model.norm.bias"]}
        assert_holds(bench.out, base)
        assert_holds(bench.out / "adapter", saved_names(adapter()) | dict(list(biases.items())[:num_copied]))
        assert verify_model(bench.out, against=bench.workspace).ok
        gather_checkpoint(bench.workspace, bench.folder / "merged", **MERGE)
        assert_holds(bench.folder / "merged", merged(base, adapter()))

    @pytest.mark.parametrize("other", ["model.norm.bias", None])
    @pytest.mark.parametrize("name", [".default", ""], ids=["of ranks", "of PEFT"])
    def test_trained_biases_of_an_adapter_alone(self, bench: Bench, name: str, other: str | None) -> None:
        biases = {f"{ATTENTION}.base_layer.bias": torch.rand(12)}
        biases |= {} if other is None else {other: torch.rand(8)}
        state = {P + key.replace(".default", name): value for key, value in {**adapter(), **biases}.items()}
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        write_json(bench.workspace / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA})
        gather_checkpoint(bench.workspace, bench.out)
        assert_holds(bench.out, saved_names({**adapter(), **biases}))
        config = json.loads((bench.out / "adapter_config.json").read_text())
        assert config["bias"] == ("lora_only" if other is None else "all") and config["modules_to_save"] is None
        assert verify_model(bench.out, against=bench.workspace).ok
        (bench.folder / "base").mkdir()
        base = {**base_model(), "model.norm.bias": torch.rand(8)}
        save_file(base, bench.folder / "base/model.safetensors")
        gather_checkpoint(bench.workspace, bench.folder / "merged", base_model=bench.folder / "base", **MERGE)
        trained = {key.replace(".base_layer", ""): value for key, value in biases.items()}
        assert_holds(bench.folder / "merged", merged({**base, **trained}, adapter()))

    @pytest.mark.parametrize("is_alone", [False, True], ids=["whole", "alone"])
    def test_trained_rows_of_an_embedding(self, bench: Bench, is_alone: bool) -> None:
        rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta.default": torch.rand(2, 8)}
        state = wrapped(base_model(), adapter())
        state[f"{P}model.embed_tokens.token_adapter.base_layer.weight"] = state.pop(f"{P}model.embed_tokens.weight")
        if is_alone:
            state = {P + name: value for name, value in adapter().items()}
        state |= {P + name: value for name, value in rows.items()}
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        given = write_json(bench.folder / "given.json", {"r": RANK, "lora_alpha": ALPHA})
        error = refusal(bench, UsageError, "does not list the tokens of the rows", adapter_config=given, **SEPARATE)
        assert error.tensor == P + next(iter(rows)) and "whole adapter_config.json" in str(error.next_step)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
        write_json(bench.workspace / "adapter_config.json", config)
        refusal(bench, ContradictionError, "disagree about trainable_token_indices", **SEPARATE)
        config["trainable_token_indices"] = {"embed_tokens": [3, 5]}
        write_json(bench.workspace / "adapter_config.json", config)
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert_holds(bench.out if is_alone else bench.out / "adapter", saved_names({**adapter(), **rows}))
        assert verify_model(bench.out, against=bench.workspace).ok
        if not is_alone:
            assert_holds(bench.out, base_model())
            assert refusal(bench, UsageError, "cannot be merged", **MERGE).got == "trainable_token_indices"

    def test_an_adapter_alone_of_some_layers_is_configured_by_whole_paths(self, bench: Bench) -> None:
        later = {name.replace("layers.0", "layers.1"): value for name, value in adapter().items()}
        pairs = {**later, **{name: value for name, value in adapter().items() if "q_proj" not in name}}
        state = {P + name: tensor for name, tensor in pairs.items()}
        leave(bench.workspace, state, layouts=dict.fromkeys(state, "[m, n]"))
        write_json(bench.workspace / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA})
        gather_checkpoint(bench.workspace, bench.out)
        config = json.loads((bench.out / "adapter_config.json").read_text())
        modules = {name.partition(".lora_")[0] for name in pairs}
        assert config["target_modules"] == sorted(modules)

    def test_an_adapter_alone_is_the_output(self, bench: Bench) -> None:
        pairs = adapter()
        state = {P + name: tensor for name, tensor in pairs.items()}
        leave(bench.workspace, state, layouts=dict.fromkeys(state, "[m, n]"))
        write_json(bench.workspace / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA})
        write_json(bench.workspace / "config.json", {"model_type": "toy"})  # a model's, and there will be none
        error = refusal(bench, UsageError, "only an adapter", **MERGE)
        assert "base_model= with the safetensors weights" in (error.next_step or "")
        gather_checkpoint(bench.workspace, bench.out, dtype="bf16", **SEPARATE)
        assert sorted(path.name for path in bench.out.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "xrank_manifest.json",
        ]
        assert_holds(bench.out, saved_names({name: tensor.bfloat16() for name, tensor in pairs.items()}))
        assert verify_model(bench.out).ok
        # What PEFT itself saves is read like it: names without the adapter's.
        gather_checkpoint(bench.out, bench.folder / "again", **SEPARATE)
        assert_holds(bench.folder / "again", load_file(bench.out / "adapter_model.safetensors"))

    def test_a_tied_head_of_which_a_trained_one_is_the_adapters(self, bench: Bench) -> None:
        base, pairs = base_model(), adapter()
        state = wrapped(base, pairs)
        state[P + "lm_head.original_module.weight"] = base["model.embed_tokens.weight"].clone()
        state[P + "lm_head.modules_to_save.default.weight"] = torch.rand(16, 8)
        layouts = {n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()}
        leave(bench.workspace, state, layouts=layouts, config={"model_type": "toy", "tie_word_embeddings": True})
        write_json(bench.workspace / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA})
        report = gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert report.output is not None
        assert report.output["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]]
        assert_holds(bench.out, base)

    def test_types(self, bench: Bench) -> None:
        """What the base model does not say, --dtype base leaves alone."""
        model, pairs = leave_adapted(bench.workspace, base_model(torch.float32))
        half = {name: tensor.bfloat16() for name, tensor in model.items()}
        (bench.folder / "base").mkdir()
        save_file(half, bench.folder / "base/model.safetensors")
        gather_checkpoint(bench.workspace, bench.out, base_model=bench.folder / "base", dtype="base", **SEPARATE)
        assert_holds(bench.out, half)
        assert_holds(bench.out / "adapter", saved_names(pairs))

    def test_verify_sees_damage_in_the_folder(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        path = bench.out / "adapter/adapter_model.safetensors"
        flip(path, path.stat().st_size - 1)
        report = verify_model(bench.out)
        assert not report.ok and report.error is not None
        assert report.error["type"] == "CorruptError" and report.error["tensor"].startswith(P)
        path.unlink()
        assert verify_model(bench.out).exit_code == 3

    def test_a_run_that_ended_is_gone_on_with(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace)

        def stop(done: int, total: int) -> None:
            if any(bench.folder.glob(".model.xrank-*/adapter/*.part")):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            gather_checkpoint(bench.workspace, bench.out, progress=stop, workers=1, **SEPARATE)
        report = gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert report.output is not None and report.output["resumed_nbytes"] > 0
        assert_holds(bench.out, model)
        assert_holds(bench.out / "adapter", saved_names(pairs))


class TestAlone:
    """An adapter without its base model, as PEFT saves it, merged into the base model that the user names."""

    def save(self, bench: Bench, saved: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> tuple[Path, Path]:
        source, model = bench.folder / "source", bench.folder / "base"
        for folder in (source, model):
            folder.mkdir()
        save_file(saved, source / "adapter_model.safetensors")
        write_json(source / "adapter_config.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA})
        save_file(base, model / "model.safetensors")
        write_json(model / "config.json", {"model_type": "toy"})
        return source, model

    def test_merged_into_the_base_model(self, bench: Bench) -> None:
        base, pairs = base_model(), adapter()
        source, model = self.save(bench, saved_names(pairs), base)
        ended = run("gather", source, "--base-model", model, "--adapter", "merge", "--out", bench.out)
        assert ended.exit_code == 0, ended.stderr
        assert "names and shapes as in the base model" in ended.stdout
        assert_holds(bench.out, merged(base, pairs))
        assert (bench.out / "config.json").read_text() == (model / "config.json").read_text()
        assert verify_model(bench.out).ok

    def test_what_the_adapter_holds_whole_stands_in_place_of_the_bases(self, bench: Bench) -> None:
        base, pairs, norm = base_model(), adapter(), torch.rand(8).bfloat16()
        source, model = self.save(bench, {**saved_names(pairs), P + "model.norm.weight": norm}, base)
        report = gather_checkpoint(source, bench.out, base_model=model, **MERGE)
        assert_holds(bench.out, {**merged(base, pairs), "model.norm.weight": norm})
        assert "model.norm.weight: copied from" in notes_of(report)["adapter-trained"]

    @pytest.mark.parametrize("saved", [None, ["lm_head"]])
    def test_a_head_that_is_tied_to_what_the_trainer_left_out(self, bench: Bench, saved: list[str] | None) -> None:
        """As accelerate leaves beside an adapter: the embedding is frozen, and its other name is not."""
        source, model = self.save(bench, {**saved_names(adapter()), P + "lm_head.weight": torch.rand(16, 8)}, {})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "modules_to_save": saved}
        write_json(source / "adapter_config.json", config)
        write_json(model / "config.json", {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True})
        report = gather_checkpoint(source, bench.out, base_model=model)
        found = load_file(bench.out / "adapter_model.safetensors").keys()
        assert (P + "lm_head.weight" in found) == (saved is not None)
        assert ("adapter-tied" in notes_of(report)) == (saved is None)

    def test_another_models_adapter(self, bench: Bench) -> None:
        base = {name.replace("q_proj", "query"): tensor for name, tensor in base_model().items()}
        source, model = self.save(bench, saved_names(adapter()), base)
        with pytest.raises(ContradictionError, match="the module itself is missing") as caught:
            gather_checkpoint(source, bench.out, base_model=model, **MERGE)
        assert "the model that the adapter was trained on as base_model=" in (caught.value.next_step or "")

    def test_a_base_model_without_weights(self, bench: Bench) -> None:
        source, model = self.save(bench, saved_names(adapter()), base_model())
        (model / "model.safetensors").unlink()
        with pytest.raises(UsageError, match="contains only an adapter"):
            gather_checkpoint(source, bench.out, base_model=model, **MERGE)


class TestRefusals:
    @pytest.mark.parametrize("half", [LORA_A, LORA_B])
    @pytest.mark.parametrize("choice", ["merge", "separate"])
    def test_half_a_pair(self, bench: Bench, half: str, choice: Any) -> None:
        pairs = adapter()
        del pairs[half]
        leave_adapted(bench.workspace, None, pairs)
        error = refusal(bench, ContradictionError, "the other half of its pair is missing", adapter=choice)
        assert error.tensor in (P + LORA_A, P + LORA_B)

    def test_no_pair_at_all_of_an_adapted_module(self, bench: Bench) -> None:
        state = wrapped(base_model(), adapter())
        del state[P + LORA_A], state[P + LORA_B]
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        refusal(bench, ContradictionError, r"q_proj\.base_layer\.weight: the adapter of its module is missing", **MERGE)

    def test_an_original_without_what_was_trained_in_its_place(self, bench: Bench) -> None:
        state = {**wrapped(base_model(), adapter()), P + "score.original_module.weight": torch.rand(2, 8)}
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        refusal(
            bench,
            ContradictionError,
            r"score\.original_module\.weight: the trained tensor that replaces it",
            **SEPARATE,
        )

    @pytest.mark.parametrize("choice", ["merge", "separate"])
    def test_no_base_of_an_adapted_module(self, bench: Bench, choice: Any) -> None:
        base = base_model()
        del base[f"{DOWN}.weight"]
        leave_adapted(bench.workspace, base)
        error = refusal(bench, ContradictionError, "the module itself is missing", adapter=choice)
        assert error.tensor == f"{P}{DOWN}.lora_A.default.weight"

    @pytest.mark.parametrize("choice", ["merge", "separate"])
    def test_several_adapters(self, bench: Bench, choice: Any) -> None:
        state = {**wrapped(base_model(), adapter()), P + LORA_A.replace("default", "other"): torch.rand(4, 8)}
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        error = refusal(bench, UsageError, "several adapters", adapter=choice)
        assert "default" in (error.got or "") and "other" in (error.got or "")

    @pytest.mark.parametrize("name", ["lora_A.one.two.weight", "lora_something"])
    def test_kinds_that_are_not_known(self, bench: Bench, name: str) -> None:
        state = {**wrapped(base_model(), adapter()), f"{P}{DOWN}.{name}": torch.rand(4, 8)}
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        error = refusal(bench, UsageError, "an unknown kind", **SEPARATE)
        assert error.tensor == f"{P}{DOWN}.{name}"

    def test_a_quantized_base(self, bench: Bench) -> None:
        base = {**base_model(), f"{ATTENTION}.weight": torch.ones(12, 8, dtype=torch.int8)}
        _, pairs = leave_adapted(bench.workspace, base)
        error = refusal(bench, UsageError, r"q_proj\.weight is quantized", **MERGE)
        assert error.got == "I8 [12, 8]"
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert_holds(bench.out, base)
        assert_holds(bench.out / "adapter", saved_names(pairs))

    def test_a_base_of_another_shape(self, bench: Bench) -> None:
        base = {**base_model(), f"{ATTENTION}.weight": torch.rand(12, 6)}
        leave_adapted(bench.workspace, base)
        refusal(bench, ContradictionError, r"q_proj\.weight: the shape of its adapter does not fit", **MERGE)

    def test_convolutions(self, bench: Bench) -> None:
        base = {"conv.weight": torch.rand(4, 3, 2, 2)}
        lora = {
            "conv.lora_A.default.weight": torch.rand(RANK, 3, 2, 2),
            "conv.lora_B.default.weight": torch.rand(4, RANK, 1, 1),
        }
        leave_adapted(bench.workspace, base, lora, layouts=dict.fromkeys((*base, *lora), "[a, b, c, d]"))
        refusal(bench, UsageError, "an adapter of this kind cannot be merged", **MERGE)
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert_holds(bench.out / "adapter", saved_names(lora))

    @pytest.mark.parametrize("key", ["use_qalora", "use_bdlora", "layer_replication"])
    def test_more_than_a_product(self, bench: Bench, key: str) -> None:
        leave_adapted(bench.workspace)
        value = True if key.startswith("use") else [[0, 1]]
        config = write_json(bench.folder / "c.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, key: value})
        error = refusal(bench, UsageError, "cannot be merged", adapter_config=config, **MERGE)
        assert error.got == key

    def test_a_bias_of_the_adapters_own(self, bench: Bench) -> None:
        lora = {**adapter(), f"{DOWN}.lora_B.default.bias": torch.rand(8)}
        leave_adapted(bench.workspace, None, lora, layouts={f"{DOWN}.lora_B.default.bias": "[h]"})
        error = refusal(bench, UsageError, "cannot be merged", **MERGE)
        assert error.tensor == f"{P}{DOWN}.lora_B.default.bias"
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        assert_holds(bench.out / "adapter", saved_names(lora))

    def test_a_square_weight_among_weights_of_both_kinds(self, bench: Bench) -> None:
        base = {"a.weight": torch.rand(8, 24), "b.weight": torch.rand(24, 8), "c.weight": torch.rand(8, 8)}
        lora = {}
        for name, width in (("a", 24), ("b", 24), ("c", 8)):
            lora[f"{name}.lora_A.default.weight"] = torch.rand(RANK, 8)
            lora[f"{name}.lora_B.default.weight"] = torch.rand(width, RANK)
        leave_adapted(bench.workspace, base, lora, layouts=dict.fromkeys((*base, *lora), "[m, n]"))
        error = refusal(bench, UsageError, r"c\.weight: whether it is stored", **MERGE)
        assert error.tensor == "c.weight"

    def test_a_square_weight_of_a_name_that_says_neither(self, bench: Bench) -> None:
        base = {"h.c_proj.weight": torch.rand(8, 8)}
        lora = {"h.c_proj.lora_A.default.weight": torch.rand(4, 8), "h.c_proj.lora_B.default.weight": torch.rand(8, 4)}
        leave_adapted(bench.workspace, base, lora, layouts=dict.fromkeys((*base, *lora), "[m, n]"))
        refusal(bench, UsageError, r"c_proj\.weight: whether it is stored", **MERGE)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "fan_in_fan_out": False}
        gather_checkpoint(bench.workspace, bench.out, adapter_config=write_json(bench.folder / "c", config), **MERGE)
        assert_holds(bench.out, merged(base, lora))

    def test_a_tensor_that_is_tied(self, bench: Bench) -> None:
        module = "model.embed_tokens"
        base = base_model()
        base["lm_head.weight"] = base[f"{module}.weight"].clone()
        lora = {
            f"{module}.lora_embedding_A.default": torch.rand(RANK, 16),
            f"{module}.lora_embedding_B.default": torch.rand(8, RANK),
        }
        layouts = {**dict.fromkeys(lora, "[m, n]"), "lm_head.weight": "[v/tp, h]"}
        config = {"model_type": "toy", "tie_word_embeddings": True}
        leave_adapted(bench.workspace, base, lora, layouts=layouts, config=config)
        error = refusal(bench, UsageError, "has an adapter, and is tied to lm_head", **MERGE)
        assert error.tensor == f"{module}.weight"
        gather_checkpoint(bench.workspace, bench.out, **SEPARATE)
        del base["lm_head.weight"]
        assert_holds(bench.out, base)

    def test_two_names_of_one_tensor(self, bench: Bench) -> None:
        state = {**wrapped(base_model(), adapter()), f"{ATTENTION}.weight": torch.rand(12, 8)}
        leave(bench.workspace, state, layouts={n: "[n]" if t.dim() == 1 else "[m, n]" for n, t in state.items()})
        refusal(bench, ContradictionError, "two tensors would have this name", **MERGE)

    def test_a_recipe_that_would_rename_what_is_adapted(self, bench: Bench) -> None:
        names = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2"]
        base = {f"layers.0.{name}.weight": torch.rand(8, 8) for name in [*names, "feed_forward.w3"]}
        base.update({f"layers.0.{name}.weight": torch.rand(8) for name in ("attention_norm", "ffn_norm")})
        base.update(
            {
                "tok_embeddings.weight": torch.rand(16, 8),
                "norm.weight": torch.rand(8),
                "output.weight": torch.rand(16, 8),
            }
        )
        lora = {"layers.0.attention.wq.lora_A.default.weight": torch.rand(RANK, 8)}
        lora["layers.0.attention.wq.lora_B.default.weight"] = torch.rand(8, RANK)
        layouts = {name: "[n]" if tensor.dim() == 1 else "[m, n]" for name, tensor in {**base, **lora}.items()}
        config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
        leave_adapted(bench.workspace, base, lora, layouts=layouts, config=config)
        for choice in (MERGE, SEPARATE):
            refusal(bench, UsageError, "that the recipe torchtitan-llama3 would rename", **choice)
        gather_checkpoint(bench.workspace, bench.out, recipe="none", **MERGE)
        assert_holds(bench.out, merged(base, lora))


class TestConfigurations:
    def test_none(self, bench: Bench) -> None:
        """As transformers' Trainer leaves with FSDP: PEFT refuses the folder until its configuration is there."""
        model, pairs = leave_adapted(bench.workspace)
        (bench.workspace / "lora_train_meta.json").unlink()
        error = refusal(bench, UsageError, "no file contains the rank and alpha", **MERGE)
        assert "adapter_config.json" in (error.got or "") and "adapter_config=" in (error.next_step or "")
        report = gather_checkpoint(bench.workspace, bench.out)
        assert "PEFT needs it to load the adapter" in notes_of(report)["adapter-config"]
        assert_holds(bench.out, model)
        assert_holds(bench.out / "adapter", saved_names(pairs))
        assert [path.name for path in (bench.out / "adapter").iterdir()] == ["adapter_model.safetensors"]

    def test_what_verl_leaves_beside_its_states(self, bench: Bench) -> None:
        model, pairs = leave_adapted(bench.workspace, meta={"r": RANK, "lora_alpha": 99})
        (bench.workspace / "lora_adapter").mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"}
        write_json(bench.workspace / "lora_adapter/adapter_config.json", config)
        gather_checkpoint(bench.workspace, bench.out, **MERGE)
        assert_holds(bench.out, merged(model, pairs))

    def test_what_lies_in_the_checkpoints_root(self, bench: Bench) -> None:
        root = bench.workspace / "checkpoint-7"
        model, pairs = leave_adapted(root / "pytorch_model_fsdp_0")
        (root / "pytorch_model_fsdp_0/lora_train_meta.json").rename(root / "lora_train_meta.json")
        gather_checkpoint(root, bench.out, **MERGE)
        assert_holds(bench.out, merged(model, pairs))

    @pytest.mark.parametrize(
        ("content", "kind", "match"),
        [
            ({"r": 4}, UsageError, "has no lora_alpha"),
            ({}, UsageError, "has no r and no lora_alpha"),
            ({"r": 4, "lora_alpha": 8, "peft_type": "LOHA"}, UsageError, "is not a LoRA configuration"),
            ({"r": "4", "lora_alpha": 8}, CorruptError, "r is not what PEFT writes"),
            ({"r": True, "lora_alpha": 8}, CorruptError, "r is not what PEFT writes"),
            ({"r": 4, "lora_alpha": 0}, CorruptError, "lora_alpha is not"),
            ({"r": 4, "lora_alpha": 8, "rank_pattern": [4]}, CorruptError, "rank_pattern is not"),
            ({"r": 4, "lora_alpha": 8, "rank_pattern": {"(": 4}}, CorruptError, "rank_pattern is not"),
            ({"r": 4, "lora_alpha": 8, "use_rslora": "no"}, CorruptError, "use_rslora is not"),
            ({"r": 4, "lora_alpha": 8, "target_parameters": [[0, 1]]}, CorruptError, "target_parameters is not"),
            ({"r": 5, "lora_alpha": 8}, ContradictionError, "does not have the rank in c.json"),
            ({"r": 4, "lora_alpha": 8, "use_dora": True}, ContradictionError, "disagree about use_dora"),
        ],
    )
    def test_that_are_wrong(self, bench: Bench, content: dict[str, Any], kind: type[XrankError], match: str) -> None:
        leave_adapted(bench.workspace)
        config = write_json(bench.folder / "c.json", {"peft_type": "LORA", **content})
        error = refusal(bench, kind, match, adapter_config=config, **MERGE)
        assert error.file == str(config)

    def test_that_are_no_json_or_not_there(self, bench: Bench) -> None:
        leave_adapted(bench.workspace)
        config = bench.folder / "c.json"
        with pytest.raises(UsageError, match="cannot be read: No such file"):
            gather_checkpoint(bench.workspace, bench.out, adapter_config=config, **MERGE)
        config.write_text("{")
        refusal(bench, CorruptError, "is no JSON", adapter_config=config, **MERGE)


class TestSources:
    def test_verls_files(self, bench: Bench) -> None:
        model, pairs = base_model(), adapter(torch.bfloat16)
        actor = bench.folder / "global_step_7" / "actor"
        actor.mkdir(parents=True)
        torch.save(wrapped(model, pairs), actor / "model_world_size_1_rank_0.pt")
        write_json(actor / "lora_train_meta.json", {"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"})
        ended = run("gather", bench.folder / "global_step_7", "--out", bench.out, "--adapter", "merge")
        assert ended.exit_code == 0, ended.stderr
        assert "adapter  merged into 2 tensors" in ended.stdout
        assert_holds(bench.out, merged(model, pairs))

    def test_a_model_folder_with_an_adapter_in_it(self, bench: Bench) -> None:
        model, pairs = base_model(), adapter()
        source = bench.folder / "source"
        source.mkdir()
        save_file(model, source / "model.safetensors")
        save_file(saved_names(pairs), source / "adapter_model.safetensors")
        write_json(source / "adapter_config.json", {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA})
        gather_checkpoint(source, bench.out, **MERGE)
        assert_holds(bench.out, merged(model, pairs))

    def test_a_layout_files_aliases_are_in_the_sources_names(self, bench: Bench) -> None:
        base = base_model()
        base["lm_head.weight"] = base["model.embed_tokens.weight"].clone()
        leave_adapted(bench.workspace, base, layouts={"lm_head.weight": "[v/tp, h]"})
        layout = bench.folder / "layout.toml"
        layout.write_text(f'[alias]\n"{P}lm_head.weight" = "{P}model.embed_tokens.weight"\n')
        report = gather_checkpoint(bench.workspace, bench.out, layouts=layout, **MERGE)
        assert report.output is not None
        assert report.output["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]]

    def test_ties_that_a_source_records(self, bench: Bench) -> None:
        """As DeepSpeed's shared parameters are: under its own names."""
        leave_adapted(bench.workspace)
        model = WorkspaceReader().read(str(bench.workspace), Hints())
        aliases = {f"{P}{ATTENTION}.base_layer.bias": P + "model.norm.weight"}
        options = GatherOptions(adapter="separate")
        found = adapt(replace(model, aliases=aliases), options, str(bench.workspace), {})
        assert found is not None and found.source.aliases == {f"{ATTENTION}.bias": "model.norm.weight"}

    @pytest.mark.parametrize("half", ["A", "B"])
    def test_a_bit_that_flipped_in_a_factor(self, bench: Bench, half: str) -> None:
        _, pairs = leave_adapted(bench.workspace)
        tensor = pairs[f"{DOWN}.lora_{half}.default.weight"]
        part = tensor.chunk(2, 1)[0] if half == "A" else tensor.chunk(2, 0)[0]
        path = state_of(bench.workspace, 0)
        flip(path, path.read_bytes().index(raw(part)) + 3)
        with pytest.raises(CorruptError, match=rf"down_proj\.lora_{half}\.default\.weight.*checksum") as caught:
            gather_checkpoint(bench.workspace, bench.out, **MERGE)
        assert caught.value.rank == 0 and caught.value.file == str(path)

    def test_ranks_that_disagree_about_a_factor(self, bench: Bench) -> None:
        _, pairs = leave_adapted(bench.workspace)
        other = {**pairs, LORA_A: pairs[LORA_A] + 1}
        leave_adapted(bench.workspace, None, other, ranks=[3])
        with pytest.raises(ContradictionError, match=r"q_proj\.lora_A\.default\.weight: rank 3 holds different values"):
            gather_checkpoint(bench.workspace, bench.out, **MERGE)
        report = gather_checkpoint(bench.workspace, bench.out, replicas="pick", **MERGE)
        assert_holds(bench.out, merged(base_model(), pairs))
        assert "lora_A" in notes_of(report)["replicas-differ"]

    def test_ranks_that_disagree_about_what_is_merged(self, bench: Bench) -> None:
        base, _ = leave_adapted(bench.workspace)
        other = {**base, f"{DOWN}.weight": base[f"{DOWN}.weight"] + 1}
        leave_adapted(bench.workspace, other, ranks=[2])
        with pytest.raises(ContradictionError, match=r"down_proj\.weight: rank 2 holds different values"):
            gather_checkpoint(bench.workspace, bench.out, dtype="fp32", **MERGE)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with forked_ranks() as forked:
        yield forked


@pytest.mark.parametrize("choice", ["merge", "separate"])
def test_ranks_that_share_a_gather_write_what_one_does(ranks: ForkedRanks, tmp_path: Path, choice: str) -> None:
    """Each reads the factors of what it merges; what several read is checked once, and counted so."""
    made = torch.Generator().manual_seed(5)
    base = {f"{i}.up.weight": torch.randn(120, 101, generator=made).bfloat16() for i in range(4)}
    lora = {}
    for i in range(4):
        lora[f"{i}.up.lora_A.default.weight"] = torch.randn(RANK, 101, generator=made)
        lora[f"{i}.up.lora_B.default.weight"] = torch.randn(120, RANK, generator=made)
    layouts = {name: "[f/tp, h]" if name.endswith("lora_B.default.weight") else "[r, h/~dp]" for name in lora}
    leave_adapted(tmp_path / "run", base, lora, layouts={**layouts, **dict.fromkeys(base, "[f/tp/~dp, h]")})
    command = ("gather", tmp_path / "run", "--adapter", choice, "--json", "--max-shard-size", "60KB", "--out")
    alone = run(*command, tmp_path / "alone")
    assert alone.exit_code == 0, alone.stderr
    ended = ranks(*command, tmp_path / "shared", num_ranks=3, window_nbytes=4096, round_nbytes=20_000)
    assert [rank.exit_code for rank in ended] == [0, 0, 0], ended
    assert json.loads(ended[0].stdout)["proof"] == json.loads(alone.stdout)["proof"]
    assert_holds(tmp_path / "shared", merged(base, lora) if choice == "merge" else base)
    files = [path.relative_to(tmp_path / "alone") for path in sorted((tmp_path / "alone").rglob("*")) if path.is_file()]
    assert len(files) > 3
    for file in files:
        assert (tmp_path / "shared" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), file
