"""Records that travel between the parts, with their shapes.

Shape legend: S sequences, T packed tokens of all sequences one after another, V vocabulary, H hidden, E experts,
K experts per token, L layers with experts.  Masks are bool, True means trained.

Alignment: everything with a ``_T`` suffix belongs to the token at its position.  ``logprobs_T[t]`` is
``log p(token_t | tokens before it)``; ``values_T[t]`` is the value of the state in which token ``t`` was chosen.
The first token of a sequence was chosen by nobody: its log-prob, entropy and value are 0 and its mask is False.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NOT_DRAWN = float("inf")  # as a sampler's log-prob: what no sampler says, not even one that breaks down


@dataclass(frozen=True)
class Picture:
    """A picture of a sequence.

    key: of its content (a sha256).  height, width: in patches.  tokens: that stand for it, as many as it has features.
    """

    key: str
    height: int
    width: int
    tokens: int

    @property
    def num_patches(self) -> int:
        """How many patches it has."""
        return self.height * self.width


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Ragged sequences, laid end to end, no padding.

    The tensors from old_logprobs_T to selection_T are optional and float32: what advantages and losses need.

    lengths_S: tokens of each sequence, all positive.
    tokens_T: int64 for an engine; int32, half the memory, on the controller, which only counts and sends them.
    mask_T: bool, tokens that are trained; the first of a sequence never is.
    old_logprobs_T, ref_logprobs_T, rollout_logprobs_T: of the policy before the step, the reference and the sampler;
        the sampler's are ``NOT_DRAWN`` at trained tokens that it did not draw.
    turn_rewards_T: what a turn earned by itself, at its last token and 0 elsewhere; None where no turn did.
    advantages_T, returns_T, old_values_T: what the actor and the critic are trained with, and what the critic said.
    teacher_advantages_T: a teacher's part of the advantages, until ``step_numbers.finish`` adds it to the others.
    weights_T: what the policy loss of each token is multiplied by (importance correction).
    selection_T: how far a token's key is above the least that is selected, so not negative where the token is
        (``algorithms/selection.py``).
    routing_TLK: expert choices to replay, one row per token and layer of the model, uint8 or int16
        (``MoeConfig.choice_bytes``); those of dense layers are not read.
    teacher_hidden_MH: the teacher's last hidden states that predict the M tokens of ``teacher_scored_T``, in its dtype,
        where a divergence over the vocabulary is trained; both stay in host memory.
    teacher_scored_T: bool, tokens that were to be trained when the teacher scored the batch.
    positions_T3: int32, the positions of each token in time, height and width, of a model with rotation by three axes.
    feature_T: int32, which of the features of its sequence's pictures, one behind another, takes a token's place; -1
        for a token of text.  images_S: the pictures of each sequence, in order.  patches: of each picture by its key,
        uint8 [patches, numbers of a patch], in host memory; the first pipeline stage alone has them.
    unrouted_T: bool, tokens whose routers choose in spite of ``routing_TLK``, because nobody recorded them; None: none.
    extra_T: fields that rows of the table of roles make beyond these, by name, one that ends in ``_T``.
    extra_S: numbers of each sequence that a loss of whole sequences reads, float32, by name, one that ends in ``_S``.
    pairs_S: the key of each sequence's pair, None where it has none; None where no sequence has one.  A pair is trained
        by one rank, in one microbatch; its first sequence is the preferred one.
    """

    lengths_S: tuple[int, ...]
    tokens_T: Tensor
    mask_T: Tensor
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    rollout_logprobs_T: Tensor | None = None
    turn_rewards_T: Tensor | None = None
    advantages_T: Tensor | None = None
    teacher_advantages_T: Tensor | None = None
    returns_T: Tensor | None = None
    old_values_T: Tensor | None = None
    weights_T: Tensor | None = None
    selection_T: Tensor | None = None
    routing_TLK: Tensor | None = None
    unrouted_T: Tensor | None = None
    positions_T3: Tensor | None = None
    feature_T: Tensor | None = None
    images_S: tuple[tuple[Picture, ...], ...] | None = None
    patches: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    teacher_scored_T: Tensor | None = None
    teacher_hidden_MH: Tensor | None = None
    extra_T: Mapping[str, Tensor] = field(default_factory=dict)
    extra_S: Mapping[str, Tensor] = field(default_factory=dict)
    pairs_S: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        num_tokens = sum(self.lengths_S)
        assert self.lengths_S and min(self.lengths_S) >= 1, "a batch holds at least one sequence and none is empty"
        for name, tensor in self.token_fields():
            assert tensor.shape[0] == num_tokens, f"{name} has {tensor.shape[0]} rows for {num_tokens} tokens"
        if self.teacher_hidden_MH is not None:
            assert len(self.teacher_hidden_MH) == sum(self.scored_S), "a hidden state for each token that was scored"
        assert self.pairs_S is None or len(self.pairs_S) == len(self.lengths_S), "pairs_S has a key a sequence"
        assert (self.images_S is None) == (self.feature_T is None), "pictures, and where their features go"
        self._check_pictures()
        assert all(x_S.shape == (len(self.lengths_S),) for x_S in self.extra_S.values()), "a number a sequence"
        assert self.mask_T.dtype == torch.bool, "masks are bool"
        assert not self.mask_T[list(self.offsets_S)].any(), "the first token of a sequence is never trained"

    def _check_pictures(self) -> None:
        if self.images_S is None or self.feature_T is None:
            return
        assert len(self.images_S) == len(self.lengths_S), "pictures of every sequence"
        for images, feature_T in zip(self.images_S, torch.split(self.feature_T, list(self.lengths_S)), strict=True):
            wanted_T = torch.arange(sum(image.tokens for image in images), device=feature_T.device)
            placed = torch.equal(feature_T[feature_T >= 0].long(), wanted_T)
            assert placed, "each feature of a sequence's pictures takes the place of one token, in their order"

    def demand_patches(self) -> None:
        """Asserts that all pictures have their patches."""
        for image in (image for images in self.images_S or () for image in images):
            rows = len(self.patches[image.key]) if image.key in self.patches else 0
            assert rows == image.num_patches, f"picture {image.key} has {rows} patches"

    @property
    def patches_S(self) -> list[int]:
        """The patches of each sequence's pictures."""
        if self.images_S is None:
            return [0] * len(self.lengths_S)
        return [sum(image.num_patches for image in images) for images in self.images_S]

    @property
    def offsets_S(self) -> tuple[int, ...]:
        """Where each sequence starts in T."""
        offsets = [0]
        for length in self.lengths_S[:-1]:
            offsets.append(offsets[-1] + length)
        return tuple(offsets)

    @property
    def scored_S(self) -> list[int]:
        """How many tokens of each sequence the teacher scored."""
        assert self.teacher_scored_T is not None, "no teacher scored this batch"
        return [int(part.sum()) for part in torch.split(self.teacher_scored_T, list(self.lengths_S))]

    def token_fields(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of every per-token field that is present."""
        named = [(name, getattr(self, name)) for name in _TOKEN_FIELDS]
        return [*((name, tensor) for name, tensor in named if tensor is not None), *self.extra_T.items()]

    @classmethod
    def of_fields(
        cls,
        lengths_S: tuple[int, ...],
        named: Mapping[str, Tensor],
        pairs_S: tuple[int | None, ...] | None = None,
        extra_S: Mapping[str, Tensor] | None = None,
        images_S: tuple[tuple[Picture, ...], ...] | None = None,
        patches: Mapping[str, NDArray[np.uint8]] | None = None,
    ) -> TrainBatch:
        """From per-token fields by name, as ``token_fields`` has them, and what is of sequences."""
        known = {name: tensor for name, tensor in named.items() if name in (*_TOKEN_FIELDS, HIDDEN)}
        extra_T = {name: tensor for name, tensor in named.items() if name not in known}
        return cls(
            lengths_S=lengths_S,
            pairs_S=pairs_S,
            extra_T=extra_T,
            extra_S=extra_S or {},
            images_S=images_S,
            patches=patches or {},
            **known,
        )

    def to(self, device: torch.device) -> TrainBatch:
        """The same batch with its tensors on ``device``, but for what a teacher said."""
        moved = {name: tensor.to(device) for name, tensor in self.token_fields() if name not in _ON_HOST}
        batch = copy(self)  # not checked again: the host would wait for the device
        for name, tensor in moved.items():
            if name in _TOKEN_FIELDS:
                object.__setattr__(batch, name, tensor)
        object.__setattr__(batch, "extra_T", {name: moved[name] for name in self.extra_T})
        return batch

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The sequences ``indices``, in that order, as a batch of their own."""
        selected = {}
        for name, tensor in self.token_fields():
            sequences = torch.split(tensor, list(self.lengths_S))
            selected[name] = torch.cat([sequences[i] for i in indices])
        if self.teacher_hidden_MH is not None:
            states = torch.split(self.teacher_hidden_MH, self.scored_S)
            selected[HIDDEN] = torch.cat([states[i] for i in indices])
        pairs_S = None if self.pairs_S is None else tuple(self.pairs_S[i] for i in indices)
        extra_S = {name: x_S[list(indices)] for name, x_S in self.extra_S.items()}
        images_S = None if self.images_S is None else tuple(self.images_S[i] for i in indices)
        shown = {image.key for images in images_S or () for image in images}
        patches = {key: patches for key, patches in self.patches.items() if key in shown}
        lengths_S = tuple(self.lengths_S[i] for i in indices)
        return TrainBatch.of_fields(lengths_S, selected, pairs_S, extra_S, images_S, patches)


HIDDEN = "teacher_hidden_MH"
TAUGHT_BY = "taught_by_S"  # of ``extra_S``, with several teachers: a number of ``config.roles.Teachers.names``
_NOT_OF_TOKENS = ("lengths_S", HIDDEN, "extra_T", "extra_S", "pairs_S", "images_S", "patches")
_ON_HOST = ("teacher_scored_T",)
_TOKEN_FIELDS = tuple(each.name for each in fields(TrainBatch) if each.name not in _NOT_OF_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """What sums over the whole global minibatch are divided by; fixed by the caller before the first forward.

    loss: what the loss sum is divided by (trained tokens for token-mean).  tokens and sequences: of all data-parallel
    ranks together; the mixture-of-experts losses are means over these.
    """

    loss: float
    tokens: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss sees of one microbatch on one rank: N rows, each a token that was predicted there.

    logprobs_N, entropy_N, values_N: float32 from this forward pass, with gradient; a critic has only values, an
    actor never has them.  mask_N: rows that are trained; all other rows hold zeros.  sequence_N: a row's sequence in
    this microbatch, -1 for padding; num_sequences: how many there are.  With context parallelism a rank sees only a
    part of each sequence, so whole-sequence quantities are made with ``sequence_sums``.  full_kl_N: exact KL to the
    reference at trained rows, with gradient, where the engine was asked for it; divergence_N: the same of a divergence
    from the teacher.  extra_N: the batch's ``extra_T``, ``NAME_N`` for ``NAME_T``.  extra_S: the batch's ``extra_S`` of
    the microbatch's sequences, the same on every
    context rank.  pairs_P2: int64, the numbers in this microbatch of both sequences of each pair, the preferred one
    first; None if the batch has no pairs.
    """

    mask_N: Tensor
    sequence_N: Tensor
    num_sequences: int
    sum_over_context: Callable[[Tensor], Tensor]
    logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None
    values_N: Tensor | None = None
    full_kl_N: Tensor | None = None
    divergence_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    ref_logprobs_N: Tensor | None = None
    rollout_logprobs_N: Tensor | None = None
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None
    old_values_N: Tensor | None = None
    weights_N: Tensor | None = None
    selection_N: Tensor | None = None
    extra_N: Mapping[str, Tensor] = field(default_factory=dict)
    extra_S: Mapping[str, Tensor] = field(default_factory=dict)
    pairs_P2: Tensor | None = None

    def sequence_sums(self, x_N: Tensor) -> Tensor:
        """Sum of ``x_N`` over each whole sequence, [num_sequences] on every context rank; differentiable."""
        member_N = self.sequence_N.clamp(min=0)
        sums_S = torch.zeros(max(self.num_sequences, 1), dtype=x_N.dtype, device=x_N.device)
        return self.sum_over_context(sums_S.index_add(0, member_N, x_N * (self.sequence_N >= 0)))

    def expand(self, x_S: Tensor) -> Tensor:
        """A per-sequence value at each row of its sequence; padding rows get some sequence's value."""
        return x_S[self.sequence_N.clamp(min=0)]

    def own_shares(self, dtype: torch.dtype) -> Tensor:
        """The share of each whole sequence's rows that this rank has; over the context ranks they add up to 1.

        [num_sequences], at least one.  What is of a whole sequence, and the same on all context ranks, is multiplied
        by this before it is added to a loss or a metric.
        """
        here_N = (self.sequence_N >= 0).to(dtype)
        rows_S = torch.zeros(max(self.num_sequences, 1), dtype=dtype, device=here_N.device)
        rows_S = rows_S.index_add(0, self.sequence_N.clamp(min=0), here_N)
        return rows_S / self.sum_over_context(rows_S).clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """What a loss returns: sums over the rows of this rank, never means so that no layout can change the result.

    total: scalar with gradient, connected to the graph even where no row is trained.  metrics: sums without gradient.
    maxima: the largest values over trained rows, without gradient, -inf where no row is trained; these no layout can
    change either.
    """

    total: Tensor
    metrics: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """What one forward pass says of each token, in the order of the batch that was given; float32, on the CPU.

    routing_TLK: uint8 or int16, the experts chosen, in the order of their scores; only where recording was asked for.
    """

    logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    values_T: Tensor | None = None
    routing_TLK: Tensor | None = None


class SentAsArrays:
    """A dataclass of CPU tensors that is pickled as numpy arrays, in a tenth of the time: a step brings thousands."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        values = [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]
        return _of_arrays, (type(self), [x.numpy() if isinstance(x, Tensor) else x for x in values])


def _of_arrays(kind: type[Any], values: Sequence[Any]) -> Any:
    # Copied: what lies in Ray's store cannot be written to, which torch does not know.
    tensors = [torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for x in values]
    return kind(**dict(zip((each.name for each in fields(kind)), tensors, strict=True)))


@dataclass(frozen=True, kw_only=True)
class SequenceScores(SentAsArrays):
    """Of each sequence, sums over its trained tokens, float64: of log-probs or values, and of entropies where asked."""

    sums_S: Tensor
    entropy_S: Tensor | None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, the same on every rank.

    loss: global loss, its sum over all ranks divided by the caller's denominator.  grad_norm: global L2 norm before
    clipping.  lr: the rate this step used.  skipped: the reason why the weights were left alone, or None.
    metrics, maxima: the loss function's own, and among the first the router statistics, reduced over all ranks.
    saved_tokens: of prompts that the step did not compute once more (``EngineConfig.share_prompts``), over all ranks.
    scores: of this rank's batch, with the weights before the step, where the engine was asked for them.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: str | None
    metrics: dict[str, float]
    maxima: dict[str, float] = field(default_factory=dict)
    saved_tokens: int = 0
    scores: TokenScores | None = None
