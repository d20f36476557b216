"""Whether a model fits a configuration: layouts of all roles, lengths, and a sequence for every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
from transformers import AddedToken, AutoModelForCausalLM, PreTrainedTokenizerBase

from mcore_rl.config.algorithm import DistillConfig, Divergence, KlPenalty
from mcore_rl.config.data import SftDataConfig
from mcore_rl.config.engine import Precision
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.roles import CriticConfig, FrozenModelConfig, RoleConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import PolicyModelConfig, TrainerConfig
from mcore_rl.controller.lifecycle.model_checks import (
    adapter_violations,
    answer_violations,
    model_offline_violations,
    model_run_violations,
    patch_violations,
    vocabulary_violations,
)
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.ground.errors import CheckpointError, Violation
from tests.support import models, prompt_files, tiny_models
from tests.support.settings import actor_config, algorithm_config, any_run


def run(
    world: int, *, n: int = 2, actor: str = "", mini: int = 8, critic: str | None = None, critic_mini: int = 8
) -> RunConfig:
    """critic: its layout; None: there is none."""
    return any_run(
        algorithm=algorithm_config(adv_estimator="grpo" if critic is None else "gae"),
        actor=actor_config(parallel=parallel(actor), ppo_mini_batch_size=mini),
        critic=CriticConfig(parallel=parallel(critic or ""), ppo_mini_batch_size=critic_mini),
        rollout=RolloutConfig(n=n, max_prompt_length=64, max_response_length=64),
        trainer=TrainerConfig(n_gpus_per_node=world),
    )


def parallel(axes: str) -> ParallelConfig:
    return ParallelConfig(**{axis: int(size) for axis, size in (each.split("=") for each in axes.split())})


def keys(violations: list[Violation]) -> list[str]:
    return [violation.key for violation in violations]


def test_what_fits_is_not_refused() -> None:
    assert (
        model_run_violations(
            run(4, actor="tp=2 ep=2", critic="pp=2"), {"actor": models.moe(), "critic": models.dense()}
        )
        == []
    )


def test_a_model_beside_the_policy_reads_its_samples() -> None:
    short = replace(models.dense(), max_position_embeddings=100)
    (violation,) = model_run_violations(run(2, critic=""), {"actor": models.dense(), "critic": short})
    assert violation.key == "critic.path" and "has 100 positions, and a sequence up to 128 tokens" in violation.problem


def test_each_role_is_refused_under_its_own_name() -> None:
    assert "actor.parallel.ep" in keys(model_run_violations(run(2, actor="ep=2"), {"actor": models.dense()}))
    violations = model_run_violations(run(2, critic="ep=2"), {"actor": models.dense(), "critic": models.dense()})
    assert keys(violations) == ["critic.parallel.ep"]
    absent = replace(run(2, critic="ep=2"), algorithm=algorithm_config())
    assert model_run_violations(absent, {"actor": models.dense()}) == [], "a critic that is not there"


def test_a_context_that_is_too_long_is_refused_with_the_rest() -> None:
    settings = run(2, actor="ep=2")
    settings.rollout.max_response_length = 65
    refused_keys = keys(model_run_violations(settings, {"actor": models.dense()}))
    assert {"rollout.max_prompt_length", "actor.parallel.ep"} <= set(refused_keys)


def test_every_data_parallel_rank_must_get_a_sequence_of_each_update() -> None:
    assert model_run_violations(run(8, mini=4), {"actor": models.dense()}) == [], "8 sequences for 8 ranks"
    (violation,) = model_run_violations(run(8, mini=3), {"actor": models.dense()})
    assert str(violation) == (
        "actor.ppo_mini_batch_size=3: makes 6 sequences a step, fewer than the 8 data-parallel ranks of the actor. "
        "Write 4 or more"
    )
    assert model_run_violations(run(8, mini=3, actor="tp=2"), {"actor": models.dense()}) == []
    violation = model_run_violations(
        run(8, mini=4, critic="", critic_mini=1), {"actor": models.dense(), "critic": models.dense()}
    )
    assert keys(violation) == ["critic.ppo_mini_batch_size"]


def test_fine_tuning_is_held_against_the_model_too() -> None:
    def settings(length: int = 128, size: int = 4, axes: str = "", world: int = 4) -> SftConfig:
        return SftConfig(
            data=SftDataConfig(max_length=length, train_batch_size=size),
            actor=RoleConfig(parallel=parallel(axes)),
            trainer=TrainerConfig(n_gpus_per_node=world),
        )

    assert model_offline_violations(settings(), models.dense()) == []
    assert keys(model_offline_violations(settings(length=129, axes="ep=2"), models.dense())) == [
        "actor.parallel.ep", "data.max_length"
    ]  # fmt: skip
    (violation,) = model_offline_violations(settings(size=3), models.dense())
    assert str(violation) == "data.train_batch_size=3: is fewer than the 4 data-parallel ranks. Write 4 or more"
    assert model_offline_violations(settings(size=3, axes="tp=2"), models.dense()) == []


def test_a_full_kl_must_fit_into_the_memory_that_it_may_take() -> None:
    """4 ranks of data parallelism train 12 or 13 of 50 sequences, of which 64 tokens each; 48 of 96 columns."""
    model = replace(models.dense(), vocab_size=96)
    settings = run(8, n=5, mini=10, actor="tp=2")
    settings.data.max_prompt_length = settings.data.max_response_length = 64
    settings.actor.use_kl_loss, settings.actor.kl_loss_type = True, KlPenalty.full
    assert model_run_violations(settings, {"actor": model}) == []
    needed = 13 * 64 * 48 * 2 / 2**30
    settings.actor.full_kl_gib = needed
    assert model_run_violations(settings, {"actor": model}) == []
    settings.actor.full_kl_gib = 0.99 * needed
    (violation,) = model_run_violations(settings, {"actor": model})
    assert violation.key == "actor.kl_loss_type" and "832 tokens x 48 columns x 2 bytes" in violation.problem
    assert "actor.kl_loss_type=k3" in violation.remedy
    settings.actor.kl_loss_type = KlPenalty.k3
    assert model_run_violations(settings, {"actor": model}) == []


def test_a_context_rank_keeps_its_part_of_a_full_kl() -> None:
    settings = run(4, n=4, mini=4, actor="cp=4")
    settings.data.max_prompt_length, settings.data.max_response_length = 28, 100
    settings.actor.use_kl_loss, settings.actor.kl_loss_type = True, KlPenalty.full
    settings.actor.precision, settings.actor.full_kl_gib = Precision.float32, 0.0
    (violation,) = model_run_violations(settings, {"actor": models.dense()})
    assert f"512 tokens x {models.dense().vocab_size} columns x 4 bytes" in violation.problem


def test_adapters_of_layers_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    tiny_models.save("qwen2", tmp_path)
    settings = run(2)
    settings.model.path = str(tmp_path)
    assert list(adapter_violations(settings)) == []
    settings.actor.lora = LoraConfig(rank=4, target_modules=["q_proj", "w1"])
    (violation,) = adapter_violations(settings)
    assert violation.key == "actor.lora.target_modules" and "'w1'" in violation.problem and "q_proj" in violation.remedy
    sft = SftConfig(model=settings.model)
    sft.actor.lora = LoraConfig(rank=4, exclude_modules=["w1"])
    assert keys(list(adapter_violations(sft))) == ["actor.lora.exclude_modules"]


def test_adapters_of_a_changed_output_projection_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """PEFT saves the projection beside its adapters."""
    base, saved = tmp_path / "base", tmp_path / "saved"
    tiny_models.save("mixtral", base)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(saved))
    settings = run(2)
    settings.model.path = str(base)
    settings.actor.lora = LoraConfig(rank=4, alpha=8.0, target_modules=["lm_head"], path=str(saved))
    assert list(adapter_violations(settings)) == []
    tiny_models.save("mixtral", base, seed=1)
    with pytest.raises(CheckpointError, match=r"is not lm_head.weight of .* Merge them with PEFT"):
        list(adapter_violations(settings))


@pytest.mark.parametrize("divergence", [Divergence.drawn, Divergence.forward_kl])
def test_a_teacher_may_have_more_rows_of_padding_and_no_fewer(divergence: Divergence) -> None:
    taught = replace(
        run(2), algorithm=algorithm_config(distill=DistillConfig(coef=1.0, divergence=divergence)),
        teacher=FrozenModelConfig(path="t"),
    )  # fmt: skip
    dense = models.dense()
    wide, narrow = (replace(dense, vocab_size=dense.vocab_size + more) for more in (8, -8))
    assert model_run_violations(taught, {"actor": dense, "teacher": wide}) == []
    (violation,) = model_run_violations(taught, {"actor": dense, "teacher": narrow})
    assert violation.key == "teacher.path" and "it cannot score all of them" in violation.problem


@pytest.mark.parametrize(
    ("mark", "is_special", "refused"),
    [("</think>", True, True), ("</think>", False, False), ("</think>\n", False, False), ("Answer:", None, False)],
)
def test_a_thought_ends_with_what_graders_see(mark: str, is_special: bool | None, refused: bool) -> None:
    tokenizer = prompt_files.tokenizer()
    if is_special is not None:
        tokenizer.add_tokens([AddedToken("</think>", special=is_special)], special_tokens=is_special)
    seen = tokenizer.decode(tokenizer.encode(f"Some thought. {mark} 5"), skip_special_tokens=True)
    assert (mark not in seen) == refused
    violations = list(answer_violations(RewardConfig(answer_after=mark), tokenizer))
    assert [violation.key for violation in violations] == ["reward.answer_after"] * refused


def test_a_model_that_scores_has_the_policy_s_tokens(tmp_path: Path) -> None:
    """Compared where a model of its own scores tokens; a critic's head has no tokens, and the policy's are its own."""
    prompt_files.tokenizer().save_pretrained(tmp_path / "same")
    more = prompt_files.tokenizer()
    more.add_tokens(["<think>"])
    more.save_pretrained(tmp_path / "more")
    (tmp_path / "none").mkdir()

    def violations(path: str, policy: PreTrainedTokenizerBase) -> list[Violation]:
        config = replace(
            run(2, critic=""), model=PolicyModelConfig(path=str(tmp_path / "policy")),
            teacher=FrozenModelConfig(path=path), critic=CriticConfig(path=str(tmp_path / "none")),
            algorithm=algorithm_config(adv_estimator="gae", distill=DistillConfig(coef=1.0)),
        )  # fmt: skip
        return list(vocabulary_violations(config, policy))

    plain = prompt_files.tokenizer()
    assert all(violations(str(tmp_path / name), plain) == [] for name in ("same", "more", "policy"))
    (other,) = violations(str(tmp_path / "same"), more)
    assert other.key == "teacher.path" and "the numbers of 1 tokens differ, first of '<think>'" in other.problem
    (lacking,) = violations(str(tmp_path / "none"), plain)
    assert lacking.key == "teacher.path" and "has no tokenizer" in lacking.problem


def test_a_pair_has_the_pictures_of_its_row_twice() -> None:
    media = [[Placed(ImageRef("a", "a.png"), 1, Grid(1, 4, 8))], [Placed(ImageRef("b", "b.png"), 1, Grid(1, 2, 2))]]
    narrow = actor_config(microbatch_patches=40)
    assert patch_violations("actor", narrow, media) == []
    (refused,) = patch_violations("actor", narrow, media, pairs=True)
    assert refused.key == "actor.microbatch_patches" and refused.remedy == "Write 64 or more"
    assert refused.problem == "1 of 2 pairs do not fit; the longest, pair 0, takes 64 patches"
    (single,) = patch_violations("actor", actor_config(microbatch_patches=31), media)
    assert "row 0, takes 32 patches" in single.problem
