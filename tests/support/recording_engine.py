"""Runs of this process on a CPU whose engines report experts, which vLLM's CPU build cannot.

vLLM draws the samples; the experts of each are transformers' with the first weights (kind ``own``), or others at random
(``random``), which no engine would report and therefore show what was made of them.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.controller.lifecycle import preparation, start_processes
from mcore_rl.controller.lifecycle.resending_pool import ResendingPool
from mcore_rl.controller.programs import start
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.arrays import RoutesArray
from mcore_rl.reports.transformers_scorer import _Choices
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.rollout.served import Served

Recorded = list[tuple[list[int], Sample]]  # the tokens of the prompt, and the sample with its experts


class Recorder:
    """Reports the experts of samples.  kind: ``own`` or ``random``."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._choices, self._kind = _Choices(self._reference), kind
        moe = model_of(read_config(directory))[1].moe
        assert moe is not None
        self._moe = moe

    def experts(self, request: Request, sample: Sample) -> RoutesArray:
        """Of all tokens but the last."""
        tokens = [*request.prompt.tokens, *sample.tokens.tolist()][:-1]
        with torch.no_grad():
            self._reference(torch.tensor([tokens]))
        own_TLK = self._choices.taken()
        assert own_TLK is not None
        if self._kind == "own":
            return own_TLK.numpy()
        seed = zlib.crc32(f"{sample.prompt_id}/{sample.index}".encode())
        shape = (*own_TLK.shape[:2], self._moe.num_experts)
        return np.random.default_rng(seed).random(shape).argsort(-1)[..., : self._moe.top_k]


@contextmanager
def experts_reported(recorder: Recorder) -> Iterator[Recorded]:
    """Within, engines report experts, and may be asked to.  Gives every sample, with its experts."""
    recorded: Recorded = []

    class Pool(ResendingPool):
        async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
            by_key = {request.key: request for request in requests}
            async for sample in super().generate(requests, sampling):
                request = by_key[sample.prompt_id, sample.index]
                sample = replace(sample, experts=recorder.experts(request, sample))
                recorded.append((list(request.prompt.tokens), sample))
                yield sample

    def unasked(served: Served, *args: Any, **options: Any) -> Any:
        assert isinstance(served.config, RolloutConfig)
        assert served.config.return_routed_experts, "the run asks its engines for experts"
        plain = replace(served.config, return_routed_experts=False)
        return started(replace(served, config=plain), *args, **options)

    started = start_processes.start_engines
    with (
        mock.patch.object(start, "ResendingPool", Pool),
        mock.patch.object(start_processes, "start_engines", unasked),
        mock.patch.object(preparation, "why_unrecorded", return_value=None),
    ):
        yield recorded
