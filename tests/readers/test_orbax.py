"""Orbax's checkpoints, in OCDBT and in folders, zarr 2 and 3: gathered bit for bit, damaged, mixed up, incomplete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tensorstore", reason="pip install tensorstore zstandard")
pytest.importorskip("zstandard", reason="pip install tensorstore zstandard")

from tests.readers.orbax_checkpoints import Keys, save_step, save_tree
from tests.readers.orbax_claims import CLAIMS
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.errors import ContradictionError, CorruptError, IncompleteError, NoSpaceError, UnsafeError, UsageError
from xrank.readers.orbax import OrbaxReader
from xrank.testing.reader_contract import ReaderContract, SampleSource, WholeTensor, read_model

_NAMES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "float16": "F16", "uint8": "U8", "bool": "BOOL"}


def _params(seed: int = 0) -> dict[tuple[str | int, ...], np.ndarray]:
    random = np.random.default_rng(seed)
    net = ("params", "params", "net")
    return {
        (*net, "layers", "mlp", "wi_0", "kernel"): random.standard_normal((12, 3, 40)).astype(ml_dtypes.bfloat16),
        (*net, "layers", "mlp", "wo", "kernel"): random.standard_normal((40, 3, 12)).astype(np.float32),
        (*net, "norm", "scale"): np.ones(12, np.float32),
        (*net, "odd", 0): random.standard_normal((7, 5)).astype(np.float32),
        (*net, "odd", 1): np.arange(3, dtype=np.int32),
        (*net, "scalar"): np.array(2.5, np.float32),
    }


CHUNKS: Mapping[Keys, tuple[int, ...]] = {
    ("params", "params", "net", "layers", "mlp", "wi_0", "kernel"): (6, 3, 10),
    ("params", "params", "net", "layers", "mlp", "wo", "kernel"): (10, 3, 4),
    ("params", "params", "net", "norm", "scale"): (6,),
    ("params", "params", "net", "odd", 0): (4, 2),  # the last chunks reach over the edge
}


def _state() -> dict[tuple[str | int, ...], np.ndarray]:
    params = _params()
    moments = {("opt_state", 0, name, *keys[1:]): value for name in ("mu", "nu") for keys, value in params.items()}
    return {**params, **moments, ("step",): np.array(5, np.int32)}


def _expected(params: Mapping[Keys, np.ndarray] | None = None) -> dict[str, WholeTensor]:
    return {
        ".".join(map(str, keys[2:])): WholeTensor(_NAMES[str(value.dtype)], value.shape, value.tobytes())
        for keys, value in (params or _params()).items()
    }


def _small_state() -> dict[tuple[str | int, ...], np.ndarray]:
    """For the contracts, which gather each some hundred times."""
    params = _params()
    return {**params, ("opt_state", 0, "mu", "odd"): params["params", "params", "net", "odd", 0]}


_NO_CHECKSUMS = "zstd's frames and raw chunks carry no checksums as Orbax writes them"


class _OcdbtContract(ReaderContract):
    reader = OrbaxReader()
    frameworks = ("torch", "jax", "orbax", "flax")

    def files(self, made: SampleSource) -> list[Path]:
        """All but the manifests and nodes of processes' own stores, which nothing reads after their merge."""
        used = {os.path.realpath(file.path) for file in self.reader.read(str(made.path), made.hints).files}
        return [
            file
            for file in super().files(made)
            if "ocdbt.process_0" not in str(file.relative_to(made.path)) or os.path.realpath(file) in used
        ]

    def follows_names_in(self, file: Path) -> bool:
        """Values of processes' own stores may lie in one file with a node that their merge has replaced."""
        return not any(part.startswith("ocdbt.process_") for part in file.parts)


class TestOcdbt(_OcdbtContract):
    """Values in data files, as those of large models."""

    unseen: ClassVar = {"a bit of a tensor flipped": _NO_CHECKSUMS, "zeros to the end": _NO_CHECKSUMS}

    def make(self, folder: Path) -> SampleSource:
        options: dict[str, Any] = {"chunks": CHUNKS, "processes": 2, "inline_nbytes": 0}
        return SampleSource(save_step(folder / "5", {"default": _small_state()}, **options), _expected())


class TestInline(_OcdbtContract):
    """Values in the nodes of the store, as those of norms and of small models."""

    def make(self, folder: Path) -> SampleSource:
        return SampleSource(save_tree(folder / "5", _small_state(), chunks=CHUNKS), _expected())


@pytest.mark.slow
class TestZarr3(_OcdbtContract):
    unseen: ClassVar = {"a bit of a tensor flipped": _NO_CHECKSUMS}

    def make(self, folder: Path) -> SampleSource:
        options: dict[str, Any] = {"chunks": CHUNKS, "is_zarr3": True, "parts": 2, "inline_nbytes": 0}
        return SampleSource(save_step(folder / "5", {"items": _small_state()}, **options), _expected())


@pytest.mark.slow
class TestFolders(ReaderContract):
    """A folder for each array, without compression."""

    reader = OrbaxReader()
    unseen: ClassVar = {
        "a bit of a tensor flipped": _NO_CHECKSUMS,
        "zeros to the end": _NO_CHECKSUMS,
        "another rank's file": _NO_CHECKSUMS,
    }

    def make(self, folder: Path) -> SampleSource:
        options: dict[str, Any] = {"chunks": CHUNKS, "is_ocdbt": False, "is_compressed": False}
        return SampleSource(save_tree(folder / "5", _params(), **options), _expected())


def gathered(folder: Path, **options: Any) -> Mapping[str, WholeTensor]:
    """Gather into a folder beside it; return the tensors."""
    out = folder.parent / f"{folder.name}.out"
    shutil.rmtree(out, ignore_errors=True)
    gather_checkpoint(folder, out, **options)
    return read_model(out)


@pytest.mark.parametrize("is_compressed", [True, False])
@pytest.mark.parametrize("is_zarr3", [False, True])
@pytest.mark.parametrize("is_ocdbt", [True, False])
def test_every_encoding(tmp_path: Path, is_ocdbt: bool, is_zarr3: bool, is_compressed: bool) -> None:
    options = {"is_ocdbt": is_ocdbt, "is_zarr3": is_zarr3, "is_compressed": is_compressed}
    assert gathered(save_tree(tmp_path / "tree", _params(), chunks=CHUNKS, **options)) == _expected()


def test_a_tree_of_nodes(tmp_path: Path) -> None:
    """Many keys make a tree of several levels, whose nodes leave out the prefixes of their keys."""
    many = {
        ("params", "params", f"layers_{i}", name): np.full((3, 2), i, np.float32)
        for i in range(20)
        for name in ("kernel", "bias")
    }
    folder = tmp_path / "tree"
    save_tree(folder, many)
    # The store anew, with nodes of some hundred bytes.
    import tensorstore

    shutil.rmtree(folder / "d")
    (folder / "manifest.ocdbt").unlink()
    config = {"max_inline_value_bytes": 20, "max_decoded_node_bytes": 400}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/", "config": config}).result()
    transaction = tensorstore.Transaction(atomic=True)
    old = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/ocdbt.process_0/"}).result()
    for key in old.list().result():
        store.with_transaction(transaction)[key] = old[key]
    transaction.commit_sync()
    assert gathered(folder) == _expected(many)


def test_what_is_found_and_left_out(tmp_path: Path) -> None:
    save_step(tmp_path / "run" / "5", {"default": _state()}, chunks=CHUNKS, processes=2)
    report = inspect_source(tmp_path / "run")
    source = report.to_dict()["source"]
    assert (source["format"], source["world_size"], source["step"]) == ("orbax", 2, 5)
    assert source["skipped_nbytes"] == 2 * sum(value.nbytes for value in _params().values()) + 4
    assert report.details["problems"] == []
    notes = " ".join(note["message"] if isinstance(note, dict) else note[1] for note in report.to_dict()["notes"])
    assert "left out: opt_state (12), step (1)" in notes


def test_steps_must_be_chosen(tmp_path: Path) -> None:
    for step in (0, 10):
        save_step(tmp_path / "run" / str(step), {"default": _params(step)}, chunks=CHUNKS)
    with pytest.raises(UsageError, match="contains several sources") as caught:
        gathered(tmp_path / "run")
    assert f"{tmp_path}/run/0 (orbax), {tmp_path}/run/10 (orbax)" in str(caught.value.got)
    assert gathered(tmp_path / "run" / "10") == _expected(_params(10))


def test_an_unfinished_step_beside_a_finished_one(tmp_path: Path) -> None:
    save_step(tmp_path / "run" / "0", {"default": _params()})
    shutil.copytree(tmp_path / "run" / "0", tmp_path / "run" / "1.orbax-checkpoint-tmp")
    assert gathered(tmp_path / "run") == _expected()


def test_items_are_parts(tmp_path: Path) -> None:
    items = {"ema": _params(1), "state": _state(), "opt_state": _params(2)}
    step = save_step(tmp_path / "7", items)
    with pytest.raises(UsageError, match="2 of its items may be the model") as caught:
        gathered(step)
    assert 'part="ema" or part="opt_state" or part="state"' in str(caught.value.next_step)
    assert gathered(step, part="ema") == _expected(_params(1))
    assert gathered(step, part="state") == gathered(step, part="state.params") == _expected()
    with pytest.raises(UsageError, match="none of its items"):
        gathered(step, part="model")


def test_parts_of_a_tree(tmp_path: Path) -> None:
    averages = {("ema_params", *keys[1:]): value for keys, value in _params(3).items()}
    step = save_step(tmp_path / "7", {"default": {**_state(), **averages}})
    with pytest.raises(UsageError, match="more than one part"):
        gathered(step)
    assert gathered(step, part="params") == _expected()
    assert gathered(step, part="ema_params") == _expected(_params(3))


def test_verify_against_and_load(tmp_path: Path) -> None:
    import torch

    import xrank

    step = save_step(tmp_path / "7", {"default": _state()}, chunks=CHUNKS, inline_nbytes=0)
    gathered(step)
    report = xrank.verify_model(tmp_path / "7.out", against=step).to_dict()
    assert (report["proof"]["against"], report["plan"]["num_tensors"]) == (str(step), len(_params()))
    opened = xrank.open_checkpoint(step)
    want = _params()["params", "params", "net", "layers", "mlp", "wo", "kernel"]
    for _ in range(2):
        assert torch.equal(opened["net.layers.mlp.wo.kernel"], torch.from_numpy(want))
    module = torch.nn.Module()
    module.register_parameter("norm", torch.nn.Parameter(torch.zeros(7, 5)))
    tree = save_tree(tmp_path / "small", {("params", "norm"): _params()["params", "params", "net", "odd", 0]})
    xrank.load_model(module, tree)
    assert module.norm.detach().numpy().tobytes() == _expected()["net.odd.0"].data


def _remove_chunk(folder: Path, name: str) -> None:
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    store.delete_range(tensorstore.KvStore.KeyRange(name, name + "\0")).result()


def test_a_missing_chunk_is_not_zeros(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree", _params(), chunks=CHUNKS)
    _remove_chunk(tree, "params.params.net.layers.mlp.wi_0.kernel/1.0.2")
    with pytest.raises(IncompleteError, match=r"wi_0\.kernel, .*contains no chunk with these elements") as caught:
        gathered(tree)
    assert caught.value.tensor == "net.layers.mlp.wi_0.kernel" and "[6, 0, 20]" in str(caught.value.got)
    assert not (tmp_path / "tree.out").exists()
    assert [problem["exit_code"] for problem in inspect_source(tree).details["problems"]] == [3]


@pytest.mark.parametrize("is_compressed", [True, False])
@pytest.mark.parametrize("is_zarr3", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "got"),
    [
        ("norm.scale", [10], "elements other than 0 in the chunk that begins at [6]"),
        ("odd.0", [7, 4], "a chunk that begins at [0, 4]"),
        ("odd.0", [5, 5], "elements other than 0 in the chunk that begins at [4, 0]"),
        ("layers.mlp.wi_0.kernel", [12, 2, 40], "elements other than 0 in the chunk that begins at [0, 0, 0]"),
        ("layers.mlp.wo.kernel", [4, 3, 12], "a chunk that begins at [10, 0, 0]"),
    ],
)
def test_a_shape_that_leaves_elements_out(
    tmp_path: Path, name: str, shape: list[int], got: str, is_zarr3: bool, is_compressed: bool
) -> None:
    """One flipped bit of a shape, which has no checksum, would cut the tensor."""
    options = {"is_ocdbt": False, "is_zarr3": is_zarr3, "is_compressed": is_compressed}
    tree = save_tree(tmp_path / "tree", _params(), chunks=CHUNKS, **options)
    file = tree / f"params.params.net.{name}" / ("zarr.json" if is_zarr3 else ".zarray")
    file.write_text(json.dumps({**json.loads(file.read_text()), "shape": shape}))
    with pytest.raises(CorruptError, match=f"net.{name}: its shape .* leaves out elements") as caught:
        gathered(tree)
    assert caught.value.got == got and not (tmp_path / "tree.out").exists()


def test_a_shape_that_leaves_parts_of_a_shard_out(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree", _params(), chunks=CHUNKS, is_ocdbt=False, is_zarr3=True, parts=2)
    file = tree / "params.params.net.norm.scale" / "zarr.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shape": [9]}))
    with pytest.raises(CorruptError, match="leaves out elements") as caught:
        gathered(tree)
    assert caught.value.got == "a part of a shard that begins at [9]"


def test_a_missing_chunk_of_a_folder(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree", _params(), chunks=CHUNKS, is_ocdbt=False)
    (tree / "params.params.net.norm.scale" / "1").unlink()
    with pytest.raises(IncompleteError, match=r"net\.norm\.scale, .*no chunk"):
        gathered(tree)
    shutil.rmtree(tree / "params.params.net.norm.scale")
    with pytest.raises(IncompleteError, match="_METADATA names this array"):
        gathered(tree)


def test_a_missing_part_of_a_shard(tmp_path: Path) -> None:
    """The index of a shard marks parts that were never written."""
    import tensorstore

    tree = save_tree(tmp_path / "tree", _params(), chunks=CHUNKS, is_ocdbt=False, is_zarr3=True, parts=2)
    name = "params.params.net.layers.mlp.wi_0.kernel"
    shutil.rmtree(tree / name / "c")
    array = tensorstore.open({"driver": "zarr3", "kvstore": f"file://{tree}/{name}/"}).result()
    array[:9].write(_params()["params", "params", *name.split(".")[2:]][:9]).result()  # one and a half shards
    with pytest.raises(IncompleteError, match=r"wi_0\.kernel") as caught:
        gathered(tree)
    assert "[9, 0, 0]" in str(caught.value.got)


def test_a_process_whose_store_was_not_merged(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree", _params(), processes=2)
    (tree / "manifest.ocdbt").unlink()
    with pytest.raises(IncompleteError, match="parts were not merged"):
        gathered(tree)


def test_a_missing_data_file_names_its_tensor(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree", _params(), chunks=CHUNKS, inline_nbytes=300)
    model = OrbaxReader().read(str(tree), _hints())
    record = int(model.shards[1].record[0])
    os.unlink(model.files[int(model.records.file[record])].path)
    with pytest.raises(IncompleteError, match=r"with chunks of net\.layers\.mlp\.wo\.kernel, is missing") as caught:
        gathered(tree)
    assert caught.value.tensor == model.shards[1].name


def _hints() -> Any:
    from xrank.readers.base import Hints

    return Hints()


def test_a_damaged_chunk_is_found_while_it_is_decoded(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree", _params(), chunks=CHUNKS, inline_nbytes=0)
    model = OrbaxReader().read(str(tree), _hints())
    record = int(model.shards[1].record[2])
    path = model.files[int(model.records.file[record])].path
    with open(path, "r+b") as file:
        file.seek(int(model.records.offset[record]))
        file.write(b"\0\0\0\0")
    with pytest.raises(CorruptError, match=r"net\.layers\.mlp\.wo\.kernel, .*has a damaged chunk") as caught:
        gathered(tree)
    assert (caught.value.tensor, caught.value.file) == (model.shards[1].name, path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"compressor": {"id": "blosc", "cname": "lz4"}}, "the compressor blosc"),
        ({"order": "F"}, "the order F"),
        ({"filters": [{"id": "delta"}]}, "the filters"),
        ({"dtype": ">f4"}, "the byte order of >f4"),
    ],
)
def test_an_unknown_encoding_is_named(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    tree = save_tree(tmp_path / "tree", _params(), is_ocdbt=False)
    file = tree / "params.params.net.odd.0" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UsageError, match=what) as caught:
        gathered(tree)
    assert caught.value.tensor == "params.params.net.odd.0"


@pytest.mark.parametrize("missing", ["tensorstore", "zstandard"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    tree = save_tree(tmp_path / "tree", _params())
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=f"{missing} is not installed") as caught:
        gathered(tree)
    assert caught.value.next_step == f"install it: pip install {missing}"


def test_a_path_out_of_the_folder(tmp_path: Path) -> None:
    from xrank.formats.zarr_array import _parse_location

    for location in ("value:../:d/1:0:9", "value::/etc/passwd:0:9", "value:a/:../../b:0:9", "value::d/\0:0:9"):
        with pytest.raises(UnsafeError, match="names a file outside its folder"):
            _parse_location(location, "manifest.ocdbt")


def test_scratch_without_room(tmp_path: Path) -> None:
    """The decoded records lie beside the output; where the disk is full, the error says what for."""
    big = {("params", "w"): np.random.default_rng(0).standard_normal((512, 2048)).astype(np.float32)}
    tree = save_tree(tmp_path / "tree", big, inline_nbytes=0)
    code = (
        "import resource, sys; from xrank.cli.main import main\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); main()"
    )
    command = [sys.executable, "-c", code, "gather", str(tree), "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode in (1, 2) and "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()
    assert issubclass(NoSpaceError, OSError)


def test_memory_is_flat(tmp_path: Path) -> None:
    """One chunk of 126 MB is decoded by a process of 80 MB."""
    value = np.random.default_rng(0).integers(0, 1 << 16, (60, 1 << 20), np.uint16).view(ml_dtypes.bfloat16)
    tree = save_tree(tmp_path / "tree", {("params", "layers", "w"): value})
    del value
    command = [sys.executable, "-m", "xrank", "gather", str(tree), "--out", str(tmp_path / "out"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(ended.stdout)["peak_rss_nbytes"] < 110_000_000


RECIPE = """
framework = "own"
[config]
d = "hidden_size"
[tensors]
"net.odd.0 [a, d]" = { to = "turned.weight [d, a]", times = "sqrt(a d)" }
"net.norm.scale [n]" = "norm.weight [n]"
[sizes]
a = 7
n = 12
"""


def test_a_recipe_may_multiply(tmp_path: Path) -> None:
    """Gathered, compared with the checkpoint, opened, cast, and resumed under the same plan."""
    import xrank

    params = {keys: value for keys, value in _params().items() if keys[-2:] in (("odd", 0), ("norm", "scale"))}
    tree = save_tree(tmp_path / "tree", params, chunks=CHUNKS)
    (tree / "config.json").write_text(json.dumps({"hidden_size": 5}))
    file = tmp_path / "own.toml"
    file.write_text(RECIPE)
    odd = params["params", "params", "net", "odd", 0]
    want = (odd * np.float32(35**0.5)).T
    assert gathered(tree, recipe=file)["turned.weight"].data == np.ascontiguousarray(want).tobytes()
    cast = gathered(tree, recipe=file, dtype="bf16")["turned.weight"]
    assert cast.data == np.ascontiguousarray(want.astype(ml_dtypes.bfloat16)).tobytes()
    opened = xrank.open_checkpoint(tree, recipe=file)["turned.weight"]
    assert opened.numpy().tobytes() == np.ascontiguousarray(want).tobytes()
    notes = xrank.gather_checkpoint(tree, tmp_path / "m", recipe=file).notes
    assert [text for code, text in notes if code == "scaled"] == ["net.odd.0: multiplied by 5.91607978"]


def test_what_gather_reads_the_other_commands_read(tmp_path: Path) -> None:
    """MaxText's Qwen 3 and Llama: resharded, opened, loaded, verified and inspected, with the recipe."""
    import torch

    import xrank
    from tests.recipes.made_checkpoints import as_maxtext, config_of, saved, tiny

    # Heads of 16, so that a query divided and multiplied by the root is exact.
    for family, recipe in (("qwen3", None), ("llama", "maxtext-llama3.1")):
        model, room = tiny(family, head_dim=16), tmp_path / family
        own = as_maxtext(model, is_scanned=True, turns_pairs=family == "llama")
        params = {("params", "params", *name.split(".")): tensor.numpy() for name, tensor in own.items()}
        moments = {("opt_state", "mu", *keys[1:]): value for keys, value in params.items()}
        step = save_step(room / "run" / "7", {"items": {**params, **moments}}, processes=2)
        (step / "config.json").write_text(json.dumps(config_of(model)))
        want = {name: tensor.contiguous() for name, tensor in saved(model).items()}
        model.save_pretrained(room / "base")

        details = inspect_source(room / "run").to_dict()
        assert details["source"]["recipe"] == ("maxtext-qwen3" if family == "qwen3" else None)
        assert [fault["type"] for fault in details["problems"]] == ([] if family == "qwen3" else ["UsageError"])
        xrank.gather_checkpoint(room / "run", room / "m", recipe=recipe)
        assert xrank.verify_model(room / "m", against=room / "run", recipe=recipe).ok
        assert xrank.verify_model(room / "m", base_model=room / "base").ok
        if family == "llama":  # the other convention's rows lie elsewhere
            assert not xrank.verify_model(room / "m", against=room / "run", recipe="maxtext-llama2").ok
        named = xrank.gather_checkpoint(room / "run", room / "n", recipe="none")
        assert "training-names" in {code for code, _ in named.notes}
        opened = xrank.open_checkpoint(room / "run", recipe=recipe)
        assert all(torch.equal(tensor, want[name]) for name, tensor in opened.items()) and len(opened) == len(want)
        fresh = tiny(family, head_dim=16)
        for parameter in fresh.parameters():
            parameter.data.fill_(7.0)
        xrank.load_model(fresh, room / "run", recipe=recipe or "maxtext-qwen3")
        assert all(torch.equal(tensor, want[name]) for name, tensor in saved(fresh).items())

        layouts = xrank.layout.LayoutMap(xrank.layout.DeviceMesh((2,), ("tp",)))
        for name, tensor in want.items():
            layouts[name] = "[a/~tp, b]" if tensor.ndim == 2 else "[a]"
        report = xrank.reshard_checkpoint(room / "run", layouts, room / "states", recipe=recipe or "maxtext-qwen3")
        assert report.output["world_size"] == 2
        assert gathered(room / "states", recipe="none") == {
            name: WholeTensor("F32", tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in want.items()
        }


@pytest.mark.parametrize("is_ocdbt", [True, False], ids=["ocdbt", "folders"])
def test_an_array_that_the_tree_does_not_name_is_no_smaller_model(tmp_path: Path, is_ocdbt: bool) -> None:
    """Damage that leaves JSON may take entries out of the tree, which has no checksum."""
    folder = save_tree(tmp_path / "5", _params(), is_ocdbt=is_ocdbt)
    path = folder / "_METADATA"
    tree = json.loads(path.read_text())
    moved = next(key for key in tree["tree_metadata"] if "scalar" in key)
    tree[moved] = tree["tree_metadata"].pop(moved)
    path.write_text(json.dumps(tree))
    with pytest.raises(ContradictionError, match=r"net\.scalar: .* contains this array") as caught:
        gather_checkpoint(folder, tmp_path / "out")
    assert caught.value.file == str(path) and not (tmp_path / "out").exists()


def test_what_a_text_claims_is_bounded_before_it_is_allocated(tmp_path: Path) -> None:
    """Shapes and grids are text: 160 bytes once took 2 GB."""
    program = [sys.executable, "-m", "tests.readers.orbax_claims", str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    rows = {row["name"]: row for row in map(json.loads, ended.stdout.splitlines())}
    assert {name: row["code"] for name, row in rows.items()} == {name: code for name, (_, code) in CLAIMS.items()}, rows
    assert all(row["text"].startswith("xrank: ") for row in rows.values() if row["code"])
    assert max(row["rss_nbytes"] for row in rows.values()) < 400 << 20 and not any(row["rest"] for row in rows.values())


@pytest.mark.parametrize("is_zarr3", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda array: array.update(shape=[2**64, 2]), "shape[0] is 18446744073709551616"),
        (lambda array: array.update(shape=[float("inf")]), "shape[0] is inf"),
        (lambda array: array.update(shape={"0": 3}), "shape is a dict of 1"),
        (lambda array: array.update(zarr_format=True), "zarr_format is True"),
        (lambda array: array.update(node_type="group", dtype="\ud800"), "not "),
        (lambda array: array.pop("shape"), "not an object with shape"),
    ],
)
def test_values_that_no_array_has(
    tmp_path: Path, is_zarr3: bool, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    tree = save_tree(tmp_path / "tree", _params(), is_ocdbt=False, is_zarr3=is_zarr3)
    file = tree / "params.params.net.odd.0" / ("zarr.json" if is_zarr3 else ".zarray")
    array = json.loads(file.read_text())
    change(array)
    file.write_text(json.dumps(array))
    with pytest.raises(CorruptError, match="is not valid metadata of a zarr array") as caught:
        gather_checkpoint(tree, tmp_path / "out")
    assert caught.value.file == str(file) and says in str(caught.value.got) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("separator", [1e300, "", "\0", ["."]])
def test_separators_that_no_store_has(tmp_path: Path, separator: object) -> None:
    tree = save_tree(tmp_path / "tree", _params(), is_ocdbt=False)
    file = tree / "params.params.net.odd.0" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dimension_separator": separator}))
    with pytest.raises(CorruptError) as caught:
        gather_checkpoint(tree, tmp_path / "out")
    assert "not a slash or a dot" in str(caught.value.got)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nests too deep"),
        ('{"tree_metadata": []}', "tree_metadata is a list of 0, not an object"),
        ('{"tree_metadata": {"a": {"key_metadata": [{"key": Infinity, "key_type": 1}]}}}', "key is inf, not a text"),
        ('{"tree_metadata": {"a": {"key_metadata": [{"key": 1e999, "key_type": 2}]}}}', "key is inf, not a text"),
        ('{"tree_metadata": {"a": {"key_metadata": [{"key": "\\ud800", "key_type": 2}]}}}', "not a text in UTF-8"),
        ('{"tree_metadata": {"a": {"key_metadata": [{"key": "9e9", "key_type": 1}]}}}', "key is '9e9', not an index"),
        ('{"tree_metadata": {"\\udfff": 1}}', "not a text in UTF-8"),
    ],
)
def test_trees_that_orbax_does_not_write(tmp_path: Path, text: str, says: str) -> None:
    tree = save_tree(tmp_path / "tree", _params(), is_ocdbt=False)
    (tree / "_METADATA").write_text(text)
    with pytest.raises(CorruptError, match="is not the metadata of a tree of Orbax") as caught:
        gather_checkpoint(tree, tmp_path / "out")
    assert says in str(caught.value.got) and not (tmp_path / "out").exists()
