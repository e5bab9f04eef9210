"""Shows the sessions of docstrings as code: griffe reads them in a section "Examples" of Google's style alone."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_BARE_SESSION = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)


class Examples(griffe.Extension):
    """Names the section as griffe does, and makes one where a session stands alone."""

    def on_object(self, *, obj: griffe.Object, **arguments: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = _BARE_SESSION.sub(
                lambda found: f"Examples:\n{textwrap.indent(found[0], '    ')}", text
            )
