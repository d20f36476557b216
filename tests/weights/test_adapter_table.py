"""What a LoRA run trains, by hand for one layout; which layers are adapted; refusals that name what exists."""

from __future__ import annotations

import pytest

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.registry import FAMILIES
from mcore_rl.weights.adapter_table import PEFT, AdapterTable, linears, target_violations
from mcore_rl.weights.table import Table
from tests.support import models


def table(name: str, layout: str = "", world_size: int = 1, head: Head = Head.lm, **lora: object) -> AdapterTable:
    model = models.dense(num_layers=2) if name == "llama" else models.moe(num_layers=2)
    parallel = parse_layout(layout)
    return AdapterTable(Table(FAMILIES[name], model, parallel, world_size, head=head), LoraConfig(rank=3, **lora))  # type: ignore[arg-type]


def held(adapters: AdapterTable, rank: int, name: str) -> tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]]:
    """(shape, the tensors of PEFT's files that it is made of with the first element of each)."""
    (local,) = (each for each in adapters.tensors(rank) if each.name == name)
    return adapters.shape(local), [(piece.hf, piece.hf_start) for piece in adapters.pieces(local)]


def test_rows_split_have_a_whole_and_rows_of_b_and_columns_split_the_reverse() -> None:
    model = models.dense(num_layers=2)
    adapters, attention = table("llama", "tp=2", 2), f"{PEFT}model.layers.1.self_attn."
    query, hidden = model.num_attention_heads * model.head_dim, model.hidden_size
    ours = "decoder.layers.1.self_attention."
    assert held(adapters, 1, f"{ours}linear_qkv.lora_A.0") == (
        (3, hidden), [(f"{attention}q_proj.lora_A.weight", (0, 0))],
    )  # fmt: skip
    shape, pieces = held(adapters, 1, f"{ours}linear_qkv.lora_B.0")
    assert (shape, pieces[0]) == ((query // 2, 3), (f"{attention}q_proj.lora_B.weight", (query // 2, 0)))
    shape, pieces = held(adapters, 1, f"{ours}linear_qkv.lora_B.2")
    assert pieces[0][0] == f"{attention}v_proj.lora_B.weight"
    assert held(adapters, 1, f"{ours}linear_proj.lora_A.0") == (
        (3, query // 2), [(f"{attention}o_proj.lora_A.weight", (0, query // 2))],
    )  # fmt: skip
    assert held(adapters, 1, f"{ours}linear_proj.lora_B.0") == (
        (hidden, 3), [(f"{attention}o_proj.lora_B.weight", (0, 0))],
    )  # fmt: skip


def test_each_expert_has_its_own() -> None:
    model = models.moe(num_layers=2)
    assert model.moe is not None
    adapters = table("mixtral", "ep=2", 2)
    first = model.moe.num_experts // 2
    shape, pieces = held(adapters, 1, "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.lora_B.1")
    theirs = f"{PEFT}model.layers.0.block_sparse_moe.experts.{first}.w3.lora_B.weight"
    assert (shape, pieces) == ((model.moe.ffn_hidden_size, 3), [(theirs, (0, 0))])
    names = [name for name in adapters.hf_tensors if ".experts." in name]
    assert len(names) == 2 * model.moe.num_experts * 3 * 2, "layers, experts, linears, A and B"


def test_a_value_head_trains_beside_adapters() -> None:
    critic = table("llama", head=Head.value)
    assert "score.weight" in critic.hf_tensors and critic.canonical("output_layer.weight") == "output_layer.weight"
    assert table("llama").canonical("output_layer.weight") is None


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("decoder.layers.0.mlp.linear_fc1.lora.lora_A.1", "decoder.layers.0.mlp.linear_fc1.lora_A.1"),
        ("decoder.layers.0.mlp.experts.linear_fc2.lora.7.lora_B.0",
         "decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.lora_B.0"),
        ("decoder.layers.0.mlp.linear_fc1.weight", None),
        ("output_layer.weight", None),
    ],
)  # fmt: skip
def test_names_of_modules(key: str, name: str | None) -> None:
    assert table("llama").canonical(key) == name


def targets(**lora: object) -> set[str]:
    return {name.split(".lora_")[0].rpartition(".")[2] for name in table("llama", **lora).hf_tensors}  # type: ignore[arg-type]


def test_targets_are_those_of_peft() -> None:
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert targets() == every
    assert targets(target_modules=["q_proj", "mlp.up_proj"]) == {"q_proj", "up_proj"}
    assert targets(exclude_modules=["mlp.down_proj", "k_proj"]) == every - {"down_proj", "k_proj"}
    assert "j_proj" not in every and not targets(target_modules=["_proj"]), "parts of names between dots"


def test_the_output_projection_is_adapted_where_it_is_named_and_is_no_embedding() -> None:
    """Padding of the vocabulary is in B as in the weight: 101 rows over four ranks."""
    adapted = table("llama", "tp=4", 4, target_modules=["lm_head"])
    last, size = adapted.model.vocab_size, -(-adapted.model.vocab_size // 4)
    assert adapted.hf_tensors.keys() == {f"base_model.model.lm_head.lora_{which}.weight" for which in "AB"}
    (b,) = (each for each in adapted.tensors(3) if each.name == "output_layer.lora_B.0")
    assert last % 4 and adapted.shape(b) == (size, 3)
    assert sum(piece.shape[0] for piece in adapted.pieces(b)) == last - 3 * size
    tied = Table(FAMILIES["llama"], models.dense(num_layers=2, tie_output=True))
    (violation,) = target_violations(LoraConfig(rank=3, target_modules=["lm_head", "q_proj"]), tied, "actor.lora.")
    assert "'lm_head'" in str(violation)


def test_rows_of_a_fused_weight_follow_its_order_and_skip_what_is_not_adapted() -> None:
    base = Table(FAMILIES["llama"], models.dense(num_layers=1, num_query_groups=2))
    (qkv,) = (each for each in base.tensors(0) if each.name.endswith("linear_qkv.weight"))
    adapters = AdapterTable(base, LoraConfig(rank=3, target_modules=["q_proj", "v_proj"]))
    rows = adapters.adapted[id(qkv.rule)].rows(base.model, qkv)
    head, queries = base.model.head_dim, base.model.num_attention_heads * base.model.head_dim
    half = list(range(queries // 2)), list(range(queries // 2, queries))
    values = list(range(queries, queries + head)), list(range(queries + head, queries + 2 * head))
    assert rows == half[0] + [-1] * head + values[0] + half[1] + [-1] * head + values[1]


def test_unknown_targets_are_named_with_what_there_is() -> None:
    base = Table(FAMILIES["llama"], models.dense(num_layers=2))
    wrong = LoraConfig(rank=3, target_modules=["q_proj", "qkv"], exclude_modules=["w1"])
    violations = list(target_violations(wrong, base, "actor.lora."))
    assert [each.key for each in violations] == ["actor.lora.target_modules", "actor.lora.exclude_modules"]
    assert "'qkv'" in str(violations[0]) and "down_proj, gate_proj, k_proj" in str(violations[0])
    nothing = LoraConfig(rank=3, target_modules=["q_proj"], exclude_modules=["q_proj"])
    (violation,) = target_violations(nothing, base, "actor.lora.")
    assert "leave no layer" in str(violation)
    assert not list(target_violations(LoraConfig(rank=3), base, ""))
    (violation,) = target_violations(LoraConfig(rank=3, exclude_modules=["all-linear"]), base, "actor.lora.")
    assert violation.key == "actor.lora.exclude_modules", "it names no layer"


def test_routers_and_gates_of_experts_are_no_targets() -> None:
    names = linears(Table(FAMILIES["qwen2_moe"], models.qwen2_moe()))
    assert not any("gate." in f"{name}." or name.endswith("shared_expert_gate") for name in names), names
    assert any(name.endswith("experts.{e}.gate_proj") for name in names)
