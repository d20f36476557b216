"""On-policy distillation from the command line: a teacher of another size, vocabulary padding and layout.

One run of three steps, and one that goes on from its second.  The teacher is mixed with a reward, so that one run has
both parts of the advantages, a reference, and two updates of a batch.  And a run of each divergence over the whole
vocabulary, from which alone it learns.  And runs of two teachers, each of which teaches the rows of a data source.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from tests.e2e.test_roles import Observed
from tests.house.source import ROOT
from tests.support import prompt_files, run_task
from tests.support.run_task import AGREEMENT, SPEED, nothing_left, write_task

STEPS, SAVED = 3, 2
TEMPERATURE = 0.8
PADDING = 6  # rows of the teacher's vocabulary that are no tokens
SETTINGS = (
    "algorithm.distill.coef=0.5", "teacher.parallel.tp=2", f"rollout.temperature={TEMPERATURE}",
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.record_rollouts=true",
    "trainer.max_restarts=0",
)  # fmt: skip


def write_teacher(directory: Path, tokenizer_of: Path, seed: int = 1) -> None:
    """A dense model, deeper and wider than the task's mixture, with the tokens of that."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(seed)
    config = Qwen3Config(
        num_hidden_layers=3, hidden_size=96, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, vocab_size=len(tokenizer) + PADDING, max_position_embeddings=256, initializer_range=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


OF_THE_LOSS = (
    "algorithm.adv_estimator=none", "actor.loss_mode=policy_gradient",
    "actor.ppo_mini_batch_size=${data.train_batch_size}", "actor.use_kl_loss=false", "algorithm.use_kl_in_reward=false",
)  # fmt: skip


def command(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "mcore_rl.cli", *words]
    return subprocess.run(program, cwd=ROOT, text=True, capture_output=True, check=False, timeout=900)


def run(task: Path, directory: Path, *more: str) -> Observed:
    with nothing_left():
        overrides = run_task.overrides(task, directory, f"teacher.path={task}/teacher", *SETTINGS, *more)
        done = command("train", *overrides)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Observed(directory, {line.pop("step"): line for line in lines})


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("task"))
    write_teacher(directory / "teacher", directory / "model")
    return directory


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, processes: None) -> Observed:
    return run(task, tmp_path_factory.mktemp("whole"))


def drawn(directory: Path, step: int) -> list[tuple[list[int], list[bool]]]:
    """(tokens, which of them the policy drew) of each response of ``step``, from the run's own record."""
    table = pq.read_table(directory / "record" / f"step_{step}.parquet", columns=["tokens", "rest"])
    masks = [
        [part["author"] == "model" for part in json.loads(rest)["segments"] for _ in range(part["tokens"])]
        for rest in table.column("rest").to_pylist()
    ]
    return list(zip(table.column("tokens").to_pylist(), masks, strict=True))


def sources_of(directory: Path, step: int, rows: list[dict[str, object]]) -> list[str]:
    """The data source of each of ``drawn``, by the number of its prompt among ``rows``, which were trained on."""
    table = pq.read_table(directory / "record" / f"step_{step}.parquet", columns=["group"])
    groups = json.loads(table.schema.metadata[b"mcore_rl.drawn"])["groups"]
    return [str(rows[groups[place]["number"]]["data_source"]) for place in table.column("group").to_pylist()]


@torch.no_grad()
def distributions(model: Path, responses: list[tuple[list[int], list[bool]]], size: int) -> torch.Tensor:
    """transformers' log-probs of the first ``size`` tokens of the vocabulary at each drawn token, float64."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager").eval()
    rows = []
    for tokens, mask in responses:
        logits_TV = network(torch.tensor([tokens])).logits[0, :-1, :size] / TEMPERATURE
        rows.append(logits_TV.log_softmax(-1)[torch.tensor(mask[1:])])
    return torch.cat(rows)


@torch.no_grad()
def logprobs(model: Path, responses: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """transformers' log-probs of the drawn tokens, float64, one response after the other."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager").eval()
    rows = []
    for tokens, mask in responses:
        of_tokens_TV = (network(torch.tensor([tokens])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        of_drawn_T = of_tokens_TV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        rows.append(of_drawn_T[torch.tensor(mask[1:])])
    return torch.cat(rows)


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
def test_the_distance_to_the_teacher_is_what_transformers_says(task: Path, whole: Observed) -> None:
    responses = drawn(whole.directory, 1)
    distances = logprobs(task / "model", responses) - logprobs(task / "teacher", responses)
    metrics = whole.metrics[1]
    assert len(distances) > 100 and distances.std() > 0.1
    assert metrics["distill/reverse_kl"] == pytest.approx(float(distances.mean()), abs=1e-5)
    assert metrics["distill/reverse_kl_std"] == pytest.approx(float(distances.std(unbiased=False)), abs=1e-5)
    assert metrics["distill/reverse_kl_max"] == pytest.approx(float(distances.max()), abs=1e-4)
    assert whole.metrics[STEPS]["distill/reverse_kl"] < metrics["distill/reverse_kl"], "it learns from the teacher"


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_divergences_over_the_vocabulary_are_what_transformers_says(
    divergence: str, task: Path, tmp_path: Path, processes: None
) -> None:
    beta = ["algorithm.distill.jsd_beta=0.3"] if divergence == "jensen_shannon" else []
    taught = run(task, tmp_path, *OF_THE_LOSS, f"algorithm.distill.divergence={divergence}", *beta)
    responses, size = drawn(tmp_path, 1), AutoConfig.from_pretrained(task / "model").vocab_size
    p_MV, q_MV = (distributions(task / name, responses, size) for name in ("model", "teacher"))
    m_MV = (0.7 * p_MV.exp() + 0.3 * q_MV.exp()).log()

    def kl(a_MV: torch.Tensor, b_MV: torch.Tensor) -> torch.Tensor:
        return (a_MV.exp() * (a_MV - b_MV)).sum(-1)

    expected_M = {
        "reverse_kl": kl(p_MV, q_MV),
        "forward_kl": kl(q_MV, p_MV),
        "jensen_shannon": 0.7 * kl(p_MV, m_MV) + 0.3 * kl(q_MV, m_MV),
    }[divergence]
    first, last = taught.metrics[1], taught.metrics[STEPS]
    assert len(expected_M) > 100 and expected_M.std() > 0.01
    assert first[f"distill/{divergence}"] == pytest.approx(float(expected_M.mean()), abs=1e-5)
    assert first[f"distill/{divergence}_max"] == pytest.approx(float(expected_M.max()), abs=1e-4)
    assert last[f"distill/{divergence}"] < first[f"distill/{divergence}"], "it learns from the teacher"


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("divergence", ["drawn", "forward_kl"])
def test_two_teachers_are_what_transformers_says_of_each_source(
    divergence: str, task: Path, tmp_path: Path, processes: None
) -> None:
    """The teacher has two data-parallel ranks; a third of the rows are of the source that it teaches itself."""
    rows = pq.read_table(task / "train.parquet").to_pylist()
    rows = [row | {"data_source": "openai/gsm8k" if number % 3 else "arithmetic"} for number, row in enumerate(rows)]
    prompt_files.write(tmp_path / "train.parquet", rows)
    write_teacher(tmp_path / "other", task / "model", seed=2)
    of_loss = () if divergence == "drawn" else (*OF_THE_LOSS, f"algorithm.distill.divergence={divergence}")
    taught = run(
        task, tmp_path / "run", *of_loss, f"data.train_files=[{tmp_path}/train.parquet]", "teacher.parallel.tp=1",
        f"teacher.by_source={{openai/gsm8k: {tmp_path}/other}}",
    )  # fmt: skip
    sources, responses = sources_of(tmp_path / "run", 1, rows), drawn(tmp_path / "run", 1)
    first = taught.metrics[1]
    key = "distill/reverse_kl" if divergence == "drawn" else f"distill/{divergence}"
    size, of_all = AutoConfig.from_pretrained(task / "model").vocab_size, []
    for source, name, teacher in (
        ("arithmetic", "teacher.path", task / "teacher"), ("openai/gsm8k", "openai/gsm8k", tmp_path / "other"),
    ):  # fmt: skip
        own = [response for response, each in zip(responses, sources, strict=True) if each == source]
        if divergence == "drawn":
            expected_M = logprobs(task / "model", own) - logprobs(teacher, own)
        else:
            p_MV, q_MV = (distributions(model, own, size) for model in (task / "model", teacher))
            expected_M = (q_MV.exp() * (q_MV - p_MV)).sum(-1)
        of_all.append(expected_M)
        assert len(expected_M) > 30
        assert first[f"{key}/{name}"] == pytest.approx(float(expected_M.mean()), abs=1e-5)
    assert first[key] == pytest.approx(float(torch.cat(of_all).mean()), abs=1e-5)
    plan = (tmp_path / "run" / "plan.json").read_text()
    assert "teacher_1 weights" in plan and "teacher_2" not in plan


@pytest.mark.tier("full")
def test_a_teacher_is_planned_and_not_saved(whole: Observed) -> None:
    plan = (whole.directory / "plan.json").read_text()
    assert "teacher weights" in plan and "teacher optimizer" not in plan and "teacher checkpoints" not in plan
    assert all(metrics["time/teacher"] > 0 for metrics in whole.metrics.values())
    roles = {path.name for path in (whole.directory / f"checkpoints/step_{SAVED}").iterdir() if path.is_dir()}
    assert roles == {"actor"}


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
def test_a_run_goes_on_bit_for_bit(task: Path, whole: Observed, tmp_path: Path) -> None:
    saved = f"checkpoints/step_{SAVED}"
    shutil.copytree(whole.directory / saved, tmp_path / saved)
    resumed = run(task, tmp_path)

    def trained(metrics: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in metrics.items() if not key.startswith(SPEED) and key not in AGREEMENT}

    assert list(resumed.metrics) == [STEPS]
    assert trained(resumed.metrics[STEPS]) == trained(whole.metrics[STEPS])
    ours, theirs = whole.tensors(STEPS, "actor"), resumed.tensors(STEPS, "actor")
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
