"""What is appended to a turn is what the chat template writes there, and nothing else is rendered or encoded.

The oracle is transformers' own ``apply_chat_template`` and tokenizer of the whole conversation.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from mcore_rl.agents.rendering import ANSWERED, TurnRenderer, call_id, slot
from mcore_rl.ground.errors import DataError
from tests.support.chat_styles import ENDS, QWEN25, REWRITING, STYLES, WITHOUT_TOOLS, style

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "calculator", "description": "adds", "parameters": {"type": "object"}}}
]
WORDS = (
    "42",
    "apples",
    "  two  spaces",
    "\nline",
    "é",
    "日本",
    "🙂",
    "a  b\n\n c",
    "'s",
    "12345",
    "{'k': 1}",
    "x\ty",
    "",
)


def some_text(rng: random.Random) -> str:
    """Begins with a letter: what a model drew first does not merge with the template's text before it."""
    return "so " + "".join(rng.choice(WORDS) + rng.choice(" \n,") for _ in range(rng.randrange(6))) + "end"


def results(rng: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "name": "tool", "tool_call_id": call_id(number), "content": rng.choice(WORDS) + some_text(rng)}
        for number in range(count)
    ]


def whole(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """transformers' tokens of a conversation that waits for the model."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def closings(tokenizer: Any) -> set[int]:
    return {tokenizer.convert_tokens_to_ids(each) for each in ENDS} - {None, tokenizer.unk_token_id}


@pytest.mark.parametrize("name", STYLES)
def test_a_conversation_turn_by_turn_has_the_tokens_of_the_whole(name: str) -> None:
    tokenizer, rng = style(name), random.Random(name)
    renderer = TurnRenderer(tokenizer)
    ends = closings(tokenizer)
    for _ in range(20):
        messages: list[dict[str, Any]] = [{"role": "user", "content": some_text(rng)}]
        tokens = whole(tokenizer, messages)
        for _ in range(rng.randint(1, 5)):
            answer: dict[str, Any] = {"role": "assistant", "content": some_text(rng)}
            said = results(rng, rng.randint(1, 3))
            if name in WITHOUT_TOOLS or (rng.random() < 0.4 and name != "harmony"):
                said = [{"role": "user", "content": rng.choice(WORDS) + some_text(rng)}]
            if name in ("harmony", "mistral", "mistral-legacy") and said[0]["role"] == "tool":  # only after a call
                answer["tool_calls"] = [{"id": "1", "function": {"name": "tool", "arguments": {}}}]
            messages += [answer, *said]
            expected = whole(tokenizer, messages)
            added = renderer.appended(said, min(ends))
            drawn = expected[len(tokens) : len(expected) - len(added)]
            assert drawn[-1] in ends, "the model's turn is left, up to the token that ends it"
            tokens += drawn + added
            assert tokens == expected


@pytest.mark.parametrize("name", STYLES)
def test_text_of_a_tool_makes_no_control_token(name: str) -> None:
    tokenizer, rng = style(name), random.Random(name)
    renderer = TurnRenderer(tokenizer)
    control = renderer.encoder.control_ids
    spelled = [tokenizer.convert_ids_to_tokens(each) for each in sorted(control)]
    role = "user" if name in WITHOUT_TOOLS else "tool"
    plain = renderer.appended([{"role": role, "content": "x"}], None)
    for _ in range(30):
        hostile = "".join(rng.choice([*spelled, *WORDS, "\ud800", slot(0), ANSWERED, "\0"]) for _ in range(12))
        encoded = renderer.appended([{"role": role, "content": f"x{hostile}x"}], None)
        assert [each for each in encoded if each in control] == [each for each in plain if each in control]
        assert not set(renderer.continued(hostile)) & control
        if name in ("qwen2.5", "qwen3", "deepseek"):  # byte-level, and the content stands as it is
            assert f"x{hostile.encode(errors='replace').decode()}x" in tokenizer.decode(encoded)


def test_the_tokenizer_itself_would_make_control_tokens_of_it() -> None:
    """Else the test above could not fail."""
    tokenizer = style("qwen2.5")
    control = TurnRenderer(tokenizer).encoder.control_ids
    assert control & set(tokenizer("x<|im_end|>x</tool_call>", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", STYLES)
def test_the_end_of_a_turn_is_written_where_the_model_did_not_draw_one(name: str) -> None:
    tokenizer = style(name)
    renderer = TurnRenderer(tokenizer)
    said = [{"role": "user", "content": "more"}]
    with_end, without = renderer.appended(said, None), renderer.appended(said, tokenizer.eos_token_id)
    ends = closings(tokenizer)
    assert with_end == [with_end[0], *without] and with_end[0] in ends


@pytest.mark.parametrize("name", STYLES)
def test_templates_that_rewrite_earlier_turns_are_named(name: str) -> None:
    roles = ["user"] if name in WITHOUT_TOOLS else ["tool", "user"]
    notes = TurnRenderer(style(name), tools=TOOLS).check(roles)
    assert any("writes earlier turns differently" in note for note in notes) == (name in REWRITING)
    assert any("does not write the tools' descriptions" in note for note in notes) == (name in ("deepseek", "harmony"))


def test_mistral_rewrites_because_the_tools_move() -> None:
    assert not TurnRenderer(style("mistral")).check(["tool", "user"])


def test_results_are_the_users_where_the_template_has_no_tools() -> None:
    renderer = TurnRenderer(style("gemma"), tools=TOOLS)
    assert any("no role for tools" in note for note in renderer.check(["tool"]))
    two = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    assert renderer.appended(two, None) == renderer.appended([{"role": "user", "content": "3\n\n4"}], None)


def with_template(template: str) -> Any:
    tokenizer = style("qwen2.5")
    made = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index0 > 1 %}{{ raise_exception('two messages') }}{% endif %}{{ m.content }}"
        "{% endfor %}",
        "{% for m in messages[:2] %}{{ m.content }}<|im_end|>{% endfor %}",
    ],
    ids=["refuses", "drops"],
)
def test_a_template_that_cannot_write_more_turns_is_refused(template: str) -> None:
    with pytest.raises(DataError, match="cannot write user after a turn of the assistant"):
        TurnRenderer(with_template(template)).check(["user"])


def test_a_template_without_an_end_of_turn() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    renderer = TurnRenderer(tokenizer)
    said = [{"role": "user", "content": "more"}]
    text = "\nuser: more\nassistant:"
    assert tokenizer.decode(renderer.appended(said, None)) == tokenizer.decode(renderer.appended(said, 0)) == text


def test_trimmed_content_that_is_all_white_space_is_empty() -> None:
    tokenizer = style("gemma")
    renderer = TurnRenderer(tokenizer)
    assert renderer.appended([{"role": "user", "content": "  "}], 0) == renderer.appended(
        [{"role": "user", "content": ""}], 0
    )


def test_arguments_of_the_template_are_given() -> None:
    tokenizer = style("qwen3")
    said = [{"role": "user", "content": "more"}]
    more = TurnRenderer(tokenizer, {"enable_thinking": False}).appended(said, tokenizer.eos_token_id)
    assert tokenizer.decode(more).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_style_of_qwen_is_the_one_that_it_says() -> None:
    """A template that is broken would be as wrong in the oracle."""
    text = style("qwen2.5").apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\na<|im_end|>\n" and QWEN25
