"""Predicts the export of a model that nobody here can train: which cut lets ranks write what they hold?

A Llama of 70 billion parameters lies on 1,024 ranks, cut by FSDP or replicated over dp. One layout file for each says
it all; `xrank simulate` plans the export as `export_model` would, and counts what each rank reads of others and writes.
No tensor is made, no rank is started. The page has the charts.

    python examples/simulate_export.py --html export.html
    xrank simulate LAYOUTS.toml --operation export --link "write=1GB/s memory=8GB/s bandwidth=25GB/s" --html export.html
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from xrank.virtual.simulation.simulation import seconds_text, simulate, simulation_html
from xrank.words import size_text

LAYOUTS = """
[mesh]
grid = "pp=4 dp={dp} tp=8"

[sizes]
L = 80
h = 8192
g = 8            # groups of r queries of d, each with a key and a value
r = 8
d = 128
f = 28672
v = 128256

[tensors]
"embed" = "[v/tp{cut}, h] where pp=0"
"head" = "[v/tp{cut}, h] where pp=last"
"norm" = "[h{cut}] where pp=last"
"layers.{{L/pp}}.qkv" = "[(g/tp <q: r d | k: d | v: d>){cut}, h]"
"layers.{{L/pp}}.out" = "[h{cut}, (g r d)/tp]"
"layers.{{L/pp}}.fc1" = "[<gate: f/tp | up: f/tp>{cut}, h]"
"layers.{{L/pp}}.fc2" = "[h{cut}, f/tp]"
"layers.{{L/pp}}.norms" = "[2, h]"
"""

LINK = "write=1GB/s memory=8GB/s bandwidth=25GB/s latency=20us tp.bandwidth=200GB/s tp.latency=3us all_write=200GB/s"
"""A rank's own share of file system, memory and network; ranks of one tp group share a host."""


def main() -> None:
    """Simulate both cuts, print what differs, and write the page of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=32, help="replicas, or shards of FSDP")
    parser.add_argument("--html", type=Path, help="write the page of the export of what FSDP cut")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, cut in (("FSDP", "/~dp"), ("replicas", "")):
            file = Path(folder) / f"{name}.toml"
            file.write_text(LAYOUTS.format(dp=arguments.dp, cut=cut))
            found = simulate(file, "export", link=LINK)
            moved, prediction = found.traffic, found.prediction
            assert prediction is not None
            taken, written = moved.total("taken_nbytes"), moved.total("written_nbytes")
            print(
                f"{name:<9} {found.work.num_ranks:,} ranks write {size_text(written.sum())}, of it "
                f"{size_text(taken.sum())} that lies with others; the busiest gives away "
                f"{size_text(moved.total('given_nbytes').max())}; {seconds_text(prediction.seconds)}"
            )
            if arguments.html is not None and name == "FSDP":
                arguments.html.write_text(simulation_html(found))
                print(f"{'wrote':<9} {arguments.html}")


if __name__ == "__main__":
    main()
