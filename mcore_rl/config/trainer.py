"""The configuration group ``trainer``: length of the run, devices, checkpoints, alarms; and ``model``, ``ray_init``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mcore_rl.config.engine import Device
from mcore_rl.errors import Violation


class Logger(Enum):
    """A destination of metrics.  The run directory always has them too."""

    console = "console"
    wandb = "wandb"
    tensorboard = "tensorboard"


class ResumeMode(Enum):
    """What a run resumes from.

    ``auto``: the newest complete checkpoint of the run directory, if there is one.  ``path``: a given checkpoint.
    ``off``: nothing.
    """

    auto = "auto"
    path = "path"
    off = "off"


class Placement(Enum):
    """``colocated``: trainer and rollout take turns on the same devices.  ``separate``: each has its own."""

    colocated = "colocated"
    separate = "separate"


@dataclass(kw_only=True)
class WatchdogConfig:
    """When a call of training workers or engines counts as hung; it is then told of with stacks, and taken for a death.

    For an engine that draws or scores, the time without any progress counts in place of a call's.

    limit_s: seconds after which any call counts as hung; 0: no call ever does.
    factor: a call that was answered twice or more counts as hung after this many times its longest duration so far.
    least_s: the shortest limit that ``factor`` may give, seconds.
    """

    limit_s: float = 7200.0
    factor: float = 20.0
    least_s: float = 300.0


@dataclass(kw_only=True)
class GuardConfig:
    """Limits of metrics, means over ``window`` steps, beyond which a run raises an alarm.

    window: steps; 0: no alarms.
    reward_drop: alarm if the reward lost this share of what it had gained since the first window.
    entropy_share: alarm if the entropy is below this share of the entropy at first (collapse).
    max_logprob_diff: largest difference of log-probs between sampler and trainer, nats.
    max_kl: largest KL to the reference, nats; None is any.
    max_clip_share: largest share of responses that are cut off at their length limit.
    stop: whether an alarm ends the run, after a checkpoint.
    check_weights_freq: compare every tensor of the engines with the trainer's in each weight update whose number this
    divides; 0: in the first update only.
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

    default_local_dir: the run directory.
    total_epochs, total_training_steps: length of the run; the steps, if given, replace the epochs.
    save_freq, test_freq: steps between checkpoints and between validations; 0 is never, except a checkpoint at the end.
    val_before_train, val_only: validate before the first step; only validate.
    async_save: write a checkpoint while the run goes on, from a copy in host memory.
    max_to_keep: how many of the newest checkpoints are kept; None is all.
    keep_every: also keep the checkpoints of steps that it divides; the best by validation is always kept.
    critic_warmup: first steps in which only the critic is trained.
    nnodes, n_gpus_per_node: nodes of the trainer and its devices per node; on CPU, processes per node.
    device: of trainer and rollout.
    log_val_generations: validation samples that loggers receive.
    save_rollouts: keep the samples of every step.
    profile_steps: steps, counted from 1, whose training torch's profiler traces.
    timeout_s: limit of a collective, seconds.
    max_restarts: how many restarts of dead rollout engines the whole run makes; counted apart, also how often the run
    restarts from its newest checkpoint after a training process died.
    device_peak_tflops: peak of a trainer's device in the actor's precision, TFLOP/s, for MFU; None is that of its data
    sheet, if it is known (parallel/peak_flops.py).
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
        """The number of training processes."""
        return self.nnodes * self.n_gpus_per_node


def is_due(frequency: int, step: int, last_step: int) -> bool:
    """True every ``frequency`` steps and at the last step; always False if ``frequency`` is 0."""
    return frequency > 0 and (step % frequency == 0 or step == last_step)


@dataclass(kw_only=True)
class ModelPathConfig:
    """path: a Hugging Face checkpoint directory.  tokenizer_path: the directory of its tokenizer; None is ``path``."""

    path: str = ""
    tokenizer_path: str | None = None


@dataclass(kw_only=True)
class RayInitConfig:
    """How Ray is started.

    num_cpus: CPU cores of this machine that Ray may use; None is all that this process may use.
    address: address of a running cluster; None starts one on this machine.
    timeline_json_file: file for Ray's timeline, written at the end; None is none.
    """

    num_cpus: int | None = None
    address: str | None = None
    timeline_json_file: str | None = None


def trainer_violations(trainer: TrainerConfig) -> list[Violation]:
    """Every violation within ``trainer``, not looking at other groups."""
    violations = []
    if not trainer.default_local_dir.strip():
        problem, remedy = "names no directory", "Write the directory of the run, such as runs/first"
        violations.append(Violation("trainer.default_local_dir", trainer.default_local_dir, problem, remedy))
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
            violations.append(Violation(f"trainer.{name}", value, "must be positive", "Write 1 or more"))
    for name in ("save_freq", "test_freq", "critic_warmup", "log_val_generations", "max_restarts"):
        if getattr(trainer, name) < 0:
            violations.append(
                Violation(f"trainer.{name}", getattr(trainer, name), "must not be negative", "Write 0 or more")
            )
    guards = trainer.guards
    for name in ("window", "check_weights_freq", "reward_drop", "entropy_share", "max_logprob_diff", "max_clip_share"):
        if not getattr(guards, name) >= 0:
            remedy = "Write 0 or more"
            violations.append(
                Violation(f"trainer.guards.{name}", getattr(guards, name), "must not be negative", remedy)
            )
    if guards.window == 1:
        remedy = "Write 2 or more, or 0 for no alarms"
        violations.append(Violation("trainer.guards.window", 1, "of one step, there is no mean", remedy))
    watchdog = trainer.watchdog
    for name, least in (("limit_s", 0.0), ("factor", 1.0), ("least_s", 0.0)):
        value = getattr(watchdog, name)
        if not value >= least:
            remedy = f"Write {least:g} or more"
            violations.append(Violation(f"trainer.watchdog.{name}", value, f"must be at least {least:g}", remedy))
    if min(trainer.profile_steps, default=1) < 1:
        violations.append(
            Violation("trainer.profile_steps", trainer.profile_steps, "steps count from 1", "Write [2], say")
        )
    peak = trainer.device_peak_tflops
    if peak is not None and not peak > 0:
        remedy = "Write the TFLOP/s of the device's data sheet, dense, or leave it out"
        violations.append(Violation("trainer.device_peak_tflops", peak, "must be positive", remedy))
    if (trainer.resume_mode is ResumeMode.path) != (trainer.resume_from_path is not None):
        problem = f"goes with trainer.resume_mode=path only, which is {trainer.resume_mode.value}"
        if trainer.resume_from_path is None:
            problem = "says nothing, and trainer.resume_mode=path needs it"
        remedy = "Write both or neither"
        violations.append(Violation("trainer.resume_from_path", trainer.resume_from_path, problem, remedy))
    return violations
