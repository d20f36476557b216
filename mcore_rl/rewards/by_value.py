"""Reward functions that stand in a notebook or a script, as a Python file that grading processes import.

``cloudpickle`` takes functions, classes and values of ``__main__`` by value, and whatever can be imported by its name;
so the file extends ``sys.path`` by the folders of the caller, which stand beside it in ``FOLDERS``.  Code is written
without the place where it stood, sets in one order, classes without a number: the same functions give the same file,
also from another process, so that a run goes on with them.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import keyword
import os
import site
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle
import xxhash

from mcore_rl.ground.errors import Violation, refuse_if_any
from mcore_rl.ground.secrets import redacted

KEY = "reward"
FOLDERS = "folders.json"  # beside the file; of this call, and no part of what the functions are
PROTOCOL = 4  # of pickles
WIDTH = 116  # of a line of the file
MAX_BYTES = 64 << 20  # of a function with what it holds
TAKEN = ("base64", "json", "sys", "Path", "cloudpickle", "folders")  # names of the file's own
FILE = '''\
"""Reward functions of a call of mcore_rl.train, by value.  Read their source below; the bytes are what is run."""

import base64
import json
import sys
from pathlib import Path

import cloudpickle

folders = Path(__file__).with_name("{folders}")
sys.path += [each for each in json.loads(folders.read_text()) if each not in sys.path] if folders.exists() else []
{names} = cloudpickle.loads(base64.b64decode("""
{payload}
"""))

{source}
'''


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """Writes functions and classes without what differs between processes that define the same."""

    dispatch_table: ClassVar[Any] = cloudpickle.Pickler.dispatch_table.new_child()

    def reducer_override(self, obj: Any) -> Any:
        """See ``cloudpickle.Pickler``."""
        reduced = super().reducer_override(obj)
        if not isinstance(reduced, tuple) or len(reduced) < len(_BY_VALUE):
            return reduced
        make, args, (held, slots), *rest = reduced
        if isinstance(obj, type):
            args = (*args[:-2], None, None)  # the first: a random number, for classes that are sent twice
            held = {name: value for name, value in held.items() if name not in _PLACE_OF_CLASS}
        return make, args, (_in_order(held), _in_order(slots)), *rest

    def _function_getnewargs(self, func: FunctionType) -> Any:
        names = {name: func.__globals__.get(name) for name in ("__name__", "__package__")}
        self.globals_ref.setdefault(id(func.__globals__), {name: value for name, value in names.items() if value})
        return super()._function_getnewargs(func)


_BY_VALUE = ("make", "args", "state", "items", "pairs", "setter")  # what cloudpickle reduces to what goes by value
_PLACE_OF_CLASS = ("__firstlineno__", "__static_attributes__")  # from Python 3.13 on


class _InOrder:
    """A set, pickled in one order."""

    def __init__(self, values: Set[Any]) -> None:
        self._kind = type(values)
        self._values = sorted(map(_in_order, values), key=repr)

    def __reduce__(self) -> tuple[type[Any], tuple[list[Any]]]:
        return self._kind, (self._values,)

    def __repr__(self) -> str:
        return repr(self._values)


def _in_order(value: Any) -> Any:
    """``value``, with ``_InOrder`` for the sets in it; itself where there are none."""
    kind = type(value)
    if kind in (set, frozenset):
        return _InOrder(value)
    if kind is dict:
        pairs = {name: _in_order(each) for name, each in value.items()}
        return pairs if any(pairs[name] is not value[name] for name in pairs) else value
    if kind in (list, tuple):
        items = [_in_order(each) for each in value]
        return kind(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


def _placeless(code: CodeType) -> Any:
    reduce = cloudpickle.Pickler.dispatch_table[CodeType]
    return reduce(code.replace(co_filename="reward", co_firstlineno=1, co_consts=_in_order(code.co_consts)))


def _cell(cell: CellType) -> Any:
    make, args = cloudpickle.Pickler.dispatch_table[CellType](cell)
    return make, _in_order(args)


_Pickler.dispatch_table[CodeType] = _placeless
_Pickler.dispatch_table[CellType] = _cell


@dataclass(frozen=True)
class FunctionsFile:
    """Reward functions as files that are yet to be written.

    path: the file of the functions, whose name follows from them.  names: theirs in it.  files: what is to be written.
    """

    path: Path
    names: list[str]
    files: dict[Path, bytes]


def functions_file(functions: Sequence[Callable[..., Any]], folder: Path) -> FunctionsFile:
    """Make the file of ``functions`` in ``folder``.

    Raises ConfigError, with every violation: one is no function, cannot be pickled, is too large, or holds the value of
    a secret.
    """
    refuse_if_any([violation for each in functions for violation in _violations(each)])
    names = names_of(functions)
    payload = base64.b64encode(_pickled(list(functions))).decode()
    text = FILE.format(
        folders=FOLDERS,
        names=", ".join(names) + ",",
        payload="\n".join(payload[at : at + WIDTH] for at in range(0, len(payload), WIDTH)),
        source="\n".join(f"# {line}".rstrip() for each in functions for line in [*_source(each), ""]),
    )
    data = text.encode(errors="backslashreplace")
    path = folder / f"rewards-{xxhash.xxh3_64_hexdigest(data)}.py"
    return FunctionsFile(path, names, {path: data, folder / FOLDERS: json.dumps(_folders()).encode()})


def names_of(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """A name for each, by which its part of the reward is shown; ``reward_N`` where its own is none, or is taken."""
    names: list[str] = []
    for number, each in enumerate(functions, 1):
        name = _name(each)
        usable = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")
        others = (f"reward_{later}" for later in count(number))
        if not usable or name in (*names, *TAKEN):
            name = next(each for each in others if each not in names)
        names.append(name)
    return names


def _name(function: object) -> str:
    return str(function.__name__) if hasattr(function, "__name__") else type(function).__name__


def _violations(function: object) -> list[Violation]:
    if isinstance(function, str):
        remedy = "Write reward_model.enable=true and reward_model.model.path, docs/rewards.md"
        return [Violation(KEY, function, "is no function; a reward model has keys of its own", remedy)]
    if not callable(function):
        return [Violation(KEY, function, "is no function", "Give f(completions, **columns), or a list of such")]
    name = _name(function)
    try:
        data = _pickled(function)
    except Exception as error:  # noqa: BLE001  whatever an object does when it is pickled
        said = " ".join(str(error).split()) or type(error).__name__
        remedy = "Make inside the function what cannot be sent, or write it into a file: custom_reward_function.path"
        return [Violation(KEY, name, f"cannot be sent to the processes that grade: {said}", remedy)]
    if len(data) > MAX_BYTES:
        problem = f"holds {len(data) >> 20:,} MB of data, and {MAX_BYTES >> 20} are sent"
        return [Violation(KEY, name, problem, "Load it inside the function from a file")]
    held = "\n".join([data.decode(errors="replace"), *_source(function)])
    if redacted(held) != held:
        problem = "holds the value of a secret of the environment, and would be written into the run directory"
        remedy = "Read os.environ inside the function, and write the variable's name into custom_reward_function.env"
        return [Violation(KEY, name, problem, remedy)]
    return []


def _pickled(value: Any) -> bytes:
    written = io.BytesIO()
    _Pickler(written, protocol=PROTOCOL).dump(value)
    return written.getvalue()


def _folders() -> list[str]:
    """Folders that the caller imports from, and a process of the environment does not."""
    paths = sysconfig.get_paths()
    standard = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    inside = [os.path.join(each, "") for each in (*standard, *site.getsitepackages(), site.getusersitepackages())]
    places = dict.fromkeys(os.path.abspath(each) for each in sys.path)
    return [each for each in places if os.path.isdir(each) and not os.path.join(each, "").startswith(tuple(inside))]


def _source(function: object) -> list[str]:
    """Source of ``function``, or a line that says it was not found."""
    with suppress(OSError, TypeError, SyntaxError, ValueError):
        text = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]  # told by TypeError
        if isinstance(function, FunctionType) and _defines(compile(text, "reward", "exec"), function.__code__):
            return text.splitlines()
    return [f"{_name(function)}: its source is not there"]


def _defines(module: CodeType, wanted: CodeType) -> bool:
    """Compare the functions of the top level of ``module`` with ``wanted``, by names: text may be of another."""
    codes = [each for each in module.co_consts if isinstance(each, CodeType)]
    return any((each.co_name, each.co_varnames) == (wanted.co_name, wanted.co_varnames) for each in codes)
