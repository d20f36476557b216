"""Each kind of algorithm lifts a tiny model on held-out prompts of a task that nobody told it; a wrong sign does not.

The whole stack: Ray, two Megatron processes with the experts split over them, a critic of two stages, vLLM.  The task
is dense, so that ten steps are enough: the reward is the share of words that begin with a letter of the alphabet's
second half.  One start for all that are selected, without a critic if none needs it; each case gets the first weights
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.role import Never
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.preparation import complete, prepare
from mcore_rl.controller.loop import train
from mcore_rl.controller.programs.start import open_run
from mcore_rl.controller.run import Run
from mcore_rl.controller.step.rollout_collection import RolloutCollector
from mcore_rl.parallel.device import detect
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.tracking.jsonl import read_metrics
from mcore_rl.tracking.sinks import Tracker
from tests.support import run_task
from tests.support.flipped import Flipped

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    words = [word for word in solution_str.split() if word[0].isalpha()]
    return sum(word[0].lower() >= "n" for word in words) / max(1, len(words))
"""
FLIPPED = "flipped"
QUICK = ("grpo", FLIPPED)  # in the tier `ci`; the others are of the tier `full`
STEPS = 10
LIFT = 0.2
SETTINGS = (
    f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", "trainer.save_freq=0",
    "trainer.val_before_train=true", "actor.optim.lr=3e-3",
    "data.train_batch_size=16", "actor.ppo_mini_batch_size=8", "rollout.ignore_eos=true", "actor.use_kl_loss=false",
    "rollout.val_kwargs.temperature=1.0", "rollout.val_kwargs.n=8",
)  # fmt: skip
CASES = {
    "ppo": ("algorithm=ppo", "rollout.n=8", "algorithm.lam=1", "critic.optim.lr=3e-3", "critic.parallel.pp=2"),
    "grpo": ("algorithm=grpo", "rollout.n=8"),
    "rloo": ("algorithm=rloo", "rollout.n=8"),
    "reinforce_plus_plus": ("algorithm=reinforce_plus_plus", "rollout.n=8"),
    # Tokens are selected over the step, and weights are divided by their mean over the step.
    "kl_cov": (
        "algorithm=grpo", "rollout.n=8", "actor.loss_mode=kl_cov", "actor.kl_cov_ratio=0.02",
        "algorithm.off_policy=decoupled", "algorithm.rollout_correction.batch_normalize=true",
    ),
    "sppo": ("algorithm=sppo", "rollout.n=8", "algorithm.sppo_eta=4"),
    "sppo_softmean": ("algorithm=sppo_softmean", "rollout.n=8", "algorithm.sppo_eta=4"),
    "gspo": (
        "algorithm=gspo", "rollout.n=8", "actor.loss_mode=gspo", "actor.loss_agg_mode=seq_mean_token_mean",
        "actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.2",
    ),
}  # fmt: skip


class Course:
    """One start of all processes, gone through by one algorithm after the other from the same first weights."""

    def __init__(self, started: Run, task: Path, folder: Path) -> None:
        self.started, self.task, self.folder = started, task, folder

    async def take(self, name: str, overrides: Sequence[str], *, flipped: bool = False) -> tuple[float, float]:
        """Mean reward of responses to the held-out prompts before the first step, and after the last."""
        started = self.started
        config = configuration(self.task, self.folder / name, *overrides)
        platform = detect(config.trainer.device)
        config = complete(config, platform)
        prepared = prepare(config, platform)
        groups = {role.name: started.groups[role.name] for role in config.group_rows}
        await started.devices.to_trainer()
        for group in roles(started):
            await group.load_state(self.folder / group.role)
        await started.policy.take_snapshot("reference", Never())
        collector = RolloutCollector(started.collector.engine, started.collector.scorer, config)
        values = {"algorithm": name}
        with Tracker.open(self.folder / name, config.trainer, values, STEPS) as tracker:
            run = Run(
                config,
                platform,
                tracker,
                prepared,
                groups,
                collector,
                started.devices,
                started.elastic,
            )
            if flipped:
                run.losses["actor"] = Flipped(config.actor)
            await train(run)
        rows = read_metrics(self.folder / name / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(STEPS + 1))
        return rows[0]["val/arithmetic/reward"], rows[-1]["val/arithmetic/reward"]


def configuration(task: Path, directory: Path, *overrides: str) -> RunConfig:
    return compose(RunConfig, "train", run_task.overrides(task, directory, *SETTINGS, *overrides))


def roles(run: Run) -> list[TrainGroup]:
    return [*run.groups.values()]


Outcomes = dict[str, tuple[float, float]]
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.tier("full")) for name in (*CASES, FLIPPED)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Outcomes:
    """(before, after) of every case that is selected; "flipped" is GRPO with the wrong sign."""
    here = [item for item in request.session.items if item.path == request.node.path]
    selected = [item.callspec.params["name"] for item in here if "name" in getattr(item, "fixturenames", ())]
    folder = tmp_path_factory.mktemp("learning")
    task = run_task.write_task(folder / "task")
    (task / "reward.py").write_text(REWARD)

    async def all_of_them() -> Outcomes:
        most = CASES["ppo" if "ppo" in selected else "grpo"]  # only PPO needs a critic
        async with open_run(configuration(task, folder / "first", *most)) as started:
            for group in roles(started):
                (folder / group.role).mkdir()
                await group.save_state(folder / group.role, behind=False)
            course = Course(started, task, folder)
            flipped = {name: name == FLIPPED for name in selected}
            return {
                name: await course.take(name, CASES["grpo" if flipped[name] else name], flipped=flipped[name])
                for name in selected
            }

    return asyncio.run(all_of_them())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_the_right_sign_learns_and_a_wrong_one_unlearns(outcomes: Outcomes, name: str) -> None:
    before, after = outcomes[name]
    assert after < before if name == FLIPPED else after > before + LIFT, outcomes


def test_all_begin_alike(outcomes: Outcomes) -> None:
    assert len(outcomes) > 1
    assert len({before for before, _ in outcomes.values()}) == 1, "the same weights, seeds and prompts"
