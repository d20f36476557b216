"""Reward functions of users: what they may answer, and what is said of files that cannot be used."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy
import pytest

from mcore_rl.config.reward import CustomRewardFunction, RewardConfig, custom_violations
from mcore_rl.ground.errors import ConfigError
from mcore_rl.rewards.custom import as_score, load_custom, weighted_sum
from mcore_rl.rewards.score import NotANumberError, RewardRequest, Score

REQUEST = RewardRequest(("p", 0), "mine", "abc", "gold", {"level": 3})


def written(folder: Path, text: str, name: str = "compute_score") -> CustomRewardFunction:
    path = folder / "my_reward.py"
    path.write_text(text)
    return CustomRewardFunction(path=str(path), name=name)


@pytest.mark.parametrize(
    "text",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info): ",
        "def compute_score(extra_info, ground_truth, solution_str, data_source, **others): ",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, alpha=1): ",
        "def compute_score(**columns): return check(**columns)\n"
        "def check(data_source, solution_str, ground_truth, extra_info): ",
        "async def compute_score(data_source, solution_str, ground_truth, extra_info): ",
        "class Judge:\n  def __call__(self, data_source, solution_str, ground_truth, extra_info): return check("
        "data_source, solution_str, ground_truth, extra_info)\ncompute_score = Judge()\ndef check(data_source,"
        " solution_str, ground_truth, extra_info): ",
    ],
)
def test_it_is_told_everything_by_name(tmp_path: Path, text: str) -> None:
    body = "return len(solution_str) + extra_info['level'] / 10 + (data_source, ground_truth).count('gold')\n"
    assert load_custom(written(tmp_path, text + body))(REQUEST, RewardConfig()) == Score(4.3)


def test_a_function_that_has_a_place_for_the_conversation_is_told_it(tmp_path: Path) -> None:
    text = """
def compute_score(data_source, solution_str, ground_truth, extra_info, messages):
    return {"score": len(messages), "turn_rewards": [len(m["content"]) for m in messages if m["role"] == "assistant"]}
"""
    said = [("user", "2 + 3?"), ("assistant", "add"), ("tool", "5"), ("assistant", "five")]
    request = replace(REQUEST, messages=[{"role": role, "content": content} for role, content in said], num_turns=2)
    assert load_custom(written(tmp_path, text))(request, RewardConfig()) == Score(4.0, turn_rewards=(3.0, 4.0))


def test_an_async_function_keeps_its_loop(tmp_path: Path) -> None:
    text = """
import asyncio
loops = []
async def judge(**columns):
    await asyncio.sleep(0)
    loops.append(asyncio.get_running_loop())
    return {"score": len(loops), "same": loops[0] is loops[-1]}
"""
    grader = load_custom(written(tmp_path, text, "judge"))
    assert [grader(REQUEST, RewardConfig()).parts for _ in range(3)] == [{"same": 1.0}] * 3


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (1, Score(1.0)),
        (True, Score(1.0)),
        (numpy.float32(0.5), Score(0.5)),
        (numpy.array(0.5), Score(0.5)),
        (Decimal("0.5"), Score(0.5)),
        (Fraction(1, 2), Score(0.5)),
        ({"score": 0.5}, Score(0.5)),
        ({"score": 1, "acc": True, "len": 3}, Score(1.0, {"acc": 1.0, "len": 3.0}, correct=1.0)),
        ({"score": 1, "pred": "x", "other": "y"}, Score(1.0, answer="x")),
        ({"score": 1, "pred": 7}, Score(1.0, {"pred": 7.0}, answer="7")),
        ({"score": 1, "bad": float("nan"), "none": None}, Score(1.0)),
        ({"score": 1, "turn_rewards": [0.5, 0]}, Score(1.0, turn_rewards=(0.5, 0.0))),
        ({"score": 1, "turn_rewards": numpy.array([0.5])}, Score(1.0, turn_rewards=(0.5,))),
    ],
)
def test_answers(answer: object, score: Score) -> None:
    read = as_score(answer)
    assert read == score
    assert type(read.value) is float


@pytest.mark.parametrize(
    "answer",
    [
        *(None, "1.0", b"1", float("nan"), float("inf"), -float("inf"), [1.0], {}, {"acc": 1}, {"score": None}, 1j),
        *({"score": 1, "turn_rewards": [float("nan")]}, {"score": 1, "turn_rewards": ["1"]}),
    ],
)
def test_what_is_no_number_is_named(answer: object) -> None:
    with pytest.raises(NotANumberError, match=r"not a finite number|no score"):
        as_score(answer)


LISTED = """
def shape(completions, **columns):
    return [float(completions[0][0]["content"] == "abc")]
async def level(completions, level, **columns):
    return [None if level[0] > 5 else level[0] / 4]
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 2, "acc": ground_truth == "gold", "pred": solution_str, "turn_rewards": [0.5], "length": 3}
def broken(completions, **columns):
    return [1 / 0]
"""


def listed(folder: Path, functions: list[str], weights: list[float] | None = None) -> CustomRewardFunction:
    return replace(written(folder, LISTED), functions=functions, weights=weights)


def test_several_functions_are_summed_by_their_weights(tmp_path: Path) -> None:
    grade = load_custom(listed(tmp_path, ["shape", "level", "compute_score"], [4.0, 1.0, -0.5]))
    score = grade(REQUEST, RewardConfig())
    assert score.value == 4.0 * 1.0 + 1.0 * 0.75 - 0.5 * 2
    assert score.parts == {"shape": 1.0, "level": 0.75, "compute_score": 2.0, "acc": 1.0, "length": 3.0}
    assert (score.correct, score.answer, score.turn_rewards) == (1.0, "abc", (-0.25,))
    deep = replace(REQUEST, extra_info={"level": 6})
    assert grade(deep, RewardConfig()).parts.keys() == score.parts.keys() - {"level"}
    assert grade(deep, RewardConfig()).value == 3.0


def test_without_weights_each_counts_once(tmp_path: Path) -> None:
    assert load_custom(listed(tmp_path, ["shape", "level"]))(REQUEST, RewardConfig()).value == 1.75


def test_where_no_function_has_a_score_there_is_none(tmp_path: Path) -> None:
    deep = replace(REQUEST, extra_info={"level": 6})
    with pytest.raises(NotANumberError, match="each of level answered None"):
        load_custom(listed(tmp_path, ["level"]))(deep, RewardConfig())
    with pytest.raises(NotANumberError, match="level answered None, and no other function is named"):
        load_custom(written(tmp_path, LISTED, "level"))(deep, RewardConfig())
    with pytest.raises(NotANumberError, match="sum of the rewards is inf"):
        weighted_sum({"a": Score(1e308), "b": Score(1e308)}, {"a": 1.0, "b": 1.0})


def test_one_function_of_trls_signature(tmp_path: Path) -> None:
    assert load_custom(written(tmp_path, LISTED, "level"))(REQUEST, RewardConfig()) == Score(0.75)


def test_the_function_that_raises_is_named(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        load_custom(listed(tmp_path, ["shape", "broken"]))(REQUEST, RewardConfig())
    assert caught.value.__notes__ == ["in broken"]


def test_everything_wrong_with_a_list_is_said_at_once(tmp_path: Path) -> None:
    text = "def ids(completions, completion_ids): pass\ndef odd(response): pass\n"
    with pytest.raises(ConfigError) as caught:
        load_custom(replace(written(tmp_path, text), functions=["ids", "odd", "absent"]))
    lines = [str(each) for each in caught.value.violations]
    assert [line.partition(":")[0] for line in lines] == [
        f"custom_reward_function.functions={name}" for name in ("ids", "odd", "absent")
    ]
    assert "requires completion_ids, which is not given here" in lines[0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"functions": ["a"]}, "custom_reward_function.path=None: is not set, and functions are named"),
        ({"path": "r.py", "functions": ["a", "a"]}, "names a more than once"),
        ({"path": "r.py", "functions": ["a"], "weights": [1.0, 2.0]}, "has 2 weights for 1 functions"),
        ({"path": "r.py", "weights": [1.0]}, "has 1 weights for 0 functions"),
        ({"path": "r.py", "functions": ["a", "b"], "weights": [1.0, 0.0]}, None),
    ],
)
def test_a_list_that_contradicts_itself(values: dict[str, object], said: str | None) -> None:
    lines = [str(each) for each in custom_violations(CustomRewardFunction(**values))]  # type: ignore[arg-type]
    assert [said in line for line in lines if said] == [True] * (said is not None) and bool(lines) is bool(said)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def other(): pass", r"custom_reward_function.name=compute_score: .*my_reward.py defines no function"),
        ("compute_score = 3", r"defines no function of that name"),
        ("def compute_score(response): pass", r"compute_score\(response\) in .*my_reward.py cannot be called: "),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info, tokenizer): pass",
            r"missing a required argument: 'tokenizer'.*Define compute_score\(data_source, solution_str, ground_truth,",
        ),
        ("def compute_score(", r"custom_reward_function.path=.*my_reward.py: importing it raised SyntaxError"),
        ("import not_installed_anywhere", r"importing it raised ModuleNotFoundError: No module named 'not_installed"),
        ("raise SystemExit(3)", r"importing it raised SystemExit: 3"),
        ("import sys\nsys.exit(3)", r"importing it raised SystemExit: 3"),
        ("raise KeyboardInterrupt", r"importing it raised KeyboardInterrupt: "),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_custom(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.py", tmp_path):
        with pytest.raises(ConfigError, match=f"custom_reward_function.path={path}: there is no such file"):
            load_custom(CustomRewardFunction(path=str(path)))
    (tmp_path / "reward.txt").write_text("")
    with pytest.raises(ConfigError, match="is not a Python file"):
        load_custom(CustomRewardFunction(path=str(tmp_path / "reward.txt")))


GRADED = "(data_source, solution_str, ground_truth, extra_info"
VERLS = f"def compute_score{GRADED}, scale=1.0, words=()): return scale * (solution_str in words)\n"


@pytest.mark.parametrize(
    ("kwargs", "value"), [({}, 0.0), ({"words": ["abc"]}, 1.0), ({"scale": 3, "words": ["abc"]}, 3.0)]
)
def test_it_is_given_its_reward_kwargs(tmp_path: Path, kwargs: dict[str, object], value: float) -> None:
    custom = replace(written(tmp_path, VERLS), reward_kwargs=kwargs)
    assert load_custom(custom)(REQUEST, RewardConfig()) == Score(value)


@pytest.mark.parametrize(
    "text",
    [
        f"def compute_score{GRADED}, **others): return others['limit']",
        f"async def compute_score{GRADED}, *, limit): return limit",
    ],
)
def test_reward_kwargs_of_any_kind_of_function(tmp_path: Path, text: str) -> None:
    custom = replace(written(tmp_path, text), reward_kwargs={"limit": 7})
    assert load_custom(custom)(REQUEST, RewardConfig()).value == 7


def test_each_of_several_functions_is_given_what_it_takes(tmp_path: Path) -> None:
    text = f"""{VERLS}
def short(completions, scale, limit, **columns): return [scale * (len(completions[0][0]["content"]) < limit)]
"""
    custom = replace(written(tmp_path, text), functions=["compute_score", "short"])
    kwargs = {"scale": 2, "limit": 4, "words": ["abc"]}
    score = load_custom(replace(custom, reward_kwargs=kwargs))(REQUEST, RewardConfig())
    assert score.parts == {"compute_score": 2.0, "short": 2.0} and score.value == 4.0


def test_reward_kwargs_that_no_function_takes_or_that_are_given_anyway_are_refused(tmp_path: Path) -> None:
    kwargs = {"scale": 2, "scales": 3, "solution_str": "mine"}
    with pytest.raises(ConfigError) as refused:
        load_custom(replace(written(tmp_path, VERLS), reward_kwargs=kwargs))
    keys = {each.key: each.problem for each in refused.value.violations}
    assert set(keys) == {f"custom_reward_function.reward_kwargs.{name}" for name in ("scales", "solution_str")}
    assert "has no such argument" in keys["custom_reward_function.reward_kwargs.scales"]


def test_reward_kwargs_without_a_function_are_refused() -> None:
    (violation,) = custom_violations(CustomRewardFunction(reward_kwargs={"scale": 1}))
    assert violation.key == "custom_reward_function.reward_kwargs" and "path=FILE.py" in violation.remedy
