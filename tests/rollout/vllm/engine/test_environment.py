"""What vLLM is started with, by platform."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import MoeBackend, Quantization, RolloutConfig
from mcore_rl.config.vllm_fields import OURS_ON_CPU
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.rollout.vllm.engine import engine_node
from mcore_rl.rollout.vllm.engine.admission import engine_violations
from mcore_rl.rollout.vllm.engine.engine_node import EngineNode, Meeting
from mcore_rl.rollout.vllm.engine.environment import (
    MULTIMODAL_FORMAT,
    MULTIMODAL_WORKER,
    NOT_QUANTISED,
    ONLINE,
    core_shares,
    engine_arguments,
    engine_environment,
    has_tokenizer,
)
from tests.support import models, reward_models, text_parts

CPU = detect(Device.cpu)
ROCM = replace(CPU, kind=Device.rocm, device_type="cuda", num_devices=8)


@pytest.mark.parametrize(
    ("cores", "ranks", "shares"),
    [
        ((0, 1), 1, [(0, 1)]),
        ((0, 1), 2, [(0,), (1,)]),
        ((3, 4, 5, 7, 9), 2, [(3, 4), (5, 7)]),
        ((6,), 2, [(6,), (6,)]),
    ],
)
def test_every_rank_has_cores(cores: tuple[int, ...], ranks: int, shares: list[tuple[int, ...]]) -> None:
    assert core_shares(cores, ranks) == shares


def test_threads_are_bound_on_the_cpu_and_no_device_is_seen() -> None:
    one = engine_environment(CPU, RolloutConfig(), (2, 3))
    assert (one["OMP_NUM_THREADS"], one["VLLM_ENABLE_V1_MULTIPROCESSING"]) == ("2", "0")
    two = engine_environment(CPU, RolloutConfig(tp=2), (2, 3))
    assert (two["OMP_NUM_THREADS"], two["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "2|3")
    assert two["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1" and two["VLLM_CPU_KVCACHE_SPACE"] is None
    assert two["CUDA_VISIBLE_DEVICES"] == two["HIP_VISIBLE_DEVICES"] == "-1"


def test_an_accelerator_gets_its_masks_and_nothing_of_the_cpu() -> None:
    variables = engine_environment(ROCM, RolloutConfig(), (0,), device_ids=("4", "5"))
    assert variables["HIP_VISIBLE_DEVICES"] == variables["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert not {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_MLA_DISABLE"} & variables.keys()
    assert "CUDA_VISIBLE_DEVICES" not in engine_environment(ROCM, RolloutConfig(), (0,))


def test_latent_attention_is_not_quantised_where_aiter_is_asked_for() -> None:
    """vLLM makes its products fp8 (and fp4 on MI355X) then, in silence, and training is in bfloat16."""
    names = ("VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM")
    asked = engine_environment(ROCM, RolloutConfig(), (0,), environ={"VLLM_ROCM_USE_AITER": "1"})
    assert [asked[name] for name in names] == ["0", "0"]
    chosen = engine_environment(ROCM, RolloutConfig(), (0,), environ={names[0]: "1"})
    assert [chosen[name] for name in names] == ["1", "0"]
    for platform in (CPU, replace(ROCM, kind=Device.cuda)):
        assert not set(names) & engine_environment(platform, RolloutConfig(), (0,), environ={}).keys()


def test_engines_have_no_secrets_and_a_place_for_sockets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-123456")
    for platform in (CPU, ROCM):
        variables = engine_environment(platform, RolloutConfig(), (0,), scratch=Path("/scratch"))
        assert variables["SOME_API_KEY"] is None and variables["VLLM_RPC_BASE_PATH"] == "/scratch"
        assert "VLLM_RPC_BASE_PATH" not in engine_environment(platform, RolloutConfig(), (0,))


def test_arguments_on_the_cpu_and_on_an_accelerator(tmp_path: Path) -> None:
    rollout = RolloutConfig(tp=2, max_prompt_length=5000, dtype=Precision.float32)
    cpu = engine_arguments(tmp_path, rollout, models.dense(), CPU, "package.module.Class")
    assert (cpu["tensor_parallel_size"], cpu["distributed_executor_backend"]) == (2, "mp")
    assert cpu["kv_cache_memory_bytes"] == 2**30 and not cpu["enable_sleep_mode"]
    assert not cpu["enable_chunked_prefill"] and cpu["max_num_batched_tokens"] == cpu["max_model_len"] == 5512
    assert cpu["worker_extension_cls"] == "package.module.Class" and cpu["dtype"] == "float32"
    assert cpu["logprobs_mode"] == "processed_logprobs" and cpu["skip_tokenizer_init"]
    rocm = engine_arguments(tmp_path, rollout, models.dense(), ROCM, None)
    awaiting = engine_arguments(tmp_path, rollout, models.dense(), ROCM, None, awaits_weights=True)
    plain = {"quantization_config": None}  # whatever config.json says of the files, an update brings plain numbers
    assert awaiting == rocm | {"load_format": "dummy", "hf_overrides": plain} and "load_format" not in rocm
    assert rocm["kv_cache_memory_bytes"] is None and rocm["enable_sleep_mode"]
    assert "runner" not in cpu and "pooler_config" not in cpu
    assert "enable_chunked_prefill" not in rocm and "compilation_config" not in rocm and not rocm["enforce_eager"]


def test_what_the_user_passes_on_stands_beside_what_is_ours(tmp_path: Path) -> None:
    rollout = RolloutConfig(engine={"block_size": 64, "disable_custom_all_reduce": True})
    without = engine_arguments(tmp_path, RolloutConfig(), models.dense(), CPU, None)
    passed = engine_arguments(tmp_path, rollout, models.dense(), CPU, None)
    assert passed == without | {"block_size": 64, "disable_custom_all_reduce": True}
    for name in OURS_ON_CPU:
        assert name in {**without, **engine_arguments(tmp_path, rollout, models.deepseek_v3(), CPU, None)}
        chosen = RolloutConfig(engine={name: True})
        assert [each.key for each in engine_violations(models.dense(), chosen, CPU)] == [f"rollout.engine.{name}"]
        assert engine_violations(models.dense(), chosen, ROCM) == []


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (dict(tp=2), (2, 1, False)),
        (dict(tp=2, dp=4, ep=2), (2, 1, True)),  # four engines, each with its experts over its two ranks
        (dict(tp=2, dp=4, ep=8), (2, 4, True)),  # one engine
    ],
)
def test_layouts_are_vllm_s_arguments(tmp_path: Path, layout: dict[str, int], expected: tuple[int, int, bool]) -> None:
    arguments = engine_arguments(tmp_path, RolloutConfig(**layout), models.moe(), ROCM, None)
    names = ("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel")
    assert tuple(arguments[name] for name in names) == expected


def test_experts_have_a_kernel_that_updates_may_write_for(tmp_path: Path) -> None:
    def backend(platform: Platform, extension: str | None, model: ModelConfig, **changes: object) -> object:
        config = RolloutConfig(**changes)  # type: ignore[arg-type]
        return engine_arguments(tmp_path, config, model, platform, extension).get("moe_backend")

    assert backend(ROCM, "updates", models.moe()) == "triton"
    assert backend(ROCM, None, models.moe()) == "auto"
    assert backend(CPU, "updates", models.moe()) == "auto"
    assert backend(ROCM, "updates", models.moe(), moe_backend=MoeBackend.batched_triton) == "batched_triton"
    assert backend(ROCM, "updates", models.dense()) is None


@pytest.mark.parametrize("quantization", [each for each in Quantization if each is not Quantization.none], ids=str)
def test_quantised_engines_are_vllm_s_own_with_kernels_that_keep_the_scales(
    tmp_path: Path, quantization: Quantization
) -> None:
    plain, config = RolloutConfig(), RolloutConfig(quantization=quantization)
    arguments = engine_arguments(tmp_path, config, models.moe(), ROCM, "updates", awaits_weights=True)
    without = engine_arguments(tmp_path, plain, models.moe(), ROCM, "updates", awaits_weights=True)
    ours = {"quantization": ONLINE[quantization], "quantization_config": {"ignore": NOT_QUANTISED}}
    assert arguments == without | ours
    assert engine_environment(ROCM, config, (0,))["VLLM_USE_DEEP_GEMM"] == "0"
    assert "VLLM_USE_DEEP_GEMM" not in engine_environment(ROCM, plain, (0,))


def test_deepseek_gets_what_its_config_and_the_cpu_lack(tmp_path: Path) -> None:
    arguments = engine_arguments(tmp_path, RolloutConfig(), models.deepseek_v3(), CPU, None)
    bias = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert arguments["hf_overrides"] == bias
    assert arguments["compilation_config"] == {"custom_ops": ["all", "-rotary_embedding"]}
    assert "compilation_config" not in engine_arguments(tmp_path, RolloutConfig(), models.deepseek_v3(), ROCM, None)
    assert "hf_overrides" not in engine_arguments(tmp_path, RolloutConfig(), models.moe(), CPU, None)


def test_a_tokenizer_is_found_by_its_files(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert has_tokenizer(tmp_path)


def test_a_reward_model_s_engine_gives_the_last_token_s_score_as_it_is(tmp_path: Path) -> None:
    arguments = engine_arguments(tmp_path, reward_models.config(tmp_path, tp=2), models.dense(), CPU, None)
    assert (arguments["runner"], arguments["convert"], arguments["max_model_len"]) == ("pooling", "classify", 200)
    assert arguments["pooler_config"] == {"seq_pooling_type": "LAST", "use_activation": False}
    assert (arguments["tensor_parallel_size"], arguments["dtype"]) == (
        2,
        "float32",
    ) and "logprobs_mode" not in arguments


def test_an_engine_on_several_nodes_keeps_to_the_interface_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        "lo": [SimpleNamespace(address="127.0.0.1")],
        "eth7": [SimpleNamespace(address="fe80::1%eth7"), SimpleNamespace(address="10.0.0.2")],
    }
    monkeypatch.setattr(engine_node.psutil, "net_if_addrs", lambda: there)
    meeting = Meeting(host="10.0.0.1", port=4711, rpc_port=4712)
    node = EngineNode(nnodes=2, node_rank=1, address="10.0.0.2", meeting=meeting)
    rollout = RolloutConfig(tp=4)
    variables = engine_environment(ROCM, rollout, (0,), environ={}, node=node)
    assert variables["VLLM_HOST_IP"] == "10.0.0.2" and variables["GLOO_SOCKET_IFNAME"] == "eth7"
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    chosen = engine_environment(ROCM, rollout, (0,), environ={"GLOO_SOCKET_IFNAME": "ib0"}, node=node)
    assert "GLOO_SOCKET_IFNAME" not in chosen, "the cluster has said which"
    unknown = engine_environment(ROCM, rollout, (0,), environ={}, node=replace(node, address="10.9.9.9"))
    assert "GLOO_SOCKET_IFNAME" not in unknown
    alone = engine_environment(ROCM, rollout, (0,), environ={})
    assert not {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"} & alone.keys()
    assert engine_environment(CPU, rollout, (2, 3), environ={}, node=node)["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"


def test_arguments_of_an_engine_on_several_nodes(tmp_path: Path) -> None:
    meeting = Meeting(host="10.0.0.1", port=4711, rpc_port=4712)
    node = EngineNode(nnodes=2, node_rank=1, address="10.0.0.2", meeting=meeting)
    over = engine_arguments(tmp_path, RolloutConfig(tp=2), models.dense(), CPU, None, node=node)
    one = engine_arguments(tmp_path, RolloutConfig(tp=2), models.dense(), CPU, None)
    more = dict(master_addr="10.0.0.1", master_port=4711, data_parallel_rpc_port=4712)
    assert over == one | dict(nnodes=2, node_rank=1) | more
    assert (one["nnodes"], one["node_rank"]) == (1, 0) and not more.keys() & one.keys()
    replicas = engine_arguments(tmp_path, RolloutConfig(dp=2, ep=2), models.moe(), ROCM, None, node=node)
    assert replicas["distributed_executor_backend"] == "mp", "also of one rank each"


def test_the_text_part_of_a_multimodal_checkpoint_is_run_by_itself(tmp_path: Path) -> None:
    config = text_parts.config("Qwen3VLForConditionalGeneration") | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = engine_arguments(tmp_path, RolloutConfig(), models.dense(), ROCM, None)
    (written,) = Path(read["hf_config_path"]).iterdir()
    given = json.loads(written.read_text())
    assert (given["architectures"], given["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")
    assert given["hidden_size"] == config["text_config"]["hidden_size"]
    assert not {"vision_config", "text_config", "quantization_config"} & given.keys()
    assert read["load_format"] == MULTIMODAL_FORMAT and read["worker_extension_cls"] == MULTIMODAL_WORKER
    updated = engine_arguments(tmp_path, RolloutConfig(), models.dense(), ROCM, "a.Class", awaits_weights=True)
    assert (updated["load_format"], updated["worker_extension_cls"]) == ("dummy", "a.Class")
    assert "hf_config_path" in updated and "limit_mm_per_prompt" not in updated


def test_the_whole_of_a_multimodal_checkpoint_is_run_where_prompts_have_pictures(tmp_path: Path) -> None:
    config = text_parts.config("Qwen3VLForConditionalGeneration")
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, model = model_of(config, pictures=True)
    read = engine_arguments(tmp_path, RolloutConfig(), model, ROCM, None)
    assert "hf_config_path" not in read, "vLLM reads the checkpoint's own"
    assert read["hf_overrides"] == {"quantization_config": None}, "fp8 is dequantised by the loader"
    assert (read["load_format"], read["worker_extension_cls"]) == (MULTIMODAL_FORMAT, MULTIMODAL_WORKER)
    assert read["limit_mm_per_prompt"].keys() == {"image"} and read["mm_processor_cache_gb"] == 0
    updated = engine_arguments(tmp_path, RolloutConfig(), model, ROCM, "a.Class", awaits_weights=True)
    assert (updated["load_format"], updated["worker_extension_cls"]) == ("dummy", "a.Class")
