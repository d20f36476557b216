"""What ``actor.router_replay`` needs of a run, a model and an engine (docs/router_replay.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mcore_rl.config.algorithm import OffPolicy
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.roles import RouterReplay
from mcore_rl.config.step_plan import why_scored
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig

KEY = "actor.router_replay"


def replay_violations(run: RunConfig) -> Iterator[Violation]:
    """What contradicts ``actor.router_replay``, not looking at a model."""
    mode = run.actor.router_replay
    if mode is RouterReplay.r2 and run.algorithm.off_policy is OffPolicy.bypass:
        problem = (
            "repeats the experts of the log-prob pass, and with algorithm.off_policy=bypass the ratio is to the sampler"
        )
        yield Violation(KEY, mode.value, problem, f"Write {KEY}=r3, or algorithm.off_policy=recompute")
    elif mode is RouterReplay.r2 and why_scored(run) is None:
        problem = "repeats the experts of the log-prob pass, and a step of one update needs no such pass"
        yield Violation(KEY, mode.value, problem, f"Write {KEY}=off, or a smaller actor.ppo_mini_batch_size")
    if mode is RouterReplay.r3 and not run.rollout.enable_prefix_caching:
        problem = f"vLLM records experts with prefix caching alone, and {KEY}=r3 needs them"
        yield Violation("rollout.enable_prefix_caching", False, problem, f"Write true, or {KEY}=off")


def replay_model_violations(run: RunConfig, model: ModelConfig, unrecorded: str | None) -> Iterator[Violation]:
    """Why ``model`` cannot replay what the run asks for.  unrecorded: why engines record no experts; None: they do."""
    mode = run.actor.router_replay
    if mode is not RouterReplay.off and model.moe is None:
        yield Violation(KEY, mode.value, "the model is dense: it has no routers", f"Write {KEY}=off")
    elif mode is RouterReplay.r3 and unrecorded is not None:
        yield Violation(KEY, mode.value, unrecorded, f"Write {KEY}=r2, or off")
