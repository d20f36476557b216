"""A language model as a judge (arXiv:2306.05685): it reads a response with a rubric, and ends with a score.

Invariant: only the judge's own completion is searched for a score.  The response is data within the request, between
lines that it cannot write; whether it persuades the judge is another question.  A judgement that cannot be had costs
its response alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from mcore_rl.config.judge import JudgeConfig
from mcore_rl.config.reward import RewardConfig
from mcore_rl.ground.errors import ConfigError, McoreRLError, Violation
from mcore_rl.rewards.completions import split
from mcore_rl.rewards.judge_client import AnswersJudge, JudgeClient, JudgeError, JudgeTimeoutError
from mcore_rl.rewards.judgements import Judgement, Judgements, key_of
from mcore_rl.rewards.score import NotANumberError, RewardRequest, Score
from mcore_rl.rewards.worker import failed, grade

PART = "judge"  # the name of a score's part, for ``reward/part/judge``
NO_TRUTH = "(none is given)"
PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth|fence)\}")
MILLION = 1_000_000


class JudgeCostError(McoreRLError):
    """The judge has cost as much as ``reward.judge.max_cost`` allows."""


class Judge:
    """Scores responses with the judge of ``config.judge``, ``concurrency`` at a time; an async context manager.

    engines: answer in place of a server.
    path: the file of its judgements, in which earlier ones are looked up; None: those of this object alone.
    at_limit: called at each request after ``max_cost`` is reached, instead of which the response has an error; None:
    ``score`` raises JudgeCostError.

    Raises ConfigError if its key is missing or what earlier judgements cost is the limit already.
    """

    def __init__(self, config: RewardConfig, path: Path | None = None, engines: AnswersJudge | None = None) -> None:
        self._reward = config
        self._config = config.judge
        self._template = config.judge.template
        self._client: AnswersJudge = engines or JudgeClient(config.judge)
        self._room = asyncio.Semaphore(config.judge.concurrency)
        self._judgements = Judgements(path)
        self._under_way: dict[str, asyncio.Task[Judgement]] = {}
        self.at_limit: Callable[[], None] | None = None
        self._begin()
        if self._is_at_limit:
            self._judgements.close()
            problem = f"and the judgements in {path} have cost {self.cost:.6g}"
            raise ConfigError([Violation("reward.judge.max_cost", config.judge.max_cost, problem, "Raise it")])

    def _begin(self) -> None:
        self._requests = self._cached = self._failed = 0
        self._seconds = 0.0
        judgements = self._judgements
        self._told = (self._client.num_retries, judgements.prompt_tokens, judgements.completion_tokens)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        await self._client.__aexit__()
        self._judgements.close()

    @property
    def cost(self) -> float:
        """The cost of all judgements in the file, in the currency of ``price_per_million``; 0 without prices."""
        read, written = self._config.price_per_million or (0.0, 0.0)
        judgements = self._judgements
        return (judgements.prompt_tokens * read + judgements.completion_tokens * written) / MILLION

    @property
    def _is_at_limit(self) -> bool:
        return self._config.max_cost is not None and self.cost >= self._config.max_cost

    async def score(self, request: RewardRequest) -> Score:
        """The judge's score of a response, from 0 to 1; with an error where there is none, as a grader's.

        The overlong penalty is added as for a grader.
        """
        try:
            judgement = await self._answered(self.request_of(request), self._config.retries)
        except JudgeError as error:
            self._failed += 1
            kind = "timeout" if isinstance(error, JudgeTimeoutError) else "raised"
            return failed(kind, f"the judge: {error}", self._reward)

        def verdict(_: RewardRequest, __: RewardConfig) -> Score:
            value = score_in(judgement, self._config)
            return Score(value, {PART: value})

        score = grade(request, self._reward, verdict)
        self._failed += score.error is not None
        return score

    async def check(self, request: RewardRequest) -> str:
        """Asks once, before anything is drawn; returns what is wrong with the answer, or "" if it has a score.

        ConfigError: there is no answer.
        """
        try:
            judgement = await self._answered(self.request_of(request), 0)
            score_in(judgement, self._config)
        except JudgeError as error:
            remedy = "Start the judge, or mend the address, its model or its key (reward.judge.*)"
            refusal = Violation("reward.judge.address", self._config.address, f"does not judge: {error}", remedy)
            raise ConfigError([refusal]) from error
        except NotANumberError as error:
            return str(error)
        return ""

    def request_of(self, request: RewardRequest) -> dict[str, Any]:
        """What the judge is sent for a response."""
        config = self._config
        return {
            **self._client.asked_of,
            "messages": [{"role": "user", "content": rendered(self._template, request)}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }

    def take(self) -> dict[str, float]:
        """The metrics since the last call; ``judge/cost`` is of all judgements in the file."""
        retries, prompt_tokens, completion_tokens = self._told
        judgements = self._judgements
        metrics = {
            "judge/requests": float(self._requests),
            "judge/cached": float(self._cached),
            "judge/retries": float(self._client.num_retries - retries),
            "judge/failed": float(self._failed),
            "judge/prompt_tokens": float(judgements.prompt_tokens - prompt_tokens),
            "judge/completion_tokens": float(judgements.completion_tokens - completion_tokens),
            "judge/seconds": self._seconds,
        }
        self._begin()
        return metrics | ({"judge/cost": self.cost} if self._config.price_per_million else {})

    async def _answered(self, request: Mapping[str, Any], retries: int) -> Judgement:
        """The answer, from the file, from the same request that is under way, or from the server."""
        key = key_of(request)
        if (known := self._judgements.get(key)) is not None:
            self._cached += 1
            return known
        if key in self._under_way:
            self._cached += 1
        else:
            task = asyncio.create_task(self._asked(key, request, retries))
            self._under_way[key] = task
            task.add_done_callback(lambda task: self._end(key, task))
        return await asyncio.shield(self._under_way[key])  # others may wait for it, too

    def _end(self, key: str, task: asyncio.Task[Judgement]) -> None:
        self._under_way.pop(key, None)
        task.cancelled() or task.exception()  # nobody may be waiting for it any more

    async def _asked(self, key: str, request: Mapping[str, Any], retries: int) -> Judgement:
        async with self._room:
            if self._is_at_limit:  # only now: others have cost something while this one waited
                problem = f"it has cost {self.cost:.6g}, and reward.judge.max_cost={self._config.max_cost:g}"
                if self.at_limit is None:
                    raise JudgeCostError(f"the judge is not asked any more: {problem}. Raise the limit to go on")
                self.at_limit()
                raise JudgeError(problem)
            self._requests += 1
            begun = time.perf_counter()
            try:
                judgement = await self._client.ask(request, retries)
            finally:
                self._seconds += time.perf_counter() - begun
            self._judgements.add(key, judgement)
            return judgement


def rendered(template: str, request: RewardRequest) -> str:
    """``template`` with the texts of ``request`` in their places; placeholders within these texts stay as they are."""
    prompt, completion = split(request)
    texts = {
        "prompt": _conversation(prompt),
        "response": request.response if len(completion) == 1 else _conversation(completion),
        "ground_truth": NO_TRUTH if request.ground_truth in (None, "") else str(request.ground_truth),
    }
    whole = "\0".join(texts.values()).encode(errors="surrogatepass")
    texts["fence"] = f"======== {hashlib.sha256(whole).hexdigest()[:16]}"
    return PLACEHOLDER.sub(lambda match: texts[match[1]], template)


def _conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """One message as it is; of several, each below the name of its role."""
    said = [(str(each.get("role")), str(each.get("content") or "")) for each in messages]
    return said[0][1] if len(said) == 1 else "\n\n".join(f"{role}:\n{content}" for role, content in said)


def score_in(judgement: Judgement, config: JudgeConfig) -> float:
    """The score in the judge's completion, brought to 0..1.

    NotANumberError: there is none, or it is not within ``scale``, or the completion was cut off: what matches then may
    be words of the response that the judge quoted.
    """
    if judgement.truncated:
        raise NotANumberError(f"the judge's answer was cut off at reward.judge.max_tokens={config.max_tokens}")
    text = judgement.text
    low, high = config.scale
    *_, last = (None, *re.finditer(config.pattern, text))
    if last is None:
        raise NotANumberError(f"the judge gave no score; its answer ends {text[-80:]!r}")
    try:
        value = float(last[1] or "")
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise NotANumberError(f"the judge's score {last[1]!r} is no number from {low:g} to {high:g}")
    return (value - low) / (high - low)
