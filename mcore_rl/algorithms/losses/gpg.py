"""Group policy gradient (arXiv:2504.02546)."""

from __future__ import annotations

from mcore_rl.algorithms.losses.policy_gradient import policy_gradient
from mcore_rl.algorithms.losses.token_losses import TokenLosses
from mcore_rl.config.roles import ActorConfig
from mcore_rl.ground.types import LossInputs


def gpg(inputs: LossInputs, config: ActorConfig) -> TokenLosses:
    """``-A log p``, the plain policy gradient; only the advantage of GPG is new, ``advantages/gpg.py``.

    It is a loss of its own so that a recipe names the paper that it follows.
    """
    return policy_gradient(inputs, config)
