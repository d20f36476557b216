"""Every tensor that a rollout rank holds otherwise than the trainer is named, with what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.sync.check import Expected, HeldFingerprints, Key, differences, expected_weights
from mcore_rl.weights.rollout_table import RolloutTable
from tests.support.checkpoints import MODELS

NORM, HEAD, EMBED, EXPERTS = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight", "experts.w2_weight"
# Two rollout ranks of ep=2: of four experts, rank 0 has 0 and 1, rank 1 has 2 and 3.
VALUES: dict[Key, int] = {
    (0, NORM, -1): 7,
    (1, NORM, -1): 7,
    (0, EMBED, -1): -3,
    (1, EMBED, -1): 11,
    **{(expert // 2, EXPERTS, expert % 2): 100 + expert for expert in range(4)},
}
VALUES[0, "experts.w13_weight", 0] = 500  # another stacked tensor
SLOTS = {(0, "experts.w13_weight", 0): 0} | {(expert // 2, EXPERTS, expert % 2): expert for expert in range(4)}
NOW = Expected(version=8, values=VALUES, experts=SLOTS)
BEFORE = Expected(version=5, values={key: value + 1000 for key, value in VALUES.items()}, experts=SLOTS)
WHOLE = HeldFingerprints(values=VALUES, copies={})


def holding(changes: Mapping[Key, int | None], copies: Mapping[tuple[int, str], str] | None = None) -> HeldFingerprints:
    """What is expected, but for ``changes``; None takes a tensor away."""
    values = {key: value for key, value in {**VALUES, **changes}.items() if value is not None}
    return HeldFingerprints(values=values, copies=copies or {})


def test_what_is_as_expected_is_not_named() -> None:
    assert differences(NOW, WHOLE) == differences(NOW, WHOLE, BEFORE) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({(1, NORM, -1): None}, f"rollout rank 1: {NORM} is missing: the worker has no such tensor"),
        ({(1, NORM, -1): 1007}, f"rollout rank 1: {NORM} is stale: version 5's, not version 8's"),
        ({(0, EMBED, -1): 4}, f"rollout rank 0: {EMBED} is wrong: neither version 8's nor version 5's"),
        ({(1, EXPERTS, 0): 4}, f"rollout rank 1: {EXPERTS} expert 2 is wrong: neither version 8's nor version 5's"),
        ({(1, EXPERTS, 1): 1103}, f"rollout rank 1: {EXPERTS} expert 3 is stale: version 5's, not version 8's"),
        ({(1, EXPERTS, 1): 100}, f"rollout rank 1: {EXPERTS} expert 3 is wrong: it holds expert 0"),
        ({(1, EXPERTS, 1): 500}, f"rollout rank 1: {EXPERTS} expert 3 is wrong: neither version 8's nor version 5's"),
        ({(0, EXPERTS, 1): None}, f"rollout rank 0: {EXPERTS} expert 1 is missing: the worker has no such tensor"),
        ({(1, "spare", -1): 0}, "rollout rank 1: spare (slot -1) is in the worker and not in the plan"),
    ],
)
def test_each_difference_is_one_sentence(changes: dict[Key, int | None], sentence: str) -> None:
    assert differences(NOW, holding(changes), BEFORE) == [sentence]


def test_two_that_changed_places_are_both_named() -> None:
    swapped = holding({(0, EXPERTS, 0): 101, (0, EXPERTS, 1): 100})
    assert differences(NOW, swapped) == [
        f"rollout rank 0: {EXPERTS} expert 0 is wrong: it holds expert 1",
        f"rollout rank 0: {EXPERTS} expert 1 is wrong: it holds expert 0",
    ]


def test_without_an_earlier_check_stale_is_wrong() -> None:
    assert differences(NOW, holding({(0, NORM, -1): 1007})) == [f"rollout rank 0: {NORM} is wrong: neither version 8's"]


def test_a_copy_is_held_against_what_it_is_a_copy_of() -> None:
    copies = {(0, HEAD): EMBED, (1, HEAD): EMBED}
    fresh = {(0, HEAD, -1): -3, (1, HEAD, -1): 11}
    assert differences(NOW, holding(fresh, copies), BEFORE) == []
    assert differences(NOW, holding(fresh | {(1, HEAD, -1): 1011}, copies), BEFORE) == [
        f"rollout rank 1: {HEAD}, the packed copy of {EMBED}, is stale: version 5's, not version 8's"
    ]


def test_answers_of_two_engines_become_one() -> None:
    """Of tp=2 and of tp=1: ranks 0 and 1, and rank 2."""
    first = HeldFingerprints.of(0, [[(NORM, -1, 7), ("w", 1, -9)], [(NORM, -1, 8)]], [{HEAD: EMBED}, {}])
    both = first.beside(HeldFingerprints.of(2, [[(NORM, -1, 9)]], [{HEAD: EMBED}]))
    assert both.values == {(0, NORM, -1): 7, (0, "w", 1): -9, (1, NORM, -1): 8, (2, NORM, -1): 9}
    assert both.copies == {(0, HEAD): EMBED, (2, HEAD): EMBED}


def test_training_ranks_add_their_parts_up_as_64_bits_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts at the ends of what 64 bits hold; and every tensor and expert of the table is expected."""
    table = RolloutTable(FAMILIES["mixtral"], MODELS["mixtral"], parse_rollout_layout("tp=2,ep=2"))
    stored = [(rank, tensor) for rank in range(2) for tensor in table.tensors(rank)]
    plain = [(rank, tensor.name, -1) for rank, tensor in stored if not tensor.experts]
    experts = {
        (rank, tensor.name, slot): number for rank, tensor in stored for slot, number in enumerate(tensor.experts)
    }
    assert set(experts.values()) == {0, 1, 2, 3}
    parts: list[dict[Key, int]] = [
        {plain[0]: (1 << 63) - 1, plain[1]: -5, plain[2]: -(1 << 63), next(iter(experts)): 1 << 40},
        {plain[0]: 2, plain[1]: 3, plain[2]: -1, next(iter(experts)): -(1 << 33)},
    ]
    publishers: list[Any] = [
        SimpleNamespace(
            rollout=table,
            tensors={(0, "w"): torch.zeros(1)},
            fingerprints=lambda mine=mine: mine,
            adapters=None,
            quantises=lambda _: False,
        )
        for mine in parts
    ]
    sent: list[torch.Tensor] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda halves: sent.append(halves.clone()))
    for publisher in publishers:
        expected_weights(publisher, 3)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda halves: halves.copy_(sent[0] + sent[1]))
    expectation = expected_weights(publishers[0], 3)
    assert expectation.version == 3 and expectation.experts == experts
    sums = {plain[0]: -(1 << 63) + 1, plain[1]: -2, plain[2]: (1 << 63) - 1, next(iter(experts)): (1 << 40) - (1 << 33)}
    assert expectation.values == {**dict.fromkeys([*plain, *experts], 0), **sums}
    assert differences(expectation, HeldFingerprints(values=expectation.values, copies={})) == []
    assert replace(expectation, version=4) != expectation
