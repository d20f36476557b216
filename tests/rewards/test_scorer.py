"""Grading in processes: order, what goes wrong with one response and with no other, and how the processes end."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.reward import CodeConfig, CustomRewardFunction, RewardConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.rewards import scorer as scorer_module
from mcore_rl.rewards.confinement import ConfinementError
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.scorer import Scorer
from tests.rewards.test_gsm8k import gold_solutions
from tests.support.daemons import DAEMON

LIMIT_S = 3.0  # of a response that hangs; those that do not take milliseconds
CUSTOM = """
import asyncio, os, sys, time

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    match solution_str:
        case "raise": raise KeyError("x")
        case "exit": sys.exit(0)
        case "die": os._exit(7)
        case "kill": os.kill(os.getpid(), 9)
        case "crash": __import__("ctypes").string_at(0)
        case "hang": time.sleep(600)
        case "spin":
            while True: pass
        case "nan": return float("nan")
        case "none": return None
        case "text": return "1.0"
        case "dict": return {"score": 2, "acc": 1, "length": 3}
        case "turn": return {"score": 2, "turn_rewards": [0.5]}
        case "turns": return {"score": 2, "turn_rewards": [0.5, 0.25]}
        case "interrupt":
            os.kill(os.getpid(), 2)
            return 4.0
        case "pid": return os.getpid()
        case "pickle":
            import stat
            from multiprocessing.connection import Connection
            numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
            sockets = [number for number in numbers if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode)]
            kept = [Connection(number) for number in sockets]  # of them, the event loop's own
            for each in kept:
                each.send(KeyError("unpickled"))
            time.sleep(600)
        case "stray": return os.fork() and 1.0
        case "pids":
            child = os.fork()
            if child == 0: time.sleep(600)
            return child
        case "daemon": return daemon()
    return float(solution_str)
"""
GOOD = {
    "1.5": Score(1.5),
    "interrupt": Score(4.0),
    "dict": Score(2.0, {"acc": 1.0, "length": 3.0}, correct=1.0),
    "turn": Score(2.0, turn_rewards=(0.5,)),
}
BAD = {
    "raise": ("raised", "KeyError: 'x'"),
    "exit": ("raised", "SystemExit"),
    "die": ("died", "exit code 7"),
    "kill": ("died", "exit code -9"),
    "crash": ("died", "exit code -11"),
    "hang": ("timeout", "grading ('p', 0) of mine took longer than"),
    "spin": ("timeout", "took longer than"),
    "nan": ("not_a_number", "the score is nan"),
    "none": ("not_a_number", "the score is None"),
    "text": ("not_a_number", "the score is '1.0'"),
    "turns": ("raised", "2 turn rewards for 1 turns of the model"),
    "pickle": ("raised", "codec can't decode"),  # who has taken the process over is heard, and not unpickled
    "\ud800 lone": ("raised", "ValueError"),
}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))  # of other tests: multiprocessing's resource tracker
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reward-")]


@pytest.fixture
def custom(tmp_path: Path) -> CustomRewardFunction:
    (tmp_path / "reward.py").write_text(CUSTOM + DAEMON)
    return CustomRewardFunction(path=str(tmp_path / "reward.py"))


def mine(response: str) -> RewardRequest:
    return RewardRequest(("p", 0), "mine", response, None)


def gsm8k(response: str, ground_truth: object = "18") -> RewardRequest:
    return RewardRequest(("p", 0), "gsm8k", response, ground_truth)


def test_scores_come_in_order_and_are_picklable() -> None:
    with Scorer(RewardConfig(num_workers=2)) as scorer:
        scores = asyncio.run(scorer.score_all([gsm8k(f"#### {number}") for number in range(40)]))
        assert [score.value for score in scores] == [float(number == 18) for number in range(40)]
        assert pickle.loads(pickle.dumps(scores)) == scores
        assert asyncio.run(scorer.score(gsm8k("\ud800 #### 18"))).value == 1.0  # another loop, and no valid text
        assert asyncio.run(scorer.score_all([])) == []
        assert set(scorer.counts.values()) == {0}


def test_what_goes_wrong_costs_that_response_and_no_other(custom: CustomRewardFunction) -> None:
    config = RewardConfig(num_workers=2, timeout_s=LIMIT_S, error_score=-9.0)
    texts = [text for bad in BAD for text in (bad, *GOOD)]
    with Scorer(config, custom) as scorer:
        scores = asyncio.run(scorer.score_all(map(mine, texts)))
        counts = scorer.counts
    for text, score in zip(texts, scores, strict=True):
        if text in GOOD:
            assert score == GOOD[text]
        else:
            kind, detail = BAD[text]
            assert score.value == -9.0
            assert score.error is not None
            assert score.error.startswith(f"{kind}: ")
            assert detail in score.error
    kinds = [kind for kind, _ in BAD.values()]
    assert counts == {kind: kinds.count(kind) for kind in ("raised", "not_a_number", "timeout", "died")}


def test_a_process_is_kept_while_it_works_and_replaced_when_it_is_lost(custom: CustomRewardFunction) -> None:
    async def pids(scorer: Scorer) -> list[float]:
        return [(await scorer.score(mine(text))).value for text in ("pid", "raise", "nan", "pid", "die", "pid")]

    with Scorer(RewardConfig(num_workers=1), custom) as scorer:
        first, _, _, second, _, third = asyncio.run(pids(scorer))
    assert first == second != third


def test_what_a_grader_started_ends_with_it(custom: CustomRewardFunction) -> None:
    with Scorer(RewardConfig(num_workers=1, timeout_s=LIMIT_S), custom) as scorer:
        left = [psutil.Process(int(asyncio.run(scorer.score(mine(name))).value)) for name in ("pids", "daemon")]
        assert all(process.is_running() for process in left)
        asyncio.run(scorer.score(mine("hang")))
        assert psutil.wait_procs(left, timeout=60)[1] == []
        stray = asyncio.run(scorer.score_all([mine("stray"), mine("1.5")]))  # a fork that comes back from the function
        assert [score.value for score in stray] == [1.0, 1.5]


def test_a_row_that_cannot_be_sent_or_read_is_an_error_of_that_response() -> None:
    with Scorer(RewardConfig(num_workers=1)) as scorer:
        scores = asyncio.run(scorer.score_all([gsm8k("#### 18", lambda: 18), gsm8k("#### 18", Unreadable())]))
        assert asyncio.run(scorer.score(gsm8k("#### 18"))).value == 1.0
        assert scorer.counts["raised"] == 2
    assert "raised: the row cannot be sent" in str(scores[0].error)
    assert "raised: the row cannot be read" in str(scores[1].error)


class Unreadable:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return int, ("not a number",)


def test_the_loop_is_free_while_graders_work(custom: CustomRewardFunction) -> None:
    """The caller goes on between asking and having: a hanging grader holds up nobody who waits for another."""

    async def both(scorer: Scorer) -> None:
        task = asyncio.create_task(scorer.score(mine("hang")))
        assert (await scorer.score(mine("1.5"))).value == 1.5
        assert not task.done()
        task.cancel()

    with Scorer(RewardConfig(num_workers=2, timeout_s=600.0), custom) as scorer:
        asyncio.run(both(scorer))


def test_an_unknown_source_is_refused_before_anything_is_graded() -> None:
    with Scorer(RewardConfig(num_workers=1)) as scorer:
        with pytest.raises(ConfigError, match="data_source=mine"):
            scorer.check_sources(["gsm8k", "mine"])
        with pytest.raises(ConfigError, match="data_source=mine"):
            asyncio.run(scorer.score(mine("1")))


def test_a_custom_function_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(): pass")
    with pytest.raises(ConfigError, match=r"reward\.py defines no function of that name"):
        Scorer(RewardConfig(num_workers=1), CustomRewardFunction(path=str(tmp_path / "reward.py")))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("while True: pass", r"importing it took longer than 1 s\. .*custom_reward_function\.import_timeout_s"),
        ("import time\ntime.sleep(3600)", r"importing it took longer than 1 s"),
        ("10 ** 10 ** 10", r"importing it took longer than 1 s"),  # in C, where Python takes no signal
        ("import os\nos._exit(0)", r"importing it ended its process with exit code 0\. Take os\._exit"),
        ("import os\nos._exit(7)", r"importing it ended its process with exit code 7"),
        ("import os\nos.kill(os.getpid(), 11)", r"importing it ended its process with exit code -11"),
        ("import sys\nsys.exit('no model')", r"importing it raised SystemExit: no model"),
        ("raise KeyboardInterrupt", r"importing it raised KeyboardInterrupt"),
    ],
)
def test_a_file_that_hangs_or_ends_its_process_is_one_message(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "reward.py").write_text(f"{text}\ndef compute_score(**columns): return 1.0\n")
    custom = CustomRewardFunction(path=str(tmp_path / "reward.py"), import_timeout_s=1.0)
    with pytest.raises(ConfigError, match=rf"custom_reward_function\.path=.*reward\.py: {complaint}") as caught:
        Scorer(RewardConfig(num_workers=1), custom)
    assert len(caught.value.violations) == 1


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused(tmp_path: Path, limit_s: float) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(**columns): return 1.0\n")
    custom = CustomRewardFunction(path=str(tmp_path / "reward.py"), import_timeout_s=limit_s)
    with pytest.raises(ConfigError, match=r"import_timeout_s=.*is no time"):
        Scorer(RewardConfig(num_workers=1), custom)


def test_a_function_that_answers_no_number_is_refused_before_anything_is_drawn(custom: CustomRewardFunction) -> None:
    with Scorer(RewardConfig(num_workers=1), custom) as scorer:
        for text, said in (("none", "the score is None"), ("nan", "the score is nan"), ("text", "the score is '1.0'")):
            with pytest.raises(
                ConfigError, match=rf"reward\.py: called for p .* answered no score: {said}.*Return a number"
            ):
                scorer.try_custom(mine(text))
        assert set(scorer.counts.values()) == {0}


@pytest.mark.parametrize(("text", "kind"), [("raise", "raised"), ("die", "died")])
def test_what_may_be_one_rows_fault_is_a_warning(
    custom: CustomRewardFunction, caplog: pytest.LogCaptureFixture, text: str, kind: str
) -> None:
    with Scorer(RewardConfig(num_workers=1), custom) as scorer:
        scorer.try_custom(mine(text))
        assert f"reward.py, called for p with the ground truth as the response: {kind}" in caplog.text
        caplog.clear()
        scorer.try_custom(mine("1.5"))
        assert caplog.text == ""
        assert set(scorer.counts.values()) == {0}


FORGED = """
import os, pickle, socket, struct, sys

class Evil:
    def __reduce__(self):
        return os.system, ("touch MARK",)

message = pickle.dumps(Evil())
socket.socket(fileno=int(sys.argv[1])).sendall(struct.pack("!i", len(message)) + message)
"""


def test_a_grading_process_that_begins_with_a_pickle_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forged.py").write_text(FORGED.replace("MARK", str(tmp_path / "evil")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(scorer_module, "WORKER", "forged")
    worker = scorer_module._Worker(RewardConfig(num_workers=1), CustomRewardFunction())
    with pytest.raises(OSError, match="the grading process began with"):
        worker.wait_until_ready()
    worker.end()
    assert not (tmp_path / "evil").exists()


def test_closing_ends_what_hangs_and_cancels_who_waits(custom: CustomRewardFunction) -> None:
    async def close_in_between() -> list[object]:
        scorer = Scorer(RewardConfig(num_workers=1, timeout_s=600.0), custom)
        await scorer.score(mine("1.5"))
        tasks = [asyncio.create_task(scorer.score(mine(text))) for text in ("spin", "1.5", "1.5")]
        await asyncio.sleep(0)  # they are queued
        await asyncio.to_thread(scorer.close)
        scorer.close()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    assert [type(outcome) for outcome in asyncio.run(close_in_between())] == [asyncio.CancelledError] * 3


PROGRAM = RewardRequest(("p", 0), "code", "print(3)", {"inputs": [""], "outputs": ["3"]})


def test_weak_confinement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "weaknesses", lambda: ("Landlock is missing", "seccomp is missing"))
    with Scorer(RewardConfig(num_workers=1)) as scorer:
        scorer.check_sources(["gsm8k"])
        with pytest.raises(ConfigError, match=r"=code: Landlock is missing; seccomp is missing\. Grade .*weak_conf"):
            scorer.check_sources(["gsm8k", "code"])
        with pytest.raises(ConfigError, match="Landlock is missing"):
            asyncio.run(scorer.score(PROGRAM))


def test_a_machine_that_runs_no_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[str, ...]:
        raise ConfinementError("no program can be run here")

    monkeypatch.setattr(scorer_module, "weaknesses", fail)
    with (
        Scorer(RewardConfig(num_workers=1)) as scorer,
        pytest.raises(ConfigError, match=r"no program can be run here\. Grade code on another machine"),
    ):
        scorer.check_sources(["code"])


def test_weak_confinement_that_is_allowed_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scorer_module, "weaknesses", lambda: ("Landlock is missing.",))
    with Scorer(RewardConfig(num_workers=1, code=CodeConfig(allow_weak_confinement=True))) as scorer:
        asyncio.run(scorer.score(gsm8k("#### 18")))
        assert caplog.messages == []
        assert [score.value for score in asyncio.run(scorer.score_all([PROGRAM] * 3))] == [1.0] * 3
    assert caplog.messages == ["Programs are not fully confined on this machine. Landlock is missing."]


def test_rows_that_test_nothing_are_named_and_rows_judged_inside_are_asked_for() -> None:
    """All at once, before anything is graded."""
    good = ["assert f(1) == 2", "def test_f():\n    assert f(1) == 2"]
    inside = ["class Node: pass\nassert f(Node()) == 1"]
    nothing = ["def check(c):\n    assert c(1)"]
    rows = [("a.parquet:0", "mbpp", good), ("a.parquet:1", "gsm8k", "18"), ("a.parquet:2", "mbpp", inside)]
    with Scorer(RewardConfig(num_workers=1)) as scorer:
        assert scorer.check_code_rows(rows[:2]) == [
            "mbpp: 1 rows are judged outside of the program's process, 0 inside, where a program could forge its "
            "verdict"
        ]
        assert scorer.check_code_rows([("a.parquet:1", "gsm8k", "18")]) == []
        with pytest.raises(ConfigError) as refused:
            scorer.check_code_rows([*rows, ("a.parquet:3", "mbpp", nothing), ("a.parquet:4", "code", "{}")])
    text = str(refused.value)
    assert "a.parquet:3" in text
    assert "only defines check and checks nothing. Call it on the program's function" in text
    assert "a.parquet:4" in text
    assert "1 rows have tests that run in the program's own process" in text
    assert "a.parquet:2: it defines class Node" in text
    assert "reward.code.allow_inside_judging=true" in text
    with Scorer(RewardConfig(num_workers=1, code=CodeConfig(allow_inside_judging=True))) as scorer:
        (line,) = scorer.check_code_rows(rows)
    assert line.startswith("mbpp: 1 rows are judged outside of the program's process, 1 inside")


def test_of_many_bad_rows_some_are_named() -> None:
    rows = [(f"a.parquet:{number}", "code", ["x = 1"]) for number in range(100)]
    with Scorer(RewardConfig(num_workers=1)) as scorer, pytest.raises(ConfigError, match="90 more rows") as refused:
        scorer.check_code_rows(rows)
    assert len(refused.value.violations) == 11


SECRETIVE = """
import os
KEYS = ("JUDGE_API_KEY", "OTHER_API_KEY", "PGPASSWORD", "HTTPS_PROXY", "PLAIN")
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError("refused: Bearer " + os.environ["JUDGE_API_KEY"])
    return {"score": 1, "pred": ",".join(key for key in KEYS if key in os.environ)}
"""


def test_graders_have_no_secrets_but_those_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in Python's copy of the environment nor in the kernel's, nor in what an error says of it."""
    (tmp_path / "reward.py").write_text(SECRETIVE)
    values = {"JUDGE_API_KEY": "sk-judge-123456", "OTHER_API_KEY": "sk-other-123456", "PGPASSWORD": "hunter2hunter2"}
    values |= {"HTTPS_PROXY": "http://user:hunter2hunter2@proxy:1", "PLAIN": "plain"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for named, seen in (([], "PLAIN"), (["JUDGE_API_KEY"], "JUDGE_API_KEY,PLAIN")):
        custom = CustomRewardFunction(path=str(tmp_path / "reward.py"), env=named)
        with Scorer(RewardConfig(num_workers=1), custom) as scorer:
            assert asyncio.run(scorer.score(mine("1"))).answer == seen
            (worker,) = scorer._workers
            (grading,) = psutil.Process(worker.guard).children()
            for pid in (worker.guard, grading.pid):
                environ = Path(f"/proc/{pid}/environ").read_text()
                assert [name for name in values if values[name] in environ] == seen.split(",")
            error = asyncio.run(scorer.score(mine("raise"))).error
            expected = "raised: ValueError: refused: Bearer ***" if named else "raised: KeyError: 'JUDGE_API_KEY'"
            assert error == expected
    monkeypatch.delenv("JUDGE_API_KEY")
    with pytest.raises(ConfigError, match=r"custom_reward_function\.env=JUDGE_API_KEY: is not set"):
        Scorer(RewardConfig(num_workers=1), custom)


MAIN = """
import asyncio, sys
from mcore_rl.config.reward import CustomRewardFunction, RewardConfig
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rewards.scorer import Scorer
scorer = Scorer(RewardConfig(num_workers=2, timeout_s=600.0), CustomRewardFunction(path=sys.argv[1]))
requests = [RewardRequest(("p", 0), "mine", text, None) for text in ("pid", "pid", "spin", "hang", "1.5")]
async def main():
    pids = [(await scorer.score(request)).value for request in requests[:2]]
    tasks = [asyncio.create_task(scorer.score(request)) for request in requests[2:]]
    await asyncio.sleep(0)
    print("busy", flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_program_that_is_ended(custom: CustomRewardFunction, number: int) -> None:
    """In the middle of grading, without closing: Ctrl-C, which goes to the whole terminal, and worse."""
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, str(custom.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"busy\n"
        while len(workers := psutil.Process(program.pid).children(recursive=True)) < 4:  # and their guards
            time.sleep(0.01)
        os.killpg(program.pid, number)
        assert program.wait(60) != 0
        assert psutil.wait_procs(workers, timeout=60)[1] == []


def test_every_gold_solution_of_gsm8k_in_parallel() -> None:
    solutions = gold_solutions()
    requests = [RewardRequest((str(i), 0), "openai/gsm8k", text, text) for i, text in enumerate(solutions)]
    with Scorer(RewardConfig(num_workers=2)) as scorer:
        scores = asyncio.run(scorer.score_all(requests))
        assert set(scorer.counts.values()) == {0}
    assert [score.value for score in scores] == [1.0] * 8792
