"""Between our records and vLLM's: sampling parameters going in, pieces of responses coming out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from mcore_rl.errors import RolloutError
from mcore_rl.rollout.protocol import (
    Chunk,
    FinishReason,
    Request,
    Sample,
    Sampling,
    VersionSpan,
    demand_numbers,
    seed_of,
)


def sampling_params(
    request: Request, sampling: Sampling, kind: RequestOutputKind, *, detokenize: bool
) -> SamplingParams:
    """vLLM's parameters of one sample."""
    greedy = sampling.temperature == 0
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=-1 if greedy else sampling.top_k,
        seed=None if greedy else seed_of(request, sampling),
        max_tokens=sampling.max_tokens - request.num_done,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,  # of the token that was drawn, and no other
        flat_logprobs=True,  # four lists instead of one dictionary a token
        detokenize=detokenize,
        output_kind=kind,
    )


class Response:
    """One response as it comes in, piece by piece or all at once."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._tokens: list[NDArray[np.int32]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._text: list[str] = []
        self._versions: list[VersionSpan] = []
        self._length = 0
        if request.so_far is not None:
            self._add(request.so_far.tokens, request.so_far.logprobs, request.so_far.text)
            self._versions += request.so_far.versions

    def chunk(self, output: RequestOutput) -> Chunk:
        """Take the tokens that are new in ``output``."""
        (completion,) = output.outputs
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        flat = [] if completion.logprobs is None else completion.logprobs.logprobs
        assert len(flat) == len(tokens), f"{len(flat)} log-probs of {len(tokens)} tokens"
        start = self._length
        logprobs = np.asarray(flat, dtype=np.float32)
        demand_numbers(self.request, start, logprobs)
        self._add(tokens, logprobs, completion.text)
        prompt = self.request.prompt
        return Chunk(
            prompt_id=prompt.id,
            index=self.request.index,
            start=start,
            tokens=tokens,
            logprobs=logprobs,
            text=completion.text,
        )

    def sample(self, output: RequestOutput) -> Sample:
        """The whole of it, once ``output`` is vLLM's last."""
        (completion,) = output.outputs
        self._versions += self._new_versions(completion)
        finish = completion.finish_reason
        if finish not in FinishReason.__members__:
            raise RolloutError(f"prompt {self.request.prompt.id}: vLLM ended the sample with {finish}")
        experts = completion.routed_experts
        return Sample(
            prompt_id=self.request.prompt.id,
            index=self.request.index,
            tokens=np.concatenate([np.empty(0, np.int32), *self._tokens]),
            logprobs=np.concatenate([np.empty(0, np.float32), *self._logprobs]),
            versions=tuple(self._versions),
            finish=FinishReason(finish),
            stop=completion.stop_reason,
            text="".join(self._text),
            cached_tokens=output.num_cached_tokens or 0,
            experts=None if experts is None else np.asarray(experts, dtype=np.int16),
        )

    def _add(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], text: str) -> None:
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        self._text.append(text)
        self._length += len(tokens)

    def _new_versions(self, completion: CompletionOutput) -> list[VersionSpan]:
        """vLLM's spans, which count from the first token that it made."""
        done = self.request.num_done
        spans = completion.weight_versions or []
        return [VersionSpan(version=int(s.version), start=done + s.start, end=done + s.end) for s in spans]
