"""Deltas of models on disk: plain lines that know the format alone make the new model of the old one and the delta."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import xrank
from tests.cli.bench import run
from tests.commands.applied_deltas import apply_version, read_index, read_model
from xrank.errors import ContradictionError, OutputExistsError, UsageError
from xrank.formats.deltas import state_digest

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8]
NAMES = [
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.3.down_proj.weight",
    "model.norm.weight",
    "format",
    "score",
]
SHAPES = [(), (3, 0), (1,), (7,), (16, 3), (5, 7, 11), (257, 129)]


@st.composite
def pairs(draw) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    old, new = {}, {}
    for number, name in enumerate(draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 9)) + number)
        values = torch.randint(0, 256, (torch.zeros(shape, dtype=dtype).nbytes,), generator=generator).byte()
        change = draw(st.sampled_from(["none", "sparse", "dense"]))
        changed = values.clone()
        if change == "dense":
            changed = changed + 1
        elif change == "sparse" and len(values):
            changed[torch.randint(0, len(values), (1 + len(values) // 50,), generator=generator)] ^= 3
        old[name], new[name] = (one.view(dtype).reshape(shape) for one in (values, changed))
    return old, new


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def digest(folder: Path) -> str:
    import xxhash
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as opened:
        kinds = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    rows = read_model(folder).items()
    return state_digest(
        {name: (kinds[name], shape, xxhash.xxh3_128_hexdigest(data)) for name, (_, shape, data) in rows}
    )


@given(pairs(), st.sampled_from(["xor", "overwrite"]), st.sampled_from(["xxh3-128", "blake3", "adler32"]))
@settings(max_examples=40)
def test_the_new_model_of_the_old_one(models, encoding: str, checksum: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        old, new = (save(Path(folder) / name, one) for name, one in zip("ab", models, strict=True))
        out = Path(folder) / "weight_v000001"
        report = xrank.make_delta(old, new, out, encoding=encoding, checksum=checksum, step=7, max_shard_size="20KB")
        assert apply_version(out, read_model(old)) == read_model(new)
        facts = read_index(out)["metadata"]
        assert facts == {
            "version": "000001",
            "base_version": "000000",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": checksum,
            "xrank": {"state": digest(new), "base_state": digest(old), "step": 7},
        }
        assert report.details.num_compared == len(models[0])
        assert report.details.num_changed == len(read_index(out)["weight_map"])


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two models of some MB, of which the second has a few other values, also at the ends of stretches."""
    generator = torch.Generator().manual_seed(3)
    old = {f"layers.{n}.weight": torch.randn(40 + n, 70, generator=generator).bfloat16() for n in range(60)}
    old["large.weight"] = torch.randn(2300, 1025, generator=generator)  # 9.4 MB: three stretches
    old["frozen.weight"] = torch.randn(1500, 1025, generator=generator)
    new = {name: one.clone() for name, one in old.items()}
    for place in (0, 1 << 20, (1 << 20) - 1, -1):
        new["large.weight"].view(-1)[place] += 1
    new["layers.7.weight"][3] *= 1.5
    return save(tmp_path / "old", old), save(tmp_path / "new", new)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_large_tensors_and_several_threads(models, tmp_path, workers: int, encoding: str) -> None:
    out, done = tmp_path / "chain" / "weight_v000004", []
    report = xrank.make_delta(
        *models, out, workers=workers, encoding=encoding, progress=lambda *figures: done.append(figures)
    )
    assert apply_version(out, read_model(models[0])) == read_model(models[1])
    assert (report.details.version, report.details.base_version, report.details.num_changed) == (4, 3, 2)
    total = sum(len(data) for _, _, data in read_model(models[1]).values())
    assert done[-1] == (total, total)
    assert report.nbytes < 10_000


def test_a_checkpoint_under_a_folders_names(tmp_path: Path) -> None:
    """A checkpoint of ranks has a tied tensor twice, the folder once."""
    config = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true}'
    embed, norm = torch.randn(11, 4), torch.ones(4)
    old = save(tmp_path / "old", {"model.embed_tokens.weight": embed, "model.norm.weight": norm})
    (old / "config.json").write_text(config)
    trained = embed + 1
    state = {"model.embed_tokens.weight": trained, "lm_head.weight": trained.clone(), "model.norm.weight": norm}
    torch.save(state, tmp_path / "step-1.pt")
    out = tmp_path / "weight_v000001"
    xrank.make_delta(old, tmp_path / "step-1.pt", out)
    want = save(tmp_path / "new", {"model.embed_tokens.weight": trained, "model.norm.weight": norm})
    assert apply_version(out, read_model(old)) == read_model(want)
    assert list(read_index(out)["weight_map"]) == ["model.embed_tokens.weight"]
    state["lm_head.weight"][3, 2] += 1
    torch.save(state, tmp_path / "step-2.pt")
    with pytest.raises(ContradictionError, match=r"lm_head\.weight"):
        xrank.make_delta(old, tmp_path / "step-2.pt", tmp_path / "weight_v000002")
    assert not (tmp_path / "weight_v000002").exists()


def test_a_base_that_is_a_version(models, tmp_path: Path) -> None:
    """Its number is that of its name; a model without one is taken for the version before."""
    first = tmp_path / "chain" / "weight_v000001"
    assert xrank.make_delta(*models, first, encoding="overwrite").details.base_version == 0
    models[0].rename(tmp_path / "chain" / "weight_v000000")
    third = save(
        tmp_path / "third",
        {**load_file(models[1] / "model.safetensors"), "layers.0.weight": torch.ones(40, 70).bfloat16()},
    )
    report = xrank.make_delta(first, third, tmp_path / "chain" / "weight_v000003")
    assert (report.details.base_version, report.details.num_changed) == (1, 1)
    xrank.gather_checkpoint(tmp_path / "chain" / "weight_v000003", tmp_path / "out")
    assert read_model(tmp_path / "out") == read_model(third)
    assert xrank.make_delta(models[1], third, tmp_path / "weight_v000008").details.base_version == 7


def _reshaped(one: dict[str, torch.Tensor]) -> None:
    one["b"] = one["b"].reshape(3, 2)


OTHERS: list[tuple[str, Any]] = [
    ("a", lambda one: one.pop("a")),
    ("c", lambda one: one.update(c=torch.ones(2))),
    ("b", _reshaped),
    ("b", lambda one: one.update(b=one["b"].half())),
]


@pytest.mark.parametrize(("name", "change"), OTHERS)
def test_other_tensors_are_refused(tmp_path: Path, name: str, change: Any) -> None:
    old = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    new = dict(old)
    change(new)
    folders = save(tmp_path / "old", old), save(tmp_path / "new", new)
    with pytest.raises(UsageError, match=f"^{name}: a delta only has changed values") as caught:
        xrank.make_delta(*folders, tmp_path / "weight_v000001")
    assert caught.value.tensor == name
    assert "starts a new chain" in str(caught.value.next_step)
    assert not (tmp_path / "weight_v000001").exists()


@pytest.mark.parametrize("name", ["step-1", "weight_v1", "weight_v000002", "weight_v0000x1"])
def test_a_folder_that_is_no_version_after_its_base(models, tmp_path: Path, name: str) -> None:
    base = models[0].rename(tmp_path / "weight_v000002")
    with pytest.raises(UsageError, match="is not the folder of a version after"):
        xrank.make_delta(base, models[1], tmp_path / "out" / name)


def test_the_same_call_again(models, tmp_path: Path) -> None:
    out = tmp_path / "weight_v000001"
    xrank.make_delta(*models, out)
    files = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = xrank.make_delta(*models, out)
    assert "made-before" in dict(again.notes)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == files
    with pytest.raises(OutputExistsError):
        xrank.make_delta(*models, out, encoding="overwrite")
    xrank.make_delta(*models, out, encoding="overwrite", overwrite=True)
    assert apply_version(out, read_model(models[0])) == read_model(models[1])


def test_the_command(models, tmp_path: Path) -> None:
    out = tmp_path / "weight_v000001"
    done = run("delta", "make", *models, "-o", out, "--step", 3)
    assert done.exit_code == 0
    assert "2 of 62 tensors" in done.stdout
    assert apply_version(out, read_model(models[0])) == read_model(models[1])
