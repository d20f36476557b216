"""Adapters of verl's, of PEFT and of Megatron-Bridge, become ours: never a run of whole weights at LoRA's rate."""

from __future__ import annotations

import pytest

from mcore_rl.from_verl.answer import Difference
from tests.from_verl.test_translate import at, listed, translated

MODEL = "actor_rollout_ref.model"


def test_adapters_of_megatron_bridge() -> None:
    """Its defaults (verl/trainer/config/model/hf_model.yaml): alpha 32, all four kinds of layers."""
    translation = translated(f"{MODEL}.lora.rank=16", version="0.9.0")
    expected = {"actor.lora.rank": 16, "actor.lora.alpha": 32.0, "actor.lora.target_modules": ["all-linear"]}
    assert {key: at(translation.run, key) for key in expected} == expected
    assert at(translation.run, "rollout.lora") == "auto" and translation.is_whole
    assert listed(translation, f"{MODEL}.lora.rank") is Difference.changed


def test_layers_have_the_names_of_the_hugging_face_model() -> None:
    words = [f"{MODEL}.lora.rank=8", f"{MODEL}.lora.target_modules=[linear_qkv,linear_fc2]", f"{MODEL}.lora.merge=True"]
    run = translated(*words).run
    assert run.actor.lora.target_modules == ["q_proj", "k_proj", "v_proj", "down_proj"]
    assert run.rollout.lora.value == "merged"


@pytest.mark.parametrize(
    "word", ["dropout=0.1", "adapter_path=/a", "type=dora", "target_modules=['*.layers.0.*.linear_qkv']"]
)
def test_what_is_not_ours_is_said_and_adapters_are_trained_all_the_same(word: str) -> None:
    translation = translated(f"{MODEL}.lora.rank=8", f"{MODEL}.lora.{word}")
    assert listed(translation, f"{MODEL}.lora.{word.partition('=')[0]}") is Difference.absent
    assert translation.run.actor.lora.rank == 8


def test_a_rank_that_nobody_can_read_is_no_run_of_whole_weights() -> None:
    for key in ("lora_rank", "lora.rank"):
        translation = translated(f"{MODEL}.{key}=<output-of-cat>")
        assert translation.settings["actor.lora.rank"].value == "???" and not translation.is_whole
