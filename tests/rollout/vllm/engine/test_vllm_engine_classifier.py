"""Live engines of reward models (float32, CPU): their scores are transformers', and their deaths have names.

The largest difference measured: 1e-5, of scores up to 32.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from transformers import PreTrainedModel

from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from tests.support import reward_models
from tests.support.forked import start_engine
from tests.support.reward_models import TwoLayerReward, reference

ATOL = 1e-4
LENGTHS = (1, 2, 7, 16, 17, 33, 64, 111, 199, 200)  # around vLLM's blocks of 16, up to the limit
DRAW = random.Random(5)
TEXTS = [[DRAW.randrange(3, 101) for _ in range(length)] for length in LENGTHS]
ALIKE = [[*TEXTS[6], last] for last in (3, 4, 5)]  # share all but their last token, and the prefix cache


@dataclass
class Started:
    """llama: two engines of one model."""

    llama: list[EngineProcess]
    llama_model: PreTrainedModel
    qwen2: EngineProcess
    qwen2_model: PreTrainedModel
    two_layer: EngineProcess
    two_layer_model: TwoLayerReward


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[Started]:
    root = tmp_path_factory.mktemp("reward_models")
    models = reward_models.write(root / "llama"), reward_models.write(root / "qwen2", "qwen2", seed=1)
    two_layer = TwoLayerReward(root / "two_layer")
    with ExitStack() as stack:
        engines = []
        for index, name in enumerate(("llama", "llama", "qwen2", "two_layer")):
            settings = reward_models.config(root / name)
            engine = start_engine(
                f"reward engine {index}", root / name, settings, wait=False, log=root / f"{index}.log"
            )
            engines.append(stack.enter_context(engine))
        for engine in engines:
            engine.wait_until_ready()
        yield Started(engines[:2], models[0], engines[2], models[1], engines[3], two_layer)


def scores(engine: EngineProcess, texts: list[list[int]]) -> list[float]:
    numbers = asyncio.run(engine.classify(texts))
    assert all(isinstance(each, float) for each in numbers), numbers
    return [float(each) for each in numbers]


def test_scores_are_those_of_transformers(started: Started) -> None:
    for engine, model in ((started.llama[0], started.llama_model), (started.qwen2, started.qwen2_model)):
        expected = reference(model, TEXTS)
        assert max(expected) - min(expected) > 5, "scores differ: agreement says something"
        assert scores(engine, TEXTS) == pytest.approx(expected, abs=ATOL)


def test_a_head_of_two_layers_is_asked_at_the_last_token(started: Started) -> None:
    assert scores(started.two_layer, TEXTS) == pytest.approx(started.two_layer_model.reference(TEXTS), abs=ATOL)


def test_texts_that_begin_alike_have_scores_of_their_own(started: Started) -> None:
    expected = reference(started.llama_model, ALIKE)
    assert len({round(each, 2) for each in expected}) == 3
    for _ in range(2):  # the second time all of it is in the cache
        assert scores(started.llama[0], ALIKE) == pytest.approx(expected, abs=ATOL)


def test_two_engines_give_what_one_gives_and_both_work(started: Started) -> None:
    async def run() -> list[float | str]:
        pool = EnginePool(started.llama, 8)
        await pool.sleep()
        await pool.wake()
        return await asyncio.gather(*map(pool.classify, TEXTS))

    before = [asyncio.run(engine.statistics()).prompt_tokens for engine in started.llama]
    assert asyncio.run(run()) == pytest.approx(reference(started.llama_model, TEXTS), abs=ATOL)
    after = [asyncio.run(engine.statistics()).prompt_tokens for engine in started.llama]
    assert all(late > early for late, early in zip(after, before, strict=True))


def test_a_dead_engine_is_named_with_what_it_was_doing(started: Started) -> None:  # the last: it is gone then
    async def run() -> None:
        pool = EnginePool([started.llama[1]], 8)
        started.llama[1]._process.kill()
        await pool.classify(TEXTS[-1])

    with pytest.raises(
        DeadEngineError, match=r"reward engine 1 died while scoring 1 texts: its process \d+ was killed"
    ):
        asyncio.run(run())
