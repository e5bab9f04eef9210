"""Models in the attributes of other modules: names as the class in config.json has them, or a refusal by name."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel

import xrank
from tests.readers.rank_checkpoints import verl
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.verify import verify_model
from xrank.errors import ContradictionError, IncompleteError, UsageError
from xrank.testing.rank_pool import RankPool

State = dict[str, torch.Tensor]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
PREFIXES = ("model.", "llm.", "backbone.", "_forward_module.", "state.model.model.", "0.auto_model.")


def make_llama() -> State:
    """Return the tensors of a small Llama."""
    shapes = {"model.embed_tokens": (12, 8), "model.norm": (8,), "lm_head": (12, 8)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{p}_proj": (8 if p in "qo" else 4, 8) for p in "qkvo"}
        shapes |= {f"{layer}mlp.{p}_proj": (8, 10) if p == "down" else (10, 8) for p in ("gate", "up", "down")}
        shapes |= {f"{layer}{p}_layernorm": (8,) for p in ("input", "post_attention")}
    random = torch.Generator().manual_seed(1)
    return {f"{name}.weight": torch.rand(shape, generator=random) for name, shape in shapes.items()}


LLAMA = make_llama()


def save_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ranks, torch warns that this process is alone
        dcp.save({"model": dict(state)}, checkpoint_id=folder, no_dist=True)


def save_torch(folder: Path, state: Mapping[str, Any]) -> None:
    torch.save({"model": dict(state), "step": 3}, folder / "model.pt")


def save_flat(folder: Path, state: Mapping[str, Any]) -> None:
    torch.save(dict(state), folder / "model.pt")


def save_safetensors(folder: Path, state: Mapping[str, Any]) -> None:
    save_file(dict(state), folder / "model.safetensors")


KINDS: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
    "dcp": save_dcp,
    "torch": save_torch,
    "flat": save_flat,
    "safetensors": save_safetensors,
}


def write(
    folder: Path, state: Mapping[str, Any], kind: str = "torch", config: Mapping[str, Any] | None = CONFIG
) -> Path:
    """Write a source of a kind, with a config.json beside it."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    KINDS[kind](folder, state)
    return folder


def put_before(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def assert_gives(source: Path, out: Path, want: State, **options: Any) -> dict[str, str]:
    """Gather, compare names and values, and return the notes."""
    report = gather_checkpoint(source, out, **options)
    found = load_file(out / "model.safetensors")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    return dict(report.notes)


@pytest.mark.parametrize(
    ("kind", "prefix"), [*((kind, "net.model.") for kind in KINDS), *(("torch", prefix) for prefix in PREFIXES)]
)
def test_names_are_those_of_the_class(tmp_path: Path, kind: str, prefix: str) -> None:
    source = write(tmp_path / "run", put_before(prefix, LLAMA), kind)
    note = assert_gives(source, tmp_path / "out", LLAMA)["wrapper-names"]
    assert any(note.endswith(f"{prefix}{name} is {name}") for name in LLAMA)
    base = write(tmp_path / "base", LLAMA, "safetensors")
    assert_gives(source, tmp_path / "based", LLAMA, base_model=base)
    verify_model(tmp_path / "out", against=source)
    assert {row["name"] for row in inspect_source(source).details.tensors} == LLAMA.keys()


@pytest.mark.parametrize(
    ("kind", "prefix"), [*((kind, "llm.") for kind in KINDS), ("torch", ""), ("dcp", "net.model.")]
)
def test_a_hole_is_found_behind_a_prefix_and_beside_a_head(tmp_path: Path, kind: str, prefix: str) -> None:
    lacks = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight")
    for number, name in enumerate(lacks):
        state = put_before(prefix, {n: tensor for n, tensor in LLAMA.items() if n != name})
        source = write(tmp_path / str(number), {**state, "value_head.weight": torch.ones(1, 8)}, kind)
        with pytest.raises(IncompleteError, match=name.replace(".", r"\.")):
            gather_checkpoint(source, tmp_path / f"out{number}")


def test_heads_beside_the_model_keep_their_names(tmp_path: Path) -> None:
    value = {"value_head.weight": torch.ones(1, 8)}
    source = write(tmp_path / "critic", {**put_before("policy.", LLAMA), **value}, "dcp")
    assert "wrapper-names" in assert_gives(source, tmp_path / "out", {**LLAMA, **value})
    base = write(tmp_path / "base", LLAMA, "safetensors")
    with pytest.raises(ContradictionError, match=r"value_head\.weight is not in the base model"):
        gather_checkpoint(source, tmp_path / "based", base_model=base)
    assert_gives(source, tmp_path / "without", LLAMA, exclude=["value_head.*"], base_model=base)
    # A wrapper may hold the base model and the head side by side.
    body = {name.removeprefix("model."): tensor for name, tensor in LLAMA.items() if name != "lm_head.weight"}
    apart = {**put_before("backbone.", body), "lm_head.weight": LLAMA["lm_head.weight"]}
    assert_gives(write(tmp_path / "apart", apart), tmp_path / "joined", LLAMA)


def test_two_models_of_the_class_are_refused_until_one_is_left_out(tmp_path: Path) -> None:
    other = {name: tensor + 1 for name, tensor in LLAMA.items()}
    source = write(tmp_path / "run", {**put_before("actor.", LLAMA), **put_before("critic.", other)}, "dcp")
    with pytest.raises(UsageError, match=r"actor\.\* and critic\.\* are both models"):
        gather_checkpoint(source, tmp_path / "out")
    assert_gives(source, tmp_path / "actor", LLAMA, exclude=["critic.*"])
    assert_gives(source, tmp_path / "critic", other, exclude=["actor.*"])


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_no_known_class_are_refused(tmp_path: Path, kind: str) -> None:
    state = {
        f"tower.{name.replace('layers', 'blocks').replace('embed', 'rows').replace('norm', 'scale')}": t
        for name, t in LLAMA.items()
    }
    source = write(tmp_path / "run", state, kind)
    with pytest.raises(ContradictionError, match="have no names of LlamaForCausalLM") as raised:
        gather_checkpoint(source, tmp_path / "out")
    assert raised.value.got == "21 tensors, all under tower"
    assert inspect_source(source).details.problems
    assert not (tmp_path / "out").exists()
    # The remedies lead somewhere: names are kept where the caller says so, or the config is another class'.
    assert_gives(source, tmp_path / "kept", state, recipe="none")
    config = {"model_type": "mine", "architectures": ["Mine"]}
    (source / "config.json").write_text(json.dumps(config))
    assert_gives(source, tmp_path / "other", state)


def test_names_that_a_class_has_stay(tmp_path: Path) -> None:
    body = {name.removeprefix("model."): tensor for name, tensor in LLAMA.items() if name != "lm_head.weight"}
    bare = {**CONFIG, "architectures": ["LlamaModel"]}
    for number, (state, config) in enumerate(
        [
            (body, bare),  # a base model's own names
            (put_before("llm.", LLAMA), {**CONFIG, "architectures": ["MyPolicy"]}),
            (put_before("llm.", LLAMA), {**CONFIG, "auto_map": {"AutoModel": "mine.Policy"}}),
            (put_before("llm.", LLAMA), None),
        ]
    ):
        notes = assert_gives(write(tmp_path / f"{number}", state, "dcp", config), tmp_path / f"out{number}", state)
        assert "wrapper-names" not in notes
    source = write(tmp_path / "wrapped", put_before("encoder.", body), "dcp", bare)
    assert_gives(source, tmp_path / "out", body)


def test_a_child_called_module_is_the_base_models_own(tmp_path: Path) -> None:
    own = {"module.a.weight": torch.ones(2, 3), "module.b.weight": torch.ones(2)}
    base = write(tmp_path / "base", own, "safetensors", None)
    for kind in KINDS:
        assert_gives(write(tmp_path / kind, own, kind, None), tmp_path / f"{kind}-out", own, base_model=base)
        wrapped = write(tmp_path / f"{kind}-wrapped", put_before("net.module.", own), kind, None)
        assert_gives(wrapped, tmp_path / f"{kind}-bare", own, base_model=base)


@pytest.mark.parametrize("prefix", ["llm.", "net.model."])
def test_an_adapter_behind_a_prefix_has_pefts_names(tmp_path: Path, prefix: str) -> None:
    peft = "base_model.model."
    q = "model.layers.0.self_attn.q_proj"
    state = put_before(peft, {name.replace(f"{q}.weight", f"{q}.base_layer.weight"): t for name, t in LLAMA.items()})
    factors = {
        f"{peft}{q}.lora_A.default.weight": torch.ones(2, 8),
        f"{peft}{q}.lora_B.default.weight": torch.ones(8, 2),
    }
    source = write(tmp_path / "run", put_before(prefix, {**state, **factors}))
    (source / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
    )
    assert_gives(source, tmp_path / "out", LLAMA)
    saved = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == {name.replace(".default", "") for name in factors}
    merged = {**LLAMA, f"{q}.weight": LLAMA[f"{q}.weight"] + 4}
    gather_checkpoint(source, tmp_path / "merged", adapter="merge")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.allclose(found[name], tensor) for name, tensor in merged.items())


class Config:
    """Stands in for transformers' config: xrank reads only its JSON text."""

    def __init__(self) -> None:
        self.architectures: list[str] = []

    def to_json_string(self) -> str:
        return json.dumps({**CONFIG, "architectures": self.architectures})


class Part(torch.nn.Module):
    """A module with given children."""

    def __init__(self, **children: torch.nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class LlamaForCausalLM(Part):
    """A module with Llama's names and a config."""

    config: Config


def make_module(state: State) -> torch.nn.Module:
    """Return a module with these tensors."""
    module = LlamaForCausalLM()
    module.config = Config()
    for name, tensor in state.items():
        *path, last = name.split(".")
        here: torch.nn.Module = module
        for part in path:
            if part not in here._modules:
                here.add_module(part, Part())
            here = here.get_submodule(part)
        here.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    return module


def test_a_live_model_in_attributes(tmp_path: Path) -> None:
    inner = make_module(LLAMA)
    module = Part(net=Part(model=inner))
    xrank.export_model(module, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == LLAMA.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    # A state dict shows no config, but the base model does.
    report = xrank.export_model(module.state_dict(), tmp_path / "based", base_model=tmp_path / "out")
    assert "wrapper-names" in dict(report.notes)
    assert load_file(tmp_path / "based" / "model.safetensors").keys() == LLAMA.keys()
    # Tensors beside the model make another model of it, whose names stay.
    critic = Part(llm=inner, value_head=torch.nn.Linear(8, 1))
    assert {name for name, _ in xrank.iter_model(critic)} == {*put_before("llm.", LLAMA), *critic.state_dict()}


@pytest.mark.parametrize("kind", ["dcp", "torch", "safetensors"])
def test_a_load_uses_the_modules_names(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path / "run", put_before("llm.", LLAMA), kind)
    for module in (make_module(LLAMA), Part(llm=make_module(LLAMA))):
        want = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        for parameter in module.parameters():
            parameter.data.zero_()
        xrank.load_model(module, source)
        assert all(torch.equal(tensor, want[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_extra_states_are_left_out(tmp_path: Path, kind: str) -> None:
    extra = {f"model.layers.{i}.self_attn.q_proj._extra_state": torch.arange(5, dtype=torch.uint8) for i in range(2)}
    empty = {"model.layers.0.mlp._extra_state": torch.empty(0, dtype=torch.uint8)}
    source = write(tmp_path / "run", {**LLAMA, **extra, **empty}, kind)
    notes = assert_gives(source, tmp_path / "out", LLAMA)
    assert "3 extra states" in notes["extra-state"]
    verify_model(tmp_path / "out", against=source)
    if kind != "safetensors":
        # Older versions of Transformer Engine pickle it.
        pickled = {**LLAMA, "model.layers.0.mlp._extra_state": io.BytesIO(b"scales")}
        assert_gives(write(tmp_path / "pickled", pickled, kind), tmp_path / "pickled-out", LLAMA)
    # Also of models that no config.json names; statistics of a norm are weights.
    norm = torch.nn.BatchNorm1d(3).state_dict()
    other = write(tmp_path / "other", {**norm, "act._extra_state": torch.ones(2)}, kind, None)
    assert_gives(other, tmp_path / "norm", norm)


@pytest.mark.parametrize("kind", KINDS)
def test_an_averaged_model_is_the_model(tmp_path: Path, kind: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    averaged = AveragedModel(module)
    source = write(tmp_path / "ema", averaged.state_dict(), kind, None)
    notes = assert_gives(source, tmp_path / "out", module.state_dict())
    assert "n_averaged" in notes["left-out"] and "wrapper-names" in notes
    xrank.export_model(averaged, tmp_path / "live")
    assert load_file(tmp_path / "live" / "model.safetensors").keys() == module.state_dict().keys()
    # A counter of that name in another model is its own.
    own = {**module.state_dict(), "n_averaged": torch.tensor(3)}
    assert_gives(write(tmp_path / "own", own, kind, None), tmp_path / "own-out", own)


def test_extra_states_of_ranks_differ(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = verl(rank_pool, tmp_path / "actor", num_ranks=2)
    for rank, file in enumerate(sorted(folder.glob("model_world_size_2_rank_*.pt"))):
        state = torch.load(file, weights_only=False)
        torch.save({**state, "head._extra_state": torch.full((rank + 1,), rank, dtype=torch.uint8)}, file)
    gather_checkpoint(folder, tmp_path / "out")
    assert "head._extra_state" not in load_file(tmp_path / "out" / "model.safetensors")
