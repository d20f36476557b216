"""The run as a user writes it: how long, on what, what is kept of it, and who is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.config.engine import Device
from mcore_rl.errors import Violation


class Logger(Enum):
    """Who is told of metrics, besides the run directory, which always is."""

    console = "console"
    wandb = "wandb"
    tensorboard = "tensorboard"


class ResumeMode(Enum):
    """``auto``: from the run directory's newest complete checkpoint, if there is one.  ``path``: from a given one."""

    auto = "auto"
    path = "path"
    off = "off"


class Placement(Enum):
    """``colocated``: trainer and rollout take turns on the same devices.  ``separate``: each has its own."""

    colocated = "colocated"
    separate = "separate"


@dataclass(kw_only=True)
class WatchdogConfig:
    """When a call of the workers counts as hung: each rank's phase and stacks are shown, and the run ends.

    limit_s: for any call, however long it took before.  factor: for one that was answered twice or more, times its
    longest so far, and least_s at least.  0 for ``limit_s``: nothing is ever taken to be hung.
    """

    limit_s: float = 7200.0
    factor: float = 20.0
    least_s: float = 300.0


@dataclass(kw_only=True)
class GuardConfig:
    """What raises an alarm, from means over ``window`` steps; 0 steps: nothing does.

    reward_drop: share of what the reward had gained that was lost again.  entropy_share: of the entropy at first, below
    which it collapsed.  max_logprob_diff: between sampler and trainer, nats.  max_kl: to the reference, nats; None is
    any.  max_clip_share: of responses that are cut off.  stop: an alarm ends the run, after a checkpoint.
    check_weights_freq: every tensor that the engines hold is compared with the trainer's in each update that it
    divides; 0 is the first update only.
    """

    window: int = 10
    reward_drop: float = 0.5
    entropy_share: float = 0.1
    max_logprob_diff: float = 0.1
    max_kl: float | None = None
    max_clip_share: float = 0.9
    stop: bool = False
    check_weights_freq: int = 0


@dataclass(kw_only=True)
class TrainerConfig:
    """The run.

    default_local_dir: the run directory.  total_epochs; total_training_steps: instead, where it is given.
    save_freq, test_freq: steps between checkpoints and between validations; 0 is never, but a checkpoint at the end.
    async_save: a checkpoint is written while the run goes on, from a copy in host memory.
    val_before_train, val_only.  max_to_keep: the newest checkpoints; None is all.  keep_every: those of steps that it
    divides are kept besides, and so is the best by validation.  critic_warmup: steps in which only the critic
    is trained.  nnodes, n_gpus_per_node: of the trainer; on CPU, processes.  device: of trainer and rollout.
    log_val_generations: validation samples shown to loggers.  save_rollouts: the samples of every step are kept.
    profile_steps: from 1, whose training is traced by torch's profiler.  timeout_s: of a collective.
    max_restarts: of rollout engines that die, in all; and, counted apart, of the run from its newest checkpoint when a
    training process dies.
    device_peak_tflops: what a device of the trainer can do in the actor's precision, TFLOP/s, for MFU; None is what its
    data sheet says, where it is known (parallel/peak_flops.py).
    """

    project_name: str = "mcore_rl"
    experiment_name: str = "run"
    default_local_dir: str = "runs/run"
    logger: list[Logger] = field(default_factory=lambda: [Logger.console])
    total_epochs: int = 1
    total_training_steps: int | None = None
    save_freq: int = 0
    test_freq: int = 0
    val_before_train: bool = True
    val_only: bool = False
    resume_mode: ResumeMode = ResumeMode.auto
    resume_from_path: str | None = None
    async_save: bool = True
    max_to_keep: int | None = None
    keep_every: int | None = None
    critic_warmup: int = 0
    nnodes: int = 1
    n_gpus_per_node: int = 1
    device: Device = Device.auto
    placement: Placement = Placement.colocated
    log_val_generations: int = 8
    save_rollouts: bool = True
    profile_steps: list[int] = field(default_factory=list)
    timeout_s: float = 600.0
    device_peak_tflops: float | None = None
    max_restarts: int = 3
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)

    @property
    def world_size(self) -> int:
        """Training processes."""
        return self.nnodes * self.n_gpus_per_node


def is_due(frequency: int, step: int, last_step: int) -> bool:
    """Every ``frequency`` steps, and at the last; never where it is 0."""
    return frequency > 0 and (step % frequency == 0 or step == last_step)


@dataclass(kw_only=True)
class ModelPathConfig:
    """path: a Hugging Face checkpoint directory.  tokenizer_path: where its tokenizer is; None is ``path``."""

    path: str = ""
    tokenizer_path: str | None = None


@dataclass(kw_only=True)
class RayInitConfig:
    """num_cpus: that Ray may use on this machine; None is all that this process may.

    address: of a running cluster; None starts one on this machine.  timeline_json_file: Ray's timeline, at the end.
    """

    num_cpus: int | None = None
    address: str | None = None
    timeline_json_file: str | None = None


def trainer_violations(trainer: TrainerConfig) -> list[Violation]:
    """Everything wrong in ``trainer`` by itself."""
    found = []
    for name in (
        "total_epochs",
        "total_training_steps",
        "max_to_keep",
        "keep_every",
        "nnodes",
        "n_gpus_per_node",
        "timeout_s",
    ):
        value = getattr(trainer, name)
        if value is not None and value <= 0:
            found.append(Violation(f"trainer.{name}", value, "must be positive", "Write 1 or more"))
    for name in ("save_freq", "test_freq", "critic_warmup", "log_val_generations", "max_restarts"):
        if getattr(trainer, name) < 0:
            found.append(
                Violation(f"trainer.{name}", getattr(trainer, name), "must not be negative", "Write 0 or more")
            )
    guards = trainer.guards
    for name in ("window", "check_weights_freq", "reward_drop", "entropy_share", "max_logprob_diff", "max_clip_share"):
        if not getattr(guards, name) >= 0:
            remedy = "Write 0 or more"
            found.append(Violation(f"trainer.guards.{name}", getattr(guards, name), "must not be negative", remedy))
    if guards.window == 1:
        remedy = "Write 2 or more, or 0 for no alarms"
        found.append(Violation("trainer.guards.window", 1, "of one step, there is no mean", remedy))
    watchdog = trainer.watchdog
    for name, least in (("limit_s", 0.0), ("factor", 1.0), ("least_s", 0.0)):
        value = getattr(watchdog, name)
        if not value >= least:
            remedy = f"Write {least:g} or more"
            found.append(Violation(f"trainer.watchdog.{name}", value, f"must be at least {least:g}", remedy))
    if min(trainer.profile_steps, default=1) < 1:
        found.append(Violation("trainer.profile_steps", trainer.profile_steps, "steps count from 1", "Write [2], say"))
    peak = trainer.device_peak_tflops
    if peak is not None and not peak > 0:
        remedy = "Write the TFLOP/s of the device's data sheet, dense, or leave it out"
        found.append(Violation("trainer.device_peak_tflops", peak, "must be positive", remedy))
    if (trainer.resume_mode is ResumeMode.path) != (trainer.resume_from_path is not None):
        problem = f"goes with trainer.resume_mode=path only, which is {trainer.resume_mode.value}"
        if trainer.resume_from_path is None:
            problem = "says nothing, and trainer.resume_mode=path needs it"
        remedy = "Write both or neither"
        found.append(Violation("trainer.resume_from_path", trainer.resume_from_path, problem, remedy))
    return found
