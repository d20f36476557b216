"""``mcore-rl plan``, as a user runs it: what it answers, what it writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.tracking.samples import write_samples
from tests.house.source import ROOT
from tests.support import published


def test_a_recipe_is_planned_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, values = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main(["plan", "recipe=mixtral_8x22b_rloo", "--html", str(page), "--json", str(values)]) == 0
    assert "140.6B parameters on 64 ranks" in " ".join(capsys.readouterr().out.split())
    assert json.loads(values.read_text())["num_parameters"] == 140_630_071_296
    assert "It fits." in page.read_text()


def test_what_does_not_fit_leaves_with_two_and_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=qwen25_7b_remax", "cluster.gpu_memory_gib=40"]) == 2
    said = capsys.readouterr().err
    assert "update needs" in said and "of 40.0 GiB" in said and "Nearest settings that fit" in said


def test_measured_rates_are_printed_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step_s(*more: str) -> float:
        assert main(["plan", "recipe=qwen25_05b_ppo", "cluster=nvidia_h100", "--json", str(tmp_path / "p"), *more]) == 0
        return float(json.loads((tmp_path / "p").read_text())["step_s"])

    head = {"format": "mcore-rl doctor", "version": 1, "device": "cuda", "device_name": "NVIDIA H100 80GB HBM3"}
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps(head | {"rates": {"intra_node_gb_s": 20.0, "host_link_gb_s": 2.0}}))
    before = step_s()
    assert "in place of" not in capsys.readouterr().out
    assert step_s(f"cluster.measured={path}") > before, "slow links make a longer step"
    said = capsys.readouterr().out
    assert f"intra_node_gb_s: 20 GB/s, from {path}, in place of 450 * 0.7 of the yaml\n" in said
    assert f"host_link_gb_s: 2 GB/s, from {path}, in place of 25, assumed\n" in said


def test_a_search_writes_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = tmp_path / "plan.json"
    assert main(["plan", "recipe=qwen25_05b_ppo", "--search", "--limit", "2", "--json", str(values)]) == 0
    written = json.loads(values.read_text())
    assert written["step_s"] == written["search"]["best"][0]["plan"]["step_s"]
    assert "actor.recompute=" in capsys.readouterr().out


def test_fine_tuning_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=gemma2_2b_sft"]) == 0
    assert "update_actor" in capsys.readouterr().out
    assert main(["plan", "recipe=gemma2_2b_sft", "--search"]) == 0
    said = capsys.readouterr().out
    assert "actor.parallel.tp=" in said and "rollout." not in said
    assert main(["plan", "recipe=gemma2_2b_sft", "cluster=cpu", "--search"]) == 2
    assert "searches layouts of accelerators" in capsys.readouterr().err


def test_a_recipe_with_pictures_is_planned_with_its_tower(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "recipe=qwen25_vl_7b_grpo"]) == 0
    said = capsys.readouterr().out
    assert "8.3B parameters" in said and "\npictures " in said and "\nengine, vision tower at work " in said
    assert main(["verify", "recipe=qwen25_vl_7b_grpo", "rollout.tp=8", "rollout.dp=1", "--check"]) == 2
    assert "model.vision.ffn_hidden_size" in capsys.readouterr().err, "3,420 does not divide by 8"


def test_a_directory_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(published.FACTS["Qwen/Qwen2.5-0.5B-Instruct"]))
    (tmp_path / "mine.yaml").write_text(f"defaults: [train, _self_]\nmodel: {{path: {model}}}\n")
    words = ["--config-dir", str(tmp_path), "--config-name", "mine", "cluster=nvidia_h100"]
    assert main(["plan", *words]) == 0
    assert "0.5B parameters" in capsys.readouterr().out
    assert main(["plan", *words, "model.path=nowhere"]) == 2
    assert "has no config.json" in capsys.readouterr().err
    (model / "config.json").write_text("{")
    assert main(["plan", *words]) == 2
    assert "config.json: is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "recipe="),
        (["nonsense"], "nonsense=: is no override. Write key=value"),
        (["recipe=no_such"], "there is no no_such.yaml"),
        (["recipe=mixtral_8x22b_rloo", "cluster=no_such"], "there is no no_such.yaml"),
        (["recipe=mixtral_8x22b_rloo", "trainer.no_such=1"], "trainer.no_such"),
        (["recipe=mixtral_8x22b_rloo", "actor.parallel.tp=3"], "actor.parallel.tp=3"),
    ],
)
def test_mistakes_are_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_no_torch_is_loaded() -> None:
    code = (
        "import runpy, sys; sys.argv = ['plan_run', 'recipe=mixtral_8x22b_rloo']\n"
        "try: runpy.run_path('tools/plan_run.py', run_name='__main__')\n"
        "except SystemExit as left: assert left.code == 0, left.code\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_modes_are_compared_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = tmp_path / "modes.json"
    words = ["plan", "recipe=qwen25_05b_ppo", "--modes", "--json", str(values)]
    assert main([*words, "--lengths", "100"]) == 0
    assert "no mode pays" in capsys.readouterr().out, "one node cannot be split"
    written = json.loads(values.read_text())
    assert [row["mode"] for row in written["rows"]] == ["sync, colocated"] and written["mean_length"] == 100
    for number, prompt in enumerate("ab"):
        write_samples(tmp_path, number, "rollouts", [{"prompt_id": prompt, "num_tokens": 100 + number}])
    assert main([*words, "--lengths", str(tmp_path)]) == 0
    assert json.loads(values.read_text())["mean_length"] == 100.5


def test_a_plan_takes_the_mean_of_responses_from_a_key_a_number_or_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half the tokens of responses, half the tokens drawn, and less time; the memory is that of the longest."""
    write_samples(tmp_path, 1, "rollouts", [{"prompt_id": "a", "num_tokens": tokens} for tokens in (50, 206)])
    plans = []
    ways = ([], ["data.mean_response_length=128"], ["--lengths", "128"], ["--lengths", str(tmp_path)])
    for words in ways:
        file = tmp_path / "plan.json"
        assert main(["plan", "recipe=qwen25_05b_ppo", "--json", str(file), *words]) == 0
        plans.append(json.loads(file.read_text()))
        shown = " ".join(capsys.readouterr().out.split())
        low, high = plans[-1]["step_range_s"]
        assert low < plans[-1]["step_s"] < high and plans[-1]["calibration"] in shown
    whole, *halves = plans
    assert halves[0] == halves[1] == halves[2]
    assert halves[0]["tokens"]["drawn"] == whole["tokens"]["drawn"] / 2 and whole["tokens"]["drawn"] == 256 * 256
    assert halves[0]["step_s"] < whole["step_s"] and halves[0]["peaks"] == whole["peaks"]
    assert (
        main(["plan", "recipe=qwen25_05b_ppo", "--search", "--limit", "1", "--lengths", "128", "--json", str(file)])
        == 0
    )
    assert json.loads(file.read_text())["tokens"]["drawn"] == 256 * 128


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe=gemma2_2b_sft", "--modes", "--html", "a"], ["fine-tuning has none"]),
        (["recipe=qwen25_05b_ppo", "cluster=cpu", "--modes"], ["searches layouts of accelerators"]),
        (["recipe=qwen25_05b_ppo", "--modes", "--lengths", "9999"], ["is not within 1 and 512 tokens"]),
        (["recipe=qwen25_05b_ppo", "--modes", "--lengths", "nowhere"], ["has no rollouts/step_N.parquet"]),
        (["recipe=qwen25_05b_ppo", "--lengths", "nowhere"], ["has no rollouts/step_N.parquet"]),
        (["recipe=gemma2_2b_sft", "--lengths", "9"], ["fine-tuning draws none"]),
        (
            ["recipe=qwen25_05b_ppo", "data.mean_response_length=513"],
            ["data.mean_response_length=513: is more than data.max_response_length=512"],
        ),
    ],
)
def test_modes_refuse_what_they_cannot_compare(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert all(each in text for each in said), text
