"""What an update that scores its own batch keeps, and what its loss gets; over ranks: the gate (engine_runs.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.config.role import Head
from mcore_rl.ground.types import LossInputs
from mcore_rl.training.microbatch import NOWHERE, Microbatch
from mcore_rl.training.step_outputs import TokenOutputs, keep_scores

TARGETS = torch.tensor([2, NOWHERE, 0])  # of three rows in a batch of four tokens


def outputs() -> TokenOutputs:
    groups: Any = SimpleNamespace(device=torch.device("cpu"))
    return TokenOutputs(Head.lm, True, 4, groups)


def microbatch() -> Microbatch:
    rows: dict[str, Any] = dict.fromkeys(("tokens", "position_ids", "labels_N", "sources_N", "sequence_N"), TARGETS)
    where = {"targets_N": TARGETS, "router_rows_M": TARGETS, "members": (0,), "lengths": (3,)}
    return Microbatch(index=0, width=3, packed=None, **where, **rows)  # type: ignore[arg-type]


def inputs(**changes: Any) -> LossInputs:
    logprobs_N = torch.tensor([-1.0, 9.0, -2.0], requires_grad=True)
    given: dict[str, Any] = dict(logprobs_N=logprobs_N, entropy_N=logprobs_N * -3)
    mask_N = torch.tensor([True, False, True])
    return LossInputs(
        mask_N=mask_N, sequence_N=torch.zeros(3), num_sequences=1, sum_over_context=lambda x: x, **given | changes
    )


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_loss_gets_its_own_log_probs_detached_as_old_ones(with_entropy: bool) -> None:
    out, before = outputs(), inputs()
    given = keep_scores(out, microbatch(), before, with_entropy=with_entropy)
    assert given.logprobs_N is before.logprobs_N and given.logprobs_N is not None and given.logprobs_N.requires_grad
    assert given.old_logprobs_N is not None and not given.old_logprobs_N.requires_grad
    assert torch.equal(given.old_logprobs_N, given.logprobs_N)
    assert (given.entropy_N is before.entropy_N) if with_entropy else given.entropy_N is None
    kept = out._out
    assert not kept.requires_grad
    tokens = kept[:, :4]  # the last place takes what belongs to none
    assert torch.equal(tokens, torch.tensor([[-2.0, 0.0, -1.0, 0.0], [6.0, 0.0, 3.0, 0.0]]))


def test_old_log_probs_that_are_there_stay() -> None:
    sampled_N = torch.tensor([-1.5, 0.0, -2.5])  # the sampler's, with off_policy=bypass
    given = keep_scores(outputs(), microbatch(), inputs(old_logprobs_N=sampled_N), with_entropy=False)
    assert given.old_logprobs_N is sampled_N
