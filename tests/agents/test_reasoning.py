"""A call that is only thought of is none; what a model without reasoning writes is its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.agents.reasoning import Reasoning, reasoning_of
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from tests.support.chat_styles import style

PLAIN, OPENED = Reasoning("<think>", "</think>", False), Reasoning("<think>", "</think>", True)


@pytest.mark.parametrize(
    ("reasoning", "raw", "answer"),
    [
        (PLAIN, "<think>CALL</think>so", "so"),
        (PLAIN, "<think>CALL</think>so CALL", "so CALL"),
        (PLAIN, "<think>CALL", ""),  # cut off, or it ended its turn within a thought
        (PLAIN, "CALL", "CALL"),
        (PLAIN, "\n<think>a</think>CALL<think>b</think>c", "\nCALLc"),
        (PLAIN, "a</think>b", "b"),  # the prompt opened it after all
        (PLAIN, "a</think>b<think>c</think>d", "bd"),
        (OPENED, "CALL</think>so", "so"),
        (OPENED, "CALL", ""),
        (OPENED, "<think>CALL</think>so", "so"),
        (OPENED, "", ""),
    ],
)
def test_thoughts_are_told_from_answers(reasoning: Reasoning, raw: str, answer: str) -> None:
    assert reasoning.answer(raw) == answer


def test_models_that_have_thoughts() -> None:
    assert reasoning_of(style("qwen3")) == PLAIN
    assert reasoning_of(style("qwen3"), {"enable_thinking": False}) == PLAIN, "the prompt closes it again"
    assert reasoning_of(style("qwen2.5")) is None and reasoning_of(style("llama3")) is None
    thinking = type(style("qwen3"))(tokenizer_object=style("qwen3").backend_tokenizer)
    thinking.chat_template = (
        "{{ messages[0].content }}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    assert reasoning_of(thinking) == OPENED


def test_a_call_that_is_only_thought_of_is_not_run(tmp_path: Path) -> None:
    """By whichever parser; the program of a user is told the thought as before."""
    path = tmp_path / "parser.py"
    path.write_text("def calls(text):\n    return [{'name': 'calculator', 'arguments': {}}] * text.count('CALL')\n")
    config = AgentConfig(tools=["calculator"], tool_parser=f"{path}:calls")
    for name, thought in (("qwen3", 0), ("qwen2.5", 1)):
        runner = AgentRunner(config, CodeConfig(), style(name))
        try:
            read = runner._read_calls
            assert len(read("<think>CALL</think>so").calls) == thought
            assert len(read("<think>CALL").calls) == thought
            assert len(read("<think>a</think>CALL").calls) == 1
            schemas = [{"type": "function", "function": {"name": "calculator"}}]
            assert len(runner._read_calls_of(schemas, "<think>CALL</think>so").calls) == thought
        finally:
            runner.close()
