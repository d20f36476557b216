"""A configuration with one group for each role: which there are, which a run uses, and where weights come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import reduce
from typing import Any, Self, TypeVar

from mcore_rl.config.role import Role
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import RoleConfig, TrainedConfig
from mcore_rl.config.trainer import ModelPathConfig

T = TypeVar("T")


class RoleGroups:
    """What the configurations of ``mcore-rl train`` and ``sft`` have in common: roles, each with its group."""

    model: ModelPathConfig

    @property
    def role_rows(self) -> tuple[Role, ...]:
        """The roles of the run, in the order of the table."""
        raise NotImplementedError

    @property
    def group_rows(self) -> tuple[Role, ...]:
        """Those of them with processes of their own."""
        return tuple(role for role in self.role_rows if role.shares is None)

    @property
    def policy(self) -> Role:
        """The role whose weights the rollout engines draw with."""
        return next(role for role in self.role_rows if role.publishes)

    @property
    def trained_rows(self) -> tuple[Role, ...]:
        """Those of them that are trained, in that order: the policy last, since others learn from its samples."""
        return tuple(sorted((role for role in self.role_rows if role.trains), key=lambda role: role.publishes))

    def snapshots_of(self, group: str) -> tuple[Role, ...]:
        """Those of them with frozen weights in the processes of ``group``."""
        return tuple(role for role in self.role_rows if role.group == group and role.snapshot is not None)

    def role_config(self, role: Role) -> RoleConfig:
        """The configuration group of ``role``, or of the role whose processes it shares."""
        found = getattr(self, role.group)
        assert isinstance(found, RoleConfig)
        return found

    def trained_config(self, role: Role) -> TrainedConfig:
        """The configuration group of a role that is trained."""
        found = self.role_config(role)
        assert isinstance(found, TrainedConfig), f"{role.name} is not trained"
        return found

    def weights_of(self, role: Role) -> str:
        """The Hugging Face checkpoint of its first weights."""
        path: str | None = self._value_at(role.weights or "model.path")
        return path or self.model.path

    def has_weights(self, role: Role) -> bool:
        """Whether the key that names its first weights is written."""
        return role.weights is not None and bool(self._value_at(role.weights))

    def with_groups(self, groups: Mapping[str, RoleConfig]) -> Self:
        """The same with other configuration groups of roles, by name."""
        changes: dict[str, Any] = dict(groups)
        return replace(self, **changes)  # type: ignore[type-var]  # a dataclass, as whatever has groups

    def _value_at(self, key: str) -> Any:
        return reduce(getattr, key.split("."), self)


def with_role_groups(schema: type[T]) -> type[T]:
    """``schema``, not yet a dataclass, with a field for the configuration group of each row that it has none of."""
    for role in ROLES.values():
        if role.config is not None and role.name not in schema.__annotations__:
            schema.__annotations__[role.name] = role.config
            setattr(schema, role.name, field(default_factory=role.config))
    return schema


def group_defaults(schema: type[Any]) -> dict[str, dict[str, Any]]:
    """What the groups that ``with_role_groups`` made take from other groups, unless something else is written."""
    found = dict[str, dict[str, Any]]()
    if not issubclass(schema, RoleGroups):
        return found
    for role in ROLES.values():
        if role.config is None or role.publishes or role.name not in schema.__annotations__:
            continue
        found[role.name] = {"device": "${trainer.device}", "precision": "${actor.precision}"}
        found[role.name]["microbatch_tokens"] = 16384
        if role.trains:
            found[role.name]["ppo_mini_batch_size"] = "${actor.ppo_mini_batch_size}"
    return found
