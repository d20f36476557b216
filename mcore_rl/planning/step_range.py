"""The range of a planned step, and the measured run that the plan's constants were held against.

A plan is a number for each part of a step; what is known of their error is how far measured runs were from theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.planning.measured_runs import WITHIN, MeasuredRun, measured_runs, measured_updates
from mcore_rl.planning.training import RolePlan

# Devices that share rows: the same chip with another memory, or of the same generation.
ALIKE = (("H100", "H200"), ("GB200", "B200"), ("MI300X", "MI325X"), ("A100",))
# Before they had rows of their own, experts on H100, all models on MI300X and dense models on GB200 took 1.5 to 2 times
# what was planned, and none less: so much longer may a step be where no row is of the same device, model and layers.
UNKNOWN = 2.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How far a planned step may be from a real one.

    run: the nearest measured run; "" if there is none.  alike: whether it is of the same kind of device, model and
    layers.  low, high: what the planned seconds are multiplied by.
    """

    run: str
    alike: bool
    low: float
    high: float

    def range_s(self, step_s: float) -> tuple[float, float]:
        """The least and the most seconds of a step that is planned to take ``step_s``."""
        return step_s * self.low, step_s * self.high

    @property
    def text(self) -> str:
        """What the range rests on, in a line."""
        if not self.run:
            return f"no measured run is like this one: a step may take {UNKNOWN:g} times as long, or half"
        if self.alike:
            return f"calibrated on {self.run}: measured runs of this kind are within {WITHIN:.0%}"
        return (
            f"no measured run has this device, model kind and layers; nearest is {self.run}, "
            f"and a step may take {UNKNOWN:g} times as long{', or half' if self.low == 1 / UNKNOWN else ''}"
        )


def role_calibration(cluster: ClusterConfig, role: RolePlan) -> Calibration:
    """The calibration of a run on ``cluster`` that trains ``role``."""
    billions = role.sizes.num_parameters / 1e9
    experts = role.model.moe is not None
    return calibration_of(cluster, billions=billions, experts=experts, fused=role.kernels.fused)


def calibration_of(cluster: ClusterConfig, *, billions: float, experts: bool, fused: bool) -> Calibration:
    """The calibration of a run on ``cluster``.

    billions: parameters of the policy.  experts: whether it has experts.  fused: its layers are Transformer Engine's.
    """
    if not cluster.gpus_per_node:
        return Calibration(run="", alike=False, low=1 / UNKNOWN, high=UNKNOWN)
    family = family_of(cluster.device_name)
    kind = [run for run in measured_runs() if run.experts == experts and "step" in run.counted]
    here = [run for run in kind if family_of(run.device) == family and run.fused == fused]
    if family and here:
        return Calibration(run=_nearest(here, billions).name, alike=True, low=1 / (1 + WITHIN), high=1 / (1 - WITHIN))
    local = [each.name for each in measured_updates() if (each.model.moe is not None) == experts]
    updates = local if not fused and family == ALIKE[0] else []
    name = updates[0] if updates else _nearest(kind, billions).name
    stale = experts and not fused  # LOCAL_EXPERT_EFFICIENCY is of experts that were launched one by one
    return Calibration(run=name, alike=False, low=1 / UNKNOWN if stale else 1 / (1 + WITHIN), high=UNKNOWN)


def family_of(device_name: str) -> tuple[str, ...]:
    """The devices of ``ALIKE`` to which a device belongs; empty if to none."""
    return next((family for family in ALIKE if any(word in device_name for word in family)), ())


def _nearest(runs: Iterable[MeasuredRun], billions: float) -> MeasuredRun:
    return min(runs, key=lambda run: abs(log(run.billions / billions)))
