"""The interpreter keeps its variables through an episode, and nothing that a cell does reaches beyond its process."""

from __future__ import annotations

import json

import pytest

from mcore_rl.agents.episode_calls import EpisodeCalls
from mcore_rl.agents.toolbox.interpreter import NOTHING, SCHEMA, PythonInterpreter
from mcore_rl.agents.tools import ToolCall, ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from tests.support.awaited import awaited


async def outputs(*cells: str, timeout_s: float = 10.0) -> list[str]:
    tool = PythonInterpreter({}, SCHEMA, CodeConfig(timeout_s=timeout_s))
    await tool.create("e")
    return [(await tool.execute("e", {"code": cell})).text for cell in cells]


@awaited
async def test_variables_stay_and_output_is_of_the_last_cell() -> None:
    said = await outputs(
        "x = 3\nprint('hi')", "x * 2", "def f(y):\n    return y + x", "f(4)", "print(x); x = 9", "x", ""
    )
    assert said == ["hi", "6", NOTHING, "7", "3", "9", NOTHING]


@awaited
async def test_calls_of_one_turn_run_in_their_order() -> None:
    calls = EpisodeCalls(ToolSet({"python": PythonInterpreter({}, SCHEMA)}), AgentConfig(), "e", {})
    cells = ["import time\ntime.sleep(0.5)\nx = 1", "x += 1", "x"]
    said = await calls.run([ToolCall(name="python", arguments=json.dumps({"code": cell})) for cell in cells])
    assert [each.text for each in said] == [NOTHING, NOTHING, "2"]


@awaited
async def test_a_cell_that_raises_keeps_what_it_did_before() -> None:
    said = await outputs("a = 1\nraise ValueError('no')\na = 2", "a", "def f(:", "a\nb", "a")
    assert said[0] == "line 2: ValueError: no" and said[1] == said[4] == "1"
    assert "SyntaxError" in said[2] and said[3] == "line 2: NameError: name 'b' is not defined"


@awaited
async def test_random_numbers_are_the_same_when_cells_run_again() -> None:
    first, again, more = await outputs("import random\nx = random.random()\nx", "x", "random.random() == x")
    assert first == again and more == "False"


@pytest.mark.parametrize(
    ("cell", "said"),
    [("while True: pass", "took longer than 1 s"), ("import os\nos._exit(0)", "the interpreter ended"),
     ("import os\nos.kill(os.getpid(), 9)", "the interpreter ended")],
)  # fmt: skip
@awaited
async def test_a_cell_that_ends_its_process_is_not_run_again(cell: str, said: str) -> None:
    kept, wrong, after = await outputs("x = 1", cell, "x", timeout_s=1.0)
    assert kept == NOTHING and said in wrong and "has no effect" in wrong and after == "1"


@pytest.mark.parametrize(
    "cell",
    ["import os\nos.fork()", "open('/etc/passwd').read()", "import socket\nsocket.create_connection(('127.0.0.1', 1))",
     "b = bytearray(10**11)", "print('a' * 10**11)", "import subprocess\nsubprocess.run(['true'])"],
)  # fmt: skip
@awaited
async def test_confinement_holds(cell: str) -> None:
    said, after = await outputs(cell, "'alive'")
    assert "Error" in said and after == "'alive'"


@awaited
async def test_fences_around_code_are_taken_off() -> None:
    assert await outputs("```python\n1 + 1\n```") == ["2"]


@awaited
async def test_episodes_do_not_share_variables() -> None:
    tool = PythonInterpreter({}, SCHEMA)
    for name in ("a", "b"):
        await tool.create(name)
    await tool.execute("a", {"code": "x = 1"})
    assert "NameError" in (await tool.execute("b", {"code": "x"})).text
