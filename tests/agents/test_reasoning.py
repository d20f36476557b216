"""A call that is only thought of is none; what a model without reasoning writes is its answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.agents.reasoning import Reasoning, reasoning_of
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.session import Session
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.rollout.protocol import Sampling
from tests.support.awaited import awaited
from tests.support.chat_styles import style
from tests.support.drawn_turns import DrawnTurns, agent_row

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


@pytest.mark.parametrize(
    ("after", "raw", "answer"),
    [
        ("<|Assistant|><think>\n", "CALL", ""),
        ("<|tool_outputs_end|>", "CALL", "CALL"),  # nothing opened a thought there
        ("<|tool_outputs_end|>", "<think>CALL</think>so", "so"),
        ("<|tool_outputs_end|>", "CALL</think>so", "so"),
        ("<think>\n\n</think>\n\n", "CALL", "CALL"),
    ],
)
def test_a_turn_begins_within_a_thought_if_what_is_before_it_opens_one(after: str, raw: str, answer: str) -> None:
    assert OPENED.answer(raw, after) == PLAIN.answer(raw, after) == answer


@awaited
async def test_calls_after_a_result_are_read_where_only_the_first_turn_opens_a_thought(tmp_path: Path) -> None:
    """As DeepSeek-V3's template, whose turn goes on behind results without a new opening."""
    path = tmp_path / "parser.py"
    path.write_text("def calls(text):\n    return [{'name': 'calculator', 'arguments': {}}] * text.count('CALL')\n")
    deepseek = style("deepseek")
    tokenizer = type(deepseek)(tokenizer_object=deepseek.backend_tokenizer, eos_token=deepseek.eos_token)
    whole = deepseek.chat_template.rstrip().removesuffix("{%- endif %}")
    tokenizer.chat_template = whole + "{{- '<think>\n' }}{%- endif %}"
    assert reasoning_of(tokenizer) == OPENED
    runner = AgentRunner(AgentConfig(tools=["calculator"], tool_parser=f"{path}:calls"), CodeConfig(), tokenizer)
    try:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
        row = replace(agent_row(tokenizer), tokens=tuple(prompt["input_ids"]))
        engine = DrawnTurns(tokenizer, ["CALL", "so</think>CALL", "CALL"])
        one = Session(runner._parts, engine, row, "0.0/file:0", 3, 1, Sampling(max_tokens=400, seed=7))
        assert one.calls_of(await one.draw()) == [], "it thinks"
        one.append([{"role": "user", "content": "go on"}])
        assert len(one.calls_of(await one.draw())) == 1
        one.append([{"role": "tool", "content": "4"}])
        assert len(one.calls_of(await one.draw())) == 1, "nothing opened a thought behind the result"
    finally:
        runner.close()


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
