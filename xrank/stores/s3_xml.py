"""The XML of S3's answers. Its few elements are found by their names, so that no parser reads what a server sends."""

from __future__ import annotations

import re
from html import unescape

from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.s3_connection import Answer

__all__ = ["find_text", "list_texts", "need_field", "need_text"]


def find_text(text: str, name: str) -> str | None:
    """Return the content of the first element of a name; None if there is none."""
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return None if found is None else unescape(found[1])


def need_text(text: str, name: str) -> str:
    """Return the content of the first element of a name.

    Raises:
        FaultError: there is none.
    """
    found = find_text(text, name)
    if not found:
        raise FaultError(FaultKind.PASSING, f"an answer without {name}")
    return found


def need_field(answer: Answer, name: str) -> str:
    """Return the content of the first element of a name in an answer; as `need_text`."""
    return need_text(answer.body.decode(errors="replace"), name)


def list_texts(answer: Answer, name: str) -> list[str]:
    """Return the content of all elements of a name.

    Raises:
        FaultError: the answer is cut off.
    """
    text = answer.body.decode(errors="replace").strip()
    root = re.match(r"(?:<\?xml[^>]*>)?\s*<(\w+)", text)
    if root is None or not text.endswith(f"</{root[1]}>"):
        raise FaultError(FaultKind.PASSING, "an answer that is not whole")
    return re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
