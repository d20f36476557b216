"""Training from Python, for notebooks and scripts: ``mcore_rl.train``, ``sft``, ``prefer`` and ``reward``.

They compose, check and run what the commands of these names do, by the same functions.  Where an event loop
runs already, as in a notebook, the run has one in a thread of its own; there, SIGTERM and SIGUSR1 are the notebook's.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.commands.programs import PROGRAMS
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.tracking.jsonl import read_metrics

if TYPE_CHECKING:  # a mistake in the configuration is said before torch and Ray are imported
    from mcore_rl.controller.training_run import Callback

RunSettings = Mapping[str, Any] | Sequence[str]
_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
_WORDS = {"true", "false", "null", "nan", "inf", "yes", "no", "on", "off"}


@dataclass(frozen=True)
class RunResult:
    """A run that has ended.

    directory: of the run.  finished: False if a callback or a signal ended it early; the same call goes on from there.
    """

    directory: Path
    finished: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of its metrics.jsonl: the step, and numbers by the names of docs/metrics.md."""
        return read_metrics(self.directory / "metrics.jsonl")

    @property
    def report(self) -> Path:
        """The page of the run, report.html."""
        return self.directory / "report.html"

    @property
    def weights(self) -> Path:
        """The Hugging Face checkpoint of its last weights, if it is finished."""
        return self.directory / "hf" / "final"


def train(
    config: RunSettings | RunConfig = (),
    *,
    callbacks: Sequence[Callback] = (),
    config_dir: Path | str | None = None,
    config_name: str | None = None,
) -> RunResult:
    """Reinforcement learning, as ``mcore-rl train`` does it.

    Args:
        config: overrides as on the command line, a dictionary of groups and values, or a whole configuration.
        callbacks: called with (step, metrics) after each step, and after a validation before the first, in the thread
            of the run, which waits for them.  One that returns True ends the run after that step, with a checkpoint.
        config_dir, config_name: as the options of that name; ``config`` comes on top of that file.

    Raises:
        McoreRLError: a mistake of the user's, all violations at once, or a run that cannot go on; see docs/from_trl.md.
        KeyboardInterrupt: Ctrl-C, or the notebook's stop; all processes of the run have ended.
        Whatever a callback raises; the run ends then, without another checkpoint.
    """
    run = _composed("train", config, config_dir, config_name)
    from mcore_rl.controller.programs.train import run_training

    return _result(run, run_training(run, callbacks))


def sft(
    config: RunSettings | SftConfig = (),
    *,
    callbacks: Sequence[Callback] = (),
    config_dir: Path | str | None = None,
    config_name: str | None = None,
) -> RunResult:
    """Supervised fine-tuning, as ``mcore-rl sft`` does it; arguments and errors are those of ``train``."""
    run = _composed("sft", config, config_dir, config_name)
    from mcore_rl.controller.programs.sft import SFT

    return _result(run, SFT.train(run, callbacks))


def prefer(
    config: RunSettings | PreferConfig = (),
    *,
    callbacks: Sequence[Callback] = (),
    config_dir: Path | str | None = None,
    config_name: str | None = None,
) -> RunResult:
    """Learning from preferred answers, as ``mcore-rl prefer`` does it; arguments and errors are those of ``train``."""
    run = _composed("prefer", config, config_dir, config_name)
    from mcore_rl.controller.programs.prefer import PREFER

    return _result(run, PREFER.train(run, callbacks))


def reward(
    config: RunSettings | RewardTrainingConfig = (),
    *,
    callbacks: Sequence[Callback] = (),
    config_dir: Path | str | None = None,
    config_name: str | None = None,
) -> RunResult:
    """Training a reward model, as ``mcore-rl reward`` does it; arguments and errors are those of ``train``."""
    run = _composed("reward", config, config_dir, config_name)
    from mcore_rl.controller.programs.reward import REWARD

    return _result(run, REWARD.train(run, callbacks))


def overrides_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """``values``, nested groups with their settings, as overrides of the command line."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from overrides_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_written(value)}"


def _written(value: object) -> str:
    """A value in hydra's syntax."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Enum():
            return _written(value.value)
        case int() | float():
            return repr(value)
        case Mapping():
            return "{" + ",".join(f"{name}:{_written(each)}" for name, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(_written, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = re.sub(r"(\\*)'", lambda quote: f"{quote[1] * 2}\\'", text)
    return "'" + re.sub(r"\\+$", lambda last: last[0] * 2, escaped) + "'"


def _composed(program: str, config: Any, config_dir: Path | str | None, config_name: str | None) -> Any:
    schema = PROGRAMS[program].schema
    if not isinstance(config, schema):
        overrides = list(overrides_of(config) if isinstance(config, Mapping) else map(str, config))
        directory = None if config_dir is None else Path(config_dir)
        config = PROGRAMS[program].composed(overrides, directory, config_name)
    return PROGRAMS[program].ready(config)


def _result(run: RunConfig | OfflineConfig, running: Coroutine[Any, Any, int]) -> RunResult:
    directory = Path(run.trainer.default_local_dir).resolve()
    return RunResult(directory, finished=_ended(running) == 0)


def _ended(running: Coroutine[Any, Any, int]) -> int:
    """The exit code of a program.  Its loop is this thread's, or another thread's where this one has a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(running)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    ended: Future[int] = Future()

    async def in_thread() -> int:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await running

    def work() -> None:
        try:
            ended.set_result(asyncio.run(in_thread()))
        except BaseException as error:  # noqa: BLE001  the caller's thread raises it
            ended.set_exception(error)

    thread = threading.Thread(target=work, name="mcore_rl run")
    thread.start()
    try:
        return ended.result()
    except KeyboardInterrupt:
        loop, task = started.result()
        loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()
