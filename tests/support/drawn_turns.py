"""An engine that draws turns which a test wrote down, token by token, for sessions of agents."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from mcore_rl.data.prompts import PromptRow
from mcore_rl.rollout.episodes import FinishReason, VersionSpan
from mcore_rl.rollout.protocol import Request, Sample, Sampling


def agent_row(tokenizer: Any, question: str = "what is 2 + 3?", *, number: int = 0, **columns: Any) -> PromptRow:
    """A row whose prompt is the chat template's."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return PromptRow(
        id=f"file:{number}", tokens=tuple(tokens), messages=messages, data_source="sums", ground_truth="5",
        extra_info={}, columns=columns,
    )  # fmt: skip


class DrawnTurns:
    """Draws ``turns``, texts, in order; each episode begins with the first.

    A text that ends with a stop string of the request ends there; else the model ends it with ``end``.  Tokens are not
    those that the tokenizer would make of the text: each character is encoded by itself.  requests: all that were made.
    """

    def __init__(self, tokenizer: Any, turns: Sequence[str] | Callable[[int], str], end: int | None = None) -> None:
        self.tokenizer, self.turns = tokenizer, turns
        self.end = tokenizer.eos_token_id if end is None else end
        self.requests: list[tuple[Request, Sampling]] = []
        self.finish: FinishReason | None = None

    def drawn(self, text: str) -> list[int]:
        """Each character by itself."""
        return [token for letter in text for token in self.tokenizer(letter, add_special_tokens=False)["input_ids"]]

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        (request,) = requests
        self.requests.append((request, sampling))
        await asyncio.sleep(0)
        _, _, turn = request.prompt.id.partition("/turn")
        number = int(turn or 0)
        text = self.turns(number) if callable(self.turns) else self.turns[number]
        stop = next((each for each in sampling.stop if text.endswith(each)), None)
        tokens = self.drawn(text) + ([] if stop is not None else [self.end])
        finish = self.finish or FinishReason.stop
        if len(tokens) > sampling.max_tokens:
            tokens, finish = tokens[: sampling.max_tokens], FinishReason.length
        rng = random.Random(f"{request.prompt.id}/{request.index}")
        yield Sample(
            prompt_id=request.prompt.id,
            index=request.index,
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array([-rng.random() for _ in tokens], dtype=np.float32),
            versions=(VersionSpan(version=number, start=0, end=len(tokens)),),
            finish=finish,
            stop=stop if finish is FinishReason.stop else None,
            text=text if stop is None else text.removesuffix(stop),
            cached_tokens=16 * number,
        )
