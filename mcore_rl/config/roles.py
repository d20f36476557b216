"""The configuration groups of roles: engine settings, layout, and the settings of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any

from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.bounds import (
    CrossCheck,
    InputModel,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check,
)
from mcore_rl.config.engine import EngineConfig, OptimizerKind, engine_rules
from mcore_rl.config.lora import LoraConfig, lora_violations
from mcore_rl.config.megatron_fields import megatron_violations
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.errors import Violation


class LossAggregation(Enum):
    """How the losses of tokens become one number.

    ``token_mean``: the mean over all trained tokens of the minibatch.  ``seq_mean_token_sum``, ``seq_mean_token_mean``:
    the mean over sequences of the sums or means over their tokens.  ``sum_over_constant``: the sum over all tokens,
    divided by the number of sequences times ``loss_agg_constant`` (arXiv:2503.20783).
    """

    token_mean = "token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_mean = "seq_mean_token_mean"
    sum_over_constant = "sum_over_constant"


class RouterReplay(Enum):
    """Whose choice of experts the policy's updates repeat; the names of the papers.

    ``off``: every pass chooses its own.  ``r2``: the trainer's, as the log-prob pass before the updates made it
    (arXiv:2507.18071, section 5.3).  ``r3``: the sampler's, in the log-prob pass too (arXiv:2510.11370).
    """

    off = "off"
    r2 = "r2"
    r3 = "r3"


@dataclass(kw_only=True)
class RoleConfig(EngineConfig):
    """The configuration group ``NAME.*`` of a role NAME with processes of its own: engine settings and layout."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def rules(self, key: str) -> list[CrossCheck[Any]]:
        """What finds contradictions between its settings.  key: the group's name."""
        return [
            partial(engine_rules, prefix=f"{key}."),
            lambda group: megatron_violations(group.megatron, f"{key}.megatron"),
        ]

    def violations(self, key: str) -> list[Violation]:
        """Every violation within the group.  key: the group's name."""
        return check(self, self.rules(key), f"{key}.")


@dataclass(kw_only=True)
class FrozenModelConfig(RoleConfig):
    """A frozen model beside the policy, such as a teacher.  path: its weights; None is the actor's first weights."""

    path: InputModel | None = None


@dataclass(kw_only=True)
class TeacherConfig(FrozenModelConfig):
    """The teacher of on-policy distillation, or several of one architecture, chosen by a row's data source.

    path: teaches all rows whose data source is not in ``by_source``; None: there are no such rows.
    by_source: data source -> the weights that teach its rows, as ``{openai/gsm8k: DIR, math: OTHER}``.
    """

    by_source: dict[str, InputModel] = field(default_factory=dict)


@dataclass(kw_only=True)
class AdaptedConfig(RoleConfig):
    """A role that trains its weights, or adapters beside them.  lora: see ``LoraConfig``."""

    lora: LoraConfig = field(default_factory=LoraConfig)

    def rules(self, key: str) -> list[CrossCheck[Any]]:
        """As ``RoleConfig.rules``."""
        return [*super().rules(key), partial(_lora_violations, key=key)]


def _lora_violations(config: AdaptedConfig, key: str) -> Iterator[Violation]:
    yield from lora_violations(config.lora, f"{key}.lora.")
    if config.lora.rank and config.megatron.get("moe_shared_expert_overlap"):
        problem = "calls the parts of shared experts one by one, past their adapters"
        yield Violation(
            f"{key}.megatron.moe_shared_expert_overlap", True, problem, f"Leave it out with {key}.lora.rank"
        )
    if config.lora.rank and config.optim.optimizer is OptimizerKind.muon:
        problem = f"would make each factor of an adapter orthogonal, and not what {key}.lora adds to a weight"
        yield Violation(f"{key}.optim.optimizer", "muon", problem, "Write adamw, or train all weights")


class TowerTraining(Enum):
    """Whether the vision tower of a model that sees pictures learns (``trained``) or stays as it is (``frozen``)."""

    trained = "trained"
    frozen = "frozen"


@dataclass(kw_only=True)
class SeeingConfig(AdaptedConfig):
    """A role that may be given pictures (``data.image_key``).

    vision: see ``TowerTraining``; None: trained, or frozen beside adapters.
    """

    vision: TowerTraining | None = None

    @property
    def trains_tower(self) -> bool:
        """Whether the tower learns: ``vision``, or what it means where it is not written."""
        return not self.lora.rank if self.vision is None else self.vision is TowerTraining.trained

    def rules(self, key: str) -> list[CrossCheck[Any]]:
        """As ``RoleConfig.rules``."""
        return [*super().rules(key), partial(_tower_violations, key=key)]


def trains_tower(config: EngineConfig) -> bool:
    """Whether a vision tower of a role with these settings learns, if it has one."""
    return isinstance(config, SeeingConfig) and config.trains_tower


def _tower_violations(config: SeeingConfig, key: str) -> Iterator[Violation]:
    if config.vision is TowerTraining.trained and config.lora.rank:
        problem = f"and {key}.lora.rank={config.lora.rank} trains adapters alone, which the tower has none of"
        yield Violation(f"{key}.vision", "trained", problem, "Leave it out, or train all weights")


@dataclass(kw_only=True)
class TrainedConfig(SeeingConfig):
    """A role that is trained.

    ppo_mini_batch_size: prompts per optimizer step, with all of their samples.
    ppo_epochs: passes over the samples of a step.
    shuffle: shuffle the samples before the second and later passes.
    loss_agg_mode: see ``LossAggregation``.
    loss_agg_constant: the divisor of ``sum_over_constant``; None is ``data.max_response_length``.
    """

    ppo_mini_batch_size: PositiveInt = 256
    ppo_epochs: PositiveInt = 1
    shuffle: bool = True
    loss_agg_mode: LossAggregation = LossAggregation.token_mean
    loss_agg_constant: PositiveFloat | None = None


@dataclass(kw_only=True)
class TrainedModelConfig(TrainedConfig):
    """A trained model beside the policy.  path: its first weights; None is the actor's."""

    path: InputModel | None = None


@dataclass(kw_only=True)
class ActorConfig(TrainedConfig):
    """The policy that is trained.  The file of a policy loss adds its own settings.

    allow_stale_updates: permit several updates per batch with a loss that has no ratio (``policy_gradient``, ``gpg``).
    All but the first then treat samples of an older policy as samples of the current one.
    loss_mode: the policy loss's name in docs/algorithms.md, or ``FILE.py:NAME`` of a file of your own.
    entropy_coeff: coefficient of the entropy bonus.
    use_kl_loss: add ``kl_loss_coef`` times the KL to the reference, estimated by ``kl_loss_type``, to the loss.
    kl_loss_coef: the coefficient of that KL.
    full_kl_gib: the most host memory that a process takes for the reference's logits of a minibatch, with
    ``kl_loss_type=full``.
    router_replay: see ``RouterReplay``; of a mixture of experts alone.
    """

    allow_stale_updates: bool = False
    loss_mode: str = "ppo_clip"
    entropy_coeff: NonNegativeFloat = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: KlPenalty = KlPenalty.k3
    full_kl_gib: NonNegativeFloat = 8.0
    router_replay: RouterReplay = RouterReplay.off

    @property
    def with_full_kl(self) -> bool:
        """Whether the loss has the exact KL to the reference."""
        return self.use_kl_loss and self.kl_loss_type is KlPenalty.full


@dataclass(kw_only=True)
class CriticConfig(TrainedModelConfig):
    """The value model of PPO: a worker group of its own, in a layout of its own.

    The value head starts as the checkpoint has it (``score.weight``); if it has none, at random, normal with a standard
    deviation of 0.02.

    cliprange_value: the value loss clips values to within this distance of the old ones; 0 is no clipping.
    """

    cliprange_value: NonNegativeFloat = 0.5


BY_SOURCE = "by_source"  # the key that names teachers by a row's data source
REST = "teacher.path"  # stands for the data sources without a teacher of their own; no data source has such a name


@dataclass(frozen=True)
class Teachers:
    """The teachers of a run.

    rest: the checkpoint that teaches rows of any other data source; None: there are none.
    by_source: data source -> the checkpoint that teaches its rows.

    What teaches a row is one of ``names``.  Several of these may stand for one teacher, one of ``directories``.
    """

    rest: str | None
    by_source: Mapping[str, str]

    @cached_property
    def _named(self) -> dict[str, str]:
        return ({} if self.rest is None else {REST: self.rest}) | dict(self.by_source)

    @property
    def names(self) -> tuple[str, ...]:
        """Data sources, and ``REST`` before them if there is a teacher of the rest."""
        return tuple(self._named)

    @property
    def directories(self) -> tuple[str, ...]:
        """Each checkpoint once.  The first is the teacher's live weights, the others are snapshots beside it."""
        return tuple(dict.fromkeys(self._named.values()))

    @property
    def numbers(self) -> tuple[int, ...]:
        """For each of ``names``, the number of its teacher among ``directories``."""
        return tuple(self.directories.index(directory) for directory in self._named.values())

    @property
    def are_several(self) -> bool:
        """Whether the data source of a row decides anything."""
        return len(self.names) > 1

    def name_of(self, source: str) -> int:
        """The place among ``names`` of what teaches rows of ``source``; preparation has seen that somebody does."""
        names = self.names
        return names.index(source if source in self.by_source else REST)

    def untaught(self, sources: Sequence[str]) -> list[str]:
        """Those of ``sources`` whose rows nobody teaches."""
        return [] if self.rest is not None else [each for each in dict.fromkeys(sources) if each not in self.by_source]


def snapshot_of(number: int) -> str | None:
    """The snapshot with the weights of a teacher, by its number; None: they are the live ones."""
    return f"teacher_{number}" if number else None
