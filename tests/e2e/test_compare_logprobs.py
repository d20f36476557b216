"""``mcore-rl compare`` as a user runs it: vLLM, transformers and Megatron, in processes of their own.

A run takes vLLM's import and start, transformers' import and Megatron's on two ranks: about 25 s of two cores.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoints.convert import to_megatron
from mcore_rl.cli import main
from mcore_rl.reports import scoring
from tests.support import tiny_models
from tests.support.fp8_on_cpu import put_on_path

AGREES = 1e-4  # float32; 2e-6 is measured
WHOLE_BLOCKS = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_experts=4)
DAMAGED = "model.layers.1.mlp.down_proj.weight"


def run(capsys: pytest.CaptureFixture[str], hf: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and standard output."""
    out, prompts = hf.with_suffix(".json"), hf.with_suffix(".parquet")
    tiny_models.save_prompts(prompts)
    wanted = ["--hf", str(hf), "--data", str(prompts), "--out", str(out), "--max-tokens", "32"]
    code = main(["compare", *wanted, *arguments])
    return code, json.loads(out.read_text()), capsys.readouterr().out


def causes(report: dict[str, Any]) -> dict[str, bool | None]:
    return {finding["cause"]: finding["found"] for finding in report["findings"]}


@pytest.mark.tier("full")
def test_experts_over_two_ranks_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: None) -> None:
    tiny_models.save("mixtral", tmp_path / "hf")
    arguments = ("--layout", "tp=2,ep=2", "--temperature", "0.7", "--samples", "2")
    code, report, said = run(capsys, tmp_path / "hf", *arguments)
    assert code == 0, said
    assert report["verdict"].startswith("They agree") and report["verdict"] in said
    assert report["num_tokens"] > 100 and report["settings"]["temperature"] == 0.7
    assert max(pair["max_abs"] for pair in report["pairs"]) <= AGREES
    assert min(pair["max_abs"] for pair in report["pairs"]) > 0, "three scorers, and not one of them thrice"
    assert report["top1"]["agreement"] == {"transformers": 1.0, "megatron": 1.0}
    nothing = {
        "weights": False,
        "configuration": False,
        "sampling parameters": False,
        "routing": False,
        "quantisation": False,
        "precision": False,
    }
    assert causes(report) == nothing | {"tokenisation": None}


def test_the_difference_of_an_engine_in_fp8_is_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, processes: None
) -> None:
    """Rounding in transformers moves log-probs as far as the engine's do; bfloat16 alone moves them much less."""
    put_on_path(monkeypatch)
    hf = tmp_path / "hf"
    tiny_models.save("qwen3_moe", hf, torch.bfloat16, **WHOLE_BLOCKS)
    asked = ("--dtype", "bfloat16", "--quantization", "fp8_block")
    code, report, said = run(capsys, hf, *asked)
    assert code == 0, said
    parts = report["rounding"]
    assert [each["group"] for each in parts["effects"]] == ["all", "attention", "dense", "experts"]
    assert report["settings"]["quantization"] == "fp8_block"
    assert 2 * parts["bfloat16_mean"] < parts["whole_mean"]
    assert parts["whole_mean"] / 1.5 < parts["expected_mean"] < 1.5 * parts["whole_mean"]
    assert parts["left_mean"] < 0.9 * parts["whole_mean"], "transformers rounds most numbers as vllm does"
    for each in parts["effects"]:
        assert parts["bfloat16_mean"] / 4 < each["weights_mean"] < 2 * parts["whole_mean"]
        assert f"{each['group']} " in said and f"{each['activations_mean']:.1e} " in said
    examined = causes(report)
    assert examined["quantisation"] and examined["weights"] is False, "vLLM's bytes are the files' after our quantiser"
    assert "quantisation" in report["verdict"]


def test_a_damaged_weight_is_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: None) -> None:
    """Megatron's checkpoint was made before the Hugging Face copy of it changed; the other two still agree."""
    tiny_models.save("llama", tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", report=lambda *_: None)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors[DAMAGED][3, 70:] += 0.5  # of the second tensor-parallel rank
    save_file(tensors, path, {"format": "pt"})
    code, report, said = run(capsys, tmp_path / "hf", "--megatron", str(tmp_path / "megatron"), "--layout", "tp=2")
    assert code == 1 and len(report["exceeded"]) == 4, said  # maximum and mean of two pairs
    assert "Cause: the weights" in report["verdict"] and report["verdict"] in said
    (weights,) = (finding for finding in report["findings"] if finding["cause"] == "weights")
    assert (
        weights["found"]
        and weights["evidence"] == f"megatron holds 1 tensors otherwise than --hf: {DAMAGED} (by 5.0e-01)"
    )
    (configuration,) = (finding for finding in report["findings"] if finding["cause"] == "configuration")
    assert not configuration["found"]
    assert configuration["evidence"] == "vllm, transformers, megatron: every field is the same"
    assert report["top1"]["agreement"]["transformers"] == 1.0 > report["top1"]["agreement"]["megatron"]
    agree = {(pair["first"], pair["second"]): pair["max_abs"] <= AGREES for pair in report["pairs"]}
    assert agree == {("vllm", "transformers"): True, ("megatron", "transformers"): False, ("vllm", "megatron"): False}


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_theta": 20000.0}, "rotary_frequencies"),
    ("llama", {"rms_norm_eps": 1e-2}, "norm_epsilon"),
    ("mixtral", {"num_experts_per_tok": 3}, "moe.top_k"),
    ("mixtral", {"intermediate_size": 90}, ""),  # of no whole 16 bytes, on all sides
]


@pytest.mark.tier("full")
@pytest.mark.parametrize(("family", "changed", "named"), CHANGES)
def test_another_configuration_of_vllm_is_the_cause(
    family: str, changed: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, processes: None,
) -> None:  # fmt: skip
    """vLLM is given the same weights with another config.json; nothing else knows of it."""
    shared = {} if named else changed
    tiny_models.save(family, tmp_path / "hf", **shared)
    other = shutil.copytree(tmp_path / "hf", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(changed_config(config, changed)))
    start = scoring.start_engine

    def start_other(name: str, directory: Path, *args: Any, **options: Any) -> Any:
        return start(name, other, *args, **options)

    monkeypatch.setattr(scoring, "start_engine", start_other)
    code, report, said = run(capsys, tmp_path / "hf", "--max-abs-diff", "100", "--mean-abs-diff", "100")
    (configuration,) = (finding for finding in report["findings"] if finding["cause"] == "configuration")
    if not named:
        assert code == 0 and not configuration["found"] and report["verdict"].startswith("They agree"), said
        return
    assert code == 1 and report["exceeded"] == [], "what was asked for is kept, and the model is another one"
    assert configuration["found"] and {line.split(" of ")[0] for line in configuration["evidence"].split("; ")} == {
        named
    }
    assert "Cause: the configuration is not the same" in report["verdict"]
    worst = {(pair["first"], pair["second"]): pair["max_abs"] for pair in report["pairs"]}
    assert worst["megatron", "transformers"] <= AGREES < worst["vllm", "transformers"]


def changed_config(config: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """``changed``, the theta where transformers 5 writes it."""
    if "rope_theta" in changed:
        return config | {"rope_parameters": config["rope_parameters"] | changed}
    return config | changed


def test_a_checkpoint_trained_with_another_theta_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.save("llama", tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", report=lambda *_: None)
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 10000.0
    path.write_text(json.dumps(config))
    tiny_models.save_prompts(tmp_path / "prompts.parquet")
    asked = ["--data", str(tmp_path / "prompts.parquet"), "--out", str(tmp_path / "report.json")]
    code = main(["compare", "--hf", str(tmp_path / "hf"), "--megatron", str(tmp_path / "megatron"), *asked])
    said = capsys.readouterr().err
    assert code == 2 and not (tmp_path / "report.json").exists()
    assert "rotary_base: 500000.0 in its own hf/config.json, 10000.0 in the one given" in said


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistakes") / "hf"
    tiny_models.save("llama", directory)
    tiny_models.save_prompts(directory / "prompts.parquet")
    return directory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout", "tp=3"], "--layout tp=3"),
        (["--layout", "xp=2"], "no such axis"),
        (["--rollout", "tp=2,dp=2"], "--rollout dp=2"),
        (["--rollout", "tp=3"], "--rollout tp=3"),
        (["--temperature", "0"], "--temperature=0: must be positive"),
        (["--max-tokens", "4096"], "max_response_length=4096"),
        (["--samples", "0"], "samples=0"),
        (["--quantization", "fp8_block"], "--dtype=float32: is what vLLM quantises to fp8_block"),
        (["--quantization", "fp8_channel", "--dtype", "bfloat16"], "--quantization=fp8_channel: vLLM has no kernels"),
        (["--hf", "nowhere", "--seed", "-1"], "--hf=nowhere: there is no such directory"),
        (["--megatron", "nowhere"], "nowhere"),
        (["--data", "nowhere.parquet"], "--data=nowhere.parquet: there is no such file"),
        (["--out", "nowhere/report.json"], "out=nowhere/report.json"),
    ],
)
def test_a_mistake_is_one_message(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = ["--hf", str(llama), "--data", str(llama / "prompts.parquet"), "--out", str(tmp_path / "report.json")]
    assert main(["compare", *given, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.startswith("error: ") and said in err, err
    assert not (tmp_path / "report.json").exists()
