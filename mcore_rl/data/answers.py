"""The rows' own answers as tokens that follow their prompts: what the model would have said to give them.

An answer is a text, written by the chat template as the assistant's turn after the prompt's messages; its tokens end
with the one that ends the turn, as a response's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.data.rows import SourceFile, clean_messages, field_type, field_value, is_text, no_column
from mcore_rl.data.turns import ASSISTANT, Turns


@dataclass(frozen=True)
class OwnAnswers:
    """Reads the answers of prompts (``prompts.AnswerReader``).

    key, prompt_key: the columns of answers and of messages; the former may be a field, as ``extra_info.answer``.
    """

    turns: Turns
    key: str
    prompt_key: str

    def column_problem(self, file: SourceFile) -> str:
        """Why no row of ``file`` has an answer; "" if they may."""
        kind = field_type(file.table.schema, self.key)
        if kind is None:
            return no_column(file, self.key, "Write the answers there, or name it as data.answer_key")
        if not is_text(kind):
            return f"{file.name}: column {self.key} is {kind}, not text. Write the answers as texts"
        return ""

    def read(self, record: dict[str, Any], prompt: Sequence[int]) -> list[int] | str:
        """The tokens of a row's answer, at least one; or what is wrong with it, in words.

        prompt: the tokens of the row's prompt, whole.
        """
        answer = field_value(record, self.key)
        messages = clean_messages(record[self.prompt_key])
        if not answer:
            return f"{self.key} is null or empty. Write the answer, or leave the row out"
        assert not isinstance(messages, str), "the row has a prompt"
        try:
            tokens, mask = self.turns.encode([*messages, {"role": ASSISTANT, "content": answer}], begin=len(messages))
        except ValueError as error:
            return f"{self.key}: {error}"
        except Exception as error:  # noqa: BLE001 - a template is a program of the user's and may raise anything
            return f"{self.key}: the chat template refuses it: {error}. Mend the answer or the template"
        first = mask.index(True) if any(mask) else len(mask)
        if tokens[:first] != list(prompt):
            said = "the chat template writes the prompt in other tokens where an answer follows"
            return f"{self.key}: {said}. Use a template whose prompt ends with a special token or a line"
        return [token for token, trained in zip(tokens, mask, strict=True) if trained]
