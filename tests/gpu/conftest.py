"""Every test here runs twice: on the accelerator, skipped where there is none, and with tiny sizes on the CPU.

The second run keeps the tests themselves from rotting on machines that cannot run the first.
"""

from __future__ import annotations

import pytest

from mcore_rl.parallel.device import Platform, detect
from tests.gpu.places import PLACES


@pytest.fixture(scope="session", params=PLACES)
def platform(request: pytest.FixtureRequest, processes: None) -> Platform:
    return detect(request.param)
