"""Tells what a model thinks from what it answers: a call that is only thought of is none.

Models mark their thoughts by words that their chat templates and tokenizers have, or begin each turn within one.  The
marks are those of vLLM's reasoning parsers.  A model without such words has no reasoning here, whatever it writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)


@dataclass(frozen=True)
class Reasoning:
    """How a model marks its thoughts.  opened: the prompt of a first turn ends within one."""

    begin: str
    end: str
    opened: bool

    def answer(self, raw: str, after: str = "") -> str:
        """The part of a turn that is no thought.  An unfinished thought goes to the end.

        after: the end of what it was drawn after.  DeepSeek's template opens a thought behind a question, and none
        behind results of tools.
        """
        inside = self.opened
        answer = ""
        rest = raw
        if after:
            inside = after.rstrip().endswith(self.begin)
        first_end = raw.find(self.end)
        first_begin = raw.find(self.begin)
        if first_end >= 0 and not 0 <= first_begin < first_end:
            inside = True
        if first_begin >= 0 and not raw[:first_begin].strip():
            inside = False  # the model writes the mark itself
        while rest:
            said, mark, rest = rest.partition(self.end if inside else self.begin)
            answer += "" if inside else said
            inside = inside != bool(mark)
        return answer


def reasoning_of(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None = None) -> Reasoning | None:
    """How the model of ``tokenizer`` marks its thoughts; None: it has none.  kwargs: of its chat template."""
    template = tokenizer.get_chat_template()
    added = tokenizer.get_added_vocab()
    for begin, end in MARKS:
        if end not in template and end not in added:
            continue
        asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **(kwargs or {})}
        try:
            prompt = str(tokenizer.apply_chat_template([{"role": "user", "content": "asked"}], **asked))
        except Exception:  # noqa: BLE001 - a template is a program of the user's and may raise anything
            prompt = ""
        return Reasoning(begin, end, prompt.rstrip().endswith(begin))
    return None
