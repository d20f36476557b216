"""Calls a user's function as a program: it reads the row from standard input, and prints the result as its last line.

What the function itself prints goes to standard error.  This file is run by its path and imports nothing of the house.

Argument: ``FILE.py:FUNCTION``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys


def main(place: str) -> None:
    """Prints what the function returns as JSON; what the function raises ends the process."""
    path, _, name = place.rpartition(":")
    row = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = vars(module)[name](row)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    answers.write("\n" + json.dumps(result) + "\n")
    answers.close()


async def _awaited(value: object) -> object:
    return await value  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1])
