"""How well a step used the devices: TFLOP of its models, TFLOP/s per device, and MFU, the share of the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import psutil

from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.role import Head
from mcore_rl.config.roles import trains_tower
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import Pass, StepStage
from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.data.shared_prompts import Stem
from mcore_rl.families.flops import forward_flops, tower_flops, train_flops
from mcore_rl.ground.types import Picture
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.peak_flops import peak_tflops
from mcore_rl.tracking.lanes import State, trainer_state

TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often one model scores and trains the sequences of a step; 0.5 if it does so with half of them.

    shares: whether it computes a prompt once for all of its samples.
    lengths_S: tokens of its sequences, where these are others than the step's.
    trains_tower: whether its vision tower learns, if it has one; else updates have that one's forward pass alone.
    """

    model: ModelConfig
    scored: float
    trained: float
    head: Head = Head.lm
    shares: bool = False
    lengths_S: Sequence[int] | None = None
    trains_tower: bool = False


def step_passes(
    run: RunConfig,
    plan: Sequence[StepStage],
    models: Mapping[str, ModelConfig],
    num_updates: Mapping[str, int],
    in_context: Sequence[tuple[Pass, Sequence[int]]] = (),
    sharing: Container[str] = (),
) -> list[Passes]:
    """The passes of each model in a step, to count FLOP.

    models: by role.  num_updates: the optimizer steps of each role.  sharing: the roles whose engines share prompts.
    in_context: each pass behind other prompts, with the tokens of its sequences.
    """
    scored = Counter(stage.group for stage in plan if isinstance(stage, Pass) and stage.context is None)
    passes = list[Passes]()
    for role in run.group_rows:
        trained = 0.0
        if role.trains:
            mini = run.trained_config(role).ppo_mini_batch_size
            trained = num_updates[role.name] * mini / run.data.train_batch_size
        passes.append(
            Passes(
                model=models[role.name],
                scored=float(scored[role.name]),
                trained=trained,
                head=role.head,
                shares=role.name in sharing,
                trains_tower=trains_tower(run.role_config(role)),
            )
        )
    others = [Passes(model=models[each.group], scored=1, trained=0, lengths_S=told_S) for each, told_S in in_context]
    return passes + others


def tflop(
    lengths_S: Sequence[int],
    passes: Sequence[Passes],
    stems: Sequence[Stem] = (),
    images_S: Sequence[Sequence[Picture]] | None = None,
) -> dict[str, float]:
    """``perf/tflop_*`` of a step over sequences of ``lengths_S`` tokens, without the kinds of pass that did not run.

    stems: of the sequences.  A trunk counts once, also where parts of a prompt's samples are computed apart: what is
    computed again is no need of the model's.  images_S: their pictures, of which equal ones count once, too.
    """
    seen = {picture.key: (picture.height, picture.width) for images in images_S or () for picture in images}
    grids = list(seen.values())
    again = [stem.shared for stem in stems for _ in stem.members[1:] if stem.shared]

    def needed(each: Passes, flops: Callable[..., int]) -> int:
        all_apart = flops(each.model, each.lengths_S or lengths_S, head=each.head)
        return all_apart - flops(each.model, again, head=each.head) if each.shares else all_apart

    def tower(each: Passes, *, train: bool = False) -> int:
        return tower_flops(each.model, grids, train=train) if each.lengths_S is None else 0

    scored = sum(each.scored * (needed(each, forward_flops) + tower(each)) for each in passes)
    trained = sum(each.trained * (needed(each, train_flops) + tower(each, train=each.trains_tower)) for each in passes)
    tflops = {"perf/tflop_updates": trained / TERA, "perf/tflop_logprobs": scored / TERA}
    return {key: value for key, value in tflops.items() if value}


def host_use() -> dict[str, float]:
    """``perf/host_*`` of the controller's machine: its processors since the last call, and its memory now."""
    return {
        "perf/host_cpu_share": psutil.cpu_percent() / 100,
        "perf/host_memory_share": psutil.virtual_memory().percent / 100,
    }


def utilization(
    metrics: Mapping[str, float], seconds: Mapping[str, float], num_devices: int, peak: float | None
) -> dict[str, float]:
    """``perf/tflops_per_device*``, and ``perf/mfu*`` if the ``peak`` of a device, TFLOP/s, is known.

    metrics: includes the result of ``tflop``.  seconds: ``time/*`` of the step, as the controller measures phases,
    including data transfer and waiting.  num_devices: of the trainer; on CPU, processes.
    """
    rates = {}
    spent_on = {"updates": 0.0, "logprobs": 0.0}
    for key, spent in seconds.items():
        phase = key.removeprefix("time/")
        if phase.startswith("update_"):
            spent_on["updates"] += spent
        elif trainer_state(phase) is State.training and phase != "advantages":
            spent_on["logprobs"] += spent
    for name, spent in spent_on.items():
        needed = metrics.get(f"perf/tflop_{name}")
        if not needed or not spent:
            continue
        ending = "" if name == "updates" else f"_{name}"
        rate = needed / spent / num_devices
        rates[f"perf/tflops_per_device{ending}"] = rate
        if peak is not None:
            rates[f"perf/mfu{ending}"] = rate / peak
    return rates


def device_peak(trainer: TrainerConfig, precision: Precision, platform: Platform) -> float | None:
    """The peak of a device, TFLOP/s: ``trainer.device_peak_tflops``, else its data sheet's; None if it is unknown."""
    if trainer.device_peak_tflops is not None:
        return trainer.device_peak_tflops
    return peak_tflops(platform.device_name, precision)
