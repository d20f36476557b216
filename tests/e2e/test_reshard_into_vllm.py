"""The rollout tables, and the plans into them, against real vLLM: where its own ``load_weights`` puts every element.

One process of vLLM for the file: its import takes 7 s.  Every family, every layout, every mutant of a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import RolloutLayout, parse_rollout_layout
from mcore_rl.families.family import Family
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.families.rules import Stage
from mcore_rl.families.towers import PICTURES
from mcore_rl.proofs.mutation import (
    TABLES,
    MutantVerdict,
    OracleCase,
    case_failures,
    cases,
    has_experts,
    judge_all,
    with_rules,
)
from mcore_rl.proofs.placement import ParameterPlacement
from mcore_rl.proofs.prove import LOADED, NAMED, READABLE, STATED, ProofSubject, prove
from mcore_rl.proofs.tracer import Tracer
from mcore_rl.rollout.vllm.oracle import VllmProcess
from mcore_rl.training.meta import meta_rank
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from tests.support import picture_models
from tests.support.published import FACTS, TINY

CONFIGS = dict(TINY) | {name: picture_models.config(name) for name in PICTURES}
BUILT_IN = FAMILIES | PICTURES


@pytest.fixture(scope="module")
def vllm(processes: None) -> Iterator[VllmProcess]:
    with VllmProcess() as process:
        yield process


@pytest.fixture(scope="module")
def cases_of(vllm: VllmProcess) -> Callable[[str], list[OracleCase]]:
    """Of a family: its rollout tables in vLLM's layouts, tied and untied, with and without latent attention."""
    return cache(lambda model_type: cases(CONFIGS[model_type], None, vllm.placements))


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_the_table_is_what_vllm_loads(cases_of: Callable[[str], list[OracleCase]], model_type: str) -> None:
    made = cases_of(model_type)
    assert {case.table for case in made} == {
        table for table in TABLES if table != "weights" and getattr(BUILT_IN[model_type], table)
    }
    for case in made:
        assert case_failures(case) == []


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_the_plan_delivers_what_vllm_loads(cases_of: Callable[[str], list[OracleCase]], model_type: str) -> None:
    """The index tracer: from Megatron's tensors, through every copy of the plan, to where vLLM's load puts them."""
    trainings = ["tp=2,pp=2"]
    if has_experts(CONFIGS[model_type]):
        trainings += ["tp=2,pp=2,ep=2,etp=2", "tp=2,pp=2,ep=4,etp=1"]
    for case in cases_of(model_type):
        layout, latent = parse_rollout_layout(case.name), case.table == "rollout"
        for training in trainings if case.config == cases_of(model_type)[-1].config else trainings[:1]:
            table = Table(case.family, case.model, parse_layout(training), 8 if "ep" in training else 4)
            tracer = Tracer(plan_reshard(table, RolloutTable(case.family, case.model, layout, latent_attention=latent)))
            # vLLM was given the checkpoint in transformers' order, and the tracer counts in the table's.
            place = np.zeros(case.checkpoint.num_elements + 1, dtype=np.int64)
            for name in case.checkpoint:
                place[case.checkpoint.read(name)] = tracer.checkpoint.read(name)

            def direct(rank: int, case: OracleCase = case, place: np.ndarray = place) -> dict[str, np.ndarray]:
                loaded = case.right[rank % len(case.right)]
                return {name: place[stored.numbers] for name, stored in loaded.items()}

            assert list(tracer.failures(range(layout.world_size), direct)) == [], (case.name, training)


@pytest.mark.parametrize("model_type", list(CONFIGS))
def test_no_wrong_rollout_table_survives(cases_of: Callable[[str], list[OracleCase]], model_type: str) -> None:
    judged = list(judge_all(cases_of(model_type)))
    assert [f"{each.mutant}: {each.why}" for each in judged if each.verdict is MutantVerdict.survived] == []
    assert sum(each.verdict is MutantVerdict.failed for each in judged) > 100


# ---- the whole proof, of wrong tables ----


def mutated(table: str, end: str, **changes: object) -> Family:
    """Llama with another rule; without changes, without the rule."""
    family = FAMILIES["llama"]
    rules = []
    for rule in getattr(family, table):
        if not rule.name.endswith(end):
            rules.append(rule)
        elif changes:
            rules.append(replace(rule, **{part: make(rule) for part, make in changes.items()}))  # type: ignore[operator]
    assert tuple(rules) != getattr(family, table)
    return with_rules(family, table, tuple(rules))


def keys_for_values(rule):  # type: ignore[no-untyped-def]
    return (rule.hf[0], rule.hf[2], rule.hf[1])


HEAD = next(rule.hf for rule in FAMILIES["llama"].weights if rule.name == "output_layer.weight")
NORM = "input_layernorm.weight"
WRONG: dict[str, tuple[Family, str, str]] = {
    "keys for values, in vLLM": (
        mutated("rollout", "qkv_proj.weight", hf=keys_for_values),
        LOADED,
        "qkv_proj.weight: its rule puts model.layers.0.self_attn.v_proj.weight[0, 0]",
    ),
    "gate for up, in vLLM": (
        mutated("rollout", "gate_up_proj.weight", hf=lambda rule: rule.hf[::-1]),
        LOADED,
        "mlp.gate_up_proj.weight: its rule puts model.layers.0.mlp.up_proj.weight[0, 0] at (0, 0)",
    ),
    "no norms in vLLM": (mutated("rollout", NORM), LOADED, f"model.layers.0.{NORM}: no rule makes it"),
    "keys for values, in Megatron": (
        mutated("weights", "linear_qkv.weight", hf=keys_for_values),
        STATED,
        "where model.layers.0.self_attn.k_proj.weight[0, 0] belongs",
    ),
    "the head for the embedding": (
        mutated("weights", "word_embeddings.weight", hf=lambda rule: HEAD),
        STATED,
        "its rule puts lm_head.weight[0, 0] at (0, 0), where model.embed_tokens.weight[0, 0] belongs",
    ),
    "no norms on either side": (
        with_rules(mutated("weights", NORM), "rollout", mutated("rollout", NORM).rollout),
        NAMED,
        f"model.layers.1.{NORM} of shape (64,) is in transformers' model, and no training rule takes it",
    ),
    "another stage": (
        mutated("weights", "final_layernorm.weight", stage=lambda rule: Stage.first),
        STATED,
        "decoder.final_layernorm.weight: no rule makes it",
    ),
    "a dimension that is not there": (
        mutated("weights", "final_layernorm.weight", dim=lambda rule: 1),
        READABLE,
        "the rule of decoder.final_layernorm.weight: it cannot be read: IndexError",
    ),
    "no statement": (replace(FAMILIES["llama"], name="llamoid"), STATED, "llamoid: no statement of this family"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_a_wrong_table_is_not_proven(vllm: VllmProcess, case: str) -> None:
    family, check, said = WRONG[case]
    report = proven(vllm, family)
    failures = {each.proves: each.failures for each in report.checks}
    assert any(said in failure for failure in failures[check]), failures


def test_the_right_table_is_proven(vllm: VllmProcess) -> None:
    report = proven(vllm, FAMILIES["llama"])
    assert report.proven, [each.failures for each in report.checks]
    assert len(report.checks) == 11


LOADS: dict[str, dict[int, dict]] = {}


def proven(vllm: VllmProcess, family: Family):  # type: ignore[no-untyped-def]
    """The proof of a small llama with the tables of ``family``; vLLM loads it once."""

    def load(config: object, shapes: object, layout: RolloutLayout, latent: bool) -> dict[int, ParameterPlacement]:
        if "llama" not in LOADS:
            LOADS["llama"] = vllm.placements(config, shapes, layout, latent)  # type: ignore[arg-type]
        return LOADS["llama"]

    return prove(
        ProofSubject(
            config=TINY["llama"], family=family, parallel=parse_layout("tp=2,pp=2"), world_size=4,
            rollout=parse_rollout_layout("tp=2"), megatron=meta_rank, vllm=load,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rollout"),
    [
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "tp=8"),
        ("Qwen/Qwen2.5-72B-Instruct", "tp=16"),
        ("Qwen/Qwen3-235B-A22B", "tp=4,dp=2,ep=8"),
        ("deepseek-ai/DeepSeek-V3", "tp=8,dp=2,ep=16"),
        ("deepseek-ai/DeepSeek-V2", "tp=8"),
        ("moonshotai/Moonlight-16B-A3B", "tp=2,dp=2,ep=4"),
        ("moonshotai/Kimi-K2-Instruct", "tp=16,ep=16"),
        ("zai-org/GLM-4.5", "tp=16"),
        ("zai-org/GLM-4.5-Air", "tp=4,dp=2,ep=8"),
        ("zai-org/GLM-4.7-Flash", "tp=4,dp=2,ep=8"),
        ("MiniMaxAI/MiniMax-M2.5", "tp=8"),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", "tp=4"),
        ("HuggingFaceTB/SmolLM3-3B", "tp=2"),
        ("baidu/ERNIE-4.5-0.3B-PT", "tp=4"),
        ("google/gemma-2-2b-it", "tp=4"),
        ("google/gemma-3-1b-it", "tp=4"),
        ("microsoft/phi-4", "tp=2"),
        ("microsoft/Phi-4-mini-instruct", "tp=8"),
        ("allenai/OLMoE-1B-7B-0924-Instruct", "tp=8"),
        ("openai/gpt-oss-20b", "tp=2"),
        ("openai/gpt-oss-120b", "tp=4,dp=2,ep=8"),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "tp=4"),
    ],
)
def test_full_size_shapes_are_those_of_vllm(vllm: VllmProcess, name: str, rollout: str) -> None:
    """Of the first and the last rank: vLLM's own model classes on the meta device."""
    config = {key: value for key, value in FACTS[name].items() if key != "quantization_config"}
    layout, (family, model) = parse_rollout_layout(rollout), model_of(FACTS[name])
    table = RolloutTable(family, model, layout)
    ranks = [0, layout.tp * layout.engine_dp - 1]
    built = vllm.rollout_parameters(
        config, ranks=ranks, tp=layout.tp, dp=layout.engine_dp, expert_parallel=layout.ep > 1
    )
    for rank, held in zip(ranks, built, strict=True):
        stored = {tensor.parameter: tensor for tensor in table.tensors(rank)}
        assert {name: table.parameter_shape(tensor) for name, tensor in stored.items()} == {
            name: parameter.shape for name, parameter in held.items()
        }
        assert all(tuple(stored[name].experts) == parameter.experts for name, parameter in held.items())
        dtypes = {name: tensor.rule.dtype or "bfloat16" for name, tensor in stored.items()}
        assert dtypes == {name: parameter.dtype for name, parameter in held.items()}
