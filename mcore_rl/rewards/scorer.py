"""Grades in parallel: the scorer sends episodes to its own processes, each of which grades one at a time.

The caller awaits each score on its event loop, so that grading overlaps generation.  One thread serves each process.

The invariant: whatever a grader does, only its own response gets ``error_score``, and ``counts`` has an entry.  The
scorer replaces a process that hangs or ends, and no process outlives the scorer or the program.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import IO, Self

from mcore_rl.config.reward import CustomRewardFunction, RewardConfig
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.ground.secrets import without_secrets
from mcore_rl.processes.guarding import AskedProgram
from mcore_rl.rewards.code import WEAK, CodeRows, grade_code
from mcore_rl.rewards.confinement import ConfinementError, weaknesses
from mcore_rl.rewards.custom import import_refusal, trial_refusal
from mcore_rl.rewards.registry import GRADERS, grader_of
from mcore_rl.rewards.score import ERROR_KINDS, RewardRequest, Score
from mcore_rl.rewards.worker import failed, refusal_of, unpacked
from mcore_rl.tracking.messages import harmless

MAX_WORKERS = 16
MAX_ANSWER = 16 << 20  # bytes of a Score
START_S = 120.0  # the time limit for a process to start and to import a custom function's file
WORKER = "mcore_rl.rewards.worker"
MAX_SHOWN = 1 << 20  # bytes that all grading processes of a run may print
PIECE = 1 << 16

logger = logging.getLogger(__name__)


class Prints:
    """Relays what grading processes print to the standard error of this one, up to ``MAX_SHOWN`` in all."""

    def __init__(self) -> None:
        self._left = MAX_SHOWN
        self._told = False
        self._lock = threading.Lock()

    def relay(self, stream: IO[bytes]) -> None:
        """Reads ``stream`` to its end in a thread: a process never waits for a reader."""
        threading.Thread(target=self._read, args=(stream,), name="prints", daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while piece := stream.read(PIECE):
                self._show(piece)

    def _show(self, piece: bytes) -> None:
        with self._lock:
            shown = piece[: self._left]
            self._left -= len(shown)
            tells = len(shown) < len(piece) and not self._told
            self._told = self._told or tells
        if shown:
            sys.stderr.write(harmless(shown.decode(errors="replace")))
        if tells:
            sys.stderr.write(f"\n(reward functions have printed {MAX_SHOWN >> 20} MiB; what follows is not shown)\n")


PRINTS = Prints()


class _Worker(AskedProgram):
    """A grading process."""

    def __init__(self, config: RewardConfig, custom: CustomRewardFunction) -> None:
        super().__init__(WORKER, without_secrets(custom.env), shows=True)
        PRINTS.relay(self.output)
        self._settings = pickle.dumps((config, custom))
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Waits until the process can grade.

        ConfigError: the custom function cannot be loaded.  TimeoutError, EOFError, OSError: the process did not start.
        """
        if not self._is_ready:
            self.send(self._settings)
            if refusal := refusal_of(self.answer(START_S, MAX_ANSWER)):
                raise refusal
            self._is_ready = True

    def grade(self, message: bytes, timeout_s: float) -> Score:
        """The Score of a pickled request.  TimeoutError, EOFError, OSError: the process returned none."""
        self.send(message)
        return unpacked(self.answer(timeout_s, MAX_ANSWER))


class Scorer:
    """Grades ``config.num_workers`` episodes at a time; a context manager, usable from any event loop.

    A process starts when it is first needed, in about 0.2 s.  With ``custom.path``, the constructor starts one to try
    the function, and raises ConfigError if it cannot be loaded.
    """

    def __init__(self, config: RewardConfig, custom: CustomRewardFunction | None = None) -> None:
        self._config = config
        self._custom = custom or CustomRewardFunction()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False
        self._workers: set[_Worker] = set()
        self._queue: queue.SimpleQueue[tuple[RewardRequest, Future[Score]] | None] = queue.SimpleQueue()
        self._confinement_known = False
        if self._custom.path is not None:
            self._check_custom()
        count = config.num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        # Daemon threads: a program that ends without close() does not wait for what is still queued.
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """How many episodes could not be graded, by kind of error; see ``ERROR_KINDS``."""
        with self._lock:
            return {kind: self._counts[kind] for kind in ERROR_KINDS}

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """Raises ConfigError if a data source has no grader; nothing to check with a custom function.

        Also raises it if a grader would run programs that this machine cannot confine; see
        ``CodeConfig.allow_weak_confinement``.
        """
        if self._custom.path is None:
            for data_source in sorted(set(data_sources)):
                if grader_of(data_source) is grade_code:
                    self._check_confinement(data_source)

    def try_custom(self, request: RewardRequest) -> None:
        """Calls the user's function once, before anything is drawn: ConfigError if it answers no number.

        Anything else that goes wrong there is a warning: it may be this row's, or a judge's that comes back.
        """
        worker, score = self._grade(None, request)
        self._forget(worker)
        with self._lock:
            self._counts.clear()
        if score.error is not None and score.error.startswith("not_a_number"):
            raise trial_refusal(self._custom, request.key[0], score.error.partition(": ")[2])
        if score.error is not None:
            logger.warning(
                "%s, called for %s with the ground truth as the response: %s",
                self._custom.path,
                request.key[0],
                score.error,
            )

    def check_code_rows(self, rows: Iterable[tuple[str, str, object]]) -> list[str]:
        """Reads the test cases of every row that is graded as code.

        rows: (name, data source, ground truth); those of other data sources are left out.

        Returns a line for each data source, with how many rows are judged outside of the program's process and how many
        inside.  ConfigError: rows that test nothing, or that are judged inside and nobody asked for it.
        """
        code_rows = CodeRows.of(row for row in rows if GRADERS.get(row[1]) is grade_code)
        refuse_if_any(code_rows.violations(self._config.code))
        return code_rows.report()

    async def score(self, request: RewardRequest) -> Score:
        """The Score of one episode.  ConfigError: its data source has no grader.  Cancelling drops a queued request."""
        assert not self._closed, "the scorer is closed"
        self.check_sources([request.data_source])
        future: Future[Score] = Future()
        self._queue.put((request, future))
        return await asyncio.wrap_future(future)

    async def score_all(self, requests: Iterable[RewardRequest]) -> list[Score]:
        """The Score of each request, in their order."""
        return list(await asyncio.gather(*map(self.score, requests)))

    def close(self) -> None:
        """Ends all processes and cancels pending scores; idempotent."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_custom(self) -> None:
        remedy = "Set it where the run is started, or leave it out"
        absent = set(self._custom.env) - without_secrets(self._custom.env).keys()
        violations = [Violation("custom_reward_function.env", n, "is not set", remedy) for n in sorted(absent)]
        if not 0 < (limit_s := self._custom.import_timeout_s) < math.inf:
            key = "custom_reward_function.import_timeout_s"
            violations.append(Violation(key, limit_s, "is no time", "Write seconds, more than 0"))
        refuse_if_any(violations)
        worker = _Worker(self._config, self._custom)
        try:
            worker.wait_until_ready()
        except (TimeoutError, EOFError, OSError) as error:
            raise import_refusal(self._custom, worker.end()) from error
        finally:
            worker.end()

    def _serve(self) -> None:
        """The loop of a thread: grades queued requests with a process of its own, which it replaces when it is lost."""
        worker: _Worker | None = None
        while (job := self._queue.get()) is not None:
            request, future = job
            if self._closed:
                future.cancel()
            if future.cancelled():
                continue
            worker, score = self._grade(worker, request)
            if self._closed:
                future.cancel()
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_result(score)
        self._forget(worker)

    def _grade(self, worker: _Worker | None, request: RewardRequest) -> tuple[_Worker | None, Score]:
        """Returns (the process for the next episode, None if it was lost; the Score)."""
        doing = "starting"
        limit_s = START_S
        try:
            message = pickle.dumps(request)
        except Exception as error:  # noqa: BLE001  whatever pickling a column's value does
            return worker, self._failed("raised", f"the row cannot be sent to a grading process: {error}")
        try:
            worker = worker or self._start()
            worker.wait_until_ready()
            doing = f"grading {request.key} of {request.data_source}"
            limit_s = self._config.timeout_s
            score = worker.grade(message, limit_s)
            if score.turn_rewards and len(score.turn_rewards) != request.num_turns:
                said = f"{len(score.turn_rewards)} turn rewards for {request.num_turns} turns of the model"
                return worker, self._failed("raised", said)
            return worker, self._counted(score)
        except TimeoutError:
            self._forget(worker)
            return None, self._failed("timeout", f"{doing} took longer than {limit_s:g} s")
        except (EOFError, OSError) as error:
            code = self._forget(worker)
            return None, self._failed("died", f"{doing}, the process ended with exit code {code} ({error!r})")
        except Exception as error:  # noqa: BLE001  for example, a custom function's file that changed since the start
            self._forget(worker)
            return None, self._failed("raised", str(error))

    def _failed(self, kind: str, detail: str) -> Score:
        return self._counted(failed(kind, detail, self._config))

    def _counted(self, score: Score) -> Score:
        if score.error is not None:
            with self._lock:
                self._counts[score.error.partition(":")[0]] += 1
        return score

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise OSError("the scorer is closed")
            worker = _Worker(self._config, self._custom)
            self._workers.add(worker)
            return worker

    def _forget(self, worker: _Worker | None) -> int | None:
        if worker is None:
            return None
        with self._lock:
            self._workers.discard(worker)
        return worker.end()

    def _check_confinement(self, data_source: str) -> None:
        """Raises ConfigError if programs would not be fully confined; only warns, once, if the user allows that."""
        if self._confinement_known:
            return
        try:
            weak_points = weaknesses()
        except ConfinementError as error:
            refusal = Violation("data_source", data_source, str(error), "Grade code on another machine")
            raise ConfigError([refusal]) from error
        if weak_points and not self._config.code.allow_weak_confinement:
            raise ConfigError([Violation("data_source", data_source, "; ".join(weak_points), WEAK)])
        for weakness in weak_points:
            logger.warning("Programs are not fully confined on this machine. %s", weakness)
        self._confinement_known = True
