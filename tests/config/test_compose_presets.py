"""``algorithm=NAME`` sets what the object says, and that is what papers and published runs say."""

from __future__ import annotations

from enum import Enum
from functools import reduce
from pathlib import Path

import pytest
import yaml

from mcore_rl.cli import main
from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.clipping import PpoClipConfig
from mcore_rl.config.compose import compose, preset
from mcore_rl.config.launch import load_recipe
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.ground.errors import ConfigError
from tests.support.own_algorithm import LOSS, MEDIAN

SOUND = ["model.path=m", "data.train_files=[t.parquet]", "data.val_files=[v.parquet]"]
TEACHER = {"distill": ["teacher.path=t"]}  # what else a run of the algorithm must be told

# Read from the papers and runs a second time, by hand: estimator, loss, aggregation, where the KL is, its estimate.
READ = {
    "best_of_n": ("best_of_n", "policy_gradient", "seq_mean_token_sum", "", ""),
    "clip_cov": ("grpo", "clip_cov", "token_mean", "", ""),
    "cispo": ("grpo", "cispo", "token_mean", "", ""),
    "dapo": ("grpo", "ppo_clip", "token_mean", "", ""),
    "distill": ("none", "policy_gradient", "token_mean", "", ""),
    "dr_grpo": ("dr_grpo", "ppo_clip", "sum_over_constant", "", ""),
    "gdpo": ("gdpo", "ppo_clip", "token_mean", "", ""),
    "gmpo": ("grpo", "geo_mean", "seq_mean_token_mean", "", ""),
    "gpg": ("gpg", "gpg", "token_mean", "", ""),
    "grpo": ("grpo", "ppo_clip", "seq_mean_token_mean", "loss", "k3"),
    "gspo": ("grpo", "gspo", "seq_mean_token_mean", "", ""),
    "kl_cov": ("grpo", "kl_cov", "token_mean", "", ""),
    "lite_ppo": ("lite_ppo", "ppo_clip", "token_mean", "", ""),
    "online_dpo": ("best_worst", "preference", "seq_mean_token_sum", "", ""),
    "opo": ("opo", "policy_gradient", "seq_mean_token_sum", "", ""),
    "pkpo": ("pass_at_k", "policy_gradient", "seq_mean_token_sum", "", ""),
    "ppo": ("gae", "ppo_clip", "token_mean", "", ""),
    "prime": ("prime", "ppo_clip", "token_mean", "", ""),
    "raft": ("raft", "policy_gradient", "token_mean", "loss", "low_var_kl"),
    "raft_plus_plus": ("raft", "ppo_clip", "token_mean", "loss", "low_var_kl"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip", "token_mean", "reward", "k1"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo_clip", "token_mean", "loss", "k2"),
    "remax": ("remax", "policy_gradient", "seq_mean_token_sum", "reward", "k1"),
    "rloo": ("rloo", "policy_gradient", "seq_mean_token_sum", "reward", "k1"),
    "sapo": ("grpo", "sapo", "seq_mean_token_mean", "", ""),
    "spin": ("true_answer", "preference", "seq_mean_token_sum", "", ""),
    "sppo": ("win_rate", "sppo", "seq_mean_token_sum", "", ""),
    "sppo_softmean": ("softmean", "sppo", "seq_mean_token_sum", "", ""),
}


def run_of(*overrides: str) -> RunConfig:
    return compose(RunConfig, "train", [*SOUND, *overrides])


def value(run: RunConfig, key: str) -> object:
    setting = reduce(getattr, key.split("."), run)
    return setting.value if isinstance(setting, Enum) else setting


def test_every_algorithm_is_read_here_again() -> None:
    assert set(READ) == set(algorithms())


@pytest.mark.parametrize("name", READ)
def test_an_algorithm_is_what_its_paper_says(name: str) -> None:
    run = run_of(f"algorithm={name}")
    kl = [run.algorithm.kl_penalty] * run.algorithm.use_kl_in_reward + [run.actor.kl_loss_type] * run.actor.use_kl_loss
    place = " and ".join(["reward"] * run.algorithm.use_kl_in_reward + ["loss"] * run.actor.use_kl_loss)
    assert READ[name] == (
        run.algorithm.adv_estimator, run.actor.loss_mode, run.actor.loss_agg_mode.value, place,
        " ".join(each.value for each in kl),
    )  # fmt: skip


def test_only_dapo_has_a_dual_clip() -> None:
    """The bound of arXiv:1912.09729 is in no other algorithm's paper; verl has 3.0 for all."""
    clipping = {name: run_of(f"algorithm={name}").actor for name in READ}
    bounds = {name: actor.clip_ratio_c for name, actor in clipping.items() if isinstance(actor, PpoClipConfig)}
    assert len(bounds) > 8 and bounds == {name: 10.0 if name == "dapo" else None for name in bounds}


@pytest.mark.parametrize(("longest", "punished"), [(20480, 4096), (1024, 204)])
def test_dapo_punishes_a_fifth_of_the_response_length(longest: int, punished: int) -> None:
    run = run_of("algorithm=dapo", f"data.max_response_length={longest}")
    assert run.reward.overlong.tokens(run.data.max_response_length) == punished


def test_numbers_of_the_papers() -> None:
    ppo, dapo, gspo = (run_of(f"algorithm={name}") for name in ("ppo", "dapo", "gspo"))
    assert (ppo.algorithm.gamma, ppo.algorithm.lam, ppo.actor.clip_low, ppo.actor.clip_high) == (1.0, 0.95, 0.2, 0.2)
    assert (dapo.actor.clip_low, dapo.actor.clip_high, dapo.actor.clip_ratio_c, dapo.rollout.n) == (0.2, 0.28, 10.0, 16)
    assert dapo.algorithm.filter_groups.enable and dapo.reward.overlong.enable and not dapo.algorithm.mask_truncated
    assert (gspo.actor.clip_low, gspo.actor.clip_high) == (3e-4, 4e-4)
    gmpo, sapo, clip_cov, kl_cov = (
        run_of(f"algorithm={name}").actor for name in ("gmpo", "sapo", "clip_cov", "kl_cov")
    )
    assert (gmpo.clip_low, gmpo.clip_high, sapo.tau_pos, sapo.tau_neg) == (0.4, 0.4, 1.0, 1.05)
    assert (clip_cov.clip_cov_ratio, clip_cov.clip_cov_lb, clip_cov.clip_cov_ub) == (0.0002, 1.0, 5.0)
    assert (kl_cov.kl_cov_ratio, kl_cov.ppo_kl_coef) == (0.002, 1.0)
    prime = run_of("algorithm=prime")
    filtering, model = prime.algorithm.filter_groups, prime.process_reward  # type: ignore[attr-defined]  # of the table
    assert (prime.rollout.n, prime.algorithm.process_coef, prime.algorithm.outcome_coef) == (4, 5.0, 5.0)
    assert (filtering.enable, filtering.lower, filtering.upper, filtering.max_num_gen_batches) == (True, 0.2, 0.8, 4)
    assert (model.beta, model.optim.lr, model.optim.clip_grad, model.update.value) == (0.05, 1e-6, 10.0, "before")


@pytest.mark.parametrize("name", READ)
def test_the_run_has_every_value_of_the_object(name: str) -> None:
    run = run_of(f"algorithm={name}")
    for key, expected in preset(algorithms()[name]).items():
        if expected == "${data.train_batch_size}":
            expected = run.data.train_batch_size
        assert value(run, key) == expected, key


@pytest.mark.parametrize("name", READ)
def test_an_object_sets_only_what_its_run_reads(name: str) -> None:
    run = run_of(f"algorithm={name}", *TEACHER.get(name, []))
    run.written = frozenset(algorithms()[name].all_settings())
    assert run_violations(run) == []


def test_every_value_has_its_source() -> None:
    assert all(each.source for algorithm in algorithms().values() for each in algorithm.all_settings().values())


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(MEDIAN + LOSS)
    return path


def test_a_file_of_ones_own_is_chosen_by_its_path(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(f"algorithm={own}")
    assert run == run_of(f"algorithm={own}:median")
    assert run.algorithm.adv_estimator == run.actor.loss_mode == f"{own}:median"
    assert run.rollout.n == 5 and run.roles == ("actor",), "the rest is GRPO's, without its KL"
    assert run_violations(run) == []
    assert [each.key for each in run_violations(run_of(f"algorithm={own}", "rollout.n=1"))] == ["rollout.n"]
    stale = run_violations(run_of(f"algorithm={own}", "actor.ppo_epochs=2", "actor.clip_ratio=0.1", "critic.path=c"))
    assert [each.key for each in stale] == ["actor.clip_ratio", "critic.path", "actor.ppo_epochs"]
    assert main(["train", "--cfg", f"algorithm={own}"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["adv_estimator"] == f"{own}:median"


def test_a_path_may_be_relative_to_where_the_run_is_started(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    assert run_of("algorithm=own.py").actor.loss_mode == f"{own}:median"


def test_a_recipe_names_the_algorithm_of_a_file_beside_it(own: Path) -> None:
    (own.parent / "algorithm").mkdir()
    own.rename(own.parent / "algorithm" / "own.py")
    (own.parent / "mine.yaml").write_text("defaults: [train, override algorithm: median, _self_]\nrollout: {n: 3}\n")
    run = load_recipe(str(own.parent / "mine.yaml"), SOUND)
    assert isinstance(run, RunConfig) and run_violations(run) == []
    assert (run.rollout.n, run.actor.loss_mode) == (3, f"{own.parent}/algorithm/own.py:median")


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("nowhere.py", "there is no such file. Write the path of a Python file"),
        ("{own}:mediam", "does not say which algorithm of the file. Did you mean median?"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(choice: str, said: str, own: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run_of(f"algorithm={choice.format(own=own)}")
    assert str(error.value.violations[0]) == f"algorithm={choice.format(own=own)}: {said}"


def test_one_of_several_of_a_file_must_be_named(own: Path) -> None:
    own.write_text(own.read_text() + "\nOTHER = replace(MEDIAN, name='other', kl=GRPO.kl)\n")
    with pytest.raises(ConfigError, match=r"does not say which .* Write algorithm=.*own.py:NAME, one of median, other"):
        run_of(f"algorithm={own}")
    assert run_of(f"algorithm={own}:other").roles == ("actor", "reference")


def test_help_names_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {each.name} " in shown and each.about in shown for each in algorithms().values())
