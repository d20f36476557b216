"""The reward model of a run: encodes conversations in its template, and scores them.

The invariant: a response's score is that of transformers' ``AutoModelForSequenceClassification`` for the same messages,
transformed as ``reward_model.transform`` says, or the response has a named error.  A conversation is only cut if
``reward_model.truncation`` says so.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from mcore_rl.config.data import Truncation
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.reward_model import RewardModelConfig, RewardTransform
from mcore_rl.data.chat_template import rendered
from mcore_rl.data.prompts import truncated
from mcore_rl.data.scored_answers import conversation_tokens
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.families.config_json import read_config
from mcore_rl.ground.errors import ConfigError, DataError, Violation, refuse_if_any, violations_of
from mcore_rl.parallel.device import Platform
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.worker import grade
from mcore_rl.rollout.vllm.engine.admission import admit

TOKENIZER = "reward_model.model.tokenizer_path"
PART = "model"  # the name of a score's part, for ``reward/part/model``
SAMPLE = "a response"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Encoder:
    """Encodes a conversation as the tokens that the reward model reads.

    tokenizer: has the chat template.
    pad_token_id: of the model's config.json; None if it has none.
    max_length, truncation: ``reward_model.max_length`` and ``reward_model.truncation``.
    """

    tokenizer: PreTrainedTokenizerBase
    pad_token_id: int | None
    max_length: int
    truncation: Truncation

    def text(self, conversation: Messages) -> str:
        """``conversation`` in the chat template.  Raises whatever the template raises."""
        return rendered(self.tokenizer, conversation)

    def tokens(self, conversation: Messages) -> list[int]:
        """The tokens of ``text``, without padding at the end, since transformers reads the score before the padding.

        ValueError: there is no token, or there are more than ``max_length`` and truncation is error.
        """
        said = [dict(message) for message in conversation]
        tokens = conversation_tokens(self.tokenizer, said, self.pad_token_id)
        if len(tokens) > self.max_length and self.truncation is Truncation.error:
            problem = f"the conversation has {len(tokens)} tokens, more than reward_model.max_length={self.max_length}"
            raise ValueError(f"{problem}. Raise it, or write reward_model.truncation=left")
        return list(truncated(tokens, self.max_length, self.truncation)) if len(tokens) > self.max_length else tokens


class Classifier(Protocol):
    """Engines of a reward model, in a run or alone."""

    async def classify(self, tokens: Sequence[int]) -> float | str:
        """See ``EnginePool.classify``."""
        ...


class RewardModel:
    """Scores episodes with the engines of a reward model; its scores are like a grader's.  See docs/rewards.md."""

    def __init__(self, encoder: Encoder, engines: Classifier, reward: RewardConfig, transform: RewardTransform) -> None:
        self._encoder = encoder
        self._engines = engines
        self._reward = reward
        self._transform = transform
        # One thread, so that no two threads use the tokenizer, and the event loop is not blocked.
        self._thread = ThreadPoolExecutor(1, "reward-model")

    async def score(self, request: RewardRequest) -> Score:
        """The model's score of the conversation ``request.messages``, transformed; its part is the score itself.

        If there is no score, or it is not finite, the Score has an error, as for a grader; the overlong penalty is
        added as for a grader.  DeadEngineError: an engine is gone.
        """
        loop = asyncio.get_running_loop()
        value: float | Exception
        try:
            tokens = await loop.run_in_executor(self._thread, self._encoder.tokens, request.messages)
        except Exception as error:  # noqa: BLE001  a template is a program of the user's and may raise anything
            value = error
        else:
            answer = await self._engines.classify(tokens)
            value = ValueError(f"vLLM gave no score: {answer}") if isinstance(answer, str) else answer

        def verdict(_: RewardRequest, __: RewardConfig) -> Score:
            if isinstance(value, Exception):
                raise value
            return Score(transformed(value, self._transform), {PART: value})

        return grade(request, self._reward, verdict)

    def close(self) -> None:
        """Ends the thread that encodes; the caller that started the engines ends them."""
        self._thread.shutdown(cancel_futures=True)


def transformed(score: float, transform: RewardTransform) -> float:
    """The reward of a ``score``."""
    # By tanh, since exp of a large number overflows: sigma(x) = (1 + tanh(x / 2)) / 2.
    return score if transform is RewardTransform.none else (1.0 + math.tanh(score / 2.0)) / 2.0


def prepare_encoder(config: RewardModelConfig, platform: Platform) -> Encoder:
    """Checks the reward model of ``config`` and its tokenizer, and returns its encoder.

    Raises ConfigError with every violation: those of ``admit``, and of the tokenizer, its chat template and vocabulary.
    """
    directory = Path(config.model.path)
    where = Path(config.model.tokenizer_path or directory)
    violations: list[Violation] = []
    vocab_size = tokenizer = None
    try:
        vocab_size = admit(directory, config, platform).vocab_size
    except ConfigError as error:
        violations += error.violations
    try:
        tokenizer = load_tokenizer(where, trained=False) if directory.is_dir() or config.model.tokenizer_path else None
    except DataError as error:
        violations += violations_of(TOKENIZER, str(where), error.problems)
    if tokenizer is not None:
        violations += _tokenizer_violations(tokenizer, where, vocab_size)
    refuse_if_any(violations)
    assert tokenizer is not None
    pad_token_id = read_config(directory).get("pad_token_id")
    return Encoder(tokenizer, pad_token_id, config.max_model_len, config.truncation)


def _tokenizer_violations(tokenizer: PreTrainedTokenizerBase, where: Path, vocab_size: int | None) -> list[Violation]:
    violations = []
    highest = max(tokenizer.get_vocab().values())
    if vocab_size is not None and highest >= vocab_size:
        problem = f"has token {highest}, and the reward model's vocabulary has {vocab_size}"
        violations.append(Violation(TOKENIZER, str(where), problem, "Name the tokenizer of the reward model"))
    encoder = Encoder(tokenizer, None, 1, Truncation.left)
    problem = template_problem(encoder, [{"role": "user", "content": "a question"}])
    if problem:
        violations.append(
            Violation(TOKENIZER, str(where), problem, "Use a chat template of conversations with answers")
        )
    return violations


def template_problem(encoder: Encoder, messages: Messages) -> str:
    """Why the template cannot render a response after ``messages``; "" if it can."""
    try:
        text = encoder.text([*messages, {"role": "assistant", "content": SAMPLE}])
    except Exception as error:  # noqa: BLE001  as above
        return f"the chat template refuses the conversation: {error}"
    return "" if SAMPLE in text else "the chat template leaves the response out"
