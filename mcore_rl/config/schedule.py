"""The learning rates of a whole run: how many optimizer steps it has, and with that where warm-up and decay end.

A step of the run has several optimizer steps, one for each minibatch and pass.  How many steps a run has is known when
its data have been read, so that ``scheduled`` completes the configuration then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from mcore_rl.config.engine import OptimizerConfig, Schedule
from mcore_rl.config.role import Role
from mcore_rl.config.role_groups import RoleGroups
from mcore_rl.config.roles import TrainedConfig
from mcore_rl.ground.errors import Violation

R = TypeVar("R", bound=RoleGroups)


def num_updates(run: RoleGroups, role: Role, num_steps: int) -> int:
    """The optimizer steps of ``role`` in ``num_steps`` steps of the run: of sft one each.

    The policy takes none while ``trainer.critic_warmup`` lasts.
    """
    config = run.role_config(role)
    if not isinstance(config, TrainedConfig):
        return num_steps
    steps = num_steps - run.trainer.critic_warmup if role.publishes else num_steps
    batch: int = run.data.train_batch_size  # type: ignore[attr-defined]  # both commands have it
    return max(0, steps) * max(1, batch // config.ppo_mini_batch_size) * config.ppo_epochs


def of_length(optim: OptimizerConfig, length: int) -> OptimizerConfig:
    """``optim`` for a run of ``length`` optimizer steps: with numbers where it leaves them to the run."""
    total = optim.total_steps or max(1, length)
    warmup = math.ceil(total * optim.warmup_ratio) if optim.warmup_ratio else optim.lr_warmup_steps
    return replace(optim, total_steps=max(total, warmup + 1), lr_warmup_steps=warmup, warmup_ratio=0.0)


def scheduled(run: R, num_steps: int) -> R:
    """``run`` with the schedule of each trained role as it is for a run of ``num_steps`` steps."""
    groups = {}
    for role in run.role_rows:
        if role.trains:
            config = run.role_config(role)
            groups[role.name] = replace(config, optim=of_length(config.optim, num_updates(run, role, num_steps)))
    return run.with_groups(groups)


def schedule_violations(run: RoleGroups, num_steps: int) -> Iterator[Violation]:
    """Schedules that do not go with a run of ``num_steps`` steps."""
    for role in (each for each in run.role_rows if each.trains):
        optim = run.role_config(role).optim
        length = num_updates(run, role, num_steps)
        if optim.lr_schedule is Schedule.constant or not length:
            continue
        if not optim.total_steps:
            if length <= optim.lr_warmup_steps:
                problem = f"is no less than the run, {length:,} optimizer steps, and nothing is left to decay in"
                remedy = f"Write fewer, {role.name}.optim.warmup_ratio=0.1, or a longer run"
                yield Violation(f"{role.name}.optim.lr_warmup_steps", optim.lr_warmup_steps, problem, remedy)
        elif optim.total_steps < length and not optim.allow_early_end:
            at = optim.lr * optim.min_lr_ratio
            problem = f"ends the {optim.lr_schedule.value} schedule before the run, which has {length:,} optimizer "
            problem += f"steps: the last {length - optim.total_steps:,} have a learning rate of {at:g}"
            remedy = f"Leave it out: it follows from the run; or write {role.name}.optim.allow_early_end=true"
            yield Violation(f"{role.name}.optim.total_steps", optim.total_steps, problem, remedy)
