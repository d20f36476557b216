"""The environment that the processes of a run start with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.parallel.cpu import UNCOMPILED
from mcore_rl.parallel.device import detect, num_cores
from mcore_rl.rollout.vllm.engine.environment import engine_environment
from mcore_rl.runtime.start import training_environment

CPU = detect(Device.cpu)
H100 = replace(CPU, kind=Device.cuda, device_type="cuda", num_devices=8, queues_reorder=True)
EVERYWHERE = {"TOKENIZERS_PARALLELISM": "false"}
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUEUES:
        monkeypatch.delenv(name, raising=False)


def test_training_processes_on_an_accelerator_have_one_thread_and_one_queue() -> None:
    assert training_environment(H100, ParallelConfig(tp=2), 8) == {**EVERYWHERE, "OMP_NUM_THREADS": "1", **QUEUES}
    assert training_environment(H100, ParallelConfig(), 8) == {**EVERYWHERE, "OMP_NUM_THREADS": "1"}


def test_training_processes_on_the_cpu_share_its_cores_and_compile_nothing() -> None:
    wanted = {**EVERYWHERE, "OMP_NUM_THREADS": str(max(1, num_cores() // 2)), **UNCOMPILED}
    assert training_environment(CPU, ParallelConfig(tp=2), 2) == wanted


def test_what_the_user_set_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    environment = training_environment(H100, ParallelConfig(tp=2), 8)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and "CUDA_DEVICE_MAX_COPY_CONNECTIONS" not in environment


def test_engines_keep_the_queues_that_they_inherit() -> None:
    assert not QUEUES.keys() & engine_environment(H100, RolloutConfig(tp=2), (0,), environ={}).keys()
