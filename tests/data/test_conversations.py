"""Conversations: what is trained is what the assistant says and the token that ends it, for every form of template."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from mcore_rl.config.data import SftDataConfig, Truncation
from mcore_rl.data.conversations import Conversation, ConversationSet
from mcore_rl.ground.errors import DataError
from tests.support import prompt_files
from tests.support.prompt_files import user, write

TOKENIZER = prompt_files.tokenizer()
TITLE = "data.train_files"
TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "1 + 1 = 2\n#### 2"},
    {"role": "user", "content": "héllo 🙂 again\n"},
    {"role": "assistant", "content": "日本 2"},
]


def load(*paths: Path, template: str | None = None, max_samples: int | None = None, **options: Any) -> ConversationSet:
    tokenizer = prompt_files.tokenizer(template)
    return ConversationSet.load(paths, SftDataConfig(**options), tokenizer, max_samples=max_samples, title=TITLE)


def refusal(*paths: Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        load(*paths, **options)
    assert str(caught.value).startswith(f"{TITLE}: ")
    return caught.value


def trained(conversation: Conversation) -> list[str]:
    """The text of every run of trained tokens."""
    assert len(conversation.tokens) == len(conversation.mask)
    pairs = zip(conversation.mask, conversation.tokens, strict=True)
    runs = [(mask, [token for _, token in run]) for mask, run in groupby(pairs, key=lambda pair: pair[0])]
    return [TOKENIZER.decode(tokens) for mask, tokens in runs if mask]


def test_conversations_that_ask_for_more_than_text_are_refused(tmp_path: Path) -> None:
    rows = [{"chat": TURNS, "tools": tools} for tools in ([], [{"name": "calc"}], None, [{"name": "calc"}])]
    said = "x.parquet:3: tools has an entry without function. Write [{type: function, function: {name"
    assert said in str(refusal(write(tmp_path / "x.parquet", rows), messages_key="chat"))
    assert len(load(write(tmp_path / "y.parquet", rows[::2]), messages_key="chat")) == 2


def test_conversations_with_pictures_are_refused(tmp_path: Path) -> None:
    """In a column of any name, and within a content, which jsonl can hold beside texts."""
    files = write(tmp_path / "x.parquet", [{"chat": TURNS, "figure": {"bytes": b"x", "path": None}}])
    assert "figure: pictures and sounds are not supported, and 1 would" in str(refusal(files, messages_key="chat"))
    seen = [{"role": "user", "content": [{"type": "text", "text": "1?"}, {"type": "image"}]}, *TURNS[2:3]]
    lines = tmp_path / "y.jsonl"
    lines.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in (TURNS, seen)))
    said = "message 0 has a part of type image, and text alone is read. Leave the row out"
    assert f"y.jsonl:1: {said}" in str(refusal(lines, messages_key="chat"))


@pytest.mark.parametrize("template", [None, prompt_files.CHATML, prompt_files.TAGGED])
def test_the_assistant_s_turns_and_their_ends_are_trained(tmp_path: Path, template: str | None) -> None:
    path = write(tmp_path / "x.parquet", [{"chat": TURNS}, {"chat": TURNS[:3]}])
    conversations = load(path, template=template, messages_key="chat")
    assert trained(conversations[0]) == ["1 + 1 = 2\n#### 2<|end|>", "日本 2<|end|>"]
    assert trained(conversations[1]) == ["1 + 1 = 2\n#### 2<|end|>"]
    assert conversations[0].id == "x.parquet:0"
    whole = prompt_files.tokenizer(template).apply_chat_template(TURNS, tokenize=False)
    assert TOKENIZER.decode(conversations[0].tokens) == whole
    assert conversations.lengths == [len(conversations[0].tokens), len(conversations[1].tokens)]
    assert conversations.describe().startswith(
        f"{TITLE}: 2 conversations of {min(conversations.lengths)} to {max(conversations.lengths)} tokens"
    )


def test_the_untrained_beginning_is_the_prompt_of_the_rollout(tmp_path: Path) -> None:
    conversation = load(write(tmp_path / "x.parquet", [{"chat": TURNS[:3]}]), messages_key="chat")[0]
    asked = TOKENIZER.apply_chat_template(TURNS[:2], add_generation_prompt=True, return_dict=False)
    assert conversation.mask == (False,) * len(asked) + (True,) * (len(conversation.tokens) - len(asked))
    assert list(conversation.tokens[: len(asked)]) == asked


def test_a_tokenizer_that_begins_texts_begins_no_conversation_twice(tmp_path: Path) -> None:
    path, options = (
        write(tmp_path / "x.parquet", [{"prompt": "1", "response": "2"}]),
        {"max_samples": None, "title": "x"},
    )
    conversations = ConversationSet.load([path], SftDataConfig(), prompt_files.beginning_tokenizer(), **options)
    assert conversations[0] == load(path)[0]


def test_a_turn_that_no_token_ends_is_refused_or_ends_as_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"prompt": "1 + 1?", "response": "2"}])
    said = str(refusal(path, template=prompt_files.BARE))
    assert "x.parquet:0: message 1 ends with no token at which engines stop (<|end|>)" in said
    assert "data.end_of_turn=TOKEN" in said
    assert trained(load(path, template=prompt_files.BARE, end_of_turn="<|end|>")[0]) == ["2\n<|end|>"]
    trimming = prompt_files.tokenizer(prompt_files.BARE)  # its offsets leave out white space, as Llama 3's do
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # type: ignore[attr-defined]
    config = SftDataConfig(end_of_turn="<|end|>")
    conversations = ConversationSet.load([path], config, trimming, max_samples=None, title=TITLE)
    assert trained(conversations[0])[0].startswith("2"), "the space before it is the template's"
    with pytest.raises(DataError, match="is no token of the tokenizer"):
        load(path, end_of_turn="<|no|>")


def test_prompts_as_messages_or_text_with_responses_also_inside_of_columns(tmp_path: Path) -> None:
    rows = [{"prompt": user("1 + 1?"), "text": "1 + 1?", "response": "2", "extra": {"answer": "two", "q": {"r": "2"}}}]
    path = write(tmp_path / "x.parquet", rows)
    first = load(path)[0]
    assert TOKENIZER.decode(first.tokens) == "<|begin|><|user|>1 + 1?<|end|><|assistant|>2<|end|>"
    assert load(path, prompt_key="text")[0] == first
    assert load(path, response_key="extra.q.r")[0] == first
    assert trained(load(path, response_key="extra.answer")[0]) == ["two<|end|>"]
    dotted = write(tmp_path / "y.parquet", [rows[0] | {"extra.answer": "whole name"}])
    assert trained(load(dotted, response_key="extra.answer")[0]) == ["whole name<|end|>"]


def test_a_template_that_rewrites_the_past_is_refused_with_the_row(tmp_path: Path) -> None:
    thoughtful = [dict(turn) for turn in TURNS]
    thoughtful[2]["content"] = "hm</think>2"
    path = write(tmp_path / "x.parquet", [{"chat": TURNS}, {"chat": thoughtful}, {"chat": thoughtful[:3]}])
    (problem,) = refusal(path, template=prompt_files.FORGETFUL, messages_key="chat").problems
    assert problem.startswith("x.parquet:1: the chat template's prefixes do not agree: message 2")
    assert "{% generation %}" in problem
    only = write(tmp_path / "y.parquet", [{"chat": thoughtful[:3]}])
    assert trained(load(only, template=prompt_files.FORGETFUL, messages_key="chat")[0]) == ["hm</think>2<|end|>"]


def test_parts_that_end_within_a_token_train_nothing_beyond_them(tmp_path: Path) -> None:
    """What stands behind this template's part is no end of a turn, and ' ' is no token of its own before a word."""
    template = "<|user|>1{% generation %}2<|end|> apples {% endgeneration %}cards<|end|>"
    path = write(tmp_path / "x.parquet", [{"prompt": "1", "response": "2"}])
    said = str(refusal(path, template=template))
    assert "x.parquet:0: message 1 has text behind <|end|>, at which engines stop" in said
    said = str(refusal(path, template=template.replace("<|end|> apples ", " apples ")))
    assert "x.parquet:0: message 1 ends with no token at which engines stop" in said
    conversation = load(path, template="<|user|>1{% generation %}2{% endgeneration %}<|end|>cards")[0]
    assert trained(conversation) == ["2<|end|>"], "the end is trained where the mark leaves it out"
    assert TOKENIZER.decode(conversation.tokens) == "<|user|>12<|end|>cards"


def test_tags_decide_and_no_token_spans_their_beginning(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"prompt": "1", "response": "2"}])
    template = "<|user|>2 app{% generation %}les 3<|end|>\n{% endgeneration %}"
    assert trained(load(path, template=template)[0]) == ["les 3<|end|>"], "nobody draws the newline"


def test_a_conversation_that_begins_with_the_assistant_needs_tags(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"chat": TURNS[2:]}])
    assert "x.parquet:0: begins with the assistant" in str(refusal(path, messages_key="chat"))
    conversation = load(path, messages_key="chat", template=prompt_files.TAGGED)[0]
    assert trained(conversation) == ["1 + 1 = 2\n#### 2<|end|>", "日本 2<|end|>"]


@pytest.mark.parametrize("truncation", [Truncation.right, Truncation.left])
def test_long_ones_are_cut_and_left_out_where_nothing_trained_is_left(tmp_path: Path, truncation: Truncation) -> None:
    rows = [
        {"prompt": "1", "response": "2"},
        {"prompt": "12345678901", "response": "2"},
        {"prompt": "1", "response": "22"},
    ]
    conversations = load(write(tmp_path / "x.parquet", rows), max_length=7, truncation=truncation)
    whole = load(tmp_path / "x.parquet", max_length=17)
    assert whole.lengths == [7, 17, 8]
    if truncation is Truncation.right:
        assert [conversations[index].id for index in range(len(conversations))] == ["x.parquet:0", "x.parquet:2"]
        assert conversations[1] == Conversation("x.parquet:2", whole[2].tokens[:7], whole[2].mask[:7])
    else:
        assert [conversations[index].tokens for index in range(3)] == [whole[index].tokens[-7:] for index in range(3)]
        assert [conversations[index].mask for index in range(3)] == [whole[index].mask[-7:] for index in range(3)]
    assert (conversations.num_truncated, conversations.num_left_out) == (2, 3 - len(conversations))
    assert f"2 cut to 7 tokens ({truncation.value})" in conversations.describe()


def test_long_ones_are_refused_and_none_left_too(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"prompt": "1", "response": "2"}, {"prompt": "12", "response": "2"}])
    (problem,) = refusal(path, max_length=7).problems
    assert problem.startswith("1 have more than data.max_length=7 tokens, the longest 8: x.parquet:1. ")
    said = str(refusal(path, max_length=3, truncation=Truncation.right))
    assert "no conversation is left. All 2 have no trained token within data.max_length" in said


def test_samples_are_chosen_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"prompt": f"{n}", "response": "2"} for n in range(40)])
    conversations = load(path, max_samples=5)
    assert len(conversations) == 5
    assert all(
        conversations[i].tokens[2:-4] == tuple(TOKENIZER.encode(conversations[i].id.split(":")[1])) for i in range(5)
    )
    assert {conversations[i].id for i in range(5)} != {load(path, max_samples=5, seed=2)[i].id for i in range(5)}


def test_everything_broken_is_named_at_once(tmp_path: Path) -> None:
    chats = [{"chat": None}, {"chat": []}, {"chat": TURNS[:2]}, {"chat": TURNS}]
    problems = refusal(write(tmp_path / "x.parquet", chats), messages_key="chat").problems
    assert [problem.split(".")[1] for problem in problems] == [
        "parquet:0: chat is null",
        "parquet:1: chat has no messages",
        "parquet:2: chat has no message of the assistant",
    ]
    pairs = [{"prompt": "1", "response": None}, {"prompt": "1", "response": ""}, {"prompt": "", "response": "2"}]
    number = write(tmp_path / "n.parquet", [{"prompt": 1, "response": user("2")}])
    bare = write(tmp_path / "b.parquet", [{"question": "1"}])
    problems = refusal(write(tmp_path / "p.parquet", pairs), number, bare).problems
    assert [problem.partition(".")[2].split(".")[0] for problem in problems] == [
        "parquet:0: response is null or empty",
        "parquet:1: response is null or empty",
        "parquet:2: prompt has no messages",
        "parquet: column prompt is int64, not a list of {role, content} or text",
        "parquet: column response is list<element: struct<role: string, content: string>>, not text",
        "parquet: no column prompt; it has question",
        "parquet: no column response; it has question",
    ]
    assert "no column extra.answer" in str(refusal(number, response_key="extra.answer"))
    good = write(tmp_path / "t.parquet", [{"prompt": "1", "response": "2"}])
    refusing, untagged = "{{ raise_exception('no') }}", "{% generation %}{% endgeneration %}<|user|>1"
    assert "t.parquet:0: the chat template refuses it: no" in str(refusal(good, template=refusing))
    assert "t.parquet:0: nothing of it is trained" in str(refusal(good, template=untagged))
