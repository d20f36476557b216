"""What an algorithm is: an advantage estimator, a policy loss, a KL term, and the values of the keys that they read.

One ``Algorithm`` stands in one file of ``config/algorithms``.  From it are made ``algorithm=NAME``, what a run of it
needs, which keys it reads, its line in ``mcore-rl train --help``, and its rows in docs/algorithms.md.

Nothing here imports torch, so that a configuration is composed and checked before torch is loaded.  An estimator and a
loss therefore name their function (``module:function``), which ``load`` imports where it is to compute.  A file of a
user's may name the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, Generic, TypeVar

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.roles import LossAggregation

T = TypeVar("T")
Function = str | Callable[..., Any]
ACTOR, CRITIC, REFERENCE = "actor", "critic", "reference"


@dataclass(frozen=True)
class Sourced(Generic[T]):
    """A value and where it is from: a section of a paper, or a published run."""

    value: T
    source: str


class Scope(Enum):
    """For what one advantage is estimated, and therefore where.

    ``sequence``: all tokens of a response share it.  The function is ``(PromptGroups, AlgorithmConfig) -> Tensor [S]``
    and runs on the controller, which sees the score of every response.
    ``token``: tokens differ, and no response depends on another.  The function is ``(AdvantageInputs, AlgorithmConfig)
    -> Advantages`` and runs on the ranks, each for its own sequences.
    """

    sequence = "response"
    token = "token"


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """How advantages follow from rewards.

    name: of ``algorithm.adv_estimator``.
    function: see ``Scope``.
    scope: of one advantage.
    formula: for docs/algorithms.md, in its notation.
    paper: where the formula is from.
    roles: that it needs beside the actor.
    min_group: samples of a prompt that it needs at least (``rollout.n``).
    greedy: whether it needs the score of a greedy response to each prompt.
    parts: whether it needs the parts of the reward that ``algorithm.gdpo_reward_keys`` names.
    whitens: whether advantages are whitened over the batch whatever ``algorithm.whiten_advantages`` says.
    reads: keys that only some estimators read, and this one does.
    """

    name: str
    function: Function
    scope: Scope
    formula: str
    paper: str
    roles: tuple[str, ...] = ()
    min_group: int = 1
    greedy: bool = False
    parts: bool = False
    whitens: bool = False
    reads: frozenset[str] = frozenset()

    def load(self) -> Callable[..., Any]:
        """The function."""
        return _load(self.function)


@dataclass(frozen=True, kw_only=True)
class TokenSelection:
    """Tokens of a step that a loss treats apart: those with the largest keys (``algorithms/selection.py``).

    keys: ``(covariances [M], uniform draws [M], ActorConfig) -> keys [M]``, of trained tokens; -inf is never selected.
    share: the key of the actor that says how many, of all trained tokens.
    """

    keys: Function
    share: str

    def load(self) -> Callable[..., Any]:
        """The function."""
        return _load(self.keys)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The actor's loss at each token.

    name: of ``actor.loss_mode``.
    function: ``(LossInputs, ActorConfig) -> TokenLosses``.
    formula, paper: as of an ``Estimator``.
    needs_old: whether it reads the log-probs that the policy had before the step.
    updates_per_batch: optimizer steps that samples of one policy are good for at most; None is any number.
    aggregation: the only ``actor.loss_agg_mode`` for which it is what its paper says; None is any.
    selection: tokens that are chosen over the whole step; None of a loss that treats all alike.
    reads: keys that only some losses read, and this one does.
    """

    name: str
    function: Function
    formula: str
    paper: str
    needs_old: bool = True
    updates_per_batch: int | None = None
    aggregation: LossAggregation | None = None
    selection: TokenSelection | None = None
    reads: frozenset[str] = frozenset()

    def load(self) -> Callable[..., Any]:
        """The function."""
        return _load(self.function)


@dataclass(frozen=True)
class InReward:
    """``- coef * KL(policy || reference)`` is added to the reward of each token.  source: who says so."""

    estimate: KlPenalty
    source: str
    coef: Sourced[float]

    def settings(self) -> dict[str, Sourced[Any]]:
        """The keys that say so."""
        return {
            "algorithm.use_kl_in_reward": Sourced(True, self.source),
            "algorithm.kl_penalty": Sourced(self.estimate, self.source),
            "algorithm.kl_ctrl.kl_coef": self.coef,
        }


@dataclass(frozen=True)
class InLoss:
    """``coef * KL(policy || reference)`` is added to the actor's loss.  source: who says so."""

    estimate: KlPenalty
    source: str
    coef: Sourced[float]

    def settings(self) -> dict[str, Sourced[Any]]:
        """The keys that say so."""
        return {
            "actor.use_kl_loss": Sourced(True, self.source),
            "actor.kl_loss_type": Sourced(self.estimate, self.source),
            "actor.kl_loss_coef": self.coef,
        }


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A published algorithm: what ``algorithm=NAME`` sets.  Every key may still be overridden.

    name: NAME, and the name of its file.
    title: as its paper writes it.
    about: what sets it apart, in one line.
    paper: where it is from.
    advantages, loss: its parts.
    aggregation: ``actor.loss_agg_mode``.
    samples: ``rollout.n``.
    kl: where the distance to the reference counts; None: nowhere, and there is no reference.
    settings: further keys.
    """

    name: str
    title: str
    about: str
    paper: str
    advantages: Estimator
    loss: PolicyLoss
    aggregation: Sourced[LossAggregation]
    samples: Sourced[int]
    kl: InReward | InLoss | None = None
    settings: Mapping[str, Sourced[Any]] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that a run of it builds, by name."""
        return (ACTOR, *self.advantages.roles, *([REFERENCE] if self.kl else []))

    def all_settings(self) -> dict[str, Sourced[Any]]:
        """Every key that it sets, dotted; values may be interpolations of other keys."""
        found: dict[str, Sourced[Any]] = {
            "algorithm.adv_estimator": Sourced(self.advantages.name, self.advantages.paper),
            "actor.loss_mode": Sourced(self.loss.name, self.loss.paper),
            "actor.loss_agg_mode": self.aggregation,
            "rollout.n": self.samples,
        }
        if self.loss.updates_per_batch == 1:
            source = f"{self.loss.name} has no ratio: one update of a batch"
            found["actor.ppo_mini_batch_size"] = Sourced("${data.train_batch_size}", source)
        if self.kl is not None:
            found |= self.kl.settings()
        return found | dict(self.settings)


@cache
def _load(function: Function) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = vars(import_module(module))[name]
    return found
