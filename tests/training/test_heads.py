"""The critic: where its head is, and that its values and their gradient are those of a matrix product by hand.

By hand is float64, from the hidden states that enter the head, caught one sequence at a time.  The head multiplies 48
numbers in float32: errors are about 1e-7 of the result, and the bound is 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import OptimizerConfig, Precision
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.ground.types import LossInputs, LossSums, TokenScores, TrainBatch
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from mcore_rl.training.heads import ValueHead
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

TOLERANCE = 1e-5
MODEL = models.dense(num_layers=2, tie_output=True)
LAYOUTS = ["", "tp=2", "pp=2", "pp=2,vpp=2"]
CASES = [(layout, precision) for layout in LAYOUTS[:3] for precision in Precision] + [("pp=2,vpp=2", Precision.float32)]


@dataclass
class Observed:
    """One rank under one layout.  hidden: what enters the head, [s / tp, H] of each sequence; empty without a head."""

    scores: TokenScores
    hidden: list[Tensor] = field(default_factory=list)
    head: list[Tensor] = field(default_factory=list)
    gradient: list[Tensor] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    is_shared: list[bool] = field(default_factory=list)
    value_dtypes: set[torch.dtype] = field(default_factory=set)
    given: list[str] = field(default_factory=list)


def _heads(engine: Engine) -> list[ValueHead]:
    return [module for chunk in engine.models for module in chunk.modules() if isinstance(module, ValueHead)]


def _observe_layout(groups: ProcessGroups, layout: str, precision: Precision) -> Observed:
    # Rate 0 and no clipping: the gradients stay in place after a step.
    still = OptimizerConfig(lr=0.0, clip_grad=0.0)
    settings = engines.config(precision=precision, optim=still, microbatch_tokens=None, microbatch_sequences=1)
    model = models.dense(tie_output=True) if "vpp" in layout else MODEL
    engine = engines.build(groups, model, settings, layout=layout, role="critic", head=Head.value)
    whole, hidden, seen = batches.ragged(MODEL.vocab_size), [], []
    hooks = [
        head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][:, 0])) for head in _heads(engine)
    ]
    result = Observed(engine.score(engines.share_of(whole, groups)))
    for hook in hooks:
        hook.remove()

    def loss(inputs: LossInputs) -> LossSums:
        assert inputs.values_N is not None
        seen.append(inputs)
        return batches.value_loss(inputs)

    engine.train_step(engines.share_of(whole, groups), loss, batches.denominators(whole))
    result.hidden = [part.double() for part in hidden]
    result.head = [head.weight.detach().double() for head in _heads(engine)]
    result.gradient = [head.weight.main_grad.double() for head in _heads(engine)]
    result.parameters = [name for chunk in engine.models for name, _ in chunk.named_parameters()]
    result.is_shared = [bool(chunk.share_embeddings_and_output_weights) for chunk in engine.models]
    result.value_dtypes = {inputs.values_N.dtype for inputs in seen if inputs.values_N is not None}
    if seen:
        result.given = [name for name in ("logprobs_N", "entropy_N", "values_N") if vars(seen[0])[name] is not None]
    return result


def _observe(rank: Rank) -> dict[tuple[str, Precision], Observed]:
    by_case = {}
    with engines.world(rank):
        for layout, precision in CASES:
            with engines.groups_of(layout) as groups:
                by_case[layout, precision] = _observe_layout(groups, layout, precision)
    return by_case


@pytest.fixture(scope="module")
def observed(processes: None) -> list[dict[tuple[str, Precision], Observed]]:
    return run_ranks(_observe, 2)


Ranks = list[dict[tuple[str, Precision], Observed]]


def replicas(observed: Ranks, layout: str, precision: Precision) -> list[tuple[TrainBatch, list[Tensor], Observed]]:
    """(its share of the batch, hidden states [s, H] of each sequence, one of its last ranks) of each model replica."""
    shape, whole = Layout.of(parse_layout(layout), 2), batches.ragged(MODEL.vocab_size)
    states = []
    for dp in range(shape.dp):
        peers = [
            observed[shape.rank_of(tp=tp, cp=0, dp=dp, pp=shape.pp - 1)][layout, precision] for tp in range(shape.tp)
        ]
        batch = whole.select(range(dp, len(whole.lengths_S), shape.dp))
        hidden = [torch.cat(parts) for parts in zip(*(peer.hidden for peer in peers), strict=True)]
        states.append((batch, hidden, peers[0]))
    return states


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_values_are_hidden_states_times_the_head(layout: str, precision: Precision, observed: Ranks) -> None:
    """Each stands beside the token that the state before it chose; a first token was chosen by nobody."""
    for batch, hidden, seen in replicas(observed, layout, precision):
        (head,) = seen.head
        expected = []
        for length, hidden_TH in zip(batch.lengths_S, hidden, strict=True):
            expected.append(torch.cat([torch.zeros(1, dtype=torch.float64), (hidden_TH @ head[0])[: length - 1]]))
        assert seen.scores.values_T is not None and seen.scores.values_T.abs().max() > 0.1
        torch.testing.assert_close(seen.scores.values_T.double(), torch.cat(expected), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_the_gradient_of_the_head_is_that_of_the_formula(layout: str, precision: Precision, observed: Ranks) -> None:
    """``sum (v - return) h / n`` over all trained tokens of all replicas, on every rank that has a head.

    A bfloat16 gradient is rounded once a microbatch, to 2^-9 of each element.
    """
    expected, whole = torch.zeros(MODEL.hidden_size, dtype=torch.float64), batches.ragged(MODEL.vocab_size)
    for batch, hidden, seen in replicas(observed, layout, precision):
        assert batch.returns_T is not None
        for start, length, hidden_TH in zip(batch.offsets_S, batch.lengths_S, hidden, strict=True):
            rows = torch.arange(start + 1, start + length)
            error = (hidden_TH[: length - 1] @ seen.head[0][0] - batch.returns_T[rows]) * batch.mask_T[rows]
            expected += error @ hidden_TH[: length - 1]
    expected /= batches.denominators(whole).loss
    gradients = [gradient for rank in observed for gradient in rank[layout, precision].gradient]
    assert len(gradients) == (1 if layout.startswith("pp=2") else 2)
    if layout == "":  # gradients are scattered over data-parallel ranks; the sum of this one is on the first
        gradients = gradients[:1]
    # 2**-8 is the spacing of bfloat16 beside 1: the hidden states are rounded, and CPUs sum them in different orders.
    bound = TOLERANCE if precision is Precision.float32 else 2**-8
    for gradient in gradients:
        assert (gradient[0] - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_is_in_the_last_stage_only(layout: str, observed: Ranks) -> None:
    shape = Layout.of(parse_layout(layout), 2)
    for rank, seen in enumerate(observed):
        of_rank = seen[layout, Precision.float32]
        is_last = shape.coords(rank).pp == shape.pp - 1
        assert len(of_rank.head) == is_last
        assert [name for name in of_rank.parameters if "output_layer" in name] == ["output_layer.weight"] * is_last
        assert all(head.shape == (1, MODEL.hidden_size) for head in of_rank.head)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_is_tied_to_nothing(layout: str, observed: Ranks) -> None:
    """Though the model's own output projection would be: the embedding is in the first stage alone."""
    shape = Layout.of(parse_layout(layout), 2)
    for rank, seen in enumerate(observed):
        of_rank = seen[layout, Precision.float32]
        assert not any(of_rank.is_shared)
        embeddings = [name for name in of_rank.parameters if "embedding" in name]
        assert len(embeddings) == (shape.coords(rank).pp == 0)


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_a_critic_gives_values_and_nothing_else(layout: str, precision: Precision, observed: Ranks) -> None:
    """Float32, also of a bfloat16 model, on every rank of a replica."""
    for of_rank in (rank[layout, precision] for rank in observed):
        assert of_rank.scores.logprobs_T is None and of_rank.scores.entropy_T is None
        assert of_rank.scores.values_T is not None and of_rank.scores.values_T.dtype == torch.float32
        assert of_rank.given in ([], ["values_N"]) and of_rank.value_dtypes <= {torch.float32}
    if layout:
        first, second = (rank[layout, precision].scores.values_T for rank in observed)
        assert engines.same_bits(first, second)
