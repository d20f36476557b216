"""Real supervised fine-tuning, against transformers on the same rows: two processes, experts split over them.

Two runs of four steps: one in peace, and one that a hostile parent starts in its background, where Ctrl-C is of no
consequence, that is told to leave, goes on, and loses a training process.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.cli import main
from mcore_rl.config.compose import compose
from mcore_rl.config.sft import SftConfig
from mcore_rl.controller.lifecycle.run_checkpoints import Progress, begin, finish
from mcore_rl.controller.programs import sft
from mcore_rl.controller.step.preemption import REQUEUE
from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.ground.errors import ConfigError, McoreRLError
from tests.support import prompt_files
from tests.support.crash_runs import doing, launch, nothing_survives
from tests.support.run_task import nothing_left, write_task

POSITIONS = 777
CHANGED = f"model.config_overrides.max_position_embeddings={POSITIONS}"
STEPS, SAVED, BATCH, VALIDATED = 4, 2, 8, 5
SPEED = ("time/", "perf/")
# Two implementations in float32, each a mean over a hundred tokens of log-probs that are right to 1e-6.
TOLERANCE = 2e-6


@dataclass
class Observed:
    """Of one run: its directory, and metrics by step."""

    directory: Path
    metrics: dict[int, dict[str, float]]


def overrides(task: Path, directory: Path, *more: str) -> list[str]:
    return [
        f"model.path={task}/model",
        f"data.train_files=[{task}/sft-train.parquet]",
        f"data.val_files=[{task}/sft-val.parquet]",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=false",
        "data.max_length=128",
        "actor.parallel.ep=2",
        "actor.precision=float32",
        "actor.microbatch_tokens=256",
        "actor.optim.lr=3e-3",
        "actor.optim.weight_decay=0.0",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "trainer.logger=[]",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.save_freq={SAVED}",
        "trainer.profile_steps=[1]",
        f"trainer.default_local_dir={directory}",
        *more,
    ]


def settings(task: Path, directory: Path, *more: str) -> SftConfig:
    return compose(SftConfig, "sft", overrides(task, directory, *more))


def run(task: Path, directory: Path) -> Observed:
    with nothing_left():
        assert asyncio.run(sft.SFT.train(settings(task, directory, CHANGED))) == 0
    return observed(directory)


def observed(directory: Path) -> Observed:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Observed(directory, {line.pop("step"): line for line in lines})


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums with their solutions, more than are trained, and the model of the other runs."""
    directory = write_task(tmp_path_factory.mktemp("task"))
    for name, split, count in (("train", Split.train, STEPS * BATCH + 3), ("val", Split.validation, VALIDATED)):
        rows = [
            {"prompt": prompt_files.user(each.question), "response": each.solution}
            for each in generate(1, count, 0, split)
        ]
        prompt_files.write(directory / f"sft-{name}.parquet", rows)
    return directory


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Observed:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sft, "SCORED_AT_ONCE", VALIDATED - 1)  # so that one is left, and two ranks to score it
        return run(task, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def struck(task: Path, tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Observed:
    directory = tmp_path_factory.mktemp("struck") / "run"
    words = ["sft", *overrides(task, directory, "trainer.save_freq=0", CHANGED)]
    with nothing_survives(directory.parent) as traces:
        run = launch(words, directory, traces, hostile=True)
        run.until(lambda run: run.num_logged == 1)  # validation before training
        run.strike("controller", signal.SIGINT)
        run.until(lambda run: run.num_logged == 2)
        run.strike("controller", signal.SIGTERM)
        assert run.finish() == REQUEUE
        left = re.search(r"left after step ([123]), on SIGTERM\. .*/step_\1 is complete: the same command", run.said())
        assert left, run.said()
        run = launch(words, directory, traces)
        run.until(doing(run.num_logged + 1, "train_step"))
        run.strike("actor-rank-1.log")
        assert run.finish() == 0
        assert f"restart 1 of 3 (trainer.max_restarts) from step_{left[1]}" in run.said()
    return observed(directory)


def loss_of(model_path: Path, rows: list[dict[str, str]]) -> float:
    """By transformers: of what the assistant says and the token that ends it, one conversation at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    end = tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token))
    total, count = 0.0, 0
    for row in rows:
        asked = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        answer = [*tokenizer.encode(row["response"], add_special_tokens=False), end]
        tokens = torch.tensor([[*asked, *answer]])
        labels = torch.tensor([[*(-100 for _ in asked), *answer]])
        with torch.no_grad():
            total += float(model(tokens, labels=labels).loss.double()) * len(answer)
        count += len(answer)
    return total / count


def rows_of(task: Path, name: str) -> list[dict[str, str]]:
    return pq.read_table(task / f"sft-{name}.parquet").to_pylist()


def test_the_first_steps_loss_is_that_of_the_responses_alone(task: Path, whole: Observed) -> None:
    expected = loss_of(task / "model", rows_of(task, "train")[:BATCH])
    assert whole.metrics[1]["sft/loss"] == pytest.approx(expected, abs=TOLERANCE)


def test_evaluation_is_of_every_validation_row_and_falls(task: Path, whole: Observed) -> None:
    before, after = (whole.metrics[step]["sft/val_loss"] for step in (0, STEPS))
    assert before == pytest.approx(loss_of(task / "model", rows_of(task, "val")), abs=TOLERANCE)
    assert after < before - 0.5
    assert [step for step, metrics in whole.metrics.items() if "sft/val_loss" in metrics] == [0, STEPS]


def test_what_is_exported_is_what_was_evaluated(task: Path, whole: Observed) -> None:
    final = whole.directory / "hf" / "final"
    evaluated = whole.metrics[STEPS]["sft/val_loss"]
    assert loss_of(final, rows_of(task, "val")) == pytest.approx(evaluated, abs=TOLERANCE)


def test_every_step_is_told_of(task: Path, whole: Observed) -> None:
    assert list(whole.metrics) == [0, 1, 2, 3, 4]
    for step in range(1, STEPS + 1):
        metrics = whole.metrics[step]
        assert metrics["actor/lr"] == 3e-3 and metrics["actor/skipped_updates"] == 0.0
        assert metrics["actor/grad_norm"] > 0 and metrics["time/update_actor"] > 0
        assert {"router/load_max", "perf/trained_tokens_per_s", "perf/tflop_updates"} <= metrics.keys()
        rate = metrics["perf/tflop_updates"] / metrics["time/update_actor"] / 2
        assert metrics["perf/tflops_per_device"] == pytest.approx(rate)
        assert not {"perf/mfu", "perf/tflop_logprobs"} & metrics.keys(), "nobody knows a CPU's peak; nothing is scored"
    names = {path.name for path in (whole.directory / "profiles" / "step_1").iterdir()}
    assert names == {"actor-rank-0.json", "actor-rank-1.json"}
    assert (whole.directory / "report.html").is_file()


def test_what_is_changed_of_the_model_is_read_written_and_part_of_the_run(task: Path, whole: Observed) -> None:
    """One changed config.json: the trainer's, that of the export and the checkpoints, and of the run's identity."""
    places = ["model", "hf/final", f"checkpoints/step_{STEPS}/actor/hf"]
    for place in places:
        config = json.loads((whole.directory / place / "config.json").read_text())
        assert config["max_position_embeddings"] == POSITIONS, place
    assert json.loads((task / "model" / "config.json").read_text())["max_position_embeddings"] != POSITIONS
    identity = json.loads((whole.directory / "checkpoints" / f"step_{STEPS}" / "run.json").read_text())
    assert identity["model"]["max_position_embeddings"] == POSITIONS
    assert identity["config"]["model"]["config_overrides"] == {"max_position_embeddings": POSITIONS}
    assert identity["config"]["model"]["path"] == str(task / "model")
    with pytest.raises(ConfigError, match="is another model than the checkpoint's: max_position_embeddings 777 there"):
        sft.SFT.prepare(
            settings(task, whole.directory, f"model.config_overrides.max_position_embeddings={POSITIONS + 1}")
        )


@pytest.mark.tier("full")
def test_signals_and_deaths_change_no_bit(whole: Observed, struck: Observed) -> None:
    assert list(struck.metrics) == list(whole.metrics)
    for step in whole.metrics:
        ours, theirs = (
            {key: value for key, value in each.metrics[step].items() if not key.startswith(SPEED)}
            for each in (struck, whole)
        )
        assert ours == theirs
    final, again = (each.directory / "hf" / "final" / "model.safetensors" for each in (whole, struck))
    assert final.read_bytes() == again.read_bytes()


def test_muon_learns_from_the_command_line_and_goes_on_from_a_checkpoint_with_the_same_bits(
    task: Path, tmp_path: Path, fast_ray: None
) -> None:
    muon = ["actor.optim.optimizer=muon", "trainer.profile_steps=[]"]
    with nothing_left():
        assert main(["sft", *overrides(task, tmp_path / "whole", *muon)]) == 0
        parts = overrides(task, tmp_path / "parts", *muon)
        assert main(["sft", *parts, f"trainer.total_training_steps={SAVED}"]) == 0
        assert main(["sft", *parts]) == 0
    whole, again = (observed(tmp_path / name) for name in ("whole", "parts"))
    losses = [whole.metrics[step]["sft/loss"] for step in range(1, STEPS + 1)]
    assert losses[-1] < losses[0]
    assert [again.metrics[step]["sft/loss"] for step in range(1, STEPS + 1)] == losses
    final, resumed = (each.directory / "hf" / "final" / "model.safetensors" for each in (whole, again))
    assert final.read_bytes() == resumed.read_bytes()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.path=''", "model.path=: is not set"),
        ("data.train_files=[]", "data.train_files=[]: there is nothing to train on"),
        ("data.val_files=[]", "data.val_files=[]: trainer.test_freq=4 needs some"),
        ("trainer.mode=one_step_off", "trainer.mode=one_step_off: sft draws no rollouts. Leave trainer.mode out"),
        ("trainer.critic_warmup=2", "trainer.critic_warmup=2: sft has no critic"),
        ("data.max_length=300", "data.max_length=300: exceeds the model's 256 tokens"),
        ("data.max_length=8", "max_length"),
        ("data.truncation=middle", "data.truncation=middle: a conversation without its middle is another one"),
        ("data.train_batch_size=1", "data.train_batch_size=1: is fewer than the 2 data-parallel ranks"),
        ("data.train_batch_size=64", "data.train_batch_size"),
        ("data.response_key=answer", "answer"),
        ("data.train_files=[nowhere.parquet]", "nowhere.parquet"),
        ("actor.microbatch_tokens=null", "actor.microbatch_tokens=None: either this or microbatch_sequences"),
        ("actor.parallel.ep=3", "actor.parallel.ep=3"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    task: Path, tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(McoreRLError) as caught:
        sft.SFT.prepare(settings(task, tmp_path / "run", override))
    assert said in str(caught.value), str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_refused(task: Path, tmp_path: Path) -> None:
    prepared = sft.SFT.prepare(settings(task, tmp_path))
    progress = Progress(step=prepared.num_steps, sampler=prepared.sampler.state_dict())
    finish(begin(tmp_path, progress, ["actor"], prepared.identity.keep), {})
    (tmp_path / "environment.json").write_text(f'{{"finished_step": {prepared.num_steps}}}')
    for override in ("trainer.save_freq=0", "actor.optim.lr=3e-4"):
        with pytest.raises(ConfigError, match="this run is finished"):
            sft.SFT.prepare(settings(task, tmp_path, override))


def test_all_mistakes_are_named_at_once(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        sft.SFT.prepare(settings(task, tmp_path, "data.train_files=[]", "actor.optim.lr=-1", "trainer.save_freq=-1"))
    keys = {violation.key for violation in caught.value.violations}
    assert keys == {"data.train_files", "actor.optim.lr", "trainer.save_freq"}


@pytest.mark.tier("full")
def test_a_run_that_only_validates_trains_nothing(task: Path, tmp_path: Path, whole: Observed, fast_ray: None) -> None:
    with nothing_left():
        assert asyncio.run(sft.SFT.train(settings(task, tmp_path, "trainer.val_only=true"))) == 0
    (only,) = observed(tmp_path).metrics.values()
    assert only["sft/val_loss"] == whole.metrics[0]["sft/val_loss"]
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob("checkpoints/*"))


def test_no_token_before_the_first_is_predicted() -> None:
    """A conversation that is trained from its first token on loses that one."""
    each = sft.Conversation(id="x:0", tokens=(5, 6, 7), mask=(True, True, False))
    batch = sft.batch_of([each, each])
    assert batch.mask_T.tolist() == [False, True, False] * 2
    assert batch.lengths_S == (3, 3) and batch.tokens_T.tolist() == [5, 6, 7] * 2
