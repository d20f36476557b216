"""transformers' side of a log-probability report: one device, eager attention, sequence by sequence, no padding.

It computes with transformers alone, so that it is independent of our code; but for the rounding of engines in fp8,
which is put into transformers' model, one group of layers after another.

What an engine in fp8 does otherwise than one in bfloat16 is three things: its matrices are rounded, what they multiply
is rounded, and its kernels add in an order of their own.  transformers in float32 shows the first two, each alone.
Matrices are exchanged in place.  Products are caught where they are computed (``torch.nn.functional.linear``), since
experts are no modules in transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from mcore_rl.checkpoints.convert import open_hf
from mcore_rl.checkpoints.rest import part_in
from mcore_rl.checkpoints.rounded_weights import rounded_tensors
from mcore_rl.checkpoints.stacked import expert_parameters
from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import Quantization
from mcore_rl.families.family import Family
from mcore_rl.families.stacks import StackedPart, stacked_parts
from mcore_rl.ground.arrays import Float64Array
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.phase import phase
from mcore_rl.reports.question import ALL, TIE, Answers, Question, RoundedScores, VllmSamples, floats
from mcore_rl.reports.transformers_config import effective_config
from mcore_rl.rollout.protocol import Sample, Sampling
from mcore_rl.weights.quantised import rounded_activations
from mcore_rl.weights.quantised_shards import LayerGroup, group_of, is_quantised
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.tensor_slice import TensorSlice

EVERYTHING = "the whole distribution at temperature 1"
TRUNCATED = "what top-p and top-k leave"
LAYERS = "layers."  # begins the name of a layer's tensor in transformers' decoder
Distribution = Callable[[Tensor], Tensor]  # the model's logits to those that tokens are drawn with


@torch.no_grad()
def score(question: Question, drawn: VllmSamples) -> dict[Precision, Answers]:
    """Score in each precision of the question."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # The whole of a multimodal checkpoint, which trainer and engine compute the text part of.
    of_model: Any = AutoModelForCausalLM if part_in(question.hf) is None else AutoModelForImageTextToText
    device = device_of(detect(Device.auto), 0)
    passes = {}
    for precision in question.precisions:
        with phase("transformers", dtype=precision.value):
            dtype = getattr(torch, precision.value)
            # Eager experts, one after another: the grouped product takes widths of whole 16 bytes only (torch 2.13).
            model: Any = of_model.from_pretrained(
                question.hf, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            )
            passes[precision] = _transformers_pass(model.to(device), question.sampling, drawn)
            if precision is Precision.float32 and question.quantization is not Quantization.none:
                logprobs_of = partial(_sampled_logprobs, model, drawn, question.sampling.temperature)
                passes[precision] = replace(passes[precision], rounded=rounded_scores(model, question, logprobs_of))
            del model
    return passes


def _transformers_pass(model: Any, sampling: Sampling, drawn: VllmSamples) -> Answers:
    choices = _Choices(model)
    tempered = _tempered(sampling.temperature)
    distributions = {"": tempered}
    if sampling.temperature != 1:
        distributions[EVERYTHING] = _tempered(1.0)
    if sampling.truncated:
        distributions[TRUNCATED] = lambda logits_NV: _truncated(tempered(logits_NV), sampling)
    values = _logprobs(model, drawn, distributions)
    routing_TLK = choices.taken()
    tops = [
        logits_NV.gather(1, tokens_N1)[:, 0] >= logits_NV.amax(1) - TIE
        for logits_NV, tokens_N1 in _response_logits(model, drawn, drawn.greedy)
    ]
    return Answers(
        logprobs=values.pop(""),
        is_top1=torch.cat(tops).cpu().numpy(),
        sampled_from=values,
        routing_TLK=routing_TLK,
        config=effective_config(model),
    )


def _tempered(temperature: float) -> Distribution:
    return lambda logits_NV: logits_NV / temperature


def _sampled_logprobs(model: Any, drawn: VllmSamples, temperature: float) -> Float64Array:
    return _logprobs(model, drawn, {"": _tempered(temperature)})[""]


def _logprobs(model: Any, drawn: VllmSamples, distributions: Mapping[str, Distribution]) -> dict[str, Float64Array]:
    """Log-probs of the samples' response tokens under each distribution."""
    rows: dict[str, list[Tensor]] = {name: [] for name in distributions}
    for logits_NV, tokens_N1 in _response_logits(model, drawn, drawn.samples):
        for name, distribution in distributions.items():
            logprobs_NV = torch.log_softmax(distribution(logits_NV), -1)
            rows[name].append(logprobs_NV.gather(1, tokens_N1)[:, 0])
    return {name: floats(torch.cat(parts)) for name, parts in rows.items()}


def _response_logits(model: Any, drawn: VllmSamples, samples: Sequence[Sample]) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits before each response token, float32 [N, V]; the tokens, int64 [N, 1]) of each of ``samples``."""
    for sample in samples:
        prompt = drawn.prompts[sample.prompt_id].tokens
        tokens = torch.tensor([[*prompt, *sample.tokens.tolist()]], device=model.device)
        logits = model(tokens, use_cache=False).logits[0].float()
        yield logits[len(prompt) - 1 : -1], tokens[0, len(prompt) :, None]


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


class RoundedActivations(TorchFunctionMode):
    """While it is entered, rounds what is multiplied by one of ``matrices``."""

    def __init__(self, quantization: Quantization, matrices: Iterable[Tensor]) -> None:
        super().__init__()
        self.quantization = quantization
        self.addresses = {matrix.data_ptr() for matrix in matrices}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls ``func``; of a product with one of the matrices the input is rounded first."""
        if func is torch.nn.functional.linear and args[1].data_ptr() in self.addresses:
            args = (rounded_activations(args[0], self.quantization), *args[1:])
        return func(*args, **(kwargs or {}))


def rounded_scores(model: Any, question: Question, logprobs_of: Callable[[], Float64Array]) -> dict[str, RoundedScores]:
    """Log-probs of ``model`` after rounding, by group of layers, and of all together; ``model`` is left as it was.

    model: transformers' of ``question.hf``, in float32.  logprobs_of: scores the tokens with it.
    """
    checkpoint, plain = open_hf(question.hf)
    table = RolloutTable(plain.family, plain.model, question.rollout)
    present = {group_of(rule) for rule in table.rules if is_quantised(rule) and table.layers(rule)}
    groups: dict[str, Collection[LayerGroup]] = {ALL: present}
    if len(present) > 1:
        groups |= {group.value: (group,) for group in LayerGroup if group in present}
    place_of = _Places(model, plain.family, plain.model)
    scores = {}
    with checkpoint:
        for name, members in groups.items():
            exchanged: dict[str, Tensor] = {}
            for tensor, values in rounded_tensors(checkpoint, table, question.quantization, members):
                exchanged[tensor] = place_of(tensor)
                exchanged[tensor].copy_(values)
            weights = logprobs_of()
            with RoundedActivations(question.quantization, exchanged.values()):
                scores[name] = RoundedScores(weights=weights, activations=logprobs_of())
            for tensor, there in exchanged.items():
                values = torch.empty(there.shape)
                checkpoint.read_into(tensor, TensorSlice.whole(there.shape), values)
                there.copy_(values)
    return scores


class _Places:
    """Where transformers' decoder has a tensor of the files, as a view of its parameter."""

    def __init__(self, model: Any, family: Family, config: ModelConfig) -> None:
        self.parameters: dict[str, Tensor] = dict(model.get_decoder().named_parameters())
        self.parts: dict[str, StackedPart] = {}
        if config.moe is not None:
            self.parts = stacked_parts(expert_parameters(family), config)

    def __call__(self, name: str) -> Tensor:
        part = self.parts.get(name)
        if part is None:
            return self.parameters[_in_decoder(name)].data
        view: Tensor = part.within(self.parameters[_in_decoder(part.stored)].data[part.expert])
        return view


def _in_decoder(name: str) -> str:
    return name[name.index(LAYERS) :]
