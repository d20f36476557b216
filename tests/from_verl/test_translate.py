"""Values arrive, meanings are derived, nothing that was written is passed over: by the run that comes of it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.launch import load_recipe, load_words
from mcore_rl.config.names import value_at
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.from_verl.answer import Difference, ModelFacts, yaml_of
from mcore_rl.from_verl.models import model_facts
from mcore_rl.from_verl.translate import Translation, translate
from mcore_rl.from_verl.written import Launch, of_launch, of_tree
from mcore_rl.ground.errors import ConfigError
from mcore_rl.planning.plan import plan
from mcore_rl.planning.recipes import run_model

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
FIELDS = f"{M}.override_transformer_config"
PUBLISHED: dict[str, list[str]] = json.loads((Path(__file__).parent / "published.json").read_text())
C = "algorithm.rollout_correction"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDS, HEADS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
PP, VPP = f"{M}.pipeline_model_parallel_size", f"{M}.virtual_pipeline_model_parallel_size"
MEGATRON = ["--config-name=ppo_megatron_trainer.yaml", "algorithm.adv_estimator=grpo", f"{R}.n=8"]


def translated(*words: str, version: str = "0.9.0", model: ModelFacts | None = None) -> Translation:
    return translate(of_launch(Launch("verl.trainer.main_ppo", [*MEGATRON, *words]), version), model)


def at(config: Any, key: str) -> Any:
    value = value_at(config, key)
    value = list(value) if isinstance(value, tuple) else value
    return getattr(value, "value", value)


def listed(translation: Translation, key: str) -> Difference | None:
    return next((each.kind for each in translation.entries if each.verl == key), None)


# What is written -> (our key, its value).  Values were worked out from what verl's own code does with the keys.
ARRIVES: dict[str, tuple[str, Any]] = {
    f"{A}.ppo_mini_batch_size=64": ("actor.ppo_mini_batch_size", 64),  # verl multiplies by n: it counts prompts
    f"{A}.optim.lr=3e-6": ("actor.optim.lr", 3e-6),
    f"{A}.router_replay.mode=R3": ("actor.router_replay", "r3"),
    f"{M}.router_replay.mode=R2": ("actor.router_replay", "r2"),
    f"{A}.optim.betas=[0.9,0.95]": ("actor.optim.betas", [0.9, 0.95]),
    f"{A}.optim.betas='[0.9,0.96]'": ("actor.optim.betas", [0.9, 0.96]),  # quotes that bash left
    f"+{A}.optim.override_optimizer_config.adam_beta2=0.98": ("actor.optim.betas", [0.9, 0.98]),
    f"+{A}.optim.override_optimizer_config.adam_eps=1e-9": ("actor.optim.eps", 1e-9),
    f"{A}.loss_agg_mode=seq-mean-token-sum-norm": ("actor.loss_agg_mode", "sum_over_constant"),
    f"{A}.loss_agg_mode=seq-mean-token-mean": ("actor.loss_agg_mode", "seq_mean_token_mean"),
    f"{A}.clip_ratio_high=0.28": ("actor.clip_ratio_high", 0.28),
    f"{A}.clip_ratio_c=null": ("actor.clip_ratio_c", None),
    f"{A}.policy_loss.loss_mode=gspo": ("actor.loss_mode", "gspo"),
    f"{A}.entropy_coeff=0.01": ("actor.entropy_coeff", 0.01),
    f"{M}.tensor_model_parallel_size=4": ("actor.parallel.tp", 4),
    f"{M}.pipeline_model_parallel_size=2": ("actor.parallel.pp", 2),
    f"{M}.context_parallel_size=2": ("actor.parallel.cp", 2),
    f"{M}.expert_model_parallel_size=8": ("actor.parallel.ep", 8),
    f"{M}.dtype=float32": ("actor.precision", "float32"),
    f"{FIELDS}.recompute_granularity=full": ("actor.recompute", "full"),
    f"+{FIELDS}.moe_token_dispatcher_type=flex": ("actor.moe.dispatcher", "flex"),
    f"+{FIELDS}.moe_z_loss_coeff=0.001": ("actor.moe.z_loss_coeff", 0.001),
    f"+{FIELDS}.bias_dropout_fusion=False": ("actor.megatron", {"bias_dropout_fusion": False}),
    f"+{FIELDS}.gradient_accumulation_fusion=False": ("actor.gradient_accumulation_fusion", False),
    f"+{M}.override_ddp_config.overlap_grad_reduce=False": ("actor.overlap_grad_reduce", False),
    f"{R}.temperature=0.6": ("rollout.temperature", 0.6),
    f"{R}.top_p=0.9": ("rollout.top_p", 0.9),
    f"{R}.tensor_model_parallel_size=4": ("rollout.tp", 4),
    f"{R}.expert_parallel_size=2": ("rollout.ep", 2),
    f"{R}.gpu_memory_utilization=0.85": ("rollout.gpu_memory_utilization", 0.85),
    f"{R}.free_cache_engine=False": ("rollout.enable_sleep_mode", False),
    f"+{R}.enable_sleep_mode=False": ("rollout.enable_sleep_mode", False),
    f"{R}.val_kwargs.n=4": ("rollout.val_kwargs.n", 4),
    f"{R}.val_kwargs.temperature=0.7": ("rollout.val_kwargs.temperature", 0.7),
    "data.train_files=/data/a.parquet": ("data.train_files", ["/data/a.parquet"]),
    "data.train_files=['/a.parquet', '/b.parquet']": ("data.train_files", ["/a.parquet", "/b.parquet"]),
    "data.max_response_length=8192": ("data.max_response_length", 8192),
    "data.truncation='left'": ("data.truncation", "left"),
    "data.train_max_samples=-1": ("data.train_max_samples", None),
    "+data.apply_chat_template_kwargs.enable_thinking=False": ("data.chat_template_kwargs", {"enable_thinking": False}),
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B": ("model.path", "Qwen/Qwen2-7B"),
    "+actor_rollout_ref.model.override_config.rope_theta=1e6": ("model.config_overrides", {"rope_theta": 1e6}),
    "algorithm.norm_adv_by_std_in_grpo=False": ("algorithm.adv_estimator", "dr_grpo"),
    "algorithm.adv_estimator=rloo_vectorized": ("algorithm.adv_estimator", "rloo"),
    "algorithm.adv_estimator=remax": ("actor.loss_mode", "ppo_clip"),  # verl's for every estimator
    "algorithm.filter_groups.enable=True": ("algorithm.filter_groups.enable", True),
    "trainer.save_freq=-1": ("trainer.save_freq", 0),
    "trainer.test_freq=7": ("trainer.test_freq", 7),
    "trainer.total_training_steps=100": ("trainer.total_training_steps", 100),
    "trainer.resume_mode=disable": ("trainer.resume_mode", "off"),
    "trainer.max_actor_ckpt_to_keep=3": ("trainer.max_to_keep", 3),
    "actor_rollout_ref.nccl_timeout=1200": ("trainer.timeout_s", 1200.0),
    "global_profiler.steps=[2,5]": ("trainer.profile_steps", [2, 5]),
    "ray_kwargs.ray_init.num_cpus=16": ("ray_init.num_cpus", 16),
    "reward.custom_reward_function.path=mine.py": ("custom_reward_function.path", "mine.py"),
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True": ("reward.overlong.enable", True),
}  # fmt: skip


def batches() -> list[list[str]]:
    """The words of ``ARRIVES``, in as few commands as they fit in: no key of verl's or ours twice in one."""
    made, alone = list[list[str]](), list[list[str]]()
    for word, (ours, _) in ARRIVES.items():
        if ours in ("algorithm.adv_estimator", "actor.loss_mode"):  # it decides which others are read
            alone.append([word])
            continue
        for batch in made:
            taken = {ARRIVES[each][0] for each in batch} | {each.partition("=")[0] for each in batch}
            if not taken & {ours, word.partition("=")[0]}:
                batch.append(word)
                break
        else:
            made.append([word])
    return [*made, *alone]


@pytest.mark.parametrize("words", batches(), ids=lambda words: words[0])
def test_values_arrive(words: list[str]) -> None:
    run = translated(*words).run
    came = {word: at(run, ARRIVES[word][0]) for word in words}
    assert came == {word: ARRIVES[word][1] for word in words}
    assert all(type(value) is type(ARRIVES[word][1]) for word, value in came.items())


# Words, the version -> what several of verl's keys mean together.
DERIVED: dict[tuple[str, str], dict[str, Any]] = {
    # megatron_actor.py: max_token_len = ppo_max_token_len_per_gpu * context_parallel_size
    (f"{A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=12000 {M}.context_parallel_size=2", "0.7.0"): {
        "actor.microbatch_tokens": 24000,
    },
    (f"{A}.use_dynamic_bsz=True {A}.ppo_micro_batch_size_per_gpu=4", "0.7.0"): {"actor.microbatch_tokens": 16384},
    (f"{A}.ppo_micro_batch_size_per_gpu=4 data.max_prompt_length=1024 data.max_response_length=2048", "0.7.0"): {
        "actor.microbatch_tokens": 12288,
    },
    # The scheduler makes one step for each step of the run, of 1024 / 256 minibatches
    (f"{A}.optim.lr_warmup_steps=10 data.train_batch_size=1024", "0.7.0"): {"actor.optim.lr_warmup_steps": 40},
    (f"{A}.optim.lr_warmup_steps=10 {A}.ppo_epochs=2", "0.7.0"): {"actor.optim.lr_warmup_steps": 80},
    (f"{A}.optim.lr_warmup_steps_ratio=0.1", "0.7.0"): {
        "actor.optim.warmup_ratio": 0.1, "actor.optim.lr_warmup_steps": 0,
    },
    (f"{A}.optim.lr_decay_style=cosine {A}.optim.lr_decay_steps=50 {A}.optim.min_lr=1e-7 {A}.optim.lr=1e-6", "0.7.0"): {
        "actor.optim.lr_schedule": "cosine", "actor.optim.total_steps": 200,
        "actor.optim.min_lr_ratio": pytest.approx(0.1),
    },
    # Megatron's default in 0.4.1 is a line to 0, and later a constant
    ("", "0.4.1"): {"actor.optim.lr_schedule": "linear", "actor.optim.total_steps": None},
    ("", "0.5.0"): {"actor.optim.lr_schedule": "constant"},
    # verl's clip_ratio is not read while its two others are 0.2
    (f"{A}.clip_ratio=0.3", "0.7.0"): {"actor.clip_ratio": 0.2, "actor.clip_ratio_low": None},
    (f"{A}.clip_ratio=0.3 {A}.clip_ratio_low=null {A}.clip_ratio_high=null", "0.7.0"): {"actor.clip_ratio": 0.3},
    # Megatron: expert_tensor_parallel_size=None is the tensor parallel size
    (f"{M}.tensor_model_parallel_size=2 {M}.expert_model_parallel_size=4", "0.7.0"): {"actor.parallel.etp": 2},
    (f"{VPP}=2", "0.7.0"): {"actor.parallel.vpp": 1},
    (f"{VPP}=2 {PP}=2", "0.7.0"): {"actor.parallel.vpp": 2},
    # verl's defaults that decide what is trained, for each version
    ("", "0.7.0"): {
        "actor.loss_agg_mode": "token_mean", "rollout.tp": 2, "trainer.total_epochs": 30, "trainer.n_gpus_per_node": 8,
        "actor.use_kl_loss": False, "rollout.n": 8,
    },
    ("", "0.4.0"): {"rollout.tp": 1},
    # 0.4 samples synchronously, and do_sample=False is greedy; later versions read the temperature
    (f"{R}.val_kwargs.temperature=1.0", "0.4.1"): {"rollout.val_kwargs.temperature": 0.0},
    (f"{R}.val_kwargs.temperature=1.0", "0.7.0"): {"rollout.val_kwargs.temperature": 1.0},
    (f"{A}.use_kl_loss=True", "0.7.0"): {"actor.kl_loss_type": "low_var_kl", "actor.kl_loss_coef": 0.001},
    (f"{A}.use_kl_loss=True {A}.kl_loss_type=mse", "0.7.0"): {"actor.kl_loss_type": "k2"},
    # The mismatch of sampler and trainer, in three spellings
    ("algorithm.rollout_is=True algorithm.rollout_is_threshold=3 algorithm.rollout_is_mode=mask", "0.6.0"): {
        "algorithm.off_policy": "decoupled", f"{C}.level": "token", f"{C}.mode": "zero",
        f"{C}.upper": 3.0, f"{C}.lower": pytest.approx(1 / 3),
    },
    (f"{C}.rollout_rs=geometric {C}.rollout_rs_threshold=1.001", "0.7.0"): {
        f"{C}.reject": "seq_mean_k1", f"{C}.reject_upper": 1.001,
        f"{C}.reject_lower": None, "algorithm.off_policy": "recompute",
    },
    (f"{C}.rollout_is=token {C}.rollout_is_threshold=0.5_5.0", "0.9.0"): {
        "algorithm.off_policy": "decoupled", f"{C}.level": "token", f"{C}.mode": "zero",
        f"{C}.lower": 0.5, f"{C}.upper": 5.0,
    },
    # since 0.7.1 verl's k1 is log p_sampler - log p_trainer (rollout_corr_helper.py); ours is of p_trainer / p_sampler
    (f"{C}.rollout_rs=token_k1 {C}.rollout_rs_threshold=0.8_2.0", "0.9.0"): {
        f"{C}.reject": "token_k1", f"{C}.reject_lower": 0.5, f"{C}.reject_upper": 1.25,
    },
    (f"{C}.rollout_rs=token {C}.rollout_rs_threshold=2.0 {C}.rollout_rs_threshold_lower=0.8", "0.7.0"): {
        f"{C}.reject": "token_k1", f"{C}.reject_lower": 0.8, f"{C}.reject_upper": 2.0,
    },
    ("algorithm.rollout_is=True algorithm.rollout_is_threshold=3 algorithm.rollout_is_level=geometric", "0.6.0"): {
        "algorithm.off_policy": "decoupled", f"{C}.level": "geometric",
    },
    (f"{C}.bypass_mode=True", "0.9.0"): {"algorithm.off_policy": "bypass"},
    # verl leaves the weights out there, and so the bounds are read by nobody
    (f"{C}.bypass_mode=True {C}.rollout_is=sequence {C}.rollout_is_threshold=4", "0.9.0"): {
        "algorithm.off_policy": "bypass", f"{C}.upper": 2.0,
    },
    # 0.6.1 rejects in its decoupled mode alone (ray_trainer.py), 0.7.0 in its bypass loss too
    (f"{C}.bypass_mode=True {C}.rollout_rs=token {C}.rollout_rs_threshold=2", "0.6.1"): {
        "algorithm.off_policy": "bypass", f"{C}.reject": "none",
    },
    (f"{C}.bypass_mode=True {C}.rollout_rs=token {C}.rollout_rs_threshold=2", "0.7.0"): {
        "algorithm.off_policy": "bypass", f"{C}.reject": "token_k1", f"{C}.reject_upper": 2.0,
    },
    (f"{C}.rollout_is=sequence {C}.rollout_is_batch_normalize=True", "0.9.0"): {
        "algorithm.off_policy": "decoupled", f"{C}.level": "sequence", f"{C}.batch_normalize": True,
    },
    (
        f"{C}.bypass_mode=True {C}.loss_type=reinforce "
        f"{C}.rollout_is=token", "0.9.0",
    ): {
        "actor.loss_mode": "policy_gradient", "algorithm.off_policy": "decoupled",
        f"{C}.level": "token", "actor.ppo_mini_batch_size": 1024,
    },
}  # fmt: skip


@pytest.mark.parametrize("words", DERIVED, ids=lambda words: f"{words[0][-50:]} {words[1]}")
def test_a_meaning_is_derived(words: tuple[str, str]) -> None:
    translation = translated(*words[0].split(), version=words[1])
    assert {key: at(translation.run, key) for key in DERIVED[words]} == DERIVED[words]
    assert translation.violations == []


def test_weights_that_verl_leaves_out_of_the_loss_are_named() -> None:
    translation = translated(f"{C}.bypass_mode=True", f"{C}.rollout_is=sequence", version="0.9.0")
    assert listed(translation, f"{C}.rollout_is") is Difference.dropped


# Layers, pp, vpp, what is asked for -> the layers of each chunk, by Megatron's own division (transformer_block.py).
STAGES = [
    (61, 16, 1, {FIRST: 3, LAST: 2}, [3, *[4] * 14, 2]),
    (94, 8, 1, {EMBEDS: True, HEADS: True}, [11, *[12] * 6, 11]),
    (32, 4, 2, {FIRST: 4, LAST: 4}, [2, 6, 6, 2, 2, 6, 6, 2]),
    (61, 12, 1, {LAST: 6}, [*[5] * 11, 6]),
]


@pytest.mark.parametrize(("layers", "pp", "vpp", "asked", "chunks"), STAGES)
def test_layers_of_stages(layers: int, pp: int, vpp: int, asked: dict[str, Any], chunks: list[int]) -> None:
    words = [f"+{FIELDS}.{name}={value}" for name, value in asked.items()]
    words += [f"{PP}={pp}", f"{VPP}={vpp}"]
    known = translated(*words, model=ModelFacts(layers, is_mixture=True))
    assert known.settings["actor.parallel.pipeline_layers"].value == chunks and sum(chunks) == layers
    unknown = translated(*words)
    assert "actor.parallel.pipeline_layers" not in unknown.settings and not unknown.is_whole
    assert all(listed(unknown, f"{FIELDS}.{name}") is Difference.absent for name in asked)


def test_what_changes_how_vllm_computes_is_passed_on() -> None:
    known = translated(f"+{R}.engine_kwargs.vllm.block_size=16", f"+{R}.engine_kwargs.vllm.quantization=fp8")
    assert known.settings["rollout.engine"].value == {"block_size": 16}
    assert listed(known, f"{R}.engine_kwargs.vllm.quantization") is Difference.absent and not known.is_whole
    graphs = f"+{R}.engine_kwargs.vllm.compilation_config."
    grouped = translated(f"{graphs}cudagraph_mode=FULL_DECODE_ONLY", f"{graphs}cudagraph_capture_sizes='[4,8]'")
    assert grouped.is_whole
    assert grouped.settings["rollout.engine"].value == {
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 8]}
    }


@pytest.mark.parametrize(
    ("drawn", "judged", "ours"),
    [(0.7, 0.8, (0.42, 0.48)), (0.6, 0.3, (0.6, 0.3)), (0.8, None, (0.55, 0.35))],  # verl's own share of a judge is 0.5
)
def test_engines_that_are_awake_at_once_share_a_device(
    drawn: float, judged: float | None, ours: tuple[float, float]
) -> None:
    judge, key = "reward.reward_model", "rollout.gpu_memory_utilization"
    words = [f"{judge}.enable=True", f"{judge}.model_path=m", f"{R}.gpu_memory_utilization={drawn}"]
    words += [f"{judge}.{key}={judged}"] if judged else []
    translation = translated(*words)
    assert translation.violations == []
    assert (at(translation.run, key), at(translation.run, f"reward_model.{key.rpartition('.')[2]}")) == ours
    assert (listed(translation, f"{R}.gpu_memory_utilization") is Difference.changed) is (ours[0] != drawn)
    alone = translated(f"{R}.gpu_memory_utilization={drawn}", f"{judge}.{key}=0.8")
    assert at(alone.run, key) == drawn, "no reward model"


def test_adapters_of_peft_are_ours() -> None:
    group = "actor_rollout_ref.model"
    words = (f"{group}.lora_rank=32", f"{group}.lora_alpha=64", f"{group}.target_modules=[q_proj,v_proj]")
    known = translated(*words, f"{group}.lora_adapter_path=there")
    ours = {key: each.value for key, each in known.settings.items() if key.startswith("actor.lora.")}
    assert ours["actor.lora.rank"] == 32 and ours["actor.lora.alpha"] == 64 and ours["actor.lora.path"] == "there"
    assert ours["actor.lora.target_modules"] == ["q_proj", "v_proj"]
    assert listed(known, f"{group}.lora_adapter_path") is Difference.changed, "verl's reference has no adapters"
    lost = translated(f"{group}.lora_adapter_path=there")
    assert listed(lost, f"{group}.lora_adapter_path") is Difference.absent and not lost.is_whole
    every = translated(f"{group}.lora_rank=8", f"{group}.target_modules=all-linear")
    assert every.settings["actor.lora.target_modules"].value == ["all-linear"]
    assert not any(key.startswith("actor.lora.") for key in translated(f"{group}.lora_alpha=64").settings)
    pattern = translated(f"{group}.lora_rank=8", f"{group}.target_modules=.*q_proj")
    assert listed(pattern, f"{group}.target_modules") is Difference.absent


def test_engines_in_fp8_keep_their_correction() -> None:
    """verl's is blockwise; without weights of its own, ours must be told to train as it does."""
    alone = translated(f"{R}.quantization=fp8")
    assert alone.settings["rollout.quantization"].value == "fp8_block"
    assert alone.settings["rollout.allow_uncorrected"].value is True
    assert listed(alone, f"{R}.quantization") is Difference.changed
    weighed = translated(f"{R}.quantization=fp8", "algorithm.rollout_correction.rollout_is=token")
    assert weighed.settings["algorithm.off_policy"].value == "decoupled"
    assert "rollout.allow_uncorrected" not in weighed.settings


# What is not here -> said so, and left out; its harmless value is not.
ABSENT = {
    f"{R}.quantization": ("torchao", "null"),
    f"{R}.quantization_config_file": ("there.json", "null"),
    f"{R}.engine_kwargs.vllm.some_setting": ("1", "null"),
    f"{R}.pipeline_model_parallel_size": ("2", "1"),
    f"{A}.optim.optimizer": ("dist_muon", "adam"),
    f"{A}.optim.lr_decay_style": ("WSD", "constant"),
    f"{A}.optim.lr_warmup_init": ("1e-7", "0.0"),
    f"{A}.optim.exp_avg_dtype": ("bf16", "fp32"),
    f"{A}.policy_loss.loss_mode": ("dppo_tv", "vanilla"),
    f"{A}.kl_loss_type": ("abs", "kl"),
    f"{A}.loss_agg_mode": ("token-sum", "token-mean"),
    f"{M}.dtype": ("float16", "bfloat16"),
    f"{M}.router_replay.mode": ("record", "disabled"),
    f"{FIELDS}.hidden_dropout": ("0.1", "0.0"),
    f"{FIELDS}.fp8": ("hybrid", "null"),
    f"{FIELDS}.no_such_field": ("1", None),
    "algorithm.adv_estimator": ("grpo_passk", "grpo"),
    "algorithm.use_pf_ppo": ("True", "False"),
    "trainer.v1.trainer_mode": ("colocate_async", "sync"),
    "trainer.logger": ("[console,clearml]", "[console,wandb]"),
    "trainer.device": ("npu", "cuda"),
    "distillation.enabled": ("True", "False"),  # its default is a loss over estimates, k3
    "distillation.teacher_models.math.external.base_url": ("m", "null"),
    "reward.reward_manager.source": ("importlib", "register"),
    "data.custom_cls.path": ("mine.py", "null"),
}


def test_what_is_not_here_is_said() -> None:
    translation = translated(*(f"+{key}={value}" for key, (value, _) in ABSENT.items()))
    assert {key: listed(translation, key) for key in ABSENT} == dict.fromkeys(ABSENT, Difference.absent)
    assert not translation.is_whole


def test_what_asks_for_nothing_is_no_loss() -> None:
    translation = translated(*(f"+{key}={value}" for key, (_, value) in ABSENT.items() if value is not None))
    assert translation.of_kind(Difference.absent) == [] and translation.is_whole


def test_what_is_no_key_of_verls_is_said() -> None:
    translation = translated("trainer.save_frequency=3", "trainer.total_epochs=")
    (unknown, empty) = sorted(translation.of_kind(Difference.unknown), key=lambda each: each.verl, reverse=True)
    assert unknown.verl == "trainer.total_epochs=" and "no value" in unknown.text
    assert empty.verl == "trainer.save_frequency" and "did you mean trainer.save_freq?" in empty.text
    assert not translation.is_whole


def test_a_default_that_is_another_is_listed() -> None:
    defaults = {each.verl: each for each in translated().of_kind(Difference.default)}
    epochs, seed = defaults["trainer.total_epochs"], defaults[f"{R}.seed"]
    assert (epochs.value, epochs.ours) == (30, "trainer.total_epochs=30") and "written into the yaml" in epochs.text
    assert (seed.value, seed.ours) == (42, "rollout.seed=0")
    assert "trainer.nnodes" not in defaults, "it is the same"


def test_a_key_that_our_run_would_not_read_is_left_out() -> None:
    translation = translated(f"{A}.kl_loss_coef=0.02", "critic.optim.lr=1e-5", "algorithm.lam=0.9")
    assert [listed(translation, key) for key in (f"{A}.kl_loss_coef", "critic.optim.lr", "algorithm.lam")] == [
        Difference.dropped
    ] * 3
    assert "actor.kl_loss_coef" not in translation.settings


def test_a_critic() -> None:
    words = "algorithm.adv_estimator=gae algorithm.lam=0.95 critic.optim.lr=2e-5 critic.model.path=/c"
    words += " critic.megatron.tensor_model_parallel_size=2 critic.use_dynamic_bsz=True"
    translation = translated(*words.split(), "critic.ppo_max_token_len_per_gpu=9000")
    assert translation.algorithm == "ppo" and translation.violations == []
    expected = {"critic.parallel.tp": 2, "critic.path": "/c", "critic.microbatch_tokens": 9000, "algorithm.lam": 0.95}
    assert {key: at(translation.run, key) for key in expected} == expected
    assert at(translation.run, "critic.optim.lr") == 2e-5


def test_reward_kwargs_arrive() -> None:
    name = "custom_reward_function"
    words = [f"{name}.path=m.py", f"+{name}.reward_kwargs.scale=0.5", f"+{name}.reward_kwargs.words=[a,b]"]
    assert translated(*words).run.custom_reward_function.reward_kwargs == {"scale": 0.5, "words": ["a", "b"]}


def test_a_yaml_file_of_verls() -> None:
    tree = {
        "defaults": ["x"], "trainer": {"total_epochs": 3, "nnodes": 1, "balance_batch": True},
        "actor_rollout_ref": {"actor": {"megatron": {"tensor_model_parallel_size": 4}, "optim": {"lr": "2e-6"}}},
    }  # fmt: skip
    verl = of_tree(tree)
    assert verl.is_megatron and verl.version == "0.10.0.dev"
    assert set(verl.written) == {"trainer.total_epochs", f"{M}.tensor_model_parallel_size", f"{A}.optim.lr"}
    settings = translate(verl).settings
    assert (settings["actor.parallel.tp"].value, settings["trainer.total_epochs"].value) == (4, 3)


def test_generation() -> None:
    words = "data.path=p.parquet data.n_samples=4 data.output_path=o.parquet rollout.temperature=0.7 model.path=m"
    words += " rollout.tensor_model_parallel_size=2 rollout.response_length=99 trainer.n_gpus_per_node=8"
    drawn = translate(of_launch(Launch("verl.trainer.main_generation", words.split())))
    assert drawn.program == "generate" and drawn.is_whole
    expected = {
        "data.files": ["p.parquet"], "rollout.n": 4, "out": "o.parquet", "rollout.temperature": 0.7, "rollout.tp": 2,
        "rollout.dp": 4, "data.max_response_length": 99, "model.path": "m",
        "rollout.top_k": 50, "rollout.top_p": 0.7,  # verl's defaults
    }  # fmt: skip
    assert {key: at(drawn.run, key) for key in expected} == expected


def test_evaluation() -> None:
    words = ["data.path=o.parquet", "custom_reward_function.path=r.py"]
    graded = translate(of_launch(Launch("verl.trainer.main_eval", words)))
    assert graded.program == "evaluate" and graded.is_whole
    assert (graded.run.path, graded.run.custom_reward_function.path) == ("o.parquet", "r.py")


@cache
def of_script(script: str) -> Translation:
    verl = of_launch(Launch("verl.trainer.main_ppo", PUBLISHED[script]), script.split()[0])
    return translate(verl, model_facts(str(verl["actor_rollout_ref.model.path"])))


# verl's key -> (ours, what our value is of verl's): read off each published script once more, by hand.
READ_OFF = {
    "data.train_batch_size": ("data.train_batch_size", int),
    "data.max_prompt_length": ("data.max_prompt_length", int),
    "data.max_response_length": ("data.max_response_length", int),
    "data.truncation": ("data.truncation", str),
    f"{A}.ppo_mini_batch_size": ("actor.ppo_mini_batch_size", int),
    f"{A}.optim.lr": ("actor.optim.lr", float),
    f"{A}.optim.weight_decay": ("actor.optim.weight_decay", float),
    f"{A}.use_kl_loss": ("actor.use_kl_loss", "True".__eq__),
    f"{A}.kl_loss_coef": ("actor.kl_loss_coef", float),
    f"{A}.kl_loss_type": ("actor.kl_loss_type", str),
    f"{A}.entropy_coeff": ("actor.entropy_coeff", float),
    f"{A}.clip_ratio_low": ("actor.clip_low", float), f"{A}.clip_ratio_high": ("actor.clip_high", float),
    f"{A}.clip_ratio_c": ("actor.clip_ratio_c", float),
    f"{A}.loss_agg_mode": ("actor.loss_agg_mode", lambda text: text.replace("-", "_")),
    f"{M}.tensor_model_parallel_size": ("actor.parallel.tp", int),
    f"{M}.pipeline_model_parallel_size": ("actor.parallel.pp", int),
    f"{M}.expert_model_parallel_size": ("actor.parallel.ep", int),
    f"{M}.expert_tensor_parallel_size": ("actor.parallel.etp", int),
    f"{R}.n": ("rollout.n", int), f"{R}.temperature": ("rollout.temperature", float),
    f"{R}.tensor_model_parallel_size": ("rollout.tp", int),
    f"{R}.gpu_memory_utilization": ("rollout.gpu_memory_utilization", float),
    f"{R}.val_kwargs.top_p": ("rollout.val_kwargs.top_p", float),
    "actor_rollout_ref.model.path": ("model.path", str),
    "trainer.nnodes": ("trainer.nnodes", int), "trainer.n_gpus_per_node": ("trainer.n_gpus_per_node", int),
    "trainer.total_epochs": ("trainer.total_epochs", int),
    "trainer.save_freq": ("trainer.save_freq", lambda text: max(0, int(text))),
}  # fmt: skip
# What a script asks for that is not here; of all others, nothing.
NOT_HERE = {
    "0.4.1 examples/grpo_trainer/run_deepseek671b_math_megatron.sh": {
        f"{FIELDS}.num_layers_in_first_pipeline_stage", f"{FIELDS}.num_layers_in_last_pipeline_stage",
        "trainer.default_local_dir=",  # of a variable that the script does not set
    },
}  # fmt: skip


@pytest.mark.parametrize("script", PUBLISHED)
def test_a_published_script_becomes_a_run(script: str) -> None:
    translation = of_script(script)
    assert translation.violations == []
    words = [word.lstrip("+") for word in PUBLISHED[script] if not word.startswith("--")]
    written = dict(word.split("=", 1) for word in words if "=" in word)
    assert len(written) > 25
    for key, (ours, of) in READ_OFF.items():
        if key in written and listed(translation, key) is not Difference.dropped:
            assert at(translation.run, ours) == of(written[key]), key  # type: ignore[operator]
    lost = {each.verl for kind in (Difference.absent, Difference.unknown) for each in translation.of_kind(kind)}
    assert lost == NOT_HERE.get(script, set())


@pytest.mark.parametrize("script", PUBLISHED)
def test_no_key_of_a_published_script_is_passed_over(script: str) -> None:
    translation = of_script(script)
    told = {each.verl for each in translation.entries}
    came = {key for each in translation.settings.values() for key in each.sources}
    assert sorted(translation.verl.written.keys() - told - came) == []


# Not planned: a model whose config.json nobody knows; nodes of 16 devices; a script whose experts take 16 devices where
# there are 8 (etp=4, ep=2, pp=2), and half a replica of its engines.
UNPLANNED = {
    "0.9.0 examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh": "rollout.ep",
    "0.4.1 examples/grpo_trainer/run_deepseek671b_math_megatron.sh": "model.path",
    "0.7.0 recipe/dapo/test_dapo_7b_math_megatron.sh": "trainer.n_gpus_per_node",
}
RELATIVES = {"Qwen3-30B-A3B-Base": "qwen3-30b-a3b", "Qwen2.5-32B": "qwen2.5-32b-instruct"}  # of the same layers


@pytest.mark.parametrize("script", PUBLISHED)
@pytest.mark.tier("full")
def test_a_published_script_is_planned(script: str, tmp_path: Path) -> None:
    translation = of_script(script)
    path = tmp_path / "translated.yaml"
    path.write_text(yaml_of(translation.program, translation.algorithm, translation.settings, "of a test"))
    run = load_recipe(str(path))
    assert run == translation.run and isinstance(run, RunConfig) and run_violations(run, planned=True) == []
    relative = RELATIVES.get(Path(run.model.path).name)
    words = [f"recipe={path}", "cluster=nvidia_h100", *([f"recipe.checkpoint={relative}"] if relative else [])]
    try:
        planned, cluster, _ = load_words(words)
        assert plan(planned, run_model(planned), cluster)
        refused = ""
    except ConfigError as error:
        refused = error.violations[0].key
    assert refused == UNPLANNED.get(script, "")


def test_what_was_composed_is_what_the_file_says(tmp_path: Path) -> None:
    """``Translation.run`` is made without the file; here it is read as ``train`` reads it."""
    translation = translated(f"{A}.optim.lr=3e-7", f"+{FIELDS}.bias_dropout_fusion=True", "trainer.logger=[console]")
    path = tmp_path / "translated.yaml"
    path.write_text(
        yaml_of(translation.program, translation.algorithm, translation.settings, "of a test\nin two lines")
    )
    run = load_recipe(str(path))
    assert run == translation.run and isinstance(run, RunConfig)
    free = ("actor.megatron", "data.chat_template_kwargs")  # groups, of which what was written names the keys
    assert {next((group for group in free if key.startswith(f"{group}.")), key) for key in run.written} == {
        *translation.settings
    }
