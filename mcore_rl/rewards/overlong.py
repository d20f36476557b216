"""Soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13): long responses lose before they are cut off."""

from __future__ import annotations

from mcore_rl.config.reward import OverlongConfig


def overlong_penalty(num_tokens: int, max_tokens: int, config: OverlongConfig) -> float:
    """What is added to the value of a response of ``num_tokens`` that could have ``max_tokens``; 0 or negative.

    0 up to ``max_tokens - length``, from there in a line to ``-penalty_factor`` at ``max_tokens``, no less beyond it.
    """
    exceeded = num_tokens - (max_tokens - config.length)
    share = min(max(exceeded / config.length, 0.0), 1.0)
    return -config.penalty_factor * share if config.enable else 0.0
