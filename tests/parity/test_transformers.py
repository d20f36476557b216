"""The single-process engine against transformers: log-probs, entropies, loss and every parameter's gradient.

Float32 on both sides.  Both round each product once, so what differs is the order of sums: about 1e-6 of the size of
the result for these widths.  The bound is 1e-5.
"""

from __future__ import annotations

import re

import pytest
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mcore_rl.config.engine import Device, OptimizerConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.families.towers import PICTURES
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.proofs.statements import STATEMENTS, Holder, stated
from mcore_rl.training.engine import Engine
from tests.invariance.problems import MODELS, Case, Problem
from tests.support import batches, full_weights, hf_reference
from tests.support.engine_runs import engine_config
from tests.support.forked import run_ranks
from tests.support.full_weights import Weights

pytestmark = pytest.mark.tier("test")
TOLERANCE = 1e-5
NAMES = tuple(name for name, model in MODELS.items() if model.vision is None)  # the others: test_pictures


# Of the engine: log-probs, entropies, loss, gradients, the family, and parameters that are not as the proof states.
Side = tuple[torch.Tensor, torch.Tensor, float, Weights, str, list[str]]


def _not_as_stated(chunk: torch.nn.Module, reference: PreTrainedModel) -> list[str]:
    """Parameters of the only rank that are not, bit for bit, what ``proofs/statements.py`` says of the reference's."""
    config, state = reference.config, dict(reference.state_dict())
    whole = {name: tensor.numpy() for name, tensor in revert_weight_conversion(reference, state).items()}
    alone = Holder(
        tp=0, num_tp=1, etp=0, num_etp=1, kv_heads=config.num_key_value_heads, tied=config.tie_word_embeddings,
        linear_key_heads=getattr(config, "linear_num_key_heads", 0),
    )  # fmt: skip
    wrong = []
    for key, held in chunk.state_dict().items():
        if held is None:
            continue
        layer, expert = (re.search(pattern, key) for pattern in (r"layers\.(\d+)\.", r"local_experts\.(\d+)\."))
        said = stated(
            STATEMENTS[config.model_type], whole, key, int(layer[1]) if layer else None,
            int(expert[1]) if expert else None, alone,
        )  # fmt: skip
        if not torch.equal(torch.from_numpy(said), held):
            wrong.append(key)
    return wrong


def _engine_side(rank: Rank, names: tuple[str, ...]) -> dict[str, Side]:
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    results = {}
    for name in names:
        model, case = MODELS[name], Case(problem=Problem(model=name))
        config = engine_config(case)
        # Rate 0: the gradients stay in place after the step, unclipped, and the weights do not move.
        config.optim = OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0)
        engine = Engine("actor", model, ParallelConfig(), config, groups, platform)
        reference = hf_reference.build(model)
        start = hf_reference.full_weights(reference, model)
        engine.load_weights(lambda models, start=start: full_weights.load_full(models, start))
        wrong = _not_as_stated(engine.models[0], reference)
        batch = batches.ragged(model.vocab_size)
        scores = engine.score(batch)
        step = engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)
        for parameter in engine.models[0].parameters():
            parameter.data.copy_(parameter.main_grad)
        gradients = full_weights.gather_full(engine.models, start)
        assert scores.logprobs_T is not None and scores.entropy_T is not None
        results[name] = (scores.logprobs_T, scores.entropy_T, step.loss, gradients, reference.config.model_type, wrong)
    destroy_groups()
    return results


@pytest.fixture(scope="module")
def engine_side(processes: None) -> dict[str, Side]:
    return run_ranks(_engine_side, 1, (NAMES,))[0]


def _reference(name: str) -> tuple[torch.Tensor, torch.Tensor, float, Weights]:
    """The same with transformers, one sequence at a time, no packing and no padding, and autograd all the way."""
    model = MODELS[name]
    reference = hf_reference.build(model)
    batch = batches.ragged(model.vocab_size)
    logprobs_T, entropy_T, loss = batches.whole_loss(lambda tokens: reference(tokens).logits, batch)
    loss.backward()
    gradients = hf_reference.full_weights(reference, model, gradients=True)
    return logprobs_T.detach(), entropy_T.detach(), float(loss.detach()), gradients


@pytest.mark.parametrize("name", NAMES)
def test_scores_loss_and_gradients_agree(name: str, engine_side: dict[str, Side]) -> None:
    logprobs_T, entropy_T, loss, gradients, *_ = engine_side[name]
    their_logprobs_T, their_entropy_T, their_loss, their_gradients = _reference(name)
    torch.testing.assert_close(logprobs_T, their_logprobs_T, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(entropy_T, their_entropy_T, rtol=TOLERANCE, atol=TOLERANCE)
    assert loss == pytest.approx(their_loss, rel=TOLERANCE)
    assert gradients.keys() == their_gradients.keys()
    for key, gradient in gradients.items():
        error = (gradient - their_gradients[key]).norm() / their_gradients[key].norm()
        assert error < TOLERANCE, f"{key}: relative error {error:.1e}"
        assert their_gradients[key].norm() > 0, f"{key}: nothing was compared"


@pytest.mark.parametrize("name", NAMES)
def test_the_statement_says_what_these_weights_are(name: str, engine_side: dict[str, Side]) -> None:
    """The weights that make the numbers above equal are those that the proof states: keys are keys, and up is up."""
    assert engine_side[name][-1] == []


def test_every_statement_is_held_against_transformers(engine_side: dict[str, Side]) -> None:
    """Those of models with a tower are their text families', which are here, and the tower's, in test_pictures."""
    assert {side[-2] for side in engine_side.values()} == STATEMENTS.keys() - PICTURES.keys()
