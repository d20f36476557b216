"""The user's reward function: ``compute_score(data_source, solution_str, ground_truth, extra_info)``.

It is called with keyword arguments.  If it has a parameter ``messages``, it also receives the whole conversation.  It
returns a number, or a dict with ``score`` and further entries: numbers become parts, ``acc`` also whether the answer is
right, ``pred`` is the answer, ``turn_rewards`` has a reward for each turn of the model; other entries are dropped.  It
may be ``async def``; a process runs one call at a time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_rl.config.reward import CustomRewardFunction, RewardConfig
from mcore_rl.errors import ConfigError, Violation
from mcore_rl.rewards.score import NotANumberError, RewardRequest, Score, finite

MODULE = "custom_reward_function"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_SIGNATURE = f"({', '.join(_ARGUMENTS)})"
_TURN_REWARDS = "turn_rewards"  # a key of the dict that the function returns
_MESSAGES = "messages"  # a parameter of the function, if it wants them


class CustomGrader:
    """A ``Grader`` that calls the user's function; ``load_custom`` makes it."""

    def __init__(self, function: Callable[..., Any], *, wants_messages: bool) -> None:
        self._function, self._wants_messages = function, wants_messages
        self._runner = asyncio.Runner()  # one loop for all calls: clients that a function opened stay usable

    def __call__(self, request: RewardRequest, config: RewardConfig) -> Score:
        """The function's result as a Score.

        NotANumberError: its result is not a finite number.  Raises whatever the function raises.
        """
        also = {_MESSAGES: [dict(message) for message in request.messages]} if self._wants_messages else {}
        answer = self._function(
            data_source=request.data_source,
            solution_str=request.response,
            ground_truth=request.ground_truth,
            extra_info=dict(request.extra_info),
            **also,
        )
        return as_score(self._runner.run(_result(answer)) if inspect.isawaitable(answer) else answer)


def load_custom(custom: CustomRewardFunction) -> CustomGrader:
    """The grader of the function that ``custom`` names.  ConfigError: the file, the name or the signature is wrong."""
    path = Path(str(custom.path))
    if not path.is_file():
        raise _violation("path", custom.path, "there is no such file", "Write the path of a Python file")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise _violation("path", custom.path, "is not a Python file", "Write the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # whatever the user's file does, sys.exit and KeyboardInterrupt too
        problem = f"importing it raised {type(error).__name__}: {error}"
        raise _violation("path", custom.path, problem, "Correct the file") from error
    function = vars(module).get(custom.name)
    if not callable(function):
        problem = f"{path} defines no function of that name"
        raise _violation("name", custom.name, problem, f"Define {custom.name}{_SIGNATURE} there, or name another")
    wants_messages = False
    with suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(function)
        wants_messages = _MESSAGES in signature.parameters
        try:
            signature.bind(**dict.fromkeys([*_ARGUMENTS, _MESSAGES] if wants_messages else _ARGUMENTS))
        except TypeError as error:
            problem = f"{custom.name}{signature} in {path} cannot be called: {error}"
            raise _violation("name", custom.name, problem, f"Define {custom.name}{_SIGNATURE}") from error
    return CustomGrader(function, wants_messages=wants_messages)


def import_refusal(custom: CustomRewardFunction, code: int) -> ConfigError:
    """What is wrong with a file whose import did not come back: its process ended with the exit ``code``."""
    if code == -signal.SIGALRM:
        problem = f"importing it took longer than {custom.import_timeout_s:g} s"
        remedy = "Let it do less on import, or set custom_reward_function.import_timeout_s"
    else:
        problem = f"importing it ended its process with exit code {code}"
        remedy = "Take os._exit, or what crashes, out of the file; python FILE shows it"
    return _violation("path", custom.path, problem, remedy)


def trial_refusal(custom: CustomRewardFunction, key: str, error: str) -> ConfigError:
    """What is wrong with a function whose trial on the row ``key`` gave no number."""
    problem = f"called for {key} with the ground truth as the response, {custom.name} answered no score: {error}"
    return _violation("path", custom.path, problem, "Return a number, or a dict with a number as score")


def as_score(answer: object) -> Score:
    """The Score of what the function returned, a number or a dict with ``score``.  NotANumberError: it is neither."""
    if not isinstance(answer, Mapping):
        return Score(finite(answer, "the score"))
    if "score" not in answer:
        raise NotANumberError(f"the dict has {sorted(map(str, answer))[:10]}, but no score")
    parts = {}
    for name, part in answer.items():
        with suppress(NotANumberError):
            if name not in ("score", _TURN_REWARDS):
                parts[str(name)] = finite(part, str(name))
    said = answer.get("pred")
    said = None if said is None else str(said)
    turns = tuple(finite(each, "a turn reward") for each in answer.get(_TURN_REWARDS, ()))
    value, correct = finite(answer["score"], "the score"), parts.get("acc")
    return Score(value, parts, correct=correct, answer=said, turn_rewards=turns)


async def _result(answer: Awaitable[Any]) -> Any:
    return await answer


def _violation(key: str, value: object, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation(f"custom_reward_function.{key}", value, problem, remedy)])
