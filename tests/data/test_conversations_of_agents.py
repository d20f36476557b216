"""Fine-tuning on conversations with tools trains the tokens that RL trains of the same, for every template.

The oracle is the agents' renderer: what an episode of the same turns consists of, drawn and appended.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.rendering import TurnRenderer, call_id
from mcore_rl.config.data import SftDataConfig
from mcore_rl.data.conversations import ConversationSet
from mcore_rl.ground.errors import DataError
from tests.support.chat_styles import WITHOUT_TOOLS, style
from tests.support.prompt_files import write

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
# They write earlier turns differently: reasoning is dropped, the tools move.  (style, whether there are tools)
REFUSED = [("qwen3", True), ("qwen3", False), ("mistral", True), ("mistral-legacy", True), ("harmony", True)]
PLAIN_TOO = ("qwen2.5", "llama3", "mistral-legacy", "deepseek", "gemma", "stripping")


def conversation(name: str) -> list[dict[str, Any]]:
    """A question, a call, its two results or what a user says, an answer, a doubt, an answer."""
    call = {"id": call_id(0), "type": "function", "function": {"name": "calculator", "arguments": {"expression": "2"}}}
    said: list[dict[str, Any]] = [{"role": "user", "content": "so what is 2 + 3?"}]
    if name in WITHOUT_TOOLS:
        said += [{"role": "assistant", "content": "so let me see"}, {"role": "user", "content": "end 5"}]
    else:
        said += [{"role": "assistant", "content": "so let me see", "tool_calls": [call]}]
        said += [{"role": "tool", "name": "calculator", "tool_call_id": call_id(0), "content": "5"}]
    said += [{"role": "assistant", "content": "it is 5."}, {"role": "user", "content": "sure? end"}]
    return [*said, {"role": "assistant", "content": "quite sure."}]


def trained(tmp_path: Path, name: str, tools: Any) -> tuple[list[int], list[bool]]:
    path = write(tmp_path / "c.parquet", [{"messages": conversation(name), "tools": tools}])
    config = SftDataConfig(messages_key="messages", max_length=4096)
    made = ConversationSet.load([path], config, style(name), max_samples=None, title="data.train_files")[0]
    return list(made.tokens), list(made.mask)


@pytest.mark.parametrize(
    ("name", "with_tools"),
    [(name, tools) for name in PLAIN_TOO for tools in (True, False) if (name, tools) not in REFUSED],
)
def test_the_masks_are_those_of_an_episode(tmp_path: Path, name: str, with_tools: bool) -> None:
    tokenizer, given = style(name), TOOLS if with_tools else None
    tokens, mask = trained(tmp_path, name, json.dumps(TOOLS) if with_tools else None)
    messages, renderer = conversation(name), TurnRenderer(tokenizer)
    more = {"tools": given} if given else {}
    text = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, **more)
    episode = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    of_model = [False] * len(episode)
    place = 1
    while place < len(messages):
        assert tokens[: len(episode)] == episode, "what stands before a turn"
        drawn = tokens[len(episode) :]
        count = next((n for n in range(len(drawn)) if not mask[len(episode) + n]), len(drawn))
        assert count and drawn[count - 1] in renderer.encoder.control_ids, "the turn, and the token that ends it"
        episode += drawn[:count]
        of_model += [True] * count
        others = messages[place + 1 :]
        others = others[: next((n for n, each in enumerate(others) if each["role"] == "assistant"), len(others))]
        if others:
            appended = renderer.appended(others, episode[-1])
            episode += appended
            of_model += [False] * len(appended)
        place += 1 + len(others)
    assert tokens[: len(episode)] == episode and mask[: len(episode)] == of_model
    assert not any(mask[len(episode) :]) and not tokenizer.decode(tokens[len(episode) :]).strip()
    assert sum(mask) > 12 and mask.count(False) > 12


@pytest.mark.parametrize(("name", "with_tools"), REFUSED)
def test_templates_that_write_earlier_turns_differently_are_refused(
    tmp_path: Path, name: str, with_tools: bool
) -> None:
    with pytest.raises(DataError, match="prefixes do not agree"):
        trained(tmp_path, name, TOOLS if with_tools else None)


def test_tools_stand_in_the_prompt_as_lists_and_as_json(tmp_path: Path) -> None:
    two = [*TOOLS, {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]
    as_lists, as_json = trained(tmp_path, "qwen2.5", TOOLS), trained(tmp_path, "qwen2.5", json.dumps(TOOLS))
    assert as_lists == as_json
    assert trained(tmp_path, "qwen2.5", [json.dumps(each) for each in two]) == trained(
        tmp_path, "qwen2.5", json.dumps(two)
    )
    text = style("qwen2.5").decode(as_lists[0])
    assert '"name": "calculator"' in text and text != style("qwen2.5").decode(trained(tmp_path, "qwen2.5", None)[0])


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("[", "is no JSON"),
        ('{"a": 1}', "is no list"),
        ("[1]", "has an entry without function"),
        ("[{}]", "has an entry"),
    ],
)
def test_what_is_no_tool_is_said(tmp_path: Path, tools: str, problem: str) -> None:
    with pytest.raises(DataError, match=f"c.parquet:0: tools {problem}"):
        trained(tmp_path, "qwen2.5", tools)
