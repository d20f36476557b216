"""Reward functions that stand in a notebook or a script, as a Python file that grading processes import.

``cloudpickle`` takes functions, classes and values of ``__main__`` by value, and whatever can be imported by its name;
so the file extends ``sys.path`` by the folders of the caller.  Their code is written without the place where it stood:
the same functions give the same file, also from another process, so that a run goes on with them.
"""

from __future__ import annotations

import base64
import inspect
import io
import keyword
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle
import xxhash

from mcore_rl.errors import Violation, refuse_if_any
from mcore_rl.secrets import redacted
from mcore_rl.tracking.atomic import replaced

KEY = "reward"
PROTOCOL = 4  # of pickles
WIDTH = 116  # of a line of the file
FILE = '''\
"""Reward functions of a call of mcore_rl.train, by value.  Read their source below; the bytes are what is run."""

import base64
import sys

import cloudpickle

sys.path += [each for each in {folders} if each not in sys.path]
{names} = cloudpickle.loads(base64.b64decode("""
{payload}
"""))

{source}
'''


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
    """Writes code without the file and the line that it comes from."""

    dispatch_table: ClassVar[Any] = cloudpickle.Pickler.dispatch_table.new_child()


def _placeless(code: CodeType) -> Any:
    reduce = cloudpickle.Pickler.dispatch_table[CodeType]
    return reduce(code.replace(co_filename="reward", co_firstlineno=1))


_Pickler.dispatch_table[CodeType] = _placeless


def write_functions(functions: Sequence[Callable[..., Any]], folder: Path) -> tuple[Path, list[str]]:
    """Write ``functions`` to a file in ``folder`` whose name follows from them; return it and their names there.

    Raises ConfigError, with every violation: one is no function, cannot be pickled, or holds the value of a secret.
    """
    refuse_if_any([violation for each in functions for violation in _violations(each)])
    names = names_of(functions)
    payload = base64.b64encode(_pickled(list(functions))).decode()
    text = FILE.format(
        folders=_folders(),
        names=", ".join(names) + ",",
        payload="\n".join(textwrap.wrap(payload, WIDTH)),
        source="\n".join(f"# {line}".rstrip() for each in functions for line in [*_source(each), ""]),
    )
    data = text.encode(errors="backslashreplace")
    path = folder / f"rewards-{xxhash.xxh3_64_hexdigest(data)}.py"
    if not path.exists():
        with replaced(path) as new:
            new.write_bytes(data)
    return path, names


def names_of(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """A name for each, by which its part of the reward is shown; ``reward_N`` where its own is none, or is taken."""
    names: list[str] = []
    for number, each in enumerate(functions, 1):
        name = _name(each)
        usable = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")
        names.append(name if usable and name not in (*names, "base64", "sys", "cloudpickle") else f"reward_{number}")
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
    held = data.decode("latin-1")
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
    inside = (sys.prefix, sys.base_prefix)
    places = dict.fromkeys(os.path.abspath(each) for each in sys.path)
    return [each for each in places if os.path.isdir(each) and not each.startswith(inside)]


def _source(function: object) -> list[str]:
    """The lines that define ``function``, where Python finds them and they do."""
    with suppress(OSError, TypeError, SyntaxError, ValueError):
        text = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]  # told by TypeError
        if isinstance(function, FunctionType) and _defines(compile(text, "reward", "exec"), function.__code__):
            return text.splitlines()
    return [f"{_name(function)}: its source is not there"]


def _defines(module: CodeType, wanted: CodeType) -> bool:
    """Whether a function of the top level of ``module`` is ``wanted``, by its names: text found may be of another."""
    codes = [each for each in module.co_consts if isinstance(each, CodeType)]
    return any((each.co_name, each.co_varnames) == (wanted.co_name, wanted.co_varnames) for each in codes)
