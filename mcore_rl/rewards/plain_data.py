"""Values as plain data: what goes into an untrusted program and what comes out, as JSON, never as a pickle.

``decode`` builds exact built-in types (and a few of the standard library's and numpy's) and nothing else, so that no
value has a comparison, a hash or a text of the program's own.  What is not data becomes a reference, if the caller can
hold one, or an ``Opaque``.

``confined_program`` and ``judge`` load this file by its path; it imports little, for speed.
"""

from __future__ import annotations

import builtins
import json
import sys

TYPE_CHECKING = False  # typing takes longer to import than the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 200  # of containers within containers
MAX_RANGE = 1_000_000
# The types that a value may be: a program may return one, or be given one.
TYPES = ("bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set", "frozenset", "object")
# Further types, by their module: name -> the arguments that make a value of it again.
EXTRA: dict[str, dict[str, Callable[[Any], list[Any]]]] = {
    "decimal": {"Decimal": lambda value: [str(value)]},
    "fractions": {"Fraction": lambda value: [value.numerator, value.denominator]},
    "datetime": {
        "datetime": lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond],
        "date": lambda value: [value.year, value.month, value.day],
        "time": lambda value: [value.hour, value.minute, value.second, value.microsecond],
        "timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    },
    "collections": {"deque": lambda value: [list(value)]},
}


class Opaque:
    """Stands for a value of a program that is no data: true, and equal to nothing but itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<a {self.kind} of the program>"


def opaque(value: object) -> dict[str, Any]:
    """The reference to ``value`` that nobody can follow."""
    return {"opaque": str(type(value).__name__)[:80]}


def encode(value: Any, refer: Callable[[Any], Any] = opaque, depth: int = 0) -> Any:
    """``value`` as what JSON can hold; instances of subclasses as their built-in type.  refer: for what is no data.

    ValueError: it is too deep, as one that contains itself is.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"the value is more than {MAX_DEPTH} levels deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        number = int(value)
        return number if -(2**63) <= number < 2**63 else {"int": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item, refer, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, refer, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, refer, depth + 1), encode(v, refer, depth + 1)] for k, v in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": [encode(item, refer, depth + 1) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    if value is Ellipsis:
        return {"ellipsis": 0}
    if isinstance(value, type) and value.__name__ in TYPES and value is getattr(builtins, value.__name__):
        return {"type": value.__name__}
    module = type(value).__module__
    name = type(value).__name__
    if module == "numpy":
        return _encode_numpy(value, refer, depth)
    is_extra = name in EXTRA.get(module, {}) and type(value) is getattr(sys.modules[module], name)
    if is_extra and not (hasattr(value, "tzinfo") and value.tzinfo is not None):
        return {"extra": [module, name, encode(EXTRA[module][name](value), refer, depth + 1)]}
    return refer(value)


def _encode_numpy(value: Any, refer: Callable[[Any], Any], depth: int) -> Any:
    if not hasattr(value, "dtype") or value.dtype.kind not in "biufc":
        return refer(value)
    if value.ndim == 0:
        return encode(value.item(), refer, depth)
    return {"array": [value.dtype.str, list(value.shape), encode(value.ravel().tolist(), refer, depth + 1)]}


def decode(form: Any, resolve: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value that ``encode`` wrote.  resolve: for references.  ValueError: ``form`` is not what it writes."""
    if form is None or type(form) in (bool, int, float, str):
        return form
    if type(form) is list:
        return [decode(item, resolve) for item in form]
    if type(form) is not dict:
        raise ValueError("not data")
    try:
        (tag,) = form
        inner = form[tag]
        match tag:
            case "int":
                return int(inner, 16)
            case "tuple":
                return tuple(decode(item, resolve) for item in inner)
            case "dict":
                return {decode(key, resolve): decode(item, resolve) for key, item in inner}
            case "set":
                return {decode(item, resolve) for item in inner}
            case "bytes":
                return bytes.fromhex(inner)
            case "complex":
                return complex(float(inner[0]), float(inner[1]))
            case "range":
                numbers = range(*map(int, inner))
                if len(numbers) > MAX_RANGE:  # whoever sorts it would hold every number
                    raise ValueError("not data: a range that is too long")
                return numbers
            case "ellipsis":
                return Ellipsis
            case "type" if inner in TYPES:
                return getattr(builtins, inner)
            case "extra" if inner[1] in EXTRA[inner[0]]:
                return getattr(__import__(inner[0]), inner[1])(*decode(inner[2]))
            case "array":
                return _decode_array(*inner)
            case "opaque" if resolve is None:
                return Opaque(str(inner))
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not data: {type(error).__name__}") from None
    if resolve is None:
        raise ValueError("not data")
    return resolve(form)


def _decode_array(dtype: str, shape: list[int], items: list[Any]) -> Any:
    import numpy  # only where a value is an array

    kind = numpy.dtype(dtype)
    if kind.kind not in "biufc" or not all(type(item) in (bool, int, float, dict) for item in items):
        raise ValueError("not data")
    return numpy.array([decode(item) for item in items], dtype=kind).reshape([int(length) for length in shape])


def read_value(line: str) -> Any:
    """The value of a line of JSON that a program wrote; if it is none, an ``Opaque``, which equals nothing else."""
    try:
        return decode(json.loads(line))
    except (ValueError, RecursionError, MemoryError):
        return Opaque("broken value")
