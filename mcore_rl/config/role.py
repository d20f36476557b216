"""The record of a role, such as actor or critic.  ``role_table.py`` has the table of all roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from mcore_rl.config.stages import ADVANTAGES, INPUTS, Function, Pass, StepStage, Update, load_function

if TYPE_CHECKING:
    from mcore_rl.config.roles import RoleConfig


class Head(Enum):
    """The output of a model.  ``lm``: logits over the vocabulary.  ``value``: one number per token, the value head's.

    ``hidden``: the last hidden states, after the final norm; the model has no output projection then.
    There is no scalar head (one number per sequence): a reward model's score is the value at the last token
    (``data/scored_answers.py``).
    """

    lm = "lm"
    value = "value"
    hidden = "hidden"


@dataclass(frozen=True)
class Never:
    """Frozen weights stay as they were at the start of the run."""


@dataclass(frozen=True)
class Every:
    """Frozen weights become the trained ones after every ``steps`` steps (SPPO, arXiv:2405.00675; SPIN, 2401.01335)."""

    steps: int


@dataclass(frozen=True)
class ExponentialAverage:
    """After each step, frozen weights become ``decay`` times themselves plus ``1 - decay`` times the trained ones.

    The average is of the weights that the forward pass reads, and is kept in float32; to score, it is rounded to their
    dtype.
    """

    decay: float


def nothing(role: Role, run: Any) -> Sequence[StepStage]:
    """The stages of a role that a step does not touch."""
    return ()


Moves = Never | Every | ExponentialAverage


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model's part in a run.  A new role needs only such a row, and a loss function if it is trained.

    name: names its configuration group, its directory in checkpoints, its logs and its metrics.
    head: the output of its model.
    weights: the configuration key that names the Hugging Face checkpoint of its first weights; if that key is null,
    they are those of ``model.path``.
    config: the dataclass of its configuration group ``NAME.*``; the row creates this group.
    shares: the role in whose processes it runs, as a snapshot of that role's weights; it then has no configuration
    group, and neither ``weights`` nor ``config``.
    trains: whether it has an optimizer.
    publishes: whether the rollout engines sample with its weights.  This holds for one trained role of a run, which is
    scored first and trained last.
    on_request: True if writing its ``weights`` key also adds it to a run; False if only the algorithm does.
    stages: ``(role, RunConfig) -> stages`` of a step, made by ``scores``, ``copy_scores`` and ``update``; a field that
    one makes and another reads ties them (config/step_plan.py).
    keeps_copy: whether a frozen copy of the weights is kept beside the trained ones, as PRIME's reference is
    (arXiv:2502.01456).
    loss: ``(config) -> RoleLoss`` (algorithms/role_loss.py), or its ``module:name``.
    moves: when frozen weights, of a snapshot or a frozen copy, take over the trained ones of the same processes.
    phase: names its scoring pass in ``time/PHASE``; its updates are ``update_NAME``.  A role of a user's file leaves it
    out: it is ``NAME_scores`` then, which metrics know by its form.
    """

    name: str
    head: Head = Head.lm
    weights: str | None = None
    config: type[RoleConfig] | None = None
    shares: str | None = None
    trains: bool = False
    publishes: bool = False
    on_request: bool = False
    stages: Callable[[Role, Any], Sequence[StepStage]] = nothing
    keeps_copy: bool = False
    loss: Function | None = None
    moves: Moves = Never()
    phase: str = ""

    def __post_init__(self) -> None:
        own = self.weights is not None and self.config is not None
        assert own != (self.shares is not None), f"{self.name} has weights and a configuration, or shares another's"
        assert self.trains == (self.loss is not None), f"{self.name} has a loss where it is trained"
        assert self.trains or not self.keeps_copy, f"{self.name} is frozen: a copy of it would say the same"
        follows = self.shares is not None or self.keeps_copy
        assert follows or isinstance(self.moves, Never), f"{self.name} has no frozen weights beside trained ones"
        object.__setattr__(self, "phase", self.phase or f"{self.name}_scores")

    @property
    def group(self) -> str:
        """The name of the role whose processes and configuration group it uses: ``shares``, or its own."""
        return self.shares or self.name

    @property
    def snapshot(self) -> str | None:
        """The name of its frozen weights in those processes; None if it has none."""
        if self.shares is not None:
            return self.name
        return f"{self.name}_copy" if self.keeps_copy else None

    def scores(self, *makes: str, reads: Sequence[str] = (), sampled: bool = True) -> Pass:
        """Its pass with its own weights: the live ones, or those of the snapshot that it is."""
        return Pass(
            role=self.name,
            group=self.group,
            weights=self.name if self.shares is not None else None,
            makes=makes,
            reads=(*INPUTS, *reads),
            phase=self.phase,
            sampled=sampled,
        )

    def copy_scores(self, *makes: str, sampled: bool = True) -> Pass:
        """The pass of its frozen copy."""
        assert self.keeps_copy, f"{self.name} keeps no copy"
        return replace(self.scores(*makes, sampled=sampled), weights=self.snapshot)

    def update(self, *reads: str, whole: bool = False, sampled: bool = True) -> Update:
        """Its optimizer steps.

        reads: the fields that its loss is given, beside tokens and mask.
        whole: it trains all tokens that the model drew, before there are advantages; else those that these leave.
        """
        told = reads if whole else (*reads, ADVANTAGES)
        return Update(role=self.name, reads=(*INPUTS, *told), phase=self.update_phase, sampled=sampled)

    def make_loss(self, config: RoleConfig) -> Any:
        """Its ``RoleLoss``, with the settings of its configuration group."""
        assert self.loss is not None, f"{self.name} is not trained"
        return load_function(self.loss)(config)

    @property
    def update_phase(self) -> str:
        """The name of its updates in ``time/PHASE``."""
        return f"update_{self.name}"


def moves_after(moves: Moves, step: int) -> bool:
    """Whether frozen weights change after ``step`` (counted from 1)."""
    match moves:
        case Never():
            return False
        case Every(steps):
            return step % steps == 0
        case ExponentialAverage():
            return True
