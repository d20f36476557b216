"""What is said of an exception of vLLM's, and of a process of its that died."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from pathlib import Path

import pytest

from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.vllm.engine.liveness import SETTLE_S, Liveness, words


class EngineGenerateError(Exception):
    """As vLLM's: without words."""


def raised(*errors: Exception) -> Exception:
    """The last of ``errors``, each the cause of the next."""
    for cause, error in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[-1]


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([ValueError("half a character"), EngineGenerateError()], "ValueError: half a character"),
        (
            [ValueError("half a character"), EngineGenerateError(), EngineGenerateError()],
            "ValueError: half a character",
        ),
        ([ValueError("cause"), EngineGenerateError("own words")], "EngineGenerateError: own words"),
        ([EngineGenerateError()], "EngineGenerateError: "),
    ],
)
def test_an_error_without_words_is_told_by_its_cause(errors: list[Exception], said: str) -> None:
    assert words(raised(*errors)) == said


def test_a_cause_that_is_written_late_is_told(tmp_path: Path) -> None:
    """On a busy machine vLLM writes what a worker died of long after the worker is gone."""
    log = tmp_path / "log"
    log.write_text("")

    async def run() -> None:
        liveness = Liveness("rollout-0", log, [], lambda: False)
        watch = asyncio.create_task(liveness.watch())
        process.kill()
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(3 * SETTLE_S)
        log.write_text("ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.\n")
        await watch

    with (
        subprocess.Popen(["sleep", "600"]) as process,
        pytest.raises(DeadEngineError, match="rollout-0 died while serving: vLLM's VllmWorker-1 was killed by SIGKILL"),
    ):
        asyncio.run(run())
