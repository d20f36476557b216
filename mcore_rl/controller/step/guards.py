"""Alarms: runs that go wrong say so while there is still something to save.

Each alarm compares the mean of a metric over the last ``window`` steps with what it was before, so that one bad batch
raises none.  An alarm is told once, and again after it had ceased.  What was seen before a resume is read back from
metrics.jsonl; nothing here changes a number of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from statistics import fmean, median

from mcore_rl.config.trainer import GuardConfig

SURE = 5.0  # standard errors of two means' difference: the best of hundreds of windows is far out by chance alone
NORMAL = 0.954  # median of the difference of two normal values, in standard deviations


class History:
    """A metric's values, a step each, and its means over windows."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: list[float] = []
        self.first = self.last = self.best = math.nan

    def add(self, value: float) -> None:
        """The next step's."""
        self._values.append(value)
        if len(self._values) < self._window:
            return
        self.last = fmean(self._values[-self._window :])
        if math.isnan(self.first):
            self.first = self.best = self.last
        self.best = max(self.best, self.last)

    @property
    def error(self) -> float:
        """Standard error of the difference of two windows' means, from how much one step differs from the next.

        By the median, which a fall does not move.
        """
        steps = [abs(after - before) for before, after in pairwise(self._values)]
        return median(steps) / NORMAL * math.sqrt(2 / self._window)


class Guards:
    """What is wrong with a run, from the metrics of its steps."""

    def __init__(self, config: GuardConfig, earlier: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._config = config
        self._histories: dict[str, History] = {}
        self._told: set[str] = set()
        for metrics in earlier:
            self.see(metrics)

    def see(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Alarms that this step raises, a sentence each with the remedy."""
        if not self._config.window:
            return []
        for key in WATCHED:
            if (value := metrics.get(key)) is not None and math.isfinite(value):
                self._histories.setdefault(key, History(self._config.window)).add(value)
        found: list[str] = []
        for key, alarm in WATCHED.items():
            history = self._histories.get(key)
            said = None if history is None or math.isnan(history.last) else alarm(history, self._config)
            if said is not None and key not in self._told:
                found.append(said)
            (self._told.discard if said is None else self._told.add)(key)
        return found


def _reward(history: History, config: GuardConfig) -> str | None:
    gained, lost = history.best - history.first, history.best - history.last
    if lost <= max(config.reward_drop * gained, SURE * history.error):
        return None
    means = f"{history.best:.3g} at its best, {history.last:.3g} now"
    return (
        f"the reward collapses: {means} (means of {config.window} steps). Look at rollouts/; go on from an earlier "
        "checkpoint with a smaller actor.optim.lr or a KL term"
    )


def _entropy(history: History, config: GuardConfig) -> str | None:
    if history.last >= config.entropy_share * history.first:
        return None
    return (
        f"the entropy collapses: {history.first:.3g} nats at first, {history.last:.3g} now. Samples of a prompt become "
        "alike: raise actor.entropy_coeff, actor.clip_ratio_high or rollout.temperature"
    )


def _agreement(history: History, config: GuardConfig) -> str | None:
    if history.last <= config.max_logprob_diff:
        return None
    return (
        f"sampler and trainer differ by {history.last:.3g} nats a token. Set trainer.guards.check_weights_freq=1 for a "
        "step; where weights agree, use algorithm.rollout_correction, or find out why with tools/compare_logprobs.py"
    )


def _kl(history: History, config: GuardConfig) -> str | None:
    if config.max_kl is None or history.last <= config.max_kl:
        return None
    return f"the KL to the reference is {history.last:.3g} nats, over trainer.guards.max_kl={config.max_kl:g}"


def _cut_off(history: History, config: GuardConfig) -> str | None:
    if history.last <= config.max_clip_share:
        return None
    return (
        f"{history.last:.0%} of the responses are cut off at data.max_response_length. Raise it, or use "
        "reward.overlong.enable=true"
    )


WATCHED: dict[str, Callable[[History, GuardConfig], str | None]] = {
    "reward/mean": _reward,
    "actor/entropy": _entropy,
    "rollout/logprob_diff_mean": _agreement,
    "kl/reward": _kl,
    "kl/loss": _kl,
    "response/clip_share": _cut_off,
}
