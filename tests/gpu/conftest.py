"""Every test here runs twice: on the accelerator, skipped where there is none, and with tiny sizes on the CPU.

The second run keeps the tests themselves from rotting on machines that cannot run the first.
"""

from __future__ import annotations

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.parallel.device import Platform, detect

HERE = detect(Device.auto)
NO_ACCELERATOR = f"needs an accelerator; torch {torch.__version__} sees only {HERE.device_name}"


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(
            Device.auto,
            id="accelerator",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HERE.is_accelerator, reason=NO_ACCELERATOR)],
        ),
        pytest.param(Device.cpu, id="cpu"),
    ],
)
def platform(request: pytest.FixtureRequest, processes: None) -> Platform:
    return detect(request.param)
