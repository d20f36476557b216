"""The processes that grade: each takes one request at a time from its pipe and answers with a Score.

Started by ``scorer``, without the secrets of the environment.  A worker imports neither torch nor vLLM, ignores Ctrl-C,
and ends when its pipe does or when the process that started it dies.  Whatever a grader raises or answers becomes a
Score; what it cannot report (that it hangs, or that its process is gone) is for the scorer to see.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import sys
from dataclasses import asdict, replace
from multiprocessing.connection import Connection

from mcore_rl.config.reward import RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.custom import load_custom
from mcore_rl.rewards.overlong import overlong_penalty
from mcore_rl.rewards.registry import Grader, grader_of
from mcore_rl.rewards.score import NotANumberError, RewardRequest, Score, finite
from mcore_rl.tracking.secrets import redacted

MEMORY_BYTES = 4 << 30  # for graders of ours: of 10^(10^10) in an answer, sympy would fill the machine
PR_SET_PDEATHSIG = 1
MAX_DETAIL = 500  # characters of an error


def grade(request: RewardRequest, config: RewardConfig, custom: Grader | None = None) -> Score:
    """What ``custom``, or else the grader of the data source, says of ``request``, with the overlong penalty added.

    Never raises: an exception or a value that is no finite number is a Score with ``error``, of ``error_score``.
    """
    try:
        score = (custom or grader_of(request.data_source))(request, config)
        value, parts = finite(score.value, "the score"), dict(score.parts)
    except NotANumberError as error:
        return failed("not_a_number", str(error), config)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a grader does
        return failed("raised", f"{type(error).__name__}: {error}", config)
    if config.overlong.enable:
        parts["overlong"] = overlong_penalty(request.num_tokens, request.max_tokens, config.overlong)
        value += parts["overlong"]
    return replace(score, value=value, parts=parts, error=None)


def failed(kind: str, detail: str, config: RewardConfig) -> Score:
    """The Score of a response that could not be graded; ``kind`` is one of ``ERROR_KINDS``."""
    return Score(config.error_score, error=f"{kind}: {redacted(detail)[:MAX_DETAIL]}")


def packed(score: Score) -> bytes:
    """``score`` as JSON, for the pipe.

    Not as a pickle: a custom function may run what a model wrote, which could then answer in its place.
    """
    return json.dumps(asdict(score)).encode()


def unpacked(message: bytes) -> Score:
    """The Score that ``packed`` wrote.  ValueError: ``message`` is none."""
    try:
        found = json.loads(message)
        value, correct = finite(found.pop("value"), "the score"), found.pop("correct")
        parts = {str(name): finite(part, name) for name, part in found.pop("parts").items()}
        said = {name: found[name] if found[name] is None else str(found[name]) for name in ("error", "answer")}
        turns = tuple(finite(each, "a turn reward") for each in found.pop("turn_rewards"))
        correct = correct if correct is None else finite(correct, "correct")
        return Score(value, parts, correct, **said, turn_rewards=turns)
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"the grading process did not answer with a score: {error!r}") from error


def main(descriptor: int, parent: int) -> None:
    """Serve on the socket ``descriptor`` until ``parent`` closes it or dies.

    Takes (config, custom) first and answers None, or the ConfigError of a custom function that cannot be loaded.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    sys.set_int_max_str_digits(0)
    own = os.getpid()
    with Connection(descriptor) as connection:
        config, custom = connection.recv()
        grader: Grader | None = None
        try:
            grader = load_custom(custom) if custom.path is not None else None
        except ConfigError as error:
            connection.send(error)
            return
        if grader is None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        connection.send(None)
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, ConnectionError):
                return
            score = _answer(message, config, grader)
            if os.getpid() != own:  # a process that a custom function forked has come back from it
                os._exit(0)
            connection.send_bytes(packed(score))


def _answer(message: bytes, config: RewardConfig, custom: Grader | None) -> Score:
    try:
        request = pickle.loads(message)
    except Exception as error:  # noqa: BLE001  whatever unpickling a column's value does
        return failed("raised", f"the row cannot be read in the grading process: {error}", config)
    return grade(request, config, custom)
