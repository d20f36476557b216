"""``mcore-rl sample``: a person asks a model, and reads what it answers, drawn as in training and validation.

Answers go to the standard output and everything else to the standard error; no file is written.  Invariant: an answer
follows from weights, question, the question's number and ``rollout.seed``.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mcore_rl.config.bounds import file_violations
from mcore_rl.config.generate import GenerateConfig, sample_violations
from mcore_rl.config.rollout import yarn_reach
from mcore_rl.controller.lifecycle.messages import outcome
from mcore_rl.controller.programs.generate import draw, opened_pool, prepare_engines
from mcore_rl.controller.step.rollout_collection import sampling_of
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.responses import LENGTH, Generated
from mcore_rl.families.config_changes import ConfigChanges
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import DataError, refuse_if_any
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.protocol import SampleSource
from mcore_rl.tracking.messages import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT = "max_prompt_length"
RESPONSE = "max_response_length"
LENGTHS = {PROMPT: 2048, RESPONSE: 1024}  # tokens, where the model's context has room for both


async def run_sample(
    config: GenerateConfig, question: str | None, written: Collection[str] = (), check: bool = False
) -> int:
    """Answer ``question``; None: those that are typed, until the end of the input.  Returns the exit code 0.

    written: the keys that the user wrote, whose lengths stay as they are.  check: start nothing.

    Raises ConfigError and kin with everything that keeps it from starting, before any process does.
    """
    refuse_if_any([*sample_violations(config), *file_violations(config)])
    platform = detect(config.rollout.device)
    with _kept_if_it_fails() as folder:
        config = replace(with_lengths(config, written), out=str(folder / "answers.parquet"))
        config, tokenizer = prepare_engines(config, platform)
        asked = None if question is None else prompt_of(question, 0, config, tokenizer)
        if check:
            outcome("nothing is wrong. Nothing was started")
            return 0
        async with AsyncExitStack() as stack:
            with _working("starting Ray and the rollout engine"):
                pool = await stack.enter_async_context(opened_pool(config, platform))
            if asked is not None:
                await answer(pool, asked, config)
            else:
                await _converse(pool, config, tokenizer)
    return 0


def with_lengths(config: GenerateConfig, written: Collection[str]) -> GenerateConfig:
    """``config`` with the lengths that its user did not write: ``LENGTHS``, or what the model's context leaves."""
    changed = ConfigChanges.of(config.model).apply(read_config(Path(config.model.directory).expanduser()))
    _, model = model_of(changed)
    context = min(model.max_position_embeddings, yarn_reach(model) or model.max_position_embeddings)
    lengths = {name: getattr(config.data, name) for name in LENGTHS if {f"data.{name}", f"rollout.{name}"} & {*written}}
    if RESPONSE not in lengths:
        room = context - lengths[PROMPT] if PROMPT in lengths else context // 2
        lengths[RESPONSE] = max(1, min(LENGTHS[RESPONSE], room))
    if PROMPT not in lengths:
        lengths[PROMPT] = max(1, min(LENGTHS[PROMPT], context - lengths[RESPONSE]))
    return replace(config, data=replace(config.data, **lengths), rollout=replace(config.rollout, **lengths))


def prompt_of(question: str, number: int, config: GenerateConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompt of one message of the user.  DataError: the chat template refuses it, or it is too long."""
    return PromptSet.of_question(question, f"question {number}", config.data.prompts, tokenizer)


async def answer(source: SampleSource, asked: PromptSet, config: GenerateConfig) -> None:
    """Draw ``rollout.n`` answers to the one prompt of ``asked``, and show them."""
    rollout = config.rollout
    begun = time.monotonic()
    with _working("answering"):
        (answers,) = await draw(source, asked, rollout.n, sampling_of(rollout, rollout, rollout.seed), lambda _: None)
    seconds = time.monotonic() - begun
    for number, each in enumerate(answers, 1):
        outcome(each.text if rollout.n == 1 else f"[{number}] {each.text}")
    say(_summary(answers, seconds, rollout.max_response_length), "dim")


def _summary(answers: list[Generated], seconds: float, limit: int) -> str:
    tokens = sum(each.num_tokens for each in answers)
    cut = sum(each.finish == LENGTH for each in answers)
    said = f"({tokens:,} tokens in {seconds:.1f} s"
    if cut:
        said += f"; {cut} of {len(answers)}" if len(answers) > 1 else ""
        said += f"{'' if len(answers) > 1 else ';'} cut off at data.max_response_length={limit}"
    return f"{said})"


async def _converse(source: SampleSource, config: GenerateConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Answer each line that is typed, by itself; a question that cannot be asked is told of, and the next is read."""
    console = Console(stderr=True)
    say("Each line is a question of its own; Ctrl-D ends.", "dim")
    number = 0
    while True:
        console.print("> ", end="", markup=False, highlight=False)
        line = await _typed_line()
        if not line:
            console.print()
            return
        if not line.strip():
            continue
        try:
            await answer(source, prompt_of(line.strip(), number, config, tokenizer), config)
        except DataError as error:
            say(str(error))
        number += 1


async def _typed_line() -> str:
    """The next line of the terminal, "" at its end; Ctrl-C ends the wait, as a thread's could not be."""
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sys.stdin)
    return sys.stdin.readline()


@contextmanager
def _working(text: str) -> Iterator[None]:
    """While active: ``text`` and the seconds, on a terminal; elsewhere a line at the beginning."""
    console = Console(stderr=True)
    if not console.is_terminal:
        say(text)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(text, total=None)
        yield


@contextmanager
def _kept_if_it_fails() -> Iterator[Path]:
    """A folder for the engine's logs, which stays after an error: its message names one of them."""
    folder = Path(tempfile.mkdtemp(prefix="mcore-rl-sample-"))
    try:
        yield folder
    except Exception as error:
        if not any(folder.glob("*/*.log")) or isinstance(error, DataError):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
