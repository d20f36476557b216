"""Conversations as text, by a tokenizer's chat template: messages as the template reads them, whole or refused.

Data spells the arguments of a call as an object or as JSON text.  Most templates read objects, and write a text as a
quoted one or refuse it; a few join texts, and refuse an object or write it as Python does.  ``readable`` gives each
template what it reads.  What a message says and the template has no place for (a call, a thought, a tool's result) is
refused: dropped, it would be trained or answered as if the row did not say it.  So is a role that nobody has: many
templates write any role, and the model would read a misspelt one as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mcore_rl.ground.json_text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields of messages that say something, which no template reads that does not name them.
SAYING = ("tool_calls", "reasoning_content", "reasoning", "thinking")
ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
)  # others are a template's own, which names them
MAX_ROLE = 80  # characters of a role in a message
KEY, VALUE = "mcorerlkey", "mcorerlvalue"  # plain words that no template changes


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    opens: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    pictures: bool = False,
) -> str:
    """The text of ``messages``.  opens: with the opening of the assistant's next turn.  kwargs: for the template.

    pictures: contents may have parts of type image, which the template writes.

    ValueError: see ``readable``; and whatever the template raises.
    """
    given = dict(kwargs or {})
    read = readable(tokenizer, messages, given.get("tools"), pictures=pictures)
    return str(tokenizer.apply_chat_template(read, tokenize=False, add_generation_prompt=opens, **given))


def readable(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Any = None,
    *,
    pictures: bool = False,
) -> list[dict[str, Any]]:
    """``messages`` as the chat template reads them.  tools: as it is given them, which may choose the template.

    pictures: contents may have parts of type image.  ValueError, with the remedy: a role is none of ``ROLES`` and none
    that the template names, a content has parts that are not read, a call's arguments are no JSON object, or the
    template has no place for what is said.
    """
    if not pictures:
        _refuse_parts(messages)
    read = [dict(message) for message in messages]
    for place, message in enumerate(read):
        role = str(message["role"])
        if role not in ROLES and not re.search(
            rf"""['"]{re.escape(role)}['"]""", tokenizer.get_chat_template(tools=tools)
        ):
            said = f"message {place} has the role {role[:MAX_ROLE]!r}, which the chat template does not name"
            raise ValueError(f"{said}. Write {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    if not any(message.get(key) for message in read for key in SAYING):
        return read
    template = tokenizer.get_chat_template(tools=tools)
    for place, message in enumerate(read):
        for key in SAYING:
            if message.get(key) and not re.search(rf"\b{key}\b", template):
                remedy = "Use a chat template that writes it, or leave it out of the messages"
                raise ValueError(f"message {place} has {key}, which the chat template does not read. {remedy}")
        if message.get("tool_calls"):
            form = _form(template)
            message["tool_calls"] = [_call(each, place, form) for each in _calls(message["tool_calls"], place)]
            if form.null_content:
                message.setdefault("content", None)
    return read


def _refuse_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse contents that are more than text: a template of a text model writes nothing for them, or their JSON."""
    for place, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                remedy = "Leave the row out, or drop the part where the text alone is meant"
                raise ValueError(f"message {place} has a part of type {kind}, and text alone is read. {remedy}")


@dataclass(frozen=True)
class _Form:
    """How a template reads a call.

    texts: its arguments as JSON text.  null_content: where nothing is said beside it, a content that is null.
    """

    texts: bool = False
    null_content: bool = False


@lru_cache(maxsize=16)
def _form(template: str) -> _Form:
    """The form in which ``template`` writes a call's arguments as JSON, or by their names and values."""
    for texts in (False, True):
        absent, null, said = (
            _writes(template, content, texts) for content in ({}, {"content": None}, {"content": "so"})
        )
        if absent or null or said:
            return _Form(texts=texts, null_content=null and not absent)
    return _Form()


def _writes(template: str, content: Mapping[str, Any], texts: bool) -> bool:
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments: Any = {KEY: VALUE}
    function = {"name": "tool", "arguments": json.dumps(arguments) if texts else arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    conversation = [{"role": "user", "content": "asked"}, {"role": "assistant", **content, "tool_calls": [call]}]
    try:
        written: Any = render_jinja_template(
            conversations=[conversation], chat_template=template, bos_token="", eos_token=""
        )
    except Exception:  # noqa: BLE001 - a template is a program of the user's and may raise anything
        return False
    text = str(written[0][0])
    as_python = f"'{KEY}'" in text
    in_quotes = f'\\"{KEY}\\"' in text
    return KEY in text and VALUE in text and not as_python and not in_quotes


def _calls(calls: Any, place: int) -> list[Any]:
    """The calls of message ``place``, which may be JSON text."""
    if isinstance(calls, str):
        try:
            calls = read_json(calls)
        except ValueError as error:
            raise ValueError(f"message {place} has tool_calls that are no JSON: {error}. Write a list") from error
    if not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls):
        form = "Write [{type: function, function: {name, arguments}}, ...]"
        raise ValueError(f"message {place} has tool_calls that are no list of calls. {form}")
    return calls


def _call(call: Mapping[str, Any], place: int, form: _Form) -> dict[str, Any]:
    """``call`` with its arguments in ``form``."""
    of_function = call.get("function")
    function = of_function if isinstance(of_function, dict) else call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            decoded = read_json(arguments) if arguments.strip() else {}
        except ValueError:
            decoded = None
    else:
        decoded = {} if arguments is None else arguments
    if not isinstance(decoded, dict):
        called = f"calls {function.get('name')} with arguments that are no JSON object"
        raise ValueError(f"message {place} {called}. Write {{name: value, ...}}, or its JSON")
    if not form.texts:
        written: Any = decoded
    elif isinstance(arguments, str) and arguments.strip():
        written = arguments
    else:
        written = json.dumps(decoded, ensure_ascii=False)
    changed = {**function, "arguments": written}
    return {**call, "function": changed} if function is of_function else changed
