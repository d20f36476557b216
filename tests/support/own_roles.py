"""``mcore-rl`` with three rows of one's own in the table of roles, and the loss of one of them.

A tutor is frozen, and has a model and a layout of its own.  ``process`` is a language model that is trained, and is
neither actor nor critic; the exponential average of its weights scores beside it.  The reference follows the actor.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from mcore_rl.algorithms.losses.aggregation import sum_token_losses
from mcore_rl.algorithms.losses.token_losses import masked_sum, trained_rows
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.role import Every, ExponentialAverage, Role
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import FrozenModelConfig, TrainedConfig, TrainedModelConfig
from mcore_rl.ground.types import LossInputs, LossSums

EACH = "--each"  # commands come as json, and are run one after the other
DECAY, EVERY = 0.5, 2
ROLES |= {
    "reference": replace(ROLES["reference"], moves=Every(EVERY)),
    "tutor": Role(
        name="tutor",
        weights="tutor.path",
        config=FrozenModelConfig,
        on_request=True,
        stages=lambda role, run: [role.scores("tutor_logprobs_T")],
    ),
    "process": Role(
        name="process",
        trains=True,
        weights="process.path",
        config=TrainedModelConfig,
        on_request=True,
        stages=lambda role, run: [
            role.scores("process_logprobs_T"),
            role.copy_scores("process_copy_logprobs_T"),
            role.update("tutor_logprobs_T", "process_logprobs_T", "process_copy_logprobs_T"),
        ],
        keeps_copy=True,
        loss="tests.support.own_roles:ProcessLoss",
        moves=ExponentialAverage(DECAY),
    ),
}


@dataclass(frozen=True)
class ProcessLoss(RoleLoss):
    """Half the squared distance of its log-probs to the tutor's."""

    config: TrainedConfig

    def __call__(self, inputs: LossInputs) -> LossSums:
        inputs = trained_rows(inputs)
        assert inputs.logprobs_N is not None
        gap_N = inputs.logprobs_N - inputs.extra_N["tutor_logprobs_N"]
        per_token = {
            "process/gap": gap_N.abs(),
            "process/change": (inputs.logprobs_N - inputs.extra_N["process_logprobs_N"]).abs(),
            "process/lead": (inputs.extra_N["process_logprobs_N"] - inputs.extra_N["process_copy_logprobs_N"]).abs(),
        }
        metrics = {name: masked_sum(x_N.detach(), inputs.mask_N) for name, x_N in per_token.items()}
        return LossSums(total=sum_token_losses(gap_N.square() / 2, inputs, self.config.loss_agg_mode), metrics=metrics)


def answer(words: list[str]) -> dict[str, Any]:
    """What ``mcore-rl`` with these words says and returns."""
    from mcore_rl.cli import main

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        returncode = main(words)
    return {"returncode": returncode, "stdout": out.getvalue(), "stderr": err.getvalue()}


if __name__ == "__main__":
    if sys.argv[1:] == [EACH]:
        json.dump([answer(words) for words in json.load(sys.stdin)], sys.stdout)
        sys.exit()
    from mcore_rl.cli import main

    sys.exit(main(sys.argv[1:]))
