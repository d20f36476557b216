"""The user's reward functions: one, or the weighted sum of several (``custom_reward_function.functions``).

A function is verl's ``compute_score(data_source, solution_str, ground_truth, extra_info)`` or, if it has a parameter
``completions``, TRL's (``completions.py``).  Both are called with keyword arguments.

One of verl's signature with a parameter ``messages`` also receives the whole conversation.  It returns a number, or a
dict with ``score`` and further entries: numbers become parts, ``acc`` also whether the answer is right, ``pred`` is the
answer, ``turn_rewards`` has a reward for each turn of the model; other entries are dropped.

Either may be ``async def``; a process runs one call at a time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.config.reward import CustomRewardFunction, RewardConfig
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.rewards.completions import COMPLETIONS, NAMED, NOT_GIVEN, CompletionsFunction, required, takes_completions
from mcore_rl.rewards.score import NotANumberError, RewardRequest, Score, finite

MODULE = "custom_reward_function"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_SIGNATURE = f"({', '.join(_ARGUMENTS)})"
_TRL_SIGNATURE = "(prompts, completions, **columns)"
_TURN_REWARDS = "turn_rewards"  # a key of the dict that the function returns
_MESSAGES = "messages"  # a parameter of the function, if it wants them


@dataclass(frozen=True)
class RewardFunction:
    """A function of the user's file.

    call: calls it; something to await if it is ``async def``.  read: the Score in its answer; None: it has no opinion.
    """

    name: str
    call: Callable[[RewardRequest], Any]
    read: Callable[[Any], Score | None]


class CustomGrader:
    """A ``Grader`` that calls the user's functions; ``load_custom`` makes it.

    weights: of each function, whose weighted sum is then the reward; None: there is one function, and its answer is it.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        self._functions = functions
        self._weights = weights
        self._runner = asyncio.Runner()  # one loop for all calls: clients that a function opened stay usable

    def __call__(self, request: RewardRequest, config: RewardConfig) -> Score:
        """The functions' results as a Score.

        NotANumberError: a result is not a finite number, or every function answered None.  Raises whatever a function
        raises.
        """
        if self._weights is None:
            (only,) = self._functions
            score = self._score(only, request)
            if score is None:
                raise NotANumberError(f"{only.name} answered None, and no other function is named")
            return score
        scores = {each.name: self._named_score(each, request) for each in self._functions}
        return weighted_sum(scores, dict(zip(scores, self._weights, strict=True)))

    def _score(self, function: RewardFunction, request: RewardRequest) -> Score | None:
        answer = function.call(request)
        return function.read(self._runner.run(_result(answer)) if inspect.isawaitable(answer) else answer)

    def _named_score(self, function: RewardFunction, request: RewardRequest) -> Score | None:
        try:
            return self._score(function, request)
        except NotANumberError:
            raise
        except Exception as error:
            error.add_note(f"in {function.name}")
            raise


def weighted_sum(scores: Mapping[str, Score | None], weights: Mapping[str, float]) -> Score:
    """The sum of the functions' scores times their weights; None takes no part in it.

    parts: what each function answered, without its weight, by its name; and the parts that they name themselves.
    correct, answer: of the first function that says it.  NotANumberError: no function has a score.
    """
    said = {name: score for name, score in scores.items() if score is not None}
    if not said:
        raise NotANumberError(f"each of {', '.join(scores)} answered None")
    parts = {name: part for score in reversed(said.values()) for name, part in score.parts.items()}
    turns = [
        [weights[name] * each for each in score.turn_rewards] for name, score in said.items() if score.turn_rewards
    ]
    return Score(
        finite(sum(weights[name] * score.value for name, score in said.items()), "the sum of the rewards"),
        parts | {name: score.value for name, score in said.items()},
        correct=next((score.correct for score in said.values() if score.correct is not None), None),
        answer=next((score.answer for score in said.values() if score.answer is not None), None),
        turn_rewards=tuple(map(sum, zip(*turns, strict=True))),
    )


def load_custom(custom: CustomRewardFunction) -> CustomGrader:
    """The grader of the functions that ``custom`` names.  ConfigError: the file, a name or a signature is wrong."""
    module = _imported(custom)
    _demand_taken(module, custom)
    if not custom.functions:
        return CustomGrader([_function(module, custom, "name", custom.name)])
    functions = list[RewardFunction]()
    violations = list[Violation]()
    for name in custom.functions:
        try:
            functions.append(_function(module, custom, "functions", name))
        except ConfigError as error:
            violations += error.violations
    refuse_if_any(violations)
    return CustomGrader(functions, list(custom.weighted.values()))


def _imported(custom: CustomRewardFunction) -> ModuleType:
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
    return module


def _function(module: ModuleType, custom: CustomRewardFunction, key: str, name: str) -> RewardFunction:
    """The function ``name`` of the user's file.  key: that names it.  ConfigError: it cannot be called."""
    function = vars(module).get(name)
    path = custom.path
    if not callable(function):
        problem = f"{path} defines no function of that name"
        raise _violation(
            key, name, problem, f"Define {name}{_SIGNATURE} or {name}{_TRL_SIGNATURE} there, or name another"
        )
    wants_messages = False
    with suppress(ValueError):  # a builtin without a signature
        function, signature = _with_kwargs(function, custom.reward_kwargs)
        if takes_completions(signature):
            return _of_completions(name, function, signature, custom, key)
        wants_messages = _MESSAGES in signature.parameters
        try:
            signature.bind(**dict.fromkeys([*_ARGUMENTS, _MESSAGES] if wants_messages else _ARGUMENTS))
        except TypeError as error:
            problem = f"{name}{signature} in {path} cannot be called: {error}"
            raise _violation(key, name, problem, f"Define {name}{_SIGNATURE} or {name}{_TRL_SIGNATURE}") from error

    def call(request: RewardRequest) -> Any:
        also = {_MESSAGES: [dict(message) for message in request.messages]} if wants_messages else {}
        return function(
            data_source=request.data_source,
            solution_str=request.response,
            ground_truth=request.ground_truth,
            extra_info=dict(request.extra_info),
            **also,
        )

    return RewardFunction(name, call, as_score)


def _demand_taken(module: ModuleType, custom: CustomRewardFunction) -> None:
    """Refuses ``reward_kwargs`` that no function takes, and those that it is given anyway."""
    names = custom.functions or [custom.name]
    untaken = set(custom.reward_kwargs)
    for function in (vars(module).get(name) for name in names):
        if callable(function):
            with suppress(ValueError):
                untaken -= set(_taken(inspect.signature(function), custom.reward_kwargs))
    given = sorted(custom.reward_kwargs.keys() & {*_ARGUMENTS, _MESSAGES, "prompts", COMPLETIONS})
    problems = {name: f"{' and '.join(names)} in {custom.path} has no such argument" for name in sorted(untaken)}
    problems |= dict.fromkeys(given, "is what a response is graded by")
    refuse_if_any(
        [
            Violation(
                f"custom_reward_function.reward_kwargs.{name}", custom.reward_kwargs[name], problem, "Leave it out"
            )
            for name, problem in problems.items()
        ]
    )


def _taken(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The ``kwargs`` that a function of ``signature`` takes by name."""
    parameters = signature.parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return dict(kwargs)
    return {each.name: kwargs[each.name] for each in parameters if each.kind in NAMED and each.name in kwargs}


def _with_kwargs(
    function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], inspect.Signature]:
    """``function`` with those of ``kwargs`` that it takes, and what it is still to be given."""
    signature = inspect.signature(function)
    taken = _taken(signature, kwargs)
    if not taken:
        return function, signature
    others = [each for name, each in signature.parameters.items() if name not in taken]
    return (lambda **given: function(**(given | taken))), signature.replace(parameters=others)


def _of_completions(
    name: str, function: Callable[..., Any], signature: inspect.Signature, custom: CustomRewardFunction, key: str
) -> RewardFunction:
    if absent := [each for each in required(signature) if each in NOT_GIVEN]:
        problem = f"{name}{signature} in {custom.path} requires {', '.join(absent)}, which is not given here"
        raise _violation(key, name, problem, f"Define {name}{_TRL_SIGNATURE} without it")
    calling = CompletionsFunction(name, function, signature, custom.completions)

    def read(answer: Any) -> Score | None:
        reward = calling.reward_of(answer)
        return None if reward is None else Score(reward)

    return RewardFunction(name, calling, read)


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
    who = ", ".join(custom.functions) or custom.name
    problem = f"called for {key} with the ground truth as the response, {who} answered no score: {error}"
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
    value = finite(answer["score"], "the score")
    correct = parts.get("acc")
    return Score(value, parts, correct=correct, answer=said, turn_rewards=turns)


async def _result(answer: Awaitable[Any]) -> Any:
    return await answer


def _violation(key: str, value: object, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation(f"custom_reward_function.{key}", value, problem, remedy)])
