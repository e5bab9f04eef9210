"""Megatron-core's distributed checkpoints, synthesised: what is model, what is left out, what must be refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

import xrank
from tests.cli.bench import Ended, run
from tests.commands.forked_ranks import forked_ranks
from tests.readers.made_megatron import Run, whole_model, write_config, write_dist
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.engine.report import Report
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.base import Hints
from xrank.readers.dcp import DcpReader
from xrank.readers.discovery import find_source
from xrank.readers.megatron.dist import MegatronDistReader
from xrank.testing.reader_contract import ReaderContract, SampleSource, read_model, whole

pytestmark = pytest.mark.quick

RUN = Run(tp=2, pp=2, chunks=((1, 1),), args={"vocab_size": 13})


def gathered(source: Path, out: Path) -> Report:
    """Gather under Megatron's own names."""
    return gather_checkpoint(source, out, recipe="none")


def stacked(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model with layers as a dim, and their experts as the next one."""
    found: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    for name, tensor in model.items():
        parts = name.split(".")
        numbers = tuple(int(part) for part in parts if part.isdecimal())
        plain = ".".join(part for part in parts if not part.isdecimal()).replace("local_experts", "experts")
        found.setdefault(plain, {})[numbers] = tensor
    return {name: _stack(tensors) for name, tensors in found.items()}


def _stack(tensors: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    if () in tensors:
        return tensors[()]
    firsts = sorted({key[0] for key in tensors})
    return torch.stack([_stack({key[1:]: t for key, t in tensors.items() if key[0] == first}) for first in firsts])


def nest(place: Path, into: Path, common: dict[str, Any]) -> Path:
    """Move a checkpoint to where another trainer has it, with that trainer's own ``common.pt``."""
    into.parent.mkdir(parents=True)
    torch.save(common, place / "common.pt")
    return Path(shutil.move(place, into))


def test_nemos_folders(tmp_path: Path) -> None:
    """NeMo 2: ``weights`` beside ``context``, names with a prefix, and no args."""
    model = whole_model(RUN)
    common = {"epoch": 0, "global_step": 10, "pytorch-lightning_version": "2.5", "callbacks": {}}
    run = tmp_path / "run"
    weights = nest(
        write_dist(tmp_path / "made", RUN, model, prefix="module."), run / "step=10-last" / "weights", common
    )
    (weights.parent / "context").mkdir()
    (weights.parent / "context" / "model.yaml").write_text("_target_: nemo.collections.llm.LlamaModel\n")
    for number, place in enumerate((run, weights.parent, weights)):
        gathered(place, tmp_path / f"out-{number}")
        assert read_model(tmp_path / f"out-{number}") == {name: whole(tensor) for name, tensor in model.items()}
    with pytest.raises(UsageError, match="needs the size 'v'") as caught:
        gather_checkpoint(run, tmp_path / "out")
    assert "config.json" in str(caught.value.next_step)


@pytest.mark.parametrize("is_alone", [False, True], ids=["whole", "alone"])
def test_lora_of_megatron_bridge_is_named(tmp_path: Path, is_alone: bool) -> None:
    """Its wrapped layers have `to_wrap` in their names, and its checkpoints of an adapter hold the factors alone."""
    model = whole_model(RUN)
    for name in [name for name in model if name.endswith("linear_qkv.weight")]:
        layer, weight = name.removesuffix(".weight"), model.pop(name)
        model[f"{layer}.to_wrap.weight"] = weight
        model[f"{layer}.adapter.linear_in.weight"] = torch.rand(4, weight.shape[1])
        model[f"{layer}.adapter.linear_out.weight"] = torch.rand(weight.shape[0], 4)
    if is_alone:
        model = {name: tensor for name, tensor in model.items() if ".adapter." in name}
    source = write_dist(tmp_path / "run", RUN, model)
    with pytest.raises(UsageError, match="contains Megatron-Bridge's LoRA") as caught:
        gather_checkpoint(source, tmp_path / "out")
    assert "export it for PEFT" in str(caught.value.next_step) and not (tmp_path / "out").exists()


def test_verls_megatron_backend(tmp_path: Path) -> None:
    """verl: ``dist_ckpt`` beside ``huggingface``, whose config.json is the model's; its weights are a second source."""
    model = whole_model(RUN)
    actor = tmp_path / "global_step_5" / "actor"
    place = nest(write_dist(tmp_path / "made", RUN, model), actor / "dist_ckpt", {"rng_state": [{"random": 3}]})
    (actor / "huggingface").mkdir()
    write_config(actor / "huggingface", RUN)
    for number, source in enumerate((tmp_path / "global_step_5", actor, place)):
        report = gather_checkpoint(source, tmp_path / f"out-{number}")
        assert (report.source["format"], report.source["recipe"]) == ("megatron-dist", "megatron-llama")
        assert (tmp_path / f"out-{number}" / "config.json").is_file()
    # The whole model beside the state is taken, and compared with it under Hugging Face's names.
    exported = actor / "huggingface" / "model.safetensors"
    shutil.copy(tmp_path / "out-0" / "model.safetensors", exported)
    for number, source in enumerate((tmp_path / "global_step_5", actor)):
        report = gather_checkpoint(source, tmp_path / f"whole-{number}")
        assert (report.source["format"], report.source["recipe"]) == ("safetensors", None)
        note = next(text for code, text in report.notes if code == "also-here")
        assert f"megatron-dist files in {place} are next to the safetensors files" in note and "tensors agree" in note
        assert read_model(tmp_path / f"whole-{number}") == read_model(tmp_path / "out-0")
    gather_checkpoint(actor, tmp_path / "again", format="megatron-dist")
    tensors = load_file(exported)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, exported)
    with pytest.raises(UsageError, match="hold different models") as caught:
        gather_checkpoint(actor, tmp_path / "out")
    assert "safetensors" in caught.value.next_step and "megatron-dist" in caught.value.next_step
    # Below several such folders the user must choose.
    shutil.copytree(actor, tmp_path / "global_step_5" / "critic")
    with pytest.raises(UsageError, match="contains several sources"):
        gather_checkpoint(tmp_path / "global_step_5", tmp_path / "out")


FORMS: dict[str, tuple[Run, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]] = {
    "numbered": (RUN, dict),
    "stacked": (RUN, stacked),
    "experts": (replace(RUN, has_experts=True), dict),
    "stacked experts": (replace(RUN, has_experts=True), stacked),
    "grouped experts": (replace(RUN, has_experts=True, grouped=True), dict),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at", ["run", "run/iter_0000010"])
def test_forms(tmp_path: Path, form: str, at: str) -> None:
    run, shaped = FORMS[form]
    model = shaped(whole_model(run))
    write_dist(tmp_path / "run", run, model)
    report = gathered(tmp_path / at, tmp_path / "out")
    assert read_model(tmp_path / "out") == {name: whole(tensor) for name, tensor in model.items()}
    assert (report.source["format"], report.source["step"], report.source["world_size"]) == ("megatron-dist", 10, 4)
    assert report.source["skipped_nbytes"] > 0
    assert {"left-out", "extra-state"} <= {code for code, _ in report.notes}


class TestContract(ReaderContract):
    reader = MegatronDistReader()
    frameworks = ("torch", "megatron")
    recipe = "none"
    # A marker cut short names another iteration, which may be on its way.
    exit_codes: ClassVar = {"a file cut short": frozenset({3, 4})}
    unseen: ClassVar = {"a bit of the metadata flipped": "nothing but the recipe vouches for the names in .metadata"}

    def make(self, folder: Path) -> SampleSource:
        run = Run(tp=2, chunks=((1,),))
        model = stacked(whole_model(run))
        write_dist(folder / "checkpoint", run, model)
        write_config(folder / "checkpoint", run)
        return SampleSource(folder / "checkpoint", {name: whole(tensor) for name, tensor in model.items()})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_dist(tmp_path / "run", RUN, whole_model(RUN))


def refused(place: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        gather_checkpoint(place, place.parent.parent / "out", recipe="none", format="megatron-dist")
    assert not (place.parent.parent / "out").exists()


def change_common(place: Path, **changes: Any) -> None:
    state = torch.load(place / "common.pt", weights_only=False)
    state.update(changes)
    torch.save(state, place / "common.pt")


def test_no_other_reader_takes_it(place: Path) -> None:
    assert find_source(str(place))[1].name == find_source(str(place.parent))[1].name == "megatron-dist"
    assert DcpReader().recognize(str(place)) is not None


@pytest.mark.parametrize("name", ["metadata.json", "common.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_a_missing_file_is_named(place: Path, name: str) -> None:
    (place / name).unlink()
    refused(place, IncompleteError, name)


def test_wrapped_modules_lose_their_prefix(tmp_path: Path) -> None:
    model = whole_model(RUN)
    place = write_dist(tmp_path / "run", RUN, model, prefix="module.")
    gathered(place, tmp_path / "out")
    assert read_model(tmp_path / "out") == {name: whole(tensor) for name, tensor in model.items()}


def test_arguments_and_details(place: Path) -> None:
    model = MegatronDistReader().read(str(place), Hints())
    assert model.args is not None and (model.args["num_layers"], model.args["params_dtype"]) == (2, "torch.bfloat16")
    shown = inspect_source(place).details["format"]
    assert (shown["iterations"], shown["parallel"]) == (["iter_0000010"], "TP 2, PP 2, VPP 1, EP 1")
    assert (shown["layers"], shown["vocabulary"]) == ("numbered in names", "16 rows stored, 13 true")
    assert shown["optimizer"].startswith("2 tensors left out")


def test_several_iterations_and_no_marker(place: Path) -> None:
    shutil.copytree(place, place.parent / "iter_0000020")
    assert find_source(str(place.parent))[0] == str(place.parent)
    (place.parent / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(UsageError, match="several sources"):
        find_source(str(place.parent))


def test_a_layer_that_nobody_saved(tmp_path: Path) -> None:
    model = {name: tensor for name, tensor in whole_model(RUN).items() if ".layers.1." not in name}
    refused(write_dist(tmp_path / "run", RUN, model), ContradictionError, r"decoder\.layers\.1")


def test_layers_of_another_model(tmp_path: Path) -> None:
    run = replace(RUN, args={"num_layers": 1})
    refused(write_dist(tmp_path / "run", run, whole_model(RUN)), ContradictionError, r"decoder\.layers\.1")
    place = write_dist(tmp_path / "stacked", run, stacked(whole_model(RUN)))
    refused(place, ContradictionError, r"decoder\.layers\.")


def test_another_iterations_folder(place: Path) -> None:
    change_common(place, iteration=20)
    refused(place, ContradictionError, "a different iteration")


@pytest.mark.parametrize("told", [{"sharded_backend": "zarr"}, {"sharded_backend_version": 2}, {"common_backend": "x"}])
def test_other_backends_are_refused(place: Path, told: dict[str, Any]) -> None:
    config = json.loads((place / "metadata.json").read_text())
    (place / "metadata.json").write_text(json.dumps({**config, **told}))
    refused(place, UsageError, "not of the format megatron-dist|has no known format|not supported")


def test_a_config_of_nothing(place: Path) -> None:
    (place / "metadata.json").write_text("{}")
    refused(place, CorruptError, r"metadata\.json")


def test_arguments_of_another_class_are_refused(place: Path) -> None:
    change_common(place, args=Path("x"))
    refused(place, UsageError, "should be an argparse.Namespace: is an object of .pathlib")


def test_no_arguments(place: Path, tmp_path: Path) -> None:
    change_common(place, args=None)
    assert "no-args" in {code for code, _ in gathered(place, tmp_path / "out").notes}
    assert MegatronDistReader().read(str(place), Hints()).args is None


def test_a_flipped_name_is_seen_by_the_recipe(place: Path, tmp_path: Path) -> None:
    content = (place / ".metadata").read_bytes()
    assert content.count(b"linear_proj") > 0
    (place / ".metadata").write_bytes(content.replace(b"linear_proj", b"linear_prok"))
    with pytest.raises(UsageError, match="no recipe fits"):
        gather_checkpoint(place, tmp_path / "out")


def test_an_optimizer_alone(tmp_path: Path) -> None:
    refused(write_dist(tmp_path / "run", RUN, {"optimizer.step": torch.zeros(8)}), UsageError, "no model")


def list_hashes(place: Path) -> Path:
    """Write ``integrity.json`` as Megatron-core 0.18 does last (validation.py: save_integrity_manifest)."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(place.iterdir())}
    (place / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}, indent=2))
    return place


def change_list(place: Path, **changes: Any) -> None:
    content = json.loads((place / "integrity.json").read_text())
    (place / "integrity.json").write_text(json.dumps({**content, **changes}))


def from_another_save(place: Path, tmp_path: Path) -> None:
    """Take a rank's file of another save: its pieces are sound, and nothing in them names the step."""
    later = {name: tensor + 1 for name, tensor in whole_model(RUN).items()}
    shutil.copy(write_dist(tmp_path / "other", RUN, later) / "__1_0.distcp", place)


def refuses(place: Path, tmp_path: Path, code: int, *said: str) -> None:
    """See gather and verify refuse a checkpoint alike."""
    ends: list[Ended] = [
        run("gather", place, "--out", tmp_path / "refused", "--recipe", "none"),
        run("verify", place),
    ]
    for ended in ends:
        shown = ended.stderr or ended.stdout
        assert ended.exit_code == code and all(text in shown for text in said), shown
    assert not [name for name in os.listdir(tmp_path) if "refused" in name]


@pytest.fixture
def listed(place: Path) -> Path:
    return list_hashes(place)


def test_right_hashes_are_compared(listed: Path, tmp_path: Path) -> None:
    assert run("gather", listed, "--out", tmp_path / "out", "--recipe", "none").exit_code == 0
    assert run("verify", listed).exit_code == 0
    gathered(listed, tmp_path / "again")
    assert read_model(tmp_path / "out") == read_model(tmp_path / "again")


def test_a_file_of_another_save_is_seen_by_its_hash(place: Path, tmp_path: Path) -> None:
    list_hashes(place)
    from_another_save(place, tmp_path)
    refuses(place, tmp_path, 4, "__1_0.distcp", "integrity.json", "sha256")


@pytest.mark.parametrize("name", ["metadata.json", "common.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_a_wrong_hash_is_refused_by_name(listed: Path, tmp_path: Path, name: str) -> None:
    files = json.loads((listed / "integrity.json").read_text())["files"]
    change_list(listed, files={**files, name: "0" * 64})
    refuses(listed, tmp_path, 4, name, "integrity.json", "0" * 64)


def test_a_listed_file_that_is_missing_is_named(place: Path, tmp_path: Path) -> None:
    (place / "more.yaml").write_text("of the run")
    list_hashes(place)
    (place / "more.yaml").unlink()
    refuses(place, tmp_path, 3, "more.yaml", "integrity.json")


def test_a_file_of_the_model_that_is_not_listed_is_named(listed: Path, tmp_path: Path) -> None:
    files = json.loads((listed / "integrity.json").read_text())["files"]
    change_list(listed, files={name: text for name, text in files.items() if name != "__1_0.distcp"})
    refuses(listed, tmp_path, 4, "__1_0.distcp", "integrity.json does not list it")


def test_another_file_that_is_not_listed_is_noted(listed: Path, tmp_path: Path) -> None:
    (listed / "run_config.yaml").write_text("later")
    notes = dict(gathered(listed, tmp_path / "out").notes)
    assert "run_config.yaml" in notes["unlisted-files"]


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"algorithm": "blake3"}, 2, "blake3"),
        ({"files": {"../secret": "0" * 64}}, 4, "outside its folder"),
        ({"files": {"common.pt": "0" * 40}}, 4, "no SHA-256 of 'common.pt'"),
        ({"files": ["common.pt"]}, 4, "is not a list of hashes"),
        ({"files": {"common.pt": 5}}, 4, "is not a list of hashes"),
    ],
)
def test_a_list_of_another_kind_is_refused(
    listed: Path, tmp_path: Path, changes: dict[str, Any], code: int, said: str
) -> None:
    change_list(listed, **changes)
    refuses(listed, tmp_path, code, said)


def test_hashes_are_compared_by_every_command_that_reads_all(place: Path, tmp_path: Path) -> None:
    list_hashes(place)
    right = Path(shutil.copytree(place, tmp_path / "right"))
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    for name, tensor in whole_model(RUN).items():
        layouts[name] = "[" + ", ".join("abc"[: tensor.dim()]) + "]"
    from_another_save(place, tmp_path)
    with pytest.raises(CorruptError, match=r"__1_0\.distcp"):
        xrank.reshard_checkpoint(place, layouts, tmp_path / "states", recipe="none")
    assert not (tmp_path / "states").exists()
    assert "__1_0.distcp" in str(xrank.verify_model(right, against=place).error)


def test_ranks_share_the_files_to_hash(place: Path, tmp_path: Path) -> None:
    list_hashes(place)
    with forked_ranks() as ranks:
        ended = ranks("gather", place, "--recipe", "none", "--out", tmp_path / "out", num_ranks=2)
        assert [one.exit_code for one in ended] == [0, 0], ended
        from_another_save(place, tmp_path)
        ended = ranks("gather", place, "--recipe", "none", "--out", tmp_path / "refused", num_ranks=2)
    assert 0 not in [one.exit_code for one in ended] and "__1_0.distcp" in "".join(one.stderr for one in ended)
    assert not (tmp_path / "refused").exists()
