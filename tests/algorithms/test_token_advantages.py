"""What the policy loss becomes off policy, from three log-probs of each token: by loops over lists, in float64.

The reference knows ``mu``, ``old`` and ``p`` of each token, and the formulas of docs/algorithms.md.  Its gradient is of
finite differences in which the weight ``old / mu`` stands still.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from mcore_rl.algorithms.correction import MEASURE, correction_metrics
from mcore_rl.algorithms.own_scores import own_scores
from mcore_rl.algorithms.policy import policy_loss
from mcore_rl.algorithms.token_advantages import Outcomes, TokenAdvantages, compute_advantages
from mcore_rl.config.algorithm import (
    AlgorithmConfig,
    CorrectionLevel,
    CorrectionMode,
    OffPolicy,
    Rejection,
    RolloutCorrectionConfig,
)
from mcore_rl.ground.types import NOT_DRAWN, TokenScores, TrainBatch
from tests.algorithms.cases import ALL, Case
from tests.algorithms.loss_cases import Minibatch, over_context, whole
from tests.support.settings import actor_config, algorithm_config

CLIP, STEP = 0.2, 1e-6
BOUNDS = dict(upper=1.5, lower=0.6)
CHOICES = [
    *((off_policy, CorrectionLevel.token, CorrectionMode.truncate) for off_policy in OffPolicy),
    *((OffPolicy.decoupled, *each) for each in list(product(CorrectionLevel, CorrectionMode))[1:]),
]


@dataclass(frozen=True)
class LogProbs:
    """Three log-probs and an advantage of each token of a case, by sequence; untrained ones are not numbers."""

    case: Case
    mu: list[list[float]]
    old: list[list[float]]
    p: list[list[float]]
    advantages: list[list[float]]

    @classmethod
    def drawn(cls, case: Case, seed: int, moved: float = 0.3) -> LogProbs:
        """moved: how far ``p`` is from ``old``."""
        draw = random.Random(seed)
        old = [[draw.gauss(-2, 1) if kept else math.nan for kept in mask] for mask in case.masks]
        mu = [[x + draw.gauss(0, 0.5) if x == x else 0.0 for x in row] for row in old]
        p = [[x + moved * draw.gauss(0, 1) if x == x else 0.0 for x in row] for row in old]
        return cls(case, mu, old, p, [[draw.gauss(0, 1) for _ in row] for row in old])


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def algorithm(off_policy: OffPolicy, level: CorrectionLevel, mode: CorrectionMode, **more: object) -> AlgorithmConfig:
    config = RolloutCorrectionConfig(level=level, mode=mode, **BOUNDS, **more)  # type: ignore[arg-type]
    return algorithm_config(adv_estimator="remax", off_policy=off_policy, rollout_correction=config)


def weight_by_hand(row: list[float], at: int, algorithm: AlgorithmConfig) -> tuple[float, bool]:
    """(weight, whether it is trained) of a token.  row: ``log(old / mu)`` of the response's trained tokens."""
    config = algorithm.rollout_correction
    if algorithm.off_policy is not OffPolicy.decoupled:
        return 1.0, True
    log_ratio = {
        CorrectionLevel.token: row[at],
        CorrectionLevel.sequence: math.fsum(row),
        CorrectionLevel.geometric: math.fsum(row) / len(row),
    }[config.level]
    ratio = math.exp(log_ratio)
    if config.mode is CorrectionMode.truncate:
        return min(ratio, config.upper), True
    inside = config.lower <= ratio <= config.upper
    return (ratio if inside else 0.0), inside or config.mode is CorrectionMode.zero


def loss_by_hand(x: LogProbs, algorithm: AlgorithmConfig) -> float:
    """The sum over trained tokens."""
    total = 0.0
    for index, mask in enumerate(x.case.masks):
        places = [place for place, kept in enumerate(mask) if kept]
        row = [x.old[index][place] - x.mu[index][place] for place in places]
        for at, place in enumerate(places):
            weight, trained = weight_by_hand(row, at, algorithm)
            before = x.mu if algorithm.off_policy is OffPolicy.bypass else x.old
            ratio = math.exp(x.p[index][place] - before[index][place])
            clipped, advantage = min(max(ratio, 1 - CLIP), 1 + CLIP), x.advantages[index][place]
            total += trained * weight * max(-advantage * ratio, -advantage * clipped)
    return total


def gradient_by_hand(x: LogProbs, algorithm: AlgorithmConfig) -> list[float]:
    """Of ``loss_by_hand`` with respect to ``p``, by central differences."""
    gradient = []
    for row, mask in zip(x.p, x.case.masks, strict=True):
        for place, kept in enumerate(mask):
            if not kept:
                gradient.append(0.0)
                continue
            middle, both = row[place], list[float]()
            for side in (STEP, -STEP):
                row[place] = middle + side
                both.append(loss_by_hand(x, algorithm))
            row[place] = middle
            gradient.append((both[0] - both[1]) / (2 * STEP))
    return gradient


def tokens_of(x: LogProbs, algorithm: AlgorithmConfig) -> TokenAdvantages:
    case, number = x.case, len(x.case.masks)
    batch = TrainBatch(
        lengths_S=case.lengths,
        tokens_T=torch.zeros(sum(case.lengths), dtype=torch.int64),
        mask_T=case.inputs().mask_T,
        old_logprobs_T=flat(x.old),
        rollout_logprobs_T=flat(x.mu),
    )
    outcomes = Outcomes(
        scores_S=torch.zeros(number), truncated_S=torch.zeros(number, dtype=torch.bool), greedy_S=torch.zeros(number)
    )
    tokens, stats = compute_advantages(batch, outcomes, algorithm, 0.0)
    assert stats.trained_S.tolist() == [int(each.sum()) for each in tokens.mask_T.split(list(case.lengths))]
    return tokens


def minibatch(x: LogProbs, algorithm: AlgorithmConfig) -> Minibatch:
    """What the actor's loss receives, ``p`` with gradient."""
    tokens = tokens_of(x, algorithm)
    old_T = flat(x.old) if tokens.old_logprobs_T is None else tokens.old_logprobs_T
    fields = {"logprobs": flat(x.p).requires_grad_(), "old_logprobs": old_T, "advantages": flat(x.advantages)}
    if tokens.weights_T is not None:
        fields["weights"] = tokens.weights_T
    return Minibatch(x.case.lengths, tokens.mask_T, fields)


LOSS = policy_loss(actor_config(clip_ratio=CLIP, clip_ratio_c=None))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(each.value for each in choice))
def test_loss_and_gradient_are_those_of_the_formula(
    choice: tuple[OffPolicy, CorrectionLevel, CorrectionMode],
) -> None:
    config, met = algorithm(*choice), set[bool]()
    for name, case in ALL.items():
        x = LogProbs.drawn(case, 7)
        batch = minibatch(x, config)
        total = LOSS(whole(batch)).total
        assert float(total.detach()) == pytest.approx(loss_by_hand(x, config), abs=1e-12), name
        (gradient_T,) = batch.gradients(total)
        assert gradient_T.tolist() == pytest.approx(gradient_by_hand(x, config), abs=1e-7), name
        met |= set((gradient_T == 0)[case.inputs().mask_T].tolist())
    assert met == {False, True}, "else nothing was clipped"


@pytest.mark.parametrize("level", list(CorrectionLevel))
def test_the_weight_has_no_gradient(level: CorrectionLevel) -> None:
    """In the first update ``old`` is ``p`` itself; the gradient is the weight's times that of ``recompute``."""
    x = LogProbs.drawn(ALL["drawn_3"], 8, moved=0.0)
    weighed, plain = (
        minibatch(x, algorithm(each, level, CorrectionMode.truncate))
        for each in (OffPolicy.decoupled, OffPolicy.recompute)
    )
    assert not weighed.fields["weights"].requires_grad
    of_weighed, of_plain = (each.gradients(LOSS(whole(each)).total)[0] for each in (weighed, plain))
    assert torch.allclose(of_weighed, weighed.fields["weights"] * of_plain, rtol=1e-12, atol=0)
    assert not torch.equal(of_weighed, of_plain)


def test_without_staleness_all_are_one_objective() -> None:
    """Where the sampler had the weights and the numbers of the trainer."""
    for case in ALL.values():
        x = LogProbs.drawn(case, 9)
        same = LogProbs(case, [[a if a == a else 0.0 for a in row] for row in x.old], x.old, x.p, x.advantages)
        losses = {float(LOSS(whole(minibatch(same, algorithm(*choice)))).total.detach()) for choice in CHOICES}
        assert len(losses) == 1


@pytest.mark.parametrize("off_policy", list(OffPolicy))
def test_a_rejection_goes_with_each(off_policy: OffPolicy) -> None:
    """Tokens of rejected responses are in no loss; the others' are as without a rejection."""
    more = dict(reject=Rejection.seq_mean_k1, reject_upper=1.2)
    for case in (ALL["drawn_3"], ALL["drawn_5"]):
        x = LogProbs.drawn(case, 10)
        rejecting, all_ = (
            tokens_of(x, algorithm(off_policy, CorrectionLevel.token, CorrectionMode.truncate, **each))
            for each in (more, {})
        )
        expected = []
        for old, mu, mask in zip(x.old, x.mu, case.masks, strict=True):
            changes = [a - b for a, b, kept in zip(old, mu, mask, strict=True) if kept]
            inside = not changes or abs(math.fsum(changes) / len(changes)) <= math.log(1.2)
            expected += [kept and inside for kept in mask]
        assert rejecting.mask_T.tolist() == expected and expected != all_.mask_T.tolist()
        if off_policy is OffPolicy.decoupled:
            assert rejecting.weights_T is not None and all_.weights_T is not None
            assert torch.equal(rejecting.weights_T, all_.weights_T.masked_fill(~rejecting.mask_T, 0))


@pytest.mark.parametrize("level", list(CorrectionLevel))
def test_context_ranks_add_up_to_the_whole(level: CorrectionLevel) -> None:
    """A rank that has half of a response weighs its tokens by the ratio of the whole response."""
    x = LogProbs.drawn(ALL["drawn_3"], 11)
    batch = minibatch(x, algorithm(OffPolicy.decoupled, level, CorrectionMode.truncate))
    expected = LOSS(whole(batch))
    for seed in range(3):
        split = over_context(LOSS, batch, seed)
        assert float(split.total.detach()) == pytest.approx(float(expected.total.detach()), rel=1e-12)


def test_what_no_sampler_drew_is_trained_and_not_measured() -> None:
    """A data set's answer beside two that were drawn: the agreement is that of the two, as if they were alone."""
    lengths, mask_T = (3, 4, 3), torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1]).bool()
    old_T = torch.linspace(-2, -1, 10)
    drawn_T = old_T + torch.linspace(-0.2, 0.3, 10)
    drawn_T[5:7] = NOT_DRAWN

    def measured(members: list[int]) -> tuple[TokenAdvantages, dict[str, float]]:
        whole = TrainBatch(
            lengths_S=lengths,
            tokens_T=torch.arange(10),
            mask_T=mask_T,
            rollout_logprobs_T=drawn_T,
            old_logprobs_T=old_T,
        ).select(members)
        outcomes = Outcomes(scores_S=torch.zeros(len(members)), truncated_S=torch.zeros(len(members)).bool())
        config = algorithm_config(adv_estimator="true_answer")
        tokens, stats = compute_advantages(whole, outcomes, config, 0.0)
        own = own_scores(whole, TokenScores(logprobs_T=whole.old_logprobs_T))
        assert stats.correction is not None
        metrics = [correction_metrics(each, MEASURE, weighs=False) for each in (stats.correction, own.correction)]
        assert metrics[0] == metrics[1]
        assert stats.trained_S.tolist() == [2] * len(members)
        return tokens, metrics[0]

    tokens, whole = measured([0, 1, 2])
    _, alone = measured([0, 2])
    assert torch.equal(tokens.mask_T, mask_T), "it is trained all the same"
    assert whole == pytest.approx(alone) and all(math.isfinite(x) for x in whole.values())
