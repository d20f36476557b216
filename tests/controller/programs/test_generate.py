"""Responses of a real engine against transformers' greedy ones; the order of samples; what is refused at the start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.compose import compose
from mcore_rl.config.data import DataConfig
from mcore_rl.config.engine import Device
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.generate import GenerateConfig
from mcore_rl.config.reward import CodeConfig
from mcore_rl.controller.programs.evaluate import run_evaluate
from mcore_rl.controller.programs.generate import draw, generated, logs_beside, prepare, run_generate
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.responses import AgentRecord, Generated, write_responses
from mcore_rl.ground.errors import McoreRLError
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.episodes import Author, FinishReason
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.tracking.journal import journal, journal_of
from tests.support.chat_styles import style
from tests.support.drawn_turns import DrawnTurns
from tests.support.greedy_llama import TOKENIZER, asked_tokens, greedy, write_llama
from tests.support.prompt_files import row, write
from tests.support.scripted_rollout import answered, conversation, turn
from tests.support.vllm_device import ON_VLLM_DEVICE

LENGTH = 12
QUESTIONS = ["Tom has 3 apples.", "2 + 3?", "Who has 7 coins and finds 9 more of them, and how many?", "Why?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(scope="module")
def published(model: Path) -> tuple[Path, list[str]]:
    """The same weights with another config.json, and what makes a run read the model's own."""
    directory = shutil.copytree(model, model.parent / "published")
    config = json.loads((model / "config.json").read_text())
    other = {"rope_parameters": config["rope_parameters"] | {"rope_theta": 1.5}, "attention_dropout": 0.1}
    (directory / "config.json").write_text(json.dumps(config | other | {"unsloth_fixed": True}))
    rope = ",".join(f"{name}:{value}" for name, value in config["rope_parameters"].items())
    words = [f"model.config_overrides={{rope_parameters:{{{rope}}}}}", "model.ignore_fields=[attention_dropout]"]
    return directory, words


def rows_of(questions: Sequence[str]) -> list[dict[str, Any]]:
    return [row(question, str(number), level=number) for number, question in enumerate(questions)]


def config_of(model: Path, out: Path, *overrides: str) -> GenerateConfig:
    small = [f"data.max_response_length={LENGTH}", "data.max_prompt_length=64", "rollout.dtype=float32"]
    engine = [ON_VLLM_DEVICE["rollout"], f"rollout.kv_cache_memory_bytes={16 << 20}", "rollout.max_num_seqs=8"]
    written = [f"model.path={model}", f"out={out}", *small, *engine, *overrides]
    return compose(GenerateConfig, "generate", written)


def test_greedy_responses_are_those_of_transformers(
    model: Path, published: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str], fast_ray: None
) -> None:
    """Two files, one prompt too long and left out; all columns kept, in order; one engine on Ray.

    The engine's config.json is the model's own by ``model.config_overrides`` and ``model.ignore_fields`` alone.
    """
    folder = model.parent
    long = row("Tom " * 70, "0", level=9)
    first = write(folder / "a.parquet", [*rows_of(QUESTIONS[:2]), long])
    second = write(folder / "b.parquet", [dict(each, note="b") for each in rows_of(QUESTIONS[2:])])
    out = folder / "made" / "answers.parquet"
    files = f"data.files=[{first},{second}]"
    directory, changes = published
    config = config_of(directory, out, files, "data.filter_overlong_prompts=true", "rollout.temperature=0", *changes)
    assert asyncio.run(run_generate(config)) == 0

    table = pq.read_table(out)
    kept = [*pq.read_table(first).to_pylist()[:2], *pq.read_table(second).to_pylist()]
    made = ("responses", "response_num_tokens", "finish_reasons")
    assert [name for name in table.column_names if name not in made] == [*kept[0], "note"]
    written = table.to_pylist()
    assert [{name: each[name] for name in each if name not in made} for each in written] == [
        {"note": None} | each for each in kept
    ]
    for question, each in zip(QUESTIONS, written, strict=True):
        tokens = greedy(model, asked_tokens(question), LENGTH)
        ended = tokens[-1] == TOKENIZER.eos_token_id
        assert each["responses"] == [TOKENIZER.decode(tokens, skip_special_tokens=True)]
        assert each["response_num_tokens"] == [len(tokens)]
        assert each["finish_reasons"] == ["stop" if ended else "length"]
    assert [file.name for file in out.parent.iterdir() if file.is_file()] == ["answers.parquet"]
    assert sorted(file.name for file in logs_beside(out).iterdir()) == ["engine-0.log", "engine-0.stacks", "model"]
    said = capsys.readouterr()
    assert "config.json is read with changes: rope_parameters" in said.err and "unsloth_fixed" in said.err
    assert "data.files: 4 prompts of" in said.err and "1 of 5 left out" in said.err
    assert "answers.parquet: 4 prompts, 1 responses each" in said.out


class Backwards:
    """Answers the last request first, with its own name; every second response is cut off."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        for request in reversed(requests):
            yield Sample(
                prompt_id=request.prompt.id,
                index=request.index,
                tokens=np.zeros(request.index + 1, dtype=np.int32),
                logprobs=np.zeros(request.index + 1, dtype=np.float32),
                versions=(),
                finish=FinishReason.length if request.index % 2 else FinishReason.stop,
                text=f"{request.prompt.id}/{request.index}",
            )


def test_samples_come_in_any_order_and_stand_in_theirs(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet", rows_of(["a", "b", "a"]))  # two rows with one question are two prompts
    config = DataConfig(max_prompt_length=64)
    prompts = PromptSet.load([path], config, TOKENIZER, max_samples=None, title="data.files")
    told: list[int] = []
    drawn = asyncio.run(draw(Backwards(), prompts, 3, Sampling(max_tokens=4), told.append))  # type: ignore[arg-type]
    assert drawn == [
        [Generated(f"p.parquet:{n}/{i}", i + 1, "length" if i % 2 else "stop") for i in range(3)] for n in range(3)
    ]
    assert told == [3, 2, 1] * 3


def test_responses_that_are_there_are_not_drawn_again(tmp_path: Path) -> None:
    """Stopped after four of nine samples: the other five are asked for, and the file has the same bytes."""
    path = write(tmp_path / "p.parquet", rows_of(["a", "b", "c"]))
    prompts = PromptSet.load([path], DataConfig(), TOKENIZER, max_samples=None, title="data.files")
    out, told, asked = tmp_path / "o.parquet", list[int](), list[str]()

    class Watched(Backwards):
        async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
            asked.extend(f"{each.prompt.id}/{each.index}" for each in requests)
            async for sample in super().generate(requests, sampling):
                yield sample

    def killed(num_tokens: int) -> None:
        told.append(num_tokens)
        if len(told) == 4:
            raise KeyboardInterrupt

    def drawn(report: Callable[[int], None]) -> list[list[Generated]]:
        with journal(out, {}, afresh=False) as kept:
            return asyncio.run(draw(Watched(), prompts, 3, Sampling(max_tokens=4), report, kept))  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        drawn(killed)
    first, asked[:] = set(asked), []
    again = drawn(told.append)
    assert len(first) == 9 and len(asked) == 5 and told[4:8] == [0] * 4
    whole = asyncio.run(draw(Backwards(), prompts, 3, Sampling(max_tokens=4), told.append))  # type: ignore[arg-type]
    assert again == whole
    for name, groups in (("again", again), ("whole", whole)):
        write_responses(tmp_path / name, prompts.table(), groups)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.tier("full")
def test_a_generation_that_was_killed_goes_on_and_writes_the_same_file(
    model: Path, tmp_path: Path, processes: None
) -> None:
    """By the command, with a real engine that samples by a seed."""
    prompts = write(tmp_path / "p.parquet", rows_of([f"What is {n} + {n}?" for n in range(24)]))
    small = [f"data.max_response_length={LENGTH}", "data.max_prompt_length=64", "rollout.dtype=float32", "rollout.n=2"]
    engine = [ON_VLLM_DEVICE["rollout"], f"rollout.kv_cache_memory_bytes={16 << 20}", "rollout.max_num_seqs=2"]
    words = [f"model.path={model}", f"data.files=[{prompts}]", *small, *engine]
    made = [tmp_path / "whole.parquet", tmp_path / "killed.parquet"]
    command = [sys.executable, "-m", "mcore_rl.cli", "generate", *words]
    assert subprocess.run([*command, f"out={made[0]}"]).returncode == 0
    run = subprocess.Popen([*command, f"out={made[1]}"], start_new_session=True)
    while not (journal_of(made[1]).exists() and len(journal_of(made[1]).read_text().splitlines()) > 6):
        assert run.poll() is None, "it ended before it was killed"
        time.sleep(0.002)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    there = len(journal_of(made[1]).read_text().splitlines()) - 1
    assert 6 <= there < 48 and not made[1].exists()
    again = subprocess.run([*command, f"out={made[1]}"], capture_output=True, text=True)
    assert again.returncode == 0 and f"which has {there} responses" in again.stderr
    assert made[1].read_bytes() == made[0].read_bytes() and not journal_of(made[1]).exists()


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "7 * 6"}}</tool_call>'
WRONG = '<tool_call>{"name": "nonesuch", "arguments": {}}</tool_call>'


class Turns(DrawnTurns):
    """Answers rows without an agent at once; ``stops_after`` requests it raises."""

    stops_after = 10**9

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        for request in requests:
            if len(self.requests) >= self.stops_after:
                raise RuntimeError("the engine is gone")
            async for sample in super().generate([request], sampling):
                yield sample


def agents_of(tmp_path: Path, **settings: Any) -> tuple[AgentRunner, PromptSet]:
    tokenizer = style("qwen2.5")
    agents = AgentRunner(AgentConfig(tools=["calculator"], **settings), CodeConfig(), tokenizer)
    asked = {"tool_agent": {}, "interaction": {"name": "gsm8k", "ground_truth": "7"}, "single_turn_agent": {}}
    rows = [
        row(f"ask {name}", "7", data_source="gsm8k") | {"agent_name": name, "interaction_kwargs": asked[name] or None}
        for name in asked
    ]
    path = write(tmp_path / "agents.parquet", rows)
    prompts = PromptSet.load(
        [path], DataConfig(), tokenizer, max_samples=None, title="data.files", graded=False, agents=agents
    )
    return agents, prompts


def test_agents_run_beside_rows_without_one_and_a_killed_command_goes_on(tmp_path: Path) -> None:
    """The turns, reasons, calls and rewards by hand; after an engine's death only what is missing is drawn."""
    agents, prompts = agents_of(tmp_path, max_turns=3)
    said = [CALL, WRONG, "#### 7"]
    sampling = Sampling(max_tokens=400)

    def drawn(engine: Any, out: Path) -> list[list[Generated]]:
        with journal(out, {}, afresh=False) as kept:
            return asyncio.run(draw(engine, prompts, 2, sampling, lambda count: None, kept, agents))

    whole = Turns(style("qwen2.5"), said)
    groups = drawn(whole, tmp_path / "whole")
    tool, talk, alone = (group[0] for group in groups)
    assert [turn["role"] for turn in tool.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [turn["trained"] for turn in tool.turns] == [True, False, True, False, True]
    assert tool.turns[1]["content"] == "42" and "no tool 'nonesuch'" in tool.turns[3]["content"]
    assert tool.text == "#### 7" and tool.num_tokens == sum(turn["num_tokens"] for turn in tool.turns)
    did = tool.agent
    assert did and (did.reason, did.turns, did.calls, did.failed_calls) == ("answered", 3, 2, 1)
    assert [turn["reward"] for turn in talk.turns if turn["trained"]] == [0.0, 0.0, 1.0]
    assert talk.agent and (talk.agent.reason, talk.agent.calls) == ("interaction", 0)
    assert (alone.text, alone.turns, alone.agent) == (CALL, (), None)

    broken = Turns(style("qwen2.5"), said)
    broken.stops_after = 9
    with pytest.raises(RuntimeError, match="the engine is gone"):
        drawn(broken, tmp_path / "again")
    there = len(journal_of(tmp_path / "again").read_text().splitlines()) - 1
    again = Turns(style("qwen2.5"), said)
    made = drawn(again, tmp_path / "again")
    assert 0 < there < 6 and len(again.requests) < len(whole.requests)
    timeless = [[replace(each, agent=each.agent and replace(each.agent, tool_s=0)) for each in group] for group in made]
    assert timeless == [
        [replace(each, agent=each.agent and replace(each.agent, tool_s=0)) for each in group] for group in groups
    ]


def test_what_agents_did_is_in_the_file_and_evaluate_counts_it(tmp_path: Path) -> None:
    agents, prompts = agents_of(tmp_path, max_turns=3, tool_reward_coef=0.5)
    engine = Turns(style("qwen2.5"), [CALL, WRONG, "#### 7"])
    groups = asyncio.run(draw(engine, prompts, 1, Sampling(max_tokens=400), lambda count: None, None, agents))
    lost = replace(groups[0][0], finish="abort", agent=AgentRecord(reason="interaction_failed", turns=1))
    write_responses(tmp_path / "r.parquet", prompts.table(), [[groups[0][0], lost], groups[1] * 2, groups[2] * 2])
    (first, talk, alone) = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert first["end_reasons"] == ["answered", "interaction_failed"] and first["num_calls"] == [2, 0]
    assert first["num_failed_calls"] == [1, 0] and talk["num_turns"] == [3, 3] and alone["end_reasons"] == [None, None]

    config = compose(EvaluateConfig, "evaluate", [f"path={tmp_path / 'r.parquet'}", f"out={tmp_path / 'n.json'}"])
    assert asyncio.run(run_evaluate(config)) == 0
    (report,) = json.loads((tmp_path / "n.json").read_text())["data_sources"].values()
    # By hand: right, lost; right and half a point of the interaction; CALL names no answer.
    assert report["metrics"]["score"]["value"] == pytest.approx(((1 + 0) / 2 + 1.5 + 0) / 3)
    assert report["metrics"]["accuracy"]["value"] == pytest.approx((0.5 + 1 + 0) / 3) and report["errors"]["lost"] == 1
    assert report["agents"] == {
        "turns_mean": 2.5, "calls_mean": 0.5, "failed_call_share": 0.5, "tool_s_mean": pytest.approx(0, abs=0.1),
        "end/answered": 0.25, "end/interaction": 0.5, "end/interaction_failed": 0.25,
    }  # fmt: skip


def test_a_conversation_keeps_its_turns() -> None:
    turns = [
        turn(Author.model, (7, 8), text="2 + 3"),
        turn(Author.tool, (9,), text="5"),
        turn(Author.model, (7,), text="so 5"),
    ]
    said = [("assistant", "2 + 3", 2), ("tool", "5", 1), ("assistant", "so 5", 1)]
    keys = ("role", "content", "num_tokens")
    made = tuple(
        dict(zip(keys, each, strict=True)) | {"trained": each[0] == "assistant", "reward": None} for each in said
    )
    assert generated(conversation(0, turns)) == Generated("so 5", 4, "stop", made)
    assert generated(answered(0, text="5", cut=True)) == Generated("5", 2, "length")


def refusal(config: GenerateConfig) -> str:
    with pytest.raises(McoreRLError) as caught:
        prepare(config, detect(Device.cpu))
    return str(caught.value)


def test_a_place_that_cannot_be_written_is_refused_with_all_else(model: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.parquet", rows_of(["a"]))
    files = f"data.files=[{prompts}]"
    assert "is one of data.files. Write another name" in refusal(config_of(model, prompts, files, "overwrite=true"))
    assert "is a directory" in refusal(config_of(model, tmp_path, files))
    old = write(tmp_path / "old.parquet", rows_of(["b"]))
    said = refusal(config_of(model, old, files, "rollout.n=0"))
    assert "2 problems" in said and f"out={old}: exists. Write another name, or overwrite=true" in said
    prepared, prompts_of, _ = prepare(config_of(model, old, files, "overwrite=true"), detect(Device.cpu))
    assert len(prompts_of) == 1 and prepared.out == str(old)


def test_files_with_responses_and_models_without_text_are_refused(model: Path, tmp_path: Path) -> None:
    answered = write(tmp_path / "p.parquet", [row(responses=["x"], finish_reasons=["stop"])])
    said = refusal(config_of(model, tmp_path / "o.parquet", f"data.files=[{answered}]"))
    assert "data.files: 1 problem" in said and "there is a column responses, finish_reasons already" in said
    silent = tmp_path / "silent"
    silent.mkdir()
    for name in ("config.json", "model.safetensors"):
        (silent / name).symlink_to(model / name)
    config = config_of(silent, tmp_path / "o.parquet", f"data.files=[{answered}]", f"model.tokenizer_path={model}")
    assert "has no tokenizer, so that responses have no text" in refusal(config)


def test_relative_paths_are_found_by_every_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "p.parquet", rows_of(["a"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").symlink_to(model)
    config, *_ = prepare(config_of(Path("m"), Path("o.parquet"), "data.files=[p.parquet]"), detect(Device.cpu))
    assert (config.model.path, config.out) == (str(model), str(tmp_path / "o.parquet"))
