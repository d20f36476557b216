"""The proof at published sizes: right tables pass, and one that is wrong beyond a size alone is named.

Such a table says of every reduced model what the right one says, so that no other check sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.rollout import RolloutLayout, parse_rollout_layout
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.families.rules import Range, Rule, ShardLayout, ShardRanges, Sizes
from mcore_rl.parallel.layout import balanced_layers, layout_violations
from mcore_rl.proofs.full_size import NumberGrid, full_size_failures, joined, narrow_config, width_failures
from mcore_rl.proofs.hf_model import HfShapes, hf_shapes
from mcore_rl.proofs.prove import STATED, STATED_FULL, ProofSubject, prove
from mcore_rl.proofs.statements import STATEMENTS
from mcore_rl.proofs.tracer import reduced_config
from mcore_rl.training.meta import meta_rank
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from tests.support.published import FACTS

LARGEST: dict[str, str] = {}  # family -> its published model with most layers
for _name, _facts in FACTS.items():
    if not _name.startswith("tiny-"):
        _family = model_of(_facts)[0].name
        held = LARGEST.get(_family)
        if held is None or FACTS[held]["num_hidden_layers"] < _facts["num_hidden_layers"]:
            LARGEST[_family] = _name
# transformers makes tens of thousands of tensors
DEAR = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "qwen3_moe", "qwen3_next")
NAMES = [pytest.param(name, marks=pytest.mark.tier("full") if name in DEAR else ()) for name in LARGEST]
SHARING = "query heads of a key/value head"  # which the reduced model keeps
# What a rule could be wrong beyond, and the bound, which no other reduced model exceeds.
SIZES: dict[str, tuple[Callable[[ModelConfig], int], int]] = {
    SHARING: (lambda model: model.num_attention_heads // model.num_query_groups, 2),
    "ffn": (lambda model: model.ffn_hidden_size, 4096),
    "hidden": (lambda model: model.hidden_size, 2048),
    "layers": (lambda model: model.num_layers, 8),
    "vocabulary": (lambda model: model.vocab_size, 4096),
    "experts": (lambda model: model.moe.num_experts if model.moe else 0, 7),
    "width of experts": (lambda model: model.moe.ffn_hidden_size or 0 if model.moe else 0, 512),
}


@lru_cache(maxsize=2)
def _shapes(name: str) -> HfShapes:
    family, _ = model_of(FACTS[name])
    return hf_shapes(FACTS[name], family.model_type)


def _layout(model: ModelConfig, tp: int = 4) -> ParallelConfig:
    while True:
        parallel = parse_layout(f"tp={tp},pp=2,ep=2" if model.moe else f"tp={tp},pp=2")
        parallel.pipeline_layers = balanced_layers(model.num_layers, 2)
        if not layout_violations(model, parallel, tp * 2):
            return parallel
        tp //= 2
        assert tp, "fits no layout"


def _failures(family_name: str, rules: tuple[Rule, ...] | None = None) -> list[str]:
    facts = FACTS[LARGEST[family_name]]
    family, model = model_of(facts)
    parallel = _layout(model)
    wrong = family if rules is None else replace(family, weights=rules)
    table = Table(wrong, model, parallel, parallel.tp * parallel.pp)
    compared, failures = full_size_failures(table, STATEMENTS[family_name], facts, _shapes(LARGEST[family_name]))
    assert compared
    return failures


@pytest.mark.parametrize("name", NAMES)
def test_right_tables_pass(name: str) -> None:
    assert _failures(name) == []


def exchanged_parts(model: ModelConfig, shard: ShardRanges) -> ShardRanges:
    """Up before gate, values before queries: the parts of a shard in another order."""
    return replace(shard, ranges=tuple(sorted(shard.ranges, key=lambda each: -each.source)))


def exchanged_heads(model: ModelConfig, shard: ShardRanges) -> ShardRanges:
    """Neighbouring ranges of one tensor change places: heads of two groups, or halves of one range."""
    if not shard.ranges or shard.ranges[0].end - shard.ranges[0].begin < 2:
        return shard
    first = shard.ranges[0]
    others = [n for n, each in enumerate(shard.ranges) if n and each.source == first.source]
    size = first.end - first.begin
    ranges = list(shard.ranges)
    if others and ranges[others[0]].end - ranges[others[0]].begin == size:
        ranges[0], ranges[others[0]] = ranges[others[0]], ranges[0]
    else:
        middle = first.begin + size // 2
        ranges[:1] = [Range(first.source, middle, first.end), Range(first.source, first.begin, middle)]
    return replace(shard, ranges=tuple(ranges))


def shifted(model: ModelConfig, shard: ShardRanges) -> ShardRanges:
    """The last element of the first range twice, and the first not at all."""
    if not shard.ranges or shard.ranges[0].end - shard.ranges[0].begin < 2:
        return shard
    first, *rest = shard.ranges
    return replace(shard, ranges=(Range(first.source, first.begin + 1, first.end),
                                  Range(first.source, first.end - 1, first.end), *rest))  # fmt: skip


Change = Callable[[ModelConfig, ShardRanges], ShardRanges]
WRONG: tuple[Change, ...] = (exchanged_parts, exchanged_heads, shifted)


@dataclass(frozen=True)
class Beyond:
    """``layout``, and beyond the bound of ``size`` what ``change`` makes of it; None: ranks in the other order."""

    layout: ShardLayout
    change: Change | None
    size: str

    def __call__(self, model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
        measure, bound = SIZES[self.size]
        if measure(model) <= bound:
            return self.layout(model, sizes, num_shards, index)
        if self.change is None:
            return self.layout(model, sizes, num_shards, num_shards - 1 - index)
        return self.change(model, self.layout(model, sizes, num_shards, index))


def _mutants(family_name: str) -> Iterator[tuple[str, Rule]]:
    facts = FACTS[LARGEST[family_name]]
    family, model = model_of(facts)
    parallel = _layout(model)
    small = model_of(reduced_config(facts, replace(parallel, pipeline_layers=None), RolloutLayout()))[1]
    table = Table(family, model, parallel, parallel.tp * parallel.pp)
    shards = {local.rule: local for rank in range(table.layout.world_size) for local in table.tensors(rank)}
    sizes = [size for size, (measure, bound) in SIZES.items() if measure(model) > bound]
    for size in sizes:
        measure, bound = SIZES[size]
        assert size == SHARING or measure(small) <= bound, f"{size}: a reduced model has {measure(small)}"
    turn = count()
    for rule, local in shards.items():
        for change in (*WRONG, None):
            size = sizes[next(turn) % len(sizes)]
            wrong = replace(rule, layout=Beyond(rule.layout, change, size))
            if rule.shard(model, local.num_shards, local.index) != wrong.shard(model, local.num_shards, local.index):
                yield f"{rule.name}: {change.__name__ if change else 'ranks'}: {size}", wrong


@pytest.mark.parametrize("name", NAMES)
def test_no_table_that_is_wrong_beyond_a_size_passes(name: str) -> None:
    made = list(_mutants(name))
    assert len(made) > 15
    assert [told for told, rule in made if not _failures(name, (rule,))] == []


@pytest.mark.parametrize(
    ("end", "change", "size", "only_here"),
    [
        ("linear_fc1.weight", exchanged_parts, "ffn", True),
        ("word_embeddings.weight", None, "vocabulary", True),
        ("linear_qkv.weight", exchanged_heads, SHARING, False),
    ],
)
def test_the_prover_does_not_say_proven(end: str, change: Change | None, size: str, only_here: bool) -> None:
    """The last one is found in the reduced model, too, which has as many query heads for a key/value head."""
    facts = FACTS["meta-llama/Llama-3.1-8B-Instruct"] | {"num_hidden_layers": 4}
    family = FAMILIES["llama"]
    rules = tuple(
        replace(rule, layout=Beyond(rule.layout, change, size)) if rule.name.endswith(end) else rule
        for rule in family.weights
    )
    subject = ProofSubject(
        config=facts, family=replace(family, weights=rules), parallel=parse_layout("tp=2"), world_size=2, rollout=None,
        megatron=meta_rank, vllm=lambda *_: {},
    )  # fmt: skip
    failed = [each.proves for each in prove(subject).checks if each.failures]
    assert failed == ([STATED_FULL] if only_here else [STATED_FULL, STATED])
    assert prove(replace(subject, family=family)).proven


@pytest.mark.parametrize("name", list(LARGEST))
def test_vllms_tables_cut_wide_tensors_as_narrow_ones(name: str) -> None:
    """And one that does not is named, for each rule of the MLPs and of the vocabulary that is cut."""
    facts = FACTS[LARGEST[name]]
    family, model = model_of(facts)
    for layout in map(parse_rollout_layout, ("tp=2", "tp=1")):
        count, failures = width_failures(family, facts, layout)
        assert count and failures == []
    tp = parse_rollout_layout("tp=2")
    table, num_wrong = RolloutTable(family, model, tp), 0
    narrow = model_of(narrow_config(facts, 2))[1]
    for rule in table.rules:
        for size, (measure, bound) in SIZES.items():
            vocabulary = size == "vocabulary"
            if measure(model) <= bound or (measure(narrow) > bound and not vocabulary):
                continue
            if vocabulary and rule.hf[0].dims[0] != "vocab":
                continue
            for change in (*WRONG, None):
                wrong = replace(rule, layout=Beyond(rule.layout, change, size))
                count = table.num_shards(rule)
                if rule.shard(model, count, 0) == wrong.shard(model, count, 0):
                    continue
                num_wrong += 1
                assert width_failures(replace(family, rollout=(wrong,)), facts, tp)[1], (rule.name, size, change)
    assert num_wrong > (2 if name == "ernie4_5" else 5)  # whose one published size is narrow


def test_a_grid_is_what_numpy_makes_of_the_whole_array() -> None:
    """Each of the functions that statements use, on a matrix, a vector and a stack."""

    def whole(grid: NumberGrid) -> Any:
        return grid.rows if grid.columns is None else grid.rows[..., None] + grid.columns

    matrix = NumberGrid(100 + 6 * np.arange(8), np.arange(6))
    stack = NumberGrid(1 + 6 * np.arange(12).reshape(3, 4), np.arange(6))
    makes: list[Callable[[Any], Any]] = [
        lambda a: a[2:7, 1:5],
        lambda a: a.T,
        lambda a: a[..., 1::2].T,
        lambda a: np.split(a, 4, axis=0)[2],
        lambda a: np.split(a, [1, 5])[1],
        lambda a: np.split(a, 3, axis=1)[1],
        lambda a: np.concatenate([a[4:], a[:2]]),
        lambda a: a.reshape(2, -1, 2, 6)[:, :, 1].reshape(-1, 6),
        lambda a: np.concatenate([a.reshape(2, -1, 6), a.reshape(2, -1, 6)], axis=1).reshape(-1, 6),
    ]
    for make in makes:
        assert np.array_equal(whole(make(matrix)), make(whole(matrix)))
    for make in (lambda a: a[1], lambda a: a[2][..., 0::2].T, lambda a: a[1][1:3].T):
        assert np.array_equal(whole(make(stack)), make(whole(stack)))
    assert np.array_equal(whole(NumberGrid(np.arange(9)).reshape(3, -1)[1]), [3, 4, 5])
    padded = joined([matrix, np.zeros((2, 6), dtype=np.int64)])
    assert padded.shape == (10, 6) and not padded.same(joined([matrix, matrix[:2]]))
    with pytest.raises(TypeError):
        np.cumsum(matrix)  # type: ignore[call-overload]
