"""Folders of whole tensors, .bin and safetensors: what must be there, what is tied, and what is no weight."""

from __future__ import annotations

import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from xrank.cli.main import cli
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model
from xrank.engine.report import Report
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UnsafeError, UsageError, XrankError
from xrank.readers.discovery import find_source
from xrank.readers.hugging_face.folder import HfFolderReader
from xrank.readers.torch_save import BinFolderReader
from xrank.testing.reader_contract import ReaderContract, SampleSource, WholeTensor, read_model, whole

pytestmark = pytest.mark.quick

KINDS = ["bin", "safetensors"]


def model() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.rand(6, 4, generator=random),
        "norm.weight": torch.rand(4, generator=random).bfloat16(),
        "steps": torch.tensor(3),
        "mask": torch.tensor([True, False]),
    }


def write(folder: Path, kind: str, *, num_files: int = 2, index: bool = True, total_size: int | None = None) -> Path:
    """Write the model as transformers does."""
    folder.mkdir(parents=True)
    stem = {"bin": "pytorch_model", "safetensors": "model"}[kind]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(num_files)]
    for number, (name, tensor) in enumerate(model().items()):
        parts[number % num_files][name] = tensor
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{num_files:05d}.{kind}" if num_files > 1 else f"{stem}.{kind}"
        torch.save(part, folder / file) if kind == "bin" else save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    nbytes = sum(tensor.nbytes for tensor in model().values()) if total_size is None else total_size
    if index:
        told = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(told))
    return folder


def wanted() -> dict[str, WholeTensor]:
    return {name: whole(tensor) for name, tensor in model().items()}


def gathered(path: Path, **options: Any) -> tuple[Mapping[str, WholeTensor], Report]:
    out = path.parent / f"{path.name}.out"
    report = gather_checkpoint(path, out, **options)
    return read_model(out), report


class TestBin(ReaderContract):
    reader = BinFolderReader()

    def make(self, folder: Path) -> SampleSource:
        return SampleSource(write(folder / "model", "bin"), wanted())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_files", [1, 3])
def test_with_and_without_index(tmp_path: Path, kind: str, num_files: int) -> None:
    assert gathered(write(tmp_path / "a", kind, num_files=num_files))[0] == wanted()
    assert gathered(write(tmp_path / "b", kind, num_files=num_files, index=False))[0] == wanted()
    (file, *others) = sorted((tmp_path / "b").iterdir())
    place, reader = find_source(str(file))[:2]
    # One file of several is no model: its folder is.
    assert (place, reader.name) == (str(file.parent if others else file), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_the_others_names_tell_of(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "model", kind, num_files=3, index=False)
    gone = sorted(folder.iterdir())[2]
    gone.unlink()
    with pytest.raises(IncompleteError, match=f"implies {gone.name}") as caught:
        gathered(folder)
    assert caught.value.file == str(gone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_may_claim_any_number_of_files(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "model", kind, index=False)
    first = sorted(folder.iterdir())[0]
    first.rename(folder / first.name.replace("of-00002", "of-99999"))
    with pytest.raises(IncompleteError, match="implies"):
        gathered(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ghosts_and_strays_of_the_index(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "model", kind)
    (file,) = folder.glob("*.index.json")
    index = json.loads(file.read_text())
    first = index["weight_map"]["embed.weight"]
    changes: list[tuple[str, str, type[XrankError]]] = [
        ("lm_head.weight", first, IncompleteError),
        ("embed.weight", "../" + first, UnsafeError),
        ("embed.weight", "absent.bin", IncompleteError),
    ]
    for name, target, error in changes:
        weight_map = {**index["weight_map"], name: target}
        file.write_text(json.dumps({**index, "weight_map": weight_map}))
        with pytest.raises(error) as caught:
            gathered(folder)
        assert str(caught.value.file).startswith(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_the_index_decides_which_shard_counts(tmp_path: Path, kind: str) -> None:
    """A tool that changes some tensors writes them to a file of their own, and leaves the old ones in their shards."""
    folder = write(tmp_path / "model", kind)
    (file,) = folder.glob("*.index.json")
    index = json.loads(file.read_text())
    shards = sorted(folder.glob(f"*-of-*.{kind}"))
    names = {shard.name: [n for n, f in index["weight_map"].items() if f == shard.name] for shard in shards}
    changed = names[shards[0].name][0]
    stale = {name: model()[name] + 1 for name in names[shards[1].name]}
    held = [
        # Its own tensors, one of them superseded, another shard's, and one that no index names.
        {name: model()[name] + (name == changed) for name in names[shards[0].name]}
        | stale
        | {"old.norm": torch.ones(3)},
        {name: model()[name] for name in names[shards[1].name]},
    ]
    overlay = f"{shards[0].name.split('-')[0]}-overlay-00001.{kind}"
    for path, state in zip([*shards, folder / overlay], [*held, {changed: model()[changed]}], strict=True):
        torch.save(state, path) if kind == "bin" else save_file(state, path)
    file.write_text(json.dumps({"metadata": {}, "weight_map": {**index["weight_map"], changed: overlay}}))
    found, report = gathered(folder)
    assert found == wanted()
    (note,) = [text for code, text in report.notes if code == "not-in-index"]
    assert note.startswith(
        f"{len(stale) + 2} tensors left out that {file.name} does not list, or lists in a different file, "
    )
    # The base model of another gather is read by its index, too.
    if kind == "safetensors":
        again = gathered(write(tmp_path / "again", kind), base_model=folder)[1]
        assert again.proof["base_model"] == "names and shapes"
    # A tensor that the index gives to a file without it is not replaced by a stale one.
    file.write_text(json.dumps({"weight_map": {**index["weight_map"], changed: shards[1].name}}))
    with pytest.raises(ContradictionError, match=re.escape(changed)):
        gathered(folder)


DELTA = {
    "version": "000007",
    "base_version": "000006",
    "delta_encoding": "xor",
    "compression_format": "zstd",
    "checksum_format": "xxh3-128",
}


def write_delta(folder: Path, metadata: dict[str, str], name: str = "model-00000-of-00001.safetensors") -> Path:
    """Write what a trainer leaves of a step: bodies of zstd, with the checksums of the new tensors."""
    folder.mkdir()
    bodies = {name: torch.randint(0, 255, (9,), dtype=torch.uint8) for name in model()}
    save_file(bodies, folder / name, metadata=dict.fromkeys(bodies, "0f" * 16))
    if metadata:
        index = {"metadata": metadata, "weight_map": dict.fromkeys(bodies, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_is_not_a_model(tmp_path: Path, encoding: str) -> None:
    """slime, miles and ModelExpress write only what changed in a step, under the names of the model."""
    folder = write_delta(tmp_path / "weight_v000007", {**DELTA, "delta_encoding": encoding})
    for path, code, text in (
        (folder, 3, "the changes since version 6, which is missing"),
        (folder / "model-00000-of-00001.safetensors", 2, "a delta of"),
    ):
        ended = CliRunner().invoke(cli, ["gather", str(path), "--out", str(tmp_path / "out")])
        assert ended.exit_code == code and text in ended.stderr and not (tmp_path / "out").exists()
        shown = json.loads(CliRunner().invoke(cli, ["inspect", str(path), "--json"]).stdout)
        assert [problem["exit_code"] for problem in shown["problems"]] == [code]
    with pytest.raises(UsageError, match="is a delta of version 7 on base 6, not a model"):
        gathered(write(tmp_path / "whole", "safetensors"), base_model=folder)
    # Without its index, its bodies and checksums show it.
    with pytest.raises(UsageError, match="is a delta of one version of weights on another"):
        gathered(write_delta(tmp_path / "bare", {}))
    # The version that begins a chain is a whole model.
    start = write(tmp_path / "weight_v000000", "safetensors")
    (file,) = start.glob("*.index.json")
    index = json.loads(file.read_text())
    file.write_text(json.dumps({**index, "metadata": {"version": "000000"}}))
    assert gathered(start)[0] == wanted()


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_total_is_noted(tmp_path: Path, kind: str) -> None:
    """verl counts elements there, Megatron-Bridge copies the source's."""
    found, report = gathered(write(tmp_path / "model", kind, total_size=31))
    assert found == wanted()
    notes = {note["code"]: note["message"] for note in report.to_dict()["notes"]}
    assert "total_size 31, and the tensors have 114 bytes" in notes["wrong-total-size"]
    _, sound = gathered(write(tmp_path / "sound", kind))
    assert "wrong-total-size" not in {note["code"] for note in sound.to_dict()["notes"]}


@pytest.mark.parametrize("kind", KINDS)
def test_placeholders_of_zero_3(tmp_path: Path, kind: str) -> None:
    """What `save_pretrained` leaves of parameters that DeepSpeed holds; a base model may have such a tensor."""
    folder = tmp_path / "model"
    folder.mkdir()
    numbers = torch.empty(0, dtype=torch.int32)  # ZeRO-3 partitions parameters, and an export may have written it
    state = {"a.weight": torch.empty(0), "b.weight": torch.empty(0), "c": torch.rand(2), "numbers": numbers}
    file = folder / {"bin": "pytorch_model.bin", "safetensors": "model.safetensors"}[kind]
    torch.save(state, file) if kind == "bin" else save_file(state, file)
    with pytest.raises(UsageError, match=r"a\.weight: a placeholder of shape \[0\].*likewise b\.weight") as caught:
        gathered(folder)
    assert caught.value.file == str(file) and "ZeRO checkpoint" in str(caught.value.next_step)
    assert "numbers" not in caught.value.message
    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    found, _ = gathered(folder, base_model=tmp_path / "base")
    assert found == {name: whole(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("kind", [*KINDS, "pt"])
def test_a_models_own_empty_tensor(tmp_path: Path, kind: str) -> None:
    """A buffer without an element is not a placeholder, unless ZeRO's files lie beside it or a weight is empty."""
    folder = tmp_path / "model"
    folder.mkdir()
    state = {**model(), "head.cache": torch.empty(0), "grid": torch.empty(0, 5)}
    file = folder / {"bin": "pytorch_model.bin", "safetensors": "model.safetensors", "pt": "model.pt"}[kind]

    def save(state: dict[str, torch.Tensor]) -> None:
        save_file(state, file) if kind == "safetensors" else torch.save(state, file)

    save(state)
    found, report = gathered(folder)
    assert found == {name: whole(tensor) for name, tensor in state.items()}
    assert ("empty-tensors", "1 float tensor of shape [0]: head.cache") in report.notes
    save({**state, "up.weight": torch.empty(0)})
    with pytest.raises(UsageError, match="a placeholder of shape"):
        gathered(folder)
    save(state)
    (folder / "zero_to_fp32.py").touch()
    with pytest.raises(UsageError, match=r"head\.cache: a placeholder of shape"):
        gathered(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_that_an_earlier_save_left(tmp_path: Path, kind: str) -> None:
    """save_pretrained of one file over one of several removes the files and not their index; loading takes the file."""
    folder = write(tmp_path / "model", kind)
    parts = [file.rename(tmp_path / file.name) for file in folder.glob(f"*-of-*.{kind}")]
    (new,) = write(tmp_path / "new", kind, num_files=1, index=False).iterdir()
    new.rename(folder / new.name)
    found, report = gathered(folder)
    assert found == wanted()
    assert any(code == "stale-index" and "earlier save" in text for code, text in report.notes)
    # Which of the two is the model, nothing says.
    parts[0].rename(folder / parts[0].name)
    with pytest.raises(UsageError, match="contains more than one model") as caught:
        gathered(folder, overwrite=True)
    assert parts[0].name in str(caught.value.got)
    assert gathered(folder / new.name)[0] == wanted()


def test_what_a_desktop_leaves_beside_is_no_file_of_the_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "safetensors", index=False)
    for file in list(folder.iterdir()):
        (folder / f"._{file.name}").write_bytes(b"\0\5\x16\7")
    assert gathered(folder)[0] == wanted()


def test_what_an_index_does_not_name_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "safetensors")
    save_file({"mtp.weight": torch.rand(2)}, folder / "mtp.safetensors")
    found, report = gathered(folder)
    assert found == wanted()
    assert any(code == "left-out" and "mtp.safetensors" in text for code, text in report.notes)


@pytest.mark.parametrize("index", [True, False])
def test_an_adapter_beside_numbered_files(tmp_path: Path, index: bool) -> None:
    folder = write(tmp_path / "model", "safetensors", index=index)
    pair = {f"base_model.model.embed.lora_{side}.weight": torch.rand(2, 2) for side in "AB"}
    save_file(pair, folder / "adapter_model.safetensors")
    found, report = gathered(folder)
    assert found == wanted()
    assert "1 LoRA pairs are written separately" in dict(report.notes)["adapter"]


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_wrappers_gave(tmp_path: Path, kind: str) -> None:
    """As accelerate's save_model leaves them of a compiled model; loading takes such names for none of the model's."""
    w, b = torch.rand(4, 2), torch.rand(3)
    state = {"module._orig_mod.a.w": w, "module.b": b}
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / {"bin": "pytorch_model.bin", "safetensors": "model.safetensors"}[kind]
    torch.save(state, file) if kind == "bin" else save_file(state, file)
    for path in (file.parent, file):
        found, report = gathered(path)
        assert found == {"a.w": whole(w), "b": whole(b)}
        assert "module._orig_mod.a.w is a.w" in dict(report.notes)["wrapper-names"]
    (tmp_path / "base").mkdir()
    save_file({name: torch.zeros_like(tensor) for name, tensor in state.items()}, tmp_path / "base/model.safetensors")
    assert gathered(file.parent, base_model=tmp_path / "base", overwrite=True)[0].keys() == state.keys()


def test_two_candidates_in_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "bin", num_files=1)
    save_file({"other": torch.rand(2)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match="can be read in several ways") as caught:
        gathered(folder)
    assert caught.value.got == "safetensors files and bin files without a tensor in common"
    assert gathered(folder, format="bin")[0] == wanted()


@pytest.mark.parametrize("name", ["consolidated", "optimizer", "model_1"])
def test_what_lies_beside_a_whole_model(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", "safetensors", num_files=1, index=False)
    save_file({"more": torch.rand(2)}, folder / f"{name}.safetensors")
    found, report = gathered(folder)
    assert found == wanted()
    assert any(code == "left-out" and name in text for code, text in report.notes)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "more" in gathered(folder, overwrite=True)[0]


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    """Two names of one storage; equal bytes elsewhere, or another view of it, are no tie."""
    embed = torch.rand(6, 4)
    state = {"embed.weight": embed, "lm_head.weight": embed, "turned": embed.t(), "twin": embed.clone()}
    (tmp_path / "model").mkdir()
    torch.save(state, tmp_path / "model" / "pytorch_model.bin")
    found, report = gathered(tmp_path / "model")
    assert found == {name: whole(tensor) for name, tensor in state.items() if name != "lm_head.weight"}
    assert "lm_head.weight" in json.dumps(report.to_dict()["output"]["tied"])


@pytest.mark.parametrize(
    "names", [["embed_tokens.weight", "lm_head.weight"], ["lm_head.weight", "embed_tokens.weight"]]
)
@pytest.mark.parametrize(
    ("config", "is_tied"),
    [
        ({"model_type": "llama", "tie_word_embeddings": False}, False),
        ({"model_type": "llama"}, False),  # which is what leaving it out means to a Llama
        ({"model_type": "gpt2"}, True),
        ({"model_type": "gpt2", "tie_word_embeddings": False}, False),
        ({"model_type": "llama", "tie_word_embeddings": True}, True),
    ],
)
def test_a_head_that_config_does_not_tie(
    tmp_path: Path, names: list[str], config: dict[str, Any], is_tied: bool
) -> None:
    """Without its head such a model is loaded with a random one, though in the source the two were one tensor."""
    both = torch.rand(6, 4)
    (tmp_path / "model").mkdir()
    torch.save(dict.fromkeys([*names, "other.weight"], both), tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found, report = gathered(tmp_path / "model")
    wanted = [*names, "other.weight"][: 1 if is_tied else 3]
    assert found == dict.fromkeys(wanted, whole(both))
    assert ("untied" in dict(report.notes)) is not is_tied
    assert verify_model(tmp_path / "model.out", against=tmp_path / "model").ok


def test_accelerates_full_state(tmp_path: Path) -> None:
    torch.save(OrderedDict(model()), tmp_path / "pytorch_model_fsdp.bin")
    torch.save({"state": {}}, tmp_path / "optimizer.bin")
    assert gathered(tmp_path)[0] == wanted()


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_1.bin", "pytorch_model-00001-of-00002.bin"])
def test_a_second_model_is_not_mixed_in(tmp_path: Path, name: str) -> None:
    torch.save(model(), tmp_path / "pytorch_model_fsdp.bin")
    torch.save({"critic.weight": torch.rand(2)}, tmp_path / name)
    torch.save({"more.weight": torch.rand(2)}, tmp_path / name.replace("00001", "00002"))
    with pytest.raises(UsageError, match="contains more than one model"):
        gathered(tmp_path)
    assert gathered(tmp_path / "pytorch_model_fsdp.bin")[0] == wanted()


def test_what_accelerate_leaves_beside_is_told(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "pytorch_model.bin")
    torch.save({"critic.weight": torch.rand(2)}, tmp_path / "pytorch_model_1.bin")
    found, report = gathered(tmp_path)
    assert found == wanted()
    assert any(code == "left-out" and "pytorch_model_1.bin" in text for code, text in report.notes)


@pytest.mark.parametrize(
    "state",
    [{"model": {2: torch.rand(2)}}, [torch.rand(2)], {1: torch.rand(2)}, torch.rand(2)],
    ids=["number in a dict", "list", "number as name", "tensor"],
)
def test_what_is_no_state_dict(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="is not a state dict"):
        gathered(tmp_path)


def test_an_object_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.rand(2), "module": torch.nn.Linear(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"whole module.*Linear"):
        gathered(tmp_path)


@pytest.mark.parametrize("name", ["model_world_size_1_rank_0.pt", "iter_0000001/mp_rank_00/model_optim_rng.pt"])
def test_the_format_before_zips_in_ranks_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    torch.save(model(), tmp_path / name, _use_new_zipfile_serialization=False)
    with pytest.raises(UsageError, match="old format"):
        gathered(tmp_path)


def test_the_format_before_zips(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UsageError, match="old format") as caught:
        gathered(tmp_path)
    assert "save it again" in str(caught.value.next_step)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(CorruptError):
        gathered(tmp_path)


def split(folder: Path, names: list[str]) -> Path:
    """Write each rank's rows of one tensor into a file of its own."""
    folder.mkdir()
    for name, rows in zip(names, torch.arange(8.0).reshape(4, 2).chunk(len(names)), strict=True):
        save_file({"embed.weight": rows.clone()}, folder / name)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        (["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"], []),  # vLLM's sharded_state
        (["rank0.safetensors", "rank1.safetensors"], []),  # TensorRT-LLM
        (["model_0.safetensors", "model_1.safetensors"], []),  # torch_checkpointing
        (["policy_0.safetensors", "policy_1.safetensors"], ["metadata.pkl"]),
    ],
)
def test_files_of_ranks_are_no_model_however_few_are_left(tmp_path: Path, names: list[str], beside: list[str]) -> None:
    """Each holds all names, at half their size: with the other one moved away, nothing but its name shows that."""
    folder = split(tmp_path / "model", names)
    for name in beside:
        (folder / name).touch()
    for place in (folder, folder / names[0], folder / names[1]):
        assert HfFolderReader().recognize(str(place)) is not None
        with pytest.raises(XrankError):
            gathered(place)
    (folder / names[1]).rename(tmp_path / "elsewhere")
    for place in (folder, folder / names[0]):
        with pytest.raises(XrankError):
            gathered(place)


def test_one_name_in_two_files(tmp_path: Path) -> None:
    """Two models, or two ranks' parts of one: a base model shows which."""
    folder = split(tmp_path / "model", ["first.safetensors", "second.safetensors"])
    with pytest.raises(UsageError, match=r"embed\.weight is in two files") as caught:
        gathered(folder)
    assert f"such as {folder}/first.safetensors, with base_model= to prove its shapes" in caught.value.next_step
    assert "move" not in caught.value.next_step
    split(tmp_path / "base", ["model.safetensors"])
    with pytest.raises(ContradictionError):
        gathered(folder / "first.safetensors", base_model=tmp_path / "base")
    (tmp_path / "half").mkdir()
    save_file({"embed.weight": torch.zeros(2, 2)}, tmp_path / "half" / "model.safetensors")
    found, _ = gathered(folder / "first.safetensors", base_model=tmp_path / "half")
    assert found == {"embed.weight": whole(torch.arange(4.0).reshape(2, 2))}


# ---- diffusers: a pipeline of components, each in a folder of its own


def component(folder: Path, state: dict[str, torch.Tensor], class_name: str) -> Path:
    folder.mkdir(parents=True)
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": class_name, "_diffusers_version": "0.36.0"}))
    return folder


def test_a_pipeline_is_gathered_component_by_component(tmp_path: Path) -> None:
    """diffusers finds weights by a name of its own (utils/constants.py: SAFETENSORS_WEIGHTS_NAME)."""
    folder = tmp_path / "pipeline"
    transformer = component(folder / "transformer", {"w": torch.rand(4, 8)}, "FluxTransformer2DModel")
    component(folder / "vae", {"v": torch.rand(2)}, "AutoencoderKL")
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(UsageError, match="contains several sources") as caught:
        gathered(folder)
    assert str(transformer) in str(caught.value.got)
    paths = f"{transformer} or {folder / 'vae'}"
    assert caught.value.next_step == f"gather each component separately: give {paths} as the path"
    save_file({"w": torch.rand(4, 8).half()}, transformer / "diffusion_pytorch_model.fp16.safetensors")
    found, report = gathered(transformer)
    assert found == {"w": whole(load_file(transformer / "diffusion_pytorch_model.safetensors")["w"])}
    assert any(code == "left-out" and "fp16" in text for code, text in report.notes)
    out = folder / "transformer.out"
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "xrank_manifest.json",
    }
    assert verify_model(out).ok and verify_model(transformer, against=out).ok


def test_a_component_of_several_files(tmp_path: Path) -> None:
    state = {f"{number}.w": torch.rand(64, 8) for number in range(3)}
    folder = component(tmp_path / "transformer", state, "SD3Transformer2DModel")
    found, _ = gathered(folder, max_shard_size="2KB")
    out = tmp_path / "transformer.out"
    index = json.loads((out / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["weight_map"]["1.w"] == "diffusion_pytorch_model-00002-of-00003.safetensors"
    assert found == {name: whole(tensor) for name, tensor in state.items()}
    assert gathered(out)[0] == found
    index["weight_map"]["3.w"] = index["weight_map"]["2.w"]
    (out / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(IncompleteError, match=r"3\.w: the index and the files"):
        gathered(out, overwrite=True)


def test_a_component_of_a_bin_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.bin")
    assert gathered(tmp_path)[0] == {"w": whole(torch.ones(2))}
