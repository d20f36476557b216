"""No wrong training table survives: every family, every mutant of a rule, by the statement and Megatron's modules.

``tests/e2e/test_reshard_into_vllm.py`` is the same for rollout tables, by vLLM.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.families.rules import Axis, Rule, Stage, hf
from mcore_rl.families.towers import PICTURES
from mcore_rl.ground.errors import WeightMapError
from mcore_rl.proofs import mutation, statements
from mcore_rl.proofs.mutation import (
    UNJUDGED,
    MutantJudge,
    MutantVerdict,
    case_failures,
    cases,
    family_score,
    judge_all,
    mutants,
    training_case,
    with_rules,
)
from mcore_rl.proofs.placement import placement_failures
from mcore_rl.proofs.statements import STATEMENTS, Statement, grouped, whole
from mcore_rl.training.meta import meta_rank
from tests.support import picture_models
from tests.support.published import TINY

DENSE = ("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")  # fields that make a layer dense


@pytest.mark.tier("ci")
@pytest.mark.parametrize("name", [*FAMILIES, *PICTURES])
def test_no_wrong_training_table_survives(name: str) -> None:
    made = cases(picture_models.config(name) if name in PICTURES else TINY[name], meta_rank, None)
    for case in made:
        assert case_failures(case) == []
    judged = list(judge_all(made))
    assert [f"{each.mutant}: {each.why}" for each in judged if each.verdict is MutantVerdict.survived] == []
    assert sum(each.verdict is MutantVerdict.failed for each in judged) > 150


@pytest.mark.parametrize("name", [name for name in FAMILIES if mutation.has_experts(TINY[name])])
def test_small_models_have_both_kinds_of_layers(name: str) -> None:
    """Else a rule of dense layers would be unchanged by everything."""
    moe = model_of(TINY[name])[1].moe
    assert moe is not None
    assert bool(moe.dense_layers) == any(TINY[name].get(field) for field in DENSE)


def test_every_way_to_be_wrong_is_tried() -> None:
    """By hand, of llama: each part of a rule, and the three mistakes that names do not show."""
    case = training_case(TINY["llama"], "tp=2", meta_rank)
    made = list(mutants(case.family, "weights", [case.model]))
    parts = Counter(mutant.part for mutant in made)
    assert parts.keys() == {
        "deleted", "doubled", "hf", "layout", "axis", "stage", "layers", "dim", "stacked", "turn", "dtype", "absent_ok",
        "only", "checkpoint", "stored_parts", "exchanged", UNJUDGED,
    }  # fmt: skip
    told = {str(mutant) for mutant in made}
    qkv, fc1 = "decoder.layers.{l}.self_attention.linear_qkv.weight", "decoder.layers.{l}.mlp.linear_fc1.weight"
    names = ["model.layers.{l}.self_attn.k_proj.weight", "model.layers.{l}.self_attn.v_proj.weight"]
    assert f"weights: {qkv}: hf {names[0]} and {names[1]} change places" in told
    assert f"weights: {qkv}: hf {names[0]} is {names[1]}" in told
    assert f"weights: {fc1}: hf lacks model.layers.{{l}}.mlp.up_proj.weight" in told
    assert "weights: embedding.word_embeddings.weight: exchanged with output_layer.weight" in told


def test_a_hole_is_a_survivor() -> None:
    """An oracle that does not look at a parameter lets its mutants live; so does a rule that no case has."""
    case = training_case(TINY["llama"], "tp=2", meta_rank)
    blind = {rank: dict(said) for rank, said in case.right.items()}
    said = case.read(case.family)
    name = "chunk 0 decoder.layers.0.self_attention.linear_qkv.weight"
    rule = next(rule for rule in case.family.weights if rule.name.endswith("linear_qkv.weight"))
    wrong = with_rules(case.family, "weights", tuple(
        replace(each, hf=(each.hf[0], each.hf[2], each.hf[1])) if each is rule else each for each in case.family.weights
    ))  # fmt: skip
    for rank in blind:  # what the wrong table says is right here
        blind[rank] |= {key: word for key, word in case.read(wrong).of(rank) if "linear_qkv" in key}
    assert dict(said.of(0))[name] is not blind[0][name]
    lived = [j for j in judge_all([replace(case, right=blind)]) if j.verdict is MutantVerdict.survived]
    assert any(
        "k_proj.weight and model.layers.{l}.self_attn.v_proj.weight change places" in str(j.mutant) for j in lived
    )
    nobody = Rule(
        "decoder.extra.weight", (hf("model.extra.weight", "hidden"),), stage=Stage.first, only=lambda model: False
    )
    unjudged = with_rules(case.family, "weights", (*case.family.weights, nobody))
    judged = [MutantJudge([replace(case, family=unjudged)])(each) for each in mutants(unjudged, "weights", [case.model])
              if each.rule == nobody.name]  # fmt: skip
    assert [each.verdict for each in judged] == [MutantVerdict.survived]


def test_an_idle_axis_is_named() -> None:
    """A norm that tensor ranks would each take for a part of their own."""
    case = training_case(TINY["llama"], "tp=2", meta_rank)
    rules = tuple(
        replace(rule, axis=Axis.tensor) if rule.name.endswith("final_layernorm.weight") else rule
        for rule in case.family.weights
    )
    wrong = with_rules(case.family, "weights", rules)
    (said,) = placement_failures(lambda: case.read(wrong), case.right, case.checkpoint, "rank")
    assert said.startswith("decoder.final_layernorm.weight: its rule cuts it over 2 ranks")


def stated(name: str, monkeypatch: pytest.MonkeyPatch, **layer: object) -> str:
    """What is wrong with the statement of family ``name`` and other lines for its layers."""
    changed = {key: line for key, line in (dict(STATEMENTS[name].layer) | layer).items() if line is not None}
    with monkeypatch.context() as patch:
        patch.setitem(STATEMENTS, name, Statement(STATEMENTS[name].outside, changed))  # type: ignore[arg-type]
        with pytest.raises(WeightMapError) as caught:
            training_case(TINY[name], "tp=2,pp=2,vpp=2", meta_rank)
    return "\n".join(caught.value.problems)


def test_a_wrong_statement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is missing, that names what is not there, that cuts in another way, that uses a tensor twice."""
    norm, qkv = "input_layernorm.weight", "self_attention.linear_qkv.weight"
    assert f"decoder.layers.0.{norm}: not stated: KeyError" in stated("llama", monkeypatch, **{norm: None})
    assert "not stated: KeyError: 'model.layers.0.no.weight'" in stated(
        "llama", monkeypatch, **{norm: whole("no.weight")}
    )
    query, key = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
    said = stated("llama", monkeypatch, **{qkv: grouped(query, key, key)})
    assert "the statement: model.layers.0.self_attn.v_proj.weight: 128 of its 128 elements are in no parameter" in said
    assert "its statement makes shape" in stated("llama", monkeypatch, **{qkv: whole(key)})


def test_a_family_without_a_statement_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(statements.STATEMENTS, "llama")
    score = family_score(TINY["llama"], meta_rank, lambda *_: {})
    assert score.judged == () and "llama: no statement of this family" in score.failures[0]


def test_every_statement_is_of_a_family() -> None:
    assert STATEMENTS.keys() == FAMILIES.keys() | PICTURES.keys()
