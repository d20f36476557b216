"""What a rollout engine is asked for and what it gives: prompts and sampling in, samples out, and the verbs around it.

Two implementations: ``vllm_engine.VllmEngine``, in a process that belongs to vLLM (a Ray actor), and
``engine.process.EngineProcess``, which stands for one in a child process.  ``pool.EnginePool`` draws with several.
How weights travel is not here: ``rpc`` reaches the methods of vLLM's workers, ``start_update`` and
``finish_update`` stand around it.

Everything here travels by pickle and needs neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_rl.episodes import FinishReason, VersionSpan
from mcore_rl.errors import RolloutError


class Pause(Enum):
    """What becomes of unfinished samples: frozen until ``resume``, ended with what they have, or waited for."""

    keep = "keep"
    abort = "abort"
    wait = "wait"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    temperature: logits are divided by it; 0 takes the likeliest token.  top_p: the fewest tokens whose probability
    reaches it; 1 keeps all.  top_k: the k likeliest; -1 keeps all.  max_tokens: of the response, at least 1.
    stop: strings that end a response; they are cut from its text, not from its tokens.  stop_token_ids: tokens that end
    it, besides the model's own; the token is part of the response.  ignore_eos: the model's own do not end it.
    seed: of the run.  A sample's draws follow from (seed, prompt id, index) and from nothing else.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut off, so that log-probs are of the rest, and not of the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """id: names it in seeds, samples and messages; the same on every run.  tokens: at least one."""

    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One response, finished.

    tokens: [N] int32, with the stop token where there is one.  logprobs: [N] float32, the log-prob of each token under
    the distribution it was drawn from: log_softmax(logits / temperature), over the tokens that top-p and top-k left
    where they are set (``Sampling.truncated``); at temperature 0, log_softmax(logits).  versions: who drew which token.
    stop: the stop string or token id that ended it, None where the model's own end token, a limit or an abort did.
    text: without special tokens and stop string; "" without a tokenizer.  cached_tokens: of the prompt, found in the
    prefix cache.  experts: [prompt + N - 1, L, K] int16, the experts chosen at each token that was run through the
    model, the last response token being none of them; None unless ``rollout.return_routed_experts``.
    """

    prompt_id: str
    index: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionSpan, ...]
    finish: FinishReason
    stop: int | str | None = None
    text: str = ""
    cached_tokens: int = 0
    experts: NDArray[np.int16] | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Sample number ``index`` of ``prompt``.

    so_far: an aborted sample of it to go on from.  The result begins with its tokens, log-probs and versions, and
    ``Sampling.max_tokens`` counts them.
    """

    prompt: Prompt
    index: int = 0
    so_far: Sample | None = None

    @property
    def key(self) -> tuple[str, int]:
        """(prompt id, index)."""
        return self.prompt.id, self.index

    @property
    def num_done(self) -> int:
        """Tokens of the response that are there already."""
        return 0 if self.so_far is None else len(self.so_far.tokens)

    @property
    def tokens(self) -> list[int]:
        """What the model is given: the prompt, and the response so far."""
        return [*self.prompt.tokens, *([] if self.so_far is None else self.so_far.tokens.tolist())]


def requests_of(prompts: Iterable[Prompt], n: int) -> list[Request]:
    """``n`` samples of each prompt, prompt by prompt."""
    return [Request(prompt=prompt, index=index) for prompt in prompts for index in range(n)]


def seed_of(request: Request, sampling: Sampling) -> int:
    """63 bits that depend on the run's seed, the prompt id, the index and the tokens that are there already.

    A hash, so that neighbours share nothing: vLLM's own seed + index gives (seed 1, index 2) the draws of (2, 1).
    """
    text = f"{sampling.seed}/{request.index}/{request.num_done}/{request.prompt.id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def demand_numbers(request: Request, start: int, logprobs: NDArray[np.float32]) -> None:
    """Raise RolloutError where a log-prob of the response's tokens from ``start`` on is no number.

    Such tokens are drawn from nothing: the model's logits were not finite there, and vLLM goes on in silence.
    """
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if len(wrong):
        place = len(request.prompt.tokens) + start + int(wrong[0])
        raise RolloutError(
            f"prompt {request.prompt.id}, sample {request.index}: from token {place} of the sequence on, vLLM's logits "
            "are not finite. Look for positions that the model's RoPE does not reach, weights that are not finite, or "
            "a dtype that is too narrow"
        )


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """An engine since it started, and how it stands now.

    running, waiting: samples.  kv_cache_usage: 0 to 1.  generated_tokens, prompt_tokens: in all.  cached_tokens: of the
    prompt tokens, found in the prefix cache.  preemptions: samples that lost their KV cache to others and were run
    again.  busy_s: time with work.  tokens_per_s: generated_tokens over busy_s.
    """

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    busy_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of work."""
        return self.generated_tokens / self.busy_s if self.busy_s else 0.0


class SampleSource(Protocol):
    """What samples are drawn from: an engine, a pool of engines, or a pool that survives the death of engines."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """Draw the sample of every request; yield each as it finishes, in any order."""
        ...


class Classifier(Protocol):
    """One engine of a reward model, of one or more ranks.  Raises DeadEngineError as a ``RolloutEngine`` does."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    async def classify(self, texts: Sequence[Sequence[int]]) -> list[float | str]:
        """The head's number at the last token of each text, as it is, finite or not; or what vLLM says instead of one.

        texts: tokens, at least one and at most ``reward_model.max_length`` each.
        """
        ...

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``."""
        ...

    async def wake(self) -> None:
        """See ``RolloutEngine.wake``."""
        ...

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``."""
        ...


class RolloutEngine(SampleSource, Protocol):
    """One engine, of one or more ranks.  All methods but ``generate`` return when it is done.

    Any of them raises DeadEngineError once the engine is gone, naming it, what it was doing and the first cause.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """Every request's sample, as they finish.  Leaving the iterator early aborts the rest.

        RolloutError, before anything is sent: an empty prompt, one that is too long, a stop string without a tokenizer;
        or weights that are only partly updated.
        """
        ...

    async def abort(self, keys: Iterable[tuple[str, int]] | None = None) -> None:
        """End these samples (None: all) with what they have; whoever waits for them gets them, finish ``abort``."""
        ...

    async def pause(self, mode: Pause) -> None:
        """Draw no more tokens until ``resume``.  Samples asked for meanwhile wait."""
        ...

    async def resume(self) -> None:
        """Go on after ``pause``."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Give the accelerator's memory back.  1: weights go to the host.  2: weights are dropped.  CPU: nothing."""
        ...

    async def wake(self) -> None:
        """Take it again; after level 2 weights must be sent before anything is generated."""
        ...

    async def version(self) -> int:
        """Of the weights that the next token is drawn with."""
        ...

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        """Pause, and refuse new samples until ``finish_update``: from here on weights may be half old, half new."""
        ...

    async def finish_update(self, version: int) -> None:
        """All weights are ``version``'s: forget what the caches hold of the old ones, and go on."""
        ...

    async def fail_update(self, cause: str) -> None:
        """The update failed: end what is frozen, and keep refusing, naming ``cause``, until a complete one succeeds."""
        ...

    async def rpc(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        """Call ``method`` of every rank's worker, or of its extension; the results in rank order.

        Arguments and results are plain values (no tensors, no classes of one's own): vLLM sends them as msgpack.
        RolloutError: it raised; the message says what.
        """
        ...

    async def statistics(self) -> Statistics:
        """See ``Statistics``."""
        ...

    async def shutdown(self) -> None:
        """End its processes."""
        ...
