"""The interface of a rollout engine: prompts and sampling in, samples out, and the methods that control the engine.

``engine.vllm_engine.VllmEngine`` implements it in a process that belongs to vLLM.  ``engine.process.EngineProcess`` and
``runtime.engine_client.EngineClient`` call such an engine in a child process and below a Ray actor.
``pool.EnginePool`` generates with several engines.  The transfer of weights is not here: it goes through
``call_workers``, which calls methods of vLLM's workers, between ``start_update`` and ``finish_update``.

All records here can be pickled and need neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcore_rl.data.media.placed import Placed
from mcore_rl.ground.arrays import RoutesArray
from mcore_rl.ground.errors import RolloutError
from mcore_rl.rollout.episodes import FinishReason, VersionSpan

P = ParamSpec("P")
T = TypeVar("T")


class Pause(Enum):
    """What happens to unfinished samples when an engine is paused.

    keep: they stop, and continue at ``resume``.
    abort: they end with the tokens that they have.
    wait: the pause begins when they are finished.
    """

    keep = "keep"
    abort = "abort"
    wait = "wait"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and what ends a response.

    Fields:
        max_tokens: the most tokens of the response, at least 1.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: keeps the fewest tokens whose probability reaches it; 1 keeps all.
        top_k: keeps the k likeliest tokens; -1 keeps all.
        stop: strings that end a response; they are cut from its text, not from its tokens.
        stop_token_ids: tokens that end a response, besides the model's own; the token is part of the response.
        ignore_eos: the model's own end token does not end a response.
        seed: of the run.  The random draws of a sample depend only on (seed, prompt id, index).
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
        """True if top-p or top-k remove tokens: log-probs are then over the remaining tokens, not the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True)
class MadePatches:
    """Patches that are there, as ``PromptPicture.read``."""

    patches: NDArray[np.uint8]

    def __call__(self) -> NDArray[np.uint8]:
        """Returns the patches."""
        return self.patches


@dataclass(frozen=True, eq=False)
class PromptPicture:
    """A picture of a prompt.

    placed: which one it is, and which of the prompt's tokens stand for it, one for each of its features.
    read: makes its patches, [patches, width] uint8 (``data.media.pixels``).  It is called when the prompt is sent to an
        engine, once for all samples that go there together; so prompts that wait hold no pixels.
    """

    placed: Placed
    read: Callable[[], NDArray[np.uint8]]

    def __reduce__(self) -> tuple[type[PromptPicture], tuple[Placed, MadePatches]]:
        return PromptPicture, (self.placed, MadePatches(self.read()))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The tokens that a response continues.

    Fields:
        id: names the prompt in seeds, samples and messages; the same in every run.
        tokens: at least one token.
        opening: the id of the prompt that its conversation began with; "" if it is that one.
        pictures: in the order of their places, one behind another.  A token that stands for none is text, whatever
            its id is.
    """

    id: str
    tokens: tuple[int, ...]
    opening: str = ""
    pictures: tuple[PromptPicture, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One finished response of N tokens.

    Fields:
        prompt_id, index: of the ``Request``.
        tokens: [N] int32, including the stop token if there is one.
        logprobs: [N] float32, the log-prob of each token under the distribution that it was drawn from:
            log_softmax(logits / temperature), over the tokens that top-p and top-k left (``Sampling.truncated``); at
            temperature 0, log_softmax(logits).
        versions: the version of the weights that drew each token, as spans that cover [0, N) in order.
        finish: why it ended.
        stop: the stop string or token id that ended it; None if the model's own end token, a limit or an abort did.
        text: the response without special tokens and stop string; "" without a tokenizer.
        cached_tokens: tokens of the prompt that the prefix cache had.
        experts: [prompt + N - 1, L, K], the experts of each token that the model processed, which excludes the last
            response token; None unless ``rollout.return_routed_experts``.  Of a sample that was aborted and continued,
            a token's are those of the pass that drew the next one.
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
    experts: RoutesArray | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Asks for one sample.

    Fields:
        prompt: the prompt to continue.
        index: the number of the sample among the prompt's samples, from 0.
        so_far: an aborted sample of the same prompt and index to continue.  The result begins with its tokens,
            log-probs and versions, and ``Sampling.max_tokens`` includes them.
    """

    prompt: Prompt
    index: int = 0
    so_far: Sample | None = None

    @property
    def key(self) -> tuple[str, int]:
        """(prompt id, index), which identifies the sample."""
        return self.prompt.id, self.index

    @property
    def num_done(self) -> int:
        """The number of tokens of ``so_far``."""
        return 0 if self.so_far is None else len(self.so_far.tokens)

    @property
    def tokens(self) -> list[int]:
        """The model's input: the prompt's tokens, then those of ``so_far``."""
        return [*self.prompt.tokens, *([] if self.so_far is None else self.so_far.tokens.tolist())]


def requests_of(prompts: Iterable[Prompt], n: int) -> list[Request]:
    """Requests for ``n`` samples of each prompt, prompt by prompt."""
    return [Request(prompt=prompt, index=index) for prompt in prompts for index in range(n)]


def aborted(request: Request) -> Sample:
    """The aborted sample of a request that no engine has begun: ``so_far``, else one without tokens."""
    if request.so_far is not None:
        return request.so_far
    return Sample(
        prompt_id=request.prompt.id,
        index=request.index,
        tokens=np.zeros(0, dtype=np.int32),
        logprobs=np.zeros(0, dtype=np.float32),
        versions=(),
        finish=FinishReason.abort,
    )


def seed_of(request: Request, sampling: Sampling) -> int:
    """The seed of one sample, 63 bits: a hash of the run's seed, the prompt id, the index and the tokens so far.

    A hash, so that no two samples share their draws: vLLM's own seed + index gives (seed 1, index 2) those of (2, 1).
    """
    text = f"{sampling.seed}/{request.index}/{request.num_done}/{request.prompt.id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def demand_numbers(request: Request, start: int, logprobs: NDArray[np.float32]) -> None:
    """Raises RolloutError if a log-prob is not finite.

    The model's logits were not finite there, so the token is meaningless, and vLLM does not report it.

    Args:
        request: the request whose response it is.
        start: position in the response of the first of ``logprobs``.
        logprobs: [tokens] float32.
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
    """Counts of an engine since it started, and its state after its last step.

    Fields:
        running, waiting: samples that run and that wait, now.
        kv_cache_usage: used share of the KV cache, 0 to 1, now.
        prompt_tokens: of all samples.
        cached_tokens: prompt tokens that were in the prefix cache.
        generated_tokens: of all samples.
        preemptions: how often a sample lost its KV cache to others and was computed again.
        busy_s: seconds in which at least one sample was running.
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
        """``generated_tokens`` divided by ``busy_s``; 0 before the first token."""
        return self.generated_tokens / self.busy_s if self.busy_s else 0.0


class SampleSource(Protocol):
    """Anything that generates samples: an engine, a pool of engines, or a pool that survives the death of engines."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """Generates the sample of every request; yields each as it finishes, in any order."""
        ...


class EngineMemory(Enum):
    """The memory that an engine releases when it sleeps; the values are vLLM's tags."""

    weights = "weights"
    kv_cache = "kv_cache"


class EnginePart(Protocol):
    """What an engine on several nodes has on one of them."""

    async def watch(self) -> None:
        """Waits until one of its processes ends, and raises DeadEngineError with the cause then."""
        ...


class RolloutEngine(SampleSource, Protocol):
    """One engine, of one or more ranks.  That of a reward model classifies; others generate.

    Methods return when they have taken effect.  Each raises DeadEngineError once the engine is gone; the message names
    the engine, what it was doing and the first cause.
    """

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """Generates the sample of every request; yields each as it finishes.  Closing the iterator aborts the rest.

        Raises, before anything is generated, RolloutError: an empty prompt, one that is too long, a stop string without
        a tokenizer; WeightsIncompleteError: weights that are only partly updated.
        """
        ...

    async def classify(self, texts: Sequence[Sequence[int]]) -> list[float | str]:
        """Returns the head's number at the last token of each text, finite or not; or vLLM's message if it fails.

        texts: the tokens of each text, at least one and at most ``reward_model.max_length``.
        """
        ...

    async def abort(self, keys: Iterable[tuple[str, int]] | None = None) -> None:
        """Ends these samples (None: all) with the tokens that they have; ``generate`` yields them, finish ``abort``.

        keys: (prompt id, index) of each.  ``Request.so_far`` continues such a sample.
        """
        ...

    async def pause(self, mode: Pause) -> None:
        """Generates no more tokens until ``resume``; new requests wait meanwhile."""
        ...

    async def resume(self) -> None:
        """Continues after ``pause``."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Releases the accelerator's memory; on the CPU, does nothing.

        level: 1 moves the weights to host memory, 2 drops them.
        """
        ...

    async def wake(self, memory: EngineMemory | None = None) -> None:
        """Takes the memory again; after level 2, weights must be sent before the engine can generate.

        memory: only that; the engine generates when it has both.  None: all of it.
        """
        ...

    async def version(self) -> int:
        """The version of the weights that will draw the next token."""
        ...

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        """Pauses, and refuses new samples until ``finish_update``: meanwhile weights may be half old, half new."""
        ...

    async def finish_update(self, version: int) -> None:
        """Ends an update: all weights are ``version`` now.  Drops caches of the old ones and continues kept samples."""
        ...

    async def fail_update(self, cause: str) -> None:
        """Aborts kept samples and refuses to generate, with ``cause`` in the message, until an update succeeds."""
        ...

    async def call_workers(
        self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **options: P.kwargs
    ) -> list[T]:
        """Calls a method of every rank's vLLM worker; returns the results in rank order.

        Arguments and results are plain values (no tensors, no custom classes): vLLM sends them as msgpack, so tuples
        arrive as lists.

        method: any function with the method's name and signature; ``worker_methods`` has those of this package.
        Raises RolloutError with what the method raised.
        """
        ...

    async def statistics(self) -> Statistics:
        """The engine's counts since its start, and its current state."""
        ...

    async def shutdown(self) -> None:
        """Ends the engine's processes."""
        ...
