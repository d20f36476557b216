"""gpt-oss: attention sinks, biases on every linear layer, alternating windows, yarn, experts with a clamped gate.

Its checkpoints stack the experts of a layer, with the rows of gate and up in turns, and matrices as [inputs, outputs].
vLLM (models/gpt_oss.py, 0.32) keeps the turns, which its kernels expect; Megatron has the gate before the rest.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.model import Activation, ModelConfig, MoeConfig
from mcore_rl.families.blocks import (
    ATTENTION,
    ENDS,
    GROUPED_ATTENTION,
    HF_ATTENTION,
    HF_MLP,
    LAYER,
    NORMS,
    QKV_BIAS,
    experts,
    of_vllm,
)
from mcore_rl.families.decoder import Defaults, demand_untied, read_layer_types, read_sizes, set_window
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.rope import YARN_KINDS, read_rope, read_yarn
from mcore_rl.families.rules import Axis, Layers, Rule, first_shard, hf, split
from mcore_rl.families.stacks import Stack

DEFAULTS = Defaults(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
)
ALPHA = 1.702  # of the gate, which vLLM's kernels have written in (activation swigluoai)
LIMIT = 7.0
DEFAULT_ROPE = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}  # of the configuration class


def read(fields: Fields) -> ModelConfig:
    """Reads ``GptOssConfig``; refuses what vLLM's models/gpt_oss.py (0.32) has written in otherwise."""
    model = read_sizes(fields, DEFAULTS)
    model.head_dim = fields.take("head_dim", int, 64)
    longest = model.max_position_embeddings
    model.rotary_base, model.rope, _ = read_rope(fields, DEFAULTS.rope_theta, longest, kinds=YARN_KINDS)
    if not any(fields.values.get(name) for name in ("rope_parameters", "rope_scaling")):
        model.rope, _ = read_yarn(Fields(DEFAULT_ROPE), longest)
    fields.demand("hidden_act", "silu", because="is another activation, which transformers does not read here")
    fields.demand("swiglu_alpha", ALPHA, because="is another gate, which vLLM 0.32 does not read")
    fields.demand("swiglu_limit", LIMIT, because="clamps elsewhere, which vLLM 0.32 does not read")
    fields.demand("attention_bias", True, because="leaves out biases, and vLLM 0.32 has them")
    fields.demand("rms_norm_eps", 1e-5, because="is not 1e-5, which vLLM 0.32 has written in")
    demand_untied(fields)
    alternating = list(range(0, model.num_layers, 2))
    layers = read_layer_types(fields, model, alternating)
    if layers != alternating:
        problem = "is not a window in the first layer and in every second one behind it, which vLLM 0.32 has"
        fields.refuse("layer_types", problem, "Choose a checkpoint with these")
    set_window(model, fields.take("sliding_window", int, 128), alternating)
    model.attention_sinks = model.qkv_bias = model.linear_bias = True
    model.activation = Activation.quick_gelu
    model.activation_clamp = LIMIT
    model.glu_linear_offset = 1.0
    for name in ("num_experts", "experts_per_token"):  # the names of OpenAI's own code, beside those below
        fields.ignore(name)
    model.moe = MoeConfig(
        num_experts=fields.take("num_local_experts", int, 128),
        top_k=fields.take("num_experts_per_tok", int, 4),
        ffn_hidden_size=model.ffn_hidden_size,
    )
    return model


_EXPERT = HF_MLP + "experts.{e}."
GATE_BIAS, UP_BIAS = (hf(f"{_EXPERT}{part}_proj.bias", "expert_ffn") for part in ("gate", "up"))
DOWN_BIAS = hf(_EXPERT + "down_proj.bias", "hidden")
GATE, UP = (hf(f"{_EXPERT}{part}_proj.weight", "expert_ffn", "hidden") for part in ("gate", "up"))
DOWN = hf(_EXPERT + "down_proj.weight", "hidden", "expert_ffn")
STACKS = (
    Stack(HF_MLP + "experts.gate_up_proj", (GATE, UP), in_turns=True, transposed=True),
    Stack(HF_MLP + "experts.gate_up_proj_bias", (GATE_BIAS, UP_BIAS), in_turns=True),
    Stack(HF_MLP + "experts.down_proj", (DOWN,), transposed=True),
    Stack(HF_MLP + "experts.down_proj_bias", (DOWN_BIAS,)),
)

_LOCAL = LAYER + "mlp.experts.local_experts.{e}."
_STORED = LAYER + "mlp.experts.experts."
_OUTPUT_BIAS = Rule(ATTENTION + "linear_proj.bias", (hf(HF_ATTENTION + "o_proj.bias", "hidden"),))
_SINKS = Rule(
    ATTENTION + "core_attention.softmax_offset",
    (hf(HF_ATTENTION + "sinks", "query_heads"),),
    split,
    axis=Axis.tensor,
)
_ROUTER_BIAS = Rule(LAYER + "mlp.router.bias", (hf(HF_MLP + "router.bias", "experts"),), layers=Layers.experts)
_EXPERTS = experts(HF_MLP, router="router.weight")
WEIGHTS = (
    *ENDS.weights,
    *NORMS.weights,
    *GROUPED_ATTENTION.weights,
    *QKV_BIAS.weights,
    _OUTPUT_BIAS,
    _SINKS,
    *_EXPERTS.weights,
    _ROUTER_BIAS,
    Rule(
        _LOCAL + "linear_fc1.bias",
        (GATE_BIAS, UP_BIAS),
        split,
        axis=Axis.expert_tensor,
        layers=Layers.experts,
        checkpoint=_STORED + "linear_fc1.bias",
    ),
    Rule(_LOCAL + "linear_fc2.bias", (DOWN_BIAS,), layers=Layers.experts, checkpoint=_STORED + "linear_fc2.bias"),
)
_ROUTER, _W13_BOTH, _W2 = _EXPERTS.rollout
_W13 = replace(_W13_BOTH, hf=(GATE,), turn=(0, 2))
_W13_BIAS = replace(_W13, name=HF_MLP + "experts.routed_experts.w13_bias", hf=(GATE_BIAS,))
_EMBEDDING, *_OTHER_ENDS = ENDS.rollout
_QKV, _PROJECTION = GROUPED_ATTENTION.rollout
_ATTENTION = (_QKV, *QKV_BIAS.rollout, _PROJECTION, of_vllm(_OUTPUT_BIAS), of_vllm(_SINKS))
ROLLOUT = (
    replace(_EMBEDDING, name="model.embedding.weight"),
    *_OTHER_ENDS,
    *NORMS.rollout,
    *(replace(rule, name=rule.name.replace(".self_attn.", ".attn.")) for rule in _ATTENTION),
    _ROUTER,
    of_vllm(_ROUTER_BIAS),
    _W13,
    replace(_W13, hf=(UP,), turn=(1, 2)),
    _W2,
    _W13_BIAS,
    replace(_W13_BIAS, hf=(UP_BIAS,), turn=(1, 2)),
    # Every rank adds its own to a sum over ranks.
    replace(_W2, name=HF_MLP + "experts.routed_experts.w2_bias", hf=(DOWN_BIAS,), dim=0, layout=first_shard),
)

FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    read=read,
    weights=WEIGHTS,
    rollout=ROLLOUT,
    stacks=STACKS,
    mxfp4=True,
)
