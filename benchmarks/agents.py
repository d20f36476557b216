"""Agents' episodes beside the engine: how busy tools that sleep leave it, and what a turn costs over raw drawing.

    python benchmarks/agents.py [--episodes 256] [--turns 8] [--median 0.5] [--rounds 3]

Busy: so many episodes at once, of so many turns, each of which calls a tool that sleeps a lognormal time (sigma 1).
While every episode that goes on is asleep, no engine could draw: that time is the tools'.  Of the rest, in which at
least one episode is not asleep, the engine has to be busy (a sample is running) for at least 0.9.  What it is not is
ours: rendering, parsing, the way to the engine and back, which the loop of a run shares with nothing here.

Overhead: 32 episodes of 8 turns at once, with a tool that returns at once, by ``tool_agent``; and by a program over
HTTP, client and all in this process.  Then the same requests again, each episode's one after the other and nothing
between them: the same tokens by the same seeds.  The cache is emptied before each.  Rounds alternate, and medians of
their ratios are compared.  Target: ``tool_agent`` takes at most 1.1 of the raw drawing.

The model is a llama of 5 million parameters with random weights, whose steps are so short that everything around them
shows.  Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from mcore_rl.agents.conversations import Conversations
from mcore_rl.agents.gateway import Gateway
from mcore_rl.agents.rendering import TurnRenderer
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.session import SessionParts
from mcore_rl.agents.tools import EpisodeTool, ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.reward import CodeConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.data.prompts import PromptRow
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.rollout.vllm.engine.admission import admit
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.tool_parsers import ReadCalls

BUSY = 0.9
OVERHEAD = 1.1
AT_ONCE = 32  # episodes of the second measurement
TURN_TOKENS = 24  # mean of a turn
PROMPT = 256
RESPONSE = 1536
PARSER = "def read_calls(text):\n    return [{'name': 'sleep', 'arguments': {}}]\n"
TOOLS = """
tools:
- class_name: __main__.Sleep
  tool_schema: {type: function, function: {name: sleep, parameters: {type: object}}}
"""


class Awake:
    """Seconds in which at least one episode went on and was not asleep."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._since = 0.0

    def add(self, change: int) -> None:
        """So many more are awake."""
        if self.count:
            self.seconds += time.perf_counter() - self._since
        self.count = self.count + change
        self._since = time.perf_counter()


class Sleep(EpisodeTool):
    """Sleeps a lognormal time.  median_s: 0: returns at once."""

    median_s = 0.0
    awake = Awake()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        if self.median_s:
            rng = random.Random(f"{instance_id}/{time.perf_counter_ns()}")
            self.awake.add(-1)
            await asyncio.sleep(self.median_s * rng.lognormvariate(0, 1))
            self.awake.add(1)
        return "slept well, and woke up"


class Recorder:
    """A source that keeps the requests of each episode."""

    def __init__(self, source: EnginePool) -> None:
        self._source = source
        self.asked: dict[int, list[tuple[Request, Sampling]]] = {}

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        (request,) = requests
        async for sample in self._source.generate(requests, sampling):
            # Cut to what was drawn, by count alone: a second drawing must not look for an end.
            self.asked.setdefault(request.index, []).append((request, sampling))
            yield sample


def write_model(directory: Path, max_length: int = PROMPT + RESPONSE) -> Any:
    """The model and its tokenizer, with a chat template; returns the tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    made.train_from_iterator([__doc__], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=8, vocab_size=len(tokenizer))
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=max_length)
    eos = tokenizer.eos_token_id
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=eos)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer


def rows(tokenizer: Any, count: int, salt: str) -> list[PromptRow]:
    made = []
    for number in range(count):
        messages = [{"role": "user", "content": f"{salt} {number}: {'how long do tools sleep ' * 6}"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        made.append(PromptRow(f"{salt}:{number}", tokens, messages, "sleep", "", {}, {"agent_name": "tool_agent"}))
    return made


class Bench:
    """One engine, and what runs on it."""

    def __init__(self, engine: EngineProcess, tokenizer: Any, folder: Path, turns: int, num_seqs: int) -> None:
        (folder / "parser.py").write_text(PARSER)
        (folder / "tools.yaml").write_text(TOOLS)
        self.engine = engine
        self.tokenizer = tokenizer
        self.turns = turns
        self.pool = EnginePool([engine], num_seqs)
        self._version = 0
        config = AgentConfig(
            tool_config_path=str(folder / "tools.yaml"),
            tool_parser=f"{folder}/parser.py:read_calls",
            max_turns=turns,
            max_tool_s=3600.0,
            tool_timeout_s=600.0,
        )
        self.config = config
        self.runner = AgentRunner(config, CodeConfig(), tokenizer)
        # One token in so many ends a turn: a random model draws them all alike.
        ends = range(2, len(tokenizer), TURN_TOKENS)
        self.sampling = Sampling(max_tokens=RESPONSE, stop_token_ids=tuple(ends), ignore_eos=True, seed=1)

    async def busy(self, count: int, median_s: float) -> float:
        """The engine's busy share of the time that the tools leave."""
        Sleep.median_s = median_s
        Sleep.awake = Awake()
        before, begun = await self.engine.statistics(), time.perf_counter()

        async def one(number: int, row: PromptRow) -> int:
            Sleep.awake.add(1)
            episode = await self.runner.run(self.pool, row, row.id, number, 0, self.sampling)
            Sleep.awake.add(-1)
            return episode.num_response_tokens

        tokens = await asyncio.gather(*(one(*each) for each in enumerate(rows(self.tokenizer, count, "busy"))))
        wall = time.perf_counter() - begun
        after = await self.engine.statistics()
        busy_s = after.busy_s - before.busy_s
        left_s = Sleep.awake.seconds
        drawn = after.generated_tokens - before.generated_tokens
        print(
            f"{count} episodes of {self.turns} turns, tools of {median_s:g} s in the median: {wall:.1f} s, of which "
            f"the tools left {left_s:.1f}; busy {busy_s:.1f} s; {drawn:,} tokens drawn of {sum(tokens):,}",
            flush=True,
        )
        return busy_s / left_s

    async def overhead(self, number: int) -> tuple[float, float]:
        """What ``tool_agent``, and a program over HTTP, take over the raw drawing of the same tokens."""
        Sleep.median_s = 0.0
        agent = await self._over_raw(f"round{number}", self._agent)
        return agent, await self._over_raw(f"http{number}", self._program)

    async def _over_raw(self, salt: str, run: Any) -> float:
        recorder = Recorder(self.pool)
        given = rows(self.tokenizer, AT_ONCE, salt)
        await self._cold()
        begun = time.perf_counter()
        await run(recorder, given)
        agents_s = time.perf_counter() - begun
        await self._cold()
        begun = time.perf_counter()
        await asyncio.gather(*map(self._raw, recorder.asked.values()))
        return agents_s / (time.perf_counter() - begun)

    async def _agent(self, source: Recorder, given: Sequence[PromptRow]) -> None:
        await asyncio.gather(
            *(self.runner.run(source, row, row.id, 0, index, self.sampling) for index, row in enumerate(given))
        )

    async def _program(self, source: Recorder, given: Sequence[PromptRow]) -> None:
        parts = SessionParts(
            config=self.config, tokenizer=self.tokenizer, renderer=TurnRenderer(self.tokenizer), tools=ToolSet()
        )
        gateway = Gateway("127.0.0.1", 0, parts, lambda tools, raw: ReadCalls(calls=()))
        url = await gateway.start()
        async with aiohttp.ClientSession() as session:

            async def one(index: int, row: PromptRow) -> None:
                made = Conversations(parts, source, row, row.id, 0, index, self.sampling, PROMPT)
                async with gateway.opened(made, takes_reward=False) as access:
                    messages = list(row.messages)
                    for _ in range(self.turns):
                        headers = {"Authorization": f"Bearer {access.key}"}
                        body = json.dumps({"messages": messages})
                        async with session.post(f"{url}/chat/completions", data=body, headers=headers) as answer:
                            said = await answer.json()
                        messages.append(said["choices"][0]["message"])
                        messages.append({"role": "user", "content": "slept well, and woke up"})

            await asyncio.gather(*(one(index, row) for index, row in enumerate(given)))
        await gateway.close()

    async def _raw(self, requests: Sequence[tuple[Request, Sampling]]) -> None:
        for request, sampling in requests:
            async for _ in self.pool.generate([request], sampling):
                pass

    async def _cold(self) -> None:
        """Empties the prefix cache: as after an update of weights."""
        self._version += 1
        await self.engine.start_update()
        await self.engine.finish_update(self._version)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--median", type=float, default=0.5, help="seconds that a tool sleeps")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    platform = detect(Device.cpu)
    rollout = RolloutConfig(
        device=Device.cpu,
        dtype=Precision.float32,
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,
        max_prompt_length=PROMPT,
        max_response_length=RESPONSE,
        max_num_seqs=given.episodes,
        enable_prefix_caching=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_model(folder)
        admit(folder, rollout, platform)
        engine = start_engine("rollout-0", folder, rollout)
        try:
            load = os.getloadavg()[0]
            bench = Bench(engine, tokenizer, folder, given.turns, given.episodes)

            async def measured() -> tuple[float, list[tuple[float, float]]]:
                await bench.overhead(-1)  # what is compiled and imported at first
                busy = await bench.busy(given.episodes, given.median)
                ratios = []
                for number in range(given.rounds):
                    ratios.append(await bench.overhead(number))
                    print(f"round {number + 1} of {given.rounds}: {ratios[-1][0]:.3f} {ratios[-1][1]:.3f}", flush=True)
                return busy, ratios

            busy, ratios = asyncio.run(measured())
        finally:
            engine.close()
    agent, program = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"busy {busy:.3f} of the time that the tools leave (at least {BUSY})")
    print(f"tool_agent {agent:.3f} of raw drawing (at most {OVERHEAD}), a program over HTTP {program:.3f}")
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    return int(busy < BUSY or agent > OVERHEAD)


if __name__ == "__main__":
    sys.exit(main())
