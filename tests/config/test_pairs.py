"""Runs that learn from pairs: how many sequences a prompt has, and every contradiction with its remedy."""

from __future__ import annotations

import re

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.pairs import needs_answers, sequences_per_prompt, trains_pairs, units_per_prompt
from mcore_rl.config.role import Every, Never
from mcore_rl.config.run import RunConfig, run_violations

SOUND = ["model.path=m", "data.train_files=[t.parquet]", "data.val_files=[v.parquet]"]
ONLINE, SPIN = "algorithm=online_dpo", "algorithm=spin"
ANSWER = "data.answer_key=extra_info.answer"


def run_of(*overrides: str) -> RunConfig:
    return compose(RunConfig, "train", [*SOUND, *overrides])


@pytest.mark.parametrize(
    ("words", "pairs", "answers", "units", "sequences"),
    [
        (["algorithm=grpo", "rollout.n=4"], False, False, 4, 4),
        ([ONLINE], True, False, 1, 2),
        ([ONLINE, "rollout.n=8"], True, False, 1, 2),
        ([SPIN, ANSWER], True, True, 1, 2),
        ([SPIN, ANSWER, "rollout.n=3"], True, True, 3, 6),
    ],
)
def test_a_prompt_has_so_many_sequences(
    words: list[str], pairs: bool, answers: bool, units: int, sequences: int
) -> None:
    run = run_of(*words)
    assert run_violations(run) == []
    assert (trains_pairs(run), needs_answers(run)) == (pairs, answers)
    assert (units_per_prompt(run), sequences_per_prompt(run)) == (units, sequences)


def test_the_loss_says_whether_there_is_a_reference_and_the_key_whether_it_moves() -> None:
    def reference(*words: str) -> object:
        return next((row.moves for row in run_of(*words).role_rows if row.name == "reference"), None)

    assert reference(ONLINE) == Never() and reference(SPIN, ANSWER) == Every(1)
    assert reference(ONLINE, "algorithm.ref_update_freq=7") == Every(7)
    assert reference(SPIN, ANSWER, "algorithm.ref_update_freq=0") == Never()
    assert reference("algorithm=grpo", "algorithm.ref_update_freq=3") == Every(3)
    assert reference(ONLINE, "actor.preference.loss=simpo") is None
    assert all(isinstance(row.moves, Never) for row in run_of(SPIN, ANSWER).role_rows if row.name != "reference")


REFUSED = {
    f"{ONLINE} actor.loss_mode=ppo_clip": "best_worst makes pairs.*Write actor.loss_mode=preference",
    "algorithm=grpo actor.loss_mode=preference actor.loss_agg_mode=seq_mean_token_sum": (
        "algorithm.adv_estimator=grpo: .*compares the responses of a pair.*best_worst or true_answer"
    ),
    f"{ONLINE} rollout.n=1": "rollout.n=1: .*best_worst compares the samples of a prompt",
    f"{ONLINE} actor.preference.loss=kto": "actor.preference.loss=kto: learns from labels.*dpo or ipo",
    f"{ONLINE} actor.preference.gamma=2": "actor.preference.gamma=2.0: is not read by dpo.*simpo",
    f"{ONLINE} actor.microbatch_sequences=1 actor.microbatch_tokens=null": "parts the two sequences of a pair",
    f"{ONLINE} actor.use_kl_loss=true": "actor.use_kl_loss=True: .*has the reference in it.*larger beta",
    f"{ONLINE} algorithm.use_kl_in_reward=true": "algorithm.use_kl_in_reward=True: best_worst ranks responses",
    f"{ONLINE} algorithm.off_policy=decoupled": "algorithm.off_policy=decoupled: weighs tokens.*recompute",
    f"{ONLINE} algorithm.off_policy=bypass": "algorithm.off_policy=bypass: .*has no ratio",
    f"{ONLINE} algorithm.rollout_correction.reject=token_k1 algorithm.rollout_correction.reject_upper=2": (
        "algorithm.rollout_correction.reject=token_k1: leaves tokens or single responses out"
    ),
    f"{ONLINE} actor.loss_agg_mode=token_mean": "actor.loss_agg_mode=token_mean: .*Write actor.loss_agg_mode=seq_mean",
    f"{SPIN} data.answer_key=null": "data.answer_key=None: .*no column is named.*data.answer_key=extra_info.answer",
    f"{SPIN} {ANSWER} actor.router_replay=r3": "actor.router_replay=r3: .*through no engine.*r2 or off",
    f"{ONLINE} {ANSWER}": "data.answer_key=extra_info.answer: is not read.*adv_estimator=true_answer",
    "algorithm=dapo algorithm.ref_update_freq=2": "algorithm.ref_update_freq=2: is not read: there is no reference",
    "algorithm=grpo actor.preference.beta=1": "actor.preference.beta=1.0: is not read.*has no use for it",
    f"{ONLINE} algorithm.mask_truncated=true algorithm.masked_in_baseline=false algorithm.filter_groups.enable=true": (
        "pairs have no baseline"
    ),
    f"{ONLINE} algorithm.whiten_advantages=true": "algorithm.whiten_advantages=True: is not read: pairs have no",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_contradiction_is_refused_once_with_its_remedy(words: str) -> None:
    violations = run_violations(run_of(*words.split()))
    assert len(violations) == 1, violations
    assert re.search(REFUSED[words], str(violations[0])), violations[0]


@pytest.mark.parametrize(
    "words",
    [
        "trainer.mode=one_step_off trainer.placement=separate",
        "trainer.mode=async trainer.placement=separate async.max_staleness=2",
        "rollout.partial=true",
        "actor.lora.rank=8",
        "algorithm.filter_groups.enable=true rollout.n=4",
        "actor.ppo_epochs=3 actor.ppo_mini_batch_size=64",
        "actor.entropy_coeff=0.01",
        "actor.router_replay=r2",
    ],
)
def test_what_goes_with_pairs(words: str) -> None:
    for algorithm in (ONLINE, f"{SPIN} {ANSWER}"):
        assert run_violations(run_of(*algorithm.split(), *words.split())) == []
