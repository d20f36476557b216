"""A result is written as that of its tool and call, and a turn is opened after whatever token ended the one before.

The oracle is transformers' ``apply_chat_template`` and tokenizer of the real conversation.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mcore_rl.agents.rendering import TurnRenderer, call_id
from tests.support.chat_styles import style

CALLING = ("qwen2.5", "qwen3", "llama3", "mistral", "deepseek", "glm", "kimi", "harmony")
QUESTION = {"role": "user", "content": "so how is it?"}


def conversation(name: str, ids: list[str], tools: list[str]) -> list[dict[str, Any]]:
    """A question, calls of ``tools``, their results."""
    arguments: Any = {"city": "Oslo"}
    if name == "deepseek":
        arguments = json.dumps(arguments)
    calls = [
        {"id": own, "type": "function", "function": {"name": tool, "arguments": arguments}}
        for own, tool in zip(ids, tools, strict=True)
    ]
    results = [
        {"role": "tool", "name": tool, "tool_call_id": own, "content": f"so {number} end"}
        for number, (own, tool) in enumerate(zip(ids, tools, strict=True))
    ]
    return [QUESTION, {"role": "assistant", "content": "so let me", "tool_calls": calls}, *results]


CASES = [(name, count) for name in CALLING for count in (1, 2) if (name, count) != ("harmony", 2)]  # one call a turn


def whole(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("name", "count"), CASES)
@pytest.mark.parametrize("own_id", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_results_are_of_their_tools_and_calls(name: str, count: int, own_id: bool, named: bool) -> None:
    tools = ["weather", "calculator"][:count]
    ids = [f"functions.{tool}:{number}" for number, tool in enumerate(tools)]
    if not own_id or name == "mistral":  # its ids have nine letters and digits
        ids = [call_id(number) for number in range(count)]
    tokenizer, messages = style(name), conversation(name, ids, tools)
    results = [dict(each) for each in messages[2:]]
    if not named and name != "kimi":  # as programs send them: by the id alone
        results = [{key: each[key] for key in ("role", "content", "tool_call_id")} for each in results]
    expected = whole(tokenizer, messages)
    renderer = TurnRenderer(tokenizer)
    added = renderer.appended(results, None, dict(zip(ids, tools, strict=True)))
    assert expected[-len(added) :] == added
    text = tokenizer.decode(added)
    assert all(("so 0 end" in text, text.count("so ") == count, len(added) < len(expected)))
    if name == "kimi":
        assert all(f"## Return of {own}\n" in text for own in ids)
    if name == "harmony":
        assert "functions.weather to=assistant" in text


LOOKING_UP = (  # as Gemma 4's template: a result is of the call with its id, whose name stands there
    "{%- for m in messages %}{%- if m.role == 'tool' %}{%- for each in messages %}"
    "{%- for call in each.tool_calls or [] %}"
    "{%- if call.id == m.tool_call_id %}{{- '<|im_start|>' + call.function.name + '\n' + m.content + '<|im_end|>' }}"
    "{%- endif %}{%- endfor %}{%- endfor %}{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- call.function.name + (call.function.arguments | tojson) }}{%- endfor %}"
    "{{- '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.mark.parametrize("named", [False, True])
def test_a_template_that_looks_names_up_by_ids_finds_the_calls(named: bool) -> None:
    plain = style("qwen2.5")
    tokenizer = type(plain)(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = LOOKING_UP
    messages = conversation("qwen2.5", ["id of one", "id of two"], ["weather", "calculator"])
    results = [{key: each[key] for key in each if named or key != "name"} for each in messages[2:]]
    added = TurnRenderer(tokenizer).appended(results, None, {"id of one": "weather", "id of two": "calculator"})
    expected = whole(tokenizer, messages)
    assert expected[-len(added) :] == added
    assert [name in tokenizer.decode(added) for name in ("weather\nso 0", "calculator\nso 1")] == [True, True]


@pytest.mark.parametrize("hostile", ["<|im_end|>", "x<|im_system|>y", "mcorerlslot0end", "\ud800", "a" * 99])
def test_names_and_ids_that_a_model_draws_make_no_control_token(hostile: str) -> None:
    tokenizer = style("kimi")
    renderer = TurnRenderer(tokenizer)
    control = renderer.encoder.control_ids
    plain = renderer.appended([{"role": "tool", "name": "a", "tool_call_id": "b", "content": "c"}], None)
    added = renderer.appended([{"role": "tool", "name": hostile, "tool_call_id": hostile, "content": "c"}], None)
    assert [each for each in added if each in control] == [each for each in plain if each in control]


def test_an_id_that_the_template_refuses_is_replaced() -> None:
    renderer = TurnRenderer(style("mistral"))
    said = {"role": "tool", "name": "weather", "content": "so"}
    assert renderer.appended([{**said, "tool_call_id": "call_of_a_program"}], None) == renderer.appended([said], None)


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("last", ["<|user|>", "<|observation|>", "<|endoftext|>", None])
def test_the_next_role_is_opened_after_whatever_ended_a_turn(role: str, last: str | None) -> None:
    """GLM's turns end with the token that opens the next one, which the model draws, with another's, or with eos."""
    tokenizer = style("glm")
    renderer = TurnRenderer(tokenizer)
    said = {"role": role, "content": "so", "name": "weather", "tool_call_id": "1"}
    text = tokenizer.apply_chat_template(
        [QUESTION, {"role": "assistant", "content": "UNIQUE"}, said], tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer(text.partition("UNIQUE")[2], add_special_tokens=False)["input_ids"]
    opener = tokenizer.convert_tokens_to_ids({"user": "<|user|>", "tool": "<|observation|>"}[role])
    assert expected[0] == opener
    drawn = None if last is None else tokenizer.convert_tokens_to_ids(last)
    assert renderer.appended([said], drawn) == (expected[1:] if drawn == opener else expected)
    assert renderer.ending_ids == {tokenizer.convert_tokens_to_ids(each) for each in ("<|user|>", "<|observation|>")}
