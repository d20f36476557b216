"""How tests in one process and the program in another speak: messages over two pipes, and the program's side of it.

Messages are JSON behind their length.  The judge asks ["name", NAME], ["call", REF, arguments, keywords],
["operate", REF, OPERATION, arguments]; the program answers ["value", value, arguments where they changed],
["raise", name of a built-in exception, text], or asks in between ["callback", number, arguments, keywords].

``confined_program`` loads this file by its path.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# confined_program has put the file's neighbour there under this name; elsewhere it is the package's.
if "confined_plain_data" in sys.modules and not TYPE_CHECKING:
    from confined_plain_data import decode, encode
else:
    from mcore_rl.rewards.plain_data import decode, encode

MAX_MESSAGE = 64 << 20
OPERATIONS: dict[str, Callable[..., Any]] = {
    "attribute": getattr,
    "set": setattr,
    "len": len,
    "iter": iter,
    "next": next,
    "item": lambda value, key: value[key],
    "put": lambda value, key, item: value.__setitem__(key, item),
    "str": str,
    "repr": repr,
}
# Raised by the tests' side, these would end a loop of the tests early, as if nothing were left to test.
ENDINGS = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt)


class BrokenError(BaseException):
    """The other side ended, or said what is no message.  Not an Exception, so that tests do not catch it."""


class UnjudgedError(BaseException):
    """Tests hand the program what is no data, which only its own process could judge."""


class Wire:
    """One end of the two pipes.  source, sink: descriptors."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink

    def send(self, message: object) -> None:
        """BrokenError: nobody reads."""
        body = json.dumps(message).encode()
        view = memoryview(len(body).to_bytes(4, "big") + body)
        try:
            while view:
                view = view[os.write(self._sink, view) :]
        except OSError as error:
            raise BrokenError("the program has ended") from error

    def receive(self) -> Any:
        """BrokenError: the other side has ended, or this is no message."""
        size = int.from_bytes(self._read(4), "big")
        if size > MAX_MESSAGE:
            raise BrokenError("the program sent a message of more than 64 MiB")
        try:
            return json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise BrokenError("the program sent what is no message") from error

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._source, min(size, 1 << 20))
            if not part:
                raise BrokenError("the program has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def serve(wire: Wire, namespace: dict[str, Any]) -> None:
    """Answers the judge until it has ended."""
    held: list[Any] = []

    def refer(value: Any) -> Any:
        if type(value) is _Callback:
            return {"callback": value.number}
        held.append(value)
        return {"ref": len(held) - 1}

    def resolve(form: dict[str, Any]) -> Any:
        return held[form["ref"]] if "ref" in form else _Callback(wire, form["callback"], refer, resolve)

    while True:
        try:
            request = wire.receive()
        except BrokenError:
            return
        try:
            wire.send(_answer(request, namespace, held, refer, resolve))
        except BaseException as error:  # noqa: BLE001  the program's functions may raise anything
            wire.send(raised(error, request))


def _answer(request: Any, namespace: dict[str, Any], held: list[Any], refer: Any, resolve: Any) -> Any:
    verb, target, *rest = request
    if verb == "name":
        return ["value", encode(_named(namespace, target), refer), None]
    if verb == "operate":
        name, arguments = rest
        return ["value", encode(OPERATIONS[name](held[target], *decode(arguments, resolve)), refer), None]
    sent, keywords = rest
    arguments = decode(sent, resolve)
    value = held[target](*arguments, **{name: decode(form, resolve) for name, form in keywords.items()})
    changed = None
    if any(type(form) is list or (type(form) is dict and form.keys() & {"dict", "set", "array"}) for form in sent):
        after = [encode(each, refer) if type(each) in (list, dict, set) else None for each in arguments]
        changed = [new if new is not None and new != old else None for new, old in zip(after, sent, strict=True)]
    return ["value", encode(value, refer), changed]


def _named(namespace: dict[str, Any], name: str) -> Any:
    if name in namespace:
        return namespace[name]
    if "Solution" in namespace and hasattr(namespace["Solution"], name):
        return getattr(namespace["Solution"](), name)
    raise NameError(f"name {name!r} is not defined")


def raised(error: BaseException, request: Any) -> Any:
    """The message of an exception, as the nearest built-in one; of those that end loops, a RuntimeError."""
    if isinstance(error, ENDINGS) and not (
        isinstance(error, StopIteration) and request[:1] + request[2:3] == ["operate", "next"]
    ):
        error = RuntimeError(f"the program raised {type(error).__name__}")
    known = next(kind for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind)
    try:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    except Exception:  # noqa: BLE001  a text of the program's own
        text = ""
    return ["raise", known.__name__, text[:2000]]


class _Callback:
    """A function of the tests, for the program to call."""

    def __init__(self, wire: Wire, number: int, refer: Any, resolve: Any) -> None:
        self.number = number
        self._wire = wire
        self._refer = refer
        self._resolve = resolve

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        named = {name: encode(value, self._refer) for name, value in keywords.items()}
        self._wire.send(["callback", self.number, encode(list(arguments), self._refer), named])
        kind, value, *rest = self._wire.receive()
        if kind == "raise":
            raise getattr(builtins, value)(*rest)
        return decode(value, self._resolve)
