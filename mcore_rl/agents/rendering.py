"""What a chat template writes between two turns of the model, as tokens.

A turn that the model drew stays as it was drawn, token for token.  What is appended to it (results of tools, answers of
a user) is rendered once: the template writes a short conversation, and what it writes from the end of the model's turn
to the opening of the next is what stands there.  Nothing that was drawn is ever rendered or encoded again, so that a
template that writes earlier turns differently (one that drops their reasoning) changes nothing; ``notes`` says so.

Invariant: the tokens of an episode are a prefix of the tokens of the same episode some turns later.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mcore_rl.agents.text_encoding import TextEncoder, TextRun, encodable
from mcore_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatMessage = Mapping[str, Any]

TITLE = "chat template"
ASKED, ANSWERED, REASONED = "mcorerlasked", "mcorerlanswered", "mcorerlreasoned"  # plain words that no template changes
TOOL, USER = "tool", "user"


def call_id(number: int) -> str:
    """The id of call ``number`` of a turn: nine letters and digits, which Mistral's templates insist on."""
    return f"call{number:05d}"


class _Marks:
    """Plain words that stand for what spells a control token, while a template writes what is around it.

    spelled: the text that each word stands for.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder, self._nonce = encoder, secrets.token_hex(8)  # which no message can know
        self.spelled: dict[str, str] = {}

    def of(self, value: Any, *, special_only: bool = False) -> Any:
        """``value`` with words in every text of its lists and dicts.  special_only: for special tokens alone."""
        if isinstance(value, str):
            return self._encoder.replaced(encodable(value), self._word, special_only=special_only)
        if isinstance(value, Mapping):
            return {self.of(key): self.of(each, special_only=special_only) for key, each in value.items()}
        if isinstance(value, list):
            return [self.of(each, special_only=special_only) for each in value]
        return value

    def runs(self, text: str) -> list[TextRun]:
        """``text`` with what the words stand for, which the template did not write."""
        parts = re.split(f"(mcorerl{self._nonce}x[0-9]+x)", text)
        return [(self.spelled[part], False) if part in self.spelled else (part, True) for part in parts]

    def _word(self, spelled: str) -> str:
        word = f"mcorerl{self._nonce}x{len(self.spelled)}x"
        self.spelled[word] = spelled
        return word


def slot(number: int) -> str:
    """The word that stands for the content of message ``number`` of what is appended."""
    return f"mcorerlslot{number}end"


@dataclass(frozen=True)
class TurnFrame:
    """What the template writes around the contents of appended messages.

    closing: the control token that ends the model's turn, with white space before it; "" if the template has none.
    around: the texts before the first content, between each two and after the last, which opens the model's turn.
    with_call: the template writes such messages only after a turn that called a tool.
    """

    closing: str
    around: tuple[str, ...]
    with_call: bool = False


class TurnRenderer:
    """Renders appended messages by the chat template of ``tokenizer``.

    kwargs: ``data.chat_template_kwargs``.  tools: the schemas of the tools, for ``notes`` alone: the prompt names them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.encoder = TextEncoder(tokenizer)
        self._tokenizer, self._kwargs, self._tools = tokenizer, dict(kwargs or {}), list(tools)
        self._frames: dict[tuple[str, ...], TurnFrame] = {}
        self._tool_role: str | None = None

    def check(self, roles: Sequence[str]) -> list[str]:
        """Checks that messages of ``roles`` can be appended; returns what a user should know of it (``notes``).

        Raises DataError: the template refuses or drops such messages, or the tokenizer encodes them differently when
        the conversation is encoded as a whole.
        """
        problems = []
        for role in roles:
            for count in (1, 2) if role == TOOL else (1,):
                try:
                    problems += self._differences((role,) * count)
                except DataError as error:
                    problems += error.problems
        if problems:
            raise DataError(TITLE, list(dict.fromkeys(problems)))
        return self.notes(roles)

    def appended(self, messages: Sequence[ChatMessage], last: int | None) -> list[int]:
        """The tokens from the end of the model's turn to the opening of its next, with ``messages`` between them.

        messages: {role, content} each, roles ``tool`` or ``user``; the text of their contents makes no control token.
        last: the drawn token that ended the turn, which stands for the template's own; None: a limit or a stop string
        ended it, and the template's end is written.
        """
        messages = self._merged(messages)
        frame = self._frame(tuple(message["role"] for message in messages))
        contents = self._contents(messages, frame)
        runs: list[TextRun] = [(frame.around[0] if last is not None else frame.closing + frame.around[0], True)]
        for content, behind in zip(contents, frame.around[1:], strict=True):
            runs += [(content, False), (behind, True)]
        return self.encoder.encode(runs, after=last)

    def opening(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        judge: Callable[[str], None] = lambda text: None,
    ) -> list[int]:
        """The tokens of a whole conversation that waits for the model.

        What the messages and tools spell makes no control token, but for those that are not special (<think>) where the
        assistant wrote them: templates read them there.  Without such text they are what the tokenizer makes of it all.
        judge: is given the text before it is tokenized, and may refuse it.
        DataError: the template refuses the conversation.
        """
        marks = _Marks(self.encoder)
        marked = [marks.of(dict(each), special_only=each["role"] == "assistant") for each in messages]
        more = {"tools": marks.of(list(tools))} if tools else {}
        try:
            text = encodable(self._render(marked, open_turn=True, **more))
        except Exception as error:
            raise DataError(TITLE, [f"refuses the conversation: {error}. Mend the messages"]) from error
        judge(text)
        if not marks.spelled:
            tokenizer: Any = self._tokenizer
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.encoder.encode(marks.runs(text))

    def continued(self, text: str) -> list[int]:
        """The tokens of ``text`` within the model's turn, as an observation of ReAct; none is a control token."""
        return self.encoder.encode([(text, False)])

    def notes(self, roles: Sequence[str]) -> list[str]:
        """What the template does that a user may not expect, a sentence each."""
        notes = []
        if TOOL in roles and self._role_of_tools() == USER:
            notes.append("the chat template has no role for tools: their results are written as the user's messages")
        if TOOL in roles and self._tools and not self._names_tools():
            notes.append(
                "the chat template does not write the tools' descriptions: the prompts must say which there are"
            )
        if self._rewrites():
            notes.append(
                "the chat template writes earlier turns differently once others follow (it drops reasoning, or moves "
                "the tools' descriptions): episodes keep the tokens of earlier turns as they were drawn"
            )
        return notes

    @cached_property
    def closing_id(self) -> int | None:
        """The control token with which the template ends the model's turn; None: it has none."""
        ids = self.encoder.encode([(self._frame((USER,)).closing, True)])
        return next((each for each in reversed(ids) if each in self.encoder.control_ids), None)

    def _differences(self, roles: tuple[str, ...]) -> list[str]:
        """Where the tokens of a conversation differ from what the tokenizer makes of it as a whole."""
        messages = self._merged(self._slots(roles))
        frame, problems = self._frame(tuple(message["role"] for message in messages)), []
        whole = self._render([*self._stub(frame.with_call), *messages], open_turn=True)
        tokenizer: Any = self._tokenizer
        expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
        ids = self.appended(messages, None)
        if list(expected[-len(ids) :]) != ids:
            problems.append(
                f"messages of {'+'.join(roles)} are other tokens by themselves than in the whole conversation. Use the "
                "model's own tokenizer.json"
            )
        hostile = "".join(tokenizer.convert_ids_to_tokens(sorted(self.encoder.control_ids)))
        encoded = self.appended([{**message, "content": hostile} for message in messages], None)
        written = "".join((frame.closing, *frame.around))
        if sum(each in self.encoder.control_ids for each in encoded) != len(self.encoder.control(written)):
            problems.append(
                "text of a tool would make control tokens. Use a tokenizer whose tokens are in added_tokens"
            )
        return problems

    def _frame(self, roles: tuple[str, ...]) -> TurnFrame:
        """The frame of messages of ``roles``.  DataError: the template cannot write them."""
        if roles not in self._frames:
            frame = self._read_frame(self._slots(roles))
            if frame is None:
                problem = f"cannot write {' + '.join(roles)} after a turn of the assistant, or drops what they say"
                raise DataError(TITLE, [f"{problem}. Use the chat template of the model's instruct version"])
            self._frames[roles] = frame
        return self._frames[roles]

    def _read_frame(self, messages: Sequence[ChatMessage]) -> TurnFrame | None:
        """The frame of ``messages``, whose contents are slots; None if the template refuses or drops them."""
        for with_call in (False, True):  # some templates write results only after a call
            try:
                before = self._render(self._stub(with_call))
                whole = self._render([*self._stub(with_call), *messages], open_turn=True)
            except Exception:  # noqa: BLE001 - a template is a program of the user's and may raise anything
                continue
            text = self._after_turn(before, whole, with_call)
            around = list[str]()
            for number in range(len(messages)):
                if text is None or text.count(slot(number)) != 1:
                    break
                first, _, text = text.partition(slot(number))
                around.append(first)
            if text is None or len(around) < len(messages):
                continue
            ends = self.encoder.control(around[0])
            end = ends[0].end() if ends and not around[0][: ends[0].start()].strip() else 0
            return TurnFrame(around[0][:end], (around[0][end:], *around[1:], text), with_call)
        return None

    def _after_turn(self, before: str, whole: str, with_call: bool) -> str | None:
        """What of ``whole`` stands behind the text of the model's turn; None if it cannot be told."""
        if not with_call:
            return whole.partition(ANSWERED)[2] if whole.count(ANSWERED) == 1 else None
        if not whole.startswith(before):
            return None
        ends = self.encoder.control(before)
        return whole[ends[-1].start() if ends and not before[ends[-1].end() :].strip() else len(before) :]

    def _contents(self, messages: Sequence[ChatMessage], frame: TurnFrame) -> list[str]:
        """The content of each message as the template writes it (trimmed, as JSON); unchanged where that is unclear.

        Each is rendered among slots, so that no content can be mistaken for the template's text.
        """
        contents, roles = list[str](), tuple(message["role"] for message in messages)
        for number, message in enumerate(messages):
            content = encodable(str(message["content"]))
            among = self._slots(roles)
            among[number] = {**among[number], "content": content}
            before = frame.closing + frame.around[0]
            for earlier in range(number):
                before += slot(earlier) + frame.around[earlier + 1]
            behind = frame.around[number + 1]
            for later in range(number + 1, len(messages)):
                behind += slot(later) + frame.around[later + 1]
            written = self._between(among, frame.with_call, before, behind)
            contents.append(content if written is None else written)
        return contents

    def _between(self, messages: Sequence[ChatMessage], with_call: bool, before: str, behind: str) -> str | None:
        """What stands between ``before`` and ``behind`` in the rendering of ``messages``; None if that is unclear."""
        try:
            whole = self._render([*self._stub(with_call), *messages], open_turn=True)
        except Exception:  # noqa: BLE001 - see _read_frame
            return None
        start = whole.find(before, whole.find(ANSWERED)) + len(before)
        if start < len(before) or not whole.endswith(behind) or start > len(whole) - len(behind):
            return None
        return whole[start : len(whole) - len(behind)]

    def _slots(self, roles: Sequence[str]) -> list[ChatMessage]:
        """Messages of ``roles`` as the template is given them, with slots for their contents."""
        return [
            {"role": role, "content": slot(number)}
            | ({"name": "tool", "tool_call_id": call_id(number)} if role == TOOL else {})
            for number, role in enumerate(roles)
        ]

    def _merged(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """``messages`` in roles that the template knows: without one for tools, their results are one of the user's."""
        results = [str(each["content"]) for each in messages if each["role"] == TOOL]
        if not results or self._role_of_tools() == TOOL:
            return list(messages)
        others = [each for each in messages if each["role"] != TOOL]
        return [{"role": USER, "content": "\n\n".join(results)}, *others]

    def _role_of_tools(self) -> str:
        """``tool``; ``user`` if the template cannot write that."""
        if self._tool_role is None:
            self._tool_role = TOOL
            if self._read_frame(self._slots((TOOL,))) is None:
                self._tool_role = USER
        return self._tool_role

    def _names_tools(self) -> bool:
        name = str(self._tools[0]["function"]["name"])
        question = [{"role": USER, "content": ASKED}]
        return name in self._render(question, tools=self._tools)

    def _rewrites(self) -> bool:
        """Whether a turn is written differently when another follows it."""
        tools: dict[str, Any] = {"tools": self._tools} if self._tools else {}
        reasoned = {"role": "assistant", "content": f"<think>\n{REASONED}\n</think>\n\n{ANSWERED}"}
        try:
            first = self._render([{"role": USER, "content": ASKED}], open_turn=True, **tools)
            plain = self._render(self._stub(), **tools)
            longer = self._render([*self._stub(), {"role": USER, "content": slot(0)}], **tools)
            thought = self._render(
                [{"role": USER, "content": ASKED}, reasoned, {"role": USER, "content": slot(0)}], **tools
            )
        except Exception:  # noqa: BLE001 - see _read_frame
            return False
        return not longer.startswith(plain) or not longer.startswith(first) or REASONED not in thought

    def _stub(self, with_call: bool = False) -> list[ChatMessage]:
        """The conversation that is rendered in place of the real one."""
        answer: dict[str, Any] = {"role": "assistant", "content": ANSWERED}
        if with_call:
            function = {"name": "tool", "arguments": {}}
            answer["tool_calls"] = [{"id": call_id(0), "type": "function", "function": function}]
        return [{"role": USER, "content": ASKED}, answer]

    def _render(self, messages: Sequence[ChatMessage], *, open_turn: bool = False, **more: Any) -> str:
        given: dict[str, Any] = {"tokenize": False, "add_generation_prompt": open_turn, **self._kwargs, **more}
        return str(self._tokenizer.apply_chat_template([dict(each) for each in messages], **given))
