"""Programs' conversations drawn by vLLM, scored again by transformers: the same log-probs; and the cache grows.

The engine drew turn by turn; transformers reads each episode once, as a whole.  Both in float32.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mcore_rl.agents.conversations import Conversations
from mcore_rl.agents.rendering import TurnRenderer
from mcore_rl.agents.session import SessionParts
from mcore_rl.agents.tools import ToolSet
from mcore_rl.config.agent import AgentConfig
from mcore_rl.rollout.episodes import Episode, FinishReason
from mcore_rl.rollout.protocol import Sampling
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from tests.agents.test_session_exactness import hostile, request
from tests.support import rollouts
from tests.support.chat_styles import style
from tests.support.drawn_turns import agent_row
from tests.support.forked import start_engine

NAME, BLOCK = "qwen2.5", 128  # tokens of a block of the CPU engine's cache
TOLERANCE = 1e-5  # of float32 log-probs
SAMPLING = Sampling(max_tokens=1500, seed=5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(directory: Path) -> LlamaForCausalLM:
    tokenizer = style(NAME)
    torch.manual_seed(0)
    sizes = rollouts.SIZES | dict(
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.05,
    )
    made = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager")).eval()
    made.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return made


@pytest.fixture(scope="module")
def engine(directory: Path, model: LlamaForCausalLM, processes: None) -> Iterator[EngineProcess]:
    config = rollouts.config(
        max_prompt_length=1500, max_response_length=1500, max_num_seqs=16,
        kv_cache_memory_bytes=2**28,  # no block of the 400 is evicted
    )  # fmt: skip
    made = start_engine("rollout-0", directory, config)
    try:
        yield made
    finally:
        made.close()


async def play(engine: EngineProcess, number: int) -> Conversations:
    """A program that goes on, branches, and rewrites, with hostile text; up to twelve turns."""
    rng, tokenizer = random.Random(number), style(NAME)
    parts = SessionParts(
        config=AgentConfig(max_turns=20), tokenizer=tokenizer, renderer=TurnRenderer(tokenizer), tools=ToolSet()
    )
    row = agent_row(tokenizer, f"question {number} " * rng.randint(1, 12), number=number)
    made = Conversations(parts, engine, row, f"p{number}", number, 0, SAMPLING, 1500)
    known = [list(row.messages)]
    spelled = list(tokenizer.added_tokens_decoder.values())
    for turn in range(rng.randint(1, 12)):
        said = list(rng.choice(known[-2:]))
        if rng.random() < 0.1 and len(said) > 2:
            said = [{"role": "user", "content": "summary"}, *said[2:]]
        message = await request(made, said, calls=False, max_tokens=8)
        text = hostile(rng, [str(each) for each in spelled])[:120]
        known.append([*said, message, {"role": rng.choice(["user", "tool"]), "content": f"{turn} {text}"}])
    return made


@pytest.mark.parametrize("count", [16, pytest.param(400, marks=pytest.mark.tier("full"))])
def test_logprobs_equal_those_of_transformers(engine: EngineProcess, model: LlamaForCausalLM, count: int) -> None:
    async def all_of_them() -> list[Conversations]:
        return await asyncio.gather(*(play(engine, number) for number in range(count)))

    worst, num_trained = 0.0, 0
    begins = set[str]()
    for made in asyncio.run(all_of_them()):
        for episode in made.episodes("answered", FinishReason.stop):
            worst = max(worst, difference(model, episode))
            num_trained += sum(segment.trained for segment in episode.segments)
            assert episode.agent is not None
            begins.add(episode.agent.begins)
        for turn in made.turns:  # a turn finds all whole blocks of the turns before it
            if turn.parent is not None and len(turn.parent.tokens) > BLOCK:
                assert turn.cached_tokens >= (len(turn.parent.tokens) - 1) // BLOCK * BLOCK
    assert num_trained > 4 * count and {"first", "branch"} <= begins
    print(f"{count} episodes, {num_trained} turns, largest difference {worst:.2e}")
    assert worst < TOLERANCE


def difference(model: LlamaForCausalLM, episode: Episode) -> float:
    """The largest between the episode's log-probs and transformers', over its trained tokens."""
    tokens = np.concatenate([segment.tokens for segment in episode.segments])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.from_numpy(tokens).long()[None]).logits[0], -1).numpy()
    worst, start = 0.0, 0
    for segment in episode.segments:
        end = start + len(segment.tokens)
        if segment.trained and segment.logprobs is not None:
            again = logprobs[np.arange(start - 1, end - 1), segment.tokens]
            worst = max(worst, float(np.abs(again - segment.logprobs).max()))
        start = end
    return worst
