"""What a role is: one record.  The table of the roles that there are is ``role_table.py``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_rl.config.roles import RoleConfig


class Head(Enum):
    """What a model ends in.  ``lm``: logits over the vocabulary.  ``value``: one number a token, the value head's.

    A scalar head, one number a sequence, is not among them until something trains or scores with it: the reward model
    of ``reward_model.*`` runs in vLLM.
    """

    lm = "lm"
    value = "value"


@dataclass(frozen=True)
class Never:
    """Frozen weights stay as the run began with them."""


@dataclass(frozen=True)
class Every:
    """Frozen weights become the trained ones after every ``steps`` steps (SPPO, arXiv:2405.00675; SPIN, 2401.01335)."""

    steps: int


@dataclass(frozen=True)
class ExponentialAverage:
    """After each step, frozen weights become ``decay`` times themselves plus ``1 - decay`` times the trained ones.

    The average is kept in float32, of the weights that the forward pass reads; it is rounded to their type to score.
    """

    decay: float


Moves = Never | Every | ExponentialAverage


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model's part in a run.  A row is all that a role needs, beside its loss function.

    name: of its configuration group, its directory in checkpoints, its logs and its metrics.
    head: what its model ends in.
    weights: the configuration key that names the Hugging Face checkpoint of its first weights; where that is null,
    they are ``model.path``'s.
    config: the dataclass of its configuration group ``NAME.*``, which is there because the row is.
    shares: the role whose processes it runs in, as a snapshot of that role's weights; then it has no group, and
    neither ``weights`` nor ``config``.
    trains: whether it has an optimizer.
    publishes: whether the rollout engines draw with its weights.  One trained role of a run does; it is scored first,
    and trained last.
    on_request: whether a run has it where its ``weights`` key is written, and not only where the algorithm needs it.
    makes: fields of the batch, ``*_T``, that a pass over the samples fills before anything is trained; the first is of
    its log-probs or values.  ``entropy_S``: entropies besides, for a metric.
    copy_makes: the field that a frozen copy of a trained role fills, PRIME's reference say (arXiv:2502.01456).
    reads: fields that its loss is given, beside tokens and mask.  ``advantages_T`` are those of the algorithm.
    read_by: roles whose losses are given what this one makes.
    loss: ``module:function`` of ``(config) -> RoleLoss`` (algorithms/role_loss.py).
    moves: when frozen weights, a snapshot's or a frozen copy's, follow the trained ones of the same processes.
    phase: of its pass over the samples, in ``time/PHASE``; that of its updates is ``update_NAME``.
    """

    name: str
    head: Head = Head.lm
    weights: str | None = None
    config: type[RoleConfig] | None = None
    shares: str | None = None
    trains: bool = False
    publishes: bool = False
    on_request: bool = False
    makes: tuple[str, ...] = ()
    copy_makes: str | None = None
    reads: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    loss: str | None = None
    moves: Moves = Never()
    phase: str = ""

    def __post_init__(self) -> None:
        own = self.weights is not None and self.config is not None
        assert own != (self.shares is not None), f"{self.name} has weights and a configuration, or shares another's"
        assert self.trains == (self.loss is not None), f"{self.name} has a loss where it is trained"
        assert self.trains or self.copy_makes is None, f"{self.name} is frozen: a copy of it would say the same"
        follows = self.shares is not None or self.copy_makes is not None
        assert follows or isinstance(self.moves, Never), f"{self.name} has no frozen weights beside trained ones"
        object.__setattr__(self, "phase", self.phase or f"{self.name}_scores")

    @property
    def group(self) -> str:
        """The role whose processes and configuration group it uses: its own, or those that it shares."""
        return self.shares or self.name

    @property
    def snapshot(self) -> str | None:
        """The name of its frozen weights in those processes; None where it has none."""
        if self.shares is not None:
            return self.name
        return None if self.copy_makes is None else f"{self.name}_copy"

    def make_loss(self, config: RoleConfig) -> Any:
        """Its loss, a ``RoleLoss``, of its configuration group."""
        assert self.loss is not None, f"{self.name} is not trained"
        module, _, name = self.loss.partition(":")
        return getattr(import_module(module), name)(config)

    @property
    def update_phase(self) -> str:
        """Of its updates, in ``time/PHASE``."""
        return f"update_{self.name}"


def moves_after(moves: Moves, step: int) -> bool:
    """Whether frozen weights move after ``step``."""
    match moves:
        case Never():
            return False
        case Every(steps):
            return step % steps == 0
        case ExponentialAverage():
            return True
