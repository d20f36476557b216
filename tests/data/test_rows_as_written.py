"""What is trained is what the row says: tokens and mask are those of the chat template over the row as it was written.

The oracle is transformers: ``apply_chat_template`` over the row's own Python values, its tokenizer, and the tokens of
special ends by their names.  Nothing here comes from what reads files.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.data import DataConfig, SftDataConfig, TrainedTurns
from mcore_rl.data.conversations import ConversationSet
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.rows import read_files
from mcore_rl.ground.errors import DataError
from tests.support.chat_styles import joining, style
from tests.support.prompt_files import write_as

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "says how it is",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "round",
            "description": "rounds",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "digits": {"type": "integer", "default": 2}},
            },
        },
    },
]
# Tokens at which the families' engines stop besides eos (their generation_config.json).
ENDS = {"glm": ["<|user|>", "<|observation|>"], "phi3": ["<|end|>"], "harmony": ["<|call|>"]}
END_OF = {"glm": "<|user|>"}  # what the option says
TEXT_ARGUMENTS = ("deepseek",)  # the template joins texts, and refuses objects
CALLING = ("qwen2.5", "qwen3", "llama3", "deepseek", "glm", "kimi")
TAGGED = ("qwen2.5", "glm", "kimi")
JOINING = ("qwen2.5", "llama3")


def calling(number: int, name: str, arguments: Any) -> list[dict[str, Any]]:
    return [
        {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    ]


def conversation(spelled: Any) -> list[dict[str, Any]]:
    """Two calls with different arguments, one of them null, and an answer that begins with a line end."""
    return [
        {"role": "user", "content": "How is it in Oslo, in whole numbers?"},
        {"role": "assistant", "content": "so", "tool_calls": calling(0, "weather", spelled({"city": "Oslo ø"}))},
        {"role": "tool", "name": "weather", "tool_call_id": "functions.weather:0", "content": "7.5"},
        {"role": "assistant", "content": "so", "tool_calls": calling(1, "round", spelled({"x": 7.5, "digits": 0}))},
        {"role": "tool", "name": "round", "tool_call_id": "functions.round:1", "content": "8"},
        {"role": "assistant", "content": "\n8 degrees"},
    ]


def unescaped(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def tagged(template: str) -> str:
    """``template`` with tags around what the assistant says and, where the template writes one, its end."""
    before, begin, rest = template.partition("message.role == 'assistant' %}")
    assert begin
    opening, end = {
        "im_start": ("{{- '<|im_start|>assistant' }}", "{{- '<|im_end|>\\n' }}"),
        "im_assistant": ("{{- '<|im_assistant|>assistant<|im_middle|>' }}", "{{- '<|im_end|>' }}"),
        "glm": ("{{- '<|assistant|>' }}", "{%- elif message.role == 'tool' %}"),
    }[next(key for key in ("im_start", "im_assistant", "glm") if key == "glm" or f"<|{key}|>assistant" in rest)]
    inner, _, after = rest.partition(end)
    head, opens, said = inner.partition(opening)
    assert opens
    if end.startswith("{{"):
        return f"{before}{begin}{head}{opening}{{%- generation -%}}{said}{end}{{%- endgeneration -%}}{after}"
    return f"{before}{begin}{head}{opening}{{%- generation -%}}{said}{{%- endgeneration -%}}{end}{after}"


def tokenizer_of(name: str, with_tags: bool) -> Any:
    plain = style(name)
    if not with_tags:
        return plain
    made = type(plain)(tokenizer_object=plain.backend_tokenizer, eos_token=plain.eos_token)
    made.chat_template = tagged(plain.chat_template)
    return made


def expected(
    name: str, messages: list[dict[str, Any]], tools: Any, places: list[int], ends: set[int]
) -> tuple[list[int], list[bool]]:
    """transformers' tokens of each prompt and of what follows it, up to the end, which alone is trained."""
    tokenizer = style(name)

    def text(upto: int, opens: bool) -> str:
        more = {"tools": tools} if tools else {}
        given: dict[str, Any] = {"tokenize": False, "add_generation_prompt": opens, **more}
        return str(tokenizer.apply_chat_template(messages[:upto], **given))

    whole, tokens, mask, done = text(len(messages), False), list[int](), list[bool](), 0
    for place in places:
        prompt, through = text(place, True), text(place + 1, False)
        assert whole.startswith(prompt)
        before = tokenizer(whole[done : len(prompt)], add_special_tokens=False)["input_ids"]
        drawn = tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
        stop = next((n for n, token in enumerate(drawn) if token in ends), None)
        own = drawn if stop is None else drawn[: stop + 1]
        if stop is None:
            assert place == len(messages) - 1
            own = [*own, tokenizer.convert_tokens_to_ids(END_OF[name])]
        tokens += [*before, *own]
        mask += [False] * len(before) + [True] * len(own)
        ended = tokenizer.convert_ids_to_tokens(own[-1])
        at = whole.find(ended, len(prompt))
        done = len(whole) if at < 0 else at + len(ended)
        assert len(through) <= len(whole)
    rest = tokenizer(whole[done:], add_special_tokens=False)["input_ids"]
    return tokens + rest, mask + [False] * len(rest)


def read(path: Path, tokenizer: Any, name: str, **options: Any) -> tuple[list[int], list[bool]]:
    config = SftDataConfig(messages_key="messages", max_length=4096, end_of_turn=END_OF.get(name), **options)
    ends = {tokenizer.convert_tokens_to_ids(each) for each in ENDS.get(name, ())}
    rows = ConversationSet.load([path], config, tokenizer, max_samples=None, title="data.train_files", ends=ends)
    return list(rows[len(rows) - 1].tokens), list(rows[len(rows) - 1].mask)


def stops(name: str) -> set[int]:
    tokenizer = style(name)
    return {tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(each) for each in ENDS.get(name, ()))}


# (style, arguments are text, tags, tools, file)
CASES = [
    case
    for case in product(CALLING, (False, True), (False, True), (False, True), ("parquet", "jsonl"))
    if not case[2] or case[0] in TAGGED
]


@pytest.mark.parametrize(("name", "as_text", "tags", "tools", "kind"), CASES)
def test_tokens_and_mask_are_those_of_the_template(
    tmp_path: Path, name: str, as_text: bool, tags: bool, tools: bool, kind: str
) -> None:
    spelled = json.dumps if as_text else dict
    messages, given = conversation(spelled), SCHEMAS if tools else None
    other = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]  # it has neither
    rows = [{"messages": other, "tools": None}, {"messages": messages, "tools": given}]
    as_read = (json.dumps if as_text else unescaped) if name in TEXT_ARGUMENTS else dict
    said = conversation(as_read)
    if name == "qwen3":  # it drops the thoughts of earlier turns, and writes an empty one into the last
        places, options = [5], {"trained_turns": TrainedTurns.last}
    else:
        places, options = [1, 3, 5], {}
    path = write_as(tmp_path / f"c.{kind}", rows)
    assert read(path, tokenizer_of(name, tags), name, **options) == expected(name, said, given, places, stops(name))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_null_that_a_line_says_stays_and_one_that_nobody_said_goes(tmp_path: Path, kind: str) -> None:
    messages = conversation(dict)
    messages[3]["tool_calls"][0]["function"]["arguments"] = {"x": 7.5, "digits": None}
    said = conversation(dict)
    said[3]["tool_calls"][0]["function"]["arguments"] = {"x": 7.5} | ({"digits": None} if kind == "jsonl" else {})
    path = write_as(tmp_path / f"c.{kind}", [{"messages": messages}])
    assert read(path, style("qwen2.5"), "qwen2.5") == expected("qwen2.5", said, None, [1, 3, 5], stops("qwen2.5"))
    assert '"city": "Oslo ø"}' in style("qwen2.5").decode(read(path, style("qwen2.5"), "qwen2.5")[0])


def test_lines_whose_calls_have_one_argument_of_two_types_are_read(tmp_path: Path) -> None:
    messages = conversation(dict)
    messages[3]["tool_calls"][0]["function"]["arguments"] = {"city": ["Oslo", 2]}
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert read(path, style("qwen2.5"), "qwen2.5") == expected("qwen2.5", messages, None, [1, 3, 5], stops("qwen2.5"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tool_calls": calling(0, "weather", '{"city": ')}, "message 1 calls weather with arguments that are no JSON"),
        ({"tool_calls": calling(0, "weather", "[1]")}, "message 1 calls weather with arguments that are no JSON"),
        ({"tool_calls": "[1]"}, "message 1 has tool_calls that are no list of calls"),
        ({"reasoning_content": "so"}, "message 1 has reasoning_content, which the chat template does not read"),
        ({"train": False}, "message 1 has train, which is not read. Write weight, 0 or 1"),
        ({"weight": 0.5}, "message 1 has weight 0.5. Write 0 or 1"),
        ({"weight": 0, "loss_mask": 1}, "message 1 has a weight and a loss_mask that differ"),
        ({"role": "user", "loss_mask": 1}, "message 1 is of the user and has loss_mask 1"),
    ],
)
def test_what_would_be_trained_otherwise_than_the_row_says_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"} | change]
    messages += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    with pytest.raises(DataError) as caught:
        read(write_as(tmp_path / "c.parquet", [{"messages": messages}]), style("qwen2.5"), "qwen2.5")
    assert f"c.parquet:0: {said}" in str(caught.value)


# As axolotl, LLaMA-Factory, ms-swift, OpenAI's and others' files spell it.
UNREAD = (
    "train",
    "trainable",
    "training",
    "train_on_turn",
    "train_detail",
    "loss",
    "loss_weight",
    "loss_scale",
    "masked",
)


@pytest.mark.parametrize("key", UNREAD)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_other_spellings_of_what_is_trained_are_refused(tmp_path: Path, key: str, role: str) -> None:
    messages = [message | ({key: False} if message["role"] == role else {}) for message in SAID]
    place = {"user": 0, "assistant": 1}[role]
    with pytest.raises(DataError, match=f"message {place} has {key}, which is not read. Write weight, 0 or 1"):
        read(write_as(tmp_path / "c.parquet", [{"messages": messages}]), style("qwen2.5"), "qwen2.5")


def test_a_template_without_calls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="message 1 has tool_calls, which the chat template does not read"):
        read(write_as(tmp_path / "c.parquet", [{"messages": conversation(dict)}]), style("phi3"), "phi3")


@pytest.mark.parametrize("key", ["weight", "loss_mask"])
@pytest.mark.parametrize("zero", [0, False, 0.0])
@pytest.mark.parametrize("tags", [False, True])
def test_a_turn_of_weight_0_is_not_trained(tmp_path: Path, key: str, zero: Any, tags: bool) -> None:
    plain = conversation(dict)
    weighed = [{**message, key: zero} if place == 3 else message for place, message in enumerate(plain)]
    path = write_as(tmp_path / "c.parquet", [{"messages": weighed}])
    made = read(path, tokenizer_of("qwen2.5", tags), "qwen2.5")
    assert made == expected("qwen2.5", plain, None, [1, 5], stops("qwen2.5"))


@pytest.mark.parametrize("tags", [False, True])
def test_the_last_turn_alone(tmp_path: Path, tags: bool) -> None:
    path = write_as(tmp_path / "c.jsonl", [{"messages": conversation(dict)}])
    made = read(path, tokenizer_of("qwen2.5", tags), "qwen2.5", trained_turns=TrainedTurns.last)
    assert made == expected("qwen2.5", conversation(dict), None, [5], stops("qwen2.5"))
    weighed = conversation(dict)
    weighed[5]["weight"] = 0
    path = write_as(tmp_path / "d.jsonl", [{"messages": weighed}])
    with pytest.raises(DataError, match="nothing of it is trained"):
        read(path, tokenizer_of("qwen2.5", tags), "qwen2.5", trained_turns=TrainedTurns.last)


SAID = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def runs(name: str, made: tuple[list[int], list[bool]]) -> list[str]:
    """The text of each run of trained tokens."""
    texts = [""]
    for token, trained in zip(*made, strict=True):
        if trained:
            texts[-1] += style(name).decode([token])
        elif texts[-1]:
            texts.append("")
    return [text for text in texts if text]


def test_a_turn_ends_with_a_token_at_which_engines_stop(tmp_path: Path) -> None:
    path = write_as(tmp_path / "c.parquet", [{"messages": SAID}])
    assert runs("phi3", read(path, style("phi3"), "phi3")) == ["b<|end|>", "d<|end|>"], "nobody draws <|endoftext|>"
    phi3 = style("phi3")
    parted = type(phi3)(tokenizer_object=phi3.backend_tokenizer, eos_token="<|endoftext|>")
    parted.chat_template = (  # as TRL's phi3_training.jinja: the end of all is a part of its own
        "{%- for m in messages %}{{- '<|' + m.role + '|>\\n' }}{%- if m.role == 'assistant' %}{%- generation %}"
        "{{- m.content + '<|end|>\\n' }}{%- endgeneration %}{%- else %}{{- m.content + '<|end|>\\n' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}"
        "{%- generation %}{{- eos_token }}{%- endgeneration %}{%- endif %}"
    )
    assert runs("phi3", read(path, parted, "phi3")) == ["b<|end|>", "d<|end|>"]
    assert runs("phi3", read(path, parted, "phi3", trained_turns=TrainedTurns.last)) == ["d<|end|>"]
    weighed = [message | ({"weight": 0} if place == 3 else {}) for place, message in enumerate(SAID)]
    assert runs("phi3", read(write_as(tmp_path / "w.parquet", [{"messages": weighed}]), parted, "phi3")) == ["b<|end|>"]
    assert runs("glm", read(path, style("glm"), "glm")) == ["\nb<|user|>", "\nd<|user|>"], "the other role's opener"
    config = SftDataConfig(messages_key="messages")
    glm = style("glm")
    with pytest.raises(DataError, match=r"message 1 ends with no token at which engines stop \(<\|endoftext\|>\)"):
        ConversationSet.load([path], config, glm, max_samples=None, title="x")
    users = {glm.convert_tokens_to_ids("<|user|>")}
    with pytest.raises(DataError, match=r"message 3 ends with no token .* data.end_of_turn=TOKEN"):
        ConversationSet.load([path], config, glm, max_samples=None, title="x", ends=users)
    qwen = style("qwen2.5")
    base = type(qwen)(tokenizer_object=qwen.backend_tokenizer, eos_token="<|endoftext|>")
    base.chat_template = qwen.chat_template
    number = qwen.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(DataError, match=rf"end with <\|im_end\|>, write {number} into eos_token_id of generation_conf"):
        ConversationSet.load([path], config, base, max_samples=None, title="x")


def test_what_opens_a_turn_is_not_trained_where_earlier_turns_are_written_differently(tmp_path: Path) -> None:
    """As in TRL's gptoss_training.jinja and deepseekv3_training.jinja, whose tags hold the opening of the turn."""
    qwen = style("qwen2.5")
    thoughtless = type(qwen)(tokenizer_object=qwen.backend_tokenizer, eos_token="<|im_end|>")
    thoughtless.chat_template = (  # the last turn of all keeps what it thought; its prompt is nowhere in the text
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- generation %}{{- '<|im_start|>assistant\n' }}"
        "{{- (m.thinking + '/' if m.thinking and loop.last) ~ m.content + '<|im_end|>' }}{%- endgeneration %}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    call = {"role": "assistant", "content": "b", "thinking": "why"}
    messages = [SAID[0], call, call | {"content": "e"}, *SAID[2:]]
    path = write_as(tmp_path / "c.jsonl", [{"messages": messages}])
    assert runs("qwen2.5", read(path, thoughtless, "qwen2.5")) == ["b<|im_end|>", "e<|im_end|>", "d<|im_end|>"]
    opened = type(qwen)(tokenizer_object=qwen.backend_tokenizer, eos_token="<|im_end|>")
    opened.chat_template = thoughtless.chat_template.replace(
        "assistant\n' }}{%- endif %}", "assistant\n' }}{{- '<think>\n' }}{%- endif %}"
    )
    assert runs("qwen2.5", read(path, opened, "qwen2.5")) == ["b<|im_end|>", "e<|im_end|>", "d<|im_end|>"]


def test_an_end_behind_which_turns_go_on_is_not_recommended_alone(tmp_path: Path) -> None:
    """gpt-oss's <|end|> ends a thought too: engines that stop there draw no answer."""
    path = write_as(tmp_path / "c.parquet", [{"messages": SAID}])
    tagged_harmony = type(style("harmony"))(
        tokenizer_object=style("harmony").backend_tokenizer, eos_token=style("harmony").eos_token
    )
    tagged_harmony.chat_template = (
        "{%- for m in messages %}{{- '<|start|>' + m.role }}{%- if m.role == 'assistant' %}{%- generation %}"
        "{{- '<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}{%- endgeneration %}"
        "{%- else %}{{- '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
    )
    with pytest.raises(DataError, match=r"message 1 .* go on behind it .*: weight 0, or data.trained_turns=last"):
        read(path, tagged_harmony, "harmony")
    made = read(path, tagged_harmony, "harmony", trained_turns=TrainedTurns.last)
    assert runs("harmony", made) == ["<|message|>d<|return|>"]


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "deepseek", "mistral", "mistral-legacy", "gemma", "phi3"])
@pytest.mark.parametrize("answer", ["\n\nso", "  so", " \n so", "so"])
def test_a_prompt_has_the_tokens_that_a_rollout_gives_it(tmp_path: Path, name: str, answer: str) -> None:
    """Whatever the answer begins with, if the template keeps it."""
    tokenizer = joining(name) if name in JOINING else style(name)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    tokens, mask = read(write_as(tmp_path / "c.jsonl", [{"messages": messages}]), tokenizer, name)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokens[: len(asked)] == asked and mask.index(True) == len(asked)
    if name == "qwen2.5" and answer[0] == "\n":
        assert tokenizer(whole, add_special_tokens=False)["input_ids"][: len(asked)] != asked, "else it shows nothing"
    assert tokenizer.decode(tokens) == tokenizer.decode(tokenizer(whole, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("answer", ["\nwhy\n</think>\n\nso", "\n\n\nwhy</think>so", "why\n</think>\n\nso"])
def test_a_prompt_that_opens_a_thought_has_the_tokens_that_a_rollout_gives_it(tmp_path: Path, answer: str) -> None:
    """As Qwen3-Thinking's, whose prompts end with a line end, which the thought may begin with."""
    plain = joining("qwen2.5")
    tokenizer = type(plain)(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}{{- '<think>\n' }}"
        "{%- endif %}{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    tokens, mask = read(write_as(tmp_path / "c.jsonl", [{"messages": messages}]), tokenizer, "qwen2.5")
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokens[: len(asked)] == asked and mask.index(True) == len(asked)
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
    whole = tokenizer(tokenizer.decode(tokens), add_special_tokens=False)["input_ids"]
    assert (whole[: len(asked)] != asked) == answer.startswith("\n"), "else it shows nothing"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("within", [False, True])
def test_options_of_tools_are_those_of_the_row(tmp_path: Path, kind: str, within: bool) -> None:
    """``create(precision=None)`` would override a default that the row says nothing of."""
    one = {"calculator": {"create_kwargs": {"precision": 3, "unit": None}}}
    two = {"python": {"create_kwargs": {"files": {"a": "1"}, "env": [{"x": 1}, {"y": 2}]}}}
    rows = [
        {"prompt": [{"role": "user", "content": "1?"}]}
        | ({"extra_info": {"tools_kwargs": each}} if within else {"tools_kwargs": each})
        for each in (one, two)
    ]
    path = write_as(tmp_path / f"c.{kind}", rows)
    (file,) = read_files([path], [], max_samples=None, seed=1)
    columns = [file.record(index) for index in range(2)]
    options = [(each["extra_info"] if within else each)["tools_kwargs"] for each in columns]
    if kind == "parquet":
        one = {"calculator": {"create_kwargs": {"precision": 3}}}
    assert options == [one, two]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_lines_are_rows_as_they_were_written(tmp_path: Path, kind: str) -> None:
    """Also what graders read: a ground truth has no other row's fields, and 1 is not 1.0 because another is 2.5."""
    truths = [{"kwargs": [{"words": 5}, {"letter": "x"}], "n": 1}, {"n": 2.5, "deep": {"a": None}}, {"n": 3}]
    rows = [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": "1?"}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": index} | ({"hint": {"x": 1}} if index else {}),
        }
        for index, truth in enumerate(truths)
    ]
    del rows[2]["extra_info"]
    path = write_as(tmp_path / f"c.{kind}", rows)
    prompts = PromptSet.load([path], DataConfig(), style("qwen2.5"), max_samples=None, title="data.train_files")
    assert json.dumps([each.ground_truth for each in map(prompts.__getitem__, range(3))]) == json.dumps(truths)
    assert [prompts[index].extra_info for index in range(3)] == [{"index": 0}, {"index": 1, "hint": {"x": 1}}, {}]
