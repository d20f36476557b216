"""PKPO: pass@k policy optimization (arXiv:2505.15201)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.rloo import POLICY_GRADIENT
from mcore_rl.config.bounds import Interval
from mcore_rl.config.roles import LossAggregation
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


@dataclass(kw_only=True)
class PassAtKConfig(AlgorithmConfig):
    """pass_k: the k of pass@k, at most ``rollout.n``."""

    pass_k: Annotated[int, Interval("[2, inf)", "Write 2 or more; with 1 it would be rloo")] = 2


def _k_violations(run: RunConfig) -> Iterator[Violation]:
    """Refuses a k for which a prompt has too few samples."""
    assert isinstance(run.algorithm, PassAtKConfig)
    k = run.algorithm.pass_k
    n = run.rollout.n
    if k > n:
        yield Violation("algorithm.pass_k", k, f"is more than rollout.n={n}", f"Write {n} or less, or rollout.n={k}")


BEST_OF_K_GAIN = Estimator(
    name="pass_at_k",
    function="mcore_rl.algorithms.advantages.pass_at_k:pass_at_k",
    scope=Scope.sequence,
    formula="mean of `max(set) - max(set without it)` over the sets of `pass_k` responses with this one",
    paper="arXiv:2505.15201",
    min_group=2,
    settings=PassAtKConfig,
    rules=(_k_violations,),
)

PKPO = Algorithm(
    name="pkpo",
    title="PKPO",
    about="what a response adds to the best of k, so that pass@k grows and not pass@1 alone; no KL",
    paper="arXiv:2505.15201",
    advantages=BEST_OF_K_GAIN,
    loss=POLICY_GRADIENT,
    aggregation=Sourced(LossAggregation.seq_mean_token_sum, "arXiv:2505.15201: the gradient of a whole response"),
    samples=Sourced(8, "ours: the paper takes any n from k on"),
    settings={"algorithm.pass_k": Sourced(4, "ours: the paper compares several, and lowers k to 1 in the end")},
)
