"""Mutated inputs: texts changed token by token, and bytes changed one by one; a seed repeats them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["NASTY", "Mutator", "change_value", "write_json"]

_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|[A-Za-z_][\w.]*|[-+]?\d[\w.]*|\s+|.', re.DOTALL)

NASTY: tuple[bytes, ...] = (
    *(b"0", b"-1", b"1", b"2", b"3.5", b"-0.0", b"1e400", b"NaN", b"Infinity", b"-Infinity", b"99999999999"),
    *(b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"1" + b"0" * 30, b"7" * 400),
    *(b"9" * 5000, b"1_000", b"0x10", b"0o7", b"1e-9", b"1979-05-27", b"1979-05-27T07:32:00Z", b"inf", b"nan"),
    *(b"null", b"true", b"false", b"[]", b"{}", b"[[]]", b"[0]", b'[""]', b"[null]", b'{"": 0}', b'{"a": {"b": []}}'),
    *(b'""', b'"."', b'".."', b'"../x"', b'"/"', b'"/etc/passwd"', b'"a/b"', b'"\\u0000"', b'"\\ud800"', b'"\\n"'),
    *(
        b'"%s"',
        b'"{}"',
        b'"{0}"',
        b'"' + b"a." * 2000 + b'a"',
        b'"' + b"(" * 5000 + b")" * 5000 + b'"',
        b'"(a+)+$"',
        b'"\\\\"',
    ),
    *(b'"*"', b'"[a"', b'"a{99999}"', b'"(?P<n>x)"', b'"[n/tp, h]"', b'"\xc3\xa9"', b'"' + b"x" * 70000 + b'"'),
    *(b"[" * 300, b"{" * 300, b"(" * 300, b"<q: " * 300, b'{"a":' * 300, b"]" * 300, b"\x00", b"\xff", b"\xef\xbb\xbf"),
    *(b".".join([b"a"] * 2000), b"a=", b"=", b"#", b"\n", b"\r\n", b"\t", b",", b":", b".", b"/", b"/~", b"%", b"|"),
    *(
        b"*",
        b"+",
        b"..",
        b"last",
        b"pad(",
        b"flat(",
        b"where",
        b"in",
        b"sum(",
        b"[tensors]\n",
        b"[[x]]\n",
        b"'''",
        b'"""',
    ),
)
"""Tokens that parsers of JSON, TOML, layouts, terms and patterns may stumble over."""


_VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, 7, 10**3, 10**6, 10**9, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 7**3000),
    *(0.0, -0.0, 0.5, 2.0, 3.7, -1.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), None, True, False),
    *(
        "",
        "0",
        "3",
        "x",
        "llama",
        "a.b",
        ".*",
        "(",
        "*" * 50,
        "x" * 5000,
        "\0",
        "\ud800",
        "\u0663",
        "../x",
        "M*-E",
        "1e999",
    ),
    *([], {}, [[]], [0], [-1], [None], [10**30], ["x"], [1, 2, 3], [True], [{}], {"a": 1}, {"0": 0}, {"": {}}),
    *([0] * 5000, ["full_attention"] * 5000, {"rope_type": []}, {"rope_type": "llama3", "factor": 10**400}),
)
"""Values that code for JSON may stumble over."""
_KEYS = ("0", -1, 2**64, 1.5, None, True, (1, 2), b"0", "\ud800", float("nan"))
"""Keys that a pickle may have in the place of numbers."""
_RAW = {
    f"raw {number}": token
    for number, token in enumerate(
        (
            *(b"[" * 90 + b"]" * 90, b"[" * 990 + b"]" * 990, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 50_000),
            *(b"9" * 4200, b"-" + b"9" * 5000, b"1e999", b"-1e999", b"NaN", b"-Infinity", b"1E400", b"-0"),
            *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xff"', b'"\xed\xa0\x80"', b'"\\u0000"', b"'a'", b"undefined", b""),
        )
    )
}
"""A text in a value -> what `write_json` writes in its place; a value holds none of it, or not so deep."""


def write_json(rng: random.Random, value: Any) -> bytes:
    """Return a value as JSON; seldom with repeated keys, in another encoding, or cut short."""
    if rng.random() < 0.15:
        value = change_value(rng, value, (*_RAW,), depth=rng.randrange(8))
    content = json.dumps(value, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    for name, token in _RAW.items():
        content = content.replace(b'"%s"' % name.encode(), token)
    match rng.randrange(60):
        case 0:
            keys = re.findall(rb'"[a-z_]+": ', content)
            content = content.replace(rng.choice(keys), rng.choice(keys)) if keys else content
        case 1:
            encoding = rng.choice(("utf-16", "utf-8-sig", "utf-32-le", "cp037"))
            content = content.decode("utf-8", "replace").encode(encoding, "replace")
        case 2:
            content = content[: rng.randrange(len(content) + 1)]
        case 3:
            content += rng.choice((b"\0", b"{}", b"\n", b"]"))
    return content


def change_value(rng: random.Random, value: Any, values: Sequence[Any] = _VALUES, depth: int = 100) -> Any:
    """Return a value with one of its parts replaced, removed or repeated.

    Args:
        rng: decides.
        value: of plain containers, texts and numbers.
        values: what a part is replaced by.
        depth: deepest part that changes.
    """
    if isinstance(value, dict) and value and depth and rng.random() < 0.95:
        key = rng.choice([*value])
        match rng.randrange(12):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                others = ("", "x", f"{key}.", str(key).upper(), "text_config", "vision_config")
                return {**value, rng.choice(others): value[key]}
            case 2:
                return {**value, key: value[rng.choice([*value])]}
            case 3:
                digits = rng.choice(("0", "9" * 15, "9" * 19, "9" * 200, "7" * 5000, "\u0663", "-1"))
                other = re.sub(r"\d+", digits, key, count=1) if isinstance(key, str) else rng.choice(_KEYS)
                return {other if name == key else name: part for name, part in value.items()}
        return {**value, key: change_value(rng, value[key], values, depth - 1)}
    if isinstance(value, (list, tuple)) and value and depth and rng.random() < 0.7:
        at = rng.randrange(len(value))
        changed = [*value]
        match rng.randrange(4):
            case 0:
                del changed[at]
            case 1:
                changed *= 2
            case _:
                changed[at] = change_value(rng, value[at], values, depth - 1)
        return type(value)(changed)
    if type(value) is int and rng.random() < 0.4:
        return rng.choice(
            (
                value + 1,
                value - 1,
                -value,
                2 * value,
                value * 10**9,
                value + 0.0 if abs(value) < 2**60 else 0.5,
                [value],
            )
        )
    return rng.choice(values)


class Mutator:
    """Changes seeds of one kind.

    Args:
        seeds: valid inputs.
        is_text: whether tokens are changed, too; bytes are in any case.
        words: further tokens of this kind.
    """

    def __init__(self, seeds: Sequence[bytes], *, is_text: bool, words: Sequence[bytes] = ()) -> None:
        self._seeds = list(seeds)
        self._values = [json.loads(seed) for seed in seeds if seed.startswith(b"{")] if is_text else []
        self._tokens = [_TOKEN.findall(seed) for seed in seeds] if is_text else []
        known = sorted({token for tokens in self._tokens for token in tokens if not token.isspace()})
        self._words = [*NASTY, *known, *words]

    def __call__(self, rng: random.Random) -> bytes:
        """Return a changed seed."""
        if self._values and rng.random() < 0.7:
            value = rng.choice(self._values)
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                value = change_value(rng, value)
            return json.dumps(value).encode()
        number = rng.randrange(len(self._seeds))
        if not self._tokens or rng.random() < 0.1:
            return self._change_bytes(rng, self._seeds[number])
        tokens = [*self._tokens[number]]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if tokens:
                rng.choice(_CHANGES)(tokens, rng, self._words)
        return b"".join(tokens)

    def _change_bytes(self, rng: random.Random, seed: bytes) -> bytes:
        content = bytearray(seed)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(content) + 1)
            match rng.randrange(7):
                case 0 | 1 if content:
                    content[at - 1] ^= 1 << rng.randrange(8)
                case 2 if content:
                    content[at - 1] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
                case 3:
                    del content[at:]
                case 4:
                    del content[at : at + rng.randrange(1, 17)]
                case 5:
                    content[at:at] = rng.randbytes(rng.randrange(1, 9))
                case _:
                    other = rng.choice(self._seeds)
                    start = rng.randrange(len(other) + 1)
                    content[at : at + rng.randrange(33)] = other[start : start + rng.randrange(65)]
        return bytes(content)


_Change = Callable[[list[bytes], random.Random, Sequence[bytes]], None]


def _place(tokens: list[bytes], rng: random.Random) -> int:
    """Return the place of a token, seldom of blanks."""
    at = rng.randrange(len(tokens))
    return rng.randrange(len(tokens)) if tokens[at].isspace() else at


def _replace(tokens: list[bytes], rng: random.Random, words: Sequence[bytes]) -> None:
    tokens[_place(tokens, rng)] = rng.choice(words)


def _replace_value(tokens: list[bytes], rng: random.Random, words: Sequence[bytes]) -> None:
    """Replace what stands behind a colon or an equals sign."""
    places = [at for at, token in enumerate(tokens[:-1]) if token in (b":", b"=")]
    if places:
        at = rng.choice(places) + 1
        tokens[at + tokens[at].isspace() : at + 1 + (tokens[at].isspace() and at + 1 < len(tokens))] = [
            rng.choice(words)
        ]


def _insert(tokens: list[bytes], rng: random.Random, words: Sequence[bytes]) -> None:
    tokens.insert(_place(tokens, rng), rng.choice(words))


def _remove(tokens: list[bytes], rng: random.Random, words: Sequence[bytes]) -> None:
    at = _place(tokens, rng)
    del tokens[at : at + rng.choice((1, 1, 2, 5))]


def _repeat(tokens: list[bytes], rng: random.Random, words: Sequence[bytes]) -> None:
    at = _place(tokens, rng)
    piece = tokens[at : at + rng.choice((1, 2, 4, 12))]
    tokens[at:at] = piece * rng.choice((1, 2, 70, 1500) if len(b"".join(piece)) < 20 else (1, 2))


def _swap(tokens: list[bytes], rng: random.Random, words: Sequence[bytes]) -> None:
    one, other = _place(tokens, rng), _place(tokens, rng)
    tokens[one], tokens[other] = tokens[other], tokens[one]


def _cut(tokens: list[bytes], rng: random.Random, words: Sequence[bytes]) -> None:
    del tokens[_place(tokens, rng) :]


_CHANGES: tuple[_Change, ...] = (
    _replace,
    _replace,
    _replace_value,
    _replace_value,
    _insert,
    _remove,
    _repeat,
    _swap,
    _cut,
)
