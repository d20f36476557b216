"""A judge on engines of the run: they answer what a server would be asked, in the chat template of its tokenizer.

Nothing listens on a port.

The invariant: an answer depends on the request and the judge's files alone, so that a kept judgement is what would be
answered again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from mcore_rl.config.judge import JudgeConfig
from mcore_rl.controller.lifecycle.fixed_engines import JUDGE, FixedEngines
from mcore_rl.controller.lifecycle.resume_check import Sums
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.ground.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadEngineError,
    RolloutError,
    Violation,
    refuse_if_any,
    violations_of,
)
from mcore_rl.parallel.device import Platform
from mcore_rl.rewards.judge_client import JudgeError
from mcore_rl.rewards.judgements import Judgement, key_of
from mcore_rl.rollout.episodes import FinishReason
from mcore_rl.rollout.protocol import Prompt, Request, Sampling
from mcore_rl.rollout.vllm.engine.admission import admit

PATH = "reward.judge.path"
# What checks of a rollout say, in this order, and what it is of a judge.
KEYS = {
    "rollout.max_prompt_length": f"{JUDGE}.max_length",
    "rollout.max_response_length": "reward.judge.max_tokens",
    "rollout.": f"{JUDGE}.",
}


class JudgeEngines:
    """Answers a judge's requests with ``engines``; see ``JudgeClient``.

    tokenizer: has the chat template.  files: checksums of the judge's files, a part of every request, so that no
    judgement of other weights is taken for one of theirs.
    """

    num_retries = 0  # an engine that died is restarted, and nothing else is tried again

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, engines: FixedEngines, config: JudgeConfig, files: Sums
    ) -> None:
        self._tokenizer = tokenizer
        self._engines = engines
        self._config = config
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        self.asked_of: Mapping[str, Any] = {"model": digest, "seed": config.seed}
        # One thread, so that no two threads use the tokenizer, and the event loop is not blocked.
        self._thread = ThreadPoolExecutor(1, "judge")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """The engines end with the run."""

    async def ask(self, request: Mapping[str, Any], retries: int) -> Judgement:
        """The answer to ``request``.  JudgeError: there is none.  DeadEngineError: an engine is gone."""
        loop = asyncio.get_running_loop()
        try:
            tokens = await loop.run_in_executor(self._thread, self._tokens, request["messages"])
        except Exception as error:
            raise JudgeError(str(error)) from error
        sampling = Sampling(
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            seed=request["seed"],
            stop_token_ids=(int(self._tokenizer.eos_token_id),),
        )
        try:
            asked = Request(prompt=Prompt(id=key_of(request), tokens=tuple(tokens)))
            sample = await self._engines.sample(asked, sampling)
        except DeadEngineError:
            raise
        except RolloutError as error:
            raise JudgeError(str(error)) from error
        return Judgement(
            text=sample.text,
            truncated=sample.finish is FinishReason.length,
            prompt_tokens=len(tokens),
            completion_tokens=len(sample.tokens),
        )

    def _tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        said = [dict(message) for message in messages]
        text = str(self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
        tokens = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        length = self._config.engines.max_length
        room = self._config.engines.max_length - self._config.max_tokens
        if len(tokens) > room:
            beside = f"beside reward.judge.max_tokens={self._config.max_tokens}"
            problem = f"the rubric with what it judges has {len(tokens)} tokens, and {JUDGE}.max_length={length}"
            raise ValueError(f"{problem} has room for {room} {beside}. Raise it")
        return tokens

    def close(self) -> None:
        """Ends the thread that encodes; the caller that started the engines ends them."""
        self._thread.shutdown(cancel_futures=True)


def prepare_judge(config: JudgeConfig, platform: Platform) -> PreTrainedTokenizerBase:
    """Checks the judge of ``config.path`` and returns its tokenizer.

    Raises ConfigError with every violation: of its files, of engines that cannot run it, of its chat template.
    """
    assert config.path is not None
    directory = Path(config.path)
    violations = list[Violation]()
    tokenizer = None
    try:
        admit(directory, config.engines.served(config.max_tokens), platform)
    except ConfigError as error:
        violations += [_of_judge(each, config) for each in error.violations]
    except CheckpointError as error:
        violations += violations_of(PATH, config.path, error.problems)
    try:
        tokenizer = load_tokenizer(directory, trained=False) if directory.is_dir() else None
        if tokenizer is not None:
            tokenizer.apply_chat_template([{"role": "user", "content": "a rubric"}], tokenize=False)
    except DataError as error:
        violations += violations_of(PATH, config.path, error.problems)
    except Exception as error:  # noqa: BLE001  as above
        problem = f"its chat template refuses one message of the user's: {error}"
        violations.append(Violation(PATH, config.path, problem, "Name a model that answers one"))
    refuse_if_any(violations)
    assert tokenizer is not None, "a folder without a tokenizer is a violation"
    return tokenizer


def _of_judge(violation: Violation, config: JudgeConfig) -> Violation:
    """Rewrites a violation of a ``rollout.*`` key, or of the model, as one of the judge's."""
    if not violation.key.startswith("rollout."):
        return Violation(f"{PATH}: {violation.key}", violation.value, violation.problem, violation.remedy)
    if violation.key == "rollout.max_prompt_length":
        problem = violation.problem.partition(" exceeds ")[2]
        remedy = f"Lower {JUDGE}.max_length, and max_tokens if need be"
        return Violation(f"{JUDGE}.max_length", config.engines.max_length, f"exceeds {problem}", remedy)
    key = violation.key
    problem = violation.problem
    remedy = violation.remedy
    for theirs, ours in KEYS.items():
        key, problem, remedy = (text.replace(theirs, ours) for text in (key, problem, remedy))
    return Violation(key, violation.value, problem, remedy)
