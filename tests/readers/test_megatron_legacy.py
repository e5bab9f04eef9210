"""Megatron's checkpoints of one file a rank: every kind of grid, and what must be refused."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.cli.bench import run
from tests.readers.made_megatron import Run, whole_model, write_config, write_legacy
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.engine.report import Report
from xrank.errors import ContradictionError, CorruptError, IncompleteError, LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.base import Hints
from xrank.readers.megatron.legacy import MegatronLegacyReader
from xrank.testing.reader_contract import ReaderContract, SampleSource, read_model, whole

pytestmark = pytest.mark.quick

RUNS = {
    "one rank": Run(),
    "tp": Run(tp=2, gated=False, bias=True),
    "tp x pp": Run(tp=2, pp=2, chunks=((2, 2),), bias=True),
    "vpp": Run(tp=2, pp=2, chunks=((1, 1), (1, 1))),
    "uneven first": Run(pp=2, chunks=((1, 3),), args={"decoder_first_pipeline_num_layers": 1}),
    "uneven ends, vpp": Run(
        pp=3,
        chunks=((1, 2, 1), (1, 2, 1)),
        args={"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2},
    ),
    "layout of stages": Run(pp=2, chunks=((3, 0), (1, 1)), args={"pipeline_model_parallel_layout": "Ettt|||t|tL"}),
    "ep": Run(ep=2, has_experts=True),
    "tp x ep": Run(tp=2, ep=2, has_experts=True, grouped=True),
    "tp x pp x ep": Run(tp=2, pp=2, ep=2, chunks=((1, 1),), has_experts=True),
    "experts whole": Run(tp=2, ep=4, etp=1, has_experts=True, grouped=True),
    "more ranks than experts": Run(tp=4, ep=2, etp=1, has_experts=True),
    "experts in one": Run(tp=2, ep=2, has_experts=True, in_one=True),
    "experts in one, plain": Run(tp=2, ep=4, etp=1, has_experts=True, in_one=True, gated=False),
    "dp": Run(tp=2, pp=2, dp=2, chunks=((1, 1),)),
}


def gathered(source: Path, out: Path, **options: Any) -> Report:
    """Gather under Megatron's own names."""
    return gather_checkpoint(source, out, recipe="none", **options)


def expected(run: Run) -> dict[str, Any]:
    return {name: whole(tensor) for name, tensor in whole_model(run).items()}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_grids(tmp_path: Path, run: Run) -> None:
    write_legacy(tmp_path / "run", run)
    report = gathered(tmp_path / "run", tmp_path / "out")
    assert read_model(tmp_path / "out") == expected(run)
    assert (report.source["format"], report.source["step"]) == ("megatron-legacy", 10)
    assert report.source["world_size"] == run.world
    assert report.source["skipped_nbytes"] > 0


class TestContract(ReaderContract):
    reader = MegatronLegacyReader()
    frameworks = ("torch", "megatron")
    recipe = "none"
    # A marker cut short names another iteration, which may be on its way.
    exit_codes: ClassVar = {"a file cut short": frozenset({3, 4})}

    def make(self, folder: Path) -> SampleSource:
        run = Run(tp=2, chunks=((1,),))
        write_legacy(folder / "checkpoint", run)
        write_config(folder / "checkpoint", run)
        return SampleSource(folder / "checkpoint", expected(run))


def test_tied_copies_are_compared_and_written_once(tmp_path: Path) -> None:
    run = Run(tp=2, pp=2, chunks=((1, 1),), tied=True)
    model = whole_model(run)
    write_legacy(tmp_path / "run", run)
    report = gathered(tmp_path / "run", tmp_path / "out")
    found = read_model(tmp_path / "out")
    assert set(model) - set(found) == {"output_layer.weight"}
    assert report.output["tied"]
    model["output_layer.weight"] = model["output_layer.weight"] + 1
    write_legacy(tmp_path / "other", run, model)
    with pytest.raises(ContradictionError, match=r"embedding|output_layer"):
        gathered(tmp_path / "other", tmp_path / "out2")


def test_inspect_shows_grid_and_stages(tmp_path: Path) -> None:
    write_legacy(tmp_path / "run", RUNS["vpp"])
    shown = inspect_source(tmp_path / "run").details["format"]
    assert shown["grid"][1] == "PP 1, EP 0: TP 0 present, TP 1 present"
    assert shown["stages"] == {
        "PP 0, chunk 0": "layers 0-0",
        "PP 0, chunk 1": "layers 2-2",
        "PP 1, chunk 0": "layers 1-1",
        "PP 1, chunk 1": "layers 3-3",
    }
    assert shown["parallel"] == "TP 2, PP 2, VPP 2, EP 1"


def test_arguments_are_plain_values(tmp_path: Path) -> None:
    place = write_legacy(tmp_path / "run", RUNS["tp"])
    args = MegatronLegacyReader().read(str(place), Hints()).args
    assert args is not None
    assert (args["num_layers"], args["swiglu"], args["params_dtype"]) == (2, False, "torch.bfloat16")


@pytest.fixture
def two_by_two(tmp_path: Path) -> Path:
    return write_legacy(tmp_path / "run", Run(tp=2, pp=2, chunks=((2, 2),)))


def change(folder: Path, rank: str, edit: Callable[[dict[str, Any]], None]) -> Path:
    file = folder / f"mp_rank_{rank}" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    edit(state)
    torch.save(state, file)
    return file


def refused(folder: Path, kind: type[Exception], match: str) -> Any:
    with pytest.raises(kind, match=match) as caught:
        gathered(folder, folder.parent.parent / "out")
    assert not (folder.parent.parent / "out").exists()
    return caught.value


def test_inspect_names_every_hole(two_by_two: Path) -> None:
    shutil.rmtree(two_by_two / "mp_rank_01_000")
    shutil.rmtree(two_by_two / "mp_rank_00_001")
    one, other = inspect_source(two_by_two).details["problems"]
    assert one["exit_code"] == other["exit_code"] == 3
    assert one["got"] == "2 files; missing: mp_rank_01_000, mp_rank_00_001"


@pytest.mark.parametrize("lost", ["00_000", "01_000", "00_001", "01_001"])
def test_a_missing_rank_is_named(two_by_two: Path, lost: str) -> None:
    shutil.rmtree(two_by_two / f"mp_rank_{lost}")
    assert lost in str(refused(two_by_two, IncompleteError, f"mp_rank_{lost}").file)


def test_a_stage_of_which_only_the_optimizer_was_written(two_by_two: Path) -> None:
    file = two_by_two / "mp_rank_01_001" / "model_optim_rng.pt"
    file.rename(file.with_name("distrib_optim.pt"))
    ended = run("gather", two_by_two, "--out", two_by_two.parent.parent / "out")
    assert ended.exit_code == 3 and "IncompleteError: mp_rank_01_001/model_optim_rng.pt: not in" in ended.stderr
    assert "PP 1" in ended.stderr and "copy mp_rank_01_001 from where it was written" in ended.stderr
    assert "a gather would exit 3" in run("inspect", two_by_two).stdout


def test_a_marker_of_nothing(two_by_two: Path) -> None:
    (two_by_two.parent / "latest_checkpointed_iteration.txt").write_text("20")
    with pytest.raises(IncompleteError, match="iter_0000020"):
        gathered(two_by_two.parent, two_by_two.parent.parent / "out")


@pytest.mark.parametrize("text", ["../run/iter_0000010", "/etc", "-1", "iter_0000010", ""])
def test_a_marker_that_is_no_number(two_by_two: Path, text: str) -> None:
    (two_by_two.parent / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CorruptError, match="is not a marker"):
        gathered(two_by_two.parent, two_by_two.parent.parent / "out")


def test_a_release(two_by_two: Path, tmp_path: Path) -> None:
    for file in two_by_two.glob("*/*.pt"):
        state = torch.load(file, weights_only=False)
        state["iteration"] = "release"
        torch.save(state, file)
    two_by_two.rename(two_by_two.parent / "release")
    (two_by_two.parent / "latest_checkpointed_iteration.txt").write_text("release")
    report = gathered(two_by_two.parent, tmp_path / "out")
    assert report.source["step"] is None
    assert read_model(tmp_path / "out") == expected(Run(tp=2, pp=2, chunks=((2, 2),)))


@pytest.mark.parametrize(("from_", "to"), [("00_000", "01_000"), ("01_001", "01_000"), ("01_001", "00_001")])
@pytest.mark.parametrize("told", [True, False], ids=["ranks told", "converted"])
def test_another_ranks_file(tmp_path: Path, from_: str, to: str, told: bool) -> None:
    # Three stages: those between the first and the last hold the same names.
    args = {} if told else {"rank": 0, "local_rank": 0}
    place = write_legacy(tmp_path / "run", Run(tp=2, pp=3, chunks=((1, 1, 1),), args=args))
    for a, b in ((from_, to), ("00_001", "01_001")):
        copy = Path(shutil.copytree(tmp_path / "run", tmp_path / f"{a}{b}")) / place.name
        shutil.copy(copy / f"mp_rank_{a}" / "model_optim_rng.pt", copy / f"mp_rank_{b}" / "model_optim_rng.pt")
        refused(copy, ContradictionError, rf"mp_rank_{b}|copy|another rank|holds")


@pytest.mark.parametrize(
    ("run", "one", "other"),
    [
        (Run(pp=4, chunks=((1, 1, 1, 1),)), "00_001", "00_002"),
        (Run(pp=4, chunks=((1, 1, 1, 1),), args={"use_tp_pp_dp_mapping": True}), "00_001", "00_002"),
        (Run(tp=2), "00", "01"),
        (Run(tp=2, ep=2, chunks=((1,),), has_experts=True), "01_000", "01_001"),
    ],
    ids=["stages", "stages before data", "parts", "experts"],
)
def test_swapped_ranks(tmp_path: Path, run: Run, one: str, other: str) -> None:
    place = write_legacy(tmp_path / "run", run)
    (place / f"mp_rank_{one}").rename(place / "x")
    (place / f"mp_rank_{other}").rename(place / f"mp_rank_{one}")
    (place / "x").rename(place / f"mp_rank_{other}")
    refused(place, ContradictionError, "another rank's file")


def test_another_steps_file(two_by_two: Path) -> None:
    change(two_by_two, "01_001", lambda state: state.update(iteration=20))
    refused(two_by_two, ContradictionError, "a different iteration")


def test_another_iterations_folder(two_by_two: Path) -> None:
    moved = two_by_two.rename(two_by_two.parent / "iter_0000030")
    refused(moved, ContradictionError, "a different iteration than its folder")


def test_arguments_that_differ(two_by_two: Path) -> None:
    change(two_by_two, "01_001", lambda state: setattr(state["args"], "hidden_size", 16))
    refused(two_by_two, ContradictionError, "args.hidden_size")


def test_layers_that_arguments_do_not_tell(tmp_path: Path) -> None:
    place = write_legacy(tmp_path / "run", Run(pp=2, chunks=((3, 1),)))
    refused(place, ContradictionError, "pipeline stage 0 does not contain")
    place = write_legacy(tmp_path / "other", Run(pp=2, chunks=((2, 2),), args={"num_layers": 6}))
    refused(place, ContradictionError, "args.num_layers")


def test_replicas_are_compared(two_by_two: Path) -> None:
    def edit(state: dict[str, Any]) -> None:
        state["model"]["decoder.layers.1.pre_mlp_layernorm.weight"][3] = 7

    change(two_by_two, "01_001", edit)
    refused(two_by_two, ContradictionError, r"decoder\.layers\.3\.pre_mlp_layernorm")


def test_a_copy_that_a_rank_lacks(two_by_two: Path) -> None:
    change(two_by_two, "01_001", lambda state: state["model"].pop("decoder.layers.1.pre_mlp_layernorm.weight"))
    refused(two_by_two, ContradictionError, "mp_rank_01_001")


def test_plain_halves_are_not_taken_for_gate_and_up(two_by_two: Path) -> None:
    for rank in ("00_000", "01_000", "00_001", "01_001"):
        change(two_by_two, rank, lambda state: setattr(state["args"], "swiglu", False))
    refused(two_by_two, ContradictionError, "one projection")


def test_an_unknown_name_needs_a_layout(two_by_two: Path, tmp_path: Path) -> None:
    parts = {}
    for tp in range(2):
        parts[tp] = torch.rand(3, 2)
        change(two_by_two, f"0{tp}_000", lambda state, tp=tp: state["model"].update({"extra.weight": parts[tp]}))  # type: ignore[misc]
    error = refused(two_by_two, LayoutError, r"extra\.weight")
    assert error.tensor == "extra.weight" and "layouts=" in error.next_step
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["extra.weight"] = "[a, b/tp]"
    layouts["decoder.layers.0.mlp.linear_fc2.weight"] = "[h, f/tp]"
    gathered(two_by_two, tmp_path / "out", layouts=layouts)
    assert read_model(tmp_path / "out")["extra.weight"] == whole(torch.cat([parts[0], parts[1]], dim=1))


def encoders(state: Any) -> None:
    """Make a decoder BERT's encoder; its other names are not a decoder's either."""
    names = {name: name.replace("decoder.", "encoder.") for name in state["model"]}
    state["model"] = {names[name]: tensor for name, tensor in state["model"].items()}


def test_a_model_without_a_decoder(tmp_path: Path) -> None:
    run = Run(chunks=((3,),))
    place = write_legacy(tmp_path / "run", run)
    gathered(place, tmp_path / "decoder")
    change(place, "00", encoders)
    gathered(place, tmp_path / "encoder")
    want = {name.replace("decoder.", "encoder."): tensor for name, tensor in read_model(tmp_path / "decoder").items()}
    assert read_model(tmp_path / "encoder") == want and "encoder.layers.2.mlp.linear_fc1.weight" in want
    change(place, "00", lambda state: state["args"].__dict__.update(num_layers=4))
    refused(place, ContradictionError, r"args\.num_layers")


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """Names and cuts as Megatron-core 0.16 saved them; its own save of such layers gathered the same."""
    run = Run(tp=2, pp=2, chunks=((1, 1),))
    more = {f"mtp.layers.0.{norm}.weight": torch.rand(8) for norm in ("enorm", "hnorm", "final_layernorm")}
    more["mtp.layers.0.eh_proj.weight"] = torch.rand(8, 16)
    more["mtp.layers.0.transformer_layer.self_attention.linear_proj.weight"] = torch.rand(8, 8)
    more["mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"] = torch.rand(24, 8)
    model = whole_model(run) | more
    write_legacy(tmp_path / "run", run, model)
    gathered(tmp_path / "run", tmp_path / "out")
    assert read_model(tmp_path / "out") == {name: whole(tensor) for name, tensor in model.items()}


@pytest.mark.parametrize("is_cut", [True, False])
def test_latent_attention(tmp_path: Path, is_cut: bool) -> None:
    """As Megatron-core 0.16's own linear layers leave it, and as Transformer Engine's, which repeat what goes down."""
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_pos_emb_head_dim": 2}
    run = Run(tp=2, args=sizes)
    at = "decoder.layers.0.self_attention."
    down = {f"{at}linear_{x}_down_proj.weight": torch.rand(8, 8) for x in ("q", "kv")}
    more = {f"{at}linear_{x}_up_proj.weight": torch.rand(12, rank) for x, rank in (("q", 8), ("kv", 6))}
    more |= {f"{at}kv_layernorm.weight": torch.rand(6), f"{at}linear_q_up_proj.layer_norm_weight": torch.rand(8)}
    model = whole_model(run) | down | more
    place = write_legacy(tmp_path / "run", run, model)
    if not is_cut:
        for file in place.glob("*/*.pt"):
            state = torch.load(file, weights_only=False)
            state["model"].update(down)
            torch.save(state, file)
    gathered(tmp_path / "run", tmp_path / "out")
    assert read_model(tmp_path / "out") == {name: whole(tensor) for name, tensor in model.items()}
    # Without the sizes, neither is told.
    for file in place.glob("*/*.pt"):
        state = torch.load(file, weights_only=False)
        del state["args"].q_lora_rank
        torch.save(state, file)
    with pytest.raises(LayoutError, match=r"linear_q_down_proj\.weight: it is unknown how Megatron splits"):
        gathered(tmp_path / "run", tmp_path / "again")


def test_an_encoder_over_stages_is_refused(two_by_two: Path) -> None:
    """Each stage counts from 0, and nothing but the decoder's layers is renumbered."""
    for rank in ("00_000", "01_000", "00_001", "01_001"):
        change(two_by_two, rank, encoders)
    assert refused(two_by_two, UsageError, "an encoder").next_step == "save with --ckpt-format torch_dist"


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_that_arguments_do_not_tell(tmp_path: Path, grouped: bool) -> None:
    """As --moe-extended-tp of old releases left them: a part of every expert on each expert rank."""
    write_legacy(tmp_path / "run", Run(ep=2, has_experts=True, grouped=grouped, args={"num_experts": 2}))
    with pytest.raises(ContradictionError, match="its share of the experts") as caught:
        gathered(tmp_path / "run", tmp_path / "out")
    assert (caught.value.got, caught.value.want) == (
        "2 experts in a layer, on each of 2 expert ranks",
        "2 in all, as in args.num_experts",
    )


def test_experts_without_a_number_are_refused(tmp_path: Path) -> None:
    place = write_legacy(tmp_path / "run", Run())
    change(place, "00", lambda s: s["model"].update({"decoder.layers.0.mlp.experts.weight1": torch.rand(4, 4)}))
    refused(place, CorruptError, r"experts\.weight1")
    place = write_legacy(tmp_path / "other", Run())
    change(place, "00", lambda s: s["model"].update({"decoder.layers.0.mlp.experts.lora.weight": torch.rand(4, 4)}))
    refused(place, LayoutError, r"experts\.lora")


def test_old_versions_and_modules_are_refused(tmp_path: Path) -> None:
    place = write_legacy(tmp_path / "run", Run())
    change(place, "00", lambda state: state.update(checkpoint_version=2.0))
    refused(place, UsageError, "a different version")
    nested = {"language_model": {"encoder": {"weight": torch.rand(2)}}}
    change(place, "00", lambda state: state.update(checkpoint_version=3.0, model=nested))
    refused(place, UsageError, "older than Megatron-core")


def test_arguments_of_another_class_are_refused(tmp_path: Path) -> None:
    place = write_legacy(tmp_path / "run", Run())
    change(place, "00", lambda state: state.update(args=Path("x")))
    refused(place, UsageError, "should be an argparse.Namespace: is an object of .pathlib")


def test_a_whole_module_is_named(tmp_path: Path) -> None:
    place = write_legacy(tmp_path / "run", Run())
    change(place, "00", lambda state: state.update(model=torch.nn.Linear(2, 2)))
    refused(place, UsageError, "its model is a whole module")
    change(place, "00", lambda state: state.update(model={"w": argparse.Namespace(x=torch.ones(2))}))
    refused(place, UsageError, "w is an object of 'argparse.Namespace'")


def test_a_rank_of_a_larger_run_left_over(two_by_two: Path) -> None:
    shutil.copytree(two_by_two / "mp_rank_01_001", two_by_two / "mp_rank_02_001")
    refused(two_by_two, ContradictionError, "mp_rank_02_001")
