"""Runs that learn from pairs of responses: how many sequences a prompt has, and what contradicts them.

An estimator of ``Scope.pair`` says which two responses are a pair, and a loss with ``pairs`` compares them; neither
works without the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mcore_rl.config.algorithm import OffPolicy, Rejection
from mcore_rl.config.algorithm_object import Scope
from mcore_rl.config.algorithm_registry import ESTIMATOR_KEY, LOSS_KEY, estimator, estimators, policy_loss
from mcore_rl.config.preference import PreferenceConfig, PreferenceLoss, parted_pairs, preference_violations
from mcore_rl.config.roles import ActorConfig, RouterReplay
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig

GROUP = "actor.preference."


@dataclass(kw_only=True)
class PairsConfig(ActorConfig):
    """A policy that learns from pairs of responses.  preference: the loss; see ``PreferenceConfig``."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)


def needs_answers(run: RunConfig) -> bool:
    """Whether the rows' own answers are trained."""
    return estimator(run.algorithm.adv_estimator).answers


def trains_pairs(run: RunConfig) -> bool:
    """Whether pairs are trained, and not the responses by themselves."""
    return policy_loss(run.actor.loss_mode).pairs


def units_per_prompt(run: RunConfig) -> int:
    """How many pairs of a prompt are trained, a response alone where there is none; without pairs, how many responses.

    What one data-parallel rank trains whole.
    """
    return 1 if trains_pairs(run) and not needs_answers(run) else run.rollout.n


def sequences_per_prompt(run: RunConfig) -> int:
    """The most sequences of a prompt that are scored and trained."""
    return units_per_prompt(run) * (2 if trains_pairs(run) else 1)


def pair_violations(run: RunConfig) -> Iterator[Violation]:
    """Every violation of what pairs are made of, and of settings that mean something for single responses alone."""
    chosen = estimator(run.algorithm.adv_estimator)
    loss = policy_loss(run.actor.loss_mode)
    actor = run.actor
    if (chosen.scope is Scope.pair) != loss.pairs:
        yield _mismatch(chosen.name, loss.name, pairs=loss.pairs)
        return
    if not isinstance(actor, PairsConfig):
        return
    yield from preference_violations(actor.preference, GROUP)
    if not actor.preference.row.pairs:
        problem = "learns from labels of single responses, and here are pairs"
        others = [each.value for each in PreferenceLoss if each is not actor.preference.loss]
        yield Violation(f"{GROUP}loss", actor.preference.loss.value, problem, f"Write {' or '.join(others)}")
    yield from parted_pairs(actor.microbatch_sequences)
    if actor.use_kl_loss:
        problem = f"actor.loss_mode={loss.name} has the reference in it: actor.preference.beta is its weight"
        yield Violation("actor.use_kl_loss", True, problem, "Write false, and a larger beta")
    if chosen.answers:
        yield from _answer_violations(run)
    if run.algorithm.off_policy is OffPolicy.decoupled:
        problem = "weighs tokens, and the loss is of whole responses"
        yield Violation("algorithm.off_policy", OffPolicy.decoupled.value, problem, "Write recompute")
    reject = run.algorithm.rollout_correction.reject
    if reject is not Rejection.none:
        problem = "leaves tokens or single responses out of pairs"
        yield Violation("algorithm.rollout_correction.reject", reject.value, problem, "Write none")


def _mismatch(name: str, loss: str, *, pairs: bool) -> Violation:
    if pairs:
        makers = [each.name for each in estimators().values() if each.scope is Scope.pair]
        problem = f"{LOSS_KEY}={loss} compares the responses of a pair, and this makes none"
        return Violation(ESTIMATOR_KEY, name, problem, f"Write {' or '.join(makers)}")
    problem = f"{ESTIMATOR_KEY}={name} makes pairs and no advantages, and this reads those"
    return Violation(LOSS_KEY, loss, problem, f"Write {LOSS_KEY}=preference")


def _answer_violations(run: RunConfig) -> Iterator[Violation]:
    """What the rows' own answers, which no engine has drawn, lack."""
    if run.data.answer_key is None:
        problem = f"{ESTIMATOR_KEY}={run.algorithm.adv_estimator} trains the rows' own answers, and no column is named"
        yield Violation("data.answer_key", None, problem, "Write data.answer_key=extra_info.answer, say")
    if run.actor.router_replay is RouterReplay.r3:
        problem = "repeats the experts that engines report, and the rows' own answers have gone through no engine"
        yield Violation("actor.router_replay", RouterReplay.r3.value, problem, "Write r2 or off")
