"""The stages of a step: passes of models, functions and updates, each with the fields that it reads and makes.

Whoever must know what a step does reads the list that ``step_plan`` makes of them: the loop, the FLOP counter, the
planner.  A name that ends in ``_T`` is a field of the batch, one number per token, and stays where the tokens are; any
other is a value of the controller's.  Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

Function = str | Callable[..., Any]  # itself, or its ``module:name``, which imports nothing until it is called

TOKENS = ("tokens_T", "mask_T")
INPUTS = (*TOKENS, "positions_T3", "feature_T")  # what every model is given; the last two where it sees pictures
OUTCOME = "outcome_S"  # whether each response is right, 0 to 1; assembled where a stage reads it
OUTCOMES = "outcomes"  # the ``Outcomes`` that advantages are estimated from; a stage may replace them
TOKEN_REWARDS = "token_rewards_T"  # what a stage adds to the rewards of tokens
ADVANTAGES = "step_advantages"  # what ``Estimate`` makes for the updates


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward pass over the whole batch, without gradient.

    role: the row whose scores it makes, or a name of its own for its metrics.
    group: the role whose processes compute it.
    weights: the name of frozen weights in these processes; None: the live ones.
    makes: first log-probs, values or hidden states; ``entropy_S`` adds entropies, ``routing_TLK`` the chosen experts.
    reads: the fields that it is given.
    sampled: whether its log-probs are at the temperature of the sampling; else at 1.
    rests: whether the processes have nothing more to do in the step.
    context: ``(Episode, all episodes of its prompt, RunConfig) -> messages`` or its ``module:name``: the model is told
    these in the prompt's place, and what it makes is of the response behind them.  None instead of messages keeps the
    prompt.
    """

    role: str
    group: str
    makes: tuple[str, ...]
    phase: str
    weights: str | None = None
    reads: tuple[str, ...] = INPUTS
    sampled: bool = True
    rests: bool = False
    context: Function | None = None


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """Work on each sequence by itself, on the ranks that have its tokens.

    function: ``(TrainBatch, values, RunConfig) -> dict`` or its ``module:name``.  It makes fields ``*_T``, and values
    with one row per sequence, which the controller receives.  values: tensors among ``reads``, of the same sequences.
    """

    function: Function
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    phase: ClassVar[str] = "advantages"


@dataclass(frozen=True, kw_only=True)
class OnController:
    """Work on what spans sequences.

    function: ``(values, StepBatch, RunConfig) -> (dict of what it makes, metrics)``, or its ``module:name``.
    """

    function: Function
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    phase: ClassVar[str] = "advantages"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Rewards become advantages, on the ranks and on the controller (``controller/step/advantages.py``)."""

    reads: tuple[str, ...]
    makes: tuple[str, ...] = (ADVANTAGES, "advantages_T", "teacher_advantages_T", "returns_T", "weights_T")
    phase: ClassVar[str] = "advantages"


@dataclass(frozen=True, kw_only=True)
class Update:
    """The optimizer steps of a role; then frozen weights that follow its own move.

    reads: the fields that its loss is given, beside tokens and mask.  An update that reads ``ADVANTAGES`` trains the
    tokens that these leave; any other trains all tokens that the model drew.
    sampled: as in ``Pass``.  scores: whether the first forward pass stands for a pass before the update.
    """

    role: str
    reads: tuple[str, ...]
    phase: str
    sampled: bool = True
    scores: bool = False
    makes: tuple[str, ...] = ()


StepStage = Pass | OnRanks | OnController | Estimate | Update


@cache
def load_function(function: Function) -> Callable[..., Any]:
    """Imports ``function`` if it is a name, and returns it."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    loaded: Callable[..., Any] = vars(import_module(module))[name]
    return loaded


def is_field(name: str) -> bool:
    """Whether ``name`` is a field of the batch, which stays with the tokens."""
    return name.endswith(("_T", "_T3", "_TLK", "_MH"))
