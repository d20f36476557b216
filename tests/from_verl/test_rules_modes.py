"""Asynchronous runs, agents and fine-tuning: the values that verl's own code would take, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.from_verl.answer import Difference
from mcore_rl.from_verl.translate import Translation, translate
from mcore_rl.from_verl.written import Launch, of_launch
from tests.from_verl.test_translate import at, listed, translated

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
RUN = [
    "algorithm.adv_estimator=grpo", f"{R}.n=8", "data.train_batch_size=0", "data.gen_batch_size=1",
    f"{A}.ppo_mini_batch_size=32", "rollout.nnodes=2", "rollout.n_gpus_per_node=8", f"{R}.tensor_model_parallel_size=4",
]  # fmt: skip


def of_module(module: str, *words: str) -> Translation:
    return translate(of_launch(Launch(module, list(words)), "0.9.0"))


# verl trains trigger_parameter_sync_step x require_batches minibatches of 32 prompts between two updates of weights.
ASYNCHRONOUS: dict[tuple[str, ...], dict[str, Any]] = {
    (): {
        "trainer.mode": "async", "trainer.placement": "separate", "data.train_batch_size": 128,
        "actor.ppo_mini_batch_size": 32, "async.max_staleness": 1, "async.partial_rollout": True, "rollout.dp": 4,
    },
    ("async_training.trigger_parameter_sync_step=2", "async_training.require_batches=3"): {
        "data.train_batch_size": 192,
    },
    ("async_training.staleness_threshold=0",): {"async.max_staleness": 0},
    ("async_training.staleness_threshold=1.5", "async_training.partial_rollout=False"): {
        "async.max_staleness": 2, "async.partial_rollout": False,
    },
    ("rollout.total_rollout_steps=12800",): {"trainer.total_training_steps": 100},
    # its scheduler makes a step for each of the 4 minibatches
    (f"{A}.optim.lr_warmup_steps=10",): {"actor.optim.lr_warmup_steps": 10},
    ("async_training.require_batches=2", f"{A}.optim.lr_warmup_steps=10"): {"actor.optim.lr_warmup_steps": 20},
}  # fmt: skip


@pytest.mark.parametrize("words", ASYNCHRONOUS, ids=lambda words: " ".join(words) or "defaults")
def test_fully_asynchronous(words: tuple[str, ...]) -> None:
    translation = of_module(FULLY, *RUN, *words)
    assert {key: at(translation.run, key) for key in ASYNCHRONOUS[words]} == ASYNCHRONOUS[words]
    assert translation.is_whole, (translation.violations, translation.of_kind(Difference.unknown))


def test_one_step_off() -> None:
    translation = of_module(ONE_STEP, *RUN, "data.train_batch_size=64")
    expected = {"trainer.mode": "one_step_off", "trainer.placement": "separate", "rollout.dp": 4}
    assert {key: at(translation.run, key) for key in expected} == expected
    assert at(translation.run, "data.train_batch_size") == 64 and translation.violations == []


def test_separate_trainer_of_verls_newer_loop() -> None:
    words = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_threshold=3",
             f"{R}.nnodes=1", f"{R}.n_gpus_per_node=8", f"{R}.tensor_model_parallel_size=2"]  # fmt: skip
    translation = translated(*words)
    expected = {"trainer.mode": "async", "async.max_staleness": 3, "rollout.dp": 4, "trainer.placement": "separate"}
    assert {key: at(translation.run, key) for key in expected} == expected
    colocated = translated("trainer.v1.trainer_mode=colocate_async")
    assert listed(colocated, "trainer.v1.trainer_mode") is Difference.absent
    assert at(colocated.run, "trainer.mode") == "sync"


TURNS = f"{R}.multi_turn"
AGENTS: dict[tuple[str, ...], dict[str, Any]] = {
    (f"{TURNS}.enable=True", f"{TURNS}.tool_config_path=tools.yaml", f"{TURNS}.format=hermes"): {
        "default_agent_loop": "tool_agent", "tool_config_path": "tools.yaml", "tool_parser": "hermes",
        "max_tool_response_length": 256, "tool_response_cut": "middle",  # verl's defaults
    },
    (f"{R}.agent.default_agent_loop=tool_agent", f"{TURNS}.max_assistant_turns=5", f"{TURNS}.max_user_turns=9"): {
        "default_agent_loop": "tool_agent", "max_turns": 5,
    },
    # a turn of the user's follows each of the model's: after the second, the model has a third
    (f"{TURNS}.enable=True", f"{TURNS}.max_user_turns=2"): {"max_turns": 3},
    (f"{TURNS}.enable=True", f"{TURNS}.tool_response_truncate_side=left", f"{TURNS}.max_tool_response_length=99"): {
        "tool_response_cut": "left", "max_tool_response_length": 99,
    },
    (f"{TURNS}.tool_config_path=tools.yaml",): {"default_agent_loop": "single_turn_agent", "tool_config_path": None},
}  # fmt: skip


@pytest.mark.parametrize("words", AGENTS)
def test_agents(words: tuple[str, ...]) -> None:
    translation = translated(*words)
    agent = {name: at(translation.run, f"rollout.agent.{name}") for name in AGENTS[words]}
    assert agent == AGENTS[words] and translation.is_whole


def test_agents_that_are_not_ours_are_named() -> None:
    own = translated(f"{R}.agent.default_agent_loop=my_agent", f"{R}.agent.agent_loop_config_path=agents.yaml")
    told = {each.verl: each.text for each in own.of_kind(Difference.absent)}
    assert "rollout.agent.loops.my_agent=FILE.py:CLASS" in told[f"{R}.agent.default_agent_loop"]
    assert f"{R}.agent.agent_loop_config_path" in told
    code = translated(f"{TURNS}.enable=True", f"{TURNS}.function_tool_path=tools.py")
    assert listed(code, f"{TURNS}.function_tool_path") is Difference.absent


def test_fine_tuning() -> None:
    words = [
        "data.train_files=a.parquet", "data.max_token_len_per_gpu=4096", "engine=fsdp", "model.path=m", "optim.lr=1e-4",
        "engine.ulysses_sequence_parallel_size=2", "model.lora_rank=32", "trainer.total_epochs=3",
    ]  # fmt: skip
    launch = Launch("verl.trainer.sft_trainer", words, nodes="2", devices="4")
    translation = translate(of_launch(launch, "0.9.0"))
    assert translation.program == "sft" and translation.is_whole
    expected = {
        "data.train_files": ["a.parquet"], "data.messages_key": "messages", "data.train_batch_size": 256,
        "actor.microbatch_tokens": 8192,  # 4096 a device, of two that share a row
        "actor.parallel.cp": 2, "actor.optim.lr": 1e-4, "actor.lora.rank": 32, "actor.recompute": "full",
        "model.path": "m", "trainer.nnodes": 2, "trainer.n_gpus_per_node": 4, "trainer.total_epochs": 3,
    }  # fmt: skip
    assert {key: at(translation.run, key) for key in expected} == expected


def test_fine_tuning_of_verls_earlier_trainer() -> None:
    words = "data.prompt_key=q data.response_key=a data.micro_batch_size_per_gpu=4 data.max_length=512"
    words += " model.partial_pretrain=m optim.warmup_steps_ratio=0.2 optim.lr_scheduler=cosine trainer.save_freq=-1"
    translation = translate(of_launch(Launch("verl.trainer.fsdp_sft_trainer", words.split()), "0.5.0"))
    assert translation.is_whole
    expected = {
        "data.prompt_key": "q", "data.response_key": "a", "data.messages_key": None, "actor.microbatch_tokens": 2048,
        "model.path": "m", "actor.optim.warmup_ratio": 0.2, "actor.optim.lr_schedule": "cosine",
        "actor.optim.lr": 1e-5, "trainer.save_freq": 0,
    }  # fmt: skip
    assert {key: at(translation.run, key) for key in expected} == expected


def test_fine_tuning_with_megatron() -> None:
    words = "engine=megatron optim=megatron engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2"
    words += " model.path=m optim.lr_decay_style=cosine optim.lr_warmup_steps=10 optim.min_lr=1e-5 optim.lr=1e-4"
    translation = translate(of_launch(Launch("verl.trainer.sft_trainer", words.split()), "0.9.0"))
    assert translation.is_whole
    expected = {
        "actor.parallel.tp": 2, "actor.parallel.pp": 2, "actor.optim.lr_warmup_steps": 10, "actor.recompute": "none",
        "actor.optim.lr_schedule": "cosine", "actor.optim.min_lr_ratio": pytest.approx(0.1),
    }  # fmt: skip
    assert {key: at(translation.run, key) for key in expected} == expected
