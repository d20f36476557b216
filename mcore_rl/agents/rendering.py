"""What a chat template writes between two turns of the model, as tokens.

A turn that the model drew stays as it was drawn, token for token.  What is appended to it (results of tools, answers of
a user) is rendered once: the template writes a short conversation, and what it writes from the end of the model's turn
to the opening of the next is what stands there.  Nothing that was drawn is ever rendered or encoded again, so that a
template that writes earlier turns differently (one that drops their reasoning) changes nothing; ``notes`` says so.

Invariant: the tokens of an episode are a prefix of the tokens of the same episode some turns later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mcore_rl.agents.text_encoding import Marks, TextEncoder, TextRun, encodable
from mcore_rl.data.chat_template import readable
from mcore_rl.ground.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatMessage = Mapping[str, Any]

TITLE = "chat template"
ASKED, ANSWERED, REASONED = "mcorerlasked", "mcorerlanswered", "mcorerlreasoned"  # plain words that no template changes
WORD = "mcorerl"  # in all of these
TOOL = "tool"
USER = "user"
MAX_FRAMES = 1024  # by roles, names and ids of calls, which programs choose


def call_id(number: int) -> str:
    """The id of call ``number`` of a turn: nine letters and digits, which Mistral's templates insist on."""
    return f"call{number:05d}"


def slot(number: int) -> str:
    """The word that stands for the content of message ``number`` of what is appended."""
    return f"mcorerlslot{number}end"


@dataclass(frozen=True)
class TurnFrame:
    """What the template writes around the contents of appended messages.

    closing: the control token that ends the model's turn, with white space before it; "" if the template has none, and
        the token that opens what follows stands in its place (GLM).
    around: the texts before the first content, between each two and after the last, which opens the model's turn.
    calls: of the turn that they are rendered after.
    """

    closing: str
    around: tuple[str, ...]
    calls: tuple[Mapping[str, Any], ...] = ()


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
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._tools = list(tools)
        self._frames: dict[str, TurnFrame] = {}
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

    def appended(
        self, messages: Sequence[ChatMessage], last: int | None, called: Mapping[str, str] | None = None
    ) -> list[int]:
        """The tokens from the end of the model's turn to the opening of its next, with ``messages`` between them.

        messages: {role, content} each, roles ``tool`` or ``user``; the text of their contents makes no control token.
            Those of a tool may have its ``name`` and the ``tool_call_id`` of the call that they answer.
        last: the drawn token that ended the turn, which stands for the template's own; None: a limit or a stop string
        ended it, and the template's end is written.
        called: the names of tools by the ids of their calls, where messages have no names.
        """
        messages = self._merged(messages)
        try:
            frame = self._frame(messages, called)
        except DataError:  # of these names or ids
            messages = [{"role": message["role"], "content": message["content"]} for message in messages]
            frame = self._frame(messages)
        contents = self._contents(messages, frame)
        first = frame.around[0]
        if last is None:
            first = frame.closing + first
        elif last == self._opener(frame):
            first = first[self.encoder.control(first)[0].end() :]
        runs: list[TextRun] = [(first, True)]
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
        marks = Marks(self.encoder)
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
    def ending_ids(self) -> frozenset[int]:
        """The control tokens that end the model's turn; where the template has none, those that open what follows."""
        ends = set[int]()
        for role in (USER, TOOL):
            try:
                frame = self._frame(self._merged([{"role": role, "content": ""}]))
            except DataError:
                continue
            closing = [
                each for each in self.encoder.encode([(frame.closing, True)]) if each in self.encoder.control_ids
            ]
            opener = self._opener(frame)
            ends |= {*closing[-1:], *(() if opener is None else (opener,))}
        return frozenset(ends)

    def _opener(self, frame: TurnFrame) -> int | None:
        """The token that opens what follows a turn which no token ends; None: one does, or nothing opens it."""
        control = self.encoder.control(frame.around[0])
        if frame.closing or not control or frame.around[0][: control[0].start()].strip():
            return None
        return self.encoder.id_of(control[0].group())

    def _differences(self, roles: tuple[str, ...]) -> list[str]:
        """Where the tokens of a conversation differ from what the tokenizer makes of it as a whole."""
        of_tool = {"name": TOOL}
        asked = [{"role": role, "content": slot(n)} | (of_tool if role == TOOL else {}) for n, role in enumerate(roles)]
        messages = self._slots(self._merged(asked))
        frame = self._frame(messages)
        problems = []
        whole = self._render([*self._stub(frame.calls), *messages], open_turn=True)
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

    def _frame(self, messages: Sequence[ChatMessage], called: Mapping[str, str] | None = None) -> TurnFrame:
        """The frame of ``messages``: of their roles, names and ids.  DataError: the template cannot write them."""
        slots = self._slots(messages)
        calls = self._calls(messages, called or {})
        key = repr((slots, calls))
        if key not in self._frames:
            frame = self._read_frame(slots, calls)
            if frame is None:
                roles = " + ".join(str(message["role"]) for message in messages)
                problem = f"cannot write {roles} after a turn of the assistant, or drops what they say"
                raise DataError(TITLE, [f"{problem}. Use the chat template of the model's instruct version"])
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            self._frames[key] = frame
        return self._frames[key]

    def _read_frame(self, messages: Sequence[ChatMessage], calls: Sequence[Mapping[str, Any]]) -> TurnFrame | None:
        """The frame of ``messages``, whose contents are slots; None if the template refuses or drops them.

        Results of tools stand after the calls that they are of, as far as the template writes these; some write no more
        than one in a turn.
        """
        for before in (tuple(calls), tuple(calls[:1]), ()):
            text = self._after_turn(messages, before)
            around = list[str]()
            for number in range(len(messages)):
                if text is None or text.count(slot(number)) != 1:
                    break
                first, _, text = text.partition(slot(number))
                around.append(first)
            if text is None or len(around) < len(messages):
                continue
            end = self._end_of_turn(around[0]) if self._ends_turns else 0
            return TurnFrame(around[0][:end], (around[0][end:], *around[1:], text), before)
        return None

    def _after_turn(self, messages: Sequence[ChatMessage], calls: Sequence[Mapping[str, Any]]) -> str | None:
        """What is written behind the text of the model's turn if ``messages`` follow it; None if it cannot be told."""
        try:
            before = self._render(self._stub(calls))
            whole = self._render([*self._stub(calls), *messages], open_turn=True)
        except Exception:  # noqa: BLE001 - a template is a program of the user's and may raise anything
            return None
        if not calls:
            return whole.partition(ANSWERED)[2] if whole.count(ANSWERED) == 1 else None
        if not whole.startswith(before) or any(str(call["function"]["name"]) not in before for call in calls):
            return None
        ends = self.encoder.control(before)
        if not self._ends_turns or not ends or before[ends[-1].end() :].strip():
            return whole[len(before) :]
        return whole[ends[-1].start() :]

    def _end_of_turn(self, text: str) -> int:
        """Where in ``text`` the control token ends that it begins with; 0: with none."""
        ends = self.encoder.control(text)
        return ends[0].end() if ends and not text[: ends[0].start()].strip() else 0

    @cached_property
    def _ends_turns(self) -> bool:
        """Whether the template writes a control token behind a turn of the model that nothing follows."""
        try:
            return bool(self.encoder.control(self._render(self._stub()).partition(ANSWERED)[2]))
        except Exception:  # noqa: BLE001 - see _after_turn
            return True

    def _contents(self, messages: Sequence[ChatMessage], frame: TurnFrame) -> list[str]:
        """The content of each message as the template writes it (trimmed, as JSON); unchanged where that is unclear.

        Each is rendered among slots, so that no content can be mistaken for the template's text.
        """
        contents = list[str]()
        for number, message in enumerate(messages):
            content = encodable(str(message["content"]))
            among = self._slots(messages)
            among[number] = {**among[number], "content": content}
            before = frame.closing + frame.around[0]
            for earlier in range(number):
                before += slot(earlier) + frame.around[earlier + 1]
            behind = frame.around[number + 1]
            for later in range(number + 1, len(messages)):
                behind += slot(later) + frame.around[later + 1]
            written = self._between(among, frame.calls, before, behind)
            contents.append(content if written is None else written)
        return contents

    def _between(
        self, messages: Sequence[ChatMessage], calls: Sequence[Mapping[str, Any]], before: str, behind: str
    ) -> str | None:
        """What stands between ``before`` and ``behind`` in the rendering of ``messages``; None if that is unclear."""
        try:
            stub = self._render(self._stub(calls))
            whole = self._render([*self._stub(calls), *messages], open_turn=True)
        except Exception:  # noqa: BLE001 - see _after_turn
            return None
        begin = len(stub) - len(before) if calls else whole.find(ANSWERED)
        start = whole.find(before, max(0, begin)) + len(before)
        if (begin < 0 and not calls) or start < len(before):
            return None
        if not whole.endswith(behind) or start > len(whole) - len(behind):
            return None
        return whole[start : len(whole) - len(behind)]

    def _slots(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """``messages`` as the template is given them, with slots for their contents."""
        slots = list[ChatMessage]()
        for number, message in enumerate(messages):
            of_tool: dict[str, str] = {}
            if message["role"] == TOOL:
                of_tool = {"tool_call_id": self._plain(message.get("tool_call_id"), call_id(number))}
                if name := message.get("name"):
                    of_tool["name"] = self._plain(name, TOOL)
            slots.append({"role": message["role"], "content": slot(number)} | of_tool)
        return slots

    def _calls(self, messages: Sequence[ChatMessage], called: Mapping[str, str]) -> list[Mapping[str, Any]]:
        """The calls that the results among ``messages`` are of."""
        calls = list[Mapping[str, Any]]()
        for number, message in enumerate(messages):
            if message["role"] == TOOL:
                name = message.get("name") or called.get(str(message.get("tool_call_id")))
                function = {"name": self._plain(name, TOOL), "arguments": {}}
                number_id = self._plain(message.get("tool_call_id"), call_id(number))
                calls.append({"id": number_id, "type": "function", "function": function})
        return calls

    def _plain(self, text: Any, otherwise: str) -> str:
        """``text``, a name or an id, where it spells no control token and none of our words; else ``otherwise``."""
        said = encodable(str(text)) if text else ""
        return otherwise if not said or self.encoder.control(said) or WORD in said else said

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
            result = [{"role": TOOL, "content": "", "name": TOOL}]
            if self._read_frame(self._slots(result), self._calls(result, {})) is None:
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

    def _stub(self, calls: Sequence[Mapping[str, Any]] = ()) -> list[ChatMessage]:
        """The conversation that is rendered in place of the real one.  calls: of its turn."""
        answer: dict[str, Any] = {"role": "assistant", "content": ANSWERED}
        if calls:
            answer["tool_calls"] = [dict(call) for call in calls]
        return [{"role": USER, "content": ASKED}, answer]

    def _render(self, messages: Sequence[ChatMessage], *, open_turn: bool = False, **more: Any) -> str:
        given: dict[str, Any] = {"tokenize": False, "add_generation_prompt": open_turn, **self._kwargs, **more}
        said = [dict(each) for each in messages]
        with suppress(ValueError):  # the template has no place for it: episodes keep what was drawn
            said = readable(self._tokenizer, said, given.get("tools"))
        return str(self._tokenizer.apply_chat_template(said, **given))
