"""transformers' side of a log-probability report: one device, eager attention, sequence by sequence, no padding.

It computes with transformers alone, so that it is independent of our code; but for ``rounded_model``, which puts the
rounding of engines in fp8 into transformers' model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from mcore_rl.arrays import Float64Array
from mcore_rl.checkpoints.rest import part_in
from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.rollout import Quantization
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.phase import phase
from mcore_rl.reports.question import TIE, Answers, Question, VllmSamples, floats
from mcore_rl.reports.rounded_model import rounded_scores
from mcore_rl.reports.transformers_config import effective_config
from mcore_rl.rollout.protocol import Prompt, Sample, Sampling

EVERYTHING = "the whole distribution at temperature 1"
TRUNCATED = "what top-p and top-k leave"


@torch.no_grad()
def score(question: Question, drawn: VllmSamples) -> dict[Precision, Answers]:
    """Score in each precision of the question."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # The whole of a multimodal checkpoint, which trainer and engine compute the text part of.
    of_model: Any = AutoModelForCausalLM if part_in(question.hf) is None else AutoModelForImageTextToText
    device, passes = device_of(detect(Device.auto), 0), {}
    for precision in question.precisions:
        with phase("transformers", dtype=precision.value):
            dtype = getattr(torch, precision.value)
            # Eager experts, one after another: the grouped product takes widths of whole 16 bytes only (torch 2.13).
            model: Any = of_model.from_pretrained(
                question.hf, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            )
            passes[precision] = _transformers_pass(model.to(device), question.sampling, drawn)
            if precision is Precision.float32 and question.quantization is not Quantization.none:
                logprobs_of = partial(response_logprobs, model, drawn, question.sampling.temperature)
                passes[precision] = replace(passes[precision], rounded=rounded_scores(model, question, logprobs_of))
            del model
    return passes


def _transformers_pass(model: Any, sampling: Sampling, drawn: VllmSamples) -> Answers:
    choices = _Choices(model)
    others = {EVERYTHING: 1.0} if sampling.temperature != 1 else {}
    rows: dict[str, list[Tensor]] = {name: [] for name in ("", *others, *([TRUNCATED] * sampling.truncated))}
    for sample in drawn.samples:
        logits_NV, tokens_N1 = _response_logits(model, drawn.prompts[sample.prompt_id], sample)
        scaled_NV = logits_NV / sampling.temperature
        rows[""].append(_chosen(scaled_NV, tokens_N1))
        for name, temperature in others.items():
            rows[name].append(_chosen(logits_NV / temperature, tokens_N1))
        if sampling.truncated:
            rows[TRUNCATED].append(_chosen(_truncated(scaled_NV, sampling), tokens_N1))
    routing_TLK = choices.taken()
    tops = []
    for sample in drawn.greedy:
        logits_NV, tokens_N1 = _response_logits(model, drawn.prompts[sample.prompt_id], sample)
        tops.append(logits_NV.gather(1, tokens_N1)[:, 0] >= logits_NV.amax(1) - TIE)
    values = {name: floats(torch.cat(parts)) for name, parts in rows.items()}
    return Answers(
        logprobs=values.pop(""),
        is_top1=torch.cat(tops).cpu().numpy(),
        sampled_from=values,
        routing_TLK=routing_TLK,
        config=effective_config(model),
    )


def response_logprobs(model: Any, drawn: VllmSamples, temperature: float) -> Float64Array:
    """Log-probs of the samples' response tokens."""
    rows = []
    for sample in drawn.samples:
        logits_NV, tokens_N1 = _response_logits(model, drawn.prompts[sample.prompt_id], sample)
        rows.append(_chosen(logits_NV / temperature, tokens_N1))
    return floats(torch.cat(rows))


def _response_logits(model: Any, prompt: Prompt, sample: Sample) -> tuple[Tensor, Tensor]:
    """(logits before each response token, float32 [N, V]; the tokens, int64 [N, 1])."""
    tokens = torch.tensor([[*prompt.tokens, *sample.tokens.tolist()]], device=model.device)
    logits = model(tokens, use_cache=False).logits[0].float()
    begin = len(prompt.tokens)
    return logits[begin - 1 : -1], tokens[0, begin:, None]


def _chosen(scaled_NV: Tensor, tokens_N1: Tensor) -> Tensor:
    return torch.log_softmax(scaled_NV, -1).gather(1, tokens_N1)[:, 0]


def _truncated(scaled_NV: Tensor, sampling: Sampling) -> Tensor:
    """Logits with -inf for tokens that top-k, and then top-p of the rest, cut off."""
    order_NV = scaled_NV.argsort(-1, descending=True)
    sorted_NV = scaled_NV.gather(-1, order_NV)
    if sampling.top_k > 0:
        sorted_NV[:, sampling.top_k :] = -torch.inf
    p_NV = sorted_NV.softmax(-1)
    before_NV = p_NV.cumsum(-1) - p_NV
    sorted_NV[before_NV >= sampling.top_p] = -torch.inf
    return torch.full_like(scaled_NV, -torch.inf).scatter(-1, order_NV, sorted_NV)


class _Choices:
    """Records the experts of every token, layer by layer.

    All of transformers' families call ``experts(x, index, weights)`` (modeling_mixtral.py, qwen2_moe, qwen3_moe and
    deepseek_v3, 5.19).
    """

    def __init__(self, model: Any) -> None:
        self._layers: dict[int, list[Tensor]] = {}
        layers = model.get_decoder().layers
        self._num_layers = len(layers)
        for number, layer in enumerate(layers):
            experts = layer.mlp._modules.get("experts")
            if experts is not None:
                experts.register_forward_pre_hook(partial(self._note, number))

    def _note(self, layer: int, module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._layers.setdefault(layer, []).append(arguments[1].to(torch.int16).cpu())

    def taken(self) -> Tensor | None:
        """Return and forget the choices so far, [T, L, K]; dense layers are zero.  None without experts."""
        if not self._layers:
            return None
        chosen = {layer: torch.cat(parts) for layer, parts in self._layers.items()}
        empty = torch.zeros_like(next(iter(chosen.values())))
        self._layers = {}
        return torch.stack([chosen.get(layer, empty) for layer in range(self._num_layers)], dim=1)
