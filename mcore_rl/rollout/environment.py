"""How vLLM is started on each platform: environment variables and engine arguments, in one place.

Everything that differs between CPU, CUDA and ROCm, or that answers to a peculiarity of vLLM 0.32, is here.  Nothing
here starts a process or imports vLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.parallel.device import Platform, consistent_environment, num_cores

CPU_KV_CACHE_BYTES = 2**30  # where none are asked for; vLLM would take gpu_memory_utilization of the machine
CPU_BATCHED_TOKENS = 4096  # of one step, where no number is asked for
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def usable_cores() -> tuple[int, ...]:
    """The ids of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else tuple(range(num_cores()))


def engine_environment(
    platform: Platform, rollout: RolloutConfig, cores: Sequence[int], device_ids: Sequence[str] | None = None
) -> dict[str, str | None]:
    """Variables that the process of one engine must be started with, before it imports anything; None means unset.

    cores: that the engine computes on, CPU only; each rank gets its share of them as its OpenMP threads, bound.  Where
    ranks are more than cores, they share.  device_ids: the accelerators it sees; None leaves the masks alone.
    """
    environment: dict[str, str | None] = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if platform.is_accelerator:
        if device_ids is not None:
            environment |= consistent_environment(platform.kind, device_ids)
        return environment
    shares = core_shares(cores, rollout.tp)
    return environment | consistent_environment(platform.kind, ()) | {
        # One rank runs in the process of vLLM's EngineCore itself: the platform would give it one more, and an import
        # of vLLM (platforms/cpu.py, check_and_update_config).
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if rollout.tp > 1 else "0",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "OMP_NUM_THREADS": str(len(shares[0])),
        "TORCHDYNAMO_DISABLE": "1",  # what it would compile takes 5 to 30 s and gains nothing on the CPU
        "VLLM_CPU_KVCACHE_SPACE": None,  # it would overrule kv_cache_memory_bytes
        # The CPU kernels of latent attention want dimensions that small models do not have.
        "VLLM_MLA_DISABLE": "1",
    }  # fmt: skip


def core_shares(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """``cores`` over ``ranks``, as evenly as can be, in order; at least one each, shared where there are too few."""
    assert cores, "an engine computes somewhere"
    if len(cores) < ranks:
        return [(cores[rank % len(cores)],) for rank in range(ranks)]
    each = len(cores) // ranks
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def engine_arguments(
    directory: Path, rollout: RolloutConfig, model: ModelConfig, platform: Platform, extension: str | None
) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``AsyncEngineArgs`` for ``directory``, a Hugging Face checkpoint.

    extension: dotted name of the class whose methods vLLM's workers get (``worker_extension_cls``).
    """
    layout = rollout.layout
    arguments: dict[str, Any] = dict(
        model=str(directory),
        skip_tokenizer_init=not has_tokenizer(directory),
        dtype=rollout.dtype.value,
        max_model_len=rollout.max_model_len,
        tensor_parallel_size=layout.tp,
        data_parallel_size=layout.engine_dp,
        enable_expert_parallel=layout.ep > 1,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_memory_bytes=rollout.kv_cache_memory_bytes,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enable_prefix_caching=rollout.enable_prefix_caching,
        enforce_eager=rollout.enforce_eager,
        enable_sleep_mode=rollout.enable_sleep_mode and platform.is_accelerator,
        enable_return_routed_experts=rollout.return_routed_experts,
        # Of the distribution that tokens are drawn from, not of the raw logits, which is vLLM's default.
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # sampling is what we say; what the checkpoint recommends is for chat
        disable_log_stats=True,
        worker_extension_cls=extension or "",
    )
    if layout.tp > 1:
        arguments["distributed_executor_backend"] = "mp"
    if not platform.is_accelerator:
        arguments |= _on_cpu(rollout, model)
    if model.moe is not None and model.moe.expert_bias:
        # vLLM's DeepSeek builds and loads the bias only where config.json has this field, which transformers 5 leaves
        # out (deepseek_v2.py, 0.32: topk_method).
        arguments["hf_overrides"] = {"topk_method": "noaux_tc", "scoring_func": model.moe.score.value}
    return arguments


def _on_cpu(rollout: RolloutConfig, model: ModelConfig) -> dict[str, Any]:
    wanted = rollout.max_num_batched_tokens or CPU_BATCHED_TOKENS
    found: dict[str, Any] = dict(
        kv_cache_memory_bytes=rollout.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES,
        enforce_eager=True,  # and with it no warm-up; see TORCHDYNAMO_DISABLE
        # A prompt cut over two steps has vLLM turn the generator of its seed back, which ends the engine: "CPU
        # Generator does not use offset" (gpu_model_runner.py, 0.32, _bookkeeping_sync).  So every prompt fits one step.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(wanted, rollout.max_model_len, rollout.max_num_seqs),
    )
    if model.mla is not None and model.mla.interleaved:
        # The CPU's kernel of the rotary embedding is silently wrong where pairs are interleaved.
        found["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return found


def has_tokenizer(directory: Path) -> bool:
    """Whether text can be made of tokens: a tokenizer stands in the directory."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)
