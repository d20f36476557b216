"""vLLM's own loading, seen rank by rank: every element of a checkpoint lands, and where slicing by hand says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from mcore_rl.families.readership import READERSHIP
from mcore_rl.ground.errors import CheckpointError, RolloutError
from mcore_rl.rollout.vllm.oracle import Parameter, VllmProcess, _layout
from tests.support.config_reads import vllm_reads

Array = NDArray[np.float32]
Tensors = dict[str, Array]

LAYERS, HIDDEN, FFN, HEADS, KV, HEAD, VOCAB, EXPERTS, EXPERT_FFN = 2, 128, 96, 4, 2, 32, 100, 8, 48
SIZES = dict(
    num_hidden_layers=LAYERS,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_attention_heads=HEADS,
    num_key_value_heads=KV,
    head_dim=HEAD,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
MOE = dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=EXPERT_FFN)
LATENT = dict(q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=32)
HYBRID = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4, linear_num_value_heads=8,
    linear_key_head_dim=12, linear_value_head_dim=20,
)  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=EXPERTS),
    "qwen2": Qwen2Config(**SIZES | dict(tie_word_embeddings=True)),
    "qwen3": Qwen3Config(**SIZES),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=80),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE),
    "qwen3_next": Qwen3NextConfig(**SIZES, **MOE, **HYBRID, shared_expert_intermediate_size=80),
    "qwen3_5_text": Qwen3_5TextConfig(**SIZES, **HYBRID),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**SIZES, **MOE, **HYBRID, shared_expert_intermediate_size=80),
    "olmoe": OlmoeConfig(**SIZES | dict(intermediate_size=EXPERT_FFN), num_experts=EXPERTS, num_experts_per_tok=2),
    "phi3": Phi3Config(**SIZES | dict(tie_word_embeddings=True), pad_token_id=0),
    "gemma3_text": Gemma3TextConfig(**SIZES | dict(tie_word_embeddings=True)),
    "gemma2": Gemma2Config(**SIZES | dict(tie_word_embeddings=True)),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | LATENT | dict(num_key_value_heads=HEADS, head_dim=8), n_routed_experts=EXPERTS, n_shared_experts=1,
        moe_intermediate_size=EXPERT_FFN, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        topk_method="noaux_tc", scoring_func="sigmoid",
    ),
    "deepseek_v2": DeepseekV2Config(
        **SIZES | LATENT | dict(num_key_value_heads=HEADS, head_dim=8), n_routed_experts=EXPERTS, n_shared_experts=1,
        moe_intermediate_size=EXPERT_FFN, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        topk_method="group_limited_greedy",
    ),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, attention_bias=True, use_qk_norm=True, n_routed_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=EXPERT_FFN, num_mtp_layers=0,
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **SIZES | LATENT | dict(num_key_value_heads=HEADS, head_dim=8), n_routed_experts=EXPERTS, n_shared_experts=1,
        moe_intermediate_size=EXPERT_FFN, num_experts_per_tok=2, first_k_dense_replace=1,
    ),
    "minimax_m2": MiniMaxM2Config(
        **SIZES | dict(intermediate_size=EXPERT_FFN), num_local_experts=EXPERTS, num_experts_per_tok=2,
        rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True,
    ),
    "seed_oss": SeedOssConfig(**SIZES),
    "smollm3": SmolLM3Config(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=0),
    "ernie4_5": Ernie4_5Config(**SIZES),
    "gpt_oss": GptOssConfig(  # vLLM shares no key head of it, and pads no expert
        **SIZES | dict(num_key_value_heads=HEADS, intermediate_size=4 * 32, num_hidden_layers=1),
        num_local_experts=EXPERTS, num_experts_per_tok=2,
    ),
}  # fmt: skip
MOE_FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "deepseek_v2", "glm4_moe", "olmoe", "gpt_oss", "qwen3_next",
    "glm4_moe_lite", "minimax_m2", "qwen3_5_moe_text",
)  # fmt: skip


@pytest.fixture(scope="module")
def vllm(processes: None) -> Iterator[VllmProcess]:
    with VllmProcess() as process:
        yield process


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    """Family -> (directory as transformers saves it, its tensors): all elements are distinct integers from 1."""
    made = {}
    for family, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(family)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tensors, count = {}, 1
        for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
            integers = torch.arange(count, count + tensor.numel(), dtype=torch.float32)
            tensors[name], count = integers.reshape(tensor.shape), count + tensor.numel()
        assert count < 2**24, "float32 holds no larger integers exactly"
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        made[family] = folder, {name: tensor.numpy() for name, tensor in tensors.items()}
    return made


def rows(array: Array, part: int, parts: int) -> Array:
    return np.split(array, parts)[part]


def test_vllm_stays_out_of_this_process(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # of a test before
    vllm.rollout_parameters(checkpoints["llama"][0])
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("family", CONFIGS)
def test_vllm_reads_no_field_that_is_not_recorded(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], family: str
) -> None:
    """What vLLM looks up while it makes the model, against the parsed sources (``families/readership.py``)."""
    folder, _ = checkpoints[family]
    reads = vllm._process.submit(vllm_reads, folder, _layout(1, 1, False, None, True)).result()
    assert isinstance(reads, set), reads
    assert {"hidden_size", "rms_norm_eps", "num_hidden_layers"} <= reads
    assert reads <= READERSHIP[family]


LAYOUTS = [(family, tp, 1, False) for family in CONFIGS for tp in (1, 2, 4)]
LAYOUTS += [(family, 2, dp, True) for family in MOE_FAMILIES for dp in (1, 2)]


@pytest.mark.parametrize(("family", "tp", "dp", "expert_parallel"), LAYOUTS)
def test_every_element_of_the_checkpoint_lands_and_nothing_else(
    vllm: VllmProcess,
    checkpoints: dict[str, tuple[Path, Tensors]],
    family: str,
    tp: int,
    dp: int,
    expert_parallel: bool,
) -> None:
    folder, tensors = checkpoints[family]
    layout = dict(tp=tp, dp=dp, expert_parallel=expert_parallel)
    loaded = vllm.load_directly(folder, **layout)
    assert len(loaded) == tp * dp
    landed = np.concatenate([array.ravel() for rank in loaded for array in rank.values()])
    total = sum(tensor.size for tensor in tensors.values())
    np.testing.assert_array_equal(np.unique(landed[landed != 0]), np.arange(1, total + 1))
    # What is described without memory is what is loaded.
    described = vllm.rollout_parameters(folder, **layout, dtype="float32")
    for arrays, parameters in zip(loaded, described, strict=True):
        assert {name: array.shape for name, array in arrays.items()} == {n: p.shape for n, p in parameters.items()}


@pytest.mark.parametrize(("family", "kind"), [("llama", "weight"), ("qwen2", "weight"), ("qwen2", "bias")])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_attention_is_query_then_key_then_value_and_ranks_share_key_heads(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], family: str, kind: str, tp: int
) -> None:
    folder, hf = checkpoints[family]
    for rank, held in enumerate(vllm.load_directly(folder, tp=tp)):
        prefix = "model.layers.1.self_attn."
        query, key, value = (hf[f"{prefix}{letter}_proj.{kind}"] for letter in "qkv")
        group, groups = (rank, tp) if tp <= KV else (rank * KV // tp, KV)  # ranks 0 and 1 of 4 hold head 0 of 2
        expected = np.concatenate([rows(query, rank, tp), rows(key, group, groups), rows(value, group, groups)])
        np.testing.assert_array_equal(held[f"{prefix}qkv_proj.{kind}"], expected)
        output = np.split(hf[f"{prefix}o_proj.weight"], tp, axis=1)[rank]
        np.testing.assert_array_equal(held[f"{prefix}o_proj.weight"], output)


def test_gate_and_up_are_cut_before_they_are_joined(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]]
) -> None:
    folder, hf = checkpoints["gemma2"]
    mlp = "model.layers.0.mlp."
    for rank, held in enumerate(vllm.load_directly(folder, tp=4)):
        gate, up = (rows(hf[f"{mlp}{name}_proj.weight"], rank, 4) for name in ("gate", "up"))
        np.testing.assert_array_equal(held[f"{mlp}gate_up_proj.weight"], np.concatenate([gate, up]))
        down = np.split(hf[f"{mlp}down_proj.weight"], 4, axis=1)[rank]
        np.testing.assert_array_equal(held[f"{mlp}down_proj.weight"], down)


def test_the_vocabulary_is_padded_with_zeros_to_64_and_a_tied_head_is_not_stored(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]]
) -> None:
    padded = 128  # of 100 tokens
    for family, names in (("llama", ("model.embed_tokens", "lm_head")), ("qwen2", ("model.embed_tokens",))):
        folder, hf = checkpoints[family]
        ranks = vllm.load_directly(folder, tp=4)
        for name in names:
            whole = np.concatenate([rank[f"{name}.weight"] for rank in ranks])
            expected = np.zeros((padded, HIDDEN), np.float32)
            expected[:VOCAB] = hf[f"{name}.weight"]
            np.testing.assert_array_equal(whole, expected)
    assert "lm_head.weight" not in ranks[0]


@pytest.mark.parametrize(
    ("family", "mlp", "names"),
    [("mixtral", "block_sparse_moe", ("w1", "w3", "w2")), ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj"))],
)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (4, 1), (2, 2)])
def test_experts_are_stacked_and_each_is_cut_over_all_ranks(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], family: str, mlp: str, names: tuple[str, ...],
    tp: int, dp: int,
) -> None:  # fmt: skip
    folder, hf = checkpoints[family]
    hf = {name.replace(".block_sparse_moe.", ".mlp.").replace(".mlp.", f".{mlp}."): hf[name] for name in hf}
    for rank, held in enumerate(vllm.load_directly(folder, tp=tp, dp=dp)):
        prefix = f"model.layers.1.{mlp}.experts."
        for expert in range(EXPERTS):
            gate, up, down = (hf[f"{prefix}{expert}.{name}.weight"] for name in names)
            w13 = np.concatenate([rows(gate, rank, tp * dp), rows(up, rank, tp * dp)])
            np.testing.assert_array_equal(held[f"{prefix}routed_experts.w13_weight"][expert], w13)
            w2 = np.split(down, tp * dp, axis=1)[rank]
            np.testing.assert_array_equal(held[f"{prefix}routed_experts.w2_weight"][expert], w2)


@pytest.mark.parametrize(("tp", "expert_parallel"), [(1, False), (2, False), (2, True)])
def test_gate_and_up_of_gpt_oss_take_turns_and_one_rank_adds_the_output_bias(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], tp: int, expert_parallel: bool
) -> None:
    folder, hf = checkpoints["gpt_oss"]
    theirs = {name: hf[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj")}
    theirs |= {name: hf[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj_bias", "down_proj_bias")}
    parts, each = (1, EXPERTS // tp) if expert_parallel else (tp, EXPERTS)
    for rank, held in enumerate(vllm.load_directly(folder, tp=tp, expert_parallel=expert_parallel)):
        prefix, part = "model.layers.0.mlp.experts.routed_experts.", rank % parts
        mine = slice(rank * each, (rank + 1) * each) if expert_parallel else slice(None)
        turns = np.split(theirs["gate_up_proj"][mine].swapaxes(1, 2), parts, axis=1)[part]
        np.testing.assert_array_equal(held[f"{prefix}w13_weight"], turns)
        down = np.split(theirs["down_proj"][mine].swapaxes(1, 2), parts, axis=2)[part]
        np.testing.assert_array_equal(held[f"{prefix}w2_weight"], down)
        np.testing.assert_array_equal(
            held[f"{prefix}w13_bias"], np.split(theirs["gate_up_proj_bias"][mine], parts, axis=1)[part]
        )
        once = theirs["down_proj_bias"][mine] * (part == 0)
        np.testing.assert_array_equal(held[f"{prefix}w2_bias"], once)
        sinks = rows(hf["model.layers.0.self_attn.sinks"], rank, tp)
        np.testing.assert_array_equal(held["model.layers.0.attn.sinks"], sinks)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_expert_parallel_ranks_hold_whole_experts_in_order(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], tp: int, dp: int
) -> None:
    folder, hf = checkpoints["qwen3_moe"]
    layout = dict(tp=tp, dp=dp, expert_parallel=True)
    prefix = "model.layers.0.mlp.experts."
    each = EXPERTS // (tp * dp)
    described = vllm.rollout_parameters(folder, **layout)
    for rank, held in enumerate(vllm.load_directly(folder, **layout)):
        mine = range(rank * each, (rank + 1) * each)
        assert described[rank][f"{prefix}routed_experts.w2_weight"].experts == tuple(mine)
        expected = np.stack([hf[f"{prefix}{expert}.down_proj.weight"] for expert in mine])
        np.testing.assert_array_equal(held[f"{prefix}routed_experts.w2_weight"], expected)


@pytest.mark.parametrize("latent_attention", [True, False])
def test_latent_attention_fuses_the_down_projections_on_every_rank_or_keeps_them_apart(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], latent_attention: bool
) -> None:
    folder, hf = checkpoints["deepseek_v3"]
    prefix = "model.layers.1.self_attn."
    down = [hf[f"{prefix}{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    for rank, held in enumerate(vllm.load_directly(folder, tp=2, latent_attention=latent_attention)):
        if latent_attention:
            np.testing.assert_array_equal(held[f"{prefix}fused_qkv_a_proj.weight"], np.concatenate(down))
        else:
            np.testing.assert_array_equal(held[f"{prefix}q_a_proj.weight"], down[0])
            np.testing.assert_array_equal(held[f"{prefix}kv_a_proj_with_mqa.weight"], down[1])
        for name in ("q_b_proj", "kv_b_proj"):
            np.testing.assert_array_equal(held[f"{prefix}{name}.weight"], rows(hf[f"{prefix}{name}.weight"], rank, 2))


@pytest.mark.parametrize(("dp", "expert_parallel", "parts"), [(1, False, 2), (1, True, 2), (2, False, 2), (2, True, 1)])
def test_deepseeks_shared_experts_are_whole_where_tokens_are_spread(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], dp: int, expert_parallel: bool, parts: int
) -> None:
    folder, hf = checkpoints["deepseek_v3"]
    prefix = "model.layers.1.mlp.shared_experts."
    for rank, held in enumerate(vllm.load_directly(folder, tp=2, dp=dp, expert_parallel=expert_parallel)):
        gate, up = (rows(hf[f"{prefix}{name}_proj.weight"], rank % parts, parts) for name in ("gate", "up"))
        np.testing.assert_array_equal(held[f"{prefix}gate_up_proj.weight"], np.concatenate([gate, up]))


def test_full_size_shapes_take_no_memory_and_the_router_bias_stays_float32(vllm: VllmProcess) -> None:
    mixtral = MixtralConfig(
        hidden_size=6144, intermediate_size=16384, num_attention_heads=48, num_key_value_heads=8,
        num_hidden_layers=56, vocab_size=32768, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    (rank,) = vllm.rollout_parameters(mixtral.to_dict(), tp=8, ranks=[3])
    assert len(rank) == 56 * 7 + 3
    prefix = "model.layers.55."
    assert rank[f"{prefix}self_attn.qkv_proj.weight"] == Parameter(shape=(8 * 128, 6144), dtype="bfloat16")
    experts = Parameter(shape=(8, 2 * 2048, 6144), dtype="bfloat16", experts=tuple(range(8)))
    assert rank[f"{prefix}block_sparse_moe.experts.routed_experts.w13_weight"] == experts

    tokens = 2**40  # no machine holds their embeddings
    (rank,) = vllm.rollout_parameters(
        LlamaConfig(**SIZES | dict(vocab_size=tokens), architectures=["LlamaForCausalLM"]).to_dict(), tp=2, ranks=[1]
    )
    assert rank["lm_head.weight"].shape == (tokens // 2, HIDDEN)

    deepseek = DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"], topk_method="noaux_tc", scoring_func="sigmoid"
    )  # the class's defaults are DeepSeek-V3
    (rank,) = vllm.rollout_parameters(deepseek.to_dict(), tp=8, dp=32, expert_parallel=True, ranks=[255])
    prefix = "model.layers.60."
    assert rank[f"{prefix}mlp.gate.e_score_correction_bias"] == Parameter(shape=(256,), dtype="float32")
    assert rank[f"{prefix}mlp.gate.weight"] == Parameter(shape=(256, 7168), dtype="bfloat16")
    assert rank[f"{prefix}self_attn.kv_b_proj.weight"].shape == (128 // 8 * (128 + 128), 512)
    w2 = rank[f"{prefix}mlp.experts.routed_experts.w2_weight"]
    assert w2 == Parameter(shape=(1, 7168, 2048), dtype="bfloat16", experts=(255,))


def test_a_refusal_of_vllm_is_one_message(
    vllm: VllmProcess, checkpoints: dict[str, tuple[Path, Tensors]], tmp_path: Path
) -> None:
    folder, tensors = checkpoints["llama"]
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(RolloutError, match=r"tp=3, .*heads \(4\) must be divisible by tensor parallel size \(3\)"):
        vllm.rollout_parameters(config, tp=3)
    with pytest.raises(RolloutError, match=r"\['NoSuchModel'\], of which vLLM has no model"):
        vllm.rollout_parameters(config | {"architectures": ["NoSuchModel"]})
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        vllm.load_directly(tmp_path)

    (tmp_path / "config.json").write_text(json.dumps(config))
    missing = "model.layers.1.self_attn.k_proj.weight"
    rest = {name: torch.from_numpy(tensor) for name, tensor in tensors.items() if name != missing}
    save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RolloutError, match=r"nothing for model\.layers\.1\.self_attn\.qkv_proj\.weight"):
        vllm.load_directly(tmp_path)
    assert vllm.rollout_parameters(config), "the process goes on"
