"""Where each test of this folder runs: on the accelerator, skipped where there is none, and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import detect
from tests.support.skips import ACCELERATOR

HERE = detect(Device.auto)
NEEDED = f"{ACCELERATOR}torch {torch.__version__} sees only {HERE.device_name}"
MARKS = {Device.auto: (pytest.mark.gpu, pytest.mark.skipif(not HERE.is_accelerator, reason=NEEDED)), Device.cpu: ()}
NAMES = {Device.auto: "accelerator", Device.cpu: "cpu"}
PLACES = [pytest.param(place, id=name, marks=MARKS[place]) for place, name in NAMES.items()]


def cases(of_place: Callable[[bool], Iterable[tuple[Any, ...]]]) -> list[ParameterSet]:
    """Parameters whose first is the place, for tests that do not have the same cases in both.

    of_place: whether it is an accelerator -> the further parameters of each case.
    """
    return [
        pytest.param(place, *case, id="-".join([name, *map(_name, case)]), marks=MARKS[place])
        for place, name in NAMES.items()
        for case in of_place(place is Device.auto)
    ]


def _name(parameter: Any) -> str:
    return str(getattr(parameter, "value", parameter))
