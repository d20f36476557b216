"""What ``train`` says of keys of verl's: ours, from the same table."""

from __future__ import annotations

import pytest

from mcore_rl.cli import main

CASES = {
    "actor_rollout_ref.actor.optim.lr=1e-6": "It is verl's; write actor.optim.lr=1e-06",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean": "It is verl's; write actor.loss_agg_mode=token_mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla": "It is verl's; write actor.loss_mode=ppo_clip",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl": "write actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4": "here it is actor.microbatch_tokens",
    "+actor_rollout_ref.model.lora_rank=32": "It is verl's; here it is actor.lora.rank",
    "+actor_rollout_ref.model.lora.rank=32": "It is verl's; here it is actor.lora.rank",
    "trainer.balance_batch=True": "It is verl's, and needs nothing here: always, by tokens. Leave it out",
    "trainer.max_actor_ckpt_to_keep=3": "write trainer.max_to_keep=3",
    "rollout.tensor_model_parallel_size=4": "write rollout.tp=4",  # without verl's first name
    "actor.ppo_max_token_len_per_gpu=4": "here it is actor.microbatch_tokens",
    "beta=0.04": "TRL's beta is here: actor.kl_loss_coef",  # and not what ends so
    "optim.lr=1e-6": "here are actor.optim.lr, critic.optim.lr",  # by its end
    "my.optim.clip_grad=1": "here are actor.optim.clip_grad, critic.optim.clip_grad",
    "policy.parallel.tp=2": "Did you mean actor.parallel.tp or critic.parallel.tp",  # the end of ours
    "trainer.save_freqq=1": "Did you mean trainer.save_freq",  # of neither: the nearest, as ever
}


@pytest.mark.parametrize("word", CASES)
def test_a_key_of_verls_is_told_ours(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--check", word]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "there is no such key" in told and CASES[word] in told


def test_another_program_is_told_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--check", "actor_rollout_ref.actor.optim.lrr=1"]) == 2
    assert "verl" not in capsys.readouterr().err.replace("actor_rollout_ref", "")
