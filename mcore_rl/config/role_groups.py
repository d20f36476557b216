"""A configuration with one group per role: which roles a run has, their groups, and where their weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Self, get_type_hints

from mcore_rl.config.algorithm_object import ACTOR
from mcore_rl.config.data import ImagesConfig
from mcore_rl.config.names import has_key
from mcore_rl.config.role import Role
from mcore_rl.config.roles import BY_SOURCE, RoleConfig, SeeingConfig, TeacherConfig, TrainedConfig
from mcore_rl.config.trainer import PolicyModelConfig, TrainerConfig
from mcore_rl.ground.errors import Violation

POLICY = "model.path"
MODEL_VIEW = "model"  # in the run directory: links to the policy's checkpoint beside its changed config.json


class RoleGroups:
    """Base class of the configurations of ``mcore-rl train`` and ``sft``, which have one group per role."""

    model: PolicyModelConfig
    trainer: TrainerConfig

    @property
    def sees_pictures(self) -> bool:
        """Whether its models are given the pictures of rows."""
        raise NotImplementedError

    @property
    def role_rows(self) -> tuple[Role, ...]:
        """The roles of the run, in the order of the table."""
        raise NotImplementedError

    @property
    def group_rows(self) -> tuple[Role, ...]:
        """The roles of the run that have processes of their own."""
        return tuple(role for role in self.role_rows if role.shares is None)

    def row(self, name: str) -> Role:
        """The role of that name."""
        return next(role for role in self.role_rows if role.name == name)

    @property
    def policy(self) -> Role:
        """The role with whose weights the rollout engines sample."""
        return next(role for role in self.role_rows if role.publishes)

    @property
    def trained_rows(self) -> tuple[Role, ...]:
        """The trained roles in the order of the table, but the policy last, since the others learn from its samples."""
        return tuple(sorted((role for role in self.role_rows if role.trains), key=lambda role: role.publishes))

    def snapshots_of(self, group: str) -> tuple[Role, ...]:
        """The roles of the run that have frozen weights in the processes of ``group``."""
        return tuple(role for role in self.role_rows if role.group == group and role.snapshot is not None)

    def role_config(self, role: Role) -> RoleConfig:
        """The configuration group of ``role``, or of the role whose processes it shares."""
        config = getattr(self, role.group)
        assert isinstance(config, RoleConfig)
        return config

    def trained_config(self, role: Role) -> TrainedConfig:
        """The configuration group of a trained role."""
        config = self.role_config(role)
        assert isinstance(config, TrainedConfig), f"{role.name} is not trained"
        return config

    def loss_of(self, role: Role) -> Any:
        """The ``RoleLoss`` of a trained role, with the settings of the run."""
        return role.make_loss(self.role_config(role))

    def weights_of(self, role: Role) -> str:
        """The Hugging Face checkpoint of the role's first weights; of several teachers, the first."""
        return next(iter(self.checkpoints_of(role).values()))

    def checkpoints_of(self, role: Role) -> dict[str, str]:
        """The Hugging Face checkpoints of the role's first weights, by the keys that name them.

        More than one, all of one architecture, if it has ``by_source``; the policy's if none is named.
        """
        named: dict[str, str] = self._named_by(role) or {POLICY: self.model.path}
        return {key: self.model_directory if each == self.model.path else each for key, each in named.items()}

    def _named_by(self, role: Role) -> dict[str, str]:
        """The weights that the role's own keys name."""
        if not has_key(self, role.group):
            return {}
        path = self._value_at(role.weights) if role.weights else None
        config = getattr(self, role.group)
        more = config.by_source if isinstance(config, TeacherConfig) else {}
        named = {f"{role.name}.{BY_SOURCE}.{source}": directory for source, directory in more.items()}
        return ({str(role.weights): path} if path else {}) | named

    @property
    def model_directory(self) -> str:
        """The policy's checkpoint as it is read: ``model.path`` or its copy; if it is changed, a view of it."""
        return str(Path(self.trainer.default_local_dir) / MODEL_VIEW) if self.model.is_changed else self.model.directory

    def has_weights(self, role: Role) -> bool:
        """Whether a key that names the role's first weights has a value."""
        return bool(self._named_by(role))

    def with_groups(self, groups: Mapping[str, RoleConfig]) -> Self:
        """A copy in which the given configuration groups of roles, by name, are replaced."""
        changes: dict[str, Any] = dict(groups)
        return replace(self, **changes)  # type: ignore[type-var]  # every subclass is a dataclass

    def _value_at(self, key: str) -> Any:
        return reduce(getattr, key.split("."), self)


def group_defaults(schema: type[Any]) -> dict[str, dict[str, Any]]:
    """Default values, by group, of the groups of roles beside the actor: mostly interpolations of other groups."""
    defaults = dict[str, dict[str, Any]]()
    if not issubclass(schema, RoleGroups):
        return defaults
    for name, kind in get_type_hints(schema).items():
        if name == ACTOR or not (isinstance(kind, type) and issubclass(kind, RoleConfig)):
            continue
        defaults[name] = {"device": "${trainer.device}", "precision": "${actor.precision}"}
        defaults[name]["share_prompts"] = "${actor.share_prompts}"
        defaults[name]["microbatch_tokens"] = 16384
        if issubclass(kind, TrainedConfig):
            defaults[name]["ppo_mini_batch_size"] = "${actor.ppo_mini_batch_size}"
    return defaults


def picture_violations(data: object, roles: Mapping[str, RoleConfig]) -> Iterator[Violation]:
    """Settings of pictures where models are given none, and microbatches that cannot hold any.

    data: the group ``data``.  roles: the configuration of each role with processes of its own, by name.
    """
    may_see = isinstance(data, ImagesConfig)
    if isinstance(data, ImagesConfig) and data.sees_pictures:
        for name, role in roles.items():
            if role.microbatch_sequences is not None:
                problem = "leaves sequences unpacked, and those with pictures are packed"
                remedy = f"Write {name}.microbatch_tokens=16384, say, in its place"
                yield Violation(f"{name}.microbatch_sequences", role.microbatch_sequences, problem, remedy)
        return
    problem = "is not read: the model is given no pictures"
    remedy = "Leave it out, or write data.image_key=images, say" if may_see else "Leave it out"
    for name, role in roles.items():
        if role.microbatch_patches is not None:
            yield Violation(f"{name}.microbatch_patches", role.microbatch_patches, problem, remedy)
        if isinstance(role, SeeingConfig) and role.vision is not None:
            yield Violation(f"{name}.vision", role.vision.value, problem, remedy)
