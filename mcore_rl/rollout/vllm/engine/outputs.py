"""Converts between this package's records and vLLM's: inputs with pictures, sampling parameters, finished responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from mcore_rl.episodes import FinishReason, VersionSpan
from mcore_rl.errors import RolloutError
from mcore_rl.rollout.protocol import PromptPicture, Request, Sample, Sampling, demand_numbers, seed_of
from mcore_rl.rollout.routes import continued
from mcore_rl.rollout.vllm.engine.patch_files import name_of, named


def picture_item(picture: PromptPicture, *, by_name: bool) -> MultiModalKwargsItem:
    """The picture as the models of ``picture_models`` take it.  by_name: its patches are in a file of ``patch_files``.

    No patch is copied here.
    """
    grid = picture.placed.grid
    patches = named(picture) if by_name else torch.from_numpy(picture.read())
    rows = torch.tensor([len(patches)])
    fields: Mapping[str, tuple[MultiModalFieldConfig, torch.Tensor]] = {
        "pixel_values": (MultiModalFieldConfig.flat_from_sizes("image", rows, keep_on_cpu=by_name), patches),
        "image_grid_thw": (
            MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            torch.tensor([[grid.t, grid.h, grid.w]]),
        ),
    }
    return MultiModalKwargsItem({name: kind.build_elems(name, data)[0] for name, (kind, data) in fields.items()})


def engine_input(request: Request, items: Mapping[int, MultiModalKwargsItem]) -> Any:
    """vLLM's input of one sample, already processed: the tokens, and where each picture is among them.

    items: ``picture_item`` of each picture of the prompt, by the picture's identity.
    """
    pictures = request.prompt.pictures
    if not pictures:
        return tokens_input(request.tokens)
    placed = [picture.placed for picture in pictures]
    return mm_input(
        request.tokens,
        {"image": [items[id(picture)] for picture in pictures]},
        {"image": [name_of(each.image.sha256, each.grid.h, each.grid.w) for each in placed]},
        {"image": [PlaceholderRange(offset=each.first, length=each.grid.tokens) for each in placed]},
    )


def sampling_params(request: Request, sampling: Sampling, *, detokenize: bool) -> SamplingParams:
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
        logprobs=0,  # of the drawn token only
        flat_logprobs=True,  # four lists instead of one dictionary per token
        detokenize=detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sample_of(request: Request, output: RequestOutput) -> Sample:
    """The whole response to ``request``, from vLLM's last and only ``output``.

    It begins with the tokens of ``request.so_far``.  RolloutError: a log-prob is not finite, or vLLM ended the sample
    with an error.
    """
    (completion,) = output.outputs
    if completion.finish_reason not in FinishReason.__members__:
        raise RolloutError(f"prompt {request.prompt.id}: vLLM ended the sample with {completion.finish_reason}")
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    flat = [] if completion.logprobs is None else completion.logprobs.logprobs
    assert len(flat) == len(tokens), f"{len(flat)} log-probs of {len(tokens)} tokens"
    logprobs = np.asarray(flat, dtype=np.float32)
    done, so_far = request.num_done, request.so_far
    demand_numbers(request, done, logprobs)
    # vLLM's spans count from the first token that it generated for this request.
    spans = [
        VersionSpan(version=int(span.version), start=done + span.start, end=done + span.end)
        for span in completion.weight_versions or []
    ]
    return Sample(
        prompt_id=request.prompt.id,
        index=request.index,
        tokens=tokens if so_far is None else np.concatenate([so_far.tokens, tokens]),
        logprobs=logprobs if so_far is None else np.concatenate([so_far.logprobs, logprobs]),
        versions=(*(() if so_far is None else so_far.versions), *spans),
        finish=FinishReason(completion.finish_reason),
        stop=completion.stop_reason,
        text=completion.text if so_far is None else so_far.text + completion.text,
        cached_tokens=output.num_cached_tokens or 0,
        experts=continued(request, completion.routed_experts),
    )
