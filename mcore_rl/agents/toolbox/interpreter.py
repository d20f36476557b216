"""A Python interpreter for the model's code, confined as the programs that code rewards grade.

It keeps its variables through an episode, and no process does: a call runs the earlier cells again, silently, and then
its own, in a fresh confined process (``rewards/confinement.py``).  A cell that hangs, exhausts its memory or kills its
process is not run again.  ``random`` is seeded, so that earlier cells give the values that they gave before; what reads
the clock or the system's randomness does not.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcore_rl.agents.tools import TOOLS_KEY, EpisodeTool, ToolResult, ToolSchema, schema_of_texts
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.ground.errors import ConfigError, Violation
from mcore_rl.rewards.code import WEAK, program_of
from mcore_rl.rewards.confinement import ConfinementError, Ending, run_confined, weaknesses

SCHEMA = schema_of_texts(
    "python",
    "Runs Python code and returns what it prints, and the value of its last line. Variables stay.",
    code="Python source",
)
NOTHING = "(no output)"
# Runs in the confined process.  Earlier cells are silent, and what they raise was said when they first ran.
_DRIVER = """
import ast, contextlib, io, json, random, sys
random.seed(0)
def run_cell(source, names):
    tree = ast.parse(source, "cell")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if value is not None:
            print(repr(value))
class Silence(io.TextIOBase):
    def write(self, text):
        return len(text)
def run_all(cells):
    names = {"__name__": "__main__", "open": open}
    for cell in cells[:-1]:
        with contextlib.redirect_stdout(Silence()), contextlib.redirect_stderr(Silence()):
            try:
                run_cell(cell, names)
            except BaseException:
                pass
    try:
        run_cell(cells[-1], names)
    except SystemExit:
        pass
    except BaseException as error:
        place, trace = getattr(error, "lineno", None), error.__traceback__
        while trace is not None:
            place = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "cell" else place
            trace = trace.tb_next
        line = "" if place is None else f"line {place}: "
        print(f"{line}{type(error).__name__}: {error}")
"""


class PythonInterpreter(EpisodeTool):
    """The tool ``python``.  code: the limits of a call; its time covers the earlier cells, too."""

    limits_itself = True

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema, code: CodeConfig | None = None) -> None:
        super().__init__(config, tool_schema)
        self._code = code or CodeConfig()
        self._cells: dict[str, list[str]] = {}
        self._turns: dict[str, asyncio.Lock] = {}  # the cells of an episode run one after another, as they were written
        self._room = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0))))

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """See ``EpisodeTool.create``."""
        self._cells[instance_id] = []
        self._turns[instance_id] = asyncio.Lock()

    @asynccontextmanager
    async def place(self, instance_id: str) -> AsyncIterator[None]:
        """See ``EpisodeTool.place``."""
        async with self._turns[instance_id], self._room:
            yield

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """See ``EpisodeTool.execute``."""
        cells = self._cells[instance_id]
        cell = program_of(str(parameters["code"]))
        result, is_kept = await asyncio.to_thread(run_cells, (*cells, cell), self._code)
        if is_kept:
            cells.append(cell)
        return result

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """See ``EpisodeTool.release``."""
        self._cells.pop(instance_id, None)
        self._turns.pop(instance_id, None)


def run_cells(cells: tuple[str, ...], code: CodeConfig) -> tuple[ToolResult, bool]:
    """(what the last of ``cells`` gives, whether it belongs to the state)."""
    # Its names are in a dict of their own; what a cell could do to the driver, it could do to itself.
    steps = [("execute", f"run_all(json.loads({json.dumps(json.dumps(cells))}))"), ("value", "True")]
    outcome = run_confined(_DRIVER, code, steps=steps)
    text = outcome.stdout.rstrip("\n")
    if outcome.ending is Ending.finished and outcome.values:  # a cell may end its process with exit code 0
        return ToolResult(text=text or NOTHING), True
    problem = f"it took longer than {code.timeout_s:g} s"
    if outcome.ending is not Ending.timeout:
        problem = f"the interpreter ended ({outcome.message or 'a limit of memory, output or processes'})"
    return ToolResult(text=f"{text}\nError: {problem}. The code has no effect.".lstrip("\n"), failed=True), False


def make(config: AgentConfig, code: CodeConfig) -> PythonInterpreter:
    """Make the tool of a run.  Raises ConfigError where programs cannot be confined."""
    try:
        weak_points = weaknesses()
    except ConfinementError as error:
        problem = f"no program can be run here: {error}"
        raise ConfigError([Violation(TOOLS_KEY, "python", problem, "Leave it out, or run elsewhere")]) from error
    if weak_points and not code.allow_weak_confinement:
        raise ConfigError([Violation(TOOLS_KEY, "python", "; ".join(weak_points), WEAK)])
    return PythonInterpreter({}, SCHEMA, code)
