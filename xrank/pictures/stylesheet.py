"""The one look of all pages, notebook outputs and pictures in the docs: colours, style and search.

Colours of text and lines follow the surroundings (``currentColor``), so a fragment fits into a light or dark notebook;
a page chooses by the reader's ``prefers-color-scheme``. The palette is that of Okabe and Ito ("Color Universal Design",
2008), whose eight colours people with each kind of colour blindness can tell apart.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources

ACCENT = "#0072b2"

_PALETTE = ("e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7", "999999")
_SHADES = (0.0, 0.5, -0.35)
"""Shares of white, or of black where negative, that are mixed into the palette in its first, second, ... pass."""


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


STYLE = _read("style.css")

PAGE_STYLE = _read("page.css")

SEARCH_SCRIPT = _read("search.js")

SEARCH_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SEARCH_SCRIPT.encode()).digest()).decode()
"""Hash of the script for the page's policy, so that no other script runs."""


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
