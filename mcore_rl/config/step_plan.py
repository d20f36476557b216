"""What a step does: its stages, in order, made from the configuration.

Roles and the advantage estimator contribute stages; each comes as soon as what it reads is there.  The loop runs the
list; the FLOP counter, the planner and the search count it.

Old log-probs are those of the weights before the step.  Where a step takes one update of the whole batch, its forward
pass has these weights: its own log-probs, detached, are the old ones, bit for bit, and a pass of their own is left out.
With ``algorithm.off_policy=bypass`` the sampler's stand for them, however many updates there are; then the forward pass
of the first minibatch says how trainer and sampler differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mcore_rl.config.algorithm import OffPolicy, Rejection
from mcore_rl.config.algorithm_object import TEACHER
from mcore_rl.config.algorithm_registry import estimator, policy_loss
from mcore_rl.config.stages import INPUTS, OUTCOME, OUTCOMES, TOKEN_REWARDS, Estimate, Pass, StepStage, Update, is_field
from mcore_rl.ground.errors import ConfigError, Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig

OLD_LOGPROBS = "old_logprobs_T"
# What no stage has to make.  A step begins with it, where the run has it; but an update that selects tokens makes the
# selection for itself, and old log-probs are the sampler's (``off_policy=bypass``) or its own where no pass makes them.
GIVEN = frozenset(
    {
        *INPUTS,
        "rollout_logprobs_T",
        "turn_rewards_T",
        "routing_TLK",
        "unrouted_T",
        OUTCOME,
        OUTCOMES,
        OLD_LOGPROBS,
        "selection_T",
    }
)
# What the estimation reads where the run has it.
ESTIMATED_FROM = (
    OLD_LOGPROBS,
    "ref_logprobs_T",
    "teacher_logprobs_T",
    "old_values_T",
    TOKEN_REWARDS,
)
FOR_METRICS = frozenset({OLD_LOGPROBS, "routing_TLK"})  # a pass may be there for these alone


def step_plan(run: RunConfig, *, trains_policy: bool = True) -> tuple[StepStage, ...]:
    """The stages of a step, in the order in which they run.

    trains_policy: False while a critic warms up.
    Raises ConfigError if a stage reads what none makes, makes what none reads, or waits for one that waits for it.
    """
    policy = run.policy.name
    before = list[StepStage]()
    after = list[StepStage]()
    for role in run.role_rows:
        for stage in role.stages(role, run):
            is_update = isinstance(stage, Update) and stage.role == policy
            (after if is_update else before).append(stage)
    if trains_policy and why_scored(run) is None:
        before = [stage for stage in before if not (isinstance(stage, Pass) and stage.role == policy)]
        after = [replace(stage, scores=True) if isinstance(stage, Update) else stage for stage in after]
    before += estimator(run.algorithm.adv_estimator).stages
    made = {name for stage in before for name in stage.makes}
    estimate = Estimate(reads=("rollout_logprobs_T", OUTCOMES, *(name for name in ESTIMATED_FROM if name in made)))
    _demand_sound(run, [*before, estimate, *after])
    stages = [*before, estimate, *after] if trains_policy else _read_here([*before, estimate])
    return _resting(run, _in_order(run, stages))


def why_scored(run: RunConfig) -> str | None:
    """Why each step of ``run`` scores its samples with the policy before the update; None: it does not.

    The policy's loss may read old log-probs, and metrics may; anything else that reads them, or a second update, needs
    the pass.
    """
    config = run.trained_config(run.policy)
    algorithm = run.algorithm
    if algorithm.rollout_correction.reject is not Rejection.none:
        return "rollout_correction.reject reads the ratio of trainer to sampler"
    if algorithm.off_policy is OffPolicy.bypass:
        return None
    reasons = {
        "a step has several updates": config.ppo_epochs > 1 or config.ppo_mini_batch_size < run.data.train_batch_size,
        "the KL is in the reward": algorithm.use_kl_in_reward,
        "the teacher is compared with them": algorithm.distill.in_advantages,
        "the ratio of trainer to sampler weighs the loss": algorithm.weighs,
        "the loss selects tokens of the whole step": policy_loss(run.actor.loss_mode).selection is not None,
        "truncated responses are measured, but not trained": algorithm.mask_truncated,
        "another stage reads them": _is_read(run, OLD_LOGPROBS),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def reads_outcomes(run: RunConfig) -> bool:
    """Whether a step needs to know which responses are right."""
    policy = run.policy
    return _is_read(run, OUTCOME) or any(OUTCOME in stage.reads for stage in policy.stages(policy, run))


def _is_read(run: RunConfig, name: str) -> bool:
    """Whether a stage of another role than the policy, or of the estimator, reads ``name``."""
    of_roles = [stage for role in run.role_rows if not role.publishes for stage in role.stages(role, run)]
    return any(name in stage.reads for stage in (*of_roles, *estimator(run.algorithm.adv_estimator).stages))


def _in_order(run: RunConfig, stages: Sequence[StepStage]) -> list[StepStage]:
    """Each stage as soon as all that it reads is made, in the given order where several could be next."""
    waiting = list(stages)
    placed = list[StepStage]()
    while waiting:
        ready = next((each for each in waiting if not _waits(each, waiting)), None)
        if ready is None:
            raise _refusal(run, f"stages wait for each other: {', '.join(sorted(map(_title, waiting)))}")
        waiting.remove(ready)
        placed.append(ready)
    return placed


def _waits(stage: StepStage, waiting: Iterable[StepStage]) -> bool:
    return any(other is not stage and not set(stage.reads).isdisjoint(other.makes) for other in waiting)


def _demand_sound(run: RunConfig, stages: Sequence[StepStage]) -> None:
    made = {name for stage in stages for name in stage.makes}
    read = {name for stage in stages for name in stage.reads}
    for stage in stages:
        _demand_told(run, stage)
        if missing := sorted(set(stage.reads) - made - GIVEN):
            raise _refusal(run, f"{_title(stage)} reads {', '.join(missing)}, which nothing in a step makes")
        unread = [name for name in stage.makes if is_field(name) and name not in read | FOR_METRICS]
        if unread and not isinstance(stage, Estimate):
            raise _refusal(run, f"{_title(stage)} makes {', '.join(unread)}, which nothing in a step reads")


def _demand_told(run: RunConfig, stage: StepStage) -> None:
    """Refuses a pass behind other prompts that makes more than numbers of tokens, or is a teacher's of several."""
    if not isinstance(stage, Pass) or stage.context is None:
        return
    if more := [name for name in stage.makes if name.endswith(("_MH", "_TLK"))]:
        raise _refusal(
            run, f"{_title(stage)} behind other prompts makes {', '.join(more)}, and not log-probs or values"
        )
    if stage.role == TEACHER:
        raise _refusal(run, f"{_title(stage)} behind other prompts has the name of the teachers' own; give it another")


def _read_here(stages: Sequence[StepStage]) -> list[StepStage]:
    """``stages`` without the passes that only the policy's update would have read."""
    read = {name for stage in stages for name in stage.reads} | FOR_METRICS
    return [stage for stage in stages if not isinstance(stage, Pass) or not read.isdisjoint(stage.makes)]


def _resting(run: RunConfig, stages: Sequence[StepStage]) -> tuple[StepStage, ...]:
    """Lets the processes of a trained role rest after their last pass, if no update follows in which they do."""
    trained = {role.name for role in run.trained_rows if not role.publishes}
    last = dict[str, StepStage]()
    for stage in stages:
        if isinstance(stage, Pass):
            last[stage.group] = stage
        elif isinstance(stage, Update):
            last[stage.role] = stage
    resting = [last[name] for name in trained]
    return tuple(replace(each, rests=True) if isinstance(each, Pass) and each in resting else each for each in stages)


def _title(stage: StepStage) -> str:
    match stage:
        case Pass():
            return f"a pass of {stage.role}"
        case Update():
            return f"the update of {stage.role}"
        case Estimate():
            return "the estimation of advantages"
        case _:
            name = stage.function
            return name.rpartition(":")[2] if isinstance(name, str) else name.__name__


def _refusal(run: RunConfig, problem: str) -> ConfigError:
    remedy = "Mend the stages of the algorithm or of the role (docs/algorithms.md)"
    return ConfigError([Violation("algorithm.adv_estimator", run.algorithm.adv_estimator, problem, remedy)])
