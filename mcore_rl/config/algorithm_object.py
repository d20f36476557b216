"""What an algorithm is: an advantage estimator, a policy loss, a KL term, and the values of the keys that they read.

One file of ``config/algorithms`` holds one ``Algorithm``.  It defines ``algorithm=NAME``, the roles of a run, the keys
that are read, the line in ``mcore-rl train --help``, and the rows in docs/algorithms.md.

Nothing here imports torch, so that a configuration is composed and checked before torch is loaded.  An estimator and a
loss therefore name their function as ``module:function``; ``load`` imports it in the process that computes.  A user's
file may hold the function itself instead of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mcore_rl.config.algorithm import AlgorithmConfig, KlPenalty
from mcore_rl.config.role import Role
from mcore_rl.config.roles import ActorConfig, LossAggregation
from mcore_rl.config.stages import Function, StepStage, load_function

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig
    from mcore_rl.ground.errors import Violation

T = TypeVar("T")
ACTOR = "actor"
CRITIC = "critic"
REFERENCE = "reference"
TEACHER = "teacher"
NO_REWARD = "none"  # the estimator of which every advantage is 0


@dataclass(frozen=True)
class Sourced(Generic[T]):
    """A value and its source: a section of a paper, or a published run."""

    value: T
    source: str


class Scope(Enum):
    """Of what an estimator gives an advantage, and therefore in which process it runs.

    ``sequence``: all tokens of a response share one.  The function is ``(PromptGroups, AlgorithmConfig) -> Tensor [S]``
    and runs on the controller, which sees the score of every response.
    ``token``: each token has its own, and no response depends on another.  The function is ``(AdvantageInputs,
    AlgorithmConfig) -> Advantages`` and runs on the ranks, each for its own sequences.
    ``pair``: of nothing; it says which of two responses is preferred, and the loss compares them.  The function is
    ``(scores of a prompt's responses, list of float) -> list[Pair]`` (algorithms/advantages/pairs.py), at most one pair
    of a prompt, or of a response with ``answers``; it runs on the controller before anything is scored.
    """

    sequence = "response"
    token = "token"
    pair = "pair"


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """How advantages follow from rewards.

    name: the value of ``algorithm.adv_estimator`` that chooses it.
    function: what computes it, with the signature that ``Scope`` gives.
    scope: one advantage per response, or per token, or pairs of responses.
    formula: for docs/algorithms.md, in its notation.
    paper: the source of the formula.
    roles: the roles that it needs beside the actor; of a role of the table the name, else the row that it brings.
    stages: what a step does for it beside the roles' own stages, such as rewards of tokens (config/step_plan.py).
    min_group: the fewest samples per prompt (``rollout.n``) with which it works.
    over_step: True if scores of other prompts' responses are in its baseline, so that it compares without a group.
    greedy: True if it needs the score of a greedy response to each prompt.
    refuses_kl: why ``algorithm.use_kl_in_reward`` is refused with it, to follow its name; empty: it is not.
    whitens: True if it always whitens advantages over the batch, whatever ``algorithm.whiten_advantages`` says.
    answers: True if its pairs have the row's own answer (``data.answer_key``).
    settings: the group ``algorithm`` with the keys that it has and others do not.
    rules: find what contradicts it in a run.
    """

    name: str
    function: Function
    scope: Scope
    formula: str
    paper: str
    roles: tuple[str | Role, ...] = ()
    stages: tuple[StepStage, ...] = ()
    min_group: int = 1
    over_step: bool = False
    greedy: bool = False
    refuses_kl: str = ""
    whitens: bool = False
    answers: bool = False
    settings: type[AlgorithmConfig] = AlgorithmConfig
    rules: tuple[Callable[[RunConfig], Iterable[Violation]], ...] = ()

    @property
    def parts(self) -> bool:
        """Whether it needs parts of the reward, which its settings name."""
        return self.settings.reward_parts is not AlgorithmConfig.reward_parts

    @property
    def own_keys(self) -> frozenset[str]:
        """The dotted keys and groups of ``settings`` that not every estimator has."""
        return _own_keys(self.settings, AlgorithmConfig, "algorithm")

    @property
    def role_names(self) -> tuple[str, ...]:
        """The names of ``roles``."""
        return tuple(role.name if isinstance(role, Role) else role for role in self.roles)

    @property
    def compares(self) -> bool:
        """Whether the scores of other responses are in the baseline of one."""
        return self.scope is not Scope.pair and (self.min_group > 1 or self.over_step)

    @property
    def tells_signal(self) -> bool:
        """Whether the scores of one group say which of its responses are trained: nothing else is needed."""
        return self.scope is Scope.sequence and not (self.parts or self.over_step or self.name == NO_REWARD)

    def load(self) -> Callable[..., Any]:
        """Imports ``function`` if it is a name, and returns it."""
        return load_function(self.function)


@dataclass(frozen=True, kw_only=True)
class TokenSelection:
    """The tokens of a step that a loss treats apart: those with the largest keys (``algorithms/selection.py``).

    keys: ``(covariances [M], uniform draws [M], ActorConfig) -> keys [M]``, of trained tokens; -inf is never selected.
    share: the name of the actor's setting that gives the selected share of all trained tokens.
    """

    keys: Function
    share: str

    def load(self) -> Callable[..., Any]:
        """Imports ``keys`` if it is a name, and returns the function."""
        return load_function(self.keys)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The actor's loss at each token.

    name: the value of ``actor.loss_mode`` that chooses it.
    function: ``(LossInputs, ActorConfig) -> TokenLosses``.
    formula, paper: as in ``Estimator``.
    needs_old: True if it reads the log-probs that the policy had before the step.
    updates_per_batch: the most optimizer steps that it may take on samples of one policy; None is any number.
    aggregation: the only ``actor.loss_agg_mode`` with which it is the paper's loss; None is any.
    selection: how it selects tokens over the whole step; None if it treats all tokens alike.
    pairs: True if it looks at both responses of a pair.
    fields: what it reads of the batch beside log-probs, advantages and weights: ``NAME_T`` as ``extra_N["NAME_N"]``,
    ``NAME_S`` as ``extra_S["NAME_S"]``.  ``outcome_S``: whether each response is right, 0 to 1.
    settings: the group ``actor`` with the keys that it has and others do not.
    rules: find what contradicts it in a run.
    """

    name: str
    function: Function
    formula: str
    paper: str
    needs_old: bool = True
    updates_per_batch: int | None = None
    aggregation: LossAggregation | None = None
    selection: TokenSelection | None = None
    pairs: bool = False
    fields: tuple[str, ...] = ()
    settings: type[ActorConfig] = ActorConfig
    rules: tuple[Callable[[RunConfig], Iterable[Violation]], ...] = ()

    @property
    def own_keys(self) -> frozenset[str]:
        """The dotted keys and groups of ``settings`` that not every loss has."""
        return _own_keys(self.settings, ActorConfig, "actor")

    def load(self) -> Callable[..., Any]:
        """Imports ``function`` if it is a name, and returns it."""
        return load_function(self.function)


@dataclass(frozen=True)
class InReward:
    """``- coef * KL(policy || reference)`` is added to the reward of each token.  source: the paper or run of this."""

    estimate: KlPenalty
    source: str
    coef: Sourced[float]

    def settings(self) -> dict[str, Sourced[Any]]:
        """The dotted keys that switch this KL on."""
        return {
            "algorithm.use_kl_in_reward": Sourced(True, self.source),
            "algorithm.kl_penalty": Sourced(self.estimate, self.source),
            "algorithm.kl_ctrl.kl_coef": self.coef,
        }


@dataclass(frozen=True)
class InLoss:
    """``coef * KL(policy || reference)`` is added to the actor's loss.  source: the paper or run of this."""

    estimate: KlPenalty
    source: str
    coef: Sourced[float]

    def settings(self) -> dict[str, Sourced[Any]]:
        """The dotted keys that switch this KL on."""
        return {
            "actor.use_kl_loss": Sourced(True, self.source),
            "actor.kl_loss_type": Sourced(self.estimate, self.source),
            "actor.kl_loss_coef": self.coef,
        }


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A published algorithm: what ``algorithm=NAME`` sets.  Every key may still be overridden.

    name: NAME, and the name of its file.
    title: the name as its paper writes it.
    about: what sets it apart, in one line.
    paper: its source.
    advantages, loss: its estimator and its policy loss.
    aggregation: the value of ``actor.loss_agg_mode``.
    samples: the value of ``rollout.n``.
    kl: whether the KL to the reference is in the reward or in the loss; None: there is no KL and no reference.
    teacher: the coefficient of a teacher's part of the advantages; None: there is no teacher.
    settings: further dotted keys and their values.
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
    teacher: Sourced[float] | None = None
    settings: Mapping[str, Sourced[Any]] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that a run of it builds, by name."""
        more = [*([REFERENCE] if self.kl or self.loss.pairs else []), *([TEACHER] if self.teacher else [])]
        return (ACTOR, *self.advantages.role_names, *more)

    def all_settings(self) -> dict[str, Sourced[Any]]:
        """Every dotted key that the algorithm sets; a value may be an interpolation of another key."""
        settings: dict[str, Sourced[Any]] = {
            "algorithm.adv_estimator": Sourced(self.advantages.name, self.advantages.paper),
            "actor.loss_mode": Sourced(self.loss.name, self.loss.paper),
            "actor.loss_agg_mode": self.aggregation,
            "rollout.n": self.samples,
        }
        if self.loss.updates_per_batch == 1:
            source = f"{self.loss.name} has no ratio: one update of a batch"
            settings["actor.ppo_mini_batch_size"] = Sourced("${data.train_batch_size}", source)
        if self.kl is not None:
            settings |= self.kl.settings()
        if self.teacher is not None:
            settings["algorithm.distill.coef"] = self.teacher
        return settings | dict(self.settings)


def _own_keys(settings: type[Any], common: type[Any], group: str) -> frozenset[str]:
    shared = {each.name for each in fields(common)}
    return frozenset(f"{group}.{each.name}" for each in fields(settings) if each.name not in shared)
