"""One question through a real engine against transformers' greedy answer; lengths, prompts, what is shown."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.generate import GenerateConfig
from mcore_rl.controller.programs.sample import answer, prompt_of, with_lengths
from mcore_rl.ground.errors import DataError
from mcore_rl.rollout.episodes import FinishReason
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from tests.support.greedy_llama import TOKENIZER, asked_tokens, greedy, write_llama
from tests.support.rollouts import SIZES
from tests.support.vllm_device import ON_VLLM_DEVICE

LENGTH = 12
SMALL = ["rollout.dtype=float32", ON_VLLM_DEVICE["rollout"], f"rollout.kv_cache_memory_bytes={16 << 20}"]


def config_of(*words: str) -> GenerateConfig:
    return compose(GenerateConfig, "generate", words)


def test_a_prompt_has_the_tokens_of_transformers(tmp_path: Path) -> None:
    for question in ("Tom has 3 apples.", "two\nlines, a tab\t and <|im_start|>", "日本?"):
        prompt = prompt_of(question, 7, config_of(), TOKENIZER)
        assert len(prompt) == 1 and list(prompt[0].tokens) == asked_tokens(question)
        assert prompt[0].id == "question 7:0"
    with pytest.raises(DataError, match=r"1 prompt has more than data.max_prompt_length=8 tokens"):
        prompt_of("Tom has 3 apples.", 0, config_of("data.max_prompt_length=8"), TOKENIZER)


@pytest.mark.parametrize(
    ("context", "words", "lengths"),
    [
        (32768, {}, (2048, 1024)),
        (2048, {}, (1024, 1024)),
        (64, {}, (32, 32)),
        (64, {"data.max_response_length": 24}, (40, 24)),
        (64, {"data.max_prompt_length": 60}, (60, 4)),
        (64, {"data.max_prompt_length": 40, "data.max_response_length": 99}, (40, 99)),  # refused later
        (64, {"data.max_response_length": 99}, (1, 99)),
    ],
)
def test_lengths_that_nobody_wrote_fit_the_model(
    tmp_path: Path, context: int, words: dict[str, int], lengths: tuple[int, int]
) -> None:
    size = dict(SIZES) | dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(size | {"max_position_embeddings": context}))
    config = with_lengths(config_of(f"model.path={tmp_path}", *(f"{key}={n}" for key, n in words.items())), words)
    assert (config.data.max_prompt_length, config.data.max_response_length) == lengths
    assert (config.rollout.max_prompt_length, config.rollout.max_response_length) == lengths


class Scripted:
    """Answers with an escape sequence; every second answer is cut off."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        assert sampling.max_tokens == 4 and sampling.seed == 5
        for request in requests:
            yield Sample(
                prompt_id=request.prompt.id,
                index=request.index,
                tokens=np.zeros(3, dtype=np.int32),
                logprobs=np.zeros(3, dtype=np.float32),
                versions=(),
                finish=FinishReason.length if request.index % 2 else FinishReason.stop,
                text=f"it is [bold]{request.index}\x1b[2J",
            )


def test_answers_are_on_the_standard_output_and_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for n, shown, said in (
        (1, "it is [bold]0\\x1b[2J\n", "(3 tokens in "),
        (
            2,
            "[1] it is [bold]0\\x1b[2J\n[2] it is [bold]1\\x1b[2J\n",
            "; 1 of 2 cut off at data.max_response_length=4)",
        ),
    ):
        config = config_of("data.max_response_length=4", "rollout.seed=5", f"rollout.n={n}")
        asyncio.run(answer(Scripted(), prompt_of("Why?", 0, config, TOKENIZER), config))  # type: ignore[arg-type]
        out, err = capsys.readouterr()
        assert out == shown and said in err


@pytest.mark.tier("ci")
@pytest.mark.timeout(400)
def test_questions_that_are_typed_get_the_greedy_answers_of_transformers(tmp_path: Path, processes: None) -> None:
    """By the command, on a terminal: two questions and one that is too long, and Ctrl-D."""
    model = write_llama(tmp_path / "model")
    questions = ["Tom has 3 apples.", "2 + 3?"]
    ours, theirs = os.openpty()
    words = [*SMALL, "rollout.temperature=0", f"data.max_response_length={LENGTH}", "data.max_prompt_length=64"]
    command = [sys.executable, "-m", "mcore_rl.cli", "sample", str(model), *words]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        os.write(ours, "\n".join([questions[0], "", "Tom " * 70, questions[1], "\x04"]).encode())
        out, err = asking.communicate()
    os.close(ours)
    os.close(theirs)
    assert asking.returncode == 0, err
    answers = [greedy(model, asked_tokens(each), LENGTH) for each in questions]
    assert out == "".join(TOKENIZER.decode(each, skip_special_tokens=True) + "\n" for each in answers)
    assert "more than data.max_prompt_length=64 tokens" in err and "cut off at data.max_response_length=12" in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is written"
