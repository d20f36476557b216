"""The choice of experts and their weights against transformers' routers, and the balance loss of sigmoids by hand.

Scores of both sides come from the same float32 operations, so choices must be equal and weights differ by rounding of
6e-8 at most; the bound is 1e-6.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, Qwen2MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from mcore_rl.config.engine import AuxLoss, LayerSpec, MoeTrainConfig
from mcore_rl.config.model import MoeConfig, RouterScore
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.training.model import transformer_config
from mcore_rl.training.router import RoutedMicrobatch, Router, RouterState, within_best_groups
from tests.support import engines, models

TOLERANCE = 1e-6
NUM_TOKENS, NUM_EXPERTS = 500, 16
DEEPSEEK = MoeConfig(
    num_experts=NUM_EXPERTS,
    top_k=4,
    ffn_hidden_size=8,
    score=RouterScore.sigmoid,
    expert_bias=True,
    num_groups=4,
    top_k_groups=2,
    routed_scaling_factor=2.5,
)
QWEN = MoeConfig(num_experts=NUM_EXPERTS, top_k=4, ffn_hidden_size=8)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def router(moe: MoeConfig, bias_E: Tensor | None = None) -> Router:
    """One that is fed with logits; Megatron's constructor would want process groups."""
    built = Router.__new__(Router)
    torch.nn.Module.__init__(built)
    built.config = transformer_config(models.dense(moe=moe), ParallelConfig(), engines.config(), LayerSpec.local)
    built.topk, built.score_function, built.expert_bias = moe.top_k, moe.score.value, bias_E
    return built


def dense_weights(choices_MK: Tensor, weights_MK: Tensor) -> Tensor:
    """Weights by expert, so that the order of the chosen does not matter."""
    return torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter(1, choices_MK, weights_MK)


def chosen(of: Router, logits_ME: Tensor) -> tuple[Tensor, Tensor]:
    """(weights [M, K], experts [M, K]) that the router chooses itself."""
    scores_ME = of._scores(logits_ME)
    choices_MK = of._own_choices(scores_ME)
    return of._weights(scores_ME, choices_MK), choices_MK


@pytest.mark.parametrize(
    "moe",
    [
        DEEPSEEK,
        replace(DEEPSEEK, norm_topk_prob=False),
        replace(DEEPSEEK, num_groups=1, top_k_groups=1),
        replace(DEEPSEEK, num_groups=2, top_k=3),
        replace(DEEPSEEK, num_groups=8, top_k_groups=5, top_k=7),
        replace(DEEPSEEK, top_k=1, routed_scaling_factor=1.0),
    ],
)
def test_deepseeks_choice(moe: MoeConfig) -> None:
    config = DeepseekV3Config(
        hidden_size=NUM_EXPERTS, n_routed_experts=moe.num_experts, num_experts_per_tok=moe.top_k,
        n_group=moe.num_groups, topk_group=moe.top_k_groups, norm_topk_prob=moe.norm_topk_prob,
        routed_scaling_factor=moe.routed_scaling_factor,
    )  # fmt: skip
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.data.copy_(torch.eye(NUM_EXPERTS))  # tokens are logits
    bias_E, logits_ME = 0.3 * random(NUM_EXPERTS, seed=1), random(NUM_TOKENS, NUM_EXPERTS)
    theirs.e_score_correction_bias.copy_(bias_E)
    _, their_weights_MK, their_choices_MK = theirs(logits_ME)

    weights_MK, choices_MK = chosen(router(moe, bias_E), logits_ME)
    assert torch.equal(choices_MK.sort().values, their_choices_MK.sort().values)
    expected = dense_weights(their_choices_MK, their_weights_MK)
    torch.testing.assert_close(dense_weights(choices_MK, weights_MK), expected, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_qwens_choice(norm_topk_prob: bool) -> None:
    config = Qwen2MoeConfig(
        hidden_size=NUM_EXPERTS, num_experts=NUM_EXPERTS, num_experts_per_tok=QWEN.top_k, norm_topk_prob=norm_topk_prob
    )
    theirs = Qwen2MoeTopKRouter(config)
    theirs.weight.data.copy_(torch.eye(NUM_EXPERTS))
    logits_ME = random(NUM_TOKENS, NUM_EXPERTS)
    _, their_weights_MK, their_choices_MK = theirs(logits_ME)
    weights_MK, choices_MK = chosen(router(replace(QWEN, norm_topk_prob=norm_topk_prob)), logits_ME)
    assert torch.equal(choices_MK, their_choices_MK), "both come in the order of the scores"
    torch.testing.assert_close(weights_MK, their_weights_MK, rtol=TOLERANCE, atol=0)


def test_the_bias_and_the_groups_change_choices() -> None:
    """Else the tests above could not tell whether they take part."""
    bias_E, logits_ME = 0.3 * random(NUM_EXPERTS, seed=1), random(NUM_TOKENS, NUM_EXPERTS)
    _, choices_MK = chosen(router(DEEPSEEK, bias_E), logits_ME)
    for other in (router(DEEPSEEK), router(replace(DEEPSEEK, num_groups=1, top_k_groups=1), bias_E)):
        _, others_MK = chosen(other, logits_ME)
        differ_M = (choices_MK.sort().values != others_MK.sort().values).any(1)
        assert differ_M.float().mean() > 0.2


@pytest.mark.parametrize("moe", [DEEPSEEK, QWEN])
def test_dictated_experts_get_the_weights_of_their_scores(moe: MoeConfig) -> None:
    logits_ME, bias_E = random(NUM_TOKENS, NUM_EXPERTS), 10 * random(NUM_EXPERTS, seed=1)
    dictated_MK = random(NUM_TOKENS, NUM_EXPERTS, seed=2).topk(moe.top_k).indices
    sigmoid = moe.score is RouterScore.sigmoid
    dictating = router(moe, bias_E if sigmoid else None)
    weights_MK = dictating._weights(dictating._scores(logits_ME), dictated_MK)
    scores_MK = (torch.sigmoid(logits_ME) if sigmoid else torch.exp(logits_ME)).double().gather(1, dictated_MK)
    expected_MK = scores_MK / scores_MK.sum(-1, keepdim=True) * moe.routed_scaling_factor
    torch.testing.assert_close(weights_MK.double(), expected_MK, rtol=TOLERANCE, atol=0)


def test_the_two_best_of_a_group_rank_it() -> None:
    #  the best expert stands in the first group, the best pair in the second
    ranked_ME = torch.tensor([[9.0, 0.0, 0.0, 6.0, 5.0, 0.0, 7.0, 1.0, 1.0]])
    inf = float("inf")
    one, two = (within_best_groups(ranked_ME, 3, kept, num_best=2).tolist() for kept in (1, 2))
    assert one == [[-inf, -inf, -inf, 6, 5, 0, -inf, -inf, -inf]]
    assert two == [[9, 0, 0, 6, 5, 0, -inf, -inf, -inf]]
    one, two = (within_best_groups(ranked_ME, 3, kept, num_best=1).tolist() for kept in (1, 2))
    assert one == [[9, 0, 0, -inf, -inf, -inf, -inf, -inf, -inf]]
    assert two == [[9, 0, 0, -inf, -inf, -inf, 7, 1, 1]]


def test_the_balance_loss_of_sigmoids_is_that_of_the_formula() -> None:
    """arXiv:2412.19437, eq. 17 to 20, here over one batch of which two tokens are padding; value and gradient."""
    logits_ME = random(9, NUM_EXPERTS).requires_grad_()
    sequence_M = torch.tensor([0, 0, 0, 1, 1, 1, 1, -1, -1])
    counts_E = torch.arange(NUM_EXPERTS, dtype=torch.float32)
    terms = MoeTrainConfig(aux_loss=AuxLoss.batch, aux_loss_coeff=0.3)
    built = router(DEEPSEEK)
    built.state = RouterState(
        terms=terms, num_layers=1, num_experts=NUM_EXPERTS, top_k=4, split=None, device=torch.device("cpu"), tokens=7,
        batch_counts_LE=counts_E[None], choice_dtype=torch.uint8,
    )  # type: ignore[arg-type]  # fmt: skip
    built.layer = 0
    microbatch = RoutedMicrobatch(index=0, sequence_M=sequence_M, lengths=(3, 4))
    map_ME = torch.zeros_like(logits_ME, dtype=torch.bool)
    probs_ME = built._attach_aux_loss(0 * logits_ME, logits_ME, map_ME, microbatch)
    probs_ME.sum().backward()

    exact_ME = logits_ME.detach().double().requires_grad_()
    scores_ME = torch.sigmoid(exact_ME)
    probabilities_ME = scores_ME / scores_ME.sum(1, keepdim=True)
    fractions_E = counts_E * NUM_EXPERTS / (4 * 7)
    loss = 0.3 * (fractions_E * probabilities_ME[:7].mean(0)).sum()
    loss.backward()
    assert float(built.state.aux_L[0]) == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    assert exact_ME.grad is not None and logits_ME.grad is not None
    torch.testing.assert_close(logits_ME.grad.double(), exact_ME.grad, rtol=1e-5, atol=1e-8)
