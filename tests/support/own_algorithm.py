"""An algorithm of a user's own, in one file: the example of docs/algorithms.md, and a loss to go with it."""

from __future__ import annotations

import re

from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
(MEDIAN,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LOSS = """

from mcore_rl.algorithms.losses.token_losses import TokenLosses
from mcore_rl.config.algorithm_object import PolicyLoss


def thrice(inputs, config):
    return TokenLosses(loss_N=-3 * inputs.advantages_N * inputs.logprobs_N)


MEDIAN = replace(
    MEDIAN,
    loss=PolicyLoss(
        name="median", function=thrice, formula="`-3 A log p`", paper="none", needs_old=False, updates_per_batch=1
    ),
)
"""
