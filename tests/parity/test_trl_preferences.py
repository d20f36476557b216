"""TRL's own losses of preferences against ours, on random ragged pairs; skipped where TRL is not installed.

See ``test_trl.py`` for how to have it.  The losses are methods, which are called on objects
that have what they read; KTO's takes whole batches of a data loader, and stands here as its two lines of formula do.
In what we differ on purpose: IPO's log-ratios are means over tokens in TRL (``length_normalized``), and sums in its
paper; ORPO's cross entropy is over the prompt too in TRL, and over the answer in its paper; cDPO is CPO's in TRL, whose
DPO no longer has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.preference_losses import Responses, pair_losses
from mcore_rl.config.preference import PreferenceConfig, PreferenceLoss
from tests.support.oracles import oracles

PAIRS, LONGEST, BETA = 6, 9, 0.7


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with oracles("TRL"):
        yield


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, the reference's, masks), each [2 * PAIRS, LONGEST], preferred answers first; ragged, with holes."""
    random = torch.Generator().manual_seed(4)
    mask = torch.rand(2 * PAIRS, LONGEST, generator=random) < 0.7
    mask[:, 0] = True
    logprobs = -torch.rand(2 * PAIRS, LONGEST, generator=random, dtype=torch.float64) * 3 * mask
    ref = logprobs + 0.4 * torch.randn(2 * PAIRS, LONGEST, generator=random, dtype=torch.float64) * mask
    return logprobs.requires_grad_(), ref, mask


def sides(logprobs: Tensor, ref: Tensor, mask: Tensor) -> tuple[Responses, Responses]:
    whole = Responses(logprobs.sum(1), ref.sum(1), mask.sum(1).double())
    return whole.chosen(torch.arange(PAIRS)), whole.chosen(torch.arange(PAIRS, 2 * PAIRS))


def ours(config: PreferenceConfig, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return pair_losses(*sides(*batch), torch.zeros(PAIRS, dtype=torch.float64), config).mean()


def trl_dpo(kind: str, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    trainer = import_module("trl.trainer.dpo_trainer").DPOTrainer
    logprobs, ref, mask = batch

    def model(**asked: Any) -> SimpleNamespace:
        ones = torch.ones(2 * PAIRS, LONGEST)
        return SimpleNamespace(log_probs=logprobs, entropy=ones, mean_logits=ones, is_top1=ones.bool())

    model.training = True  # type: ignore[attr-defined]
    process = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x, reduce=lambda x, **_: x
    )
    known = SimpleNamespace(
        model=model, accelerator=process, aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", loss_types=[kind], loss_weights=[1.0], beta=BETA, label_smoothing=0.0,
        use_weighting=False, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    first = torch.zeros(2 * PAIRS, 1, dtype=mask.dtype)
    inputs = {
        "input_ids": torch.zeros(2 * PAIRS, LONGEST + 1, dtype=torch.long),
        "attention_mask": torch.ones(2 * PAIRS, LONGEST + 1, dtype=torch.long),
        "completion_mask": torch.cat([first, mask], dim=1).long(),
        "ref_chosen_logps": ref.sum(1)[:PAIRS],
        "ref_rejected_logps": ref.sum(1)[PAIRS:],
    }
    loss: Tensor = trainer._compute_loss(known, model, inputs, False)
    return loss


def assert_alike(config: PreferenceConfig, theirs: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    mine = ours(config, batch)
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-7)  # some of TRL's are float32
    (own,) = torch.autograd.grad(mine, batch[0], retain_graph=True)
    (other,) = torch.autograd.grad(theirs, batch[0])
    torch.testing.assert_close(own, other, atol=1e-8, rtol=1e-6)
    assert own.any()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("sigmoid", PreferenceConfig(beta=BETA)),
        ("hinge", PreferenceConfig(loss=PreferenceLoss.hinge, beta=BETA)),
        ("ipo", PreferenceConfig(loss=PreferenceLoss.ipo, beta=BETA, length_normalized=True)),
        ("sigmoid_norm", PreferenceConfig(beta=BETA, length_normalized=True)),
    ],
)
def test_dpo_and_kin_are_those_of_trl(kind: str, config: PreferenceConfig) -> None:
    batch = drawn()
    assert_alike(config, trl_dpo(kind, batch), batch)


def test_simpo_is_that_of_trl() -> None:
    trainer, batch = import_module("trl.experimental.cpo.cpo_trainer").CPOTrainer, drawn()
    known = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.4, beta=BETA, label_smoothing=0.1,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    means = [side.mean_logprobs_R for side in sides(*batch)]
    config = PreferenceConfig(loss=PreferenceLoss.simpo, beta=BETA, gamma=0.4, label_smoothing=0.1)
    assert_alike(config, trainer.cpo_loss(known, *means)[0].mean(), batch)


def test_cdpo_is_cpo_of_log_ratios() -> None:
    trainer, batch = import_module("trl.experimental.cpo.cpo_trainer").CPOTrainer, drawn()
    known = SimpleNamespace(
        alpha=0.0, loss_type="sigmoid", beta=BETA, label_smoothing=0.2,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    config = PreferenceConfig(beta=BETA, label_smoothing=0.2)
    ratios = [side.log_ratios(config) for side in sides(*batch)]
    assert_alike(config, trainer.cpo_loss(known, *ratios)[0].mean(), batch)


def test_orpos_odds_are_those_of_trl() -> None:
    trainer, batch = import_module("trl.experimental.orpo.orpo_trainer").ORPOTrainer, drawn()
    known = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device=torch.device("cpu")))
    means = [side.mean_logprobs_R for side in sides(*batch)]
    config = PreferenceConfig(loss=PreferenceLoss.orpo, beta=BETA, sft_coef=0.0)
    assert_alike(config, -trainer.odds_ratio_loss(known, *means)[0].mean().double(), batch)
