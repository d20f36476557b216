"""The configuration group ``rollout``: layout of the engines (``tp=8,dp=4,ep=8``), memory, and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any

from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.bounds import (
    Bytes,
    Interval,
    Lines,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Ranks,
    Seed,
    check,
)
from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.lora import PublishedLora
from mcore_rl.config.model import ModelConfig, RopeType
from mcore_rl.config.parallel import parse_sizes
from mcore_rl.config.vllm_fields import VLLM_FIELDS
from mcore_rl.ground.errors import Violation

ROLLOUT_AXES = ("tp", "dp", "ep")
BYTES = {Precision.float32: 4, Precision.bfloat16: 2}
MIN_TEMPERATURE = 0.01  # vLLM raises a lower temperature to this, except 0 (_MAX_TEMP in sampling_params.py, 0.32)
CPU_KV_CACHE_BYTES = 2**30  # the default on CPU; vLLM's would be gpu_memory_utilization of the machine
CPU_BATCHED_TOKENS = 4096  # per engine step, the default on CPU
UPDATE_BUCKET_BYTES = 256 << 20  # of a weight update, half of it in flight; a process holds two at most
VOCAB_PADDING = 64  # vLLM pads the vocabulary to a multiple of it (vocab_parallel_embedding.py, 0.32)

TopK = Annotated[int, Interval("[-1, inf)", "Write -1 to keep all, or 1 or more")]
MemoryShare = Annotated[float, Interval("(0, 1]", "Write 0.5 beside a trainer on the same device, 0.9 alone")]


@dataclass(frozen=True, kw_only=True)
class RolloutLayout:
    """Sizes of vLLM's parallel axes; rank ``dp_rank * tp + tp_rank`` of ``tp * dp``.

    tp: tensor parallel.  dp: replicas.  ep: how many ranks share the whole experts of a layer, one of three sizes:
    1: none; every expert is sliced over the tp ranks of its replica.
    tp: the ranks of each replica (``enable_expert_parallel``; replicas are independent engines).
    tp * dp: all ranks (``enable_expert_parallel`` with ``data_parallel_size=dp``).
    Experts are placed contiguously (vLLM's ``linear``).

    Deliberately not offered: vLLM's ``data_parallel_size`` without expert parallelism, which slices every expert over
    all tp * dp ranks (``flatten_tp_across_dp_and_pcp`` in fused_moe/config.py); independent replicas serve as well.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in ROLLOUT_AXES)

    @property
    def world_size(self) -> int:
        """The ranks of all replicas together: tp * dp."""
        return self.tp * self.dp

    @property
    def engine_dp(self) -> int:
        """``data_parallel_size`` of an engine: dp if replicas share experts and thus one engine, else 1."""
        return self.dp if self.experts_span_replicas else 1

    @property
    def engine_size(self) -> int:
        """The ranks of one engine: tp * engine_dp."""
        return self.tp * self.engine_dp

    @property
    def num_engines(self) -> int:
        """How many engines there are: dp, or 1 if replicas share experts."""
        return self.dp // self.engine_dp

    @property
    def experts_span_replicas(self) -> bool:
        """Whether the experts of a layer are spread over several replicas."""
        return self.ep > self.tp


assert ROLLOUT_AXES == tuple(field.name for field in fields(RolloutLayout))


class MoeBackend(Enum):
    """vLLM's kernels for experts that are not quantised (fused_moe/oracle/unquantized.py, 0.32), by its own names.

    auto: triton where the engine's weights are updated and the device is an accelerator, else what vLLM chooses.
    triton, batched_triton: they read the experts as they were loaded, and so as an update writes them.
    flashinfer_trtllm, flashinfer_cutlass (vLLM's first choices on Blackwell), aiter (ROCm): they rearrange, pad or swap
    the halves of the experts in place after loading.
    """

    auto = "auto"
    triton = "triton"
    batched_triton = "batched_triton"
    flashinfer_trtllm = "flashinfer_trtllm"
    flashinfer_cutlass = "flashinfer_cutlass"
    aiter = "aiter"


class Quantization(Enum):
    """The form that vLLM's online quantisation gives the matrices of engines (vllm/config/quantization.py, 0.32).

    fp8_block: float8_e4m3 with a scale for each 128 by 128 elements.  fp8_channel: with one for each row.
    fp8_tensor: with one for each tensor.  mxfp8: with a power of two for each 32 elements of a row.
    """

    none = "none"
    fp8_block = "fp8_block"
    fp8_channel = "fp8_channel"
    fp8_tensor = "fp8_tensor"
    mxfp8 = "mxfp8"


KEEPS_WEIGHTS = (MoeBackend.auto, MoeBackend.triton, MoeBackend.batched_triton)


@dataclass(kw_only=True)
class ValidationConfig:
    """How validation samples; all else is as in training.  The default is greedy.

    n: samples per prompt.
    temperature, top_p, top_k: as in ``rollout``; temperature 0 is greedy.
    """

    n: PositiveInt = 1
    temperature: NonNegativeFloat = 0.0
    top_p: PositiveShare = 1.0
    top_k: TopK = -1


@dataclass(kw_only=True)
class ServingConfig:
    """vLLM engines, for generation or for classification.

    tp: tensor-parallel ranks of a replica.
    dp: replicas.  None: 1; of the rollout of ``train``, where it takes turns with the trainer on accelerators, all that
    these hold.
    ep: ranks that share the experts of a layer: 1 (every rank has a slice of each), ``tp`` (a replica's
    share them whole) or ``tp * dp`` (all do).
    device, dtype: where and in which dtype an engine computes.
    gpu_memory_utilization: share of each device's memory (on CPU: of the machine's) for weights and KV cache of a rank.
    kv_cache_memory_bytes: KV cache per rank; None is what that share leaves, and 1 GiB on CPU.
    max_num_seqs: sequences that run at once.
    max_num_batched_tokens: tokens per engine step; None is vLLM's choice.
    enable_prefix_caching: sequences with a common prefix share its KV cache.
    enforce_eager: no compilation and no CUDA graphs.
    enable_sleep_mode: an engine can release its memory to the trainer between steps (accelerators).
    moe_backend: the kernel of a mixture's experts, see ``MoeBackend``.
    engine: further arguments of vLLM's engine by name, as far as ``vllm_fields.py`` allows them.
    """

    tp: Ranks = 1
    dp: Ranks | None = None
    ep: Ranks = 1
    device: Device = Device.auto
    dtype: Precision = Precision.bfloat16
    gpu_memory_utilization: MemoryShare = 0.5
    kv_cache_memory_bytes: Bytes | None = None
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    enable_sleep_mode: bool = True
    moe_backend: MoeBackend = MoeBackend.auto
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> RolloutLayout:
        """The layout of ``tp``, ``dp`` and ``ep``."""
        return RolloutLayout(tp=self.tp, dp=self.dp or 1, ep=self.ep)

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence."""
        raise NotImplementedError


@dataclass(kw_only=True)
class RolloutConfig(ServingConfig):
    """The rollout engines and how they sample.

    n: samples per prompt.
    temperature, top_p, top_k: 1, 1 and -1 sample from the whole distribution, the only one whose log-probs the trainer
        reproduces.
    stop, stop_token_ids, ignore_eos: what ends a response besides its length.
    seed: the seed of all sampling.
    max_prompt_length: the most tokens of a prompt.
    max_response_length: the most tokens after the prompt, whoever wrote them; with tools, all turns and results.
    return_routed_experts: record the experts of every token; needs vLLM's model runner V2 and therefore Triton, which
        the CPU does not have.  ``actor.router_replay=r3`` sets it; no command reads the record otherwise.
    partial: a step takes the groups that are finished first; unfinished responses are kept with their tokens and go on
        in the next step, with its weights.  For ``trainer.mode=sync``; ``async.max_staleness`` bounds their age.
    over_sampling: groups that are begun beyond those of a step, as a share of ``data.train_batch_size``.
    lora: whether the engines of a run with adapters hold merged weights or apply the adapters, see ``PublishedLora``.
    quantization: the form of the engines' matrices, see ``Quantization``; an update quantises where it arrives.
    allow_uncorrected: quantised engines draw for a trainer that does not weigh the difference.
    val_kwargs: how validation samples.  agent: agent loops, tools, and what ends an episode.
    """

    n: Annotated[int, Interval("[1, 16384]")] = 1
    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    top_k: TopK = -1
    stop: list[Lines] = field(default_factory=list)
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    ignore_eos: bool = False
    seed: Seed = 0
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    return_routed_experts: bool = False
    partial: bool = False
    over_sampling: PositiveFloat = 0.5
    lora: PublishedLora = PublishedLora.auto
    quantization: Quantization = Quantization.none
    allow_uncorrected: bool = False
    val_kwargs: ValidationConfig = field(default_factory=ValidationConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)

    @property
    def published_lora(self) -> PublishedLora:
        """``lora``, where quantised engines hold merged weights."""
        is_plain = self.quantization is Quantization.none
        return self.lora if is_plain or self.lora is not PublishedLora.auto else PublishedLora.merged

    @property
    def max_model_len(self) -> int:
        """The most tokens of an episode: the longest prompt plus the longest response."""
        return self.max_prompt_length + self.max_response_length


def routing_violations(rollout: RolloutConfig, instead: str) -> list[Violation]:
    """Refuses a written ``return_routed_experts``: what reads the record sets it.  instead: what to write."""
    if not rollout.return_routed_experts:
        return []
    problem = "nobody would read the experts that it records"
    return [Violation("rollout.return_routed_experts", True, problem, f"Write {instead}")]


def parse_rollout_layout(text: str) -> RolloutLayout:
    """``"tp=8,dp=2"`` to a ``RolloutLayout``; axes left out are 1.

    Raises ConfigError with every malformed, unknown, repeated or non-positive part.
    """
    return RolloutLayout(**parse_sizes(text, ROLLOUT_AXES, "rollout layout"))


def rollout_violations(model: ModelConfig, layout: RolloutLayout) -> list[Violation]:
    """Every reason why vLLM cannot run ``model`` in ``layout``."""
    sizes = {f"rollout.{axis}": getattr(layout, axis) for axis in ROLLOUT_AXES}
    violations = [Violation(key, n, "must be positive", "Write 1 or more") for key, n in sizes.items() if n < 1]
    if violations:
        return violations  # the rules below divide by these sizes
    return _tensor_violations(model, layout) + _expert_violations(model, layout)


def quantization_of(config: ServingConfig) -> Quantization:
    """The form of the matrices of an engine; one that scores has them plain."""
    return config.quantization if isinstance(config, RolloutConfig) else Quantization.none


def rollout_config_violations(rollout: RolloutConfig) -> list[Violation]:
    """Every violation within ``rollout``, not looking at a model."""
    rules = (
        _engine_violations,
        _backend_violations,
        _quantization_violations,
        _greedy_violations,
        _draws_violations,
    )
    return check(rollout, rules, "rollout.")


def _engine_violations(rollout: RolloutConfig) -> list[Violation]:
    return VLLM_FIELDS.violations(rollout.engine, "rollout.engine")


def _backend_violations(rollout: RolloutConfig) -> list[Violation]:
    if rollout.moe_backend in KEEPS_WEIGHTS:
        return []
    problem = "rearranges the experts' weights in place, and an update writes them as they are in the checkpoint"
    return [Violation("rollout.moe_backend", rollout.moe_backend.value, problem, "Write rollout.moe_backend=auto")]


def _quantization_violations(rollout: RolloutConfig) -> Iterator[Violation]:
    if rollout.quantization is Quantization.none:
        return
    if rollout.dtype is not Precision.bfloat16:
        problem = f"is what vLLM quantises to {rollout.quantization.value}, and it takes bfloat16 alone"
        remedy = "Write rollout.dtype=bfloat16, or rollout.quantization=none"
        yield Violation("rollout.dtype", rollout.dtype.value, problem, remedy)
    if rollout.lora is PublishedLora.adapter:
        problem = f"adds adapters to weights in {rollout.quantization.value}, whose rounding they were not trained with"
        yield Violation("rollout.lora", rollout.lora.value, problem, "Write rollout.lora=merged")


def _greedy_violations(rollout: RolloutConfig) -> list[Violation]:
    if rollout.temperature != 0 or rollout.n == 1:
        return []
    problem = f"draws the same response rollout.n={rollout.n} times"
    remedy = "Write 1.0, or rollout.n=1"
    return [Violation("rollout.temperature", 0, problem, remedy)]


def _draws_violations(rollout: RolloutConfig) -> Iterator[Violation]:
    yield from draw_violations(rollout, "rollout")
    yield from draw_violations(rollout.val_kwargs, "rollout.val_kwargs")


def draw_violations(draw: RolloutConfig | ValidationConfig, key: str) -> Iterator[Violation]:
    """What vLLM would draw in another way than it was asked to.  key: the prefix of the keys."""
    if 0 < draw.temperature < MIN_TEMPERATURE:
        problem = f"vLLM draws as if it were {MIN_TEMPERATURE:g}"
        yield Violation(f"{key}.temperature", draw.temperature, problem, "Write 0 for greedy, or more")
    if draw.top_k == 0:
        yield Violation(f"{key}.top_k", draw.top_k, "keeps no token", "Write -1 to keep all, or 1 or more")


POSITIONS = "write model.config_overrides.max_position_embeddings=TOKENS"


def context_violations(model: ModelConfig, rollout: RolloutConfig) -> list[Violation]:
    """Refuses lengths beyond the model's context or YaRN's reach, and a KV cache too small for one sequence."""
    violations = []
    if rollout.max_model_len > model.max_position_embeddings:
        context = model.max_position_embeddings
        problem = f"with rollout.max_response_length={rollout.max_response_length} exceeds the model's {context} tokens"
        remedy = f"Lower one of them, to {context} in all, or if the model reaches further, {POSITIONS}"
        violations.append(Violation("rollout.max_prompt_length", rollout.max_prompt_length, problem, remedy))
    rope = model.rope
    reach = yarn_reach(model)
    if reach is not None and rollout.max_model_len > reach:
        problem = f"with rollout.max_response_length={rollout.max_response_length} exceeds the {reach} tokens that YaRN"
        problem += f" reaches: factor {rope.factor:g} times {rope.original_max_position_embeddings}"
        remedy = f"Lower one of them, to {reach} in all, or write what it means by model.config_overrides.rope_scaling"
        violations.append(Violation("rollout.max_prompt_length", rollout.max_prompt_length, problem, remedy))
    least = sequence_bytes(model, rollout, rollout.max_model_len)
    if rollout.kv_cache_memory_bytes is not None and rollout.kv_cache_memory_bytes < least:
        problem = f"does not hold one sequence of {rollout.max_model_len} tokens, which takes {least}"
        remedy = f"Write {least} times the sequences that shall run at once, or shorten the sequences"
        violations.append(Violation("rollout.kv_cache_memory_bytes", rollout.kv_cache_memory_bytes, problem, remedy))
    return violations


def yarn_reach(model: ModelConfig) -> int | None:
    """The number of positions that YaRN covers; None if the model does not use YaRN.

    vLLM tabulates that many positions, and reads past the end of the table for later ones (yarn_scaling_rope.py, 0.32).
    """
    rope = model.rope
    return int(rope.factor * rope.original_max_position_embeddings) if rope.type is RopeType.yarn else None


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of vLLM's embedding and output projection, over all ranks."""
    return -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def kv_bytes_per_token(model: ModelConfig, rollout: ServingConfig) -> int:
    """Bytes of KV cache per token on one rank: the keys and values of the heads that the rank has.

    0 for latent attention, whose cache depends on the kernel: vLLM itself refuses a cache that is too small.
    """
    if model.mla is not None:
        return 0
    heads = max(1, model.num_query_groups // rollout.tp)
    return 2 * model.num_attention_layers * heads * model.head_dim * BYTES[rollout.dtype]


def sequence_bytes(model: ModelConfig, rollout: ServingConfig, length: int) -> int:
    """Bytes of cache of a sequence of ``length`` tokens on one rank; see ``kv_bytes_per_token``."""
    return kv_bytes_per_token(model, rollout) * length + state_bytes(model, rollout)


def state_bytes(model: ModelConfig, rollout: ServingConfig) -> int:
    """Bytes that the layers with linear attention keep for a sequence on one rank, whatever its length.

    The last tokens of the convolution, and the state of each head (``gated_delta_net_state_shape`` in
    vllm/model_executor/layers/mamba/mamba_utils.py, 0.32), in the model's dtype.
    """
    linear = model.linear_attention
    if linear is None:
        return 0
    taps = (linear.conv_kernel_dim - 1) * (2 * linear.key_dim + linear.value_dim)
    state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
    return len(linear.layers) * (taps + state) // rollout.tp * BYTES[rollout.dtype]


def _tensor_violations(model: ModelConfig, layout: RolloutLayout) -> list[Violation]:
    padded = padded_vocab_size(model)
    widths = {"model.num_attention_heads": model.num_attention_heads, "the padded vocabulary": padded}
    if model.moe is None or model.moe.dense_layers:
        widths["model.ffn_hidden_size"] = model.ffn_hidden_size
    if model.moe is not None and layout.ep == 1:
        widths["model.moe.ffn_hidden_size"] = model.moe.ffn_hidden_size
    if model.moe is not None:
        widths["model.moe.shared_ffn_hidden_size"] = model.moe.shared_ffn_hidden_size
    if model.linear_attention is not None:
        widths["model.linear_attention.num_key_heads"] = model.linear_attention.num_key_heads
    if model.vision is not None:
        widths["model.vision.num_heads"] = model.vision.num_heads
        widths["model.vision.ffn_hidden_size"] = model.vision.ffn_hidden_size
    remedy = "Write a rollout.tp that does"
    violations = [
        Violation("rollout.tp", layout.tp, f"does not divide {key}={size}", remedy)
        for key, size in widths.items()
        if size % layout.tp
    ]
    groups = model.num_query_groups
    if model.mla is None and groups % layout.tp and layout.tp % groups:
        problem = f"neither divides model.num_query_groups={groups} nor is a multiple of it"
        violations.append(Violation("rollout.tp", layout.tp, problem, "Write a rollout.tp that is one or the other"))
    elif model.joint_qk_norm and layout.tp > groups:  # it gathers a shared head once for every rank (models/olmoe.py)
        problem = f"exceeds model.num_query_groups={groups}, over all of which vLLM 0.32 norms the keys at once"
        violations.append(Violation("rollout.tp", layout.tp, problem, f"Write a rollout.tp of {groups} or less"))
    elif model.attention_sinks and layout.tp > groups:  # it divides the key heads by tp (models/gpt_oss.py)
        problem = f"exceeds model.num_query_groups={groups}, and vLLM 0.32 shares no key of a model with sinks"
        violations.append(Violation("rollout.tp", layout.tp, problem, f"Write a rollout.tp of {groups} or less"))
    return violations


def _expert_violations(model: ModelConfig, layout: RolloutLayout) -> list[Violation]:
    if layout.ep == 1:
        return []
    choices = sorted({1, layout.tp, layout.world_size})
    if model.moe is None:
        return [Violation("rollout.ep", layout.ep, "the model has no experts", "Write rollout.ep=1")]
    if layout.ep not in choices:
        written = f"rollout.tp={layout.tp} nor rollout.tp * rollout.dp={layout.world_size}"
        problem = f"is neither 1, {written}, and vLLM spreads experts over none, one replica or all"
        return [Violation("rollout.ep", layout.ep, problem, f"Write rollout.ep as one of {choices}")]
    if model.moe.num_experts % layout.ep:
        problem = f"does not divide model.moe.num_experts={model.moe.num_experts}"
        fitting = [size for size in choices if model.moe.num_experts % size == 0]
        return [Violation("rollout.ep", layout.ep, problem, f"Write rollout.ep as one of {fitting}")]
    return []
