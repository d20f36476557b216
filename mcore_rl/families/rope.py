"""The rotary position embedding of a configuration, in both spellings.

Until version 4 transformers wrote ``rope_theta`` and ``rope_scaling``; since 5 it writes ``rope_parameters`` with both
inside.  Numbers are those of modeling_rope_utils.py in transformers 5.19.  Frequencies that change with the length of
the input cannot be trained: longrope is read for the lengths of the pre-training alone (phi3), and dynamic NTK equals
the default up to ``max_position_embeddings`` (``_compute_dynamic_ntk_parameters``: the base is multiplied by a power of
1), which is our longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from mcore_rl.config.model import RopeConfig, RopeType
from mcore_rl.families.fields import Fields, same

_LLAMA3_RAMP = "needs low_freq_factor below high_freq_factor"


Reader = Callable[[Fields, int], tuple[RopeConfig, float]]


def read_partial_rotary_factor(fields: Fields, default: float) -> float:
    """The rotated share of each head: beside ``rope_theta``, or with it in the rope's own fields."""
    share = fields.take("partial_rotary_factor", float, default)
    for name in ("rope_parameters", "rope_scaling"):
        inner = Fields(fields.values[name]) if isinstance(fields.values.get(name), dict) else None
        if inner is None or "partial_rotary_factor" not in inner.values:
            continue
        inside = inner.take("partial_rotary_factor", float, default)
        fields.violations += inner.violations
        if "partial_rotary_factor" in fields.values and inside != share:
            fields.refuse("partial_rotary_factor", f"stands beside {name}'s of {inside}", "Keep one of the two")
        share = inside
    return share


def read_rope(
    fields: Fields,
    default_theta: float,
    max_position_embeddings: int,
    *,
    kinds: Mapping[str, Reader] | None = None,
    partial: bool = False,
) -> tuple[float, RopeConfig, float]:
    """(base, rope configuration, factor of ``mscale_all_dim`` on the softmax scale of latent attention).

    default_theta: of the configuration class.  kinds: the readers of the rope types that the family has; None: those of
    most.  partial: the family reads ``partial_rotary_factor`` itself.
    """
    readers = _KINDS if kinds is None else kinds
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    inner = fields.inside(name)
    other = fields.inside("rope_parameters" if name == "rope_scaling" else "rope_scaling")
    if other is not None:
        fields.refuse("rope_parameters", "stands beside another rope_scaling", "Keep one of the two")
    theta = fields.take("rope_theta", float, default_theta)
    if inner is None:
        return theta, RopeConfig(), 1.0
    base, rope, scale = read_parameters(inner, theta, max_position_embeddings, readers, partial=partial)
    if "rope_theta" in fields.values and base != theta:
        fields.refuse("rope_theta", f"stands beside {name}.rope_theta={base}", "Keep one of the two")
    fields.close(inner)
    return base, rope, scale


def read_parameters(
    inner: Fields, theta: float, longest: int, kinds: Mapping[str, Reader], *, partial: bool = False
) -> tuple[float, RopeConfig, float]:
    """``read_rope`` of the mapping alone, which the caller closes.  theta: what stands outside it."""
    base = inner.take("rope_theta", float, theta)
    if partial:
        inner.ignore("partial_rotary_factor")
    else:
        inner.demand("partial_rotary_factor", 1, None, because="rotates a part of each head only")
    kind = inner.take("type", str, "default")
    if "rope_type" in inner.values:
        spelt = kind
        kind = inner.take("rope_type", str, "default")
        if "type" in inner.values and not same(spelt, kind):
            inner.refuse("type", f"stands beside rope_type={kind}", "Keep one of the two")
    rope = RopeConfig()
    scale = 1.0
    if kind in kinds:
        rope, scale = kinds[kind](inner, longest)
    else:
        spelling = "rope_type" if "rope_type" in inner.values else "type"
        inner.refuse(spelling, "is not supported", f"Choose a checkpoint with one of {', '.join(kinds)}")
        inner.ignore(*inner.values)  # one violation is enough
    return base, rope, scale


def _factor(inner: Fields) -> float:
    factor = inner.take("factor", float, 1.0)
    if "factor" not in inner.values or factor < 1:
        inner.refuse("factor", "this rope type extends the context by a factor", "Write a number of 1 or more")
    return factor


def _trained(inner: Fields, longest: int) -> int:
    trained = inner.take("original_max_position_embeddings", int, longest)
    if trained < 1:
        inner.refuse("original_max_position_embeddings", "is the length of the pre-training", "Write 1 or more")
    return max(trained, 1)


def read_default(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
    """Frequencies as they are."""
    return RopeConfig(), 1.0


def read_linear(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
    """Frequencies divided by one number."""
    return RopeConfig(type=RopeType.linear, factor=_factor(inner)), 1.0


def _dynamic(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
    _factor(inner)
    because = f"moves the length from which the frequencies change away from max_position_embeddings={longest}"
    inner.demand("original_max_position_embeddings", longest, None, because=because)
    return RopeConfig(), 1.0


def _llama3(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
    rope = RopeConfig(
        type=RopeType.llama3,
        factor=_factor(inner),
        original_max_position_embeddings=_trained(inner, longest),
        low_freq_factor=inner.take("low_freq_factor", float, 1.0),
        high_freq_factor=inner.take("high_freq_factor", float, 4.0),
    )
    for name in ("low_freq_factor", "high_freq_factor"):
        if name not in inner.values:
            inner.refuse(name, f"rope type llama3 {_LLAMA3_RAMP}, and transformers has no default", "Write both")
    if rope.low_freq_factor >= rope.high_freq_factor:
        inner.refuse("low_freq_factor", f"rope type llama3 {_LLAMA3_RAMP}={rope.high_freq_factor}", "Write a lower one")
    return rope, 1.0


def read_yarn(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
    """A ramp over dimensions, and a factor on cosine and sine."""
    trained = _trained(inner, longest)
    if inner.values.get("factor") is None and "factor" in inner.values:
        inner.optional("factor", float)
        factor = longest / trained
    else:
        factor = _factor(inner)
    mscale = inner.optional("mscale", float)
    mscale_all_dim = inner.optional("mscale_all_dim", float)
    given = [value for value in (mscale, mscale_all_dim) if value is not None]
    if len(given) == 1 or any(value <= 0 for value in given):
        inner.refuse("mscale", "is read together with mscale_all_dim", "Write both, positive, or neither")
    attention_factor = inner.optional("attention_factor", float)
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    rope = RopeConfig(
        type=RopeType.yarn,
        factor=factor,
        original_max_position_embeddings=trained,
        beta_fast=inner.optional("beta_fast", float) or 32.0,
        beta_slow=inner.optional("beta_slow", float) or 1.0,
        truncate=inner.take("truncate", bool, True),
        attention_factor=attention_factor,
    )
    return rope, _mscale(factor, mscale_all_dim) ** 2 if mscale_all_dim else 1.0


def _mscale(factor: float, mscale: float) -> float:
    """``get_mscale`` in modeling_rope_utils.py."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _latent_yarn(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
    because = "is overruled by mscale in vLLM (models/deepseek_v2.py, 0.32) and overrules it in transformers"
    inner.demand("attention_factor", None, because=because)
    return read_yarn(inner, longest)


def _gpt_oss_yarn(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
    """What vLLM passes on: ``factor``, the length, the bounds and ``truncate``; it computes the attention factor."""
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        if inner.values.get(name) is None:
            inner.refuse(name, "is missing, and vLLM 0.32 needs it", "Write the number of the checkpoint")
    rope, scale = read_yarn(inner, longest)
    because = "changes the factor on cosine and sine, which vLLM 0.32 does not read here"
    inner.demand("attention_factor", None, _mscale(rope.factor, 1.0), because=because)
    for name in ("mscale", "mscale_all_dim"):
        inner.demand(name, None, because=because)
    return rope, scale


def _default_of_axes(inner: Fields, longest: int) -> tuple[RopeConfig, float]:
    """The default, by positions of three axes, which are one for a token of text."""
    inner.ignore("mrope_section", "mrope_interleaved")
    return read_default(inner, longest)


_KINDS: dict[str, Reader] = {
    "default": read_default,
    "linear": read_linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": read_yarn,
}
# Of latent attention, where vLLM 0.32 takes every other type for yarn.
LATENT_KINDS: dict[str, Reader] = {"default": read_default, "yarn": _latent_yarn}
YARN_KINDS: dict[str, Reader] = {"yarn": _gpt_oss_yarn}  # vLLM's models/gpt_oss.py (0.32) takes every type for yarn
# Of language models from multimodal checkpoints, whose other types vLLM 0.32 rotates without axes.
KINDS_OF_AXES: dict[str, Reader] = {"default": _default_of_axes}
