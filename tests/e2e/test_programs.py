"""Users' programs train from the command line, with vLLM and Megatron: what they made the model say, exactly.

The engines drew turn by turn, each time for a whole conversation that a program sent as text; the trainer scores each
conversation as one sequence.  The log-probs agree only if its tokens are those that were drawn, after the same ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import main
from tests.support import run_task
from tests.support.vllm_device import ON_VLLM_DEVICE

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(1500)]
TOLERANCE = 1e-5  # of float32 log-probs, as without agents
# One sample of four by the openai client, with a stream; the others without its import, which takes a second each.
PROGRAM = """
import json, os, urllib.request

def plain(messages, **more):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = json.dumps({"messages": messages, "model": "m", **more}).encode()
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def streamed(messages, **more):
    import openai
    chunks = openai.OpenAI().chat.completions.create(model="m", messages=messages, stream=True, **more)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

def solve(row):
    say = streamed if row["sample"] == 0 else plain
    messages = list(row["prompt"])
    for turn in range(3):
        messages.append({"role": "assistant", "content": say(messages, max_tokens=12)})
        messages.append({"role": "user", "content": f"again {turn} <|end|>"})
    critic = say([{"role": "user", "content": "criticise " + messages[1]["content"]}], max_tokens=5)
    if row["sample"] == 1:
        return "none"
    return {"reward": len(critic) % 5 / 4}
"""
HANGS = (
    PROGRAM
    + """
def hang(row):
    plain(row["prompt"], max_tokens=5)
    for own_session in (False, True):
        if os.fork() == 0:
            if own_session:
                os.setsid()
            break
    open(f"{os.path.dirname(__file__)}/marks/{os.getpid()}", "w").close()
    import time
    time.sleep(10000)
"""
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run_task.write_task(tmp_path_factory.mktemp("programs"))
    (folder / "program.py").write_text(HANGS)
    (folder / "marks").mkdir()
    return folder


def settings(task: Path, run: str, function: str, *more: str) -> list[str]:
    return run_task.overrides(
        task, task / run, "rollout.agent.default_agent_loop=program",
        f"rollout.agent.program.function={task}/program.py:{function}", "rollout.agent.program.max_parallel=16",
        "data.max_response_length=300", "model.config_overrides.max_position_embeddings=512", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(task: Path, fast_ray: None) -> Path:
    more = ["rollout.agent.program.reward=sum", "trainer.total_training_steps=2", "trainer.save_rollouts=true"]
    assert main(["train", *settings(task, "run", "solve", *more, "trainer.test_freq=2")]) == 0
    return task / "run"


@pytest.fixture(scope="module")
def steps(run_dir: Path) -> list[dict[str, Any]]:
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [each for each in metrics if "rollout/logprob_diff_max" in each]


def test_what_was_drawn_for_a_program_is_scored_alike_as_one_sequence(steps: list[dict[str, Any]]) -> None:
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/logprob_diff_max"] < TOLERANCE and step["actor/grad_norm"] > 0
        # Two of each of 24 samples, and of each of the 8 that are lost one, of which nothing is trained.
        assert step["agent/conversations_mean"] == (24 * 2 + 8) / 32 and step["agent/rewritten_share"] == 0


def test_a_sample_without_a_reward_is_lost_and_named(steps: list[dict[str, Any]], run_dir: Path) -> None:
    rows = pq.read_table(run_dir / "rollouts" / "step_1.parquet").to_pylist()
    lost = [row for row in rows if row["reason"] == "program_no_reward"]
    assert len(lost) == 8 == steps[0]["agent/lost"] and {row["sample"] for row in lost} == {1}
    kept = [row for row in rows if row["reason"] == "answered"]
    assert len(kept) == 2 * 24 and {row["begins"] for row in kept} == {"first", "separate"}
    main_one = next(row for row in kept if row["begins"] == "separate")
    assert main_one["conversation"] == 0 and "criticise" in main_one["prompt"]
    segments = json.loads(next(row for row in kept if row["begins"] == "first")["segments"])
    assert [each["author"] for each in segments] == ["prompt", *["model", "user"] * 2, "model"]


def test_programs_end_with_a_controller_that_is_killed(task: Path, run_dir: Path) -> None:
    """64 episodes, three processes each: the program, a child, and a child with a session of its own."""
    more = ["data.train_batch_size=16", "actor.ppo_mini_batch_size=8", "rollout.agent.program.max_parallel=64"]
    command = [sys.executable, "-m", "mcore_rl.cli", "train", *settings(task, "killed", "hang", *more)]
    with (task / "killed.log").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    until = time.monotonic() + 900
    while len(list((task / "marks").iterdir())) < 3 * 64 and time.monotonic() < until:
        assert run.poll() is None, (task / "killed.log").read_text()[-2000:]
        time.sleep(0.1)
    pids = [int(mark.name) for mark in (task / "marks").iterdir()]
    assert len(pids) == 3 * 64 and all(map(psutil.pid_exists, pids)) and ON_VLLM_DEVICE
    started = run_task.descendants(run.pid)
    run.kill()
    run.wait()
    until = time.monotonic() + 120
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not run_task.still_alive(started)
