"""The XML of stores' answers. Its few elements are found by their names: no parser reads what a server sends."""

from __future__ import annotations

import re
from html import unescape

from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.http_connection import Answer


def decode_text(answer: Answer) -> str:
    """Return the text of an answer. Azure puts a byte order mark before it."""
    return answer.body.decode("utf-8-sig", errors="replace")


def find_text(text: str, name: str) -> str | None:
    """Return the content of the first element of a name; None if there is none."""
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return None if found is None else unescape(found[1])


def need_text(text: str, name: str) -> str:
    """Return the content of the first element of a name.

    Raises:
        FaultError: the text has no such element, or an empty one.
    """
    found = find_text(text, name)
    if not found:
        raise FaultError(FaultKind.PASSING, f"an answer without {name}")
    return found


def need_number(text: str, name: str) -> int:
    """Return the number in the first element of a name.

    Raises:
        FaultError: the text has no such element, or its content is no number.
    """
    found = need_text(text, name)
    if not re.fullmatch(r"[0-9]{1,19}", found):
        raise FaultError(FaultKind.PASSING, f"an answer without a number as {name}")
    return int(found)


def need_field(answer: Answer, name: str) -> str:
    """Return the content of the first element of a name in an answer; as `need_text`."""
    return need_text(decode_text(answer), name)


def list_texts(answer: Answer, name: str) -> list[str]:
    """Return the content of all elements of a name.

    Raises:
        FaultError: the answer is cut off.
    """
    text = decode_text(answer).strip()
    root = re.match(r"(?:<\?xml[^>]*>)?\s*<(\w+)", text)
    if root is None or not text.endswith(f"</{root[1]}>"):
        raise FaultError(FaultKind.PASSING, "an answer that is not whole")
    return re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
