"""Responses that go on under new weights, from the command line: each token's log-prob is of the version that drew it.

The prompts fill a block of the engine's prefix cache, which must not serve what older weights computed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from mcore_rl.cli import main
from mcore_rl.controller.rollouts.stream import RolloutStream
from mcore_rl.controller.run import Run
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.rollout.episodes import Episode
from tests.support import prompt_files
from tests.support.ahead_runs import APART, lines, prompts, staleness
from tests.support.rollouts import chosen, reference_logprobs
from tests.support.run_task import nothing_left, overrides, write_task

pytestmark = [pytest.mark.timeout(1500), pytest.mark.tier("full"), pytest.mark.usefixtures("processes", "fast_ray")]

STEPS, BOUND, BATCH, LONGEST = 5, 2, 4, 90
BLOCK = 128  # tokens of a block of the prefix cache, on the CPU
TOLERANCE = 2e-5  # nats, in float32: vLLM's and transformers' order of summation
COLOCATED = ("actor.parallel.ep=1", "trainer.n_gpus_per_node=1")
# The engine is slower than the trainer, or draws more than one group at once: so something is under way.
MODES = {
    "in flight": ("trainer.mode=async", "rollout.max_num_seqs=2", *APART),
    "in turns": ("rollout.partial=true", "rollout.over_sampling=1", "rollout.max_num_seqs=6", *COLOCATED),
}


@dataclass
class Seen:
    """The episodes of each step, as it was trained."""

    episodes: dict[int, list[Episode]] = field(default_factory=dict)


def observed(task: Path, directory: Path, *more: str) -> Seen:
    """A run of ``mcore-rl train`` that exports the policy after every step, as ``hf/vSTEP``."""
    seen, following, guarding = Seen(), RolloutStream.next, Run.guard

    async def following_seen(self: RolloutStream, step: int) -> RolloutBatch:
        batch = await following(self, step)
        seen.episodes[step] = batch.episodes
        return batch

    async def exporting(self: Run, metrics: Mapping[str, float]) -> None:
        await guarding(self, metrics)
        await self.export(f"v{self.progress.step}")

    sizes = [
        f"data.train_batch_size={BATCH}", f"actor.ppo_mini_batch_size={BATCH // 2}", "actor.microbatch_tokens=1024",
        "data.max_prompt_length=150", f"data.max_response_length={LONGEST}",
        f"trainer.total_training_steps={STEPS}", f"async.max_staleness={BOUND}", "trainer.test_freq=2",
    ]  # fmt: skip
    watching = mock.patch.object(RolloutStream, "next", following_seen)
    with watching, mock.patch.object(Run, "guard", exporting), nothing_left():
        assert main(["train", *overrides(task, directory, *sizes, *more)]) == 0
    return seen


def long_prompts(task: Path) -> None:
    """Prompts of more tokens than a block has, each another one."""
    rows = [
        prompt_files.row("What is " + " + ".join(str((number + at) % 9) for at in range(44)) + "?", str(number))
        for number in range(BATCH * STEPS)
    ]
    for row in rows:
        row["data_source"] = "arithmetic"
    prompt_files.write(task / "train.parquet", rows)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_unfinished_goes_on_and_every_token_is_of_the_weights_that_drew_it(mode: str, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    task, directory = write_task(tmp_path / "task"), tmp_path / "run"
    long_prompts(task)
    seen = observed(task, directory, *MODES[mode])
    rows = lines(directory)
    assert max(most for _, most in staleness(rows)) <= BOUND
    drawn = prompts(directory, STEPS)
    assert len(drawn) == len({*drawn}) == BATCH * STEPS, "all prompts, each once"
    spans = [versions for step in range(1, STEPS + 1) for versions in versions_of(directory, step)]
    mixed = [versions for versions in spans if len(versions) > 1]
    assert mixed, "some response was under way when weights changed"
    assert all([*versions] == sorted(versions) for versions in spans)
    shares = [row["rollout/resumed_share"] for row in rows]
    assert sum(shares) * BATCH * 4 == pytest.approx(len(mixed))
    if mode == "in turns":
        assert sum(row["rollout/kept_tokens"] for row in rows) > 0 and rows[-1]["rollout/kept_tokens"] == 0
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows if row["rollout/staleness_max"] == 0)
    assert {each.row.number for episodes in seen.episodes.values() for each in episodes} == {*range(BATCH * STEPS)}
    assert worst_difference(task, directory, seen) < TOLERANCE


def versions_of(directory: Path, step: int) -> list[dict[int, int]]:
    """Of each response: version -> tokens, as its row says."""
    rows: list[dict[str, Any]] = pq.read_table(directory / "rollouts" / f"step_{step}.parquet").to_pylist()
    spans = [{each["version"]: each["num_tokens"] for each in json.loads(row["versions"])} for row in rows]
    assert [sum(each.values()) for each in spans] == [row["num_tokens"] for row in rows]
    return spans


def worst_difference(task: Path, directory: Path, seen: Seen) -> float:
    """Between a token's log-prob, and what transformers computes over all that was before it with the same weights."""
    places = {0: task / "model"} | {step: directory / "hf" / f"v{step}" for step in range(1, STEPS)}
    models = {
        v: AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager").eval()
        for v, place in places.items()
    }
    worst, moved = 0.0, Counter[bool]()
    for episode in (each for episodes in seen.episodes.values() for each in episodes):
        prompt, response = episode.segments
        assert len(prompt.tokens) > BLOCK and response.logprobs is not None
        by_version: dict[int, NDArray[np.float32]] = {
            version: chosen(
                reference_logprobs(models[version], prompt.tokens.tolist(), response.tokens.tolist()),
                response.tokens.tolist(),
            )
            for version in {span.version for span in response.versions}
        }
        for span in response.versions:
            place = slice(span.start, span.end)
            worst = max(worst, float(np.abs(response.logprobs[place] - by_version[span.version][place]).max(initial=0)))
            others = [each[place] for version, each in by_version.items() if version != span.version]
            moved.update(bool(np.abs(each - response.logprobs[place]).max(initial=0) > 0.01) for each in others)
    assert moved[True] > moved[False], "the versions agree, and nothing is proven"
    return worst
