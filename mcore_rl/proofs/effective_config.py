"""The configuration that a live model computes with, and the comparison of several of them, field by field.

Weights alone do not make a model: another rope theta, norm epsilon or number of experts per token changes every
log-prob, and no weight shows it.  Each side reads its own modules back (``training.effective_config``,
``rollout.vllm.effective_config``, ``reports.transformers_config``), never a file of ours, and this module
compares what they found.

Fields that a shape shows (widths, biases, the number of experts on disk) are left to the comparison of weights.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

P = ParamSpec("P")
# Plain values, as JSON has them: they come from other processes.
Value = bool | int | float | str | list[float] | None
EffectiveConfig = dict[str, dict[str, Value]]  # place in the model -> field, named as in ``config.model`` -> value

MODEL = "the model"
FINAL_NORM = "the final norm"
FREQUENCIES = "rotary_frequencies"
RTOL = 1e-6  # of a double that was a float32 on the way
# bfloat16 has 8 bits.  vLLM's table of cosines has the model's dtype; many rows tell a frequency better than one, but
# not a factor, whose square is in the scale.  The factor of embeddings is rounded before the product, or after it.
COARSER = {FREQUENCIES: 2e-3, "rotary_factor": 2**-8, "softmax_scale": 2**-7, "embedding_scale": 2**-8}
MAX_ROWS = 4096  # of a table of cosines that are read
INNER_NORMS = ("q_", "k_", "kv_")  # beginnings of the names of norms of queries, keys and latents
SHOWN = 8  # layers that a message names one by one


def layer_place(layer: int) -> str:
    """The place of ``layer`` (from 0) in an ``EffectiveConfig``."""
    return f"layer {layer}"


def joined(parts: Sequence[EffectiveConfig]) -> EffectiveConfig:
    """One configuration from those of all ranks, which hold different layers, or the same.

    Where ranks contradict each other, the value says so, and so differs from every other holder's.
    """
    whole: EffectiveConfig = {}
    for rank, part in enumerate(parts):
        for place, fields in part.items():
            held = whole.setdefault(place, {})
            for name, value in fields.items():
                if name in held and held[name] != value and not _alike(name, held[name], value):
                    value = f"{_shown(name, held[name])}, but {_shown(name, value)} on rank {rank}"
                held[name] = value
    return whole


def config_differences(configs: Mapping[str, EffectiveConfig]) -> list[str]:
    """One line for each field in which holders differ: the field, where, and the value of each holder.

    A field that a holder did not read (its places have no such entry) is not compared with it; see ``unread``.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for place in dict.fromkeys(place for config in configs.values() for place in config):
        held = {holder: config[place] for holder, config in configs.items() if place in config}
        for name in dict.fromkeys(name for fields in held.values() for name in fields):
            values = {holder: fields[name] for holder, fields in held.items() if name in fields}
            first = next(iter(values.values()))
            if not all(_alike(name, first, value) for value in values.values()):
                said = ", ".join(f"{holder} {_shown(name, value)}" for holder, value in values.items())
                lines.setdefault((name, said), []).append(place)
    return [f"{name} of {_places(places)}: {said}" for (name, said), places in lines.items()]


def unread(configs: Mapping[str, EffectiveConfig]) -> dict[str, list[str]]:
    """Holder -> the fields that another holder read at a place that both have, and this one did not."""
    missing: dict[str, list[str]] = {}
    for holder, config in configs.items():
        others = [other for name, other in configs.items() if name != holder]
        names = (name for place in config for other in others for name in other.get(place, {}).keys() - config[place])
        if lacking := sorted(set(names)):
            missing[holder] = lacking
    return missing


def _alike(name: str, one: Value, other: Value) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        rtol = COARSER.get(name, RTOL)
        return len(one) == len(other) and all(_close(a, b, rtol) for a, b in zip(one, other, strict=True))
    if isinstance(one, bool | str | None) or isinstance(other, bool | str | None):
        return type(one) is type(other) and one == other
    if isinstance(one, list) or isinstance(other, list):
        return False
    return _close(one, other, COARSER.get(name, RTOL))


def _close(one: float, other: float, rtol: float) -> bool:
    return math.isclose(one, other, rel_tol=rtol)


def _shown(name: str, value: Value) -> str:
    if isinstance(value, list):
        return _frequencies_shown(value) if name == FREQUENCIES else " and ".join(f"{each:.6g}" for each in value)
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value).strip('"')


def _frequencies_shown(values: Sequence[float]) -> str:
    """The base that explains the frequencies, ``scale * base ** (-i / n)``, where one does; else some of them."""
    pairs = len(values)
    if not pairs:
        return "no rotation"
    if pairs > 1 and values[-1] > 0:
        base = (values[0] / values[-1]) ** (pairs / (pairs - 1))
        fitted = [values[0] * base ** (-i / pairs) for i in range(pairs)]
        if all(_close(a, b, COARSER[FREQUENCIES]) for a, b in zip(values, fitted, strict=True)):
            slowed = "" if _close(values[0], 1.0, COARSER[FREQUENCIES]) else f" divided by {1 / values[0]:.3g}"
            return f"{pairs} pairs of base {float(f'{base:.3g}'):g}{slowed}"
    return f"{pairs} pairs from {values[0]:.4g} over {values[pairs // 2]:.4g} to {values[-1]:.4g}"


def _places(places: Sequence[str]) -> str:
    layers = [place.removeprefix("layer ") for place in places if place.startswith("layer ")]
    others = [place for place in places if not place.startswith("layer ")]
    if len(layers) > SHOWN:
        others.insert(0, f"{len(layers)} layers ({', '.join(layers[:3])} to {layers[-1]})")
    elif layers:
        others.insert(0, f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}")
    return " and ".join(others)


# What readers share


def readable(read: Callable[P, Mapping[str, Value]], *args: P.args, **options: P.kwargs) -> dict[str, Value]:
    """What ``read`` finds; nothing where a module lacks what it asks for.

    Another kernel, device or version may keep a field elsewhere.  That must stop no run: the field is not compared, and
    ``unread`` names it.
    """
    try:
        return dict(read(*args, **options))
    except (AttributeError, KeyError, TypeError):
        return {}


def norm_fields(modules: Iterable[tuple[str, nn.Module]], hidden_size: int) -> dict[str, Value]:
    """The epsilons of all norms among ``modules``, by their names; those of heads and latents apart.

    A norm is known by its vector ``weight`` (``layer_norm_weight`` where Transformer Engine fuses it into a linear) and
    its ``variance_epsilon`` or ``eps``, in transformers, vLLM and Megatron alike; one of heads or latents by its width,
    or by its name where it is as wide as the model (OLMoE's, over all heads).
    """
    epsilons: dict[str, set[float]] = {}
    for path, module in modules:
        own = vars(module)
        parameters = module._parameters
        weight = parameters.get("layer_norm_weight", parameters.get("weight"))
        epsilon = own.get("variance_epsilon", own.get("eps"))
        if isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(epsilon, float):
            inner = len(weight) != hidden_size or path.rpartition(".")[2].startswith(INNER_NORMS)
            name = "inner_norm_epsilon" if inner else "norm_epsilon"
            epsilons.setdefault(name, set()).add(epsilon)
    return {name: min(values) if len(values) == 1 else sorted(values) for name, values in epsilons.items()}


def gate_fields(activation: Callable[[Tensor], Tensor], clamp: float, offset: float) -> dict[str, Value]:
    """The gate of an MLP that clamps its halves and shifts the other one (gpt-oss)."""
    return {
        "activation": activation_name(activation),
        "activation_clamp": float(clamp),
        "glu_linear_offset": float(offset),
    }


def rotary_fields(frequencies: Sequence[float], factor: float, scale: float, head_dim: int) -> dict[str, Value]:
    """The rotation, and the scale of query-key products.

    frequencies: radians per position of each rotated pair.  factor: on cosine and sine.  scale: on query-key products.
    A factor on wholly rotated heads is the same as its square on their products, and is counted there.
    """
    if 2 * len(frequencies) == head_dim:
        factor, scale = 1.0, scale * factor**2
    return {FREQUENCIES: list(frequencies), "rotary_factor": factor, "softmax_scale": scale}


def neighbours_rotate(attention: Any) -> bool:
    """Whether rotated pairs are neighbours, by the ``rotate_half`` of the file of transformers' ``attention``.

    A file without it has a function for halves (gpt_oss), or rotates complex numbers (deepseek_v2), whose two parts are
    neighbours.
    """
    functions = vars(sys.modules[type(attention).__module__])
    rotate_half = functions.get("rotate_half")
    if (
        rotate_half is None
        and (rotated := functions.get("_apply_rotary_emb")) is not None
        and "first_half" in (rotated.__code__.co_varnames)
    ):
        return False
    return rotate_half is None or bool(rotate_half(torch.tensor([0.0, 1.0, 0.0, 0.0]))[0] != 0)


def linear_fields(num_key_heads: int, num_value_heads: int) -> dict[str, Value]:
    """What the shapes of linear attention do not show."""
    prefix = "linear_attention."
    return {f"{prefix}num_key_heads": num_key_heads, f"{prefix}num_value_heads": num_value_heads}


def routing_fields(
    *, num_experts: int, top_k: int, score: str, norm_topk_prob: bool, num_groups: int, top_k_groups: int, scale: float
) -> dict[str, Value]:
    """How experts are chosen and weighed, in one spelling.

    Groups of which none is left out are no groups; a softmax of which all experts are chosen is normalised already.
    """
    limited = top_k_groups < num_groups
    return {
        "moe.num_experts": num_experts,
        "moe.top_k": top_k,
        "moe.score": score,
        "moe.norm_topk_prob": norm_topk_prob or (score == "softmax" and top_k == num_experts),
        "moe.num_groups": num_groups if limited else 1,
        "moe.top_k_groups": top_k_groups if limited else 1,
        "moe.routed_scaling_factor": float(scale),
    }


@cache
def activation_name(function: Callable[[Tensor], Tensor]) -> str:
    """The name of an activation, found by what it makes of some numbers; its own name if it is none that we know."""
    x = torch.tensor([-2.0, -0.5, 1.5], device="cpu")
    known = {
        "silu": nn.functional.silu(x),
        "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
        "gelu": nn.functional.gelu(x),
        "quick_gelu": x * torch.sigmoid(1.702 * x),
        "relu": nn.functional.relu(x),
    }
    made = function(x)
    matches = [name for name, values in known.items() if torch.allclose(made, values, rtol=0, atol=1e-6)]
    return matches[0] if matches else str(function)


@torch.no_grad()
def frequencies_of(cos_PN: Tensor, sin_PN: Tensor) -> tuple[list[float], float]:
    """(radians per position of each of N pairs, the factor on cosine and sine) of a table over P positions from 0.

    The table may be rounded to bfloat16: every row that is read halves the error of the rows before it, and the last
    half of them are averaged.
    """
    rows = min(len(cos_PN), MAX_ROWS)
    assert rows > 1, "one position says nothing of a frequency"
    cos_PN = cos_PN[:rows].double().cpu()
    sin_PN = sin_PN[:rows].double().cpu()
    factor = torch.hypot(cos_PN, sin_PN).mean()
    angles_PN = _angles(cos_PN / factor, sin_PN / factor)
    frequencies_N = angles_PN[1]
    position = 2
    while position < rows:
        off_N = angles_PN[position] - frequencies_N * position
        frequencies_N = frequencies_N + (off_N - 2 * math.pi * (off_N / (2 * math.pi)).round()) / position
        position *= 2
    positions_P1 = torch.arange(max(rows // 2, 1), rows, dtype=torch.float64)[:, None]
    off_PN = angles_PN[-len(positions_P1) :] - positions_P1 * frequencies_N
    off_PN -= 2 * math.pi * (off_PN / (2 * math.pi)).round()
    frequencies_N = frequencies_N + (off_PN / positions_P1).mean(0)
    return frequencies_N.tolist(), float(factor)


def _angles(cos: Tensor, sin: Tensor) -> Tensor:
    """Angles in (-pi, pi] from the smaller of cosine and sine, because the larger one hardly changes with the angle."""
    from_sin = torch.asin(sin.clamp(-1, 1))
    from_sin = torch.where(cos < 0, torch.copysign(torch.full_like(sin, math.pi), sin) - from_sin, from_sin)
    from_cos = torch.copysign(torch.acos(cos.clamp(-1, 1)), sin)
    return torch.where(sin.abs() < cos.abs(), from_sin, from_cos)
