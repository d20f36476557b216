"""Refuses keys that the user wrote but that the run would not read, since they cannot do what the user meant.

An estimator and a loss declare the keys that they read (``config/algorithm_object.py``).  The table here has the keys
that another key switches on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

from mcore_rl.config.algorithm import CorrectionMode, Divergence, KlControl, KlPenalty, Rejection
from mcore_rl.config.algorithm_object import NO_REWARD, REFERENCE, TEACHER, Estimator, PolicyLoss, Scope
from mcore_rl.config.algorithm_registry import (
    ESTIMATOR_KEY,
    LOSS_KEY,
    estimator,
    estimators,
    policy_loss,
    policy_losses,
)
from mcore_rl.config.bounds import Unsound
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.config.engine import Dispatcher
from mcore_rl.config.judge import WAY, JudgeConfig
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.names import value_at
from mcore_rl.config.pairs import needs_answers
from mcore_rl.config.role import Role
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import AdaptedConfig, LossAggregation
from mcore_rl.config.rollout import Quantization
from mcore_rl.config.trainer import ASYNC, Placement
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


@dataclass(frozen=True)
class Switch:
    """Keys that are read under a condition.

    keys: dotted; a key that ends in a dot means all keys of that group.
    on: whether a run reads them.
    problem: why a run does not read them.
    remedy: what switches them on.
    """

    keys: tuple[str, ...]
    on: Callable[[RunConfig], bool]
    problem: str
    remedy: str


SWITCHES = (
    Switch(
        ("async.max_staleness",),
        lambda run: run.trainer.mode is ASYNC or run.rollout.partial,
        "trainer.mode itself says how far drawing is ahead of training",
        "trainer.mode=async",
    ),
    Switch(
        ("async.partial_rollout", "async.overdue"),
        lambda run: run.trainer.mode is ASYNC,
        "nothing is drawn while the trainer works",
        "trainer.mode=async",
    ),
    Switch(
        ("async.partial_rollout", "async.overdue"),
        lambda run: run.async_.max_staleness > 0,
        "nothing is drawn ahead",
        "async.max_staleness=1",
    ),
    Switch(
        ("rollout.over_sampling",),
        lambda run: run.rollout.partial,
        "a step waits for all groups that it begins",
        "rollout.partial=true",
    ),
    Switch(
        ("custom_reward_function.name",),
        lambda run: not run.custom_reward_function.functions,
        "custom_reward_function.functions are there instead of it",
        "custom_reward_function.functions=[]",
    ),
    Switch(
        ("custom_reward_function.completions",),
        lambda run: run.custom_reward_function.path is not None,
        "there is no function of your own",
        "custom_reward_function.path=FILE",
    ),
    Switch(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl."),
        lambda run: run.algorithm.use_kl_in_reward,
        "there is no KL in the reward",
        "algorithm.use_kl_in_reward=true",
    ),
    Switch(
        ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.target_kl_per", "algorithm.kl_ctrl.horizon"),
        lambda run: run.algorithm.kl_ctrl.type is KlControl.adaptive,
        "the coefficient is fixed",
        "algorithm.kl_ctrl.type=adaptive",
    ),
    Switch(
        ("algorithm.ref_update_freq",),
        lambda run: REFERENCE in run.roles,
        "there is no reference",
        "actor.use_kl_loss=true",
    ),
    Switch(
        ("data.answer_key",),
        needs_answers,
        "the rows' own answers are not trained",
        f"{ESTIMATOR_KEY}=true_answer",
    ),
    Switch(
        ("actor.kl_loss_coef", "actor.kl_loss_type", "actor.full_kl_gib"),
        lambda run: run.actor.use_kl_loss,
        "there is no KL in the loss",
        "actor.use_kl_loss=true",
    ),
    Switch(
        ("actor.full_kl_gib",),
        lambda run: run.actor.kl_loss_type is KlPenalty.full,
        "no logits of the reference are kept",
        "actor.kl_loss_type=full",
    ),
    Switch(
        ("actor.clip_ratio",),
        lambda run: (
            isinstance(run.actor, ClippedConfig)
            and (run.actor.clip_ratio_low is None or run.actor.clip_ratio_high is None)
        ),
        "actor.clip_ratio_low and actor.clip_ratio_high are both there instead of it",
        "these two",
    ),
    Switch(
        ("actor.allow_stale_updates",),
        lambda run: policy_loss(run.actor.loss_mode).updates_per_batch is not None,
        "the loss has a ratio, which takes care of several updates of a batch",
        "actor.loss_mode=policy_gradient",
    ),
    Switch(
        ("rollout.lora",),
        lambda run: run.actor.lora.rank > 0,
        "there are no adapters",
        "actor.lora.rank=32",
    ),
    Switch(
        ("rollout.allow_uncorrected",),
        lambda run: run.rollout.quantization is not Quantization.none,
        "engines hold plain weights",
        "rollout.quantization=fp8_block",
    ),
    Switch(
        ("algorithm.whiten_advantages",),
        lambda run: not estimator(run.algorithm.adv_estimator).whitens,
        "the estimator whitens its advantages by itself",
        "another estimator",
    ),
    Switch(
        ("algorithm.whiten_advantages",),
        lambda run: run.algorithm.adv_estimator != NO_REWARD,
        "every advantage is 0",
        "another estimator",
    ),
    Switch(
        (
            "algorithm.filter_groups.max_num_gen_batches",
            "algorithm.filter_groups.metric",
            "algorithm.filter_groups.lower",
            "algorithm.filter_groups.upper",
        ),
        lambda run: run.algorithm.filter_groups.enable,
        "no groups are filtered",
        "algorithm.filter_groups.enable=true",
    ),
    Switch(
        (
            "algorithm.rollout_correction.level",
            "algorithm.rollout_correction.mode",
            "algorithm.rollout_correction.upper",
            "algorithm.rollout_correction.lower",
            "algorithm.rollout_correction.batch_normalize",
        ),
        lambda run: run.algorithm.weighs,
        "nothing weighs the loss",
        "algorithm.off_policy=decoupled",
    ),
    Switch(
        ("algorithm.rollout_correction.lower",),
        lambda run: run.algorithm.rollout_correction.mode is not CorrectionMode.truncate,
        "truncation has no lower bound",
        "algorithm.rollout_correction.mode=mask",
    ),
    Switch(
        ("algorithm.rollout_correction.reject_upper", "algorithm.rollout_correction.reject_lower"),
        lambda run: run.algorithm.rollout_correction.reject is not Rejection.none,
        "nothing is rejected",
        "algorithm.rollout_correction.reject=seq_mean_k1",
    ),
    Switch(
        ("algorithm.rollout_correction.reject_lower",),
        lambda run: run.algorithm.rollout_correction.reject.bounds_ratio,
        "k2 and k3 are never negative, and bounded from above alone",
        "algorithm.rollout_correction.reject=seq_mean_k1",
    ),
    Switch(
        ("algorithm.masked_in_baseline",),
        lambda run: run.algorithm.mask_truncated,
        "no response is masked",
        "algorithm.mask_truncated=true",
    ),
    Switch(
        ("algorithm.masked_in_baseline",),
        lambda run: estimator(run.algorithm.adv_estimator).compares or run.algorithm.filter_groups.enable,
        "neither the estimator nor a filter compares responses",
        "algorithm.filter_groups.enable=true",
    ),
    Switch(
        ("algorithm.masked_in_baseline",),
        lambda run: (
            estimator(run.algorithm.adv_estimator).compares
            or not estimator(run.algorithm.adv_estimator).tells_signal
            or run.algorithm.filter_groups.lower is not None
            or run.algorithm.filter_groups.upper is not None
        ),
        "each response is trained by its own score, and no mean of a group is bounded",
        "algorithm.filter_groups.lower=0.6",
    ),
    Switch(
        ("algorithm.masked_in_baseline", "algorithm.whiten_advantages", "algorithm.distill."),
        lambda run: estimator(run.algorithm.adv_estimator).scope is not Scope.pair,
        "pairs have no baseline, and no advantages",
        "another estimator",
    ),
    Switch(
        ("algorithm.distill.divergence", "algorithm.distill.jsd_beta"),
        lambda run: run.algorithm.distill.coef > 0,
        "there is no teacher",
        "algorithm.distill.coef=1",
    ),
    Switch(
        ("algorithm.distill.jsd_beta",),
        lambda run: run.algorithm.distill.divergence is Divergence.jensen_shannon,
        "nothing is mixed",
        "algorithm.distill.divergence=jensen_shannon",
    ),
    Switch(
        ("reward.code.first_cases",),
        lambda run: run.reward.code.continuous,
        "all test cases must pass",
        "reward.code.continuous=true",
    ),
    Switch(
        ("reward.overlong.length", "reward.overlong.penalty_factor"),
        lambda run: run.reward.overlong.enable,
        "long responses are not punished",
        "reward.overlong.enable=true",
    ),
    Switch(
        tuple(f"reward.judge.{each.name}" for each in fields(JudgeConfig) if each.name not in ("address", "path")),
        lambda run: run.reward.judge.key is not None,
        "there is no judge",
        "reward.judge.address=http://HOST:8000/v1, or reward.judge.path=DIR",
    ),
    Switch(
        tuple(f"reward.judge.{name}" for name in ("model", *WAY)),
        lambda run: run.reward.judge.address is not None,
        "the judge is behind no address",
        "reward.judge.address=http://HOST:8000/v1",
    ),
    Switch(
        ("reward.judge.engines.", "reward.judge.seed"),
        lambda run: run.reward.judge.path is not None,
        "the run starts no engines for a judge",
        "reward.judge.path=DIR",
    ),
)


def switches() -> tuple[Switch, ...]:
    """All switches: those of the roles' groups, derived from the table of roles, then ``SWITCHES``."""
    return (*(switch for role in ROLES.values() if role.config is not None for switch in _of_role(role)), *SWITCHES)


def _of_role(role: Role) -> Iterator[Switch]:
    """The switches of a role's group: a run reads it if it has the role, and some of its keys only if it trains it."""
    name = role.name
    needed_by = [each.name for each in estimators().values() if name in each.role_names]
    remedy = f"{role.weights}=DIR" if role.on_request else f"{ESTIMATOR_KEY}={' or '.join(needed_by)}"
    if name == TEACHER:
        remedy = "algorithm.distill.coef=1"
    if not role.publishes:
        yield Switch((f"{name}.",), lambda run: name in run.roles, f"there is no {name}", remedy)

    def where(test: Callable[[RunConfig], bool]) -> Callable[[RunConfig], bool]:
        """``test`` where there is such a group; else the switch above says enough."""
        return lambda run: name not in run.roles or test(run)

    yield Switch(
        (f"{name}.moe.flex_backend",),
        where(lambda run: run.role_config(role).moe.dispatcher is Dispatcher.flex),
        f"{name}.moe.dispatcher sends tokens without it",
        f"{name}.moe.dispatcher=flex",
    )
    yield from _of_adapters(role)
    if not role.trains:
        trains = (
            "optim.",
            "recompute",
            "max_nonfinite_steps",
            "overlap_grad_reduce",
            "overlap_offload",
            "gradient_accumulation_fusion",
            "tp_comm_overlap",
        )
        keys = tuple(f"{name}.{key}" for key in trains)
        yield Switch(keys, lambda run: False, f"the {name} is not trained", "it for a role that is")
        return
    yield Switch(
        (f"{name}.overlap_offload",),
        lambda run: run.trainer.placement is Placement.colocated,
        "the trainer has devices of its own and moves nothing to host memory",
        "trainer.placement=colocated",
    )
    yield Switch(
        (f"{name}.loss_agg_constant",),
        where(lambda run: run.trained_config(role).loss_agg_mode is LossAggregation.sum_over_constant),
        f"{name}.loss_agg_mode divides by no constant",
        f"{name}.loss_agg_mode=sum_over_constant",
    )
    yield Switch(
        (f"{name}.shuffle",),
        where(lambda run: run.trained_config(role).ppo_epochs > 1),
        "there is one pass over the samples, and the second is the first to be shuffled",
        f"{name}.ppo_epochs=2",
    )


def _of_adapters(role: Role) -> Iterator[Switch]:
    if role.config is None or not issubclass(role.config, AdaptedConfig):
        return

    def adapts(run: RunConfig) -> bool:
        if role.name not in run.roles:
            return True  # another switch says enough
        config = run.role_config(role)
        return isinstance(config, AdaptedConfig) and config.lora.rank > 0

    keys = tuple(f"{role.name}.lora.{each.name}" for each in fields(LoraConfig) if each.name != "rank")
    yield Switch(keys, adapts, "there are no adapters", f"{role.name}.lora.rank=32")


def unread_violations(run: RunConfig) -> list[Violation]:
    """A violation for each key of ``run.written`` that nothing in ``run`` reads."""
    return [violation for key in sorted(run.written) if (violation := _violation(run, key))]


def why_unread(run: RunConfig, key: str) -> list[tuple[str, str]]:
    """(problem, remedy) for each reason why ``run`` does not read ``key``; none if it does."""
    return [*_of_parts(run, key)] or [*_of_switches(run, key)]


def _violation(run: RunConfig, key: str) -> Violation | None:
    for problem, remedy in why_unread(run, key):
        value = run.absent[key] if key in run.absent else value_at(run, key)
        if isinstance(value, Unsound):
            return None  # its bounds are another violation
        shown = value.value if isinstance(value, Enum) else value
        return Violation(key, shown, f"is not read: {problem}", f"Leave it out, or write {remedy}")
    return None


def _of_switches(run: RunConfig, key: str) -> Iterator[tuple[str, str]]:
    for switch in switches():
        named = any(key == each or (each.endswith(".") and key.startswith(each)) for each in switch.keys)
        if named and not switch.on(run):
            yield switch.problem, switch.remedy


def _of_parts(run: RunConfig, key: str) -> Iterator[tuple[str, str]]:
    """(problem, remedy) if ``key`` is read by other estimators or losses, but not by the chosen one."""
    chosen: tuple[tuple[str, Estimator | PolicyLoss, list[Estimator | PolicyLoss]], ...] = (
        (ESTIMATOR_KEY, estimator(run.algorithm.adv_estimator), [*estimators().values()]),
        (LOSS_KEY, policy_loss(run.actor.loss_mode), [*policy_losses().values()]),
    )
    for part_key, part, others in chosen:
        readers = [other.name for other in others if _has(other, key)]
        if readers and not _has(part, key):
            yield f"{part_key}={part.name} has no use for it", f"{part_key}={' or '.join(readers)}"


def _has(part: Estimator | PolicyLoss, key: str) -> bool:
    return any(f"{key}.".startswith(f"{own}.") for own in part.own_keys)
