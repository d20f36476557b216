"""Settings of an estimator or a policy loss, each with the keys that it has of those that a test gives to all."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_registry import estimator, policy_loss
from mcore_rl.config.roles import ActorConfig
from mcore_rl.config.run import RunConfig, any_run_schema

T = TypeVar("T")


def algorithm_config(adv_estimator: str = "grpo", **values: Any) -> AlgorithmConfig:
    """The settings of ``adv_estimator``, with those of ``values`` that it has; another may have the rest."""
    return _chosen(estimator(adv_estimator).settings, "algorithm", values | {"adv_estimator": adv_estimator})


def actor_config(loss_mode: str = "ppo_clip", **values: Any) -> ActorConfig:
    """The settings of a policy trained by ``loss_mode``, with those of ``values`` that it has."""
    return _chosen(policy_loss(loss_mode).settings, "actor", values | {"loss_mode": loss_mode})


def any_run(**groups: Any) -> RunConfig:
    """A run of GRPO with the groups of all roles."""
    chosen = {"algorithm": algorithm_config(), "actor": actor_config()}
    return any_run_schema()(**(chosen | groups))


def _chosen(kind: type[T], group: str, values: dict[str, Any]) -> T:
    known = {each.name for each in fields(get_type_hints(any_run_schema())[group])}
    assert values.keys() <= known, values.keys() - known
    own = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # a class
    return kind(**{name: value for name, value in values.items() if name in own})
