"""A judge of ours is checked before anything starts, and what it is asked waits while its engines sleep."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.engine import Precision
from mcore_rl.config.judge import JudgeConfig, JudgeEnginesConfig
from mcore_rl.controller.lifecycle.fixed_engines import FixedEngines
from mcore_rl.controller.lifecycle.judge_engines import JudgeEngines, prepare_judge
from mcore_rl.ground.errors import ConfigError, DeadEngineError, RolloutError
from mcore_rl.parallel.device import detect
from mcore_rl.rewards.judge_client import JudgeError
from mcore_rl.rollout.episodes import FinishReason
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from tests.support import prompt_files, served_judges
from tests.support.vllm_device import VLLM_DEVICE

ENGINES = JudgeEnginesConfig(
    dtype=Precision.float32, device=VLLM_DEVICE, max_length=200, kv_cache_memory_bytes=16 << 20
)
ASKED = {"messages": [{"role": "user", "content": "2 + 3?"}], "temperature": 0.0, "max_tokens": 24}


class Engine:
    """Answers with its name; dies at the first request if it is told to."""

    def __init__(self, log: list[Any], *, dies: bool = False) -> None:
        self.name, self.log, self.dies, self.error = "judge engine 0", log, dies, None

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        self.log.append((requests[0].prompt.id, sampling))
        if self.dies:
            raise DeadEngineError("it is gone")
        yield Sample(
            prompt_id=requests[0].prompt.id, index=0, tokens=np.zeros(3, np.int32), logprobs=np.zeros(3, np.float32),
            versions=(), finish=FinishReason.length, text="Score: 3",
        )  # fmt: skip

    async def version(self) -> int:
        if self.dies:
            raise DeadEngineError("it is gone")
        return 0

    async def restart(self) -> None:
        self.dies = False

    async def sleep(self, level: int) -> None:
        self.log.append("sleeps")

    async def wake(self, memory: object) -> None:
        self.log.append("wakes")


def judge(log: list[Any], *, dies: bool = False, limit: int = 3, seed: int = 5) -> JudgeEngines:
    engines = FixedEngines([Engine(log, dies=dies)], 8, limit)  # type: ignore[list-item]
    config = JudgeConfig(path="judge", max_tokens=24, seed=seed, engines=ENGINES)
    return JudgeEngines(prompt_files.tokenizer(), engines, config, {"model.safetensors": "a sum"})


def test_an_engine_is_asked_greedily_with_the_seed_and_only_while_it_is_awake() -> None:
    async def run() -> None:
        log = list[Any]()
        answers = judge(log)
        request = {**ASKED, **answers.asked_of}
        await answers._engines.sleep()
        asked = asyncio.create_task(answers.ask(request, 0))
        await asyncio.sleep(0.2)
        assert log == ["sleeps"] and not asked.done()
        await answers._engines.wake()
        judgement = await asked
        assert (judgement.text, judgement.truncated, judgement.completion_tokens) == ("Score: 3", True, 3)
        _, woken, (_, sampling) = log
        assert woken == "wakes" and (sampling.temperature, sampling.seed, sampling.max_tokens) == (0.0, 5, 24)
        assert sampling.stop_token_ids == (prompt_files.tokenizer().eos_token_id,)
        answers.close()

    asyncio.run(run())


def test_other_files_or_another_seed_are_asked_anew() -> None:
    async def run() -> None:
        first, again, other = judge([]), judge([]), judge([], seed=6)
        files = JudgeEngines(prompt_files.tokenizer(), first._engines, first._config, {"model.safetensors": "another"})
        assert first.asked_of == again.asked_of and other.asked_of != first.asked_of != files.asked_of

    asyncio.run(run())


def test_an_engine_that_died_is_restarted_and_asked_again_within_the_limit() -> None:
    async def run() -> None:
        log = list[Any]()
        answers = judge(log, dies=True)
        request = {**ASKED, **answers.asked_of}
        judgements = await asyncio.gather(answers.ask(request, 0), answers.ask(request | {"seed": 7}, 0))
        assert [each.text for each in judgements] == ["Score: 3"] * 2
        lost = judge([], dies=True, limit=0)
        with pytest.raises(DeadEngineError):
            await lost.ask({**ASKED, **lost.asked_of}, 0)

    asyncio.run(run())


def test_what_has_no_room_and_what_vllm_refuses_cost_their_response_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        answers = judge([])
        long = [{"role": "user", "content": "2 + 3? " * 200}]
        with pytest.raises(JudgeError, match=r"reward\.judge\.engines\.max_length=200 has room for 176 beside"):
            await answers.ask({**ASKED, **answers.asked_of, "messages": long}, 0)

        async def refuse(*_: object) -> Sample:
            raise RolloutError("logits are not finite")

        monkeypatch.setattr(FixedEngines, "sample", refuse)
        with pytest.raises(JudgeError, match="not finite"):
            await answers.ask({**ASKED, **answers.asked_of}, 0)

    asyncio.run(run())


def test_what_keeps_a_judge_from_being_served_is_said_with_its_keys(tmp_path: Path) -> None:
    path = served_judges.write_judge(tmp_path / "judge")
    good = JudgeConfig(path=str(path), max_tokens=24, engines=ENGINES)
    platform = detect(VLLM_DEVICE)
    assert prepare_judge(good, platform).eos_token_id is not None

    def refused(config: JudgeConfig) -> dict[str, str]:
        with pytest.raises(ConfigError) as caught:
            prepare_judge(config, platform)
        return {each.key: f"{each.problem} {each.remedy}" for each in caught.value.violations}

    said = refused(replace(good, engines=replace(ENGINES, max_length=999)))
    assert "exceeds the model's 256 tokens" in said["reward.judge.engines.max_length"]
    said = refused(replace(good, engines=replace(ENGINES, tp=3)))
    assert "reward.judge.engines.tp" in said and "rollout" not in str(said)
    said = refused(replace(good, engines=replace(ENGINES, kv_cache_memory_bytes=1)))
    assert "reward.judge.engines.kv_cache_memory_bytes" in said and "rollout" not in str(said)
    assert "reward.judge.path" in refused(replace(good, path=str(tmp_path / "none")))
    bare = shutil.copytree(path, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    assert "reward.judge.path" in refused(replace(good, path=str(bare)))
