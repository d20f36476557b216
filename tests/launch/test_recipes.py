"""Every recipe: composes, validates, says what it reproduces, fits its cluster by plan, and its weights go right.

That it trains is ``tests/e2e/test_shadows.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from mcore_rl.commands.verify import prove
from mcore_rl.config.algorithm import FilterMetric, KlPenalty, OffPolicy
from mcore_rl.config.algorithms.prime import ProcessRewardConfig
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.config.compose import as_dict
from mcore_rl.config.data import SftDataConfig
from mcore_rl.config.engine import Recompute
from mcore_rl.config.launch import load_cluster, load_recipe, recipe_names
from mcore_rl.config.resources import MODEL_CONFIGS, RECIPES
from mcore_rl.config.role import Head
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import LossAggregation
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import ASYNC as ASYNC_MODE
from mcore_rl.config.trainer import Logger, Placement
from mcore_rl.controller.lifecycle.model_checks import model_offline_violations, model_run_violations
from mcore_rl.data.datasets import DATASETS
from mcore_rl.families.checkpoints import find_checkpoint, published_config
from mcore_rl.families.registry import model_of
from mcore_rl.planning.peaks import Phase, Place
from mcore_rl.planning.plan import plan
from mcore_rl.planning.recipes import num_steps, other_models, recipe_config_json, recipe_model
from mcore_rl.planning.serving import rollout_weight_bytes
from mcore_rl.proofs.verify import verify
from mcore_rl.training.meta import meta_rank
from mcore_rl.weights.table import Table
from tests.support import shadows
from tests.support.composed import recipe

NAMES = [name for name in recipe_names() if not name.startswith(("arithmetic", "products"))]
MOST_OVERRIDES = 36
FULL = 0.9  # of a device: docs/planning.md says to leave a tenth free
FOLDERS = {name: name for name in DATASETS} | {"dapo-math": "dapo"}


@dataclass(frozen=True)
class Row:
    """What was published, read from its log or script.

    kl: where it is: "reward", "loss" or both.  warmup: updates; verl counts steps.  aggregation: where the loss
    says it.
    """

    estimator: str
    batch: int
    mini: int
    n: int
    lengths: tuple[int, int]
    lr: float
    kl: str
    entropy: float
    steps: int
    critic_lr: float | None = None
    clip: tuple[float, float, float | None] = (0.2, 0.2, 3.0)
    weight_decay: float = 0.01
    warmup: int = 0
    aggregation: LossAggregation = LossAggregation.token_mean
    kl_coef: float = 0.001


ADAPTERS = tuple(f"qwen25_{size}_grpo_lora" for size in ("05b", "15b", "3b", "7b", "14b", "32b", "72b"))
ASYNC = {  # and what they are but for when they draw
    "qwen3_30b_a3b_grpo_async": "qwen3_30b_a3b_grpo",
    "mixtral_8x22b_grpo_async": "mixtral_8x22b_rloo",
    "deepseek_v3_grpo_async": "deepseek_v3_grpo",
}
ASYNC_OWN = {
    "deepseek_v3_grpo_async": ("actor.router_replay",),
    "mixtral_8x22b_grpo_async": ("algorithm.adv_estimator", "algorithm.use_kl_in_reward", "actor.entropy_coeff"),
}
OWN = ("qwen3_30b_a3b_grpo_lora", "mixtral_8x22b_grpo_lora", "qwen25_7b_sft_lora")  # adapters that nobody published
PRIME = ("qwen25_05b_prime", "eurus2_7b_prime")
SEQUENCES = LossAggregation.seq_mean_token_sum
NO_DUAL = (0.2, 0.2, None)  # a loss without the dual clip, or a run that nobody published
DISTILLED = "qwen3_4b_distill_30b_a3b"  # nobody published it
PUBLISHED = {
    "gemma2_2b_ppo": Row("gae", 512, 128, 1, (1024, 512), 1e-6, "reward", 0.001, 210, 1e-5),
    "qwen25_05b_ppo": Row("gae", 256, 64, 1, (1024, 512), 1e-6, "reward", 0.001, 435, 1e-5),
    "qwen25_05b_prime": Row("prime", 64, 64, 4, (1024, 3072), 5e-7, "", 0.001, 870),
    "eurus2_7b_prime": Row("prime", 64, 64, 4, (1024, 3072), 5e-7, "", 0.001, 592),
    "deepseek_7b_ppo": Row("gae", 1024, 256, 1, (512, 512), 2e-6, "reward", 0.001, 105, 2e-5),
    "deepseek_7b_ppo_mi300x": Row("gae", 1024, 256, 1, (512, 512), 1e-6, "reward", 0.001, 1120, 1e-5),
    "deepseek_7b_grpo_mi300x": Row("grpo", 1024, 256, 5, (512, 1024), 1e-6, "loss", 0.001, 1120),
    "qwen2_7b_grpo": Row("grpo", 1024, 256, 5, (1024, 1024), 1e-6, "loss", 0.001, 210),
    "qwen25_vl_7b_grpo": Row("grpo", 512, 128, 5, (1024, 2048), 1e-6, "loss", 0.0, 60, kl_coef=0.01),
    "qwen25_7b_remax": Row("remax", 1024, 256, 4, (512, 1024), 1e-6, "reward", 0.001, 70),
    "qwen25_7b_spin": Row(
        "best_worst", 32, 8, 2, (1024, 1024), 1e-6, "", 0.0, 1165, clip=NO_DUAL, aggregation=SEQUENCES
    ),
    "qwen25_7b_sppo": Row(
        "softmean", 1024, 256, 1, (1024, 512), 1e-6, "", 0.0, 140, clip=NO_DUAL, warmup=15 * 4, aggregation=SEQUENCES
    ),
    "mixtral_8x22b_rloo": Row("rloo", 128, 128, 4, (512, 4096), 1e-6, "reward and loss", 0.001, 870),
    "mixtral_8x7b_rloo": Row("rloo", 128, 128, 4, (512, 4096), 1e-6, "reward and loss", 0.001, 870),
    "qwen2_7b_gpg": Row("gpg", 1024, 256, 5, (1024, 1024), 1e-6, "", 0.0, 105, clip=NO_DUAL),
    "qwen25_math_7b_dapo": Row(
        "grpo", 512, 32, 16, (2048, 8192), 1e-6, "", 0.0, 200, clip=(0.2, 0.28, 10.0), weight_decay=0.1, warmup=160
    ),
    "qwen25_72b_grpo": Row("grpo", 1024, 256, 5, (512, 1024), 1e-6, "loss", 0.0, 105),
    "qwen3_30b_a3b_grpo": Row("grpo", 64, 64, 5, (1024, 2048), 1e-6, "loss", 0.0, 1740),
    "qwen3_vl_30b_a3b_grpo": Row("grpo", 512, 128, 5, (1024, 2048), 1e-6, "loss", 0.0, 60, kl_coef=0.01),
    "qwen3_30b_a3b_grpo_fp8": Row("grpo", 64, 64, 5, (1024, 2048), 1e-6, "loss", 0.0, 1740),
    "qwen3_235b_a22b_grpo": Row(
        "grpo", 256, 16, 4, (2048, 4096), 1e-6, "", 0.0, 100, clip=(0.2, 0.28, 10.0), weight_decay=0.1, warmup=160
    ),
    "deepseek_v3_grpo": Row("grpo", 512, 128, 4, (2048, 4096), 1e-6, "loss", 0.0, 28),
    "qwen3_30b_a3b_grpo_async": Row("grpo", 64, 64, 5, (1024, 2048), 1e-6, "loss", 0.0, 1740),
    "deepseek_v3_grpo_async": Row("grpo", 512, 128, 4, (2048, 4096), 1e-6, "loss", 0.0, 28),
    "qwen25_7b_dapo_interpreter": Row("grpo", 64, 16, 16, (2048, 16384), 1e-6, "", 0.0, 271, clip=(0.2, 0.28, 10.0)),
    "qwen25_3b_gsm8k_tool": Row("grpo", 256, 256, 16, (1024, 1024), 1e-6, "loss", 0.0, 435),
    "qwen25_3b_gsm8k_interaction": Row("grpo", 512, 512, 8, (1024, 3072), 1e-6, "loss", 0.0, 210),
    "qwen3_30b_a3b_agent": Row("grpo", 64, 16, 16, (2048, 8192), 1e-6, "loss", 0.0, 271, clip=NO_DUAL),  # nobody's
    **{name: Row("grpo", 64, 64, 5, (512, 1024), 3e-5, "loss", 0.001, 116) for name in ADAPTERS},
}


def rl_recipe(name: str) -> RunConfig:
    run = recipe(name)
    assert isinstance(run, RunConfig)
    return run


def test_every_row_has_its_recipe() -> None:
    assert set(NAMES) == {"gemma2_2b_sft", "qwen25_15b_grpo_xml", DISTILLED, *OWN, *ASYNC, *PUBLISHED}


@pytest.mark.parametrize("name", NAMES)
def test_composes_and_validates_at_full_size(name: str) -> None:
    run = recipe(name)
    model = recipe_model(run)
    if isinstance(run, SftConfig):
        violations = run.violations() + model_offline_violations(run, model)
    else:
        models = {role.name: model for role in run.group_rows} | other_models(run)
        violations = run_violations(run) + model_run_violations(run, models)
    assert violations == []


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_reproduces(name: str) -> None:
    run = recipe(name)
    about = run.recipe
    checkpoint = find_checkpoint(about.checkpoint, MODEL_CONFIGS)
    assert checkpoint.name == about.checkpoint and about.title and about.published.note
    assert about.published.score is None or (about.published.source and about.published.hardware)
    folders = {FOLDERS[dataset] for dataset in about.datasets}
    assert set(about.datasets) <= DATASETS.keys()
    files = [Path(path) for path in (*run.data.train_files, *run.data.val_files)]
    assert {path.parent.name for path in files} == folders
    splits = {split for dataset in about.datasets for split in DATASETS[dataset].splits}
    assert splits - {"validation"} <= {path.stem for path in files} <= splits
    assert {path.suffix for path in files} == {".parquet"}
    assert all(path.parts[0] == "data" and len(path.parts) == 3 for path in files)
    assert run.model.path in (f"models/{checkpoint.hf_id.rpartition('/')[2]}", "runs/gemma2_2b_sft/hf/final")
    assert run.trainer.experiment_name == name and run.trainer.default_local_dir == f"runs/{name}"


def test_a_recipe_stands_on_the_weights_of_another() -> None:
    assert recipe("gemma2_2b_ppo").model.path == f"{recipe('gemma2_2b_sft').trainer.default_local_dir}/hf/final"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short(name: str) -> None:
    values = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    del values["recipe"], values["defaults"]
    assert leaves(values) <= MOST_OVERRIDES


def leaves(value: Any) -> int:
    return sum(map(leaves, value.values())) if isinstance(value, dict) else 1


@pytest.mark.parametrize("name", NAMES)
def test_stands_on_whole_nodes_of_its_cluster(name: str) -> None:
    run, cluster = recipe(name), load_cluster(recipe(name).recipe.cluster)
    assert run.trainer.n_gpus_per_node <= cluster.gpus_per_node
    assert run.trainer.nnodes == 1 or run.trainer.n_gpus_per_node == cluster.gpus_per_node
    if isinstance(run, RunConfig):
        shared = run.trainer.placement is Placement.colocated
        assert run.rollout.layout.world_size == run.trainer.world_size or not shared
        assert run.rollout.tp <= cluster.gpus_per_node, "an engine has its devices on one node"
        assert run.rollout.layout.engine_dp == 1


@pytest.mark.parametrize("name", NAMES)
def test_is_planned_on_its_cluster_and_fits(name: str) -> None:
    run = recipe(name)
    model, cluster = recipe_model(run), load_cluster(run.recipe.cluster)
    made = plan(run, model, cluster, other_models(run))
    assert made.fits, made.violations
    assert made.violations == [] and made.num_gpus >= run.trainer.world_size and made.step_s > 0


@pytest.mark.parametrize("name", NAMES)
def test_recomputes_no_more_than_it_must(name: str) -> None:
    """A tenth of a device is left free in the update, and with less recompute, in whatever microbatches, it is not."""
    run = recipe(name)
    model, cluster = recipe_model(run), load_cluster(run.recipe.cluster)

    def share(*more: str) -> float:
        peaks = plan(load_recipe(name, more), model, cluster, other_models(run)).peaks
        updates = [each for each in peaks if each.phase is Phase.update and each.place is Place.device]
        return max(each.num_bytes / (each.capacity or 1) for each in updates)

    assert share() < FULL
    if run.actor.recompute is Recompute.none:
        return
    data = run.data
    longest = data.max_length if isinstance(data, SftDataConfig) else data.max_prompt_length + data.max_response_length
    for tokens in (run.actor.microbatch_tokens, -(-longest // 1024) * 1024):
        assert share("actor.recompute=none", f"actor.microbatch_tokens={tokens}") > FULL, tokens


def test_a_plan_is_near_what_was_measured() -> None:
    """grpo_run_deepseek7b_llm.log: 91 to 122 s a step on 8 MI300X, with FSDP and vLLM of 2025."""
    run = rl_recipe("deepseek_7b_grpo_mi300x")
    made = plan(run, recipe_model(run), load_cluster(run.recipe.cluster))
    assert 91 / 2 < made.step_s < 122 * 2


def test_what_does_not_fit_is_said() -> None:
    run = load_recipe("mixtral_8x22b_rloo", ["trainer.nnodes=2", "actor.parallel.pp=1", "rollout.dp=2"])
    assert isinstance(run, RunConfig)
    made = plan(run, recipe_model(run), load_cluster(run.recipe.cluster))
    assert not made.fits and made.violations


@pytest.mark.parametrize("name", PUBLISHED)
def test_hyperparameters_are_those_published(name: str) -> None:
    run, row = rl_recipe(name), PUBLISHED[name]
    assert run.algorithm.adv_estimator == row.estimator
    assert (run.data.train_batch_size, run.actor.ppo_mini_batch_size, run.rollout.n) == (row.batch, row.mini, row.n)
    assert (run.data.max_prompt_length, run.data.max_response_length) == row.lengths
    optim = run.actor.optim
    assert (optim.lr, optim.weight_decay, optim.lr_warmup_steps) == (row.lr, row.weight_decay, row.warmup)
    assert (optim.clip_grad, optim.lr_schedule.value, run.actor.ppo_epochs) == (1.0, "constant", 1)
    if isinstance(run.actor, ClippedConfig):
        assert (run.actor.clip_low, run.actor.clip_high, vars(run.actor).get("clip_ratio_c")) == row.clip
    assert run.actor.loss_agg_mode is row.aggregation
    assert run.actor.entropy_coeff == row.entropy
    assert run.algorithm.use_kl_in_reward is ("reward" in row.kl) and run.actor.use_kl_loss is ("loss" in row.kl)
    assert (run.algorithm.kl_ctrl.kl_coef, run.actor.kl_loss_coef) == (0.001, row.kl_coef)
    assert run.algorithm.kl_penalty is KlPenalty.k1 and run.actor.kl_loss_type is KlPenalty.k3
    of_algorithm = vars(run.algorithm)
    assert (of_algorithm.get("gamma", 1.0), of_algorithm.get("lam", 1.0), run.rollout.temperature) == (1.0, 1.0, 1.0)
    assert run.algorithm.filter_groups.enable is (name in PRIME)
    assert num_steps(run) == row.steps
    if row.critic_lr is not None:
        assert "critic" in run.roles and run.critic.optim.lr == row.critic_lr
        assert run.critic.ppo_mini_batch_size == row.mini and run.critic.cliprange_value == 0.5


@pytest.mark.parametrize("name", PRIME)
def test_the_process_reward_model_and_the_filter_of_prime_are_those_published(name: str) -> None:
    run = rl_recipe(name)
    model, filtering = run.role_config(ROLES["process_reward"]), run.algorithm.filter_groups
    assert isinstance(model, ProcessRewardConfig)
    assert (model.beta, model.update.value, model.ppo_mini_batch_size, model.ppo_epochs) == (0.05, "before", 64, 1)
    assert (model.optim.lr, model.optim.clip_grad, model.optim.weight_decay) == (1e-6, 10.0, 0.0)
    assert (filtering.lower, filtering.upper, run.data.gen_batch_size) == (0.2, 0.8, 4 * run.data.train_batch_size)
    assert filtering.max_num_gen_batches == 1 and run.algorithm.process_coef == run.algorithm.outcome_coef


def test_programs_are_scored_as_in_primes_code() -> None:
    """verl's prime_code.compute_score with continuous=True: the share of the first ten cases, which the filter sees."""
    run = rl_recipe("eurus2_7b_prime")
    assert (run.reward.code.continuous, run.reward.code.first_cases) == (True, 10)
    assert run.algorithm.filter_groups.metric is FilterMetric.score


@pytest.mark.parametrize(
    ("name", "tools", "turns", "drawn"),
    [
        ("qwen25_7b_dapo_interpreter", ["python"], 16, (30, 1.0, 0.6)),
        ("qwen25_3b_gsm8k_tool", ["calc_gsm8k_reward"], 5, (1, 0.0, 1.0)),
        ("qwen25_3b_gsm8k_interaction", [], 5, (1, 0.0, 1.0)),
        ("qwen3_30b_a3b_agent", ["python"], 16, (30, 1.0, 0.6)),
    ],
)
def test_agents_have_the_tools_and_turns_that_were_published(
    name: str, tools: list[str], turns: int, drawn: tuple[int, float, float]
) -> None:
    rollout = rl_recipe(name).rollout
    validation = rollout.val_kwargs
    assert (rollout.agent.tools, rollout.agent.max_turns, rollout.agent.tool_parser) == (tools, turns, "hermes")
    assert (validation.n, validation.temperature, validation.top_p) == drawn
    assert not rl_recipe(name).reward.overlong.enable


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_as_published(name: str) -> None:
    lora = rl_recipe(name).actor.lora
    assert (lora.rank, lora.alpha, lora.target_modules, lora.use_rslora) == (32, 32.0, ["all-linear"], False)
    assert not rl_recipe(name).data.shuffle


def test_adapters_of_our_own_are_trained_as_those_that_were_published() -> None:
    for name in OWN:
        lora = recipe(name).actor.lora
        assert (lora.rank, lora.alpha, lora.target_modules, lora.use_rslora) == (32, 32.0, ["all-linear"], False)
        assert (
            recipe(name).recipe.published.score is None and "No run is published" in recipe(name).recipe.published.note
        )
    for name in OWN[:2]:
        run, row = rl_recipe(name), PUBLISHED[ADAPTERS[0]]
        assert (run.data.train_batch_size, run.rollout.n, run.actor.optim.lr) == (row.batch, row.n, row.lr)
        assert num_steps(run) == row.steps
    assert recipe(OWN[2]).actor.optim.lr == 10 * recipe("gemma2_2b_sft").actor.optim.lr


def test_a_teacher_teaches_as_the_source_of_its_settings_says() -> None:
    """tinker-cookbook, on_policy_distillation.py: group_size, kl_penalty_coef, num_substeps; no reward is learnt."""
    run = rl_recipe(DISTILLED)
    assert "No run is published" in run.recipe.published.note
    assert (run.algorithm.adv_estimator, run.algorithm.distill.coef, run.rollout.n) == ("none", 1.0, 4)
    assert run.actor.ppo_mini_batch_size == run.data.train_batch_size and not run.actor.use_kl_loss
    student, teacher = recipe_model(run), other_models(run)["teacher"]
    assert teacher.moe is not None and student.moe is None and teacher.vocab_size == student.vocab_size
    names = {each for peak in plan(run, student, load_cluster(run.recipe.cluster), {"teacher": teacher}).peaks
             for each in (row.part for row in peak.rows)}  # fmt: skip
    assert "teacher weights" in names


@pytest.mark.parametrize("name", ASYNC)
def test_asynchronous_forms_draw_on_devices_of_their_own_and_train_as_their_sync_forms(name: str) -> None:
    run, other = rl_recipe(name), rl_recipe(ASYNC[name])
    assert (run.trainer.mode, run.trainer.placement) == (ASYNC_MODE, Placement.separate)
    assert 1 <= run.async_.max_staleness <= 4 and run.algorithm.off_policy is OffPolicy.decoupled
    changed = shadows.differing(as_dict(other), as_dict(run))
    changed = [key for key in changed if key.partition(".")[0] not in ("recipe", "trainer", "rollout", "async")]
    own = {"algorithm.off_policy", *ASYNC_OWN.get(name, ())}
    assert set(changed) == own, "what is trained, and how, is that of the sync form"


def test_engines_in_fp8_draw_for_the_same_training_from_half_the_bytes() -> None:
    """Embedding and head stay plain; what is drawn is weighed."""
    name = "qwen3_30b_a3b_grpo_fp8"
    run, other = rl_recipe(name), rl_recipe("qwen3_30b_a3b_grpo")
    changed = shadows.differing(as_dict(other), as_dict(run))
    changed = [key for key in changed if key.partition(".")[0] not in ("recipe", "trainer")]
    assert sorted(changed) == ["algorithm.off_policy", "rollout.quantization"]
    assert run.algorithm.off_policy is OffPolicy.decoupled
    model, cluster = recipe_model(run), load_cluster(run.recipe.cluster)
    held = [
        rollout_weight_bytes(model, each.rollout.layout, 2, quantization=each.rollout.quantization)
        for each in (run, other)
    ]
    assert 0.5 < held[0] / held[1] < 0.55
    assert plan(run, model, cluster).step_s < plan(other, model, cluster).step_s, "decoding reads fewer bytes"


def test_supervised_fine_tuning_is_as_published() -> None:
    """fsdp_sft_trainer.py, 2024-12: a tenth of the steps is warm-up, then a cosine to 0."""
    run = recipe("gemma2_2b_sft")
    assert isinstance(run, SftConfig)
    optim = run.actor.optim
    assert (run.data.train_batch_size, run.data.max_length, num_steps(run)) == (256, 1024, 58)
    assert (optim.lr, tuple(optim.betas), optim.weight_decay) == (1e-5, (0.9, 0.95), 0.01)
    assert (optim.lr_schedule.value, optim.total_steps, optim.lr_warmup_steps) == ("cosine", None, int(0.1 * 58))


def test_the_course_for_trl_is_as_published() -> None:
    """grpo_demo.py, with the defaults of TRL's GRPOConfig in January 2025: beta, temperature, prompts a device."""
    run = rl_recipe("qwen25_15b_grpo_xml")
    optim, data = run.actor.optim, run.data
    assert (optim.lr, tuple(optim.betas), optim.weight_decay, optim.clip_grad) == (5e-6, (0.9, 0.99), 0.1, 0.1)
    assert (optim.lr_schedule.value, optim.warmup_ratio, optim.total_steps) == ("cosine", 0.1, None)
    assert (data.train_batch_size, run.actor.ppo_mini_batch_size, run.rollout.n) == (1 * 4, 1 * 4, 16)
    assert (data.max_prompt_length, data.max_response_length, data.truncation.value) == (256, 786, "left")
    assert (run.trainer.total_epochs, run.trainer.save_freq, num_steps(run)) == (1, 100, 7473 // 4)
    assert (run.actor.use_kl_loss, run.actor.kl_loss_coef, run.actor.kl_loss_type) == (True, 0.04, KlPenalty.k3)
    assert run.actor.loss_agg_mode is LossAggregation.seq_mean_token_mean and run.rollout.temperature == 0.9
    assert run.reward.xml.compatibility.value == "grpo_demo" and Logger.wandb in run.trainer.logger


def layouts(name: str) -> tuple[str, ...]:
    """What a proof depends on."""
    run = recipe(name)
    rollout = run.rollout.layout if isinstance(run, RunConfig) else None
    layers = run.actor.parallel.pipeline_layers
    critic = isinstance(run, RunConfig) and "critic" in run.roles
    critic_layout = str(run.critic.parallel) if isinstance(run, RunConfig) and critic else ""
    return tuple(map(str, (
        run.recipe.checkpoint, run.actor.parallel, layers, run.trainer.world_size, rollout, critic_layout,
    )))  # fmt: skip


# Recipes whose proof is another's, as the next test holds: nothing is composed before any test begins.
SAME_PROOF = {
    "deepseek_v3_grpo_async": "deepseek_v3_grpo",
    "mixtral_8x22b_grpo_async": "mixtral_8x22b_rloo",
    "qwen25_3b_gsm8k_tool": "qwen25_3b_gsm8k_interaction",
    "qwen25_7b_sppo": "qwen25_7b_spin",
    "qwen3_30b_a3b_grpo_async": "qwen3_30b_a3b_grpo",
    "qwen3_30b_a3b_grpo_fp8": "qwen3_30b_a3b_grpo",
}
# 10 to 30 seconds each.  tests/proofs/test_verify_full_size.py proves the largest models, in other layouts, in `ci`.
QUICK = ("mixtral_8x22b_rloo", "qwen25_05b_ppo")  # experts; a critic
PROVEN = [pytest.param(name, marks=pytest.mark.tier("ci" if name in QUICK else "full"))
          for name in NAMES if name not in SAME_PROOF]  # fmt: skip


def test_every_recipe_has_one_proof() -> None:
    one_each = {name: layouts(name) for name in NAMES if name not in SAME_PROOF}
    assert len(set(one_each.values())) == len(one_each)
    assert {name: layouts(name) for name in SAME_PROOF} == {name: one_each[its] for name, its in SAME_PROOF.items()}


@pytest.mark.parametrize("name", PROVEN)
def test_weights_go_right_at_full_size(name: str) -> None:
    run = recipe(name)
    config, world_size = recipe_config_json(run), run.trainer.world_size
    rollout = run.rollout.layout if isinstance(run, RunConfig) else None
    report, model = prove(
        config, run.actor.parallel, world_size, rollout, None, Console(quiet=True), pictures=run.sees_pictures
    )
    assert report.proven, [check.failures[:3] for check in report.checks]
    if isinstance(run, RunConfig) and "teacher" in run.roles:
        published = published_config(find_checkpoint(run.recipe.checkpoints["teacher"], MODEL_CONFIGS), MODEL_CONFIGS)
        report, _ = prove(published, run.teacher.parallel, world_size, None, None, Console(quiet=True))
        assert report.proven, [check.failures[:3] for check in report.checks]
    if isinstance(run, RunConfig) and "critic" in run.roles:
        family, _ = model_of(config)
        table = Table(family, model, run.critic.parallel, world_size, head=Head.value)
        modules = partial(meta_rank, model, run.critic.parallel, world_size, head=Head.value)
        critic = verify(table, None, modules)
        assert critic.proven, [check.failures[:3] for check in critic.checks]
