"""The kernel that vLLM chooses for a mixture's experts leaves weights where and as an update writes them.

By vLLM's own platforms, configuration and choice, for a Hopper, a Blackwell and an MI300X that are not here
(tests/support/vllm_platforms.py).
"""

from __future__ import annotations

import ast

import pytest

from mcore_rl.config.rollout import KEEPS_WEIGHTS, MoeBackend
from tests.accelerators.conftest import Outcome

pytestmark = pytest.mark.tier("ci")


# What vLLM chooses by itself; on the last two an update would have been refused.
OWN_CHOICE = {
    "sm90": "TRITON",
    "sm100": "FLASHINFER_TRTLLM",
    "gfx942": "TRITON",
    "gfx942 with AITER asked for": "AITER",
}


def test_updated_engines_read_experts_as_they_are_written(outcomes: dict[str, dict[str, Outcome]]) -> None:
    wanted = {"setting": "triton", "chosen": "TRITON", "kept": True, "adapters": "TRITON"}
    for device, cases in outcomes.items():
        assert {name: cases["auto"][name] for name in wanted} == wanted, device


def test_vllm_alone_would_rearrange_the_experts_of_an_engine_with_adapters_on_blackwell(
    outcomes: dict[str, dict[str, Outcome]],
) -> None:
    """It looks at the setting only after that (select_unquantized_moe_backend); see receiver/plain_experts.py."""
    chosen = {device: cases["auto"]["adapters, vLLM's"] for device, cases in outcomes.items()}
    assert chosen == dict.fromkeys(outcomes, "TRITON") | ({"sm100": "FLASHINFER_TRTLLM"} if "sm100" in outcomes else {})


def test_engines_that_are_not_updated_have_vllms_choice(outcomes: dict[str, dict[str, Outcome]]) -> None:
    chosen = {device: cases["not updated"]["chosen"] for device, cases in outcomes.items()}
    assert chosen == {device: OWN_CHOICE[device] for device in outcomes}
    for device, cases in outcomes.items():
        assert (cases["not updated"]["kept"] is True) == (OWN_CHOICE[device] == "TRITON")


def test_what_is_refused_is_what_rearranges_weights(outcomes: dict[str, dict[str, Outcome]]) -> None:
    """``KEEPS_WEIGHTS``, which the configuration refuses the others of, by what vLLM does to weights at loading."""
    for device, cases in outcomes.items():
        for backend in MoeBackend:
            outcome = cases[backend.value]
            if backend in KEEPS_WEIGHTS:
                assert outcome["kept"] is True, (device, outcome)
            else:
                assert "refused" in outcome or not outcome["kept"], (device, outcome)


def test_vllm_has_no_kernel_that_the_setting_does_not_name(outcomes: dict[str, dict[str, Outcome]]) -> None:
    for cases in outcomes.values():
        named = ast.literal_eval(cases["unknown"]["refused"].partition("Expected one of ")[2].rstrip("."))
        assert {"auto", *named} == {backend.value for backend in MoeBackend}
