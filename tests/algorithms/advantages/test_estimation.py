"""Every estimator against its formula, written out for plain lists of floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from random import Random

import pytest
import torch

from mcore_rl.algorithms.advantages.estimation import estimate, estimate_advantages
from mcore_rl.algorithms.advantages.gae import gae
from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs
from mcore_rl.algorithms.advantages.pairs import best_worst
from mcore_rl.algorithms.advantages.raft import best_of_n
from mcore_rl.algorithms.advantages.sppo import win_rate
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import Scope
from mcore_rl.config.algorithm_registry import estimators
from tests.algorithms.cases import ALL, EDGES, Case
from tests.support.settings import algorithm_config
from tests.support.spy import spied

Rows = list[list[float]]  # one entry a trained token
Reference = Callable[[Case, AlgorithmConfig], Rows]
GAMMA, LAM = 0.9, 0.8
WEIGHTS = [1.0, 0.25]  # of gdpo
PASS_K = 3
ETA = 0.7


def backwards(row: list[float], factor: float) -> list[float]:
    """y[t] = x[t] + factor * y[t + 1], by its explicit sum."""
    return [sum(factor ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]


def gae_by_hand(case: Case, config: AlgorithmConfig) -> tuple[Rows, Rows]:
    advantages, returns = [], []
    for rewards, values in zip(case.trained(case.rewards), case.trained(case.values), strict=True):
        after = [*values[1:], 0.0]
        deltas = [r + config.gamma * n - v for r, n, v in zip(rewards, after, values, strict=False)]
        row = backwards(deltas, config.gamma * config.lam)
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, values, strict=True)])
    return advantages, returns


def per_group(formula: Callable[[float, int, list[float], list[int]], float]) -> Reference:
    """``formula(own score, own place, scores of the group, lengths of the group)`` of members; 0 for only members."""

    def rows(case: Case, config: AlgorithmConfig) -> Rows:
        trained = case.trained(case.rewards)
        result = []
        for own, group in zip(trained, case.groups, strict=True):
            members = [row for row, other in zip(trained, case.groups, strict=True) if other == group and row]
            place = next((i for i, row in enumerate(members) if row is own), -1)
            scores = [math.fsum(row) for row in members]
            lone = len(members) < 2
            value = 0.0 if lone or not own else formula(scores[place], place, scores, [len(m) for m in members])
            result.append([value] * len(own))
        return result

    return rows


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def grpo_formula(score: float, place: int, scores: list[float], lengths: list[int]) -> float:
    centre = mean(scores)
    std = math.sqrt(math.fsum((s - centre) ** 2 for s in scores) / (len(scores) - 1))
    return 0.0 if len(set(scores)) == 1 else (score - centre) / (std + 1e-6)


def rloo_formula(score: float, place: int, scores: list[float], lengths: list[int]) -> float:
    return score - mean(scores[:place] + scores[place + 1 :])


def opo_formula(score: float, place: int, scores: list[float], lengths: list[int]) -> float:
    weighted = math.fsum(n * s for n, s in zip(lengths, scores, strict=True))
    return score - weighted / sum(lengths)


centred = per_group(lambda score, place, scores, lengths: score - mean(scores))


def gpg_by_hand(case: Case, config: AlgorithmConfig) -> Rows:
    rows, trained = centred(case, config), case.trained(case.rewards)
    total = sum(bool(row) for row in trained)
    silent = 0
    for group in set(case.groups):
        scores = [math.fsum(row) for row, other in zip(trained, case.groups, strict=True) if other == group and row]
        silent += len(scores) if len(set(scores)) == 1 else 0
    alpha = total / (total - silent) if total > silent else 1.0
    return [[alpha * x for x in row] for row in rows]


def remax_by_hand(case: Case, config: AlgorithmConfig) -> Rows:
    rows = [backwards(row, 1.0) for row in case.trained(case.rewards)]
    return [[x - greedy for x in row] for row, greedy in zip(rows, case.greedy, strict=True)]


def lite_ppo_by_hand(case: Case, config: AlgorithmConfig) -> Rows:
    scores = [math.fsum(row) for row in case.trained(case.rewards) if row]
    centre = mean(scores) if scores else 0.0
    std = math.sqrt(math.fsum((s - centre) ** 2 for s in scores) / (len(scores) - 1)) if len(scores) > 1 else 0.0
    return [[x / (std + 1e-6) for x in row] for row in centred(case, config)]


def gdpo_by_hand(case: Case, config: AlgorithmConfig) -> Rows:
    """arXiv:2601.05242: GRPO of each reward, their weighted sum, divided by its deviation over the batch."""
    trained, summed = case.trained(case.rewards), [0.0] * len(case.groups)
    compared = []
    for place, (group, row) in enumerate(zip(case.groups, trained, strict=True)):
        members = [i for i, other in enumerate(case.groups) if other == group and trained[i]]
        if not row or len(members) < 2:
            continue
        compared.append(place)
        for k, weight in enumerate(WEIGHTS):
            scores = [case.parts[i][k] for i in members]
            summed[place] += weight * grpo_formula(case.parts[place][k], 0, scores, [])
    centre = mean([summed[i] for i in compared]) if compared else 0.0
    std = math.sqrt(math.fsum((summed[i] - centre) ** 2 for i in compared) / max(len(compared) - 1, 1))
    return [
        [(z - centre) / (std + 1e-6) if place in compared else 0.0 for _ in row]
        for place, (z, row) in enumerate(zip(summed, trained, strict=True))
    ]


def best_of_n_formula(score: float, place: int, scores: list[float], lengths: list[int]) -> float:
    return 0.0 if score < max(scores) or len(set(scores)) == 1 else 1 / scores.count(score)


def pass_at_k_formula(score: float, place: int, scores: list[float], lengths: list[int]) -> float:
    """arXiv:2505.15201, eq. 33, set by set; a mean over the sets of the response."""
    size = min(PASS_K, len(scores))
    sets = [each for each in combinations(range(len(scores)), size) if place in each]
    gains = [max(scores[i] for i in each) - max(scores[i] for i in each if i != place) for each in sets]
    return mean(gains)


def win_rate_formula(score: float, place: int, scores: list[float], lengths: list[int]) -> float:
    won = [(score > other) + (score == other) / 2 for i, other in enumerate(scores) if i != place]
    return ETA * (mean(won) - 0.5)


def softmean_by_hand(case: Case, config: AlgorithmConfig) -> Rows:
    trained = case.trained(case.rewards)
    scores = [math.fsum(row) for row in trained]
    members = [math.exp(ETA * score) for score, row in zip(scores, trained, strict=True) if row]
    return [
        [ETA * score - math.log(mean(members or [1.0]))] * len(row) for score, row in zip(scores, trained, strict=True)
    ]


def raft_by_hand(case: Case, config: AlgorithmConfig) -> Rows:
    return [[max(math.fsum(row), 0.0)] * len(row) for row in case.trained(case.rewards)]


REFERENCES: dict[str, Reference] = {
    "gae": lambda case, config: gae_by_hand(case, config)[0],
    "grpo": per_group(grpo_formula),
    "dr_grpo": centred,
    "rloo": per_group(rloo_formula),
    "reinforce_plus_plus": lambda case, config: [backwards(row, config.gamma) for row in case.trained(case.rewards)],
    "prime": lambda case, config: [backwards(row, config.gamma) for row in case.trained(case.rewards)],
    "reinforce_plus_plus_baseline": centred,
    "remax": remax_by_hand,
    "gpg": gpg_by_hand,
    "opo": per_group(opo_formula),
    "lite_ppo": lite_ppo_by_hand,
    "gdpo": gdpo_by_hand,
    "raft": raft_by_hand,
    "best_of_n": per_group(best_of_n_formula),
    "pass_at_k": per_group(pass_at_k_formula),
    "win_rate": per_group(win_rate_formula),
    "softmean": softmean_by_hand,
    "none": lambda case, config: [[0.0] * len(row) for row in case.trained(case.rewards)],
}
COMPARES = {
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline",
    "gpg", "opo", "lite_ppo", "gdpo", "best_of_n", "pass_at_k", "win_rate",
}  # fmt: skip
WHITENED = {"gae", "prime", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}


def whitened_by_hand(case: Case, rows: Rows, estimator: str) -> Rows:
    """Over trained tokens, without those of only members where groups are compared; these stay 0."""
    members = [group for group, mask in zip(case.groups, case.masks, strict=True) if any(mask)]
    counts = [estimator not in COMPARES or members.count(group) > 1 for group in case.groups]
    flat = [x for row, counted in zip(rows, counts, strict=True) if counted for x in row]
    if not flat:
        return [[0.0] * len(row) for row in rows]
    centre = mean(flat)
    variance = math.fsum((x - centre) ** 2 for x in flat) / max(len(flat) - 1, 1)
    return [
        [(x - centre) / math.sqrt(variance + 1e-8) if counted else 0.0 for x in row]
        for row, counted in zip(rows, counts, strict=True)
    ]


def expected(case: Case, config: AlgorithmConfig) -> list[float]:
    rows = REFERENCES[config.adv_estimator](case, config)
    if config.adv_estimator in WHITENED or config.whiten_advantages:
        rows = whitened_by_hand(case, rows, config.adv_estimator)
    return case.at_tokens(rows)


# The others make pairs: test_pairs.py.
MADE = {name: row for name, row in estimators().items() if row.scope is not Scope.pair}


def test_every_estimator_has_its_formula_here() -> None:
    rows = MADE
    assert set(rows) == set(REFERENCES)
    # What prime is given was compared before: tests/algorithms/test_process_rewards.py.
    assert {name for name, row in rows.items() if row.min_group > 1} == COMPARES | {"prime"}
    assert {name for name, row in rows.items() if row.whitens} == WHITENED
    needs = {name: row.role_names for name, row in rows.items() if row.roles}
    assert needs == {"gae": ("critic",), "prime": ("process_reward",)}
    assert {name for name, row in rows.items() if row.greedy} == {"remax"}
    assert {name for name, row in rows.items() if row.parts} == {"gdpo"}


@pytest.mark.parametrize("name", list(MADE))
def test_an_estimator_reads_the_keys_that_it_says(name: str) -> None:
    row, case = MADE[name], ALL["drawn_0"]
    inputs = case.inputs()
    groups = PromptGroups.of(case.group_S, inputs.scores_S, inputs.counts_S, case.parts_SK())
    given = inputs if row.scope is Scope.token else groups
    config, read = spied(algorithm_config(adv_estimator=name))
    row.load()(given, config)
    if row.parts:  # the controller reads them, where it gathers the parts of the rewards
        read.add("gdpo_reward_keys")
    if name == "prime":  # the controller reads them, where it compares
        read |= {"process_coef", "outcome_coef", "process_norm"}
    assert {f"algorithm.{field}" for field in read} == row.own_keys


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("estimator", list(MADE))
def test_advantages_are_those_of_the_formula(estimator: str, whiten: bool) -> None:
    config = algorithm_config(
        adv_estimator=estimator,
        gamma=GAMMA,
        lam=LAM,
        whiten_advantages=whiten,
        gdpo_reward_weights=WEIGHTS,
        pass_k=PASS_K,
        sppo_eta=ETA,
    )
    for name, case in ALL.items():
        advantages_T = estimate_advantages(case.inputs(), case.group_S, config, case.parts_SK()).advantages_T
        assert advantages_T.dtype == torch.float64
        # Float64 rounding, which whitening of all but equal values enlarges by up to 1 / sqrt(1e-8).
        torch.testing.assert_close(
            advantages_T, torch.tensor(expected(case, config), dtype=torch.float64), atol=1e-10, rtol=1e-10, msg=name
        )


@pytest.mark.parametrize("estimator", list(MADE))
def test_float32_is_near(estimator: str) -> None:
    config = algorithm_config(
        adv_estimator=estimator, gamma=GAMMA, lam=LAM, gdpo_reward_weights=WEIGHTS, pass_k=PASS_K, sppo_eta=ETA
    )
    for name, case in ALL.items():
        inputs, parts_SK = case.inputs(torch.float32), case.parts_SK(torch.float32)
        advantages_T = estimate_advantages(inputs, case.group_S, config, parts_SK).advantages_T
        assert advantages_T.dtype == torch.float32
        torch.testing.assert_close(advantages_T, torch.tensor(expected(case, config)), atol=2e-5, rtol=2e-5, msg=name)


def test_gae_returns_are_not_whitened() -> None:
    config = algorithm_config(adv_estimator="gae", gamma=GAMMA, lam=LAM)
    for case in ALL.values():
        returns_T = estimate_advantages(case.inputs(), case.group_S, config).returns_T
        by_hand = case.at_tokens(gae_by_hand(case, config)[1])
        torch.testing.assert_close(returns_T, torch.tensor(by_hand, dtype=torch.float64), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("estimator", [e for e in MADE if e != "gae"])
def test_without_a_critic_there_are_no_returns(estimator: str) -> None:
    config = algorithm_config(adv_estimator=estimator)
    case = ALL["drawn_0"]
    assert estimate_advantages(case.inputs(), case.group_S, config, case.parts_SK()).returns_T is None


@pytest.mark.parametrize("estimator", sorted(COMPARES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_and_only_members_give_exactly_nothing(estimator: str, dtype: torch.dtype) -> None:
    config = algorithm_config(adv_estimator=estimator)
    for name in ("equal_rewards", "only_one_member_groups", "empty_response_leaves_one_member", "all_masked"):
        case = EDGES[name]
        advantages_T = estimate_advantages(case.inputs(dtype), case.group_S, config, case.parts_SK(dtype)).advantages_T
        assert not advantages_T.any(), name


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("estimator", list(MADE))
def test_what_stands_at_untrained_tokens_poisons_nothing(estimator: str, whiten: bool) -> None:
    config = algorithm_config(
        adv_estimator=estimator,
        gamma=GAMMA,
        lam=LAM,
        whiten_advantages=whiten,
        gdpo_reward_weights=WEIGHTS,
        pass_k=PASS_K,
        sppo_eta=ETA,
    )
    for case in ALL.values():
        clean = case.inputs()
        assert clean.values_T is not None
        broken = replace(
            clean,
            process_T=clean.rewards_T.masked_fill(~clean.mask_T, math.nan),
            values_T=clean.values_T.masked_fill(~clean.mask_T, math.inf),
        )
        of_broken, of_clean = (
            estimate_advantages(each, case.group_S, config, case.parts_SK()) for each in (broken, clean)
        )
        assert torch.equal(of_broken.advantages_T, of_clean.advantages_T)


def test_an_empty_response_does_not_move_its_siblings() -> None:
    config = algorithm_config(adv_estimator="grpo")
    case = EDGES["empty_response"]
    with_empty = estimate_advantages(case.inputs(), case.group_S, config).advantages_T
    value = 0.5 / (math.sqrt(0.5) + 1e-6)  # the scores are 1 and 0
    assert with_empty.tolist() == pytest.approx([0, value, value, 0, 0, 0, 0, -value])


def test_gae_by_hand_numbers() -> None:
    inputs = AdvantageInputs(
        lengths_S=(3,),
        mask_T=torch.tensor([False, True, True]),
        outcome_S=torch.tensor([1.0], dtype=torch.float64),
        values_T=torch.tensor([0.0, 0.5, 0.25], dtype=torch.float64),
    )
    config = algorithm_config(adv_estimator="gae", gamma=0.5, lam=0.5)
    # deltas: 0 + 0.5 * 0.25 - 0.5 = -0.375 and 1 - 0.25 = 0.75; A_1 = -0.375 + 0.25 * 0.75 = -0.1875
    assert gae(inputs, config).advantages_T.tolist() == [0.0, -0.1875, 0.75]


@pytest.mark.parametrize("field", ["values_T", "greedy_S"])
def test_what_is_needed_is_asked_for(field: str) -> None:
    estimator = {"values_T": "gae", "greedy_S": "remax"}[field]
    inputs = replace(ALL["drawn_0"].inputs(), **{field: None})  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=field):
        estimate_advantages(inputs, ALL["drawn_0"].group_S, algorithm_config(adv_estimator=estimator))


def test_misshapen_inputs_are_refused() -> None:
    with pytest.raises(AssertionError, match="outcome_S"):
        replace(ALL["drawn_0"].inputs(), outcome_S=torch.tensor([0.0]))


def test_the_parts_are_asked_for() -> None:
    case = ALL["drawn_0"]
    with pytest.raises(AssertionError, match="parts_SK"):
        estimate_advantages(case.inputs(), case.group_S, algorithm_config(adv_estimator="gdpo"))


def test_a_response_that_is_masked_stays_in_the_baseline_or_leaves_it() -> None:
    """Scores 1, 1, 0, 0 of one prompt, the last two cut off; members are of one token each."""
    group_S, scores_S = torch.zeros(4).long(), torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    trained_S, all_S = torch.tensor([1, 1, 0, 0]), torch.ones(4).long()
    for estimator in sorted(COMPARES - {"gdpo"}):
        config = algorithm_config(adv_estimator=estimator)
        left = estimate(group_S, scores_S, trained_S, None, config)
        assert left.advantages_S is not None and not left.advantages_S.any(), estimator
        stayed = estimate(group_S, scores_S, trained_S, None, config, members_S=all_S)
        assert stayed.advantages_S is not None and stayed.spread is not None
        if estimator == "reinforce_plus_plus_baseline":  # whitened over what is trained: two equal values
            assert stayed.advantages_S[:2].abs().max() < 1e-12
        else:
            assert (stayed.advantages_S[:2] > 0).all(), estimator
            assert stayed.spread.count == 2 and stayed.spread.low == stayed.spread.high == stayed.advantages_S[0]


DECIMALS = ("0.1", "0.2", "0.3", "0.7", "-0.4", "1000.1", "1000.3")


@pytest.mark.parametrize("seed", range(20))
def test_scores_that_differ_by_rounding_are_equal_where_they_are_ranked(seed: int) -> None:
    """The parts of each score are added by Python's decimals, exactly, and by floats in another order."""
    draw = Random(seed)
    chosen = [[draw.choice(DECIMALS) for _ in range(3)] for _ in range(4)]
    parts = [draw.sample(each, 3) for each in (*chosen, chosen[0], chosen[1])]
    exact = [sum(map(Decimal, each)) for each in parts]
    for dtype in (torch.float32, torch.float64):
        scores_S = torch.stack([torch.tensor([float(part) for part in each], dtype=dtype).sum() for each in parts])
        groups = PromptGroups.of(torch.zeros(6, dtype=torch.int64), scores_S, torch.ones(6, dtype=torch.int64))
        ranked = groups.ranked_S.tolist()
        assert [[a < b for a in ranked] for b in ranked] == [[a < b for a in exact] for b in exact]
        won = win_rate(groups, algorithm_config("win_rate", sppo_eta=1.0))
        expected = [sum((a > b) - (a < b) for b in exact) / 10 for a in exact]
        assert won.tolist() == pytest.approx(expected, abs=1e-6)
        best = best_of_n(groups, algorithm_config())
        top = [each == max(exact) for each in exact] if len(set(exact)) > 1 else [False] * 6
        assert best.tolist() == pytest.approx([is_top / max(1, sum(top)) for is_top in top])
        (pair,) = best_worst(scores_S.tolist()) or [None]
        assert pair == (None if len(set(exact)) == 1 else (exact.index(max(exact)), exact.index(min(exact))))
