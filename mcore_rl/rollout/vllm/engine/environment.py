"""The environment variables and engine arguments with which vLLM is started on each platform.

Every difference between CPU, CUDA and ROCm, and every workaround for vLLM 0.32, is here.  Nothing here starts a process
or imports vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.checkpoints.rest import part_in
from mcore_rl.config.engine import Device
from mcore_rl.config.lora import EngineAdapters
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.reward_model import RewardModelConfig
from mcore_rl.config.rollout import (
    CPU_BATCHED_TOKENS,
    CPU_KV_CACHE_BYTES,
    MoeBackend,
    Quantization,
    RolloutConfig,
    ServingConfig,
    quantization_of,
)
from mcore_rl.families.config_json import CONFIG, read_config
from mcore_rl.families.text_part import text_config
from mcore_rl.ground.secrets import secret_names
from mcore_rl.parallel.cpu import UNCOMPILED
from mcore_rl.parallel.device import Platform, consistent_environment, num_cores
from mcore_rl.parallel.pinned import settings_of_a_new_process
from mcore_rl.parallel.pinned_size import ENGINE_MAX_CACHED_BYTES
from mcore_rl.rollout.vllm.engine.engine_node import ONE_NODE, EngineNode

# Where AITER is asked for, products of latent attention would be fp8 or fp4 (layers/attention/mla_attention.py, 0.32).
AITER_QUANTISES = ("VLLM_ROCM_USE_AITER_FP8BMM", "VLLM_ROCM_USE_AITER_FP4BMM")
# Blocks' scales stay where and as they are made: DeepGEMM would have them rounded or laid out anew.
UNPACKED_BLOCKS = {"VLLM_USE_DEEP_GEMM": "0"}
# vLLM's names of its online quantisation, and the modules that it would quantise and ``weights.quantised`` does not.
ONLINE = {
    Quantization.fp8_block: "fp8_per_block",
    Quantization.fp8_channel: "fp8_per_channel",
    Quantization.fp8_tensor: "fp8_per_tensor",
    Quantization.mxfp8: "mxfp8",
}
NOT_QUANTISED = ["*.gate", "*.shared_expert_gate", "*.linear_attn.*"]
# The load format of ``receiver/multimodal_loader.py``, and the extension of a worker that needs no other.
MULTIMODAL_FORMAT = "mcore_rl_multimodal"
MULTIMODAL_WORKER = "mcore_rl.rollout.vllm.receiver.multimodal_loader.MultimodalWorker"
MAX_PICTURES = 999  # of a prompt: vLLM wants a number, and reads it only where it processes pictures itself
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the process of an engine needs to start it; see ``start_engine``.

    model: the model in ``directory``, as ``admit`` returned it.
    log: the file that has the process's output.
    scratch: the folder of its sockets, which is removed when it ends.
    node: which of the engine's nodes it is on.
    """

    name: str
    directory: Path
    config: ServingConfig
    model: ModelConfig
    platform: Platform
    cores: tuple[int, ...]
    extension: str | None
    version: int
    log: Path
    scratch: Path
    awaits_weights: bool
    adapters: EngineAdapters | None
    node: EngineNode

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of vLLM's ``AsyncEngineArgs``."""
        return engine_arguments(
            self.directory,
            self.config,
            self.model,
            self.platform,
            self.extension,
            awaits_weights=self.awaits_weights,
            adapters=self.adapters,
            node=self.node,
        )


def usable_cores() -> tuple[int, ...]:
    """The ids of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else tuple(range(num_cores()))


def engine_environment(
    platform: Platform,
    config: ServingConfig,
    cores: Sequence[int],
    device_ids: Sequence[str] | None = None,
    scratch: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    node: EngineNode = ONE_NODE,
) -> dict[str, str | None]:
    """The environment variables with which an engine's process on a node must be started; None: unset the variable.

    Args:
        platform, config: the engine's.
        cores: the cores that the engine computes on, CPU only; each rank's OpenMP threads are bound to its share of
            them, and ranks share cores if there are fewer cores than ranks.
        device_ids: the accelerators that it sees; None leaves the masks alone.
        scratch: a private folder for sockets, the file where vLLM's ranks meet and all other temporary files, which a
            killed vLLM does not remove; None: the folder for temporary files.
        environ: the environment that the engine inherits.
        node: which of the engine's nodes it is.
    """
    environment: dict[str, str | None] = dict.fromkeys(secret_names())  # unset, so that the engine's log has none
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    environment |= node.environment(environ)
    if scratch is not None:
        environment |= {"VLLM_RPC_BASE_PATH": str(scratch), "TMPDIR": str(scratch)}
    if platform.kind is Device.rocm:
        environment |= {name: environ.get(name, "0") for name in AITER_QUANTISES}
    if quantization_of(config) is not Quantization.none:
        environment |= UNPACKED_BLOCKS
    if platform.is_accelerator:
        if device_ids is not None:
            environment |= consistent_environment(platform.kind, device_ids)
        if isinstance(config, RolloutConfig):
            # A reward model sleeps with its weights in every step: for it torch keeps what it has pinned.
            environment |= settings_of_a_new_process(ENGINE_MAX_CACHED_BYTES, environ)
        return environment
    shares = core_shares(cores, max(1, config.tp // node.nnodes))
    return (
        environment
        | consistent_environment(platform.kind, ())
        | UNCOMPILED
        | {
            # With one rank, it runs in the process of vLLM's EngineCore; the platform would start another process
            # for it, which imports vLLM once more (platforms/cpu.py, check_and_update_config).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if config.tp > 1 else "0",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
            "OMP_NUM_THREADS": str(len(shares[0])),
            "VLLM_CPU_KVCACHE_SPACE": None,  # it would overrule kv_cache_memory_bytes
            # The CPU kernels of latent attention require dimensions that small models do not have.
            "VLLM_MLA_DISABLE": "1",
        }
    )


def picture_folder() -> Path:
    """The folder of the pictures of the engine that this process is of: in its scratch folder."""
    return Path(os.environ["TMPDIR"]) / "pictures"


def core_shares(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Splits ``cores`` evenly over ``ranks``, in order; each rank gets at least one, shared if there are too few."""
    assert cores, "an engine computes somewhere"
    if len(cores) < ranks:
        return [(cores[rank % len(cores)],) for rank in range(ranks)]
    each = len(cores) // ranks
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def engine_arguments(
    directory: Path,
    config: ServingConfig,
    model: ModelConfig,
    platform: Platform,
    extension: str | None,
    *,
    awaits_weights: bool = False,
    adapters: EngineAdapters | None = None,
    node: EngineNode = ONE_NODE,
) -> dict[str, Any]:
    """The keyword arguments of vLLM's ``AsyncEngineArgs`` for ``directory``, a Hugging Face checkpoint.

    model: the model in ``directory``.  extension: dotted name of the class whose methods are added to vLLM's workers
    (``worker_extension_cls``); None is none.  awaits_weights, adapters, node: see ``start_engine``.
    """
    layout = config.layout
    arguments: dict[str, Any] = dict(
        model=str(directory),
        skip_tokenizer_init=not has_tokenizer(directory),
        dtype=config.dtype.value,
        max_model_len=config.max_model_len,
        tensor_parallel_size=layout.tp,
        data_parallel_size=layout.engine_dp,
        enable_expert_parallel=layout.ep > 1,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        enable_sleep_mode=config.enable_sleep_mode and platform.is_accelerator,
        generation_config="vllm",  # take sampling from the request only; the checkpoint's defaults are for chat
        disable_log_stats=True,
        worker_extension_cls=extension or "",
        **node.arguments(),
    )
    if isinstance(config, RolloutConfig):
        arguments["enable_return_routed_experts"] = config.return_routed_experts
        # Log-probs of the distribution that tokens are drawn from, not of the raw logits as by vLLM's default.
        arguments["logprobs_mode"] = "processed_logprobs"
        arguments |= _quantised(config.quantization)
    if isinstance(config, RewardModelConfig):
        # Explicit, because files of other tools in the directory (modules.json) may change it.  The raw score of the
        # last token: vLLM's default is its sigmoid (ClassifierPoolerHead, 0.32).
        pooler = {"seq_pooling_type": "LAST", "use_activation": False}
        arguments |= dict(runner="pooling", convert="classify", pooler_config=pooler)
    if awaits_weights:
        # Random weights.  A parameter that no update fills is refused (receiver/live_weights.py); buffers outside of
        # the checkpoint keep their values, and the scales of a cache that is not quantised are 1 after any start.
        arguments["load_format"] = "dummy"
        # An update brings plain numbers, also where the checkpoint is quantised (checkpoints/published.py).
        arguments["hf_overrides"] = {"quantization_config": None}
    if part_in(directory) is not None:
        if not awaits_weights:
            arguments["load_format"] = MULTIMODAL_FORMAT
        arguments["worker_extension_cls"] = extension or MULTIMODAL_WORKER
        arguments |= _of_text_part(directory) if model.vision is None else _OF_PICTURES
    arguments |= _of_adapters(adapters)
    if layout.tp > 1 or node.nnodes > 1:
        arguments["distributed_executor_backend"] = "mp"
    if model.moe is not None:
        arguments["moe_backend"] = _moe_backend(config, platform, updated=extension is not None)
    if not platform.is_accelerator:
        arguments |= _on_cpu(config, model)
    if model.moe is not None and model.moe.expert_bias:
        # vLLM's DeepSeek builds and loads the bias only if config.json has this field, which transformers 5 leaves out
        # (deepseek_v2.py, 0.32: topk_method).
        bias = {"topk_method": "noaux_tc", "scoring_func": model.moe.score.value}
        arguments["hf_overrides"] = arguments.get("hf_overrides", {}) | bias
    return _beside(arguments, config.engine)


# How vLLM runs a model that sees pictures, which come processed; its weights come as plain numbers.
_OF_PICTURES: dict[str, Any] = dict(
    hf_overrides={"quantization_config": None},
    limit_mm_per_prompt={"image": MAX_PICTURES},
    mm_processor_cache_gb=0,
    skip_mm_profiling=True,
)


def _of_text_part(directory: Path) -> dict[str, Any]:
    """How vLLM runs the language model in a multimodal checkpoint by itself, without a tower.

    Weights, names, adapters and kernels are then those of the text model, which the trainer has, and a tower would take
    memory.  vLLM is given a config.json of its own.
    """
    folder = Path(tempfile.mkdtemp(prefix="text-part-"))  # in the engine's scratch folder, which goes with it
    left_out = ("auto_map", "quantization_config")
    config = {name: value for name, value in text_config(read_config(directory)).items() if name not in left_out}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return {"hf_config_path": str(folder)}


def _quantised(quantization: Quantization) -> dict[str, Any]:
    """How vLLM quantises what it is given, on loading and on every update; ``weights/quantised.py`` says what."""
    if quantization is Quantization.none:
        return {}
    return {"quantization": ONLINE[quantization], "quantization_config": {"ignore": NOT_QUANTISED}}


def _of_adapters(adapters: EngineAdapters | None) -> dict[str, Any]:
    if adapters is None:
        return {}
    return dict(
        enable_lora=True,
        max_loras=len(adapters.ids),
        max_lora_rank=adapters.held_rank,
        lora_target_modules=list(adapters.modules),
    )


def _beside(ours: dict[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """``ours`` with what the user passes on, which ``admission`` has let in: none of it is ours."""
    assert not passed.keys() & ours.keys()
    return {**ours, **passed}


def _moe_backend(config: ServingConfig, platform: Platform, *, updated: bool) -> str:
    """vLLM's ``moe_backend``: an update writes experts as they were loaded, so their kernel must read them like that.

    The CPU's kernel packs them, and is unpacked for an update (receiver/live_weights.py); it has no other.
    """
    if config.moe_backend is MoeBackend.auto and updated and platform.is_accelerator:
        return MoeBackend.triton.value
    return config.moe_backend.value


def _on_cpu(config: ServingConfig, model: ModelConfig) -> dict[str, Any]:
    wanted = config.max_num_batched_tokens or CPU_BATCHED_TOKENS
    arguments: dict[str, Any] = dict(
        kv_cache_memory_bytes=config.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES,
        enforce_eager=True,  # and therefore no warm-up; see UNCOMPILED
        # For a prompt that is split over two steps, vLLM rewinds the seed's generator, which kills the engine on CPU:
        # "CPU Generator does not use offset" (gpu_model_runner.py, 0.32, _bookkeeping_sync).  So each fits one step.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(wanted, config.max_model_len, config.max_num_seqs),
    )
    if model.linear_attention is not None:
        # vLLM keeps states of prefixes at the ends of chunks only, and refuses to where prompts are not chunked
        # (models/config.py, 0.32, MambaModelConfig).
        arguments["enable_prefix_caching"] = False
    if model.mla is not None and model.mla.interleaved:
        # The CPU's kernel of the rotary embedding is silently wrong for interleaved pairs.
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


def has_tokenizer(directory: Path) -> bool:
    """True if the directory has a tokenizer's files, so that responses have text."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)
