"""No wrong table of adapters survives, the trainer's by the weights' statements, vLLM's by vLLM's own loading."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcore_rl.families.registry import FAMILIES
from mcore_rl.proofs.adapter_mutation import adapter_cases, adapter_score
from mcore_rl.proofs.mutation import FamilyScore, MutantVerdict, case_failures
from mcore_rl.rollout.vllm.oracle import VllmProcess
from mcore_rl.training.meta import meta_rank
from tests.support.published import TINY

GATE = ("llama",)
IN_GATE = [pytest.param(name, marks=() if name in GATE else pytest.mark.tier("full")) for name in FAMILIES]
# Families whose adapters vLLM does not apply.
REFUSED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def _demand_no_survivor(score: FamilyScore) -> None:
    assert score.failures == ()
    assert [f"{each.mutant}: {each.why}" for each in score.survived] == []
    assert sum(each.verdict is MutantVerdict.failed for each in score.judged) > 100


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", list(FAMILIES))
def test_no_wrong_training_table_of_adapters_survives(name: str) -> None:
    _demand_no_survivor(adapter_score(TINY[name], meta_rank, None))


@pytest.mark.tier("ci")
@pytest.mark.parametrize("name", GATE)
def test_adapters_are_where_the_weights_statements_say(name: str) -> None:
    for case in adapter_cases(TINY[name], meta_rank, None):
        assert case_failures(case) == []


@pytest.fixture(scope="module")
def vllm(processes: None) -> Iterator[VllmProcess]:
    with VllmProcess() as started:
        yield started


@pytest.mark.parametrize("name", [each for each in IN_GATE if each.values[0] not in REFUSED])
def test_no_wrong_table_of_vllms_adapters_survives(vllm: VllmProcess, name: str) -> None:
    _demand_no_survivor(adapter_score(TINY[name], None, vllm.adapter_placements))
