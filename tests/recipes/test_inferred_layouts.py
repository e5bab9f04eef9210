"""Layout files of checkpoints that record no layouts: found from the pieces, proven, and read back by reshard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.bench import run
from tests.faults.planted import SOURCES
from tests.readers.dcp_checkpoints import save
from tests.readers.made_megatron import Run, whole_model, write_config, write_legacy
from tests.readers.made_zero import Zero, made_model, write_zero
from xrank.testing.rank_pool import RankPool


def _experts(folder: Path, **how: object) -> None:
    made = Run(has_experts=True, grouped=True, **how)  # type: ignore[arg-type]
    write_legacy(folder, made, whole_model(made))
    write_config(folder, made)


MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "DCP": (SOURCES["DCP"][0], '"1.weight" = "[d0/~a0, d1]"'),
    "Megatron": (SOURCES["Megatron"][0], '"output_layer.weight" = "[d0/~a1, d1] where a0=1"'),
    "experts": (lambda folder: _experts(folder, tp=2, ep=2), "[<p0: 12/~a1 | p1: 12/~a1>, d1] where a0=1"),
    "whole experts": (lambda folder: _experts(folder, tp=2, ep=2, etp=1), '[mesh]\ngrid = "a0=2 a1=2"'),
    "torch_dist": (SOURCES["torch_dist"][0], '"decoder.final_layernorm.weight" = "[d0]"'),
}


def shown(source: Path, file: Path) -> str:
    ended = run("layout", "show", source, "--toml")
    assert ended.exit_code == 0, ended.stderr
    file.write_text(ended.stdout)
    checked = run("layout", "check", file, source)
    assert checked.exit_code == 0, checked.stderr
    return ended.stdout


def gathered(source: Path, out: Path) -> dict[str, torch.Tensor]:
    ended = run("gather", source, "-o", out, "--recipe", "none")
    assert ended.exit_code == 0, ended.stderr
    return load_file(out / "model.safetensors")


def check(source: Path, folder: Path, want: str) -> None:
    """Check the file, and that states in its layout have the source's values and the source's layout."""
    assert want in shown(source, folder / "layout.toml")
    ended = run("reshard", source, "--layout", folder / "layout.toml", "-o", folder / "states")
    assert ended.exit_code == 0, ended.stderr
    before, after = gathered(source, folder / "before"), gathered(folder / "states", folder / "after")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert run("layout", "diff", source, folder / "states", "--exit-code").exit_code == 0


@pytest.mark.parametrize("name", MADE)
def test_a_file_says_what_the_ranks_saved(tmp_path: Path, name: str) -> None:
    make, want = MADE[name]
    make(tmp_path / "source")
    check(tmp_path / "source", tmp_path, want)


@pytest.mark.parametrize(
    ("cut", "want"),
    [
        (
            "fsdp2 x tp",
            '"up.weight" = "[d0/~a1/~a0, d1]"\n"up.bias" = "[d0/~a1/~a0]"\n"down.weight" = "[d0/~a0, d1/~a1]"',
        ),
        ("hsdp", '"embed.weight" = "[d0/~a1, d1]"'),
        ("tp", '"down.weight" = "[d0, d1/~a0]"'),
    ],
)
def test_cuts_of_real_ranks(tmp_path: Path, rank_pool: RankPool, cut: str, want: str) -> None:
    (tmp_path / "source").mkdir()
    rank_pool.run(4, save, str(tmp_path / "source"), cut, "model", 0, {})
    check(tmp_path / "source", tmp_path, want)


@pytest.mark.parametrize(
    ("stage", "want"),
    [
        (3, '"flat.embed.weight" = "flat(embed.weight [11, 6])/~a0"'),
        (2, "flat(up.bias [7], norm.weight [6], scale [], pad 6)/a0"),
    ],
)
def test_flat_buffers_of_zero(tmp_path: Path, stage: int, want: str) -> None:
    write_zero(tmp_path / "source", made_model(), Zero(stage=stage, num_ranks=3))
    assert want in shown(tmp_path / "source", tmp_path / "layout.toml")
    ended = run("reshard", tmp_path / "source", "--layout", tmp_path / "layout.toml", "-o", tmp_path / "states")
    assert ended.exit_code == 2 and "reshard writes none" in ended.stderr


def test_pieces_that_no_layout_gives(tmp_path: Path) -> None:
    write_zero(tmp_path / "source", made_model(), Zero(stage=2, num_ranks=3, alignment=4))
    ended = run("layout", "show", tmp_path / "source", "--toml")
    assert ended.exit_code == 2 and "no layout of up to 3 axes" in ended.stderr
