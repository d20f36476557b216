"""What is refused before an engine starts: one message, with the remedy, and no process."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.ground.errors import CheckpointError, ConfigError, RolloutError
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.protocol import Prompt, Sampling, requests_of
from mcore_rl.rollout.vllm.engine.admission import admit, engine_violations
from mcore_rl.rollout.vllm.engine.request_checks import Limits, demand_requests
from tests.support import models, rollouts

CPU = detect(Device.cpu)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    rollouts.write("mixtral", directory)
    return directory


def config(**changes: object) -> RolloutConfig:
    return rollouts.config(**changes)


def test_what_can_run_is_admitted(mixtral: Path) -> None:
    assert admit(mixtral, config(tp=2), CPU).moe is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(tp=3), ["rollout.tp=3: does not divide model.num_attention_heads=4"]),
        (dict(ep=2), ["rollout.ep=2: is neither 1,", "Write rollout.ep as one of [1]"]),
        (dict(tp=2, ep=2), ["rollout.ep=2: vLLM's CPU kernel of the experts cannot spread them. Write rollout.ep=1"]),
        (dict(max_prompt_length=500), ["rollout.max_prompt_length=500: with rollout.max_response_length=64 exceeds"]),
        (dict(kv_cache_memory_bytes=4096), ["rollout.kv_cache_memory_bytes=4096: does not hold one sequence of 264"]),
        (dict(gpu_memory_utilization=1e-6), ["rollout.gpu_memory_utilization=1e-06: is 0.0 GiB of", "Raise it, or"]),
        (dict(stop=["x"]), ["has no tokenizer, so that responses have no text. Write rollout.stop_token_ids"]),
        (dict(return_routed_experts=True), ["vLLM records experts on accelerators only"]),
        (
            dict(temperature=-1, top_p=0, n=0, max_num_seqs=0),
            ["4 problems", "rollout.temperature=-1", "rollout.top_p=0", "rollout.n=0", "rollout.max_num_seqs=0"],
        ),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_keys(mixtral: Path, changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        admit(mixtral, config(**changes), CPU)
    for words in said:
        assert words in str(error.value)


def test_the_cpus_kernels_of_linear_attention_are_of_one_dtype_and_shape() -> None:
    """Found by running them: assertions of bfloat16, of a convolution's taps, and of two widths of heads."""
    model = models.qwen3_next()  # three taps, heads of 10 and 6

    def said(**changes: object) -> str:
        settings: dict[str, Any] = {"dtype": Precision.bfloat16} | changes
        return "\n".join(map(str, engine_violations(model, RolloutConfig(**settings), CPU)))

    assert "rollout.dtype=float32: vLLM's CPU kernels" in said(dtype=Precision.float32)
    assert said(tp=2) == said()
    assert "model.linear_attention.conv_kernel_dim=3" in said()
    assert "key_head_dim=10: beside value_head_dim=6: vLLM's CPU kernels take 64 or 128 for both" in said()
    assert model.linear_attention is not None
    fitting = replace(model.linear_attention, conv_kernel_dim=4, key_head_dim=64, value_head_dim=128)
    model = models.qwen3_next(linear_attention=fitting)
    assert "key_head_dim=64: beside value_head_dim=128" in said()
    model = models.qwen3_next(linear_attention=replace(fitting, value_head_dim=64))
    assert said() == said(tp=4) == ""
    rocm = replace(CPU, kind=Device.rocm, device_type="cuda")
    assert engine_violations(model, RolloutConfig(dtype=Precision.float32), rocm) == []


def test_an_accelerator_may_spread_experts_and_record_routing(mixtral: Path) -> None:
    rocm = replace(CPU, kind=Device.rocm, device_type="cuda")
    assert admit(mixtral, config(tp=2, ep=2, return_routed_experts=True), rocm)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel.*is not supported"):
        admit(tmp_path, config(), CPU)


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), ('{"architectures": [', "is not JSON")])
def test_a_directory_without_a_model_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {said}.*Name the directory of a Hugging Face model"):
        admit(tmp_path, config(), CPU)


LIMITS = Limits(name="e", max_prompt_length=8, max_response_length=4, vocab_size=9, has_tokenizer=False)


@pytest.mark.parametrize(("length", "max_tokens"), [(8, 4), (11, 1), (9, 3)])
def test_the_whole_sequence_must_fit(length: int, max_tokens: int) -> None:
    """So a later turn may be given more than a prompt: all that was said before it."""
    requests = requests_of([Prompt(id="p", tokens=(1,) * length)], 1)
    demand_requests(requests, Sampling(max_tokens=max_tokens), LIMITS)
    longer = requests_of([Prompt(id="p", tokens=(1,) * (length + 1))], 1)
    said = (
        f"prompt p has {length + 1} tokens, with max_tokens={max_tokens} more than the 12 that rollout.max_prompt_len"
    )
    with pytest.raises(RolloutError, match=said):
        demand_requests(longer, Sampling(max_tokens=max_tokens), LIMITS)


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (lambda name: "0.33.1", "vllm 0.33.1 is installed, and only 0.32 is tested. Install it: pip install 'vllm==0"),
        (lambda name: "0.3.2", "only 0.32 is tested"),
        (missing, "vLLM is not installed"),
    ],
)
def test_a_vllm_that_was_not_tested_is_refused(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch, version: Callable[[str], str], said: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(RolloutError, match=said):
        admit(mixtral, config(), CPU)
