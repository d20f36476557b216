"""``mcore-rl recipes`` and what a recipe is to ``verify``: names in, a table or a file out."""

from __future__ import annotations

import pytest

from mcore_rl.cli import main
from mcore_rl.config.launch import recipe_names, recipe_path


def test_every_recipe_has_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert set(lines) == set(recipe_names())
    assert "64 of nvidia_h100" in lines["mixtral_8x22b_rloo"] and " sft " in lines["gemma2_2b_sft"]
    assert "any machine" in lines["arithmetic_grpo"]


def test_one_is_the_file_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "qwen2_7b_grpo"]) == 0
    assert capsys.readouterr().out == recipe_path("qwen2_7b_grpo").read_text(encoding="utf-8")
    assert main(["recipes", "qwen2_7b_grp"]) == 2
    assert "Did you mean qwen2_7b_grpo" in capsys.readouterr().err


def test_a_recipe_names_the_model_and_the_layouts_of_a_proof(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "recipe=mixtral_8x22b_rloo", "--check"]) == 0
    assert "the layouts suit the model" in capsys.readouterr().out
    assert main(["verify", "recipe=mixtral_8x22b_rloo", "--check", "actor.parallel.tp=3"]) == 2
    assert "tp=3" in capsys.readouterr().err
    for words in ([], ["recipe=mixtral_8x22b_rloo", "--model", "mixtral-8x22b"]):
        assert main(["verify", *words]) == 2
        assert "Write one of recipe=NAME, --model NAME, --hf DIR, --mutate" in capsys.readouterr().err
