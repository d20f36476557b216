"""Alarms about runs that go wrong, raised while there is still something to save.

Each alarm compares the mean of a metric over the last ``window`` steps with its earlier values, so that one bad batch
raises none.  An alarm is raised once, and again only after it had ceased.  After a resume, the earlier metrics are read
from metrics.jsonl.  Alarms change no number of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from mcore_rl.config.trainer import GuardConfig

SURE = 5.0  # standard errors of two means' difference: the best of hundreds of windows is far from the mean by chance
NORMAL = 0.954  # median absolute difference of two normal values, in standard deviations


class History:
    """The values of a metric, one per step, and its means over windows.

    first, last, best: the mean over the first window, the last one, and the highest mean; nan before the first.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: list[float] = []
        self.first = self.last = self.best = math.nan

    def add(self, value: float) -> None:
        """Adds the value of the next step."""
        self._values.append(value)
        if len(self._values) < self._window:
            return
        self.last = fmean(self._values[-self._window :])
        if math.isnan(self.first):
            self.first = self.best = self.last
        self.best = max(self.best, self.last)

    @property
    def error(self) -> float:
        """The standard error of the difference of two windows' means, from the differences between successive steps.

        It uses their median, which a sudden fall of the metric does not change.
        """
        steps = [abs(after - before) for before, after in pairwise(self._values)]
        return median(steps) / NORMAL * math.sqrt(2 / self._window)


@dataclass(frozen=True)
class Alarm:
    """What can be wrong with a metric.  is_due: whether it is.  text: says so, of a ``history`` and a ``config``."""

    is_due: Callable[[History, GuardConfig], bool]
    text: str


class Guards:
    """Raises the alarms of a run, from the metrics of its steps.  earlier: the metrics before a resume."""

    def __init__(self, config: GuardConfig, earlier: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._config = config
        self._histories: dict[str, History] = {}
        self._told: set[str] = set()
        for metrics in earlier:
            self.see(metrics)

    def see(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Adds the metrics of a step; returns the alarms that it raises, one sentence each with the remedy."""
        if not self._config.window:
            return []
        for key in WATCHED:
            if (value := metrics.get(key)) is not None and math.isfinite(value):
                self._histories.setdefault(key, History(self._config.window)).add(value)
        alarms: list[str] = []
        for key, alarm in WATCHED.items():
            history = self._histories.get(key)
            if history is None or math.isnan(history.last) or not alarm.is_due(history, self._config):
                self._told.discard(key)
            elif key not in self._told:
                alarms.append(alarm.text.format(history=history, config=self._config))
                self._told.add(key)
        return alarms


def _collapses(history: History, config: GuardConfig) -> bool:
    gained = history.best - history.first
    lost = history.best - history.last
    return lost > max(config.reward_drop * gained, SURE * history.error)


KL = Alarm(
    lambda history, config: config.max_kl is not None and history.last > config.max_kl,
    "the KL to the reference is {history.last:.3g} nats, over trainer.guards.max_kl={config.max_kl:g}",
)
WATCHED = {
    "reward/mean": Alarm(
        _collapses,
        "the reward collapses: {history.best:.3g} at its best, {history.last:.3g} now (means of {config.window} "
        "steps). Look at rollouts/; go on from an earlier checkpoint with a smaller actor.optim.lr or a KL term",
    ),
    "actor/entropy": Alarm(
        lambda history, config: history.last < config.entropy_share * history.first,
        "the entropy collapses: {history.first:.3g} nats at first, {history.last:.3g} now. Samples of a prompt become "
        "alike: raise actor.entropy_coeff, actor.clip_ratio_high or rollout.temperature",
    ),
    "rollout/logprob_diff_mean": Alarm(
        lambda history, config: history.last > config.max_logprob_diff,
        "sampler and trainer differ by {history.last:.3g} nats a token. Where samples are of older weights, write a "
        "smaller async.max_staleness, trainer.mode=sync or algorithm.off_policy=decoupled; else set "
        "trainer.guards.check_weights_freq=1 for a step, and where weights agree, find out why with mcore-rl compare",
    ),
    "rollout/effective_sample_size": Alarm(
        lambda history, config: history.last < config.min_effective_sample_size,
        "the effective sample size is {history.last:.0%}: few samples are of the policy that is trained, and outweigh "
        "the others. Write a smaller async.max_staleness, trainer.mode=sync, or algorithm.off_policy=decoupled with "
        "algorithm.rollout_correction.level=token or geometric",
    ),
    "rollout/masked_share": Alarm(
        lambda history, config: history.last > config.max_masked_share,
        "{history.last:.0%} of the trained tokens are left out of the loss, over trainer.guards.max_masked_share="
        "{config.max_masked_share:g}. Widen the bounds of algorithm.rollout_correction, or write a smaller "
        "async.max_staleness, or trainer.mode=sync",
    ),
    "actor/kl_k3": Alarm(
        lambda history, config: history.last > config.max_update_kl,
        "the ratio of the loss runs away: {history.last:.3g} nats a token between the policy that a step starts from "
        "and the updated one. Lower actor.optim.lr, actor.ppo_epochs or actor.clip_ratio; with "
        "algorithm.off_policy=bypass staleness counts too, and decoupled takes it out",
    ),
    "kl/reward": KL,
    "kl/loss": KL,
    "response/clip_share": Alarm(
        lambda history, config: history.last > config.max_clip_share,
        "{history.last:.0%} of the responses are cut off at data.max_response_length. Raise it, or use "
        "reward.overlong.enable=true",
    ),
}
