"""Generation through ``start_engine`` beside vLLM's own offline ``LLM.generate``: same prompts, seeds and settings.

    python benchmarks/rollout.py [--rounds 5] [--prompts 48] [--n 4] [--response 96]
    python benchmarks/rollout.py --hidden 1024 --layers 8 --rounds 3         # 118 million parameters
    python benchmarks/rollout.py --ray                                       # and as a run draws

Each runs in a process of its own, started with the same environment and engine arguments, on the same cores; rounds
alternate, so that whatever else the machine does hits both, and the medians are compared.  Target: at least 0.97 of the
offline tokens/s.  The model is a llama with random weights in float32: by default of 5 million parameters, whose steps
are so short that everything around them shows.

With --ray a third engine draws as a run's do: below a Ray actor, through a pool; it has no target.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import inherited_environment
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Prompt, Request, SampleSource, Sampling, requests_of
from mcore_rl.rollout.vllm.engine.admission import admit
from mcore_rl.rollout.vllm.engine.environment import engine_arguments, engine_environment, usable_cores
from mcore_rl.rollout.vllm.engine.process import start_engine

TARGET = 0.97
VOCAB = 8192


def write_model(directory: Path, hidden: int, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, vocab_size=VOCAB)
    heads = dict(num_attention_heads=hidden // 64, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(directory)


def offline(connection: Connection, directory: Path, rollout: RolloutConfig, rounds: list[list[Request]]) -> None:
    """The other process: one round of ``LLM.generate`` for every message, answered with (tokens, seconds)."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, sys.stdout.fileno())
    os.dup2(quiet, sys.stderr.fileno())
    if sys.platform == "linux":
        os.sched_setaffinity(0, usable_cores())
    from vllm import LLM
    from vllm.inputs.engine import tokens_input

    from mcore_rl.rollout.vllm.engine.vllm_engine import sampling_params

    platform = detect(rollout.device)
    llm = LLM(**engine_arguments(directory, rollout, admit(directory, rollout, platform), platform, None))
    connection.send("ready")
    for requests in rounds:
        sampling = connection.recv()
        started = time.perf_counter()
        outputs = llm.generate(
            [tokens_input(request.tokens) for request in requests],
            [sampling_params(request, sampling, detokenize=False) for request in requests],
            use_tqdm=False,
        )
        elapsed = time.perf_counter() - started
        connection.send(([list(output.outputs[0].token_ids) for output in outputs], elapsed))
    connection.recv()


def through_ray(stack: ExitStack, directory: Path, rollout: RolloutConfig) -> EnginePool:
    """A pool of one engine below a Ray actor, until ``stack`` is closed."""
    import ray

    from mcore_rl.rollout.served import Served
    from mcore_rl.runtime.engine_client import EngineClient, PartSpec
    from mcore_rl.runtime.rollout_worker import RolloutWorker

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    stack.callback(ray.shutdown)
    part = PartSpec(
        lambda: ray.remote(RolloutWorker).options(num_cpus=0).remote("ray"), directory / "ray.log", usable_cores()
    )
    client = EngineClient("ray", [part])
    stack.callback(lambda: asyncio.run(client.shutdown()))
    asyncio.run(client.start(Served(name="ray", directory=directory, config=rollout)))
    return EnginePool([client], rollout.max_num_seqs)


def ours(engine: SampleSource, requests: list[Request], sampling: Sampling) -> tuple[list[list[int]], float]:
    async def run() -> list[list[int]]:
        samples = {(sample.prompt_id, sample.index): sample async for sample in engine.generate(requests, sampling)}
        return [samples[request.key].tokens.tolist() for request in requests]

    started = time.perf_counter()
    tokens = asyncio.run(run())
    return tokens, time.perf_counter() - started


def measure(arguments: argparse.Namespace, directory: Path) -> float:
    """Both, round by round; prints a line each and returns the ratio of the medians."""
    rollout = RolloutConfig(
        device=Device.cpu,
        dtype=Precision.float32,
        max_prompt_length=160,
        max_response_length=arguments.response,
        kv_cache_memory_bytes=256 * 2**20,
        max_num_seqs=arguments.prompts * arguments.n,
    )
    sampling = Sampling(max_tokens=arguments.response, ignore_eos=True, seed=1)
    generator = random.Random(0)
    rounds = []
    for index in range(arguments.rounds + 1):  # the first warms both up; new prompts each time, for the prefix cache
        prompts = [
            Prompt(id=f"{index}/{number}", tokens=tuple(generator.choices(range(VOCAB), k=generator.randint(32, 160))))
            for number in range(arguments.prompts)
        ]
        rounds.append(requests_of(prompts, arguments.n))
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=offline, args=(theirs, directory, rollout, rounds), daemon=True)
    with inherited_environment(engine_environment(detect(rollout.device), rollout, usable_cores())):
        process.start()
    assert connection.recv() == "ready"
    speeds: dict[str, list[float]] = {"ours": [], "offline": []} | ({"ray": []} if arguments.ray else {})
    with ExitStack() as stack:
        engine = stack.enter_context(start_engine("rollout", directory, rollout))
        pool = through_ray(stack, directory, rollout) if arguments.ray else None
        for index, requests in enumerate(rounds):
            drawn = {"ours": ours(engine, requests, sampling)}
            connection.send(sampling)
            drawn["offline"] = connection.recv()
            if pool is not None:
                drawn["ray"] = ours(pool, requests, sampling)
            for name, (tokens, elapsed) in drawn.items():
                assert tokens == drawn["offline"][0], f"{name} drew other tokens"
                if index:
                    speeds[name].append(sum(map(len, tokens)) / elapsed)
    connection.send("end")
    process.join()
    for name, each in speeds.items():
        print(f"{name:8} {statistics.median(each):7.0f} tokens/s (median of {', '.join(f'{one:.0f}' for one in each)})")
    return statistics.median(speeds["ours"]) / statistics.median(speeds["offline"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--response", type=int, default=96)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ray", action="store_true", help="also an engine below a Ray actor")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments.hidden, arguments.layers)
        ratio = measure(arguments, Path(folder))
    print(f"ratio {ratio:.2f} (target: at least {TARGET}) {'met' if ratio >= TARGET else 'MISSED'}")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
