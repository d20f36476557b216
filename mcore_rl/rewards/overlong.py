"""Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13): responses near the length limit lose score."""

from __future__ import annotations

from mcore_rl.config.reward import OverlongConfig


def overlong_penalty(num_tokens: int, max_tokens: int, config: OverlongConfig) -> float:
    """The penalty that is added to a response's value, 0 or negative; 0 if not enabled.

    It is 0 up to ``max_tokens - length``, then falls linearly to ``-penalty_factor`` at ``max_tokens``, and stays
    there.
    num_tokens: length of the response.  max_tokens: its limit.
    """
    exceeded = num_tokens - (max_tokens - config.length)
    share = min(max(exceeded / config.length, 0.0), 1.0)
    return -config.penalty_factor * share if config.enable else 0.0
