"""The page's table of the notation: every text in it is read, and prints as it stands there."""

import re
from pathlib import Path

from xrank.layout import TensorLayout
from xrank.layout.notation import Flat, Pad, Parts, Product, Split, TextParser, walk

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_every_layout_of_the_table_is_one():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    texts = [text.replace("\\|", "|") for row in rows for text in re.findall("`(.*?)`", re.split(r"(?<!\\)\|", row)[1])]
    assert len(texts) >= 18
    kinds, clauses = set(), set()
    for text in texts:
        if text.startswith("layers."):
            reader = TextParser(text)
            reader.naming()
            continue
        layout = TensorLayout.parse(f"[h] {text}" if text.startswith("where") else text)
        assert str(layout).endswith(text)
        kinds |= {type(node) for dim in layout.dims for node in walk(dim)}
        kinds |= {node.kind for dim in layout.dims for node in walk(dim) if isinstance(node, Split)}
        clauses |= {
            name
            for name, found in (("in", layout.tree.view), ("where", layout.tree.where), ("sum", layout.tree.sums))
            if found
        }
    # Nothing of the notation is left out.
    assert {Product, Parts, Pad, Split, Flat, "/", "/~", "/="} <= kinds and clauses == {"in", "where", "sum"}
