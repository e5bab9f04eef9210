"""Wrong recipes, and the texts that their authors see: each names the file, the line and a next step.

``wrong_recipes.txt`` has the texts. To write it anew after a change of words, run this file as a module, and review the
difference.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import run
from tests.cli.test_recipe import OWN, SHAPES

pytestmark = pytest.mark.timeout(60)

TEXTS = Path(__file__).with_name("wrong_recipes.txt")


def replaced(old: str, new: str) -> str:
    assert old in OWN, old
    return OWN.replace(old, new)


def after(line: str) -> str:
    return f"{line}\n{OWN}"


NORM = '{ to = "model.norm.weight [h]" }'

REPEATED = """framework = "own"
[repeat.mtp]
sources = { "a." = "mtp." }
targets = { "b." = "mtp." }
copies = { "a.w [h]" = "c.w [h]" }
[tensors]
"a.w [h]" = "b.w [h]"
"""

CASES: dict[str, str | bytes] = {
    "two rules for one tensor": OWN + '"blocks.{N}.qkv.weight [w, h]" = "other.{N} [w, h]"\n',
    "empty": "",
    "repeat without rules": 'framework = "own"\n[repeat.mtp]\nsources = { "a." = "b." }\ntargets = { "a." = "b." }\n',
    "repeat of a number": REPEATED.replace('"b.w [h]"', "5"),
    "repeat of a part that is a number": REPEATED.replace('"b.w [h]"', "{ to = { q = 5 } }"),
    "copies of a text": REPEATED.replace('"b.w [h]"', '{ to = "b.w [h]", copies = "c.w [h]" }'),
    "layers' own sizes without layers": 'framework = "own"\nby_layer = ["h"]\n[tensors]\n"a.w [h]" = "b.w [h]"\n',
    "no quotes": replaced('framework = "own"', "framework = own"),
    "toml: key twice": OWN + '"norm.weight [h]" = 3\n',
    "toml: table twice": OWN + "[config]\n",
    "toml: unclosed string": OWN + '"a [h]" = "b [h]\n',
    "toml: unclosed table": "[tensors",
    "unknown key": replaced("framework", "frame"),
    "unknown table": OWN + "[tensor]\na=1\n",
    "unknown key in rule": replaced(NORM, '{ tu = "n [h]" }'),
    "unknown size": replaced(
        '"norm.weight [h]" = { to = "model.norm.weight [h]" }', '"norm.weight [zz yy]" = "model.norm.weight [zz yy]"'
    ),
    "target unknown size": replaced(NORM, '"model.norm.weight [k]"'),
    "size twice two values": replaced(
        '"embed.weight [v, h]" = "model.embed_tokens.weight [v, h]"',
        '"embed.weight [h, h]" = "model.embed_tokens.weight [h, h]"',
    ),
    "size const contradicts": OWN + "\n[sizes]\nh = 8\n",
    "unbalanced (": replaced('"norm.weight [h]" =', '"norm.weight [(h]" ='),
    "unbalanced [": replaced('"norm.weight [h]" =', '"norm.weight [h" ='),
    "unbalanced {": replaced(
        'blocks.{L}.qkv.weight [<q: d | k: d | v: d>, h]".to.q', 'blocks.{L.qkv.weight [<q: d | k: d | v: d>, h]".to.q'
    ),
    "unbalanced <": replaced('"norm.weight [h]" =', '"norm.weight [<a: h]" ='),
    "nested 10000": replaced('"norm.weight [h]" =', '"norm.weight [{}h{}]" ='.format("(" * 10000, ")" * 10000)),
    "nested parts 10000": replaced(
        '"norm.weight [h]" =', '"norm.weight [{}h{}]" ='.format("<a: " * 10000, ">" * 10000)
    ),
    "nested toml arrays": after("ignored = " + "[" * 10000 + "]" * 10000),
    "nested toml tables": after("framework = " + "{a=" * 5000 + "1" + "}" * 5000),
    "dotted 2000": OWN + "\n[config." + ".".join("a" * 2000) + "]\nb = 1\n",
    "dotted 2000 key": after(".".join("a" * 2000) + " = 1"),
    "extends list": after("extends = []"),
    "extends dict": after("extends = {}"),
    "extends number": after("extends = 3"),
    "extends itself": after('extends = "own"'),
    "extends file": after('extends = "own.toml"'),
    "extends unknown": after('extends = "megatron-lama"'),
    "extends true": after("extends = true"),
    "framework list": replaced('"own"', '["own"]'),
    "framework number": replaced('"own"', "3"),
    "model_types number": after("model_types = 3"),
    "ignored table": after("ignored = { a = 1 }"),
    "ignored not regex": after('ignored = ["("]'),
    "padded unknown": after('padded = ["zz"]'),
    "needed unknown": after('needed = ["attention"]'),
    "keep_fp32 number": after("keep_fp32 = [1]"),
    "config is list": "config = []\n" + OWN.replace('[config]\nh = "hidden_size"\n', ""),
    "config number": replaced('h = "hidden_size"', "h = 3"),
    "config bad term": replaced('h = "hidden_size"', 'h = "hidden_size /"'),
    "config bad term2": replaced('h = "hidden_size"', 'h = "layers frm 3"'),
    "config unused name": replaced('h = "hidden_size"', 'hh = "hidden_size"'),
    "config datetime": replaced('h = "hidden_size"', "h = 1979-05-27"),
    "args nested": OWN + "[args]\nh.a = 3\n",
    "must table value": OWN + "[must]\nnormalization = { a = 1 }\n",
    "sizes zero": OWN + "[sizes]\ntwo = 0\n",
    "sizes true": OWN + "[sizes]\ntwo = true\n",
    "sizes text": OWN + '[sizes]\ntwo = "2"\n',
    "sizes huge": OWN + f"[sizes]\nh = {10**40}\n",
    "sizes huge 5000 digits": OWN + f"[sizes]\nh = {'9' * 5000}\n",
    "sizes float": OWN + "[sizes]\ntwo = 2.0\n",
    "sizes nan": OWN + "[sizes]\ntwo = nan\n",
    "size number huge in text": replaced('"norm.weight [h]" =', '"norm.weight [99999999999999999999999999]" ='),
    "bad size name": OWN + '[sizes]\n"a b" = 2\n',
    "tensors list": 'tensors = ["a"]\n',
    "tensors empty": "[tensors]\n",
    "rule number": replaced(NORM, "3"),
    "rule true": replaced(NORM, "true"),
    "rule false without extends": replaced(NORM, "false"),
    "rule list": replaced(NORM, '["model.norm.weight [h]"]'),
    "rule empty table": replaced(NORM, "{}"),
    "rule empty to": replaced(NORM, "{ to = {} }"),
    "rule to number": replaced(NORM, "{ to = 3 }"),
    "rule empty text": replaced(NORM, '""'),
    "rule name only": replaced(NORM, '"model.norm.weight"'),
    "rule source name only": replaced('"norm.weight [h]" =', '"norm.weight" ='),
    "rule empty source": replaced('"norm.weight [h]" =', '"" ='),
    "rule dims only": replaced('"norm.weight [h]" =', '"[h]" ='),
    "rule two tensors text": replaced(NORM, '"model.norm.weight [h] [h]"'),
    "rule cut": replaced(NORM, '"n [h/tp]"'),
    "rule sum no parens": replaced('"norm.weight [h]" =', '"norm.weight [h + L]" ='),
    "rule parts no target": replaced('"norm.weight [h]" =', '"norm.weight [<a: h | b: h>]" ='),
    "rule part missing": OWN.replace(
        '"blocks.{L}.qkv.weight [<q: d | k: d | v: d>, h]".to.v = "model.layers.{L}.self_attn.v_proj.weight [d, h]"\n',
        "",
    ),
    "rule part extra": OWN.replace(".to.v =", ".to.w ="),
    "rule parts twice a name": OWN.replace("<q: d | k: d | v: d>", "<q: d | q: d | v: d>"),
    "rule dims differ": replaced(NORM, '"model.norm.weight [h, h]"'),
    "rule dims order": replaced(
        '"embed.weight [v, h]" = "model.embed_tokens.weight [v, h]"',
        '"embed.weight [v, h]" = "model.embed_tokens.weight [v]"',
    ),
    "group number": replaced(NORM, '{ to = "model.norm.weight [h]", group = 3 }'),
    "group list": replaced(NORM, '{ to = "model.norm.weight [h]", group = ["a"] }'),
    "group without layers": replaced(NORM, '{ to = "model.norm.weight [h]", group = "dense" }'),
    "beside missing group": replaced(NORM, '{ to = "model.norm.weight [h]", beside = "attention" }'),
    "when unknown flag": replaced(NORM, '{ to = "model.norm.weight [h]", when = "sparse" }'),
    "unless unknown flag": replaced(NORM, '{ to = "model.norm.weight [h]", unless = "tied" }'),
    "when number": replaced(NORM, '{ to = "n [h]", when = 3 }'),
    "optional text": replaced(NORM, '{ to = "n [h]", optional = "yes" }'),
    "add float": replaced(NORM, '{ to = "n [h]", add = 0.5 }'),
    "add huge": replaced(NORM, '{ to = "model.norm.weight [h]", add = 1' + "0" * 40 + " }"),
    "add true": replaced(NORM, '{ to = "n [h]", add = true }'),
    "beside number": replaced(NORM, '{ to = "n [h]", beside = 3 }'),
    "rename without extends": OWN + '[rename.sources]\na = "b"\n',
    "rename list": OWN + "[rename]\nsources = []\n",
    "rename number": 'extends = "megatron-llama"\n[rename]\nsources = { a = 3 }\n',
    "rename unknown": 'extends = "megatron-llama"\n[rename.source]\na = "b"\n',
    "rename list2": "rename = []\n" + OWN,
    "kept list": "kept = []\n" + OWN,
    "kept no tensors": OWN + '[kept."model."]\nfrom = "a."\n',
    "kept no from": OWN + '[kept."model."]\ntensors = ["a [h]"]\n',
    "kept number": OWN + "[kept]\na = 3\n",
    "kept bad tensor": OWN + '[kept."model."]\nfrom="a."\ntensors = ["a [h"]\n',
    "kept group number": OWN + '[kept."model."]\nfrom="a."\ntensors = ["a [h]"]\ngroup = 3\n',
    "extends false rule unknown": 'extends = "megatron-llama"\n[tensors]\n"no.such [h]" = false\n',
    "extends rule number": 'extends = "megatron-llama"\n[tensors]\n"no.such [h]" = 4\n',
    "extends config list": 'extends = "megatron-llama"\n[config]\nh = [3]\n',
    "control chars": replaced('"own"', '"\\u0007own"').replace("norm.weight [h]", "norm\\u001b[31m.weight [h"),
    "very long name": replaced('"norm.weight [h]" =', '"norm.%s [h" =' % ("x" * 100000)),
    "crlf": replaced("frame", "frume").replace("\n", "\r\n"),
    "not UTF-8": OWN.encode().replace(b"own", b"\xff\xfe"),
    "UTF-16": OWN.encode("utf-16"),
    "a NUL": OWN.encode() + b"\0",
    "binary": bytes(range(256)) * 10,
    "a megabyte": b"#" * (1 << 21),
}
WITHOUT_LINE = {"empty", "repeat without rules", "rule dims only", "a megabyte"}
"""Cases in which a line is missing rather than wrong."""


def texts_of(folder: Path) -> dict[str, str]:
    """Return the output of each case."""
    (folder / "src").mkdir()
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, folder / "src" / "model.safetensors")
    return {name: text_of(folder, name) for name in CASES}


def text_of(folder: Path, name: str) -> str:
    content = CASES[name]
    (folder / "own.toml").write_bytes(content.encode() if isinstance(content, str) else content)
    ended = run("recipe", "check", folder / "own.toml", folder / "src")
    assert ended.exit_code == 2, (name, ended)
    return ended.stderr.replace(f"{folder}/", "").rstrip() + "\n"


def wanted() -> dict[str, str]:
    blocks = (block.partition("\n") for block in TEXTS.read_text().split("--- ")[1:])
    return {name: text.rstrip() + "\n" for name, _, text in blocks}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_recipe_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "src").mkdir()
    save_file({key: torch.zeros(shape) for key, shape in SHAPES.items()}, tmp_path / "src" / "model.safetensors")
    text = text_of(tmp_path, name)
    assert text == wanted()[name]
    assert "own.toml" in text and "\n  try   " in text and len(text) < 1200
    assert ("own.toml, line " in text) == (name not in WITHOUT_LINE)


@pytest.mark.parametrize("kind", ["folder", "FIFO", "nothing"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "src").mkdir()
    save_file({key: torch.zeros(shape) for key, shape in SHAPES.items()}, tmp_path / "src" / "model.safetensors")
    file = tmp_path / "own.toml"
    if kind == "folder":
        file.mkdir()
    elif kind == "FIFO":
        os.mkfifo(file)
    ended = run("recipe", "check", file, tmp_path / "src")
    assert ended.exit_code == 2
    assert str(file) in ended.stderr and "run: xrank recipe list" in ended.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = texts_of(Path(place))
    TEXTS.write_text("\n".join(f"--- {name}\n{text}" for name, text in found.items()))
