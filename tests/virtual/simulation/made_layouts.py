"""Layout files of models that need not exist."""

from __future__ import annotations

from pathlib import Path


def llama(folder: Path, grid: str, *, layers: int = 4, hidden: int = 256, fsdp: bool = True) -> Path:
    """Write the layout file of a Llama cut by pp, tp and, if `fsdp`, dp."""
    dp = "/~dp" if fsdp else ""
    block = {
        **dict.fromkeys(("q", "k", "v"), f"[h/tp{dp}, h]"),
        "o": f"[h{dp}, h/tp]",
        **dict.fromkeys(("gate", "up"), f"[f/tp{dp}, h]"),
        "down": f"[h{dp}, f/tp]",
        **dict.fromkeys(("norm1", "norm2"), f"[h{dp}]"),
    }
    rules = {
        "embed": f"[v/tp{dp}, h] where pp=0",
        "head": f"[v/tp{dp}, h] where pp=last",
        "norm": f"[h{dp}] where pp=last",
        **{f"layers.{{L/~pp}}.{name}": layout for name, layout in block.items()},
    }
    sizes = f"L = {layers}\nh = {hidden}\nf = {hidden * 7 // 2}\nv = {hidden * 16}\n"
    text = "".join(f'"{name}" = "{layout}"\n' for name, layout in rules.items())
    file = folder / "llama.toml"
    file.write_text(f'[mesh]\ngrid = "{grid}"\n\n[sizes]\n{sizes}\n[tensors]\n{text}')
    return file
