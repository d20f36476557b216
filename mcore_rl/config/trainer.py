"""The configuration group ``trainer``: length of the run, devices, checkpoints, alarms; and ``model``, ``ray_init``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from mcore_rl.config.bounds import (
    InputDirectory,
    InputModel,
    InputTokenizer,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    OutputDirectory,
    OutputFile,
    PositiveInt,
    Ranks,
    Seconds,
    SecondsOrZero,
    Share,
    check,
)
from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import Violation
from mcore_rl.hub.names import A_NAME, NO_NAME, is_repository

PUSH = "trainer.push_to_hub"
PeakTflops = Annotated[float, Interval("(0, inf)", "Write what the device's data sheet says, in TFLOP/s")]
LARGEST_WORLD = 131072  # processes; no cluster has more


class Logger(Enum):
    """A destination of metrics.  The run directory always has them too."""

    console = "console"
    wandb = "wandb"
    tensorboard = "tensorboard"
    mlflow = "mlflow"
    swanlab = "swanlab"
    trackio = "trackio"


class ResumeMode(Enum):
    """What a run resumes from.

    ``auto``: the newest complete checkpoint of the run directory, if there is one.  ``path``: a given checkpoint.
    ``off``: nothing.
    """

    auto = "auto"
    path = "path"
    off = "off"


class Mode(Enum):
    """When rollouts are drawn.

    ``sync``: draw, train, and so on in turns.  ``one_step_off``: the engines draw the next step's rollouts while a step
    is trained.  ``async``: a step begins when enough groups are finished, and the engines draw on meanwhile, as far
    ahead as ``async.max_staleness`` allows.
    """

    sync = "sync"
    one_step_off = "one_step_off"
    vars()["async"] = "async"  # the word is Python's, so that no statement may assign it


ASYNC = Mode["async"]


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

    limit_s: SecondsOrZero = 7200.0
    factor: Annotated[float, Interval("[1, inf)")] = 20.0
    least_s: SecondsOrZero = 300.0


@dataclass(kw_only=True)
class GuardConfig:
    """Limits of metrics, means over ``window`` steps, beyond which a run raises an alarm.

    window: steps; 0: no alarms.
    reward_drop: alarm if the reward lost this share of what it had gained since the first window.
    entropy_share: alarm if the entropy is below this share of the entropy at first (collapse).
    max_logprob_diff: largest difference of log-probs between sampler and trainer, nats.
    max_kl: largest KL to the reference, nats; None is any.
    max_clip_share: largest share of responses that are cut off at their length limit.
    min_effective_sample_size: smallest effective sample size of the ratios of trainer to sampler, as a share.
    max_masked_share: largest share of trained tokens that corrections leave out of the loss.
    max_update_kl: largest KL of the policy that a step's loss starts from to the updated one, nats a token (k3).
    stop: whether an alarm ends the run, after a checkpoint.
    check_weights_freq: compare every tensor of the engines with the trainer's in each weight update whose number this
    divides; 0: in the first update only.
    """

    window: NonNegativeInt = 10
    reward_drop: Annotated[float, Interval("[0, 2]")] = 0.5
    entropy_share: Share = 0.1
    max_logprob_diff: NonNegativeFloat = 0.1
    max_kl: NonNegativeFloat | None = None
    max_clip_share: Share = 0.9
    min_effective_sample_size: Share = 0.3
    max_masked_share: Share = 0.5
    max_update_kl: NonNegativeFloat = 0.5
    stop: bool = False
    check_weights_freq: NonNegativeInt = 0


@dataclass(kw_only=True)
class PrometheusConfig:
    """The address at which Prometheus asks the controller for the newest step's metrics.

    port: where it listens; None: nowhere.
    host: an IP address of the controller's machine.  Where it is not a loopback address, a request needs the secret
    that the run writes into ``prometheus_token`` of its directory.
    """

    port: Annotated[int, Interval("[1, 65535]")] | None = None
    host: str = "127.0.0.1"


@dataclass(kw_only=True)
class TrainerConfig:
    """The run.

    project_name, experiment_name: what the run is called by loggers.
    default_local_dir: the run directory.
    total_epochs, total_training_steps: length of the run; the steps, if given, replace the epochs.
    save_freq, test_freq: steps between checkpoints and between validations; 0 is never, except a checkpoint at the end.
    val_before_train, val_only: validate before the first step; only validate.
    resume_from_path: the checkpoint of ``resume_mode=path``.
    async_save: write a checkpoint while the run goes on, from a copy in host memory.
    max_to_keep: how many of the newest checkpoints are kept; None is all.
    keep_every: also keep the checkpoints of steps that it divides; the best by validation is always kept.
    critic_warmup: first steps in which the policy is not trained, but its critic or process reward model is.
    nnodes, n_gpus_per_node: nodes of the trainer and its devices per node; on CPU, processes per node.
    device: of trainer and rollout.
    push_to_hub: the repository of the Hub, OWNER/NAME, that exports are uploaded to while the run goes on: the best to
    its branch ``best``, the last to its main one; None: nowhere.  It is made, private, if it is not there.
    log_val_generations: validation samples that loggers receive.
    save_rollouts: keep the samples of every step, as texts.
    record_rollouts: keep the rollouts of every step to the last bit, in ``record/`` of the run directory, so that
    ``replay`` can train them again: about 8 bytes a token, and with ``actor.router_replay=r3`` those of the experts.
    replay: a run directory whose recorded rollouts are trained again, in their order and without engines; None draws.
    profile_steps: steps, counted from 1, whose training torch's profiler traces.
    timeout_s: limit of a collective, seconds.
    max_restarts: how many restarts of dead rollout engines the whole run makes; counted apart, also how often the run
    restarts from its newest checkpoint after a training process died.
    device_peak_tflops: peak of a trainer's device in the actor's precision, TFLOP/s, for MFU; None is that of its data
    sheet, if it is known (parallel/peak_flops.py).
    """

    project_name: str = "mcore_rl"
    experiment_name: str = "run"
    default_local_dir: OutputDirectory = "runs/run"
    logger: list[Logger] = field(default_factory=lambda: [Logger.console])
    total_epochs: PositiveInt = 1
    total_training_steps: PositiveInt | None = None
    save_freq: NonNegativeInt = 0
    test_freq: NonNegativeInt = 0
    val_before_train: bool = True
    val_only: bool = False
    resume_mode: ResumeMode = ResumeMode.auto
    resume_from_path: InputDirectory | None = None
    async_save: bool = True
    max_to_keep: PositiveInt | None = None
    keep_every: PositiveInt | None = None
    critic_warmup: NonNegativeInt = 0
    nnodes: Ranks = 1
    n_gpus_per_node: Ranks = 1
    device: Device = Device.auto
    placement: Placement = Placement.colocated
    mode: Mode = Mode.sync
    push_to_hub: str | None = None
    log_val_generations: NonNegativeInt = 8
    save_rollouts: bool = True
    record_rollouts: bool = False
    replay: InputDirectory | None = None
    profile_steps: list[PositiveInt] = field(default_factory=list)
    timeout_s: Seconds = 600.0
    device_peak_tflops: PeakTflops | None = None
    max_restarts: NonNegativeInt = 3
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)

    @property
    def world_size(self) -> int:
        """The number of training processes."""
        return self.nnodes * self.n_gpus_per_node


def is_due(frequency: int, step: int, last_step: int) -> bool:
    """True every ``frequency`` steps and at the last step; always False if ``frequency`` is 0."""
    return frequency > 0 and (step % frequency == 0 or step == last_step)


@dataclass(kw_only=True)
class ModelPathConfig:
    """path: the directory of a Hugging Face checkpoint, or its Hub id.

    tokenizer_path: of its tokenizer; None is ``path``.
    """

    path: InputModel = ""
    tokenizer_path: InputTokenizer | None = None


@dataclass(kw_only=True)
class PolicyModelConfig(ModelPathConfig):
    """The policy's checkpoint, and what every reader of its ``config.json`` reads otherwise: Megatron, vLLM, the plan.

    config_overrides: field -> value instead of the file's.  ignore_fields: fields that are read as if the file lacked
    them; for those that change nothing.
    staged: a copy of ``path`` on every node's own disk, which is read in its place (``cluster.slurm.stage_model`` makes
    it and writes this); "" is none.
    """

    config_overrides: dict[str, Any] = field(default_factory=dict)
    ignore_fields: list[str] = field(default_factory=list)
    staged: InputDirectory = ""

    @property
    def is_changed(self) -> bool:
        """Whether the checkpoint is read with another config.json than its own."""
        return bool(self.config_overrides or self.ignore_fields)

    @property
    def directory(self) -> str:
        """Where its files are read: the copy that was staged, or ``path``."""
        return self.staged or self.path


@dataclass(kw_only=True)
class RayInitConfig:
    """How Ray is started.

    num_cpus: CPU cores of this machine that Ray may use; None is all that this process may use.
    address: address of a running cluster; None starts one on this machine.
    timeline_json_file: file for Ray's timeline, written at the end; None is none.
    """

    num_cpus: PositiveInt | None = None
    address: str | None = None
    timeline_json_file: OutputFile | None = None


def trainer_violations(trainer: TrainerConfig) -> list[Violation]:
    """Every violation within ``trainer``, not looking at other groups."""
    rules = [
        *(_size_violations, _window_violations, _resume_violations, _replay_violations, _push_violations),
        _prometheus_violations,
    ]
    return check(trainer, rules, "trainer.")


def _size_violations(trainer: TrainerConfig) -> list[Violation]:
    if trainer.world_size <= LARGEST_WORLD:
        return []
    problem = f"with trainer.nnodes={trainer.nnodes} is {trainer.world_size:,} processes"
    remedy = f"Write fewer: at most {LARGEST_WORLD:,} in all"
    return [Violation("trainer.n_gpus_per_node", trainer.n_gpus_per_node, problem, remedy)]


def _window_violations(trainer: TrainerConfig) -> list[Violation]:
    if trainer.guards.window != 1:
        return []
    remedy = "Write 2 or more, or 0 for no alarms"
    return [Violation("trainer.guards.window", 1, "of one step, there is no mean", remedy)]


def _replay_violations(trainer: TrainerConfig) -> list[Violation]:
    """What contradicts a replay: it has no engines, and must not write into the run that it reads."""
    if trainer.replay is None:
        return []
    key = "trainer.replay"
    violations = list[Violation]()
    if Path(trainer.replay).resolve() == Path(trainer.default_local_dir).resolve():
        remedy = "Write another trainer.default_local_dir"
        violations.append(Violation(key, trainer.replay, "is the run directory itself", remedy))
    if trainer.val_only:
        problem = "draws nothing, and trainer.val_only=true asks for nothing else"
        violations.append(Violation(key, trainer.replay, problem, "Leave one of them out"))
    if trainer.record_rollouts:
        problem = "reads rollouts that are recorded, and trainer.record_rollouts=true would record them again"
        violations.append(Violation(key, trainer.replay, problem, "Write trainer.record_rollouts=false"))
    return violations


def _push_violations(trainer: TrainerConfig) -> list[Violation]:
    if trainer.push_to_hub is None:
        return []
    if not is_repository(trainer.push_to_hub):
        return [Violation(PUSH, trainer.push_to_hub, NO_NAME, A_NAME)]
    if trainer.val_only:
        problem = "pushes what is trained, and trainer.val_only=true trains nothing"
        return [Violation(PUSH, trainer.push_to_hub, problem, "Leave one of them out")]
    return []


def _prometheus_violations(trainer: TrainerConfig) -> list[Violation]:
    key = "trainer.prometheus.host"
    host = trainer.prometheus.host
    try:
        ip_address(host)
    except ValueError:
        return [Violation(key, host, "is no IP address", "Write 127.0.0.1, or an address of this machine")]
    if trainer.prometheus.port is None and host != PrometheusConfig.host:
        return [Violation(key, host, "nothing is served without a port", "Write trainer.prometheus.port=9464 too")]
    return []


def _resume_violations(trainer: TrainerConfig) -> list[Violation]:
    if (trainer.resume_mode is ResumeMode.path) == (trainer.resume_from_path is not None):
        return []
    problem = f"goes with trainer.resume_mode=path only, which is {trainer.resume_mode.value}"
    if trainer.resume_from_path is None:
        problem = "says nothing, and trainer.resume_mode=path needs it"
    return [Violation("trainer.resume_from_path", trainer.resume_from_path, problem, "Write both or neither")]
