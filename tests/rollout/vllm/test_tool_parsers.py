"""Calls are read by vLLM's parsers of the families; what begins a call and cannot be read is told apart from none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mcore_rl.ground.errors import ConfigError
from mcore_rl.rollout.vllm.tool_parsers import ReadCalls, VllmCallReader
from tests.support.chat_styles import DEEPSEEK_CALL, DEEPSEEK_TOKENS, style
from tests.support.oracles import oracles

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ONE = (("add", '{"a": 1}'),)

REST = {"deepseek_v3": "", "mistral": "[{"}  # what vLLM leaves of a wrong call, where that is not all of it


@pytest.fixture
def mistrals_packages() -> Iterator[None]:
    """What vLLM's parser of Mistral's calls imports."""
    with oracles("ijson and mistral_common"):
        yield


@pytest.mark.parametrize(
    ("parser", "family", "one", "wrong"),
    [
        ("hermes", "qwen2.5", 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<tool_call>{"),
        ("llama3_json", "llama3", '{"name": "add", "parameters": {"a": 1}}', '<|python_tag|>{"name"'),
        ("deepseek_v3", "deepseek", DEEPSEEK_CALL, DEEPSEEK_TOKENS[8] + "add"),
        ("mistral", "mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "[TOOL_CALLS] [{"),
    ],
)  # fmt: skip
def test_the_families_forms(
    parser: str, family: str, one: str, wrong: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    if parser == "mistral":
        request.getfixturevalue("mistrals_packages")
    before = dict(os.environ)
    reader = VllmCallReader(parser, style(family), [ADD])
    assert dict(os.environ) == before, "importing vLLM leaves nothing in the environment of later processes"
    caplog.clear()  # the import itself may warn, of a triton without a CPU backend, say
    assert reader.read(one) == ReadCalls(calls=ONE, content="so\n" if parser == "hermes" else "")
    assert reader.read("no call") == ReadCalls(calls=(), content="no call")
    assert reader.read(wrong) == ReadCalls(calls=(), unreadable=True, content=REST.get(parser, wrong))
    assert not caplog.records, "a wrong call floods no log"


def test_several_calls_of_a_turn() -> None:
    text = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>' for n in (1, 2, 3))
    calls = VllmCallReader("hermes", style("qwen2.5"), [ADD]).read(text).calls
    assert calls == tuple(("add", f'{{"a": {n}}}') for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("parser", "family", "said"),
    [("nonesuch", "qwen2.5", "vLLM has no such parser. Write one of "),
     ("deepseek_v3", "qwen2.5", "cannot read with this model's tokenizer")],
)  # fmt: skip
def test_a_parser_that_does_not_fit_is_refused(parser: str, family: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.agent.tool_parser={parser}") as caught:
        VllmCallReader(parser, style(family), [ADD])
    assert said in str(caught.value)
