"""Tools of the configuration: all that is wrong with them is said at once, with the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.function_process import FunctionProcesses
from mcore_rl.agents.tool_loading import BUILT_IN, load_tools
from mcore_rl.agents.tools import EpisodeTool, ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.ground.errors import ConfigError
from tests.support.awaited import awaited

YAML = """
tools:
  - class_name: {kind}
    config: {{type: native, step: 2}}
    tool_schema:
      type: function
      function:
        name: count
        description: counts
        parameters: {{type: object, properties: {{by: {{type: {type}}}}}, required: []}}
"""


class Counting(EpisodeTool):
    """A class as a user writes it."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[str, float, dict]:
        return str(self.config["step"] * parameters["by"]), 0.5, {}


class Incomplete:
    """Lacks all of it."""

    create = None


def load(**settings: Any) -> ToolSet:
    return load_tools(AgentConfig(**settings), CodeConfig(), FunctionProcesses(1, 5.0), [])


def test_the_built_in_tools_have_their_names(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    tools = load(tools=list(BUILT_IN), search_corpus=str(tmp_path))
    assert list(tools.tools) == list(BUILT_IN) == [schema["function"]["name"] for schema in tools.schemas]


@awaited
async def test_a_class_in_verls_form(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(YAML.format(kind=f"{__name__}.Counting", type="integer"))
    tools = load(tools=["calculator"], tool_config_path=str(path))
    assert list(tools.tools) == ["calculator", "count"]
    assert await tools.tools["count"].execute("e", {"by": 4}) == ("8", 0.5, {})


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tools=["calc", f"{tmp_path}/no.py:f", "calculator", "calculator"])
    text = str(caught.value)
    assert text.startswith("3 problems") and text.count("rollout.agent.tools=") == 3
    assert "there is no such tool" in text and "there is no Python file" in text and "another tool calculator" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tools: 3", "is no list of tools"),
        ("a: [", "is no list of tools"),
        ("tools: [{class_name: a.B}]", "has no tool_schema with function.name"),
        (YAML.format(kind="no.such.Class", type="integer"), "cannot be imported: ModuleNotFoundError"),
        (YAML.format(kind="os.path.Nothing", type="integer"), "cannot be imported: KeyError"),
        (YAML.format(kind=f"{__name__}.Incomplete", type="integer"), "has no create, execute, calc_reward, release"),
        (YAML.format(kind=f"{__name__}.Counting", type="whole"), "parameters: "),
    ],
)
def test_a_file_that_names_no_tools_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rollout\.agent\.tool_config_path") as caught:
        load(tool_config_path=str(path))
    assert said in str(caught.value)
