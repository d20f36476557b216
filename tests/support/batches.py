"""One seeded batch of ragged sequences with everything that the losses read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mcore_rl.algorithms.outcome_loss import OUTCOME
from mcore_rl.algorithms.preference import WEIGHT, PreferencesLoss
from mcore_rl.algorithms.reward_loss import STEP_LABEL_T, ScoresLoss
from mcore_rl.algorithms.token_advantages import Outcomes, compute_advantages
from mcore_rl.config.algorithm import CorrectionLevel, OffPolicy, RolloutCorrectionConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.preference import ROWS, PreferenceConfig, PreferenceLoss
from mcore_rl.config.reward_training import RewardLoss, RewardLossConfig
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, TokenScores, TrainBatch
from mcore_rl.training.distillation import Teacher
from mcore_rl.training.model import padded_vocab_size
from tests.support.settings import algorithm_config

LENGTHS = (13, 2, 29, 7, 1, 18, 23, 5, 11, 16)
NUM_PAIRS = 4
TEACHER_WIDTH = 40
NUM_RESPONSES = 7  # of which something is trained


def ragged(vocab_size: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 5) -> TrainBatch:
    """Tokens, a mask with holes, old log-probs and advantages; one sequence has a single token, one is all masked."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    mask_T = torch.rand(num_tokens, generator=random) < 0.7
    start = 0
    for index, length in enumerate(lengths):
        mask_T[start] = False
        if index == 3:
            mask_T[start : start + length] = False
        start += length
    return TrainBatch(
        lengths_S=lengths,
        tokens_T=torch.randint(0, vocab_size, (num_tokens,), generator=random),
        mask_T=mask_T,
        old_logprobs_T=-4.5 + 0.3 * torch.randn(num_tokens, generator=random),
        advantages_T=torch.randn(num_tokens, generator=random),
        returns_T=torch.randn(num_tokens, generator=random),
    )


PROMPTS = ((9, (4, 2, 11, 5)), (6, (7,)), (1, (3, 6)), (4, (8, 1)), (21, (12, 10, 14, 9)), (5, (0, 0, 6)))
"""(tokens of a prompt, tokens of each of its answers): one sample alone, prompts alone, and more than 64 tokens."""


def prompted(vocab_size: int) -> TrainBatch:
    """The samples of ``PROMPTS`` in turn, a sample of each prompt after the other; answers have holes in their masks.

    The prompt of 5 tokens begins as that of 9 does.
    """
    random = torch.Generator().manual_seed(6)
    prompts = [torch.randint(0, vocab_size, (length,), generator=random) for length, _ in PROMPTS]
    prompts[5] = torch.cat([prompts[0][:3], prompts[5][3:]])
    most = max(len(answers) for _, answers in PROMPTS)
    chosen = [(n, at) for at in range(most) for n, (_, answers) in enumerate(PROMPTS) if at < len(answers)]
    tokens, masks = list[torch.Tensor](), list[torch.Tensor]()
    for number, at in chosen:
        size = PROMPTS[number][1][at]
        trained = torch.rand(size, generator=random) < 0.8
        trained[:1] = True  # a prompt ends where training begins
        tokens.append(torch.cat([prompts[number], torch.randint(0, vocab_size, (size,), generator=random)]))
        masks.append(torch.cat([torch.zeros(len(prompts[number]), dtype=torch.bool), trained]))
    num_tokens = sum(map(len, tokens))
    return TrainBatch(
        lengths_S=tuple(map(len, tokens)),
        tokens_T=torch.cat(tokens),
        mask_T=torch.cat(masks),
        old_logprobs_T=-4.5 + 0.3 * torch.randn(num_tokens, generator=random),
        advantages_T=torch.randn(num_tokens, generator=random),
        returns_T=torch.randn(num_tokens, generator=random),
    )


def routed_alike(batch: TrainBatch) -> TrainBatch:
    """``batch`` of ``prompted`` with one choice of experts for each prompt's tokens, but for one token of a sample."""
    assert batch.routing_TLK is not None and batch.unrouted_T is not None
    routing_TLK, unrouted_T, firsts = batch.routing_TLK.clone(), batch.unrouted_T.clone(), dict[bytes, int]()
    for start, length in zip(batch.offsets_S, batch.lengths_S, strict=True):
        trained = batch.mask_T[start : start + length]
        size = int(trained.int().argmax()) if trained.any() else length
        first = firsts.setdefault(batch.tokens_T[start : start + size].numpy().tobytes(), start)
        for field_T in (routing_TLK, unrouted_T):
            field_T[start : start + size] = field_T[first : first + size].clone()
    other = batch.offsets_S[len(PROMPTS)] + 5  # of the second sample of the first prompt
    routing_TLK[other], unrouted_T[other] = routing_TLK[other].flip(-1), False
    return replace(batch, routing_TLK=routing_TLK, unrouted_T=unrouted_T)


def paired(batch: TrainBatch) -> TrainBatch:
    """Four pairs, with a reference, margins, weights and labels; two sequences have no pair.

    A preferred answer's other is empty, another has a masked other.  The reference says of a token what it says.
    """
    random, number = torch.Generator().manual_seed(21), len(batch.lengths_S)
    assert batch.old_logprobs_T is not None
    drawn_S = torch.rand(3, number, generator=random)
    return replace(
        batch,
        ref_logprobs_T=batch.old_logprobs_T,
        pairs_S=(7, 3, None, 5, 7, 5, 2, 3, None, 2),
        extra_S={"margin_S": drawn_S[0], "weight_S": 0.5 + drawn_S[1], "label_S": (drawn_S[2] > 0.5).float()},
    )


def scored(batch: TrainBatch) -> TrainBatch:
    """``batch`` with each sequence trained at its last token alone, where anything of it is: its value is a score."""
    starts = zip(batch.offsets_S, batch.lengths_S, strict=True)
    mask_T = torch.zeros_like(batch.mask_T)
    mask_T[[start + size - 1 for start, size in starts if batch.mask_T[start : start + size].any()]] = True
    return replace(batch, mask_T=mask_T)


def with_steps(batch: TrainBatch) -> TrainBatch:
    """A label at each trained token, some of them no certain ones, and weights of the sequences."""
    random = torch.Generator().manual_seed(22)
    label_T = torch.rand(batch.mask_T.shape, generator=random)
    label_T = torch.where(label_T < 0.5, (label_T < 0.2).float(), label_T)
    weight_S = 0.5 + torch.rand(len(batch.lengths_S), generator=random)
    return replace(batch, extra_T={STEP_LABEL_T: label_T}, extra_S={WEIGHT: weight_S})


def with_outcomes(batch: TrainBatch) -> TrainBatch:
    """Outcomes of the responses, two of them shares, and log-probs of a reference."""
    assert batch.old_logprobs_T is not None
    outcome_S = torch.tensor([1, 0, 1, 1, 0, 0.25, 0, 1, 0.75, 0])
    return replace(batch, extra_T={"process_ref_logprobs_T": batch.old_logprobs_T}, extra_S={OUTCOME: outcome_S})


def taught(batch: TrainBatch) -> TrainBatch:
    """Hidden states of a teacher at the trained tokens, from a normal distribution."""
    random = torch.Generator().manual_seed(31)
    hidden_MH = torch.randn(int(batch.mask_T.sum()), TEACHER_WIDTH, generator=random)
    return replace(batch, teacher_hidden_MH=hidden_MH, teacher_scored_T=batch.mask_T)


def teacher(vocab_size: int, *, tp: int, rank: int) -> Teacher:
    """Its output rows of the columns of tensor rank ``rank``, and a low soft cap."""
    rows_VH = 0.3 * torch.randn(vocab_size, TEACHER_WIDTH, generator=torch.Generator().manual_seed(32))
    columns = padded_vocab_size(vocab_size, tp) // tp
    return Teacher((rows_VH[rank * columns : (rank + 1) * columns],), soft_cap=3.0)


def preference_loss(loss: PreferenceLoss) -> PreferencesLoss:
    """Settings at which a pair has much to say."""
    smoothing = 0.1 if "label_smoothing" in ROWS[loss].reads else 0.0
    return PreferencesLoss(PreferenceConfig(loss=loss, label_smoothing=smoothing), kl=0.3)


def scores_loss(loss: RewardLoss) -> ScoresLoss:
    """With scores held near 0, where pairs are compared."""
    centering = 0.1 if loss is RewardLoss.bradley_terry else 0.0
    return ScoresLoss(RewardLossConfig(loss=loss, centering_coef=centering))


def routes(batch: TrainBatch, model: ModelConfig, seed: int = 9) -> torch.Tensor:
    """[T, L, K]: experts at random for every token of ``batch`` and every layer."""
    assert model.moe is not None and model.moe.choice_bytes == 1
    shape = (batch.tokens_T.numel(), model.num_layers, model.moe.num_experts)
    choices = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).topk(model.moe.top_k, dim=-1).indices
    return choices.to(torch.uint8)


def denominators(batch: TrainBatch) -> Denominators:
    """Counts of a whole global batch."""
    return Denominators(loss=float(batch.mask_T.sum()), tokens=batch.tokens_T.numel(), sequences=len(batch.lengths_S))


def policy_loss(inputs: LossInputs) -> LossSums:
    """A policy gradient that uses all an algorithm may.

    Token ratios, whole-sequence ratios (GSPO's), entropy, and tokens that are selected (KL-Cov's) where some are.
    """
    assert inputs.logprobs_N is not None and inputs.entropy_N is not None
    assert inputs.old_logprobs_N is not None and inputs.advantages_N is not None
    change_N = (inputs.logprobs_N - inputs.old_logprobs_N) * inputs.mask_N
    size_S = inputs.sequence_sums(inputs.mask_N.float()).clamp(min=1)
    sequence_ratio_S = torch.exp(inputs.sequence_sums(change_N) / size_S)
    weight_N = torch.exp(change_N).clamp(max=3.0) * inputs.expand(sequence_ratio_S)
    per_token_N = -inputs.advantages_N * weight_N - 0.05 * inputs.entropy_N
    if inputs.selection_N is not None:
        per_token_N = per_token_N + 0.5 * change_N.abs() * (inputs.selection_N >= 0)
    total = (per_token_N * inputs.mask_N).sum()
    return LossSums(
        total=total,
        metrics={"entropy": (inputs.entropy_N.detach() * inputs.mask_N).sum()},
        maxima={"highest": inputs.logprobs_N.detach().masked_fill(~inputs.mask_N, -torch.inf).amax()},
    )


def whole_loss(logits_of: Callable[[torch.Tensor], torch.Tensor], batch: TrainBatch) -> tuple[torch.Tensor, ...]:
    """(log-probs [T], entropies [T], mean of ``policy_loss`` without selected tokens), one sequence at a time.

    logits_of: tokens [1, t] to logits [1, t, V]; no packing, no padding, and autograd all the way.
    """
    logprobs, entropies = [], []
    for start, length in zip(batch.offsets_S, batch.lengths_S, strict=True):
        tokens = batch.tokens_T[start : start + length]
        logits = torch.log_softmax(logits_of(tokens[None])[0].float(), dim=-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, logits[:-1].gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(logits.exp() * logits).sum(-1)[:-1]]))
    logprobs_T, entropy_T = torch.cat(logprobs), torch.cat(entropies)
    assert batch.old_logprobs_T is not None and batch.advantages_T is not None
    change_T = (logprobs_T - batch.old_logprobs_T) * batch.mask_T
    total = torch.zeros(())
    for start, length in zip(batch.offsets_S, batch.lengths_S, strict=True):
        part = slice(start, start + length)
        size = batch.mask_T[part].sum().clamp(min=1)
        ratio = torch.exp(change_T[part]).clamp(max=3.0) * torch.exp(change_T[part].sum() / size)
        total = total + ((-batch.advantages_T[part] * ratio - 0.05 * entropy_T[part]) * batch.mask_T[part]).sum()
    return logprobs_T, entropy_T, total / batch.mask_T.sum()


def value_loss(inputs: LossInputs) -> LossSums:
    """Half the squared error of the values."""
    assert inputs.values_N is not None and inputs.returns_N is not None
    error_N = (inputs.values_N - inputs.returns_N) * inputs.mask_N
    return LossSums(total=0.5 * error_N.square().sum(), metrics={})


def weighed(batch: TrainBatch, scores: TokenScores, level: CorrectionLevel) -> TrainBatch:
    """``batch`` as decoupled PPO trains it: a rank's own scores are the old log-probs, and give its weights."""
    number = len(batch.lengths_S)
    algorithm = algorithm_config(
        adv_estimator="remax",
        off_policy=OffPolicy.decoupled,
        rollout_correction=RolloutCorrectionConfig(level=level, upper=1.2),
    )
    nothing_S = torch.zeros(number)
    outcomes = Outcomes(scores_S=nothing_S, truncated_S=nothing_S.bool(), greedy_S=nothing_S)
    batch = replace(batch, old_logprobs_T=scores.logprobs_T)
    tokens, _ = compute_advantages(batch, outcomes, algorithm, 0.0)
    assert tokens.weights_T is not None
    return replace(batch, weights_T=tokens.weights_T)
