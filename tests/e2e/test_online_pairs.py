"""Runs that learn from pairs of their own samples, from the command line: losses by transformers, learning, a kill.

Two training processes with the experts split over them, and a real vLLM.  ``online_dpo`` keeps the first weights as its
reference, ``spin`` takes the policy every third step; the data's answers are made of words that the reward likes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from signal import SIGKILL
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.config.data import DataConfig
from mcore_rl.controller.rollouts.recording import read_record
from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.data.prompts import PromptRow, PromptSet
from mcore_rl.rollout.episodes import Episode
from mcore_rl.tracking.jsonl import read_metrics
from tests.e2e.test_learning import LIFT, REWARD, SETTINGS, STEPS
from tests.support import prompt_files
from tests.support.crash_runs import bits_of, doing, nothing_survives, start
from tests.support.run_task import overrides, write_task

pytestmark = [pytest.mark.timeout(1800), pytest.mark.tier("full"), pytest.mark.usefixtures("processes")]
BETA, MOVES, CHECKED = 0.1, 3, 6  # of step 6 the policy is that after step 5, and the reference that after step 3
TOLERANCE = 1e-5  # two implementations in float32: beta times sums of twelve log-probs, each right to 1e-6
PAIRS = ("actor.loss_mode=preference", "actor.loss_agg_mode=seq_mean_token_sum")
ALGORITHMS = {
    "online_dpo": ("algorithm=online_dpo", "rollout.n=8"),
    "spin": ("algorithm=spin", "rollout.n=2", f"algorithm.ref_update_freq={MOVES}"),
}
LIKED = (" sells", " shells", " stamps", " wins", " pens")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task, whose rows have answers of eleven tokens in ``extra_info``."""
    made, draw = write_task(tmp_path_factory.mktemp("pairs") / "task"), Random(0)
    (made / "reward.py").write_text(REWARD)
    rows = [prompt_files.row(each.question, each.answer, data_source="arithmetic") for each in problems()]
    for each in rows:
        each["extra_info"] |= {"answer": "Zoe" + "".join(draw.choices(LIKED, k=10))}
    prompt_files.write(made / "train.parquet", rows)
    return made


def problems() -> Sequence[Any]:
    return list(generate(1, 40, 0, Split.train))


def run(words: Sequence[str | Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def directory_of(task: Path, name: str) -> Path:
    """Of a run of ten steps, one update each, which keeps everything; made once."""
    directory = task.parent / name
    if not directory.exists():
        kept = ("trainer.save_freq=1", "trainer.record_rollouts=true", "actor.ppo_mini_batch_size=16")
        run(["train", *overrides(task, directory, *SETTINGS, *ALGORITHMS[name], *PAIRS, *kept)])
    return directory


class Scores:
    """The log-prob of a response by transformers, one at a time."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def of(self, asked: Sequence[int], said: Sequence[int]) -> float:
        with torch.no_grad():
            logits = self._model(torch.tensor([[*asked, *said]])).logits[0].double()
        logprobs = torch.log_softmax(logits, dim=-1)[len(asked) - 1 : -1]
        return float(logprobs.gather(1, torch.tensor(list(said))[:, None]).sum())


def weights_after(task: Path, directory: Path, step: int) -> Scores:
    if step == 0:
        return Scores(task / "model")
    out = directory / f"exported-{step}"
    run(["convert", "to-hf", "--run", directory / "checkpoints" / f"step_{step}", "--out", out])
    return Scores(out)


def responses(episode: Episode) -> tuple[list[int], list[int]]:
    prompt, said = episode.segments
    return prompt.tokens.tolist(), said.tokens.tolist()


def pairs_of(name: str, episodes: Sequence[Episode], task: Path) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, preferred, other) by hand: the best and the worst of each prompt, or each behind the row's answer."""
    tokenizer, made = AutoTokenizer.from_pretrained(task / "model"), []
    groups = {each.group: [x for x in episodes if x.group == each.group] for each in episodes}
    for group in groups.values():
        if name == "spin":
            text = group[0].row.extra_info["answer"]
            answer = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            made += [(responses(each)[0], answer, responses(each)[1]) for each in group]
            continue
        ranked = sorted(group, key=lambda each: each.reward)
        best = next(each for each in group if each.reward == ranked[-1].reward)
        if best.reward > ranked[0].reward:
            made.append((responses(best)[0], responses(best)[1], responses(ranked[0])[1]))
    return made


@pytest.mark.parametrize("name", ALGORITHMS)
def test_held_out_reward_rises(task: Path, name: str) -> None:
    rows = read_metrics(directory_of(task, name) / "metrics.jsonl")
    assert rows[-1]["val/arithmetic/reward"] > rows[0]["val/arithmetic/reward"] + LIFT
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:]), "answers of the data are not measured"
    assert len(rows) == STEPS + 1 and all(row["pairs/count"] > 0 for row in rows[1:])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_loss_of_a_step_is_that_of_transformers(task: Path, name: str) -> None:
    """After the reference of ``spin`` has moved once; without the move, its loss would be another by far."""
    directory = directory_of(task, name)
    prompts = PromptSet.load(
        [task / "train.parquet"], DataConfig(), prompt_files.tokenizer(), max_samples=None, title="data.train_files"
    )

    def row_of(number: int, epoch: int) -> PromptRow:
        return replace(prompts[number], epoch=epoch)

    batch, _ = read_record(directory, CHECKED, row_of)
    pairs = pairs_of(name, batch.episodes, task)
    policy, first = weights_after(task, directory, CHECKED - 1), weights_after(task, directory, 0)
    moved = weights_after(task, directory, MOVES)
    logged = {row["step"]: row for row in read_metrics(directory / "metrics.jsonl")}[CHECKED]
    losses = {}
    for which, reference in (("first", first), ("moved", moved)):
        gains = [
            [policy.of(asked, said) - reference.of(asked, said) for said in (preferred, other)]
            for asked, preferred, other in pairs
        ]
        margins = BETA * torch.tensor([mine - other for mine, other in gains], dtype=torch.float64)
        losses[which] = float(-logsigmoid(margins).mean())
    right, wrong = ("moved", "first") if name == "spin" else ("first", "moved")
    assert logged["pairs/count"] == len(pairs)
    assert logged["actor/loss"] == pytest.approx(losses[right], abs=TOLERANCE)
    assert abs(logged["actor/loss"] - losses[wrong]) > 1000 * TOLERANCE


def test_a_run_that_is_killed_after_the_reference_moved_ends_with_the_same_bits(task: Path, tmp_path: Path) -> None:
    """Two updates a step; killed in the third step, of which the reference is the policy after the second."""
    words = (*ALGORITHMS["spin"], *PAIRS, "algorithm.ref_update_freq=1", "actor.use_kl_loss=false")
    with nothing_survives(tmp_path) as traces:
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        assert start(task, whole, traces, *words).finish() == 0
        struck = start(task, killed, traces, *words)
        struck.strike_at(doing(3, "train_step"), "controller", SIGKILL)
        assert struck.finish() == -SIGKILL
        again = start(task, killed, traces, *words)
        assert again.finish() == 0, again.said()
        assert bits_of(whole) == bits_of(killed)
        assert any("actor" in name for name in bits_of(whole).states)
