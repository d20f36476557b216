"""Training from Python, for notebooks and scripts: ``mcore_rl.train``, ``sft``, ``prefer`` and ``reward``.

They compose, check and run what the commands of these names do, by the same functions.  ``train`` also takes rows and
reward functions as they are; it writes them into the run's directory and names these files in the configuration.

Where an event loop runs already, as in a notebook, the run has one in a thread of its own; there, SIGTERM and SIGUSR1
are the notebook's.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.commands.programs import PROGRAMS
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.reward import Completions
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.tracking.jsonl import read_metrics
from mcore_rl.tracking.run_owner import KEY, demand_free

if TYPE_CHECKING:  # a mistake in the configuration is said before torch and Ray are imported
    from mcore_rl.controller.training_run import Callback

RunSettings = Mapping[str, Any] | Sequence[str]
UserReward = Callable[..., Any]
# ``datasets.Dataset``, a list of dicts or whatever else gives rows; or a path or Hub id, or several.
GivenData = Path | str | Iterable[Mapping[str, Any]] | Iterable[Path | str]
INPUTS = "inputs"  # folder of a run's directory: the rows and reward functions of a call
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

    def _repr_html_(self) -> str:
        """The curves, as a notebook shows the value of a cell; in a frame, whose style and scripts are its own."""
        from mcore_rl.tracking.curves import curves
        from mcore_rl.tracking.page import page
        from mcore_rl.tracking.run_files import read_run

        shown = page(self.directory.name, [curves([read_run(self.directory)])])
        style = "width:100%;height:32em;border:0"
        return f'<iframe srcdoc="{escape(shown)}" sandbox="allow-scripts" style="{style}"></iframe>'


def train(
    config: RunSettings | RunConfig = (),
    *,
    model: Path | str | Mapping[str, Any] | None = None,
    dataset: GivenData | None = None,
    eval_dataset: GivenData | None = None,
    reward: UserReward | Sequence[UserReward] | Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    config_dir: Path | str | None = None,
    config_name: str | None = None,
    **settings: Any,
) -> RunResult:
    """Reinforcement learning, as ``mcore-rl train`` does it.

    Args:
        config: overrides as on the command line, a dictionary of keys and values (``{"trainer.save_freq": 10}``), or a
            RunConfig; then only callbacks may be given too.
        model: a directory or an id of the Hub; ``model.path``.
        dataset, eval_dataset: rows with a column ``prompt``, or files of rows; see ``GivenData``.
        reward: a function or several, of TRL's signature ``f(completions, **columns)`` or verl's; also lambdas, and
            functions of a notebook.  Of several, the reward is the weighted sum (``custom_reward_function.weights``).
        callbacks: called with (step, metrics) after each step, and after a validation before the first, in the thread
            of the run, which waits for them.  One that returns True ends the run after that step, with a checkpoint.
        config_dir, config_name: as the options of that name; ``config`` comes on top of that file.
        settings: further keys by their group: ``algorithm="dr_grpo"``, ``rollout={"n": 8}``.

    Raises:
        McoreRLError: a mistake of the user's, all violations at once, or a run that cannot go on; see docs/from_trl.md.
        KeyboardInterrupt: Ctrl-C, or the notebook's stop; all processes of the run have ended.
        Whatever a callback raises; the run ends then, without another checkpoint.
    """
    groups = {"model": _group("path", model), "reward": reward if isinstance(reward, Mapping) else None}
    more = settings | {name: group for name, group in groups.items() if group is not None}
    functions = _listed(None if isinstance(reward, Mapping) else reward)
    if isinstance(config, RunConfig):
        given = {"dataset": dataset, "eval_dataset": eval_dataset, "reward": reward}
        beside = [*more, *(name for name, each in given.items() if each is not None)]
        remedy = "Set it in the configuration"
        refuse_if_any([Violation(name, "", "stands beside a whole configuration", remedy) for name in beside])
        run = config
    else:
        run = _composed("train", [*_overrides(config), *overrides_of(more)], config_dir, config_name)
        run, files = _with_inputs(run, dataset, eval_dataset, functions)
        _write(files, Path(run.trainer.default_local_dir))
    return _run("train", run, callbacks)


def sft(
    config: RunSettings | SftConfig = (),
    *,
    callbacks: Sequence[Callback] = (),
    config_dir: Path | str | None = None,
    config_name: str | None = None,
) -> RunResult:
    """Supervised fine-tuning, as ``mcore-rl sft`` does it; arguments and errors are those of ``train``."""
    return _run("sft", _composed("sft", config, config_dir, config_name), callbacks)


def prefer(
    config: RunSettings | PreferConfig = (),
    *,
    callbacks: Sequence[Callback] = (),
    config_dir: Path | str | None = None,
    config_name: str | None = None,
) -> RunResult:
    """Learning from preferred answers, as ``mcore-rl prefer`` does it; arguments and errors are those of ``train``."""
    return _run("prefer", _composed("prefer", config, config_dir, config_name), callbacks)


def reward(
    config: RunSettings | RewardTrainingConfig = (),
    *,
    callbacks: Sequence[Callback] = (),
    config_dir: Path | str | None = None,
    config_name: str | None = None,
) -> RunResult:
    """Training a reward model, as ``mcore-rl reward`` does it; arguments and errors are those of ``train``."""
    return _run("reward", _composed("reward", config, config_dir, config_name), callbacks)


def overrides_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """``values``, nested groups with their settings, as overrides of the command line."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from overrides_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_written(value)}"


def _written(value: object) -> str:
    """A value in hydra's syntax."""
    if hasattr(value, "tolist"):  # of NumPy or torch
        value = value.tolist()
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
    if isinstance(config, PROGRAMS[program].schema):
        return config
    directory = None if config_dir is None else Path(config_dir)
    return PROGRAMS[program].composed(_overrides(config), directory, config_name)


def _overrides(config: object) -> list[str]:
    if isinstance(config, Mapping):
        return [*overrides_of(config)]
    if isinstance(config, Sequence) and not isinstance(config, str) and all(isinstance(each, str) for each in config):
        return [*config]
    remedy = 'Write {"model.path": MODEL}, and other keys as docs/from_trl.md has them'
    shown = config if isinstance(config, str) else type(config).__name__
    raise ConfigError([Violation("config", shown, "is no dictionary of settings", remedy)])


def _with_inputs(
    run: RunConfig, dataset: GivenData | None, eval_dataset: GivenData | None, functions: Sequence[UserReward]
) -> tuple[RunConfig, dict[Path, bytes]]:
    """``run`` with the rows and the functions of a call as files of its directory; and these files, to be written.

    Raises ConfigError, with everything that is wrong with them and with ``run``.
    """
    given: list[tuple[str, str, Any]] = [
        ("dataset", "data.train_files", dataset),
        ("eval_dataset", "data.val_files", eval_dataset),
        ("reward", "custom_reward_function.path", functions or None),
    ]
    named = [(name, key) for name, key, value in given if value is not None and key in run.written]
    wrong = [Violation(name, "", f"and {key} say the same", "Write one of the two") for name, key in named]
    folder = Path(run.trainer.default_local_dir).expanduser().resolve() / INPUTS
    data = run.data
    custom = run.custom_reward_function
    texts = False
    files = dict[Path, bytes]()
    made = set[str]()
    if functions:
        from mcore_rl.rewards.by_value import functions_file

        made.add("custom_reward_function.path")
        with _gathered(wrong):
            of_functions = functions_file(functions, folder)
            files |= of_functions.files
            custom = replace(custom, path=str(of_functions.path), functions=of_functions.names)
    for argument, key, rows in given[:2]:
        if rows is None:
            continue
        paths = _files(rows)
        if paths is None:
            from mcore_rl.data.given_rows import rows_file

            made.add(key)
            split = "train" if argument == "dataset" else "val"
            with _gathered(wrong):
                of_rows = rows_file(rows, folder, argument=argument, split=split, prompt_key=data.prompt_key)
                files[of_rows.path] = of_rows.data
                paths = [str(of_rows.path)]
                texts = texts or of_rows.texts
        names = paths or []
        data = replace(data, train_files=names) if argument == "dataset" else replace(data, val_files=names)
    if texts and custom.path is not None and "custom_reward_function.completions" not in run.written:
        custom = replace(custom, completions=Completions.text)
    run = replace(run, data=data, custom_reward_function=custom)
    if made or wrong:
        with _gathered(wrong):
            demand_free(folder.parent)
        told = made | {each.key for each in wrong}
        others = PROGRAMS["train"].problems(run)
        wrong += [each for each in others if each.key.partition("[")[0] not in told]
    refuse_if_any(wrong)
    return run, files


@contextmanager
def _gathered(wrong: list[Violation]) -> Iterator[None]:
    """Add the violations of a ConfigError in the block to ``wrong``."""
    try:
        yield
    except ConfigError as error:
        wrong += error.violations


def _write(files: Mapping[Path, bytes], directory: Path) -> None:
    """Write each file that is not there as it is to be; equal processes may do so at once."""
    for path, data in files.items():
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() and path.read_bytes() == data:
                continue
            try:
                new.write_bytes(data)
                new.replace(path)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError([Violation(KEY, directory, problem, "Write another path")]) from error


def _files(rows: GivenData) -> list[str] | None:
    """The files that ``rows`` names; None where it is the rows themselves."""
    if isinstance(rows, str | Path):
        return [str(rows)]
    if isinstance(rows, list | tuple) and rows and all(isinstance(each, str | Path) for each in rows):
        return [*map(str, rows)]
    return None


def _group(key: str, value: Any) -> Any:
    """The settings of a group for which its most important one may stand alone."""
    return value if value is None or isinstance(value, Mapping) else {key: str(value)}


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [*value] if isinstance(value, list | tuple) else [value]


def _run(program: str, config: RunConfig | OfflineConfig, callbacks: Sequence[Callback]) -> RunResult:
    """Check ``config``, import what is slow to import, and run it."""
    run = PROGRAMS[program].ready(config)
    _, act = PROGRAMS[program].acts()
    directory = Path(run.trainer.default_local_dir).resolve()
    return RunResult(directory, finished=_ended(act(run, callbacks)) == 0)


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
