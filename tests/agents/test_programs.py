"""Programs of users' own: what they are given, what they say, and that what they do costs their own episode alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from mcore_rl.agents.runner import AgentRunner
from mcore_rl.config.agent import AgentConfig, ProgramConfig, ProgramReward
from mcore_rl.config.reward import CodeConfig
from mcore_rl.ground.errors import ConfigError, DeadEngineError, RolloutError
from mcore_rl.rollout.episodes import Episode, FinishReason
from mcore_rl.rollout.protocol import Sampling
from tests.support.awaited import awaited
from tests.support.chat_styles import style
from tests.support.drawn_turns import DrawnTurns, agent_row

# Without openai, whose import takes a second.
ASK = """
import json, os, sys, time, urllib.request

def ask(path, body):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def say(messages):
    return ask("chat/completions", {"messages": messages, "model": "m"})["choices"][0]["message"]
"""
OWN = (
    ASK
    + """
def solve(row):
    print("noise", "x" * 100)
    said = say(row["prompt"])
    say([*row["prompt"], said, {"role": "user", "content": row["extra"]}])
    return {"reward": 0.5}

async def wait(row):
    say(row["prompt"])
    return 0.25

def post(row):
    say(row["prompt"])
    ask("episode/reward", {"reward": 0.125})

def two(row):
    say(row["prompt"])
    say([{"role": "user", "content": "somebody else"}])
    return 1

def nothing(row):
    say(row["prompt"])

def huge(row):
    say(row["prompt"])
    return 10**400

def hangs_after_errors(row):
    try:
        say(row["prompt"])
    except Exception:
        time.sleep(1000)

def silent(row):
    return 1

def raises(row):
    say(row["prompt"])
    raise KeyError("no such thing")

def loops(row):
    while True:
        say(row["prompt"])

def hangs(row):
    say(row["prompt"])
    forked(row)
    time.sleep(1000)

def forked(row):
    say(row["prompt"])
    for own_session in (False, True):
        if os.fork() == 0:
            if own_session:
                os.setsid()
                if os.fork():
                    os._exit(0)
            with open(f"{row['folder']}/{os.getpid()}", "w"):
                pass
            time.sleep(1000)
    while len(os.listdir(row["folder"])) < 2:
        time.sleep(0.01)

def floods(row):
    say(row["prompt"])
    for _ in range(1 << 10):
        os.write(2, b"x" * (1 << 20))
    return 1

def secret(row):
    say(row["prompt"])
    assert "WANDB_API_KEY" not in os.environ and os.environ["SEARCH_API_KEY"] == "mine"
    assert "127.0.0.1" in os.environ["NO_PROXY"]
    return 1
"""
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def runner(own: Path, name: str, *, max_turns: int = 8, **settings: Any) -> AgentRunner:
    program = ProgramConfig(function=f"{own}:{name}", **{"reward": ProgramReward.program} | settings)
    config = AgentConfig(default_agent_loop="program", max_turns=max_turns, program=program)
    return AgentRunner(config, CodeConfig(), style("qwen2.5"))


async def run(made: AgentRunner, turns: Any = ("a", "b", "c"), **columns: Any) -> list[Episode]:
    tokenizer = style("qwen2.5")
    engine = DrawnTurns(tokenizer, turns)
    try:
        return await made.conversations(
            engine, agent_row(tokenizer, extra="more", **columns), "p", 0, 3, Sampling(max_tokens=500)
        )
    finally:
        made.close()


@awaited
async def test_a_function_is_an_episode_with_its_reward(own: Path) -> None:
    (episode,) = await run(runner(own, "solve"))
    assert [segment.text for segment in episode.segments] == ["", "a", "more", "b"]
    assert episode.graded.value == 0.5 and episode.agent is not None and episode.agent.reason == "answered"
    assert (episode.index, episode.agent.turns, episode.row.id) == (3, 2, "file:0")
    assert episode.segments[0].tokens.tolist() == list(agent_row(style("qwen2.5")).tokens)


@pytest.mark.parametrize(("name", "reward"), [("wait", 0.25), ("post", 0.125)])
@awaited
async def test_other_ways_to_say_what_it_is_worth(own: Path, name: str, reward: float) -> None:
    (episode,) = await run(runner(own, name))
    assert episode.graded.value == reward


@awaited
async def test_all_conversations_of_a_program_have_its_score(own: Path) -> None:
    main, other = await run(runner(own, "two"))
    assert main.graded.value == other.graded.value == 1 and (main.part, other.part) == (0, 1)
    assert main.messages[0]["content"] == "somebody else" and main.response == "b"


@awaited
async def test_where_the_grader_says_it_an_episode_has_no_score_yet(own: Path) -> None:
    (episode,) = await run(runner(own, "nothing", reward=ProgramReward.grader))
    assert episode.score is None and episode.end is FinishReason.stop


@pytest.mark.parametrize(
    ("name", "reason", "said"),
    [
        ("nothing", "program_no_reward", "ended without a reward. Print {reward: 0.5} last"),
        ("silent", "program_no_turns", "ended without a turn of the model"),
        ("raises", "program_failed", "KeyError: 'no such thing'"),
    ],
)
@awaited
async def test_a_program_that_fails_loses_its_episode_and_is_told_once(
    own: Path, name: str, reason: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = runner(own, name)
    for _ in range(2):
        (episode,) = await run(made)
        assert episode.lost and episode.agent is not None and episode.agent.reason == reason
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("mcore_rl")]
    assert said in line and f"agent/end/{reason}" in line


@awaited
async def test_a_limit_is_named_where_the_program_ends_of_it(own: Path) -> None:
    made = runner(own, "loops", max_turns=2)
    episodes = await run(made)
    assert all(each.truncated and each.agent is not None and each.agent.reason == "max_turns" for each in episodes)
    assert [each.graded.value for each in episodes] == [0, 0]


@pytest.mark.parametrize("name", ["hangs", "forked"])
@awaited
async def test_a_program_ends_with_all_that_it_started(own: Path, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "children"
    folder.mkdir()
    begun = time.monotonic()
    settings: dict[str, Any] = {"timeout_s": 3.0} if name == "hangs" else {}
    episodes = await run(runner(own, name, reward=ProgramReward.grader, **settings), folder=str(folder))
    assert episodes[0].agent is not None and len(list(folder.iterdir())) == 2
    hung = name == "hangs"
    assert episodes[0].agent.reason == ("program_timeout" if hung else "answered") and episodes[0].truncated == hung
    assert time.monotonic() - begun < 60
    assert not [child for child in folder.iterdir() if psutil.pid_exists(int(child.name))]


@pytest.mark.tier("full")
@awaited
async def test_a_program_that_prints_a_gigabyte_takes_no_memory_of_ours(own: Path) -> None:
    before = psutil.Process().memory_info().rss
    (episode,) = await run(runner(own, "floods"))
    assert episode.graded.value == 1 and psutil.Process().memory_info().rss - before < 200 << 20


@awaited
async def test_it_has_no_secrets_but_those_that_it_was_given(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-run")
    monkeypatch.setenv("SEARCH_API_KEY", "mine")
    monkeypatch.setenv("NO_PROXY", "example.org")
    (episode,) = await run(runner(own, "secret", env=["SEARCH_API_KEY"]))
    assert episode.graded.value == 1


@awaited
async def test_a_command_reads_the_row_and_prints_its_result(own: Path) -> None:
    code = ASK + 'row = json.load(sys.stdin); say(row["prompt"]); print("noise"); print(json.dumps({"reward": 2}))'
    program = ProgramConfig(command=[sys.executable, "-c", code], reward=ProgramReward.program)
    made = AgentRunner(AgentConfig(default_agent_loop="program", program=program), CodeConfig(), style("qwen2.5"))
    (episode,) = await run(made)
    assert episode.graded.value == 2


@awaited
async def test_a_command_that_is_not_there_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    program = ProgramConfig(command=["/no/such/program"])
    made = AgentRunner(AgentConfig(default_agent_loop="program", program=program), CodeConfig(), style("qwen2.5"))
    (episode,) = await run(made)
    assert episode.lost and "exit code is 127: /no/such/program: No such file" in caplog.text


@asynccontextmanager
async def service(answer: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/run", answer)
    site = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
    await site.setup()
    await web.TCPSite(site, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{site.addresses[0][1]}/run"
    finally:
        await site.cleanup()


def of_service(url: str, **settings: Any) -> AgentRunner:
    program = ProgramConfig(url=url, **{"reward": ProgramReward.sum} | settings)
    return AgentRunner(AgentConfig(default_agent_loop="program", program=program), CodeConfig(), style("qwen2.5"))


@awaited
async def test_a_service_is_sent_the_row_the_address_and_the_key() -> None:
    import openai

    async def answer(request: web.Request) -> web.Response:
        given = await request.json()
        client = openai.AsyncOpenAI(base_url=given["base_url"], api_key=given["api_key"])
        await client.chat.completions.create(model="m", messages=given["row"]["prompt"])
        return web.json_response({"reward": 3})

    async with service(answer) as url:
        (episode,) = await run(of_service(url))
    assert episode.graded.value == 3 and episode.response == "a"


@awaited
async def test_a_service_that_fails_or_hangs() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=500, text="no")

    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    for handle, settings, reason in ((answer, {}, "program_failed"), (hang, {"timeout_s": 0.5}, "program_no_turns")):
        async with service(handle) as url:
            (episode,) = await run(of_service(url, **settings))
        assert episode.lost and episode.agent is not None and episode.agent.reason == reason
    (episode,) = await run(of_service("http://127.0.0.1:9/run"))
    assert episode.agent is not None and episode.agent.reason == "program_failed"


@pytest.mark.tier("full")
@awaited
async def test_the_time_in_which_the_model_draws_is_not_the_programs(own: Path) -> None:
    engine = DrawnTurns(style("qwen2.5"), ["a"])
    generate = engine.generate

    async def slow(*args: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(8)
        async for sample in generate(*args):
            yield sample

    engine.generate = slow  # type: ignore[method-assign]
    made = runner(own, "wait", timeout_s=6.0)
    row = agent_row(style("qwen2.5"))
    (episode,) = await made.conversations(engine, row, "p", 0, 0, Sampling(max_tokens=500))
    assert episode.graded.value == 0.25 and episode.agent is not None and episode.agent.tool_s < 6


@awaited
async def test_the_death_of_an_engine_is_told_and_ends_the_program(own: Path) -> None:
    def die(turn: int) -> str:
        raise DeadEngineError("engine 0 died")

    with pytest.raises(DeadEngineError, match="engine 0 died"):
        await run(runner(own, "loops"), die)


@awaited
async def test_a_request_that_fails_loses_its_episode_alone(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(turn: int) -> str:
        raise RolloutError("engine 0 failed while generating 1 samples: UnicodeEncodeError: surrogates not allowed")

    for name in ("solve", "loops", "hangs_after_errors"):
        (episode,) = await run(runner(own, name), fail)
        assert episode.lost and episode.agent is not None and episode.agent.reason == "program_failed"
    assert all("surrogates not allowed" in each.getMessage() for each in caplog.records if "mcore_rl" in each.name)


@awaited
async def test_without_descriptors_an_episode_is_lost(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise OSError(24, "Too many open files")

    made = runner(own, "solve")
    monkeypatch.setattr("mcore_rl.agents.programs.os.pipe", full)
    (episode,) = await run(made)
    assert episode.lost and episode.agent is not None and episode.agent.reason == "program_failed"


@awaited
async def test_a_reward_of_hundreds_of_digits_is_none(own: Path) -> None:
    (episode,) = await run(runner(own, "huge"))
    assert episode.lost and episode.agent is not None and episode.agent.reason == "program_no_reward"


@awaited
async def test_a_run_that_is_cancelled_ends_its_programs(own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "children"
    folder.mkdir()
    task = asyncio.create_task(run(runner(own, "hangs"), folder=str(folder)))
    while len(list(folder.iterdir())) < 2:
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [child for child in folder.iterdir() if psutil.pid_exists(int(child.name))]


def test_a_program_whose_starter_is_killed_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """As in a run whose controller is killed; ``tests/e2e/test_programs.py`` kills one."""
    marks = tmp_path / "marks"
    marks.mkdir()
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n"
        f"open(f'{marks}/{{os.getpid()}}', 'w').close()\ntime.sleep(1000)\n"
    )
    starter = (
        "import os, subprocess, sys, time\nreading, writing = os.pipe()\n"
        "from mcore_rl.processes.guarding import guarded\n"
        f"subprocess.Popen(guarded([sys.executable, '-c', {program!r}], reading), pass_fds=[reading])\n"
        "os.close(reading)\ntime.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    until = time.monotonic() + 60
    while len(list(marks.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    pids = [int(mark.name) for mark in marks.iterdir()]
    assert len(pids) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("program", "record", "said"),
    [
        ({}, {}, "nothing says which. Write rollout.agent.program.function=FILE.py:FUNCTION, command or url"),
        ({"url": "http://x"}, {"tools_kwargs": {"a": {"create_kwargs": {"x": 1}}}}, "has its own tools"),
        ({"url": "http://x"}, {}, ""),
    ],
)
def test_rows_are_checked(program: dict[str, Any], record: dict[str, Any], said: str) -> None:
    config = AgentConfig(program=ProgramConfig(**program))
    problem = AgentRunner(config, CodeConfig(), style("qwen2.5")).problem_of({"agent_name": "program", **record})
    assert said in problem and bool(said) == bool(problem)


def test_one_way_to_run_is_enough() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.agent\.program=command, url: says in several ways"):
        AgentRunner(AgentConfig(program=ProgramConfig(command=["x"], url="http://x")), CodeConfig(), style("qwen2.5"))


def test_a_row_that_is_no_json_is_told_as_text(own: Path) -> None:
    import datetime

    (episode,) = asyncio.run(run(runner(own, "wait"), when=datetime.date(2024, 1, 1), raw=os.urandom(3)))
    assert episode.graded.value == 0.25 and json.dumps(episode.graded.parts) == '{"program": 0.25}'
