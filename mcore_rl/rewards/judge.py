"""Runs tests in a process that the program never enters: they call it by message, and judge what it answers.

A name that the tests neither define nor import, and that is no built-in, is the program's.  A ``Remote`` stands for
what is no data there: a function, an object, an iterator.  What is data arrives as data (``plain_data``), of exact
built-in types, so that the tests' ``==``, ``isinstance`` and ``sorted`` mean what they say.  The program never says
what is equal: tests that compare two objects of it fail.

``wire`` has the messages.  ``confined_program`` loads this file by its path.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from typing import TYPE_CHECKING, Any

# confined_program has put the file's neighbours there under these names; elsewhere they are the package's.
if "confined_wire" in sys.modules and not TYPE_CHECKING:
    from confined_plain_data import decode, encode
    from confined_wire import ENDINGS, BrokenError, UnjudgedError, Wire, raised
else:
    from mcore_rl.rewards.plain_data import decode, encode
    from mcore_rl.rewards.wire import ENDINGS, BrokenError, UnjudgedError, Wire, raised

FILE = "tests.py"


class ServedProgram:
    """The program, as the tests see it.  calls: how often they called it.  broken: why it can be asked no more."""

    def __init__(self, wire: Wire) -> None:
        self.calls = 0
        self.broken = ""
        self._wire = wire
        self._functions: list[Any] = []

    def named(self, name: str) -> Any:
        """What the program calls ``name``."""
        return self.ask(["name", name], name)

    def call(self, reference: int, text: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Calls a function of the program; changes of lists, dicts and sets that it was given are made here too."""
        self.calls += 1
        sent = [self._encode(each) for each in arguments]
        request = ["call", reference, sent, {name: self._encode(each) for name, each in keywords.items()}]
        return self.ask(request, f"{text}()", arguments)

    def operate(self, remote: Remote, operation: str, *arguments: Any, text: str = "") -> Any:
        """One of ``OPERATIONS`` on an object of the program."""
        return self.ask(["operate", remote._reference, operation, [self._encode(each) for each in arguments]], text)

    def ask(self, request: list[Any], text: str, arguments: tuple[Any, ...] = ()) -> Any:
        """The program's answer; raises what it raised."""
        try:
            return self._ask(request, text, arguments)
        except BrokenError as error:
            self.broken = self.broken or str(error)
            raise

    def _ask(self, request: list[Any], text: str, arguments: tuple[Any, ...]) -> Any:
        self._wire.send(request)
        while True:
            match self._wire.receive():
                case ["callback", int(number), list(given), dict(keywords)] if 0 <= number < len(self._functions):
                    self._wire.send(self._called(self._functions[number], given, keywords, text))
                case ["raise", str(name), str(said)]:
                    raise _exception(name, said, request)
                case ["value", form, changed]:
                    for mine, new in zip(arguments, changed or (), strict=False):
                        if new is not None:
                            _change(mine, self._decode(new, text))
                    return self._decode(form, text)
                case _:
                    raise BrokenError("the program sent what is no answer")

    def _called(self, function: Any, given: list[Any], keywords: dict[str, Any], text: str) -> list[Any]:
        arguments = [self._decode(each, text) for each in given]
        named = {name: self._decode(each, text) for name, each in keywords.items()}
        try:
            return ["value", self._encode(function(*arguments, **named))]
        except Exception as error:  # noqa: BLE001  the program is to see it
            answer: list[Any] = raised(error, [])
            return answer

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _refer(self, value: Any) -> Any:
        if type(value) is Remote:
            return {"ref": value._reference}
        if callable(value) and not isinstance(value, type):
            self._functions.append(value)
            return {"callback": len(self._functions) - 1}
        raise UnjudgedError(f"the tests hand the program a {type(value).__name__}, which is no data")

    def _decode(self, form: Any, text: str) -> Any:
        try:
            return decode(form, lambda other: self._resolve(other, text))
        except ValueError as error:
            raise BrokenError(f"the program sent what is {error}") from error

    def _resolve(self, form: dict[str, Any], text: str) -> Any:
        match form:
            case {"ref": int(reference)}:
                return Remote(self, reference, text)
            case {"callback": int(number)} if 0 <= number < len(self._functions):
                return self._functions[number]
        raise ValueError("not data")


class Remote:
    """Something in the program that is no data."""

    def __init__(self, program: ServedProgram, reference: int, text: str) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_reference", reference)
        object.__setattr__(self, "_text", text)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102  as any function
        return self._program.call(self._reference, self._text, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            if name in ("__name__", "__qualname__"):
                return self._text
            raise AttributeError(name)
        return self._program.operate(self, "attribute", name, text=f"{self._text}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.operate(self, "set", name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote) and other._reference != self._reference:
            # Not UnjudgedError: any program can return objects, and is not to choose what becomes of it.
            self._program.broken = "the tests compare two objects of the program, which only the program could"
            raise BrokenError(self._program.broken)
        return isinstance(other, Remote)

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return int(self._program.operate(self, "len"))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return self._program.operate(self, "iter", text=self._text)

    def __next__(self) -> Any:
        return self._program.operate(self, "next", text=self._text)

    def __getitem__(self, key: Any) -> Any:
        return self._program.operate(self, "item", key, text=self._text)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._program.operate(self, "put", key, value)

    def __contains__(self, item: Any) -> bool:
        return any(each is item or each == item for each in self)  # here: the program is not to say what is equal

    def __str__(self) -> str:
        return str(self._program.operate(self, "str"))

    def __repr__(self) -> str:
        return f"<{self._text} of the program>"


def _exception(name: str, said: str, request: list[Any]) -> BaseException:
    kind = vars(builtins).get(name)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return BrokenError("the program raised what is no exception")
    if issubclass(kind, ENDINGS) and not (kind is StopIteration and request[2:3] == ["next"]):
        return BrokenError("the program raised what would end a loop of the tests")
    if issubclass(kind, UnicodeError):  # takes other arguments
        kind = ValueError
    return Exception(said) if issubclass(kind, BaseExceptionGroup) else kind(said)


def _change(mine: Any, new: Any) -> None:
    """Makes ``mine``, an argument, what the program made of it."""
    if type(mine) is not type(new):
        return
    if type(mine) is list:
        mine[:] = new
    elif type(mine) in (dict, set):
        mine.clear()
        mine.update(new)


class _Reached(ast.NodeTransformer):
    """Counts the checks that are reached: puts a call before every statement that is one."""

    def visit(self, node: ast.AST) -> Any:
        node = self.generic_visit(node)
        if is_check(node):
            return [ast.parse("__reached__()").body[0], node]
        return node


def is_check(node: ast.AST) -> bool:
    """Whether a statement decides something: an assert, a call of assertX(), raises() or fail(), an if that raises."""
    match node:
        case ast.Assert():
            return True
        case ast.If():
            return any(isinstance(each, ast.Raise) for each in [*node.body, *node.orelse])
        case ast.Expr(value=value):
            return _is_assertion(value)
        case ast.With() | ast.AsyncWith():
            return any(_is_assertion(item.context_expr) for item in node.items)
    return False


def _is_assertion(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name.startswith("assert") or name in ("raises", "fail")
    return False


def judge(tests: str, program: ServedProgram | None, known: dict[str, Any]) -> dict[str, Any]:
    """The verdict: {"passed": whether nothing raised and something was checked, "error": why not}.

    program: where names are asked for that neither the tests define nor ``known`` has.  None judges inside: ``known``
    has the program's names, and the program can change whatever it likes, this verdict too.
    """
    reached = [0]

    class Builtins(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            if name.startswith("__") or program is None:
                raise KeyError(name)
            return program.named(name)

    def reach() -> None:
        reached[0] += 1

    main = types.ModuleType("__main__")
    if program is None:
        main.__dict__.update(known)
    main.__dict__.update({"__builtins__": Builtins(known) if program else builtins, "__reached__": reach})
    sys.modules["__main__"] = main
    if program is not None:
        sys.modules["solution"] = _Solution(program)
    unittest = __import__("unittest") if "unittest" in tests else None
    if unittest is not None:
        vars(unittest)["main"] = lambda *_, **__: None  # _run_found runs the tests
    error = ""
    try:
        tree = ast.fix_missing_locations(_Reached().visit(ast.parse(tests)))
        exec(compile(tree, FILE, "exec"), main.__dict__)
        _run_found(main.__dict__)
        if not reached[0]:
            error = "the tests reached no check"
        elif program is not None and not program.calls:
            error = "the tests called nothing of the program"
    except UnjudgedError as unjudged:
        return {"passed": False, "error": str(unjudged), "unjudged": True}
    except BaseException as failure:  # noqa: BLE001  whatever it is, the program has not passed
        error = f"{type(failure).__name__}: {failure}"
    if program is not None and program.broken:  # also where the tests went on after it
        error = program.broken
    return {"passed": not error, "error": error[:500]}


class _Solution(types.ModuleType):
    """The module ``solution``, whose attributes are the program's names."""

    def __init__(self, program: ServedProgram) -> None:
        super().__init__("solution")
        self.__dict__["__all__"] = []
        self.__dict__["_program"] = program

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.named(name)


def _run_found(namespace: dict[str, Any]) -> None:
    """Runs what a test runner would find: functions, and methods of classes, whose names begin with ``test``."""
    for name, value in list(namespace.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            value()
        elif isinstance(value, type) and value.__module__ == "__main__":
            if any(base.__module__.startswith("unittest") for base in value.__mro__):
                _run_unittest(value)
            elif name.startswith("Test"):
                for method in dir(value):
                    if method.startswith("test") and callable(getattr(value, method)):
                        _run_method(value(), method)


def _run_unittest(kind: type) -> None:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    for _, said in [*result.errors, *result.failures, *result.skipped]:
        raise AssertionError(said[-400:])
    if result.unexpectedSuccesses:
        raise AssertionError("a test succeeded that should not")


def _run_method(case: object, method: str) -> None:
    for step in ("setup_method", method, "teardown_method"):
        if hasattr(case, step):
            getattr(case, step)()
