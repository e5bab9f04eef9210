"""The one look of all pages, notebook outputs and pictures in the docs: colours, style and search.

Colours of text and lines follow the surroundings (``currentColor``), so a fragment fits into a light or dark notebook;
a page chooses by the reader's ``prefers-color-scheme``. The palette is that of Okabe and Ito ("Color Universal Design",
2008), whose eight colours people with each kind of colour blindness can tell apart.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

__all__ = ["ACCENT", "PAGE_STYLE", "SEARCH_SCRIPT", "SEARCH_SCRIPT_HASH", "STYLE", "Colour", "colour", "swatch"]

ACCENT = "#0072b2"

_PALETTE = ("e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7", "999999")
_SHADES = (0.0, 0.5, -0.35)
"""Shares of white, or of black where negative, that are mixed into the palette in its first, second, ... pass."""

STYLE = """
.xrank{font:14px/1.5 system-ui,sans-serif;text-align:left;--line:color-mix(in srgb,currentColor 22%,transparent);
--soft:color-mix(in srgb,currentColor 7%,transparent);--quiet:color-mix(in srgb,currentColor 68%,transparent)}
.xrank code,.xrank .code{font-family:ui-monospace,monospace;font-size:.93em;overflow-wrap:anywhere}
.xrank code{background:none;padding:0}
.xrank h1{font-size:1.5em;margin:.2em 0 .6em} .xrank h2{margin:1.8em 0 .5em;font-size:1.15em}
.xrank h3{margin:0 0 .3em;font-size:1em;font-weight:600}
.xrank table{border-collapse:collapse;margin:.4em 0;font-size:1em;border:0;display:table;width:auto}
.xrank td,.xrank th{border:0;border-bottom:1px solid var(--line);padding:.2em .9em .2em 0;text-align:left;
vertical-align:top;background:none;min-width:0}
.xrank th{font-weight:600;white-space:nowrap} .xrank .number{text-align:right;white-space:nowrap}
.xrank .wide{overflow-x:auto}
.xrank .facts{display:flex;flex-wrap:wrap;gap:.6em 2.4em;margin:.6em 0 1.2em;padding:0}
.xrank .facts div{min-width:6em} .xrank .facts b{display:block;font-size:1.35em;font-weight:600;line-height:1.3}
.xrank .facts span,.xrank .note{color:var(--quiet)} .xrank .note{margin:.3em 0}
.xrank .bad{color:#d55e00;font-weight:600}
.xrank .bar{background:#0072b2;height:.8em;min-width:1px;border-radius:2px;margin-top:.35em}
.xrank .mesh td,.xrank .mesh th{text-align:center;padding:.2em .6em;border:1px solid var(--line)}
.xrank .tensor{border-top:1px solid var(--line);padding:1em 0}
.xrank .side{display:flex;flex-wrap:wrap;gap:.4em 2em;align-items:flex-start}
.xrank .side>*{max-width:100%;min-width:0} .xrank .side>.fill{flex:1 1 22em} .xrank .side h2{margin-top:1em}
.xrank .key{white-space:nowrap} .xrank .pictures{display:flex;flex-wrap:wrap;gap:.6em 1em}
.xrank figure{margin:0;max-width:100%} .xrank figcaption{color:var(--quiet);font-size:.9em;margin-bottom:.2em}
.xrank svg{display:block;max-width:100%;height:auto;font:11px system-ui,sans-serif}
.xrank svg text.label{fill:currentColor} .xrank svg .ground{fill:var(--soft)}
.xrank svg .edge{stroke:currentColor;stroke-opacity:.45;fill:none} .xrank svg rect.box{stroke:#fff;stroke-width:.75}
.xrank .swatch{display:inline-block;width:1em;height:1em;border-radius:2px;vertical-align:-.15em;margin-right:.45em}
.xrank .legend{margin:.4em 0} .xrank .legend .key{margin-right:1.4em}
.xrank details{margin:.4em 0} .xrank summary{cursor:pointer} .xrank ul{margin:.3em 0;padding-left:1.4em}
.xrank .names{columns:24em auto;max-height:24em;overflow:auto}
.xrank input{font:inherit;color:inherit;background:var(--soft);border:1px solid var(--line);border-radius:6px;
padding:.4em .7em;width:min(26em,100%);box-sizing:border-box}
.xrank .search{position:sticky;top:0;padding:.6em 0;z-index:1;background:var(--paper,transparent)}
.xrank a{color:inherit;text-decoration-color:var(--quiet);text-underline-offset:.15em}
.xrank [hidden]{display:none}
"""
"""Rules of everything within an element of the class xrank."""

PAGE_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328}
@media (prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#dde3ea}}
body{margin:0;background:var(--paper);color:var(--ink)} .xrank{max-width:76em;margin:0 auto;padding:1.4em 1.2em 4em}
"""
"""Rules that a page needs and a fragment must not bring along."""

SEARCH_SCRIPT = """
const field = document.getElementById("search"), count = document.getElementById("found");
const groups = [...document.querySelectorAll("[data-group]")];
const names = new Map(groups.map(one => [one, one.dataset.names.toLowerCase()]));
field.parentElement.hidden = false;
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const shown = new Set();
  for (const one of groups) {
    const isFound = words.every(word => names.get(one).includes(word));
    one.hidden = !isFound;
    if (isFound) shown.add(one.dataset.group);
  }
  count.textContent = words.length ? `${shown.size} found` : "";
});
"""
"""Hides each element with a data-group whose data-names lack a word of the search field."""

SEARCH_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SEARCH_SCRIPT.encode()).digest()).decode()
"""What a page's policy names, so that no other script runs."""


@dataclass(frozen=True, slots=True)
class Colour:
    """A colour for an area, and one that can be read on it."""

    fill: str
    ink: str


def swatch(number: int, words: str) -> str:
    """Return a key of a legend: the n-th colour, and words, which are HTML."""
    return f'<span class="key"><span class="swatch" style="background:{colour(number).fill}"></span>{words}</span>'


def colour(number: int) -> Colour:
    """Return the colour of the n-th of many things; 24 differ.

    Example:
        >>> colour(0)
        Colour(fill='#e69f00', ink='#000')
    """
    base = _PALETTE[number % len(_PALETTE)]
    share = _SHADES[number // len(_PALETTE) % len(_SHADES)]
    target = 255 if share > 0 else 0
    red, green, blue = (round(v + (target - v) * abs(share)) for v in bytes.fromhex(base))
    # Relative luminance without the gamma curve is near enough to choose between black and white.
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 115
    return Colour(f"#{red:02x}{green:02x}{blue:02x}", "#fff" if is_dark else "#000")
