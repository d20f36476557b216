"""Fields of other people's configurations that a user may pass on by name: tables of which, and what is said of others.

A field is one of three kinds: ``taken``, another key of ours says it; ``refused``, for a reason; ``allowed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mcore_rl.ground.errors import Violation

ValueKind = type | tuple[type, ...] | tuple[str, ...] | tuple[int, ...]  # of a value, or the values themselves
WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list, [a,b]",
    dict: "keys and values, {a: b}",
}


@dataclass(frozen=True)
class PassedFields:
    """owner: what has the fields, in words.  name: of the key that passes them on, the last part.

    taken: key of ours, beside that key unless it has a dot before it, or ``config.json`` -> the fields that it sets.
    refused: why -> the fields; each completes "it ...".  allowed: field -> the types of its values.
    """

    owner: str
    name: str
    taken: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, tuple[str, ...]]
    allowed: Mapping[str, ValueKind]

    def violations(self, fields: Mapping[str, Any], key: str) -> list[Violation]:
        """Every field of ``fields`` that may not be set, and every value of another type.  key: the dotted prefix."""
        violations = [self._violation(name, value, key) for name, value in fields.items()]
        return [each for each in violations if each is not None]

    def _violation(self, name: str, value: Any, key: str) -> Violation | None:
        if name in self.allowed:
            return _of_value(f"{key}.{name}", value, self.allowed[name])
        for ours, names in self.taken.items():
            if name in names and ours == "config.json":
                return Violation(f"{key}.{name}", value, "the model's config.json says it", "Leave it out")
            if name in names:
                ours = ours[1:] if ours.startswith(".") else f"{key.removesuffix(self.name)}{ours}"
                return Violation(f"{key}.{name}", value, f"{ours} sets it", f"Leave it out, and write {ours}")
        for reason, names in self.refused.items():
            if name in names:
                return Violation(f"{key}.{name}", value, f"it {reason}", "Leave it out")
        known = [*self.allowed, *(each for names in self.taken.values() for each in names)]
        near = get_close_matches(name, self.allowed, 1) or get_close_matches(name, known, 1)
        remedy = f"Write {near[0]}, perhaps" if near else f"Write one of {', '.join(self.allowed)}"
        return Violation(f"{key}.{name}", value, f"{self.owner} has no such field", remedy)


def _of_value(key: str, value: Any, kind: ValueKind) -> Violation | None:
    if isinstance(kind, tuple) and not any(isinstance(each, type) for each in kind):
        fits = value in kind and not isinstance(value, bool)
        wanted = f"one of {', '.join(map(str, kind))}"
    else:
        # A bool is an int to Python, and no count; a whole number is a number.
        kinds = (int, float) if kind is float else kind
        fits = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))  # type: ignore[arg-type]
        wanted = WORDS[kind]  # type: ignore[index]  # types are hashable
    return None if fits else Violation(key, value, f"must be {wanted}", f"Write {wanted}")
