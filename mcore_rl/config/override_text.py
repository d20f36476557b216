"""Keeps what the user wrote on the command line as text, as ``yaml_files.py`` does in files.

Hydra takes ``1e3`` for 1000.0, ``1_000`` for 1000 and ``true`` for a boolean, before it looks at the type of the key: a
text of that spelling would come out as another; and in ``~/x`` or ``</answer>`` it meets characters that its grammar
has no use for.  Put in quotes each of these stays a text, which the declared type reads.
"""

from __future__ import annotations

import re

from mcore_rl.config.yaml_files import FREE

TOKENS = re.compile(
    r"""'(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | \$\{[^{}]*\}  # quoted, or an interpolation: as it is
      | [\[\]{},] | (?:\\.|[^\[\]{},'"\\$]|\$(?!\{))+""",
    re.VERBOSE,
)
READ_BY_HYDRA = re.compile(r"[+-]?[\d.][\d._]*(?:e[+-]?[\d_]+)?|[+-]?(?:inf|nan)|true|false", re.IGNORECASE)
# A text with a character that hydra's grammar has no use for.
UNREADABLE = re.compile(r"[^()'\"\\$]*[^\w\s()'\"\\$/\-+.*:%?@|,][^()'\"\\$]*", re.ASCII)


def is_free(key: str) -> bool:
    """Whether no dataclass declares the type of a dotted key, which is a ``FREE`` group or in one."""
    return not set(FREE).isdisjoint(key.lstrip("+~").split("."))


def keep_text(override: str) -> str:
    """``override`` with the numbers, booleans and unreadable texts of its value in quotes, but in ``FREE`` groups."""
    key, equals, value = override.partition("=")
    if is_free(key) or not equals:
        return override
    inside: list[tuple[str, bool]] = []  # of each bracket that is open: itself, and whether it is a free group's
    name = ""

    def kept(match: re.Match[str]) -> str:
        nonlocal name
        token = match[0]
        if token in ("[", "{"):
            free = bool(inside and inside[-1][1]) or is_free(name)
            inside.append((token, free))
        elif token in ("]", "}") and inside:
            inside.pop()
        elif inside and inside[-1][0] == "{" and ":" in token:
            name, _, rest = token.partition(":")
            name = name.strip()
            return token if inside[-1][1] or is_free(name) else f"{token[: len(token) - len(rest)]}{_quoted(rest)}"
        elif not inside or (inside[-1][0] == "[" and not inside[-1][1]):
            token = _quoted(token)
        name = ""
        return token

    return f"{key}={TOKENS.sub(kept, value)}"


def _quoted(text: str) -> str:
    word = text.strip()
    quoted = READ_BY_HYDRA.fullmatch(word) or UNREADABLE.fullmatch(word)
    return text.replace(word, f"'{word}'") if quoted else text
