"""What no layout could run of an architecture: sizes that contradict each other, parts that exclude each other."""

from __future__ import annotations

from math import isqrt

from mcore_rl.config.model import (
    LinearAttentionConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    MropeConfig,
    RopeType,
    RouterScore,
    VisionConfig,
)
from mcore_rl.ground.errors import Violation


def model_violations(model: ModelConfig) -> list[Violation]:
    """Every violation within ``model``, which no layout could run."""
    positive = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim"]
    positive += ["vocab_size", "max_position_embeddings"]
    violations = _not_positive("model", model, positive)
    if model.num_query_groups >= 1 and model.num_attention_heads % model.num_query_groups:
        divisors = [n for n in range(1, model.num_attention_heads + 1) if model.num_attention_heads % n == 0]
        violations.append(
            Violation(
                "model.num_query_groups",
                model.num_query_groups,
                f"does not divide model.num_attention_heads={model.num_attention_heads}",
                f"Write one of {divisors}",
            )
        )
    if model.mla is None and model.head_dim % 2:
        violations.append(Violation("model.head_dim", model.head_dim, "RoPE rotates pairs", "Write an even number"))
    violations += _rotary_percent_violations(model)
    if model.sliding_layers and not (model.sliding_window or 0) > 0:
        problem = f"model.sliding_layers={model.sliding_layers} have a window"
        violations.append(
            Violation("model.sliding_window", model.sliding_window, problem, "Write its tokens, 1 or more")
        )
    if model.local_rotary_base is not None and not (model.sliding_layers and model.rope.attention_factor == 1.0):
        problem = "is of sliding layers, which the model lacks, or is not alone: all layers share the scale of scores"
        remedy = "Write null, or model.rope without an attention factor"
        violations.append(Violation("model.local_rotary_base", model.local_rotary_base, problem, remedy))
    violations += _layer_violations("model.sliding_layers", model.sliding_layers, model.num_layers)
    violations += _layer_violations("model.no_rope_layers", model.no_rope_layers, model.num_layers)
    if model.rotary_interleaved and model.mla is not None:
        problem = "latent attention has a field of its own for it"
        violations.append(Violation("model.rotary_interleaved", True, problem, "Write model.mla.interleaved=true"))
    if model.no_rope_layers and (model.mla is not None or model.local_rotary_base is not None):
        problem = "latent attention and a second rotary base have no layers that rotate nothing"
        violations.append(Violation("model.no_rope_layers", model.no_rope_layers, problem, "Write []"))
    for name in ("softmax_scale", "attention_soft_cap", "output_soft_cap", "activation_clamp"):
        value = getattr(model, name)
        if value is not None and not value > 0:
            violations.append(Violation(f"model.{name}", value, "must be positive", "Write a positive number, or null"))
    if model.joint_qk_norm and not model.qk_norm:
        problem = "says over what model.qk_norm=false norms"
        violations.append(Violation("model.joint_qk_norm", True, problem, "Write model.qk_norm=true"))
    if model.sandwich_norm and model.moe is not None:
        problem = "no norm can stand behind experts, whose outputs are summed later"
        violations.append(Violation("model.sandwich_norm", True, problem, "Write model.sandwich_norm=false"))
    if model.linear_bias and not (model.moe is not None and not model.moe.shared_ffn_hidden_size and model.qkv_bias):
        problem = "is for models with experts, none of them shared, and with model.qkv_bias: Megatron has no others"
        violations.append(Violation("model.linear_bias", True, problem, "Write model.linear_bias=false"))
    if model.linear_attention is not None:
        violations += _linear_attention_violations(model, model.linear_attention)
    if model.mla is not None:
        violations += _mla_violations(model, model.mla)
    if model.moe is not None:
        violations += _moe_violations(model, model.moe)
    if model.vision is not None:
        violations += _vision_violations(model, model.vision)
    if model.mrope is not None:
        violations += _mrope_violations(model, model.mrope)
    return violations


def _vision_violations(model: ModelConfig, vision: VisionConfig) -> list[Violation]:
    positive = ["depth", "hidden_size", "num_heads", "ffn_hidden_size", "patch_size", "merge_size"]
    violations = _not_positive("model.vision", vision, [*positive, "temporal_patch_size", "window_size"])
    if violations:
        return violations  # the rules below divide by these
    unknown = [block for block in (*vision.full_blocks, *vision.deepstack) if not 0 <= block < vision.depth]
    side = vision.patch_size * vision.merge_size
    for name, is_right, problem, remedy in (
        (
            "hidden_size",
            vision.hidden_size % (4 * vision.num_heads) == 0,
            f"each of model.vision.num_heads={vision.num_heads} rotates pairs in height and in width",
            f"Write a multiple of {4 * vision.num_heads}",
        ),
        (
            "depth",
            not unknown,
            f"blocks {unknown} are named and are none of the tower's",
            "Leave them out",
        ),
        (
            "deepstack",
            len(vision.deepstack) <= model.num_layers,
            f"are features for more than model.num_layers={model.num_layers}",
            "Name fewer blocks",
        ),
        (
            "deepstack",
            vision.deepstack == sorted(set(vision.deepstack)),
            "are features in the order of the blocks, each once",
            "Write them in ascending order",
        ),
        (
            "window_size",
            vision.window_size is None or vision.window_size >= side,
            f"is less than a token's {side} pixels",
            f"Write {side} or more, or null",
        ),
        (
            "num_positions",
            isqrt(max(vision.num_positions, 0)) ** 2 == vision.num_positions,
            "are no square",
            "Write the square of a side",
        ),
        (
            "pixel_mean",
            len(vision.pixel_mean) == 3,
            "are no three numbers",
            "Write those of red, green and blue",
        ),
        (
            "pixel_std",
            len(vision.pixel_std) == 3 and min(vision.pixel_std) > 0,
            "are no three positive numbers, by which pixels are divided",
            "Write those of red, green and blue",
        ),
    ):
        if not is_right:
            violations.append(Violation(f"model.vision.{name}", getattr(vision, name), problem, remedy))
    return violations


def _mrope_violations(model: ModelConfig, mrope: MropeConfig) -> list[Violation]:
    pairs = model.rotary_dim // 2
    sections = mrope.sections
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != pairs:
        problem = f"are no three numbers that add up to the {pairs} rotated pairs of a head"
        return [Violation("model.mrope.sections", sections, problem, "Write those of time, height and width")]
    if model.mla is not None or model.local_rotary_base is not None or model.rope.type is not RopeType.default:
        problem = "is for attention over queries and keys of one kind, whose frequencies nothing changes"
        return [Violation("model.mrope", sections, problem, "Choose a checkpoint with rope_type=default")]
    return []


def _rotary_percent_violations(model: ModelConfig) -> list[Violation]:
    share = model.rotary_percent
    if share == 1:
        return []
    factor = model.rope.attention_factor
    rotated = model.rotary_dim
    pairs = f"rotates {rotated} of model.head_dim={model.head_dim}, and RoPE rotates pairs"
    problems = {
        "is no share of a head": not 0 < share < 1,
        "latent attention has widths of its own for it": model.mla is not None,
        # Of whole heads it is a factor on the scores; of a part, on that part of the keys (``training/rope.py``), where
        # their norm would stand, and held against transformers for longrope alone.
        f"attention_factor={factor:g} would scale a part of each score: for longrope without qk_norm alone": factor != 1
        and (model.qk_norm or model.rope.type is not RopeType.longrope),
        pairs: model.mla is None and 0 < share < 1 and (rotated < 2 or rotated % 2 > 0),
    }
    remedy = "Write 1, or a share that rotates an even number"
    return [Violation("model.rotary_percent", share, problem, remedy) for problem, holds in problems.items() if holds]


def _not_positive(key: str, part: object, names: list[str]) -> list[Violation]:
    values = {name: getattr(part, name) for name in names}
    wrong = {name: value for name, value in values.items() if value is not None and value < 1}
    return [Violation(f"{key}.{name}", value, "must be positive", "Write 1 or more") for name, value in wrong.items()]


def _layer_violations(key: str, layers: list[int], num_layers: int) -> list[Violation]:
    unknown = [layer for layer in layers if not 0 <= layer < num_layers]
    problem = f"{unknown} are none of the model's layers, 0 to {num_layers - 1}"
    return [Violation(key, layers, problem, "Leave them out")] if unknown else []


def _linear_attention_violations(model: ModelConfig, linear: LinearAttentionConfig) -> list[Violation]:
    violations = _layer_violations("model.linear_attention.layers", linear.layers, model.num_layers)
    positive = ["num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"]
    violations += _not_positive("model.linear_attention", linear, positive)
    if linear.num_key_heads >= 1 and linear.num_value_heads % linear.num_key_heads:
        key, problem = (
            "model.linear_attention.num_value_heads",
            f"is no multiple of num_key_heads={linear.num_key_heads}",
        )
        violations.append(Violation(key, linear.num_value_heads, problem, "Write a multiple"))
    if not 0 < len(set(linear.layers)) < model.num_layers:
        problem = "leave no layer with linear attention, or none that attends"
        violations.append(Violation("model.linear_attention.layers", linear.layers, problem, "Name some of the layers"))
    return violations


def _mla_violations(model: ModelConfig, mla: MlaConfig) -> list[Violation]:
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    positive = ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    violations = _not_positive("model.mla", mla, positive)
    rope = mla.qk_rope_head_dim
    parts = f"model.mla.qk_nope_head_dim={mla.qk_nope_head_dim} and qk_rope_head_dim={rope} add up to {width}"
    heads = model.num_attention_heads
    gate = model.attention_output_gate
    for key, value, is_right, problem, remedy in (
        ("model.mla.qk_rope_head_dim", rope, rope % 2 == 0, "RoPE rotates pairs", "Write an even number"),
        ("model.head_dim", model.head_dim, model.head_dim == width, parts, f"Write {width}"),
        (
            "model.num_query_groups",
            model.num_query_groups,
            model.num_query_groups == heads,
            f"latent attention has a key for each of model.num_attention_heads={heads}",
            f"Write {heads}",
        ),
        ("model.qkv_bias", model.qkv_bias, not model.qkv_bias, "latent attention has no biases", "Write false"),
        ("model.qk_norm", model.qk_norm, not model.qk_norm, "latent attention has norms of its own", "Write false"),
        (
            "model.attention_sinks",
            model.attention_sinks,
            not model.attention_sinks,
            "latent attention has none",
            "Write false",
        ),
        ("model.attention_output_gate", gate, not gate, "latent attention has no gate on its output", "Write false"),
    ):
        if not is_right:
            violations.append(Violation(key, value, problem, remedy))
    return violations


def _moe_violations(model: ModelConfig, moe: MoeConfig) -> list[Violation]:
    violations = _layer_violations("model.moe.dense_layers", moe.dense_layers, model.num_layers)
    if moe.num_experts < 1 or moe.num_groups < 1:
        for name in ("num_experts", "num_groups"):
            if getattr(moe, name) < 1:
                violations.append(
                    Violation(f"model.moe.{name}", getattr(moe, name), "must be positive", "Write 1 or more")
                )
        return violations  # the rules below divide by these
    experts = f"model.moe.num_experts={moe.num_experts}"
    groups = f"model.moe.num_groups={moe.num_groups}"
    num_kept = moe.num_experts // moe.num_groups * moe.top_k_groups
    limited = moe.top_k_groups < moe.num_groups
    choice = f"{experts}" if not limited else f"the {num_kept} experts of model.moe.top_k_groups={moe.top_k_groups}"
    for name, is_right, problem, remedy in (
        ("ffn_hidden_size", moe.ffn_hidden_size >= 1, "must be positive", "Write 1 or more"),
        ("shared_ffn_hidden_size", moe.shared_ffn_hidden_size >= 0, "must not be negative", "Write 0 for none"),
        (
            "dense_layers",
            len(set(moe.dense_layers)) < model.num_layers,
            "leave no layer with experts",
            "Write model.moe=null, or name fewer layers",
        ),
        (
            "shared_gate",
            moe.shared_ffn_hidden_size > 0 or not moe.shared_gate,
            "there is no shared expert",
            "Write false, or the width model.moe.shared_ffn_hidden_size",
        ),
        (
            "expert_bias",
            moe.score is RouterScore.sigmoid or not moe.expert_bias,
            f"Megatron has it for sigmoid scores only, not {moe.score.value}",
            "Write false, or score=sigmoid",
        ),
        (
            "num_groups",
            moe.num_experts % moe.num_groups == 0,
            f"does not divide {experts}",
            "Write a divisor of it",
        ),
        (
            "top_k_groups",
            1 <= moe.top_k_groups <= moe.num_groups,
            f"a token chooses from between 1 and {groups}",
            f"Write 1 to {moe.num_groups}",
        ),
        (
            "num_groups",
            not (limited and moe.expert_bias) or moe.num_experts >= 2 * moe.num_groups,
            f"groups of {experts} are ranked by their two best experts",
            f"Write {moe.num_experts // 2} or less",
        ),
        (
            "top_k",
            1 <= moe.top_k <= min(num_kept, moe.num_experts) or moe.top_k_groups < 1,
            f"a token needs between 1 and all of {choice}",
            f"Write 1 to {min(num_kept, moe.num_experts)}",
        ),
        (
            "norm_topk_prob",
            not (moe.norm_topk_prob and moe.top_k == 1 and moe.score is RouterScore.softmax),
            "the probability of the one expert would be 1 whatever its router says, which could not learn",
            "Write false, or model.moe.top_k=2 or more",
        ),
    ):
        if not is_right:
            violations.append(Violation(f"model.moe.{name}", getattr(moe, name), problem, remedy))
    return violations
