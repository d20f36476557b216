"""How much of what the devices could do a step's models needed: TFLOP, TFLOP/s of a device, MFU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.families.flops import forward_flops, train_flops
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.peak_flops import peak_tflops

TERA = 1e12
PHASES = {"updates": ("update_actor", "update_critic"), "logprobs": ("logprobs", "reference", "values")}


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What one model does with the sequences of a step.  trained: a half where half of them were."""

    model: ModelConfig
    scored: float
    trained: float
    critic: bool = False


def tflop(lengths_S: Sequence[int], passes: Sequence[Passes]) -> dict[str, float]:
    """``perf/tflop_*`` of a step over sequences of ``lengths_S`` tokens; without what was not done at all."""
    scored = sum(each.scored * forward_flops(each.model, lengths_S, critic=each.critic) for each in passes)
    trained = sum(each.trained * train_flops(each.model, lengths_S, critic=each.critic) for each in passes)
    found = {"perf/tflop_updates": trained / TERA, "perf/tflop_logprobs": scored / TERA}
    return {key: value for key, value in found.items() if value}


def utilization(
    metrics: Mapping[str, float], seconds: Mapping[str, float], num_devices: int, peak: float | None
) -> dict[str, float]:
    """``perf/tflops_per_device*``, and ``perf/mfu*`` where the ``peak`` of a device is known, TFLOP/s.

    metrics: with what ``tflop`` found.  seconds: ``time/*`` of the step: phases as the controller sees them, with the
    moving of data and the waiting in them.  num_devices: of the trainer; on CPU, processes.
    """
    found = {}
    for name, phases in PHASES.items():
        needed, spent = metrics.get(f"perf/tflop_{name}"), sum(seconds.get(f"time/{phase}", 0.0) for phase in phases)
        if not needed or not spent:
            continue
        ending = "" if name == "updates" else f"_{name}"
        rate = needed / spent / num_devices
        found[f"perf/tflops_per_device{ending}"] = rate
        if peak is not None:
            found[f"perf/mfu{ending}"] = rate / peak
    return found


def device_peak(trainer: TrainerConfig, precision: Precision, platform: Platform) -> float | None:
    """TFLOP/s: what ``trainer.device_peak_tflops`` states, else the data sheet's; None where neither says."""
    if trainer.device_peak_tflops is not None:
        return trainer.device_peak_tflops
    return peak_tflops(platform.device_name, precision)
