"""What ``actor.router_replay`` refuses of a configuration; the model and the engines are seen in the preparation."""

from __future__ import annotations

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.router_replay import replay_model_violations
from mcore_rl.config.run import RunConfig, run_violations
from tests.support import models

SEVERAL = "actor.ppo_mini_batch_size=512"  # of data.train_batch_size=1024


def run(*words: str) -> RunConfig:
    return compose(RunConfig, "train", ["data.train_batch_size=1024", *words])


def said(*words: str) -> list[str]:
    return [str(each) for each in run_violations(run(*words), planned=True)]


@pytest.mark.parametrize(
    "words",
    [
        ("actor.router_replay=off", "actor.ppo_mini_batch_size=1024"),
        ("actor.router_replay=r2", SEVERAL),
        ("actor.router_replay=r2", "actor.ppo_mini_batch_size=1024", "algorithm.use_kl_in_reward=true"),
        ("actor.router_replay=r3", "actor.ppo_mini_batch_size=1024"),
        ("actor.router_replay=r3", SEVERAL, "algorithm.off_policy=bypass"),
        ("rollout.enable_prefix_caching=false",),
    ],
)
def test_what_fits_is_accepted(words: tuple[str, ...]) -> None:
    assert said(*words) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("actor.router_replay=r2", "actor.ppo_mini_batch_size=1024"),
            "actor.router_replay=r2: repeats the experts of the log-prob pass, and a step of one update needs no such "
            "pass. Write actor.router_replay=off, or a smaller actor.ppo_mini_batch_size",
        ),
        (
            ("actor.router_replay=r2", SEVERAL, "algorithm.off_policy=bypass"),
            "actor.router_replay=r2: repeats the experts of the log-prob pass, and with algorithm.off_policy=bypass "
            "the ratio is to the sampler. Write actor.router_replay=r3, or algorithm.off_policy=recompute",
        ),
        (
            ("actor.router_replay=r3", "rollout.enable_prefix_caching=false"),
            "rollout.enable_prefix_caching=False: vLLM records experts with prefix caching alone, and "
            "actor.router_replay=r3 needs them. Write true, or actor.router_replay=off",
        ),
        (
            ("actor.router_replay=r3", "rollout.return_routed_experts=true"),
            "rollout.return_routed_experts=True: nobody would read the experts that it records. Write false; "
            "actor.router_replay=r3 lets engines record",
        ),
    ],
)
def test_what_contradicts_it_is_refused(words: tuple[str, ...], message: str) -> None:
    assert said(*words) == [message]


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_a_dense_model_is_refused(mode: str) -> None:
    (violation,) = replay_model_violations(run(f"actor.router_replay={mode}"), models.dense(), "not here")
    message = "the model is dense: it has no routers. Write actor.router_replay=off"
    assert str(violation) == f"actor.router_replay={mode}: {message}"
    assert list(replay_model_violations(run(), models.dense(), "not here")) == []


def test_engines_that_record_nothing_are_refused_for_r3() -> None:
    (violation,) = replay_model_violations(run("actor.router_replay=r3"), models.moe(), "not here")
    assert str(violation) == "actor.router_replay=r3: not here. Write actor.router_replay=r2, or off"
    assert list(replay_model_violations(run("actor.router_replay=r3"), models.moe(), None)) == []
    assert list(replay_model_violations(run("actor.router_replay=r2"), models.moe(), "not here")) == []


def test_engines_are_asked_to_record_for_r3_alone() -> None:
    asked = {
        mode: run(f"actor.router_replay={mode}").served_rollout.return_routed_experts for mode in ("off", "r2", "r3")
    }
    assert asked == {"off": False, "r2": False, "r3": True}
