"""What is refused of ``mcore-rl generate`` before a file is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.data import DataConfig, Truncation
from mcore_rl.config.engine import Precision
from mcore_rl.config.generate import GenerateConfig, generate_violations

SOUND = ["model.path=m", "data.files=[p.parquet]", "out=o.parquet"]


def config_of(*overrides: str) -> GenerateConfig:
    return compose(GenerateConfig, "generate", overrides)


def refusals(*overrides: str) -> list[str]:
    return [str(violation) for violation in generate_violations(config_of(*SOUND, *overrides))]


def test_a_model_files_and_a_name_are_enough() -> None:
    assert refusals() == []
    assert refusals("rollout.n=8", "rollout.temperature=0.6", "data.max_response_length=4096") == []


def test_what_is_missing_is_named_at_once() -> None:
    keys = [violation.key for violation in generate_violations(config_of())]
    assert keys == ["model.path", "data.files", "out"]


def test_lengths_and_memory_follow_from_the_rest() -> None:
    config = config_of(*SOUND, "data.max_prompt_length=7", "data.max_response_length=9")
    assert (config.rollout.max_prompt_length, config.rollout.max_response_length) == (7, 9)
    assert config.rollout.gpu_memory_utilization == 0.9 and not config.rollout.enable_sleep_mode


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ('{"dtype": "float32"}', "float32"),
        ('{"torch_dtype": "float32"}', "float32"),
        ('{"torch_dtype": "bfloat16"}', "bfloat16"),
        ('{"dtype": "float16"}', "bfloat16"),  # engines here compute in neither that nor float8
        ("{}", "bfloat16"),
        ('{"dtype": ["float32"]}', "bfloat16"),
        ("[]", "bfloat16"),
        ("{", "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_engines_compute_in_the_dtype_of_the_checkpoint(tmp_path: Path, text: str | None, dtype: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    model = [f"model.path='{tmp_path}'", "data.files=[p.parquet]", "out=o.parquet"]
    assert compose(GenerateConfig, "generate", model).rollout.dtype is Precision[dtype]
    for written in Precision:
        asked = [*model, f"rollout.dtype={written.value}"]
        assert compose(GenerateConfig, "generate", asked).rollout.dtype is written


def test_prompts_are_read_as_training_reads_them() -> None:
    written = ["data.prompt_key=q", "data.truncation=left", "data.filter_overlong_prompts=true", "data.seed=3"]
    config = config_of(*SOUND, *written, "+data.chat_template_kwargs.enable_thinking=false")
    expected = dict(prompt_key="q", truncation=Truncation.left, filter_overlong_prompts=True, seed=3)
    kwargs = {"enable_thinking": False}
    assert config.data.prompts == DataConfig(**expected, chat_template_kwargs=kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.max_samples=0", "data.max_samples=0: must be positive"),
        ("data.max_prompt_length=0", "data.max_prompt_length=0: must be positive"),
        ("rollout.max_response_length=5", "rollout.max_response_length=5: differs from data.max_response_length=512"),
        ("rollout.val_kwargs.n=4", "rollout.val_kwargs=...: says how training validates"),
        ("rollout.top_p=0", "rollout.top_p=0.0: must lie in (0, 1]"),
        ("rollout.n=0", "rollout.n=0: must be positive"),
        ("rollout.return_routed_experts=true", "rollout.return_routed_experts=True: nobody would read"),
    ],
)
def test_what_cannot_be_is_refused(override: str, said: str) -> None:
    messages = refusals(override)
    assert any(each.startswith(said) for each in messages), messages


def test_greedy_draws_one_response() -> None:
    assert refusals("rollout.temperature=0") == []
    assert len(refusals("rollout.temperature=0", "rollout.n=2")) == 1
