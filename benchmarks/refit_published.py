"""Predicts published weight updates by `xrank simulate --operation refit`, from layouts and link rates alone.

Each case has the model's sizes, the trainer's and the engine's layouts and the link of a GPU as its source gives them.
The prediction has only the bytes that xrank's plan moves over the links: what a source's system does besides (gathering
on the trainer, quantizing, loading, barriers) is the difference to its published time. docs/benchmarks.md has the
table with the sources.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from xrank.virtual.simulation.simulation import simulate


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a mixture of experts, as its config.json has them; norms and routers, which are small, are left out."""

    layers: int
    dense_layers: int
    hidden: int
    experts: int
    ffn: int
    vocab: int
    dense: dict[str, tuple[int, int]]
    """Name -> rows and columns of the matrices that all layers have."""
    first: dict[str, tuple[int, int]]
    """More matrices of the layers without experts."""
    has_shared_expert: bool = True


def _attention(hidden: int, heads: int, kv_heads: int, head: int) -> dict[str, tuple[int, int]]:
    kv = dict.fromkeys("kv", (kv_heads * head, hidden))
    return {"q": (heads * head, hidden), **kv, "o": (hidden, heads * head)}


def _latent_attention(
    hidden: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, value: int
) -> dict[str, tuple[int, int]]:
    return {
        "q_a": (q_rank, hidden),
        "q_b": (heads * (nope + rope), q_rank),
        "kv_a": (kv_rank + rope, hidden),
        "kv_b": (heads * (nope + value), kv_rank),
        "o": (hidden, heads * value),
    }


def _mlp(hidden: int, ffn: int, name: str) -> dict[str, tuple[int, int]]:
    return {f"{name}_gate": (ffn, hidden), f"{name}_up": (ffn, hidden), f"{name}_down": (hidden, ffn)}


QWEN3_235B = Model(94, 0, 4096, 128, 1536, 151_936, _attention(4096, 64, 4, 128), {}, False)
DEEPSEEK_V3 = Model(
    61, 3, 7168, 256, 2048, 129_280, _latent_attention(7168, 128, 1536, 512, 128, 64, 128), _mlp(7168, 18_432, "mlp")
)
KIMI_K2 = Model(
    61, 1, 7168, 384, 2048, 163_840, _latent_attention(7168, 64, 1536, 512, 128, 64, 128), _mlp(7168, 18_432, "mlp")
)
GLM_5 = Model(
    78,
    3,
    6144,
    256,
    2048,
    154_880,
    _latent_attention(6144, 64, 2048, 512, 192, 64, 256) | {"index_q": (4096, 2048), "index_k": (128, 6144)},
    _mlp(6144, 12_288, "mlp"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A published update."""

    name: str
    model: Model
    trainer: tuple[str, str]
    """Grid, and how it cuts: "fsdp", "ep" (expert parallelism, stages by an axis pp) or "ep x fsdp"."""
    engine: tuple[str, str]
    """Grid, and how it cuts: "tp" (all matrices, groups repeat along dp) or "ep" (experts; the others are whole)."""
    gbytes: float
    """Link of a GPU, GB/s in each direction."""
    published: str
    fp8: bool = False
    """Whether 8 bits of an element move."""


CASES = (
    Case("vLLM sharded_rdt, Qwen3-235B", QWEN3_235B, ("dp=8", "fsdp"), ("ep=8", "ep"), 50, "3.2-3.3 s"),
    Case("the same, TP 8", QWEN3_235B, ("dp=8", "fsdp"), ("tp=8", "tp"), 50, "6.1 s"),
    Case("SkyRL, Qwen3-235B", QWEN3_235B, ("pp=2 ep=8", "ep"), ("ep=16", "ep"), 50, "3.54 s; NCCL broadcast 64.7 s"),
    Case("prime-rl, GLM-5.2", GLM_5, ("dp=64", "fsdp"), ("ep=32", "ep"), 50, "RDMA 1.86 s, update 2.84 s"),
    Case("NeMo-RL, DeepSeek-V3", DEEPSEEK_V3, ("pp=16 ep=16", "ep"), ("dp=8 tp=32", "tp"), 50, "7.65-9.94 s"),
    Case("Perplexity, Kimi-K2", KIMI_K2, ("ep=64 dp=4", "ep x fsdp"), ("ep=128", "ep"), 50, "1.3 s", fp8=True),
    Case("checkpoint-engine, Kimi-K2", KIMI_K2, ("dp=256", "fsdp"), ("dp=16 tp=16", "tp"), 50, "16.04 s", fp8=True),
)  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", type=int, default=range(len(CASES)))
    arguments = parser.parse_args()
    print("| case | model | an engine rank takes, most | a trainer rank gives, most | seconds | of a broadcast | "
          "published |\n" + "| --- " * 7 + "|", flush=True)  # fmt: skip
    for case in (CASES[i] for i in arguments.cases):
        with tempfile.TemporaryDirectory() as folder:
            trainer, engine = Path(folder) / "trainer.toml", Path(folder) / "engine.toml"
            trainer.write_text(_format_layouts(case.model, *case.trainer))
            engine.write_text(_format_layouts(case.model, *case.engine))
            found = simulate(str(trainer), "refit", to=str(engine), link=f"bandwidth={case.gbytes}GB/s")
        scale = 0.5 if case.fp8 else 1.0  # layout files know elements of 16 bits and more
        taken, given = (scale * int(found.traffic.total(f"{name}_nbytes").max()) / 1e9 for name in ("taken", "given"))
        seconds = scale * found.prediction.seconds if found.prediction is not None else 0.0
        whole = scale * _count_elements(case.model) * 2 / 1e9
        print(
            f"| {case.name} | {whole:,.0f} GB | {taken:.1f} GB | {given:.1f} GB | {seconds:.2f} | "
            f"{whole / case.gbytes:.1f} | {case.published} |",
            flush=True,
        )


def _count_elements(model: Model) -> int:
    its, first, experts = (sum(a * b for a, b in part.values()) for part in (model.dense, model.first, _experts(model)))
    with_experts = model.layers - model.dense_layers
    return (
        model.layers * its
        + model.dense_layers * first
        + with_experts * (model.experts * experts + sum(a * b for a, b in _shared(model).values()))
        + 2 * model.vocab * model.hidden
    )


def _experts(model: Model) -> dict[str, tuple[int, int]]:
    return _mlp(model.hidden, model.ffn, "experts")


def _shared(model: Model) -> dict[str, tuple[int, int]]:
    return _mlp(model.hidden, model.ffn, "shared") if model.has_shared_expert else {}


def _format_layouts(model: Model, grid: str, cut: str) -> str:
    """Return a layout file. The experts of a layer are one tensor for each of their matrices."""
    lines = ["[mesh]", f'grid = "{grid}"', "", "[tensors]"]
    stages = int(grid.split("pp=")[1].split()[0]) if "pp=" in grid else 1

    def add(name: str, shape: tuple[int, ...], layer: int | None) -> None:
        stage = 0 if layer is None else layer * stages // model.layers
        where = f" where pp={stage}" if stages > 1 else ""
        lines.append(f'"{name}" = "{_cut(shape, cut)}{where}"')

    for layer in range(model.layers):
        has_experts = layer >= model.dense_layers
        for name, shape in (model.dense | (_shared(model) if has_experts else model.first)).items():
            add(f"layers.{layer}.{name}", shape, layer)
        for name, shape in (_experts(model) if has_experts else {}).items():
            add(f"layers.{layer}.{name}", (model.experts, *shape), layer)
    for name in ("embed", "head"):
        add(name, (model.vocab, model.hidden), None)
    return "\n".join([*lines, ""])


def _cut(shape: tuple[int, ...], cut: str) -> str:
    if len(shape) == 3:  # experts
        count, rows, columns = shape
        first = {"fsdp": f"{count}/~dp", "ep": f"{count}/ep", "ep x fsdp": f"{count}/ep", "tp": str(count)}[cut]
        if cut == "ep x fsdp":
            return f"[{first}, {rows}/~dp, {columns}]"
        if cut == "tp":
            return f"[{first}, {rows}, {columns}/tp]" if rows > columns else f"[{first}, {rows}/tp, {columns}]"
        return f"[{first}, {rows}, {columns}]"
    rows, columns = shape
    if cut == "tp":
        return f"[{rows}/~tp, {columns}]"
    if cut in ("fsdp", "ep x fsdp"):
        return f"[{rows}/{'~dp' if cut == 'fsdp' else '~ep/~dp'}, {columns}]"
    return f"[{rows}, {columns}]"


if __name__ == "__main__":
    main()
