"""A run of agents from the command line, with vLLM and Megatron: several turns, real tools, and the tokens as drawn.

The model knows nothing, so a parser of the test's own reads a call in what it says, and many tokens end a turn.  What
the engines drew turn by turn, each time with the conversation so far as the prompt, the trainer scores as one sequence:
the log-probs agree only if its tokens are those that were drawn, and those that stood before each.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import main
from tests.support import run_task
from tests.support.vllm_device import ON_VLLM_DEVICE

TOLERANCE = 1e-5  # of float32 log-probs, as without agents
TURNS = 3
PARSER = """
def read_calls(text):
    if len(text) % 5 == 0:
        return []
    said = "".join(letter for letter in text if letter.isalnum())
    return [
        {"name": "calculator", "arguments": {"expression": f"{len(text)} * 7"}},
        {"name": "python", "arguments": {"code": f"print({said!r} + '<|end|>')"}},
        {"name": "nonesuch", "arguments": {}},
    ]
"""


def agent_settings(folder: Path) -> list[str]:
    """Of ``train`` and of ``generate``."""
    return [
        "rollout.agent.default_agent_loop=tool_agent", "rollout.agent.tools=[calculator,python]",
        f"rollout.agent.tool_parser={folder}/parser.py:read_calls", f"rollout.agent.max_turns={TURNS}",
        "data.max_response_length=400", "model.config_overrides.max_position_embeddings=512",
        f"rollout.stop_token_ids=[{','.join(map(str, range(3, 200, 2)))}]",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    task = run_task.write_task(folder)
    (folder / "parser.py").write_text(PARSER)
    settings = run_task.overrides(
        task, folder / "run", *agent_settings(folder),
        "trainer.total_training_steps=2", "trainer.save_rollouts=true", "trainer.test_freq=2",
    )  # fmt: skip
    said = io.StringIO()
    with redirect_stderr(said):
        assert main(["train", *settings]) == 0
    assert "the chat template does not write the tools' descriptions" in said.getvalue()
    return folder / "run"


@pytest.fixture(scope="module")
def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.tier("test")
def test_what_was_drawn_turn_by_turn_is_scored_alike_as_one_sequence(metrics: list[dict[str, Any]]) -> None:
    steps = [each for each in metrics if "rollout/logprob_diff_max" in each]
    assert len(steps) == 2
    for step in steps:
        assert step["agent/turns_max"] == TURNS and step["agent/turns_mean"] > 1.5
        assert step["rollout/logprob_diff_max"] < TOLERANCE


def test_metrics_say_what_the_agents_did(metrics: list[dict[str, Any]]) -> None:
    step = metrics[-1]
    assert step["agent/failed_call_share"] == pytest.approx(1 / 3)  # of three calls, one has no such tool
    assert 0 < step["rollout/prefix_hit_share"] < 1, "some turns are longer than a block of the cache"
    assert step["agent/calls_mean"] > 1 and step["agent/tool_s_max"] > 0 and 0 < step["agent/trained_share"] < 0.5
    ends = {key.removeprefix("agent/end/"): value for key, value in step.items() if key.startswith("agent/end/")}
    assert sum(ends.values()) == pytest.approx(1) and "max_turns" in ends
    assert set(ends) <= {"answered", "max_turns", "max_response_length"}


def test_samples_show_the_conversation(run_dir: Path) -> None:
    rows = pq.read_table(run_dir / "rollouts" / "step_1.parquet").to_pylist()
    long = [row for row in rows if row["turns"] == TURNS]
    assert long and {row["reason"] for row in long} >= {"max_turns"}
    segments = json.loads(long[0]["segments"])
    assert [each["author"] for each in segments[:4]] == ["prompt", "model", "tool", "model"]
    product, printed, unknown = segments[2]["text"].split("\n")
    assert int(product) % 7 == 0 and printed.endswith("<|end|>")
    assert unknown == "Error: There is no tool 'nonesuch'. The tools are: calculator, python."


def test_generate_and_evaluate_have_the_numbers_of_the_runs_validation(
    run_dir: Path, metrics: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same checkpoint, prompts, sampling and agents, and the grader of the run: the same episodes and scores."""
    folder = run_dir.parent
    out, numbers = folder / "answers.parquet", folder / "numbers.json"
    engine = ["rollout.kv_cache_memory_bytes=16777216", "rollout.max_num_seqs=16", "data.max_prompt_length=64"]
    settings = [*agent_settings(folder), *engine, ON_VLLM_DEVICE["rollout"], "rollout.dtype=float32"]
    files = [f"data.files=[{folder}/val.parquet]", f"out={out}", "rollout.temperature=0"]
    assert main(["generate", f"model.path={run_dir}/hf/final", *files, *settings]) == 0
    assert "agents: " in capsys.readouterr().out
    graded = [f"path={out}", f"custom_reward_function.path={folder}/reward.py", f"out={numbers}"]
    assert main(["evaluate", *graded]) == 0
    report = json.loads(numbers.read_text())["data_sources"]["arithmetic"]
    validated = metrics[-1]
    assert report["metrics"]["score"]["value"] == pytest.approx(validated["val/arithmetic/reward"])
    assert report["num_tokens"] == validated["val/arithmetic/response_length"]
    assert report["truncated"] == pytest.approx(validated["val/arithmetic/clip_share"])
    rows = pq.read_table(out).to_pylist()
    drawn = {row["prompt_id"]: row for row in pq.read_table(run_dir / "validation" / "step_2.parquet").to_pylist()}
    for number, row in enumerate(rows):
        there = drawn[f"val.parquet:{number}"]
        assert (row["end_reasons"], row["num_turns"]) == ([there["reason"]], [there["turns"]])
        told = [(each["content"], each["num_tokens"]) for each in row["response_turns"][0]]
        after = json.loads(there["segments"] or "[]")[1:]  # one turn alone has no segments, in both files
        assert told == [(each["text"], each["num_tokens"]) for each in after]
