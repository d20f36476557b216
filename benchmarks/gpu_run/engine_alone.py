"""vLLM by itself, in one process: it draws, draws the same again, sleeps and wakes.

Its environment and arguments are those of a run's engines, its weights are random.  Two sections: every kernel launched
by itself, and graphs of decoding steps, which a run has by default.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_sections.section import GIB, Bench, Fact, Facts, Skipped
from mcore_rl.config.engine import Precision
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.parallel.device import memory
from mcore_rl.parallel.launch import inherited_environment

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS = 64
PROMPT_TOKENS = 40
RESPONSE_TOKENS = 128
TINY_PROMPTS = 8
TINY_RESPONSE_TOKENS = 16
# Qwen2.5-0.5B's sizes, and the smallest that the CPU's kernels take.
SIZES = dict(
    hidden_size=896,
    intermediate_size=4_864,
    num_attention_heads=14,
    num_key_value_heads=2,
    num_hidden_layers=24,
    vocab_size=151_936,
)
TINY_SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_hidden_layers=2,
    vocab_size=1_024,
)
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, "enforce_eager": False}


def eager(bench: Bench) -> Facts:
    """Every kernel launched by itself, with sleep where there is device memory to give back."""
    return alone(bench, {"enforce_eager": True}, sleeps=bench.platform.is_accelerator)


def graphs(bench: Bench) -> Facts:
    """Graphs of decoding steps, without torch's compiler."""
    if not bench.platform.is_accelerator:
        raise Skipped("the CPU has no graphs")
    yield from alone(bench, GRAPHS, sleeps=False)


def alone(bench: Bench, further: Mapping[str, Any], *, sleeps: bool) -> Facts:
    """One engine from its start to its last sample.  further: arguments of vLLM's."""
    from mcore_rl.rollout.vllm.engine.environment import engine_environment, usable_cores

    rollout = RolloutConfig(
        dtype=Precision.bfloat16 if bench.platform.is_accelerator else Precision.float32,
        device=bench.platform.kind,
        gpu_memory_utilization=0.3,
        max_prompt_length=PROMPT_TOKENS,
        max_response_length=RESPONSE_TOKENS,
        kv_cache_memory_bytes=64 << 20 if bench.tiny else None,
    )
    in_this_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with inherited_environment(engine_environment(bench.platform, rollout, usable_cores()) | in_this_process):
        yield from of_engine(bench, rollout, further, sleeps=sleeps)


def of_engine(bench: Bench, rollout: RolloutConfig, further: Mapping[str, Any], *, sleeps: bool) -> Facts:
    """The facts, within the environment of an engine."""
    from vllm import LLM

    from mcore_rl.families.config_json import read_config
    from mcore_rl.families.registry import model_of
    from mcore_rl.rollout.vllm.engine.environment import engine_arguments

    directory = write_config(bench.folder / "engine_alone", bench.tiny)
    _, model = model_of(read_config(directory))
    arguments = engine_arguments(directory, rollout, model, bench.platform, None)
    begun = time.monotonic()
    llm = LLM(**(arguments | {"load_format": "dummy"} | further))
    yield Fact(what="start of the engine", value=time.monotonic() - begun, unit="s")
    first, _ = drawn(llm, bench.tiny)
    again, seconds = drawn(llm, bench.tiny)
    tokens = sum(map(len, again))
    yield Fact(what=f"drawing, {len(again)} prompts at once", value=tokens / seconds, unit="tokens/s")
    yield Fact(what="the same seed gives the same tokens", value=str(first == again), ok=first == again)
    if sleeps:
        yield from sleep_and_wake(bench, llm, first)


def drawn(llm: LLM, tiny: bool) -> tuple[list[tuple[int, ...]], float]:
    """(the tokens of each response, seconds), with one seed."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    count = TINY_PROMPTS if tiny else PROMPTS
    prompts = [[(7 * i + j) % 1_000 + 5 for j in range(PROMPT_TOKENS)] for i in range(count)]
    params = SamplingParams(
        max_tokens=TINY_RESPONSE_TOKENS if tiny else RESPONSE_TOKENS,
        temperature=1.0,
        seed=1,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
    )
    begun = time.monotonic()
    outputs = llm.generate(list(map(tokens_input, prompts)), params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs], time.monotonic() - begun


def sleep_and_wake(bench: Bench, llm: LLM, first: list[tuple[int, ...]]) -> Facts:
    """Level 1 keeps weights in host memory, level 2 drops them.  first: what the engine drew before."""
    for level in (1, 2):
        before = memory(bench.platform).free_bytes
        begun = time.monotonic()
        llm.sleep(level)
        seconds = time.monotonic() - begun
        asleep = memory(bench.platform)
        taken = (asleep.total_bytes - asleep.free_bytes) / GIB
        freed = (asleep.free_bytes - before) / GIB
        yield Fact(
            what=f"sleep at level {level} frees",
            value=freed,
            unit="GiB",
            beside=f"in {seconds:.2f} s; {taken:.2f} GiB of the device stay taken",
            ok=freed > 0,
        )
        begun = time.monotonic()
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        yield Fact(what=f"waking from level {level}", value=time.monotonic() - begun, unit="s")
        if level == 1:
            llm.reset_prefix_cache()
            same = drawn(llm, bench.tiny)[0] == first
            yield Fact(what="after sleep at level 1 the same tokens", value=str(same), ok=same)


def write_config(directory: Path, tiny: bool) -> Path:
    """Write the config.json of a Qwen2 without weights or tokenizer, and return its folder."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        **(TINY_SIZES if tiny else SIZES),
        architectures=["Qwen2ForCausalLM"],
        max_position_embeddings=1_024,
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(directory)
    return directory
