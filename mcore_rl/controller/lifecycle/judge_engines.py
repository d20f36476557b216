"""A judge on engines of the run: they answer what a server would be asked, in the chat template of its tokenizer.

Nothing listens on a port.  Engines that die or hang are restarted, and what they were asked is asked again.

The invariant: an answer depends on the request and the judge's files alone, so that a kept judgement is what would be
answered again.  No engine is asked while it sleeps.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from mcore_rl.config.judge import JudgeConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.lifecycle.resume_check import Sums
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.episodes import FinishReason
from mcore_rl.errors import (
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
from mcore_rl.rollout.engine.admission import admit
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import EngineMemory, Prompt, Request, Sample, Sampling
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.placement import EngineBundles
from mcore_rl.runtime.start import start_engines
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.watchdog import Watchdog

PATH, ENGINES = "reward.judge.path", "reward.judge.engines"
# What checks of a rollout say, in this order, and what it is of a judge.
KEYS = {
    "rollout.max_prompt_length": f"{ENGINES}.max_length",
    "rollout.max_response_length": "reward.judge.max_tokens",
    "rollout.": f"{ENGINES}.",
}


class JudgePool(EnginePool):
    """A pool whose engines are restarted when they die; their weights are on the disk, so nothing is sent to them.

    max_restarts: of all engines together; 0: every death is raised.
    """

    def __init__(self, engines: Sequence[EngineClient], max_num_seqs: int, max_restarts: int) -> None:
        super().__init__(engines, max_num_seqs)
        self._restarter = EngineRestarter(engines, self, max_restarts, warn=warn)

    async def answer(self, request: Request, sampling: Sampling) -> Sample:
        """One sample.  Raises what ``EnginePool.generate`` does; DeadEngineError if the restart limit is reached."""
        return await self._restarter.shared(partial(self._answer, request, sampling))

    async def _answer(self, request: Request, sampling: Sampling) -> Sample:
        (sample,) = [sample async for sample in self.generate([request], sampling)]
        return sample

    def mark_alive(self) -> None:
        """Uses every engine again: a restarted one has read its weights."""
        super().mark_alive()
        for load in self.loads:
            load.has_weights = True
        self._assign()

    async def sleep(self, level: int = 1) -> None:
        """See ``EnginePool.sleep``."""
        await self._restarter.repeat(partial(super().sleep, level))

    async def wake(self, memory: EngineMemory | None = None) -> None:
        """See ``EnginePool.wake``."""
        await self._restarter.repeat(partial(super().wake, memory))


class JudgeEngines:
    """Answers a judge's requests with ``pool``; see ``JudgeClient``.

    tokenizer: has the chat template.  files: checksums of the judge's files, a part of every request, so that no
    judgement of other weights is taken for one of theirs.
    """

    num_retries = 0  # an engine that died is restarted, and nothing else is tried again

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pool: JudgePool, config: JudgeConfig, files: Sums) -> None:
        self._tokenizer, self._pool, self._config = tokenizer, pool, config
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        self.asked_of: Mapping[str, Any] = {"model": digest, "seed": config.seed}
        # One thread, so that no two threads use the tokenizer, and the event loop is not blocked.
        self._thread = ThreadPoolExecutor(1, "judge")
        self._awake, self._under_way = asyncio.Event(), 0
        self._awake.set()

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
            max_tokens=request["max_tokens"], temperature=request["temperature"], seed=request["seed"],
            stop_token_ids=(int(self._tokenizer.eos_token_id),),
        )  # fmt: skip
        while not self._awake.is_set():
            await self._awake.wait()
        self._under_way += 1
        try:
            asked = Request(prompt=Prompt(id=key_of(request), tokens=tuple(tokens)))
            sample = await self._pool.answer(asked, sampling)
        except DeadEngineError:
            raise
        except RolloutError as error:
            raise JudgeError(str(error)) from error
        finally:
            self._under_way -= 1
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
        length, room = self._config.engines.max_length, self._config.engines.max_length - self._config.max_tokens
        if len(tokens) > room:
            beside = f"beside reward.judge.max_tokens={self._config.max_tokens}"
            problem = f"the rubric with what it judges has {len(tokens)} tokens, and {ENGINES}.max_length={length}"
            raise ValueError(f"{problem} has room for {room} {beside}. Raise it")
        return tokens

    def close(self) -> None:
        """Ends the thread that encodes; the caller that started the engines ends them."""
        self._thread.shutdown(cancel_futures=True)

    async def sleep(self) -> None:
        """Waits until all is answered, then releases the accelerators' memory; weights move to host memory."""
        self._awake.clear()
        while self._under_way:
            await asyncio.sleep(0.01)
        await self._pool.sleep()

    async def wake(self) -> None:
        """Moves the weights back to the accelerators; waiting requests go on."""
        await self._pool.wake()
        self._awake.set()


def prepare_judge(config: JudgeConfig, platform: Platform) -> PreTrainedTokenizerBase:
    """Checks the judge of ``config.path`` and returns its tokenizer.

    Raises ConfigError with every violation: of its files, of engines that cannot run it, of its chat template.
    """
    assert config.path is not None
    directory, violations, tokenizer = Path(config.path), list[Violation](), None
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


async def start_judge(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    files: Sums,
    bundles: Sequence[EngineBundles],
    platform: Platform,
    logs: Path,
    trainers: TrainGroup | None,
    stack: AsyncExitStack,
) -> JudgeEngines:
    """Starts the judge's engines in ``bundles``; they end when ``stack`` is closed.

    trainers: the workers whose devices the engines share; the engines then sleep until they are woken.  None: the
    engines have devices of their own.
    """
    judge, trainer = config.reward.judge, config.trainer
    assert judge.path is not None
    served, watchdog = judge.engines.served(judge.max_tokens), Watchdog(trainer.watchdog)
    engines = await start_engines(
        Path(judge.path), served, bundles, platform, logs, stack, trainers, name="judge engine", watchdog=watchdog
    )
    pool = JudgePool(engines, served.max_num_seqs, trainer.max_restarts)
    answers = JudgeEngines(tokenizer, pool, judge, files)
    stack.callback(answers.close)
    if trainers is not None:
        await answers.sleep()
    return answers


def _of_judge(violation: Violation, config: JudgeConfig) -> Violation:
    """Rewrites a violation of a ``rollout.*`` key, or of the model, as one of the judge's."""
    if not violation.key.startswith("rollout."):
        return Violation(f"{PATH}: {violation.key}", violation.value, violation.problem, violation.remedy)
    if violation.key == "rollout.max_prompt_length":
        problem = violation.problem.partition(" exceeds ")[2]
        remedy = f"Lower {ENGINES}.max_length, and max_tokens if need be"
        return Violation(f"{ENGINES}.max_length", config.engines.max_length, f"exceeds {problem}", remedy)
    key, problem, remedy = violation.key, violation.problem, violation.remedy
    for theirs, ours in KEYS.items():
        key, problem, remedy = (text.replace(theirs, ours) for text in (key, problem, remedy))
    return Violation(key, violation.value, problem, remedy)
