"""Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13): responses near the length limit lose score."""

from __future__ import annotations

from mcore_rl.config.reward import OverlongConfig


def overlong_penalty(num_tokens: int, max_tokens: int, config: OverlongConfig) -> float:
    """The penalty that is added to a response's value, 0 or negative; 0 if not enabled.

    It is 0 up to ``max_tokens - length``, then falls linearly to ``-penalty_factor`` at ``max_tokens``, and stays
    there.
    num_tokens: length of the response.  max_tokens: its limit.
    """
    if not config.enable:
        return 0.0
    length = config.tokens(max_tokens)
    exceeded = num_tokens - (max_tokens - length)
    return -config.penalty_factor * min(max(exceeded / length, 0.0), 1.0)
