"""Calls reward functions of TRL's signature, ``f(prompts, completions, **columns) -> list`` (GRPOTrainer's).

A function is one of these if it has a parameter ``completions``.  It gets lists of one item, because a grading process
takes one completion at a time.  Of TRL's further arguments, ``completion_ids``, ``trainer_state``, ``log_extra`` and
``log_metric`` are not given.  The number that it answers is its reward; None is no opinion of this completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from mcore_rl.config.reward import Completions
from mcore_rl.rewards.score import NotANumberError, RewardRequest, finite

COMPLETIONS = "completions"
NOT_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric")  # of what TRL hands over
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes_completions(signature: inspect.Signature) -> bool:
    """Whether a function of ``signature`` is called as TRL calls it."""
    return COMPLETIONS in signature.parameters


def required(signature: inspect.Signature) -> list[str]:
    """The names that a function of ``signature`` cannot be called without."""
    return [name for name, each in signature.parameters.items() if each.kind in NAMED and each.default is each.empty]


class CompletionsFunction:
    """A user's function of TRL's signature.  form: of its prompts and completions."""

    def __init__(
        self, name: str, function: Callable[..., Any], signature: inspect.Signature, form: Completions
    ) -> None:
        self._name = name
        self._function = function
        self._form = form
        self._required = required(signature)
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
        self._taken = None if takes_all else frozenset(signature.parameters)

    def __call__(self, request: RewardRequest) -> Any:
        """What the function returns, for ``reward_of``; something to await if it is ``async def``.

        NotANumberError: the row lacks a column that the function requires.
        """
        given = arguments(request, self._form)
        if absent := [name for name in self._required if name not in given]:
            there = ", ".join(sorted(given.keys() - {COMPLETIONS, "prompts"}))
            raise NotANumberError(f"{self._name} requires {', '.join(absent)}, and the row's columns are {there}")
        return self._function(
            **{name: each for name, each in given.items() if self._taken is None or name in self._taken}
        )

    def reward_of(self, answer: object) -> float | None:
        """The reward in what the function returned.  NotANumberError: it is no list of one number or None."""
        if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Sized) or len(answer) != 1:
            problem = f"answered {repr(answer)[:80]}, not a list with one number for each of its completions"
            raise NotANumberError(f"{self._name} {problem}")
        reward: Any = answer[0]  # type: ignore[index]  # of a list, a tuple, an array or a tensor
        return None if reward is None else finite(reward, f"the reward of {self._name}")


def arguments(request: RewardRequest, form: Completions) -> dict[str, list[Any]]:
    """What a function is given by name: the prompt, the completion and every column of the row, in lists of one."""
    prompt, completion = split(request)
    columns = {"data_source": request.data_source, "ground_truth": request.ground_truth, **request.extra_info}
    if form is Completions.text:
        text = "\n".join(str(message.get("content", "")) for message in prompt)
        said: dict[str, Any] = {"prompts": text, COMPLETIONS: request.response}
    else:
        said = {"prompts": prompt, COMPLETIONS: completion}
    return {name: [value] for name, value in (columns | said).items()}


def split(request: RewardRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(the messages of the prompt; those of the completion, which begin with the model's first turn)."""
    messages: Sequence[Mapping[str, Any]] = request.messages
    turns = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if not messages or len(turns) < request.num_turns:
        return [], [{"role": "assistant", "content": request.response}]
    begin = turns[-request.num_turns]
    return [dict(each) for each in messages[:begin]], [dict(each) for each in messages[begin:]]
